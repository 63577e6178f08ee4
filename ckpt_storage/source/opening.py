"""Opens the checkpoint at the root of a store, of any writer, or explains why there is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from ckpt_storage.commit import attempt_files, deletion, publishing, slotlog
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.errors import (
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    FormatError,
    UnsupportedByStoreError,
)
from ckpt_storage.format.commit_record import HeadRef, split_footer
from ckpt_storage.format.names import COMMITS, INDEX_NAME, SAVES, STOCK_METADATA, WEIGHT_NAMES
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.objects import read_twice, stat_or_none
from ckpt_storage.transfer.workers import some_at_once

from .file_versions import FileVersions, listed
from .foreign import ForeignSource, StockSource, open_safetensors, open_stock, read_weight_map
from .model import CommittedSource, Source, read_manifest

_RANK_LOCAL = re.compile(r"__[0-9]+\.metadata")
"""The metadata of one rank (`use_collectives=False`)."""

_OWN_FOLDERS = frozenset({f"{COMMITS}/", f"{SAVES}/"})

_STATS_AT_ONCE = 8

_MAX_ATTEMPTS = 5
"""Reads of the head while saves keep overwriting it."""


def _committed(store: Store, options: TransferOptions) -> tuple[CommitLog, CommittedSource | None]:
    for attempts_left in reversed(range(_MAX_ATTEMPTS)):
        commit_log = slotlog.read_log(store, for_reader=True)
        if commit_log.head is None:
            break
        if not store.capabilities.is_remote:
            # On remote storage it costs two requests, which `open_newest` and publishers make.
            publishing.check_newest(store, commit_log)
        try:
            manifest = read_manifest(store, commit_log.head)
        except CheckpointGoneError:
            # It was overwritten and freed since its head was read.
            if not attempts_left:
                raise
        else:
            return commit_log, CommittedSource(store, commit_log.head, manifest, options)
    return commit_log, None


def open_source(store: Store, options: TransferOptions) -> Source:
    """Return the checkpoint at the root of `store`, of any writer.

    Costs two small reads, side by side, and the manifest for a checkpoint of ours. Otherwise the
    folder is listed before the metadata of another writer is read; twice if files lie in folders.

    Raises `CheckpointNotFoundError`, `CheckpointInProgressError`, `CheckpointGoneError`,
    `FormatError`, `UnsafeContentError`, `IntegrityError`, `StorageError`.
    """
    is_deep = False
    while True:
        commit_log, ours = _committed(store, options)
        if ours is not None:
            return ours
        source = _open_foreign(store, commit_log, options, is_deep=is_deep)
        if source is None:
            continue
        if is_deep or not any("/" in path for path in source.paths):
            return source
        # The listing comes first, so that it shows a save that ends before `.metadata` is read.
        is_deep = True


def open_newest(store: Store, options: TransferOptions) -> Source:
    """Do as `open_source`, and check on remote storage, too, that no other tool saved over ours.

    That costs two small requests. Raises `FormatError` for a newer save of another tool.
    """
    source = open_source(store, options)
    if isinstance(source, CommittedSource) and store.capabilities.is_remote:
        publishing.check_newest(store, CommitLog.ending_with(source.record))
    return source


def _open_foreign(
    store: Store, commit_log: CommitLog, options: TransferOptions, *, is_deep: bool
) -> ForeignSource | None:
    """Return another writer's checkpoint; its files are listed before its metadata is read.

    Returns None if a save of ours was committed since `commit_log` was read.
    Where nothing can be listed, as over HTTP, the files have the names that its readers know.
    """
    is_listed = True
    try:
        entries = listed(store, recursive=is_deep)
    except UnsupportedByStoreError:
        entries, is_listed = _look_for_known_files(store), False
        if not entries:
            raise
    versions = FileVersions.of_listing(entries, is_deep=is_deep, is_listed=is_listed)

    def read_stock() -> HeadRef | StockSource | None:
        content = publishing.read_stock(store)
        if content is None:
            return None
        # Without a footer it may lie beside the slots of a checkpoint of ours that was deleted.
        head_ref = split_footer(content.data)[1]
        return head_ref or open_stock(store, content.data, versions, options)

    stock = read_twice(store, STOCK_METADATA, read_stock)
    if isinstance(stock, StockSource):
        return stock
    if stock is not None and commit_log.last is None:
        if slotlog.read_log(store, for_reader=True).last is not None:
            return None
        raise FormatError(
            f"{store.url} has .metadata of save {stock.save_id} in slot {stock.slot}, but "
            "slot 1 cannot be found: there is no commits/ folder, or it lost files.",
            path=COMMITS,
            next_step="Copy the whole checkpoint, commits/ included; torch's own readers "
            "can load it as it is, without checksums.",
        )
    if stock is not None:
        publishing.check_slots(store, commit_log, publishing.read_stock_tail(store))
    if any(name.endswith(".safetensors") for name in versions.of) and commit_log.last is None:
        return open_safetensors(store, versions, options)
    raise _no_checkpoint(store, commit_log, [entry.path for entry in entries])


def _look_for_known_files(store: Store) -> Sequence[ObjectInfo]:
    """Return what is there of the metadata of stock DCP, and of weight files and their index."""
    entries = _stats(store, [STOCK_METADATA, INDEX_NAME, *WEIGHT_NAMES])
    if any(entry.path == INDEX_NAME for entry in entries):
        weight_files = set(read_weight_map(store).values())
        entries += _stats(store, sorted(weight_files.difference(WEIGHT_NAMES)))
    return entries


def _stats(store: Store, paths: Sequence[str]) -> list[ObjectInfo]:
    looks = [partial(stat_or_none, store, path) for path in paths]
    return [entry for entry in some_at_once(looks, _STATS_AT_ONCE) if entry is not None]


def _no_checkpoint(store: Store, commit_log: CommitLog, names: list[str]) -> Exception:
    """Return the error that explains why nothing can be loaded."""
    deleted = deletion.tombstone_of(store, commit_log)
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
    # A refused save leaves empty folders.
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
