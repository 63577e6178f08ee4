"""One checkpoint on two roots: commit objects here, everything else there (`commit_url=`).

For mounts that can neither rename nor create exclusively (gcsfuse, mountpoint-s3): data goes
through the mount, the few objects that need those go to the same place by its native URL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ckpt_storage.format import layout

from .base import (
    Arrived,
    Capabilities,
    Copied,
    CopySource,
    Entry,
    PathFilter,
    SharedUpload,
    Stat,
    Store,
    Upload,
    Version,
)


class SplitStore:
    """Routes `commits/`, `.metadata` and probes to `commits`, all other paths to `data`."""

    def __init__(self, data: Store, commits: Store) -> None:
        self._data = data
        self._commits = commits

    def __repr__(self) -> str:
        return f"SplitStore({self._data!r}, {self._commits!r})"

    def _of(self, path: str) -> Store:
        first = path.partition("/")[0]
        if first in {layout.COMMITS, layout.STOCK_METADATA} or first.startswith(
            layout.PROBE_PREFIX
        ):
            return self._commits
        return self._data

    @property
    def url(self) -> str:
        """The data root."""
        return self._data.url

    @property
    def capabilities(self) -> Capabilities:
        """What the data root can do, with the commit root's power over names."""
        commits = self._commits.capabilities
        return dataclasses.replace(
            self._data.capabilities,
            # What an error of a slot means depends on the storage that holds the slots.
            kind=commits.kind,
            exclusive_create=commits.exclusive_create,
            atomic_replace=commits.atomic_replace,
            if_match=commits.if_match,
        )

    def with_deadline(
        self,
        at_monotonic_s: float,
        cancelled: Callable[[], bool] | None = None,
        given_up: Callable[[], bool] | None = None,
        throttled: Callable[[], None] | None = None,
    ) -> SplitStore:
        """Return this store with both parts ending by a moment of `time.monotonic`."""
        narrowed = [
            part.with_deadline(at_monotonic_s, cancelled, given_up, throttled)
            if hasattr(part, "with_deadline")
            else part
            for part in (self._data, self._commits)
        ]
        return SplitStore(*narrowed)

    def prepare(self, folders: Sequence[str]) -> None:
        """Make each folder on the root it belongs to."""
        for part in (self._data, self._commits):
            mine = [folder for folder in folders if self._of(folder) is part]
            if mine:
                part.prepare(mine)

    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """Read from the root that holds `path`."""
        return self._of(path).read(path, most_bytes=most_bytes)

    def read_version(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Read from the root that holds `path`."""
        return self._of(path).read_version(path, most_bytes=most_bytes)

    def read_into(
        self,
        path: str,
        start: int,
        target: memoryview,
        *,
        size_bytes: int | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        """Read from the root that holds `path`."""
        self._of(path).read_into(path, start, target, size_bytes=size_bytes, arrived=arrived)

    def stat(self, path: str) -> Stat:
        """Ask the root that holds `path`."""
        return self._of(path).stat(path)

    def write(self, path: str, data: bytes) -> None:
        """Write to the root that holds `path`."""
        self._of(path).write(path, data)

    def create(self, path: str, data: bytes) -> None:
        """Create on the root that holds `path`."""
        self._of(path).create(path, data)

    def replace(self, path: str, data: bytes, *, if_match: str | None = None) -> None:
        """Replace on the root that holds `path`."""
        self._of(path).replace(path, data, if_match=if_match)

    def start_upload(self, path: str, *, part_bytes: int) -> Upload:
        """Upload to the root that holds `path`."""
        return self._of(path).start_upload(path, part_bytes=part_bytes)

    def start_shared_upload(self, path: str, *, part_bytes: int) -> SharedUpload:
        """Upload to the root that holds `path`."""
        return self._of(path).start_shared_upload(path, part_bytes=part_bytes)

    def join_upload(self, path: str, ticket: str, *, part_bytes: int) -> SharedUpload:
        """Join on the root that holds `path`."""
        return self._of(path).join_upload(path, ticket, part_bytes=part_bytes)

    def copy_source(self, path: str) -> CopySource | None:
        """Copy from the root that holds `path`."""
        return self._of(path).copy_source(path)

    def can_copy_from(self, other: Copied, *, at_any_price: bool = True) -> bool:
        """Ask the data root: nothing is copied among commit objects."""
        return self._data.can_copy_from(other, at_any_price=at_any_price)

    def list(self, prefix: str, *, recursive: bool = True) -> list[Entry]:
        """List the data root, and the commit root for what lies there."""
        if prefix:
            return self._of(prefix).list(prefix, recursive=recursive)
        entries = {entry.path: entry for entry in self._data.list("", recursive=recursive)}
        for entry in self._commits.list("", recursive=recursive):
            entries.setdefault(entry.path, entry)
        return list(entries.values())

    def delete(self, paths: Sequence[str]) -> None:
        """Delete each path on the root that holds it."""
        for part in (self._data, self._commits):
            mine = [path for path in paths if self._of(path) is part]
            if mine:
                part.delete(mine)

    def delete_folder(self, path: str) -> None:
        """Delete on the root that holds `path`."""
        self._of(path).delete_folder(path)

    def abort_uploads(self, prefix: str, *, only: PathFilter | None = None) -> int:
        """Abort on the root that holds `prefix`."""
        return self._of(prefix).abort_uploads(prefix, only=only)

    def now_s(self, probe_path: str) -> float:
        """Return the data root's clock, by which files of attempts are dated."""
        return self._data.now_s(probe_path)

    def close(self) -> None:
        """Release both."""
        self._data.close()
        self._commits.close()
