"""Whether another writer touched its files while they were read.

Such files bear no checksums and names that the next save uses again: values of two saves would mix
unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ckpt_storage.errors import CheckpointGoneError, FormatError, IntegrityError, StorageError
from ckpt_storage.format import layout
from ckpt_storage.format.layout import INDEX_NAME
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.base import Entry, Store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.workers import side_by_side

from .foreign import StockSource
from .model import CommittedSource, Source
from .opening import find_source, list_or_describe

_MARKED = (layout.STOCK_METADATA, INDEX_NAME, ".distcp", ".safetensors")
"""How the names of files end that another writer's checkpoint consists of."""

_DESCRIBING = frozenset({layout.STOCK_METADATA, INDEX_NAME})

_MOST_ASKED = 8
"""Files that are asked for alone; more of them are listed."""

Mark = tuple[int, float | None]
"""Length in bytes and time of the last change in seconds since the epoch, if the storage tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMarks:
    """Lengths and times of the files of one checkpoint, from before its metadata was read."""

    url: str
    of: Mapping[str, Mark]
    is_deep: bool

    def check(self, store: Store, paths: Collection[str] | None = None) -> None:
        """Raise `CheckpointGoneError` if one of the files is gone or was written again.

        With `paths` only they count, and the files that describe the checkpoint.
        """
        wanted: Collection[str] = self.of
        if paths is not None:
            wanted = {path for path in self.of if path in paths or path in _DESCRIBING}
            asked = [partial(self._is_as_it_was, store, path) for path in wanted]
            if len(asked) <= _MOST_ASKED and all(side_by_side(store, asked)):
                return
        # By a listing: an object's time may be told in other digits when asked for alone.
        now = _marks_of(list_or_describe(store, recursive=self.is_deep)[0])
        for path in wanted:
            if path not in now:
                raise self.gone(path, "is gone")
            if now[path] != self.of[path]:
                raise self.gone(path, "was written again")

    def _is_as_it_was(self, store: Store, path: str) -> bool:
        """Return whether a file is told alike when asked for alone; if not, a listing decides."""
        try:
            found = store.stat(path)
        except StorageError as error:
            if error.kind not in {"not-found", "permission"}:
                raise
            return False
        return (found.size_bytes, found.modified_s) == self.of[path]

    def gone(self, path: str, what: str) -> CheckpointGoneError:
        """Return the error that says what became of a file."""
        return CheckpointGoneError(
            f"{self.url}: {path} {what} since this checkpoint was opened.",
            path=path,
            phase="load",
            next_step="Open it again to see what is there now.",
        )


@contextmanager
def told_from_damage(check: Callable[[], None]) -> Iterator[None]:
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


def watch_file(store: Store, path: str) -> Callable[[], None]:
    """Return what raises `CheckpointGoneError` if a file changed since this call.

    Raises `StorageError` if the file is not there now.
    """
    before = store.stat(path)
    marks = FileMarks(url=store.url, of={}, is_deep=False)

    def check() -> None:
        try:
            now = store.stat(path)
        except StorageError as error:
            if error.kind != "not-found":
                raise
            raise marks.gone(path, "is gone") from error
        if now != before:
            raise marks.gone(path, "was written again")

    return check


def open_marked(
    store: Store, *, deadline: Deadline, options: TransferOptions
) -> tuple[Source, FileMarks | None]:
    """Open what lies at the root of `store`; return it with marks, None for one of ours.

    The marks are older than the metadata: a save that ends in between is seen by `check`, too.
    Costs one listing for another writer's checkpoint, two if files of it lie in folders. Raises
    as `opening.open_source`.
    """
    source, entries = find_source(store, deadline=deadline, options=options)
    is_deep = _lies_in_folders(source)
    if is_deep:
        entries, _ = list_or_describe(store, recursive=True)
        source, entries = find_source(store, deadline=deadline, options=options, entries=entries)
    if isinstance(source, CommittedSource):
        return source, None
    return source, FileMarks(url=store.url, of=_marks_of(entries), is_deep=is_deep)


def _lies_in_folders(source: Source) -> bool:
    return isinstance(source, StockSource) and any(
        "/" in item.relative_path for item in source.metadata.items.values()
    )


def _marks_of(entries: Iterable[Entry]) -> dict[str, Mark]:
    """Return the marks of the files that values or their description lie in."""
    return {
        entry.path: (entry.size_bytes, entry.modified_s)
        for entry in entries
        if entry.path.endswith(_MARKED)
    }
