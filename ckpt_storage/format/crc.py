"""CRC-32C of a buffer and of each of its blocks, and how such checksums combine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c as _crc32c
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Up to this length the interpreter's lock is kept: 16 MiB take well under a millisecond. A thread
# that gives the lock away gets it back only after `sys.getswitchinterval()` (5 ms) when another
# runs Python.
_KEEP_LOCK_BYTES = 16 << 20
_KEEP_LOCK, _RELEASE_LOCK = 0, 1

# Polynomials are reflected, as in the checksum itself: the highest bit is the coefficient of 1.
_POLYNOMIAL = 0x82F63B78
_ALL_ONES = 0xFFFFFFFF
_ONE = 1 << 31
_X = 1 << 30


def crc32c_of(data: Buffer, crc: int = 0) -> int:
    """Return the CRC-32C of what `crc` stands for followed by the bytes of `data`.

    `data` is any C-contiguous buffer. Other Python threads may run meanwhile.
    """
    return _crc32c(data, crc, _lock_mode(memoryview(data).nbytes))


def crcs_of_blocks(view: memoryview, block_bytes: int) -> list[int]:
    """Return the CRC-32C of each block of `view`, which is of bytes; the last may be shorter."""
    mode = _lock_mode(block_bytes)
    starts = range(0, len(view), block_bytes)
    return [_crc32c(view[at : at + block_bytes], 0, mode) for at in starts]


def _lock_mode(size_bytes: int) -> int:
    return _KEEP_LOCK if size_bytes <= _KEEP_LOCK_BYTES else _RELEASE_LOCK


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

    `crcs` may be an array of either module. Raises as `combine_each`.
    """
    return combine_each(crcs, block_bytes, [total_bytes])[0]


def combine_each(crcs: Sequence[int], block_bytes: int, totals: Sequence[int]) -> list[int]:
    """Return the CRC-32C of each of consecutive payloads, given those of all their blocks in order.

    `totals` are the payloads' lengths in bytes. Each block's checksum is moved over the whole
    blocks behind it, for all blocks at once: over 1, 2, 4, ... of them, as the binary digits of
    their number say. Raises `ValueError` if there are not as many checksums as blocks.
    """
    counts = [-(-total // block_bytes) for total in totals]
    if sum(counts) != len(crcs):
        raise ValueError(f"{len(crcs)} checksums for {sum(counts)} blocks")
    found = list[int]()
    blocks = np.asarray(crcs, dtype=np.uint32)
    if max(counts, default=0) > 1:
        blocks = blocks.copy()
        # The last one may be shorter, and is left out; of the rest, how many stand between.
        between = np.concatenate([np.arange(count - 2, -2, -1) for count in counts])
        for bit in range(int(between.max()).bit_length()):
            moved = (between > 0) & (between >> bit & 1 == 1)
            blocks[moved] = _moved(blocks[moved], block_bytes << bit)
    at = 0
    for count, total in zip(counts, totals, strict=True):
        last = int(blocks[at + count - 1]) if count else 0
        if count > 1:
            first = int(np.bitwise_xor.reduce(blocks[at : at + count - 1]))
            last = combine(first, last, total - (count - 1) * block_bytes)
        found.append(last)
        at += count
    return found


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


def _moved(crcs: NDArray[np.uint32], length: int) -> NDArray[np.uint32]:
    """Return what each checksum adds to that of itself and `length` bytes more."""
    table = _shift_tables(length)
    moved: NDArray[np.uint32] = (
        table[0][crcs & 255]
        ^ table[1][(crcs >> 8) & 255]
        ^ table[2][(crcs >> 16) & 255]
        ^ table[3][crcs >> 24]
    )
    return moved
