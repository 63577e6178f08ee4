"""What notebooks show: HTML without scripts, at home on light and dark pages, and small pictures.

Colours are the page's own (`currentColor`) or of middle lightness.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .facts import Chunk, Sharding, human_bytes, shown
from .tree import MOST_ROWS, UNASKED, Node, levels, tree_text

_STYLE = """
.ckpt{font:13px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif;color:inherit;max-width:64rem;
text-align:left}
.ckpt code,.ckpt .m{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px;
background:none;color:inherit;padding:0}
.ckpt .h{font-size:15px;font-weight:600}
.ckpt .q{opacity:.72}
.ckpt .f{display:flex;flex-wrap:wrap;gap:2px 24px;margin:6px 0 10px}
.ckpt .f div{display:flex;flex-direction:column}
.ckpt .f .q{font-size:11px}
.ckpt .r{display:grid;grid-template-columns:
minmax(11rem,1fr) minmax(4rem,7.5rem) minmax(3.5rem,8.5rem) 6.5rem minmax(1rem,6rem) 3.2rem;
column-gap:12px;align-items:center;padding:3px 8px;min-height:20px;
border-top:1px solid rgba(128,128,128,.22)}
.ckpt .r>*{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.ckpt .r .n{text-align:right;font-variant-numeric:tabular-nums}
.ckpt .r.head{border-top:0;font-size:11px}
.ckpt summary.r{cursor:pointer;list-style:none}
.ckpt summary.r::-webkit-details-marker{display:none}
.ckpt summary.r>:first-child::before{content:"\\25B8";display:inline-block;width:1.1em;opacity:.6}
.ckpt details[open]>summary.r>:first-child::before{content:"\\25BE"}
.ckpt summary.r:hover,.ckpt div.r:not(.head):hover{background:rgba(128,128,128,.1)}
.ckpt div.r>:first-child::before{content:"";display:inline-block;width:1.1em}
.ckpt .b{display:block;height:7px;border-radius:3px;background:rgba(128,128,128,.2)}
.ckpt .b i{display:block;height:100%;min-width:1px;border-radius:3px;background:hsl(212 70% 52%)}
.ckpt table{border-collapse:collapse;margin:4px 0;font-size:13px;color:inherit}
.ckpt th,.ckpt td{text-align:left;padding:3px 14px 3px 0;background:none;
border-top:1px solid rgba(128,128,128,.22)}
.ckpt th{border-top:0;font-size:11px;font-weight:400;opacity:.72}
.ckpt td.n{text-align:right;font-variant-numeric:tabular-nums}
.ckpt svg{display:block;color:inherit}
"""

_ROWS_AT_FIRST = 24
_SIDE = 30
_THIN = 8
_NARROW = 10
_MOST_CHUNKS = 256
_DIMENSIONS = 2
_GOLDEN_ANGLE = 137.508
"""Hues so far apart that neighbours never look alike, however many ranks there are."""
_HISTOGRAM = (320, 80)


def escaped(text: object) -> str:
    """Return `text` as it may stand anywhere in HTML, attributes included."""
    return html.escape(shown(str(text)), quote=True)


def page(*parts: str) -> str:
    """Return parts, which are HTML, as what a notebook shows."""
    return f'<div class="ckpt"><style>{_STYLE}</style>{"".join(parts)}</div>'


def card(title: str, facts: Mapping[str, object], *parts: str, note: Sequence[str] = ()) -> str:
    """Return a heading with notes and facts below it, then `parts`, which are HTML."""
    cells = "".join(
        f'<div><span class="q">{escaped(name)}</span><span>{escaped(value)}</span></div>'
        for name, value in facts.items()
    )
    below = f'<code class="q">{"<br>".join(map(escaped, note))}</code>' if note else ""
    return (
        f'<div class="h">{escaped(title)}</div>{below}<div class="f">{cells}</div>{"".join(parts)}'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of plain values; numbers stand at the right, None is an empty cell."""
    heads = "".join(f"<th>{escaped(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, float | int):
        told = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
        return f'<td class="n">{told}</td>'
    return f"<td>{'' if value is None else escaped(value)}</td>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeView:
    """The names of a checkpoint as a tree; text where it is printed, HTML in a notebook.

    Alike layers are shown once. `depth` limits how many levels are shown, None: all of them.
    """

    root: Node
    sharding_of: Callable[[str], Sharding]
    depth: int | None = None

    def __str__(self) -> str:
        return tree_text(self.root, self.depth)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return page(_Rows(self.root, self.sharding_of, levels(self.depth)).html)


def checkpoint_html(
    title: str,
    url: str,
    facts: Mapping[str, object],
    root: Node | None,
    sharding_of: Callable[[str], Sharding],
) -> str:
    """Return a heading and the tree of a checkpoint as HTML; without a root only the heading."""
    rows = f'<div class="r q"><span>… {escaped(UNASKED)}</span></div>'
    if root is not None:
        rows = _Rows(root, sharding_of, levels(None)).html
    return page(card(title, facts, rows, note=[url]))


_HEAD = (
    '<div class="r head q"><span>name</span><span>shape</span><span>type</span>'
    '<span class="n">size</span><span></span><span>sharding</span></div>'
)
_MORE = '<div class="r q"><span>… more names than are shown</span></div>'


class _Rows:
    """The rows of one tree, as many as a page bears; prefixes unfold without a script."""

    def __init__(self, root: Node, sharding_of: Callable[[str], Sharding], depth: int) -> None:
        self._total_bytes = max(1, root.size_bytes)
        self._sharding_of = sharding_of
        self._depth = depth
        self._left = MOST_ROWS
        # What lies below a prefix is shown at once while there is room.
        self._unfolded_count = _ROWS_AT_FIRST - len(root.children)
        rows = "".join(self._row(child, 0, 1) for child in root.children.values())
        self.html = f"{_HEAD}{rows}{_MORE if self._left <= 0 else ''}"

    def _row(self, node: Node, level: int, copies: int) -> str:
        """Return the row of a node, of which there are `copies` like it, and what is below."""
        self._left -= 1
        if self._left <= 0:
            return ""
        cells = self._cells(node, level, copies)
        if not node.children or level + 1 >= self._depth:
            return f'<div class="r">{cells}</div>'
        is_open = len(node.children) <= self._unfolded_count
        self._unfolded_count -= len(node.children) if is_open else 0
        below = "".join(
            self._row(child, level + 1, copies * node.alike) for child in node.children.values()
        )
        tag = "details open" if is_open else "details"
        return f'<{tag}><summary class="r">{cells}</summary>{below}</details>'

    def _cells(self, node: Node, level: int, copies: int) -> str:
        entry, size, bar, picture = node.entry, node.size(copies), "<span></span>", ""
        title = f"{node.value_count:,} values, {human_bytes(node.size_bytes)}"
        if entry is not None and node.is_value:
            title = entry.fqn
        if size:
            share = 100 * node.size_bytes * copies / self._total_bytes
            bar = (
                f'<span class="b" title="{share:.1f}% of all">'
                f'<i style="width:{min(share, 100.0):.1f}%"></i></span>'
            )
        if entry and entry.dtype:
            picture = sharding_svg(self._sharding_of(entry.fqn))
        return (
            f'<span style="padding-left:{level * 1.1:.1f}em" title="{escaped(title)}">'
            f"<code>{escaped(node.name)}</code></span>"
            f'<span class="q">{escaped(node.what())}</span>'
            f'<span class="q" title="{escaped(", ".join(node.dtypes()))}">'
            f'{escaped(node.types())}</span><span class="n">{escaped(size)}</span>'
            f"{bar}<span>{picture}</span>"
        )


def sharding_svg(sharding: Sharding, *, scale: int = 1) -> str:
    """Return a picture of the chunks of a tensor, a colour per rank.

    Of more than two dimensions the two are drawn in which it is cut into most parts. A tensor of
    more chunks than can be drawn is told by the title alone.
    """
    chunks = list(sharding) if len(sharding) <= _MOST_CHUNKS else []
    rows, columns = _drawn_dimensions(sharding, chunks)
    height, width = (scale * side for side in _extent(sharding, rows, columns))
    cells = "" if chunks else f'<rect width="{width}" height="{height}" fill="{_colour(None)}"/>'
    for chunk in chunks:
        y, h = _along(chunk, sharding.shape, rows, height)
        x, w = _along(chunk, sharding.shape, columns, width)
        cells += (
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" '
            f'fill="{_colour(chunk.rank)}"/>'
        )
    return (
        f'<svg role="img" width="{width + 2}" height="{height + 2}" '
        f'viewBox="-1 -1 {width + 2} {height + 2}"><title>{escaped(sharding)}</title>'
        f'<g stroke="currentColor" stroke-opacity=".55" stroke-width=".75">{cells}</g></svg>'
    )


def _colour(rank: int | None) -> str:
    if rank is None:
        return "hsl(212 8% 55% / .55)"
    return f"hsl({(212 + rank * _GOLDEN_ANGLE) % 360:.0f} 58% 55% / .8)"


def _drawn_dimensions(sharding: Sharding, chunks: Sequence[Chunk]) -> tuple[int | None, int | None]:
    """Return which dimension runs down and which across."""
    ndim = len(sharding.shape)
    if ndim <= 1:
        return None, 0 if ndim else None
    counts = sharding.counts
    if counts is None:
        counts = tuple(len({chunk.offsets[dim] for chunk in chunks}) for dim in range(ndim))
    # The last dimensions win where nothing is cut: rows and columns are there.
    order = sorted(range(ndim), key=lambda dim: (-counts[dim], -dim))
    down, across = sorted(order[:_DIMENSIONS])
    return down, across


def _extent(sharding: Sharding, rows: int | None, columns: int | None) -> tuple[int, int]:
    """Return height and width of the picture: the tensor's proportions, within reason."""
    if rows is None or columns is None:
        return _THIN, _SIDE
    tall, wide = max(1, sharding.shape[rows]), max(1, sharding.shape[columns])
    if tall >= wide:
        return _SIDE * 2 // 3, max(_NARROW, min(_SIDE, _SIDE * 2 * wide // (3 * tall)))
    return max(_NARROW, _SIDE * 2 * tall // (3 * wide)), _SIDE


def _along(
    chunk: Chunk, shape: Sequence[int], dim: int | None, extent: float
) -> tuple[float, float]:
    """Return where a chunk begins along one side of the picture, and how long it is there."""
    if dim is None or not shape[dim]:
        return 0.0, extent
    return chunk.offsets[dim] / shape[dim] * extent, chunk.sizes[dim] / shape[dim] * extent


def histogram_svg(edges: Sequence[float], counts: Sequence[int]) -> str:
    """Return the bars of a histogram."""
    width, height = _HISTOGRAM
    most = max(counts, default=0) or 1
    step = width / max(1, len(counts))
    bars = "".join(
        f'<rect x="{at * step:.2f}" y="{height - height * count / most:.2f}" '
        f'width="{max(step - 0.5, 0.5):.2f}" height="{height * count / most:.2f}">'
        f"<title>{escaped(f'[{edges[at]:.4g}, {edges[at + 1]:.4g}]: {count:,}')}</title></rect>"
        for at, count in enumerate(counts)
        if count
    )
    ends = ""
    if edges:
        ends = (
            f'<text x="0" y="{height + 13}">{edges[0]:.4g}</text>'
            f'<text x="{width}" y="{height + 13}" text-anchor="end">{edges[-1]:.4g}</text>'
        )
    return (
        f'<svg role="img" width="{width}" height="{height + 18}" '
        f'viewBox="0 0 {width} {height + 18}"><g fill="hsl(212 70% 52%)">{bars}</g>'
        f'<path d="M0 {height}H{width}" stroke="currentColor" stroke-opacity=".5"/>'
        f'<g fill="currentColor" font-size="11" opacity=".8">{ends}</g></svg>'
    )
