"""`.metadata` for stock readers: who wrote it, and how it follows the head (invariant I13).

Its footer names the slot. Conditional replacement keeps the order. On other storages, a publisher
that was paused may write an older `.metadata`; it reads the head again afterwards, and repairs it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
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
from ckpt_storage.transfer.objects import is_there, or_none_if_absent, read_or_none, read_referenced

from . import slotlog
from .info import CheckpointInfo
from .slotlog import CommitLog

log = logging.getLogger("ckpt_storage")

_PICKLE_STOP = b"."
_FOOTER_MAX_BYTES = 512
_MAX_ATTEMPTS = 10
_MAX_UNCERTAIN_WRITES = 3


def read_stock(store: Store) -> Content | None:
    """Return `.metadata` with its version token, None if it is absent. As `read_or_none`."""
    return read_or_none(store, STOCK_METADATA, max_bytes=MAX_STOCK_BYTES)


def read_stock_tail(store: Store) -> Content | None:
    """Return the end of `.metadata`, which includes the footer, and its version; None if absent."""

    def read() -> Content | None:
        return or_none_if_absent(partial(store.tail, STOCK_METADATA, _FOOTER_MAX_BYTES))

    content = read()
    is_known = (
        content is None or content.data.endswith(_PICKLE_STOP) or split_footer(content.data)[1]
    )
    if not is_known:
        # Neither a footer nor a pickle of another tool: the response may have a wrong byte.
        store.drop_caches(STOCK_METADATA)
        content = read()
    return content


def read_footer(store: Store) -> HeadRef | None:
    """Return the commit in the footer of `.metadata`, None without a footer; one small request."""
    return footer_of(read_stock_tail(store))


def footer_of(content: Content | None) -> HeadRef | None:
    """Return the commit in the footer at the end of `.metadata`, None without a footer."""
    return None if content is None else split_footer(content.data)[1]


def is_foreign(store: Store, commit_log: CommitLog) -> bool:
    """Return whether the checkpoint at the root of `store` was saved by another tool.

    Another tool may save over the slots of a deleted checkpoint; its `.metadata` has no footer.
    Raises `StorageError`.
    """
    tail = read_stock_tail(store) if commit_log.head is None else None
    return tail is not None and (commit_log.last is None or footer_of(tail) is None)


def check_slots(store: Store, commit_log: CommitLog, tail: Content | None) -> None:
    """Raise `FormatError` if slots above those of `commit_log` were lost.

    Then the footer of `.metadata`, or a listing of a disk, names a higher slot. Both are read again
    before the error, because a commit may have come since `commit_log` was read.
    """
    if not _slot_above(store, commit_log.last_slot, tail):
        return
    store.drop_caches(STOCK_METADATA)
    tail = read_stock_tail(store)
    named = _slot_above(store, commit_log.last_slot, tail)
    # Read last, so that it has what was committed while the others were read.
    last_slot = slotlog.read_log(store, known=commit_log.last).last_slot
    if named <= last_slot:
        return
    raise FormatError(
        f"{store.url} lost files of commits/: it had slot {named}, and the search found "
        f"{f'only slots up to {last_slot}' if last_slot else 'no slot'}. The last save is unknown.",
        path=slot_path(named),
        next_step="Restore commits/ from a copy before you save here. Torch's own readers load the "
        "save that .metadata names, without checksums. To give up the lost saves, delete .metadata "
        "and the slots above the gap.",
    )


def _slot_above(store: Store, last_slot: int, tail: Content | None) -> int:
    """Return a slot above `last_slot` in the footer of `.metadata` or a listing of a disk, or 0."""
    named = footer_of(tail)
    if named is not None and named.slot > last_slot:
        return named.slot
    slots = [] if store.capabilities.is_remote else slotlog.listed_slots(store)
    # A network file system may list a file that was just removed.
    is_gap = bool(slots) and slots[-1] > last_slot and is_there(store, slot_path(slots[-1]))
    return slots[-1] if is_gap else 0


def check_newest(store: Store, commit_log: CommitLog, tail: Content | None = None) -> None:
    """Raise `FormatError` if there is a newer save than the head of `commit_log`.

    It is in a lost slot, or another tool saved it over a published head. A `.metadata` that cannot
    be read is ignored. `tail` is the end of `.metadata`; None: one request reads it.
    """
    try:
        tail = tail or read_stock_tail(store)
    except StorageError as error:
        log.warning("%s: .metadata cannot be read, and is ignored: %s", store.url, error)
        tail = None
    check_slots(store, commit_log, tail)
    head = commit_log.head
    if head is None or tail is None or footer_of(tail) or not tail.data.endswith(_PICKLE_STOP):
        return
    stock_s, slot_s = (
        store.stat(path).modified_s for path in (STOCK_METADATA, slot_path(head.slot))
    )
    # A file of the same second counts as newer.
    if stock_s is not None and slot_s is not None and stock_s >= slot_s:
        raise FormatError(
            f"{store.url} holds two checkpoints: save {head.save_id} of {head.created_at} in "
            f"{slot_path(head.slot)}, and a newer save of another tool, such as torch's own "
            "writer (.metadata).",
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
    """Bring `.metadata`, which torch's own readers read, up to the newest commit at `url`.

    Call it after a save that raised `NotPublishedError`, once the cause is gone. Does nothing if
    `.metadata` is up to date. Any rank; not collective.

    Raises `StorageError` if it still cannot be replaced, `CheckpointNotFoundError` without a
    checkpoint of this package, `FormatError` if another tool saved there later, `IntegrityError` if
    `stock.metadata` is damaged, `PhaseTimeoutError`, `InvalidInputError`.
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
                next_step="Check the path; list_checkpoints(root) lists the checkpoints of a run.",
            )
        publish_head(store)


def publish_head(
    store: Store, *, own: SlotRecord | None = None, own_stock: bytes | None = None
) -> bool:
    """Bring `.metadata` up to the head; return whether it names the head now (invariant I13).

    Idempotent; any process with the right to write may call it. A saver passes the record of its
    own commit, and the bytes of its `stock.metadata` if it still has them. Raises `StorageError`,
    `IntegrityError` for a damaged `stock.metadata`, and without `own` `FormatError` as
    `check_newest`. An error does not undo the commit.
    """
    is_conditional = own is not None and replaces_by_version(store)
    # A compare-and-swap keeps the order of footers, even if the head has moved since.
    commit_log = CommitLog.ending_with(own) if own and is_conditional else None
    may_have_written, uncertain_count = False, 0
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        if attempt > 1 or commit_log is None:
            commit_log = slotlog.read_log(store, known=own)
        head, current = commit_log.head, read_stock_tail(store)
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
            # The response may have been lost.
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
        # The checkpoint was deleted meanwhile: undo the own replacement.
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
    """Delete `.metadata`; with a condition that it is unchanged if the storage has conditions."""
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
    """Replace the `.metadata` that was read; return False if it has changed since."""
    assert head is not None  # noqa: S101  # the caller made sure
    assert head.stock is not None  # noqa: S101  # the same
    try:
        stock = stock or read_referenced(store, head.stock, max_bytes=MAX_STOCK_BYTES)
    except IntegrityError:
        if _is_head(store, head):
            raise
        return False  # it was superseded and freed meanwhile
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

    One small request if it is up to date. Raises `StorageError`, of kind "permission" for a reader
    that may not write, and `FormatError` as `check_newest`. A damaged `stock.metadata` is not
    published, but the checkpoint can be loaded.
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
    """Call `publish` for a commit; return whether it succeeded. Raises `NotPublishedError`.

    Unless `is_needed`, a failure is only logged.
    """
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
            f"ckpt_storage.publish({store.url!r}); the next save publishes it, too.",
        )
        if is_needed:
            raise failure from error
        log.warning("%s", failure)
        return False
    return True
