"""The begin and the commit of one attempt; only the coordinator calls them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from ckpt_storage.errors import CheckpointExistsError, CommitConflictError, PhaseTimeoutError
from ckpt_storage.format import names
from ckpt_storage.format.commit_record import HeadRef, SlotRecord
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.format.fields import format_of
from ckpt_storage.store.probe import find_abilities, find_all_abilities
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import side_by_side

from .deletion import TOMBSTONE_AGE_S, log_to_extend
from .process import process_identity
from .publishing import check_slots, footer_of, read_stock_tail
from .slotlog import read_log, read_slot, stamp, take_slot

log = logging.getLogger("ckpt_storage")

_MAX_AGE_S = TOMBSTONE_AGE_S / 2 - 3600
"""The age at which an attempt can no longer commit; an hour less, for a request in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTicket:
    """The coordinator's permission to write one attempt; sent to every rank.

    `last_slot` is the highest slot when the attempt began, at `began_s` by the coordinator's clock;
    the commit aims at the next slot. With `with_places`, ranks report the places of their items.
    Values of each of `groups`, patterns of names, are stored in separate files. Ranks may reuse
    their files of the save `base_id`, "" for none, of the checkpoint at `base_url`.
    """

    save_id: str
    last_slot: int
    previous: HeadRef | None
    began_s: float
    world_size: int = 1
    with_places: bool = True
    groups: tuple[str, ...] = ()
    base_url: str = ""
    base_id: str = ""


def begin(
    store: Store, *, overwrite: bool, replaces: Collection[str] = (), save_id: str | None = None
) -> SaveTicket:
    """Begin an attempt: check for a checkpoint, choose a save id, make folders, write the marker.

    A copy passes the `save_id` that it chose. Coordinator only. Raises `CheckpointExistsError` for
    a committed checkpoint, ours or stock torch's, unless `overwrite` is True or its save id is in
    `replaces`. Raises `FormatError` if slots were lost, because the commit would be invisible.
    Warns if exclusive creation or durability cannot be relied on.
    """
    began_s = time.time()
    store.make_folders([])
    # First, because it determines the meaning of a 403 response to a read.
    problem = find_abilities(store).create_problem
    reads: list[Callable[[Store], Any]] = [log_to_extend, read_stock_tail]
    if store.capabilities.if_match:
        reads.append(find_all_abilities)
    commit_log, tail, *_ = side_by_side(store, [partial(read, store) for read in reads])
    check_slots(store, commit_log, tail)
    head, what = commit_log.head, None
    if not overwrite and head is not None and head.save_id not in replaces:
        what = f"a checkpoint committed at {head.created_at} ({head.save_id})"
    elif not overwrite and head is None and tail is not None and footer_of(tail) is None:
        what = "a checkpoint that another writer made (.metadata)"
    if what is not None:
        raise CheckpointExistsError(
            f"{store.url} already exists: it holds {what}.",
            path=store.url,
            phase="plan",
            next_step="Save to another id, or pass overwrite=True to replace it.",
        )
    save_id = save_id or names.new_save_id()
    store.make_folders([names.COMMITS, names.save_folder(save_id), names.ranks_folder(save_id)])
    if problem:
        _warn_once(
            store.find_scope(),
            "%s is single-writer: %s Two jobs that save to one id at the same time get no error "
            "there.",
            store.url,
            problem,
        )
    if not_durable := store.durability_problem():
        _warn_once(
            not_durable,
            "%s: %s A save that is reported as committed may be lost, or lose its shards, when the "
            "mount ends. Save to the URL of the storage itself.",
            store.url,
            not_durable,
        )
    marker = {
        "format": format_of("begun"),
        "save_id": save_id,
        "last_slot": commit_log.last_slot,
        "process": process_identity(),
        **stamp(),
    }
    store.put(names.begun_path(save_id), seal(marker))
    previous = head.head if head else None
    return SaveTicket(
        save_id=save_id, last_slot=commit_log.last_slot, previous=previous, began_s=began_s
    )


_WARNED: set[Hashable] = set()
"""Keys of the warnings that this process has logged."""


def _warn_once(key: Hashable, message: str, *arguments: str) -> None:
    if key not in _WARNED:
        _WARNED.add(key)
        log.warning(message, *arguments)


def commit(
    store: Store,
    ticket: SaveTicket,
    *,
    manifest: FileRef,
    stock: FileRef | None,
    stock_entries: int | None = None,
    user: Mapping[str, Any] = MappingProxyType({}),
    part: Mapping[str, Any] = MappingProxyType({}),
    stats: Mapping[str, Any] = MappingProxyType({}),
) -> SlotRecord:
    """Create the next slot with a commit record, by which the checkpoint begins to exist.

    Coordinator only, once all files that `manifest` names are durable; `user`, `part` and `stats`
    go into the record.

    Raises `CommitConflictError` (another saver won, or this attempt was fenced: not committed),
    `PhaseTimeoutError` (the attempt is days old: not committed), `StorageError` (the storage
    refused: not committed) or `CommitUnknownError` (the outcome is unknown).
    """
    if time.time() - ticket.began_s > _MAX_AGE_S:
        raise PhaseTimeoutError(
            f"Save {ticket.save_id} to {store.url} began more than {_MAX_AGE_S / 3600:.0f} hours "
            "ago; an attempt of this age is not committed.",
            phase="commit",
            timeout_s=_MAX_AGE_S,
            next_step="Find out why it took so long, and save again.",
        )
    slot, previous = ticket.last_slot, ticket.previous
    while True:
        slot += 1
        holder, is_ours = take_slot(
            store,
            "commit",
            slot,
            HeadRef(slot=slot, save_id=ticket.save_id),
            save_id=ticket.save_id,
            manifest=manifest,
            stock=stock,
            stock_entries=stock_entries,
            previous=previous,
            user=user,
            part=dict(part),
            stats=stats,
        )
        if is_ours:
            return holder
        if holder.is_thinned and holder.previous == previous and not part:
            # Thinning dropped values of the save that this attempt replaces.
            previous = holder.head
            continue
        # A fence of another attempt does not change the head.
        if holder.type != "fence" or ticket.save_id in holder.fenced:
            raise _conflict(store, ticket.save_id, holder)


def find_conflict(store: Store, ticket: SaveTicket) -> CommitConflictError | None:
    """Return why an attempt cannot commit: it was deleted or fenced; None if no record says so."""
    for slot in range(ticket.last_slot + 1, read_log(store).last_slot + 1):
        holder = read_slot(store, slot)
        if holder is not None and ticket.save_id in holder.fenced:
            return _conflict(store, ticket.save_id, holder)
    return None


def _conflict(store: Store, save_id: str, holder: SlotRecord) -> CommitConflictError:
    by = f"process {holder.pid} on {holder.host or 'an unknown host'} at {holder.created_at}"
    what = f"lost slot {holder.slot} to save {holder.save_id} of {by}"
    next_step = "That save is the checkpoint now. Let one job save to this id."
    if holder.type == "fence":
        what = f"was considered dead and fenced by {by}"
        next_step = "Find out why it took so long, then save again."
    elif holder.type == "deleted":
        what = f"lost: the checkpoint was deleted by {by}"
        next_step = "To replace the deleted checkpoint, save again."
    fields = ("type", "slot", "save_id", "host", "pid", "created_at")
    return CommitConflictError(
        f"Save {save_id} to {store.url} {what}; it is not committed.",
        winner={name: getattr(holder, name) for name in fields},
        path=names.slot_path(holder.slot),
        phase="commit",
        next_step=next_step,
    )
