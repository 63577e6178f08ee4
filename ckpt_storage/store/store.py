"""The facade: one root on any backend, safe to use."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from operator import methodcaller
from typing import Any, Literal, TypeAlias, TypeVar

from ckpt_storage.errors import (
    IntegrityError,
    InvalidInputError,
    StorageError,
)
from ckpt_storage.format.names import path_flaw, unsafe_path_error

from .abilities import find_record
from .backend import Backend, Content, CopySource, ObjectInfo, OpenUpload, Range, ShortReadError
from .calls import Calls, Repeat, nothing_was_done
from .problems import damaged, too_long, unable
from .threads import moved
from .upload import SYNC_BYTES_PER_S, Upload

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

UnsafeNames: TypeAlias = Literal["skip", "refuse"]
"""What a listing does about names that lead out of the folder, or are others elsewhere."""

_DEFINITE = frozenset({"credentials", "no-space", "not-found", "permission", "unsupported"})
"""Answers that prove that nothing was put, and that change nothing about an earlier request."""

_REPEATED_COUNT = 16
"""Objects whose deletion is repeated together: most backends send a request for each."""


class Store(Calls):
    """One root on one storage: every call ends in time, and was repeated where that is right.

    One call takes at most `request_timeout_s` seconds an attempt, and ends by the deadline of
    `bounded`. Every error is a `CheckpointError`, nearly always a `StorageError` whose `kind`
    says what it means; it holds no credentials. After kind "timeout" from a read or a part, its
    memory must not be used for anything else: a thread that was given up may still fill it.
    """

    kept: MutableMapping[Hashable, Any] | None = None
    """Where readers keep documents that never change; for who opens the store. None: nowhere."""

    def stat(self, path: str) -> ObjectInfo:
        """Return size, time and version of one object, never from a cache."""
        return self._look("stat", path, lambda backend: backend.stat(path))

    def get(self, path: str, *, max_bytes: int | None = None) -> Content:
        """Return a whole small object with its version, from one answer, never from a cache.

        One of more than `max_bytes` is an `IntegrityError`, and not much more is read of it.
        """

        def get(backend: Backend) -> Content:
            found = backend.get(path, max_bytes=max_bytes)
            if max_bytes is not None and len(found.data) > max_bytes:
                raise too_long(path, self.shown(path), len(found.data), max_bytes)
            return found

        return self._look("read", path, get)

    def tail(self, path: str, byte_count: int) -> Content:
        """Return the last bytes of an object, or all of a shorter one, and its version."""

        def tail(backend: Backend) -> Content:
            try:
                return backend.tail(path, byte_count)
            except ShortReadError:
                # It was replaced by a shorter one.
                return backend.tail(path, byte_count)

        return self._look("read", path, tail)

    def read(self, path: str, ranges: Iterable[Range], *, size_bytes: int | None = None) -> None:
        """Fill the memory of each range; they are iterated anew at each attempt.

        The next range is asked for when the last one is filled. `size_bytes` is the length that the
        object must have. Raises `IntegrityError` if it is another, or the object ends early.
        """

        def fill(backend: Backend) -> list[Exception]:
            return self._fill(backend, path, ranges, size_bytes)

        failure = self._look("read", path, fill, repeat="unless-abandoned")
        if failure:
            # As in `Calls._bordered`: a traceback must not hold the buffers.
            raise failure.pop()

    def _look(
        self, operation: str, path: str, call: Callable[[Backend], T], *, repeat: Repeat = "always"
    ) -> T:
        """Make a call that reads; what may not be listed is absent where it is forbidden."""
        try:
            return self.run(operation, path, call, repeat=repeat)
        except StorageError as error:
            if error.kind == "permission" and self.capabilities.is_remote:
                record = find_record(self.find_scope())
                if record is not None and record.hides_absence:
                    error.kind = "not-found"
            raise

    def find_scope(self) -> Hashable:
        """Return the key of one storage; what was seen of it holds for all roots there."""
        scope = self.scope
        return self.run("look at the storage", "", lambda _: scope()) if scope else self.url

    def _fill(
        self, backend: Backend, path: str, ranges: Iterable[Range], size_bytes: int | None
    ) -> list[Exception]:
        """Fill ranges of an object, once; return what their iterator raised, if it did."""
        lent = _Lent(ranges)
        try:
            self._check_length(path, size_bytes, backend.read(path, iter(lent)))
        except ShortReadError as error:
            position = error.position
        except Exception as error:
            if lent.failures:
                if isinstance(lent.failures[0], IntegrityError) and size_bytes is not None:
                    # A wrong length is reported as such, not as the first wrong block.
                    self._check_length(path, size_bytes, backend.stat(path).size_bytes)
                return lent.failures
            if getattr(self.explain(error, "read", path), "kind", "") != "range":
                raise
            position = lent.start
        else:
            return []
        total_bytes = backend.stat(path).size_bytes
        self._check_length(path, size_bytes, total_bytes)
        shown, start, stop = self.shown(path), lent.start, lent.stop
        if total_bytes >= stop:
            what = f"The read of {shown} ended after {position - start} of {stop - start} bytes."
            step = "Try again; if it comes back, look for a proxy that cuts answers."
            raise StorageError(what, kind="connection", retryable=True, path=shown, next_step=step)
        asked = f"within the range [{start}, {stop}) that was asked for"
        raise damaged(path, f"{shown} ends at byte {total_bytes}, {asked}.", total_bytes)

    def _check_length(self, path: str, size_bytes: int | None, found_bytes: int | None) -> None:
        if found_bytes is not None and size_bytes not in {None, found_bytes}:
            text = f"{self.shown(path)} has {found_bytes} bytes instead of {size_bytes}."
            raise damaged(path, text, min(found_bytes, size_bytes or 0))

    def drop_caches(self, path: str) -> None:
        """Have the next read of an object come from the storage itself; see `Backend`.

        An object that is gone has nothing to drop: the next read reports that.
        """
        try:
            self.run("dropping of caches", path, lambda backend: backend.drop_caches(path))
        except StorageError as error:
            if error.kind != "not-found":
                raise

    def put(self, path: str, data: bytes) -> None:
        """Put a whole object at a write-once name; visible only complete, durable; idempotent."""
        self.put_once(path, data, what="write", repeat="always")

    def create(self, path: str, data: bytes) -> None:
        """Put a whole object if nothing is there; the storage decides in one step.

        By `data`, which nobody else puts there, a lost answer is settled. Raises `StorageError` of
        kind "exists" if something else is there; of kind "unknown" if nobody can tell whether it
        was created, or will stay. Raises `UnsupportedByStoreError` if the storage cannot decide it.
        """
        if not self.capabilities.exclusive_create:
            step = "Let only one job save here at a time; of a mounted bucket use its own URL."
            raise unable(
                self.url, self.shown(path), "has no exclusive creation that can be relied on", step
            )
        self._put_settled("exclusive creation", path, data, if_absent=True)

    def create_alone(self, path: str, data: bytes) -> None:
        """Do what `create` does by a look and a put: safe while nobody else writes the name."""
        if self._whose(path, data, None) == "other":
            raise self._taken("creation", path, "exists")
        self._put_settled("creation", path, data)

    def replace(self, path: str, data: bytes, *, if_match: str | None = None) -> None:
        """Put a whole object in place of what may be there; durable on return.

        With `if_match` only if the object is still of that version, else kind "precondition"; a
        lost answer is settled as by `create`. Without it, one that was given up is not repeated.
        """
        if if_match is None:
            self.put_once(path, data, what="replace", repeat="unless-abandoned")
        elif not self.capabilities.if_match:
            what = "cannot replace an object only if it is of a given version"
            raise unable(
                self.url, self.shown(path), what, "Replace it without if_match, and read it back."
            )
        else:
            self._put_settled("replace", path, data, if_match=if_match)

    def _put_settled(
        self,
        operation: str,
        path: str,
        data: bytes,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Put an object under a condition; see `create` and `replace`."""
        is_posix = self.capabilities.kind == "posix"
        in_doubt, unsynced = False, False
        for attempt in range(1, self.policy.attempt_count + 1):
            try:
                self.put_once(path, data, what=operation, if_absent=if_absent, if_match=if_match)
            except StorageError as error:
                failure = error
            else:
                return
            if is_posix and failure.kind not in {"exists", "not-begun"}:
                # The name is linked first and its folder synced then. A failed fsync proves
                # nothing, and must not be tried again; one that was given up may still fail.
                unsynced = True
                in_doubt |= failure.retryable or failure.kind == "timeout"
            else:
                # What was not answered may still arrive.
                is_unmet = if_match is not None and failure.kind == "precondition"
                in_doubt |= not (is_unmet or failure.kind in _DEFINITE or nothing_was_done(failure))
            found = self._whose(path, data, if_match)
            if found == "other":
                kind = "exists" if if_match is None else "precondition"
                raise self._taken(operation, path, kind) from failure
            if found == "ours" and not unsynced:
                return
            if not in_doubt and (found == "nothing" or not unsynced):
                raise failure
            is_last = found == "ours" or attempt == self.policy.attempt_count
            if is_last or not self.pause(attempt):
                break
        shown, there = self.shown(path), "; it is there, but" if found == "ours" else ""
        what = f"The outcome of the {operation} of {shown} is not known{there}: {failure}"
        step = "Look at the object when the storage answers again."
        raise StorageError(what, kind="unknown", path=shown, next_step=step) from failure

    def _whose(self, path: str, data: bytes, version: str | None) -> str:
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
        what = f"The {operation} of {self.shown(path)} was refused: something else is there."
        step = "Read it again; somebody else wrote it."
        return StorageError(what, kind=kind, path=self.shown(path), next_step=step)

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
            shown = self.shown(path)
            what = f"{shown} has {len(data)} bytes; the storage takes {most_bytes} in one request."
            step = "Save fewer tensors at a time; if it is .metadata, with stock_metadata='never'."
            raise StorageError(what, path=shown, next_step=step)

        def put(backend: Backend) -> None:
            backend.put(path, [memoryview(data)], if_absent=if_absent, if_match=if_match)

        self.run(what, path, put, repeat=repeat)

    def upload(self, path: str, *, copies: bool = False) -> Upload:
        """Begin an object in parts, at a write-once name; nothing is sent before the first part.

        copies: `copy_part` may be called.
        """
        return Upload(self, path, copies=copies)

    def join(self, path: str, token: str, *, write_id: str = "") -> Upload:
        """Join another process's upload of the same path; one that is over refuses what is asked.

        The process that completes it passes the `write_id` of the owner. Raises
        `UnsupportedByStoreError` unless `capabilities.tokens_travel`.
        """
        return Upload(self, path, joined=token, write_id=write_id)

    def temporary_files(self, path: str) -> list[OpenUpload]:
        """Return the temporary files of an object, or of all below a folder of that name.

        An empty list where the storage writes no such files.
        """
        if not self.capabilities.has_temporary_files:
            return []

        def collect(backend: Backend) -> list[OpenUpload]:
            return list(backend.list_uploads(path))

        return self.run("listing of temporary files", path, collect)

    def remove_temporary_file(self, found: OpenUpload) -> None:
        """Remove a temporary file that nobody writes any more; one that is gone is no error."""
        path = found.path or ""
        self.run("removal", path, lambda backend: backend.abort_upload(path, found.token))

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

    def copy_object(self, path: str, source: CopySource, *, size_bytes: int) -> int | None:
        """Have the storage put an object equal to `source`; return its CRC-32C if reported.

        At a write-once name; visible only complete, durable; idempotent. Raises
        `UnsupportedByStoreError` where its bytes have to be sent, `IntegrityError` for another
        length.
        """
        return self.run(
            f"copy from {source.path}",
            path,
            lambda backend: backend.copy_object(path, source, size_bytes=size_bytes),
            extra_s=size_bytes / SYNC_BYTES_PER_S,
        )

    def can_copy_objects_of(self, other: Store) -> bool:
        """Return whether `copy_object` here may take objects of `other`."""
        if not self.capabilities.copies_objects:
            return False
        mine, theirs = self.copy_source(""), other.copy_source("")
        return mine is not None and theirs is not None and mine.scope == theirs.scope

    def can_copy_from(self, other: Store) -> bool:
        """Return whether `copy_part` here takes the sources of `other`: they lie in one bucket."""
        if self.capabilities.copy_min_bytes is None:
            return False
        mine, theirs = self.copy_source(""), other.copy_source("")
        return mine is not None and theirs is not None and mine.scope == theirs.scope

    def list(
        self, prefix: str, *, recursive: bool = True, unsafe_names: UnsafeNames = "skip"
    ) -> list[ObjectInfo]:
        """Return the objects below a folder, fresh from the storage; [] if there are none.

        Not recursive: only direct children; folders are then entries whose path ends in "/".
        Every path is safe to join to another root. Objects with other names are left out with a
        warning; with `unsafe_names="refuse"` the first one is an `UnsafeContentError`.
        """
        folder = prefix.strip("/")

        def collect(backend: Backend) -> tuple[list[ObjectInfo], dict[str, str]]:
            entries, flaws = [], dict[str, str]()
            for info in backend.list(folder, recursive=recursive):
                # Each page has the time of a request.
                moved()
                # A marker of the folder itself has no name in it.
                if not info.path:
                    continue
                flaw = path_flaw(info.path.removesuffix("/"))
                if flaw is None:
                    entries.append(info)
                else:
                    flaws[info.path] = flaw
            return sorted(entries, key=lambda info: info.path), flaws

        entries, flaws = self.run("listing", folder, collect)
        if flaws:
            path, flaw = min(flaws.items())
            step = "Rename or delete it with a tool of the storage, or find out who wrote it."
            error = unsafe_path_error(path, where=self.shown(folder), flaw=flaw, next_step=step)
            if unsafe_names == "refuse":
                raise error
            log.warning("%d names are passed over. The first: %s", len(flaws), error)
        return entries

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error; not atomic as a whole."""
        shown = paths[0] if len(paths) == 1 else ""
        what = f"deletion of {len(paths)} objects"
        for start in range(0, len(paths), _REPEATED_COUNT):
            some = paths[start : start + _REPEATED_COUNT]
            self.run(what, shown, methodcaller("delete", some))

    def delete_version(self, path: str, version: str) -> None:
        """Delete an object if it is of the version that `get` returned.

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
            what = f"delete_folder would delete everything below {self.url}."
            raise InvalidInputError(what, next_step="Name a folder below the root.")
        self.run("deletion", folder, lambda backend: backend.delete_folder(folder))

    def make_folders(self, folders: Sequence[str]) -> None:
        """Make the root and folders where the storage has such things; idempotent."""
        self.run("making of folders", "", lambda backend: backend.make_folders(folders))

    def durability_problem(self) -> str:
        """Return why what was written successfully may still be lost, "" if it may not."""
        return self.run("look at the storage", "", lambda backend: backend.durability_problem())

    def server_time(self, probe_path: str) -> float:
        """Return the storage's clock in Unix seconds, by writing and removing `probe_path`."""
        return self.run(
            "reading of the clock", probe_path, lambda backend: backend.server_time(probe_path)
        )


class _Lent:
    """Ranges as a backend gets them; each is taken back with the next, so nothing fills it late."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = ranges
        self.start = self.stop = 0
        self.failures: list[Exception] = []

    def __iter__(self) -> Iterator[Range]:
        try:
            for start, view in self._ranges:
                if not view.nbytes:
                    continue
                self.start, self.stop = start, start + view.nbytes
                lent = memoryview(view).cast("B")
                # Each range has the time of a request.
                moved()
                try:
                    yield start, lent
                finally:
                    # A system call that has it now keeps it.
                    with contextlib.suppress(BufferError):
                        lent.release()
                moved()
        except Exception as error:
            self.failures.append(error)
            raise
