"""The uploads of remote stores: those of a dialect, behind the border where errors are mapped.

Knows the protocol of uploads; knows no storage and no dialect. Called by `remote`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ckpt_storage.errors import StorageError

from .base import CopySource, Existing, PartReceipt, SharedUpload, Stoppable, Upload
from .queueing import Queueing
from .reserving import Opening

__all__ = ["Border", "RemoteSharedUpload", "RemoteUpload"]

T = TypeVar("T")


class Border(Protocol):
    """Runs one operation on one path; every foreign exception leaves as a `StorageError`."""

    def __call__(self, name: str, call: Callable[[], T], /) -> T:
        """Return what `call` returns; `name` is a noun for messages."""


class RemoteUpload:
    """An `Upload` of a dialect behind the border of its store."""

    def __init__(self, inner: Upload, border: Border) -> None:
        self._inner = inner
        # Asked once: to look through a protocol takes longer than to queue a part.
        self._queueing = inner if isinstance(inner, Queueing) else None
        self._border = border
        self.repeatable = bool(getattr(inner, "repeatable", True))
        """Whether a part may be sent again after an error; `retry` asks."""

    def open(self) -> None:
        """Begin on the storage, where the dialect can do so without waiting."""
        if isinstance(self._inner, Opening):
            self._border("start of the upload", self._inner.open)

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Send one part; nothing reads the buffers after the return."""
        self._run(
            f"write of part {number}",
            lambda: self._inner.write_part(number, offset, buffers, last=last),
        )

    @property
    def pause_s(self) -> float:
        """For how long (seconds) the upload waits before it repeats a request; see `Queueing`."""
        return 0.0 if self._queueing is None else self._queueing.pause_s

    def queue_part(
        self,
        number: int,
        offset: int,
        buffers: Sequence[memoryview],
        *,
        last: bool,
        freed: Callable[[], None],
    ) -> bool:
        """Take a part without waiting until it is sent, where the dialect can do so."""
        inner = self._queueing
        return inner is not None and self._run(
            f"write of part {number}",
            lambda: inner.queue_part(number, offset, buffers, last=last, freed=freed),
        )

    def check(self) -> None:
        """Raise what ended the upload while parts were queued."""
        if self._queueing is not None:
            self._run("write of the parts", self._queueing.check)

    def complete(self, total_bytes: int) -> None:
        """Make the object visible; idempotent, and right about an answer that was lost."""
        self._run("completion", lambda: self._inner.complete(total_bytes))

    def _run(self, name: str, call: Callable[[], T]) -> T:
        """Run a step; what fails for good is not worth repeating, whatever it failed of."""
        try:
            return self._border(name, call)
        except StorageError as error:
            if getattr(self._inner, "is_over", False):
                error.retryable = False
            raise

    def stop(self) -> None:
        """Let go whoever waits to send a part, where the dialect has such waiting."""
        if isinstance(self._inner, Stoppable):
            self._inner.stop()

    def abort(self) -> None:
        """Discard everything sent; idempotent."""
        self._border("abort of the upload", self._inner.abort)


class RemoteSharedUpload:
    """A `SharedUpload` of a dialect behind the border of its store."""

    def __init__(self, inner: SharedUpload, border: Border) -> None:
        self._inner = inner
        self._border = border

    def ticket(self) -> str:
        """Begin the upload if the storage names it only then, and return its ticket."""
        return self._border("start of the upload", self._inner.ticket)

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Send one part; nothing reads the buffers after the return."""
        self._border(
            f"write of part {number}",
            lambda: self._inner.write_part(number, offset, buffers, last=last),
        )

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
        """Have the storage copy one part."""
        return self._border(
            f"copy of part {number} from {source.path}",
            lambda: self._inner.copy_part(
                number, offset, source, source_start, length, source_bytes=source_bytes, last=last
            ),
        )

    def receipts(self) -> list[PartReceipt]:
        """Return what was sent; the storage keeps it by itself."""
        return self._border("handing over of the parts", self._inner.receipts)

    def complete(
        self,
        total_bytes: int,
        *,
        receipts: Sequence[PartReceipt] = (),
        existing: Existing = "refuse",
    ) -> None:
        """Make the object visible; idempotent, and right about an answer that was lost."""
        try:
            self._border(
                "completion",
                lambda: self._inner.complete(total_bytes, receipts=receipts, existing=existing),
            )
        except StorageError as error:
            if error.kind == "precondition" and existing == "refuse":
                error.kind = "exists"
            raise

    def abort(self) -> None:
        """Discard everything sent, or leave; idempotent."""
        self._border("abort of the upload", self._inner.abort)
