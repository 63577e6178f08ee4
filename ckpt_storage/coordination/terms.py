"""The terms of an operation: values that all ranks must share, compared by the coordinator."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_storage.errors import RankMismatchError

from .rank_names import spell_ranks


def check_terms(terms_of: Mapping[int, Mapping[str, str]], *, phase: str) -> None:
    """Raise `RankMismatchError` listing value -> ranks unless all ranks have equal terms."""
    error = mismatch_error(terms_of, phase=phase)
    if error is not None:
        raise error


def mismatch_error(
    terms_of: Mapping[int, Mapping[str, str]], *, phase: str
) -> RankMismatchError | None:
    """Return the error that lists value -> ranks of the first term that differs between ranks."""
    for name in dict.fromkeys(name for terms in terms_of.values() for name in terms):
        ranks_of: dict[str, list[int]] = {}
        for rank, terms in terms_of.items():
            ranks_of.setdefault(terms.get(name, "(nothing)"), []).append(rank)
        if len(ranks_of) > 1:
            return _mismatch_of(name, ranks_of, phase)
    return None


def _mismatch_of(name: str, ranks_of: dict[str, list[int]], phase: str) -> RankMismatchError:
    listing = "; ".join(
        f"{value!r}: ranks {spell_ranks(ranks)}" for value, ranks in ranks_of.items()
    )
    next_step = "Load again when the save that is running there has ended."
    if phase == "plan":
        next_step = f"Compute {name} on one rank and broadcast it, then save again."
    if name == "the step":
        next_step = (
            "Find out why a rank skipped or repeated a save; the next save that all ranks make for "
            "the same step commits."
        )
    return RankMismatchError(
        f"Ranks disagree on {name}: {listing}. Nothing was "
        f"{'written' if phase == 'plan' else 'loaded'}.",
        values=ranks_of,
        phase=phase,
        next_step=next_step,
    )
