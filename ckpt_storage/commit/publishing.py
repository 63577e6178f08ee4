"""`.metadata` for stock readers: whose it is, and how it follows the head (invariant I13).

Its footer names the slot. A storage that replaces under a condition keeps the order by itself.
Elsewhere a publisher that was paused may bring back an older one; it then looks again and mends it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ckpt_storage.errors import (
    CheckpointNotFoundError,
    FormatError,
    IntegrityError,
    NotPublishedError,
    StorageError,
    UnsupportedByStoreError,
)
from ckpt_storage.format.commit_record import HeadRef, SlotRecord, split_footer, with_footer
from ckpt_storage.format.names import STOCK_METADATA, slot_path
from ckpt_storage.format.stock_metadata import MAX_STOCK_BYTES
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Content, Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import compare_and_swap, find_all_abilities, replaces_by_version
from ckpt_storage.store.store import Store

from . import slotlog
from .info import CheckpointInfo
from .slotlog import CommitLog

log = logging.getLogger("ckpt_storage")

_PICKLE_STOP = b"."
_MAX_ATTEMPTS = 10
_MAX_UNCERTAIN_WRITES = 3


def read_footer(store: Store) -> HeadRef | None:
    """Return what the footer of `.metadata` names, None without a footer, by one small request."""
    return footer_of(slotlog.read_stock_tail(store))


def footer_of(content: Content | None) -> HeadRef | None:
    """Return what the footer at the end of `.metadata` names, if it is there and has a footer."""
    return None if content is None else split_footer(content.data)[1]


def is_foreign(store: Store, commit_log: CommitLog) -> bool:
    """Return whether another tool committed what lies at the root of `store`.

    The slots of a deleted checkpoint stay, and another tool may save under its name later: there is
    a `.metadata` without our footer then. Raises `StorageError`.
    """
    tail = slotlog.read_stock_tail(store) if commit_log.head is None else None
    return tail is not None and (commit_log.last is None or footer_of(tail) is None)


def check_slots(store: Store, commit_log: CommitLog, tail: Content | None) -> None:
    """Raise `FormatError` if slots above those of `commit_log` were lost.

    The footer of `.metadata` names a higher slot, or a listing of a disk does. What was committed
    since `commit_log` was read is not lost. Before it raises, all is read again.
    """
    if not _slot_above(store, commit_log.last_slot, tail):
        return
    store.drop_caches(STOCK_METADATA)
    tail = slotlog.read_stock_tail(store)
    named = _slot_above(store, commit_log.last_slot, tail)
    # Read last, so that it has what was committed while the others were read.
    last_slot = slotlog.read_log(store, known=commit_log.last).last_slot
    if named <= last_slot:
        return
    raise FormatError(
        f"{store.url} lost files of commits/: it held slot {named}, and the highest slot that "
        f"is there is {last_slot or 'none'}. What was saved last is not known.",
        path=slot_path(named),
        next_step="Restore commits/ from a copy, and do not save here before. Torch's own readers "
        "load what .metadata names, without checksums. To give up the lost saves, delete the slots "
        "above the highest that is there, and .metadata.",
    )


def _slot_above(store: Store, last_slot: int, tail: Content | None) -> int:
    """Return the highest slot above the last that something names, 0 if nothing does.

    That is the footer of `.metadata` and, on a disk, a listing of commits/.
    """
    named = footer_of(tail)
    if named is not None and named.slot > last_slot:
        return named.slot
    slots = [] if store.capabilities.is_remote else slotlog.listed_slots(store)
    # A network file system may list what was removed a moment ago.
    is_gap = bool(slots) and slots[-1] > last_slot and slotlog.is_there(store, slot_path(slots[-1]))
    return slots[-1] if is_gap else 0


def check_newest(store: Store, commit_log: CommitLog, tail: Content | None = None) -> None:
    """Raise `FormatError` if something names a newer save than the head of `commit_log`.

    That is another tool's save over a head that was published, or a lost slot. A `.metadata` that
    cannot be read raises nothing. `tail` is its end, if that was read; else it takes one request.
    """
    try:
        tail = tail or slotlog.read_stock_tail(store)
    except StorageError as error:
        log.warning("%s: .metadata cannot be read, and so is not looked at: %s", store.url, error)
        tail = None
    check_slots(store, commit_log, tail)
    head = commit_log.head
    if head is None or tail is None or footer_of(tail) or not tail.data.endswith(_PICKLE_STOP):
        return
    stock_s, slot_s = (
        store.stat(path).modified_s for path in (STOCK_METADATA, slot_path(head.slot))
    )
    # A file of the same second counts as newer, too.
    if stock_s is not None and slot_s is not None and stock_s >= slot_s:
        raise FormatError(
            f"{store.url} holds two checkpoints: save {head.save_id} of {head.created_at} in "
            f"{slot_path(head.slot)}, and a newer save that another tool, such as torch's own "
            "writer, saved over it (.metadata).",
            path=STOCK_METADATA,
            phase="load",
            next_step="To keep the newer save, load it with torch's own reader. To keep the "
            "older save, delete .metadata. To replace both, save with overwrite=True.",
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
    checkpoint of ours, `FormatError` if another tool saved there later, `IntegrityError` if
    the copy that is to be published is damaged, `PhaseTimeoutError`, `InvalidInputError`.
    """
    location = Location.of(url, storage_options)
    timeouts = Timeouts.of(timeout)
    deadline = Deadline("commit", timeouts.commit)
    store = open_store(location, timeouts=timeouts, retry=retry or RetryPolicy()).bounded(deadline)
    with deadline.annotate_errors(f"Publishing {location.url}"):
        if slotlog.read_log(store).head is None:
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
    commit_log = CommitLog.ending_with(own) if own and is_conditional else None
    may_have_written, uncertain_count = False, 0
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        if attempt > 1 or commit_log is None:
            commit_log = slotlog.read_log(store, known=own)
        head, current = commit_log.head, slotlog.read_stock_tail(store)
        step = _next_step(commit_log, current, may_have_written=may_have_written)
        _check_nothing_lost(store, commit_log, current, is_saver=own is not None)
        if step in {"newer", "published", "nothing"}:
            return step != "nothing"
        if step == "delete":
            _delete_seen(store, current)
            may_have_written = False
            continue
        try:
            is_put = _replaced(store, head, current, own_stock if own == head else None)
        except StorageError as error:
            # An answer may have been lost.
            may_have_written = True
            uncertain_count += 1
            if not error.retryable or uncertain_count > _MAX_UNCERTAIN_WRITES:
                raise
            is_put = False
        may_have_written = may_have_written or is_put
        is_conditional = is_conditional or replaces_by_version(store)
        # Where nothing was, only a deletion can have come in between.
        if is_put and is_conditional and (current is not None or _is_head(store, head)):
            return True
        if not is_put and not store.pause(attempt):
            break
    raise StorageError(
        f"{store.url}: .metadata was changed by others, or could not be replaced, in {attempt} "
        "attempts to publish it.",
        kind="precondition",
        path=STOCK_METADATA,
        next_step="Find out what else writes there; the next save or load publishes again.",
    )


def _check_nothing_lost(
    store: Store, commit_log: CommitLog, current: Content | None, *, is_saver: bool
) -> None:
    """Raise `FormatError` if a newer save than the head is there, or was; a saver replaces it."""
    if is_saver:
        named = footer_of(current)
        if named is not None and named.slot > commit_log.last_slot:
            check_slots(store, commit_log, current)
    elif commit_log.head is not None:
        check_newest(store, commit_log, current)


_Step = Literal["nothing", "published", "newer", "delete", "replace"]


def _next_step(commit_log: CommitLog, current: Content | None, *, may_have_written: bool) -> _Step:
    """Return what `.metadata`, of which `current` is the end, needs to follow the head."""
    head, named = commit_log.head, footer_of(current)
    if head is None:
        # What was put over a checkpoint that was deleted meanwhile is taken back.
        is_older = named is not None and named.slot <= commit_log.last_slot
        return "delete" if may_have_written and is_older else "nothing"
    if named == HeadRef(slot=head.slot, save_id=head.save_id or ""):
        return "published"
    if named is not None and named.slot > head.slot:
        return "newer"
    if head.stock is None:
        # Torch's own readers would load an older save.
        return "nothing" if current is None else "delete"
    return "replace"


def _delete_seen(store: Store, seen: Content | None) -> None:
    """Delete `.metadata` if it is what was seen, as far as the storage can tell."""
    try:
        if seen is None or seen.version is None or find_all_abilities(store).delete_problem:
            store.delete([STOCK_METADATA])
        else:
            store.delete_version(STOCK_METADATA, seen.version)
    except UnsupportedByStoreError:
        store.delete([STOCK_METADATA])
    except StorageError as error:
        if error.kind not in {"not-found", "precondition"}:
            raise


def _replaced(
    store: Store, head: SlotRecord | None, seen: Content | None, stock: bytes | None
) -> bool:
    """Put `.metadata` in place of what was read; return False if something else is there now."""
    assert head is not None  # noqa: S101  # the caller made sure
    assert head.stock is not None  # noqa: S101  # the same
    try:
        stock = stock or slotlog.read_referenced(store, head.stock, max_bytes=MAX_STOCK_BYTES)
    except IntegrityError:
        if _is_head(store, head):
            raise
        return False  # it was freed meanwhile
    data = with_footer(split_footer(stock)[0], slot=head.slot, save_id=head.save_id or "")
    try:
        compare_and_swap(store, STOCK_METADATA, data, seen)
    except StorageError as error:
        if error.kind in {"precondition", "exists", "not-found"}:
            return False
        raise
    return True


def _is_head(store: Store, record: SlotRecord | None) -> bool:
    now = slotlog.read_log(store, known=record).head
    return now is not None and record is not None and now.save_id == record.save_id


def roll_forward(store: Store, save_id: str) -> bool:
    """Publish `.metadata` if it does not name `save_id`, the head; return whether it does now.

    One small request when there is nothing to do. Raises `StorageError`, of kind "permission"
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
