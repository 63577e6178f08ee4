"""What ranks tell one another when something went wrong, and whose error it then is."""

from __future__ import annotations

import logging
import pickle
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    CommitConflictError,
    CommitUnknownError,
    FormatError,
    NotPublishedError,
    RankFailedError,
    RankMismatchError,
    SaveCancelledError,
)
from ckpt_storage.store import Location
from ckpt_storage.store.redaction import without_secrets

log = logging.getLogger("ckpt_storage")

_CAUSE_CHARS = 4000
"""How much of a traceback travels: its end."""

_PACKAGE = __name__.partition(".")[0]

_OF_THE_CHECKPOINT = (
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    CommitConflictError,
    CommitUnknownError,
    FormatError,
    NotPublishedError,
    RankMismatchError,
    SaveCancelledError,
)
"""What is wrong with the checkpoint, whichever rank sees it first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Why an operation ended, as the first rank that failed tells it.

    `decides`: the coordinator found it when it decided for all.
    """

    rank: int
    error: CheckpointError
    decides: bool = False


def told_by(report: Report, what: str) -> CheckpointError:
    """Return what the other ranks raise on a report in the operation `what`.

    The error itself where it is every rank's: what the coordinator found when it decided for all,
    what is wrong with the checkpoint, and failures that name a rank already.
    """
    error = report.error
    # What is of no kind of ours came from a planner or a state: that rank failed.
    is_verdict = report.decides and type(error) is not CheckpointError
    if is_verdict or isinstance(error, (*_OF_THE_CHECKPOINT, RankFailedError)):
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


def travelling(error: BaseException) -> CheckpointError:
    """Return a copy of `error` that every rank and process can read.

    It is of one of our own kinds, because a class of the user's may not be importable there. Where
    only the cause says what went wrong, which does not travel, its traceback is a note.
    """
    told = None
    cause: BaseException | None
    if type(error).__module__.partition(".")[0] == _PACKAGE:
        try:
            told = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
        except Exception as failure:  # noqa: BLE001  # any failure means: cannot travel
            log.debug("An error does not pickle: %s", failure)
    if not isinstance(error, CheckpointError):
        told, cause = CheckpointError(f"{type(error).__name__}: {error}"), error
    else:
        cause = error.__cause__ if type(error) is CheckpointError else None
        told = told or CheckpointError(
            str(error), rank=error.rank, phase=error.phase, path=error.path
        )
    for note in getattr(error.__cause__, "__notes__", ()):
        told.add_note(note)
    if cause is not None:
        text = "".join(traceback.format_exception(cause))[-_CAUSE_CHARS:]
        told.add_note(f"The cause, where it was raised:\n{without_secrets(text)}")
    return told


@contextmanager
def as_checkpoint_errors(what: str, rank: int, *, in_background: bool = False) -> Iterator[None]:
    """Turn every failure inside into a `CheckpointError`, with the failure as its cause.

    Also DCP's own `CheckpointException`, which is no `Exception`. Interrupts pass, but not in the
    background: there they would end a thread, and nobody would be told.
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
        raise CheckpointError(
            f"{what[:1].upper()}{what[1:]} failed on rank {rank}: {told}.",
            rank=rank,
            next_step="Its cause says where.",
        ) from error


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
    names = {name: None for terms in terms_of.values() for name in terms}
    for name in names:
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
    parts: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        if rank is not None:
            start = previous = rank
    return ", ".join(parts)
