"""The seam between the checkpoint protocol and storages: what a store does and promises.

Every path is relative to the store's root, uses `/`, and is one that `layout` spelt. Everything is
synchronous and may be called from several threads at once.

Errors: every method raises only `CheckpointError`s, nearly always `StorageError` with
`kind` set (see `errors.StorageError`); an absent object is kind "not-found".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store can do, declared as data; probes confirm what servers may ignore.

    kind: family, for messages and tuning: "posix", "s3", "gcs", "azure", "memory", "generic".
    exclusive_create: `create` is decided by the storage itself, in one step.
    atomic_replace: during `replace` a reader sees the old or the new object, never neither.
    replace_if_match: `replace(if_match=...)` is honoured (compare-and-swap).
    parallel_parts: parts of an `Upload` may come in any order and from several threads.
    min_part_bytes: least size of a part that is not the last.
    max_part_count: most parts of one upload; None where there is no limit.
    max_part_bytes: largest part of an upload; None where there is no limit.
    max_put_bytes: largest object that `write`, `create` and `replace` take; None where there is no
        limit worth telling.
    part_multiple_bytes: every part but the last must be a multiple of this.
    reads_total_size: `read_into` learns the object's size without another request.
    cheap_stat: `stat` costs no network request of its own.
    shared: other processes see what this one writes (False for `memory://`).
    is_remote: a request costs a network round trip.
    can_list_uploads: open multipart uploads below a prefix can be found and aborted.
    shared_uploads: `start_shared_upload` and `join_upload` work: several processes (threads
        only, where `shared` is False) may write parts of one object.
    shared_align_bytes: where the parts of two members meet, the offset in the object must be
        a multiple of this.
    copy_part_min_bytes: least size of a part that `SharedUpload.copy_part` copies and that is
        not the last; None where it cannot copy.
    copy_part_max_bytes: largest such part; None where there is no limit.
    copies_pay: copying a part spares more than it costs, were its bytes read for checking too.
    streams_parts: an `Upload` sends a part from where it lies, without a copy of it.
    copy_align_bytes: it pays only where the offsets in source and object are alike modulo this.
    """

    kind: Literal["posix", "s3", "gcs", "azure", "memory", "generic"]
    exclusive_create: bool
    atomic_replace: bool
    replace_if_match: bool
    parallel_parts: bool
    min_part_bytes: int = 1
    max_part_count: int | None = None
    max_part_bytes: int | None = None
    max_put_bytes: int | None = None
    part_multiple_bytes: int = 1
    reads_total_size: bool = False
    cheap_stat: bool = False
    shared: bool = True
    is_remote: bool = True
    can_list_uploads: bool = False
    shared_uploads: bool = False
    shared_align_bytes: int = 1
    copy_part_min_bytes: int | None = None
    copy_part_max_bytes: int | None = None
    copies_pay: bool = False
    streams_parts: bool = False
    copy_align_bytes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """Size in bytes and, where the storage tells, its own time of last change (Unix seconds)."""

    size_bytes: int
    modified_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One object found by a listing; `path` is relative to the store's root."""

    path: str
    size_bytes: int
    modified_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Content of an object and an opaque token for `replace(if_match=...)`; None: no token."""

    data: bytes
    token: str | None


PathFilter = Callable[[str], bool]
"""Says of a path, relative to the root, whether it is meant."""


Existing = Literal["refuse", "replace"]
"""What completing an upload does where something bears the name already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReceipt:
    """One part that a storage has taken from one member of a shared upload.

    `number` and `offset` (bytes) are as it was written with. `token` is what the storage wants
    to see again; `crc32c` is the storage's own checksum of the part, None if it told none.
    """

    number: int
    offset: int
    size_bytes: int
    token: str = ""
    crc32c: int | None = None

    def to_json(self) -> list[int | str | None]:
        """Return the receipt as values that JSON has."""
        return [self.number, self.offset, self.size_bytes, self.token, self.crc32c]

    @classmethod
    def from_json(cls, values: Sequence[int | str | None]) -> PartReceipt:
        """Return the receipt that `to_json` spelt. Raises `ValueError` for anything else."""
        number, offset, size_bytes, token, crc32c = values
        whole = [value for value in (number, offset, size_bytes) if isinstance(value, int)]
        is_crc = crc32c is None or isinstance(crc32c, int)
        if len(whole) != 3 or not isinstance(token, str) or not is_crc:  # noqa: PLR2004
            raise ValueError(f"{values!r} is no receipt")
        return cls(
            number=whole[0],
            offset=whole[1],
            size_bytes=whole[2],
            token=token,
            crc32c=crc32c if isinstance(crc32c, int) else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """An object as a storage can copy from it: `scope` says within which storage, `address` where.

    `path` is for messages. Holds no credentials.
    """

    scope: str
    address: str
    path: str


Arrived = Callable[[int], None]
"""Takes the number of bytes that an attempt to read has filled so far; 0 begins an attempt."""


class Upload(Protocol):
    """One write-once object being written part by part; invisible until `complete` returns.

    The caller ends it with exactly one of `complete` and `abort`.
    """

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Write part `number` (from 0) whose first byte lies at `offset` (bytes) in the object.

        Buffers are bytes-like views that may be used again after the return. A part
        may be sent again with the same bytes, unless the upload has an attribute
        `repeatable` that is False. `last` marks the one that ends the object.
        """

    def complete(self, total_bytes: int) -> None:
        """Make the object visible under its name and durable; idempotent.

        Raises `StorageError`; if the storage holds another length than `total_bytes`
        nothing becomes visible. A lost answer is resolved by looking at the object.
        """

    def abort(self) -> None:
        """Discard everything sent; idempotent; leaves no open upload and no temporary file."""


@runtime_checkable
class Reserving(Protocol):
    """An upload that can take the space for an object before its bytes are sent."""

    def reserve(self, total_bytes: int) -> None:
        """Take space for about `total_bytes`; idempotent, and what is not used is given back.

        Does nothing where the storage cannot tell. Raises `StorageError` of kind "no-space" if
        that many bytes do not fit. The upload goes on without, also while a call that was given
        up still runs; it need not be made again.
        """


@runtime_checkable
class SharedUpload(Upload, Protocol):
    """An upload whose parts come from several processes, and from other objects.

    One owner starts it, hands out its `ticket` and ends it with one of `complete` and `abort`;
    members join, write or copy parts, and send their `receipts` to the owner. Part numbers
    ascend with the offsets; none is used by two members, and some may be left out. A member
    that has not given its receipts can change nothing once the object is complete, as the owner
    completes nothing without them; one that has given them writes no more.
    """

    def ticket(self) -> str:
        """Return a text with which another process joins this upload of this path."""

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
        """Have the storage copy `length` bytes of `source` from `source_start` on as one part.

        Return the CRC-32C that the storage tells of what it copied; None if it tells none: the
        caller must then check the source's bytes by reading them. `source_bytes` is the length
        the source must have. Raises `IntegrityError` if it differs or the range leaves it, and
        `UnsupportedByStoreError` where the storage cannot copy.
        """

    def receipts(self) -> list[PartReceipt]:
        """End this member's writing and return what it wrote, durable; idempotent.

        Raises `StorageError` if any of it may not be: the upload can then only be aborted.
        """

    def complete(
        self,
        total_bytes: int,
        *,
        receipts: Sequence[PartReceipt] = (),
        existing: Existing = "refuse",
    ) -> None:
        """Make the object of the owner's and these members' parts visible; idempotent.

        Where something else bears the name, `StorageError` of kind "exists" is raised, unless
        it is to be replaced. Otherwise as `Upload.complete`. Owner only.
        """

    def abort(self) -> None:
        """Discard everything sent; for a member: stop, and leave discarding to the owner."""


class Store(Protocol):
    """One root on one storage.

    `url` names the root for messages and never carries credentials.
    """

    @property
    def url(self) -> str:
        """The root, for messages."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def prepare(self, folders: Sequence[str]) -> None:
        """Make folders exist where the storage has such things; one rank calls it; idempotent.

        Object stores check that the bucket exists and is reachable only where that
        costs no extra right; the first write tells otherwise.
        """

    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """Return a whole small object, never from a cache.

        One of more than `most_bytes` is an `IntegrityError`, and is not read, as far as the storage
        tells its length first; in no case is much more than that held in memory.
        """

    def read_version(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Return a whole small object with its version token, in one consistent read.

        `most_bytes` as for `read`.
        """

    def read_into(
        self,
        path: str,
        start: int,
        target: memoryview,
        *,
        size_bytes: int | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        """Fill `target` with the bytes from `start` (bytes) on.

        `size_bytes` is the length the object must have; where the storage tells the
        length with the answer and it differs, or the bytes end early,
        `IntegrityError` is raised. `arrived` may be called, never concurrently, with the
        number of bytes of `target` that are filled so far, so that they can be checked
        while they are in the processor's cache. Whoever tries again, a store or a wrapper, calls
        it with 0 before each attempt: what was filled before is to be filled, and checked,
        anew. Within an attempt the numbers grow. What it raises ends the read.
        """

    def stat(self, path: str) -> Stat:
        """Return size and time of one object, never from a cache."""

    def write(self, path: str, data: bytes) -> None:
        """Put a whole object at a write-once name, visible only complete, durable on return.

        Idempotent: called again, with the same bytes.
        """

    def create(self, path: str, data: bytes) -> None:
        """Put a whole object at `path` if nothing is there, in one atomic step of the storage.

        Raises `StorageError` of kind "exists" if something is there (perhaps our own
        object, when an answer was lost: the caller reads back and compares), and
        `UnsupportedByStoreError` if the storage cannot decide it.
        """

    def replace(self, path: str, data: bytes, *, if_match: str | None = None) -> None:
        """Put a whole object in place of what may be there; durable on return.

        With `if_match` only if the object is still of that version; else `StorageError`
        of kind "precondition".
        """

    def start_upload(self, path: str, *, part_bytes: int) -> Upload:
        """Begin a write-once object; nothing needs to be sent before the first part."""

    def start_shared_upload(self, path: str, *, part_bytes: int) -> SharedUpload:
        """Begin a write-once object that other processes may join, as its owner.

        Raises `UnsupportedByStoreError` unless `capabilities.shared_uploads`.
        """

    def join_upload(self, path: str, ticket: str, *, part_bytes: int) -> SharedUpload:
        """Join another process's upload of the same path as a member.

        Raises as `start_shared_upload`, `InvalidInputError` for a ticket of another path or
        storage, and, where the storage tells at once, kind "not-found" if it is over.
        """

    def copy_source(self, path: str) -> CopySource | None:
        """Return `path` as something that uploads of this storage can copy from, if they can."""

    def can_copy_from(self, other: Store) -> bool:
        """Return whether `copy_part` here takes the sources of `other`: one bucket, one disk."""

    def list(self, prefix: str, *, recursive: bool = True) -> list[Entry]:
        """Return the objects below a folder, fresh from the storage; [] if there are none.

        Not recursive: only direct children; folders are then entries whose path ends
        in "/" with size 0.
        """

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error; not atomic as a whole."""

    def delete_folder(self, path: str) -> None:
        """Delete a folder and all below it; idempotent; on object stores all with that prefix.

        Raises `InvalidInputError` for an empty path: the root is never meant.
        """

    def abort_uploads(self, prefix: str, *, only: PathFilter | None = None) -> int:
        """Abort open uploads and remove temporary files below a folder; return how many.

        With `only`, those for whose path, relative to the root, it returns True: an upload is
        abandoned property of whoever began it, and a folder may be shared. It may be asked several
        times for one. An upload whose path the storage does not tell whole is not asked for, and
        stays.
        """

    def now_s(self, probe_path: str) -> float:
        """Return the storage's clock in Unix seconds, by writing and removing `probe_path`."""

    def close(self) -> None:
        """Release clients owned by this store; idempotent."""
