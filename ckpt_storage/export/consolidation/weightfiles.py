"""Which tensor lies at which byte of which weight file, and the safetensors headers.

Pure values and functions; knows neither ranks nor where the bytes come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.safetensors import SafetensorsEntry, encode_safetensors_header

from .choice import Chosen

DATA_ALIGN_BYTES = 64
"""The tensors' bytes begin at a multiple of it, as payloads in our shard files do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTensor:
    """One tensor in a weight file, and the tensor of the checkpoint that its elements come from.

    `name` is what the weight file calls it, `fqn` what the checkpoint does (that of the target
    for an alias that only exists as a recorded tie). `source_dtype` is as stored, `dtype` as
    written; where they differ each element is cast. `shape` is torch's. The bytes are
    [start, stop) of the file, counted from the file's first byte, header included; `start` is a
    multiple of the element's size.
    """

    name: str
    fqn: str
    source_dtype: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Bytes in the weight file."""
        return self.stop - self.start

    @property
    def item_bytes(self) -> int:
        """Bytes of one element as written."""
        return DTYPES[self.dtype].item_bytes

    @property
    def source_item_bytes(self) -> int:
        """Bytes of one element as stored in the checkpoint."""
        return DTYPES[self.source_dtype].item_bytes

    @property
    def is_cast(self) -> bool:
        """Whether elements change their dtype on the way."""
        return self.dtype != self.source_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One safetensors file, complete but for the tensors' bytes.

    `number` counts from 1; `name` is the file name in the output folder. `header` is the first
    `len(header)` bytes of the file; the tensors' bytes follow without holes, in the order of
    `tensors` (empty tensors have start == stop). `size_bytes` is the length of the whole file.
    """

    number: int
    name: str
    header: bytes
    tensors: tuple[WeightTensor, ...]
    size_bytes: int


def weight_files(
    tensors: Sequence[Chosen], groups: Sequence[Sequence[int]], suffix: str = ""
) -> tuple[WeightFile, ...]:
    """Return the weight files that hold the `groups` of positions in `tensors`.

    Within a file tensors with larger elements come first, so that all are aligned to theirs;
    otherwise they keep their order. `suffix` (8 hexadecimal digits) sets a re-export apart from
    what lies in the folder.
    """
    return tuple(
        _weight_file(
            [tensors[at] for at in group],
            number,
            file_name(number, len(groups), suffix),
        )
        for number, group in enumerate(groups, 1)
    )


def file_name(number: int, count: int, suffix: str = "") -> str:
    """Return the name of weight file `number` (from 1) of `count`, as Hugging Face spells it."""
    if count == 1 and not suffix:
        return "model.safetensors"
    tail = f"-{suffix}" if suffix else ""
    return f"model-{number:05d}-of-{count:05d}{tail}.safetensors"


def split_by_size(tensors: Sequence[Chosen], max_file_bytes: int) -> list[list[int]]:
    """Return positions of `tensors` per file, cut as Hugging Face's libraries cut.

    A file is closed by the first tensor that would not fit; one that is larger than a file may be
    gets its own, and what came before it goes on filling its file
    (`huggingface_hub.split_state_dict_into_shards_factory`).
    """
    groups: list[list[int]] = []
    current: list[int] = []
    current_bytes = 0
    for at, tensor in enumerate(tensors):
        size = tensor.size_bytes
        if size > max_file_bytes:
            groups.append([at])
            continue
        if current and current_bytes + size > max_file_bytes:
            groups.append(current)
            current, current_bytes = [], 0
        current.append(at)
        current_bytes += size
    if current:
        groups.append(current)
    return groups


def split_by_index(tensors: Sequence[Chosen], index: Mapping[str, int]) -> list[list[int]]:
    """Return positions of `tensors` per file, given the file's number for each name.

    A number that only tensors have that do not go out makes no file; later ones move up. Raises
    `InvalidInputError` naming a tensor without a number.
    """
    groups: dict[int, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if tensor.name not in index:
            raise InvalidInputError(
                f"fqn_to_index_mapping does not say which file {tensor.name} goes into.",
                next_step="Add it to the mapping, or leave it out with exclude=.",
            )
        groups.setdefault(index[tensor.name], []).append(at)
    return [groups[number] for number in sorted(groups)]


def _weight_file(tensors: Sequence[Chosen], number: int, name: str) -> WeightFile:
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].item_bytes)
    stops = list(itertools.accumulate((t.size_bytes for t in ordered), initial=0))
    header = encode_safetensors_header(
        (
            SafetensorsEntry(name=t.name, dtype=t.dtype, shape=t.shape, start=start, end=stop)
            for t, (start, stop) in zip(ordered, itertools.pairwise(stops), strict=True)
        ),
        {"format": "pt"},
        align_bytes=DATA_ALIGN_BYTES,
    )
    origin = len(header)
    return WeightFile(
        number=number,
        name=name,
        header=header,
        tensors=tuple(
            WeightTensor(
                name=t.name,
                fqn=t.fqn,
                source_dtype=t.source_dtype,
                dtype=t.dtype,
                shape=t.shape,
                start=origin + start,
                stop=origin + stop,
            )
            for t, (start, stop) in zip(ordered, itertools.pairwise(stops), strict=True)
        ),
        size_bytes=origin + stops[-1],
    )
