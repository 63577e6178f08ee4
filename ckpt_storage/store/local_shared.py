"""The shared upload of the local store: several processes write into one temporary file.

A process that is stuck with the file open could write into it after it got its name. It cannot
do harm: the owner completes nothing without the receipts of whoever had a part to write, and
giving them closes the file; and a part is never given to a second member of the same upload.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from ckpt_storage.errors import IntegrityError, StorageError

from .base import CopySource, Existing, PartReceipt
from .draft import Draft
from .parts import SharedParts, encode_ticket, not_the_owner, whole_object

COPY_SCOPE = "posix"
TICKET_KIND = "posix"
TICKET_FIELD = "name"


class LocalSharedUpload:
    """A `SharedUpload`; parts may come from several threads, in any order, again and again.

    `path` and `shown` are the target's path in the store and its full URL; `border` gives the
    context that maps `OSError` for an operation.
    """

    def __init__(
        self,
        draft: Draft,
        path: str,
        shown: str,
        border: Callable[[str], contextlib.AbstractContextManager[None]],
        *,
        role: Literal["owner", "member"],
    ) -> None:
        self._draft = draft
        self._path = path
        self._shown = shown
        self._border = border
        self._role = role
        self._member = os.urandom(8).hex()
        self._parts = SharedParts(shown)
        self._is_synced = False
        self._state: Literal["open", "handed", "sealed", "complete", "failed", "aborted"] = "open"
        # One `receipts`, `complete` or `abort` at a time: a repeated one waits for the first.
        self._lock = threading.Lock()

    def ticket(self) -> str:
        """Return the name of the temporary file."""
        return encode_ticket(TICKET_KIND, self._path, {TICKET_FIELD: self._draft.name})

    def reserve(self, total_bytes: int) -> None:
        """Take the space for `total_bytes` now, so that a full disk is told before any is sent."""
        self._parts.check_open()
        with self._border(f"reservation of {total_bytes} bytes"):
            self._draft.reserve(total_bytes)

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Write one part straight from the caller's buffers."""
        del last
        self._parts.check_open()
        with self._border(f"write of part {number}"):
            self._draft.write(buffers, offset)
        self._add(number, offset, sum(view.nbytes for view in buffers))

    def copy_part(
        self,
        number: int,
        offset: int,
        source: CopySource,
        source_start: int,
        length: int,
        *,
        source_bytes: int | None = None,
        last: bool,
    ) -> int | None:
        """Copy within the kernel, which shares blocks where it can; no checksum is told."""
        del last
        self._parts.check_open()
        with self._border(f"copy of part {number}"):
            count, found_bytes = self._draft.copy(source.address, source_start, length, offset)
        if count < length or found_bytes != (found_bytes if source_bytes is None else source_bytes):
            wanted = "" if source_bytes is None else f" instead of {source_bytes}"
            raise IntegrityError(
                f"{source.path} has {found_bytes} bytes{wanted}; [{source_start}, "
                f"{source_start + length}) was to be copied.",
                path=source.path,
                offset=min(found_bytes, source_start + count),
                next_step="The file is damaged or not the one that was saved.",
            )
        self._add(number, offset, length)
        return None

    def receipts(self) -> list[PartReceipt]:
        """Sync the file, and close it unless it is the owner's, who has still to name it.

        So that all hosts flush what they wrote at the same time, not the owner after all others.
        """
        with self._lock:
            parts = self._parts.end()
            if not self._is_synced:
                self._check_state("open")
                self._state = "failed"
                with self._final("sync"):
                    if self._role == "member":
                        self._draft.hand_over()
                    else:
                        self._draft.sync()
                self._is_synced = True
                self._state = "handed" if self._role == "member" else "open"
            return parts

    def complete(
        self,
        total_bytes: int,
        *,
        receipts: Sequence[PartReceipt] = (),
        existing: Existing = "refuse",
    ) -> None:
        """Check parts and length, sync, rename or link; goes on at the naming if that failed."""
        if self._role == "member":
            raise not_the_owner(self._shown)
        with self._lock:
            if self._state == "open":
                self._state = "failed"
                parts = {*self._parts.end(), *receipts}
                with self._final("completion"):
                    whole_object(list(parts), total_bytes, shown=self._shown)
                    self._draft.seal(total_bytes, by_several=bool(receipts))
                self._state = "sealed"
            if self._state == "sealed":
                self._publish(existing)
                self._state = "complete"
            self._check_state("complete")

    def abort(self) -> None:
        """Remove the temporary file, as its owner; changes nothing once it is complete."""
        with self._lock, self._border("abort"):
            self._parts.end()
            if self._state in {"complete", "handed"}:
                return
            self._state = "aborted"
            if self._role == "owner":
                self._draft.discard()
            else:
                self._draft.leave()

    def _add(self, number: int, offset: int, size_bytes: int) -> None:
        self._parts.add(
            PartReceipt(number=number, offset=offset, size_bytes=size_bytes, receipt=self._member)
        )

    def _publish(self, existing: Existing) -> None:
        try:
            with self._border("completion"):
                if existing == "refuse":
                    self._draft.publish_new()
                else:
                    self._draft.publish()
        except StorageError as error:
            # Only the naming may be tried again, and only it raises a retryable error here.
            if not error.retryable:
                self._state = "failed"
            raise

    @contextlib.contextmanager
    def _final(self, operation: str) -> Iterator[None]:
        """Mark what fails inside as never to be tried again: a failed fsync must not be."""
        try:
            with self._border(operation):
                yield
        except StorageError as error:
            error.retryable = False
            raise

    def _check_state(self, wanted: str) -> None:
        if self._state != wanted:
            raise StorageError(
                f"The upload of {self._shown} has {self._state} before.",
                path=self._shown,
                next_step="Start a new one.",
            )
