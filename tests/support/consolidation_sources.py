"""What the tests of consolidation plans share: a checkpoint in memory, and copying by a plan."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import crc32c
import numpy as np
from numpy.typing import NDArray

from ckpt_storage.export.layout import lay_out_model
from ckpt_storage.export.options import ConsolidateOptions
from ckpt_storage.export.plan import Plan, plan
from ckpt_storage.export.reads import SegmentReader
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.options import DEFAULT_PART_BYTES, TransferOptions
from ckpt_storage.source.model import Key, Source, SourceFormat
from ckpt_storage.store import open_store
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace
from ckpt_storage.transfer.ranges import RangeReader

BLOCK_BYTES = 1024
SHARED = Capabilities(kind="s3", tokens_travel=True, parallel_parts=True)
"""Of a storage that several processes may write one file of."""


@dataclass(slots=True, kw_only=True)
class MemorySource(Source):
    """A checkpoint whose chunks lie in a dict: (FQN, offsets) -> bytes."""

    store: Store = field(init=False)
    format: SourceFormat = "ckpt_storage"
    save_id: str | None = "20260101T000000Z-0123456789abcdef"
    ties: Mapping[str, str] = field(default_factory=dict)
    payloads: dict[tuple[str, tuple[int, ...]], bytes] = field(default_factory=dict)

    def places(self, keys: Sequence[Key]) -> list[ChunkPlace]:
        """Return the places of several chunks, with checksums if the bytes are known."""
        found = []
        for fqn, offsets in keys:
            assert offsets is None or offsets in {box.offsets for box in self.tensors[fqn].boxes}
            data = self.payloads.get((fqn, offsets or ()), b"")
            blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
            found.append(
                ChunkPlace(
                    path=f"{fqn}-{offsets}",
                    fqn=fqn,
                    start=0,
                    size_bytes=len(data),
                    block_bytes=BLOCK_BYTES,
                    crcs=list(map(crc32c.crc32c, blocks)),
                )
            )
        return found

    def explain_missing(self, place: ChunkPlace) -> Exception:
        """Nothing is ever missing."""
        return AssertionError(place.path)


def tensor(
    fqn: str, shape: Sequence[int], dtype: str = "float32", boxes: Sequence[Box] | None = None
) -> tuple[str, TensorRecord]:
    """Return a tensor, in one chunk unless `boxes` say otherwise."""
    whole = Box((0,) * len(shape), tuple(shape))
    return fqn, TensorRecord(dtype=dtype, shape=tuple(shape), boxes=boxes or [whole])


def bare_source(
    *tensors: tuple[str, TensorRecord],
    blobs: Iterable[str] = (),
    paths: Mapping[str, tuple[str | int, ...]] | None = None,
) -> MemorySource:
    """Return a checkpoint without bytes; `paths` is its planner data."""
    return MemorySource(tensors=dict(tensors), blobs=frozenset(blobs), planner_data=paths)


def nested_source(state: Mapping[str, object]) -> MemorySource:
    """Return a checkpoint of a nested state dict, flattened as DCP does; leaves are tensors.

    A leaf that is none is a blob.
    """
    leaves: dict[tuple[str | int, ...], object] = {(): state}
    while nested := [path for path, value in leaves.items() if isinstance(value, dict)]:
        inner: Any = leaves.pop(nested[0])
        leaves |= {(*nested[0], key): value for key, value in inner.items()}
    named = {".".join(map(str, path)): value for path, value in leaves.items()}
    tensors = [(name, value[1]) for name, value in named.items() if isinstance(value, tuple)]
    blobs = named.keys() - dict(tensors).keys()
    return bare_source(*tensors, blobs=blobs, paths=dict(zip(named, leaves, strict=True)))


def array_source(
    arrays: Mapping[str, tuple[NDArray[np.generic], str, Sequence[Box]]],
) -> MemorySource:
    """Return a checkpoint that holds arrays, given with torch's dtype and cut into boxes."""
    source = bare_source(
        *(tensor(fqn, array.shape, dtype, boxes) for fqn, (array, dtype, boxes) in arrays.items())
    )
    for fqn, (array, _, boxes) in arrays.items():
        for box in boxes:
            at = tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))
            source.payloads[fqn, box.offsets] = array[at].tobytes()
    return source


def plan_export(
    source: Source,
    *,
    options: ConsolidateOptions,
    world_size: int,
    able: Capabilities = SHARED,
    part_bytes: int = DEFAULT_PART_BYTES,
) -> Plan:
    """Return the plan that a consolidation makes."""
    given: dict[str, Any] = {"source": [source.format, source.save_id, None], "able": able}
    layout = lay_out_model(source, options)[0]
    return plan(layout, world_size=world_size, part_bytes=part_bytes, **given)


@contextlib.contextmanager
def reading(plan: Plan, source: MemorySource) -> Iterator[SegmentReader]:
    """Give what reads the bytes of weight files out of a source that lies in memory."""
    with contextlib.closing(open_store(f"memory://{uuid.uuid4().hex}")) as store:
        for place, data in zip(
            source.places([*source.payloads]), source.payloads.values(), strict=True
        ):
            store.put(place.path, data)
        ranges = RangeReader(store, TransferOptions())
        yield SegmentReader(plan.files, source, ranges)


def assemble(plan: Plan, source: MemorySource, window_bytes: int) -> list[bytes]:
    """Return the weight files that come out where all regions are read as the plan says."""
    files = [bytearray(b"\xa5" * file.size_bytes) for file in plan.files]
    step = max(64, window_bytes - window_bytes % 64)
    with reading(plan, source) as reader:
        for region in plan.regions:
            for start in range(region.start, region.stop, step):
                stop = min(start + step, region.stop)
                reader.prepare(region.file, start, stop)
                reader.fill(region.file, start, stop, memoryview(files[region.file])[start:stop])
    return list(map(bytes, files))
