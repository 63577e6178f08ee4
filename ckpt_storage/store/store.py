"""The facade: one root on any backend, safe to use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ckpt_storage.errors import (
    CheckpointError,
    IntegrityError,
    InvalidInputError,
    StorageError,
)

from .access import Access
from .backend import (
    DELETE_COUNT,
    Backend,
    Content,
    CopySource,
    ObjectInfo,
    Part,
    Range,
    TooLongError,
)
from .calls import Bounds, Caller, Repeat, nothing_was_done
from .deadline import Deadline
from .reads import Reading, too_long
from .timed import moved
from .upload import Upload

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

_DEFINITE = frozenset({"credentials", "no-space", "not-found", "permission", "unsupported"})
"""Answers that prove that nothing was put, and that change nothing about an earlier request."""


class Store(Access):
    """One root on one storage: every call ends in time, and was repeated where that is right.

    One call takes at most `request_timeout_s` seconds an attempt, and ends by the deadline of
    `bounded`. Every error is a `CheckpointError`, nearly always a `StorageError` whose `kind`
    says what it means; it holds no credentials. A thread that was given up may still end its
    call: after kind "timeout" from a read or a part, its memory must not be used for anything else.

    `backend` may be made late, in the first call, by a callable. `url` names the root for messages
    and `scrub` takes credentials out of them; `scope` tells what is one storage. `clock`, `sleep`
    and `random` stand in for time in tests. May be used by several threads and by children of
    fork; it is not pickled.
    """

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def bounded(
        self,
        deadline: Deadline,
        cancelled: Callable[[], bool] | None = None,
        *,
        throttled: Callable[[], None] | None = None,
    ) -> Store:
        """Return this store with every call, repeats included, ending by `deadline`.

        It shares all but a nearer deadline; closing it does nothing. Once `cancelled` returns True
        no attempt is begun any more. Once what the deadline belongs to has failed, those under way
        are left behind, too. `throttled` is called after every answer that asks for fewer requests.
        """
        known = self._caller.bounds
        bounds = Bounds(
            deadlines=(*known.deadlines, deadline),
            cancelled=cancelled or known.cancelled,
            throttled=throttled or known.throttled,
        )
        view = self._view(self._caller.within(bounds))
        view.deadline = deadline
        return view

    def cleaning_up(self) -> Store:
        """Return this store with a deadline of its own, near and for discarding what failed."""
        return self._view(self._caller.cleaning_up())

    def _view(self, caller: Caller) -> Store:
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._caller, view._is_view = caller, True  # the same class
        return view

    def stat(self, path: str) -> ObjectInfo:
        """Return size, time and version of one object, never from a cache."""
        return self.run("stat", path, lambda backend: backend.stat(path))

    def get(self, path: str, *, max_bytes: int | None = None) -> Content:
        """Return a whole small object with its version, from one answer, never from a cache.

        One of more than `max_bytes` is an `IntegrityError`, and not much more is read of it.
        """

        def get(backend: Backend) -> Content:
            try:
                found = backend.get(path, max_bytes=max_bytes)
            except TooLongError as error:
                size_bytes = error.size_bytes
            else:
                size_bytes = len(found.data)
                if max_bytes is None or size_bytes <= max_bytes:
                    return found
            raise too_long(path, self.shown(path), size_bytes, max_bytes)

        return self.run("read", path, get)

    def read(self, path: str, ranges: Iterable[Range], *, size_bytes: int | None = None) -> None:
        """Fill the memory of each range; they are iterated anew at each attempt.

        The next range is asked for when the last one is filled. `size_bytes` is the length that the
        object must have. Raises `IntegrityError` if it is another, or the object ends early.
        """

        def kind_of(error: Exception) -> str:
            return getattr(self.explain(error, "read", path), "kind", "")

        def read(backend: Backend) -> Exception | None:
            return Reading(path, self.shown(path), ranges, size_bytes).run(backend, kind_of)

        failure = self.run("read", path, read, repeat="unless-abandoned")
        try:
            if failure is not None:
                raise failure
        finally:
            # The traceback leads to this frame, and the frame must not lead back.
            del failure

    def put(self, path: str, data: bytes) -> None:
        """Put a whole object at a write-once name, visible only complete, durable on return.

        Idempotent: called again, with the same bytes.
        """
        self._put("write", path, data)

    def create(self, path: str, data: bytes) -> None:
        """Put a whole object if nothing is there; the storage decides in one step.

        By `data`, which nobody else puts there, a lost answer is settled. Raises `StorageError` of
        kind "exists" if something else is there; of kind "unknown" if nobody can tell whether it
        was created, or whether it will stay; of any other if it was not. Raises
        `UnsupportedByStoreError` if the storage cannot decide it.
        """
        if not self.capabilities.exclusive_create:
            raise self._unable(
                path,
                "has no exclusive creation that can be relied on",
                "Let only one job save here at a time, or pass commit_url= of a storage that has "
                "it.",
            )
        self._settled("exclusive creation", path, data, if_absent=True)

    def put_absent(self, path: str, data: bytes) -> None:
        """Ask the storage once to create an object; what a failure did, nobody has looked at."""
        try:
            self._put("exclusive creation", path, data, repeat="if-nothing-done", if_absent=True)
        except StorageError as error:
            if error.kind == "precondition":
                error.kind = "exists"
            raise

    def create_alone(self, path: str, data: bytes) -> None:
        """Do what `create` does by a look and a put: safe while nobody else writes the name."""
        if self._look(path, data, None) == "other":
            raise self._taken("creation", path, "exists")
        self._settled("creation", path, data)

    def replace(self, path: str, data: bytes, *, if_match: str | None = None) -> None:
        """Put a whole object in place of what may be there; durable on return.

        With `if_match` only if the object is still of that version, else kind "precondition"; a
        lost answer is settled as by `create`. Without it, not repeated after it was given up: the
        late one might overtake.
        """
        if if_match is None:
            self._put("replace", path, data, repeat="unless-abandoned")
        elif not self.capabilities.if_match:
            raise self._unable(
                path,
                "cannot replace an object only if it is of a given version",
                "Replace it without if_match, and read it back.",
            )
        else:
            self._settled("replace", path, data, if_match=if_match)

    def _settled(
        self,
        operation: str,
        path: str,
        data: bytes,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Put an object under a condition; read back what a failure did, and try again in doubt."""
        self._check_fits(path, data)
        is_posix = self.capabilities.kind == "posix"
        in_doubt, unsynced = False, False
        for attempt in range(1, self.policy.attempt_count + 1):
            try:
                self._put(
                    operation,
                    path,
                    data,
                    repeat="if-nothing-done",
                    if_absent=if_absent,
                    if_match=if_match,
                )
            except StorageError as error:
                failure = error
            else:
                return
            kind = failure.kind
            if is_posix and kind not in {"exists", "timeout"}:
                # The name is linked first and its folder synced then. A failed fsync proves
                # nothing, and must not be tried again.
                unsynced = True
                in_doubt |= failure.retryable
            else:
                # What was not answered may still arrive.
                in_doubt |= not (kind in _DEFINITE or nothing_was_done(failure))
            found = self._look(path, data, if_match)
            if found == "other":
                refusal = "exists" if if_match is None else "precondition"
                raise self._taken(operation, path, refusal) from failure
            if found == "ours" and not unsynced:
                return
            if not in_doubt and (found == "nothing" or not unsynced):
                raise failure
            last = found == "ours" or attempt == self.policy.attempt_count
            if last or not self._caller.pause(attempt):
                break
        there = "; it is there, but" if found == "ours" else ""
        raise StorageError(
            f"The outcome of the {operation} of {self.shown(path)} is not known{there}: {failure}",
            kind="unknown",
            path=self.shown(path),
            next_step="Look at the object when the storage answers again.",
        ) from failure

    def _look(self, path: str, data: bytes, version: str | None) -> str:
        """Return whose an object is: "ours", "other", "nothing" new, or "untold"."""
        try:
            found = self.get(path, max_bytes=len(data) if version is None else None)
        except IntegrityError:
            return "other"
        except StorageError as error:
            if error.kind != "not-found":
                return "untold"
            return "nothing" if version is None else "other"
        if found.data == data:
            return "ours"
        return "nothing" if version is not None and found.version == version else "other"

    def _taken(self, operation: str, path: str, kind: str) -> StorageError:
        return StorageError(
            f"The {operation} of {self.shown(path)} was refused: something else is there.",
            kind=kind,
            path=self.shown(path),
            next_step="Read it again; somebody else wrote it.",
        )

    def upload(
        self,
        path: str,
        *,
        size_hint: int | None = None,
        if_absent: bool = False,
        copies: bool = False,
    ) -> Upload:
        """Begin an object in parts, at a write-once name; nothing is sent before the first part.

        size_hint: about how long it will be. Where the storage can, space is taken with the first
            part, which raises `StorageError` of kind "no-space" if that is not there.
        if_absent: completing it raises kind "exists" if something bears the name.
        copies: `copy_part` may be called.
        """
        return Upload(self, path, size_hint=size_hint, if_absent=if_absent, copies=copies)

    def join(self, path: str, token: str) -> Upload:
        """Join another process's upload of the same path; one that is over refuses the first part.

        Raises `UnsupportedByStoreError` unless `capabilities.tokens_travel`.
        """
        return Upload(self, path, joined=token)

    def take_over(self, path: str, token: str, write_id: str, parts: Sequence[Part]) -> Upload:
        """Own an upload that another process handed over, perhaps before it died. Raises as `join`.

        `write_id` is what it was begun with, and `parts` are all that was sent. The storage refuses
        to complete one that is gone.
        """
        return Upload(self, path, joined=token, handed_over=parts, write_id=write_id)

    def open_uploads(self, prefix: str) -> set[tuple[str, str]]:
        """Return path and token of each open upload below a folder, where the storage tells both.

        Raises `UnsupportedByStoreError` unless `capabilities.lists_uploads`.
        """
        folder = prefix.strip("/")
        return self.run(
            "listing of uploads",
            folder,
            lambda backend: {
                (found.path, found.token)
                for found in backend.list_uploads(folder)
                if found.path is not None
            },
        )

    def copy_source(self, path: str) -> CopySource | None:
        """Return the object as uploads of this storage can copy it; None where they cannot."""
        return self.run("look at the storage", path, lambda backend: backend.copy_source(path))

    def can_copy_from(self, other: Store, *, at_any_price: bool = True) -> bool:
        """Return whether `copy_part` here takes the sources of `other`: one bucket, one disk.

        Unless `at_any_price`, only where a copy spares more than it costs.
        """
        if self.capabilities.copy_min_bytes is None:
            return False
        mine, theirs = self.copy_source(""), other.copy_source("")
        if mine is None or theirs is None or mine.scope != theirs.scope:
            return False
        return at_any_price or theirs.pays

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
            return found

        return sorted(self.run("listing", folder, collect), key=lambda info: info.path)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error; not atomic as a whole."""
        if not paths:
            return
        shown = paths[0] if len(paths) == 1 else ""
        self.run(
            f"deletion of {len(paths)} objects", shown, lambda backend: _delete(backend, paths)
        )

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

    def abort_uploads(self, prefix: str, *, only: Callable[[str], bool] | None = None) -> int:
        """Abort open uploads and remove temporary files below a folder; return how many.

        With `only`, those for whose path it returns True: an upload is abandoned property of
        whoever began it, and a folder may be shared. One whose path the storage does not tell
        whole is not asked for, and stays then.
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
        opened = self._opened.get("")
        try:
            if opened is not None and type(opened).close is not Backend.close:
                self.cleaning_up().run(
                    "closing", "", lambda backend: backend.close(), repeat="unless-abandoned"
                )
        except CheckpointError as error:
            log.warning("%s was not closed: %s", self.url, error)
        finally:
            self._caller.pool.close()

    def _put(
        self,
        operation: str,
        path: str,
        data: bytes,
        *,
        repeat: Repeat = "always",
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        self._check_fits(path, data)

        def put(backend: Backend) -> None:
            backend.put(path, [memoryview(data)], if_absent=if_absent, if_match=if_match)

        self.run(operation, path, put, repeat=repeat)

    def _check_fits(self, path: str, data: bytes) -> None:
        """Refuse an object that is too long for one request."""
        most_bytes = self.capabilities.max_put_bytes
        if most_bytes is not None and len(data) > most_bytes:
            raise StorageError(
                f"{self.shown(path)} would have {len(data)} bytes; the storage takes "
                f"{most_bytes} in one request.",
                path=self.shown(path),
                next_step="Save fewer tensors in one checkpoint; if it is .metadata that is as "
                "large, save with stock_metadata='never'.",
            )


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
