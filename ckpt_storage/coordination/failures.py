"""What ranks tell one another when something went wrong, and whose error it then is."""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ckpt_storage.errors import (
    CheckpointError,
    ConsolidationError,
    IntegrityError,
    InvalidInputError,
    PhaseTimeoutError,
    RankFailedError,
    RankMismatchError,
    StorageError,
    UnsafeContentError,
)
from ckpt_storage.store import Location
from ckpt_storage.store.redaction import without_secrets

_CAUSE_CHARS = 4000
"""How much of a traceback travels: its end."""

_PACKAGE = __name__.partition(".")[0]

_OF_A_RANK = (
    ConsolidationError,
    InvalidInputError,
    IntegrityError,
    PhaseTimeoutError,
    StorageError,
    UnsafeContentError,
)
"""What one rank may meet and another not; all else is wrong whichever rank sees it first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Why an operation ended; `decides`: the coordinator found it when it decided for all."""

    rank: int
    error: CheckpointError
    decides: bool = False


def told_by(report: Report, what: str) -> CheckpointError:
    """Return what the other ranks raise: the error itself where it is every rank's.

    That is what the coordinator found when it decided for all, what is wrong with the checkpoint,
    and failures that name a rank already.
    """
    error = report.error
    # What is of no kind of ours came from a planner or a state: that rank failed.
    is_plain = type(error) is CheckpointError
    if not is_plain and (report.decides or not isinstance(error, _OF_A_RANK)):
        return error
    return of_rank(report.rank, error, what)


def locate(error: CheckpointError, what: str, *, rank: int, phase: str) -> None:
    """Make an error that leaves an operation say rank, phase and place, where it does not yet."""
    error.phase = error.phase or phase
    text, failed = str(error), error.rank
    where = re.compile(rf"\branks? {'[0-9]' if failed is None else failed}\b", re.IGNORECASE)
    place = what.split(" ", 3)[-1]
    if where.search(text) and f"{error.phase} phase" in text and place in text:
        return
    at = f"on rank {failed}" if failed is not None else f"as rank {rank} was told"
    # Not "failed": what is in doubt, or committed but not published, has not.
    text = text.removeprefix(f"{what[:1].upper()}{what[1:]} failed on rank {failed}: ")
    error.args = (f"In the {error.phase} phase of {what}, {at}: {text}",)


def of_rank(rank: int, error: CheckpointError, what: str) -> RankFailedError:
    """Return the error that says that `rank` failed with `error`."""
    failed = RankFailedError(
        f"Rank {rank} failed in the {error.phase or 'plan'} phase of {what}: {error}",
        failures={rank: str(error)},
        rank=rank,
        phase=error.phase or "plan",
        path=error.path,
    )
    failed.__cause__ = error
    return failed


def lost(
    ranks: Sequence[int], world_size: int, how: str, what: str, phase: str, known: Mapping[int, str]
) -> RankFailedError:
    """Return the error that says that ranks were lost: what happened, and what is known of each."""
    return RankFailedError(
        f"{name_ranks(ranks)} of {world_size} {how} in the {phase} phase of {what}: "
        f"{'; '.join(known.values())}.",
        failures=dict(known),
        is_silent=True,
        rank=ranks[0],
        phase=phase,
        next_step="See what ended or stopped those processes (a crash, a signal, out of memory); "
        "if they only had no time to tell that they live, raise Timeouts.silence.",
    )


def travelling(error: BaseException) -> CheckpointError:
    """Return a copy of `error` that every rank and process can read.

    It is of one of our own kinds, because a class of the user's may not be importable there. Where
    only the cause says what went wrong, which does not travel, its traceback is a note.
    """
    cause: BaseException | None = error
    if not isinstance(error, CheckpointError):
        told = CheckpointError(f"{type(error).__name__}: {error}")
    else:
        cause = error.__cause__ if type(error) is CheckpointError else None
        told = CheckpointError(str(error), rank=error.rank, phase=error.phase, path=error.path)
        if type(error).__module__.partition(".")[0] == _PACKAGE:
            # Any failure means: it cannot travel.
            with suppress(Exception):
                told = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    for note in getattr(error.__cause__, "__notes__", ()):
        told.add_note(note)
    if cause is not None:
        text = "".join(traceback.format_exception(cause))[-_CAUSE_CHARS:]
        told.add_note(f"The cause, where it was raised:\n{without_secrets(text)}")
    return told


@contextmanager
def as_checkpoint_errors(what: str, rank: int, *, in_background: bool = False) -> Iterator[None]:
    """Turn every failure inside, also DCP's own, into a `CheckpointError` with that as its cause.

    Interrupts pass, but not in the background: there they would end a thread, and nobody is told.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
        if is_interrupt and not in_background:
            raise
        told = f"{type(error).__name__}: {error}".rstrip(".: ")
        told = f"{what[:1].upper()}{what[1:]} failed on rank {rank}: {told}."
        raise CheckpointError(told, rank=rank, next_step="Its cause says where.") from error


def place_of(url: object) -> str:
    """Return what messages call a user's `url`, whatever was passed; without credentials."""
    try:
        return Location.of(url).url  # type: ignore[arg-type]  # it says so of what is no URL
    except CheckpointError:
        return "a place that cannot be used"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for the beginning of a sentence."""
    return f"Rank{'s' if len(ranks) != 1 else ''} {spell_ranks(ranks) if ranks else '?'}"


def check_terms(terms_of: Mapping[int, Mapping[str, str]], *, phase: str) -> None:
    """Raise `RankMismatchError` listing value -> ranks unless all ranks have equal terms."""
    for name in dict.fromkeys(name for terms in terms_of.values() for name in terms):
        ranks_of: dict[str, list[int]] = {}
        for rank, terms in terms_of.items():
            ranks_of.setdefault(terms.get(name, "(nothing)"), []).append(rank)
        if len(ranks_of) > 1:
            listing = "; ".join(
                f"{value!r}: ranks {spell_ranks(ranks)}" for value, ranks in ranks_of.items()
            )
            raise RankMismatchError(
                f"Ranks disagree on {name}: {listing}. Nothing was "
                f"{'written' if phase == 'plan' else 'loaded'}.",
                values=ranks_of,
                phase=phase,
                next_step=f"Compute {name} on one rank and broadcast it, then save again."
                if phase == "plan"
                else "Load again when the save that is running there has ended.",
            )


def spell_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, runs folded: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
