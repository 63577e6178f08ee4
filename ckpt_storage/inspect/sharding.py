"""How one tensor is cut into chunks, and by whom: as values and as a line of text.

Pure: knows boxes and grids, no storage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_storage.format.regions import Box
from ckpt_storage.format.tiling import Grid, find_grid

from .markup import TIMES, runs_text

__all__ = ["Chunk", "Sharding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk: offsets and sizes in elements, and the rank that wrote it, None if unknown."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The chunks of a tensor of `shape`: cells of a `grid`, else a list. Iterating gives `Chunk`s.

    Of a grid no chunk is made before it is asked for.
    """

    shape: tuple[int, ...]
    grid: Grid | None = None
    chunks: Sequence[tuple[Box, int | None]] | Sequence[tuple[Box, int]] | None = None

    def __len__(self) -> int:
        if self.grid is not None:
            return len(self.grid.owners)
        return len(self.chunks or ())

    def __iter__(self) -> Iterator[Chunk]:
        if self.grid is not None:
            for cell, rank in enumerate(self.grid.owners):
                box = self.grid.box(cell, self.shape)
                yield Chunk(offsets=box.offsets, sizes=box.sizes, rank=rank)
            return
        for box, owner in self.chunks or ():
            yield Chunk(offsets=box.offsets, sizes=box.sizes, rank=owner)

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Into how many parts each dimension is cut; None if the chunks make no grid."""
        if self.grid is not None:
            return tuple(map(len, self.grid.cuts))
        if len(self) == 1:
            return (1,) * len(self.shape)
        found = find_grid(self.shape, [box for box, _ in self.chunks or ()])
        return None if found is None else tuple(map(len, found.cuts))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote a chunk, ascending; empty where the format does not tell."""
        if self.grid is not None:
            return tuple(sorted(set(self.grid.owners)))
        return tuple(sorted({rank for _, rank in self.chunks or () if rank is not None}))

    def intersecting(self, box: Box) -> list[Box]:
        """Return the chunks that share elements with `box`, which lies in the shape."""
        if self.grid is not None:
            cells = self.grid.intersecting(box)
            return [self.grid.box(cell, self.shape) for cell in cells]
        return [held for held, _ in self.chunks or () if held.intersect(box) is not None]

    def __str__(self) -> str:
        who = runs_text(self.ranks)
        count = len(self)
        if count == 1:
            return f"whole{f', rank {who}' if who else ''}"
        cut = f"{count} chunks"
        if self.counts is not None and math.prod(self.counts) == count:
            cut = TIMES.join(map(str, self.counts))
        return f"{cut}{f', ranks {who}' if who else ''}"
