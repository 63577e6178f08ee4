"""Checkpoints that others wrote: stock DCP, torch's sharded safetensors, Hugging Face folders.

They carry no checksums of ours: only lengths can be checked.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ckpt_storage.errors import (
    CheckpointError,
    CheckpointInProgressError,
    FormatError,
    IntegrityError,
    StorageError,
)
from ckpt_storage.format.boxes import Box, find_flaw
from ckpt_storage.format.documents import MOST_DOCUMENT_BYTES
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.format.names import BLOCKER, INDEX_NAME, STOCK_METADATA, checked_path
from ckpt_storage.format.safetensors import SafetensorsHeader, parse_safetensors_header
from ckpt_storage.format.shard_item import NeedMoreBytes, parse_tensor_item
from ckpt_storage.format.stock_metadata import StockMetadata, decode_stock_metadata
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkReader, bytes_read, concerns
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.ranges import RangeRead, RangeReader

from .model import Key, SourceFormat, TensorInfo

log = logging.getLogger("ckpt_storage")

_HEAD_BYTES = 2048
_HEADER_GUESS_BYTES = 64 * 1024
_RESTORE = "Check that the checkpoint is complete; restore the file from a copy."


def _damaged(what: str, path: str, fqn: str | None = None) -> IntegrityError:
    return IntegrityError(what, fqn=fqn, path=path, offset=0, next_step=_RESTORE)


@dataclass(slots=True, kw_only=True)
class ForeignSource:
    """A checkpoint of another writer; `held` says where values lie, as far as that is known."""

    store: Store
    format: SourceFormat
    tensors: Mapping[str, TensorInfo]
    blobs: frozenset[str] = frozenset()
    planner_data: Mapping[str, tuple[str | int, ...]] | None = None
    save_id: str | None = None
    held: dict[Key, ChunkPlace] = field(default_factory=dict)

    def renew(self, store: Store, deadline: Deadline) -> None:
        """Take over the store of the step that begins."""
        del deadline
        self.store = store

    def places(self, keys: Sequence[Key]) -> list[ChunkPlace]:
        """Return where chunks and blobs lie."""
        return [self.held[key] for key in keys]

    def explain_missing(self, place: ChunkPlace) -> Exception:
        """Return the error for a file that is not there."""
        what = f"{self.store.url}: {place.path}, which {place.fqn} needs, is missing."
        return _damaged(what, place.path, place.fqn)


@dataclass(slots=True, kw_only=True)
class StockSource(ForeignSource):
    """A checkpoint of stock `FileSystemWriter` or `FsspecWriter`, through its `.metadata`."""

    metadata: StockMetadata
    options: TransferOptions
    deadline: Deadline
    _sizes: dict[Key, tuple[int, ...]] = field(init=False)
    _pacer: Pacer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._sizes = {
            (fqn, box.offsets): box.sizes
            for fqn, info in self.tensors.items()
            for box in info.boxes
        }
        self._pacer = Pacer(self.options.thread_count)

    def renew(self, store: Store, deadline: Deadline) -> None:
        """Take over the store and deadline of the step that begins."""
        self.store, self.deadline = store, deadline

    def _item_place(self, key: Key) -> ChunkPlace:
        fqn, offsets = key
        item = self.metadata.items.get(key)
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
        return ChunkPlace(
            path=checked_path(item.relative_path, where=STOCK_METADATA),
            fqn=fqn,
            start=item.offset,
            size_bytes=item.length,
            kind="raw" if offsets is None else "opaque",
        )

    def places(self, keys: Sequence[Key]) -> list[ChunkPlace]:
        """Return where chunks and blobs lie; the heads of items not known yet are read."""
        items = {key: self._item_place(key) for key in keys if key not in self.held}
        self.held.update((key, place) for key, place in items.items() if place.kind == "raw")
        head_bytes = {key: _HEAD_BYTES for key in items if key not in self.held}
        while head_bytes:
            heads = {
                key: bytearray(min(size, items[key].size_bytes)) for key, size in head_bytes.items()
            }
            self._read([(items[key], head) for key, head in heads.items()])
            head_bytes = {}
            for key, head in heads.items():
                found = self._raw_place(key, items[key], head)
                if isinstance(found, NeedMoreBytes):
                    head_bytes[key] = found.total_bytes
                else:
                    self.held[key] = found
        return [self.held[key] for key in keys]

    def _read(self, heads: Sequence[tuple[ChunkPlace, bytearray]]) -> None:
        ranges = RangeReader(self.store, self.options, self.deadline, pacer=self._pacer)
        try:
            ChunkReader(ranges).read([bytes_read(place, memoryview(head)) for place, head in heads])
        except StorageError as error:
            place = next((place for place, _ in heads if concerns(error, place.path)), None)
            if error.kind != "not-found" or place is None:
                raise
            raise self.explain_missing(place) from error

    def _raw_place(
        self, key: Key, place: ChunkPlace, head: bytearray
    ) -> ChunkPlace | NeedMoreBytes:
        parsed = parse_tensor_item(bytes(head), item_bytes=place.size_bytes, path=place.path)
        if isinstance(parsed, NeedMoreBytes):
            return parsed
        if parsed is None or parsed.dtype != self.tensors[place.fqn].dtype:
            return place  # torch itself has to read the whole item
        if parsed.shape != self._sizes[key]:
            raise FormatError(
                f"{place.fqn} in {place.path} has the shape {list(parsed.shape)}; "
                f"{STOCK_METADATA} says {list(self._sizes[key])}.",
                path=place.path,
                next_step=_RESTORE,
            )
        return replace(
            place,
            start=place.start + parsed.payload_offset,
            size_bytes=parsed.payload_bytes,
            kind="raw",
        )


def _stock_info(fqn: str, tensor: TensorRecord) -> TensorInfo:
    if tensor.dtype not in DTYPES:
        raise FormatError(
            f"{fqn} has dtype {tensor.dtype}, which this release does not read.",
            path=STOCK_METADATA,
            next_step="Load it with torch's FileSystemReader.",
        )
    # Ranks that hold replicas may each have stored an equal chunk.
    flaw = find_flaw(tensor.shape, list(dict.fromkeys(tensor.boxes)))
    if flaw is not None:
        raise FormatError(
            f"{STOCK_METADATA} describes chunks of {fqn} that do not make up its shape "
            f"{list(tensor.shape)}: {flaw}.",
            path=STOCK_METADATA,
            next_step="The save was incomplete, or the file is damaged; load another checkpoint.",
        )
    return TensorInfo(fqn=fqn, dtype=tensor.dtype, shape=tensor.shape, boxes=tensor.boxes)


def open_stock(
    store: Store, data: bytes, *, options: TransferOptions, deadline: Deadline
) -> StockSource:
    """Return the source that a stock `.metadata` describes.

    Raises as `decode_stock_metadata`, and `FormatError` if chunks do not make up their tensor: of
    what none holds, a reader could only make values up.
    """
    metadata = decode_stock_metadata(data)
    return StockSource(
        store=store,
        format="dcp",
        tensors={fqn: _stock_info(fqn, tensor) for fqn, tensor in metadata.tensors.items()},
        blobs=metadata.blobs,
        planner_data=metadata.paths,
        metadata=metadata,
        options=options,
        deadline=deadline,
    )


def open_safetensors(
    store: Store, entries: Iterable[ObjectInfo], *, options: TransferOptions, deadline: Deadline
) -> ForeignSource:
    """Return the source that the safetensors files among `entries`, and an index if any, make.

    With an index only the files that it names count, and each must hold what it says. Raises
    `FormatError`, `IntegrityError`.
    """
    sizes = {entry.path: entry.size_bytes for entry in entries}
    weight_map = _read_index(store) if INDEX_NAME in sizes else None
    weights = sorted(name for name in sizes if name.endswith(".safetensors"))
    if weight_map is not None:
        listed = sorted(set(weight_map.values()))
        missing = [name for name in listed if name not in weights]
        if missing:
            what = f"{store.url}: {INDEX_NAME} names {missing[0]}, which is missing."
            raise _damaged(what, missing[0])
        weights = listed
    sizes = {name: sizes[name] for name in weights}
    headers = _read_headers(store, sizes, options=options, deadline=deadline)
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
                file_bytes=file_bytes,
            )
    for fqn in sorted((weight_map or {}).keys() - boxes.keys())[:1]:
        name = (weight_map or {})[fqn]
        what = f"{store.url}: {name} does not hold {fqn}, which {INDEX_NAME} says it does."
        raise _damaged(what, name, fqn)
    if sharded:
        log.warning(
            "%s: torch's sharded safetensors do not record the tensors' shapes; a missing last "
            "part cannot be told from a smaller tensor",
            store.url,
        )
    tensors = {fqn: _merged(fqn, kinds[fqn][0], held) for fqn, held in boxes.items()}
    return ForeignSource(
        store=store,
        format="dcp_safetensors" if sharded else "safetensors",
        tensors=tensors,
        held=places,
    )


def _merged(fqn: str, dtype: str, boxes: Sequence[Box]) -> TensorInfo:
    """Return the tensor that chunks make: as large as they reach, without a gap."""
    shape = tuple(max(stops) for stops in zip(*(box.stops for box in boxes), strict=True))
    held = [box for box in boxes if not box.is_empty]
    flaw = find_flaw(shape, held) if held else None
    if flaw is not None:
        raise IntegrityError(
            f"The parts of {fqn} do not make up its shape {list(shape)}: {flaw}.",
            fqn=fqn,
            next_step="Files are missing, or those of another save are among them.",
        )
    return TensorInfo(fqn=fqn, dtype=dtype, shape=shape, boxes=boxes)


def in_progress(url: str) -> CheckpointInProgressError:
    """Return the error that the weight files at `url` are not all there yet."""
    return CheckpointInProgressError(
        f"{url} is still being written, or its writer died.",
        path=f"{url}/{INDEX_NAME}",
        phase="load",
        next_step="Wait for the consolidation, conversion or copy, or call it again: it goes on.",
    )


def _read_index(store: Store) -> dict[str, str]:
    data = store.get(INDEX_NAME, max_bytes=MOST_DOCUMENT_BYTES).data
    if data == BLOCKER:
        raise in_progress(store.url)
    try:
        weight_map = json.loads(data)["weight_map"]
    except (ValueError, KeyError, TypeError):
        weight_map = None
    if not isinstance(weight_map, dict) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in weight_map.items()
    ):
        raise FormatError(
            f"{store.url}: {INDEX_NAME} has no readable weight_map.",
            path=INDEX_NAME,
            next_step=_RESTORE,
        )
    return {fqn: checked_path(name, where=INDEX_NAME) for fqn, name in weight_map.items()}


def _read_headers(
    store: Store, sizes: Mapping[str, int], *, options: TransferOptions, deadline: Deadline
) -> dict[str, SafetensorsHeader]:
    """Return the headers of files of these lengths in bytes, read side by side."""
    headers: dict[str, SafetensorsHeader] = {}
    wanted = {name: min(_HEADER_GUESS_BYTES, size) for name, size in sizes.items()}

    def parse(name: str, view: memoryview) -> None:
        parsed = parse_safetensors_header(bytes(view), file_bytes=sizes[name], path=name)
        if not isinstance(parsed, NeedMoreBytes):
            headers[name] = parsed
            return
        if parsed.total_bytes <= len(view):  # pragma: no cover  # the parser asks for more or ends
            raise CheckpointError(f"{name} cannot be parsed.")
        again[name] = min(parsed.total_bytes, sizes[name])

    while wanted:
        again: dict[str, int] = {}
        reads = [
            RangeRead(
                path=name, start=0, stop=stop, done=partial(parse, name), file_bytes=sizes[name]
            )
            for name, stop in wanted.items()
        ]
        RangeReader(store, options, deadline).run(reads)
        wanted = again
    return headers
