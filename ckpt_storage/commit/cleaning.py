"""Freeing what nobody needs, and deleting: attempts, checkpoints, at last their slots (I7).

Only one rank calls it. The slots of a deleted checkpoint are its tombstone, which tells a paused
saver that its checkpoint was deleted. They may go after `TOMBSTONE_AGE_S`, because no attempt
commits that is older than half of that. They go one by one, the lowest first, each only if it is
still the record that was read: so nobody removes what a saver began anew at slot 1. Who finds no
slot 1 lists the folder.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ckpt_storage.errors import InvalidInputError, StorageError, UnsupportedByStoreError
from ckpt_storage.format import names
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import MOST_SLOT_BYTES, unseal
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import find_all_abilities
from ckpt_storage.store.store import Store

from . import slotlog
from .publishing import publish_head, read_footer

log = logging.getLogger("ckpt_storage")

LEFTOVER_AGE_S = 24 * 3600.0
"""Age by the storage's clock from which an attempt that never committed may be fenced and freed."""

TOMBSTONE_AGE_S = 7 * 24 * 3600.0
"""Age by the storage's clock from which the slots of a deleted checkpoint may be removed."""


def delete_attempt(store: Store, save_id: str) -> None:
    """Delete the folder of one attempt: shard files, rank manifests, the rest, the manifest last.

    The caller has made sure that nobody can need it. Idempotent.
    """
    folder, manifest = names.save_folder(save_id), names.manifest_path(save_id)
    abort_uploads(store, folder)
    paths = sorted(entry.path for entry in store.list(folder) if not entry.path.endswith("/"))
    store.delete([path for path in paths if path.endswith(".distcp")])
    store.delete([p for p in paths if not p.endswith(".distcp") and p != manifest])
    store.delete([manifest])
    store.delete_folder(folder)


def abort_uploads(store: Store, folder: str, only: Callable[[str], bool] | None = None) -> None:
    """Abort the uploads that dead runs left open below a folder, `only` those that are meant.

    A failure is logged and stops nothing: they take room, but no part in any checkpoint.
    """
    try:
        count = store.abort_uploads(folder, only=only)
    except StorageError as error:
        log.warning("%s: uploads that are open there stay: %s", store.shown(folder), error)
    else:
        if count:
            log.info("%s: %d uploads that were left open are gone", store.shown(folder), count)


def attempts_there(store: Store) -> dict[str, float | None]:
    """Return, for each attempt, when its youngest file was written, by the storage's clock.

    None where the storage does not tell. What others keep in a folder of that name is left out.
    """
    times_s: dict[str, list[float | None]] = {}
    for entry in store.list(names.SAVES):
        save_id = entry.path.split("/")[1]
        if names.is_save_id(save_id):
            times_s.setdefault(save_id, []).append(entry.modified_s)
    return {
        save_id: None if None in times else max(filter(None, times), default=0.0)
        for save_id, times in times_s.items()
    }


def fence(store: Store, save_ids: Sequence[str]) -> slotlog.CommitLog:
    """Take the next slot with a fence record: after it, none of `save_ids` can commit.

    Returns the log as of the fence. An id that has committed meanwhile shows as its head or in
    its history, and the caller must not delete it.
    """
    while True:
        found = log_to_extend(store)
        slot, head = found.last_slot + 1, found.head.head if found.head else None
        record, is_ours = slotlog.take_slot(store, "fence", slot, head, fenced=tuple(save_ids))
        if is_ours:
            return replace(found, last_slot=record.slot, last=record)
        store.deadline.check(f"Fencing {', '.join(save_ids)}")


def free_leftovers(
    store: Store,
    *,
    min_age_s: float = LEFTOVER_AGE_S,
    keep_previous: int = 1,
    known: SlotRecord | None = None,
) -> list[str]:
    """Free superseded commits and attempts that died; return their save ids.

    Superseded commits go but for the newest `keep_previous`. An attempt that never committed is
    fenced first, and goes at an age: that of its youngest file, by the storage's clock, so a
    storage that tells no times keeps it. Idempotent, safe when cut at any point, safe against
    readers of the head and all others (invariant I7). `known` is any record of the log, and saves
    reads. Costs a listing and the search for the head where nothing is to be freed; all slots are
    read for attempts of that age.
    """
    times_s = attempts_there(store)
    found = slotlog.read_log(store, known=known)
    references = (found.head.head, found.head.previous) if found.head else ()
    left = times_s.keys() - {one.save_id for one in references[: keep_previous + 1] if one}
    commits: dict[str, SlotRecord] = {}
    for record in slotlog.history(store, found.head) if left else ():
        save_id = record.save_id or ""
        commits[save_id] = record
        left.discard(save_id)
        if not left or save_id not in times_s:
            break  # older ones went before
    told = [(save_id, time_s) for save_id in left if (time_s := times_s[save_id]) is not None]
    old: list[str] = []
    with suppress(UnsupportedByStoreError):  # what a listing tells is no clock by itself
        now_s = store.server_time(names.probe_path()) if told else 0.0
        old = [save_id for save_id, time_s in told if now_s - time_s >= min_age_s]
    if old:
        commits = _commits(store, found)
    # The manifest of an attempt goes last, and older attempts go first.
    superseded = [one for one in list(commits)[keep_previous + 1 :] if one in times_s][::-1]
    freed = _free_commits(store, found.head, superseded)
    dead = sorted(save_id for save_id in old if save_id not in commits)
    if dead:
        # `.metadata` may still show what was deleted before the head was saved anew.
        publish_head(store)
    return freed + _fence_and_free(store, dead)


def _free_commits(store: Store, head: SlotRecord | None, save_ids: Sequence[str]) -> list[str]:
    """Delete commits that `head` superseded, in this order, but the one that `.metadata` names."""
    if head is None or not save_ids:
        return []
    named = read_footer(store)
    if named is None or named.slot < head.slot:
        publish_head(store)
        named = read_footer(store)
    freed = [save_id for save_id in save_ids if named is None or save_id != named.save_id]
    for save_id in freed:
        delete_attempt(store, save_id)
    return freed


def free_dead(store: Store, *, besides: str) -> list[str]:
    """Free attempts, however young, whose coordinator ran on this host and has ended; return ids.

    For a save that finds the storage full; `besides` is its own id. They are fenced first: one
    that lives after all fails with `CommitConflictError`.
    """
    there = attempts_there(store).keys()
    others = sorted(there - {besides} - _commits(store, slotlog.read_log(store)).keys())
    return _fence_and_free(store, [one for one in others if _has_ended(store, one)])


def _fence_and_free(store: Store, dead: Sequence[str]) -> list[str]:
    """Fence attempts, and delete those that have not committed before that."""
    commits = _commits(store, fence(store, dead)) if dead else {}
    freed = [save_id for save_id in dead if save_id not in commits]
    for save_id in freed:
        log.info("%s: freeing save attempt %s, which never committed", store.url, save_id)
        delete_attempt(store, save_id)
    return freed


def _has_ended(store: Store, save_id: str) -> bool:
    """Return whether the process that began an attempt, or this one which began another, ended."""
    path = names.begun_path(save_id)
    found = slotlog.read_if_there(store, path, most_bytes=MOST_SLOT_BYTES)
    begun = {} if found is None else unseal(found.data, path=path)
    pid = begun.get("pid")
    if begun.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return pid == os.getpid()


def _commits(store: Store, found: slotlog.CommitLog) -> dict[str, SlotRecord]:
    """Return commits by save id, newest first: the head and what it superseded."""
    records: Iterable[SlotRecord | None] = slotlog.history(store, found.head)
    if found.head is None:
        records = (slotlog.read_slot(store, slot) for slot in range(found.last_slot, 0, -1))
    return {record.save_id: record for record in records if record and record.save_id}


def delete(store: Store, *, expected_save_id: str | None = None) -> bool:
    """Delete a checkpoint: a deleted record in the next slot, `.metadata`, then all attempts.

    The slots stay as a tombstone: a paused saver that finds them fails with
    `CommitConflictError`. The record names the attempts that were there before it: only those
    are deleted, because their savers aim at the record's slot or an earlier one, while a saver
    that begins later aims behind it. Idempotent; cut at any point it leaves the old checkpoint
    or none. With `expected_save_id` it is deleted only while that save is its head, or to end what
    was begun; returns whether it is deleted. A `.metadata` that is not ours stays: another tool
    saved under the name of a deleted one. Exports below it: see `export.folder`. Raises
    `InvalidInputError` for an empty id.
    """
    if expected_save_id == "":
        raise InvalidInputError(
            "The save id to delete is empty.",
            path=store.url,
            next_step="Give the id of the save that is meant, or None for whatever is there.",
        )
    while True:
        doomed = set(attempts_there(store))
        found = slotlog.read_log(store)
        if found.last is None and not doomed:
            return False
        record = _tombstone(store, found)
        if record is not None:
            break
        found = log_to_extend(store)
        if expected_save_id not in {None, found.head.save_id if found.head else None}:
            return False
        for known in slotlog.history(store, found.head):
            if known.save_id is None or known.save_id in doomed:
                break
            doomed.add(known.save_id)  # it began and committed since the listing
        slot, fenced = found.last_slot + 1, tuple(sorted(doomed))
        record, is_ours = slotlog.take_slot(store, "deleted", slot, None, fenced=fenced)
        if is_ours:
            break
        store.deadline.check(f"Deleting {store.url}")
    _end_deletion(store, record)
    return True


def log_to_extend(store: Store) -> slotlog.CommitLog:
    """Return the slots, such that the next one may be taken within `TOMBSTONE_AGE_S` / 2.

    Of a deleted checkpoint the last record must be young for that. One whose age has come is
    removed; before, a fence is put behind it. Raises `StorageError`, `PhaseTimeoutError`.
    """
    while True:
        store.deadline.check(f"Reading the slots of {store.url}")
        found = slotlog.read_log(store)
        if found.last is None:
            return found
        age_s = None if found.head else _age_s(store, found)
        again = slotlog.read_slot(store, found.last_slot)
        if again is None or again.write_id != found.last.write_id:
            continue  # the slots were removed while they were looked at
        if age_s is None or age_s < TOMBSTONE_AGE_S / 2:
            return found
        if age_s < TOMBSTONE_AGE_S:
            left_s = min(TOMBSTONE_AGE_S - age_s, store.deadline.remaining_s())
            bounded = store.bounded(Deadline(store.deadline.phase, left_s))
            slotlog.take_slot(bounded, "fence", found.last_slot + 1, None)
        elif _removed(store, found) is None:
            return found  # nobody removes anything here


def remove_tombstone(store: Store, *, min_age_s: float = TOMBSTONE_AGE_S) -> bool:
    """Remove the slots of a deleted checkpoint, if the last is that old; return whether they went.

    Also ends a deletion that was cut. False: there is a checkpoint, or nothing, the record is too
    young, somebody else changed it meanwhile, or the storage deletes without conditions only. A
    `min_age_s` below the default is safe only where nobody saves. Raises `StorageError`.
    """
    found = slotlog.read_log(store)
    if found.head is not None or found.last is None:
        return False
    age_s = _age_s(store, found)
    return age_s is not None and age_s >= min_age_s and _removed(store, found) is True


def _tombstone(store: Store, found: slotlog.CommitLog) -> SlotRecord | None:
    """Return the deleted record that is in force, None if there is none."""
    record = None if found.head else found.last
    while record is not None and record.type == "fence":
        # Somebody cleared away attempts after the deletion.
        record = slotlog.read_slot(store, record.slot - 1)
    return record if record is not None and record.type == "deleted" else None


def _end_deletion(store: Store, record: SlotRecord) -> None:
    """Delete what a deleted record dooms: `.metadata` of an earlier save, and all attempts."""
    named = read_footer(store)
    if named is not None and named.slot < record.slot:
        store.delete([names.STOCK_METADATA])
        # A saver that began after the record may have published between look and deletion.
        publish_head(store)
    for save_id in record.fenced:
        delete_attempt(store, save_id)


def _removed(store: Store, found: slotlog.CommitLog) -> bool | None:
    """Remove the slots; return whether they went, None where the storage has no such condition."""
    record = _tombstone(store, found)
    if record is not None:
        _end_deletion(store, record)
    read = partial(slotlog.read_if_there, store, most_bytes=MOST_SLOT_BYTES)
    contents = ((slot, read(names.slot_path(slot))) for slot in slotlog.listed_slots(store))
    slots = {slot: content for slot, content in contents if content is not None}
    last = slots.get(found.last_slot)
    if last is None or max(slots) > found.last_slot:
        return False
    if SlotRecord.decode(last.data, slot=found.last_slot) != found.last:
        return False
    try:
        for slot, content in slots.items():
            if content.version is None or find_all_abilities(store).delete_problem:
                return None
            store.delete_version(names.slot_path(slot), content.version)
    except UnsupportedByStoreError:
        return None
    except StorageError as error:
        if error.kind != "precondition":
            raise
        return False
    return True


def _age_s(store: Store, found: slotlog.CommitLog) -> float | None:
    """Return the age of the last record by the storage's clock, None where it tells no times."""

    def age_s() -> float | None:
        modified_s = store.stat(names.slot_path(found.last_slot)).modified_s
        return None if modified_s is None else store.server_time(names.probe_path()) - modified_s

    try:
        return slotlog.if_there(age_s)  # it may have been removed since
    except UnsupportedByStoreError:
        return None
