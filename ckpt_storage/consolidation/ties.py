"""Tensors that share their bytes: recorded ties, those a caller confirms, and what looks like one.

Knows FQNs, dtypes, shapes and checksums; not what goes out. Called by `choice` and `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.source import Source


class Ties:
    """Ties from alias to target, checked as they come in."""

    def __init__(self, source: Source, recorded: Mapping[str, str]) -> None:
        self._source = source
        self._targets = dict(recorded)
        self.roots = self._checked("A recorded tie")
        """The target of every alias, chains followed to their end."""

    def confirm(self, tied: Mapping[str, str], find: Callable[[str], str]) -> None:
        """Take over the caller's ties; `find` turns a name of either kind into an FQN."""
        self._targets |= {find(alias): find(target) for alias, target in sorted(tied.items())}
        self.roots = self._checked("tied=")

    def _checked(self, who: str) -> dict[str, str]:
        tensors = self._source.tensors
        roots: dict[str, str] = {}
        for alias, target in sorted(self._targets.items()):
            root, seen = target, {alias}
            while root in self._targets and root not in seen:
                seen.add(root)
                root = self._targets[root]
            if root in seen:
                raise InvalidInputError(
                    f"{who} ties {alias} to itself.",
                    next_step="Give one target for all aliases of a tensor.",
                )
            if root not in tensors:
                raise InvalidInputError(
                    f"{who} maps {alias!r} to {root!r}, which is no tensor of the checkpoint.",
                    next_step="Name a tensor that is there; ckpt-storage show lists them.",
                )
            a, b = tensors.get(alias, tensors[root]), tensors[root]
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                raise InvalidInputError(
                    f"{who} maps {alias} ({a.dtype}, {list(a.shape)}) to {root} ({b.dtype}, "
                    f"{list(b.shape)}).",
                    next_step="Tied tensors have one dtype and one shape.",
                )
            roots[alias] = root
        return roots


def check_ties(source: Source, ties: Mapping[str, str]) -> None:
    """Raise `InvalidInputError` if an alias that was stored is not what its target is.

    `ties` are those of a plan. Fetches the rank manifests of the tensors concerned, so one rank
    should do it for all, before anything is written. Where chunks are cut otherwise or have no
    checksums, the tie is taken on trust.
    """
    for alias, target in sorted(ties.items()):
        if alias in source.tensors and have_same_bytes(source, alias, target) is False:
            raise InvalidInputError(
                f"{alias} is said to be tied to {target}; their checksums differ.",
                next_step='Remove it from tied=, or give tied="keep"; both then go out.',
            )


def have_same_bytes(source: Source, left: str, right: str) -> bool | None:
    """Return whether two tensors of one dtype and shape hold the same; None if not known.

    Goes by the checksums of chunks, which tell only where both are cut alike.
    """
    a, b = source.tensors[left], source.tensors[right]
    if list(a.boxes) != list(b.boxes):
        return None
    keys = [(fqn, box.offsets) for box in a.boxes for fqn in (left, right)]
    source.require(keys)
    for box in a.boxes:
        crcs = [_checksums(source, fqn, box.offsets) for fqn in (left, right)]
        if None in crcs:
            return None
        if crcs[0] != crcs[1]:
            return False
    return True


def tie_candidates(source: Source, fqns: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Return groups of those `fqns` that may be one tensor saved several times.

    They have one dtype, shape and sharding, and the same checksums. Of our checkpoints only,
    because others have no checksums, and of tensors with two dimensions or more, because many a
    bias is equal to another one. Looks at first chunks first: fetches the rank manifests of
    these, and of all chunks of tensors that agree so far; so one rank should do it for all.
    """
    if source.format != "ckpt_storage":
        return ()
    infos = {fqn: source.tensors[fqn] for fqn in sorted(set(fqns))}
    wide = [fqn for fqn, info in infos.items() if len(info.shape) > 1 and 0 not in info.shape]
    rough = _groups(wide, lambda fqn: (infos[fqn].dtype, infos[fqn].shape, len(infos[fqn].boxes)))
    source.require((fqn, infos[fqn].boxes[0].offsets) for group in rough for fqn in group)
    found: list[tuple[str, ...]] = []
    for group in rough:
        first = _groups(group, lambda fqn: _checksums(source, fqn, infos[fqn].boxes[0].offsets))
        for members in first:
            rest = members
            while rest:
                same = [fqn for fqn in rest[1:] if have_same_bytes(source, rest[0], fqn)]
                if same:
                    found.append((rest[0], *same))
                rest = [fqn for fqn in rest[1:] if fqn not in same]
    return tuple(sorted(found))


def _groups(fqns: Sequence[str], key: Callable[[str], object]) -> list[list[str]]:
    """Return the FQNs that share a key with another one."""
    groups: dict[object, list[str]] = {}
    for fqn in fqns:
        groups.setdefault(key(fqn), []).append(fqn)
    return [group for group in groups.values() if len(group) > 1]


def _checksums(
    source: Source, fqn: str, offsets: tuple[int, ...]
) -> tuple[int, tuple[int, ...]] | None:
    place = source.place(fqn, offsets)
    return None if place.crcs is None else (place.block_bytes, tuple(place.crcs))
