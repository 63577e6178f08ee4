"""The zip around the raw bytes of one tensor, as `torch.save` writes it: made and parsed.

It moves no tensor bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ckpt_storage.errors import InvalidInputError

from .dtypes import DTYPES, DType

PAYLOAD_ALIGN_BYTES = 64
"""Raw bytes in an envelope begin at a multiple of this, as in torch's own files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What stands before and after the `payload_bytes` raw bytes of one tensor.

    The length of `head` is a multiple of `PAYLOAD_ALIGN_BYTES`.
    """

    head: bytes
    tail: bytes
    payload_bytes: int

    @property
    def item_bytes(self) -> int:
        """The length of the whole item."""
        return len(self.head) + self.payload_bytes + len(self.tail)


LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_EXTRA = struct.Struct("<2H")
_EXTRA64 = struct.Struct("<2H2Q")
LOCAL_MAGIC = b"PK\x03\x04"
UTF8_FLAG = 0x0800
_MAX32 = 0xFFFFFFFF

# A date outside 1980 to 2107 makes tools stumble; this is the first day of that span.
_DOS_DATE = 0x0021
_VERSION = 20
_VERSION64 = 45

# An extra field under an id that nobody reads; torch pads with it too.
_PADDING_ID = 0x4246
_PICKLE_NAME = b"archive/data.pkl"
_PAYLOAD_NAME = b"archive/data/0"

_RECORDS = (
    (b"archive/.format_version", b"1"),
    (b"archive/.storage_alignment", str(PAYLOAD_ALIGN_BYTES).encode()),
    (b"archive/byteorder", b"little"),
    (b"archive/version", b"3\n"),
    # Torch puts a hash of names and CRCs here, and only logs it; zeros say "not computed".
    (b"archive/.data/serialization_id", b"0" * 40),
)


@lru_cache(maxsize=2048)
def tensor_envelope(dtype: str, shape: tuple[int, ...]) -> Envelope:
    """Return the bytes that turn a tensor's raw bytes into an item `torch.load` reads.

    `head` + raw bytes (little-endian, C order) + `tail` is a zip, beyond 4 GiB a zip64, with the
    records that torch 2.13's `torch.save` writes for a plain contiguous CPU tensor. The CRC-32 of
    the raw bytes in it is 0, because the head is written before they are known. Torch checks none;
    `unzip -t` reports it. Raises `InvalidInputError` for an unknown dtype or a negative size.
    """
    kind = DTYPES.get(dtype)
    if kind is None or min(shape, default=0) < 0:
        raise InvalidInputError(
            f"A tensor of dtype {dtype!r} and shape {shape} cannot be stored.",
            next_step=f"Use sizes from 0 on and one of the dtypes {', '.join(DTYPES)}.",
        )
    element_count = prod(shape)
    payload_bytes = element_count * kind.item_bytes
    head = central = b""
    for name, content in ((_PICKLE_NAME, _tensor_pickle(kind, shape, element_count)), *_RECORDS):
        crc = zlib.crc32(content)
        central += _central_header(name, crc, len(content), len(head))
        head += _local_header(name, crc, len(content)) + content
    start, wide = len(head), payload_bytes >= _MAX32
    extra = _EXTRA64.pack(1, 16, payload_bytes, payload_bytes) if wide else b""
    version = _VERSION64 if wide else _VERSION
    stored_bytes = _MAX32 if wide else payload_bytes
    unpadded = start + LOCAL_HEADER.size + len(_PAYLOAD_NAME) + len(extra) + _EXTRA.size
    padding = -unpadded % PAYLOAD_ALIGN_BYTES
    head += _local_header(_PAYLOAD_NAME, 0, stored_bytes, len(extra) + 4 + padding, version)
    head += extra + _EXTRA.pack(_PADDING_ID, padding) + b"Z" * padding
    central += _central_header(_PAYLOAD_NAME, 0, stored_bytes, start, extra, version)
    tail = central + _end_of_zip(len(head) + payload_bytes, len(central))
    return Envelope(head=head, tail=tail, payload_bytes=payload_bytes)


def _local_header(
    name: bytes, crc: int, stored_bytes: int, extra_bytes: int = 0, version: int = _VERSION
) -> bytes:
    fields = (version, UTF8_FLAG, 0, 0, _DOS_DATE, crc, stored_bytes, stored_bytes)
    return LOCAL_HEADER.pack(LOCAL_MAGIC, *fields, len(name), extra_bytes) + name


def _central_header(
    name: bytes,
    crc: int,
    stored_bytes: int,
    offset: int,
    extra: bytes = b"",
    version: int = _VERSION,
) -> bytes:
    fields = (version, version, UTF8_FLAG, 0, 0, _DOS_DATE, crc, stored_bytes, stored_bytes)
    rest = (len(name), len(extra), 0, 0, 0, 0, offset)
    return _CENTRAL.pack(b"PK\x01\x02", *fields, *rest) + name + extra


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
    """Return what torch pickles for a contiguous tensor, without its unused memo entries."""
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
            _pickle_text(b"storage") + b"c" + storage + b"\n",
            _pickle_text(b"0") + _pickle_text(b"cpu") + _pickle_int(element_count) + b"tQK\x00",
            _pickle_tuple(shape) + _pickle_tuple(stride[::-1]),
            b"\x89ccollections\nOrderedDict\n)R" + last + b"tR.",
        )
    )


# The opcodes for tuples of so many values; longer ones take a MARK.
_TUPLE_OF = (b")", b"\x85", b"\x86", b"\x87")


def _pickle_text(text: bytes) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text


def _pickle_int(value: int) -> bytes:
    if value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    length_bytes = value.bit_length() // 8 + 1
    return b"\x8a" + length_bytes.to_bytes(1, "little") + value.to_bytes(length_bytes, "little")


def _pickle_tuple(values: Sequence[int]) -> bytes:
    body = b"".join(map(_pickle_int, values))
    if len(values) < len(_TUPLE_OF):
        return body + _TUPLE_OF[len(values)]
    return b"(" + body + b"t"
