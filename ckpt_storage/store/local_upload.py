"""The upload of the local store: parts written in place into one temporary file."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from ckpt_storage.errors import StorageError

from .draft import Draft


class LocalUpload:
    """An `Upload` whose parts may come from several threads, in any order, again and again.

    `shown` is the target's full URL for messages; `border` gives the context that maps
    `OSError` for an operation.
    """

    def __init__(
        self,
        draft: Draft,
        shown: str,
        border: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._draft = draft
        self._shown = shown
        self._border = border
        self._state: Literal["open", "sealed", "complete", "failed", "aborted"] = "open"
        self._part_ends: dict[int, tuple[int, int]] = {}
        # One `complete` or `abort` at a time: a repeated one waits for the one before it.
        self._lock = threading.Lock()

    def reserve(self, total_bytes: int) -> None:
        """Take the space for `total_bytes` now, so that a full disk is told before any is sent."""
        with self._border(f"reservation of {total_bytes} bytes"):
            self._draft.reserve(total_bytes)

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Write one part straight from the caller's buffers."""
        del last
        with self._border(f"write of part {number}"):
            self._draft.write(buffers, offset)
        self._part_ends[number] = (offset, offset + sum(view.nbytes for view in buffers))

    def complete(self, total_bytes: int) -> None:
        """Check the length, sync, rename, sync the folder; goes on at the rename if that failed.

        A failure of anything else is final.
        """
        with self._lock:
            if self._state == "open":
                self._state = "failed"
                self._seal(total_bytes)
                self._state = "sealed"
            if self._state == "sealed":
                self._publish()
                self._state = "complete"
            if self._state != "complete":
                raise StorageError(
                    f"The upload of {self._shown} has {self._state} before.",
                    path=self._shown,
                    next_step="Start a new one.",
                )

    def abort(self) -> None:
        """Remove the temporary file; changes nothing once `complete` has returned."""
        with self._lock, self._border("abort"):
            if self._state != "complete":
                self._state = "aborted"
                self._draft.discard()

    def _seal(self, total_bytes: int) -> None:
        try:
            self._check_parts(total_bytes)
            with self._border("completion"):
                self._draft.seal(total_bytes)
        except StorageError as error:
            error.retryable = False
            raise

    def _publish(self) -> None:
        try:
            with self._border("completion"):
                self._draft.publish()
        except StorageError as error:
            # Only a rename may be tried again, and only it raises a retryable error here.
            if not error.retryable:
                self._state = "failed"
            raise

    def _check_parts(self, total_bytes: int) -> None:
        """Find a part that was never sent, which the length of a sparse file hides."""
        end_bytes = 0
        for start, end in sorted(self._part_ends.values()):
            if start > end_bytes:
                break
            end_bytes = max(end_bytes, end)
        if end_bytes != total_bytes:
            raise StorageError(
                f"{self._shown} was sent without a gap up to byte {end_bytes} instead of "
                f"{total_bytes}; it was not made visible.",
                path=self._shown,
                next_step="Save again.",
            )
