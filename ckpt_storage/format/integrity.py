"""CRC-32C of blocks, how such checksums combine, and documents that carry their own.

numpy is imported by the functions that need it, so that small documents do without.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ckpt_storage.errors import FormatError, IntegrityError, InvalidInputError

from .ceilings import MOST_DOCUMENT_BYTES
from .checksums import crc32c_of, crcs_of_blocks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = [
    "BlockHasher",
    "block_crcs",
    "check_format",
    "combine",
    "combine_blocks",
    "combine_each",
    "combine_many",
    "crc32c_of",
    "decode_crcs",
    "encode_crcs",
    "encode_format",
    "first_wrong_block",
    "seal",
    "unseal",
]

_POLYNOMIAL = 0x82F63B78
_ALL_ONES = 0xFFFFFFFF
# Polynomials are reflected, as in the checksum itself: the highest bit is the coefficient of 1.
_ONE = 1 << 31
_X = 1 << 30

# Below this many blocks plain integers beat numpy's cost per call.
_SCALAR_BLOCK_COUNT = 10

_HEAD = b'{"crc32c":"'
_MIDDLE = b'","body":'
_TAIL = b"}\n"
_DIGITS = slice(len(_HEAD), len(_HEAD) + 8)
_BODY_START = _DIGITS.stop + len(_MIDDLE)
_FORMAT = re.compile(r"ckpt_storage\.([a-z][a-z0-9_]*)/([1-9][0-9]{0,8})")

_RESTORE = "Restore the file from a copy, or load another checkpoint."
_WRONG_FILE = "Check that the URL names a checkpoint and that no other program wrote the file."


def first_wrong_block(
    view: memoryview, block_bytes: int, crcs: Sequence[int], first_block: int
) -> int | None:
    """Return where in `view` the first block begins that has another CRC-32C than it should.

    `view` is of bytes and begins with block `first_block`, whose checksum is at that place in
    `crcs`; its last block may be shorter. None if all are right.
    """
    found = crcs_of_blocks(view, block_bytes)
    if found == list(crcs[first_block : first_block + len(found)]):
        return None
    for number, crc in enumerate(found):
        if crc != crcs[first_block + number]:
            return number * block_bytes
    return None


class BlockHasher:
    """CRC-32C of each block of a payload that arrives in pieces of any length.

    Blocks are counted from the start of the payload; the last one may be shorter, and an empty
    payload has none. Nothing is copied. Not safe to share between threads.
    """

    __slots__ = ("_block_bytes", "_crc", "_crcs", "_filled_bytes")

    def __init__(self, block_bytes: int) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes is {block_bytes}")
        self._block_bytes = block_bytes
        self._crcs: array[int] = array("I")
        self._crc = 0
        self._filled_bytes = 0

    def update(self, data: Buffer) -> None:
        """Append a C-contiguous buffer of any element type to the payload."""
        view = memoryview(data)
        size = view.nbytes
        if not size:
            # A view with a zero in its shape cannot be cast.
            return
        if view.ndim != 1 or view.format != "B":
            view = view.cast("B")
        block = self._block_bytes
        start = 0
        if self._filled_bytes:
            start = min(block - self._filled_bytes, size)
            self._crc = crc32c_of(view[:start], self._crc)
            self._filled_bytes += start
            if self._filled_bytes < block:
                return
            self._crcs.append(self._crc)
        rest = size - (size - start) % block
        self._crcs.extend(crcs_of_blocks(view[start:rest], block))
        self._filled_bytes = size - rest
        self._crc = crc32c_of(view[rest:])

    def finish(self) -> array[int]:
        """Return the checksums of all blocks (type code "I"), and begin a new payload."""
        crcs = self._crcs
        if self._filled_bytes:
            crcs.append(self._crc)
        self._crcs = array("I")
        self._crc = self._filled_bytes = 0
        return crcs


def block_crcs(buffers: Iterable[Buffer], block_bytes: int) -> array[int]:
    """Return the CRC-32C of each block of a payload given as consecutive buffers.

    Buffers may end anywhere in a block. See `BlockHasher`.
    """
    hasher = BlockHasher(block_bytes)
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.finish()


def combine(crc_a: int, crc_b: int, length_b: int) -> int:
    """Return the CRC-32C of A followed by B, where B has `length_b` bytes.

    The method is that of `crc32_combine` in zlib 1.2.12 and later (Mark Adler): multiply the
    checksum of A by x^(8 length_b) modulo the polynomial and add that of B. Here with
    Castagnoli's polynomial. Takes about 5 us for a length seen before, 80 us for a new one.
    """
    return _multiply(_power(length_b), crc_a) ^ crc_b


def combine_many(crcs: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the CRC-32C of a concatenation; piece i has checksum `crcs[i]`, `lengths[i]` bytes.

    Raises `ValueError` if the sequences differ in length.
    """
    combined = 0
    for crc, length in zip(crcs, lengths, strict=True):
        if length:
            combined = combine(combined, crc, length)
    return combined


def combine_blocks(crcs: Sequence[int], block_bytes: int, total_bytes: int) -> int:
    """Return the CRC-32C of a payload of `total_bytes`, given that of each of its blocks.

    Neighbours are combined level by level for all blocks at once; on one level all right-hand
    sides have the same length, so one set of look-up tables serves. The tables are kept per
    length. `crcs` may be an array of either module. Raises `ValueError` if there are not as many
    checksums as blocks.
    """
    count = -(-total_bytes // block_bytes)
    if len(crcs) != count:
        raise ValueError(f"{len(crcs)} checksums for {count} blocks")
    if count == 0:
        return 0
    last_bytes = total_bytes - (count - 1) * block_bytes
    if count <= _SCALAR_BLOCK_COUNT:
        combined = 0
        for at in range(count - 1):
            combined = combine(combined, int(crcs[at]), block_bytes)
    else:
        combined = _combine_equal(crcs, block_bytes)
    return combine(combined, int(crcs[count - 1]), last_bytes)


def combine_each(crcs: Sequence[int], block_bytes: int, totals: Sequence[int]) -> list[int]:
    """Return the CRC-32C of each of consecutive payloads, given those of all their blocks in order.

    `totals` are the payloads' lengths in bytes. As `combine_blocks` for each, but payloads of
    about one length together. Raises `ValueError` if there are not as many checksums as blocks.
    """
    counts = [-(-total // block_bytes) for total in totals]
    if sum(counts) != len(crcs):
        raise ValueError(f"{len(crcs)} checksums for {sum(counts)} blocks")
    ends = list(accumulate(counts))
    if max(counts, default=0) <= _SCALAR_BLOCK_COUNT:
        return [
            combine_blocks(crcs[end - count : end], block_bytes, total)
            for count, end, total in zip(counts, ends, totals, strict=True)
        ]
    import numpy as np  # noqa: PLC0415  # see the module's docstring

    blocks = np.asarray(crcs, dtype=np.uint32)
    combined = [0] * len(counts)
    alike: dict[int, list[int]] = {}
    for number, count in enumerate(counts):
        if count:
            alike.setdefault((count - 1).bit_length(), []).append(number)
    for bits, numbers in alike.items():
        # All but the last block of each, at the end of a row that begins with nothing.
        rows = np.zeros((len(numbers), 1 << bits), dtype=np.uint32)
        for row, number in zip(rows, numbers, strict=True):
            count, end = counts[number], ends[number]
            row[len(row) - count + 1 :] = blocks[end - count : end - 1]
        for number, crc in zip(numbers, _fold(rows, block_bytes).tolist(), strict=True):
            last_bytes = totals[number] - (counts[number] - 1) * block_bytes
            combined[number] = combine(crc, int(crcs[ends[number] - 1]), last_bytes)
    return combined


def encode_crcs(crcs: Sequence[int]) -> str:
    """Return checksums as packed CRCs: base64 of little-endian 32-bit words."""
    words = array("I", crcs)
    if sys.byteorder == "big":
        words.byteswap()
    return base64.b64encode(words.tobytes()).decode("ascii")


def decode_crcs(text: str, count: int, *, path: str | None = None) -> array[int]:
    """Return the `count` checksums packed in `text` (type code "I").

    Raises `FormatError`, with the `path` of the document, if `text` is not base64 or holds
    another number of them.
    """
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        data = None
    if data is None or len(data) != 4 * count:
        found = "not base64" if data is None else f"{len(data)} bytes"
        raise FormatError(
            f"{path or 'A document'} holds packed checksums that are {found}; {count} of them, "
            f"{4 * count} bytes, belong there.",
            path=path,
            next_step=_WRONG_FILE,
        )
    words = array("I", data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def seal(body: Mapping[str, object]) -> bytes:
    """Return `body` as a sealed document: one line of JSON with the CRC-32C of its body.

    Keys keep their order. Raises `InvalidInputError` for what JSON cannot say: a NaN, a lone
    surrogate, an object of another type; and for a document longer than readers take.
    """
    try:
        text = json.dumps(
            dict(body), ensure_ascii=False, allow_nan=False, separators=(",", ":")
        ).encode()
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"A document of the checkpoint cannot be written as JSON: {error}.",
            next_step="Use plain strings, numbers, lists and dictionaries.",
        ) from error
    sealed = b"".join((_HEAD, b"%08x" % crc32c_of(text), _MIDDLE, text, _TAIL))
    if len(sealed) > MOST_DOCUMENT_BYTES:
        raise InvalidInputError(
            f"A document of the checkpoint would have {len(sealed)} bytes; readers take "
            f"{MOST_DOCUMENT_BYTES}.",
            next_step="Save fewer, larger tensors, or spread them over several checkpoints.",
        )
    return sealed


def unseal(data: bytes, *, path: str) -> dict[str, Any]:
    """Return the body of a sealed document after checking every byte of it.

    Raises `IntegrityError` for a sealed document that was cut, extended or changed, with `path`
    and the `offset` before which it is sound; `FormatError` for a file that never was one, and
    for a body that is sound but no JSON object or that has a key twice.
    """
    damage = _envelope_damage(data)
    if damage is not None:
        offset, what = damage
        raise IntegrityError(
            f"{path} ({len(data)} bytes) is damaged at or after byte {offset}: {what}.",
            path=path,
            offset=offset,
            next_step=_RESTORE,
        )
    if data[: len(_HEAD)] != _HEAD:
        raise FormatError(
            f"{path} ({len(data)} bytes) is not a document of a checkpoint: it begins with "
            f"{data[:16]!r}.",
            path=path,
            next_step=_WRONG_FILE,
        )
    try:
        body = json.loads(
            data[_BODY_START : -len(_TAIL)].decode(),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
        )
        if b"\\ud" in data or b"\\uD" in data:
            # Half of a surrogate pair, which only an escape can spell, is no text.
            json.dumps(body, ensure_ascii=False).encode()
    except (RecursionError, ValueError) as error:
        raise FormatError(
            f"{path} was written with a body that is not valid JSON: {error}.",
            path=path,
            next_step=_WRONG_FILE,
        ) from error
    if not isinstance(body, dict):
        raise FormatError(
            f"{path} was written with a body that is no JSON object.",
            path=path,
            next_step=_WRONG_FILE,
        )
    return body


def encode_format(kind: str, major: int) -> str:
    """Return what the key `format` of a document says: its kind and major version."""
    return f"ckpt_storage.{kind}/{major}"


def check_format(
    body: Mapping[str, object], kind: str, major: int, *, path: str | None = None
) -> None:
    """Raise `FormatError` unless `body` is of this kind and major version; `path` is its file's."""
    name = path or "A document"
    found = body.get("format")
    match = _FORMAT.fullmatch(found) if isinstance(found, str) else None
    if match is None or match.group(1) != kind or int(match.group(2)) < major:
        raise FormatError(
            f"{name} has the format {found!r}; {encode_format(kind, major)!r} belongs there.",
            path=path,
            next_step=_WRONG_FILE,
        )
    if int(match.group(2)) > major:
        raise FormatError(
            f"{name} has the format {found!r}; the highest version that this release of "
            f"ckpt_storage reads is {major}.",
            path=path,
            next_step="Install a newer ckpt_storage.",
        )


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the CRC's (zlib's `multmodp`)."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & _ALL_ONES
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=128)
def _repeated_square(count: int) -> int:
    """Return x^(2^count) modulo the polynomial."""
    if count == 0:
        return _X
    root = _repeated_square(count - 1)
    return _multiply(root, root)


@lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """Return x^(8 length) modulo the polynomial: what `length` more bytes do to a checksum."""
    if length < 0:
        raise ValueError(f"length is {length}")
    operator = _ONE
    # Three squarings: x^8 is what one byte does.
    exponent_bit = 3
    while length:
        if length & 1:
            operator = _multiply(_repeated_square(exponent_bit), operator)
        length >>= 1
        exponent_bit += 1
    return operator


@lru_cache(maxsize=256)
def _shift_tables(length: int) -> NDArray[np.uint32]:
    """Return a 4 x 256 table: row i maps byte i of a checksum to its share after `length` bytes.

    The map is linear over GF(2): its 32 columns are the images of single bits, and each row is
    all sums of eight of them.
    """
    import numpy as np  # noqa: PLC0415  # see the module's docstring

    columns = [_power(length)]
    while len(columns) < 32:  # noqa: PLR2004  # bits of a checksum
        last = columns[-1]
        columns.append((last >> 1) ^ _POLYNOMIAL if last & 1 else last >> 1)
    columns.reverse()
    tables = np.zeros((4, 256), dtype=np.uint32)
    for bit, column in enumerate(columns):
        row, low = tables[bit // 8], 1 << bit % 8
        row[low : 2 * low] = row[:low] ^ np.uint32(column)
    return tables


def _combine_equal(crcs: Sequence[int], block_bytes: int) -> int:
    """Return the combined checksum of all but the last of `crcs`, of `block_bytes` each."""
    import numpy as np  # noqa: PLC0415  # see the module's docstring

    return int(_fold(np.asarray(crcs, dtype=np.uint32)[None, :-1], block_bytes)[0])


def _fold(rows: NDArray[np.uint32], block_bytes: int) -> NDArray[np.uint32]:
    """Return the combined checksum of each row of checksums, of `block_bytes` each."""
    import numpy as np  # noqa: PLC0415  # see the module's docstring

    length = block_bytes
    while rows.shape[1] > 1:
        if rows.shape[1] % 2:
            # The checksum of nothing is 0, and 0 stays 0 under every shift.
            rows = np.concatenate((np.zeros((len(rows), 1), dtype=np.uint32), rows), axis=1)
        left, right = rows[:, 0::2], rows[:, 1::2]
        table = _shift_tables(length)
        rows = (
            table[0][left & 255]
            ^ table[1][(left >> 8) & 255]
            ^ table[2][(left >> 16) & 255]
            ^ table[3][left >> 24]
            ^ right
        )
        length *= 2
    return rows[:, 0]


def _envelope_damage(data: bytes) -> tuple[int, str] | None:
    """Return where a sealed document may be damaged first, and how; None if it is sound.

    None also for a file that shows neither the beginning nor the middle of an envelope, which no
    single fault does to a sealed document. Behind the head nothing vouches for one byte rather
    than another, so the offset is then that of the checksum's digits.
    """
    head = data[: len(_HEAD)]
    if not _HEAD.startswith(head):
        if _MIDDLE not in data[: _BODY_START + 1]:
            return None
        offset = next(at for at, byte in enumerate(_HEAD) if data[at : at + 1] != bytes([byte]))
        return offset, "its first bytes are not those of a sealed document"
    if len(data) < _BODY_START + len(_TAIL):
        return min(len(data), _DIGITS.start), "it is cut short"
    digits = data[_DIGITS]
    actual = b"%08x" % crc32c_of(memoryview(data)[_BODY_START : -len(_TAIL)])
    if data[_DIGITS.stop : _BODY_START] != _MIDDLE:
        what = "its body does not begin where it should"
    elif not data.endswith(_TAIL):
        what = "it does not end as a sealed document does; it was cut or extended"
    elif digits != actual:
        recorded = digits.decode("ascii", "backslashreplace")
        what = f"its body has CRC-32C {actual.decode()}, and {recorded} is recorded"
    else:
        return None
    return _DIGITS.start, what


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
