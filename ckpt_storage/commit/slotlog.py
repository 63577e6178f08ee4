"""The commit slots as they lie on a storage: find the highest, and the head it tells of."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ckpt_storage.errors import FormatError, IntegrityError, StorageError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import DAMAGED, MOST_DOCUMENT_BYTES, MOST_SLOT_BYTES, FileRef
from ckpt_storage.format.names import COMMITS, STOCK_METADATA, slot_number, slot_path
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.store.backend import Content
from ckpt_storage.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLog:
    """The slots of one checkpoint as read: the highest slot, its record, and the head commit."""

    last_slot: int
    last: SlotRecord | None
    head: SlotRecord | None


def read_slot(store: Store, slot: int) -> SlotRecord | None:
    """Return the record in `slot`, None if there is none.

    Raises `StorageError`, `IntegrityError`, `FormatError`.
    """
    try:
        data = store.get(slot_path(slot), max_bytes=MOST_SLOT_BYTES).data
    except StorageError as error:
        if error.kind == "not-found":
            return None
        raise
    return SlotRecord.decode(data, slot=slot)


def read_log(store: Store, *, known: SlotRecord | None = None) -> CommitLog:
    """Find the highest slot by galloping over names, and the head it tells of (invariant I3).

    About 2 log2(n) reads for n slots, 2 for a checkpoint saved once, one and a listing where
    nothing is; where the record of a slot is `known`, n counts from there. Safe on any rank.
    """
    return _log_of(store, partial(read_slot, store), known)


def read_log_together(store: Store) -> CommitLog:
    """Do what `read_log` does, asking for the first two slots side by side; for readers.

    Of a checkpoint saved once that is all there is to ask for, so it takes one round trip. In a
    folder without slots it costs a request more.
    """
    second: list[SlotRecord | Exception | None] = []

    def ask() -> None:
        try:
            second.append(read_slot(store, 2))
        except Exception as error:  # noqa: BLE001  # raised by the thread that wants the answer
            second.append(error)

    thread = threading.Thread(target=ask, name=f"read slot 2 of {store.url}", daemon=True)
    thread.start()

    def read(slot: int) -> SlotRecord | None:
        if slot != 2:  # noqa: PLR2004  # the one that was asked for
            return read_slot(store, slot)
        # It ends when a request must.
        thread.join()
        found = second[0]
        if isinstance(found, Exception):
            raise found
        return found

    return _log_of(store, read, None)


def listed_slots(store: Store) -> list[int]:
    """Return the numbers of the slots that a listing shows, ascending."""
    names = (entry.path.rpartition("/")[2] for entry in store.list(COMMITS, recursive=False))
    return sorted(number for name in names if (number := slot_number(name)))


def _lowest_slot(store: Store) -> int:
    """Return the lowest slot where there is no slot 1, 0 if there is none at all."""
    try:
        return next(iter(listed_slots(store)), 0)
    except StorageError as error:
        # Who may not list, and who cannot, sees no log of which slots were removed.
        if error.kind in {"not-found", "permission", "unsupported"}:
            return 0
        raise


def _log_of(
    store: Store, read: Callable[[int], SlotRecord | None], known: SlotRecord | None
) -> CommitLog:
    low, low_record = (known.slot, known) if known else (0, None)
    record = read(low + 1)
    if record is None and known is None and (lowest := _lowest_slot(store)):
        # Those of a deleted checkpoint go in this order.
        record = read(lowest)
        low = lowest - 1 if record else 0
    origin, high = low, low + 1
    while record is not None:
        low, low_record = high, record
        high += high - origin
        record = read(high)
    while high - low > 1:
        middle = (low + high) // 2
        record = read(middle)
        if record is None:
            high = middle
        else:
            low, low_record = middle, record
    if low_record is None or low_record.head is None:
        return CommitLog(last_slot=low, last=low_record, head=None)
    reference = low_record.head
    head = low_record if reference.slot == low else read(reference.slot)
    if head is None or head.type != "commit" or head.save_id != reference.save_id:
        raise FormatError(
            f"{store.url}: slot {low} names slot {reference.slot} as the newest commit of "
            f"{reference.save_id}, which it is not.",
            path=slot_path(low),
            next_step="The folder commits/ was altered; restore it from a copy.",
        )
    return CommitLog(last_slot=low, last=low_record, head=head)


def read_if_there(
    store: Store, path: str, *, most_bytes: int = MOST_DOCUMENT_BYTES
) -> Content | None:
    """Return a document with its version token, None if it is absent.

    Raises `IntegrityError` for one of more than `most_bytes`, which is not read.
    """
    try:
        return store.get(path, max_bytes=most_bytes)
    except StorageError as error:
        if error.kind == "not-found":
            return None
        raise


def stamp() -> dict[str, Any]:
    """Return who writes a record and when, for people."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created_at": now, "host": socket.gethostname(), "pid": os.getpid()}


def read_stock(store: Store) -> Content | None:
    """Return `.metadata` with its version token, None if it is absent. As `read_if_there`."""
    return read_if_there(store, STOCK_METADATA, most_bytes=MOST_STOCK_BYTES)


def read_referenced(
    store: Store, reference: FileRef, *, most_bytes: int = MOST_DOCUMENT_BYTES
) -> bytes:
    """Return the document that another one names, read no further than that says, and checked.

    Raises `StorageError` and `IntegrityError`, also for a reference to more than `most_bytes`:
    whoever wrote it made up its length.
    """
    if reference.size_bytes > most_bytes:
        raise IntegrityError(
            f"{store.url}: {reference.path} is said to have {reference.size_bytes} bytes; no such "
            f"document has more than {most_bytes}.",
            path=reference.path,
            offset=0,
            next_step=DAMAGED,
        )
    data = store.get(reference.path, max_bytes=reference.size_bytes).data
    check_document(data, reference)
    return data


def check_document(data: bytes, reference: FileRef) -> None:
    """Raise `IntegrityError` unless `data` has the length and checksum of `reference`."""
    if len(data) != reference.size_bytes or crc32c_of(data) != reference.crc32c:
        raise IntegrityError(
            f"{reference.path} has {len(data)} bytes and checksum "
            f"{crc32c_of(data):08x}; {reference.size_bytes} bytes and "
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


def is_there(store: Store, path: str) -> bool:
    """Return whether an object is there, asked of the storage by name."""
    try:
        store.stat(path)
    except StorageError as error:
        if error.kind == "not-found":
            return False
        raise
    return True
