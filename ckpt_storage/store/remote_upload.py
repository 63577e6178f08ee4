"""The uploads of remote stores: those of a dialect, behind the border where errors are mapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ckpt_storage.errors import StorageError

from .base import CopySource, Existing, PartReceipt, SharedUpload, Upload

T = TypeVar("T")


class Border(Protocol):
    """Runs one operation on one path; every foreign exception leaves as a `StorageError`."""

    def __call__(self, name: str, call: Callable[[], T], /) -> T:
        """Return what `call` returns; `name` is a noun for messages."""


class RemoteUpload:
    """An `Upload` of a dialect behind the border of its store."""

    def __init__(self, inner: Upload, border: Border) -> None:
        self._inner = inner
        self._border = border
        self.repeatable = bool(getattr(inner, "repeatable", True))
        """Whether a part may be sent again after an error; `retry` asks."""

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Send one part; nothing reads the buffers after the return."""
        self._border(
            f"write of part {number}",
            lambda: self._inner.write_part(number, offset, buffers, last=last),
        )

    def complete(self, total_bytes: int) -> None:
        """Make the object visible; idempotent, and right about an answer that was lost."""
        self._border("completion", lambda: self._inner.complete(total_bytes))

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
