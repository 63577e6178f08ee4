"""Commit slots on a storage: reading them, finding the head, and creating the next slot."""

from __future__ import annotations

import os
import socket
from bisect import bisect_left
from collections.abc import Iterator
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
from ckpt_storage.format.documents import MAX_SLOT_BYTES
from ckpt_storage.store.probe import create_new
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.objects import read_decoded, read_or_none, read_twice
from ckpt_storage.transfer.workers import side_by_side

T = TypeVar("T")

_MAX_SLOT = 1 << 40
"""More slots than saves can take; a server that shows more answers for absent files, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLog:
    """The highest slot of a checkpoint, its record, and the head."""

    last_slot: int
    last: SlotRecord | None
    head: SlotRecord | None

    @classmethod
    def ending_with(cls, head: SlotRecord) -> CommitLog:
        """Return the log that ends with a commit."""
        return cls(last_slot=head.slot, last=head, head=head)


def read_slot(store: Store, slot: int) -> SlotRecord | None:
    """Return the record in `slot`, None if the slot is free."""
    decode = partial(SlotRecord.decode, slot=slot)
    return read_decoded(store, names.slot_path(slot), decode, max_bytes=MAX_SLOT_BYTES)


class _SlotReader:
    """The slots of one checkpoint, each read at most once."""

    def __init__(self, store: Store, known: SlotRecord | None) -> None:
        self._store = store
        self._records = {} if known is None else {known.slot: known}
        self._contents: dict[int, bytes | StorageError | None] = {}

    def prefetch(self, *slots: int) -> None:
        calls = [partial(_slot_bytes, self._store, slot) for slot in slots]
        self._contents.update(zip(slots, side_by_side(self._store, calls), strict=True))

    def is_taken(self, slot: int) -> bool:
        """Return whether a slot has a file, sound or not.

        Without the right to list, S3 answers 403 for absent objects. Once one slot could be read, a
        403 for another slot means that it is free.
        """
        if slot in self._records:
            return True
        if slot not in self._contents:
            self._contents[slot] = _slot_bytes(self._store, slot)
        content = self._contents[slot]
        if not isinstance(content, StorageError):
            return content is not None
        if not self._records and not any(
            isinstance(data, bytes) for data in self._contents.values()
        ):
            raise content
        return False

    def record(self, slot: int) -> SlotRecord | None:
        """Return the record in a slot, None if it is free. Raises as `SlotRecord.decode`."""
        if slot not in self._records and self.is_taken(slot):
            content = self._contents[slot]
            data = content if isinstance(content, bytes) else b""
            self._records[slot] = _decoded(self._store, slot, data)
        return self._records.get(slot)


def read_log(
    store: Store, *, known: SlotRecord | None = None, for_reader: bool = False
) -> CommitLog:
    """Find the highest slot by a galloping search, and the head that its record names (I3).

    Only these two records are decoded; of other slots, only the existence matters. Takes about
    2 log2(n) reads for n slots, 2 for a checkpoint with one save, and a read and a listing without
    a checkpoint; with the record of a slot in `known`, n counts from that slot. With `for_reader`,
    the first two slots of a remote storage are read concurrently. Any rank.
    """
    slots, low = _SlotReader(store, known), known.slot if known else 0
    if for_reader and store.capabilities.is_remote:
        slots.prefetch(1, 2)
    if not slots.is_taken(low + 1) and known is None:
        # The lowest slots of a deleted checkpoint are removed first.
        lowest = _lowest_slot(store)
        low = lowest - 1 if lowest and slots.is_taken(lowest) else 0
    origin, high = low, low + 1
    while high < _MAX_SLOT and slots.is_taken(high):
        low, high = high, 2 * high - origin
    low = bisect_left(range(high), 1, lo=low + 1, key=lambda slot: not slots.is_taken(slot)) - 1
    last = slots.record(low) if low else None
    if last is None or last.head is None:
        return CommitLog(last_slot=low, last=last, head=None)
    reference = last.head
    head = slots.record(reference.slot)
    if head is None or head.type != "commit" or head.save_id != reference.save_id:
        raise FormatError(
            f"{store.url}: slot {low} names slot {reference.slot} as the commit of "
            f"{reference.save_id}, but that slot holds another record.",
            path=names.slot_path(low),
            next_step="The folder commits/ was changed; restore it from a copy.",
        )
    return CommitLog(last_slot=low, last=last, head=head)


def _slot_bytes(store: Store, slot: int) -> bytes | StorageError | None:
    """Return the content of a slot, None if it is free, or the error if it is forbidden."""
    try:
        content = read_or_none(store, names.slot_path(slot), max_bytes=MAX_SLOT_BYTES)
    except IntegrityError:
        # A file that is too long to be a record occupies the slot all the same.
        return b""
    except StorageError as error:
        if error.kind != "permission":
            raise
        return error
    return None if content is None else content.data


def _decoded(store: Store, slot: int, data: bytes) -> SlotRecord:
    """Return the record in `data`, the content of a slot; a damaged record is read again."""
    path, decode = names.slot_path(slot), partial(SlotRecord.decode, slot=slot)

    def again() -> SlotRecord:
        return decode(store.get(path, max_bytes=MAX_SLOT_BYTES).data)

    return read_twice(store, path, partial(decode, data), again)


def listed_slots(store: Store) -> list[int]:
    """Return the numbers of the slots in a listing, ascending."""
    files = (entry.path.rpartition("/")[2] for entry in store.list(names.COMMITS, recursive=False))
    return sorted(number for name in files if (number := names.slot_number(name)))


def _lowest_slot(store: Store) -> int:
    try:
        return next(iter(listed_slots(store)), 0)
    except StorageError as error:
        # Without a listing, a log whose lowest slots were removed looks empty.
        if error.kind in {"not-found", "permission", "unsupported"}:
            return 0
        raise


def history(store: Store, head: SlotRecord | None) -> Iterator[SlotRecord]:
    """Yield `head` and the commits that it superseded, newest first, up to a missing record."""
    while head is not None and head.type == "commit":
        yield head
        head = read_slot(store, head.previous.slot) if head.previous else None


def stamp() -> dict[str, Any]:
    """Return the time, host and process of a record, for people."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created_at": now, "host": socket.gethostname(), "pid": os.getpid()}


def resolution_steps(url: str) -> str:
    """Return how to find out whether a save to `url` was committed."""
    return (
        f"Once rank 0 has raised its error or ended, run `ckpt-storage show {url} --history`. With "
        "a commit record of this save id, the save is committed, and perhaps superseded since. "
        "Without one after Timeouts.request, it is not committed. Saving again is safe."
    )


def take_slot(
    store: Store,
    kind: Literal["commit", "fence", "deleted"],
    slot: int,
    head: HeadRef | None,
    **fields: Any,  # noqa: ANN401  # fields of `SlotRecord`
) -> tuple[SlotRecord, bool]:
    """Create a slot; return the record in it afterwards, and whether that is ours (I5).

    Raises `PhaseTimeoutError` if the deadline passed before the attempt, and `StorageError` if
    certainly nothing was created. If the outcome is unknown, raises `CommitUnknownError` for a
    commit, and `StorageError` of kind "unknown" for other records, which may be created again.
    """
    record = SlotRecord(
        type=kind, slot=slot, head=head, write_id=names.new_write_id(), **stamp(), **fields
    )
    store.deadline.check(f"Taking slot {slot} of {store.url}")
    path, data = names.slot_path(slot), record.encode()
    try:
        try:
            create_new(store, path, data)
        except StorageError as error:
            if error.kind != "not-found":
                raise
            # The folder was removed with the slots of a deleted checkpoint.
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
    what = f"It is not known whether {who} took slot {slot} of {store.url}: {failure}"
    if record.save_id is None:
        step = "Repeat the call when the storage responds again."
        raise StorageError(
            what, kind="unknown", retryable=True, path=path, next_step=step
        ) from failure
    raise CommitUnknownError(
        what,
        save_id=record.save_id,
        slot=slot,
        path=path,
        phase="commit",
        next_step=resolution_steps(store.url),
    ) from failure
