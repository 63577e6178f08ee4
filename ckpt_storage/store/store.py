"""The facade: one root on any backend, safe to use."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from typing import Any, NoReturn, TypeVar

from ckpt_storage.errors import (
    CheckpointError,
    InvalidInputError,
    StorageError,
    UnsupportedByStoreError,
)
from ckpt_storage.options import RetryPolicy

from .answers import fill, put_settled, taken, whose
from .backend import (
    DELETE_COUNT,
    Backend,
    Capabilities,
    Content,
    CopySource,
    ObjectInfo,
    Range,
)
from .calls import CLEAN_UP_S, Caller, Repeat, moved, system_random
from .deadline import Deadline
from .problems import explain, too_long
from .upload import Upload

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")


class Store(Caller):
    """One root on one storage: every call ends in time, and was repeated where that is right.

    One call takes at most `request_timeout_s` seconds an attempt, and ends by the deadline of
    `bounded`. Every error is a `CheckpointError`, nearly always a `StorageError` whose `kind`
    says what it means; it holds no credentials. After kind "timeout" from a read or a part, its
    memory must not be used for anything else: a thread that was given up may still fill it.

    A callable makes the backend in the first call. `url` names the root for messages, `scrub` takes
    credentials out of them, and `scope` tells what is one storage. `clock`, `sleep` and `random`
    stand in for time in tests. May be used by several threads and by children of fork.
    """

    kept: MutableMapping[Hashable, Any] | None = None
    """Where readers keep documents that never change; for who opens the store. None: nowhere."""

    def __init__(
        self,
        backend: Backend | Callable[[], Backend],
        *,
        url: str,
        scrub: Callable[[str], str] = str,
        policy: RetryPolicy | None = None,
        request_timeout_s: float = 300.0,
        scope: Callable[[], Hashable] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = system_random,
    ) -> None:
        policy = policy or RetryPolicy()
        super().__init__(url, policy, request_timeout_s, clock=clock, sleep=sleep, random=random)
        self.scope = scope
        self.deadline = Deadline("commit", math.inf)
        self._scrub = scrub
        self._open = backend
        # Shared by all views; of two threads that open it at once, both go on with one.
        self._opened: list[Backend] = [backend] if isinstance(backend, Backend) else []
        self._is_view = False

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Store is not pickled; open it again from its Location.")

    @property
    def capabilities(self) -> Capabilities:
        """What the storage can do; nothing is asked of it."""
        known = self._opened[:1] or [self.run("opening", "", lambda backend: backend)]
        return known[0].capabilities

    def shown(self, path: str) -> str:
        """Return the URL of a path, for messages."""
        return f"{self.url.rstrip('/')}/{path}".rstrip("/")

    def bounded(
        self,
        deadline: Deadline,
        cancelled: Callable[[], bool] | None = None,
        *,
        throttled: Callable[[], None] | None = None,
    ) -> Store:
        """Return this store with every call, repeats included, ending by `deadline`.

        Closing it does nothing. Once `cancelled` returns True no attempt is begun any more. Once
        what the deadline belongs to has failed, those under way are left behind, too. `throttled`
        is called after every answer that asks for fewer requests.
        """
        return self._view(
            deadline=deadline,
            _deadlines=(*self._deadlines, deadline),
            _cancelled=cancelled or self._cancelled,
            _throttled=throttled or self._throttled,
        )

    def cleaning_up(self) -> Store:
        """Return this store with a deadline of its own, near and for discarding what failed."""
        deadline = Deadline("write", CLEAN_UP_S, self._clock)
        return self._view(_deadlines=(deadline,), _cancelled=bool)

    def _view(self, **changed: object) -> Store:
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, _is_view=True, **changed)
        return view

    def run(
        self,
        operation: str,
        path: str,
        call: Callable[[Backend], T],
        *,
        repeat: Repeat = "always",
        extra_s: float = 0.0,
    ) -> T:
        """Return what `call` makes of the backend; see `call`."""
        return self.call(
            f"{operation} of {self.shown(path)}",
            lambda: self._bordered(operation, path, call),
            repeat=repeat,
            extra_s=extra_s,
        )

    def _bordered(self, operation: str, path: str, call: Callable[[Backend], T]) -> T:
        """Return what `call` returns; every foreign exception leaves as a `StorageError`."""
        try:
            if not self._opened and not isinstance(self._open, Backend):
                self._opened.append(self._open())
            return call(self._opened[0])
        except Exception as error:  # noqa: BLE001  # backends raise any type
            failure = [self.explain(error, operation, path)]
        # Not raised where it was caught: the foreign one may carry credentials, and its traceback
        # the caller's buffers. That of this one leads here, and nothing here leads back to it.
        raise failure.pop()

    def _look_up(self) -> None:
        self._bordered("refresh of the credentials", "", lambda backend: backend.refresh())

    def explain(self, error: Exception, operation: str, path: str) -> CheckpointError:
        """Return what an exception of the backend means, without credentials."""
        known = self._opened[0] if self._opened else None
        if known is not None and not isinstance(error, CheckpointError):
            error = known.explain(error) or error
        if isinstance(error, CheckpointError) and not isinstance(error, StorageError):
            return error
        return explain(
            error,
            operation,
            self.shown(path),
            endpoint="" if known is None else known.endpoint,
            timeout_s=self._request_timeout_s,
            scrub=self._scrub,
        )

    def stat(self, path: str) -> ObjectInfo:
        """Return size, time and version of one object, never from a cache."""
        return self.run("stat", path, lambda backend: backend.stat(path))

    def get(self, path: str, *, max_bytes: int | None = None) -> Content:
        """Return a whole small object with its version, from one answer, never from a cache.

        One of more than `max_bytes` is an `IntegrityError`, and not much more is read of it.
        """

        def get(backend: Backend) -> Content:
            found = backend.get(path, max_bytes=max_bytes)
            if max_bytes is not None and len(found.data) > max_bytes:
                raise too_long(path, self.shown(path), len(found.data), max_bytes)
            return found

        return self.run("read", path, get)

    def read(self, path: str, ranges: Iterable[Range], *, size_bytes: int | None = None) -> None:
        """Fill the memory of each range; they are iterated anew at each attempt.

        The next range is asked for when the last one is filled. `size_bytes` is the length that the
        object must have. Raises `IntegrityError` if it is another, or the object ends early.
        """
        failure = self.run(
            "read",
            path,
            lambda backend: fill(self, backend, path, ranges, size_bytes),
            repeat="unless-abandoned",
        )
        if failure:
            # As in `_bordered`.
            raise failure.pop()

    def put(self, path: str, data: bytes) -> None:
        """Put a whole object at a write-once name, visible only complete, durable on return.

        Idempotent: called again, with the same bytes.
        """
        self.put_once(path, data, what="write", repeat="always")

    def create(self, path: str, data: bytes) -> None:
        """Put a whole object if nothing is there; the storage decides in one step.

        By `data`, which nobody else puts there, a lost answer is settled. Raises `StorageError` of
        kind "exists" if something else is there; of kind "unknown" if nobody can tell whether it
        was created, or will stay. Raises `UnsupportedByStoreError` if the storage cannot decide it.
        """
        if not self.capabilities.exclusive_create:
            raise self.unable(
                path,
                "has no exclusive creation that can be relied on",
                "Let only one job save here at a time; of a mounted bucket use its own URL.",
            )
        put_settled(self, "exclusive creation", path, data, if_absent=True)

    def create_alone(self, path: str, data: bytes) -> None:
        """Do what `create` does by a look and a put: safe while nobody else writes the name."""
        if whose(self, path, data, None) == "other":
            raise taken(self.shown(path), "creation", "exists")
        put_settled(self, "creation", path, data)

    def replace(self, path: str, data: bytes, *, if_match: str | None = None) -> None:
        """Put a whole object in place of what may be there; durable on return.

        With `if_match` only if the object is still of that version, else kind "precondition"; a
        lost answer is settled as by `create`. Without it, one that was given up is not repeated.
        """
        if if_match is None:
            self.put_once(path, data, what="replace", repeat="unless-abandoned")
        elif not self.capabilities.if_match:
            raise self.unable(
                path,
                "cannot replace an object only if it is of a given version",
                "Replace it without if_match, and read it back.",
            )
        else:
            put_settled(self, "replace", path, data, if_match=if_match)

    def replace_seen(self, path: str, data: bytes, seen: Content | None) -> None:
        """Put a whole object in place of what was read there, None for nothing.

        Raises `StorageError` of kind "exists", "precondition" or "not-found" if it has changed.
        A storage that knows no conditions replaces whatever is there.
        """
        if not self.capabilities.if_match:
            self.replace(path, data)
        elif seen is None:
            self.create(path, data)
        else:
            self.replace(path, data, if_match=seen.version)

    def put_once(
        self,
        path: str,
        data: bytes,
        *,
        what: str = "exclusive creation",
        repeat: Repeat = "if-nothing-done",
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Put an object; what became of a put that failed, nobody has looked at."""
        most_bytes = self.capabilities.max_put_bytes
        if most_bytes is not None and len(data) > most_bytes:
            raise StorageError(
                f"{self.shown(path)} would have {len(data)} bytes; the storage takes "
                f"{most_bytes} in one request.",
                path=self.shown(path),
                next_step="Save fewer tensors in one checkpoint; if it is .metadata that is as "
                "large, save with stock_metadata='never'.",
            )

        def put(backend: Backend) -> None:
            backend.put(path, [memoryview(data)], if_absent=if_absent, if_match=if_match)

        self.run(what, path, put, repeat=repeat)

    def unable(self, path: str, what: str, next_step: str) -> UnsupportedByStoreError:
        """Return the error that the storage has no such call."""
        return UnsupportedByStoreError(
            f"{self.url} {what}.", kind="unsupported", path=self.shown(path), next_step=next_step
        )

    def upload(self, path: str, *, if_absent: bool = False, copies: bool = False) -> Upload:
        """Begin an object in parts, at a write-once name; nothing is sent before the first part.

        if_absent: completing it raises kind "exists" if something bears the name.
        copies: `copy_part` may be called.
        """
        return Upload(self, path, if_absent=if_absent, copies=copies)

    def join(self, path: str, token: str, *, write_id: str = "") -> Upload:
        """Join another process's upload of the same path; one that is over refuses what is asked.

        Whoever completes it gives the `write_id` of the owner. Raises `UnsupportedByStoreError`
        unless `capabilities.tokens_travel`.
        """
        return Upload(self, path, joined=token, write_id=write_id)

    def open_uploads(self, prefix: str) -> set[tuple[str, str]]:
        """Return path and token of each open upload below a folder, where the storage tells both.

        Raises `UnsupportedByStoreError` unless `capabilities.lists_uploads`.
        """
        folder = prefix.strip("/")

        def collect(backend: Backend) -> set[tuple[str, str]]:
            return {(one.path, one.token) for one in backend.list_uploads(folder) if one.path}

        return self.run("listing of uploads", folder, collect)

    def abort_uploads(self, prefix: str, *, only: Callable[[str], bool] | None = None) -> int:
        """Abort open uploads and remove temporary files below a folder; return how many.

        With `only`, those for whose path it returns True, as a folder may be shared; one whose path
        the storage does not tell whole stays then.
        """
        folder = prefix.strip("/")

        def clear(backend: Backend) -> int:
            count = 0
            for found in backend.list_uploads(folder):
                moved()
                if only is None or (found.path is not None and only(found.path)):
                    backend.abort_upload(found.path or "", found.token)
                    count += 1
            return count

        return self.run("abort of uploads", folder, clear)

    def copy_source(self, path: str) -> CopySource | None:
        """Return the object as uploads of this storage can copy it; None where they cannot."""
        return self.run("look at the storage", path, lambda backend: backend.copy_source(path))

    def can_copy_from(self, other: Store) -> bool:
        """Return whether `copy_part` here takes the sources of `other`: they lie in one bucket."""
        if self.capabilities.copy_min_bytes is None:
            return False
        mine, theirs = self.copy_source(""), other.copy_source("")
        return mine is not None and theirs is not None and mine.scope == theirs.scope

    def list(self, prefix: str, *, recursive: bool = True) -> list[ObjectInfo]:
        """Return the objects below a folder, fresh from the storage; [] if there are none.

        Not recursive: only direct children; folders are then entries whose path ends in "/".
        """
        folder = prefix.strip("/")

        def collect(backend: Backend) -> list[ObjectInfo]:
            found = []
            for info in backend.list(folder, recursive=recursive):
                # Each page has the time of a request.
                moved()
                found.append(info)
            return sorted(found, key=lambda info: info.path)

        return self.run("listing", folder, collect)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error; not atomic as a whole."""
        if paths:
            shown = paths[0] if len(paths) == 1 else ""
            what = f"deletion of {len(paths)} objects"
            self.run(what, shown, lambda backend: _delete(backend, paths))

    def delete_version(self, path: str, version: str) -> None:
        """Delete an object if it is of the version that `get` told.

        Raises `StorageError` of kind "precondition" if it is another (on some storages also if it
        is gone), and `UnsupportedByStoreError` where the storage cannot decide that.
        """
        self.run("deletion", path, lambda backend: backend.delete_version(path, version))

    def delete_folder(self, path: str) -> None:
        """Delete a folder and all below it; idempotent; on object stores all with that prefix.

        Raises `InvalidInputError` for an empty path: the root is never meant.
        """
        folder = path.strip("/")
        if not folder:
            raise InvalidInputError(
                f"delete_folder would delete everything below {self.url}.",
                next_step="Name a folder below the root.",
            )

        def clear(backend: Backend) -> None:
            if not backend.delete_folder(folder):
                _delete(backend, (info.path for info in backend.list(folder, recursive=True)))

        self.run("deletion", folder, clear)

    def make_folders(self, folders: Sequence[str]) -> None:
        """Make the root and folders where the storage has such things; idempotent."""
        self.run("making of folders", "", lambda backend: backend.make_folders(folders))

    def server_time(self, probe_path: str) -> float:
        """Return the storage's clock in Unix seconds, by writing and removing `probe_path`."""
        return self.run(
            "reading of the clock", probe_path, lambda backend: backend.server_time(probe_path)
        )

    def close(self) -> None:
        """Let go of connections and end the waiting threads; idempotent; nothing for a view.

        A backend that cannot be closed, or not in time, is left as it is, with a warning.
        """
        if self._is_view:
            return
        try:
            if self._opened and type(self._opened[0]).close is not Backend.close:
                self.cleaning_up().run(
                    "closing", "", lambda backend: backend.close(), repeat="unless-abandoned"
                )
        except CheckpointError as error:
            log.warning("%s was not closed: %s", self.url, error)
        finally:
            self._pool.close()


def _delete(backend: Backend, paths: Iterable[str]) -> None:
    """Delete objects, as many at a time as a backend takes."""
    page: list[str] = []
    for path in paths:
        moved()
        page.append(path)
        if len(page) == DELETE_COUNT:
            backend.delete(page)
            page = []
    if page:
        moved()
        backend.delete(page)
