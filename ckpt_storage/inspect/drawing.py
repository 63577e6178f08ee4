"""Small pictures as SVG: how a tensor is cut into chunks, and a histogram."""

from __future__ import annotations

from collections.abc import Sequence

from .markup import escaped
from .sharding import Sharding

__all__ = ["histogram_svg", "sharding_svg"]

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
