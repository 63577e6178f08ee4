"""The commit protocol: begin a save attempt, and commit it by one exclusive create of a slot.

Only the coordinator calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ckpt_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitConflictError,
    CommitUnknownError,
    StorageError,
)
from ckpt_storage.format.commit_record import HeadRef, SlotRecord
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.format.names import (
    COMMITS,
    STOCK_METADATA,
    begun_path,
    new_save_id,
    new_write_id,
    ranks_folder,
    save_folder,
    slot_path,
)
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import side_by_side

from .slotlog import CommitLog, is_there, read_log, read_slot, stamp
from .stockfooter import is_foreign

# Errors that prove the storage did not do what was asked, however often one asks.
_DEFINITE = frozenset({"permission", "credentials", "no-space", "unsupported"})
_ANSWER_LOST = frozenset({"exists", "timeout"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The coordinator's leave for one save attempt; sent to every rank.

    `last_slot` is the highest slot when the attempt began; the commit aims at the next one.
    """

    save_id: str
    last_slot: int
    previous: HeadRef | None
    exclusive: bool


def begin(
    store: Store,
    *,
    overwrite: bool,
    probe: Callable[[Store], bool],
    replaces: Collection[str] = (),
) -> Grant:
    """Open a save attempt: check what is there, draw a save id, make the folders, claim them.

    Coordinator only. Raises `CheckpointExistsError` for a committed checkpoint, ours or stock
    torch's, when `overwrite` is False, unless it is a save of ours whose id is in `replaces`. A
    folder that holds anything else is left as it is.
    `probe` tells whether the storage's exclusive create can be relied on.
    """
    calls: list[Callable[[], Any]] = [lambda: read_log(store)]
    if not overwrite:
        calls.append(lambda: is_there(store, STOCK_METADATA))
    found: CommitLog
    found, is_shown = [*side_by_side(store, calls), False][:2]
    if not overwrite:
        if found.head is not None and found.head.save_id not in replaces:
            raise CheckpointExistsError(
                f"{store.url} holds a checkpoint committed at {found.head.created_at} "
                f"({found.head.save_id}).",
                path=store.url,
                phase="plan",
                next_step="Save to another id, or pass overwrite=True to replace it.",
            )
        if is_shown and is_foreign(store, found):
            raise CheckpointExistsError(
                f"{store.url} holds a checkpoint that another writer made (.metadata).",
                path=store.url,
                phase="plan",
                next_step="Save to another id, or pass overwrite=True to replace it.",
            )
    save_id = new_save_id()
    store.make_folders([COMMITS, save_folder(save_id), ranks_folder(save_id)])
    exclusive = probe(store)
    # Temporary files and open uploads show in no listing: without this, an attempt that dies before
    # its first file is complete would never be found and freed.
    begun = {"format": "ckpt_storage.begun/1", "save_id": save_id, **stamp()}
    store.put(begun_path(save_id), seal(begun))
    previous = found.head.head if found.head else None
    return Grant(
        save_id=save_id,
        last_slot=found.last_slot,
        previous=previous,
        exclusive=exclusive,
    )


def commit(
    store: Store,
    grant: Grant,
    *,
    manifest: FileRef,
    stock: FileRef | None,
    stock_entries: int | None = None,
    deadline: Deadline,
    retry: RetryPolicy,
    user: Mapping[str, Any] = MappingProxyType({}),
) -> SlotRecord:
    """Take the next slot with a commit record: the instant at which the checkpoint exists.

    Coordinator only, once all that `manifest` names is durable; `user` goes into the record.
    Raises `CommitConflictError`
    (another saver won, or this attempt was fenced: not committed), `StorageError` (the storage
    refused for good: not committed) or `CommitUnknownError` (it cannot be told).
    """
    slot = grant.last_slot + 1
    while True:
        record = SlotRecord(
            type="commit",
            slot=slot,
            write_id=new_write_id(),
            head=HeadRef(slot=slot, save_id=grant.save_id),
            save_id=grant.save_id,
            manifest=manifest,
            stock=stock,
            stock_entries=stock_entries,
            previous=grant.previous,
            user=user,
            **stamp(),
        )
        holder = take_slot(store, record, exclusive=grant.exclusive, deadline=deadline, retry=retry)
        if holder.write_id == record.write_id:
            return record
        if holder.type == "fence" and grant.save_id not in holder.fenced:
            # Somebody cleared away another attempt; the head is still the one we saw.
            slot += 1
            continue
        raise _conflict(store, grant.save_id, holder)


def _conflict(store: Store, save_id: str, holder: SlotRecord) -> CommitConflictError:
    winner = {
        "type": holder.type,
        "slot": holder.slot,
        "save_id": holder.save_id,
        "host": holder.host,
        "pid": holder.pid,
        "created_at": holder.created_at,
    }
    by = f"process {holder.pid} on {holder.host or 'an unknown host'} at {holder.created_at}"
    if holder.type == "fence":
        what = f"was given up for dead and fenced by {by}"
        next_step = "See why it took so long, then save again."
    elif holder.type == "deleted":
        what = f"lost: the checkpoint was deleted by {by}"
        next_step = "If it is wanted after all, save again."
    else:
        what = f"lost slot {holder.slot} to save {holder.save_id} of {by}"
        next_step = (
            "That save is the checkpoint now. Let one job save to this id; the other goes on "
        )
        next_step += "from it, or saves to another id."
    return CommitConflictError(
        f"Save {save_id} to {store.url} {what}; it is not committed.",
        winner=winner,
        path=slot_path(holder.slot),
        phase="commit",
        next_step=next_step,
    )


def take_slot(
    store: Store, record: SlotRecord, *, exclusive: bool, deadline: Deadline, retry: RetryPolicy
) -> SlotRecord:
    """Create the slot of `record` and return whatever record holds it afterwards (invariant I5).

    Raises `PhaseTimeoutError` if there was no time even to try, `StorageError` if it is proved
    that nothing was created, and `CommitUnknownError` otherwise.
    """
    deadline.check(f"Taking slot {record.slot} of {store.url}")
    path, data = slot_path(record.slot), record.encode()
    cause: CheckpointError | None = None
    unsynced: CheckpointError | None = None
    in_doubt = False
    for attempt in range(retry.attempt_count):
        if attempt:
            delay_s = min(retry.max_delay_s, retry.first_delay_s * 2**attempt)
            deadline.sleep(delay_s)
        try:
            # Single-writer storage: the best that can be done is to look first.
            holder = None if exclusive else read_slot(store, record.slot)
            if holder is None:
                _put_slot(store, path, data, exclusive=exclusive)
                return record
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
        if holder is not None:
            if unsynced is not None and holder.write_id == record.write_id:
                # The name is linked first and its folder synced then. A failed fsync proves
                # nothing, and must not be tried again.
                raise _unknown(
                    store, record, f"for good cannot be told; it is there, but: {unsynced}"
                ) from unsynced
            return holder
        # Other ranks were told, or have told, that the save failed: they wait for our word.
        if deadline.remaining_s() == 0 or deadline.has_failed():
            break
    raise _unknown(store, record, f"cannot be told: {cause}") from cause


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


def _put_slot(store: Store, path: str, data: bytes, *, exclusive: bool) -> None:
    if exclusive:
        store.create(path, data)
    else:
        store.put(path, data)


def _read_back(store: Store, slot: int, cause: CheckpointError) -> tuple[SlotRecord | None, bool]:
    """Return who holds a slot whose creation failed, and whether it is surely free."""
    try:
        holder = read_slot(store, slot)
    except CheckpointError as error:
        cause.add_note(f"Reading slot {slot} back failed too: {error}")
        return None, False
    return holder, holder is None
