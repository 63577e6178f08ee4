"""Deleting a checkpoint, and at last the slots that tell that it was deleted (I7).

Only one rank calls it. The slots of a deleted checkpoint are its tombstone, which tells a paused
saver that its checkpoint was deleted. They may go after `TOMBSTONE_AGE_S`, because no attempt
commits that is older than half of that. They go in turn, the lowest first, each only if it is
still the record that was read: so nobody removes what a saver began anew at slot 1. A reader that
finds no slot 1 lists the folder.
"""

from __future__ import annotations

import logging
from functools import partial

from ckpt_storage.errors import InvalidInputError, StorageError, UnsupportedByStoreError
from ckpt_storage.format import names
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import MAX_SLOT_BYTES
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import find_all_abilities
from ckpt_storage.store.store import Store

from . import slotlog
from .attempt_files import attempts_there, delete_attempt, sweep_temporary_files
from .publishing import publish_head, read_footer

TOMBSTONE_AGE_S = 7 * 24 * 3600.0
"""Age by the storage's clock from which the slots of a deleted checkpoint may be removed."""

log = logging.getLogger("ckpt_storage")


def delete(store: Store, *, expected_save_id: str | None = None) -> bool:
    """Delete a checkpoint: a deleted record in the next slot, `.metadata`, then all attempts.

    The slots stay as a tombstone: a paused saver that finds them fails with
    `CommitConflictError`. The record names the attempts that were there before it: only those
    are deleted, because their savers aim at the record's slot or an earlier one, while a saver
    that begins later aims behind it. Idempotent; cut at any point it leaves the old checkpoint
    or none. With `expected_save_id` it is deleted only while that save is its head, or to end what
    was begun; returns whether it is deleted. A `.metadata` that is not ours stays: another tool
    saved under the name of a deleted checkpoint. Exports below it: see `export.removal`. Raises
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
        commit_log = slotlog.read_log(store)
        if commit_log.last is None and not doomed:
            return False
        record = tombstone_of(store, commit_log)
        if record is not None:
            break
        commit_log = log_to_extend(store)
        if expected_save_id not in {None, commit_log.head.save_id if commit_log.head else None}:
            return False
        for known in slotlog.history(store, commit_log.head):
            if known.save_id is None or known.save_id in doomed:
                break
            doomed.add(known.save_id)  # it began and committed since the listing
        slot, fenced = commit_log.last_slot + 1, tuple(sorted(doomed))
        record, is_ours = slotlog.take_slot(store, "deleted", slot, None, fenced=fenced)
        if is_ours:
            break
        store.deadline.check(f"Deleting {store.url}")
    _end_deletion(store, record)
    return True


def log_to_extend(store: Store) -> slotlog.CommitLog:
    """Return the slots, such that the next slot may be taken within `TOMBSTONE_AGE_S` / 2.

    Of a deleted checkpoint the last record must be young for that. A record whose age has come is
    removed; before, a fence is put behind it. Raises `StorageError`, `PhaseTimeoutError`.
    """
    while True:
        store.deadline.check(f"Reading the slots of {store.url}")
        commit_log = slotlog.read_log(store)
        if commit_log.last is None:
            return commit_log
        age_s = None if commit_log.head else _age_s(store, commit_log)
        again = slotlog.read_slot(store, commit_log.last_slot)
        if again is None or again.write_id != commit_log.last.write_id:
            continue  # the slots were removed while they were looked at
        if age_s is None or age_s < TOMBSTONE_AGE_S / 2:
            return commit_log
        if age_s < TOMBSTONE_AGE_S:
            left_s = min(TOMBSTONE_AGE_S - age_s, store.deadline.remaining_s())
            bounded = store.bounded(Deadline(store.deadline.phase, left_s))
            slotlog.take_slot(bounded, "fence", commit_log.last_slot + 1, None)
        elif _removed(store, commit_log) is None:
            return commit_log  # nobody removes anything here


def remove_tombstone(store: Store, *, min_age_s: float = TOMBSTONE_AGE_S) -> bool:
    """Remove the slots of a deleted checkpoint, if the last is that old; return whether they went.

    Also ends a deletion that was cut. False: there is a checkpoint, or nothing, the record is too
    young, somebody else changed it meanwhile, or the storage deletes without conditions only. A
    `min_age_s` below the default is safe only where nobody saves. Raises `StorageError`.
    """
    commit_log = slotlog.read_log(store)
    if commit_log.head is not None or commit_log.last is None:
        return False
    age_s = _age_s(store, commit_log)
    return age_s is not None and age_s >= min_age_s and _removed(store, commit_log) is True


def tombstone_of(store: Store, commit_log: slotlog.CommitLog) -> SlotRecord | None:
    """Return the deleted record that is in force, None if there is none."""
    record = None if commit_log.head else commit_log.last
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
    try:
        sweep_temporary_files(store)
    except StorageError as error:
        if error.kind != "permission":
            raise
        log.warning("%s: old temporary files stay: %s", store.url, error)


def _removed(store: Store, commit_log: slotlog.CommitLog) -> bool | None:
    """Remove the slots; return whether they went, None where the storage has no such condition."""
    record = tombstone_of(store, commit_log)
    if record is not None:
        _end_deletion(store, record)
    read = partial(slotlog.read_or_none, store, max_bytes=MAX_SLOT_BYTES)
    contents = ((slot, read(names.slot_path(slot))) for slot in slotlog.listed_slots(store))
    slots = {slot: content for slot, content in contents if content is not None}
    last = slots.get(commit_log.last_slot)
    if last is None or max(slots) > commit_log.last_slot:
        return False
    if SlotRecord.decode(last.data, slot=commit_log.last_slot) != commit_log.last:
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


def _age_s(store: Store, commit_log: slotlog.CommitLog) -> float | None:
    """Return the age of the last record by the storage's clock, None where it tells no times."""

    def age_s() -> float | None:
        modified_s = store.stat(names.slot_path(commit_log.last_slot)).modified_s
        return None if modified_s is None else store.server_time(names.probe_path()) - modified_s

    try:
        return slotlog.or_none_if_absent(age_s)  # it may have been removed since
    except UnsupportedByStoreError:
        return None
