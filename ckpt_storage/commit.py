"""The commit protocol: find the head, take a slot, publish `.metadata`, free what is superseded.

Knows documents, their order and stores (`docs/format.md`, "Algorithms"; `docs/invariants.md`);
knows no tensor and no process group. Only the coordinator calls what writes. Called by
`writer`, `catalog`, `source`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from . import integrity, layout
from .documents import FileRef
from .errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitConflictError,
    CommitUnknownError,
    FormatError,
    IntegrityError,
    StorageError,
)
from .options import RetryPolicy
from .slots import HeadRef, SlotRecord
from .store.base import Store, Version
from .transfer import Deadline

log = logging.getLogger("ckpt_storage")

LEFTOVER_AGE_S = 24 * 3600.0
"""Age by the storage's clock from which an attempt that never committed may be fenced and freed."""

_FOOTER_MAGIC = b"CKPTSTO1"
_FOOTER_TAIL_BYTES = 16
_FOOTER_MOST_BYTES = 512
_PUBLISH_ROUNDS = 20
_PUBLISH_DOUBTS = 3
# Errors that prove the storage did not do what was asked, however often one asks.
_DEFINITE = frozenset({"permission", "credentials", "no-space", "unsupported"})
_ANSWER_LOST = frozenset({"exists", "timeout"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLog:
    """The slots of one checkpoint as read: the highest slot, its record, and the head commit."""

    last_slot: int
    last: SlotRecord | None
    head: SlotRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The coordinator's leave for one save attempt; sent to every rank.

    `last_slot` is the highest slot when the attempt began; the commit aims at the next one.
    """

    save_id: str
    last_slot: int
    previous: HeadRef | None
    exclusive: bool


def read_slot(store: Store, slot: int) -> SlotRecord | None:
    """Return the record in `slot`, None if there is none.

    Raises `StorageError`, `IntegrityError`, `FormatError`.
    """
    try:
        data = store.read(layout.slot_path(slot))
    except StorageError as error:
        if error.kind == "not-found":
            return None
        raise
    return SlotRecord.decode(data, slot=slot)


def read_log(store: Store, *, known: SlotRecord | None = None) -> CommitLog:
    """Find the highest slot by galloping over names, and the head it tells of (invariant I3).

    About 2 log2(n) reads for n slots, 2 for a checkpoint saved once; where the record of a slot
    is `known`, n counts from there. Safe on any rank at any time.
    """
    low, low_record = (known.slot, known) if known else (0, None)
    origin, high = low, low + 1
    while (record := read_slot(store, high)) is not None:
        low, low_record = high, record
        high += high - origin
    while high - low > 1:
        middle = (low + high) // 2
        record = read_slot(store, middle)
        if record is None:
            high = middle
        else:
            low, low_record = middle, record
    if low_record is None or low_record.head is None:
        return CommitLog(last_slot=low, last=low_record, head=None)
    reference = low_record.head
    head = low_record if reference.slot == low else read_slot(store, reference.slot)
    if head is None or head.type != "commit" or head.save_id != reference.save_id:
        raise FormatError(
            f"{store.url}: slot {low} names slot {reference.slot} as the newest commit of "
            f"{reference.save_id}, which it is not.",
            path=layout.slot_path(low),
            next_step="The folder commits/ was altered; restore it from a copy.",
        )
    return CommitLog(last_slot=low, last=low_record, head=head)


def begin(store: Store, *, overwrite: bool, probe: Callable[[Store], bool]) -> Grant:
    """Open a save attempt: check what is there, draw a save id, make the folders.

    Coordinator only. Raises `CheckpointExistsError` for a committed checkpoint, ours or stock
    torch's, when `overwrite` is False. A folder that holds anything else is left as it is.
    `probe` tells whether the storage's exclusive create can be relied on.
    """
    found = read_log(store)
    if not overwrite:
        if found.head is not None:
            raise CheckpointExistsError(
                f"{store.url} holds a checkpoint committed at {found.head.created_at} "
                f"({found.head.save_id}).",
                path=store.url,
                phase="plan",
                next_step="Save to another id, or pass overwrite=True to replace it.",
            )
        if found.last is None and is_there(store, layout.STOCK_METADATA):
            raise CheckpointExistsError(
                f"{store.url} holds a checkpoint that another writer made (.metadata).",
                path=store.url,
                phase="plan",
                next_step="Save to another id, or pass overwrite=True to replace it.",
            )
    save_id = layout.new_save_id()
    store.prepare([layout.COMMITS, layout.save_folder(save_id), layout.ranks_folder(save_id)])
    exclusive = probe(store)
    # Temporary files and open uploads show in no listing: without this, an attempt that dies
    # before its first file is complete would never be found and freed.
    begun = {"format": "ckpt_storage.begun/1", "save_id": save_id, **_stamp()}
    store.write(_begun_path(save_id), integrity.seal(begun))
    previous = found.head.head if found.head else None
    return Grant(
        save_id=save_id,
        last_slot=found.last_slot,
        previous=previous,
        exclusive=exclusive,
    )


def _begun_path(save_id: str) -> str:
    """Return the path of the file that shows that an attempt began, and when."""
    return f"{layout.save_folder(save_id)}/begun.json"


def _publishing_path(save_id: str) -> str:
    """Return the path of the file that says that others than its saver may publish an attempt."""
    return f"{layout.save_folder(save_id)}/publishing.json"


def markers_of(save_id: str) -> list[str]:
    """Return the paths of the sealed documents that an attempt may have and no document names."""
    return [_begun_path(save_id), _publishing_path(save_id), layout.published_path(save_id)]


def read_if_there(store: Store, path: str) -> Version | None:
    """Return an object with its version token, None if it is absent."""
    try:
        return store.read_version(path)
    except StorageError as error:
        if error.kind == "not-found":
            return None
        raise


def _stamp() -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created_at": now, "host": socket.gethostname(), "pid": os.getpid()}


def commit(
    store: Store,
    grant: Grant,
    *,
    manifest: FileRef,
    stock: FileRef | None,
    deadline: Deadline,
    retry: RetryPolicy,
) -> SlotRecord:
    """Take the next slot with a commit record: the instant at which the checkpoint exists.

    Coordinator only, once all that `manifest` names is durable. Raises `CommitConflictError`
    (another saver won, or this attempt was fenced: not committed), `StorageError` (the storage
    refused for good: not committed) or `CommitUnknownError` (it cannot be told).
    """
    slot = grant.last_slot + 1
    while True:
        record = SlotRecord(
            type="commit",
            slot=slot,
            write_id=layout.new_write_id(),
            head=HeadRef(slot=slot, save_id=grant.save_id),
            save_id=grant.save_id,
            manifest=manifest,
            stock=stock,
            previous=grant.previous,
            **_stamp(),
        )
        holder = _take_slot(
            store, record, exclusive=grant.exclusive, deadline=deadline, retry=retry
        )
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
    elif holder.type == "deleted":
        what = f"lost: the checkpoint was deleted by {by}"
    else:
        what = f"lost slot {holder.slot} to save {holder.save_id} of {by}"
    return CommitConflictError(
        f"Save {save_id} to {store.url} {what}; it is not committed.",
        winner=winner,
        path=layout.slot_path(holder.slot),
        phase="commit",
        next_step="Make sure that one job saves to this id, then save again with overwrite=True.",
    )


def _take_slot(
    store: Store, record: SlotRecord, *, exclusive: bool, deadline: Deadline, retry: RetryPolicy
) -> SlotRecord:
    """Create the slot of `record` and return whatever record holds it afterwards (invariant I5).

    Raises `PhaseTimeoutError` if there was no time even to try, `StorageError` if it is proved
    that nothing was created, and `CommitUnknownError` otherwise.
    """
    deadline.check(f"Taking slot {record.slot} of {store.url}")
    path, data = layout.slot_path(record.slot), record.encode()
    cause: CheckpointError | None = None
    unsynced: CheckpointError | None = None
    in_doubt = False
    for attempt in range(retry.attempt_count):
        if attempt:
            delay_s = min(retry.max_delay_s, retry.first_delay_s * 2**attempt)
            time.sleep(min(delay_s, deadline.remaining_s()))
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
        if deadline.remaining_s() == 0:
            break
    raise _unknown(store, record, f"cannot be told: {cause}") from cause


def _unknown(store: Store, record: SlotRecord, why: str) -> CommitUnknownError:
    who = f"save {record.save_id}" if record.save_id else f"a {record.type} record"
    return CommitUnknownError(
        f"Whether {who} took slot {record.slot} of {store.url} {why}",
        save_id=record.save_id or "",
        slot=record.slot,
        path=layout.slot_path(record.slot),
        phase="commit",
        next_step="When the storage answers again, look at the slot: the save is committed if and "
        "only if its record names this save id.",
    )


def _put_slot(store: Store, path: str, data: bytes, *, exclusive: bool) -> None:
    if exclusive:
        store.create(path, data)
    else:
        store.write(path, data)


def _read_back(store: Store, slot: int, cause: CheckpointError) -> tuple[SlotRecord | None, bool]:
    """Return who holds a slot whose creation failed, and whether it is surely free."""
    try:
        holder = read_slot(store, slot)
    except CheckpointError as error:
        cause.add_note(f"Reading slot {slot} back failed too: {error}")
        return None, False
    return holder, holder is None


def with_footer(pickled: bytes, *, slot: int, save_id: str) -> bytes:
    """Return what is stored as `.metadata`: the pickle, then our footer."""
    footer = json.dumps(
        {"format": "ckpt_storage.stock/1", "slot": slot, "save_id": save_id},
        separators=(",", ":"),
    ).encode()
    return pickled + footer + b"%08d" % len(footer) + _FOOTER_MAGIC


def split_footer(data: bytes) -> tuple[bytes, HeadRef | None]:
    """Return the pickle in a `.metadata` file, and what its footer names; None without a footer."""
    if data[-8:] != _FOOTER_MAGIC or not data[-16:-8].isdigit():
        return data, None
    start = len(data) - _FOOTER_TAIL_BYTES - int(data[-16:-8])
    if start < 0:
        return data, None
    try:
        footer = json.loads(data[start:-_FOOTER_TAIL_BYTES])
        reference = HeadRef(slot=int(footer["slot"]), save_id=str(footer["save_id"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return data, None
    return data[:start], reference


def read_footer(store: Store) -> HeadRef | None:
    """Return what the footer of `.metadata` names, None if it has none or is not there.

    Two small requests, however large the pickle is.
    """
    try:
        size_bytes = store.stat(layout.STOCK_METADATA).size_bytes
        tail = bytearray(min(size_bytes, _FOOTER_MOST_BYTES))
        store.read_into(layout.STOCK_METADATA, size_bytes - len(tail), memoryview(tail))
    except IntegrityError:
        return None  # replaced by a shorter one between the two requests
    except StorageError as error:
        if error.kind == "not-found":
            return None
        raise
    return split_footer(bytes(tail))[1]


def publish(store: Store, *, own: SlotRecord | None = None, own_stock: bytes | None = None) -> bool:
    """Bring `.metadata` up to the head; return whether it names the head now (invariant I13).

    Idempotent; any rank or opener with the right to write may call it. A saver passes the
    record of its own commit, and the bytes of its `stock.metadata` if it still has them; it also
    leaves the marker `published.json`, after which it never publishes again. Raises
    `StorageError`, and `IntegrityError` for a damaged `stock.metadata`; the commit stands all
    the same.
    """
    publisher = _Publisher(store, own, own_stock)
    for _ in range(_PUBLISH_ROUNDS):
        names_head = publisher.go_on()
        if names_head is None:
            continue
        if own is not None and own.save_id is not None and publisher.has_head:
            marker = {"format": "ckpt_storage.published/1", "save_id": own.save_id}
            store.write(layout.published_path(own.save_id), integrity.seal(marker))
        return names_head
    raise StorageError(
        f"{store.url}: .metadata was changed by others {_PUBLISH_ROUNDS} times while being "
        "published.",
        kind="precondition",
        path=layout.STOCK_METADATA,
        next_step="Find out what else writes there; the next save or load publishes again.",
    )


class _Publisher:
    """One run of `publish`: what was seen, done and announced so far."""

    def __init__(self, store: Store, own: SlotRecord | None, own_stock: bytes | None) -> None:
        self._store = store
        self._own = own
        self._own_stock = own_stock
        self._conditional = store.capabilities.replace_if_match
        # A compare-and-swap on the footer keeps the order by itself, whatever the head is by now.
        self._head = own if self._conditional else None
        self._put: HeadRef | None = None
        self._announced: str | None = None
        self._doubt_count = 0
        self.has_head = True

    def go_on(self) -> bool | None:
        """Look and act once; return whether `.metadata` names the head, None: look again."""
        store = self._store
        head, self._head = self._head or read_log(store, known=self._own).head, None
        current = read_if_there(store, layout.STOCK_METADATA)
        named = split_footer(current.data)[1] if current else None
        self.has_head = head is not None
        if head is None or head.stock is None:
            return self._withdraw(named)
        if named is not None and named.slot >= head.slot:
            return True
        is_mine = self._own is not None and self._own.save_id == head.save_id
        if not self._conditional and not is_mine:
            if self._own is not None and self._put is None:
                return False  # the head's own saver, or the next opener, sees to it
            if self._announced != head.save_id:
                self._announce(head)
                return None
        data = self._stock_of(head, self._own_stock if is_mine else None)
        if data is None or not self._replace(current, data, head):
            return None
        # Where what was read was the condition, nobody was overtaken. Else look again.
        return True if self._conditional and current is not None else None

    def _withdraw(self, named: HeadRef | None) -> bool | None:
        """Undo a replacement during which the checkpoint was deleted."""
        if self._put is None or named != self._put:
            return False
        self._store.delete([layout.STOCK_METADATA])
        self._put = None
        return None

    def _announce(self, head: SlotRecord) -> None:
        """Keep the head's files from being freed while somebody else than its saver publishes it.

        Who frees looks for this file once the head has moved on; who publishes looks at the head
        once this file is there. So one of the two sees the other.
        """
        save_id = head.save_id or ""
        note = {"format": "ckpt_storage.publishing/1", "save_id": save_id, **_stamp()}
        try:
            self._store.replace(_publishing_path(save_id), integrity.seal(note))
        except StorageError as error:
            if error.kind != "not-found" or self._is_head(head):
                raise
        else:
            self._announced = save_id

    def _is_head(self, head: SlotRecord) -> bool:
        now = read_log(self._store).head
        return now is not None and now.save_id == head.save_id

    def _stock_of(self, head: SlotRecord, data: bytes | None) -> bytes | None:
        """Return what `.metadata` must hold for `head`; None if it was freed meanwhile."""
        reference = head.stock
        if reference is None or head.save_id is None:  # pragma: no cover  # callers checked
            return None
        if data is None:
            try:
                data = self._store.read(reference.path)
            except StorageError as error:
                if error.kind != "not-found":
                    raise
                if self._is_head(head):
                    raise _missing(self._store, reference) from error
                return None
        check_document(data, reference)
        pickled, _ = split_footer(data)
        return with_footer(pickled, slot=head.slot, save_id=head.save_id)

    def _replace(self, current: Version | None, data: bytes, head: SlotRecord) -> bool:
        """Put `.metadata` in place of what was read; False: look at what is there now."""
        self._put, before = head.head, self._put
        try:
            if not self._conditional:
                self._store.replace(layout.STOCK_METADATA, data)
            elif current is None:
                self._store.create(layout.STOCK_METADATA, data)
            else:
                self._store.replace(layout.STOCK_METADATA, data, if_match=current.token)
        except StorageError as error:
            if error.kind in {"precondition", "exists", "not-found"}:
                self._put = before
                return False
            # An answer may have been lost.
            self._doubt_count += 1
            if not error.retryable or self._doubt_count > _PUBLISH_DOUBTS:
                raise
            return False
        return True


def roll_forward(store: Store, save_id: str) -> bool:
    """Publish `.metadata` if it does not name `save_id`, the head; return whether it does now.

    Two small requests when there is nothing to do. Raises `StorageError`, of kind "permission"
    for a reader that may not write. A copy that is damaged is not published; that is no reason
    to refuse the checkpoint itself.
    """
    named = read_footer(store)
    if named is not None and named.save_id == save_id:
        return True
    try:
        return publish(store)
    except IntegrityError as error:
        log.warning("%s: .metadata cannot be brought up to date: %s", store.url, error)
        return False


def _missing(store: Store, reference: FileRef) -> IntegrityError:
    return IntegrityError(
        f"{store.url}: {reference.path} is missing.",
        path=reference.path,
        offset=0,
        next_step="Restore the file from a copy, or load another checkpoint.",
    )


def check_document(data: bytes, reference: FileRef) -> None:
    """Raise `IntegrityError` unless `data` has the length and checksum of `reference`."""
    if len(data) != reference.size_bytes or integrity.crc32c_of(data) != reference.crc32c:
        raise IntegrityError(
            f"{reference.path} has {len(data)} bytes and checksum "
            f"{integrity.crc32c_of(data):08x}; {reference.size_bytes} bytes and "
            f"{reference.crc32c:08x} were written.",
            path=reference.path,
            offset=0,
            next_step="Restore the file from a copy, or load another checkpoint.",
        )


def history(store: Store, head: SlotRecord) -> Iterator[SlotRecord]:
    """Yield the commits that `head` superseded, newest first, as far as their records are there."""
    reference = head.previous
    while reference is not None:
        record = read_slot(store, reference.slot)
        if record is None or record.type != "commit":
            return
        yield record
        reference = record.previous


def free_superseded(
    store: Store, *, keep_previous: int = 1, known: SlotRecord | None = None
) -> list[str]:
    """Delete the files of superseded commits beyond the newest `keep_previous`; return save ids.

    Idempotent, safe when cut at any point, safe against readers of the head, savers, openers and
    other callers (invariant I7). Looks no further back than the newest one already freed;
    `free_leftovers` gets what had to be left then. `known` is any record of the log, and saves
    reads. Raises `StorageError`.
    """
    head = read_log(store, known=known).head
    if head is None:
        return []
    candidates: list[SlotRecord] = []
    for index, record in enumerate(history(store, head)):
        if index < keep_previous or record.save_id is None or record.manifest is None:
            continue
        if not is_there(store, record.manifest.path):
            # Who freed it may have been cut just before the end.
            store.delete_folder(layout.save_folder(record.save_id))
            break  # the manifest goes last, and older attempts go first
        candidates.append(record)
    return _free_commits(store, head, candidates[::-1])


def _free_commits(store: Store, head: SlotRecord, records: Sequence[SlotRecord]) -> list[str]:
    """Delete commits that `head` superseded and nobody can publish any more, in this order."""
    if not records:
        return []
    named = read_footer(store)
    is_shown = named is not None and named.slot >= head.slot
    # Once it is, every conditional replacement that was prepared before fails.
    is_settled = (is_shown or publish(store)) and store.capabilities.replace_if_match
    freed = []
    for record in records:
        save_id = record.save_id or ""
        if not is_settled:
            if not _cannot_publish(store, record):
                continue
            # Looked at only now: what was published late was published before that was ruled out.
            named = read_footer(store)
        if named is not None and named.save_id == save_id:
            continue
        delete_attempt(store, save_id)
        freed.append(save_id)
    return freed


def is_there(store: Store, path: str) -> bool:
    """Return whether an object is there, asked of the storage by name."""
    try:
        store.stat(path)
    except StorageError as error:
        if error.kind == "not-found":
            return False
        raise
    return True


def _cannot_publish(store: Store, record: SlotRecord) -> bool:
    """Whether nobody can put a superseded commit into `.metadata` any more.

    Its saver left a marker when it was done; others leave a note before they begin. Without the
    marker, or with a note, only time tells.
    """
    save_id = record.save_id or ""
    times_s: list[float | None] = []
    if not is_there(store, layout.published_path(save_id)):
        times_s.append(store.stat(layout.slot_path(record.slot)).modified_s)
    try:
        times_s.append(store.stat(_publishing_path(save_id)).modified_s)
    except StorageError as error:
        if error.kind != "not-found":
            raise
    if not times_s:
        return True
    known_s = [time_s for time_s in times_s if time_s is not None]
    if len(known_s) < len(times_s):
        return False
    return store.now_s(layout.probe_path()) - max(known_s) > LEFTOVER_AGE_S


def delete_attempt(store: Store, save_id: str) -> None:
    """Delete the folder of one attempt: shard files, rank manifests, the rest, the manifest last.

    The caller has made sure that nobody can need it. Idempotent. The markers by which that was
    made sure go with the folder, so that it still can be when this was cut half-way.
    """
    folder = layout.save_folder(save_id)
    store.abort_uploads(folder)
    paths = sorted(entry.path for entry in store.list(folder) if not entry.path.endswith("/"))
    manifest = layout.manifest_path(save_id)
    kept = {manifest, *markers_of(save_id)}
    shards = [path for path in paths if path.endswith(".distcp")]
    store.delete(shards)
    store.delete([path for path in paths if path not in kept and not path.endswith(".distcp")])
    store.delete([manifest])
    store.delete_folder(folder)


def fence(
    store: Store,
    save_ids: Sequence[str],
    *,
    exclusive: bool,
    deadline: Deadline,
    retry: RetryPolicy,
) -> CommitLog:
    """Take the next slot with a fence record: after it, none of `save_ids` can commit.

    Returns the log as of the fence. An id that has committed meanwhile shows as its head or in
    its history, and the caller must not delete it.
    """
    while True:
        found = read_log(store)
        record = SlotRecord(
            type="fence",
            slot=found.last_slot + 1,
            write_id=layout.new_write_id(),
            head=found.head.head if found.head else None,
            fenced=tuple(save_ids),
            **_stamp(),
        )
        holder = _take_slot(store, record, exclusive=exclusive, deadline=deadline, retry=retry)
        if holder.write_id == record.write_id:
            return replace(found, last_slot=record.slot, last=record)
        deadline.check(f"Fencing {', '.join(save_ids)}")


def free_leftovers(
    store: Store,
    *,
    exclusive: bool,
    deadline: Deadline,
    retry: RetryPolicy,
    min_age_s: float = LEFTOVER_AGE_S,
    keep_previous: int = 1,
    known: SlotRecord | None = None,
) -> list[str]:
    """Free attempts that are old enough and needed by nobody; return their save ids.

    These are attempts that never committed, which are fenced first, and superseded commits that
    `free_superseded` had to leave. Age is that of the youngest file of the attempt, by the
    storage's clock; a storage that tells no times keeps its leftovers. A listing chooses the
    candidates; fence and head make deleting them safe. Costs a listing and the search for the
    head when there is nothing old; otherwise all slots are read. `known` is as in
    `free_superseded`.
    """
    times_s = _last_changes(store)
    found = read_log(store, known=known)
    for reference in (found.head.head, found.head.previous) if found.head else ():
        times_s.pop(reference.save_id if reference else "", None)
    if not times_s:
        return []
    now_s = store.now_s(layout.probe_path())
    old = [save_id for save_id, time_s in times_s.items() if now_s - time_s >= min_age_s]
    if not old:
        return []
    commits = _commits(store, found)
    dead = [save_id for save_id in old if save_id not in commits]
    if dead:
        found = fence(store, dead, exclusive=exclusive, deadline=deadline, retry=retry)
        commits = _commits(store, found)
    freed = []
    if found.head is not None:
        order = list(commits)
        superseded = [commits[save_id] for save_id in order[keep_previous + 1 :] if save_id in old]
        freed = _free_commits(store, found.head, superseded[::-1])
    if dead:
        # `.metadata` may still show what was deleted before the head was saved anew.
        publish(store)
    for save_id in dead:
        if save_id not in commits:
            log.info("freeing save attempt %s, which no commit leads to", save_id)
            delete_attempt(store, save_id)
            freed.append(save_id)
    return freed


def _last_changes(store: Store) -> dict[str, float]:
    """Return, for each attempt, when its youngest file was written, by the storage's clock.

    Attempts of which the storage does not tell are left out.
    """
    times_s: dict[str, float] = {}
    untold: set[str] = set()
    for entry in store.list(layout.SAVES):
        save_id = entry.path.split("/")[1]
        if entry.modified_s is None:
            untold.add(save_id)
        elif layout.is_save_id(save_id):
            times_s[save_id] = max(times_s.get(save_id, 0.0), entry.modified_s)
    return {save_id: time_s for save_id, time_s in times_s.items() if save_id not in untold}


def _commits(store: Store, found: CommitLog) -> dict[str, SlotRecord]:
    """Return commits by save id, newest first: the head and what it superseded.

    Without a head, every commit record left in the slots: it was deleted, or is being deleted.
    """
    records: list[SlotRecord | None]
    if found.head is None:
        records = [read_slot(store, slot) for slot in range(found.last_slot, 0, -1)]
    else:
        records = [found.head, *history(store, found.head)]
    return {record.save_id: record for record in records if record and record.save_id}


def delete_checkpoint(
    store: Store, *, exclusive: bool, deadline: Deadline, retry: RetryPolicy
) -> None:
    """Delete a checkpoint: a deleted record in the next slot, `.metadata`, then all attempts.

    The slots stay as a tombstone: a paused saver that finds them fails with
    `CommitConflictError`. The record names the attempts that were there before it: only those
    are deleted, because their savers aim at the record's slot or an earlier one, while a saver
    that begins later aims behind it. Idempotent; cut at any point it leaves the old checkpoint
    or none.
    """
    while True:
        doomed = {entry.path.split("/")[1] for entry in store.list(layout.SAVES)}
        found = read_log(store)
        if found.last is None and not doomed:
            return
        record = _tombstone(store, found)
        if record is not None:
            break
        for known in (found.head, *history(store, found.head)) if found.head else ():
            if known.save_id is None or known.save_id in doomed:
                break
            doomed.add(known.save_id)  # it began and committed since the listing
        record = SlotRecord(
            type="deleted",
            slot=found.last_slot + 1,
            write_id=layout.new_write_id(),
            head=None,
            fenced=tuple(sorted(filter(layout.is_save_id, doomed))),
            **_stamp(),
        )
        holder = _take_slot(store, record, exclusive=exclusive, deadline=deadline, retry=retry)
        if holder.write_id == record.write_id:
            break
        deadline.check(f"Deleting {store.url}")
    named = read_footer(store)
    if named is None or named.slot < record.slot:
        store.delete([layout.STOCK_METADATA])
        # A saver that began after the record may have published between look and deletion.
        publish(store)
    for save_id in record.fenced:
        delete_attempt(store, save_id)


def _tombstone(store: Store, found: CommitLog) -> SlotRecord | None:
    """Return the deleted record that is in force, None if there is none."""
    record = None if found.head else found.last
    while record is not None and record.type == "fence":
        # Somebody cleared away attempts after the deletion.
        record = read_slot(store, record.slot - 1)
    return record if record is not None and record.type == "deleted" else None
