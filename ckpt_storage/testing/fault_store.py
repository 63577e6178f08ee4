"""A `Store` that fails as it is told to; it goes when all storages stand below the facade."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ckpt_storage.store.base import (
    Arrived,
    Capabilities,
    Copied,
    CopySource,
    Entry,
    Existing,
    PartReceipt,
    PathFilter,
    Plain,
    Reserving,
    SharedUpload,
    Stat,
    Store,
    Upload,
    Version,
)
from ckpt_storage.store.retry import Refreshable

from .faults import Rule, Script

__all__ = ["FaultStore"]

T = TypeVar("T")


class FaultStore(Plain):
    """A `Store` around another that plays a `Script`; without rules it only keeps a log.

    Operations bear the names of the protocol's methods; those of uploads are `write_part`,
    `copy_part`, `ticket`, `receipts`, `reserve`, `complete` and `abort` with the object's path.
    It has `refresh`, and its uploads have `reserve`, where the inner ones do.
    """

    def __init__(self, inner: Store, rules: Sequence[Rule] = ()) -> None:
        self._inner = inner
        self.script = Script(rules)
        if isinstance(inner, Refreshable):
            # An attribute, not a method: only a store that offers it is asked.
            self.refresh: Callable[[], None] = lambda: self._play("refresh", "", inner.refresh)

    @property
    def url(self) -> str:
        """The inner store's root."""
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        """What the inner store can do."""
        return self._inner.capabilities

    def prepare(self, folders: Sequence[str]) -> None:
        """Make folders; torn or short: the first half of them."""
        self._play(
            "prepare",
            "",
            lambda: self._inner.prepare(folders),
            lambda: self._inner.prepare(folders[: len(folders) // 2]),
        )

    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """Return an object; short: its first half."""

        def whole() -> bytes:
            return self._inner.read(path, most_bytes=most_bytes)

        def half() -> bytes:
            data = whole()
            return data[: len(data) // 2]

        return self._play("read", path, whole, half)

    def read_version(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Return an object with its token; short: its first half."""

        def whole() -> Version:
            return self._inner.read_version(path, most_bytes=most_bytes)

        def half() -> Version:
            found = whole()
            return Version(data=found.data[: len(found.data) // 2], version=found.version)

        return self._play("read_version", path, whole, half)

    def read_into(
        self,
        path: str,
        start: int,
        target: memoryview,
        *,
        size_bytes: int | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        """Fill `target`; short: its first half."""
        self._play(
            "read_into",
            path,
            lambda: self._inner.read_into(
                path, start, target, size_bytes=size_bytes, arrived=arrived
            ),
            lambda: self._inner.read_into(
                path, start, target[: len(target) // 2], size_bytes=size_bytes
            ),
        )

    def stat(self, path: str) -> Stat:
        """Return size and time; short: half the size."""

        def half() -> Stat:
            found = self._inner.stat(path)
            return Stat(path=path, size_bytes=found.size_bytes // 2, modified_s=found.modified_s)

        return self._play("stat", path, lambda: self._inner.stat(path), half)

    def write(self, path: str, data: bytes) -> None:
        """Put an object; short: its first half."""
        self._play(
            "write",
            path,
            lambda: self._inner.write(path, data),
            lambda: self._inner.write(path, data[: len(data) // 2]),
        )

    def create(self, path: str, data: bytes) -> None:
        """Create an object; short: its first half."""
        self._play(
            "create",
            path,
            lambda: self._inner.create(path, data),
            lambda: self._inner.create(path, data[: len(data) // 2]),
        )

    def replace(self, path: str, data: bytes, *, if_match: str | None = None) -> None:
        """Replace an object; short: by its first half."""
        self._play(
            "replace",
            path,
            lambda: self._inner.replace(path, data, if_match=if_match),
            lambda: self._inner.replace(path, data[: len(data) // 2], if_match=if_match),
        )

    def start_upload(self, path: str, *, part_bytes: int) -> FaultUpload:
        """Begin an upload whose operations play the same script."""
        upload = self._play(
            "start_upload", path, lambda: self._inner.start_upload(path, part_bytes=part_bytes)
        )
        return FaultUpload(upload, self.script, path)

    def start_shared_upload(self, path: str, *, part_bytes: int) -> FaultSharedUpload:
        """Begin a shared upload whose operations play the same script."""
        upload = self._play(
            "start_shared_upload",
            path,
            lambda: self._inner.start_shared_upload(path, part_bytes=part_bytes),
        )
        return FaultSharedUpload(upload, self.script, path)

    def join_upload(self, path: str, ticket: str, *, part_bytes: int) -> FaultSharedUpload:
        """Join an upload; this member's operations play the same script."""
        upload = self._play(
            "join_upload",
            path,
            lambda: self._inner.join_upload(path, ticket, part_bytes=part_bytes),
        )
        return FaultSharedUpload(upload, self.script, path)

    def copy_source(self, path: str) -> CopySource | None:
        """Return the inner store's; nothing is asked of a storage."""
        return self._inner.copy_source(path)

    def can_copy_from(self, other: Copied, *, at_any_price: bool = True) -> bool:
        """Return what the inner store says."""
        return self._inner.can_copy_from(other, at_any_price=at_any_price)

    def list(self, prefix: str, *, recursive: bool = True) -> list[Entry]:
        """Return a listing; short: its first half."""

        def half() -> list[Entry]:
            found = self._inner.list(prefix, recursive=recursive)
            return found[: len(found) // 2]

        return self._play(
            "list", prefix, lambda: self._inner.list(prefix, recursive=recursive), half
        )

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; torn or short: the first half of them."""
        self._play(
            "delete",
            " ".join(paths),
            lambda: self._inner.delete(paths),
            lambda: self._inner.delete(paths[: len(paths) // 2]),
        )

    def delete_folder(self, path: str) -> None:
        """Delete a folder; torn or short: the first half of its objects."""

        def half() -> None:
            found = self._inner.list(path)
            self._inner.delete([entry.path for entry in found[: len(found) // 2]])

        self._play("delete_folder", path, lambda: self._inner.delete_folder(path), half)

    def abort_uploads(self, prefix: str, *, only: PathFilter | None = None) -> int:
        """Abort what is open below a folder."""
        return self._play(
            "abort_uploads", prefix, lambda: self._inner.abort_uploads(prefix, only=only)
        )

    def now_s(self, probe_path: str) -> float:
        """Return the storage's clock."""
        return self._play("now_s", probe_path, lambda: self._inner.now_s(probe_path))

    def close(self) -> None:
        """Close the inner store; no rule applies, since a dead process closes all too."""
        self._inner.close()

    def _play(
        self,
        operation: str,
        path: str,
        call: Callable[[], T],
        half: Callable[[], T] | None = None,
    ) -> T:
        return self.script.play(operation, path, call, half)


class FaultUpload:
    """An `Upload` around another that plays its store's script."""

    def __init__(self, inner: Upload, script: Script, path: str) -> None:
        self._inner = inner
        self._script = script
        self._path = path
        self.repeatable = bool(getattr(inner, "repeatable", True))
        if isinstance(inner, Reserving):
            self.reserve: Callable[[int], None] = lambda total_bytes: self._play(
                "reserve", lambda: inner.reserve(total_bytes)
            )

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Write a part; torn or short: its first half."""

        def half() -> None:
            joined = memoryview(b"".join(buffers))
            self._inner.write_part(number, offset, [joined[: len(joined) // 2]], last=last)

        self._play(
            "write_part",
            lambda: self._inner.write_part(number, offset, buffers, last=last),
            half,
        )

    def complete(self, total_bytes: int) -> None:
        """Complete the upload."""
        self._play("complete", lambda: self._inner.complete(total_bytes))

    def abort(self) -> None:
        """Abort the upload."""
        self._play("abort", self._inner.abort)

    def _play(
        self, operation: str, call: Callable[[], None], half: Callable[[], None] | None = None
    ) -> None:
        self._script.play(operation, self._path, call, half)


class FaultSharedUpload:
    """A `SharedUpload` around another that plays its store's script."""

    def __init__(self, inner: SharedUpload, script: Script, path: str) -> None:
        self._inner = inner
        self._script = script
        self._path = path
        self._plain = FaultUpload(inner, script, path)
        self.repeatable = self._plain.repeatable
        if isinstance(inner, Reserving):
            self.reserve = self._plain.reserve

    def ticket(self) -> str:
        """Return the ticket."""
        return self._play("ticket", self._inner.ticket)

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Write a part; torn or short: its first half."""
        self._plain.write_part(number, offset, buffers, last=last)

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
        """Copy a part; torn or short: its first half."""

        def copied(bytes_: int) -> int | None:
            return self._inner.copy_part(
                number, offset, source, source_start, bytes_, source_bytes=source_bytes, last=last
            )

        return self._play("copy_part", lambda: copied(length), lambda: copied(length // 2))

    def receipts(self) -> list[PartReceipt]:
        """Return the receipts; short: the first half of them."""

        def half() -> list[PartReceipt]:
            found = self._inner.receipts()
            return found[: len(found) // 2]

        return self._play("receipts", self._inner.receipts, half)

    def complete(
        self,
        total_bytes: int,
        *,
        receipts: Sequence[PartReceipt] = (),
        existing: Existing = "refuse",
    ) -> None:
        """Complete the upload."""
        self._play(
            "complete",
            lambda: self._inner.complete(total_bytes, receipts=receipts, existing=existing),
        )

    def abort(self) -> None:
        """Abort the upload, or leave it."""
        self._plain.abort()

    def _play(
        self, operation: str, call: Callable[[], T], half: Callable[[], T] | None = None
    ) -> T:
        return self._script.play(operation, self._path, call, half)
