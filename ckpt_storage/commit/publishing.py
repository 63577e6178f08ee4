"""`.metadata` for stock readers: its footer, and how it follows the head (invariant I13)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from ckpt_storage.errors import IntegrityError, NotPublishedError, StorageError
from ckpt_storage.format.commit_record import HeadRef, SlotRecord, split_footer, with_footer
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.format.names import STOCK_METADATA, published_path, publishing_path
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.store.backend import Content
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import side_by_side

from .info import CheckpointInfo
from .slotlog import CommitLog, check_document, read_log, read_referenced, read_stock, stamp
from .stockfooter import check_newest, read_footer

log = logging.getLogger("ckpt_storage")

_PUBLISH_ROUNDS = 20
_PUBLISH_DOUBTS = 3


def publish(
    store: Store,
    *,
    own: SlotRecord | None = None,
    own_stock: bytes | None = None,
) -> bool:
    """Bring `.metadata` up to the head; return whether it names the head now (invariant I13).

    Idempotent; any rank or opener with the right to write may call it. A saver passes the record of
    its own commit, and the bytes of its `stock.metadata` if it still has them; it also leaves the
    marker `published.json`, after which it never publishes again. Raises `StorageError`,
    `IntegrityError` for a damaged `stock.metadata`, and without `own` `FormatError` as
    `check_newest`; the commit stands all the same.
    """
    publisher = _Publisher(store, own, own_stock)
    for _ in range(_PUBLISH_ROUNDS):
        names_head = publisher.go_on()
        if names_head is None:
            continue
        try:
            publisher.end()
        except StorageError as error:
            log.warning("%s: what it supersedes is kept a day longer: %s", store.url, error)
        return names_head
    raise StorageError(
        f"{store.url}: .metadata was changed by others {_PUBLISH_ROUNDS} times while being "
        "published.",
        kind="precondition",
        path=STOCK_METADATA,
        next_step="Find out what else writes there; the next save or load publishes again.",
    )


class _Publisher:
    """One run of `publish`: what was done and announced so far."""

    def __init__(
        self,
        store: Store,
        own: SlotRecord | None,
        own_stock: bytes | None,
    ) -> None:
        self._store = store
        self._own = own
        self._own_stock = own_stock
        self._conditional = store.capabilities.if_match
        # A compare-and-swap on the footer keeps the order by itself, whatever the head is by now.
        self._head = own if self._conditional else None
        self._put: HeadRef | None = None
        self._notes: dict[str | None, str] = {}
        self._doubt_count = 0
        self._has_head = True
        self._is_marked = False

    def go_on(self) -> bool | None:
        """Look and act once; return whether `.metadata` names the head, None: look again."""
        store = self._store
        head, self._head = self._head, None
        last_slot = 0
        if head is None:
            found = read_log(store, known=self._own)
            head, last_slot = found.head, found.last_slot
        current = read_stock(store)
        named = split_footer(current.data)[1] if current else None
        if self._own is None and head is not None and current is not None:
            check_newest(store, head, current.data)
        self._has_head = head is not None
        if head is None or head.stock is None:
            return self._withdraw(named, last_slot)
        if named is not None and named.slot >= head.slot:
            return True
        is_mine = self._own is not None and self._own.save_id == head.save_id
        if not self._may_publish(is_mine=is_mine):
            return False
        if not self._conditional and not is_mine and head.save_id not in self._notes:
            self._announce(head)
            return None
        data = self._stock_of(head, self._own_stock if is_mine else None)
        if data is None or not self._replace(current, data, head):
            return None
        return self._confirm(current, is_mine=is_mine)

    def _may_publish(self, *, is_mine: bool) -> bool:
        """Return whether the head is for this run; else its saver or the next opener sees to it."""
        if is_mine:
            return not self._is_marked
        return self._conditional or self._own is None or self._put is not None

    def _confirm(self, current: Content | None, *, is_mine: bool) -> bool | None:
        """Return whether `.metadata`, just put in place of `current`, stays; None: look again.

        Where what was read was the condition, nobody was overtaken. Where absence was, only a
        deletion can have come in between. The saver's marker need not wait for that answer: its own
        commit is not published again, whatever is found.
        """
        if not self._conditional:
            return None
        if current is not None:
            return True
        calls: list[Callable[[], CommitLog | None]] = [
            lambda: read_log(self._store, known=self._own)
        ]
        if is_mine:
            calls.append(self._mark)
        found = side_by_side(self._store, calls)[0]
        head = found.head if found else None
        own = self._own
        return True if head and own and head.save_id == own.save_id else None

    def _mark(self) -> None:
        """Leave word that the saver of the own commit will not publish it (again)."""
        if self._own is not None and self._own.save_id is not None and not self._is_marked:
            self._is_marked = True
            marker = {"format": "ckpt_storage.published/1", "save_id": self._own.save_id}
            self._store.put(published_path(self._own.save_id), seal(marker))

    def _withdraw(self, named: HeadRef | None, last_slot: int) -> bool | None:
        """Undo a replacement during which the checkpoint was deleted.

        Also what another put over it, who could not know: for it, ours was still there.
        """
        if self._put is None or named is None or named.slot > last_slot:
            return False
        self._store.delete([STOCK_METADATA])
        self._put = None
        return None

    def _announce(self, head: SlotRecord) -> None:
        """Keep the head's files from being freed while somebody else than its saver publishes it.

        Who frees looks for such a note once the head has moved on; who publishes looks at the
        head once its note is there. So one of the two sees the other.
        """
        save_id = head.save_id or ""
        path = publishing_path(save_id)
        note = {"format": "ckpt_storage.publishing/1", "save_id": save_id, **stamp()}
        try:
            self._store.put(path, seal(note))
        except StorageError as error:
            if error.kind != "not-found" or self._is_head(head):
                raise
        else:
            self._notes[save_id] = path

    def end(self) -> None:
        """Leave the marker and take the notes back.

        Not after an error: what was asked for may still happen.
        """
        left = list(self._notes.values())
        if self._has_head:
            self._mark()
        elif self._is_marked and self._own is not None:
            # Whoever deleted the checkpoint may have listed its files before the marker was there.
            left.append(published_path(self._own.save_id or ""))
        if left:
            with contextlib.suppress(StorageError):
                self._store.delete(left)

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
                data = read_referenced(self._store, reference, most_bytes=MOST_STOCK_BYTES)
            except StorageError as error:
                if error.kind != "not-found":
                    raise
                if self._is_head(head):
                    raise _missing(self._store, reference) from error
                return None
        else:
            check_document(data, reference)
        pickled, _ = split_footer(data)
        return with_footer(pickled, slot=head.slot, save_id=head.save_id)

    def _replace(self, current: Content | None, data: bytes, head: SlotRecord) -> bool:
        """Put `.metadata` in place of what was read; False: look at what is there now."""
        self._put, before = head.head, self._put
        try:
            if not self._conditional:
                self._store.replace(STOCK_METADATA, data)
            elif current is None:
                self._store.create(STOCK_METADATA, data)
            else:
                self._store.replace(STOCK_METADATA, data, if_match=current.version)
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


def not_published(store: Store, record: SlotRecord, error: Exception) -> NotPublishedError:
    """Return the error that `record` is committed, but `error` kept it from being published."""
    return NotPublishedError(
        f"Save {record.save_id} to {store.url} is committed and ckpt_storage loads it, but torch's "
        f"own readers may not find it, because replacing .metadata failed: {error}",
        info=CheckpointInfo.of(store.url, record),
        path=STOCK_METADATA,
        phase="commit",
        next_step="Do not save it again. Once the cause is gone, call "
        f"ckpt_storage.publish({store.url!r}); the next save publishes, too.",
    )


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
