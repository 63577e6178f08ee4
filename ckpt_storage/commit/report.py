"""Reports of ranks to the coordinator about their files, and all reports as one table.

A report is small and columnar; it is sent between processes of one version and never stored. Most
ranks of a model have the same names and the same pattern of items, as equal bytes, which the
coordinator decodes once. The table has one row for each item of every rank, in arrays; Python runs
once for each report and once for each *different* pattern of items.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import IntegrityError
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.columns import Counts
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.rank_manifest import RankManifest

Words = NDArray[np.int32]

_DTYPES = list(DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The values of the global plan: shapes of tensors by FQN, and blobs."""

    tensors: Mapping[str, tuple[int, ...]]
    blobs: frozenset[str]
    planner_data: Mapping[str, tuple[str | int, ...]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The report of one rank: its rank manifest, its files, and their items.

    `groups` has the group of each file, "" for none, or is () without groups. `pattern`, `boxes`
    and `places` are packed; `unpacked` returns

    - of `pattern`: the FQNs, and the columns FQN, dtype (-1: blob) and box (-1: blob) of all items.
      It is equal on ranks with the same tensors.
    - of `boxes`: the number of dimensions of each box, and the offsets and sizes of all boxes.
    - of `places`: the columns file number, start and bytes of all items; None unless the
      coordinator asked for them.

    `ties` maps aliases to targets, with which they share memory on this rank; `tied` has FQN, box
    and checksum of the chunks of such tensors that have elements. `reused_bytes` is the size of
    files that an earlier save wrote.
    """

    save_id: str
    rank: int
    world_size: int
    host: str
    ref: FileRef
    files: Sequence[FileRef]
    groups: Sequence[str]
    item_count: int
    pattern: bytes
    boxes: bytes
    places: bytes | None
    ties: Mapping[str, str]
    tied: Sequence[tuple[str, Box, int]]
    reused_bytes: int

    @classmethod
    def of(
        cls,
        manifest: RankManifest,
        ref: FileRef,
        *,
        with_places: bool,
        ties: Mapping[str, str] = MappingProxyType({}),
        groups: Sequence[str] = (),
    ) -> RankReport:
        """Return the report about `manifest`, which is stored in `ref`."""
        files, boxes = manifest.files, manifest.boxes

        def column(key: str) -> list[int]:
            return [number for file in files for number in getattr(file, key)]

        # The last code is that of blobs, whose dtype is -1.
        codes = [*map(_DTYPES.index, manifest.dtypes), -1]
        rows = [column("fqn"), [codes[number] for number in column("dtype")], column("box")]
        file_numbers = [number for number, file in enumerate(files) for _ in file.fqn]
        places = [file_numbers, column("item_start"), column("item_bytes")]
        ndims = [len(box.offsets) for box in boxes]
        bounds = [bound for box in boxes for bound in (*box.offsets, *box.sizes)]
        return cls(
            save_id=manifest.save_id,
            rank=manifest.rank,
            world_size=manifest.world_size,
            host=manifest.host,
            ref=ref,
            files=[file.ref() for file in files],
            groups=tuple(groups),
            item_count=len(file_numbers),
            pattern=_packed((list(manifest.fqns), np.array(rows, dtype=np.int32))),
            boxes=_packed((np.array(ndims, dtype=np.int64), np.array(bounds, dtype=np.int64))),
            places=_packed(np.array(places, dtype=np.int64)) if with_places else None,
            ties=dict(ties),
            tied=_tied(manifest, {*ties, *ties.values()}) if ties else (),
            reused_bytes=sum(file.size_bytes for file in files if file.age),
        )


def _packed(value: object) -> bytes:
    return zlib.compress(pickle.dumps(value), 1)


def unpacked(data: bytes) -> Any:  # noqa: ANN401  # what was packed
    """Return the value of a packed field of a report."""
    return pickle.loads(zlib.decompress(data))  # noqa: S301  # our own ranks


def _tied(manifest: RankManifest, wanted: set[str]) -> list[tuple[str, Box, int]]:
    items: list[tuple[str, Box, int]] = []
    for file in manifest.files:
        names = [manifest.fqns[number] for number in file.fqn]
        places = [item for item, name in enumerate(names) if name in wanted]
        for item, crc in zip(places, file.payload_crcs(places), strict=True):
            box = manifest.box_of(file, item)
            if box is not None and not box.is_empty:
                items.append((names[item], box, crc))
    return items


class ReportTable:
    """The items of all ranks, by tensor of the plan; `blobs` has the lowest owner of each.

    `reports` are in order of rank. Raises `IntegrityError` if a rank wrote an unplanned value, or a
    tensor was written with two dtypes.
    """

    def __init__(self, reports: Sequence[RankReport], planned: Planned) -> None:
        self.blobs: dict[str, int] = {}
        self._planned = planned
        self._fqns = list(planned.tensors)
        self._numbers = {fqn: number for number, fqn in enumerate(self._fqns)}
        self._codes: Words = np.full(len(self._fqns), -1, dtype=np.int32)
        patterns: dict[bytes, tuple[Words, Words, list[str]]] = {}
        tensors: list[Words] = []
        rows: list[Words] = []
        boxes: list[tuple[Counts, Counts]] = []
        first_box = [0]
        for report in reports:
            if report.pattern not in patterns:
                patterns[report.pattern] = self._decoded(report)
            tensor, box, blobs = patterns[report.pattern]
            for fqn in blobs:
                self.blobs.setdefault(fqn, report.rank)
            tensors.append(tensor)
            rows.append(box + np.int32(first_box[-1]))
            boxes.append(unpacked(report.boxes))
            first_box.append(first_box[-1] + len(boxes[-1][0]))
        self._first_box = np.array(first_box, dtype=np.int64)
        self._ndim, self._edges = (np.concatenate(column) for column in zip(*boxes, strict=True))
        self._at = np.cumsum(2 * self._ndim) - 2 * self._ndim
        tensor = np.concatenate(tensors)
        # numpy sorts 16-bit integers by radix, and wider ones by comparison.
        small = len(self._fqns) <= 1 << 16
        order = np.argsort(tensor.astype(np.uint16) if small else tensor, kind="stable")
        self._rows = np.concatenate(rows)[order]
        self._ends = np.cumsum(np.bincount(tensor, minlength=len(self._fqns))).tolist()

    def _decoded(self, report: RankReport) -> tuple[Words, Words, list[str]]:
        fqns, (name, code, box) = unpacked(report.pattern)
        is_blob = code < 0
        blobs = [fqns[at] for at in name[is_blob].tolist()]
        known = np.array([self._numbers.get(fqn, -1) for fqn in fqns], dtype=np.int32)
        tensor_names, codes = name[~is_blob], code[~is_blob]
        numbers = known[tensor_names]
        unplanned = [fqns[at] for at in tensor_names[numbers < 0].tolist()]
        unplanned += [fqn for fqn in blobs if fqn not in self._planned.blobs]
        if unplanned:
            raise incomplete(
                f"Rank {report.rank} wrote {unplanned[0]}, which is not in the plan.", unplanned[0]
            )
        new = self._codes[numbers] < 0
        # Of two dtypes of a tensor in this report the last is kept, and the check below raises.
        self._codes[numbers[new]] = codes[new]
        for at in np.flatnonzero(self._codes[numbers] != codes)[:1]:
            fqn = self._fqns[numbers[at]]
            raise incomplete(
                f"Rank {report.rank} wrote {fqn} as {_DTYPES[codes[at]]}; others as "
                f"{self.dtype(int(numbers[at]))}.",
                fqn,
            )
        return numbers, box[~is_blob], blobs

    def dtype(self, number: int) -> str | None:
        """Return the dtype of tensor `number`, None if no rank wrote a chunk of it."""
        code = int(self._codes[number])
        return None if code < 0 else _DTYPES[code]

    def _boxes_of(self, number: int) -> Words:
        return self._rows[self._ends[number - 1] if number else 0 : self._ends[number]]

    def key(self, number: int) -> bytes:
        """Return a key that is equal for tensors of which every rank wrote equal boxes."""
        return hashlib.blake2b(self._boxes_of(number).data, digest_size=16).digest()

    def chunks(self, number: int) -> tuple[Counts, Counts]:
        """Return the owners of a tensor's chunks, and a row of offsets and sizes for each."""
        rows, fqn = self._boxes_of(number), self._fqns[number]
        owners = np.searchsorted(self._first_box, rows, side="right") - 1
        shape = self._planned.tensors[fqn]
        for at in np.flatnonzero(self._ndim[rows] != len(shape))[:1]:
            box, count = self._at[rows[at]], self._ndim[rows[at]]
            numbers = self._edges[box : box + 2 * count].tolist()
            raise outside(
                fqn, shape, Box(tuple(numbers[:count]), tuple(numbers[count:])), owners[at]
            )
        return owners, self._edges[self._at[rows][:, None] + np.arange(2 * len(shape))]


def incomplete(what: str, fqn: str) -> IntegrityError:
    """Return the error for values that were not written as planned."""
    return IntegrityError(
        what,
        fqn=fqn,
        phase="commit",
        next_step="Nothing was committed. Check the save planner and the sharding of this value.",
    )


def outside(fqn: str, shape: tuple[int, ...], box: Box, rank: int) -> IntegrityError:
    """Return the error for a chunk that is not inside its tensor."""
    return incomplete(f"Rank {rank} wrote {box} of {fqn}, whose shape is {list(shape)}.", fqn)
