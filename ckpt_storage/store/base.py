"""The seam between the checkpoint protocol and storages: what a store does and promises.

Every path is relative to the store's root, uses `/`, and is one that `layout` spelt. Everything is
synchronous and may be called from several threads at once.

Errors: every method raises only `CheckpointError`s, nearly always `StorageError` with
`kind` set (see `errors.StorageError`); an absent object is kind "not-found".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from .backend import Capabilities, Content, CopySource, ObjectInfo, Part, Range

__all__ = [
    "Arrived",
    "Capabilities",
    "Copied",
    "CopySource",
    "Entry",
    "Existing",
    "PartReceipt",
    "PathFilter",
    "Plain",
    "Reserving",
    "SharedUpload",
    "Stat",
    "Store",
    "Upload",
    "Version",
]


Stat: TypeAlias = ObjectInfo
Entry: TypeAlias = ObjectInfo
Version: TypeAlias = Content
PartReceipt: TypeAlias = Part

PathFilter = Callable[[str], bool]
"""Says of a path, relative to the root, whether it is meant."""


Existing = Literal["refuse", "replace"]
"""What completing an upload does where something bears the name already."""


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


class Copied(Protocol):
    """A store that is copied from."""

    def copy_source(self, path: str) -> CopySource | None:
        """Return `path` as something that uploads of its storage can copy from, if they can."""


class Plain:
    """What stores below the facade of old lack of it."""

    def bounded(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401  # itself
        """Return itself: it has no deadlines."""
        return self

    def cleaning_up(self) -> Any:  # noqa: ANN401  # itself
        """Return itself."""
        return self

    def read_ranges(
        self, path: str, ranges: Iterable[Range], *, size_bytes: int | None = None
    ) -> None:
        """Fill one range after the other."""
        for start, view in ranges:
            self.read_into(path, start, view, size_bytes=size_bytes)  # type: ignore[attr-defined]


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

        Raises `UnsupportedByStoreError` unless `capabilities.tokens_travel`.
        """

    def join_upload(self, path: str, ticket: str, *, part_bytes: int) -> SharedUpload:
        """Join another process's upload of the same path as a member.

        Raises as `start_shared_upload`, `InvalidInputError` for a ticket of another path or
        storage, and, where the storage tells at once, kind "not-found" if it is over.
        """

    def copy_source(self, path: str) -> CopySource | None:
        """Return `path` as something that uploads of this storage can copy from, if they can."""

    def can_copy_from(self, other: Copied, *, at_any_price: bool = True) -> bool:
        """Return whether `copy_part` here takes the sources of `other`: one bucket, one disk.

        Unless `at_any_price`, only where a copy spares more than it costs.
        """

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
