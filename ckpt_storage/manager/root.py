"""What lies below the root of a run: its checkpoints, links, and what this process does there.

Reads only. Keeps what it has read of a checkpoint until somebody asks anew.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ckpt_storage.commit import slotlog
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.publishing import is_foreign, read_footer
from ckpt_storage.commit.slotlog import or_none_if_absent
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    IntegrityError,
    PhaseTimeoutError,
    StorageError,
)
from ckpt_storage.format.names import COMMITS, PROBE_PREFIX, SAVES, slot_path
from ckpt_storage.inspect.verify import check_part
from ckpt_storage.inspect.views import natural
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import some_at_once

from .names import StepNames
from .policies import begun_s
from .retention import FolderState, by_step

USELESS = (CheckpointGoneError, CheckpointInProgressError, CheckpointNotFoundError, IntegrityError)
"""Errors that say that another checkpoint is to be taken."""

_DELETING = "it is being deleted"
_BATCH_COUNT = 8
_REMOTE_THREADS = 16
_LOCAL_THREADS = 4

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")


class Root:
    """The checkpoints below one root; steps are those of names, or `recorded_steps`."""

    def __init__(
        self,
        location: Location,
        names: StepNames,
        *,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        recorded_steps: bool = False,
    ) -> None:
        self.location = location
        self.names = names
        self.uses = Uses()
        self.retry = retry or RetryPolicy()
        self.timeouts = timeouts or Timeouts()
        self._recorded_steps = recorded_steps
        self._seen: dict[str, FolderState] = {}
        # By name and save id: a copy keeps the id, and may be damaged alone.
        self._slot_times_s: dict[tuple[str, str | None, int], float | None] = {}
        self._verdicts: dict[tuple[str, str | None], bool] = {}

    def open(self, deadline: Deadline, name: str | None = None) -> Store:
        """Return the store at the root, or at one checkpoint."""
        place = self.location if name is None else self.location.child(name)
        return open_store(place, timeouts=self.timeouts, retry=self.retry).bounded(deadline)

    def folders(self, deadline: Deadline) -> list[str]:
        """Return the names of all folders, by one listing; [] without a root."""
        try:
            entries = self.open(deadline).list("", recursive=False)
        except StorageError as error:
            if error.kind == "not-found":
                return []
            raise
        found = sorted({entry.path.rstrip("/") for entry in entries if entry.path.endswith("/")})
        for name in self.seen().difference(found):
            self.forget(name)
        return found

    def steps(self, folders: Iterable[str]) -> list[str]:
        """Return those of `folders` that are named after a step, oldest first."""
        found = ((self.names.step_of(name), name) for name in folders)
        return [name for _, name in sorted(pair for pair in found if pair[0] is not None)]

    def seen(self) -> set[str]:
        """Return the names of which `look` without `fresh` knows already."""
        return set(self._seen.copy())

    def forget(self, name: str) -> None:
        """Forget a folder: somebody changed it."""
        self._seen.pop(name, None)

    def look(
        self, names: Sequence[str], deadline: Deadline, *, fresh: bool
    ) -> dict[str, FolderState]:
        """Look at folders, several at a time; without `fresh`, what was seen before will do."""
        found = {} if fresh else self._seen.copy()
        missing = [name for name in names if name not in found]
        looks = self._all([partial(self.look_at, name, deadline) for name in missing], deadline)
        found |= zip(missing, looks, strict=True)
        return {name: self._judged(found[name]) for name in names}

    def look_at(self, name: str, deadline: Deadline) -> FolderState:
        """Look at one folder anew. Raises `StorageError`, but for a missing right."""
        url = self.location.child(name).url
        found = FolderState(name=name, step=self.names.step_of(name), url=url, status="unreadable")
        try:
            found = self._looked(self.open(deadline, name), found)
        except CheckpointError as error:
            if isinstance(error, StorageError) and error.kind != "permission":
                raise
            found = replace(found, problem=error)
        self.forget(name)
        if found.status in {"committed", "empty", "foreign"}:
            self._seen[name] = found
        return self._judged(found)

    def _looked(self, store: Store, found: FolderState) -> FolderState:
        slots, url = slotlog.read_log(store), found.url
        if slots.head is not None:
            info = CheckpointInfo.of(url, slots.head, name=found.name)
            info = info if self._recorded_steps else replace(info, step=found.step)
            return replace(found, status="committed", info=info, slot=slots.head.slot)
        if is_foreign(store, slots):
            named = read_footer(store) if slots.last is None else None
            if named is not None:
                raise IntegrityError(
                    f"{url} has .metadata of save {named.save_id} but no commits/ folder.",
                    path=COMMITS,
                    next_step="Copy the whole checkpoint, commits/ included.",
                )
            info = CheckpointInfo(url=url, name=found.name, format="dcp", step=found.step)
            return replace(found, status="foreign", info=info)
        entries = or_none_if_absent(lambda: store.list("", recursive=False)) or []
        paths = {entry.path for entry in entries if not entry.path.startswith(PROBE_PREFIX)}
        paths.discard(f"{COMMITS}/")
        is_empty = not paths or (paths == {f"{SAVES}/"} and not store.list(SAVES))
        return replace(found, status="empty" if is_empty else "uncommitted", slot=slots.last_slot)

    def _judged(self, found: FolderState) -> FolderState:
        is_damaged = self._verdicts.get((found.name, found.save_id)) is False
        return replace(found, is_damaged=is_damaged)

    def dated(
        self, found: Iterable[FolderState], deadline: Deadline, now_s: float
    ) -> list[FolderState]:
        """Return the same with the ages of their slots up to `now_s`; asks once for each slot."""
        everything = {(one.name, one.save_id, one.slot): one for one in found}
        times_s = self._slot_times_s

        def ask(name: str, save_id: str | None, slot: int) -> None:
            stat = slotlog.stat_or_none(self.open(deadline, name), slot_path(slot))
            times_s[name, save_id, slot] = None if stat is None else stat.modified_s

        missing = [key for key in everything if key[-1] and key not in times_s]
        self._all([partial(ask, *key) for key in missing], deadline)
        return [
            one if (time_s := times_s.get(key)) is None else replace(one, age_s=now_s - time_s)
            for key, one in everything.items()
        ]

    def newest_first(self, deadline: Deadline) -> Iterator[tuple[Root, FolderState]]:
        """Yield this root and what is found of each step, newest first, but doubles."""
        doubles, steps = self.doubles(), self.steps(self.folders(deadline))
        names = [name for name in reversed(steps) if name not in doubles]
        count = 1
        while names:
            batch, names = names[:count], names[count:]
            for found in self.look(batch, deadline, fresh=True).values():
                yield self, found
            count = _BATCH_COUNT

    def links(self) -> dict[str, str | None]:
        """Return the symbolic links at a local root, with the folder of the root they lead into.

        None: they lead elsewhere. Links to files count too: one may mean the weights of an export.
        """
        if not self.location.is_local:
            return {}
        root = Path(os.path.realpath(self.location.path))
        try:
            with os.scandir(root) as entries:
                links = [entry for entry in entries if entry.is_symlink()]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StorageError(
                f"{self.location.url}: {error.strerror}; which links are there cannot be told.",
                path=self.location.url,
                next_step="Look why the root cannot be listed.",
            ) from error
        meant = {link.name: Path(os.path.realpath(link)) for link in links}
        return {
            name: path.relative_to(root).parts[0] if root in path.parents else None
            for name, path in meant.items()
        }

    def doubles(self) -> set[str]:
        """Return the links that lead to a step of this root: what they mean counts by itself."""
        step_of = self.names.step_of
        return {name for name, to in self.links().items() if to and step_of(to) is not None}

    def is_sound(self, info: CheckpointInfo, deadline: Deadline, *, deep: bool = False) -> bool:
        """Return, and note, whether a checkpoint is sound; it is checked unless that is known."""
        if self._verdicts.get((info.name, info.save_id)) and not deep:
            return True
        why = "it was saved anew"
        try:
            store = self.open(deadline, info.name)
            if check_part(store, deep=deep) == info.save_id:
                self.found_sound(info.name, info.save_id)
                return True
        except USELESS as error:
            why = str(error)
        self.found_damaged(info, why)
        return False

    def found_sound(self, name: str, save_id: str | None) -> None:
        """Note that a checkpoint is sound."""
        self._verdicts[name, save_id] = True

    def found_damaged(self, info: CheckpointInfo, why: str) -> None:
        """Note that a checkpoint is damaged: no policy counts it any more."""
        log.warning("%s is not counted as a checkpoint: %s", info.url, why)
        if info.save_id is not None:
            self._verdicts[info.name, info.save_id] = False

    def damaged_ids(self, name: str) -> frozenset[str]:
        """Return the saves under a name that are known to be damaged."""
        verdicts = dict(self._verdicts)
        return frozenset(i for n, i in verdicts if n == name and i and not verdicts[n, i])

    def _all(self, calls: Sequence[Callable[[], T]], deadline: Deadline) -> list[T]:
        is_remote = self.open(deadline).capabilities.is_remote
        return some_at_once(calls, _REMOTE_THREADS if is_remote else _LOCAL_THREADS)


def newest_first(roots: Sequence[Root], deadline: Deadline) -> Iterator[tuple[Root, FolderState]]:
    """Yield each step with its root, newest first; of one step the later save first."""
    streams = [root.newest_first(deadline) for root in roots]
    return heapq.merge(*streams, key=lambda one: (-(one[1].step or 0), -begun_s(one[1].info)))


def newest_of(roots: Sequence[Root], deadline: Deadline) -> CheckpointInfo | None:
    """Return the newest committed one that is not known to be damaged."""
    for _, found in newest_first(roots, deadline):
        damage = damage_of(found)
        if damage is not None:
            log.warning("%s is passed over, and an older one is taken: %s", found.url, damage)
        if found.info is not None and not found.is_damaged:
            return found.info
    return None


def all_of(roots: Sequence[Root], deadline: Deadline) -> list[CheckpointInfo]:
    """Return what is committed below all roots, by step; of each name the save that began last."""
    infos = list[CheckpointInfo]()
    # Of two that are the same save, that of the first root comes last.
    for root in reversed(roots):
        doubles = root.doubles()
        names = [name for name in root.folders(deadline) if name not in doubles]
        infos += filter(None, map(listed, root.look(names, deadline, fresh=True).values()))
    by_name = {info.name: info for info in sorted(infos, key=begun_s)}
    return sorted(by_name.values(), key=by_step)


def list_checkpoints(
    root_url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
) -> list[CheckpointInfo]:
    """Return the committed checkpoints directly below a root, ordered by name.

    Whether one is committed is read from its commit slots, never from a listing; the listing
    only tells which folders to ask. The order is that of the names, numbers in them counted as
    numbers (`step-900` before `step-1000`); `CheckpointManager.latest` returns the highest step.
    A root that is not there holds none. Any rank; not collective.

    A folder that may not be read is listed with the format "unreadable" and its `problem`: it may
    be the newest checkpoint. One whose commit records are damaged or of a newer format is left out
    with a warning in the log; `verify` says what is wrong with it.

    Raises `StorageError`, `PhaseTimeoutError`, `InvalidInputError`.
    """
    location, timeouts = Location.of(root_url, storage_options), Timeouts.of(timeout)
    root = Root(location, StepNames(), timeouts=timeouts, retry=retry, recorded_steps=True)
    deadline, infos = Deadline("load", timeouts.load), list[CheckpointInfo]()
    names = sorted(root.folders(deadline), key=natural)
    for one in root.look(names, deadline, fresh=True).values():
        if isinstance(one.problem, StorageError):
            url, why = one.url, str(one.problem)
            infos.append(CheckpointInfo(url=url, name=one.name, format="unreadable", problem=why))
        elif (info := listed(one)) is not None:
            infos.append(info)
    return infos


def listed(found: FolderState) -> CheckpointInfo | None:
    """Return what is told of a folder in a list; warn if it cannot be read."""
    if found.problem is not None:
        log.warning("%s is left out of the list: %s", found.url, found.problem)
    return found.info


class Uses:
    """Which names this process uses: one is used by many, or deleted by one. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._uses: dict[object, tuple[str, str]] = {}

    def take(self, name: str, by: str, *, timeout_s: float) -> Callable[[], None]:
        """Note that `name` is used, and return what ends the use; waits while it is deleted."""
        use = object()
        with self._changed:
            if not self._changed.wait_for(lambda: self.now().get(name) != _DELETING, timeout_s):
                raise PhaseTimeoutError(
                    f"{name} is being deleted by this manager, and was for {timeout_s:g} s.",
                    timeout_s=timeout_s,
                    phase="plan",
                    next_step="Look why the storage is slow; then try again.",
                )
            self._uses[use] = (name, by)
        return partial(self._end, use)

    def _end(self, use: object) -> None:
        with self._changed:
            self._uses.pop(use, None)
            self._changed.notify_all()

    @contextmanager
    def deleting(self, name: str) -> Iterator[bool]:
        """Keep `name` from being used inside the block; False, where it is used, gives no leave."""
        with self._changed:
            may = name not in self.now()
            end = self.take(name, _DELETING, timeout_s=0.0) if may else lambda: None
        try:
            yield may
        finally:
            end()

    def now(self) -> dict[str, str]:
        """Return the names that are used, each with by whom."""
        with self._changed:
            return dict(self._uses.values())


def damage_of(found: FolderState) -> IntegrityError | None:
    """Return the damage for which whoever resumes takes an older one; None without one.

    That this release is too old, or lacks a right, is raised: another job would resume from it.
    """
    if found.problem is None or isinstance(found.problem, IntegrityError):
        return found.problem
    raise found.problem
