"""What lies below a root, checkpoint by checkpoint, as far as somebody asked.

Keeps what it has read: slot records never change, only the head moves on.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ckpt_storage.commit import slotlog
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.stockfooter import is_foreign, read_footer
from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.names import COMMITS, PROBE_PREFIX, SAVES, slot_path
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import Workers

from .stepnames import StepNames

_REMOTE_THREADS = 16
_LOCAL_THREADS = 4
_BATCH_COUNT = 8

log = logging.getLogger("ckpt_storage")

Status = Literal["committed", "foreign", "uncommitted", "empty", "unreadable"]
Freshness = Literal["now", "since", "ever"]
"""now: the slots are read anew. since: from the highest slot that is known on. ever: what was
read once will do; whoever acts on it looks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen of one folder.

    committed: `info` is of its head. foreign: another tool committed it. uncommitted: nothing is
    committed, or it was deleted, and something lies there. empty: nothing does, or only slots.
    unreadable: `problem` says why.
    """

    name: str
    status: Status
    info: CheckpointInfo | None = None
    last: SlotRecord | None = None
    problem: CheckpointError | None = None


class Census:
    """The checkpoints below one root. May be used from any thread."""

    def __init__(
        self,
        location: Location,
        names: StepNames,
        *,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        thread_count: int | None = None,
    ) -> None:
        self._thread_count = thread_count or (
            _LOCAL_THREADS if location.is_local else _REMOTE_THREADS
        )
        self.location = location
        self.names = names
        self._timeouts = timeouts or Timeouts()
        self._retry = retry or RetryPolicy()
        self._lock = threading.Lock()
        self._seen: dict[str, Sight] = {}
        self._times_s: dict[tuple[str, str | None], float | None] = {}
        self._misnamed: set[tuple[str, str | None]] = set()

    def root(self, deadline: Deadline) -> Store:
        """Return the store at the root."""
        return self._open(self.location, deadline)

    def store(self, name: str, deadline: Deadline) -> Store:
        """Return the store at one checkpoint."""
        return self._open(self.location.child(name), deadline)

    def _open(self, location: Location, deadline: Deadline) -> Store:
        return open_store(location, timeouts=self._timeouts, retry=self._retry).bounded(deadline)

    def folders(self, deadline: Deadline) -> list[str]:
        """Return the names of all folders below the root, by one listing; [] without a root."""
        try:
            entries = self.root(deadline).list("", recursive=False)
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

    def look(
        self,
        names: Sequence[str],
        deadline: Deadline,
        *,
        freshness: Freshness = "now",
        lists: bool = False,
    ) -> dict[str, Sight]:
        """Look at these folders, several at a time; raises `StorageError`, `PhaseTimeoutError`.

        "now" costs two reads for a checkpoint saved once, "since" one, "ever" none, once known.
        With `lists` a listing comes first: it tells a deleted one, of which only slots are left,
        without reading them.
        """
        with self._lock:
            known = {name: self._seen[name] for name in names if name in self._seen}
        settled = {"committed", "empty", "foreign"}
        found = {
            name: sight
            for name, sight in known.items()
            if freshness == "ever" and sight.status in settled
        }
        missing = [name for name in names if name not in found]

        def one(name: str) -> None:
            last = known[name].last if freshness == "since" and name in known else None
            found[name] = self.look_at(name, deadline, known=last, lists=lists)

        self._all([partial(one, name) for name in missing], "look at", deadline)
        return {name: found[name] for name in names}

    def look_at(
        self,
        name: str,
        deadline: Deadline,
        *,
        known: SlotRecord | None = None,
        lists: bool = False,
    ) -> Sight:
        """Look at one folder, as `look`; `known` is a record from which on slots are read."""
        store = self.store(name, deadline)
        try:
            sight = self._sight(store, name, known, lists=lists)
        except CheckpointError as error:
            if isinstance(error, StorageError) and error.kind != "permission":
                raise
            sight = Sight(name=name, status="unreadable", problem=error)
        with self._lock:
            self._seen[name] = sight
        return sight

    def _sight(self, store: Store, name: str, known: SlotRecord | None, *, lists: bool) -> Sight:
        entries = _entries(store) if lists else None
        if entries is not None and not entries - {f"{COMMITS}/"}:
            return Sight(name=name, status="empty")
        found = slotlog.read_log(store, known=known)
        location, step = self.location.child(name), self.names.step_of(name)
        if found.head is not None:
            info = CheckpointInfo.of(location.url, found.head, name=name)
            self._compare(info, step)
            # The name counts: it is what the order and the policies go by.
            info = dataclasses.replace(info, step=step)
            return Sight(name=name, status="committed", info=info, last=found.last)
        if is_foreign(store, found):
            named = read_footer(store) if found.last is None else None
            if named is not None:
                raise IntegrityError(
                    f"{location.url} has .metadata of save {named.save_id} but no commits/ folder.",
                    path=COMMITS,
                    next_step="Copy the whole checkpoint, commits/ included.",
                )
            info = CheckpointInfo(url=location.url, name=name, format="dcp", step=step)
            return Sight(name=name, status="foreign", info=info)
        entries = _entries(store) if entries is None else entries
        if f"{SAVES}/" in entries and not store.list(SAVES):
            entries.discard(f"{SAVES}/")
        if not entries - {f"{COMMITS}/"}:
            return Sight(name=name, status="empty", last=found.last)
        return Sight(name=name, status="uncommitted", last=found.last)

    def _compare(self, info: CheckpointInfo, step: int | None) -> None:
        """Warn, once in a process, if a folder has the name of another step than was saved."""
        if step is None or info.step is None or info.step == step:
            return
        with self._lock:
            is_new = (info.name, info.save_id) not in self._misnamed
            self._misnamed.add((info.name, info.save_id))
        if is_new:
            log.warning(
                "%s was saved as step %d. It was renamed or copied; its name counts, so it is "
                "listed, kept and restored as step %d.",
                info.url,
                info.step,
                step,
            )

    def all(self, deadline: Deadline) -> list[CheckpointInfo]:
        """Return all that is committed, by step; what has none comes first.

        Left out are links to steps of this root, and with a warning in the log what cannot be read.
        """
        folders = self.folders(deadline)
        doubles = self.doubles()
        own = [name for name in folders if name not in doubles]
        sights = self.look(own, deadline, freshness="since")
        for sight in sights.values():
            if sight.problem is not None:
                url = self.location.child(sight.name).url
                log.warning("%s is left out of the list: %s", url, sight.problem)
        infos = [sight.info for sight in sights.values() if sight.info is not None]
        return sorted(infos, key=lambda i: (-1 if i.step is None else i.step, i.name))

    def newest(
        self, deadline: Deadline, *, besides: Collection[tuple[str, str]]
    ) -> CheckpointInfo | None:
        """Return the newest committed one that is not among `besides`, by name and save id.

        One that cannot be read is passed over or raised by the rule of `damage_of`.
        """
        for sight in self.downwards(deadline):
            damage = damage_of(sight)
            if damage is not None:
                url = self.location.child(sight.name).url
                log.warning("%s is passed over, and an older one is taken: %s", url, damage)
            info = sight.info
            if info is not None and (info.name, info.save_id) not in besides:
                return info
        return None

    def downwards(self, deadline: Deadline) -> Iterator[Sight]:
        """Yield what is seen of each step, newest first; looks at a few at a time.

        A link to a step of this root is none of its own, whatever its name says.
        """
        steps = self.steps(self.folders(deadline))
        doubles = self.doubles()
        names = [name for _, name in reversed(steps) if name not in doubles]
        count = 1
        while names:
            batch, names = names[:count], names[count:]
            yield from self.look(batch, deadline).values()
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

    def doubles(self) -> set[str]:
        """Return the links that lead to a step of this root: what they mean counts by itself."""
        return {
            name
            for name, target in self.links().items()
            if target is not None and self.names.step_of(target) is not None
        }

    def unsettled(self) -> set[str]:
        """Return the names under which nothing was committed when they were seen last."""
        with self._lock:
            return {name for name, sight in self._seen.items() if sight.status == "uncommitted"}

    def forget(self, name: str) -> None:
        """Forget a folder: somebody changed it."""
        with self._lock:
            self._seen.pop(name, None)

    def settle(self, name: str) -> None:
        """Note that nothing is left in a folder that this process could free."""
        with self._lock:
            self._seen[name] = Sight(name=name, status="empty")

    def committed_s(
        self, infos: Sequence[CheckpointInfo], deadline: Deadline
    ) -> dict[str, float | None]:
        """Return by name when each was committed, by the storage's clock; None: it does not tell.

        One request each, once.
        """

        def one(info: CheckpointInfo) -> None:
            store = self.store(info.name, deadline)
            try:
                time_s = store.stat(slot_path(info.slot or 0)).modified_s
            except StorageError as error:
                if error.kind != "not-found":
                    raise
                time_s = None
            with self._lock:
                self._times_s[info.name, info.save_id] = time_s

        with self._lock:
            missing = [info for info in infos if (info.name, info.save_id) not in self._times_s]
        self._all([partial(one, info) for info in missing], "date", deadline)
        with self._lock:
            return {info.name: self._times_s[info.name, info.save_id] for info in infos}

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


def damage_of(sight: Sight) -> IntegrityError | None:
    """Return why whoever resumes passes over an unreadable folder; None if it is not unreadable.

    Damage is one reason to take an older one. That this release is too old, or lacks a right, is
    not: the same job would resume elsewhere from a newer one. Then it raises what is wrong.
    """
    if sight.problem is None or isinstance(sight.problem, IntegrityError):
        return sight.problem
    raise sight.problem


def _entries(store: Store) -> set[str]:
    try:
        entries = store.list("", recursive=False)
    except StorageError as error:
        if error.kind != "not-found":
            raise
        return set()
    return {entry.path for entry in entries if not entry.path.startswith(PROBE_PREFIX)}
