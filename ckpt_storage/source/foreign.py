"""Checkpoints of other writers: stock DCP, torch's sharded safetensors, Hugging Face folders.

They have no checksums of ours: only lengths can be checked. The record of an export of ours has a
checksum of each whole file, which a read of parts cannot use; `verify`, `copy` and exports do.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from ckpt_storage.errors import (
    CheckpointError,
    CheckpointInProgressError,
    FormatError,
    IntegrityError,
    StorageError,
)
from ckpt_storage.format.boxes import Box, Flaw, find_flaw, find_grid
from ckpt_storage.format.documents import MAX_DOCUMENT_BYTES
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.exports import GUARD_NAME
from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA, checked_path
from ckpt_storage.format.safetensors import SafetensorsHeader, parse_safetensors_header
from ckpt_storage.format.shard_item import NeedMoreBytes, parse_tensor_item
from ckpt_storage.format.stock_metadata import StockItem, decode_stock_metadata
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkReader, bytes_read, is_about
from ckpt_storage.transfer.objects import read_twice
from ckpt_storage.transfer.ranges import RangeReader

from .file_versions import FileVersions
from .model import Key, Source

log = logging.getLogger("ckpt_storage")

_K = TypeVar("_K")
_T = TypeVar("_T")

_HEAD_BYTES = 2048
_HEADER_GUESS_BYTES = 64 * 1024
_RESTORE = "Check that the checkpoint is complete; restore the file from a copy."


def _damaged(what: str, path: str, fqn: str | None = None) -> IntegrityError:
    return IntegrityError(what, fqn=fqn, path=path, offset=0, next_step=_RESTORE)


@dataclass(slots=True, kw_only=True)
class ForeignSource(Source):
    """A checkpoint of another writer; `held` has the places of values, as far as they are known."""

    held: dict[Key, ChunkPlace] = field(default_factory=dict)

    def places(self, keys: Sequence[Key]) -> list[ChunkPlace]:
        """Return where chunks and blobs lie."""
        return [self.held[key] for key in keys]

    @property
    def paths(self) -> set[str]:
        """The files that hold the values."""
        return {place.path for place in self.held.values()}

    def explain_missing(self, place: ChunkPlace) -> Exception:
        """Return the error for an absent file."""
        by = f", which {place.fqn} needs," if place.fqn else ""
        what = f"{self.store.url}: {place.path}{by} is missing."
        return _damaged(what, place.path, place.fqn or None)


@dataclass(slots=True, kw_only=True)
class StockSource(ForeignSource):
    """A checkpoint of stock `FileSystemWriter` or `FsspecWriter`, through its `.metadata`."""

    items: Mapping[Key, StockItem]
    options: TransferOptions

    @property
    def paths(self) -> set[str]:
        """The files that hold the values."""
        return {item.relative_path for item in self.items.values()}

    def _item_place(self, key: Key) -> ChunkPlace:
        fqn, offsets = key
        item = self.items.get(key)
        if item is None:
            raise FormatError(
                f"{STOCK_METADATA} says that {fqn} has a part at {offsets} but not where it lies.",
                path=STOCK_METADATA,
                next_step="The save was incomplete; load another checkpoint.",
            )
        if item.transforms:
            raise FormatError(
                f"{fqn} in {item.relative_path} is transformed by {', '.join(item.transforms)}.",
                path=item.relative_path,
                next_step="Load it with torch's FileSystemReader and that extension.",
            )
        chunk = None if offsets is None else self.tensors[fqn].chunk_at(offsets)
        return ChunkPlace(
            path=item.relative_path,
            fqn=fqn,
            start=item.offset,
            size_bytes=item.length,
            sizes=() if chunk is None else chunk.sizes,
            kind="raw" if offsets is None else "opaque",
        )

    def places(self, keys: Sequence[Key]) -> list[ChunkPlace]:
        """Return where chunks and blobs lie; read the heads of items whose place is not known."""
        items = {key: self._item_place(key) for key in keys if key not in self.held}
        self.held.update((key, place) for key, place in items.items() if place.kind == "raw")
        unknown = {key: place for key, place in items.items() if key not in self.held}
        ranges = RangeReader(self.store, self.options)
        try:
            self.held.update(_heads(ranges, unknown, _HEAD_BYTES, self._raw_place))
        except StorageError as error:
            place = next((p for p in unknown.values() if is_about(error, p.path)), None)
            if error.kind != "not-found" or place is None:
                raise
            raise self.explain_missing(place) from error
        return [self.held[key] for key in keys]

    def _raw_place(self, place: ChunkPlace, head: bytes) -> ChunkPlace | NeedMoreBytes:
        parsed = parse_tensor_item(head, item_bytes=place.size_bytes, path=place.path)
        if isinstance(parsed, NeedMoreBytes):
            return parsed
        if parsed is None or parsed.dtype != self.tensors[place.fqn].dtype:
            return place  # only torch can read the item
        if parsed.shape != place.sizes:
            what = (
                f"{place.fqn} in {place.path} has the shape {list(parsed.shape)}; "
                f"{STOCK_METADATA} says {list(place.sizes)}."
            )
            raise FormatError(what, path=place.path, next_step=_RESTORE)
        return replace(
            place,
            start=place.start + parsed.payload_offset,
            size_bytes=parsed.payload_bytes,
            kind="raw",
        )


def _heads(
    ranges: RangeReader,
    places: Mapping[_K, ChunkPlace],
    guess_bytes: int,
    parse: Callable[[ChunkPlace, bytes], _T | NeedMoreBytes],
) -> dict[_K, _T]:
    """Parse the first bytes of items; read more of them where that does not suffice."""

    def read(place: ChunkPlace, size_bytes: int) -> _T | NeedMoreBytes:
        head = bytearray(size_bytes)
        ChunkReader(ranges).read([bytes_read(place, memoryview(head))])
        return parse(place, bytes(head))

    results: dict[_K, _T] = {}
    pending = dict.fromkeys(places, guess_bytes)
    while pending:
        heads = {key: bytearray(min(size, places[key].size_bytes)) for key, size in pending.items()}
        reads = [bytes_read(places[key], memoryview(head)) for key, head in heads.items()]
        ChunkReader(ranges).read(reads)
        pending = {}
        for key, head in heads.items():
            place = places[key]
            first, again = partial(parse, place, bytes(head)), partial(read, place, len(head))
            parsed = read_twice(ranges.store, place.path, first, again)
            if not isinstance(parsed, NeedMoreBytes):
                results[key] = parsed
            elif parsed.total_bytes > len(head):
                pending[key] = parsed.total_bytes
            else:  # pragma: no cover  # parsers request more, or raise
                raise CheckpointError(f"{place.path} cannot be parsed.")
    return results


def tiles_of(boxes: Sequence[Box], shape: tuple[int, ...]) -> tuple[Sequence[Box], Flaw | None]:
    """Return the chunks that are not empty, each once, as a grid if they form one; and a flaw."""
    # Ranks with replicas may each have stored an equal chunk.
    held = list(dict.fromkeys(box for box in boxes if not box.is_empty)) or boxes
    grid = find_grid(shape, held) if len(held) > 1 else None
    return grid or held, None if grid else find_flaw(shape, held)


def _stock_tensor(fqn: str, tensor: TensorRecord) -> TensorRecord:
    if tensor.dtype not in DTYPES:
        what = f"{fqn} has dtype {tensor.dtype}, which this release does not read."
        raise FormatError(
            what, path=STOCK_METADATA, next_step="Load it with torch's FileSystemReader."
        )
    boxes, flaw = tiles_of(tensor.boxes, tensor.shape)
    if flaw is not None:
        raise FormatError(
            f"{STOCK_METADATA} describes chunks of {fqn} that do not make up its shape "
            f"{list(tensor.shape)}: {flaw}.",
            path=STOCK_METADATA,
            next_step="The save was incomplete, or the file is damaged; load another checkpoint.",
        )
    return replace(tensor, boxes=boxes)


def open_stock(
    store: Store, data: bytes, versions: FileVersions, options: TransferOptions
) -> StockSource:
    """Return the source that a stock `.metadata` describes.

    Raises as `decode_stock_metadata`, and `FormatError` if the chunks of a tensor leave a gap, for
    which there are no values.
    """
    metadata = decode_stock_metadata(data)
    return StockSource(
        store=store,
        format="dcp",
        tensors={fqn: _stock_tensor(fqn, tensor) for fqn, tensor in metadata.tensors.items()},
        blobs=metadata.blobs,
        planner_data=metadata.paths,
        versions=versions,
        items=metadata.items,
        options=options,
    )


def open_safetensors(
    store: Store, versions: FileVersions, options: TransferOptions
) -> ForeignSource:
    """Return the source of the safetensors files of a listing, and of their index if it exists.

    With an index, only the tensors that it lists count, and each must be in its file. Raises
    `FormatError`, `IntegrityError`.
    """
    sizes = {path: size_bytes for path, (size_bytes, _) in versions.of.items()}
    weight_map, weights = _list_weights(store, sizes)
    sizes = {name: sizes[name] for name in weights}
    files = {
        name: ChunkPlace(path=name, fqn="", start=0, size_bytes=size_bytes, file_bytes=size_bytes)
        for name, size_bytes in sizes.items()
    }
    ranges = RangeReader(store, options)

    def parse(place: ChunkPlace, head: bytes) -> SafetensorsHeader | NeedMoreBytes:
        return parse_safetensors_header(head, file_bytes=place.size_bytes, path=place.path)

    headers = _heads(ranges, files, _HEADER_GUESS_BYTES, parse)
    sharded = any(header.saved_offsets is not None for header in headers.values())
    boxes: dict[str, list[Box]] = {}
    kinds: dict[str, tuple[str, int, str]] = {}
    places: dict[Key, ChunkPlace] = {}
    for name, file_bytes in sizes.items():
        header = headers[name]
        for fqn, entry in header.entries.items():
            if weight_map is not None and weight_map.get(fqn) != name:
                continue
            offsets = (header.saved_offsets or {}).get(fqn, (0,) * len(entry.shape))
            kind = entry.dtype, len(entry.shape)
            *first, home = kinds.setdefault(fqn, (*kind, name))
            if (fqn, offsets) in places or tuple(first) != kind:
                raise FormatError(
                    f"{fqn} is in {home} and again, or with another dtype or number of "
                    f"dimensions, in {name}.",
                    path=name,
                    next_step="Remove the files of other checkpoints from this folder.",
                )
            boxes.setdefault(fqn, []).append(Box(offsets, entry.shape))
            places[fqn, offsets] = ChunkPlace(
                path=name,
                fqn=fqn,
                start=header.data_offset + entry.start,
                size_bytes=entry.end - entry.start,
                sizes=entry.shape,
                file_bytes=file_bytes,
            )
    for fqn in sorted((weight_map or {}).keys() - boxes.keys())[:1]:
        name = (weight_map or {})[fqn]
        what = f"{store.url}: {name} does not hold {fqn}, which {INDEX_NAME} says it does."
        raise _damaged(what, name, fqn)
    if sharded:
        log.warning(
            "%s: torch's sharded safetensors do not record the tensors' shapes; a missing last "
            "part looks like a smaller tensor",
            store.url,
        )
    tensors = {fqn: _merged(fqn, kinds[fqn][0], held) for fqn, held in boxes.items()}
    return ForeignSource(
        store=store,
        format="dcp_safetensors" if sharded else "safetensors",
        tensors=tensors,
        held=places,
        versions=versions,
    )


def _list_weights(
    store: Store, sizes: Mapping[str, int]
) -> tuple[dict[str, str] | None, list[str]]:
    """Return the index's files by tensor, None without an index, and the weight files to read."""
    weights = sorted(name for name in sizes if name.endswith(".safetensors"))
    if INDEX_NAME not in sizes:
        if GUARD_NAME in sizes:
            raise in_progress(store.url)
        return None, weights

    def read() -> dict[str, str]:
        weight_map = read_weight_map(store)
        if missing := sorted({*weight_map.values()}.difference(weights)):
            if GUARD_NAME in sizes:
                raise in_progress(store.url)
            what = f"{store.url}: {INDEX_NAME} names {missing[0]}, which is missing."
            raise _damaged(what, missing[0])
        return weight_map

    weight_map = read_twice(store, INDEX_NAME, read)
    return weight_map, sorted(set(weight_map.values()))


def _merged(fqn: str, dtype: str, boxes: Sequence[Box]) -> TensorRecord:
    """Return the tensor that the chunks make up; raise if they leave a gap."""
    shape = tuple(max(stops) for stops in zip(*(box.stops for box in boxes), strict=True))
    tiles, flaw = tiles_of(boxes, shape)
    if flaw is not None:
        what = f"The parts of {fqn} do not make up its shape {list(shape)}: {flaw}."
        raise IntegrityError(
            what, fqn=fqn, next_step="Files are missing, or files of another save are among them."
        )
    return TensorRecord(dtype=dtype, shape=shape, boxes=tiles)


def in_progress(url: str) -> CheckpointInProgressError:
    """Return the error that weight files at `url` are being written or replaced."""
    return CheckpointInProgressError(
        f"{url} is still being written, or its writer died.",
        path=f"{url}/{GUARD_NAME}",
        phase="load",
        next_step="Wait for the consolidation, conversion or copy, or call it again: it goes on.",
    )


def read_weight_map(store: Store) -> dict[str, str]:
    """Return the file of each tensor by the index of weight files."""
    data = store.get(INDEX_NAME, max_bytes=MAX_DOCUMENT_BYTES).data
    try:
        weight_map = json.loads(data)["weight_map"]
    except (ValueError, KeyError, TypeError):
        weight_map = None
    if not isinstance(weight_map, dict) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in weight_map.items()
    ):
        what = f"{store.url}: {INDEX_NAME} has no readable weight_map."
        raise FormatError(what, path=INDEX_NAME, next_step=_RESTORE)
    return {fqn: checked_path(name, where=INDEX_NAME) for fqn, name in weight_map.items()}
