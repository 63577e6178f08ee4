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
    StorageError,
    UnsafeContentError,
)
from ckpt_storage.store.redaction import without_secrets

from .rank_names import name_ranks

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
"""Errors of a single rank. All others concern every rank, whichever rank raises them first."""


def error_for_peers(
    rank: int,
    error: CheckpointError,
    what: str,
    is_decision: bool,  # noqa: FBT001  # of a failure
) -> CheckpointError:
    """Return what the other ranks raise when `rank` failed: its error if it concerns all ranks.

    That is what the coordinator raised when it decided for all (`is_decision`), any error but those
    `_OF_A_RANK`, such as that there is no checkpoint, and a timeout that names another rank.
    """
    # A plain `CheckpointError` wraps what a planner or a state raised: that rank failed.
    is_foreign = type(error) is CheckpointError
    is_general = is_decision or not isinstance(error, _OF_A_RANK)
    names_another = isinstance(error, PhaseTimeoutError) and error.rank not in {None, rank}
    if not is_foreign and (is_general or names_another):
        return error
    failed = RankFailedError(
        f"Rank {rank} failed in the {error.phase or 'plan'} phase of {what}: {error}",
        failures={rank: str(error)},
        rank=rank,
        phase=error.phase or "plan",
        path=error.path,
    )
    failed.__cause__ = error
    return failed


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

    Its class is of this package: another rank may be unable to import a class of the user's. The
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
