"""What the first bytes of an item of a shard file say: its type, shape and payload."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import prod

from ckpt_storage.errors import FormatError, IntegrityError

from .dtypes import DTYPES, DType
from .inert_pickle import (
    Allowed,
    ForbiddenGlobalError,
    Global,
    Pairs,
    PersistentId,
    PickleMalformedError,
    PickleTruncatedError,
    Record,
    build_ordered_dict,
    interpret,
)
from .shard_item import LOCAL_HEADER, LOCAL_MAGIC, UTF8_FLAG


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedMoreBytes:
    """The header does not end in the bytes given; read again at least `total_bytes` from its start.

    That may be a guess, and the same answer may come again with a larger one.
    """

    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemHeader:
    """Where the raw bytes of a plain tensor, C-ordered and little-endian, lie in its item."""

    dtype: str
    shape: tuple[int, ...]
    payload_offset: int
    payload_bytes: int


# Torch's own heads are about 1 KiB; whatever needs more than this is not plain.
_MAX_HEAD_BYTES = 1 << 20
_GUESS_BYTES = 4096

# Magic, CRC-32 and two lengths of 32 bits: only records behind 4 GiB have longer ones.
_DESCRIPTOR_BYTES = 16
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_DESCRIPTOR_FLAG = 0x0008
_TYPED_REBUILD = "torch._utils._rebuild_tensor_v2"
_UNTYPED_REBUILD = "torch._utils._rebuild_tensor_v3"
_PARAMETER_REBUILD = "torch._utils._rebuild_parameter"
_UNTYPED_STORAGE = "torch.storage.UntypedStorage"
_DTYPE_OF_STORAGE = {f"torch.{d.storage_class}": d for d in DTYPES.values() if d.storage_class}
_DTYPE_OF_GLOBAL = {f"torch.{name}": kind for name, kind in DTYPES.items()}

_ALLOWED: Allowed = {
    **dict.fromkeys((_TYPED_REBUILD, _UNTYPED_REBUILD, _PARAMETER_REBUILD, _UNTYPED_STORAGE)),
    **dict.fromkeys((*_DTYPE_OF_STORAGE, *_DTYPE_OF_GLOBAL)),
    "collections.OrderedDict": build_ordered_dict,
}
_RESTORE = "Restore the file from a copy, or load another checkpoint."


class _NotPlainError(Exception):
    """The item is one for `torch.load` to read."""


class _TooShortError(Exception):
    """At least as many bytes of the item are needed as its argument says."""


def parse_tensor_item(
    head: bytes, *, item_bytes: int, path: str | None = None
) -> ItemHeader | NeedMoreBytes | None:
    """Find dtype, shape and raw bytes of a tensor in the first bytes of its item.

    Reads what `torch.save` of torch 2.0 and later writes, and what `tensor_envelope` returns,
    without running the pickle inside; 4 KiB of `head` are nearly always enough. None if the item is
    no plain contiguous tensor or parameter that fills its storage: the whole item, of `item_bytes`,
    is one for `torch.load(weights_only=True)`. Raises `FormatError` for bytes that are no zip, and
    for an item that ends before its tensor; `IntegrityError` for a record with a wrong CRC-32.
    """
    if not head.startswith(LOCAL_MAGIC[: len(head)]):
        raise FormatError(
            f"The item of {path or 'a shard file'} does not begin as one of torch.save does.",
            path=path,
            next_step="Check that its offset comes from the metadata beside it.",
        )
    try:
        found = _parse_item(head, path)
    except _TooShortError as short:
        wanted: int = short.args[0]
        if wanted <= item_bytes or len(head) < item_bytes:
            wanted = min(wanted, item_bytes)
            return NeedMoreBytes(total_bytes=wanted) if wanted <= _MAX_HEAD_BYTES else None
    except (_NotPlainError, PickleMalformedError, PickleTruncatedError, ForbiddenGlobalError):
        return None
    else:
        if found.payload_offset + found.payload_bytes <= item_bytes:
            return found
    raise FormatError(
        f"The item of {path or 'a shard file'} ends after {item_bytes} bytes, "
        "before the tensor that it announces.",
        path=path,
        next_step=_RESTORE,
    )


def _parse_item(head: bytes, path: str | None) -> ItemHeader:
    """Walk the local headers up to the payload's; what lies behind it is not looked at."""
    plain: tuple[DType, tuple[int, ...], bytes] | None = None
    at = 0
    while True:
        name_start = at + LOCAL_HEADER.size
        _need(head, name_start)
        magic, _, flags, method, _, _, crc, stored_bytes, _, name_bytes, extra_bytes = (
            LOCAL_HEADER.unpack_from(head, at)
        )
        if magic != LOCAL_MAGIC or method or flags & ~(UTF8_FLAG | _DESCRIPTOR_FLAG):
            raise _NotPlainError
        start = name_start + name_bytes + extra_bytes
        _need(head, start)
        # The first part is the archive's own name, which torch takes from the file's.
        name = head[name_start : name_start + name_bytes].partition(b"/")[2]
        if name.startswith(b"data/"):
            if plain is None or name != plain[2]:
                raise _NotPlainError
            dtype, shape, _ = plain
            size = prod(shape) * dtype.item_bytes
            return ItemHeader(
                dtype=dtype.name, shape=shape, payload_offset=start, payload_bytes=size
            )
        end = at = start + stored_bytes
        if flags & _DESCRIPTOR_FLAG:
            # Length and CRC stand behind the content instead.
            end = _described_end(head, start)
            crc = int.from_bytes(head[end + 4 : end + 8], "little")
            at = end + _DESCRIPTOR_BYTES
        _need(head, at)
        content = head[start:end]
        # `torch.serialization.set_crc32_options(False)` leaves all of them 0.
        if crc and crc != zlib.crc32(content):
            raise IntegrityError(
                f"The record {name.decode(errors='replace')!r} of an item of "
                f"{path or 'a shard file'} is damaged, {start} bytes behind the item's start.",
                path=path,
                next_step=_RESTORE,
            )
        if name == b"data.pkl":
            plain = _plain_tensor(interpret(content, allowed=_ALLOWED)[0])
        elif name == b"byteorder" and content != b"little":
            raise _NotPlainError


def _need(head: bytes, total_bytes: int) -> None:
    if len(head) < total_bytes:
        raise _TooShortError(max(_GUESS_BYTES, total_bytes))


def _described_end(head: bytes, start: int) -> int:
    """Return where the content at `start` ends, whose length stands only behind it."""
    end = head.find(_DESCRIPTOR_MAGIC, start)
    while 0 <= end <= len(head) - _DESCRIPTOR_BYTES:
        if int.from_bytes(head[end + 8 : end + 12], "little") == end - start:
            return end
        end = head.find(_DESCRIPTOR_MAGIC, end + 1)
    raise _TooShortError(max(_GUESS_BYTES, 2 * len(head)))


def _plain_tensor(value: object) -> tuple[DType, tuple[int, ...], bytes]:
    """Return dtype, shape and record of a tensor that is contiguous and fills its storage."""
    match value:
        case Record(name=name, args=(inner, bool(), Pairs() as hooks), state=None) if (
            name == _PARAMETER_REBUILD and not hooks
        ):
            return _plain_tensor(inner)
        case Record(
            name=name,
            args=(
                PersistentId(pid=("storage", Global(name=storage), str(key), str(), int(count))),
                0,
                tuple(shape),
                tuple(stride),
                bool(),
                Pairs() as hooks,
                *more,
            ),
            state=None,
        ) if not hooks:
            dtype, unit_bytes = _storage_type(name, storage, more)
        case _:
            raise _NotPlainError
    if not _is_contiguous(shape, stride) or prod(shape) * dtype.item_bytes != count * unit_bytes:
        raise _NotPlainError
    return dtype, shape, b"data/" + key.encode()


def _storage_type(rebuild: str, storage: str, more: list[object]) -> tuple[DType, int]:
    """Return the element type and the size in bytes of the unit the storage is counted in."""
    match more:
        case [] if rebuild == _TYPED_REBUILD and storage in _DTYPE_OF_STORAGE:
            dtype = _DTYPE_OF_STORAGE[storage]
            return dtype, dtype.item_bytes
        case [Global(name=name)] if (
            rebuild == _UNTYPED_REBUILD and storage == _UNTYPED_STORAGE and name in _DTYPE_OF_GLOBAL
        ):
            return _DTYPE_OF_GLOBAL[name], 1
    raise _NotPlainError


def _is_contiguous(shape: tuple[object, ...], stride: tuple[object, ...]) -> bool:
    """Return whether the elements lie in C order without gaps; False for what are no sizes."""
    sizes = [size for size in shape if type(size) is int and size >= 0]
    if len(sizes) != len(shape) or len(stride) != len(shape):
        return False
    step = 1
    for size, given in zip(reversed(sizes), reversed(stride), strict=True):
        # Nothing is ever stepped over along a dimension of one element.
        if size != 1 and given != step and 0 not in sizes:
            return False
        step *= size
    return True
