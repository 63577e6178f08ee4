"""A storage of your own: checkpoints in one database file, at sqlite:///FOLDER/NAME.db/PREFIX.

docs/extending.md goes through it; tests/servers/test_extending.py has it pass `StoreSuite`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ckpt_storage import store
from ckpt_storage.errors import InvalidInputError, StorageError

Db: TypeAlias = sqlite3.Connection

_TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS objects
    (path TEXT PRIMARY KEY, content TEXT, size INTEGER, modified REAL, write_id TEXT);
CREATE TABLE IF NOT EXISTS uploads (content TEXT PRIMARY KEY, path TEXT);
CREATE TABLE IF NOT EXISTS pieces
    (content TEXT, start INTEGER, data BLOB, PRIMARY KEY (content, start));
"""
_FIND = "SELECT content, size, modified, write_id FROM objects WHERE path = ?"
_BELOW = "SELECT path, content, size, modified FROM objects WHERE substr(path, 1, ?) = ?"
_OVERLAPPING = (
    "SELECT start, data FROM pieces WHERE content = ? AND start < ? AND start + length(data) > ?"
)
_MOST_BYTES = 512 << 20
_KINDS = {
    sqlite3.SQLITE_BUSY: "throttled",
    sqlite3.SQLITE_CANTOPEN: "not-found",
    sqlite3.SQLITE_FULL: "no-space",
    sqlite3.SQLITE_READONLY: "permission",
}


class SqliteBackend(store.Backend):
    """One root in one database.

    An object refers to a content, which is one or more pieces and never changes: the name of the
    content is the object's version, and the token of the upload that makes it.
    """

    capabilities = store.Capabilities(
        kind="generic",
        is_remote=False,
        exclusive_create=True,
        if_match=True,
        atomic_replace=True,
        parallel_parts=True,
        max_part_bytes=_MOST_BYTES,
        max_put_bytes=_MOST_BYTES,
        tokens_travel=True,
        lists_uploads=True,
    )

    def __init__(self, location: store.Location, settings: store.Settings) -> None:
        file, separator, self._root = f"{location.path}/".partition(".db/")
        if not separator or not file.startswith("/"):
            raise InvalidInputError(
                f"{location.url} names no database.",
                next_step="Write sqlite:///FOLDER/NAME.db/PREFIX.",
            )
        self._file = Path(f"{file}.db")
        self._timeout_s = settings.request_timeout_s

    @contextlib.contextmanager
    def _reading(self, begin: str = "BEGIN") -> Iterator[Db]:
        """Yield a connection that sees one state of the database."""
        db = sqlite3.connect(
            f"{self._file.as_uri()}?mode=rw", self._timeout_s, isolation_level=None, uri=True
        )
        with contextlib.closing(db):
            db.execute("PRAGMA synchronous = FULL")
            db.execute(begin)
            yield db

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Db]:
        """Yield a connection whose changes are made together at the end, durably, or not at all."""
        with self._reading("BEGIN IMMEDIATE") as db:
            yield db
            db.execute("COMMIT")

    def _find(self, db: Db, path: str) -> store.ObjectInfo:
        row = db.execute(_FIND, [self._root + path]).fetchone()
        if row is None:
            raise FileNotFoundError(path)
        version, size_bytes, modified_s, write_id = row
        return store.ObjectInfo(
            path=path,
            size_bytes=size_bytes,
            modified_s=modified_s,
            version=version,
            write_id=write_id,
        )

    def stat(self, path: str) -> store.ObjectInfo:
        """Look the object up."""
        with self._reading() as db:
            return self._find(db, path)

    def get(self, path: str, *, max_bytes: int | None) -> store.Content:
        """Take size and bytes from one state of the database."""
        with self._reading() as db:
            info = self._find(db, path)
            most_bytes = info.size_bytes if max_bytes is None else max_bytes + 1
            data = bytearray(min(info.size_bytes, most_bytes))
            _fill(db, info, 0, memoryview(data))
        return store.Content(data=bytes(data), version=info.version)

    def read(self, path: str, ranges: Iterable[store.Range]) -> int | None:
        """Copy the pieces that a range overlaps."""
        with self._reading() as db:
            info = self._find(db, path)
            for start, view in ranges:
                if start + view.nbytes > info.size_bytes:
                    raise store.ShortReadError(max(start, info.size_bytes))
                _fill(db, info, start, view)
        return info.size_bytes

    def put(
        self,
        path: str,
        data: store.Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Insert content and object in one transaction, which also decides the conditions."""
        content, size = os.urandom(16).hex(), sum(view.nbytes for view in data)
        info = store.ObjectInfo(path=path, size_bytes=size, version=content, write_id=write_id)
        with self._writing() as db:
            if if_match is not None and self._find(db, path).version != if_match:
                raise StorageError(f"{path} was replaced meanwhile.", kind="precondition")
            _insert(db, content, 0, data)
            self._publish(db, info, if_absent=if_absent)

    def _publish(self, db: Db, info: store.ObjectInfo, *, if_absent: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            before = self._find(db, info.path)
            if if_absent:
                raise FileExistsError(info.path)
            _remove(db, before)
        row = [self._root + info.path, info.version, info.size_bytes, time.time(), info.write_id]
        db.execute("INSERT INTO objects VALUES (?, ?, ?, ?, ?)", row)

    def list(self, prefix: str, *, recursive: bool) -> Iterator[store.ObjectInfo]:
        """Look through the names; folders are what stands before a slash."""
        if not self._file.exists():
            return
        below = f"{self._root}{prefix}/" if prefix else self._root
        cut, folders = len(self._root), set()
        with self._reading() as db:
            rows = db.execute(_BELOW, [len(below), below]).fetchall()
        for path, version, size, modified_s in rows:
            child, slash, _ = path[len(below) :].partition("/")
            if slash and not recursive:
                folders.add(f"{below}{child}/"[cut:])
            else:
                yield store.ObjectInfo(
                    path=path[cut:], size_bytes=size, modified_s=modified_s, version=version
                )
        yield from (store.ObjectInfo(path=folder, size_bytes=0) for folder in folders)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete all of them in one transaction."""
        with self._writing() as db:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    _remove(db, self._find(db, path))

    def begin_upload(self, path: str, *, write_id: str) -> str:
        """Note the name of a new content."""
        del write_id
        token = os.urandom(16).hex()
        with self._writing() as db:
            db.execute("INSERT INTO uploads VALUES (?, ?)", [token, self._root + path])
        return token

    def put_part(
        self, path: str, token: str, part: store.Part, data: store.Buffers, *, last: bool
    ) -> str:
        """Insert one piece, in place of what an earlier attempt left."""
        del last
        with self._writing() as db:
            self._check_open(db, path, token)
            _insert(db, token, part.offset, data)
        return ""

    def complete_upload(
        self, path: str, token: str, parts: Sequence[store.Part], *, write_id: str
    ) -> None:
        """Have the object refer to the content."""
        size = sum(part.size_bytes for part in parts)
        info = store.ObjectInfo(path=path, size_bytes=size, version=token, write_id=write_id)
        with self._writing() as db:
            self._check_open(db, path, token)
            self._publish(db, info, if_absent=False)
            db.execute("DELETE FROM uploads WHERE content = ?", [token])

    def _check_open(self, db: Db, path: str, token: str) -> None:
        row = db.execute("SELECT path FROM uploads WHERE content = ?", [token]).fetchone()
        if row != (self._root + path,):
            raise FileNotFoundError(f"the upload of {path} is over")

    def abort_upload(self, path: str, token: str) -> None:
        """Delete the pieces, unless the upload was completed."""
        del path
        with self._writing() as db:
            if db.execute("DELETE FROM uploads WHERE content = ?", [token]).rowcount:
                db.execute("DELETE FROM pieces WHERE content = ?", [token])

    def list_uploads(self, prefix: str) -> Iterator[store.OpenUpload]:
        """Look through all that are open."""
        with self._reading() as db:
            rows = db.execute("SELECT path, content FROM uploads").fetchall()
        below = f"{self._root}{prefix}/" if prefix else self._root
        for path, token in rows:
            if f"{path}/".startswith(below):
                yield store.OpenUpload(path=path[len(self._root) :], token=token)

    def make_folders(self, folders: Sequence[str]) -> None:
        """Make the database; folders need no making."""
        del folders
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(self._file, self._timeout_s)) as db:
            db.executescript(_TABLES)

    def explain(self, error: BaseException) -> StorageError | None:
        """Say what SQLite's codes mean; all else is understood without."""
        code = getattr(error, "sqlite_errorcode", None)
        if not isinstance(error, sqlite3.Error) or code is None:
            return None
        return StorageError(
            f"SQLite could not use {self._file}: {error}.",
            kind=_KINDS.get(code & 0xFF, "other"),
            retryable=code & 0xFF == sqlite3.SQLITE_BUSY,
            next_step="See whether another program locks the file, and look at its disk.",
        )


def _insert(db: Db, content: str, start: int, data: store.Buffers) -> None:
    row = [content, start, b"".join(data)]
    db.execute("INSERT OR REPLACE INTO pieces VALUES (?, ?, ?)", row)


def _fill(db: Db, info: store.ObjectInfo, start: int, view: memoryview) -> None:
    """Copy what lies from byte `start` on into `view`."""
    stop = start + view.nbytes
    for at, data in db.execute(_OVERLAPPING, [info.version, stop, start]):
        piece = memoryview(data)[max(0, start - at) : stop - at]
        view[max(0, at - start) :][: len(piece)] = piece


def _remove(db: Db, info: store.ObjectInfo) -> None:
    db.execute("DELETE FROM objects WHERE content = ?", [info.version])
    db.execute("DELETE FROM pieces WHERE content = ?", [info.version])
