"""What lies at the root of a store, whatever wrote it; and why nothing can be loaded from there."""

from __future__ import annotations

import re

from ckpt_storage.commit import attempt_files, deletion, publishing, slotlog
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.errors import (
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    FormatError,
)
from ckpt_storage.format.commit_record import HeadRef, split_footer
from ckpt_storage.format.names import COMMITS, SAVES, STOCK_METADATA
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.rereading import read_twice

from .file_versions import FileVersions, listed
from .foreign import ForeignSource, StockSource, open_safetensors, open_stock
from .model import CommittedSource, Source, read_manifest

_RANK_LOCAL = re.compile(r"__[0-9]+\.metadata")
"""The metadata of one rank (`use_collectives=False`)."""

_OWN_FOLDERS = frozenset({f"{COMMITS}/", f"{SAVES}/"})

_MAX_LOOKS = 5
"""How often the head is looked for while saves overwrite what was found."""


def _committed(store: Store, options: TransferOptions) -> tuple[CommitLog, CommittedSource | None]:
    """Return the slots, and the checkpoint at their head if there is one."""
    for looks_left in reversed(range(_MAX_LOOKS)):
        found = slotlog.read_log(store, for_reader=True)
        if found.head is None:
            break
        if not store.capabilities.is_remote:
            # Elsewhere it costs two requests: `open_newest`, and who publishes, look there.
            publishing.check_newest(store, found)
        try:
            manifest = read_manifest(store, found.head)
        except CheckpointGoneError:
            # Overwritten, and freed, since the look at the head.
            if not looks_left:
                raise
        else:
            return found, CommittedSource(store, found.head, manifest, options)
    return found, None


def open_source(store: Store, options: TransferOptions) -> Source:
    """Return the checkpoint at the root of `store`, whatever wrote it.

    Costs two small reads, side by side, and the manifest for one of ours. Else the folder is listed
    before anything is read that tells of another writer's tensors; twice if they lie in folders.

    Raises `CheckpointNotFoundError`, `CheckpointInProgressError`, `CheckpointGoneError`,
    `FormatError`, `UnsafeContentError`, `IntegrityError`, `StorageError`.
    """
    is_deep = False
    while True:
        found, ours = _committed(store, options)
        if ours is not None:
            return ours
        source = _open_foreign(store, found, options, is_deep=is_deep)
        if is_deep or not any("/" in path for path in source.paths):
            return source
        # A save that ends between the listing and `.metadata` is seen by it.
        is_deep = True


def open_newest(store: Store, options: TransferOptions) -> Source:
    """Do as `open_source`, and look on remote storage, too, whether another tool saved over ours.

    That takes two small requests more. Raises `FormatError` for a newer save of another tool.
    """
    source = open_source(store, options)
    if isinstance(source, CommittedSource) and store.capabilities.is_remote:
        publishing.check_newest(store, CommitLog.ending_with(source.record))
    return source


def _open_foreign(
    store: Store, found: CommitLog, options: TransferOptions, *, is_deep: bool
) -> ForeignSource:
    """Return another writer's checkpoint; its files are listed before their description is read."""
    entries = listed(store, recursive=is_deep)
    marks = FileVersions.of_listing(entries, is_deep=is_deep)

    def read_stock() -> HeadRef | StockSource | None:
        content = slotlog.read_stock(store)
        if content is None:
            return None
        # One without a footer may bear the name of one of ours that was deleted: its slots stay.
        named = split_footer(content.data)[1]
        return named or open_stock(store, content.data, marks, options)

    named = read_twice(store, STOCK_METADATA, read_stock)
    if isinstance(named, StockSource):
        return named
    if named is not None and found.last is None:
        raise FormatError(
            f"{store.url} has .metadata of save {named.save_id} in slot {named.slot}, but "
            "slot 1 cannot be found: there is no commits/ folder, or it lost files.",
            path=COMMITS,
            next_step="Copy the whole checkpoint, commits/ included; torch's own readers "
            "can load it as it is, without checksums.",
        )
    if named is not None:
        publishing.check_slots(store, found, slotlog.read_stock_tail(store))
    if any(name.endswith(".safetensors") for name in marks.of) and found.last is None:
        return open_safetensors(store, marks, options)
    raise _nothing(store, found, [entry.path for entry in entries])


def _nothing(store: Store, found: CommitLog, names: list[str]) -> Exception:
    """Return the error that says why nothing can be loaded, and what to do."""
    deleted = deletion.tombstone_of(store, found)
    if deleted is not None:
        by = f"by process {deleted.pid} on {deleted.host}"
        return CheckpointGoneError(
            f"{store.url} was deleted at {deleted.created_at} {by}.",
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
    if f"{SAVES}/" in names and attempt_files.attempts_there(store):
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
    # A save that was refused leaves its folders empty.
    names = [name for name in names if name not in _OWN_FOLDERS]
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
