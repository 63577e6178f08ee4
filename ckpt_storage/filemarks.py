"""Whether another writer touched its files while they were read.

Such files bear no checksums and names that the next save uses again: values of two saves would
mix unnoticed. Knows lengths and times, no content. Called by `session`, `copying`,
`converting` and `reader`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from . import layout
from .deadline import Deadline
from .errors import CheckpointGoneError, FormatError, IntegrityError, StorageError
from .foreign import StockSource
from .layout import INDEX_NAME
from .opening import open_source
from .options import TransferOptions
from .source import CommittedSource, Source
from .store.base import Entry, Store

log = logging.getLogger("ckpt_storage")

_MARKED = (layout.STOCK_METADATA, INDEX_NAME, ".distcp", ".safetensors")
"""How the names of files end that another writer's checkpoint consists of."""

Mark = tuple[int, float | None]
"""Length in bytes and time of the last change in seconds since the epoch, if the storage tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMarks:
    """Lengths and times of the files of one checkpoint, from before its metadata was read."""

    url: str
    of: Mapping[str, Mark]
    is_deep: bool

    def check(self, store: Store) -> None:
        """Raise `CheckpointGoneError` if one of the files is gone or was written again."""
        now = _marks(store, is_deep=self.is_deep)
        for path, mark in self.of.items():
            if path not in now:
                raise self.gone(path, "is gone")
            if now[path] != mark:
                raise self.gone(path, "was written again")

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
    store: Store,
    *,
    deadline: Deadline,
    options: TransferOptions,
) -> tuple[Source, FileMarks | None]:
    """Open what lies at the root of `store`; return it with marks, None for one of ours.

    The marks are older than the metadata: a save that ends in between is seen by `check`, too.
    Costs one listing for another writer's checkpoint, two if files of it lie in folders. Raises
    as `opening.open_source`.
    """
    taken: list[Mapping[str, Mark]] = []

    def take(*, is_deep: bool) -> None:
        taken.append(_marks(store, is_deep=is_deep))

    again = partial(
        open_source, store, deadline=deadline, options=options, before_foreign=lambda: None
    )
    source = open_source(
        store,
        deadline=deadline,
        options=options,
        before_foreign=partial(take, is_deep=False),
    )
    if isinstance(source, CommittedSource):
        return source, None
    is_deep = _lies_in_folders(source)
    if is_deep:
        take(is_deep=True)
        source = again()
        if isinstance(source, CommittedSource):
            return source, None
    return source, FileMarks(url=store.url, of=taken[-1], is_deep=is_deep)


def _lies_in_folders(source: Source) -> bool:
    return isinstance(source, StockSource) and any(
        "/" in item.relative_path for item in source.metadata.items.values()
    )


def _marks(store: Store, *, is_deep: bool) -> dict[str, Mark]:
    """Return the marks of the files that values or their description lie in.

    By a listing each time: an object's time may be told in other digits when asked for alone.
    Who may read but not list is told of the description only, which a save writes last.
    """
    try:
        entries: list[Entry] = list(store.list("", recursive=is_deep))
    except StorageError as error:
        if error.kind == "not-found":
            return {}
        if error.kind != "permission":
            raise
        log.info("%s: cannot be listed; only its metadata is watched: %s", store.url, error)
        entries = [*_told(store, layout.STOCK_METADATA), *_told(store, INDEX_NAME)]
    return {
        entry.path: (entry.size_bytes, entry.modified_s)
        for entry in entries
        if entry.path.endswith(_MARKED)
    }


def _told(store: Store, path: str) -> list[Entry]:
    """Return what the storage tells of one file; nothing if it is not there, or kept secret."""
    try:
        found = store.stat(path)
    except StorageError as error:
        if error.kind not in {"not-found", "permission"}:
            raise
        return []
    return [Entry(path=path, size_bytes=found.size_bytes, modified_s=found.modified_s)]
