"""The facade: one root on any backend, safe to use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from operator import methodcaller
from typing import Literal, NoReturn, Self, TypeAlias, TypeVar, Unpack

from ckpt_storage.errors import IntegrityError, InvalidInputError, StorageError
from ckpt_storage.format.names import path_flaw, unsafe_path_error

from .abilities import RECORDS
from .backend import (
    Backend,
    Capabilities,
    Content,
    CopySource,
    ObjectInfo,
    OpenUpload,
    Range,
)
from .calls import CallOptions, Calls, Repeat, nothing_was_done
from .deadline import Deadline
from .problems import too_long, unable
from .range_reads import fill_ranges
from .threads import report_progress
from .upload import SYNC_BYTES_PER_S, Upload

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

UnsafeNames: TypeAlias = Literal["skip", "refuse"]
"""What a listing does about names that lead out of the folder, or are others elsewhere."""

_Writer: TypeAlias = Literal["ours", "another's", "nobody's", "unknown"]
"""Who wrote what is at a name since a put of ours began."""

_DEFINITE = frozenset({"credentials", "no-space", "not-found", "permission", "unsupported"})
"""Errors that prove that nothing was put, and that change nothing about an earlier request."""

_DELETED_TOGETHER = 16
"""Objects whose deletion is retried together: most backends send a request for each."""


class Store:
    """One root on one storage: every call ends by its deadline, and is retried where that is safe.

    One call takes at most `request_timeout_s` seconds an attempt, and ends by the deadline of
    `bounded`. Every error is a `CheckpointError`, nearly always a `StorageError` whose `kind`
    says what it means; it holds no credentials. After kind "timeout" from a read or a part, its
    memory must not be used for anything else: an abandoned thread may still fill it.
    """

    def __init__(
        self,
        backend: Backend | Callable[[], Backend],
        *,
        url: str,
        scope: Callable[[], Hashable] | None = None,
        **options: Unpack[CallOptions],
    ) -> None:
        """Take a backend, or a function that makes it in the first call.

        `url` names the root for messages. `scope` returns a key of the storage.
        """
        self.calls = Calls(backend, url=url, **options)
        self.url, self.scope = url, scope

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Store is not pickled; open it again from its Location.")

    @property
    def capabilities(self) -> Capabilities:
        """What the storage can do; no request is sent."""
        return self.calls.capabilities

    @property
    def deadline(self) -> Deadline:
        """The deadline of `bounded`; of a store that is not bounded it never passes."""
        return self.calls.deadline

    def shown(self, path: str) -> str:
        """Return the URL of a path, for messages."""
        return self.calls.shown(path)

    def bounded(
        self,
        deadline: Deadline,
        cancelled: Callable[[], bool] | None = None,
        *,
        throttled: Callable[[], None] | None = None,
    ) -> Self:
        """Return a view of this store whose calls, retries included, end by `deadline`.

        Closing the view does nothing. Once `cancelled` returns True no attempt begins any more.
        Once the operation of the deadline has failed, running attempts are abandoned, too.
        `throttled` is called after every response that asks for fewer requests.
        """
        return self._view(self.calls.bounded(deadline, cancelled, throttled=throttled))

    def cleaning_up(self) -> Self:
        """Return a view with a short deadline of its own, for discarding what failed."""
        return self._view(self.calls.cleaning_up())

    def _view(self, calls: Calls) -> Self:
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, calls=calls)
        return view

    def pause(self, attempt: int) -> bool:
        """Sleep after a failed attempt, with full jitter; return whether the next may begin."""
        return self.calls.pause(attempt)

    def close(self) -> None:
        """Close connections and end idle threads; idempotent; does nothing for a view."""
        self.calls.close()

    def stat(self, path: str) -> ObjectInfo:
        """Return size, time and version of one object, never from a cache."""
        return self._run_read("stat", path, lambda backend: backend.stat(path))

    def get(self, path: str, *, max_bytes: int | None = None) -> Content:
        """Return a whole small object with its version, from one response, never from a cache.

        Raises `IntegrityError` if it has more than `max_bytes`, without reading much more.
        """

        def get(backend: Backend) -> Content:
            content = backend.get(path, max_bytes=max_bytes)
            if max_bytes is not None and len(content.data) > max_bytes:
                raise too_long(path, self.shown(path), len(content.data), max_bytes)
            return content

        return self._run_read("read", path, get)

    def tail(self, path: str, byte_count: int) -> Content:
        """Return the last bytes of an object, or all of a shorter one, and its version."""
        return self._run_read("read", path, lambda backend: backend.tail(path, byte_count))

    def read(self, path: str, ranges: Iterable[Range], *, size_bytes: int | None = None) -> None:
        """Fill the memory of each range; each attempt iterates over the ranges from the start.

        `ranges` is advanced only once the range before is filled. `size_bytes` is the length that
        the object must have. Raises `IntegrityError` for another length, or if the object ends
        within a range.
        """
        fill = partial(fill_ranges, self.calls, path=path, ranges=ranges, size_bytes=size_bytes)
        failure = self._run_read("read", path, fill, repeat="unless-abandoned")
        if failure:
            # As in `Calls`: a traceback must not hold the buffers.
            raise failure.pop()

    def _run_read(
        self, operation: str, path: str, call: Callable[[Backend], T], *, repeat: Repeat = "always"
    ) -> T:
        """Run a call that reads; without the right to list, "forbidden" means absent."""
        try:
            return self.calls.run(operation, path, call, repeat=repeat)
        except StorageError as error:
            if error.kind == "permission" and self.capabilities.is_remote:
                record = RECORDS.get(self.find_scope())
                if record is not None and record.hides_absence:
                    error.kind = "not-found"
            raise

    def find_scope(self) -> Hashable:
        """Return the key of the storage; abilities that were probed hold for all its roots."""
        scope = self.scope
        return self.calls.run("look at the storage", "", lambda _: scope()) if scope else self.url

    def drop_caches(self, path: str) -> None:
        """Make the next read of an object come from the storage itself; see `Backend`.

        Does nothing for an object that is gone: the next read reports that.
        """
        try:
            self.calls.run("dropping of caches", path, lambda backend: backend.drop_caches(path))
        except StorageError as error:
            if error.kind != "not-found":
                raise

    def put(self, path: str, data: bytes) -> None:
        """Put a whole object at a write-once name; visible only complete, durable; idempotent."""
        self.put_once(path, data, "write", repeat="always")

    def create(self, path: str, data: bytes) -> None:
        """Put a whole object if nothing is there; the storage decides in one step.

        A lost response is resolved by reading the object: nobody else writes this `data`. Raises
        `StorageError` of kind "exists" if something else is there; of kind "unknown" if it is not
        known whether it was created, or will stay. Raises `UnsupportedByStoreError` if the storage
        does not decide it.
        """
        if not self.capabilities.exclusive_create:
            step = "Let only one job save here at a time; of a mounted bucket use its own URL."
            raise unable(
                self.url, self.shown(path), "has no exclusive creation that can be relied on", step
            )
        self._put_and_resolve("exclusive creation", path, data, if_absent=True)

    def create_unguarded(self, path: str, data: bytes) -> None:
        """Do as `create` by a read and a put: safe only while nobody else writes this name."""
        if self._find_writer(path, data, None) == "another's":
            raise self._conflict("creation", path, "exists")
        self._put_and_resolve("creation", path, data)

    def replace(self, path: str, data: bytes, *, if_match: str | None = None) -> None:
        """Put a whole object in place of what may be there; durable on return.

        With `if_match` only if the object still has that version, else kind "precondition"; a
        lost response is resolved as by `create`. Without it, an abandoned call is not retried.
        """
        if if_match is None:
            self.put_once(path, data, "replace", repeat="unless-abandoned")
        elif not self.capabilities.if_match:
            what = "cannot replace an object only if it is of a given version"
            raise unable(
                self.url, self.shown(path), what, "Replace it without if_match, and read it back."
            )
        else:
            self._put_and_resolve("replace", path, data, if_match=if_match)

    def _put_and_resolve(
        self,
        operation: str,
        path: str,
        data: bytes,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Put an object under a condition; if the response is lost, read the object."""
        is_posix = self.capabilities.kind == "posix"
        in_doubt, unsynced = False, False
        attempt_count = self.calls.policy.attempt_count
        for attempt in range(1, attempt_count + 1):
            try:
                self.put_once(path, data, operation, if_absent=if_absent, if_match=if_match)
            except StorageError as error:
                failure = error
            else:
                return
            if is_posix and failure.kind not in {"exists", "not-begun"}:
                # The name is linked first, then its folder is synced. A failed fsync proves
                # nothing, and must not be retried; an abandoned fsync may still fail.
                unsynced = True
                in_doubt |= failure.retryable or failure.kind == "timeout"
            else:
                # A request without a response may still arrive.
                is_unmet = if_match is not None and failure.kind == "precondition"
                in_doubt |= not (is_unmet or failure.kind in _DEFINITE or nothing_was_done(failure))
            writer = self._find_writer(path, data, if_match)
            if writer == "another's":
                kind = "exists" if if_match is None else "precondition"
                raise self._conflict(operation, path, kind) from failure
            if writer == "ours" and not unsynced:
                return
            if not in_doubt and (writer == "nobody's" or not unsynced):
                raise failure
            is_last = writer == "ours" or attempt == attempt_count
            if is_last or not self.pause(attempt):
                break
        shown, there = self.shown(path), "; it is there, but" if writer == "ours" else ""
        what = f"The outcome of the {operation} of {shown} is not known{there}: {failure}"
        step = "Read the object when the storage responds again."
        raise StorageError(what, kind="unknown", path=shown, next_step=step) from failure

    def _find_writer(self, path: str, data: bytes, version: str | None) -> _Writer:
        """Return who wrote the object since `version`, or since nothing was there, was read."""
        try:
            content = self.get(path, max_bytes=len(data) if version is None else None)
        except IntegrityError:
            return "another's"
        except StorageError as error:
            if error.kind != "not-found":
                return "unknown"
            return "nobody's" if version is None else "another's"
        if content.data == data:
            return "ours"
        return "nobody's" if version is not None and content.version == version else "another's"

    def _conflict(self, operation: str, path: str, kind: str) -> StorageError:
        what = f"The {operation} of {self.shown(path)} was refused: something else is there."
        step = "Read it again; another process wrote it."
        return StorageError(what, kind=kind, path=self.shown(path), next_step=step)

    def put_once(
        self,
        path: str,
        data: bytes,
        operation: str = "exclusive creation",
        *,
        repeat: Repeat = "if-nothing-done",
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Put an object; after a failure nobody has read whether the object is there."""
        most_bytes = self.capabilities.max_put_bytes
        if most_bytes is not None and len(data) > most_bytes:
            shown = self.shown(path)
            what = f"{shown} has {len(data)} bytes; the storage takes {most_bytes} in one request."
            step = "Save fewer tensors at a time; if it is .metadata, with stock_metadata='never'."
            raise StorageError(what, path=shown, next_step=step)

        def put(backend: Backend) -> None:
            backend.put(path, [memoryview(data)], if_absent=if_absent, if_match=if_match)

        self.calls.run(operation, path, put, repeat=repeat)

    def upload(self, path: str) -> Upload:
        """Begin an object in parts, at a write-once name; nothing is sent before the first part."""
        return Upload(self.calls, path)

    def join(self, path: str, token: str, *, write_id: str = "") -> Upload:
        """Join another process's upload of the same path.

        The process that completes it passes the `write_id` of the owner. Raises
        `UnsupportedByStoreError` unless `capabilities.tokens_travel`.
        """
        return Upload(self.calls, path, joined=token, write_id=write_id)

    def open_uploads(self, prefix: str) -> list[OpenUpload]:
        """Return the open uploads below a folder, or of an object, temporary files included.

        [] where the storage cannot list them.
        """
        folder = prefix.strip("/")

        def collect(backend: Backend) -> list[OpenUpload]:
            uploads = []
            for upload in backend.list_uploads(folder):
                report_progress()
                uploads.append(upload)
            return uploads

        return self.calls.run("listing of uploads", folder, collect)

    def abort_upload(self, upload: OpenUpload) -> None:
        """Abort an upload that nobody writes any more; an absent upload is no error."""
        path = upload.path or ""
        self.calls.run("abort", path, lambda backend: backend.abort_upload(path, upload.token))

    def abort_uploads(self, prefix: str, *, only: Callable[[str], bool] | None = None) -> int:
        """Abort open uploads and remove temporary files below a folder; return how many.

        With `only`, those for whose path it returns True, because a folder may be shared; uploads
        whose path the storage does not report stay then.
        """
        uploads = [
            upload
            for upload in self.open_uploads(prefix)
            if only is None or (upload.path is not None and only(upload.path))
        ]
        for upload in uploads:
            self.abort_upload(upload)
        return len(uploads)

    def copy_source(self, path: str) -> CopySource | None:
        """Return the object as a source of copies within the storage; None without such copies."""
        return self.calls.run(
            "look at the storage", path, lambda backend: backend.copy_source(path)
        )

    def copy_object(self, path: str, source: CopySource, *, size_bytes: int) -> int | None:
        """Copy an object within the storage; return its CRC-32C if the storage reports it.

        The name is write-once; the object is visible only complete, durable; idempotent. Raises
        `UnsupportedByStoreError` if its bytes must be sent, `IntegrityError` for another length.
        """
        return self.calls.run(
            f"copy from {source.path}",
            path,
            lambda backend: backend.copy_object(path, source, size_bytes=size_bytes),
            extra_s=size_bytes / SYNC_BYTES_PER_S,
        )

    def can_copy_objects_of(self, other: Store) -> bool:
        """Return whether `copy_object` here may copy objects of `other`."""
        return self.capabilities.copies_objects and self._shares_scope(other)

    def can_copy_from(self, other: Store) -> bool:
        """Return whether `copy_part` here may copy from objects of `other`."""
        return self.capabilities.copy_min_bytes is not None and self._shares_scope(other)

    def _shares_scope(self, other: Store) -> bool:
        mine, theirs = self.copy_source(""), other.copy_source("")
        return mine is not None and theirs is not None and mine.scope == theirs.scope

    def list(
        self, prefix: str, *, recursive: bool = True, unsafe_names: UnsafeNames = "skip"
    ) -> list[ObjectInfo]:
        """Return the objects below a folder, fresh from the storage; [] if there are none.

        Not recursive: only direct children; folders are then entries whose path ends in "/".
        Every path is safe to join to another root. Objects with other names are skipped with a
        warning; with `unsafe_names="refuse"` the first of them is an `UnsafeContentError`.
        """
        folder = prefix.strip("/")

        def collect(backend: Backend) -> tuple[list[ObjectInfo], dict[str, str]]:
            entries, flaws = [], dict[str, str]()
            for info in backend.list(folder, recursive=recursive):
                # Each page has the timeout of a request.
                report_progress()
                # A marker of the folder itself has an empty path.
                if not info.path:
                    continue
                flaw = path_flaw(info.path.removesuffix("/"))
                if flaw is None:
                    entries.append(info)
                else:
                    flaws[info.path] = flaw
            return sorted(entries, key=lambda info: info.path), flaws

        entries, flaws = self.calls.run("listing", folder, collect)
        if flaws:
            path, flaw = min(flaws.items())
            step = "Rename or delete it with a tool of the storage, or find out who wrote it."
            error = unsafe_path_error(path, where=self.shown(folder), flaw=flaw, next_step=step)
            if unsafe_names == "refuse":
                raise error
            log.warning("%d names are skipped. The first: %s", len(flaws), error)
        return entries

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; an absent object is no error; not atomic as a whole."""
        shown = paths[0] if len(paths) == 1 else ""
        what = f"deletion of {len(paths)} objects"
        for start in range(0, len(paths), _DELETED_TOGETHER):
            some = paths[start : start + _DELETED_TOGETHER]
            self.calls.run(what, shown, methodcaller("delete", some))

    def delete_version(self, path: str, version: str) -> None:
        """Delete an object if it still has the version that `get` returned.

        Raises `StorageError` of kind "precondition" for another version (on some storages also if
        it is gone), and `UnsupportedByStoreError` where the storage does not decide it.
        """
        self.calls.run("deletion", path, lambda backend: backend.delete_version(path, version))

    def delete_folder(self, path: str) -> None:
        """Delete a folder and all below it; idempotent; on object stores all with that prefix.

        Raises `InvalidInputError` for an empty path: the root is never deleted.
        """
        folder = path.strip("/")
        if not folder:
            what = f"delete_folder would delete everything below {self.url}."
            raise InvalidInputError(what, next_step="Name a folder below the root.")
        self.calls.run("deletion", folder, lambda backend: backend.delete_folder(folder))

    def make_folders(self, folders: Sequence[str]) -> None:
        """Create the root and folders, where the storage has folders; idempotent."""
        self.calls.run("creation of folders", "", lambda backend: backend.make_folders(folders))

    def durability_problem(self) -> str:
        """Return why what was written successfully may still be lost, "" if it may not."""
        return self.calls.run(
            "look at the storage", "", lambda backend: backend.durability_problem()
        )

    def server_time(self, probe_path: str) -> float:
        """Return the storage's clock in Unix seconds, by writing and removing `probe_path`."""
        return self.calls.run(
            "reading of the clock", probe_path, lambda backend: backend.server_time(probe_path)
        )
