"""The outcome of a failed save on one rank, in one function; a table is on the page *Errors*.

Every rank calls it in `_write_and_commit` of `save.py`. The outcome of the storage request that
commits is decided before, by `take_slot` in `commit/slotlog.py`.
"""

from __future__ import annotations

from typing import Literal

Stage = Literal["writing", "reported", "committing"]
"""writing: this rank has sent no report, or the coordinator has not begun to commit. reported: a
member's report may have been sent. committing: the coordinator may have sent the request to commit.
"""

Cause = Literal["failure", "unexpected", "hang", "interrupt", "undecided"]
"""failure: this rank failed, or all ranks learned of a failure. unexpected: the same, by an error
that is no `CheckpointError`. hang: the same, by a deadline or by silence, so that a rank may still
be writing. interrupt: KeyboardInterrupt or SystemExit. undecided: whether the coordinator commits
cannot be seen.
"""

StorageState = Literal["committed", "absent"]
"""absent: the save is not the head of the log, the log cannot be read, or it was not asked."""

Action = Literal["raise", "raise with info", "raise unknown"]


def outcome_of(
    *, is_coordinator: bool, stage: Stage, cause: Cause, storage: StorageState = "absent"
) -> tuple[Action, bool]:
    """Return what a rank raises, and whether it deletes the files of all ranks; pure.

    No rank raises "failed" for a save that is, or may be, committed: a commit that is claimed is
    ended by the coordinator alone.
    """
    # Without the report of every rank there is no commit.
    if cause == "undecided" and stage != "writing":
        return "raise with info" if storage == "committed" else "raise unknown", False
    # The request that commits may still be in flight.
    if stage == "committing" and cause in {"interrupt", "unexpected"}:
        return "raise unknown", False
    # A rank that hangs may still write. What failed in the commit has deleted its files itself.
    may_discard = is_coordinator and stage == "writing" and cause in {"failure", "unexpected"}
    return "raise", may_discard
