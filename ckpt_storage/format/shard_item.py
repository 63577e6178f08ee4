"""A codec of tensor items, zip archives as `torch.save` writes them, without their payloads."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ckpt_storage.errors import FormatError, IntegrityError, InvalidInputError

from .documents import DAMAGED
from .dtypes import DTYPES, DType
from .inert_pickle import (
    Allowed,
    Global,
    Pairs,
    PersistentId,
    PickleMalformedError,
    Record,
    build_ordered_dict,
    interpret,
)

PAYLOAD_ALIGN_BYTES = 64
"""Payloads begin at a multiple of this, as in torch's own files."""

_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_MAGIC = b"PK\x03\x04"
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_EXTRA = struct.Struct("<2H")
_EXTRA64 = struct.Struct("<2H2Q")
_UTF8_FLAG = 0x0800
_MAX32 = 0xFFFFFFFF

# The first day that zip tools accept.
_DOS_DATE = 0x0021
_VERSION = 20
_VERSION64 = 45

# The id of an extra field for padding, as in torch's files.
_PADDING_ID = 0x4246
_PICKLE_NAME = b"archive/data.pkl"
_PAYLOAD_NAME = b"archive/data/0"

_RECORDS = (
    (b"archive/.format_version", b"1"),
    (b"archive/.storage_alignment", str(PAYLOAD_ALIGN_BYTES).encode()),
    (b"archive/byteorder", b"little"),
    (b"archive/version", b"3\n"),
    # Torch writes a hash of names and CRCs here, and only logs it; zeros mean "not computed".
    (b"archive/.data/serialization_id", b"0" * 40),
)


@lru_cache(maxsize=2048)
def tensor_envelope(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the head and tail that make an item for `torch.load` of the raw bytes of a tensor.

    Head + raw bytes (little-endian, C order) + tail is a zip, beyond 4 GiB a zip64, with the
    records that torch 2.13's `torch.save` writes for a plain contiguous CPU tensor. The head ends
    at a multiple of `PAYLOAD_ALIGN_BYTES`. It has the CRC-32 0 for the raw bytes, because it is
    written before they are known; torch does not check it, and `unzip -t` reports it. Raises
    `InvalidInputError` for an unknown dtype or a negative size.
    """
    kind = DTYPES.get(dtype)
    if kind is None or min(shape, default=0) < 0:
        raise InvalidInputError(
            f"A tensor of dtype {dtype!r} and shape {shape} cannot be stored.",
            next_step=f"Use sizes of 0 or more and one of the dtypes {', '.join(DTYPES)}.",
        )
    element_count = prod(shape)
    payload_bytes = element_count * kind.item_bytes
    head = central = b""
    for name, content in ((_PICKLE_NAME, _tensor_pickle(kind, shape, element_count)), *_RECORDS):
        local, entry = _headers(name, zlib.crc32(content), len(content), len(head))
        head += local + content
        central += entry
    extra, version, stored_bytes = b"", _VERSION, payload_bytes
    if payload_bytes >= _MAX32:
        extra = _EXTRA64.pack(1, 16, payload_bytes, payload_bytes)
        version, stored_bytes = _VERSION64, _MAX32
    unpadded = len(head) + _LOCAL.size + len(_PAYLOAD_NAME) + len(extra) + _EXTRA.size
    padding = bytes(-unpadded % PAYLOAD_ALIGN_BYTES).replace(b"\0", b"Z")
    padding = _EXTRA.pack(_PADDING_ID, len(padding)) + padding
    local, entry = _headers(_PAYLOAD_NAME, 0, stored_bytes, len(head), version, extra, padding)
    head += local
    central += entry
    return head, central + _end_of_zip(len(head) + payload_bytes, len(central))


def _headers(
    name: bytes,
    crc: int,
    stored_bytes: int,
    offset: int,
    version: int = _VERSION,
    extra: bytes = b"",
    padding: bytes = b"",
) -> tuple[bytes, bytes]:
    """Return the local header of a record, and its entry in the central directory."""
    fields = (version, _UTF8_FLAG, 0, 0, _DOS_DATE, crc, stored_bytes, stored_bytes, len(name))
    local = _LOCAL.pack(_LOCAL_MAGIC, *fields, len(extra + padding))
    entry = _CENTRAL.pack(b"PK\x01\x02", version, *fields, len(extra), 0, 0, 0, 0, offset)
    return local + name + extra + padding, entry + name + extra


def _end_of_zip(central_start: int, central_bytes: int) -> bytes:
    count = len(_RECORDS) + 2
    if central_start < _MAX32:
        return _END.pack(b"PK\x05\x06", 0, 0, count, count, central_bytes, central_start, 0)
    fields = (44, _VERSION64, _VERSION64, 0, 0, count, count, central_bytes, central_start)
    return (
        _END64.pack(b"PK\x06\x06", *fields)
        + _LOCATOR64.pack(b"PK\x06\x07", 0, central_start + central_bytes, 1)
        + _END.pack(b"PK\x05\x06", 0, 0, count, count, central_bytes, _MAX32, 0)
    )


def _tensor_pickle(kind: DType, shape: tuple[int, ...], element_count: int) -> bytes:
    """Return torch's pickle of a contiguous tensor, without the unused memo entries."""
    rebuild, storage, last = b"_rebuild_tensor_v2", b"torch\n", b""
    if kind.storage_class is not None:
        storage += kind.storage_class.encode()
    else:
        rebuild, storage = b"_rebuild_tensor_v3", b"torch.storage\nUntypedStorage"
        last = b"ctorch\n" + kind.name.encode() + b"\n"
        element_count *= kind.item_bytes
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return b"".join(
        (
            b"\x80\x02ctorch._utils\n" + rebuild + b"\n((",
            _pickled("storage") + b"c" + storage + b"\n",
            _pickled("0") + _pickled("cpu") + _pickled(element_count) + b"tQK\x00",
            _pickled(tuple(shape)) + _pickled(tuple(stride[::-1])),
            b"\x89ccollections\nOrderedDict\n)R" + last + b"tR.",
        )
    )


def _pickled(value: object) -> bytes:
    out = io.BytesIO()
    pickler = pickle.Pickler(out, 2)
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()[2:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedMoreBytes:
    """The header is longer than the bytes: read at least `total_bytes` from its start.

    The number may be a guess: parse again, and read more if necessary.
    """

    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemHeader:
    """The place of the raw bytes of a plain tensor, C-ordered and little-endian, in its item."""

    dtype: str
    shape: tuple[int, ...]
    payload_offset: int
    payload_bytes: int


# Torch's heads have about 1 KiB; an item with a longer head is not plain.
_MAX_HEAD_BYTES = 1 << 20
_GUESS_BYTES = 4096

# Magic, CRC-32 and two 32-bit lengths; only records beyond 4 GiB have longer descriptors.
_DESCRIPTOR_BYTES = 16
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_DESCRIPTOR_FLAG = 0x0008
_TYPED_REBUILD = "torch._utils._rebuild_tensor_v2"
_UNTYPED_REBUILD = "torch._utils._rebuild_tensor_v3"
_PARAMETER_REBUILD = "torch._utils._rebuild_parameter"
_UNTYPED_STORAGE = "torch.storage.UntypedStorage"
_TYPED = {f"torch.{kind.storage_class}": kind for kind in DTYPES.values() if kind.storage_class}
_DTYPES = {f"torch.{name}": kind for name, kind in DTYPES.items()}
_KINDS: dict[tuple[str | None, ...], tuple[DType, int]] = {
    **{(_TYPED_REBUILD, storage): (kind, kind.item_bytes) for storage, kind in _TYPED.items()},
    **{(_UNTYPED_REBUILD, _UNTYPED_STORAGE, name): (kind, 1) for name, kind in _DTYPES.items()},
}
"""The dtype, and the bytes of the unit of the storage's size, by the names in the pickle."""

_ALLOWED: Allowed = {
    **dict.fromkeys((_TYPED_REBUILD, _UNTYPED_REBUILD, _PARAMETER_REBUILD, _UNTYPED_STORAGE)),
    **dict.fromkeys((*_TYPED, *_DTYPES)),
    "collections.OrderedDict": build_ordered_dict,
}


class _NotPlainError(Exception):
    """Only `torch.load` can read the item."""


class _TooShortError(Exception):
    """The parser needs the first `args[0]` bytes of the item."""


def parse_tensor_item(
    head: bytes, *, item_bytes: int, path: str | None = None
) -> ItemHeader | NeedMoreBytes | None:
    """Return dtype, shape and place of the raw bytes of a tensor from the first bytes of its item.

    Reads items of `torch.save` of torch 2.0 and later, and of `tensor_envelope`, without running
    the pickle inside; 4 KiB of `head` are nearly always enough. None if the item is not a plain
    contiguous tensor or parameter that fills its storage: then `torch.load(weights_only=True)` has
    to read the whole item, of `item_bytes`. Raises `FormatError` for bytes that are no zip, and for
    an item that ends before its tensor; `IntegrityError` for a record with a wrong CRC-32.
    """
    if not head.startswith(_LOCAL_MAGIC[: len(head)]):
        what = f"An item of {path or 'a shard file'} does not begin as items of torch.save do."
        raise FormatError(
            what, path=path, next_step="Check that its offset comes from the metadata beside it."
        )
    try:
        item = _parse_item(head, path)
    except _TooShortError as short:
        wanted: int = short.args[0]
        if wanted <= item_bytes or len(head) < item_bytes:
            wanted = min(wanted, item_bytes)
            return NeedMoreBytes(total_bytes=wanted) if wanted <= _MAX_HEAD_BYTES else None
    except (_NotPlainError, PickleMalformedError):
        return None
    else:
        if item.payload_offset + item.payload_bytes <= item_bytes:
            return item
    what = (
        f"An item of {path or 'a shard file'} ends after {item_bytes} bytes, before the end of its "
        "tensor."
    )
    raise FormatError(what, path=path, next_step=DAMAGED)


def _parse_item(head: bytes, path: str | None) -> ItemHeader:
    plain: tuple[DType, tuple[int, ...], bytes] | None = None
    at = 0
    while True:
        name_start = at + _LOCAL.size
        _need(head, name_start)
        magic, _, flags, method, _, _, crc, stored_bytes, _, name_bytes, extra_bytes = (
            _LOCAL.unpack_from(head, at)
        )
        if magic != _LOCAL_MAGIC or method or flags & ~(_UTF8_FLAG | _DESCRIPTOR_FLAG):
            raise _NotPlainError
        start = name_start + name_bytes + extra_bytes
        _need(head, start)
        # The first component is the name of the archive, which torch takes from the file name.
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
            # Length and CRC follow the content instead.
            end = _described_end(head, start)
            crc = int.from_bytes(head[end + 4 : end + 8], "little")
            at = end + _DESCRIPTOR_BYTES
        _need(head, at)
        content = head[start:end]
        # `torch.serialization.set_crc32_options(False)` leaves all of them 0.
        if crc and crc != zlib.crc32(content):
            what = (
                f"The record {name.decode(errors='replace')!r} of an item of "
                f"{path or 'a shard file'} is damaged, {start} bytes after the start of the item."
            )
            raise IntegrityError(what, path=path, next_step=DAMAGED)
        if name == b"data.pkl":
            plain = _plain_tensor(interpret(content, _ALLOWED))
        elif name == b"byteorder" and content != b"little":
            raise _NotPlainError


def _need(head: bytes, total_bytes: int) -> None:
    if len(head) < total_bytes:
        raise _TooShortError(max(_GUESS_BYTES, total_bytes))


def _described_end(head: bytes, start: int) -> int:
    """Return the end of the content at `start`, whose length follows it in a descriptor."""
    end = head.find(_DESCRIPTOR_MAGIC, start)
    while 0 <= end <= len(head) - _DESCRIPTOR_BYTES:
        if int.from_bytes(head[end + 8 : end + 12], "little") == end - start:
            return end
        end = head.find(_DESCRIPTOR_MAGIC, end + 1)
    raise _TooShortError(max(_GUESS_BYTES, 2 * len(head)))


def _plain_tensor(value: object) -> tuple[DType, tuple[int, ...], bytes]:
    """Return dtype, shape and record name of a contiguous tensor that fills its storage."""
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
            last = (link.name if isinstance(link, Global) else None for link in more)
            kind = (name, storage, *last)
        case _:
            raise _NotPlainError
    if kind not in _KINDS:
        raise _NotPlainError
    dtype, unit_bytes = _KINDS[kind]
    if not _is_contiguous(shape, stride) or prod(shape) * dtype.item_bytes != count * unit_bytes:
        raise _NotPlainError
    return dtype, shape, b"data/" + key.encode()


def _is_contiguous(shape: tuple[object, ...], stride: tuple[object, ...]) -> bool:
    """Return whether the elements are in C order without gaps; False for invalid sizes."""
    sizes = [size for size in shape if type(size) is int and size >= 0]
    if len(sizes) != len(shape) or len(stride) != len(shape):
        return False
    step = 1
    for size, actual in zip(reversed(sizes), reversed(stride), strict=True):
        # The stride of a dimension with one element does not matter.
        if size != 1 and actual != step and 0 not in sizes:
            return False
        step *= size
    return True
