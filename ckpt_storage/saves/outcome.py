"""What a save comes to on one rank, as one table; the same table is on the page *Errors*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["writing", "reported", "committing"]
"""writing: before this rank's report was sent, or before the coordinator claimed the commit.
reported: a member's report may have been sent. committing: the coordinator has claimed the commit.
"""

Cause = Literal["none", "failure", "hang", "interrupt", "undecided"]
"""none: the outcome was released. failure: this rank failed, or all ranks learned of a failure.
hang: the same, by a deadline or by silence, so that something may still be writing. interrupt:
KeyboardInterrupt or SystemExit. undecided: whether the coordinator commits cannot be seen.
"""

StorageSays = Literal["not asked", "committed", "absent"]
"""absent: the save is not the head of the log, or the log cannot be read."""

Action = Literal["return", "raise", "ask storage", "raise with info", "raise unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rank does, and whether the coordinator deletes what all ranks wrote."""

    action: Action
    discards: bool = False


def outcome_of(
    *,
    is_coordinator: bool,
    stage: Stage,
    cause: Cause,
    storage: StorageSays = "not asked",
) -> Outcome:
    """Return what a rank makes of its situation; pure.

    "Failed" is never said of a save that is or may be committed: without the report of every rank
    there is no commit, and a commit that is claimed is ended by the coordinator alone.
    """
    if cause == "none":
        return Outcome(action="return")
    if cause == "undecided":
        if stage == "writing":
            # Nothing of this rank was sent, so nothing can be committed.
            return Outcome(action="raise")
        if storage == "not asked":
            return Outcome(action="ask storage")
        if storage == "absent":
            return Outcome(action="raise unknown")
        return Outcome(action="return" if is_coordinator else "raise with info")
    if stage == "committing" and cause == "interrupt":
        # The request that commits may still be in flight.
        return Outcome(action="raise unknown")
    # What failed in the commit has deleted its files already, or has committed them.
    discards = is_coordinator and stage == "writing" and cause == "failure"
    return Outcome(action="raise", discards=discards)
