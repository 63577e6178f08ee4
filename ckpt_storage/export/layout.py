"""Which files each format has: pure functions from the values of a checkpoint to output files.

Imports torch for `.metadata` and DCP's plans alone.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import socket
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.exports import ADAPTER_PATTERN, MODEL_PATTERN
from ckpt_storage.format.manifest import PlannerData, TensorRecord, int_keys_of
from ckpt_storage.format.names import FILES_PREFIX, shard_name
from ckpt_storage.format.rank_manifest import COLUMNS, RankManifest, ShardFile, Vocabulary
from ckpt_storage.format.safetensors import SafetensorsEntry, encode_safetensors_header
from ckpt_storage.format.shard_item import PAYLOAD_ALIGN_BYTES, tensor_envelope
from ckpt_storage.options import DEFAULT_BLOCK_BYTES
from ckpt_storage.source.model import Source

from .extras import named_files
from .options import ConsolidateOptions
from .output import Span, WriteSummary
from .plan import Elements, Fixed, OutFile, Segment, boxes_of, elements_of
from .select import Selected, SkippedValue, choose_model
from .write import joined

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

T = TypeVar("T")

Files = tuple[OutFile, ...]

_ADAPTER_CONFIG = "adapter_config.json"
_EXTENSION = ".safetensors"

DATA_ALIGN_BYTES = 64
"""The tensors' bytes begin at a multiple of it, as the payloads of our shard files."""


def lay_out_model(
    source: Source, options: ConsolidateOptions
) -> tuple[Files, tuple[SkippedValue, ...]]:
    """Return the weight files of a consolidation, as in an empty folder, and what is in none."""
    tensors, skipped = choose_model(source, options)
    pattern = options.filename_pattern or _default_pattern(skipped, options)
    if options.fqn_to_index_mapping is not None:
        groups = _split_by_index(tensors, options.fqn_to_index_mapping)
    elif pattern == ADAPTER_PATTERN:
        groups = [tensors]
    else:
        groups = split_by_size(tensors, options.file_limit_bytes)
    if pattern == ADAPTER_PATTERN and len(groups) > 1:
        what = f"fqn_to_index_mapping makes {len(groups)} files; PEFT reads an adapter of one file."
        step = 'Pass filename_pattern="model{suffix}.safetensors", or one number for all tensors.'
        raise InvalidInputError(what, next_step=step)
    return _weight_files(groups, pattern), skipped


def _default_pattern(skipped: Sequence[SkippedValue], options: ConsolidateOptions) -> str:
    """Return the pattern for adapters if `adapter_config.json` lies beside the weights."""
    files = {value.fqn.removeprefix(FILES_PREFIX) for value in skipped if value.reason == "file"}
    files |= named_files(options.extra_files).keys()
    return ADAPTER_PATTERN if _ADAPTER_CONFIG in files else MODEL_PATTERN


def lay_out_whole(tensors: Mapping[str, TensorRecord], max_file_bytes: int) -> Files:
    """Return weight files of all `tensors` under their FQNs, in order."""
    groups = split_by_size(itertools.starmap(elements_of, tensors.items()), max_file_bytes)
    return _weight_files(groups or [[]], MODEL_PATTERN)


def lay_out_sharded(tensors: Mapping[str, TensorRecord], max_file_bytes: int) -> Files:
    """Return files as torch's `HuggingFaceStorageWriter` names those of its ranks.

    A file of that layout holds at most one chunk of a tensor: chunk n of each tensor is in file n,
    or in one of those that share its chunks by size.
    """
    columns: dict[int, list[Elements]] = {}
    for fqn, tensor in tensors.items():
        for number, box in enumerate(boxes_of(tensor)):
            columns.setdefault(number, []).append(elements_of(fqn, tensor, box))
    # The parts of a tensor are in order, so the columns are, too.
    groups = [
        group for column in columns.values() for group in split_by_size(column, max_file_bytes)
    ]
    files: list[OutFile] = []
    for number, group in enumerate(groups, 1):
        # Torch writes it as text too; its version is a number there, and its reader wants none.
        offsets = {part.name: {"saved_offsets": list(part.box.offsets)} for part in group}
        metadata = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        name = f"shard-{number:05d}-model-00001-of-00001.safetensors"
        files.append(_weight_file(name, group, metadata))
    return tuple(files)


def with_suffix(files: Sequence[OutFile], suffix: str) -> Files:
    """Return several weight files with a suffix in their names, as those of a re-export have.

    A single file has no suffix: libraries that look for `model.safetensors` would pass over it.
    """
    end = f"-{suffix}{_EXTENSION}"
    if len(files) == 1 or not suffix or files[0].name.endswith(end):
        return tuple(files)
    return tuple(replace(file, name=file.name.removesuffix(_EXTENSION) + end) for file in files)


def index_document(
    files: Files, *, save_id: str | None = None, fingerprint: str | None = None
) -> bytes:
    """Return `model.safetensors.index.json`, which may name the export of ours it belongs to."""
    # As Hugging Face's own, it counts tensors alone.
    total_bytes = sum(tensor.size_bytes for file in files for tensor in file.elements)
    metadata: dict[str, object] = {"total_size": total_bytes}
    if fingerprint is not None:
        metadata |= {"save_id": save_id, "fingerprint": fingerprint}
    body = {
        "metadata": metadata,
        "weight_map": {tensor.name: file.name for file in files for tensor in file.elements},
    }
    return (json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _split_by_index(tensors: Sequence[Elements], index: Mapping[str, int]) -> list[list[Elements]]:
    """Return the tensors per file; `index` maps a name or FQN to a number; gaps are closed."""
    groups: dict[int, list[Elements]] = {}
    for tensor in tensors:
        number = index.get(tensor.name, index.get(tensor.fqn))
        if number is None:
            what = f"fqn_to_index_mapping does not say which file {tensor.name} goes into."
            step = "Add it to the mapping, or leave it out with exclude=."
            raise InvalidInputError(what, next_step=step)
        groups.setdefault(number, []).append(tensor)
    return [groups[number] for number in sorted(groups)]


def _weight_files(groups: Sequence[Sequence[Elements]], pattern: str) -> Files:
    """Return weight files as Hugging Face's libraries name them."""
    count = len(groups)
    suffixes = [f"-{number:05d}-of-{count:05d}" for number in range(1, count + 1)]
    names = [pattern.format(suffix=suffix if count > 1 else "") for suffix in suffixes]
    return tuple(_weight_file(name, group, {}) for name, group in zip(names, groups, strict=True))


def _weight_file(name: str, tensors: Sequence[Elements], metadata: Mapping[str, str]) -> OutFile:
    # Larger elements first, so that each tensor begins at a multiple of its element.
    ordered = sorted(tensors, key=lambda part: -DTYPES[part.dtype].item_bytes)
    ends = itertools.accumulate((part.size_bytes for part in ordered), initial=0)
    entries = [
        SafetensorsEntry(
            name=part.name, dtype=part.dtype, shape=part.box.sizes, start=start, end=end
        )
        for part, (start, end) in zip(ordered, itertools.pairwise(ends), strict=True)
    ]
    header = encode_safetensors_header(
        entries, {"format": "pt", **metadata}, align_bytes=DATA_ALIGN_BYTES
    )
    return OutFile(name=name, segments=[Fixed(header), *ordered])


def split_by_size(
    values: Iterable[T], max_file_bytes: int, size_of: Callable[[T], int] = attrgetter("size_bytes")
) -> list[list[T]]:
    """Return the values per file, cut as Hugging Face's libraries cut.

    A file is closed by the first value that does not fit. A value larger than the limit gets a file
    of its own, and the file before it stays open
    (`huggingface_hub.split_state_dict_into_shards_factory`).
    """
    groups: list[list[T]] = []
    current: list[T] = []
    current_bytes = 0
    for value in values:
        size = size_of(value)
        if size > max_file_bytes:
            groups.append([value])
            continue
        if current and current_bytes + size > max_file_bytes:
            groups.append(current)
            current, current_bytes = [], 0
        current.append(value)
        current_bytes += size
    return [*groups, current] if current else groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The columns of the items of each shard file, whose checksums are not known yet."""

    tables: Sequence[Mapping[str, Sequence[int]]]
    known: Vocabulary


def lay_out_shards(
    tensors: Mapping[str, TensorRecord],
    blobs: Mapping[str, Segment],
    max_file_bytes: int,
    block_bytes: int | None = None,
) -> tuple[Files, Shards]:
    """Return files that hold all chunks of `tensors`, and then `blobs` as they are pickled.

    With `block_bytes` the files have edges at the frames and blocks of our format.
    """
    known = Vocabulary()
    files, tables = [], []
    values: list[tuple[str, Segment]] = [
        (fqn, elements_of(fqn, tensor, box))
        for fqn, tensor in tensors.items()
        for box in boxes_of(tensor)
    ]
    values += sorted(blobs.items())
    groups = split_by_size(
        values,
        max_file_bytes,
        # Objects never fill a file.
        lambda value: value[1].size_bytes if isinstance(value[1], Elements) else 0,
    )
    for number, group in enumerate(groups):
        file, table = lay_out_shard(shard_name(0, number), group, known, block_bytes)
        files.append(file)
        tables.append(table)
    return tuple(files), Shards(tables=tables, known=known)


def lay_out_shard(
    name: str,
    values: Iterable[tuple[str, Segment]],
    known: Vocabulary,
    block_bytes: int | None = None,
) -> tuple[OutFile, Mapping[str, Sequence[int]]]:
    """Return a shard file of chunks and pickled objects by FQN, and the columns of its items.

    With `block_bytes` the file has edges at the frames and blocks of our format.
    """
    segments: list[Segment] = []
    edges: list[int] = []
    rows: list[tuple[int, ...]] = []
    at = 0
    for fqn, part in values:
        head, tail, dtype, box = b"", b"", None, None
        if isinstance(part, Elements):
            dtype, box = part.dtype, part.box
            head, tail = tensor_envelope(dtype, box.sizes)
        start = at + -at % PAYLOAD_ALIGN_BYTES
        begin = start + len(head)
        end = begin + part.size_bytes
        segments += [Fixed(b"\0" * (start - at) + head), part, Fixed(tail)]
        at = end + len(tail)
        rows.append((*known.numbers(fqn, dtype, box), start, at - start, begin, end - begin))
        if block_bytes is not None:
            edges += [*range(begin, end, block_bytes), end]
    if block_bytes is not None:
        edges.append(at)
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    return OutFile(name=name, segments=segments, edges=edges), columns


def rank_manifest(
    files: Files, shards: Shards, made: WriteSummary, save_id: str, ties: Mapping[str, str]
) -> RankManifest:
    """Return the rank manifest of files of ours, as if one rank had written them."""
    tables = enumerate(zip(files, shards.tables, strict=True))
    return RankManifest(
        save_id=save_id,
        rank=0,
        world_size=1,
        fqns=list(shards.known.fqns),
        dtypes=list(shards.known.dtypes),
        boxes=list(shards.known.boxes),
        files=[described(file, columns, number, made) for number, (file, columns) in tables],
        ties=dict(ties),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def described(
    file: OutFile, columns: Mapping[str, Sequence[int]], number: int, made: WriteSummary
) -> ShardFile:
    """Return the table of the shard file at position `number`, which was written."""
    crcs = sorted(span for result in made.results for span in result.spans.get(number, ()))
    parts: dict[int, list[Span]] = {}
    for span in crcs:
        parts.setdefault(bisect_right(file.edges, span[0]), []).append(span)
    # Of a frame, then of the blocks of a payload, and so on; frames may be empty.
    joined_crcs = (joined(parts.get(at, [(0, 0, 0)]))[2] for at in range(len(file.edges)))
    block_crcs, frame_crcs = array("I"), array("I")
    for length in columns["payload_bytes"]:
        frame_crcs.append(next(joined_crcs))
        block_crcs.extend(islice(joined_crcs, -(-length // DEFAULT_BLOCK_BYTES)))
    frame_crcs.append(next(joined_crcs))
    table: dict[str, Any] = dict(columns)  # of types that mypy cannot tell apart
    return ShardFile(
        path=file.name,
        size_bytes=file.size_bytes,
        crc32c=joined(crcs)[2],
        block_bytes=DEFAULT_BLOCK_BYTES,
        **table,
        block_crcs=block_crcs,
        frame_crcs=frame_crcs,
    )


def metadata_of(source: Source, chosen: Selected) -> Metadata:
    """Return the `Metadata` of DCP's global plan for the values; without places."""
    import torch  # noqa: PLC0415  # only for DCP's formats
    from torch.distributed.checkpoint import metadata as dcp  # noqa: PLC0415  # as above

    state: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {
        fqn: dcp.TensorStorageMetadata(
            properties=dcp.TensorProperties(dtype=getattr(torch, tensor.dtype)),
            size=torch.Size(tensor.shape),
            chunks=[
                dcp.ChunkStorageMetadata(*map(torch.Size, (box.offsets, box.sizes)))
                for box in boxes_of(tensor)
            ],
        )
        for fqn, tensor in chosen.tensors.items()
    }
    state |= {fqn: dcp.BytesStorageMetadata() for fqn in chosen.blobs}
    paths = source.planner_data or {}
    places = ((fqn, paths.get(fqn, (fqn,))) for fqn in state)
    data = PlannerData(places, int_keys=int_keys_of(source.planner_data))
    return dcp.Metadata(state_dict_metadata=state, planner_data=data)


def stock_pickle(metadata: Metadata, files: Files, shards: Shards, url: str) -> bytes:
    """Return the `.metadata` of stock torch for these files."""
    import torch  # noqa: PLC0415  # only for DCP's formats
    from torch.distributed.checkpoint import metadata as dcp  # noqa: PLC0415  # as above
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415  # as above

    from ckpt_storage.commit.assembly import STOCK_VERSION  # noqa: PLC0415  # as above

    fqns = list(shards.known.fqns)
    # -1, which is a blob's, is the last.
    offsets = [*(torch.Size(box.offsets) for box in shards.known.boxes), None]
    keys = ("fqn", "box", "item_start", "item_bytes")
    metadata.storage_data = {
        dcp.MetadataIndex(fqns[fqn], offsets[box]): _StorageInfo(file.name, start, length)
        for file, table in zip(files, shards.tables, strict=True)
        for fqn, box, start, length in zip(*(table[key] for key in keys), strict=True)
    }
    metadata.storage_meta = dcp.StorageMeta(checkpoint_id=url)
    metadata.version = STOCK_VERSION
    # Torch's own readers know no class of this package.
    metadata.planner_data = dict(metadata.planner_data or {})
    return pickle.dumps(metadata)
