"""One checkpoint on two roots: commit objects here, everything else there (`commit_url=`).

For mounts that can neither rename nor create exclusively (gcsfuse, mountpoint-s3): data goes
through the mount, the few objects that need those go to the same place by its native URL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from ckpt_storage.errors import StorageError
from ckpt_storage.format.names import COMMITS, PROBE_PREFIX, STOCK_METADATA
from ckpt_storage.store.backend import (
    Backend,
    Buffers,
    Content,
    CopySource,
    ObjectInfo,
    OpenUpload,
    Part,
    PartCopy,
    Range,
)


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

    def _of(self, path: str) -> Backend:
        first = path.partition("/")[0]
        is_commit = first in {COMMITS, STOCK_METADATA}
        return self._commits if is_commit or first.startswith(PROBE_PREFIX) else self._data

    def _shares(self, paths: Sequence[str]) -> Iterator[tuple[Backend, list[str]]]:
        for part in (self._data, self._commits):
            mine = [path for path in paths if self._of(path) is part]
            if mine:
                yield part, mine

    def stat(self, path: str) -> ObjectInfo:
        """Ask the root that holds `path`."""
        return self._of(path).stat(path)

    def get(self, path: str, *, max_bytes: int | None) -> Content:
        """Read from the root that holds `path`."""
        return self._of(path).get(path, max_bytes=max_bytes)

    def read(self, path: str, ranges: Iterable[Range]) -> int | None:
        """Read from the root that holds `path`."""
        return self._of(path).read(path, ranges)

    def put(
        self,
        path: str,
        data: Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Write to the root that holds `path`."""
        self._of(path).put(path, data, write_id=write_id, if_absent=if_absent, if_match=if_match)

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        """List the root that holds the folder; of the whole, both."""
        if prefix:
            yield from self._of(prefix).list(prefix, recursive=recursive)
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

    def delete_version(self, path: str, version: str | None) -> None:
        """Delete on the root that holds `path`."""
        self._of(path).delete_version(path, version)

    def delete_folder(self, path: str) -> bool:
        """Delete on the root that holds `path`."""
        return self._of(path).delete_folder(path)

    def begin_upload(
        self, path: str, *, write_id: str, if_absent: bool, size_hint: int | None, copies: bool
    ) -> str:
        """Upload to the root that holds `path`."""
        return self._of(path).begin_upload(
            path, write_id=write_id, if_absent=if_absent, size_hint=size_hint, copies=copies
        )

    def put_part(
        self, path: str, token: str, number: int, offset: int, data: Buffers, *, last: bool
    ) -> str:
        """Upload to the root that holds `path`."""
        return self._of(path).put_part(path, token, number, offset, data, last=last)

    def copy_part(self, path: str, token: str, copy: PartCopy) -> Part:
        """Copy to the root that holds `path`."""
        return self._of(path).copy_part(path, token, copy)

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str, if_absent: bool
    ) -> None:
        """Complete on the root that holds `path`."""
        self._of(path).complete_upload(path, token, parts, write_id=write_id, if_absent=if_absent)

    def abort_upload(self, path: str, token: str) -> None:
        """Abort on the root that holds `path`."""
        self._of(path).abort_upload(path, token)

    def leave_upload(self, path: str, token: str) -> None:
        """Leave on the root that holds `path`."""
        self._of(path).leave_upload(path, token)

    def flush_parts(self, path: str, token: str) -> None:
        """Flush on the root that holds `path`."""
        self._of(path).flush_parts(path, token)

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """List those of the root that holds `prefix`."""
        return self._of(prefix).list_uploads(prefix)

    def copy_source(self, path: str) -> CopySource | None:
        """Copy from the root that holds `path`."""
        return self._of(path).copy_source(path)

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
