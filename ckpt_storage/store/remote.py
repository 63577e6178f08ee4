"""The store on anything that fsspec reaches: one thin body over a dialect for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from ckpt_storage.errors import (
    CheckpointError,
    IntegrityError,
    InvalidInputError,
    StorageError,
    UnsupportedByStoreError,
)

from .backends.clients import Client, Instance
from .base import (
    Arrived,
    Capabilities,
    Copied,
    CopySource,
    Entry,
    PathFilter,
    Plain,
    SharedUpload,
    Stat,
    Upload,
    Version,
)
from .dialect import Dialect, SharedDialect, client_options, dialect_for
from .location import Location
from .parts import TooLongError, too_long
from .problems import Call, explain
from .remote_upload import RemoteSharedUpload, RemoteUpload

T = TypeVar("T")


class RemoteStore(Plain):
    """A `Store` over an fsspec file system.

    Clients are built per process (see `clients`), so a child of fork may go on using it; it is not
    pickled: open it again from `Location`. Makes one attempt per call; deadlines of file systems
    that have none, and retries, are added by `retry`.
    """

    def __init__(self, location: Location, *, request_timeout_s: float) -> None:
        self._location = location
        options = client_options(location, request_timeout_s)
        self._client = Client(location, options, request_timeout_s=request_timeout_s)
        self._dialect: Dialect = dialect_for(self._client)

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A RemoteStore is not pickled; open it again from its Location.")

    @property
    def url(self) -> str:
        """The root, without credentials."""
        return self._location.url

    @property
    def capabilities(self) -> Capabilities:
        """What the family of storages can do; servers may ignore what they claim."""
        return self._dialect.capabilities

    def prepare(self, folders: Sequence[str]) -> None:
        """Make folders where the storage has such things; asks object stores nothing."""
        self._run("making of folders", "", lambda: self._dialect.prepare(folders))

    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """Return a whole small object."""
        return self.read_version(path, most_bytes=most_bytes).data

    def read_version(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Return a whole small object and its token, from one answer."""

        def get() -> Version:
            try:
                return self._dialect.get(path, most_bytes=most_bytes)
            except TooLongError as error:
                raise too_long(error, path=path, shown=self._shown(path)) from None

        return self._run("read", path, get)

    def read_into(
        self,
        path: str,
        start: int,
        target: memoryview,
        *,
        size_bytes: int | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        """Fill `target`; nothing writes into it after the return, whatever the network does.

        Raises `IntegrityError` if the object is not `size_bytes` long or ends early, and a
        retryable `StorageError` if only the answer ended early.
        """
        del arrived
        wanted = target.nbytes
        if not wanted:
            return
        view = memoryview(target).cast("B")
        try:
            # File systems fill the view in their one thread, where checks would take turns.
            read_bytes, total_bytes = self._run(
                "read", path, lambda: self._dialect.read_range(path, start, view)
            )
        except StorageError as error:
            if error.kind != "range":
                raise
            read_bytes, total_bytes = 0, self.stat(path).size_bytes
        finally:
            view.release()
        if read_bytes < wanted and total_bytes is None:
            total_bytes = self.stat(path).size_bytes
        self._check_length(path, size_bytes, total_bytes)
        if read_bytes < wanted:
            self._raise_short(path, start, wanted, read_bytes, total_bytes)

    def stat(self, path: str) -> Stat:
        """Return size and time of one object."""
        return self._run("stat", path, lambda: self._dialect.stat(path))

    def write(self, path: str, data: bytes) -> None:
        """Put a whole object."""
        self._check_put(path, data)
        self._run("write", path, lambda: self._dialect.put(path, data))

    def create(self, path: str, data: bytes) -> None:
        """Put a whole object if nothing is there; the storage decides in one request."""
        if not self.capabilities.exclusive_create:
            raise UnsupportedByStoreError(
                f"{self.url} has no exclusive creation that can be relied on.",
                kind="unsupported",
                path=self._shown(path),
                next_step="Let only one job save here at a time, or pass commit_url= of a "
                "storage that has it.",
            )
        self._check_put(path, data)
        try:
            self._run("creation", path, lambda: self._dialect.create(path, data))
        except StorageError as error:
            if error.kind == "precondition":
                error.kind = "exists"
            raise

    def replace(self, path: str, data: bytes, *, if_match: str | None = None) -> None:
        """Put a whole object; with `if_match` the storage compares and swaps in one request."""
        self._check_put(path, data)
        if if_match is None:
            self._run("replace", path, lambda: self._dialect.put(path, data))
            return
        if not self.capabilities.if_match:
            raise UnsupportedByStoreError(
                f"{self.url} cannot replace an object only if it is of a given version.",
                kind="unsupported",
                path=self._shown(path),
                next_step="Replace it without if_match, and read it back.",
            )
        try:
            self._run("replace", path, lambda: self._dialect.put_if_match(path, data, if_match))
        except StorageError as error:
            # An object that is gone, too, is no longer of the version that was read.
            if error.kind in {"exists", "not-found"}:
                error.kind = "precondition"
            raise

    def start_upload(self, path: str, *, part_bytes: int) -> Upload:
        """Begin a write-once object; sends nothing."""
        upload = self._run(
            "start of the upload",
            path,
            lambda: self._dialect.start_upload(path, part_bytes=part_bytes),
        )
        return RemoteUpload(upload, _Border(self, path))

    def start_shared_upload(self, path: str, *, part_bytes: int) -> SharedUpload:
        """Begin an upload that others may join; sends nothing."""
        del part_bytes
        dialect = self._shared_dialect(path)
        return self._behind_border(path, lambda: dialect.start_shared_upload(path))

    def join_upload(self, path: str, ticket: str, *, part_bytes: int) -> SharedUpload:
        """Join an upload; sends nothing, so one that is over is noticed by its first part."""
        del part_bytes
        dialect = self._shared_dialect(path)
        return self._behind_border(path, lambda: dialect.join_upload(path, ticket))

    def copy_source(self, path: str) -> CopySource | None:
        """Return the object's bucket and key; asks nothing."""
        place = self._dialect.copy_place(path) if isinstance(self._dialect, SharedDialect) else None
        if place is None:
            return None
        return CopySource(scope=place[0], address=place[1], path=self._shown(path))

    def can_copy_from(self, other: Copied, *, at_any_price: bool = True) -> bool:
        """Return whether both are one bucket at one endpoint; rights are not asked for."""
        del at_any_price
        mine, theirs = self.copy_source(""), other.copy_source("")
        if self.capabilities.copy_min_bytes is None or mine is None or theirs is None:
            return False
        return mine.scope == theirs.scope

    def _shared_dialect(self, path: str) -> SharedDialect:
        dialect = self._dialect
        if not self.capabilities.tokens_travel or not isinstance(dialect, SharedDialect):
            raise UnsupportedByStoreError(
                f"{self.url} has no uploads that several processes can share.",
                kind="unsupported",
                path=self._shown(path),
                next_step="Let one process write the whole object.",
            )
        return dialect

    def _behind_border(self, path: str, begin: Callable[[], SharedUpload]) -> SharedUpload:
        upload = self._run("start of the upload", path, begin)
        return RemoteSharedUpload(upload, _Border(self, path))

    def list(self, prefix: str, *, recursive: bool = True) -> list[Entry]:
        """Return the objects below a folder, in the order of their paths."""
        folder = prefix.strip("/")
        found = self._run(
            "listing", folder, lambda: self._dialect.list(folder, recursive=recursive)
        )
        return sorted(found, key=lambda entry: entry.path)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, in bulk where the storage takes that."""
        shown = paths[0] if len(paths) == 1 else ""
        if paths:
            self._run("deletion", shown, lambda: self._dialect.delete(paths))

    def delete_folder(self, path: str) -> None:
        """Delete everything below a folder, page by page; the root is refused."""
        folder = path.strip("/")
        if not folder:
            raise InvalidInputError(
                f"The root {self.url} is not deleted.", next_step="Give a folder below it."
            )
        self._run("deletion", folder, lambda: self._dialect.delete_folder(folder))

    def abort_uploads(self, prefix: str, *, only: PathFilter | None = None) -> int:
        """Abort open uploads below a folder where they can be found; return how many."""
        folder = prefix.strip("/")
        return self._run(
            "abort of uploads", folder, lambda: self._dialect.abort_uploads(folder, only)
        )

    def now_s(self, probe_path: str) -> float:
        """Return the storage's clock in Unix seconds; a probe that stays is no error."""
        return self._run(
            "reading of the clock", probe_path, lambda: self._dialect.now_s(probe_path)
        )

    def refresh(self) -> None:
        """Build this process's client anew, so that credentials are looked up again."""
        self._client.refresh()

    def close(self) -> None:
        """Use the client no more; the last store of this process that does ends its connections."""
        self._client.close()

    def _shown(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}".rstrip("/")

    def run(self, name: str, path: str, call: Callable[[], T], by: _Border) -> T:
        """Run what a dialect's upload does; for this module's own uploads."""
        return self._run(name, path, call, by)

    def _run(self, name: str, path: str, call: Callable[[], T], by: _Border | None = None) -> T:
        """Return what `call` returns; every foreign exception leaves as a `StorageError`."""
        by = by or _Border(self, path)
        try:
            with self._client.turn(by.instance) as by.instance:
                return call()
        except CheckpointError:
            raise
        except Exception as error:  # noqa: BLE001  # backends raise any type
            operation = Call(
                name=name,
                path=self._shown(path),
                endpoint=self._client.endpoint,
                timeout_s=self._client.request_timeout_s,
                scrub=self._client.scrub,
            )
            failure = explain(error, operation)
        # Raised here, not where it was caught: the foreign one may carry credentials, and
        # its traceback the caller's buffers.
        try:
            raise failure
        finally:
            # The traceback leads to this frame, and the frame must not lead back.
            del failure

    def _check_put(self, path: str, data: bytes) -> None:
        """Refuse before it is sent what the storage would refuse after."""
        most_bytes = self.capabilities.max_put_bytes
        if most_bytes is not None and len(data) > most_bytes:
            raise StorageError(
                f"{self._shown(path)} would have {len(data)} bytes; the storage takes "
                f"{most_bytes} in one request.",
                path=self._shown(path),
                next_step="Save fewer tensors in one checkpoint; if it is .metadata that is as "
                "large, save with stock_metadata='never'.",
            )

    def _check_length(self, path: str, size_bytes: int | None, total_bytes: int | None) -> None:
        if size_bytes is None or total_bytes is None or total_bytes == size_bytes:
            return
        raise IntegrityError(
            f"{self._shown(path)} has {total_bytes} bytes instead of {size_bytes}.",
            path=path,
            offset=min(total_bytes, size_bytes),
            next_step="The file is damaged or not the one that was saved.",
        )

    def _raise_short(
        self, path: str, start: int, wanted: int, read_bytes: int, total_bytes: int | None
    ) -> NoReturn:
        if (math.inf if total_bytes is None else total_bytes) >= start + wanted:
            raise StorageError(
                f"The read of {self._shown(path)} ended after {read_bytes} of {wanted} bytes.",
                kind="connection",
                retryable=True,
                path=self._shown(path),
                next_step="Try again; if it comes back, look for a proxy that cuts answers.",
            )
        raise IntegrityError(
            f"{self._shown(path)} ends at byte {total_bytes}, within the range "
            f"[{start}, {start + wanted}) that was asked for.",
            path=path,
            offset=total_bytes,
            next_step="The file is damaged or not the one that was saved.",
        )


class _Border:
    """The border of one store for the operations on one path, which share an instance."""

    def __init__(self, store: RemoteStore, path: str) -> None:
        self._store = store
        self._path = path
        self.instance: Instance | None = None

    def __call__(self, name: str, call: Callable[[], T], /) -> T:
        return self._store.run(name, self._path, call, self)
