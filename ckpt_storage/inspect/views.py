"""An open checkpoint for the eye: a tree of its names, as text and as HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .drawing import Sharding, sharding_svg
from .markup import TIMES, bar, card, escaped, human_bytes, page, shape_text, shown
from .nametree import Node

_MOST_LINES = 400
_MOST_LEVELS = 40
_MOST_DTYPES = 2
_TEXT_BAR = 12
_ROWS_AT_FIRST = 24
_SHORT_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeView:
    """The names of a checkpoint as a tree; text where it is printed, HTML in a notebook.

    Alike layers are shown once. `depth` limits how many levels are shown, None: all of them.
    """

    root: Node
    sharding_of: Callable[[str], Sharding]
    depth: int | None = None

    def __str__(self) -> str:
        lines = []
        for count, line in enumerate(_text_lines(self.root, _levels(self.depth))):
            if count == _MOST_LINES:
                lines.append("… (more names than are shown; narrow it with depth=)")
                break
            lines.append(line)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return page(tree_html(self.root, self.sharding_of, depth=self.depth))


_UNASKED = "more names than are gathered unasked; tree(depth=2) shows them"


def checkpoint_text(title: str, facts: Mapping[str, object], root: Node | None) -> str:
    """Return a few lines about a checkpoint: what it is, and its largest prefixes.

    Without a root it says how to see the names.
    """
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    lines = [shown(f"<Checkpoint {title}>"), f"  {shown(told)}"]
    if root is None:
        return "\n".join([*lines, f"  … {_UNASKED}"])
    children = list(root.children.values())
    width = max((len(shown(node.name)) for node in children[:_SHORT_LINES]), default=0)
    for node in children[:_SHORT_LINES]:
        share = node.size_bytes / root.size_bytes if root.size_bytes else 0.0
        filled = "█" * round(share * _TEXT_BAR)
        size = human_bytes(node.size_bytes) if _has_size(node) else ""
        told = f"  {shown(node.name):<{width}}  {_what(node):>12}  {size:>8}  {filled}"
        lines.append(told.rstrip())
    if len(children) > _SHORT_LINES:
        lines.append(f"  … and {len(children) - _SHORT_LINES} more")
    return "\n".join(lines)


def checkpoint_html(
    title: str,
    url: str,
    facts: Mapping[str, object],
    root: Node | None,
    sharding_of: Callable[[str], Sharding],
) -> str:
    """Return a heading and the tree of a checkpoint as HTML; without a root only the heading."""
    rows = f'<div class="r q"><span>… {escaped(_UNASKED)}</span></div>'
    if root is not None:
        rows = tree_html(root, sharding_of)
    return page(card(title, facts, rows, note=url))


def tree_html(
    root: Node, sharding_of: Callable[[str], Sharding], *, depth: int | None = None
) -> str:
    """Return the rows of a tree as HTML; prefixes unfold without a script."""
    head = "".join(
        f"<span{css}>{name}</span>"
        for name, css in (
            ("name", ""),
            ("shape", ""),
            ("type", ""),
            ("size", ' class="n"'),
            ("", ""),
            ("sharding", ""),
        )
    )
    rows = _Rows(root, sharding_of, _levels(depth))
    return f'<div class="r head q">{head}</div>{rows.html()}'


class _Rows:
    """The rows of one tree, as many as a page bears, some of them unfolded."""

    def __init__(self, root: Node, sharding_of: Callable[[str], Sharding], depth: int) -> None:
        self._root = root
        self._sharding_of = sharding_of
        self._depth = depth
        self._left = _MOST_LINES
        self._parts: list[str] = []
        self._unfolded = _unfolded(root)

    def html(self) -> str:
        for child in self._root.children.values():
            self._add(child, 0, 1)
        if self._left <= 0:
            self._parts.append('<div class="r q"><span>… more names than are shown</span></div>')
        return "".join(self._parts)

    def _add(self, node: Node, level: int, copies: int) -> None:
        """Append the row of a node, of which there are `copies` like it, and what is below."""
        self._left -= 1
        if self._left <= 0:
            return
        cells = self._cells(node, level, copies)
        if not node.children or level + 1 >= self._depth:
            self._parts.append(f'<div class="r">{cells}</div>')
            return
        state = " open" if id(node) in self._unfolded else ""
        self._parts.append(f'<details{state}><summary class="r">{cells}</summary>')
        for child in node.children.values():
            self._add(child, level + 1, copies * node.alike)
        self._parts.append("</details>")

    def _cells(self, node: Node, level: int, copies: int) -> str:
        entry = node.entry
        picture = sharding_svg(self._sharding_of(entry.fqn)) if entry and entry.dtype else ""
        size = "<span></span><span></span>"
        if _has_size(node):
            share = node.size_bytes * copies / max(1, self._root.size_bytes)
            told = escaped(_size(node, copies))
            size = f'<span class="n">{told}</span>{bar(share, f"{share:.1%} of all")}'
        return (
            f'<span style="padding-left:{level * 1.1:.1f}em" title="{escaped(_title(node))}">'
            f"<code>{escaped(node.name)}</code></span>"
            f'<span class="q">{escaped(_what(node))}</span>'
            f'<span class="q" title="{escaped(", ".join(node.dtypes()))}">'
            f"{escaped(_types(node))}</span>{size}<span>{picture}</span>"
        )


def _unfolded(root: Node) -> set[int]:
    """Return the identities of the nodes to unfold: the upper levels, while there is room."""
    rows = len(root.children)
    found: set[int] = set()
    level = list(root.children.values())
    while level:
        for node in sorted(level, key=lambda node: -node.size_bytes):
            if node.children and rows + len(node.children) <= _ROWS_AT_FIRST:
                rows += len(node.children)
                found.add(id(node))
        level = [child for node in level if id(node) in found for child in node.children.values()]
    return found


def _levels(depth: int | None) -> int:
    """Return how many levels to show: names may be nested deeper than the stack takes."""
    return _MOST_LEVELS if depth is None else min(depth, _MOST_LEVELS)


def _text_lines(node: Node, depth: int, indent: str = "", copies: int = 1) -> Iterator[str]:
    if depth <= 0:
        return
    children = list(node.children.values())
    for child in children:
        is_last = child is children[-1]
        told = [_what(child), _types(child), _size(child, copies) if _has_size(child) else ""]
        branch = ("└─ " if is_last else "├─ ") if indent or node.name else ""
        yield f"{indent}{branch}{shown(child.name)}  {'  '.join(filter(None, told))}"
        below = indent + (("   " if is_last else "│  ") if indent or node.name else "")
        yield from _text_lines(child, depth - 1, below, copies * child.alike)


def _size(node: Node, copies: int) -> str:
    """Return the size of a node; of one that stands for several, how many there are of it."""
    size = human_bytes(node.size_bytes)
    return size if copies == 1 else f"{copies}{TIMES}{size}"


def _what(node: Node) -> str:
    """Return the shape of a tensor, or how many values a prefix holds."""
    if node.children or node.alike > 1:
        values = f"{node.value_count:,} values"
        return values if node.alike == 1 else f"{node.alike}{TIMES}{node.value_count // node.alike}"
    if node.entry is None or node.entry.dtype is None:
        return "object"
    return shape_text(node.entry.shape)


def _types(node: Node) -> str:
    found = node.dtypes()
    more = f" +{len(found) - _MOST_DTYPES}" if len(found) > _MOST_DTYPES else ""
    return ", ".join(found[:_MOST_DTYPES]) + more


def _title(node: Node) -> str:
    if node.entry is not None and node.alike == 1 and not node.children:
        return node.entry.fqn
    return f"{node.value_count:,} values, {human_bytes(node.size_bytes)}"


def _has_size(node: Node) -> bool:
    return node.size_bytes > 0 or bool(node.dtypes())
