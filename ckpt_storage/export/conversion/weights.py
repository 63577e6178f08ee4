"""Values as safetensors: torch's sharded files, or one export as Hugging Face has it.

Values that safetensors cannot hold were refused or dropped before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpt_storage.commit.shardfile import ShardFileWriter
from ckpt_storage.errors import StorageError
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.safetensors import SafetensorsEntry, encode_safetensors_header
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .stream import payload_bytes
from .values import Values

_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One safetensors file to write: its name, and the box of each tensor in it, in order."""

    name: str
    boxes: tuple[tuple[str, Box], ...]
    is_sharded: bool


def plan_whole(values: Values, max_file_bytes: int) -> list[WeightFile]:
    """Return the files of an export: whole tensors, in the order of their names."""
    groups: list[list[tuple[str, Box]]] = [[]]
    size = 0
    for fqn, info in values.tensors.items():
        length = payload_bytes(info)
        if groups[-1] and size + length > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append((fqn, Box((0,) * len(info.shape), info.shape)))
        size += length
    count = len(groups)
    return [
        WeightFile(
            name="model.safetensors"
            if count == 1
            else f"model-{number:05d}-of-{count:05d}.safetensors",
            boxes=tuple(group),
            is_sharded=False,
        )
        for number, group in enumerate(groups, 1)
    ]


def plan_sharded(values: Values, max_file_bytes: int) -> list[WeightFile]:
    """Return files as torch's `HuggingFaceStorageWriter` names those of its ranks.

    A file of that layout holds one part of a tensor at the most, so part n of each tensor goes
    into shard n, or a later one where that is full.
    """
    groups: list[list[tuple[str, Box]]] = []
    sizes: list[int] = []
    for fqn, info in values.tensors.items():
        at = 0
        for box in values.boxes_of(fqn):
            length = box.volume * DTYPES[info.dtype].item_bytes
            while at < len(groups) and sizes[at] and sizes[at] + length > max_file_bytes:
                at += 1
            if at == len(groups):
                groups.append([])
                sizes.append(0)
            groups[at].append((fqn, box))
            sizes[at] += length
            at += 1
    return [
        WeightFile(
            name=f"shard-{number:05d}-model-00001-of-00001.safetensors",
            boxes=tuple(group),
            is_sharded=True,
        )
        for number, group in enumerate(groups, 1)
    ]


def index_of(values: Values, files: list[WeightFile]) -> bytes:
    """Return the index of an export."""
    weight_map = {fqn: file.name for file in files for fqn, _ in file.boxes}
    body = {
        "metadata": {"total_size": values.total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(body, indent=2) + "\n").encode()


Layout = tuple[bytes, list[tuple[str, Box, int]]]
"""The header of a weight file, and the boxes with their lengths in the order of their bytes."""


def write_weights(  # one call site, all named
    values: Values,
    file: WeightFile,
    layout: Layout,
    store: Store,
    *,
    options: TransferOptions,
    deadline: Deadline,
    on_bytes: Callable[[int], None],
) -> FileRef:
    """Write one file, laid out as `lay_out` says, and return it; durable and visible on return."""
    header, order = layout
    writer = ShardFileWriter(
        store,
        file.name,
        options=options,
        planned_bytes=len(header) + sum(length for *_, length in order),
        deadline=deadline,
        on_bytes=on_bytes,
    )

    def data() -> Iterator[memoryview]:
        values.expect((fqn, box) for fqn, box, _ in order)
        for fqn, box, _ in order:
            yield from values.box(fqn, box)
            deadline.check(f"Writing {file.name}")

    try:
        writer.frame(header)
        writer.payload(data())
        size_bytes, crc = writer.finish()
    except BaseException as error:
        try:
            writer.abort()
        except StorageError as failure:
            error.add_note(f"Discarding the upload failed too: {failure}")
        raise
    return FileRef(path=file.name, size_bytes=size_bytes, crc32c=crc)


def lay_out(values: Values, file: WeightFile) -> Layout:
    """Return how a file begins, and what follows; needs no value.

    Tensors of larger elements come first, so that each begins at a multiple of its element.
    Raises `InvalidInputError` for names that a header cannot hold.
    """
    sized = [(fqn, box, DTYPES[values.tensors[fqn].dtype].item_bytes) for fqn, box in file.boxes]
    sized.sort(key=lambda one: -one[2])
    order = [(fqn, box, box.volume * item_bytes) for fqn, box, item_bytes in sized]
    entries: list[SafetensorsEntry] = []
    at = 0
    for fqn, box, length in order:
        entries.append(
            SafetensorsEntry(
                name=fqn,
                dtype=values.tensors[fqn].dtype,
                shape=box.sizes,
                start=at,
                end=at + length,
            )
        )
        at += length
    metadata = {"format": "pt"}
    if file.is_sharded:
        # Torch writes it as text too; its version is a number there, and its reader wants none.
        offsets = {fqn: {"saved_offsets": list(box.offsets)} for fqn, box, _ in order}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    return encode_safetensors_header(entries, metadata, align_bytes=_ALIGN_BYTES), order
