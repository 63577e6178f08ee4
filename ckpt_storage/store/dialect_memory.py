"""fsspec's `memory://`: a dict in this process, with every operation one step under a lock."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence

from ckpt_storage.errors import IntegrityError, StorageError
from ckpt_storage.format import integrity

from .backends.clients import Client, ForeignFs
from .base import Capabilities, CopySource, Entry, Existing, PartReceipt, PathFilter, Stat, Version
from .parts import (
    PartList,
    SentPart,
    SharedParts,
    check_bound,
    decode_ticket,
    encode_ticket,
    ended,
    joined,
    not_the_owner,
    whole_object,
)

CAPABILITIES = Capabilities(
    kind="memory",
    exclusive_create=True,
    atomic_replace=True,
    if_match=True,
    parallel_parts=True,
    shared=False,
    is_remote=False,
    tokens_travel=True,
    copy_min_bytes=1,
)

# All memory:// file systems of a process share one dict, so they share one lock.
_LOCK = threading.RLock()


def _renew_lock() -> None:
    global _LOCK  # noqa: PLW0603  # a thread that does not exist in the child may hold it
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class MemoryDialect:
    """Speaks to the dict; see `dialect.Dialect`. A token is a digest of the content."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._root = client.root

    @property
    def capabilities(self) -> Capabilities:
        """Everything, within one process."""
        return CAPABILITIES

    def prepare(self, folders: Sequence[str]) -> None:
        """Make nothing: folders are implied by names."""
        del folders

    def get(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Copy the object out."""
        with _LOCK:
            content = self._file(self._client.fs, path).getbuffer()
            try:
                check_bound(len(content), most_bytes)
            finally:
                content.release()
            data = self._client.fs.cat_file(self._full(path))
        return Version(data=data, version=_token(data))

    def read_range(self, path: str, start: int, view: memoryview) -> tuple[int, int | None]:
        """Copy from the object's own buffer."""
        with _LOCK:
            content = self._file(self._client.fs, path).getbuffer()
            try:
                piece = content[start : start + len(view)]
                view[: len(piece)] = piece
                return len(piece), len(content)
            finally:
                content.release()

    def stat(self, path: str) -> Stat:
        """Look at the object's buffer."""
        with _LOCK:
            file = self._file(self._client.fs, path)
            return Stat(
                path=path, size_bytes=file.getbuffer().nbytes, modified_s=file.modified.timestamp()
            )

    def put(self, path: str, data: bytes) -> None:
        """Store the object whole."""
        with _LOCK:
            self._client.fs.pipe_file(self._full(path), data)

    def create(self, path: str, data: bytes) -> None:
        """Store the object if its name is free, under the lock."""
        with _LOCK:
            if self._full(path) in self._client.fs.store:
                raise FileExistsError(path)
            self.put(path, data)

    def put_if_match(self, path: str, data: bytes, token: str) -> None:
        """Store the object if the one that is there is still the one that was read."""
        with _LOCK:
            if _token(self._client.fs.cat_file(self._full(path))) != token:
                raise StorageError(
                    f"{path} is no longer of the version that was read.", kind="precondition"
                )
            self.put(path, data)

    def start_upload(self, path: str, *, part_bytes: int) -> MemoryUpload:
        """Begin a list of parts."""
        del part_bytes
        return MemoryUpload(self, path)

    def start_shared_upload(self, path: str) -> MemorySharedUpload:
        """Begin a dict of parts that this process finds by a random id."""
        return MemorySharedUpload(self, path, _Pieces(os.urandom(16).hex()), is_owner=True)

    def join_upload(self, path: str, ticket: str) -> MemorySharedUpload:
        """Find the dict of parts."""
        name = decode_ticket(ticket, "memory", path, {"name"})["name"]
        with _LOCK:
            pieces = _OPEN.get(name)
        if pieces is None:
            raise ended(path)
        return MemorySharedUpload(self, path, pieces, is_owner=False)

    def copy_place(self, path: str) -> tuple[str, str] | None:
        """Return the object's name."""
        return "memory", self._full(path)

    def slice_of(self, full: str, start: int, length: int) -> tuple[bytes, int]:
        """Return a range of an object by its full name, and the object's length."""
        with _LOCK:
            file = self._client.fs.store.get(full)
            if file is None:
                raise FileNotFoundError(full)
            content = file.getbuffer()
            try:
                return bytes(content[start : start + length]), len(content)
            finally:
                content.release()

    def list(self, prefix: str, *, recursive: bool) -> list[Entry]:
        """Look through all names."""
        below = f"{self._full(prefix)}/"
        cut = len(self._root) + 1
        entries: dict[str, Entry] = {}
        with _LOCK:
            for name, file in self._client.fs.store.items():
                if not name.startswith(below):
                    continue
                child, slash, _ = name[len(below) :].partition("/")
                if slash and not recursive:
                    path = f"{below[cut:]}{child}/"
                    entries[path] = Entry(path=path, size_bytes=0)
                else:
                    entries[name] = Entry(
                        path=name[cut:],
                        size_bytes=file.getbuffer().nbytes,
                        modified_s=file.modified.timestamp(),
                    )
        return list(entries.values())

    def delete(self, paths: Sequence[str]) -> None:
        """Drop the names."""
        with _LOCK:
            for path in paths:
                self._client.fs.store.pop(self._full(path), None)

    def delete_folder(self, path: str) -> None:
        """Drop all names below."""
        below = f"{self._full(path)}/"
        with _LOCK:
            names = self._client.fs.store
            for name in [name for name in names if name.startswith(below)]:
                del names[name]

    def abort_uploads(self, prefix: str, only: PathFilter | None) -> int:
        """Find none: parts lie in their upload only."""
        del prefix, only
        return 0

    def now_s(self, probe_path: str) -> float:
        """Return the clock of this process; nothing is written."""
        del probe_path
        return time.time()

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _file(self, fs: ForeignFs, path: str) -> ForeignFs:
        try:
            return fs.store[self._full(path)]
        except KeyError:
            raise FileNotFoundError(path) from None


def _token(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class MemoryUpload:
    """Parts kept until they are complete."""

    def __init__(self, dialect: MemoryDialect, path: str) -> None:
        self._dialect = dialect
        self._path = path
        self._parts = PartList()
        self._pieces: dict[int, bytes] = {}
        self._state = "open"

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Copy the part."""
        del last
        if self._state != "open":
            raise ended(self._path)
        data = joined(buffers)
        self._pieces[number] = data
        self._parts.add(number, SentPart(offset=offset, size_bytes=len(data), receipt=""))

    def complete(self, total_bytes: int) -> None:
        """Join the parts and store them in one step."""
        if self._state == "complete":
            return
        if self._state != "open":
            raise ended(self._path)
        parts = self._parts.whole(total_bytes, shown=self._path)
        self._dialect.put(self._path, b"".join(self._pieces[number] for number, _ in parts))
        self._state = "complete"
        self._pieces.clear()

    def abort(self) -> None:
        """Drop the parts."""
        if self._state != "complete":
            self._state = "aborted"
            self._pieces.clear()


class _Pieces:
    """The parts of one shared upload, by number; `_OPEN` knows it by its name while it is open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.by_number: dict[int, bytes] = {}
        with _LOCK:
            _OPEN[name] = self

    def close(self) -> None:
        """Forget the parts; who still holds them changes nothing any more."""
        with _LOCK:
            _OPEN.pop(self.name, None)
            self.by_number = {}


_OPEN: dict[str, _Pieces] = {}


class MemorySharedUpload:
    """A `SharedUpload` among the threads of this process."""

    def __init__(
        self, dialect: MemoryDialect, path: str, pieces: _Pieces, *, is_owner: bool
    ) -> None:
        self._dialect = dialect
        self._path = path
        self._pieces = pieces
        self._is_owner = is_owner
        self._parts = SharedParts(path)
        self._is_complete = False

    def ticket(self) -> str:
        """Return the random id."""
        return encode_ticket("memory", self._path, {"name": self._pieces.name})

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Copy the part."""
        del last
        self._keep(number, offset, b"".join(buffers))

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
        """Copy from the other object."""
        del last
        data, found_bytes = self._dialect.slice_of(source.address, source_start, length)
        if len(data) < length or source_bytes not in {None, found_bytes}:
            raise IntegrityError(
                f"{source.path} has {found_bytes} bytes; [{source_start}, "
                f"{source_start + length}) was to be copied.",
                path=source.path,
                offset=found_bytes,
                next_step="The object is damaged or not the one that was saved.",
            )
        return self._keep(number, offset, data)

    def receipts(self) -> list[PartReceipt]:
        """Take no more parts."""
        return self._parts.end()

    def complete(
        self,
        total_bytes: int,
        *,
        receipts: Sequence[PartReceipt] = (),
        existing: Existing = "refuse",
    ) -> None:
        """Join the parts and store them in one step."""
        if not self._is_owner:
            raise not_the_owner(self._path)
        if self._is_complete:
            return
        with _LOCK:
            if self._pieces.name not in _OPEN:
                raise ended(self._path)
            parts = {*self._parts.end(), *receipts}
            ordered = whole_object(list(parts), total_bytes, shown=self._path)
            data = b"".join(self._pieces.by_number[part.number] for part in ordered)
            if existing == "refuse":
                self._dialect.create(self._path, data)
            else:
                self._dialect.put(self._path, data)
        self._is_complete = True
        self._pieces.close()

    def abort(self) -> None:
        """Drop the parts, if they are ours to drop."""
        self._parts.end()
        if self._is_owner and not self._is_complete:
            self._pieces.close()

    def _keep(self, number: int, offset: int, data: bytes) -> int:
        self._parts.check_open()
        with _LOCK:
            if self._pieces.name not in _OPEN:
                raise ended(self._path)
            self._pieces.by_number[number] = data
        crc32c = integrity.crc32c_of(data)
        token = f"{id(self):x}"
        self._parts.add(
            PartReceipt(
                number=number, offset=offset, size_bytes=len(data), receipt=token, crc32c=crc32c
            )
        )
        return crc32c
