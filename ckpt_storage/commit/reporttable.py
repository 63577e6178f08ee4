"""What ranks tell the coordinator of their parts of a save, and all of that as one table.

A report is small, columnar bytes; it travels between processes of one version and is never stored.
Of N ranks that save one model most have the same names and the same pattern of items; those come
as equal bytes, which the coordinator decodes once. The table has one row an item of every rank, in
arrays; Python runs once for each report and once for each *different* pattern of items.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import IntegrityError
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.documents import Counts, FileRef
from ckpt_storage.format.rank_manifest import BoxKey, BoxTable, RankManifest

Words = NDArray[np.int32]

Tied = tuple[str, BoxKey, int]
"""A chunk of a tensor that may be tied: FQN, box, checksum."""

PlannerPath = tuple[str | int, ...]

_NO_NUMBERS: Counts = np.zeros(0, dtype=np.int64)
_NO_WORDS: Words = np.zeros(0, dtype=np.int32)
_LEVEL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The report of one rank: its document, its files, and what is in them.

    `vocabulary` and `pattern` (columns FQN, dtype, box of all items) are alike on ranks that hold
    the same tensors. `places` (file number, start, bytes of all items) is there if the coordinator
    asked for it. `tied` has the chunks with elements of tensors that may be tied.
    """

    save_id: str
    rank: int
    world_size: int
    host: str
    ref: FileRef
    files: Sequence[FileRef]
    item_count: int
    vocabulary: bytes
    pattern: bytes
    boxes: bytes
    places: bytes | None
    ties: Mapping[str, str]
    tied: Sequence[Tied]

    @classmethod
    def of(
        cls,
        manifest: RankManifest,
        ref: FileRef,
        *,
        with_places: bool,
        ties: Mapping[str, str] = MappingProxyType({}),
    ) -> RankReport:
        """Return the report on `manifest`, which is stored as `ref` says.

        `ties` maps alias to target: what is the same memory in the state of this rank.
        """
        table = BoxTable()
        columns = [
            np.array(
                [*file.items.fqn, *file.items.dtype, *table.refer(file.items)], dtype=np.int32
            ).reshape(3, -1)
            for file in manifest.files
        ]
        pattern = np.concatenate([np.empty((3, 0), dtype=np.int32), *columns], axis=1)
        return cls(
            save_id=manifest.save_id,
            rank=manifest.rank,
            world_size=manifest.world_size,
            host=manifest.host,
            ref=ref,
            files=[file.ref() for file in manifest.files],
            item_count=pattern.shape[1],
            vocabulary=_deflate(
                json.dumps([list(manifest.fqns), list(manifest.dtypes)]).encode("ascii")
            ),
            pattern=_deflate(pattern.tobytes()),
            boxes=_deflate(_flat(table.boxes)),
            places=_deflate(_places(manifest)) if with_places else None,
            ties=dict(ties),
            tied=_tied(manifest, ties),
        )

    def read_vocabulary(self) -> tuple[list[str], list[str]]:
        """Return FQNs and dtypes."""
        fqns, dtypes = json.loads(zlib.decompress(self.vocabulary))
        return fqns, dtypes

    def read_pattern(self) -> tuple[Words, Words, Words]:
        """Return the columns FQN, dtype (-1: blob) and box (-1: blob) of all items."""
        words = np.frombuffer(zlib.decompress(self.pattern), dtype=np.int32)
        fqn, dtype, box = words.reshape(3, -1)
        return fqn, dtype, box

    def read_boxes(self) -> tuple[Counts, Counts]:
        """Return the number of dimensions of each box; and offsets, then sizes, of each in turn."""
        words = np.frombuffer(zlib.decompress(self.boxes), dtype=np.int64)
        count = int(words[0])
        return words[1 : 1 + count], words[1 + count :]

    def read_places(self) -> Counts | None:
        """Return the columns file number, start and bytes of all items, if they were sent."""
        if self.places is None:
            return None
        return np.frombuffer(zlib.decompress(self.places), dtype=np.int64).reshape(3, -1)


def _deflate(data: bytes) -> bytes:
    return zlib.compress(data, _LEVEL)


def _flat(boxes: Sequence[BoxKey]) -> bytes:
    words = [len(boxes), *(len(offsets) for offsets, _ in boxes)]
    for offsets, sizes in boxes:
        words += offsets
        words += sizes
    return np.array(words, dtype=np.int64).tobytes()


def _places(manifest: RankManifest) -> bytes:
    columns = [
        np.array(
            [[number] * len(file.items), list(file.items.item_start), list(file.items.item_bytes)],
            dtype=np.int64,
        )
        for number, file in enumerate(manifest.files)
    ]
    return np.concatenate([np.empty((3, 0), dtype=np.int64), *columns], axis=1).tobytes()


def _tied(manifest: RankManifest, ties: Mapping[str, str]) -> list[Tied]:
    """Return the chunks with elements of what this rank ties."""
    wanted = {*ties, *ties.values()}
    at = {i: fqn for i, fqn in enumerate(manifest.fqns) if fqn in wanted} if wanted else {}
    found: list[Tied] = []
    for file in manifest.files if at else ():
        items = file.items
        places = [item for item, number in enumerate(items.fqn) if number in at]
        for item, crc in zip(places, file.payload_crcs(places), strict=True):
            offsets, sizes = items.offsets[item], items.sizes[item]
            if offsets is not None and sizes is not None and all(sizes):
                found.append((at[items.fqn[item]], (tuple(offsets), tuple(sizes)), crc))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the global plan promises: tensors by FQN with their shapes, and blobs."""

    tensors: Mapping[str, tuple[int, ...]]
    blobs: frozenset[str]
    planner_data: Mapping[str, PlannerPath] | None


class _Pattern(NamedTuple):
    """The items of ranks that hold the same, with FQNs as numbers of tensors of the plan."""

    tensor: Words
    box: Words
    blobs: list[str]


class ReportTable:
    """All items of all ranks, by the tensors of a plan; `blobs` has the first owner of each.

    `reports` are in order of rank. Raises `IntegrityError` if a rank wrote what was not planned,
    or a tensor in two dtypes.
    """

    def __init__(self, reports: Sequence[RankReport], planned: Planned) -> None:
        self.blobs: dict[str, int] = {}
        self._planned = planned
        self._fqns = list(planned.tensors)
        self._numbers = {fqn: number for number, fqn in enumerate(self._fqns)}
        self._codes: dict[str, int] = {}
        self._dtypes: Words = np.full(len(self._fqns), -1, dtype=np.int32)
        self._vocabularies: dict[bytes, tuple[list[str], Words, Words]] = {}
        patterns: dict[tuple[bytes, bytes], _Pattern] = {}
        tensors, rows, ndims, words = [_NO_WORDS], [_NO_WORDS], [_NO_NUMBERS], [_NO_NUMBERS]
        first_box = [0]
        for report in reports:
            key = (report.vocabulary, report.pattern)
            if key not in patterns:
                patterns[key] = self._decoded(report)
            pattern = patterns[key]
            for fqn in pattern.blobs:
                self.blobs.setdefault(fqn, report.rank)
            ndim, flat = report.read_boxes()
            ndims.append(ndim)
            words.append(flat)
            tensors.append(pattern.tensor)
            rows.append(pattern.box + np.int32(first_box[-1]))
            first_box.append(first_box[-1] + len(ndim))
        self._first_box = np.array(first_box, dtype=np.int64)
        self._ndim, self._words = np.concatenate(ndims), np.concatenate(words)
        self._at = np.cumsum(2 * self._ndim) - 2 * self._ndim
        tensor = np.concatenate(tensors)
        # Sorting 16 bits takes one pass a byte; more names than that are sorted by comparing.
        small = len(self._fqns) <= 1 << 16
        order = np.argsort(tensor.astype(np.uint16) if small else tensor, kind="stable")
        self._rows = np.concatenate(rows)[order]
        self._ends = np.cumsum(np.bincount(tensor, minlength=len(self._fqns))).tolist()

    def _decoded(self, report: RankReport) -> _Pattern:
        if report.vocabulary not in self._vocabularies:
            fqns, dtypes = report.read_vocabulary()
            known = np.array([self._numbers.get(fqn, -1) for fqn in fqns], dtype=np.int32)
            kinds = [self._codes.setdefault(dtype, len(self._codes)) for dtype in dtypes]
            self._vocabularies[report.vocabulary] = fqns, known, np.array(kinds, dtype=np.int32)
        fqns, known, codes = self._vocabularies[report.vocabulary]
        fqn, dtype, box = report.read_pattern()
        is_blob = dtype < 0
        blobs = [fqns[at] for at in fqn[is_blob].tolist()]
        held = fqn[~is_blob]
        numbers = known[held]
        strange = [fqns[at] for at in held[numbers < 0].tolist()]
        strange += [name for name in blobs if name not in self._planned.blobs]
        if strange:
            raise incomplete(
                f"Rank {report.rank} wrote {strange[0]}, which is not in the plan.", strange[0]
            )
        kinds_held = codes[dtype[~is_blob]]
        new = self._dtypes[numbers] < 0
        # Of one tensor twice with two dtypes either is kept, and the other is found below.
        self._dtypes[numbers[new]] = kinds_held[new]
        for at in np.flatnonzero(self._dtypes[numbers] != kinds_held)[:1]:
            name = self._fqns[numbers[at]]
            raise incomplete(
                f"Rank {report.rank} wrote {name} as {list(self._codes)[kinds_held[at]]}; others "
                f"as {self.dtype(int(numbers[at]))}.",
                name,
            )
        return _Pattern(numbers, box[~is_blob], blobs)

    def dtype(self, number: int) -> str | None:
        """Return the dtype of a tensor, None if no rank wrote a chunk of it."""
        code = int(self._dtypes[number])
        return None if code < 0 else list(self._codes)[code]

    def _boxes_of(self, number: int) -> Words:
        return self._rows[self._ends[number - 1] if number else 0 : self._ends[number]]

    def key(self, number: int) -> bytes:
        """Return what is equal for tensors of which every rank wrote equal boxes."""
        return hashlib.blake2b(self._boxes_of(number).data, digest_size=16).digest()

    def chunks(self, number: int) -> tuple[Counts, Counts | None]:
        """Return the owners of a tensor's chunks, and of each a row of offsets, then sizes.

        In order of rank. None for the rows if not all have the tensor's number of dimensions.
        """
        rows = self._boxes_of(number)
        owners = np.searchsorted(self._first_box, rows, side="right") - 1
        ndim = len(self._planned.tensors[self._fqns[number]])
        if (self._ndim[rows] != ndim).any():
            return owners, None
        return owners, self._words[self._at[rows][:, None] + np.arange(2 * ndim)]

    def boxes(self, number: int) -> Iterator[tuple[Box, int]]:
        """Yield the chunks of a tensor as boxes with their owners, in order of rank."""
        rows, owners = self._boxes_of(number), self.chunks(number)[0].tolist()
        places = zip(self._at[rows].tolist(), self._ndim[rows].tolist(), owners, strict=True)
        for at, ndim, owner in places:
            words = self._words[at : at + 2 * ndim].tolist()
            yield Box(tuple(words[:ndim]), tuple(words[ndim:])), owner


def boxes_of(report: RankReport) -> list[Box]:
    """Return the different boxes of one rank."""
    ndim, words = report.read_boxes()
    flat = words.tolist()
    boxes, at = [], 0
    for count in ndim.tolist():
        boxes.append(Box(tuple(flat[at : at + count]), tuple(flat[at + count : at + 2 * count])))
        at += 2 * count
    return boxes


def incomplete(what: str, fqn: str) -> IntegrityError:
    """Return the error that says that what ranks wrote is not what was planned."""
    return IntegrityError(
        what,
        fqn=fqn,
        phase="commit",
        next_step="Nothing was committed. Check the save planner and the sharding of this value.",
    )
