"""`.metadata` for stock readers: whose it is, and how it follows the head (invariant I13).

Its footer names the slot. A storage that replaces under a condition keeps the order by itself.
Elsewhere a publisher that was paused may bring back an older one; it then looks again and mends it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_storage.errors import (
    CheckpointNotFoundError,
    FormatError,
    IntegrityError,
    NotPublishedError,
    StorageError,
)
from ckpt_storage.format.commit_record import HeadRef, SlotRecord, split_footer, with_footer
from ckpt_storage.format.names import STOCK_METADATA, slot_path
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Content, Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import compare_and_swap, replaces_by_version
from ckpt_storage.store.store import Store

from .info import CheckpointInfo
from .slotlog import CommitLog, if_there, is_there, read_log, read_referenced, read_stock

log = logging.getLogger("ckpt_storage")

_PICKLE_STOP = b"."
_FOOTER_MOST_BYTES = 512
_ROUNDS = 20
_DOUBTS = 3


def read_footer(store: Store) -> HeadRef | None:
    """Return what the footer of `.metadata` names, if anything, by two small requests."""
    return split_footer(_tail(store))[1]


def _tail(store: Store) -> bytes:

    def read() -> bytes:
        size_bytes = store.stat(STOCK_METADATA).size_bytes
        tail = bytearray(min(size_bytes, _FOOTER_MOST_BYTES))
        store.read(STOCK_METADATA, [(size_bytes - len(tail), memoryview(tail))])
        return bytes(tail)

    try:
        return if_there(read) or b""
    except IntegrityError:
        return b""  # replaced by a shorter one between the two requests


def is_foreign(store: Store, found: CommitLog) -> bool:
    """Return whether another tool committed what lies at the root of `store`.

    `found` are its slots. Of a deleted checkpoint they stay, and another tool may save under its
    name later: it does if there is a `.metadata` without our footer. Raises `StorageError`.
    """
    if found.head is not None or not is_there(store, STOCK_METADATA):
        return False
    return found.last is None or read_footer(store) is None


def check_newest(store: Store, head: SlotRecord, stock: bytes | None = None) -> None:
    """Raise `FormatError` if `.metadata` tells of a newer save than `head`.

    That is another tool's save over a head that was published, or a slot behind all that are
    there. One that is damaged or cannot be read raises nothing. `stock` is its content, if that was
    read; else looking takes two small requests.
    """
    try:
        tail = _tail(store) if stock is None else stock
    except StorageError as error:
        log.warning("%s: .metadata cannot be read, and so is not looked at: %s", store.url, error)
        return
    named = split_footer(tail)[1]
    ours = f"save {head.save_id} of {head.created_at} in {slot_path(head.slot)}"
    if named is None and tail.endswith(_PICKLE_STOP):
        paths = (STOCK_METADATA, slot_path(head.slot))
        stock_s, slot_s = (store.stat(path).modified_s for path in paths)
        # One of the same second is newer, too.
        if stock_s is not None and slot_s is not None and stock_s >= slot_s:
            raise FormatError(
                f"{store.url} holds two checkpoints: {ours}, and a newer one that another tool, "
                "such as torch's own writer, saved over it (.metadata).",
                path=STOCK_METADATA,
                phase="load",
                next_step="To keep the newer one, load it with torch's own reader. To keep the "
                "older one, delete .metadata. To replace both, save with overwrite=True.",
            )
    if named is None or named.slot <= head.slot:
        return
    if named.slot > read_log(store, known=head).last_slot:
        raise FormatError(
            f"{store.url}: .metadata names save {named.save_id} in slot {named.slot}, but the "
            f"newest commit that can be found is {ours}.",
            path=slot_path(named.slot),
            phase="load",
            next_step="The folder commits/ lost files; restore it from a copy. torch's own "
            "readers still load what .metadata names, without checksums.",
        )


def publish(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | Timeouts | Any = None,  # noqa: ANN401  # timedelta too; Timeouts.of checks
    retry: RetryPolicy | None = None,
) -> None:
    """Bring `.metadata`, by which torch's own readers load, up to the newest commit at `url`.

    For a save that raised `NotPublishedError`, once the cause is gone. Does nothing where
    `.metadata` is up to date. Any rank; not collective.

    Raises `StorageError` if it still cannot be replaced, `CheckpointNotFoundError` if there is no
    checkpoint of ours, `FormatError` if another tool saved a newer one there, `IntegrityError` if
    the copy that is to be published is damaged, `PhaseTimeoutError`, `InvalidInputError`.
    """
    location = Location.of(url, storage_options)
    timeouts = Timeouts.of(timeout)
    deadline = Deadline("commit", timeouts.commit)
    store = open_store(location, timeouts=timeouts, retry=retry or RetryPolicy()).bounded(deadline)
    with deadline.governs(f"Publishing {location.url}"):
        if read_log(store).head is None:
            raise CheckpointNotFoundError(
                f"{location.url} holds no checkpoint of this package.",
                path=location.url,
                phase="commit",
                next_step="Check the path; list_checkpoints(root) shows what is there.",
            )
        publish_head(store)


def publish_head(
    store: Store, *, own: SlotRecord | None = None, own_stock: bytes | None = None
) -> bool:
    """Bring `.metadata` up to the head; return whether it names the head now (invariant I13).

    Idempotent; any rank or opener with the right to write may call it. A saver passes the record of
    its own commit, and the bytes of its `stock.metadata` if it still has them. Raises
    `StorageError`, `IntegrityError` for a damaged `stock.metadata`, and without `own` `FormatError`
    as `check_newest`; the commit stands all the same.
    """
    is_conditional = own is not None and replaces_by_version(store)
    # A compare-and-swap on the footer keeps the order by itself, whatever the head is by now.
    head, last_slot = own if is_conditional else None, 0
    has_put, doubt_count = False, 0
    for round_ in range(_ROUNDS):
        if round_ or head is None:
            found = read_log(store, known=own)
            head, last_slot = found.head, found.last_slot
        current = read_stock(store)
        named = split_footer(current.data)[1] if current else None
        if own is None and head is not None and current is not None:
            check_newest(store, head, current.data)
        if head is None or head.stock is None:
            if not has_put or named is None or named.slot > last_slot:
                return False
            # The checkpoint was deleted meanwhile: what was put over it is taken back.
            store.delete([STOCK_METADATA])
            has_put = False
            continue
        if named is not None and named.slot >= head.slot:
            return True
        data = own_stock if own == head else None
        try:
            is_put = _replaced(store, head, current, data)
        except StorageError as error:
            # An answer may have been lost.
            has_put = True
            doubt_count += 1
            if not error.retryable or doubt_count > _DOUBTS:
                raise
            continue
        has_put = has_put or is_put
        is_conditional = is_conditional or replaces_by_version(store)
        # Where nothing was, only a deletion can have come in between.
        if is_put and is_conditional and (current is not None or _is_head(store, head)):
            return True
    raise StorageError(
        f"{store.url}: .metadata was changed by others {_ROUNDS} times while being published.",
        kind="precondition",
        path=STOCK_METADATA,
        next_step="Find out what else writes there; the next save or load publishes again.",
    )


def _replaced(store: Store, head: SlotRecord, current: Content | None, stock: bytes | None) -> bool:
    """Put `.metadata` in place of what was read; return False if something else is there now."""
    assert head.stock is not None  # noqa: S101  # the caller made sure
    try:
        stock = stock or read_referenced(store, head.stock, most_bytes=MOST_STOCK_BYTES)
    except IntegrityError:
        if _is_head(store, head):
            raise
        return False  # it was freed meanwhile
    data = with_footer(split_footer(stock)[0], slot=head.slot, save_id=head.save_id or "")
    try:
        compare_and_swap(store, STOCK_METADATA, data, current)
    except StorageError as error:
        if error.kind in {"precondition", "exists", "not-found"}:
            return False
        raise
    return True


def _is_head(store: Store, record: SlotRecord) -> bool:
    now = read_log(store, known=record).head
    return now is not None and now.save_id == record.save_id


def roll_forward(store: Store, save_id: str) -> bool:
    """Publish `.metadata` if it does not name `save_id`, the head; return whether it does now.

    Two small requests when there is nothing to do. Raises `StorageError`, of kind "permission"
    for a reader that may not write, and `FormatError` as `check_newest`. A copy that is damaged is
    not published; that is no reason to refuse the checkpoint itself.
    """
    named = read_footer(store)
    if named is not None and named.save_id == save_id:
        return True
    try:
        return publish_head(store)
    except IntegrityError as error:
        log.warning("%s: .metadata cannot be brought up to date: %s", store.url, error)
        return False


def publish_commit(
    store: Store, record: SlotRecord, publish: Callable[[], object], *, is_needed: bool
) -> bool:
    """Publish a commit; return whether that worked, or raise `NotPublishedError` if needed."""
    try:
        publish()
    except Exception as error:
        failure = NotPublishedError(
            f"Save {record.save_id} to {store.url} is committed and ckpt_storage loads it, but "
            f"torch's own readers may not find it, because replacing .metadata failed: {error}",
            info=CheckpointInfo.of(store.url, record),
            path=STOCK_METADATA,
            phase="commit",
            next_step="Do not save it again. Once the cause is gone, call "
            f"ckpt_storage.publish({store.url!r}); the next save publishes, too.",
        )
        if is_needed:
            raise failure from error
        log.warning("%s", failure)
        return False
    return True
