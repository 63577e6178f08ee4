"""What is told of a checkpoint without reading its values, and how people like to read it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_storage.format.boxes import Box, Grid, find_grid
from ckpt_storage.format.dtypes import DTYPES

TIMES = " \N{MULTIPLICATION SIGN} "
DASH = "\N{EN DASH}"

NUMBER = re.compile(r"([0-9]{1,18})")
"""Python converts no more than some thousand digits, and a layer has few."""

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_ROUND_FROM = 100
_MOST_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value: a tensor, or, without a dtype, an object of unknown size."""

    fqn: str
    dtype: str | None = None
    shape: tuple[int, ...] = ()

    @property
    def item_bytes(self) -> int:
        """The size of one element; 0 for an object."""
        return 0 if self.dtype is None else DTYPES[self.dtype].item_bytes

    @property
    def size_bytes(self) -> int:
        """The size of all elements; 0 for an object."""
        return math.prod(self.shape) * self.item_bytes

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]" if self.dtype else "object"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk: offsets and sizes in elements, and the rank that wrote it, None if unknown."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The chunks of a tensor of `shape`, and the ranks that wrote them; iterating gives `Chunk`s.

    Of a regular sharding no chunk is made before it is asked for. `owners` None: not known.
    """

    shape: tuple[int, ...]
    boxes: Sequence[Box]
    owners: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    def __iter__(self) -> Iterator[Chunk]:
        for at in range(len(self.boxes)):
            box, rank = self.boxes[at], None if self.owners is None else self.owners[at]
            yield Chunk(offsets=box.offsets, sizes=box.sizes, rank=rank)

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Into how many parts each dimension is cut; None if the chunks make no grid."""
        boxes = self.boxes
        grid = boxes if isinstance(boxes, Grid) else find_grid(self.shape, boxes)
        return None if grid is None else tuple(map(len, grid.cuts))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote a chunk, ascending; empty where the format does not tell."""
        return tuple(sorted(set(self.owners or ())))

    def __str__(self) -> str:
        counts, ranks = self.counts, runs_text(self.ranks)
        if len(self) == 1:
            return f"whole, rank {ranks}" if ranks else "whole"
        cut = f"{len(self)} chunks" if counts is None else shape_text(counts)
        return f"{cut}, ranks {ranks}" if ranks else cut


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file that holds values: its path below the checkpoint, length and CRC-32C.

    `rank` wrote it. None: the format does not tell.
    """

    path: str
    size_bytes: int
    rank: int | None = None
    crc32c: int | None = None


def shown(text: str) -> str:
    """Return `text` with control characters, and marks that turn writing round, spelt out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key in which 9 comes before 10."""
    parts = enumerate(NUMBER.split(name))
    return [(int(part), "") if at % 2 else (-1, part) for at, part in parts]


def human_bytes(count: int) -> str:
    """Return a number of bytes in decimal units: 1.26 GB."""
    power = min((len(str(count)) - 1) // 3, len(_UNITS) - 1)
    value = count / 1000**power
    told = f"{value:.0f}" if value >= _ROUND_FROM else f"{value:.3g}"
    return f"{told} {_UNITS[power]}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape for people: its sizes with times signs between, "scalar" if it has none."""
    return TIMES.join(map(str, shape)) or "scalar"


def runs_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers for people, as runs: 0 to 3 and 8 as "0-3, 8", with a dash."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > _MOST_RUNS:
        return f"{numbers[0]}…{numbers[-1]}"
    return ", ".join(str(a) if a == b else f"{a}{DASH}{b}" for a, b in runs)
