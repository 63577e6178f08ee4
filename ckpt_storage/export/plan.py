"""Who writes which bytes of which output file: pure, the same on every rank."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

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

    Every byte is in one of `regions`, in order, but for files said to be complete. `checks`
    maps their positions to the rank that reads them back, and makes damaged ones again. Files
    without bytes are the coordinator's. `identity` (sha256, hex) stands for the content, not for
    ranks or file names. `able` is the output storage, and `part_bytes` suits it: smaller parts are
    planned where that balances the ranks.
    """

    layout: Layout
    world_size: int
    able: Capabilities
    part_bytes: int
    identity: str
    regions: tuple[Region, ...]
    checks: Mapping[int, int] = field(default_factory=dict)

    @property
    def files(self) -> tuple[OutFile, ...]:
        """The output files, in the order of their numbers."""
        return self.layout.files

    @property
    def digest(self) -> str:
        """What is equal on two ranks if they made the same plan (sha256, hex)."""
        regions = [[r.file, r.start, r.stop, r.owner] for r in self.regions]
        names = [file.name for file in self.files]
        return _digest([self.identity, self.world_size, names, regions])

    def regions_of(self, rank: int) -> list[Region]:
        """Return what `rank` writes, in order of file and start."""
        return [region for region in self.regions if region.owner == rank]

    def checks_of(self, rank: int) -> list[Region]:
        """Return, as whole files, the complete files that `rank` reads back."""
        return [
            Region(file=at, start=0, stop=size, owner=rank, file_bytes=size)
            for at, owner in self.checks.items()
            if owner == rank
            for size in [self.files[at].size_bytes]
        ]

    def shared(self) -> list[int]:
        """Return the files that several ranks write."""
        counts = Counter(region.file for region in self.regions)
        return [file for file, count in counts.items() if count > 1]

    def leaving(self, done: Collection[int], sealed: Collection[int] = ()) -> Plan:
        """Return the plan for what is left: files of `done` to check, of `sealed` only to name."""
        sizes = {at: file.size_bytes for at, file in enumerate(self.files)}
        left = {at: size for at, size in sizes.items() if at not in {*done, *sealed}}
        return replace(
            self,
            regions=divide(left, self.world_size, self.able, self.part_bytes),
            checks=_whole_files({at: sizes[at] for at in sorted(done)}, self.world_size),
        )


def plan(
    layout: Layout, *, world_size: int, able: Capabilities, part_bytes: int, source: object
) -> Plan:
    """Return the plan of making all files of `layout` by `world_size` ranks.

    `source` (JSON) stands for the content that they are made of.
    """
    identity = _digest({"version": 2, "source": source, "files": list(map(_content, layout.files))})
    whole = Plan(
        layout=layout,
        world_size=world_size,
        able=able,
        part_bytes=part_bytes,
        identity=identity,
        regions=(),
    )
    return whole.leaving(())


def _content(file: OutFile) -> object:
    # A header says names, dtypes, shapes and places; what it does not say is where from.
    fixed = hashlib.sha256()
    sources: list[object] = []
    for one in file.segments:
        if isinstance(one, Fixed):
            fixed.update(one.data)
        elif isinstance(one, Elements):
            sources.append([one.fqn, one.source_dtype, one.dtype, *one.box])
        else:
            sources.append([one.fqn, one.path, one.size_bytes])
    return [file.size_bytes, fixed.hexdigest(), sources]


def _digest(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def divide(
    files: Mapping[int, int], world_size: int, able: Capabilities, part_bytes: int
) -> tuple[Region, ...]:
    """Return regions that hold every byte of files once, in order; `files` maps number to bytes.

    Where files can be shared, all bytes are cut into `world_size` stretches of equal length, each
    cut moved back to the start of a part. A rank has at most one part more than the mean: at most
    1.05 times the mean if that is 20 parts of the storage's least size. Elsewhere whole files go
    to ranks.
    """
    files = {at: size for at, size in files.items() if size}
    numbers, sizes = list(files), list(files.values())
    found: list[tuple[int, int, int, int]] = []
    if not able.tokens_travel:
        owners = _whole_files(files, world_size)
        found = [(at, 0, size, owners[at]) for at, size in files.items()]
    elif files:
        starts = list(itertools.accumulate(sizes, initial=0))
        parts = _part_sizes(sizes, world_size, able, part_bytes)
        ends = [starts[-1] * rank // world_size for rank in range(world_size)]
        cuts = [*(_cut(end, starts, parts) for end in ends), starts[-1]]
        found = [
            (numbers[i], max(begin - starts[i], 0), min(end - starts[i], sizes[i]), rank)
            for rank, (begin, end) in enumerate(itertools.pairwise(cuts))
            if begin < end
            for i in range(bisect_right(starts, begin) - 1, bisect_left(starts, end))
        ]
    return tuple(
        Region(file=at, start=start, stop=stop, owner=rank, file_bytes=files[at])
        for at, start, stop, rank in found
    )


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
    at = bisect_right(starts, position) - 1
    return position - (position - starts[at]) % parts[at]


def _whole_files(files: Mapping[int, int], world_size: int) -> dict[int, int]:
    """Return the rank of each file: the largest first, each to the rank that has least.

    LPT; Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    owners = dict.fromkeys(files, 0)
    loads = [(0, rank) for rank in range(world_size)]
    for at in sorted(files, key=lambda at: (-files[at], at)):
        load, owners[at] = heapq.heappop(loads)
        heapq.heappush(loads, (load + files[at], owners[at]))
    return owners
