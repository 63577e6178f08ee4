"""The content of output files, and which rank writes which bytes of them, in which parts.

Pure, the same on every rank. All parts of a file but the last have one length, and their numbers
have no gap: Cloudflare R2, Garage and S3 Express refuse other uploads.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from ckpt_storage.format.boxes import Box
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.options import MIB
from ckpt_storage.store.backend import Capabilities

ELEMENTS_BYTES = 64
"""A multiple of it, from where tensors begin, is the end of an element of every dtype."""

_PARTS_PER_RANK = 40
"""Parts small enough that one more or less is 2.5 % of what a rank writes."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that are known before anything is read: headers, frames, padding, documents."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """A box of a tensor, its elements in C order, each cast to `dtype` if that is another.

    `name` is what the file calls it, `fqn` what the checkpoint does.
    """

    name: str
    fqn: str
    box: Box
    source_dtype: str
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return self.box.volume * DTYPES[self.dtype].item_bytes


def elements_of(
    fqn: str, tensor: TensorRecord, box: Box | None = None, *, name: str = "", dtype: str = ""
) -> Elements:
    """Return a box of a tensor, by default the whole under its FQN, as it is stored."""
    return Elements(
        name=name or fqn,
        fqn=fqn,
        box=box or Box((0,) * len(tensor.shape), tensor.shape),
        source_dtype=tensor.dtype,
        dtype=dtype or tensor.dtype,
    )


def boxes_of(tensor: TensorRecord) -> list[Box]:
    """Return the chunks of a tensor, each once; one for a tensor without elements."""
    boxes = list(dict.fromkeys(box for box in tensor.boxes if not box.is_empty))
    return boxes or [Box((0,) * len(tensor.shape), tensor.shape)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Stored bytes as they are: a value that is no tensor (`fqn`), or a whole file (`path`)."""

    size_bytes: int
    fqn: str = ""
    path: str = ""

    dtype: ClassVar[str] = "uint8"
    source_dtype: ClassVar[str] = "uint8"

    @property
    def box(self) -> Box:
        """Its bytes as elements."""
        return Box((0,), (self.size_bytes,))


Segment = Fixed | Elements | Stored


@dataclass(frozen=True, kw_only=True)
class OutFile:
    """One output file.

    `crc32c` is that of the whole file where it is known before. With `edges`, which ascend and of
    which the last is the end, the writer returns the checksum of the bytes between each two.
    """

    name: str
    segments: Sequence[Segment]
    crc32c: int | None = None
    edges: Sequence[int] = ()

    @cached_property
    def starts(self) -> Sequence[int]:
        """Where each segment begins, and then where the last one ends."""
        return list(
            itertools.accumulate((segment.size_bytes for segment in self.segments), initial=0)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return self.starts[-1]

    @property
    def elements(self) -> list[Elements]:
        """The tensors, or parts of them, in their order."""
        return [segment for segment in self.segments if isinstance(segment, Elements)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes [start, stop) of one output file, which rank `owner` writes; never empty.

    `file` is a position in `Plan.files`, and `file_bytes` that file's length. Its parts, but for
    the last, have `part_bytes`; each lies in one region. With `is_done` it is a complete file,
    which the owner reads back, and makes again if it is damaged.
    """

    file: int
    start: int
    stop: int
    owner: int
    file_bytes: int
    part_bytes: int
    is_done: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes to write."""
        return self.stop - self.start

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The first byte of each part of the region, and the byte behind its last."""
        starts = range(self.start, self.stop, self.part_bytes)
        return [(start, min(start + self.part_bytes, self.stop)) for start in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All files, and which rank writes them; the coordinator writes those without bytes.

    Every byte to write is in one of `regions`, in order; the regions of complete files follow.
    `identity` (sha256, hex) identifies the content, but neither ranks nor file names.
    """

    files: tuple[OutFile, ...]
    world_size: int
    able: Capabilities
    part_bytes: int
    identity: str
    regions: tuple[Region, ...] = ()

    @property
    def digest(self) -> str:
        """A digest that is equal on ranks with the same plan (sha256, hex)."""
        regions = [[r.file, r.start, r.stop, r.owner] for r in self.regions]
        names = [file.name for file in self.files]
        return _digest([self.identity, self.world_size, names, regions])

    def regions_of(self, rank: int) -> list[Region]:
        """Return the regions that `rank` writes or reads back."""
        return [region for region in self.regions if region.owner == rank]

    def remaining(self, done: Collection[int], sealed: Collection[int] = ()) -> Plan:
        """Return the plan without complete files: `done` are only checked, `sealed` only named."""
        sizes = {at: file.size_bytes for at, file in enumerate(self.files)}
        left = {at: size for at, size in sizes.items() if at not in {*done, *sealed}}
        regions = divide(left, self.world_size, self.able, self.part_bytes)
        checked = {at: sizes[at] for at in sorted(done)}
        checks = whole_files(checked, self.world_size, self.able, self.part_bytes)
        return replace(self, regions=(*regions, *(replace(r, is_done=True) for r in checks)))


def plan(
    files: Iterable[OutFile],
    *,
    world_size: int,
    able: Capabilities,
    part_bytes: int,
    source: object,
) -> Plan:
    """Return the plan for all `files`; `source` (JSON) identifies their source."""
    files = tuple(files)
    identity = _digest({"version": 3, "source": source, "files": list(map(_content, files))})
    whole = Plan(
        files=files, world_size=world_size, able=able, part_bytes=part_bytes, identity=identity
    )
    return whole.remaining(())


def _content(file: OutFile) -> object:
    # Headers have names, dtypes, shapes and places, but not the values of the source.
    fixed = hashlib.sha256()
    for segment in file.segments:
        data = segment.data if isinstance(segment, Fixed) else repr(segment).encode()
        fixed.update(data)
    return [file.size_bytes, fixed.hexdigest()]


def _digest(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def divide(
    files: Mapping[int, int], world_size: int, able: Capabilities, part_bytes: int
) -> tuple[Region, ...]:
    """Return regions that hold every byte of files once, in order; `files` maps number to bytes.

    Where files can be shared, all bytes are cut into `world_size` stretches of equal length, each
    cut moved back to the start of a part, so a rank has at most one part more than the mean.
    Elsewhere whole files go to ranks.
    """
    files = {at: size for at, size in files.items() if size}
    if not able.tokens_travel:
        return whole_files(files, world_size, able, part_bytes)
    total_bytes = sum(files.values())
    # One rank alone needs no balance.
    share_bytes = total_bytes // (_PARTS_PER_RANK * world_size) if world_size > 1 else part_bytes
    wanted = min(part_bytes, share_bytes)
    regions: list[Region] = []
    rank, before_bytes = 0, 0
    for at, size in files.items():
        part = length_of_parts(able, size, wanted)
        start = 0
        while start < size:
            end = total_bytes * (rank + 1) // world_size - before_bytes
            stop = size if end >= size else max(end - end % part, start)
            if start < stop:
                region = Region(
                    file=at, start=start, stop=stop, owner=rank, file_bytes=size, part_bytes=part
                )
                regions.append(region)
            if stop < size:
                rank += 1
            start = stop
        before_bytes += size
    return tuple(regions)


def length_of_parts(able: Capabilities, file_bytes: int, wanted: int) -> int:
    """Return the length of all parts of a file but the last: about `wanted`, if it is allowed."""
    least = max(able.min_part_bytes, -(-file_bytes // (able.max_part_count or file_bytes or 1)))
    # None cuts an element. Network file systems lay files out in stripes of whole mebibytes.
    unit = math.lcm(able.part_multiple_bytes, able.part_alignment_bytes, ELEMENTS_BYTES)
    striped = math.lcm(unit, MIB)
    unit = striped if striped <= wanted else unit
    return max(wanted - wanted % unit, least + -least % unit)


def whole_files(
    files: Mapping[int, int], world_size: int, able: Capabilities, part_bytes: int
) -> tuple[Region, ...]:
    """Return each file as a region: the largest first, each to the rank that has least (LPT)."""
    owners: dict[int, int] = {}
    loads = [(0, rank) for rank in range(world_size)]
    for at in sorted(files, key=lambda at: (-files[at], at)):
        load, owners[at] = heapq.heappop(loads)
        heapq.heappush(loads, (load + files[at], owners[at]))
    return tuple(
        Region(
            file=at,
            start=0,
            stop=size,
            owner=owners[at],
            file_bytes=size,
            part_bytes=length_of_parts(able, size, part_bytes),
        )
        for at, size in files.items()
    )
