"""Who writes which bytes of which output file: pure, the same on every rank."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_storage.options import MIB
from ckpt_storage.store.backend import Capabilities

from .layout import Elements, Fixed, Layout, OutFile

ELEMENTS_BYTES = 64
"""A multiple of it, from where tensors begin, is the end of an element of every dtype."""

_PARTS_PER_RANK = 40
"""Parts small enough that one more or less is 2.5 % of what a rank writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes [start, stop) of one output file, which rank `owner` writes; never empty.

    `file` is a position in `Layout.files`, and `file_bytes` that file's length.
    """

    file: int
    start: int
    stop: int
    owner: int
    file_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes to write."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is written, and by whom.

    `regions` are in order of file and start. Every byte of every file is in exactly one, but for
    the files of `checks`, position to rank: they are said to be complete, and their rank reads them
    back, and writes those that are damaged. Files without bytes are the coordinator's.

    `identity` (sha256, hex) stands for the content: source, names, dtypes, shapes, places. It
    depends neither on ranks nor on names of files. `able` is the output storage, and `part_bytes`
    the size of a part that suits it: smaller ones are planned where that balances the ranks.
    """

    layout: Layout
    world_size: int
    able: Capabilities
    part_bytes: int
    identity: str
    regions: tuple[Region, ...]
    checks: Mapping[int, int]

    @property
    def files(self) -> tuple[OutFile, ...]:
        """The output files, in the order of their numbers."""
        return self.layout.files

    @property
    def digest(self) -> str:
        """What is equal on two ranks if they made the same plan (sha256, hex)."""
        regions = [[r.file, r.start, r.stop, r.owner] for r in self.regions]
        names = [file.name for file in self.files]
        return _digest(
            [self.identity, self.world_size, names, regions, sorted(self.checks.items())]
        )

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """Return what `rank` writes, in order of file and start."""
        return tuple(region for region in self.regions if region.owner == rank)

    def whole_region(self, file: int, owner: int) -> Region:
        """Return the region that is a whole file."""
        size = self.files[file].size_bytes
        return Region(file=file, start=0, stop=size, owner=owner, file_bytes=size)

    def shared(self) -> dict[int, list[int]]:
        """Return the files that several ranks write, and those ranks."""
        owners: dict[int, list[int]] = {}
        for region in self.regions:
            owners.setdefault(region.file, []).append(region.owner)
        return {file: ranks for file, ranks in owners.items() if len(ranks) > 1}

    def renamed(self, layout: Layout) -> Plan:
        """Return the same plan over files of other names."""
        return replace(self, layout=layout)

    def checks_of(self, rank: int) -> list[int]:
        """Return the complete files that `rank` reads back."""
        return [at for at, owner in self.checks.items() if owner == rank]

    def leaving(self, done: Collection[int], sealed: Collection[int] = ()) -> Plan:
        """Return the plan for what is left where the files of `done` are said to be complete.

        Those of `sealed` are neither written nor checked: they only lack their names.
        """
        sizes = [file.size_bytes for file in self.files]
        left = [at for at in range(len(sizes)) if at not in {*done, *sealed}]
        checked = sorted(done)
        owners = _whole_files([sizes[at] for at in checked], self.world_size)
        return replace(
            self,
            regions=_regions(sizes, left, self.world_size, self.able, self.part_bytes),
            checks=dict(zip(checked, owners, strict=True)),
        )


def plan(
    layout: Layout, *, world_size: int, able: Capabilities, part_bytes: int, source: object
) -> Plan:
    """Return the plan of making all files of `layout` by `world_size` ranks.

    `source` (JSON) stands for the content that they are made of.
    """
    sizes = [file.size_bytes for file in layout.files]
    return Plan(
        layout=layout,
        world_size=world_size,
        able=able,
        part_bytes=part_bytes,
        identity=_identity(layout, source),
        regions=_regions(sizes, range(len(sizes)), world_size, able, part_bytes),
        checks={},
    )


def _identity(layout: Layout, source: object) -> str:
    # A header says names, dtypes, shapes and places; what it does not say is where from.
    content = []
    for file in layout.files:
        fixed = hashlib.sha256()
        sources: list[object] = []
        for one in file.segments:
            if isinstance(one, Fixed):
                fixed.update(one.data)
            elif isinstance(one, Elements):
                sources.append([one.fqn, one.source_dtype, one.dtype, *one.box])
            else:
                sources.append([one.fqn, one.path, one.size_bytes])
        content.append([file.size_bytes, fixed.hexdigest(), sources])
    return _digest({"version": 2, "source": source, "files": content})


def _digest(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _regions(
    sizes: Sequence[int], files: Sequence[int], world_size: int, able: Capabilities, part_bytes: int
) -> tuple[Region, ...]:
    wanted = [at for at in files if sizes[at]]
    regions = divide([sizes[at] for at in wanted], world_size, able, part_bytes)
    return tuple(replace(region, file=wanted[region.file]) for region in regions)


def divide(
    sizes_bytes: Sequence[int], world_size: int, able: Capabilities, part_bytes: int
) -> list[Region]:
    """Return regions that hold every byte of files of `sizes_bytes` once, in order.

    Where files can be shared, the files one after another are cut into `world_size` stretches of
    equal length, each cut moved back to the start of a part. A rank then has at most one part
    more than the mean, and parts are a fortieth of the mean where the storage takes such small
    ones; so the most is at most 1.05 times the mean if the mean is 20 parts of the least size.
    Elsewhere whole files go to ranks.
    """
    starts = list(itertools.accumulate(sizes_bytes, initial=0))
    pieces: list[tuple[int, int, int, int]] = []
    if not able.tokens_travel:
        owners = _whole_files(sizes_bytes, world_size)
        pieces = [(at, 0, size, owners[at]) for at, size in enumerate(sizes_bytes)]
    elif sizes_bytes:
        parts = _part_sizes(sizes_bytes, world_size, able, part_bytes)
        total = starts[-1]
        cuts = [_cut(total * rank // world_size, starts, parts) for rank in range(world_size + 1)]
        pieces = [
            (at, max(begin, starts[at]) - starts[at], min(end, starts[at + 1]) - starts[at], rank)
            for rank, (begin, end) in enumerate(itertools.pairwise(cuts))
            if begin < end
            for at in range(bisect_right(starts, begin) - 1, bisect_left(starts, end))
        ]
    return [
        Region(file=at, start=start, stop=stop, owner=rank, file_bytes=sizes_bytes[at])
        for at, start, stop, rank in pieces
    ]


def number_unit_bytes(able: Capabilities, file_bytes: int) -> int:
    """Return the bytes by which part numbers count: number = start // unit.

    No part but the last of a file may be shorter, so that all members of an upload number their
    parts without asking each other, and no number is beyond the storage's last.
    """
    return max(able.min_part_bytes, -(-file_bytes // (able.max_part_count or file_bytes or 1)))


def _part_sizes(
    sizes_bytes: Sequence[int], world_size: int, able: Capabilities, part_bytes: int
) -> list[int]:
    """Return, of each file, by which multiples it is cut; none cuts an element."""
    unit = math.lcm(able.part_multiple_bytes, able.part_alignment_bytes, ELEMENTS_BYTES)
    wanted = part_bytes
    if world_size > 1:
        wanted = min(wanted, sum(sizes_bytes) // (_PARTS_PER_RANK * world_size))
    # Network file systems lay files out in stripes of a whole number of mebibytes.
    striped = math.lcm(unit, MIB)
    unit = striped if striped <= wanted else unit
    wanted = max(wanted - wanted % unit, unit)
    least = [number_unit_bytes(able, size) for size in sizes_bytes]
    return [max(wanted, one + -one % unit) for one in least]


def _cut(position: int, starts: Sequence[int], parts: Sequence[int]) -> int:
    """Return the last start of a part, counted over all files, that is not behind `position`."""
    if position >= starts[-1]:
        return starts[-1]
    at = bisect_right(starts, position) - 1
    return position - (position - starts[at]) % parts[at]


def _whole_files(sizes_bytes: Sequence[int], world_size: int) -> list[int]:
    """Return the rank of each file: the largest first, each to the rank that has least.

    LPT; Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    owners = [0] * len(sizes_bytes)
    loads = [(0, rank) for rank in range(world_size)]
    for at in sorted(range(len(sizes_bytes)), key=lambda at: (-sizes_bytes[at], at)):
        load, owners[at] = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes_bytes[at], owners[at]))
    return owners
