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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import IntegrityError
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.documents import Counts, FileRef
from ckpt_storage.format.rank_manifest import RankManifest

Words = NDArray[np.int32]

PlannerPath = tuple[str | int, ...]

_LEVEL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the global plan promises: tensors by FQN with their shapes, and blobs."""

    tensors: Mapping[str, tuple[int, ...]]
    blobs: frozenset[str]
    planner_data: Mapping[str, PlannerPath] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The report of one rank: its document, its files, and what is in them.

    `vocabulary` and `pattern` (columns FQN, dtype, box of all items) are alike on ranks that hold
    the same tensors. `places` (file number, start, bytes of all items) is there if the coordinator
    asked for it. `ties` maps alias to target: what is the same memory in the state of this rank;
    `tied` has the chunks with elements of such tensors: FQN, box, checksum.
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
    tied: Sequence[tuple[str, Box, int]]

    @classmethod
    def of(
        cls,
        manifest: RankManifest,
        ref: FileRef,
        *,
        with_places: bool,
        ties: Mapping[str, str] = MappingProxyType({}),
    ) -> RankReport:
        """Return the report on `manifest`, which is stored as `ref` says."""
        files = manifest.files
        places = [[[n] * len(f.fqn), f.item_start, f.item_bytes] for n, f in enumerate(files)]
        boxes = [len(manifest.boxes), *(len(box.offsets) for box in manifest.boxes)]
        for box in manifest.boxes:
            boxes += (*box.offsets, *box.sizes)
        names = json.dumps([list(manifest.fqns), list(manifest.dtypes)])
        return cls(
            save_id=manifest.save_id,
            rank=manifest.rank,
            world_size=manifest.world_size,
            host=manifest.host,
            ref=ref,
            files=[file.ref() for file in files],
            item_count=sum(len(file.fqn) for file in files),
            vocabulary=zlib.compress(names.encode("ascii"), _LEVEL),
            pattern=_packed(np.int32, [[file.fqn, file.dtype, file.box] for file in files]),
            boxes=_packed(np.int64, [[boxes]]),
            places=_packed(np.int64, places) if with_places else None,
            ties=dict(ties),
            tied=_tied(manifest, {*ties, *ties.values()}) if ties else (),
        )

    def read_vocabulary(self) -> tuple[list[str], list[str]]:
        """Return FQNs and dtypes."""
        fqns, dtypes = json.loads(zlib.decompress(self.vocabulary))
        return fqns, dtypes

    def read_pattern(self) -> tuple[Words, Words, Words]:
        """Return the columns FQN, dtype (-1: blob) and box (-1: blob) of all items."""
        fqn, dtype, box = _unpacked(np.int32, self.pattern).reshape(3, -1)
        return fqn, dtype, box

    def read_boxes(self) -> tuple[Counts, Counts]:
        """Return the number of dimensions of each box; and offsets, then sizes, of each in turn."""
        words = _unpacked(np.int64, self.boxes)
        return words[1 : 1 + words[0]], words[1 + words[0] :]

    def read_places(self) -> Counts | None:
        """Return the columns file number, start and bytes of all items, if they were sent."""
        return None if self.places is None else _unpacked(np.int64, self.places).reshape(3, -1)


def _packed(kind: type, tables: Sequence[Sequence[Sequence[int]]]) -> bytes:
    """Return the rows of tables, each continued by that of the next."""
    found: list[Any] = [np.array(table, dtype=kind) for table in tables]
    return zlib.compress(np.concatenate(found, axis=1).tobytes() if found else b"", _LEVEL)


def _unpacked(kind: type, data: bytes) -> NDArray:  # type: ignore[type-arg]  # of that kind
    return np.frombuffer(zlib.decompress(data), dtype=kind)


def _tied(manifest: RankManifest, wanted: set[str]) -> list[tuple[str, Box, int]]:
    found: list[tuple[str, Box, int]] = []
    for file in manifest.files:
        names = [manifest.fqns[number] for number in file.fqn]
        places = [item for item, name in enumerate(names) if name in wanted]
        for item, crc in zip(places, file.payload_crcs(places), strict=True):
            box = manifest.box_of(file, item)
            if box is not None and not box.is_empty:
                found.append((names[item], box, crc))
    return found


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
        patterns: dict[tuple[bytes, bytes], tuple[Words, Words, list[str]]] = {}
        tensors: list[Words] = []
        rows: list[Words] = []
        boxes: list[tuple[Counts, Counts]] = []
        first_box = [0]
        for report in reports:
            key = (report.vocabulary, report.pattern)
            if key not in patterns:
                patterns[key] = self._decoded(report)
            tensor, box, blobs = patterns[key]
            for fqn in blobs:
                self.blobs.setdefault(fqn, report.rank)
            tensors.append(tensor)
            rows.append(box + np.int32(first_box[-1]))
            boxes.append(report.read_boxes())
            first_box.append(first_box[-1] + len(boxes[-1][0]))
        self._first_box = np.array(first_box, dtype=np.int64)
        self._ndim, self._words = (np.concatenate(column) for column in zip(*boxes, strict=True))
        self._at = np.cumsum(2 * self._ndim) - 2 * self._ndim
        tensor = np.concatenate(tensors)
        # Sorting 16 bits takes one pass a byte; more names than that are sorted by comparing.
        small = len(self._fqns) <= 1 << 16
        order = np.argsort(tensor.astype(np.uint16) if small else tensor, kind="stable")
        self._rows = np.concatenate(rows)[order]
        self._ends = np.cumsum(np.bincount(tensor, minlength=len(self._fqns))).tolist()

    def _decoded(self, report: RankReport) -> tuple[Words, Words, list[str]]:
        """Return the numbers of the tensors that a rank wrote, their boxes, and its blobs."""
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
        return numbers, box[~is_blob], blobs

    def dtype(self, number: int) -> str | None:
        """Return the dtype of a tensor, None if no rank wrote a chunk of it."""
        code = int(self._dtypes[number])
        return None if code < 0 else list(self._codes)[code]

    def _boxes_of(self, number: int) -> Words:
        return self._rows[self._ends[number - 1] if number else 0 : self._ends[number]]

    def key(self, number: int) -> bytes:
        """Return what is equal for tensors of which every rank wrote equal boxes."""
        return hashlib.blake2b(self._boxes_of(number).data, digest_size=16).digest()

    def chunks(self, number: int) -> tuple[Counts, Counts]:
        """Return the owners of a tensor's chunks, and of each a row of offsets, then sizes."""
        rows, fqn = self._boxes_of(number), self._fqns[number]
        owners = np.searchsorted(self._first_box, rows, side="right") - 1
        shape = self._planned.tensors[fqn]
        for at in np.flatnonzero(self._ndim[rows] != len(shape))[:1]:
            box, count = self._at[rows[at]], self._ndim[rows[at]]
            words = self._words[box : box + 2 * count].tolist()
            raise outside(fqn, shape, Box(tuple(words[:count]), tuple(words[count:])), owners[at])
        return owners, self._words[self._at[rows][:, None] + np.arange(2 * len(shape))]


def incomplete(what: str, fqn: str) -> IntegrityError:
    """Return the error that says that what ranks wrote is not what was planned."""
    return IntegrityError(
        what,
        fqn=fqn,
        phase="commit",
        next_step="Nothing was committed. Check the save planner and the sharding of this value.",
    )


def outside(fqn: str, shape: tuple[int, ...], box: Box, rank: int) -> IntegrityError:
    """Return the error that a rank wrote a chunk that is no part of the tensor."""
    return incomplete(f"Rank {rank} wrote {box} of {fqn}, whose shape is {list(shape)}.", fqn)
