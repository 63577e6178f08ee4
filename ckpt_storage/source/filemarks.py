"""Whether another writer touched its files while they were read.

Such files bear no checksums and names that the next save uses again: values of two saves would mix
unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ckpt_storage.commit import publishing, slotlog
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.errors import (
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    FormatError,
    IntegrityError,
    StorageError,
)
from ckpt_storage.format.commit_record import split_footer
from ckpt_storage.format.names import COMMITS, INDEX_NAME, SAVES, STOCK_METADATA
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import side_by_side

from .foreign import StockSource, open_safetensors, open_stock
from .model import CommittedSource, Source, read_manifest

_RANK_LOCAL = re.compile(r"__[0-9]+\.metadata")
"""The metadata of one rank (`use_collectives=False`)."""

_MOST_LOOKS = 5
"""How often the head is looked for while saves overwrite what was found."""


def _committed(
    store: Store, deadline: Deadline, options: TransferOptions
) -> tuple[CommitLog, CommittedSource | None]:
    """Return the slots, and the checkpoint at their head if there is one."""
    for looks_left in reversed(range(_MOST_LOOKS)):
        found = slotlog.read_log(store, for_reader=True)
        if found.head is None:
            break
        if not store.capabilities.is_remote:
            # Elsewhere it costs two requests: `open_newest`, and who publishes, look there.
            publishing.check_newest(store, found.head)
        try:
            manifest = read_manifest(store, found.head)
        except CheckpointGoneError:
            # Overwritten, and freed, since the look at the head.
            if not looks_left:
                raise
        else:
            return found, CommittedSource(store, found.head, manifest, deadline, options)
    return found, None


def open_source(store: Store, *, deadline: Deadline, options: TransferOptions) -> Source:
    """Return the checkpoint at the root of `store`, whatever wrote it. Raises as `find_source`."""
    return find_source(store, deadline=deadline, options=options)[0]


def find_source(
    store: Store,
    *,
    deadline: Deadline,
    options: TransferOptions,
    entries: Sequence[ObjectInfo] | None = None,
) -> tuple[Source, Sequence[ObjectInfo]]:
    """Return the checkpoint at the root of `store`, and its files if another writer wrote it.

    Costs two small reads, side by side, and the manifest for one of ours. Else the folder is listed
    before anything is read that tells of another writer's tensors, unless `entries` are given.

    Raises `CheckpointNotFoundError`, `CheckpointInProgressError`, `CheckpointGoneError`,
    `FormatError`, `UnsafeContentError`, `IntegrityError`, `StorageError`.
    """
    found, ours = _committed(store, deadline, options)
    if ours is not None:
        return ours, ()
    if entries is None:
        entries = listed(store)
    current = slotlog.read_stock(store)
    if current is not None:
        named = split_footer(current.data)[1]
        if named is None:
            # Perhaps under the name of one of ours that was deleted: its slots stay.
            return open_stock(store, current.data, options=options, deadline=deadline), entries
        if found.last is None:
            raise FormatError(
                f"{store.url} has .metadata of save {named.save_id} in slot {named.slot}, but "
                "slot 1 cannot be found: there is no commits/ folder, or it lost files.",
                path=COMMITS,
                next_step="Copy the whole checkpoint, commits/ included; torch's own readers "
                "can load it as it is, without checksums.",
            )
    names = [entry.path for entry in entries]
    if any(name.endswith(".safetensors") for name in names) and found.last is None:
        return open_safetensors(store, entries, options=options, deadline=deadline), entries
    raise _nothing(store, found, names)


def listed(store: Store, folder: str = "", *, recursive: bool = False) -> Sequence[ObjectInfo]:
    """Return what lies in a folder; nothing if that is not there."""
    return slotlog.if_there(partial(store.list, folder, recursive=recursive)) or ()


def _nothing(store: Store, found: CommitLog, names: list[str]) -> Exception:
    """Return the error that says why nothing can be loaded, and what to do."""
    last = found.last
    if last is not None and last.type == "deleted":
        return CheckpointGoneError(
            f"{store.url} was deleted at {last.created_at} by process {last.pid} on {last.host}.",
            path=store.url,
            phase="load",
            next_step="Load another checkpoint.",
        )
    local = next((name for name in names if _RANK_LOCAL.fullmatch(name)), None)
    if local is not None and f"{SAVES}/" not in names:
        return FormatError(
            f"{store.url} was saved with use_collectives=False: every rank has metadata of its "
            f"own ({local}).",
            path=local,
            next_step="Load it with torch's FileSystemReader on as many ranks as saved it.",
        )
    begun = None
    if f"{SAVES}/" in names:
        begun = "a save that has not committed"
    elif any(name.endswith(".distcp") for name in names):
        begun = ".distcp files but no .metadata, so a save by another writer"
    if begun is not None:
        return CheckpointInProgressError(
            f"{store.url} holds {begun}: it is still running, or it died.",
            path=store.url,
            phase="load",
            next_step="Wait for the save to end, or load an earlier checkpoint.",
        )
    folders = [name for name in names if name.endswith("/")]
    what = "is empty or does not exist"
    step = "Check the path; ckpt_storage.list_checkpoints(root) shows what is there."
    if names:
        what = f"holds no checkpoint, but {', '.join(sorted(names)[:3])}"
        if folders:
            step = f"Give the folder of one checkpoint, such as {store.url}/{max(folders)}"
    return CheckpointNotFoundError(
        f"{store.url} {what}.", path=store.url, phase="load", next_step=step
    )


_MARKED = (STOCK_METADATA, INDEX_NAME, ".distcp", ".safetensors")
"""How the names of files end that another writer's checkpoint consists of."""

_DESCRIBING = frozenset({STOCK_METADATA, INDEX_NAME})

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
            wanted = [path for path in self.of if path in paths or path in _DESCRIBING]
            asked = [partial(self._is_as_it_was, store, path) for path in wanted]
            if len(asked) <= _MOST_ASKED and all(side_by_side(store, asked)):
                return
        # By a listing: an object's time may be told in other digits when asked for alone.
        now = _marks_of(listed(store, recursive=self.is_deep))
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


def watch_file(store: Callable[[], Store], path: str) -> Callable[[], None]:
    """Return what raises `CheckpointGoneError` if a file changed since this call.

    `store` returns the store of the phase. Raises `StorageError` if the file is not there now.
    """
    before = store().stat(path)
    marks = FileMarks(url=store().url, of={}, is_deep=False)

    def check() -> None:
        now = slotlog.stat_if_there(store(), path)
        if now != before:
            raise marks.gone(path, "was written again" if now else "is gone")

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
        entries = listed(store, recursive=True)
        source, entries = find_source(store, deadline=deadline, options=options, entries=entries)
    if isinstance(source, CommittedSource):
        return source, None
    return source, FileMarks(url=store.url, of=_marks_of(entries), is_deep=is_deep)


def open_newest(
    store: Store, *, deadline: Deadline, options: TransferOptions
) -> tuple[Source, FileMarks | None]:
    """Do as `open_marked`, and look on remote storage, too, whether another tool saved over ours.

    That takes two small requests more. Raises `FormatError` for a newer save of another tool.
    """
    source, marks = open_marked(store, deadline=deadline, options=options)
    if isinstance(source, CommittedSource) and store.capabilities.is_remote:
        publishing.check_newest(store, source.record)
    return source, marks


def _lies_in_folders(source: Source) -> bool:
    return isinstance(source, StockSource) and any(
        "/" in item.relative_path for item in source.metadata.items.values()
    )


def _marks_of(entries: Iterable[ObjectInfo]) -> dict[str, Mark]:
    """Return the marks of the files that values or their description lie in."""
    return {
        entry.path: (entry.size_bytes, entry.modified_s)
        for entry in entries
        if entry.path.endswith(_MARKED)
    }
