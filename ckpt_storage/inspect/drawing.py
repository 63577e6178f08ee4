"""Small pictures as SVG: how a tensor is cut into chunks, and a histogram."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_storage.format.regions import Box
from ckpt_storage.format.tiling import Grid, find_grid

from .markup import TIMES, escaped, runs_text


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


_SIDE = 30
_THIN = 8
_MOST_CHUNKS = 256
_DIMENSIONS = 2
_GOLDEN_ANGLE = 137.508
"""Hues so far apart that neighbours never look alike, however many ranks there are."""


def sharding_svg(sharding: Sharding, *, scale: int = 1) -> str:
    """Return a picture of the chunks of a tensor, a colour per rank.

    Of more than two dimensions the two are drawn in which it is cut into most parts; what is cut
    too finely to be drawn is told by the title alone.
    """
    rows, columns = _drawn_dimensions(sharding)
    height, width = _extent(sharding, rows, columns)
    full = (height * scale, width * scale)
    cells = []
    if len(sharding) <= _MOST_CHUNKS:
        for chunk in sharding:
            y, h = _along(chunk.offsets, chunk.sizes, sharding.shape, rows, full[0])
            x, w = _along(chunk.offsets, chunk.sizes, sharding.shape, columns, full[1])
            cells.append(
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" '
                f'fill="{_colour(chunk.rank)}"/>'
            )
    else:
        cells.append(f'<rect width="{full[1]}" height="{full[0]}" fill="{_colour(None)}"/>')
    return (
        f'<svg role="img" width="{full[1] + 2}" height="{full[0] + 2}" '
        f'viewBox="-1 -1 {full[1] + 2} {full[0] + 2}">'
        f"<title>{escaped(sharding)}</title>"
        f'<g stroke="currentColor" stroke-opacity=".55" stroke-width=".75">{"".join(cells)}</g>'
        "</svg>"
    )


def histogram_svg(edges: Sequence[float], counts: Sequence[int]) -> str:
    """Return the bars of a histogram."""
    width, height = 320, 80
    most = max(counts, default=0) or 1
    step = width / max(1, len(counts))
    bars = "".join(
        f'<rect x="{index * step:.2f}" y="{height - height * count / most:.2f}" '
        f'width="{max(step - 0.5, 0.5):.2f}" height="{height * count / most:.2f}">'
        f"<title>{escaped(f'[{edges[index]:.4g}, {edges[index + 1]:.4g}]: {count:,}')}</title>"
        "</rect>"
        for index, count in enumerate(counts)
        if count
    )
    ends = (
        (
            f'<text x="0" y="{height + 13}">{edges[0]:.4g}</text>'
            f'<text x="{width}" y="{height + 13}" text-anchor="end">{edges[-1]:.4g}</text>'
        )
        if edges
        else ""
    )
    return (
        f'<svg role="img" width="{width}" height="{height + 18}" '
        f'viewBox="0 0 {width} {height + 18}"><g fill="hsl(212 70% 52%)">{bars}</g>'
        f'<path d="M0 {height}H{width}" stroke="currentColor" stroke-opacity=".5"/>'
        f'<g fill="currentColor" font-size="11" opacity=".8">{ends}</g></svg>'
    )


def _drawn_dimensions(sharding: Sharding) -> tuple[int | None, int | None]:
    """Return which dimension runs down and which across."""
    ndim = len(sharding.shape)
    if ndim <= 1:
        return None, 0 if ndim else None
    counts = sharding.counts
    if counts is None:
        cuts = [{chunk.offsets[dim] for chunk in sharding} for dim in range(ndim)]
        counts = tuple(map(len, cuts)) if len(sharding) <= _MOST_CHUNKS else (1,) * ndim
    # The last dimensions win where nothing is cut: there rows and columns are.
    order = sorted(range(ndim), key=lambda dim: (-counts[dim], -dim))
    down, across = sorted(order[:_DIMENSIONS])
    return down, across


def _extent(sharding: Sharding, rows: int | None, columns: int | None) -> tuple[int, int]:
    """Return height and width of the picture: the tensor's proportions, within reason."""
    if rows is None or columns is None:
        return _THIN, _SIDE
    tall, wide = max(1, sharding.shape[rows]), max(1, sharding.shape[columns])
    least = 10
    if tall >= wide:
        return _SIDE * 2 // 3, max(least, min(_SIDE, _SIDE * 2 * wide // (3 * tall)))
    return max(least, _SIDE * 2 * tall // (3 * wide)), _SIDE


def _along(
    offsets: Sequence[int],
    sizes: Sequence[int],
    shape: Sequence[int],
    dim: int | None,
    extent: float,
) -> tuple[float, float]:
    if dim is None or not shape[dim]:
        return 0.0, float(extent)
    return offsets[dim] / shape[dim] * extent, sizes[dim] / shape[dim] * extent


def _colour(rank: int | None) -> str:
    if rank is None:
        return "hsl(212 8% 55% / .55)"
    return f"hsl({(212 + rank * _GOLDEN_ANGLE) % 360:.0f} 58% 55% / .8)"
