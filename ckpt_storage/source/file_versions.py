"""Whether another writer touched its files while they were read.

Such files bear no checksums and names that the next save uses again: values of two saves would mix
unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ckpt_storage.commit import slotlog
from ckpt_storage.errors import CheckpointGoneError, FormatError, IntegrityError, StorageError
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import side_by_side

_MARKED = (STOCK_METADATA, INDEX_NAME, ".distcp", ".safetensors")
"""How the names of files end that another writer's checkpoint consists of."""

_DESCRIBING = frozenset({STOCK_METADATA, INDEX_NAME})

_MAX_ASKED = 8
"""Files that are asked for alone; more of them are listed."""

Mark = tuple[int, float | None]
"""Length in bytes and time of the last change in seconds since the epoch, if the storage tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVersions:
    """Lengths and times of the files of one checkpoint, from before its metadata was read.

    That is why a save that ends in between is seen by `check`, too.
    """

    of: Mapping[str, Mark] = field(default_factory=dict)
    is_deep: bool = False

    @classmethod
    def of_listing(cls, entries: Iterable[ObjectInfo], *, is_deep: bool) -> FileVersions:
        """Return the marks of the files that values or their description lie in."""
        of = {
            entry.path: (entry.size_bytes, entry.modified_s)
            for entry in entries
            if entry.path.endswith(_MARKED)
        }
        return cls(of=of, is_deep=is_deep)

    def check(self, store: Store, paths: Collection[str] | None = None) -> None:
        """Raise `CheckpointGoneError` if one of the files is gone or was written again.

        With `paths` only they count, and the files that describe the checkpoint.
        """
        wanted: Collection[str] = self.of
        if not wanted:
            return
        if paths is not None:
            wanted = [path for path in self.of if path in paths or path in _DESCRIBING]
            asked = [partial(self._is_as_it_was, store, path) for path in wanted]
            if len(asked) <= _MAX_ASKED and all(side_by_side(store, asked)):
                return
        # By a listing: an object's time may be told in other digits when asked for alone.
        entries = listed(store, recursive=self.is_deep)
        now = FileVersions.of_listing(entries, is_deep=self.is_deep).of
        for path in wanted:
            if path not in now:
                raise changed(store.url, path, "is gone")
            if now[path] != self.of[path]:
                raise changed(store.url, path, "was written again")

    def _is_as_it_was(self, store: Store, path: str) -> bool:
        """Return whether a file is told alike when asked for alone; if not, a listing decides."""
        try:
            found = store.stat(path)
        except StorageError as error:
            if error.kind not in {"not-found", "permission"}:
                raise
            return False
        return (found.size_bytes, found.modified_s) == self.of[path]


def changed(url: str, path: str, what: str) -> CheckpointGoneError:
    """Return the error that says what became of a file of the checkpoint at `url`."""
    told = f"{url}: {path} {what} since this checkpoint was opened."
    step = "Open it again to see what is there now."
    return CheckpointGoneError(told, path=path, phase="load", next_step=step)


@contextmanager
def changed_rather_than_damaged(check: Callable[[], None]) -> Iterator[None]:
    """Raise what `check` raises in place of an error that says that files do not fit.

    They may be sound, and of another save than the metadata.
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
    """Return what lies in a folder; nothing if that is not there."""
    return slotlog.or_none_if_absent(partial(store.list, folder, recursive=recursive)) or ()
