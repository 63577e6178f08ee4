"""The identity of an operation, and how the coordinator compares those of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt_storage.errors import CheckpointError, RankMismatchError

from .terms import mismatch_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of an operation: its kind ("the save"), URL, step, and the restores before it.

    The step finds ranks that skipped a call: with a URL that stays the same, the next call would
    otherwise look like the skipped call. `restores` counts how often this run went back to
    an earlier step. None: not known, which agrees with any value. `is_read`: ranks that gave the
    operation up at its deadline may repeat it, so a rank that is later takes the next number.
    """

    kind: str
    url: str = ""
    step: int | None = None
    restores: int | None = None
    is_read: bool = False

    def agrees_with(self, other: Identity) -> bool:
        """Return whether both may be the same operation."""
        return (
            (self.kind, self.url) == (other.kind, other.url)
            and (self.step == other.step or None in (self.step, other.step))
            and (self.restores == other.restores or None in (self.restores, other.restores))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandonment:
    """Why the coordinator abandons a number: for one identity, or (None) for all ranks."""

    error: CheckpointError
    identity: Identity | None


def find_disagreement(
    identities: Mapping[int, Identity],
    terms: Mapping[int, Mapping[str, str]],
    *,
    earlier: Iterable[Mapping[int, Identity]],
    phase: str,
    is_complete: bool,
) -> Abandonment | None:
    """Return why ranks that arrived under one number cannot go on together, None if they can.

    All mappings have global ranks as keys. `terms` are further values that ranks must share.
    `earlier` are the identities that were compared since all ranks met.
    `is_complete`: all ranks have arrived.

    If steps differ, the number is abandoned for the lowest: its ranks fail, and those ahead try the
    next number. If steps are not known, a rank is behind if its operation was that of another rank,
    but not its own, under an earlier number, and the other rank has moved on. Otherwise all fail.
    """
    distinct = set(identities.values())
    stepped = [identity for identity in distinct if identity.step is not None]
    if not all(_agree_on_step(a, b) for a, b in itertools.combinations(stepped, 2)):
        lowest = min(stepped, key=lambda identity: (identity.restores or 0, identity.step or 0))
        return Abandonment(error=_disagreement(identities, phase), identity=lowest)
    if not is_complete:
        return None
    error = mismatch_error(terms, phase=phase)
    if all(a.agrees_with(b) for a, b in itertools.combinations(distinct, 2)):
        return None if error is None else Abandonment(error=error, identity=None)
    behind = _find_behind(identities, earlier)
    return Abandonment(error=error or _disagreement(identities, phase), identity=behind)


def _agree_on_step(a: Identity, b: Identity) -> bool:
    return a.step == b.step and (a.restores == b.restores or None in (a.restores, b.restores))


def _find_behind(
    identities: Mapping[int, Identity], earlier: Iterable[Mapping[int, Identity]]
) -> Identity | None:
    """Return an identity that a rank has now, and another rank, but not this one, had earlier."""
    for before in earlier:
        left_behind = {i for rank, i in before.items() if identities.get(rank) != i}
        for rank, identity in identities.items():
            if identity in left_behind and before.get(rank) != identity:
                return identity
    return None


def _disagreement(identities: Mapping[int, Identity], phase: str) -> RankMismatchError:
    """Return the error that lists ranks by the first field in which identities differ."""
    for name, field in (
        ("the operation", "kind"),
        ("the step", "step"),
        ("the number of restores", "restores"),
        ("the checkpoint's URL", "url"),
    ):
        values = {rank: getattr(identity, field) for rank, identity in identities.items()}
        if len({value for value in values.values() if value is not None}) > 1:
            spelt = {r: {name: "unknown" if v is None else str(v)} for r, v in values.items()}
            error = mismatch_error(spelt, phase=phase)
            if error is not None:
                return error
    raise AssertionError("The identities agree.")
