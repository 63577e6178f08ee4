"""Deletion of a checkpoint, and later of its slots (I7). Only one rank calls it.

The slots of a deleted checkpoint are its tombstone, from which a paused saver learns of the
deletion. They may be removed after `TOMBSTONE_AGE_S`, because no attempt commits that is older than
half of that. They are removed in ascending order, each on the condition that it is unchanged, so
that a new checkpoint that begins at slot 1 is never damaged. A reader that finds no slot 1 lists
the folder.
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
from ckpt_storage.transfer import objects

from . import slotlog
from .attempt_files import attempts_there, delete_attempt, sweep_temporary_files
from .publishing import publish_head, read_footer

TOMBSTONE_AGE_S = 7 * 24 * 3600.0
"""The age, by the storage's clock, at which slots of a deleted checkpoint may be removed."""

log = logging.getLogger("ckpt_storage")


def delete(store: Store, *, expected_save_id: str | None = None) -> bool:
    """Delete a checkpoint: create a deleted record, then delete `.metadata` and all attempts.

    The slots stay as a tombstone; a paused saver fails with `CommitConflictError`. The record names
    the attempts that exist before it, and only those are deleted: their savers aim at the slot of
    the record or an earlier slot, and later savers at later slots. Idempotent; a killed deletion
    leaves the old checkpoint or none. With `expected_save_id`, a checkpoint with another head is
    not deleted, but a deletion that has begun is finished. Returns whether the checkpoint is
    deleted. A `.metadata` of another tool stays. `export.removal` deletes exports. Raises
    `InvalidInputError` for an empty id.
    """
    if expected_save_id == "":
        raise InvalidInputError(
            "The save id to delete is empty.",
            path=store.url,
            next_step="Pass the id of a save, or None to delete any save.",
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
            doomed.add(known.save_id)  # it has begun and committed since the listing
        slot, fenced = commit_log.last_slot + 1, tuple(sorted(doomed))
        record, is_ours = slotlog.take_slot(store, "deleted", slot, None, fenced=fenced)
        if is_ours:
            break
        store.deadline.check(f"Deleting {store.url}")
    _end_deletion(store, record)
    return True


def log_to_extend(store: Store) -> slotlog.CommitLog:
    """Return the log, whose next slot may be created within `TOMBSTONE_AGE_S` / 2.

    The last record of a deleted checkpoint must be younger than that: behind an older record a
    fence is created, and slots that are older than `TOMBSTONE_AGE_S` are removed. Raises
    `StorageError`, `PhaseTimeoutError`.
    """
    while True:
        store.deadline.check(f"Reading the slots of {store.url}")
        commit_log = slotlog.read_log(store)
        if commit_log.last is None:
            return commit_log
        age_s = None if commit_log.head else _age_s(store, commit_log)
        again = slotlog.read_slot(store, commit_log.last_slot)
        if again is None or again.write_id != commit_log.last.write_id:
            continue  # the slots were removed while their age was read
        if age_s is None or age_s < TOMBSTONE_AGE_S / 2:
            return commit_log
        if age_s < TOMBSTONE_AGE_S:
            left_s = min(TOMBSTONE_AGE_S - age_s, store.deadline.remaining_s())
            bounded = store.bounded(Deadline(store.deadline.phase, left_s))
            slotlog.take_slot(bounded, "fence", commit_log.last_slot + 1, None)
        elif _removed(store, commit_log) is None:
            return commit_log  # slots are never removed on this storage


def remove_tombstone(store: Store, *, min_age_s: float = TOMBSTONE_AGE_S) -> bool:
    """Remove the slots of a deleted checkpoint of at least `min_age_s`; return whether it did.

    It also finishes a deletion that was killed. False: there is a checkpoint, or no slot; the last
    record is too young, or another process changed it; or the storage has no conditional deletion.
    A `min_age_s` below the default is safe only if no process saves. Raises `StorageError`.
    """
    commit_log = slotlog.read_log(store)
    if commit_log.head is not None or commit_log.last is None:
        return False
    age_s = _age_s(store, commit_log)
    return age_s is not None and age_s >= min_age_s and _removed(store, commit_log) is True


def tombstone_of(store: Store, commit_log: slotlog.CommitLog) -> SlotRecord | None:
    """Return the deleted record of a deleted checkpoint, None for others."""
    record = None if commit_log.head else commit_log.last
    while record is not None and record.type == "fence":
        # Attempts were fenced after the deletion.
        record = slotlog.read_slot(store, record.slot - 1)
    return record if record is not None and record.type == "deleted" else None


def _end_deletion(store: Store, record: SlotRecord) -> None:
    """Delete the `.metadata` of an earlier save, and the attempts that a deleted record names."""
    named = read_footer(store)
    if named is not None and named.slot < record.slot:
        store.delete([names.STOCK_METADATA])
        # A later saver may have published between the read and the deletion.
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
    """Remove the slots; return whether it did, None without conditional deletion."""
    record = tombstone_of(store, commit_log)
    if record is not None:
        _end_deletion(store, record)
    read = partial(objects.read_or_none, store, max_bytes=MAX_SLOT_BYTES)
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
    """Return the age of the last record by the storage's clock, None if that has no times."""

    def age_s() -> float | None:
        modified_s = store.stat(names.slot_path(commit_log.last_slot)).modified_s
        return None if modified_s is None else store.server_time(names.probe_path()) - modified_s

    try:
        return objects.or_none_if_absent(age_s)  # another process may have removed it
    except UnsupportedByStoreError:
        return None
