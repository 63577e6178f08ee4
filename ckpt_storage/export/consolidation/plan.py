"""The plan of a consolidation: pure, the same on every rank, from the source's documents alone.

How an executor uses it: `plan.regions_of(rank)`; for each region `windows(...)`; for each window
its header bytes and `PieceFinder.pieces_of(...)`, both lazily. A piece is a box of one chunk of
the source (a `ChunkRead` in all but its `ChunkPlace`, which `source.place(piece.fqn,
piece.chunk_offsets)` gives after `source.require`), and where it lies in the file as a box of a
contiguous C-order array.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.boxes import (
    Box,
    ByteRun,
    Grid,
    find_grid,
    interval_boxes,
    run_count,
    run_extent,
)
from ckpt_storage.source.model import Source, SourceFormat, TensorInfo

from .choice import Choice, Skipped, choose
from .division import Part, Region, WriteRules, divide
from .options import ConsolidateOptions
from .weightfiles import (
    WeightFile,
    WeightTensor,
    file_name,
    split_by_index,
    split_by_size,
    weight_files,
)

__all__ = [
    "ExportPlan",
    "Part",
    "Piece",
    "PieceFinder",
    "Region",
    "Skipped",
    "WeightFile",
    "WeightTensor",
    "Window",
    "WriteRules",
    "index_document",
    "plan_export",
    "windows",
    "with_suffix",
]

MIN_WINDOW_BYTES = 64
"""A multiple of it is the end of an element of every dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """All that is written, and by whom.

    `files` are in order of their number; `regions` in order of file and start, and every byte of
    every file is in exactly one. `stripped` is the container key (with its dots) that was taken
    off the FQNs, "" if none.

    `fingerprint` (sha256, hex) stands for the content: source, tensors, headers; it depends
    neither on the world size nor on names of files, so a re-run with other ranks has the same
    one. `agreement` (sha256, hex) stands for the whole plan, names and owners too: ranks compare
    it before they begin.
    """

    save_id: str | None
    source_format: SourceFormat
    world_size: int
    files: tuple[WeightFile, ...]
    regions: tuple[Region, ...]
    skipped: tuple[Skipped, ...]
    stripped: str
    fingerprint: str
    agreement: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all weight files, headers included."""
        return sum(file.size_bytes for file in self.files)

    @property
    def ties(self) -> dict[str, str]:
        """The FQN of every alias that was left out, and that of the tensor that stands for it."""
        return {skip.fqn: skip.target for skip in self.skipped if skip.target is not None}

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """Return what `rank` writes, in order of file and start."""
        return tuple(region for region in self.regions if region.owner == rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Bytes [start, stop) of `plan.files[file]` to assemble at a time.

    `header` is the part of the file's header that falls into the window, which begins with it;
    b"" if none.
    """

    file: int
    start: int
    stop: int
    header: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer that the window needs."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements of one chunk of the source that go to one place of a weight file.

    Source: box `region`, counted from the chunk's first element, of the chunk that
    `source.place(fqn, chunk_offsets)` finds, seen as a C-order array of `chunk_sizes` elements of
    `tensor.source_dtype`. A chunk whose elements follow one another in the tensor is seen as a
    1-dimensional array, so that its part of an interval is one run; `chunk_sizes` then differs
    from the chunk's own sizes but has the same volume.
    Destination: the C-order array of shape `dest_sizes`, of `tensor.dtype`, whose first byte is
    byte `dest_start` of the file; in it the box of `region.sizes` at `dest_offsets`.
    """

    tensor: WeightTensor
    chunk_offsets: tuple[int, ...]
    chunk_sizes: tuple[int, ...]
    region: Box
    dest_start: int
    dest_sizes: tuple[int, ...]
    dest_offsets: tuple[int, ...]

    @property
    def fqn(self) -> str:
        """The tensor's name in the checkpoint."""
        return self.tensor.fqn

    @property
    def source_run(self) -> ByteRun | None:
        """The bytes of the chunk's payload, if they are one run; else None."""
        if run_count(self.chunk_sizes, self.region) != 1:
            return None
        return run_extent(self.chunk_sizes, self.region, self.tensor.source_item_bytes)

    @property
    def dest_run(self) -> ByteRun | None:
        """The bytes of the file, if they are one run; else None."""
        box = Box(self.dest_offsets, self.region.sizes)
        if run_count(self.dest_sizes, box) != 1:
            return None
        run = run_extent(self.dest_sizes, box, self.tensor.item_bytes)
        return ByteRun(self.dest_start + run.start, self.dest_start + run.stop)

    @property
    def is_plain_copy(self) -> bool:
        """Whether one run of stored bytes goes, as it is, to one run of the file.

        Then the storage can copy it without us.
        """
        return not self.tensor.is_cast and None not in (self.source_run, self.dest_run)


def plan_export(
    source: Source,
    *,
    options: ConsolidateOptions,
    world_size: int,
    rules: WriteRules,
    ties: Mapping[str, str] | None = None,
    suffix: str = "",
    source_id: str | None = None,
) -> ExportPlan:
    """Return the plan of exporting `source` by `world_size` ranks.

    `ties` are the recorded ones, alias to target in FQNs. `source_id` stands for the content of a
    source that has no save id: without it two sources of one structure have one fingerprint.
    Fetches nothing, not even rank manifests. Raises `InvalidInputError` for options that do not
    fit the checkpoint.
    """
    if world_size < 1:
        raise InvalidInputError(f"world_size is {world_size}.", next_step="Give 1 or more.")
    choice = choose(source, options, ties)
    tensors = choice.tensors
    if options.fqn_to_index_mapping is None:
        groups = split_by_size(tensors, options.file_limit_bytes)
    else:
        groups = split_by_index(tensors, _index(options.fqn_to_index_mapping, choice))
    files = weight_files(tensors, groups, suffix)
    plan = ExportPlan(
        save_id=source.save_id,
        source_format=source.format,
        world_size=world_size,
        files=files,
        regions=divide([file.size_bytes for file in files], world_size, rules),
        skipped=choice.skipped,
        stripped=choice.stripped,
        fingerprint=_fingerprint(source, source_id, files),
        agreement="",
    )
    return replace(plan, agreement=_agreement(plan))


def with_suffix(plan: ExportPlan, suffix: str) -> ExportPlan:
    """Return the same plan with files that are named for a re-export, or, with "", as at first.

    The first 8 digits of `plan.fingerprint` make a suffix that a re-run finds again.
    """
    count = len(plan.files)
    files = tuple(replace(file, name=file_name(file.number, count, suffix)) for file in plan.files)
    renamed = replace(plan, files=files)
    return replace(renamed, agreement=_agreement(renamed))


def index_document(plan: ExportPlan) -> bytes:
    """Return the bytes of `model.safetensors.index.json`.

    `total_size` counts the tensors' bytes, as Hugging Face's libraries do. `save_id` and
    `fingerprint` tell which export the files belong to; readers of theirs pass over them.
    """
    body = {
        "metadata": {
            "total_size": sum(t.size_bytes for file in plan.files for t in file.tensors),
            "save_id": plan.save_id,
            "fingerprint": plan.fingerprint,
        },
        "weight_map": {t.name: file.name for file in plan.files for t in file.tensors},
    }
    return (json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _index(mapping: Mapping[str, int], choice: Choice) -> dict[str, int]:
    """Return the file number of each name, given keys that are names or FQNs."""
    known = set(choice.names.values())
    index: dict[str, int] = {}
    for key in sorted(mapping):
        name = key if key in known else choice.names.get(key)
        # The mapping of a whole model may name what this checkpoint lacks, or what stays behind.
        if name is not None and index.setdefault(name, mapping[key]) != mapping[key]:
            raise InvalidInputError(
                f"fqn_to_index_mapping gives {name} two files, as {key} and as its other name.",
                next_step="Use the names in the weight files only.",
            )
    return index


def _digest(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _fingerprint(source: Source, source_id: str | None, files: Sequence[WeightFile]) -> str:
    # A header says names, dtypes, shapes and places; what it does not say is where from.
    content = [
        {
            "bytes": file.size_bytes,
            "header": hashlib.sha256(file.header).hexdigest(),
            "sources": [[t.fqn, t.source_dtype] for t in file.tensors],
        }
        for file in files
    ]
    return _digest(
        {
            "version": 1,
            "format": source.format,
            "save_id": source.save_id,
            "source_id": source_id,
            "files": content,
        }
    )


def _agreement(plan: ExportPlan) -> str:
    return _digest(
        {
            "fingerprint": plan.fingerprint,
            "world_size": plan.world_size,
            "names": [file.name for file in plan.files],
            "regions": [[r.file, r.start, r.stop, r.owner, r.part_bytes] for r in plan.regions],
        }
    )


def windows(
    plan: ExportPlan,
    region: Region,
    window_bytes: int,
    *,
    cut: Literal["parts", "rows"] = "parts",
) -> Iterator[Window]:
    """Yield consecutive windows of a region, each of at most `window_bytes`, lazily.

    With `cut` "parts" a window ends where a part does if one ends within reach; then windows of
    at least one part hold whole parts. Otherwise, and with "rows", it ends with a row of the
    first dimension of the tensor that it would cut, if that costs less than half of the window.
    Raises `InvalidInputError` below 64 bytes.
    """
    if window_bytes < MIN_WINDOW_BYTES:
        raise InvalidInputError(
            f"window_bytes is {window_bytes}.", next_step=f"Give {MIN_WINDOW_BYTES} or more."
        )
    header = plan.files[region.file].header
    starts = [tensor.start for tensor in plan.files[region.file].tensors]
    start = region.start
    while start < region.stop:
        stop = start + window_bytes
        if stop >= region.stop:
            stop = region.stop
        elif cut == "parts" and stop - stop % region.part_bytes > start:
            stop -= stop % region.part_bytes
        else:
            # An end of an element whatever the dtype: only rows may end elsewhere.
            stop -= stop % MIN_WINDOW_BYTES
            row = _row_start(plan.files[region.file], starts, stop)
            stop = row if row > start + window_bytes // 2 else stop
        yield Window(file=region.file, start=start, stop=stop, header=header[start:stop])
        start = stop


def _row_start(file: WeightFile, starts: Sequence[int], position: int) -> int:
    """Return where the row of a tensor begins that byte `position` of the file lies in."""
    at = bisect_right(starts, position) - 1
    if at < 0:
        return position
    tensor = file.tensors[at]
    row_bytes = math.prod(tensor.shape[1:]) * tensor.item_bytes
    return position - (position - tensor.start) % row_bytes if row_bytes else position


class PieceFinder:
    """Where the bytes of weight files come from, with look-up tables of the last few tensors.

    `tensors` is `source.tensors`. Safe to use from several threads.
    """

    def __init__(self, plan: ExportPlan, tensors: Mapping[str, TensorInfo]) -> None:
        self._plan = plan
        self._chunks = lru_cache(maxsize=64)(lambda fqn: _Chunks(tensors[fqn]))
        self._starts = lru_cache(maxsize=64)(
            lambda file: [tensor.start for tensor in plan.files[file].tensors]
        )

    def pieces_of(self, file: int, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces that make up bytes [start, stop) of `plan.files[file]`, lazily.

        `start` and `stop` are ends of regions, windows or parts. Together with the header's bytes
        the pieces are every byte of the interval once; pieces of one tensor follow one another.
        Raises `InvalidInputError` if an end is within an element.
        """
        tensors = self._plan.files[file].tensors
        at = max(bisect_right(self._starts(file), start) - 1, 0)
        while at < len(tensors) and tensors[at].start < stop:
            tensor = tensors[at]
            first, last = max(start, tensor.start), min(stop, tensor.stop)
            if first < last:
                item = tensor.item_bytes
                (begin, cut), (end, cut_end) = (
                    divmod(byte - tensor.start, item) for byte in (first, last)
                )
                if cut or cut_end:
                    raise InvalidInputError(
                        f"Bytes [{start}, {stop}) of {self._plan.files[file].name} cut an element "
                        f"of {tensor.name}.",
                        next_step="Ask for whole regions, windows or parts; this is a bug.",
                    )
                yield from self._chunks(tensor.fqn).pieces(tensor, begin, end)
            at += 1


class _Chunks:
    """The chunks of one tensor, by place."""

    __slots__ = ("_boxes", "_grid", "_shape", "_starts")

    def __init__(self, info: TensorInfo) -> None:
        shape = self._shape = info.shape
        boxes = [box for box in info.boxes if not box.is_empty]
        self._grid: Grid | None = None
        self._starts: list[int] | None = None
        if all(run_count(shape, box) == 1 for box in boxes):
            # Whole tensors and dim-0 shards: each chunk is an interval of the tensor.
            boxes.sort(key=self._linear)
            self._starts = [self._linear(box) for box in boxes]
        else:
            self._grid = find_grid(shape, boxes)
        self._boxes = boxes

    def _linear(self, box: Box) -> int:
        """Return the position of the box's first element in the tensor's C order."""
        return run_extent(self._shape, box, 1).start

    def pieces(self, tensor: WeightTensor, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces of elements [start, stop)."""
        if self._starts is not None:
            yield from self._intervals(tensor, start, stop, self._starts)
            return
        for box in interval_boxes(self._shape, start, stop):
            for chunk in self._meeting(box):
                part = chunk.intersect(box)
                if part is not None:
                    yield Piece(
                        tensor=tensor,
                        chunk_offsets=chunk.offsets,
                        chunk_sizes=chunk.sizes,
                        region=part.relative_to(chunk),
                        dest_start=tensor.start + self._linear(box) * tensor.item_bytes,
                        dest_sizes=box.sizes,
                        dest_offsets=part.relative_to(box).offsets,
                    )

    def _intervals(
        self, tensor: WeightTensor, start: int, stop: int, starts: Sequence[int]
    ) -> Iterator[Piece]:
        for at in range(bisect_right(starts, start) - 1, bisect_left(starts, stop)):
            box, origin = self._boxes[at], starts[at]
            first, last = max(start, origin), min(stop, origin + box.volume)
            yield Piece(
                tensor=tensor,
                chunk_offsets=box.offsets,
                chunk_sizes=(box.volume,),
                region=Box((first - origin,), (last - first,)),
                dest_start=tensor.start + first * tensor.item_bytes,
                dest_sizes=(last - first,),
                dest_offsets=(0,),
            )

    def _meeting(self, box: Box) -> Iterator[Box]:
        if self._grid is None:
            yield from self._boxes
        else:
            for cell in self._grid.intersecting(box):
                yield self._boxes[self._grid.owners[cell]]
