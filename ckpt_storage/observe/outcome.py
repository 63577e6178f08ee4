"""How one operation ended on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    RankFailedError,
    SaveCancelledError,
)

from .stats import OperationStats, RankTiming
from .timeline import Timeline

OUTCOME_LOGGER = "ckpt_storage.outcome"
"""The logger of the lines that report outcomes."""

Kind = Literal["save", "load", "export", "copy", "convert"]

_KINDS: dict[str, Kind] = {
    "the save": "save",
    "the load": "load",
    "the consolidation": "export",
    "the copy": "copy",
    "the conversion": "convert",
}


def kind_of(what: str) -> Kind | None:
    """Return the kind of the operation that messages call `what`; None: no report is made."""
    return _KINDS.get(" ".join(what.split()[:2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one operation ended on one rank.

    `own` is the share of this rank. `stats` are those of all ranks, None if it ended before them.
    `is_superseded`: the caller begins the operation anew.
    """

    kind: Kind
    url: str
    step: int | None
    save_id: str | None
    world_size: int
    is_coordinator: bool
    coordinator_rank: int
    timeline: Timeline
    own: RankTiming
    stats: OperationStats | None
    error: BaseException | None
    is_superseded: bool = False

    @property
    def name(self) -> str:
        """Return the outcome's name; "committed" also of a save that failed after its commit."""
        if self.error is None:
            return "ok"
        if getattr(self.error, "info", None) is not None:
            return "committed"
        if isinstance(self.error, CommitUnknownError):
            return "unknown"
        if isinstance(self.error, SaveCancelledError):
            return "cancelled"
        return "failed" if isinstance(self.error, Exception) else "interrupted"

    @property
    def code(self) -> str:
        """Return the stable code of the error, "" without an error."""
        if self.error is None:
            return ""
        return self.error.code if isinstance(self.error, CheckpointError) else "interrupt"

    @property
    def failed_ranks(self) -> tuple[int, ...]:
        """Return the ranks that the error names."""
        if isinstance(self.error, RankFailedError) and self.error.failures:
            return tuple(sorted(self.error.failures))
        rank = getattr(self.error, "rank", None)
        return () if rank is None else (rank,)
