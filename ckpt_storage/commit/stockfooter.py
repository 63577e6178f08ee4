"""The footer behind `.metadata`: whose it is, and of which save. Unpickles nothing."""

from __future__ import annotations

import logging

from ckpt_storage.errors import FormatError, IntegrityError, StorageError
from ckpt_storage.format.commit_record import HeadRef, SlotRecord, split_footer
from ckpt_storage.format.names import STOCK_METADATA, published_path, slot_path
from ckpt_storage.store.store import Store

from .slotlog import CommitLog, is_there, read_log

log = logging.getLogger("ckpt_storage")

_PICKLE_STOP = b"."

_FOOTER_MOST_BYTES = 512


def read_footer(store: Store) -> HeadRef | None:
    """Return what the footer of `.metadata` names, None if it has none or is not there.

    Two small requests, however large the pickle is.
    """
    return split_footer(_tail(store))[1]


def _tail(store: Store) -> bytes:
    try:
        size_bytes = store.stat(STOCK_METADATA).size_bytes
        tail = bytearray(min(size_bytes, _FOOTER_MOST_BYTES))
        store.read(STOCK_METADATA, [(size_bytes - len(tail), memoryview(tail))])
    except IntegrityError:
        return b""  # replaced by a shorter one between the two requests
    except StorageError as error:
        if error.kind == "not-found":
            return b""
        raise
    return bytes(tail)


def check_newest(store: Store, head: SlotRecord, stock: bytes | None = None) -> None:
    """Raise `FormatError` if `.metadata` tells of a newer save than `head`.

    That is another tool's save over a head that was published, or a slot behind all that are
    there. One that is damaged or cannot be read raises nothing. `stock` is its content, if that was
    read; else looking takes two small requests.
    """
    try:
        tail = _tail(store) if stock is None else stock
    except StorageError as error:
        log.info("%s: .metadata cannot be read, and so is not looked at: %s", store.url, error)
        return
    named = split_footer(tail)[1]
    ours = f"save {head.save_id} of {head.created_at} in {slot_path(head.slot)}"
    if named is None and tail.endswith(_PICKLE_STOP) and _is_written_after(store, head):
        raise FormatError(
            f"{store.url} holds two checkpoints: {ours}, and a newer one that another tool, such "
            "as torch's own writer, saved over it (.metadata).",
            path=STOCK_METADATA,
            phase="load",
            next_step="To keep the newer one, load it with torch's own reader. To keep the older "
            "one, delete .metadata. To replace both, save with overwrite=True.",
        )
    if (
        named is not None
        and named.slot > head.slot
        and named.slot > read_log(store, known=head).last_slot
    ):
        raise FormatError(
            f"{store.url}: .metadata names save {named.save_id} in slot {named.slot}, but the "
            f"newest commit that can be found is {ours}.",
            path=slot_path(named.slot),
            phase="load",
            next_step="The folder commits/ lost files; restore it from a copy. torch's own "
            "readers still load what .metadata names, without checksums.",
        )


def _is_written_after(store: Store, head: SlotRecord) -> bool:
    """Return whether a `.metadata` that is not ours is newer than `head`."""
    if is_there(store, published_path(head.save_id or "")):
        return True
    # Somebody else than its saver may have published it: those leave no marker.
    stock_s = store.stat(STOCK_METADATA).modified_s
    slot_s = store.stat(slot_path(head.slot)).modified_s
    return stock_s is not None and slot_s is not None and stock_s > slot_s


def is_foreign(store: Store, found: CommitLog) -> bool:
    """Return whether another tool committed what lies at the root of `store`.

    `found` are its slots. Of a deleted checkpoint they stay, and another tool may save under its
    name later: it does if there is a `.metadata` without our footer. Raises `StorageError`.
    """
    if found.head is not None or not is_there(store, STOCK_METADATA):
        return False
    return found.last is None or read_footer(store) is None
