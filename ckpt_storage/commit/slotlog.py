"""The commit slots as they lie on a storage: read, searched for the head, and taken."""

from __future__ import annotations

import os
import socket
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeVar

from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    FormatError,
    IntegrityError,
    StorageError,
)
from ckpt_storage.format import names
from ckpt_storage.format.commit_record import HeadRef, SlotRecord
from ckpt_storage.format.documents import DAMAGED, MOST_DOCUMENT_BYTES, MOST_SLOT_BYTES, FileRef
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.store.backend import Content, ObjectInfo
from ckpt_storage.store.probe import create_new
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import side_by_side

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLog:
    """The slots of one checkpoint as read: the highest slot, its record, and the head commit."""

    last_slot: int
    last: SlotRecord | None
    head: SlotRecord | None


def read_slot(store: Store, slot: int) -> SlotRecord | None:
    """Return the record in `slot`, None if there is none."""
    found = read_if_there(store, names.slot_path(slot), most_bytes=MOST_SLOT_BYTES)
    return None if found is None else SlotRecord.decode(found.data, slot=slot)


def read_log(
    store: Store, *, known: SlotRecord | None = None, for_reader: bool = False
) -> CommitLog:
    """Find the highest slot by galloping over names, and the head it tells of (invariant I3).

    About 2 log2(n) reads for n slots, 2 for a checkpoint saved once, one and a listing where
    nothing is; where the record of a slot is `known`, n counts from there. `for_reader` asks a
    remote storage for the first two side by side: mostly there is no more. Safe on any rank.
    """
    slots = _Slots(store)
    look = slots.look
    if for_reader and store.capabilities.is_remote:
        side_by_side(store, [partial(slots.read, slot) for slot in (1, 2)])
    low = 0
    if known is not None:
        low, slots.answers[known.slot] = known.slot, known

    if look(low + 1) is None and known is None:
        # Those of a deleted checkpoint go in this order.
        lowest = _lowest_slot(store)
        low = lowest - 1 if lowest and look(lowest) else 0
    origin, high = low, low + 1
    while look(high) is not None:
        low, high = high, 2 * high - origin
    low = bisect_left(range(high), 1, lo=low + 1, key=lambda slot: look(slot) is None) - 1
    last = look(low) if low else None
    if last is None or last.head is None:
        return CommitLog(last_slot=low, last=last, head=None)
    reference = last.head
    head = look(reference.slot)
    if head is None or head.type != "commit" or head.save_id != reference.save_id:
        raise FormatError(
            f"{store.url}: slot {low} names slot {reference.slot} as the newest commit of "
            f"{reference.save_id}, which it is not.",
            path=names.slot_path(low),
            next_step="The folder commits/ was altered; restore it from a copy.",
        )
    return CommitLog(last_slot=low, last=last, head=head)


class _Slots:
    """The slots of one checkpoint as they were answered, each read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.answers: dict[int, SlotRecord | StorageError | None] = {}

    def read(self, slot: int) -> None:
        """Read a slot; a refusal is kept, as it may mean that the slot is absent."""
        try:
            self.answers[slot] = read_slot(self._store, slot)
        except StorageError as error:
            if error.kind != "permission":
                raise
            self.answers[slot] = error

    def look(self, slot: int) -> SlotRecord | None:
        """Return the record in a slot, None if it is absent.

        To credentials that may not list, S3 forbids what is absent. Whoever could read one slot may
        read all, and a refusal means then that there is none.
        """
        if slot not in self.answers:
            self.read(slot)
        answer = self.answers[slot]
        if not isinstance(answer, StorageError):
            return answer
        if any(isinstance(other, SlotRecord) for other in self.answers.values()):
            return None
        raise answer


def listed_slots(store: Store) -> list[int]:
    """Return the numbers of the slots that a listing shows, ascending."""
    found = (entry.path.rpartition("/")[2] for entry in store.list(names.COMMITS, recursive=False))
    return sorted(number for name in found if (number := names.slot_number(name)))


def _lowest_slot(store: Store) -> int:
    """Return the lowest slot where there is no slot 1, 0 if there is none at all."""
    try:
        return next(iter(listed_slots(store)), 0)
    except StorageError as error:
        # Who may not list, and who cannot, sees no log of which slots were removed.
        if error.kind in {"not-found", "permission", "unsupported"}:
            return 0
        raise


def history(store: Store, head: SlotRecord | None) -> Iterator[SlotRecord]:
    """Yield `head` and the commits it superseded, newest first, as far as records are there."""
    while head is not None and head.type == "commit":
        yield head
        head = read_slot(store, head.previous.slot) if head.previous else None


def if_there(ask: Callable[[], T]) -> T | None:
    """Return what a storage answers, None where what it is asked for is absent."""
    try:
        return ask()
    except StorageError as error:
        if error.kind == "not-found":
            return None
        raise


def read_if_there(
    store: Store, path: str, *, most_bytes: int = MOST_DOCUMENT_BYTES
) -> Content | None:
    """Return a document of at most `most_bytes` and its version token, None if it is absent."""
    return if_there(partial(store.get, path, max_bytes=most_bytes))


def read_stock(store: Store) -> Content | None:
    """Return `.metadata` with its version token, None if it is absent. As `read_if_there`."""
    return read_if_there(store, names.STOCK_METADATA, most_bytes=MOST_STOCK_BYTES)


def is_there(store: Store, path: str) -> bool:
    """Return whether an object is there, asked of the storage by name."""
    return stat_if_there(store, path) is not None


def stat_if_there(store: Store, path: str) -> ObjectInfo | None:
    """Return what the storage tells of an object, None if it is absent."""
    return if_there(partial(store.stat, path))


def read_referenced(
    store: Store, reference: FileRef, *, most_bytes: int = MOST_DOCUMENT_BYTES
) -> bytes:
    """Return the document that another one names, read no further than that says, and checked.

    Raises `StorageError`, and `IntegrityError` for one that is damaged or missing, and for a
    reference to more than `most_bytes`: whoever wrote it made up its length.
    """
    if reference.size_bytes > most_bytes:
        what = (
            f"{store.url}: {reference.path} is said to have {reference.size_bytes} bytes; no such "
            f"document has more than {most_bytes}."
        )
        raise IntegrityError(what, path=reference.path, offset=0, next_step=DAMAGED)
    found = read_if_there(store, reference.path, most_bytes=reference.size_bytes)
    if found is None:
        what = f"{store.url}: {reference.path} is missing."
        raise IntegrityError(what, path=reference.path, offset=0, next_step=DAMAGED)
    check_document(found.data, reference)
    return found.data


def check_document(data: bytes, reference: FileRef) -> None:
    """Raise `IntegrityError` unless `data` has the length and checksum of `reference`."""
    found = FileRef.of(reference.path, data)
    if found != reference:
        what = (
            f"{reference.path} has {found.size_bytes} bytes and checksum {found.crc32c:08x}; "
            f"{reference.size_bytes} bytes and {reference.crc32c:08x} were written."
        )
        raise IntegrityError(what, path=reference.path, offset=0, next_step=DAMAGED)


def stamp() -> dict[str, Any]:
    """Return who writes a record and when, for people."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created_at": now, "host": socket.gethostname(), "pid": os.getpid()}


def how_to_settle(url: str) -> str:
    """Return how to find out whether a save to `url` is committed, where that is unknown."""
    return (
        f"Once rank 0 has given up or ended, run `ckpt-storage show {url} --history`. A commit "
        "record with this save id: committed, perhaps superseded since. None, or no checkpoint, "
        "after Timeouts.request: not committed. Saving again is safe."
    )


def take_slot(
    store: Store,
    kind: Literal["commit", "fence", "deleted"],
    slot: int,
    head: HeadRef | None,
    **said: Any,  # noqa: ANN401  # fields of `SlotRecord`
) -> tuple[SlotRecord, bool]:
    """Create a slot; return whatever record holds it afterwards, and whether that is ours (I5).

    Raises `PhaseTimeoutError` if there was no time even to try, and `StorageError` if it is proved
    that nothing was created. Otherwise `CommitUnknownError` for a commit; for other records, which
    may be taken again, `StorageError` of kind "unknown".
    """
    record = SlotRecord(
        type=kind, slot=slot, head=head, write_id=names.new_write_id(), **stamp(), **said
    )
    store.deadline.check(f"Taking slot {slot} of {store.url}")
    path, data = names.slot_path(slot), record.encode()
    try:
        try:
            create_new(store, path, data)
        except StorageError as error:
            if error.kind != "not-found":
                raise
            # The folder went with the slots of a deleted checkpoint.
            store.make_folders([names.COMMITS])
            create_new(store, path, data)
    except StorageError as error:
        if error.kind not in {"exists", "unknown"}:
            raise
        failure = error
    else:
        return record, True
    holder = None
    if failure.kind == "exists":
        try:
            holder = read_slot(store, slot)
        except CheckpointError as error:
            failure.add_note(f"Reading slot {slot} failed: {error}")
    if holder is not None:
        return holder, holder.write_id == record.write_id
    who = f"a {kind} record" if record.save_id is None else f"save {record.save_id}"
    what = f"Whether {who} took slot {slot} of {store.url} cannot be told: {failure}"
    if record.save_id is None:
        step = "When the storage answers again, repeat the call."
        raise StorageError(
            what, kind="unknown", retryable=True, path=path, next_step=step
        ) from failure
    raise CommitUnknownError(
        what,
        save_id=record.save_id,
        slot=slot,
        path=path,
        phase="commit",
        next_step=how_to_settle(store.url),
    ) from failure
