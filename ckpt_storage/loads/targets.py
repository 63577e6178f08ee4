"""One rank's part of a load: targets of its plan, the requests that fill them, the commit to them.

Where bytes lie it learns from `source`, how they are read from `transfer.chunks`.
"""

from __future__ import annotations

import dataclasses
import io
import math
import threading
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cache

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ckpt_storage.errors import FormatError, IntegrityError, InvalidInputError, StorageError
from ckpt_storage.format.boxes import Box, GridBoxes, WindowCopy
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.selections import box_selection
from ckpt_storage.inspect.torchload import load_whole, scan_blob
from ckpt_storage.source.model import Source
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, bytes_read, concerns

from .resolving import dtype_name, is_freed, target_resolver
from .sharedreads import fits_units
from .sharing import Key


class TensorTarget:
    """A tensor, or a part of one, that gets the elements of a selection; autograd sees none of it.

    `dtype` is that of the stored elements.
    """

    __slots__ = ("_dtype", "_lock", "_tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self._tensor = tensor
        self._dtype = dtype
        # Several windows of one target arrive in several threads.
        self._lock = threading.Lock() if tensor.device.type != "cpu" else None

    @property
    def memory(self) -> memoryview | None:
        """The memory of the tensor, if it takes the stored bytes as they are."""
        return _direct_view(self._tensor, self._dtype)

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Copy elements out of a window, converted to the tensor's own type."""
        if self._tensor.is_inference():
            # The mode is a thread's own, and such a tensor can be written to in it alone.
            with torch.inference_mode():
                self._copy(window, copies)
        else:
            self._copy(window, copies)

    def _copy(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        raw = torch.frombuffer(window, dtype=torch.uint8)
        if raw.data_ptr() % self._dtype.itemsize:
            raw = raw.clone()  # torch's kernels rely on natural alignment; some crash without
        flat = raw.view(self._dtype)
        shape = self._tensor.shape
        for copy in copies:
            source = flat.as_strided(copy.sizes, copy.source_strides, copy.source_offset_elements)
            dest = self._tensor
            for dim, size in enumerate(copy.sizes):
                if size != shape[dim]:
                    dest = dest.narrow(dim, copy.dest_offsets[dim], size)
            if self._lock is None:
                dest.copy_(source)
            else:
                with self._lock:
                    dest.copy_(source)


class LoadJob:
    """The items of one load plan on this rank, from request to commit.

    `requests` are this rank's own, `shared` those that are to be shared with other ranks.
    """

    def __init__(
        self, source: Source, planner: LoadPlanner, *, verify: bool, allow_lossy: bool
    ) -> None:
        self._source = source
        self._planner = planner
        self._verify = verify
        self._allow_lossy = allow_lossy
        self.requests: list[ChunkRead] = []
        self.shared: dict[Key, list[ChunkRead]] = {}
        # Of each request the chunk it is for, None for a blob.
        self._keys: list[Key | None] = []
        self._places: dict[str, list[ChunkPlace]] = {}
        # In two columns: thousands of pairs are as many objects for the collector to look at.
        self._items: list[ReadItem] = []
        self._targets: list[torch.Tensor] = []
        self._blobs: list[tuple[ReadItem, bytearray, ChunkPlace]] = []
        self._sizes: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
        self._wholes: dict[
            tuple[str, int], tuple[ChunkPlace, list[tuple[ReadItem, torch.Tensor]]]
        ] = {}

    def plan(self, items: Sequence[ReadItem]) -> None:
        """Turn read items into requests; resolves every target, reads no payload."""
        keys = [(item.storage_index.fqn, _offsets_of(item)) for item in items]
        self._source.require(keys)
        places = self._source.places(keys)
        stored = places
        if not self._verify:
            places = [dataclasses.replace(place, crcs=None, block_bytes=1) for place in places]
        self._request_all(items, keys, places)
        if not self._allow_lossy:
            kinds = zip(items, stored, strict=True)
            self._check_memory([p for item, p in kinds if item.type is not LoadItemType.BYTE_IO])
        # Our copies to a GPU are not on the caller's stream: let what is queued there end first.
        for device in {target.device for target in self._targets if target.is_cuda}:
            torch.cuda.synchronize(device)

    def _request_all(
        self,
        items: Sequence[ReadItem],
        keys: Sequence[tuple[str, tuple[int, ...] | None]],
        places: Sequence[ChunkPlace],
    ) -> None:
        resolve = target_resolver(self._planner)
        for item, (fqn, _), place in zip(items, keys, places, strict=True):
            self._places.setdefault(place.path, []).append(place)
            if item.type is LoadItemType.BYTE_IO:
                buffer = bytearray(place.size_bytes)
                self._blobs.append((item, buffer, place))
                self._keys.append(None)
                self.requests.append(bytes_read(place, memoryview(buffer)))
                continue
            target = resolve(item)
            if target.requires_grad:
                target = target.detach()
            if target.shape != torch.Size(item.lengths):
                raise InvalidInputError(
                    f"The planner gave a target of shape {list(target.size())} for "
                    f"{list(item.lengths)} elements of {fqn}.",
                    phase="load",
                    next_step="Check the load planner's resolve_tensor.",
                )
            if target.is_meta:
                raise InvalidInputError(
                    f"The target of {fqn} is on the meta device and can hold nothing.",
                    phase="load",
                    next_step="Materialise it first, by to_empty() say.",
                )
            if is_freed(target):
                raise InvalidInputError(
                    f"The target of {fqn} has no memory: its storage was resized to nothing.",
                    phase="load",
                    next_step="Load into tensors that have memory (FSDP: into its state_dict()).",
                )
            if not self._allow_lossy:
                self._check_cast(fqn, target)
            self._items.append(item)
            self._targets.append(target)
            if place.kind == "opaque":
                key = (place.path, place.start)
                self._wholes.setdefault(key, (place, []))[1].append((item, target))
            else:
                self._region(item, target, place)

    def _check_cast(self, fqn: str, target: torch.Tensor) -> None:
        stored = self._source.tensors[fqn].dtype
        if not torch.can_cast(_dtype(stored)[0], target.dtype):
            raise InvalidInputError(
                f"{fqn} is stored as {stored}; its target is {dtype_name(target.dtype)}, which "
                "cannot hold such values.",
                phase="load",
                next_step="Load into a target of the stored kind, or pass allow_lossy=True.",
            )

    def _check_memory(self, places: Sequence[ChunkPlace]) -> None:
        """Refuse targets that begin at one address and would get values of other checksums."""
        known: dict[tuple[torch.device, int], tuple[str, object]] = {}
        for item, target, place in zip(self._items, self._targets, places, strict=True):
            if place.crcs is None or not target.numel():
                continue
            value = (tuple(item.storage_offsets), tuple(item.lengths), list(place.crcs))
            key = (target.device, target.data_ptr())
            other, held = known.setdefault(key, (place.fqn, value))
            if held != value and other == place.fqn:
                raise InvalidInputError(
                    f"Several elements of the target of {other} are a single memory location.",
                    phase="load",
                    next_step="Load into a tensor that is not expanded: clone() it first.",
                )
            if held != value:
                raise InvalidInputError(
                    f"The targets of {other} and {place.fqn} are one memory, and the checkpoint "
                    "holds other values for each.",
                    phase="load",
                    next_step="Give each a tensor of its own, load one of them, or pass "
                    "allow_lossy=True: then either value may stay.",
                )

    def share(self, chunks: AbstractSet[Key]) -> None:
        """Set apart the requests for `chunks`, which ranks are to share; once, after `plan`."""
        self.shared = {key: [] for key in chunks}
        if not chunks:
            return
        own: list[ChunkRead] = []
        for key, request in zip(self._keys, self.requests, strict=True):
            (own if key is None else self.shared.get(key, own)).append(request)
        self.requests = own
        self._keys.clear()

    @property
    def paths(self) -> AbstractSet[str]:
        """The files that are read, once `plan` is done."""
        return self._places.keys()

    def can_share(self, unit_bytes: int) -> bool:
        """Return whether the shared requests can be cut into units: their blocks must fit."""
        places = [requests[0].place for requests in self.shared.values() if requests]
        return len(places) == len(self.shared) and all(
            fits_units(place, unit_bytes) for place in places
        )

    def share_nothing(self) -> None:
        """Make requests of this rank's own of those that were to be shared."""
        for requests in self.shared.values():
            self.requests.extend(requests)
        self.shared.clear()

    def wholes(self) -> Iterator[ChunkRead]:
        """Yield, one at a time, the requests for items that only torch itself can read.

        Each must have been read when the next is asked for; so one item is in memory at a time.
        """
        for place, users in self._wholes.values():
            buffer = bytearray(place.size_bytes)
            yield bytes_read(place, memoryview(buffer))
            whole = load_whole(buffer, place)
            for item, target in users:
                sizes = self._chunk_sizes(item)
                if tuple(whole.shape) != sizes:
                    raise _contradiction(place, f"shape {list(whole.shape)}", sizes)
                tensor = whole
                for dim, (start, size) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    tensor = tensor.narrow(dim, start, size)
                target.copy_(tensor)

    def _region(self, item: ReadItem, target: torch.Tensor, place: ChunkPlace) -> None:
        key = (item.storage_index.fqn, _offsets_of(item) or ())
        info = self._source.tensors[key[0]]
        dtype, item_bytes = _dtype(info.dtype)
        sizes = tuple(item.lengths)
        # A chunk as large as its tensor has its shape: nothing to look up for an unsharded one.
        if sizes != info.shape or place.size_bytes != math.prod(sizes) * item_bytes:
            sizes = self._chunk_sizes(item)
        where = None
        if any(item.storage_offsets) or tuple(item.lengths) != sizes:
            where = box_selection(Box(tuple(item.storage_offsets), tuple(item.lengths)))
        self._keys.append(key)
        self.requests.append(
            ChunkRead(
                place=place,
                item_bytes=item_bytes,
                chunk_sizes=sizes,
                where=where,
                target=TensorTarget(target, dtype),
            )
        )

    def _chunk_sizes(self, item: ReadItem) -> tuple[int, ...]:
        info = self._source.tensors[item.storage_index.fqn]
        offsets = _offsets_of(item) or ()
        key = None
        if isinstance(info.boxes, GridBoxes):
            # Tensors that are cut alike share a grid, which lives as long as the source.
            key = (id(info.boxes.grid), info.shape, offsets)
            known = self._sizes.get(key)
            if known is not None:
                return known
        chunk = info.chunk_at(offsets)
        if chunk is None:  # pragma: no cover  # places() found the chunk by the same offsets
            raise FormatError(f"{info.fqn} has no chunk at {offsets}.", next_step="Load again.")
        if key is not None:
            self._sizes[key] = chunk.sizes
        return chunk.sizes

    def explain(self, error: StorageError | IntegrityError) -> Exception:
        """Return `error` with what it means here: which tensor, which rank, gone or damaged."""
        found = (held for path, held in self._places.items() if concerns(error, path))
        places = next(found, [])
        if isinstance(error, StorageError):
            if error.kind == "not-found" and places:
                return self._source.explain_missing(places[0])
            return error
        if error.fqn is not None or not places:
            return error
        offset = error.offset or 0
        place = min(
            (p for p in places if p.start <= offset < p.start + p.size_bytes),
            key=lambda p: p.start,
            default=places[0],
        )
        by = f", written by rank {place.rank}" if place.rank is not None else ""
        step = error.next_step or ""
        return IntegrityError(
            f"{str(error).removesuffix(step).strip()} The file holds {place.fqn}{by}. Targets of "
            "this load hold undefined values.",
            fqn=place.fqn,
            offset=error.offset,
            path=error.path,
            rank=place.rank,
            phase="load",
            next_step=error.next_step,
        )

    def commit(self, *, unsafe_pickle: bool) -> None:
        """Hand everything to the planner; all bytes were read and verified."""
        if not unsafe_pickle:
            for _, buffer, place in self._blobs:
                scan_blob(buffer, place)
        for item, target in zip(self._items, self._targets, strict=True):
            self._planner.commit_tensor(item, target)
        for item, buffer, _ in self._blobs:
            self._planner.load_bytes(item, io.BytesIO(buffer))


@cache
def _dtype(name: str) -> tuple[torch.dtype, int]:
    return getattr(torch, name), DTYPES[name].item_bytes


def wanted_regions(plans: Sequence[LoadPlan]) -> dict[Key, list[tuple[int, Box]]]:
    """Return for each chunk which ranks want which region of it, counted from its first element."""
    wants: dict[Key, list[tuple[int, Box]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            offsets = _offsets_of(item)
            if offsets is not None:
                region = Box(tuple(item.storage_offsets), tuple(item.lengths))
                wants.setdefault((item.storage_index.fqn, offsets), []).append((rank, region))
    return wants


def _contradiction(place: ChunkPlace, found: str, sizes: tuple[int, ...]) -> FormatError:
    return FormatError(
        f"{place.fqn} in {place.path} has {found}; the metadata says {list(sizes)} elements.",
        path=place.path,
        next_step="Check that the checkpoint is complete and that its files belong together.",
    )


def _offsets_of(item: ReadItem) -> tuple[int, ...] | None:
    if item.type is LoadItemType.BYTE_IO:
        return None
    # A size is a tuple, and equal to one: no copy of each.
    return item.storage_index.offset or ()


def _direct_view(target: torch.Tensor, dtype: torch.dtype) -> memoryview | None:
    """Return the memory of a target that takes the stored bytes as they are, else None."""
    if (
        target.device.type != "cpu"
        or target.dtype != dtype
        or not target.is_contiguous()
        or target.is_conj()
        or target.is_neg()
    ):
        return None
    # Where a dimension has one element, a contiguous tensor may have any stride there.
    flat = target.as_strided((target.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy 2 types no buffer on 3.11
