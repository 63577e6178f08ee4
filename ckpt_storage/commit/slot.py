"""Taking a commit slot: one exclusive create, and a lost answer is found out by reading (I5)."""

from __future__ import annotations

from ckpt_storage.errors import CheckpointError, CommitUnknownError, StorageError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.names import COMMITS, slot_path
from ckpt_storage.store.probe import probe_exclusive_create
from ckpt_storage.store.store import Store

from .slotlog import read_slot

# Errors that prove the storage did not do what was asked, however often one asks.
_DEFINITE = frozenset({"permission", "credentials", "no-space", "unsupported"})
_ANSWER_LOST = frozenset({"exists", "timeout"})


def take_slot(store: Store, record: SlotRecord) -> SlotRecord:
    """Create the slot of `record` and return whatever record holds it afterwards.

    Raises `PhaseTimeoutError` if there was no time even to try, `StorageError` if it is proved
    that nothing was created, and `CommitUnknownError` otherwise.
    """
    deadline, retry = store.deadline, store.policy
    deadline.check(f"Taking slot {record.slot} of {store.url}")
    is_exclusive = probe_exclusive_create(store).exclusive
    cause: CheckpointError | None = None
    unsynced: CheckpointError | None = None
    in_doubt = False
    for attempt in range(retry.attempt_count):
        if attempt:
            deadline.sleep(min(retry.max_delay_s, retry.first_delay_s * 2**attempt))
        try:
            return _put(store, record, is_exclusive=is_exclusive)
        except CheckpointError as error:
            cause = error
            kind = error.kind if isinstance(error, StorageError) else ""
            if store.capabilities.kind == "posix" and kind not in _DEFINITE | _ANSWER_LOST:
                unsynced = unsynced or error
            # A request whose answer was lost may still arrive.
            in_doubt = in_doubt or kind not in _DEFINITE
            holder, is_absent = _read_back(store, record.slot, error)
            if is_absent and not in_doubt:
                raise
        if holder is not None and unsynced is not None and holder.write_id == record.write_id:
            # The name is linked first and its folder synced then. A failed fsync proves
            # nothing, and must not be tried again.
            raise _unknown(
                store, record, f"for good cannot be told; it is there, but: {unsynced}"
            ) from unsynced
        if holder is not None:
            return holder
        # Other ranks were told, or have told, that the save failed: they wait for our word.
        if deadline.remaining_s() == 0 or deadline.has_failed():
            break
    raise _unknown(store, record, f"cannot be told: {cause}") from cause


def _put(store: Store, record: SlotRecord, *, is_exclusive: bool) -> SlotRecord:
    path, data = slot_path(record.slot), record.encode()
    if not is_exclusive:
        # Single-writer storage: the best that can be done is to look first.
        holder = read_slot(store, record.slot)
        if holder is None:
            store.put(path, data)
        return holder or record
    try:
        store.create(path, data)
    except StorageError as error:
        if error.kind != "not-found":
            raise
        # The folder went with the slots of a deleted checkpoint.
        store.make_folders([COMMITS])
        store.create(path, data)
    return record


def _unknown(store: Store, record: SlotRecord, why: str) -> CommitUnknownError:
    who = f"save {record.save_id}" if record.save_id else f"a {record.type} record"
    return CommitUnknownError(
        f"Whether {who} took slot {record.slot} of {store.url} {why}",
        save_id=record.save_id or "",
        slot=record.slot,
        path=slot_path(record.slot),
        phase="commit",
        next_step="When the storage answers again, look at the slot: the save is committed if and "
        "only if its record names this save id.",
    )


def _read_back(store: Store, slot: int, cause: CheckpointError) -> tuple[SlotRecord | None, bool]:
    """Return who holds a slot whose creation failed, and whether it is surely free."""
    try:
        holder = read_slot(store, slot)
    except CheckpointError as error:
        cause.add_note(f"Reading slot {slot} back failed too: {error}")
        return None, False
    return holder, holder is None
