"""`follow`: each checkpoint below a root, once it is committed."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import InvalidInputError, PhaseTimeoutError, StorageError
from ckpt_storage.inspect.views import natural
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline

from .names import StepNames
from .root import Root

log = logging.getLogger("ckpt_storage")

_REREAD_COUNT = 16
"""How many folders of each kind that were read before one poll reads again."""

_LAST_NUMBER = re.compile(r"([0-9]{1,1000})[^0-9]*$")
"""Python reads no number of more than 4,300 digits."""


def follow(
    root_url: str | os.PathLike[str],
    *,
    after: int | None = None,
    poll_s: float = 30.0,
    idle_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
) -> Iterator[CheckpointInfo]:
    """Yield each checkpoint directly below a root once it is committed, oldest step first.

    Begins with those that are there. Never ends by itself without `idle_s`. A poll lists the root
    once and reads the folders that are new; of those without a commit it reads 16 again, in turn.
    A folder whose name has a number ("step-900") is yielded once, also if it is saved anew; a name
    without a number ("latest") each time its save is another. A poll that fails because of a
    connection or a throttled request is logged, and the next poll makes up for it. Any process; not
    collective.

    Args:
        root_url: URL or local path of the root of a run; it need not exist yet.
        after: leave out folders whose last number is at most this, unread: where an earlier
            follower stopped.
        poll_s: seconds between two polls.
        idle_s: end once nothing was committed for so long.
        storage_options: passed to the fsspec file system.
        timeout: seconds, `timedelta` or `Timeouts` (`load` counts) for one poll; default an hour.
        retry: how failed storage requests are repeated.

    Raises:
        CheckpointError: `InvalidInputError`; from the iterator `StorageError` that no repetition
            mends, `PhaseTimeoutError`.

    """
    for name, value in (("poll_s", poll_s), ("idle_s", idle_s)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidInputError(f"{name} is {value!r}.", next_step="Give finite seconds.")
    timeouts = Timeouts.of(timeout)
    location = Location.of(root_url, storage_options)
    root = Root(location, StepNames(), timeouts=timeouts, retry=retry, recorded_steps=True)
    return _run(_Follower(root, after), poll_s, idle_s)


def _run(follower: _Follower, poll_s: float, idle_s: float | None) -> Iterator[CheckpointInfo]:
    changed_s = time.monotonic()
    while True:
        start_s = time.monotonic()
        infos = follower.poll()
        if infos:
            yield from infos
            changed_s = time.monotonic()
        now_s = time.monotonic()
        if idle_s is not None and now_s - changed_s >= idle_s:
            return
        time.sleep(max(0.0, start_s + poll_s - now_s))


class _Follower:
    """What one follower has yielded, and which folders it has seen without a commit."""

    def __init__(self, root: Root, after: int | None) -> None:
        self._root = root
        self._after = after
        self._yielded: dict[str, str | None] = {}  # save id by name
        self._last_reads: dict[str, int] = {}  # of folders without a commit: number of the poll
        self._poll_count = 0

    def poll(self) -> list[CheckpointInfo]:
        """Return what was committed since the last poll, by step. Raises `StorageError`."""
        root = self._root
        self._poll_count += 1
        deadline = Deadline.of(root.timeouts, "load")
        try:
            with deadline.annotate_errors(f"Listing {root.location.url}"):
                names = [name for name in root.list_own_folders(deadline) if self._is_wanted(name)]
                states = root.read_states(self._to_read(names), deadline, fresh=True)
        except (StorageError, PhaseTimeoutError) as error:
            if isinstance(error, StorageError) and not error.retryable:
                raise
            log.warning("%s: the next poll looks again: %s", root.location.url, error)
            return []
        infos = list[CheckpointInfo]()
        for name, state in states.items():
            if state.info is None:
                if state.problem is not None and name not in self._last_reads:
                    log.warning("%s is left out for now: %s", state.url, state.problem)
                self._last_reads[name] = self._poll_count
                continue
            self._last_reads.pop(name, None)
            is_new = name not in self._yielded or self._yielded[name] != state.save_id
            self._yielded[name] = state.save_id
            if is_new:
                infos.append(state.info)
        return sorted(infos, key=lambda info: (_number_of(info.name) or 0, natural(info.name)))

    def _is_wanted(self, name: str) -> bool:
        number = _number_of(name)
        return self._after is None or number is None or number > self._after

    def _to_read(self, names: list[str]) -> list[str]:
        """Return the folders that this poll reads, and forget those that are gone."""
        for known in (self._yielded, self._last_reads):
            for name in known.keys() - set(names):
                del known[name]
        new = [name for name in names if name not in self._yielded | self._last_reads]
        waiting = sorted(self._last_reads, key=self._last_reads.__getitem__)
        unnumbered = [name for name in self._yielded if _number_of(name) is None]
        return [*new, *waiting[:_REREAD_COUNT], *unnumbered[:_REREAD_COUNT]]


def _number_of(name: str) -> int | None:
    """Return the last number in a folder's name."""
    match = _LAST_NUMBER.search(name)
    return None if match is None else int(match[1])
