"""Any other fsspec file system: a temporary file beside the target, its length checked, moved.

File systems without a rename of their own copy and delete, which still shows no name before its
content is whole, as far as their copy does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from glob import has_magic
from typing import Any

from fsspec.spec import AbstractFileSystem

from ckpt_storage.errors import StorageError, UnsupportedByStoreError

from .backends.clients import Client, ForeignFs
from .backends.drafts import draft_name, is_draft_name, is_meant
from .backends.posix import as_bytes
from .base import Capabilities, Entry, PathFilter, Stat, Version
from .parts import PartList, SentPart, check_bound, ended, joined, wrong_length

CAPABILITIES = Capabilities(
    kind="generic",
    exclusive_create=False,
    atomic_replace=False,
    if_match=False,
    parallel_parts=False,
)

_TIME_NAMES = ("mtime", "modified", "last_modified", "LastModified", "updated", "time", "created")


class GenericDialect:
    """Speaks fsspec; see `dialect.Dialect`. Its calls block for as long as the backend likes."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._root = client.root
        self._takes_ranges = True

    @property
    def capabilities(self) -> Capabilities:
        """What every file system can do."""
        return CAPABILITIES

    def prepare(self, folders: Sequence[str]) -> None:
        """Make the root and folders below it."""
        for folder in ("", *folders):
            full = self.full(folder)
            if full.strip("/"):
                self.fs.makedirs(full, exist_ok=True)

    def get(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Read the file whole; there is no token."""
        check_bound(self._check_is_file(path), most_bytes)
        return Version(data=self.fs.cat_file(self.full(path)), version=None)

    def read_range(self, path: str, start: int, view: memoryview) -> tuple[int, int | None]:
        """Read a range of the file; how long the file is comes with another call."""
        size_bytes = self._check_is_file(path)
        stop = min(start + len(view), size_bytes)
        if start >= stop:
            return 0, size_bytes
        data = self._range(self.full(path), start, stop)
        view[: len(data)] = data
        return len(data), size_bytes

    def stat(self, path: str) -> Stat:
        """Ask for size and time; a folder is no object."""
        info = self._info(path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return Stat(path=path, size_bytes=int(info["size"]), modified_s=_modified_s(info))

    def put(self, path: str, data: bytes) -> None:
        """Write a temporary file and move it to its name, in place of what is there."""
        temporary = self.temporary_name(path)
        with self.removed_on_failure(temporary):
            self.write_file(temporary, data)
            self.publish(temporary, path, len(data))

    def create(self, path: str, data: bytes) -> None:
        """Refuse: of `open(path, "xb")` nobody knows what a backend makes."""
        raise NotImplementedError(path, data)

    def put_if_match(self, path: str, data: bytes, token: str) -> None:
        """Refuse: there are no tokens."""
        raise NotImplementedError(path, data, token)

    def start_upload(self, path: str, *, part_bytes: int) -> GenericUpload:
        """Begin an upload; its temporary file comes with its first part."""
        del part_bytes
        return GenericUpload(self, path)

    def list(self, prefix: str, *, recursive: bool) -> list[Entry]:
        """Walk the folder, without what is temporary."""
        return [
            Entry(path=path, size_bytes=0)
            if info["type"] == "directory"
            else Entry(path=path, size_bytes=int(info["size"]), modified_s=_modified_s(info))
            for path, info in self._walk(prefix, recursive=recursive)
            if not is_draft_name(path.rpartition("/")[2])
        ]

    def delete(self, paths: Sequence[str]) -> None:
        """Remove the files one by one."""
        for path in paths:
            self.remove(self.full(path))

    def delete_folder(self, path: str) -> None:
        """Remove the tree, or only its files if fsspec would take its name for a pattern."""
        full = self.full(path)
        if has_magic(full):
            found = self._walk(path, recursive=True)
            self.delete([below for below, info in found if info["type"] != "directory"])
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.fs.rm(full, recursive=True)

    def abort_uploads(self, prefix: str, only: PathFilter | None) -> int:
        """Remove the temporary files below the folder, as far as the backend shows them."""
        found = [
            path
            for path, info in self._walk(prefix, recursive=True)
            if info["type"] == "file" and is_draft_name(path.rpartition("/")[2])
        ]
        found = [path for path in found if is_meant(*path.rpartition("/")[::2], only)]
        self.delete(found)
        return len(found)

    def now_s(self, probe_path: str) -> float:
        """Write the probe and ask for its time."""
        self.put(probe_path, b"clock\n")
        try:
            modified_s = self.stat(probe_path).modified_s
        finally:
            with contextlib.suppress(Exception):
                self.delete([probe_path])
        if modified_s is None:
            raise UnsupportedByStoreError(
                "This file system tells no times.",
                kind="unsupported",
                next_step="Remove leftovers by hand, once no job saves here.",
            )
        return modified_s

    @property
    def fs(self) -> ForeignFs:
        """The file system, without what it remembers of listings."""
        fs = self._client.fs
        fs.invalidate_cache()
        return fs

    def full(self, path: str) -> str:
        """Return a path as the file system spells it."""
        return f"{self._root}/{path}".rstrip("/") if path else self._root

    def temporary_name(self, path: str) -> str:
        """Return a new full name beside the target, of the form that listings leave out."""
        folder, slash, name = self.full(path).rpartition("/")
        # fsspec would take some names for patterns; then the target is not told.
        return f"{folder}{slash}{draft_name('' if has_magic(name) else name)}"

    def write_file(self, full: str, data: bytes) -> None:
        """Write a file whole, under a name that nobody reads yet."""
        stream = self.open_new(full)
        try:
            stream.write(data)
            stream.close()
        except BaseException:
            discard(stream)
            raise

    def open_new(self, full: str) -> ForeignFs:
        """Open a new file for writing; its folder is made if it is missing."""
        try:
            return self.fs.open(full, "wb")
        except FileNotFoundError:
            self.fs.makedirs(full.rpartition("/")[0], exist_ok=True)
            return self.fs.open(full, "wb")

    @contextlib.contextmanager
    def removed_on_failure(self, full: str) -> Iterator[None]:
        """Remove a temporary file if the body fails, and raise what the body raised."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self.remove(full)
            raise

    def remove(self, full: str) -> None:
        """Remove a file that may be absent."""
        try:
            self.fs.rm_file(full)
        except Exception:
            # Backends tell in many ways that there was nothing to remove.
            if self.fs.exists(full):
                raise

    def publish(self, temporary: str, path: str, total_bytes: int) -> None:
        """Check a temporary file's length and move it to its name; go on where it stopped."""
        full = self.full(path)
        if not self.fs.exists(temporary):
            # Moved before, with the answer lost.
            found_bytes = int(self._info(path)["size"])
        else:
            found_bytes = int(self.fs.info(temporary)["size"])
        if found_bytes != total_bytes:
            raise wrong_length(path, found_bytes, total_bytes)
        if self.fs.exists(temporary):
            self._move(temporary, full)
            moved_bytes = int(self._info(path)["size"])
            if moved_bytes != total_bytes:
                raise wrong_length(path, moved_bytes, total_bytes)

    def _range(self, full: str, start: int, stop: int) -> bytes:
        """Return a range of a file, fewer bytes only where the backend cuts it."""
        wanted = stop - start
        if self._takes_ranges:
            data: bytes = self.fs.cat_file(full, start=start, end=stop)
            if len(data) <= wanted:
                return data
            # Some backends take the arguments and send the whole file.
            self._takes_ranges = False
        with self.fs.open(full, "rb") as stream:
            stream.seek(start)
            pieces = []
            while wanted and (piece := stream.read(wanted)):
                pieces.append(piece)
                wanted -= len(piece)
        return b"".join(pieces)

    def _move(self, temporary: str, full: str) -> None:
        try:
            self._rename(temporary, full)
        except Exception:
            if not self.fs.exists(full) or not self.fs.exists(temporary):
                raise
            # Most servers refuse to move onto a name that is taken.
            self.remove(full)
            self._rename(temporary, full)

    def _rename(self, temporary: str, full: str) -> None:
        fs = self.fs
        has_own = getattr(fs.mv, "__func__", None) is not AbstractFileSystem.mv
        if has_own and not has_magic(temporary):
            fs.mv(temporary, full)
            return
        # fsspec's own mv takes a source name with brackets for a pattern.
        try:
            fs.cp_file(temporary, full)
        except Exception:
            if not has_own:
                raise
            fs.mv(temporary, full)
        else:
            fs.rm_file(temporary)

    def _info(self, path: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.fs.info(self.full(path))
        return found

    def _check_is_file(self, path: str) -> int:
        return self.stat(path).size_bytes

    def _walk(self, prefix: str, *, recursive: bool) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Return relative path and information of what lies below a folder."""
        folder = self.full(prefix)
        root = self._root.strip("/")
        cut = len(root) + 1 if root else 0
        try:
            if prefix and self.fs.info(folder)["type"] != "directory":
                return []
            if recursive:
                found = list(self.fs.find(folder, detail=True).values())
            else:
                found = list(self.fs.ls(folder, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        walked = []
        for info in found:
            path = str(info["name"]).strip("/")[cut:]
            is_folder = info["type"] == "directory"
            walked.append((f"{path}/" if is_folder else path, info))
        return walked


class GenericUpload:
    """An `Upload` that appends to one open temporary file, so no part can be sent again.

    An object of one part is kept until `complete`, which may be repeated.
    """

    repeatable = False

    def __init__(self, dialect: GenericDialect, path: str) -> None:
        self._dialect = dialect
        self._path = path
        self._temporary = dialect.temporary_name(path)
        self._only_part: bytes | None = None
        self._stream: ForeignFs | None = None
        self._parts = PartList()
        self._state = "open"

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Append the part to the temporary file."""
        if self._state != "open":
            raise ended(self._path)
        if last and number == 0:
            self._only_part = joined(buffers)
            return
        if number != len(self._parts):
            raise StorageError(
                f"Part {number} of {self._path} came out of its turn.",
                path=self._path,
                next_step="Save again.",
            )
        # What a failed write leaves in the stream is unknown, so it ends the upload.
        self._state = "failed"
        if self._stream is None:
            self._stream = self._dialect.open_new(self._temporary)
        size_bytes = 0
        for view in buffers:
            self._stream.write(as_bytes(view))
            size_bytes += view.nbytes
        self._state = "open"
        self._parts.add(number, SentPart(offset=offset, size_bytes=size_bytes, receipt=""))

    def complete(self, total_bytes: int) -> None:
        """Close the temporary file, check its length and move it to its name."""
        if self._state == "complete":
            return
        if self._state not in {"open", "closed"}:
            raise ended(self._path)
        if self._stream is None:
            data = self._only_part or b""
            if len(data) != total_bytes:
                raise wrong_length(self._path, len(data), total_bytes)
            self._dialect.put(self._path, data)
        else:
            if self._state == "open":
                self._parts.whole(total_bytes, shown=self._path)
                # A failed close has lost data in some backends' buffers; it is not repeated.
                self._state = "failed"
                self._stream.close()
                self._state = "closed"
            self._dialect.publish(self._temporary, self._path, total_bytes)
        self._state = "complete"
        self._only_part = None

    def abort(self) -> None:
        """Close and remove the temporary file."""
        if self._state == "complete":
            return
        self._state = "aborted"
        self._only_part = None
        if self._stream is not None:
            discard(self._stream)
            self._dialect.remove(self._temporary)


def discard(stream: ForeignFs) -> None:
    """Close a file that failed, if possible without sending what it buffers.

    What is sent all the same reaches a temporary name, which is removed next.
    """
    for name in ("discard", "close"):
        end = getattr(stream, name, None)
        if end is not None and not getattr(stream, "closed", False):
            with contextlib.suppress(Exception):
                end()


def _modified_s(info: Mapping[str, Any]) -> float | None:
    """Return the time of last change that a backend tells, in Unix seconds."""
    for name in _TIME_NAMES:
        value = info.get(name)
        if isinstance(value, datetime):
            aware = value if value.tzinfo else value.replace(tzinfo=UTC)
            return aware.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
    return None
