"""The outcome of a failed save on one rank, as one table; it is on the page *Errors*, too.

Every rank looks it up in `_write_and_commit` of `save.py`. The outcome of the storage request that
commits is decided before, by `take_slot` in `commit/slotlog.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Row:
    """Situations and the outcome for a rank; "*" stands for any value.

    `discards`: the coordinator deletes the files of all ranks.
    """

    rank: Literal["coordinator", "member", "*"]
    stage: Stage | Literal["*"]
    cause: Cause | Literal["*"]
    storage: StorageState | Literal["*"]
    action: Action
    discards: bool = False


TABLE = (
    # Without the report of every rank there is no commit.
    Row("*", "writing", "undecided", "*", "raise"),
    Row("*", "*", "undecided", "committed", "raise with info"),
    Row("*", "*", "undecided", "absent", "raise unknown"),
    # The request that commits may still be in flight.
    Row("*", "committing", "interrupt", "*", "raise unknown"),
    Row("*", "committing", "unexpected", "*", "raise unknown"),
    Row("coordinator", "writing", "failure", "*", "raise", discards=True),
    Row("coordinator", "writing", "unexpected", "*", "raise", discards=True),
    # A rank that hangs may still write. What failed in the commit has deleted its files itself.
    Row("*", "*", "*", "*", "raise"),
)
"""The first row that matches counts. No rank raises "failed" for a save that is, or may be,
committed: a commit that is claimed is ended by the coordinator alone.
"""


def outcome_of(
    *, is_coordinator: bool, stage: Stage, cause: Cause, storage: StorageState = "absent"
) -> Row:
    """Return the row of `TABLE` for a situation; pure."""
    situation = ("coordinator" if is_coordinator else "member", stage, cause, storage)
    return next(
        row
        for row in TABLE
        if all(
            pattern in {"*", value}
            for pattern, value in zip(
                (row.rank, row.stage, row.cause, row.storage), situation, strict=True
            )
        )
    )
