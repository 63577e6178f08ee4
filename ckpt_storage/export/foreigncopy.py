"""Checkpoints of other writers, copied file by file.

That a half copy looks like none is `foreignfolder`'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial

from ckpt_storage.errors import IntegrityError
from ckpt_storage.format.names import INDEX_NAME, PROBE_PREFIX, STOCK_METADATA
from ckpt_storage.source.filemarks import FileMarks, told_from_damage
from ckpt_storage.source.foreign import StockSource
from ckpt_storage.source.model import Source
from ckpt_storage.source.sourcekeys import value_keys
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.store import Store

from .filecopies import FileCopier
from .foreignfolder import Content, ForeignFolder, is_of_the_work
from .partcopies import FileToCopy


def copy_foreign(
    source: Source,
    source_store: Store,
    target: Store,
    copier: FileCopier,
    *,
    marks: FileMarks,
    source_url: str,
    overwrite: bool,
) -> int:
    """Copy all files below the root of a checkpoint of another writer; return their bytes.

    `marks` are those the source was opened with: what shows the copy to readers is written only
    after they held for all that was read. Called again after it was cut, sends what is missing.
    Raises as `ForeignFolder.begin`, `IntegrityError` if a file that the checkpoint needs is not
    there, or shorter, and `CheckpointGoneError` if another save touched the source meanwhile.
    """
    entries = [entry for entry in source_store.list("") if _is_content(entry)]
    _check_whole(source, entries)
    sizes = {entry.path: entry.size_bytes for entry in entries}
    last = STOCK_METADATA if source.format == "dcp" else INDEX_NAME
    files = [
        FileToCopy(path=path, target=path, size_bytes=size) for path, size in sorted(sizes.items())
    ]
    content: Content = "metadata"
    if source.format != "dcp":
        content = "indexed" if last in sizes else "unindexed"
    folder = ForeignFolder(target, list(sizes), content=content)
    identity = _identity(source_url, entries)
    is_resumed = folder.begin(identity, source=source_url, overwrite=overwrite)
    first = [file for file in files if file.path != last]
    with told_from_damage(partial(marks.check, source_store)):
        copier.copy(copier.check(first) if is_resumed else first)
        shown = _read_whole(source_store, last, sizes[last]) if last in sizes else None
    marks.check(source_store)
    if source.format == "dcp" and shown is not None:
        target.replace(last, shown)
    else:
        folder.show(shown)
    folder.end()
    return sum(sizes.values())


def _is_content(entry: ObjectInfo) -> bool:
    name = entry.path.rpartition("/")[2]
    return not (
        entry.path.endswith("/") or is_of_the_work(entry.path) or name.startswith(PROBE_PREFIX)
    )


def _identity(source_url: str, entries: Sequence[ObjectInfo]) -> str:
    """Return what stands for the content: where it lies, and lengths and times of its files."""
    listed = sorted((entry.path, entry.size_bytes, entry.modified_s) for entry in entries)
    return hashlib.sha256(json.dumps([source_url, listed]).encode()).hexdigest()


def _read_whole(store: Store, path: str, size_bytes: int) -> bytes:
    data = store.get(path, max_bytes=size_bytes).data
    if len(data) != size_bytes:
        raise IntegrityError(
            f"{path} has changed while the checkpoint was being copied.",
            path=path,
            offset=0,
            next_step="Copy again.",
        )
    return data


def _check_whole(source: Source, entries: Sequence[ObjectInfo]) -> None:
    """Refuse a checkpoint of which a file is missing, or shorter than what it must hold."""
    sizes = {entry.path: entry.size_bytes for entry in entries}
    if isinstance(source, StockSource):
        # Whole items, with what stands behind a tensor's bytes.
        for (fqn, _), item in source.metadata.items.items():
            _check_end(sizes, item.relative_path, fqn, item.offset + item.length)
        return
    keys = value_keys(source)
    source.require(keys)
    for key in keys:
        place = source.place(*key)
        _check_end(sizes, place.path, place.fqn, place.start + place.size_bytes)


def _check_end(sizes: Mapping[str, int], path: str, fqn: str, end: int) -> None:
    size_bytes = sizes.get(path)
    if size_bytes is None or size_bytes < end:
        what = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
        raise IntegrityError(
            f"{path} {what}; {fqn} ends at its byte {end}.",
            path=path,
            fqn=fqn,
            offset=size_bytes or 0,
            next_step="Restore the file from a copy, or copy another checkpoint.",
        )
