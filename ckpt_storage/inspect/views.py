"""The names in a checkpoint as a tree, in which alike layers are shown once: as text and as HTML.

The HTML has no scripts, and colours that suit light and dark pages.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from .facts import (
    NUMBER,
    TIMES,
    Chunk,
    Entry,
    Sharding,
    human_bytes,
    natural,
    runs_text,
    shape_text,
    shown,
)

_LEAST_ALIKE = 3
_MOST_LEVELS = 40
"""Names may be nested deeper than the stack takes."""
_MOST_ROWS = 400
_MOST_SHORT = 12
_MOST_DTYPES = 2
_MOST_OPEN = 24
_MOST_CHUNKS = 256
_SIDE = 30
_MORE = "… (more names than are shown; narrow it with depth=)"
_GOLDEN_ANGLE = 137.508
"""Hues so far apart that neighbours never look alike, however many ranks there are."""

_STYLE = """
.ckpt{font:13px/1.45 system-ui,sans-serif;max-width:64rem;text-align:left}
.ckpt b{font-size:15px}
.ckpt i{font-style:normal;opacity:.72}
.ckpt .f{display:flex;flex-wrap:wrap;gap:2px 24px;margin:6px 0 10px}
.ckpt .r{display:grid;column-gap:12px;align-items:center;padding:3px 8px;
grid-template-columns:minmax(11rem,1fr) 7.5rem 8.5rem 6.5rem 3.2rem;
border-top:1px solid rgba(128,128,128,.22)}
.ckpt .r>*{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.ckpt summary.r{cursor:pointer;font-weight:600}
"""


@dataclass(slots=True, kw_only=True)
class Node:
    """One part of a name, and what is below it; `entry` if a value has just this name.

    It stands for `alike` siblings, with totals of all; those of one `signature` are alike.
    """

    name: str
    children: dict[str, Node] = field(default_factory=dict)
    entry: Entry | None = None
    size_bytes: int = 0
    value_count: int = 0
    alike: int = 1
    signature: int = 0

    def entries(self) -> Iterator[Entry]:
        """Yield the values here and below; of alike siblings those of the first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node.entry is not None:
                yield node.entry
            waiting.extend(reversed(node.children.values()))

    def told(self, copies: int = 1) -> tuple[str, str, str]:
        """Return shape or number of values, types, and size, of which there are `copies`."""
        what = "object"
        if self.alike > 1:
            what = f"{self.alike}{TIMES}{self.value_count // self.alike}"
        elif self.children:
            what = f"{self.value_count:,} values"
        elif self.entry and self.entry.dtype:
            what = shape_text(self.entry.shape)
        dtypes = sorted({entry.dtype for entry in self.entries() if entry.dtype is not None})
        more = f" +{len(dtypes) - _MOST_DTYPES}" if len(dtypes) > _MOST_DTYPES else ""
        size = human_bytes(self.size_bytes) if dtypes else ""
        if size and copies > 1:
            size = f"{copies}{TIMES}{size}"
        return what, ", ".join(dtypes[:_MOST_DTYPES]) + more, size


def tree_of(entries: Iterable[Entry]) -> Node:
    """Return the root of the tree that names make, split at dots, sorted; alike ones are folded."""
    root = Node(name="")
    for entry in entries:
        path = [root]
        for part in entry.fqn.split("."):
            path.append(path[-1].children.setdefault(part, Node(name=part)))
        for node in path:
            node.size_bytes += entry.size_bytes
            node.value_count += 1
        path[-1].entry = entry
    # Deepest first, without recursion, which would not reach as deep as names may be nested.
    order = [root]
    for node in order:
        order.extend(node.children.values())
    for node in reversed(order):
        series: dict[object, list[Node]] = {}
        for child in sorted(node.children.values(), key=lambda child: natural(child.name)):
            is_numbered = NUMBER.fullmatch(child.name)
            series.setdefault(child.signature if is_numbered else child.name, []).append(child)
        children = [_joined(child) for group in series.values() for child in _folded(group)]
        node.children = {child.name: child for child in children}
        parts = tuple((child.name, child.signature) for child in children)
        node.signature = hash((node.entry and (node.entry.dtype, node.entry.shape), parts))
    return root


def _folded(group: list[Node]) -> list[Node]:
    """Return siblings that are alike but for their numbers as one that stands for them."""
    if len(group) < _LEAST_ALIKE:
        return group
    first = group[0]
    first.name = f"[{runs_text([int(node.name) for node in group])}]"
    first.alike = len(group)
    first.size_bytes = sum(node.size_bytes for node in group)
    first.value_count = sum(node.value_count for node in group)
    return [first]


def _joined(node: Node) -> Node:
    """Return `node`, or its child under both their names if it has one child and no value."""
    if node.entry is not None or len(node.children) != 1:
        return node
    (child,) = node.children.values()
    if node.alike > 1 and child.alike > 1:
        return node
    child.name, child.alike = f"{node.name}.{child.name}", node.alike * child.alike
    child.size_bytes, child.value_count = node.size_bytes, node.value_count
    return child


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeView:
    """The names of a checkpoint as a tree; text where it is printed, HTML in a notebook.

    Alike layers are shown once. `depth` limits how many levels are shown, None: all of them.
    """

    root: Node
    sharding_of: Callable[[str], Sharding]
    depth: int | None = None

    def __str__(self) -> str:
        lines = list(islice(_lines(self.root, self._levels), _MOST_ROWS + 1))
        return "\n".join([*lines[:_MOST_ROWS], *([_MORE] if len(lines) > _MOST_ROWS else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return page(self.rows())

    def rows(self) -> str:
        """Return the rows of the tree as HTML; prefixes unfold without a script."""
        left = iter(range(_MOST_ROWS))
        rows = "".join(self._rows(self.root, left, 0, 1))
        return rows if next(left, None) is not None else f"{rows}<div>{_MORE}</div>"

    @property
    def _levels(self) -> int:
        return _MOST_LEVELS if self.depth is None else min(self.depth, _MOST_LEVELS)

    def _rows(self, node: Node, left: Iterator[int], level: int, copies: int) -> Iterator[str]:
        """Yield the rows below a node, of which there are `copies`, while some are left."""
        for child in node.children.values():
            if next(left, None) is None:
                return
            entry, told = child.entry, child.told(copies)
            picture = sharding_svg(self.sharding_of(entry.fqn)) if entry and entry.dtype else ""
            name = escaped(entry.fqn if entry and child.alike == 1 else child.name)
            row = (
                f'<span style="padding-left:{level}em" title="{name}">{escaped(child.name)}</span>'
            )
            row += "".join(f"<span>{escaped(text)}</span>" for text in told)
            row += f"<span>{picture}</span>"
            if not child.children or level + 1 >= self._levels:
                yield f'<div class="r">{row}</div>'
                continue
            is_open = ' open=""' if len(child.children) <= _MOST_OPEN else ""
            below = "".join(self._rows(child, left, level + 1, copies * child.alike))
            yield f'<details{is_open}><summary class="r">{row}</summary>{below}</details>'


def _lines(node: Node, depth: int, indent: str | None = None, copies: int = 1) -> Iterator[str]:
    """Yield the lines below a node; the first level has no branches before it."""
    if depth <= 0:
        return
    children = list(node.children.values())
    for child in children:
        branch, below = ("└─ ", "   ") if child is children[-1] else ("├─ ", "│  ")
        before, after = ("", "") if indent is None else (indent + branch, indent + below)
        yield f"{before}{shown(child.name)}  {'  '.join(filter(None, child.told(copies)))}"
        yield from _lines(child, depth - 1, after, copies * child.alike)


def checkpoint_text(title: str, facts: Mapping[str, object], root: Node) -> str:
    """Return a few lines about a checkpoint: what it is, and its first names."""
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    lines = list(islice(_lines(root, 1), _MOST_SHORT))
    if len(root.children) > _MOST_SHORT:
        lines.append("… tree(depth=2) shows more")
    return "\n  ".join([shown(f"<Checkpoint {title}>"), shown(told), *lines])


def checkpoint_html(title: str, url: str, facts: Mapping[str, object], tree: TreeView) -> str:
    """Return a heading and the tree of a checkpoint as HTML."""
    cells = "".join(
        f"<div><i>{escaped(name)}</i><br/>{escaped(value)}</div>" for name, value in facts.items()
    )
    heading = f"<b>{escaped(title)}</b><div><code>{escaped(url)}</code></div>"
    return page(f'{heading}<div class="f">{cells}</div>{tree.rows()}')


def page(content: str) -> str:
    """Return HTML as what a notebook shows."""
    return f'<div class="ckpt"><style>{_STYLE}</style>{content}</div>'


def escaped(text: object) -> str:
    """Return `text` as it may stand anywhere in HTML, attributes included."""
    return html.escape(shown(str(text)), quote=True)


def sharding_svg(sharding: Sharding) -> str:
    """Return a picture of the chunks of a tensor, a colour per rank.

    Of its dimensions those two are drawn in which it is cut most; too many chunks are not drawn.
    """
    shape, chunks = sharding.shape, list(sharding) if len(sharding) <= _MOST_CHUNKS else []
    counts = [len({chunk.offsets[dim] for chunk in chunks}) for dim in range(len(shape))]
    # The last dimensions win where nothing is cut: rows and columns are there.
    drawn = sorted(sorted(range(len(shape)), key=lambda dim: (-counts[dim], -dim))[:2])
    # Of one dimension it runs across.
    down, across = [None, None, *drawn][-2:] if drawn else (None, None)
    cells = ""
    for chunk in chunks:
        y, height = _along(chunk, shape, down)
        x, width = _along(chunk, shape, across)
        hue = f"{((chunk.rank or 0) * _GOLDEN_ANGLE + 212) % 360:.0f} "
        hue += "8%" if chunk.rank is None else "58%"
        cells += f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        cells += f'fill="hsl({hue} 55%)"/>'
    return (
        f'<svg role="img" width="{_SIDE}" height="{_SIDE}" viewBox="0 0 {_SIDE} {_SIDE}">'
        f"<title>{escaped(sharding)}</title>"
        f'<g stroke="currentColor" stroke-width=".75">{cells}</g></svg>'
    )


def _along(chunk: Chunk, shape: Sequence[int], dim: int | None) -> tuple[float, float]:
    """Return where a chunk begins along one side of the picture, and how long it is there."""
    if dim is None or not shape[dim]:
        return 0.0, _SIDE
    return chunk.offsets[dim] / shape[dim] * _SIDE, chunk.sizes[dim] / shape[dim] * _SIDE
