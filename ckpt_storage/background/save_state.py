"""The state and the progress of a background save."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckpt_storage.coordination.heartbeats import RankProgress
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    PhaseTimeoutError,
    SaveCancelledError,
)
from ckpt_storage.options import Phase


class SaveState(enum.Enum):
    """The state of a save. The last five are final.

    COMMITTED: the checkpoint exists. FAILED, TIMED_OUT, CANCELLED: it does not exist, and this save
    will not create it. UNKNOWN: the storage did not answer whether it exists.
    """

    STAGING = "staging"
    WRITING = "writing"
    COMMITTING = "committing"
    CONSOLIDATING = "consolidating"
    COMMITTED = "committed"
    FAILED = "failed"
    TIMED_OUT = "timed-out"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def is_final(self) -> bool:
        """Whether the save has ended."""
        return self not in STATE_OF_PHASE.values()


STATE_OF_PHASE: dict[Phase, SaveState] = {
    "stage": SaveState.STAGING,
    "plan": SaveState.WRITING,
    "write": SaveState.WRITING,
    "commit": SaveState.COMMITTING,
    "consolidate": SaveState.CONSOLIDATING,
}

_STATE_OF_ERROR = {
    CommitUnknownError: SaveState.UNKNOWN,
    SaveCancelledError: SaveState.CANCELLED,
    PhaseTimeoutError: SaveState.TIMED_OUT,
}


def state_of_error(error: CheckpointError) -> SaveState:
    """Return the final state of a save that raised `error`; its `info` is of a commit."""
    if getattr(error, "info", None) is not None:
        return SaveState.COMMITTED
    states = (state for kind, state in _STATE_OF_ERROR.items() if isinstance(error, kind))
    return next(states, SaveState.FAILED)


ProgressSource = Callable[[], tuple[Mapping[int, RankProgress], str | None]]
"""Returns the progress of each rank that is known, and the save id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProgress:
    """The progress of a save: bytes and files of this rank, and the slowest rank.

    `slowest` is the rank with most bytes left to write, None before its first heartbeat. Rank 0
    receives the heartbeats of all ranks and relays the slowest; other ranks have it from there.
    """

    state: SaveState
    rank: int
    done_bytes: int = 0
    total_bytes: int = 0
    done_files: int = 0
    save_id: str | None = None
    slowest: RankProgress | None = None
    ranks: Mapping[int, RankProgress] = field(default_factory=dict)
