"""Tensors that share their bytes: recorded ties, and those that a caller confirms."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.source.model import Source


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


def _checksums(
    source: Source, fqn: str, offsets: tuple[int, ...]
) -> tuple[int, tuple[int, ...]] | None:
    place = source.place(fqn, offsets)
    return None if place.crcs is None else (place.block_bytes, tuple(place.crcs))
