"""Detects that another writer changed its files while they were read.

Such files have no checksums, and the next save reuses their names: values of two saves could mix
unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ckpt_storage.errors import CheckpointGoneError, FormatError, IntegrityError, StorageError
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.store import Store
from ckpt_storage.transfer import objects
from ckpt_storage.transfer.workers import side_by_side, some_at_once

_MARKED = (STOCK_METADATA, INDEX_NAME, ".distcp", ".safetensors")
"""Suffixes of the files of another writer's checkpoint."""

_DESCRIBING = frozenset({STOCK_METADATA, INDEX_NAME})

_MAX_STATS = 8
"""Files that are checked one by one; more of them are listed."""

FileVersion = tuple[int, float | None]
"""Length in bytes, and time of the last change in Unix seconds if the storage reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVersions:
    """Versions of the files of one checkpoint, from before its metadata was read.

    So `check` also detects a save that ended in between.
    """

    of: Mapping[str, FileVersion] = field(default_factory=dict)
    is_deep: bool = False
    is_listed: bool = True

    @classmethod
    def of_listing(
        cls, entries: Iterable[ObjectInfo], *, is_deep: bool, is_listed: bool = True
    ) -> FileVersions:
        """Return the versions of the files that hold values or describe them."""
        of = {
            entry.path: (entry.size_bytes, entry.modified_s)
            for entry in entries
            if entry.path.endswith(_MARKED)
        }
        return cls(of=of, is_deep=is_deep, is_listed=is_listed)

    def check(self, store: Store, paths: Collection[str] | None = None) -> None:
        """Raise `CheckpointGoneError` if one of the files is gone or was written again.

        With `paths` only those files and the ones that describe the checkpoint are checked.
        """
        checked: Collection[str] = self.of
        if not checked:
            return
        if paths is not None:
            checked = [path for path in self.of if path in paths or path in _DESCRIBING]
        stats = [partial(self._is_unchanged, store, path) for path in checked]
        if not self.is_listed:
            are_unchanged = some_at_once(stats, _MAX_STATS)
            for path, is_unchanged in zip(checked, are_unchanged, strict=True):
                if not is_unchanged:
                    raise changed(store.url, path, "is gone, or was written again")
            return
        is_small = paths is not None and len(stats) <= _MAX_STATS
        if is_small and all(side_by_side(store, stats)):
            return
        # A listing decides, as `stat` may report the time of an object with another precision.
        entries = listed(store, recursive=self.is_deep)
        now = FileVersions.of_listing(entries, is_deep=self.is_deep).of
        for path in checked:
            if path not in now:
                raise changed(store.url, path, "is gone")
            if now[path] != self.of[path]:
                raise changed(store.url, path, "was written again")

    def _is_unchanged(self, store: Store, path: str) -> bool:
        try:
            info = store.stat(path)
        except StorageError as error:
            if error.kind not in {"not-found", "permission"}:
                raise
            return False
        return (info.size_bytes, info.modified_s) == self.of[path]


def changed(url: str, path: str, what: str) -> CheckpointGoneError:
    """Return the error for a changed file of the checkpoint at `url`; `what` happened to it."""
    text = f"{url}: {path} {what} since this checkpoint was opened."
    step = "Open it again to see what is there now."
    return CheckpointGoneError(text, path=path, phase="load", next_step=step)


@contextmanager
def changed_rather_than_damaged(check: Callable[[], None]) -> Iterator[None]:
    """Replace an error about damaged files by the error of `check`, if that raises an error.

    The files may be sound, and of another save than the metadata.
    """
    try:
        yield
    except (FormatError, IntegrityError) as error:
        try:
            check()
        except CheckpointGoneError as gone:
            raise gone from error
        raise


def listed(store: Store, folder: str = "", *, recursive: bool = False) -> Sequence[ObjectInfo]:
    """Return the entries of a folder; none if there is no such folder."""
    return objects.or_none_if_absent(partial(store.list, folder, recursive=recursive)) or ()
