"""The state of one folder below a root, as read from the storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import CheckpointError, IntegrityError


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderState:
    """The state of a folder below a root.

    committed: `info` is of its newest commit. foreign: another tool wrote it. uncommitted: nothing
    is committed, but there are files. empty: no files, or only slots of what was deleted.
    unreadable: `problem` says why. `slot` is that of the commit, or the last slot; `age_s` counts
    from it, None where that is not known.
    """

    name: str
    step: int | None
    status: Literal["committed", "foreign", "uncommitted", "empty", "unreadable"]
    url: str = ""
    info: CheckpointInfo | None = None
    slot: int = 0
    is_damaged: bool = False
    age_s: float | None = None
    problem: CheckpointError | None = None

    @property
    def is_sound(self) -> bool:
        """Whether it is a checkpoint of the run that is not known to be damaged."""
        return self.status == "committed" and self.step is not None and not self.is_damaged

    @property
    def save_id(self) -> str | None:
        """The save that is committed, if this library wrote it."""
        return None if self.info is None else self.info.save_id


States = Mapping[str, FolderState]
"""Folder states by name."""


class _Named(Protocol):
    @property
    def step(self) -> int | None: ...

    @property
    def name(self) -> str: ...


def by_step(checkpoint: _Named) -> tuple[int, str]:
    """Return the sort key of the order of steps; folders without a step sort first."""
    return (-1 if checkpoint.step is None else checkpoint.step, checkpoint.name)


def damage_of(state: FolderState) -> IntegrityError | None:
    """Return the damage for which a resuming run takes an older checkpoint; None without any.

    Raises any other problem. Another job might resume from the checkpoint: this release may be too
    old to read it, or this user may lack a right.
    """
    if state.problem is None or isinstance(state.problem, IntegrityError):
        return state.problem
    raise state.problem
