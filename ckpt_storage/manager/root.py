"""What lies below the root of a run: its checkpoints, links, and what this process does there.

Reads only. Keeps what it has read of a checkpoint until somebody asks anew.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckpt_storage.commit import slotlog
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.publishing import is_foreign, read_footer
from ckpt_storage.errors import CheckpointError, IntegrityError, PhaseTimeoutError, StorageError
from ckpt_storage.format.names import COMMITS, PROBE_PREFIX, SAVES, slot_path
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import Workers

from .names import StepNames
from .retention import Found, Status, by_step

_REMOTE_THREADS = 16
_LOCAL_THREADS = 4
_BATCH_COUNT = 8
_LASTING: frozenset[Status] = frozenset({"committed", "empty", "foreign"})

log = logging.getLogger("ckpt_storage")


class Root:
    """The checkpoints below one root; any thread may use it.

    `uses` are the names that this process reads, writes or deletes now.
    """

    def __init__(
        self,
        location: Location,
        names: StepNames,
        *,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        thread_count: int | None = None,
    ) -> None:
        self.location = location
        self.names = names
        self.uses = Uses()
        self.retry = retry or RetryPolicy()
        self._timeouts = timeouts or Timeouts()
        self._thread_count = thread_count or (
            _LOCAL_THREADS if location.is_local else _REMOTE_THREADS
        )
        self._lock = threading.Lock()
        self._seen: dict[str, Found] = {}
        self._committed_s: dict[tuple[str, str | None], float | None] = {}
        self._misnamed: set[tuple[str, str | None]] = set()
        self._sound: set[tuple[str, str | None]] = set()
        self._damaged: set[tuple[str, str | None]] = set()

    def open(self, deadline: Deadline, name: str | None = None) -> Store:
        """Return the store at the root, or at one checkpoint."""
        place = self.location if name is None else self.location.child(name)
        return open_store(place, timeouts=self._timeouts, retry=self.retry).bounded(deadline)

    def folders(self, deadline: Deadline) -> list[str]:
        """Return the names of all folders, by one listing; [] without a root."""
        try:
            entries = self.open(deadline).list("", recursive=False)
        except StorageError as error:
            if error.kind == "not-found":
                return []
            raise
        found = {entry.path.rstrip("/") for entry in entries if entry.path.endswith("/")}
        with self._lock:
            for name in self._seen.keys() - found:
                del self._seen[name]
        return sorted(found)

    def steps(self, folders: Iterable[str]) -> list[tuple[int, str]]:
        """Return those of `folders` that are named after a step, as (step, name), oldest first."""
        found = [(self.names.step_of(name), name) for name in folders]
        return sorted((step, name) for step, name in found if step is not None)

    def look(self, names: Sequence[str], deadline: Deadline, *, fresh: bool) -> dict[str, Found]:
        """Look at folders, several at a time; two reads for a checkpoint that was saved once.

        Without `fresh`, what was seen before will do; else one listing finds deleted ones first.
        Raises `StorageError`, `PhaseTimeoutError`.
        """
        with self._lock:
            found = {
                name: self._seen[name]
                for name in names
                if not fresh and name in self._seen and self._seen[name].status in _LASTING
            }
        missing = [name for name in names if name not in found]

        def one(name: str) -> None:
            found[name] = self.look_at(name, deadline, lists=not fresh)

        self._all([partial(one, name) for name in missing], "look at", deadline)
        return {name: self._judged(found[name]) for name in names}

    def look_at(self, name: str, deadline: Deadline, *, lists: bool = False) -> Found:
        """Look at one folder anew. Raises `StorageError`, but for a missing right."""
        step = self.names.step_of(name)
        try:
            found = self._found(self.open(deadline, name), name, step, lists=lists)
        except CheckpointError as error:
            if isinstance(error, StorageError) and error.kind != "permission":
                raise
            found = Found(name=name, step=step, status="unreadable", problem=error)
        with self._lock:
            self._seen[name] = found
        return self._judged(found)

    def _found(self, store: Store, name: str, step: int | None, *, lists: bool) -> Found:
        entries = _entries(store) if lists else None
        if entries is not None and not entries - {f"{COMMITS}/"}:
            return Found(name=name, step=step, status="empty")
        slots, url = slotlog.read_log(store), self.location.child(name).url
        if slots.head is not None:
            info = CheckpointInfo.of(url, slots.head, name=name)
            self._warn_of_name(info, step)
            # The name counts: it is what the order and the policies go by.
            return Found(name=name, step=step, status="committed", info=replace(info, step=step))
        if is_foreign(store, slots):
            named = read_footer(store) if slots.last is None else None
            if named is not None:
                raise IntegrityError(
                    f"{url} has .metadata of save {named.save_id} but no commits/ folder.",
                    path=COMMITS,
                    next_step="Copy the whole checkpoint, commits/ included.",
                )
            info = CheckpointInfo(url=url, name=name, format="dcp", step=step)
            return Found(name=name, step=step, status="foreign", info=info)
        entries = _entries(store) if entries is None else entries
        if f"{SAVES}/" in entries and not store.list(SAVES):
            entries.discard(f"{SAVES}/")
        is_empty = not entries - {f"{COMMITS}/"}
        return Found(name=name, step=step, status="empty" if is_empty else "uncommitted")

    def _judged(self, found: Found) -> Found:
        is_damaged = found.info is not None and _save(found.info) in self._damaged
        return replace(found, is_damaged=is_damaged)

    def _warn_of_name(self, info: CheckpointInfo, step: int | None) -> None:
        """Warn, once in a process, if a folder has the name of another step than was saved."""
        if step is None or info.step is None or info.step == step:
            return
        with self._lock:
            is_new = _save(info) not in self._misnamed
            self._misnamed.add(_save(info))
        if is_new:
            log.warning(
                "%s was saved as step %d. It was renamed or copied; its name counts, so it is "
                "listed, kept and restored as step %d.",
                info.url,
                info.step,
                step,
            )

    def dated(self, found: Iterable[Found], deadline: Deadline, now_s: float) -> list[Found]:
        """Return the same with ages up to `now_s`, by the storage's clock; one request each, once.

        `now_s` is Unix seconds. What the storage does not tell stays None.
        """
        everything = list(found)
        infos = [one.info for one in everything if one.info is not None and one.info.slot]

        def ask(info: CheckpointInfo) -> None:
            try:
                stat = self.open(deadline, info.name).stat(slot_path(info.slot or 0))
            except StorageError as error:
                if error.kind != "not-found":
                    raise
                self._committed_s[_save(info)] = None
            else:
                self._committed_s[_save(info)] = stat.modified_s

        missing = [info for info in infos if _save(info) not in self._committed_s]
        self._all([partial(ask, info) for info in missing], "date", deadline)
        dated = []
        for one in everything:
            time_s = None if one.info is None else self._committed_s.get(_save(one.info))
            dated.append(one if time_s is None else replace(one, age_s=now_s - time_s))
        return dated

    def all(self, deadline: Deadline) -> list[CheckpointInfo]:
        """Return all that is committed, by step; what has none comes first.

        Left out are links to steps of this root, and with a warning in the log what cannot be read.
        """
        folders, doubles = self.folders(deadline), self._doubles()
        looked = self.look([one for one in folders if one not in doubles], deadline, fresh=True)
        for found in looked.values():
            if found.problem is not None:
                url = self.location.child(found.name).url
                log.warning("%s is left out of the list: %s", url, found.problem)
        infos = [found.info for found in looked.values() if found.info is not None]
        return sorted(infos, key=by_step)

    def newest_first(self, deadline: Deadline) -> Iterator[Found]:
        """Yield what is found of each step, newest first; looks at a few at a time.

        A link to a step of this root is none of its own, whatever its name says.
        """
        doubles = self._doubles()
        names = [name for _, name in self.steps(self.folders(deadline)) if name not in doubles][
            ::-1
        ]
        count = 1
        while names:
            batch, names = names[:count], names[count:]
            yield from self.look(batch, deadline, fresh=True).values()
            count = _BATCH_COUNT

    def links(self) -> dict[str, str | None]:
        """Return the symbolic links at the root, with the folder of the root they lead into.

        None: they lead elsewhere. Links to files count too: one may mean the weights of an export.
        {} where the storage is no file system of this machine. Raises `StorageError`.
        """
        if not self.location.is_local:
            return {}
        root = os.path.realpath(self.location.path)
        try:
            with os.scandir(root) as entries:
                names = [entry.name for entry in entries if entry.is_symlink()]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StorageError(
                f"{self.location.url}: {error.strerror}; which links are there cannot be told.",
                path=self.location.url,
                next_step="Look why the root cannot be listed.",
            ) from error
        found: dict[str, str | None] = {}
        for name in names:
            # Not to be normalised before links are followed.
            path = os.path.realpath(os.path.join(root, name))  # noqa: PTH118
            below = path.removeprefix(root.rstrip(os.sep) + os.sep)
            found[name] = None if below == path else Path(below).parts[0]
        return found

    def _doubles(self) -> set[str]:
        """Return the links that lead to a step of this root: what they mean counts by itself."""
        return {
            name
            for name, target in self.links().items()
            if target is not None and self.names.step_of(target) is not None
        }

    def forget(self, name: str) -> None:
        """Forget a folder: somebody changed it."""
        with self._lock:
            self._seen.pop(name, None)

    def may_hold_leftovers(self, name: str) -> bool:
        """Return whether nothing was committed under a name when it was seen last."""
        with self._lock:
            return name in self._seen and self._seen[name].status == "uncommitted"

    def is_sound(self, info: CheckpointInfo) -> bool:
        """Return whether a checkpoint was saved, loaded or checked here, and found sound.

        A copy keeps the save id, and may be damaged alone: the name counts as well.
        """
        return _save(info) in self._sound

    def found_sound(self, name: str, save_id: str | None) -> None:
        """Note that a checkpoint is sound."""
        self._sound.add((name, save_id))

    def found_damaged(self, info: CheckpointInfo, why: str) -> None:
        """Note that a checkpoint is damaged: no policy counts it any more."""
        log.warning("%s is not counted as a checkpoint: %s", info.url, why)
        if info.save_id is not None:
            self._damaged.add(_save(info))
            self._sound.discard(_save(info))

    def damaged_ids(self, name: str) -> frozenset[str]:
        """Return the saves under a name that are known to be damaged."""
        return frozenset(save_id or "" for one, save_id in list(self._damaged) if one == name)

    def _all(self, jobs: Sequence[Callable[[], None]], what: str, deadline: Deadline) -> None:
        count = min(self._thread_count, len(jobs))
        if count <= 1:
            for job in jobs:
                job()
            return
        with Workers(count, name=f"{what} {self.location.url}", deadline=deadline) as workers:
            for job in jobs:
                workers.submit(job)
            workers.drain()


class Uses:
    """Which names this process uses: one is used by many, or deleted by one. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._uses: dict[str, list[str]] = {}
        self._deleting: set[str] = set()

    def take(self, name: str, by: str, *, timeout_s: float) -> Callable[[], None]:
        """Note that `name` is used, and return what ends the use; waits while it is deleted.

        `by` says so in a plan ("it is being saved"). Raises `PhaseTimeoutError`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: name not in self._deleting, timeout_s):
                raise PhaseTimeoutError(
                    f"{name} is being deleted by this manager, and was for {timeout_s:g} s.",
                    timeout_s=timeout_s,
                    phase="plan",
                    next_step="Look why the storage is slow; then try again.",
                )
            users = self._uses.setdefault(name, [])
            users.append(by)
        left = [by]

        def end() -> None:
            with self._changed:
                if left:
                    users.remove(left.pop())

        return end

    @contextmanager
    def deleting(self, name: str) -> Iterator[bool]:
        """Keep `name` from being used inside the block; False, where it is used, gives no leave."""
        with self._changed:
            may = not self._uses.get(name) and name not in self._deleting
            if may:
                self._deleting.add(name)
        try:
            yield may
        finally:
            if may:
                with self._changed:
                    self._deleting.discard(name)
                    self._changed.notify_all()

    def now(self) -> dict[str, str]:
        """Return the names that are used, each with by whom."""
        with self._changed:
            return {name: users[0] for name, users in self._uses.items() if users}


def damage_of(found: Found) -> IntegrityError | None:
    """Return why whoever resumes passes over an unreadable folder; None if it is not unreadable.

    Damage is one reason to take an older one. That this release is too old, or lacks a right, is
    not: the same job would resume elsewhere from a newer one. Then it raises what is wrong.
    """
    if found.problem is None or isinstance(found.problem, IntegrityError):
        return found.problem
    raise found.problem


def _save(info: CheckpointInfo) -> tuple[str, str | None]:
    return (info.name, info.save_id)


def _entries(store: Store) -> set[str]:
    try:
        entries = store.list("", recursive=False)
    except StorageError as error:
        if error.kind != "not-found":
            raise
        return set()
    return {entry.path for entry in entries if not entry.path.startswith(PROBE_PREFIX)}
