"""Items of DCP's plans as they travel between ranks: in columns, not object by object.

Knows DCP's plans and pickle; knows no storage. Called by `writer` and `reader`, whose hooks return
the plans that torch's collectives, or ours, then pickle. Pickled as objects an item takes some
40 us on its way, most of it for the sizes in it; of thousands of items few differ in more than the
name.

The other side unpickles a plain list of equal items, each of objects of its own, as it would have
without this; so planners notice nothing. The rank that coordinates finds its own items again, as
torch does it where there is one rank only. Items of other classes than torch's travel as ever.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import secrets
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from .collecting import collector_paused

__all__ = ["packable"]

_Plan = TypeVar("_Plan", SavePlan, LoadPlan)
_Columns = tuple[Sequence[str], Sequence[int], Sequence[tuple[Any, ...]]]

_FIELDS: dict[type, tuple[str, ...]] = {
    WriteItem: ("index", "type", "bytes_io_data", "tensor_data"),
    TensorWriteData: ("chunk", "properties", "size"),
    BytesIOWriteData: ("nbytes",),
    ChunkStorageMetadata: ("offsets", "sizes"),
    TensorProperties: ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"),
    MetadataIndex: ("fqn", "offset", "index"),
    ReadItem: (
        *("type", "dest_index", "dest_offsets"),
        *("storage_index", "storage_offsets", "lengths"),
    ),
}

_IS_KNOWN = all(
    tuple(field.name for field in dataclasses.fields(kind)) == names
    for kind, names in _FIELDS.items()
)
"""Whether torch's classes have the fields that they had when this was written, and no others."""


def packable(plan: _Plan) -> _Plan:
    """Return the plan with a list of the same items that pickles in columns where it can."""
    if not _IS_KNOWN or type(plan.items) is not list:
        return plan
    return dataclasses.replace(plan, items=_Items(plan.items))


_Token = tuple[int, str, int]
"""A process, what tells it from others with its number, and a list of items in it."""

_NONCE = secrets.token_hex(16)
_HERE: weakref.WeakValueDictionary[int, _Items] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class _Items(list[Any]):
    """A list of plan items; what is unpickled of it is a plain list."""

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., list[Any]], tuple[Any, ...]]:
        number = next(_NUMBERS)
        _HERE[number] = self
        token = (os.getpid(), _NONCE, number)
        first = type(self[0]) if self else None
        written = _write_columns(self) if first is WriteItem else None
        if written is not None:
            return _arrived, (token, _write_items, written)
        read = _read_columns(self) if first is ReadItem else None
        return (_arrived, (token, _read_items, read)) if read else (list, (list(self),))

    def __copy__(self) -> list[Any]:
        return list(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return copy.deepcopy(list(self), memo)


def _arrived(token: _Token, make: Callable[..., list[Any]], columns: tuple[Any, ...]) -> list[Any]:
    """Return the items; those themselves where they come from this process and are still there."""
    process, nonce, number = token
    found = _HERE.get(number) if (process, nonce) == (os.getpid(), _NONCE) else None
    if found is not None:
        return list(found)
    with collector_paused():
        return make(*columns)


def _is_index(index: object) -> bool:
    """Return whether this is an index as torch's planners make them."""
    return (
        type(index) is MetadataIndex
        and (index.offset is None or type(index.offset) is torch.Size)
        and (index.index is None or type(index.index) is int)
    )


def _write_columns(items: Iterable[WriteItem]) -> _Columns | None:
    """Return names, the form of each, and the different forms; None if items are not plain."""
    size = torch.Size
    fqns: list[str] = []
    column = array("I")
    # By identity, because hashing a member of an enumeration takes longer than all else.
    numbers: dict[tuple[Any, ...], int] = {}
    forms: list[tuple[Any, ...]] = []
    for item in items:
        if type(item) is not WriteItem or not _is_index(item.index):
            return None
        index, data, blob = item.index, item.tensor_data, item.bytes_io_data
        if blob is not None and type(blob) is not BytesIOWriteData:
            return None
        key: tuple[Any, ...] = (id(item.type), index.offset, index.index, blob)
        if data is not None:
            chunk, kept = data.chunk, data.properties
            if (
                type(data) is not TensorWriteData
                or type(chunk) is not ChunkStorageMetadata
                or type(kept) is not TensorProperties
                or not (type(chunk.offsets) is type(chunk.sizes) is type(data.size) is size)
            ):
                return None
            key += (
                *(chunk.offsets, chunk.sizes, data.size, kept.dtype, kept.layout),
                *(kept.requires_grad, kept.memory_format, kept.pin_memory),
            )
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(forms)
            tensor = None
            if data is not None:
                tensor = (*map(tuple, key[4:7]), data.properties)
            forms.append((item.type, _plain(index.offset), index.index, blob, tensor))
        fqns.append(index.fqn)
        column.append(number)
    return fqns, column, forms


def _plain(size: torch.Size | None) -> tuple[int, ...] | None:
    # Torch's own takes ten times as long to pickle.
    return None if size is None else tuple(size)


def _sized(size: tuple[int, ...] | None) -> torch.Size | None:
    return None if size is None else torch.Size(size)


def _write_items(
    fqns: Sequence[str], column: Sequence[int], forms: Sequence[tuple[Any, ...]]
) -> list[WriteItem]:
    makers = [_write_maker(*form) for form in forms]
    return [makers[number](fqn) for fqn, number in zip(fqns, column, strict=True)]


def _write_maker(
    kind: WriteItemType,
    offset: tuple[int, ...] | None,
    hint: int | None,
    blob: BytesIOWriteData | None,
    tensor: tuple[Any, ...] | None,
) -> Callable[[str], WriteItem]:
    """Return what makes an item of a name. No two share an object that may be changed."""
    at = _sized(offset)
    if tensor is None:
        return lambda fqn: WriteItem(MetadataIndex(fqn, at, hint), kind, blob)
    offsets, sizes, size = map(torch.Size, tensor[:3])
    kept: TensorProperties = tensor[3]
    values = (
        *(kept.dtype, kept.layout, kept.requires_grad),
        *(kept.memory_format, kept.pin_memory),
    )

    def made(fqn: str) -> WriteItem:
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(*values), size
        )
        return WriteItem(MetadataIndex(fqn, at, hint), kind, blob, data)

    return made


def _read_columns(items: Iterable[ReadItem]) -> tuple[Any, ...] | None:
    """Return names of targets and of what is stored, the form of each, the different forms."""
    size = torch.Size
    targets: list[str] = []
    stored: list[str] = []
    column = array("I")
    numbers: dict[tuple[Any, ...], int] = {}
    forms: list[tuple[Any, ...]] = []
    for item in items:
        if (
            type(item) is not ReadItem
            or not _is_index(item.dest_index)
            or not _is_index(item.storage_index)
            or type(item.dest_offsets) is not size
            or type(item.storage_offsets) is not size
            or type(item.lengths) is not size
        ):
            return None
        dest, source = item.dest_index, item.storage_index
        key = (
            *(id(item.type), dest.offset, dest.index, item.dest_offsets),
            *(source.offset, source.index, item.storage_offsets, item.lengths),
        )
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(forms)
            forms.append(
                (
                    *(item.type, _plain(dest.offset), dest.index, tuple(item.dest_offsets)),
                    *(_plain(source.offset), source.index),
                    *(tuple(item.storage_offsets), tuple(item.lengths)),
                )
            )
        targets.append(dest.fqn)
        stored.append(source.fqn)
        column.append(number)
    return targets, None if stored == targets else stored, column, forms


def _read_items(
    targets: Sequence[str],
    stored: Sequence[str] | None,
    column: Sequence[int],
    forms: Sequence[tuple[Any, ...]],
) -> list[ReadItem]:
    makers = [_read_maker(*form) for form in forms]
    names = zip(targets, targets if stored is None else stored, strict=True)
    return [makers[number](*pair) for pair, number in zip(names, column, strict=True)]


def _read_maker(  # the fields of a form
    kind: LoadItemType,
    dest: tuple[int, ...] | None,
    dest_hint: int | None,
    dest_offsets: tuple[int, ...],
    source: tuple[int, ...] | None,
    source_hint: int | None,
    storage_offsets: tuple[int, ...],
    lengths: tuple[int, ...],
) -> Callable[[str, str], ReadItem]:
    dest_at, source_at = _sized(dest), _sized(source)
    first, second, third = map(torch.Size, (dest_offsets, storage_offsets, lengths))

    return lambda target, stored: ReadItem(
        kind,
        MetadataIndex(target, dest_at, dest_hint),
        first,
        MetadataIndex(stored, source_at, source_hint),
        second,
        third,
    )
