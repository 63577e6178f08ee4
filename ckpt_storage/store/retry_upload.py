"""Uploads with deadlines and retries: what may be repeated of each step, and when one is dead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

from ckpt_storage.errors import CheckpointError, StorageError

from .base import CopySource, Existing, PartReceipt, Reserving, SharedUpload, Upload
from .timed import AbandonedError

T = TypeVar("T")

Repeat = Literal["always", "unless-abandoned", "if-nothing-done"]
"""When an operation that failed is run again.

"always": it is idempotent. "unless-abandoned": it is, but uses the caller's memory.
"if-nothing-done": only after an error that proves the storage did nothing.
"""

SYNC_BYTES_PER_S = 20e6
"""Slowest disk that completing an upload waits for: a spinning disk shared by a few jobs."""


_RESERVE_BYTES_PER_S = 1e9
"""Slowest reservation that is waited for: a slower one writes zeros, and nothing is gained by it.

Little is lost by going on without one, and what it takes is taken from the phase's time.
"""


class Runner(Protocol):
    """What runs an operation of a store within deadlines and repeats it: a `RetryStore`."""

    @property
    def url(self) -> str:
        """The store's root, for messages."""

    def run(
        self,
        operation: str,
        path: str,
        call: Callable[[], T],
        *,
        repeat: Repeat = "always",
        extra_s: float = 0.0,
        late: Callable[[T], None] | None = None,
    ) -> T:
        """Run `call`; see `RetryStore.run`."""

    def cleaning_up(self) -> Runner:
        """Return a runner with a deadline of its own, for discarding what failed."""


class RetryUpload:
    """An `Upload` around another; dead once the storage may still be sending a part."""

    def __init__(self, store: Runner, inner: Upload, path: str) -> None:
        self._store = store
        self._inner = inner
        self._path = path
        self._given_up_part: int | None = None
        self._sent_bytes = 0
        # Most uploads take a part again; one that appends to a stream says that it does not.
        self._repeatable = bool(getattr(inner, "repeatable", True))

    def reserve(self, total_bytes: int) -> None:
        """Take space where the storage can; in one attempt, without which the upload goes on.

        Only that there is no space is raised.
        """
        inner = self._inner
        if not isinstance(inner, Reserving):
            return
        try:
            self._store.run(
                f"reservation of {total_bytes} bytes",
                self._path,
                lambda: inner.reserve(total_bytes),
                repeat="if-nothing-done",
                extra_s=total_bytes / _RESERVE_BYTES_PER_S,
            )
        except StorageError as error:
            if error.kind == "no-space":
                raise

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Write one part, repeated if the inner upload can take it again."""
        self._sending(
            number,
            f"write of part {number}",
            lambda: self._inner.write_part(number, offset, buffers, last=last),
        )
        self._sent_bytes += sum(view.nbytes for view in buffers)

    def _sending(self, number: int, operation: str, call: Callable[[], T]) -> T:
        """Run what sends part `number`; the upload is dead if that may still be going on."""
        self._check_alive()
        try:
            return self._store.run(
                operation,
                self._path,
                call,
                repeat="unless-abandoned" if self._repeatable else "if-nothing-done",
            )
        except CheckpointError as error:
            if isinstance(error, AbandonedError):
                self._given_up_part = number
            raise
        except BaseException:
            self._given_up_part = number
            raise

    def complete(self, total_bytes: int) -> None:
        """Complete, repeated if need be; refused if a part may still be on its way."""
        self._check_alive()
        self._store.run(
            "completion",
            self._path,
            lambda: self._inner.complete(total_bytes),
            extra_s=total_bytes / SYNC_BYTES_PER_S,
        )

    def abort(self) -> None:
        """Discard what was sent, also after the phase's deadline, within `CLEAN_UP_S` seconds."""
        self._store.cleaning_up().run("abort of the upload", self._path, self._inner.abort)

    def _check_alive(self) -> None:
        if self._given_up_part is not None:
            raise StorageError(
                f"The upload of {self._store.url}/{self._path} cannot go on: part "
                f"{self._given_up_part} did not end in time and may still be changing.",
                path=self._path,
                next_step="Abort it and save again.",
            )


class RetrySharedUpload(RetryUpload):
    """A `SharedUpload` around another; dead as `RetryUpload` is."""

    def __init__(self, store: Runner, inner: SharedUpload, path: str) -> None:
        super().__init__(store, inner, path)
        self._shared = inner

    def ticket(self) -> str:
        """Return the ticket, for which the upload may have to be begun; repeated if need be."""
        return self._store.run("start of the upload", self._path, self._shared.ticket)

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
        """Have a part copied, repeated if need be."""
        crc = self._sending(
            number,
            f"copy of part {number}",
            lambda: self._shared.copy_part(
                number, offset, source, source_start, length, source_bytes=source_bytes, last=last
            ),
        )
        self._sent_bytes += length
        return crc

    def receipts(self) -> list[PartReceipt]:
        """Hand over, waiting longer for many bytes; refused if a part may still be on its way."""
        self._check_alive()
        return self._store.run(
            "handing over of the parts",
            self._path,
            self._shared.receipts,
            repeat="unless-abandoned",
            extra_s=self._sent_bytes / SYNC_BYTES_PER_S,
        )

    def complete(
        self,
        total_bytes: int,
        *,
        receipts: Sequence[PartReceipt] = (),
        existing: Existing = "refuse",
    ) -> None:
        """Complete, repeated if need be; refused if a part may still be on its way."""
        self._check_alive()
        self._store.run(
            "completion",
            self._path,
            lambda: self._shared.complete(total_bytes, receipts=receipts, existing=existing),
            extra_s=total_bytes / SYNC_BYTES_PER_S,
        )
