"""The folders below the root of a run: reads them, and keeps what it has read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ckpt_storage.commit import slotlog
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.publishing import is_foreign, read_footer
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    IntegrityError,
    StorageError,
)
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.names import COMMITS, PROBE_PREFIX, SAVES, slot_path
from ckpt_storage.inspect.verify import check_part
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer import objects
from ckpt_storage.transfer.objects import or_none_if_absent
from ckpt_storage.transfer.workers import some_at_once

from .folders import FolderState
from .names import StepNames
from .names_in_use import NamesInUse
from .usage import read_usage

UNUSABLE = (CheckpointGoneError, CheckpointInProgressError, CheckpointNotFoundError, IntegrityError)
"""Errors after which a resuming run takes another checkpoint."""

_BATCH_COUNT = 8
_REMOTE_THREADS = 16
_LOCAL_THREADS = 4

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")


def _age_slot(head: SlotRecord) -> int:
    """Return the slot from which the age of a checkpoint counts: thinning changes no age."""
    slot = head.part.get("slot") if head.is_thinned else None
    return slot if isinstance(slot, int) and 0 < slot < head.slot else head.slot


class Root:
    """The folders below one root.

    Steps are those of the names, or with `recorded_steps` those of the commit records. With `usage`
    the manifest of each checkpoint is read for `CheckpointInfo.usage`. `in_use` are the names that
    this process uses; `base` names the checkpoint whose files the next save may reuse;
    `damage_count` is how often damage was found.
    """

    def __init__(
        self,
        location: Location,
        names: StepNames,
        *,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        recorded_steps: bool = False,
        usage: bool = False,
    ) -> None:
        self.location = location
        self.names = names
        self.in_use = NamesInUse()
        self.base: str | None = None
        self.damage_count = 0
        self.retry = retry or RetryPolicy()
        self.timeouts = timeouts or Timeouts()
        self._recorded_steps = recorded_steps
        self._reads_usage = usage
        self._states: dict[str, FolderState] = {}
        # By name and save id: a copy keeps the id, and may be damaged alone.
        self._slot_times_s: dict[tuple[str, str | None, int], float | None] = {}
        self._soundness: dict[tuple[str, str | None], bool] = {}

    def open(self, deadline: Deadline, name: str | None = None) -> Store:
        """Return the store at the root, or at one checkpoint."""
        place = self.location if name is None else self.location.child(name)
        return open_store(place, timeouts=self.timeouts, retry=self.retry).bounded(deadline)

    def list_folders(self, deadline: Deadline) -> list[str]:
        """Return the names of all folders, by one listing; [] without a root."""
        try:
            entries = self.open(deadline).list("", recursive=False)
        except StorageError as error:
            if error.kind == "not-found":
                return []
            raise
        names = sorted({entry.path.rstrip("/") for entry in entries if entry.path.endswith("/")})
        for name in self.known_names().difference(names):
            self.forget(name)
        return names

    def list_own_folders(self, deadline: Deadline) -> list[str]:
        """Return the names without links to steps of this root, which count under their own."""
        targets = self.links()
        return [
            name
            for name in self.list_folders(deadline)
            if (target := targets.get(name)) is None or self.names.step_of(target) is None
        ]

    def steps_of(self, folders: Iterable[str]) -> list[str]:
        """Return those of `folders` that are named after a step, lowest step first."""
        pairs = ((self.names.step_of(name), name) for name in folders)
        return [name for _, name in sorted(pair for pair in pairs if pair[0] is not None)]

    def known_names(self) -> set[str]:
        """Return the names of the folders whose state is kept."""
        return set(self._states.copy())

    def forget(self, name: str) -> None:
        """Forget the state of a folder that was changed."""
        self._states.pop(name, None)

    def read_states(
        self, names: Sequence[str], deadline: Deadline, *, fresh: bool
    ) -> dict[str, FolderState]:
        """Return states by name; read, several at a time, those not kept, or all if `fresh`."""
        states = {} if fresh else self._states.copy()
        missing = [name for name in names if name not in states]
        reads = [partial(self.read_state, name, deadline) for name in missing]
        states |= zip(missing, self._run_all(reads, deadline), strict=True)
        return {name: self._with_soundness(states[name]) for name in names}

    def read_state(self, name: str, deadline: Deadline) -> FolderState:
        """Read the state of one folder. Raises `StorageError`, but not for a missing right."""
        url = self.location.child(name).url
        state = FolderState(name=name, step=self.names.step_of(name), url=url, status="unreadable")
        try:
            state = self._read(self.open(deadline, name), state)
        except CheckpointError as error:
            if isinstance(error, StorageError) and error.kind != "permission":
                raise
            state = replace(state, problem=error)
        self.forget(name)
        if state.status in {"committed", "empty", "foreign"}:
            self._states[name] = state
        return self._with_soundness(state)

    def _read(self, store: Store, state: FolderState) -> FolderState:
        slots, url = slotlog.read_log(store), state.url
        if slots.head is not None:
            info = CheckpointInfo.of(url, slots.head, name=state.name)
            info = info if self._recorded_steps else replace(info, step=state.step)
            if self._reads_usage:
                place = self.location.child(state.name)
                info = replace(info, usage=read_usage(store, slots.head, place))
            return replace(state, status="committed", info=info, slot=_age_slot(slots.head))
        if is_foreign(store, slots):
            footer = read_footer(store) if slots.last is None else None
            if footer is not None:
                if slotlog.read_log(store).last is not None:
                    # The save was committed after the log was read.
                    return self._read(store, state)
                raise IntegrityError(
                    f"{url} has .metadata of save {footer.save_id} but no commits/ folder.",
                    path=COMMITS,
                    next_step="Copy the whole checkpoint, commits/ included.",
                )
            info = CheckpointInfo(url=url, name=state.name, format="dcp", step=state.step)
            return replace(state, status="foreign", info=info)
        entries = or_none_if_absent(lambda: store.list("", recursive=False)) or []
        paths = {entry.path for entry in entries if not entry.path.startswith(PROBE_PREFIX)}
        paths.discard(f"{COMMITS}/")
        is_empty = not paths or (paths == {f"{SAVES}/"} and not store.list(SAVES))
        return replace(state, status="empty" if is_empty else "uncommitted", slot=slots.last_slot)

    def _with_soundness(self, state: FolderState) -> FolderState:
        is_damaged = self._soundness.get((state.name, state.save_id)) is False
        return replace(state, is_damaged=is_damaged)

    def with_ages(
        self, states: Iterable[FolderState], deadline: Deadline, now_s: float
    ) -> list[FolderState]:
        """Return the same states with the ages of their slots at `now_s`; reads each slot once."""
        by_slot = {(state.name, state.save_id, state.slot): state for state in states}
        times_s = self._slot_times_s

        def read_time(name: str, save_id: str | None, slot: int) -> None:
            stat = objects.stat_or_none(self.open(deadline, name), slot_path(slot))
            times_s[name, save_id, slot] = None if stat is None else stat.modified_s

        missing = [key for key in by_slot if key[-1] and key not in times_s]
        self._run_all([partial(read_time, *key) for key in missing], deadline)
        return [
            state if (time_s := times_s.get(key)) is None else replace(state, age_s=now_s - time_s)
            for key, state in by_slot.items()
        ]

    def newest_first(self, deadline: Deadline) -> Iterator[tuple[Root, FolderState]]:
        """Yield this root and the state of each step, newest first, without links to steps."""
        names, count = self.steps_of(self.list_own_folders(deadline))[::-1], 1
        while names:
            batch, names = names[:count], names[count:]
            for state in self.read_states(batch, deadline, fresh=True).values():
                yield self, state
            count = _BATCH_COUNT

    def links(self) -> dict[str, str | None]:
        """Return the symbolic links at a local root, with the folder of the root they lead into.

        None: they lead elsewhere. Links to files count too, as to the weights of an export.
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
                f"{self.location.url}: its links cannot be listed: {error.strerror}.",
                path=self.location.url,
                next_step="Find out why the root cannot be listed.",
            ) from error
        targets = {link.name: Path(os.path.realpath(link)) for link in links}
        return {
            name: path.relative_to(root).parts[0] if root in path.parents else None
            for name, path in targets.items()
        }

    def check_sound(self, info: CheckpointInfo, deadline: Deadline, *, deep: bool = False) -> bool:
        """Return, and record, whether a checkpoint is sound; read it unless that is known.

        `deep` reads every byte, known or not.
        """
        if self._soundness.get((info.name, info.save_id)) and not deep:
            return True
        reason = "another save replaced it"
        try:
            store = self.open(deadline, info.name)
            # A file that is damaged in another checkpoint may have a hard link in this one.
            is_deep = deep or self.damage_count > 0
            if check_part(store, deep=is_deep) == info.save_id:
                if self.damage_count > 0 and not is_deep:
                    return self.check_sound(info, deadline, deep=True)  # it was found meanwhile
                self.record_sound(info.name, info.save_id)
                return True
        except IntegrityError as error:
            self.record_damaged(info, str(error))
            return False
        except UNUSABLE as error:
            reason = str(error)
        self._record_unusable(info, reason)
        return False

    def record_sound(self, name: str, save_id: str | None) -> None:
        """Record that a checkpoint is sound."""
        self._soundness[name, save_id] = True

    def record_damaged(self, info: CheckpointInfo, reason: str) -> None:
        """Record that a checkpoint is damaged: no policy counts it any more.

        Others may have a hard link to the damaged file, so none is known to be sound any more.
        """
        self._record_unusable(info, reason)
        self.damage_count += 1
        self.base = None
        for key, is_sound in self._soundness.copy().items():
            if is_sound:
                self._soundness.pop(key, None)

    def _record_unusable(self, info: CheckpointInfo, reason: str) -> None:
        log.warning("%s is not counted as a checkpoint: %s", info.url, reason)
        if info.save_id is not None:
            self._soundness[info.name, info.save_id] = False

    def damaged_ids(self, name: str) -> frozenset[str]:
        """Return the saves under a name that are known to be damaged."""
        return frozenset(
            save_id
            for (folder, save_id), is_sound in self._soundness.copy().items()
            if folder == name and save_id and not is_sound
        )

    def _run_all(self, calls: Sequence[Callable[[], T]], deadline: Deadline) -> list[T]:
        is_remote = self.open(deadline).capabilities.is_remote
        return some_at_once(calls, _REMOTE_THREADS if is_remote else _LOCAL_THREADS)
