"""Files of a checkpoint as a source that is copied: paths, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckpt_storage.errors import IntegrityError
from ckpt_storage.source.foreign import StockSource
from ckpt_storage.source.model import Key, Source, TensorInfo, gone
from ckpt_storage.source.sourcekeys import value_keys
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace

from .layout import Layout, Stored, out_file
from .output import Site


def lay_out_copies(files: Iterable[tuple[str, str, int, int | None]]) -> Layout:
    """Return files that are those of the source: path, name here, length, CRC-32C if known."""
    return Layout(
        files=tuple(
            out_file(number, name, [Stored(path=path, size_bytes=size_bytes)], crc32c=crc32c)
            for number, (path, name, size_bytes, crc32c) in enumerate(files, 1)
        )
    )


class CopiedFiles:
    """Files as a source: there are no tensors, only paths.

    `save_id` is that of the checkpoint that they belong to, if it is one of ours.
    """

    def __init__(self, site: Site, save_id: str | None) -> None:
        self.tensors: Mapping[str, TensorInfo] = {}
        self._site = site
        self._save_id = save_id

    def require(self, chunks: Iterable[Key]) -> None:
        """Fetch nothing."""

    def renew(self, store: Store, deadline: Deadline) -> None:
        """Take over nothing."""

    def place(self, fqn: str, offsets: tuple[int, ...] | None) -> ChunkPlace:
        """Raise: there are no values."""
        raise KeyError((fqn, offsets))

    def explain_missing(self, place: ChunkPlace) -> Exception:
        """Return the error to raise when a file is not there."""
        moved = None
        if self._save_id is not None:
            moved = gone(self._site.source, self._save_id, place.path)
        return moved or IntegrityError(
            f"{self._site.setting.source.url}: {place.path} is missing.",
            path=place.path,
            offset=0,
            next_step="Restore the file from a copy, or copy another checkpoint.",
        )


def check_whole(source: Source, entries: Sequence[ObjectInfo]) -> None:
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
