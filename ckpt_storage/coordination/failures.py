"""Errors that concern several ranks: how they are sent, and what each rank raises."""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

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
"""How much of a traceback is sent: its end."""

_PACKAGE = __name__.partition(".")[0]

_OF_A_RANK = (
    ConsolidationError,
    InvalidInputError,
    IntegrityError,
    PhaseTimeoutError,
    StorageError,
    UnsafeContentError,
)
"""Errors of one rank alone; all others concern every rank, whichever rank raises them first."""


def error_for_peers(
    rank: int,
    error: CheckpointError,
    what: str,
    is_decision: bool,  # noqa: FBT001  # of a failure
) -> CheckpointError:
    """Return what the other ranks raise when `rank` failed: its error if it concerns all ranks.

    That is what the coordinator raised when it decided for all (`is_decision`), what is wrong with
    the checkpoint, and errors that name another rank.
    """
    # An error of no class of ours came from a planner or a state: that rank failed.
    is_foreign = type(error) is CheckpointError
    is_general = is_decision or not isinstance(error, _OF_A_RANK)
    names_another = isinstance(error, PhaseTimeoutError) and error.rank not in {None, rank}
    if not is_foreign and (is_general or names_another):
        return error
    return with_rank(rank, error, what)


def add_context(error: CheckpointError, what: str, *, rank: int, phase: str) -> None:
    """Add rank, phase and URL to the message of an error that an operation raises."""
    error.phase = error.phase or phase
    text, failed = str(error), error.rank
    where = re.compile(rf"\branks? {'[0-9]' if failed is None else failed}\b", re.IGNORECASE)
    place = what.split(" ", 3)[-1]
    if where.search(text) and f"{error.phase} phase" in text and place in text:
        return
    at = f"on rank {failed}" if failed is not None else f"raised on rank {rank}"
    # Not "failed": a save whose outcome is unknown, or that is not published, has not failed.
    text = text.removeprefix(f"{what[:1].upper()}{what[1:]} failed on rank {failed}: ")
    error.args = (f"In the {error.phase} phase of {what}, {at}: {text}",)


def with_rank(rank: int, error: CheckpointError, what: str) -> RankFailedError:
    """Return the error of the other ranks when `rank` failed with `error`."""
    failed = RankFailedError(
        f"Rank {rank} failed in the {error.phase or 'plan'} phase of {what}: {error}",
        failures={rank: str(error)},
        rank=rank,
        phase=error.phase or "plan",
        path=error.path,
    )
    failed.__cause__ = error
    return failed


def ranks_lost_error(
    ranks: Sequence[int], world_size: int, how: str, what: str, phase: str, known: Mapping[int, str]
) -> RankFailedError:
    """Return the error of ranks that were lost: how, and what is known of each."""
    return RankFailedError(
        f"{name_ranks(ranks)} of the group's {world_size} {how} in the {phase} phase of {what}: "
        f"{'; '.join(known.values())}.",
        failures=dict(known),
        is_silent=True,
        rank=ranks[0],
        phase=phase,
        next_step="See what ended or stopped those processes (a crash, a signal, out of memory); "
        "if they only had no time to send heartbeats, raise Timeouts.silence.",
    )


def picklable_copy(error: BaseException) -> CheckpointError:
    """Return a copy of `error` that every rank and process can unpickle.

    Its class is one of this package, because a class of the user's may not be importable there. The
    cause does not pickle; if only the cause shows what went wrong, its traceback is a note.
    """
    cause: BaseException | None = error
    if not isinstance(error, CheckpointError):
        copy = CheckpointError(f"{type(error).__name__}: {error}")
    else:
        cause = error.__cause__ if type(error) is CheckpointError else None
        copy = CheckpointError(str(error), rank=error.rank, phase=error.phase, path=error.path)
        if type(error).__module__.partition(".")[0] == _PACKAGE:
            # Any failure means: it does not pickle.
            with suppress(Exception):
                copy = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    for note in getattr(error.__cause__, "__notes__", ()):
        copy.add_note(note)
    if cause is not None:
        text = "".join(traceback.format_exception(cause))[-_CAUSE_CHARS:]
        copy.add_note(f"The cause, where it was raised:\n{without_secrets(text)}")
    return copy


@contextmanager
def as_checkpoint_errors(what: str, rank: int, *, in_background: bool = False) -> Iterator[None]:
    """Turn every exception, also DCP's own, into a `CheckpointError` whose cause it is.

    Interrupts pass, but not in the background: there they would only end a thread.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
        if is_interrupt and not in_background:
            raise
        reason = f"{type(error).__name__}: {error}".rstrip(".: ")
        message = f"{what[:1].upper()}{what[1:]} failed on rank {rank}: {reason}."
        raise CheckpointError(message, rank=rank, next_step="See its cause.") from error


def redacted_url(url: object) -> str:
    """Return a user's `url` for messages, whatever was passed; without credentials."""
    try:
        return Location.to_read(url).url  # type: ignore[arg-type]  # it raises for all else
    except CheckpointError:
        return "a place that cannot be used"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for the beginning of a sentence."""
    return f"Rank{'s' if len(ranks) != 1 else ''} {spell_ranks(ranks) if ranks else '?'}"


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
        if len(ranks_of) == 1:
            continue
        listing = "; ".join(
            f"{value!r}: ranks {spell_ranks(ranks)}" for value, ranks in ranks_of.items()
        )
        done, next_step = "loaded", "Load again when the save that is running there has ended."
        if phase == "plan":
            done, next_step = "written", f"Compute {name} on one rank and broadcast it, then save "
            next_step += "again."
        if name == "the step":
            next_step = "Find out why a rank skipped or repeated a save; the next save that all "
            next_step += "ranks make for the same step commits."
        return RankMismatchError(
            f"Ranks disagree on {name}: {listing}. Nothing was {done}.",
            values=ranks_of,
            phase=phase,
            next_step=next_step,
        )
    return None


def spell_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, runs folded: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
