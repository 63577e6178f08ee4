"""Layouts of safetensors: Hugging Face's weight files with their index, and torch's sharded ones.

Pure.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.safetensors import SafetensorsEntry, encode_safetensors_header
from ckpt_storage.source.model import Source, TensorInfo

from .layout import Elements, Fixed, Layout, OutFile, boxes_of, elements_of, split_by_size
from .options import ConsolidateOptions
from .select import choose_model

DATA_ALIGN_BYTES = 64
"""The tensors' bytes begin at a multiple of it, as payloads in our shard files do."""

_size_of = attrgetter("size_bytes")


def lay_out_model(
    source: Source, options: ConsolidateOptions, ties: Mapping[str, str] | None = None
) -> Layout:
    """Return the weight files that a consolidation makes, named for an empty folder.

    `ties` are the recorded ones. Raises `InvalidInputError` for options that do not fit.
    """
    tensors, skipped = choose_model(source, options, ties)
    if options.fqn_to_index_mapping is None:
        groups = split_by_size(tensors, options.file_limit_bytes, _size_of)
    else:
        groups = _split_by_index(tensors, options.fqn_to_index_mapping)
    return Layout(files=_weight_files(groups), skipped=skipped)


def lay_out_whole(tensors: Iterable[TensorInfo], max_file_bytes: int) -> Layout:
    """Return weight files of all `tensors` under their FQNs, in order."""
    groups = split_by_size(map(elements_of, tensors), max_file_bytes, _size_of)
    return Layout(files=_weight_files(groups or [[]]))


def lay_out_sharded(tensors: Iterable[TensorInfo], max_file_bytes: int) -> Layout:
    """Return files as torch's `HuggingFaceStorageWriter` names those of its ranks.

    A file of that layout holds one part of a tensor at the most, so part n of each tensor goes
    into shard n, or a later one where that is full.
    """
    groups: list[list[Elements]] = []
    sizes: list[int] = []
    for info in tensors:
        at = 0
        for one in (elements_of(info, box) for box in boxes_of(info)):
            while at < len(groups) and sizes[at] and sizes[at] + one.size_bytes > max_file_bytes:
                at += 1
            if at == len(groups):
                groups.append([])
                sizes.append(0)
            groups[at].append(one)
            sizes[at] += one.size_bytes
            at += 1
    files = []
    for number, group in enumerate(groups, 1):
        # Torch writes it as text too; its version is a number there, and its reader wants none.
        offsets = {one.name: {"saved_offsets": list(one.box.offsets)} for one in group}
        metadata = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        name = f"shard-{number:05d}-model-00001-of-00001.safetensors"
        files.append(_weight_file(number, name, group, metadata))
    return Layout(files=tuple(files))


def with_suffix(layout: Layout, suffix: str) -> Layout:
    """Return weight files that are named for a re-export, or, with "", as at first."""
    count = len(layout.files)
    files = (replace(f, name=_file_name(f.number, count, suffix)) for f in layout.files)
    return replace(layout, files=tuple(files))


def index_document(
    layout: Layout, *, save_id: str | None = None, fingerprint: str | None = None
) -> bytes:
    """Return the bytes of `model.safetensors.index.json`; `total_size` counts tensors alone.

    `save_id` and `fingerprint` tell which export of ours the files belong to.
    """
    total_bytes = sum(one.size_bytes for file in layout.files for one in file.elements)
    metadata: dict[str, object] = {"total_size": total_bytes}
    if fingerprint is not None:
        metadata |= {"save_id": save_id, "fingerprint": fingerprint}
    body = {
        "metadata": metadata,
        "weight_map": {one.name: file.name for file in layout.files for one in file.elements},
    }
    return (json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _split_by_index(tensors: Sequence[Elements], index: Mapping[str, int]) -> list[list[Elements]]:
    """Return the tensors per file, given its number by name or FQN; gaps are closed."""
    groups: dict[int, list[Elements]] = {}
    for tensor in tensors:
        number = index.get(tensor.name, index.get(tensor.fqn))
        if number is None:
            raise InvalidInputError(
                f"fqn_to_index_mapping does not say which file {tensor.name} goes into.",
                next_step="Add it to the mapping, or leave it out with exclude=.",
            )
        groups.setdefault(number, []).append(tensor)
    return [groups[number] for number in sorted(groups)]


def _file_name(number: int, count: int, suffix: str = "") -> str:
    """Return the name of weight file `number` (from 1) of `count`, as Hugging Face spells it."""
    if count == 1 and not suffix:
        return "model.safetensors"
    tail = f"-{suffix}" if suffix else ""
    return f"model-{number:05d}-of-{count:05d}{tail}.safetensors"


def _weight_files(groups: Sequence[Sequence[Elements]]) -> tuple[OutFile, ...]:
    count = len(groups)
    return tuple(
        _weight_file(number, _file_name(number, count), group, {})
        for number, group in enumerate(groups, 1)
    )


def _weight_file(
    number: int, name: str, tensors: Sequence[Elements], metadata: Mapping[str, str]
) -> OutFile:
    # Larger elements first, so that each tensor begins at a multiple of its element.
    ordered = sorted(tensors, key=lambda one: -one.item_bytes)
    ends = itertools.accumulate((one.size_bytes for one in ordered), initial=0)
    entries = [
        SafetensorsEntry(name=one.name, dtype=one.dtype, shape=one.box.sizes, start=start, end=end)
        for one, (start, end) in zip(ordered, itertools.pairwise(ends), strict=True)
    ]
    header = encode_safetensors_header(
        entries, {"format": "pt", **metadata}, align_bytes=DATA_ALIGN_BYTES
    )
    return OutFile(number=number, name=name, segments=[Fixed(header), *ordered])
