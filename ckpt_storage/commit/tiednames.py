"""What ranks say about tensors that are the same memory, and the ties that follow for all.

Two sources: each rank's writer ties what it wrote (in its report), and each rank's front
door ties what lies in its state, also where the ranks divided the chunks of one tensor among
them. Of names that any front door ties, the front doors decide; of all others, the writers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from ckpt_storage.commit.reporttable import RankReport
from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.format.rank_manifest import BoxKey

Groups = tuple[tuple[str, ...], ...]
"""Groups of FQNs; in each, names are in the order of the state or plan."""


def candidate_ties(views: Sequence[Groups]) -> Groups:
    """Return what could be tied if nobody objects, given the groups that each rank ties."""
    union = _Union()
    for group in chain.from_iterable(views):
        for name in group:
            union.join(group[0], name)
    groups: dict[str, list[str]] = {}
    for name, root in union.roots().items():
        groups.setdefault(root, []).append(name)
    return tuple(map(tuple, groups.values()))


def settled_ties(views: Sequence[Groups], objections: Sequence[Sequence[Groups]]) -> dict[str, str]:
    """Return what each name of `views` is tied to; itself, if it is tied to none before it.

    An objection has, of one candidate group, the names that a rank holds, in groups of those that
    are the same memory there. Names of different groups are not tied; nor is one that the rank
    does not hold to one that it holds. The names of the lowest rank come first.
    """
    seen_as: dict[str, list[tuple[int, int]]] = {}
    for number, objection in enumerate(chain.from_iterable(objections)):
        for at, names in enumerate(objection):
            for name in names:
                seen_as.setdefault(name, []).append((number, at))
    union = _Union()
    for group in chain.from_iterable(views):
        firsts: dict[tuple[tuple[int, int], ...], str] = {}
        for name in group:
            union.join(firsts.setdefault(tuple(seen_as.get(name, ())), name), name)
    return union.roots()


def agreed_ties(
    reports: Sequence[RankReport],
    tensors: Mapping[str, TensorRecord],
    settled: Mapping[str, str],
) -> dict[str, str]:
    """Return alias -> target of what is the same memory on all ranks; no target is an alias.

    `settled` is what the front doors made out, {} without them; then all ranks knew the names of
    it when they reported. A tie that only writers know needs the word of every rank that wrote
    elements of either. All of them need equal dtype, shape, chunks and checksums of chunks.
    """
    roots = dict(settled) | {
        name: root
        for name, root in _written_ties(reports).items()
        if name not in settled and root not in settled
    }
    tied = {root for name, root in roots.items() if name != root}
    names = {name for name, root in roots.items() if root in tied and name in tensors}
    chunks = _chunks(reports, names)
    groups: dict[object, list[str]] = {}
    for name in filter(chunks.__contains__, roots):
        tensor = tensors[name]
        if len(chunks[name]) == tensor.chunk_count:
            same = (roots[name], tensor.dtype, tensor.shape, frozenset(chunks[name].items()))
            groups.setdefault(same, []).append(name)
    return {alias: group[0] for group in groups.values() for alias in group[1:]}


def _written_ties(reports: Sequence[RankReport]) -> dict[str, str]:
    views = [_groups_of(report.ties) for report in reports]
    group_of = {name: n for n, group in enumerate(candidate_ties(views)) for name in group}
    held = _Held(group_of)
    objections = []
    for report in reports if group_of else ():
        classes: dict[int, dict[str, list[str]]] = {}
        for name in held.by(report):
            root = report.ties.get(name, name)
            classes.setdefault(group_of[name], {}).setdefault(root, []).append(name)
        objections.append([tuple(map(tuple, groups.values())) for groups in classes.values()])
    return settled_ties(views, objections)


def _groups_of(ties: Mapping[str, str]) -> Groups:
    groups: dict[str, list[str]] = {}
    for alias, target in ties.items():
        groups.setdefault(target, [target]).append(alias)
    return tuple(map(tuple, groups.values()))


class _Held:
    """Finds which of some names a rank wrote elements of; looks once at each pattern of items."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._items: dict[tuple[bytes, bytes], list[tuple[str, int]]] = {}

    def by(self, report: RankReport) -> list[str]:
        """Return the names in order of the rank's items."""
        key = (report.vocabulary, report.pattern)
        items = self._items.get(key)
        if items is None:
            fqns, _ = report.read_vocabulary()
            wanted = {at: fqn for at, fqn in enumerate(fqns) if fqn in self._names}
            fqn, _, box = report.read_pattern()
            items = self._items[key] = [
                (wanted[name], place)
                for name, place in zip(fqn.tolist(), box.tolist(), strict=True)
                if name in wanted and place >= 0
            ]
        empty = report.empty_boxes() if items else ()
        return list(dict.fromkeys(name for name, place in items if not empty[place]))


def _chunks(reports: Sequence[RankReport], names: Iterable[str]) -> dict[str, dict[BoxKey, int]]:
    """Return box -> checksum of every chunk with elements of the tensors `names`."""
    found: dict[str, dict[BoxKey, int]] = {}
    wanted = frozenset(names)
    for report in reports if wanted else ():
        for name, box, crc in report.tied:
            if name in wanted:
                found.setdefault(name, {}).setdefault(box, crc)
    return found


class _Union:
    """Names joined to sets; the one that was named first stands for each set."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._order: dict[str, int] = {}

    def join(self, one: str, other: str) -> None:
        """Put the sets of both together."""
        roots = sorted((self._root(one), self._root(other)), key=self._order.__getitem__)
        self._parents[roots[1]] = roots[0]

    def roots(self) -> dict[str, str]:
        """Return the first name of each name's set, in the order in which names came."""
        return {name: self._root(name) for name in self._parents}

    def _root(self, name: str) -> str:
        parent = self._parents.setdefault(name, name)
        self._order.setdefault(name, len(self._order))
        while parent != name:
            above = self._parents[parent]
            self._parents[name] = above
            name, parent = parent, above
        return name
