"""What a save comes to on one rank, as one table; the page *Errors* shows the same table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["writing", "reported", "committing"]
"""writing: this rank has sent no report, or the coordinator has not begun to commit. reported: a
member's report may have been sent. committing: the coordinator may have sent the request to commit.
"""

Cause = Literal["none", "failure", "unexpected", "hang", "interrupt", "undecided"]
"""none: the outcome was released. failure: this rank failed, or all ranks learned of a failure.
unexpected: the same, by an error that is no `CheckpointError`. hang: the same, by a deadline or by
silence, so that something may still be writing. interrupt: KeyboardInterrupt or SystemExit.
undecided: whether the coordinator commits cannot be seen.
"""

StorageSays = Literal["not asked", "committed", "absent"]
"""absent: the save is not the head of the log, or the log cannot be read."""

Action = Literal["return", "raise", "ask storage", "raise with info", "raise unknown"]


@dataclass(frozen=True, slots=True)
class Row:
    """Situations and what a rank makes of them; "*" stands for any value.

    `discards`: the coordinator deletes what all ranks wrote.
    """

    rank: Literal["coordinator", "member", "*"]
    stage: Stage | Literal["*"]
    cause: Cause | Literal["*"]
    storage: StorageSays | Literal["*"]
    action: Action
    discards: bool = False


TABLE = (
    Row("*", "*", "none", "*", "return"),
    # Without the report of every rank there is no commit.
    Row("*", "writing", "undecided", "*", "raise"),
    Row("*", "*", "undecided", "not asked", "ask storage"),
    Row("*", "*", "undecided", "absent", "raise unknown"),
    Row("coordinator", "*", "undecided", "committed", "return"),
    Row("member", "*", "undecided", "committed", "raise with info"),
    # The request that commits may still be in flight.
    Row("*", "committing", "interrupt", "*", "raise unknown"),
    Row("*", "committing", "unexpected", "*", "raise unknown"),
    Row("coordinator", "writing", "failure", "*", "raise", discards=True),
    Row("coordinator", "writing", "unexpected", "*", "raise", discards=True),
    # A rank that hangs may still write. What failed in the commit has deleted its files itself.
    Row("*", "*", "*", "*", "raise"),
)
"""The first row that matches counts. "Failed" is never said of a save that is committed, or may be:
a commit that is claimed is ended by the coordinator alone.
"""


def outcome_of(
    *,
    is_coordinator: bool,
    stage: Stage,
    cause: Cause,
    storage: StorageSays = "not asked",
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
