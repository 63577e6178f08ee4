"""fsspec's `memory://`: a dict in this process, with every operation one step under a lock.

Knows `MemoryFileSystem`; other processes see nothing of it. Called by `remote`.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence

from ckpt_storage.errors import StorageError

from .base import Capabilities, Entry, Stat, Version
from .clients import Client, ForeignFs
from .parts import PartList, SentPart, ended, joined

__all__ = ["MemoryDialect"]

CAPABILITIES = Capabilities(
    kind="memory",
    exclusive_create=True,
    atomic_replace=True,
    replace_if_match=True,
    parallel_parts=True,
    reads_total_size=True,
    cheap_stat=True,
    shared=False,
    is_remote=False,
    self_timed=True,
)

# All memory:// file systems of a process share one dict, so they share one lock.
_LOCK = threading.RLock()


def _renew_lock() -> None:
    global _LOCK  # noqa: PLW0603  # a thread that does not exist in the child may hold it
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class MemoryDialect:
    """Speaks to the dict; see `remote.Dialect`. A token is a digest of the content."""

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

    def get(self, path: str) -> Version:
        """Copy the object out."""
        with _LOCK:
            data = self._client.fs.cat_file(self._full(path))
        return Version(data=data, token=_token(data))

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
            return Stat(size_bytes=file.getbuffer().nbytes, modified_s=file.modified.timestamp())

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

    def abort_uploads(self, prefix: str) -> int:
        """Find none: parts lie in their upload only."""
        del prefix
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
