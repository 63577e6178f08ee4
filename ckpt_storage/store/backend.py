"""The interface of storages, which third parties implement."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ckpt_storage.errors import StorageError, UnsupportedByStoreError
from ckpt_storage.options import PageCache

from .threads import report_progress

Buffers: TypeAlias = Sequence[memoryview]
"""Consecutive bytes, as views of format "B"; the caller may reuse them after the call."""

Range: TypeAlias = tuple[int, memoryview]
"""The offset of the first byte to read, and the memory to fill."""

DELETE_COUNT = 1000
"""Most paths of one `Backend.delete`."""

Kind: TypeAlias = Literal["posix", "s3", "gcs", "azure", "memory", "generic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a storage can do, without a request.

    kind: family of storages, for messages and tuning.
    is_remote: a request costs a network round trip.
    shared: other processes see the writes of this one.
    exclusive_create: the storage decides `put(if_absent=True)` in one step. Without it only one
        job may save to a place at a time.
    if_match: the storage decides `put(if_match=...)` in one step.
    atomic_replace: while an object is replaced, readers see the old or the new object.
    parallel_parts: parts may be put in any order, from several threads.
    min_part_bytes: least size of a part, except the last.
    max_part_bytes, max_part_count, max_put_bytes: limits; None where there is none.
    part_multiple_bytes: the size of every part but the last is a multiple of this.
    part_alignment_bytes: the offset between parts of two processes is a multiple of this.
    streams_parts: parts are sent without a copy; else memory for a copy is claimed.
    tokens_travel: another process may use the token of an upload.
    last_part_publishes: the storage accepts the last part only with the completion. `Store` then
        calls `put_part(last=True)` just before `complete_upload`, and retries both as one.
    lists_uploads: `list_uploads` finds open uploads.
    has_temporary_files: uploads are temporary files beside their target, which `list_uploads` finds
        with the time of their last change, and `abort_upload` removes.
    copies_objects: `copy_object` copies whole objects.
    copies_with_checksum: `copy_object` returns the CRC-32C of the copy.
    copy_min_bytes, copy_max_bytes: sizes of a part that `copy_part` can copy (the last may be
        smaller); None: it copies no parts.
    """

    kind: Kind
    is_remote: bool = True
    shared: bool = True
    exclusive_create: bool = False
    if_match: bool = False
    atomic_replace: bool = False
    parallel_parts: bool = False
    min_part_bytes: int = 1
    max_part_bytes: int | None = None
    max_part_count: int | None = None
    max_put_bytes: int | None = None
    part_multiple_bytes: int = 1
    part_alignment_bytes: int = 1
    streams_parts: bool = False
    tokens_travel: bool = False
    last_part_publishes: bool = False
    lists_uploads: bool = False
    has_temporary_files: bool = False
    copies_objects: bool = False
    copies_with_checksum: bool = False
    copy_min_bytes: int | None = None
    copy_max_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object, or a folder in a listing (its path ends in "/").

    modified_s: time of the last change in Unix seconds by the storage's clock, if reported.
    version: for `put(if_match=...)` and `delete_version`; None if the storage has none.
    write_id: that of the write, if the storage keeps it.
    link_count: how many names a file has in its file system; 1 elsewhere.
    """

    path: str
    size_bytes: int
    modified_s: float | None = None
    version: str | None = None
    write_id: str | None = None
    link_count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A whole small object and its version, from one response."""

    data: bytes
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of an upload; JSON, so that it travels between processes.

    number: from 0, ascending with the offsets; some servers refuse gaps.
    receipt: what `put_part` returned and `complete_upload` needs.
    crc32c: CRC-32C of the bytes, of a copied part as the storage reports it; None: not computed.
    """

    number: int
    offset: int
    size_bytes: int
    receipt: str = ""
    crc32c: int | None = None

    def to_json(self) -> list[int | str | None]:
        """Return the part as values that JSON has."""
        return [self.number, self.offset, self.size_bytes, self.receipt, self.crc32c]

    @classmethod
    def from_json(cls, values: Sequence[int | str | None]) -> Part:
        """Return the part of `to_json`. Raises `ValueError` for other values."""
        kinds = (int, int, int, str, int | None)
        if len(values) != len(kinds) or not all(map(isinstance, values, kinds)):
            raise ValueError(f"{values!r} is no part")
        fields: dict[str, Any] = dict(zip(cls.__slots__, values, strict=True))
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """An object that `copy_part` and `copy_object` can copy to roots of the same `scope`.

    address: its name in the storage. path: for messages. None of these holds credentials.
    """

    scope: str
    address: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCopy:
    """A part whose bytes are `length` of `source` from `start` on.

    source_bytes: the length that the whole source must have; None if unknown.
    """

    number: int
    offset: int
    source: CopySource
    start: int
    length: int
    source_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenUpload:
    """An upload that was begun and neither completed nor aborted; `path` is None if unknown.

    modified_s: time of the last change of a temporary file, by the storage's clock.
    """

    path: str | None
    token: str
    modified_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Arguments of backends besides the location; `request_timeout_s` is that of a call.

    sync_files, page_cache: as for `save`; for file systems.
    """

    request_timeout_s: float = 300.0
    sync_files: bool = True
    page_cache: PageCache = "keep"


class ShortReadError(Exception):
    """The response to a read ended early: the first missing byte is at `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the response ended before byte {position}")
        self.position = position


class Backend(abc.ABC):
    """One root on one storage.

    Paths are relative to the root, use "/", and are "" only in `list`. Methods block, are called
    from many threads, make one attempt each, and may raise anything: `FileNotFoundError`,
    `FileExistsError`, `PermissionError`, `TimeoutError`, `ConnectionError` and HTTP statuses
    are understood, `StorageError(kind=...)` is exact. `Store` adds deadlines, retries and error
    texts. The constructor sends no request. A call that makes many requests calls `report_progress`
    after each, as a call without progress for `Settings.request_timeout_s` is abandoned.
    """

    capabilities: Capabilities
    endpoint: str = ""
    """Host that requests go to, for messages; "" for a default."""

    @abc.abstractmethod
    def stat(self, path: str) -> ObjectInfo:
        """Return size, time and version of an object, never from a cache."""

    @abc.abstractmethod
    def get(self, path: str, *, max_bytes: int | None) -> Content:
        """Return a whole small object and its version, from one response, never from a cache.

        Do not read all of an object longer than `max_bytes`: raise `IntegrityError`, or return
        more than `max_bytes`.
        """

    def tail(self, path: str, byte_count: int) -> Content:
        """Return the last bytes of an object, or all of a shorter one, and its version.

        Raise `ShortReadError` if the object was replaced by a shorter object meanwhile.
        """
        info = self.stat(path)
        data = bytearray(min(byte_count, info.size_bytes))
        if data:
            self.read(path, [(info.size_bytes - len(data), memoryview(data))])
        return Content(data=bytes(data), version=info.version)

    @abc.abstractmethod
    def read(self, path: str, ranges: Iterable[Range]) -> int | None:
        """Fill the memory of each range; return the object's size, if the storage reports it.

        Take the next range only once this range is filled: it is checked then. Raise
        `ShortReadError`, or an HTTP status of 416, if object or response end within a range.
        """

    @abc.abstractmethod
    def put(
        self,
        path: str,
        data: Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Put or replace a whole object: visible only complete, durable on return.

        if_absent: raise `FileExistsError` if an object exists; decided by the storage in one step.
        if_match: raise `StorageError(kind="precondition")` unless it has that version. An HTTP
        status of 412 means either. Conditions that `capabilities` does not declare are not passed.
        write_id: stored with the object, if the storage can.
        """

    @abc.abstractmethod
    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        """Yield the objects below a folder, one page a request; nothing if there is no folder.

        Not recursive: direct children; folders have a path that ends in "/" and size 0. In any
        order, without the temporary files of uploads.
        """

    @abc.abstractmethod
    def delete(self, paths: Sequence[str]) -> None:
        """Delete at most 1,000 objects; an absent one is no error."""

    @abc.abstractmethod
    def begin_upload(self, path: str, *, write_id: str) -> str:
        """Begin an object in parts and return a token for the other calls."""

    @abc.abstractmethod
    def put_part(self, path: str, token: str, part: Part, data: Buffers, *, last: bool) -> str:
        """Store one part and return a receipt; may be repeated with the same bytes.

        A storage that verifies CRC-32C gets `part.crc32c`, if it is known, so that it refuses bytes
        that changed since. A storage that cannot take a part twice raises
        `StorageError(retryable=False)` then.
        """

    @abc.abstractmethod
    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str
    ) -> None:
        """Make the object of these parts visible and durable; `parts` cover it without a gap.

        Replaces an existing object. May be called again after any error that is not final.
        """

    @abc.abstractmethod
    def abort_upload(self, path: str, token: str) -> None:
        """Discard the parts; idempotent.

        With a token of `list_uploads`, `path` is "" if that did not report it.
        """

    def close(self) -> None:  # noqa: B027  # no connections by default
        """Close connections; the backend may be used again after it."""

    def refresh(self) -> None:  # noqa: B027  # no credentials by default
        """Look credentials up again: those in use were refused."""

    def drop_caches(self, path: str) -> None:
        """Make the next read of an object come from the storage, over a new connection.

        Called after a checksum mismatch. Drop this host's caches of the object and connections to
        the storage; caches behind a mount or a gateway stay.
        """
        del path

    def make_folders(self, folders: Sequence[str]) -> None:
        """Create the root and these folders below it, if the storage has folders."""
        del folders

    def durability_problem(self) -> str:
        """Return why successful writes may still be lost; "" if they may not."""
        return ""

    def delete_folder(self, path: str) -> None:
        """Delete a folder and all below it."""
        paths = (info.path for info in self.list(path, recursive=True))
        while page := tuple(itertools.islice(paths, DELETE_COUNT)):
            report_progress()
            self.delete(page)
            report_progress()

    def delete_version(self, path: str, version: str) -> None:
        """Delete an object if it has that version; decided by the storage in one step.

        Raise `StorageError(kind="precondition")` for another version; for an absent object, raise
        it or do nothing. Raise `UnsupportedByStoreError` if the storage does not decide it.
        """
        raise UnsupportedByStoreError(f"{path} of {version} is not deleted.")

    def flush_parts(self, path: str, token: str) -> None:
        """Make the parts that this process has put durable, before another process completes.

        A failure is final: neither this nor the completion may succeed after it.
        """
        del path, token

    def leave_upload(self, path: str, token: str) -> None:
        """Stop using an upload that another process began, and will complete or abort."""
        del path, token

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:  # noqa: ARG002
        """Yield the open uploads below a folder."""
        return iter(())

    def copy_source(self, path: str) -> CopySource | None:  # noqa: ARG002
        """Return the object as a source of copies, None without copies; "" is the root."""
        return None

    def copy_part(self, path: str, token: str, copy: PartCopy) -> Part:
        """Copy bytes of another object within the storage as one part.

        Raise `IntegrityError` if the source's length is known and is not `copy.source_bytes`.
        """
        del token, copy
        raise UnsupportedByStoreError(f"Parts of {path} cannot be copied.")

    def copy_object(self, path: str, source: CopySource, *, size_bytes: int) -> int | None:
        """Put a copy of another object of this storage; return its CRC-32C if reported.

        No byte passes through this process; a file system links the file. Visible only complete,
        durable on return, replaces an existing object, may be retried. Raise
        `UnsupportedByStoreError` if this object cannot be copied so, `IntegrityError` for another
        size than `size_bytes`.
        """
        del source, size_bytes
        raise UnsupportedByStoreError(f"{path} cannot be copied.")

    def server_time(self, probe_path: str) -> float:
        """Return the storage's clock in Unix seconds, by putting and deleting an object."""
        self.put(probe_path, [memoryview(b"clock\n")])
        modified_s = self.stat(probe_path).modified_s
        self.delete([probe_path])
        if modified_s is None:
            raise UnsupportedByStoreError("The storage reports no times of objects.")
        return modified_s

    def explain(self, error: BaseException) -> StorageError | None:  # noqa: ARG002
        """Return the error for an exception of this storage's client; None: the default error."""
        return None
