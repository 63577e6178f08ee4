"""`.metadata` for stock readers: whose it is, and how it follows the head (invariant I13).

Its footer names the slot. A storage that replaces under a condition keeps the order by itself.
Elsewhere a saver that is paused could bring back what was freed meanwhile. So whoever frees a
superseded save first makes sure that nobody will publish it any more: its saver leaves the marker
`published.json` when it is done, and others leave a note while they are at it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ckpt_storage.errors import FormatError, IntegrityError, NotPublishedError, StorageError
from ckpt_storage.format.commit_record import HeadRef, SlotRecord, split_footer, with_footer
from ckpt_storage.format.documents import DAMAGED, FileRef, seal
from ckpt_storage.format.names import (
    STOCK_METADATA,
    published_path,
    publishing_path,
    slot_path,
)
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.store.backend import Content
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import side_by_side

from .info import CheckpointInfo
from .slotlog import CommitLog, is_there, read_log, read_referenced, read_stock, stamp

log = logging.getLogger("ckpt_storage")

_PICKLE_STOP = b"."
_FOOTER_MOST_BYTES = 512
_ROUNDS = 20
_DOUBTS = 3


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


def _is_written_after(store: Store, head: SlotRecord) -> bool:
    """Return whether a `.metadata` that is not ours is newer than `head`."""
    if is_there(store, published_path(head.save_id or "")):
        return True
    # Somebody else than its saver may have published it: those leave no marker.
    stock_s, slot_s = (
        store.stat(path).modified_s for path in (STOCK_METADATA, slot_path(head.slot))
    )
    return stock_s is not None and slot_s is not None and stock_s > slot_s


def publish(store: Store, *, own: SlotRecord | None = None, own_stock: bytes | None = None) -> bool:
    """Bring `.metadata` up to the head; return whether it names the head now (invariant I13).

    Idempotent; any rank or opener with the right to write may call it. A saver passes the record of
    its own commit, and the bytes of its `stock.metadata` if it still has them; it also leaves the
    marker `published.json`, after which it never publishes again. Raises `StorageError`,
    `IntegrityError` for a damaged `stock.metadata`, and without `own` `FormatError` as
    `check_newest`; the commit stands all the same.
    """
    publisher = _Publisher(store, own, own_stock)
    for round_ in range(_ROUNDS):
        # A compare-and-swap on the footer keeps the order by itself, whatever the head is by now.
        head, last_slot = (own, 0) if publisher.is_conditional and not round_ else (None, 0)
        if head is None:
            found = read_log(store, known=own)
            head, last_slot = found.head, found.last_slot
        names_head = publisher.go_on(head, last_slot)
        if names_head is not None:
            publisher.end(is_there=head is not None)
            return names_head
    raise StorageError(
        f"{store.url}: .metadata was changed by others {_ROUNDS} times while being published.",
        kind="precondition",
        path=STOCK_METADATA,
        next_step="Find out what else writes there; the next save or load publishes again.",
    )


@dataclass(slots=True)
class _Publisher:
    """One run of `publish`: what was done and announced so far."""

    store: Store
    own: SlotRecord | None
    own_stock: bytes | None
    is_marked: bool = False
    has_put: bool = False
    doubt_count: int = 0
    notes: dict[str | None, str] = field(default_factory=dict)

    @property
    def is_conditional(self) -> bool:
        return self.store.capabilities.if_match

    def go_on(self, head: SlotRecord | None, last_slot: int) -> bool | None:
        """Look and act once; return whether `.metadata` names the head, None: look again."""
        own = self.own
        current = read_stock(self.store)
        named = split_footer(current.data)[1] if current else None
        if own is None and head is not None and current is not None:
            check_newest(self.store, head, current.data)
        if head is None or head.stock is None:
            return self._withdraw(named, last_slot)
        if named is not None and named.slot >= head.slot:
            return True
        is_mine = own is not None and own.save_id == head.save_id
        if self.is_marked if is_mine else not (self.is_conditional or own is None or self.has_put):
            return False  # its saver or the next opener sees to it
        if not (self.is_conditional or is_mine or head.save_id in self.notes):
            self._announce(head)
            return None
        data = self._stock_of(head, head.stock, self.own_stock if is_mine else None)
        if data is None or not self._replace(current, data) or not self.is_conditional:
            return None
        return True if current is not None else self._is_own_still(is_mine=is_mine)

    def _withdraw(self, named: HeadRef | None, last_slot: int) -> bool | None:
        """Undo a replacement during which the checkpoint was deleted.

        Also what another put over it, who could not know: for it, ours was still there.
        """
        if not self.has_put or named is None or named.slot > last_slot:
            return False
        self.store.delete([STOCK_METADATA])
        self.has_put = False
        return None

    def _is_own_still(self, *, is_mine: bool) -> bool | None:
        """Return whether the head, put where nothing was, is the own commit; None: look again.

        Only a deletion can have come in between. The marker need not wait for that answer: its own
        commit is not published again, whatever is found.
        """
        store, own = self.store, self.own
        calls: list[Callable[[], CommitLog | None]] = [partial(read_log, store, known=own)]
        found = side_by_side(store, [*calls, self._mark] if is_mine else calls)[0]
        now = found.head if found else None
        return True if now and own and now.save_id == own.save_id else None

    def end(self, *, is_there: bool) -> None:
        """Leave the marker and take the notes back.

        Not after an error: what was asked for may still happen.
        """
        left = list(self.notes.values())
        try:
            if is_there:
                self._mark()
            elif self.is_marked and self.own is not None:
                # Whoever deleted the checkpoint may have listed its files before the marker.
                left.append(published_path(self.own.save_id or ""))
            with contextlib.suppress(StorageError):
                self.store.delete(left)
        except StorageError as error:
            log.warning("%s: what it supersedes is kept a day longer: %s", self.store.url, error)

    def _mark(self) -> None:
        """Leave word that the saver of the own commit will not publish it (again)."""
        if self.own is not None and self.own.save_id is not None and not self.is_marked:
            self.is_marked = True
            marker = {"format": "ckpt_storage.published/1", "save_id": self.own.save_id}
            self.store.put(published_path(self.own.save_id), seal(marker))

    def _announce(self, head: SlotRecord) -> None:
        """Keep the head's files from being freed while somebody else than its saver publishes it.

        Who frees looks for such a note once the head has moved on; who publishes looks at the
        head once its note is there. So one of the two sees the other.
        """
        save_id = head.save_id or ""
        path = publishing_path(save_id)
        note = {"format": "ckpt_storage.publishing/1", "save_id": save_id, **stamp()}
        try:
            self.store.put(path, seal(note))
        except StorageError as error:
            if error.kind != "not-found" or self._is_head(head):
                raise
        else:
            self.notes[save_id] = path

    def _is_head(self, head: SlotRecord) -> bool:
        now = read_log(self.store).head
        return now is not None and now.save_id == head.save_id

    def _stock_of(self, head: SlotRecord, reference: FileRef, data: bytes | None) -> bytes | None:
        """Return what `.metadata` must hold for `head`; None if it was freed meanwhile."""
        if data is None:
            try:
                data = read_referenced(self.store, reference, most_bytes=MOST_STOCK_BYTES)
            except StorageError as error:
                if error.kind != "not-found":
                    raise
                if not self._is_head(head):
                    return None
                raise IntegrityError(
                    f"{self.store.url}: {reference.path} is missing.",
                    path=reference.path,
                    offset=0,
                    next_step=DAMAGED,
                ) from error
        return with_footer(split_footer(data)[0], slot=head.slot, save_id=head.save_id or "")

    def _replace(self, current: Content | None, data: bytes) -> bool:
        """Put `.metadata` in place of what was read; False: look at what is there now."""
        had_put, self.has_put = self.has_put, True
        try:
            if self.is_conditional and current is None:
                self.store.create(STOCK_METADATA, data)
            else:
                version = current.version if self.is_conditional and current else None
                self.store.replace(STOCK_METADATA, data, if_match=version)
        except StorageError as error:
            if error.kind in {"precondition", "exists", "not-found"}:
                self.has_put = had_put
                return False
            # An answer may have been lost.
            self.doubt_count += 1
            if not error.retryable or self.doubt_count > _DOUBTS:
                raise
            return False
        return True


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
