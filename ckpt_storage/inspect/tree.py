"""The names in a checkpoint as a tree of prefixes, in which alike layers are shown once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from .facts import TIMES, Entry, human_bytes, runs_text, shape_text, shown

MOST_ROWS = 400
UNASKED = "more names than are gathered unasked; tree(depth=2) shows them"

_NUMBER = re.compile(r"([0-9]+)")
_LEAST_ALIKE = 3
_MOST_DIGITS = 100
"""Python converts no more than some thousand digits, and a layer has few."""
_MOST_LEVELS = 40
"""Names may be nested deeper than the stack takes."""
_MOST_DTYPES = 2
_BAR_WIDTH = 12
_SHORT_LINES = 12


@dataclass(slots=True, kw_only=True)
class Node:
    """One part of a name, and what is below it; `entry` if a value has just this name.

    `alike` is how many siblings this one stands for; its totals are of all of them. Nodes of one
    `signature` have the same names, types and shapes below them.
    """

    name: str
    children: dict[str, Node] = field(default_factory=dict)
    entry: Entry | None = None
    size_bytes: int = 0
    value_count: int = 0
    alike: int = 1
    signature: int = 0

    def add(self, entry: Entry) -> None:
        """Count a value that lies here or below."""
        self.size_bytes += entry.size_bytes
        self.value_count += 1

    def entries(self) -> Iterator[Entry]:
        """Yield the values here and below; of alike siblings those of the first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node.entry is not None:
                yield node.entry
            waiting.extend(reversed(node.children.values()))

    def dtypes(self) -> list[str]:
        """Return the types of the tensors here, each once, sorted."""
        return sorted({entry.dtype for entry in self.entries() if entry.dtype is not None})

    @property
    def is_value(self) -> bool:
        """Whether it is one value and nothing else."""
        return not self.children and self.alike == 1

    def what(self) -> str:
        """Return the shape of a tensor, or how many values a prefix holds."""
        if self.alike > 1:
            return f"{self.alike}{TIMES}{self.value_count // self.alike}"
        if self.children:
            return f"{self.value_count:,} values"
        return shape_text(self.entry.shape) if self.entry and self.entry.dtype else "object"

    def types(self) -> str:
        """Return the first few types of the tensors here."""
        found = self.dtypes()
        more = f" +{len(found) - _MOST_DTYPES}" if len(found) > _MOST_DTYPES else ""
        return ", ".join(found[:_MOST_DTYPES]) + more

    def size(self, copies: int = 1) -> str:
        """Return the size, with the number of such nodes if there are several; "" for objects."""
        if not self.size_bytes and not self.dtypes():
            return ""
        size = human_bytes(self.size_bytes)
        return size if copies == 1 else f"{copies}{TIMES}{size}"


def tree_of(entries: Iterable[Entry]) -> Node:
    """Return the root of the tree that names make, split at dots, sorted, numbers as numbers.

    A node with a single child takes it in ("model.layers"); at least three numbered siblings that
    differ in nothing but their number become one ("[0-31]", with a dash).
    """
    root = Node(name="")
    for entry in entries:
        node = root
        node.add(entry)
        for part in entry.fqn.split("."):
            node = node.children.setdefault(part, Node(name=part))
            node.add(entry)
        node.entry = entry
    # Deepest first, without recursion, which would not reach as deep as names may be nested.
    order = [root]
    for node in order:
        order.extend(node.children.values())
    for node in reversed(order):
        children = sorted(node.children.values(), key=lambda child: _natural(child.name))
        node.children = _folded([_joined(child) for child in children])
        parts = [(child.name, child.signature) for child in node.children.values()]
        own = node.entry and (node.entry.dtype, node.entry.shape)
        node.signature = hash((own, tuple(parts)))
    return root


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key in which 9 comes before 10."""
    return [(int(part), "") if _is_number(part) else (-1, part) for part in _NUMBER.split(name)]


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS


def _leading(name: str) -> str:
    """Return the digits a name begins with; "" if there are none or too many."""
    match = _NUMBER.match(name)
    return match[0] if match and _is_number(match[0]) else ""


def _joined(node: Node) -> Node:
    """Return `node`, or its child under both their names if it has one child and no value."""
    if node.entry is None and len(node.children) == 1:
        (child,) = node.children.values()
        # A node that stands for several keeps its number at the front, for folding to find.
        if child.alike == 1 or not _NUMBER.match(node.name):
            child.name = f"{node.name}.{child.name}"
            return child
    return node


def _folded(nodes: list[Node]) -> dict[str, Node]:
    """Return siblings by name, each series of alike ones as its first."""
    groups: dict[tuple[int, bool, str], list[Node]] = {}
    for node in nodes:
        digits = _leading(node.name)
        rest = node.name.removeprefix(digits)
        groups.setdefault((node.signature, bool(digits), rest), []).append(node)
    found: dict[str, Node] = {}
    for (_, is_numbered, rest), group in groups.items():
        if not is_numbered or len(group) < _LEAST_ALIKE:
            found.update((node.name, node) for node in group)
            continue
        first = group[0]
        numbers = sorted(int(_leading(node.name)) for node in group)
        first.name = f"[{runs_text(numbers)}]{rest}"
        first.alike = len(group)
        first.size_bytes = sum(node.size_bytes for node in group)
        first.value_count = sum(node.value_count for node in group)
        found[first.name] = first
    return found


def levels(depth: int | None) -> int:
    """Return how many levels to show where `depth` are wanted; None: as many as there are."""
    return _MOST_LEVELS if depth is None else min(depth, _MOST_LEVELS)


def tree_text(root: Node, depth: int | None) -> str:
    """Return a tree as lines of text, cut short where there are too many."""
    lines = []
    for count, line in enumerate(_lines(root, levels(depth))):
        if count == MOST_ROWS:
            lines.append("… (more names than are shown; narrow it with depth=)")
            break
        lines.append(line)
    return "\n".join(lines)


def _lines(node: Node, depth: int, indent: str | None = None, copies: int = 1) -> Iterator[str]:
    """Yield the lines below a node; the first level has no branches before it."""
    if depth <= 0:
        return
    children = list(node.children.values())
    for child in children:
        branch, below = ("└─ ", "   ") if child is children[-1] else ("├─ ", "│  ")
        before, after = ("", "") if indent is None else (indent + branch, indent + below)
        told = "  ".join(filter(None, (child.what(), child.types(), child.size(copies))))
        yield f"{before}{shown(child.name)}  {told}"
        yield from _lines(child, depth - 1, after, copies * child.alike)


def checkpoint_text(title: str, facts: Mapping[str, object], root: Node | None) -> str:
    """Return a few lines about a checkpoint: what it is, and its first prefixes.

    Without a root it says how to see the names.
    """
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    lines = [shown(f"<Checkpoint {title}>"), f"  {shown(told)}"]
    if root is None:
        return "\n".join([*lines, f"  … {UNASKED}"])
    children = list(root.children.values())
    width = max((len(shown(node.name)) for node in children[:_SHORT_LINES]), default=0)
    for node in children[:_SHORT_LINES]:
        bar = "█" * round(node.size_bytes / max(1, root.size_bytes) * _BAR_WIDTH)
        told = f"  {shown(node.name):<{width}}  {node.what():>12}  {node.size():>8}  {bar}"
        lines.append(told.rstrip())
    if len(children) > _SHORT_LINES:
        lines.append(f"  … and {len(children) - _SHORT_LINES} more")
    return "\n".join(lines)
