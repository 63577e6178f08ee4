"""The names in a checkpoint as a tree of prefixes, in which alike layers are shown once.

Pure: knows names, shapes and sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .markup import runs_text

_NUMBER = re.compile(r"[0-9]+")
_NUMBERS = re.compile(r"([0-9]+)")
_LEAST_ALIKE = 3
_MOST_DIGITS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value: a tensor, or, without a dtype, something else whose size is not known."""

    fqn: str
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    size_bytes: int = 0


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

    def dtypes(self) -> list[str]:
        """Return the types of the tensors here, each once, sorted."""
        return sorted({entry.dtype for entry in self.entries() if entry.dtype is not None})

    def entries(self) -> Iterator[Entry]:
        """Yield the values here and below; of alike siblings those of the first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node.entry is not None:
                yield node.entry
            waiting.extend(reversed(node.children.values()))


def tree_of(entries: Iterable[Entry]) -> Node:
    """Return the root of the tree that names make, split at dots, sorted, numbers as numbers.

    A node with a single child takes it in ("model.layers"); at least three numbered siblings that
    differ in nothing but their number become one ("[0-31]", with a dash).
    """
    root = Node(name="")
    for entry in entries:
        node = root
        _count(node, entry)
        for part in entry.fqn.split("."):
            node = node.children.setdefault(part, Node(name=part))
            _count(node, entry)
        node.entry = entry
    _tidy(root)
    return root


def _count(node: Node, entry: Entry) -> None:
    node.size_bytes += entry.size_bytes
    node.value_count += 1


def _tidy(root: Node) -> None:
    """Sort, join and fold all below `root`, deepest first; recursion would not reach as deep."""
    order = [root]
    for node in order:
        order.extend(node.children.values())
    for node in reversed(order):
        # Storing order says nothing: ranks share the work by size.
        children = sorted(node.children.values(), key=lambda child: _natural(child.name))
        node.children = _folded([_joined(child) for child in children])
        parts = [(child.name, child.signature) for child in node.children.values()]
        own = node.entry and (node.entry.dtype, node.entry.shape)
        node.signature = hash((own, tuple(parts)))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key in which 9 comes before 10."""
    return [(int(part), "") if _is_number(part) else (-1, part) for part in _NUMBERS.split(name)]


def _is_number(part: str) -> bool:
    # Python converts no more than some thousand digits, and a layer has few.
    return part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS


def _joined(node: Node) -> Node:
    """Return `node`, or its child under both their names if it has one child and no value."""
    if node.entry is None and len(node.children) == 1:
        (child,) = node.children.values()
        # What stands for several keeps its number at the front, where folding looks for one.
        if child.alike == 1 or not _NUMBER.match(node.name):
            child.name = f"{node.name}.{child.name}"
            return child
    return node


def _folded(nodes: list[Node]) -> dict[str, Node]:
    groups: dict[tuple[int, str], list[Node]] = {}
    for node in nodes:
        groups.setdefault(_kind(node), []).append(node)
    found: dict[str, Node] = {}
    for (_, pattern), group in groups.items():
        if len(group) < _LEAST_ALIKE or "#" not in pattern:
            found.update((node.name, node) for node in group)
            continue
        numbers = sorted(int(_leading(node.name) or "0") for node in group)
        first = group[0]
        first.name = f"[{runs_text(numbers)}]{pattern[1:]}"
        first.alike = len(group)
        first.size_bytes = sum(node.size_bytes for node in group)
        first.value_count = sum(node.value_count for node in group)
        found[first.name] = first
    return found


def _kind(node: Node) -> tuple[int, str]:
    """Return what siblings must share to be alike: structure, and the name but for its number."""
    pattern = _NUMBER.sub("#", node.name, count=1) if _is_number(_leading(node.name)) else node.name
    return node.signature, pattern


def _leading(name: str) -> str:
    """Return the digits a name begins with; "" if it begins with none."""
    match = _NUMBER.match(name)
    return match[0] if match else ""
