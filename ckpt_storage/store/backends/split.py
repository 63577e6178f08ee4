"""One checkpoint on two roots: commit objects here, everything else there (`commit_url=`).

For mounts that can neither rename nor create exclusively (gcsfuse, mountpoint-s3): data goes
through the mount, the few objects that need those go to the same place by its native URL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from ckpt_storage.errors import StorageError
from ckpt_storage.format.names import COMMITS, PROBE_PREFIX, STOCK_METADATA
from ckpt_storage.store.backend import Backend, ObjectInfo

P = ParamSpec("P")
T = TypeVar("T")


def _routed(
    method: Callable[Concatenate[Backend, P], T],
) -> Callable[Concatenate[SplitBackend, P], T]:
    """Return the method of the root that holds the path, its first argument."""
    name = method.__name__

    def call(self: SplitBackend, /, *args: P.args, **more: P.kwargs) -> T:
        path: Any = next(iter((*args, *more.values())))
        found: Callable[P, T] = getattr(self.root_of(path), name)
        return found(*args, **more)

    return call


class SplitBackend(Backend):
    """Routes `commits/`, `.metadata` and probes to `commits`, all other paths to `data`."""

    def __init__(self, data: Backend, commits: Backend) -> None:
        self._data = data
        self._commits = commits
        self.endpoint = data.endpoint
        able = commits.capabilities
        self.capabilities = dataclasses.replace(
            data.capabilities,
            # What an error of a slot means depends on the storage that holds the slots.
            kind=able.kind,
            exclusive_create=able.exclusive_create,
            atomic_replace=able.atomic_replace,
            if_match=able.if_match,
        )

    def root_of(self, path: str) -> Backend:
        """Return the backend of the root that holds `path`."""
        first = path.partition("/")[0]
        is_commit = first in {COMMITS, STOCK_METADATA}
        return self._commits if is_commit or first.startswith(PROBE_PREFIX) else self._data

    def _shares(self, paths: Sequence[str]) -> Iterator[tuple[Backend, list[str]]]:
        for part in (self._data, self._commits):
            mine = [path for path in paths if self.root_of(path) is part]
            if mine:
                yield part, mine

    stat = _routed(Backend.stat)
    get = _routed(Backend.get)
    read = _routed(Backend.read)
    put = _routed(Backend.put)
    delete_version = _routed(Backend.delete_version)
    delete_folder = _routed(Backend.delete_folder)
    begin_upload = _routed(Backend.begin_upload)
    put_part = _routed(Backend.put_part)
    copy_part = _routed(Backend.copy_part)
    complete_upload = _routed(Backend.complete_upload)
    abort_upload = _routed(Backend.abort_upload)
    leave_upload = _routed(Backend.leave_upload)
    flush_parts = _routed(Backend.flush_parts)
    list_uploads = _routed(Backend.list_uploads)
    copy_source = _routed(Backend.copy_source)

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        """List the root that holds the folder; of the whole, both."""
        if prefix:
            yield from self.root_of(prefix).list(prefix, recursive=recursive)
            return
        seen = set()
        for info in self._data.list("", recursive=recursive):
            seen.add(info.path)
            yield info
        for info in self._commits.list("", recursive=recursive):
            if info.path not in seen:
                yield info

    def delete(self, paths: Sequence[str]) -> None:
        """Delete each path on the root that holds it."""
        for part, mine in self._shares(paths):
            part.delete(mine)

    def make_folders(self, folders: Sequence[str]) -> None:
        """Make each folder on the root it belongs to."""
        for part, mine in self._shares(folders):
            part.make_folders(mine)

    def server_time(self, probe_path: str) -> float:
        """Return the data root's clock, by which files of attempts are dated."""
        return self._data.server_time(probe_path)

    def explain(self, error: BaseException) -> StorageError | None:
        """Ask both: either may have raised it."""
        return self._data.explain(error) or self._commits.explain(error)

    def refresh(self) -> None:
        """Look up the credentials of both again."""
        self._data.refresh()
        self._commits.refresh()

    def close(self) -> None:
        """Release both."""
        self._data.close()
        self._commits.close()
