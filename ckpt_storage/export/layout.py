"""What output files are made of: a list of segments each, without holes.

Pure values. A layout says nothing of ranks, of storages, or of which file a stored byte lies in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, TypeVar

from ckpt_storage.format.boxes import Box
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.source.model import TensorInfo

T = TypeVar("T")

Reason = Literal["blob", "optimizer", "training state", "outside the model", "excluded", "tied"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A value of the checkpoint that is in no weight file.

    `because` says it for people; for reason "tied" `target` is the FQN that stands for it.
    `size_bytes` is None for a blob.
    """

    fqn: str
    reason: Reason
    because: str
    size_bytes: int | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that are known before anything is read: headers, frames, padding, documents."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """A box of a tensor, its elements in C order, each cast to `dtype` if that is another.

    `name` is what the file calls it, `fqn` what the checkpoint does.
    """

    name: str
    fqn: str
    box: Box
    source_dtype: str
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return self.box.volume * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one element as written."""
        return DTYPES[self.dtype].item_bytes

    @property
    def source_item_bytes(self) -> int:
        """Bytes of one element as stored."""
        return DTYPES[self.source_dtype].item_bytes


def elements_of(
    info: TensorInfo, box: Box | None = None, *, name: str = "", dtype: str = ""
) -> Elements:
    """Return a box of a tensor, by default the whole under its FQN, as it is stored."""
    return Elements(
        name=name or info.fqn,
        fqn=info.fqn,
        box=box or Box((0,) * len(info.shape), info.shape),
        source_dtype=info.dtype,
        dtype=dtype or info.dtype,
    )


def boxes_of(info: TensorInfo) -> list[Box]:
    """Return the chunks of a tensor, each once; one for a tensor without elements."""
    boxes = list(dict.fromkeys(box for box in info.boxes if not box.is_empty))
    return boxes or [elements_of(info).box]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Stored bytes as they are: a value that is no tensor (`fqn`), or a whole file (`path`)."""

    size_bytes: int
    fqn: str = ""
    path: str = ""

    dtype: ClassVar[str] = "uint8"
    source_dtype: ClassVar[str] = "uint8"
    item_bytes: ClassVar[int] = 1
    source_item_bytes: ClassVar[int] = 1

    @property
    def box(self) -> Box:
        """Its bytes as elements."""
        return Box((0,), (self.size_bytes,))


Segment = Fixed | Elements | Stored


@dataclass(frozen=True, kw_only=True)
class OutFile:
    """One output file; `number` counts from 1.

    `crc32c` is that of the whole file where it is known before. With `edges`, which ascend and of
    which the last is the end, the writer also tells the checksums of what lies between them.
    """

    number: int
    name: str
    segments: Sequence[Segment]
    crc32c: int | None = None
    edges: Sequence[int] = ()

    @cached_property
    def starts(self) -> Sequence[int]:
        """Where each segment begins, and then where the last one ends."""
        return list(itertools.accumulate((one.size_bytes for one in self.segments), initial=0))

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return self.starts[-1]

    @property
    def elements(self) -> list[Elements]:
        """The tensors, or parts of them, in their order."""
        return [one for one in self.segments if isinstance(one, Elements)]


def split_by_size(
    values: Iterable[T], max_file_bytes: int, size_of: Callable[[T], int]
) -> list[list[T]]:
    """Return the values per file, cut as Hugging Face's libraries cut.

    A file is closed by the first value that would not fit; one that is larger than a file may be
    gets its own, and what came before it goes on filling its file
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
class Layout:
    """All files of an output, in the order of their numbers, and what is in none of them."""

    files: tuple[OutFile, ...]
    skipped: tuple[Skipped, ...] = ()

    @property
    def ties(self) -> Mapping[str, str]:
        """The FQN of every alias that was left out, and that of the tensor that stands for it."""
        return {skip.fqn: skip.target for skip in self.skipped if skip.target is not None}


def lay_out_copies(files: Iterable[tuple[str, str, int, int | None]]) -> Layout:
    """Return files that are those of the source: path, name here, length, CRC-32C if known."""
    return Layout(
        files=tuple(
            OutFile(
                number=number,
                name=name,
                segments=[Stored(path=path, size_bytes=size_bytes)],
                crc32c=crc32c,
            )
            for number, (path, name, size_bytes, crc32c) in enumerate(files, 1)
        )
    )
