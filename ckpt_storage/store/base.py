"""The seam between the checkpoint protocol and storages: what a store does and promises.

Knows no file system and no network. Every path is relative to the store's root, uses
`/`, and is one that `layout` spelt. Everything is synchronous and may be called from
several threads at once. Implementations: `local`, `remote`; wrappers: `retry`,
`testing.faults`. Callers: `transfer`, `commit`, `source`, `catalog`.

Errors: every method raises only `CheckpointError`s, nearly always `StorageError` with
`kind` set (see `errors.StorageError`); an absent object is kind "not-found".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Arrived", "Capabilities", "Entry", "Stat", "Store", "Upload", "Version"]


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
    part_multiple_bytes: every part but the last must be a multiple of this.
    reads_total_size: `read_into` learns the object's size without another request.
    cheap_stat: `stat` costs no network request of its own.
    shared: other processes see what this one writes (False for `memory://`).
    is_remote: a request costs a network round trip.
    self_timed: operations end by themselves at the request deadline; otherwise a
        wrapper runs them in a thread that can be abandoned.
    can_list_uploads: open multipart uploads below a prefix can be found and aborted.
    """

    kind: Literal["posix", "s3", "gcs", "azure", "memory", "generic"]
    exclusive_create: bool
    atomic_replace: bool
    replace_if_match: bool
    parallel_parts: bool
    min_part_bytes: int = 1
    max_part_count: int | None = None
    part_multiple_bytes: int = 1
    reads_total_size: bool = False
    cheap_stat: bool = False
    shared: bool = True
    is_remote: bool = True
    self_timed: bool = False
    can_list_uploads: bool = False


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


Arrived = Callable[[int], None]
"""Takes the number of bytes that a read has filled so far."""


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

    def read(self, path: str) -> bytes:
        """Return a whole small object, never from a cache."""

    def read_version(self, path: str) -> Version:
        """Return a whole small object with its version token, in one consistent read."""

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
        while they are in the processor's cache; a smaller number than before means that an
        attempt began anew. What it raises ends the read.
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

    def abort_uploads(self, prefix: str) -> int:
        """Abort open uploads and remove temporary files below a folder; return how many."""

    def now_s(self, probe_path: str) -> float:
        """Return the storage's clock in Unix seconds, by writing and removing `probe_path`."""

    def close(self) -> None:
        """Release clients owned by this store; idempotent."""
