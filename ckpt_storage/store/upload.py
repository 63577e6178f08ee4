"""One object in parts: which parts were sent, by whom, and whether the object became visible."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Literal, TypeAlias

from ckpt_storage.errors import (
    CheckpointError,
    InvalidInputError,
    StorageError,
    UnsupportedByStoreError,
)
from ckpt_storage.format.crc import crc32c_of_all

from .backend import Backend, Part, PartCopy
from .calls import Calls
from .problems import unable
from .threads import AbandonedError

_State: TypeAlias = Literal["open", "closed", "complete", "aborted"]
""""closed": the receipts were returned, so no part may be written any more."""

SYNC_BYTES_PER_S = 20e6
"""Slowest disk for which a completion waits: a spinning disk shared by a few jobs."""

_REFUSALS = frozenset({"credentials", "no-space", "permission", "unsupported"})
"""Errors after which an object was certainly not completed."""


class Upload:
    """One new object, invisible until `complete` returns; ended by `complete` or `abort`.

    One process, the owner, begins it. Where `capabilities.tokens_travel`, others join with its
    `token`, write or copy parts, and pass their `receipts` to the process that completes it. Part
    numbers ascend with the offsets, without a gap, and none is used twice. After a part was
    abandoned the upload can only be aborted, as its memory may still be sent. If the response to
    the start is lost, `abort_uploads` or a lifecycle rule ends the upload. Safe in any thread.
    """

    def __init__(
        self, calls: Calls, path: str, *, joined: str | None = None, write_id: str = ""
    ) -> None:
        self._calls, self._path, self._shown = calls, path, calls.shown(path)
        self._capabilities = calls.capabilities
        self._is_owner, self._token = joined is None, joined
        if joined is not None:
            self._check_shared()
        self.write_id = write_id or os.urandom(16).hex()
        self._parts: dict[int, Part] = {}
        # The last part, if it would make the object visible too early or may be the whole object.
        self._held: tuple[Part, bytes] | None = None
        self._lock = threading.Lock()
        # Held during the start, so that parts that are sent at once begin one upload.
        self._begin_lock = threading.Lock()
        self._may_be_visible = False
        self._abandoned_part: Part | None = None
        self._state: _State = "open"

    def token(self) -> str:
        """Return a text with which another process joins this upload of this path.

        Raises `UnsupportedByStoreError` unless `capabilities.tokens_travel`.
        """
        self._check_shared()
        return self._ensure_begun()

    def write_part(
        self,
        number: int,
        offset: int,
        buffers: Sequence[memoryview],
        *,
        last: bool,
        crc32c: int | None = None,
    ) -> None:
        """Write part `number` (from 0) whose first byte lies at `offset` (bytes) in the object.

        The buffers may be used again after the return, unless it raised kind "timeout". A part may
        be sent again with the same bytes, where the storage can take it twice. `last` marks the
        part that ends the object. `crc32c` is the checksum of the bytes, if the caller has computed
        it: a storage that verifies checksums refuses bytes that changed since.
        """
        self._check("open")
        size_bytes = sum(view.nbytes for view in buffers)
        part = Part(number=number, offset=offset, size_bytes=size_bytes, crc32c=crc32c)
        # An object of one part is one request in place of three.
        is_whole = not number and not offset and self._is_owner and not self._token
        is_put = is_whole and self._capabilities.is_remote and self._fits_put(part)
        if last and (is_put or self._capabilities.last_part_publishes):
            data = b"".join(buffers)
            self._check_unchanged(part, [memoryview(data)])
            self._held = part, data
            return

        def put(backend: Backend, token: str) -> Part:
            return self._put_part(backend, token, part, buffers, last=last)

        self._send(part, "write", put)

    def _put_part(
        self, backend: Backend, token: str, part: Part, data: Sequence[memoryview], *, last: bool
    ) -> Part:
        try:
            receipt = backend.put_part(self._path, token, part, data, last=last)
        except Exception:
            self._check_unchanged(part, data)
            raise
        return replace(part, receipt=receipt)

    def _check_unchanged(self, part: Part, data: Sequence[memoryview]) -> None:
        """Raise if the bytes of a part are not those that its checksum was computed of."""
        if part.crc32c is not None and crc32c_of_all(data) != part.crc32c:
            what = f"cannot continue: the part at byte {part.offset} changed in this process's "
            what += "memory after its checksum was computed"
            step = "Do not change the state before the save has returned or copied it; if nothing "
            step += "does, test the memory of this host."
            raise self._error(what, step)

    def _fits_put(self, part: Part) -> bool:
        most_bytes = self._capabilities.max_put_bytes
        return most_bytes is None or part.size_bytes <= most_bytes

    def copy_part(self, copy: PartCopy) -> int | None:
        """Copy bytes of another object within the storage; return their CRC-32C as it reports it.

        Without a report (None), the caller must read the bytes and check them. Raises
        `IntegrityError` if the source has another length or the range exceeds it, and
        `UnsupportedByStoreError` where the storage cannot copy.
        """
        self._check("open")
        part = Part(number=copy.number, offset=copy.offset, size_bytes=copy.length)
        return self._send(
            part,
            f"copy from {copy.source.path}",
            lambda backend, token: backend.copy_part(self._path, token, copy),
        ).crc32c

    def receipts(self) -> list[Part]:
        """Close this member and return the parts that it wrote, durable; idempotent.

        Raises `StorageError` if a part may not be durable: the upload can then only be aborted.
        """
        with self._lock:
            self._check()
            if self._state == "open":
                self._state = "closed"
            parts = [self._parts[number] for number in sorted(self._parts)]
        token = self._token
        if token is not None:
            what = "flush of the parts"
            flush = methodcaller("flush_parts", self._path, token)
            sync_s = sum(part.size_bytes for part in parts) / SYNC_BYTES_PER_S
            self._calls.run(what, self._path, flush, repeat="unless-abandoned", extra_s=sync_s)
        return parts

    def complete(self, total_bytes: int, *, receipts: Sequence[Part] = ()) -> None:
        """Make the object of this and other members' parts visible and durable; idempotent.

        If parts overlap, leave a gap or do not end at `total_bytes`, raises `StorageError` and
        nothing becomes visible. A lost response is resolved by reading the object's `write_id`: a
        member that completes must know the owner's.
        """
        with self._lock:
            if self._state == "complete":
                return
            self._check("open", "closed")
            self._state = "closed"
            held = self._held
            parts = {*self._parts.values(), *receipts, *([held[0]] if held else ())}
        ordered = _check_gapless(parts, total_bytes, shown=self._shown)
        if self._token is None and (self._fits_put(held[0]) if held else not ordered):
            data = [memoryview(held[1] if held else b"")]
            self._finish(
                total_bytes, lambda backend: backend.put(self._path, data, write_id=self.write_id)
            )
        else:
            token = self._ensure_begun()
            self._finish(total_bytes, lambda backend: self._complete(backend, token, ordered))
        self._state = "complete"
        self._held = None

    def abort(self) -> None:
        """Discard all parts, also after the phase's deadline, within `CLEAN_UP_S` seconds.

        Idempotent. Only the owner discards; other members just stop.
        """
        with self._lock:
            if self._state == "complete":
                return
            self._state = "aborted"
            self._held = None
        try:
            self._calls.cleaning_up().run("abort of the upload", self._path, self._discard)
        finally:
            if self._may_be_visible:
                self._delete_object()

    def _delete_object(self) -> None:
        try:
            self._calls.cleaning_up().run("deletion", self._path, self._delete_if_ours)
        except StorageError as error:
            if error.kind not in {"not-found", "precondition"}:
                raise

    def _ensure_begun(self) -> str:
        with self._begin_lock:
            if self._token is None:
                self._check("open", "closed")
                begin = methodcaller("begin_upload", self._path, write_id=self.write_id)
                token: str = self._calls.run("start of the upload", self._path, begin)
                self._token = token
            return self._token

    def _send(self, part: Part, operation: str, call: Callable[[Backend, str], Part]) -> Part:
        """Send a part and keep its receipt; an abandoned part makes the upload unusable."""
        token = self._ensure_begun()
        what = f"{operation} of {part.size_bytes} bytes at byte {part.offset}"

        try:
            receipt = self._calls.run(
                what, self._path, lambda backend: call(backend, token), repeat="unless-abandoned"
            )
        except BaseException as error:
            # After an abandoned or interrupted call the part may still be in flight.
            if isinstance(error, AbandonedError) or not isinstance(error, CheckpointError):
                self._abandoned_part = part
            raise
        with self._lock:
            # `receipts` may have closed the upload while the part was being sent.
            self._check("open")
            self._parts[part.number] = receipt
        return receipt

    def _complete(self, backend: Backend, token: str, parts: list[Part]) -> None:
        if self._held is not None:
            held, data = self._held
            last = self._put_part(backend, token, held, [memoryview(data)], last=True)
            parts = [last if part is held else part for part in parts]
        backend.complete_upload(self._path, token, parts, write_id=self.write_id)

    def _finish(self, total_bytes: int, call: Callable[[Backend], None]) -> None:
        """Make the object visible; after a failure, read whether it is there all the same."""
        self._may_be_visible = True
        try:
            self._calls.run("completion", self._path, call, extra_s=total_bytes / SYNC_BYTES_PER_S)
        except StorageError as failure:
            if failure.kind in _REFUSALS:
                raise
            # Storages without write ids: nobody else writes this name.
            is_gone, ours_bytes = failure.kind == "not-found", None
            # The error of the completion is raised, not this one of the lookup.
            with contextlib.suppress(StorageError):
                info = self._calls.run("stat", self._path, methodcaller("stat", self._path))
                if info.write_id == self.write_id or (is_gone and info.write_id is None):
                    ours_bytes = info.size_bytes
            if ours_bytes == total_bytes:
                return
            if is_gone:
                what = "nothing" if ours_bytes is None else f"{ours_bytes} bytes"
                what = f"is gone, and {what} of ours lies there instead of {total_bytes} bytes"
                step = "Save again; look for a lifecycle rule that aborts uploads early."
                raise self._error(what, step) from failure
            raise

    def _discard(self, backend: Backend) -> None:
        # Wait for a thread that is beginning the upload.
        with self._begin_lock:
            token = self._token
        if token is not None and not self._is_owner:
            backend.leave_upload(self._path, token)
        elif token is not None:
            backend.abort_upload(self._path, token)

    def _delete_if_ours(self, backend: Backend) -> None:
        """Delete the object if this upload made it."""
        info = backend.stat(self._path)
        if info.write_id != self.write_id:
            return
        if info.version is not None:
            with contextlib.suppress(UnsupportedByStoreError):
                backend.delete_version(self._path, info.version)
                return
        backend.delete([self._path])

    def _check_shared(self) -> None:
        if not self._capabilities.tokens_travel:
            what = "takes no upload from several processes"
            step = "Let one process write the whole object."
            raise unable(self._calls.url, self._shown, what, step)

    def _check(self, *states: _State) -> None:
        """Raise unless the upload is usable and in one of these states, if any are passed."""
        if self._abandoned_part is not None:
            at = self._abandoned_part.offset
            why = f"the part at byte {at} did not end in time and may still be in flight"
            raise self._error(f"cannot continue: {why}", "Abort it and save again.")
        if states and self._state not in states:
            raise self._error("was ended before", "Start a new upload.")

    def _error(self, what: str, next_step: str) -> StorageError:
        text = f"The upload of {self._shown} {what}."
        return StorageError(text, path=self._shown, next_step=next_step)


def _check_gapless(parts: Iterable[Part], total_bytes: int, *, shown: str) -> list[Part]:
    """Return the parts in order; raise unless they make up an object of `total_bytes`."""
    ordered = sorted(parts, key=lambda part: part.number)
    numbers = [part.number for part in ordered]
    if len({*numbers}) < len(numbers):
        step = "Pass each member its own numbers; this is a bug of the calling program."
        raise InvalidInputError(f"Two members sent the same part of {shown}.", next_step=step)
    end_bytes = 0
    for part in ordered:
        if part.offset != end_bytes:
            break
        end_bytes += part.size_bytes
    if end_bytes != total_bytes or sum(part.size_bytes for part in ordered) != total_bytes:
        what = f"{shown} was sent without a gap up to byte {end_bytes} instead of {total_bytes}"
        what += "; it was not made visible."
        raise StorageError(what, path=shown, next_step="Save again.")
    return ordered
