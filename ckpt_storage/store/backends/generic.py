"""Any other fsspec file system: writes a temporary file, checks its length and moves it."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from glob import has_magic
from typing import Any

from fsspec.spec import AbstractFileSystem

from ckpt_storage.errors import StorageError
from ckpt_storage.format.names import path_flaw
from ckpt_storage.store.backend import (
    Buffers,
    Capabilities,
    Content,
    ObjectInfo,
    OpenUpload,
    Part,
    Range,
    Settings,
    ShortReadError,
)
from ckpt_storage.store.location import Location
from ckpt_storage.store.problems import is_absence, unless_absent, upload_error
from ckpt_storage.store.threads import report_progress

from .client_registry import ForeignFs
from .clients import ClientBackend
from .temp_files import is_temp_name, target_path, temp_name

log = logging.getLogger("ckpt_storage")

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # By default Windows and Samba refuse to open a file twice, even for reading.
    "smb": {"share_access": "rwd"},
}
"""Defaults of options, by scheme."""

_HUB_KINDS = frozenset({"buckets", "datasets", "spaces"})
"""What paths on the Hugging Face Hub begin with, but those of models."""

_TIME_NAMES = ("mtime", "modified", "last_modified", "LastModified", "updated", "time", "created")


@dataclass(slots=True, kw_only=True)
class _Writing:
    """An open temporary file, and the file system instance that it alone uses."""

    fs: ForeignFs
    stream: ForeignFs
    # The bytes that were written successfully, and why no more can be written.
    end: int = 0
    problem: str = ""
    using: threading.Lock = field(default_factory=threading.Lock)
    process_id: int = field(default_factory=os.getpid)

    def check(self, path: str, end: int, otherwise: str) -> None:
        """Raise, now and at every later call, unless the file has exactly `end` bytes."""
        if not self.problem and self.end != end:
            self.problem = otherwise
        if self.problem:
            raise upload_error(path, self.problem)


class FsspecBackend(ClientBackend):
    """One root on a file system that fsspec knows; a token is the path of a temporary file."""

    capabilities = Capabilities(kind="generic", has_temporary_files=True)

    def __init__(self, location: Location, settings: Settings) -> None:
        options = {**_DEFAULTS.get(location.protocol, {}), **location.storage_options}
        if isinstance(options.get("auth"), list):
            # JSON and command lines have no tuples, which HTTP clients require here.
            options["auth"] = tuple(options["auth"])
        super().__init__(location, settings, options=options)
        name = "_cat_file" if self._is_async else "cat_file"
        # Implementations without the argument return the whole file.
        parameters = inspect.signature(getattr(self._family, name)).parameters
        self._takes_ranges = "start" in parameters
        self._writings: dict[str, _Writing] = {}

    def stat(self, path: str) -> ObjectInfo:
        with self._borrowed_client() as fs:
            return self._info(fs, path)

    def get(self, path: str, *, max_bytes: int | None) -> Content:
        with self._borrowed_client() as fs:
            size_bytes = self._info(fs, path).size_bytes
            if max_bytes is not None and size_bytes > max_bytes:
                return Content(data=self._range(fs, path, 0, max_bytes + 1))
            return Content(data=fs.cat_file(self._full(path)))

    def read(self, path: str, ranges: Iterable[Range]) -> int | None:
        """Request the size, then each range; its bytes are copied once."""
        with self._borrowed_client() as fs:
            size_bytes = self._info(fs, path).size_bytes
            for start, view in ranges:
                stop = min(start + view.nbytes, size_bytes)
                data = self._range(fs, path, start, stop) if start < stop else b""
                view[: len(data)] = data
                if len(data) < view.nbytes:
                    raise ShortReadError(start + len(data))
        return size_bytes

    def put(
        self,
        path: str,
        data: Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        token = self.begin_upload(path, write_id="")
        part = Part(number=0, offset=0, size_bytes=sum(view.nbytes for view in data))
        try:
            self.put_part(path, token, part, data, last=True)
            self.complete_upload(path, token, [part], write_id="")
        except BaseException:
            with contextlib.suppress(Exception):
                self.abort_upload(path, token)
            raise

    def delete(self, paths: Sequence[str]) -> None:
        with self._borrowed_client() as fs:
            for path in paths:
                report_progress()
                _remove(fs, self._full(path))

    def delete_folder(self, path: str) -> None:
        """Remove the files page by page, then the folders, unless fsspec takes one for a pattern.

        Files with unsafe names stay, as do their folders: many servers resolve "..", so that such a
        name is another file's.
        """
        unsafe: list[str] = []
        for page in self._pages(path, recursive=True):
            files = [info.path for info in page if not info.path.endswith("/")]
            unsafe += (file for file in files if path_flaw(file) is not None)
            self.delete([file for file in files if path_flaw(file) is None])
        full = self._full(path)
        if unsafe:
            log.warning("%r: names such as %r are not deleted", path, unsafe[0])
            return
        with self._borrowed_client() as fs, unless_absent():
            if not has_magic(full):
                fs.rm(full, recursive=True)

    def make_folders(self, folders: Sequence[str]) -> None:
        with self._borrowed_client() as fs:
            self._check_share(fs)
            for full in filter(lambda full: full.strip("/"), map(self._full, ("", *folders))):
                try:
                    fs.makedirs(full, exist_ok=True)
                except Exception:
                    # Another thread may have created it.
                    if not _exists(fs, full):
                        raise

    def begin_upload(self, path: str, *, write_id: str) -> str:
        folder, slash, name = path.rpartition("/")
        # fsspec takes some names for patterns.
        token = f"{folder}{slash}{temp_name('object' if has_magic(name) else name)}"
        own = self._acquire()
        try:
            stream = own.open(self._full(token), "wb")
        except BaseException:
            self._release(own, healthy=False)
            raise
        self._writings[token] = _Writing(fs=own, stream=stream)
        return token

    def put_part(self, path: str, token: str, part: Part, data: Buffers, *, last: bool) -> str:
        """Append the part. After a failed write the content is unknown, so no part follows."""
        writing = self._writings.get(token)
        if writing is None:
            raise upload_error(path, "has ended, or another process began it")
        writing.check(path, part.offset, f"got the part at byte {part.offset} out of order")
        writing.problem = f"was cut off within the part at byte {part.offset}"
        with writing.using:
            try:
                for view in data:
                    writing.stream.write(bytes(view))
                    writing.end += view.nbytes
            except Exception as error:
                writing.problem += self._scrub(f" by {type(error).__name__}: {error}")
                raise
            finally:
                if token not in self._writings:  # it was aborted meanwhile
                    self._discard(writing)
        writing.problem = ""
        return ""

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str
    ) -> None:
        total_bytes = sum(part.size_bytes for part in parts)
        writing = self._writings.get(token)
        if writing is not None:
            what = f"holds {writing.end} bytes instead of {total_bytes}"
            writing.check(path, total_bytes, what)
            # Some clients lose buffered data in a failed close.
            writing.problem = "was cut off at its end"
            with writing.using:
                writing.stream.close()
                self._writings.pop(token, None)
                self._release(writing.fs)
        with self._borrowed_client() as fs:
            self._publish(fs, self._full(token), path, total_bytes)

    def abort_upload(self, path: str, token: str) -> None:
        if not is_temp_name(token.rpartition("/")[2]):
            raise upload_error(path, "has another token")
        self._drop(token)
        with self._borrowed_client() as fs:
            _remove(fs, self._full(token))

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Yield the temporary files of an object, or all below a folder."""
        folder, _, name = prefix.strip("/").rpartition("/")
        for page in self._pages(folder, recursive=False):
            for info in page:
                if name and target_path(info.path) == prefix:
                    yield _upload_of(info)
        for page in self._pages(prefix.strip("/"), recursive=True):
            for info in page:
                is_temporary = is_temp_name(info.path.rpartition("/")[2])
                if is_temporary and path_flaw(info.path) is None:
                    yield _upload_of(info)

    def close(self) -> None:
        """Close also the files of uploads that were not ended."""
        for token, writing in list(self._writings.items()):
            # A child of fork does not touch inherited files.
            if writing.process_id == os.getpid():
                self._drop(token)
        super().close()

    def _drop(self, token: str) -> None:
        writing = self._writings.pop(token, None)
        # A call that hangs keeps its instance.
        if writing is not None and writing.using.acquire(blocking=False):
            self._discard(writing)
            writing.using.release()

    def _discard(self, writing: _Writing) -> None:
        """Close a failed file, if possible without sending its buffered data."""
        for name in ("discard", "close"):
            end = getattr(writing.stream, name, None)
            if end is not None and not getattr(writing.stream, "closed", False):
                with contextlib.suppress(Exception):
                    end()
        self._release(writing.fs)

    @property
    def _bucket(self) -> str:
        """The host of the URL, if paths begin with it: then it is a bucket.

        On the Hugging Face Hub it is the repository: OWNER/NAME, for data sets below `datasets/`.
        """
        if self._location.protocol == "hf":
            parts = self._root.strip("/").split("/")
            return "/".join(parts[: 3 if parts[0] in _HUB_KINDS else 2])
        host = self._location.target.partition("://")[2].partition("/")[0]
        first = self._root.strip("/").partition("/")[0]
        return host if host == first else ""

    def _may_lack_bucket(self, error: BaseException) -> bool:
        return isinstance(error, FileNotFoundError)

    def _check_bucket(self) -> None:
        first = self._root[: len(self._root) - len(self._root.lstrip("/"))] + self._bucket
        with self._borrowed_client() as fs:
            fs.info(first)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/") if path else self._root

    def _info(self, fs: ForeignFs, path: str) -> ObjectInfo:
        info: Mapping[str, Any] = fs.info(self._full(path))
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return _object_info(path, info)

    def _range(self, fs: ForeignFs, path: str, start: int, stop: int) -> bytes:
        """Return a range of a file, fewer bytes only if the file system truncates it."""
        full, missing = self._full(path), stop - start
        if self._takes_ranges:
            data: bytes = fs.cat_file(full, start=start, end=stop)
            if len(data) <= missing:
                return data
            # Some servers send the whole file anyway.
            self._takes_ranges = False
        pieces = []
        with fs.open(full, "rb") as stream:
            stream.seek(start)
            while missing and (piece := stream.read(missing)):
                pieces.append(piece)
                missing -= len(piece)
        return b"".join(pieces)

    def _pages(self, prefix: str, *, recursive: bool) -> Iterator[Sequence[ObjectInfo]]:
        """Yield the direct children of each folder.

        A folder with an unsafe name is not listed, but yielded as a file. A name that is not below
        the root becomes an absolute path. `Store.list` reports both.
        """
        folders, root = [prefix], self._root.strip("/")
        above = f"{root}/" if root else ""
        while folders:
            folder = folders.pop()
            with self._borrowed_client() as fs:
                try:
                    entries = fs.ls(self._full(folder), detail=True)
                except Exception as error:
                    if not is_absence(error):
                        raise
                    if folder == prefix and (no_bucket := self.explain(error)) is not None:
                        raise no_bucket from error
                    self._check_share(fs)
                    entries = []  # there is no folder, or it was removed meanwhile
            page = []
            for info in entries:
                name, is_folder = str(info["name"]).strip("/"), info["type"] == "directory"
                if name == f"{above}{folder}".rstrip("/"):
                    continue
                path = name[len(above) :] if name.startswith(above) else f"/{name}"
                if not is_folder:
                    page.append(_object_info(path, info))
                elif recursive and path_flaw(path) is not None:
                    page.append(ObjectInfo(path=path, size_bytes=0))
                else:
                    page.append(ObjectInfo(path=f"{path}/", size_bytes=0))
                    folders += [path] if recursive else []
            yield page

    def _check_share(self, fs: ForeignFs) -> None:
        """Raise unless the SMB share exists: the client retries to create it without end."""
        share = self._root.strip("/").partition("/")[0]
        if self._location.protocol == "smb" and not _exists(fs, f"/{share}"):
            what = f"There is no share {share!r} at {self.endpoint}, or this user may not use it."
            step = "Check the URL: smb://HOST/SHARE/FOLDER. Only the server's owner makes shares."
            raise StorageError(what, path=self._location.url, next_step=step)

    def _publish(self, fs: ForeignFs, temporary: str, path: str, total_bytes: int) -> None:
        """Check a temporary file's length and move it to its name; may be retried."""
        size_bytes = None  # an earlier attempt moved it
        with unless_absent():
            size_bytes = int(fs.info(temporary)["size"])
        if size_bytes == total_bytes:
            _move(fs, temporary, self._full(path))
        if size_bytes in {None, total_bytes}:
            size_bytes = self._info(fs, path).size_bytes
        if size_bytes != total_bytes:
            raise upload_error(path, f"holds {size_bytes} bytes instead of {total_bytes}")


def _upload_of(info: ObjectInfo) -> OpenUpload:
    path = target_path(info.path)
    return OpenUpload(path=path, token=info.path, modified_s=info.modified_s)


def _exists(fs: ForeignFs, full: str) -> bool:
    """Return whether a name exists; fsspec's own `exists` ignores every error."""
    with unless_absent():
        fs.info(full)
        return True
    return False


def _remove(fs: ForeignFs, full: str) -> None:
    try:
        fs.rm_file(full)
    except Exception:
        # Clients report an absent file in many ways.
        if _exists(fs, full):
            raise


def _move(fs: ForeignFs, temporary: str, full: str) -> None:
    try:
        _rename(fs, temporary, full)
    except PermissionError:
        raise
    except Exception:
        if not _exists(fs, full) or not _exists(fs, temporary):
            raise
        # Most servers refuse to move onto an existing name.
        _remove(fs, full)
        _rename(fs, temporary, full)


def _rename(fs: ForeignFs, temporary: str, full: str) -> None:
    if getattr(fs.mv, "__func__", None) is not AbstractFileSystem.mv:
        fs.mv(temporary, full)
    else:
        # fsspec's own mv takes brackets in the source name for a pattern.
        fs.cp_file(temporary, full)
        fs.rm_file(temporary)


def _object_info(path: str, info: Mapping[str, Any]) -> ObjectInfo:
    """Return the entry of a listing; the time of last change has one of many names."""
    times = (_time_of(info.get(name)) for name in _TIME_NAMES)
    modified_s = next((time for time in times if time is not None), None)
    return ObjectInfo(path=path, size_bytes=int(info["size"]), modified_s=modified_s)


def _time_of(value: object) -> float | None:
    with contextlib.suppress(ValueError):
        value = datetime.fromisoformat(value) if isinstance(value, str) else value
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return float(value) if isinstance(value, int | float) else None
