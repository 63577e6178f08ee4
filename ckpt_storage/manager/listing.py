"""The committed checkpoints below a root, or below a root and its mirror."""

from __future__ import annotations

import heapq
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import StorageError
from ckpt_storage.inspect.views import natural
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline

from .folders import FolderState, by_step, damage_of
from .names import StepNames
from .policies import begun_s
from .root import Root

log = logging.getLogger("ckpt_storage")


def list_checkpoints(
    root_url: str | os.PathLike[str],
    *,
    usage: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
) -> list[CheckpointInfo]:
    """Return the committed checkpoints directly below a root, ordered by name.

    Whether a folder is committed is read from its commit slots, never from a listing; the listing
    only shows which folders to read. Numbers in names are ordered as numbers (`step-900` before
    `step-1000`); `CheckpointManager.latest` returns the highest step. A root that does not exist
    holds none. Any rank; not collective.

    With `usage` each `CheckpointInfo.usage` says which groups of values a checkpoint holds, and the
    bytes of its files. That reads each manifest. It is None for checkpoints of other tools, and
    where the manifest is unreadable, which is logged.

    A folder that may not be read is listed with the format "unreadable" and its `problem`: it may
    be the newest checkpoint. A folder whose commit records are damaged or of a newer format is left
    out with a warning in the log; `verify` reports the damage.

    Raises `StorageError`, `PhaseTimeoutError`, `InvalidInputError`.
    """
    location, timeouts = Location.to_read(root_url, storage_options), Timeouts.of(timeout)
    root = Root(
        location, StepNames(), timeouts=timeouts, retry=retry, recorded_steps=True, usage=usage
    )
    deadline, infos = Deadline("load", timeouts.load), list[CheckpointInfo]()
    names = sorted(root.list_folders(deadline), key=natural)
    for state in root.read_states(names, deadline, fresh=True).values():
        if isinstance(state.problem, StorageError):
            infos.append(
                CheckpointInfo(
                    url=state.url, name=state.name, format="unreadable", problem=str(state.problem)
                )
            )
        elif (info := _info_of(state)) is not None:
            infos.append(info)
    return infos


def list_all(roots: Sequence[Root], deadline: Deadline) -> list[CheckpointInfo]:
    """Return the checkpoints below all roots, by step; of each name the save that began last."""
    infos = list[CheckpointInfo]()
    # Of two copies of a save, the copy of the first root is last.
    for root in reversed(roots):
        names = root.list_own_folders(deadline)
        infos += filter(None, map(_info_of, root.read_states(names, deadline, fresh=True).values()))
    by_name = {info.name: info for info in sorted(infos, key=begun_s)}
    return sorted(by_name.values(), key=by_step)


def newest_first(roots: Sequence[Root], deadline: Deadline) -> Iterator[tuple[Root, FolderState]]:
    """Yield each step with its root, newest first; of one step the later save first."""
    streams = [root.newest_first(deadline) for root in roots]
    return heapq.merge(*streams, key=lambda pair: (-(pair[1].step or 0), -begun_s(pair[1].info)))


def find_newest(roots: Sequence[Root], deadline: Deadline) -> CheckpointInfo | None:
    """Return the newest committed checkpoint that is whole and not known to be damaged."""
    for _, state in newest_first(roots, deadline):
        damage = damage_of(state)
        if damage is not None:
            log.warning("%s is skipped, and an older checkpoint is taken: %s", state.url, damage)
        if state.info is not None and not state.is_damaged and not state.info.part:
            return state.info
    return None


def _info_of(state: FolderState) -> CheckpointInfo | None:
    """Return the entry of a list; log a folder that cannot be read."""
    if state.problem is not None:
        log.warning("%s is left out of the list: %s", state.url, state.problem)
    return state.info
