"""Sources of numpy arrays in chunks of any shape, and what a weight file of them must hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from crc32c import crc32c

from ckpt_storage.errors import IntegrityError
from ckpt_storage.format.boxes import Box
from ckpt_storage.source.model import SourceFormat, TensorInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace

BLOCK_BYTES = 4096


@dataclass(slots=True)
class Chunked:
    """A tensor as numpy holds its bits, its dtype's name, and the boxes it was saved in."""

    array: np.ndarray[Any, Any]
    dtype: str
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def whole(array: np.ndarray[Any, Any], dtype: str) -> Chunked:
    """Return a tensor in one chunk."""
    return Chunked(array, dtype, [((0,) * array.ndim, array.shape)])


def split(array: np.ndarray[Any, Any], dtype: str, counts: Sequence[int]) -> Chunked:
    """Return a tensor cut into `counts[d]` chunks along each dimension, as evenly as may be."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size, count in zip(array.shape, counts, strict=True):
        step = -(-size // count)
        cuts = [(at, min(step, size - at)) for at in range(0, size, step)]
        boxes = [((*o, at), (*s, n)) for o, s in boxes for at, n in cuts]
    return Chunked(array, dtype, boxes)


@dataclass(slots=True)
class ArraySource:
    """A `Source` of arrays; chunk i of a tensor lies in the file of rank i modulo their number."""

    tensors: Mapping[str, TensorInfo]
    known: Mapping[tuple[str, tuple[int, ...] | None], ChunkPlace]
    format: SourceFormat = "ckpt_storage"
    save_id: str | None = "a" * 8
    blobs: frozenset[str] = frozenset()
    planner_data: Mapping[str, tuple[str | int, ...]] | None = None
    required: list[tuple[str, tuple[int, ...] | None]] = field(default_factory=list)

    def require(self, chunks: Iterable[tuple[str, tuple[int, ...] | None]]) -> None:
        """Note what was asked for."""
        self.required.extend(chunks)

    def renew(self, store: Store, deadline: Deadline) -> None:
        """Do nothing."""

    def places(self, keys: Sequence[tuple[str, tuple[int, ...] | None]]) -> list[ChunkPlace]:
        """Return the places of several chunks."""
        return [self.place(fqn, offsets) for fqn, offsets in keys]

    def place(self, fqn: str, offsets: tuple[int, ...] | None) -> ChunkPlace:
        """Return a place that `require` was called for."""
        assert (fqn, offsets) in self.required
        return self.known[fqn, offsets]

    def explain_missing(self, place: ChunkPlace) -> Exception:
        """Return the error that a shard is missing."""
        return IntegrityError(
            f"{place.path} is missing.", path=place.path, fqn=place.fqn, rank=place.rank
        )


def saved(
    store: Store,
    state: Mapping[str, Chunked],
    *,
    ranks: int = 2,
    crcs: bool = True,
    block_bytes: int = BLOCK_BYTES,
) -> ArraySource:
    """Write the chunks of `state` to one file per rank and return the source of them."""
    store.make_folders(["saves", "saves/s", "hf"])
    content = [bytearray() for _ in range(ranks)]
    found: list[tuple[str, tuple[int, ...], int, int, bytes]] = []
    for fqn, tensor in state.items():
        for i, (offsets, sizes) in enumerate(tensor.boxes):
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            data = np.ascontiguousarray(tensor.array[box]).tobytes()
            file = content[i % ranks]
            file += b"\xee" * (64 + -len(file) % 64)
            found.append((fqn, offsets, i % ranks, len(file), data))
            file += data
    places = {}
    for fqn, offsets, rank, start, data in found:
        blocks = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
        places[fqn, offsets] = ChunkPlace(
            path=f"saves/s/rank-{rank}",
            fqn=fqn,
            start=start,
            size_bytes=len(data),
            file_bytes=len(content[rank]),
            rank=rank,
            block_bytes=block_bytes if crcs else 1,
            crcs=[crc32c(block) for block in blocks] if crcs else None,
        )
    for rank, file in enumerate(content):
        upload = store.upload(f"saves/s/rank-{rank}")
        upload.write_part(0, 0, [memoryview(bytes(file))], last=True)
        upload.complete(len(file))
    tensors = {
        fqn: TensorInfo(
            fqn=fqn,
            dtype=tensor.dtype,
            shape=tensor.array.shape,
            boxes=[Box(offsets, sizes) for offsets, sizes in tensor.boxes],
        )
        for fqn, tensor in state.items()
    }
    return ArraySource(tensors, places)  # type: ignore[arg-type]  # keys without None


def tensors_of(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype code, shape and bytes of the tensors of a safetensors file, read by hand."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    return {
        name: (
            entry["dtype"],
            tuple(entry["shape"]),
            body[entry["data_offsets"][0] : entry["data_offsets"][1]],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of a name."""
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the elements as unsigned integers of their size."""
    found = tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize]).numpy()
    return found.view(f"u{found.itemsize}")
