"""One object on its way through obstore: held back if it is small, else one streamed multipart put.

Knows how obstore puts, completes and aborts; knows what it leaves behind only through
`Remains`, which a family's fsspec dialect has. Called by `dialect_obstore`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from ckpt_storage.errors import StorageError

from .mapping import HttpFailure
from .obstore_client import ObstoreClient
from .obstore_errors import CrashedError
from .obstore_feed import Feed, StoppedError
from .parts import ended, gone, joined, wrong_length

__all__ = ["ObstoreUpload", "Remains", "found_bytes"]

WRITE_IDS = {"azure": "ckptwriteid", "gcs": "ckpt-write-id", "s3": "ckpt-write-id"}
"""Metadata that tells one attempt to write a name from another, as the fsspec dialects spell it."""

_MOST_AT_ONCE = 32
"""Parts that obstore sends at a time, if there are so many threads, each of which waits for its.

obstore looks for failures only once it has sent as many, so a larger number would waste more.
"""

_GRACE_S = 5.0
_NOT_FOUND = 404
_NO_UPLOAD = "NoSuchUpload"


class Remains(Protocol):
    """What obstore has no request for: clearing up after an upload that failed."""

    def abort_all(self, path: str) -> None:
        """Abort every open upload of this very path."""

    def delete(self, path: str) -> None:
        """Delete an object that may be absent."""


class ObstoreUpload:
    """An `Upload` that obstore repeats requests of; a part that failed for good is the end of it.

    The callers' buffers are sent from where they lie: `write_part` returns when its part
    is on the storage. `is_over` tells that no further call can succeed. Success is what obstore
    or a look at the object says; that nobody told of a failure is none.
    """

    def __init__(
        self, client: ObstoreClient, path: str, *, chunk_bytes: int, remains: Remains
    ) -> None:
        self._client = client
        self._path = path
        self._name = client.name(path)
        self._shown = client.shown(path)
        self._remains = remains
        self._chunk_bytes = chunk_bytes
        self._write_id = os.urandom(16).hex()
        self._only_part: bytes | None = None
        self._put: _Put | None = None
        # Held while the put is begun, so that parts sent at once begin one.
        self._lock = threading.Lock()
        self._may_be_visible = False
        self._state = "open"
        # An attempt may begin until the deadline of the first, and lasts no longer than that.
        self._patience_s = 2 * client.request_timeout_s + _GRACE_S

    @property
    def is_over(self) -> bool:
        """Whether the put has failed, which nothing mends."""
        put = self._put
        return put is not None and put.has_failed

    def open(self) -> None:
        """Have obstore begin the upload now, in a thread of its own."""
        self._begun()

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Hand a part to obstore, which begins the upload with the first one, or has begun it."""
        if self._state != "open":
            raise ended(self._shown)
        if last and number == 0 and self._put is None:
            self._only_part = joined(buffers)
            return
        put = self._begun()
        try:
            put.feed.put(offset, buffers, timeout_s=self._patience_s)
        except TimeoutError as error:
            # obstore may still read the buffers: the upload must never be completed.
            put.give_up(error)
        put.raise_failure()
        if self._state != "open":
            raise ended(self._shown)
        if put.feed.is_stopped:
            raise self._ended_unasked()

    @property
    def pause_s(self) -> float:
        """For how long (seconds) obstore waits before it repeats a request for the first time."""
        return self._client.pause_s

    def queue_part(
        self,
        number: int,
        offset: int,
        buffers: Sequence[memoryview],
        *,
        last: bool,
        freed: Callable[[], None],
    ) -> bool:
        """Hand a part to obstore and return; after the last one obstore completes by itself."""
        if self._state != "open":
            raise ended(self._shown)
        if last and number == 0 and self._put is None:
            self._only_part = joined(buffers)
            freed()
            return True
        put = self._begun()
        self._may_be_visible = self._may_be_visible or last
        if not put.feed.lend(offset, buffers, last=last, freed=freed):
            put.raise_failure()
            raise self._ended_unasked()
        return True

    def check(self) -> None:
        """Raise why obstore ended before the last part, or that it lets go of no part any more."""
        put = self._put
        if put is None or put.is_done:
            return
        if put.feed.idle_s > self._patience_s:
            # It may still read the buffers: what comes of it must never count.
            put.give_up(TimeoutError(f"No part was sent within {self._patience_s:g} s"))
        if put.feed.is_ended and not put.was_given_up:
            # Whether it failed after all, `complete` finds out: the object may be there.
            return
        put.raise_failure()
        if self._state != "open":
            raise ended(self._shown)
        if put.feed.is_stopped:
            raise self._ended_unasked()

    def complete(self, total_bytes: int) -> None:
        """Put the only part, or let obstore complete; look at the object if its answer is lost."""
        if self._state == "complete":
            return
        if self._state != "open":
            raise ended(self._shown)
        if self._put is None:
            self._put_small(total_bytes)
        else:
            self._finish(self._put, total_bytes)
        with self._lock:
            if self._state == "open":
                self._state = "complete"
            is_complete = self._state == "complete"
        self._only_part = None
        if not is_complete:
            # An abort has overtaken this, and may have looked before the object was there.
            self._delete_visible()
            raise ended(self._shown)

    def stop(self) -> None:
        """Let go whoever waits in `write_part`, as soon as obstore lets go of their buffers."""
        # Waits for a thread that is just beginning the put.
        with self._lock:
            if self._state == "complete":
                return
            self._state = "aborted"
            self._only_part = None
            put = self._put
        if put is not None:
            put.feed.stop()

    def abort(self) -> None:
        """Have obstore abort, then clear up what it may have left."""
        self.stop()
        if self._state == "complete":
            return
        put = self._put
        if put is not None:
            put.wait(self._patience_s)
            # Also where obstore has aborted: S3 may keep parts that arrive meanwhile.
            self._remains.abort_all(self._path)
        self._delete_visible()

    def _delete_visible(self) -> None:
        # What bears no mark may be what another copy of the same save has put there meanwhile.
        if self._may_be_visible and self._found_bytes(unmarked_is_ours=False) is not None:
            self._remains.delete(self._path)

    def _begun(self) -> _Put:
        with self._lock:
            if self._state != "open":
                raise ended(self._shown)
            if self._put is None:
                self._put = _Put(
                    self._client,
                    self._name,
                    {WRITE_IDS[self._client.family]: self._write_id},
                    chunk_bytes=self._chunk_bytes,
                )
                # An upload that nobody ends must not keep its thread for ever.
                weakref.finalize(self, self._put.feed.stop).atexit = False
            return self._put

    def _put_small(self, total_bytes: int) -> None:
        import obstore  # noqa: PLC0415  # an extra

        data = self._only_part or b""
        if len(data) != total_bytes:
            raise wrong_length(self._shown, len(data), total_bytes)
        self._may_be_visible = True
        self._client.run(
            "write",
            lambda store: obstore.put(
                store,
                self._name,
                data,
                attributes={WRITE_IDS[self._client.family]: self._write_id},
                use_multipart=False,
            ),
        )

    def _finish(self, put: _Put, total_bytes: int) -> None:
        if not put.feed.is_ended:
            put.raise_failure()
        if put.feed.end_bytes != total_bytes:
            raise wrong_length(self._shown, put.feed.end_bytes, total_bytes)
        self._may_be_visible = True
        put.feed.end()
        put.wait(self._patience_s)
        if put.is_done:
            return
        if put.was_given_up:
            put.raise_failure()
            raise self._ended_unasked()
        # A server forgets the upload once it has done the work, and then the answer got lost.
        length = self._found_bytes()
        if length == total_bytes:
            return
        if put.is_gone:
            raise gone(self._shown, length, total_bytes)
        put.raise_failure()
        if self._state != "open":
            raise ended(self._shown)
        raise self._ended_unasked()

    def _ended_unasked(self) -> StorageError:
        return StorageError(
            f"The upload of {self._shown} ended before its time, and obstore did not say why.",
            path=self._shown,
            next_step="Save again; if it comes back, pass engine='fsspec'.",
        )

    def _found_bytes(self, *, unmarked_is_ours: bool = True) -> int | None:
        return found_bytes(
            self._client, self._name, self._write_id, unmarked_is_ours=unmarked_is_ours
        )


def found_bytes(
    client: ObstoreClient, name: str, write_id: str, *, unmarked_is_ours: bool = True
) -> int | None:
    """Return the length of the object if it is the one that `write_id` stands for, else None.

    Some servers keep no metadata: to who only confirms a length, an unmarked object is ours.
    """
    import obstore  # noqa: PLC0415  # an extra

    try:
        found = client.run("read", lambda store: obstore.get(store, name, options={"head": True}))
    except HttpFailure as error:
        if error.status != _NOT_FOUND:
            raise
        return None
    unmarked = write_id if unmarked_is_ours else None
    mark = found.attributes.get(WRITE_IDS[client.family], unmarked)
    return int(found.meta["size"]) if mark == write_id else None


class _Put:
    """One call of `obstore.put` in a thread of its own, which ends when its feed does."""

    def __init__(
        self, client: ObstoreClient, name: str, attributes: dict[str, str], *, chunk_bytes: int
    ) -> None:
        self.feed = Feed(chunk_bytes)
        self._failure: Exception | None = None
        self._is_done = False
        self._was_given_up = False
        self._thread = threading.Thread(
            target=self._run,
            args=(client, name, attributes, chunk_bytes),
            name=f"ckpt-storage upload {name}",
            daemon=True,
        )
        self._thread.start()

    def _run(
        self, client: ObstoreClient, name: str, attributes: dict[str, str], chunk_bytes: int
    ) -> None:
        try:
            import obstore  # noqa: PLC0415  # an extra

            client.run(
                "upload",
                lambda store: obstore.put(
                    store,
                    name,
                    self.feed,
                    attributes=attributes,
                    use_multipart=True,
                    chunk_size=chunk_bytes,
                    max_concurrency=_MOST_AT_ONCE,
                ),
            )
            self._is_done = self.feed.is_exhausted
        except Exception as error:  # noqa: BLE001  # raised again by whoever waits
            # The traceback would keep this frame, and with it the feed, alive.
            self._failure = self._failure or error.with_traceback(None)
        except BaseException as error:  # noqa: BLE001  # no thread is above this one
            told = f"{type(error).__name__}: {error}"
            self._failure = self._failure or CrashedError(f"obstore ended with {told}")
        finally:
            self.feed.stop()

    @property
    def is_done(self) -> bool:
        """Whether obstore has taken all, said that it is done, and nobody had given it up."""
        return self._is_done and self._failure is None

    @property
    def has_failed(self) -> bool:
        """Whether obstore has given up; it then has tried to abort what it had begun."""
        return self._failure is not None

    @property
    def was_given_up(self) -> bool:
        """Whether the put was ended from here, since when nothing vouches for its content."""
        return self._was_given_up

    @property
    def is_gone(self) -> bool:
        """Whether the storage no longer knew the upload."""
        failure = self._failure
        return isinstance(failure, HttpFailure) and failure.error_code == _NO_UPLOAD

    def give_up(self, error: Exception) -> None:
        """Have obstore abort as soon as it asks for more, because of `error`."""
        self._was_given_up = True
        self._failure = self._failure or error.with_traceback(None)
        self.feed.stop()

    def raise_failure(self) -> None:
        """Raise what ended the put, if anything did."""
        failure = self._failure
        if failure is None or isinstance(failure, StoppedError):
            return
        try:
            raise failure
        finally:
            with contextlib.suppress(AttributeError):
                failure.__traceback__ = None
            del failure

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the put; raises `TimeoutError`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"The upload did not end within {timeout_s:g} s")
