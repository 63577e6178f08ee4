"""CRC-32C of buffers and of their blocks, and of concatenations of checksummed data."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from typing import TYPE_CHECKING

from crc32c import crc32c as _crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Up to this length the interpreter's lock is kept: 16 MiB take well under a millisecond. A thread
# that releases the lock waits up to `sys.getswitchinterval()` (5 ms) for a thread that runs Python.
_KEEP_LOCK_BYTES = 16 << 20

# Polynomials are reflected, as in the checksum itself: the highest bit is the coefficient of 1.
_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31
_ONE_BYTE = 1 << 23


def crc32c_of(data: Buffer, crc: int = 0) -> int:
    """Return the CRC-32C of data with checksum `crc` and then `data`, a C-contiguous buffer."""
    return _crc32c(data, crc, memoryview(data).nbytes > _KEEP_LOCK_BYTES)


def crc32c_of_all(pieces: Iterable[Buffer]) -> int:
    """Return the CRC-32C of consecutive buffers."""
    return reduce(lambda crc, piece: crc32c_of(piece, crc), pieces, 0)


def first_wrong_block(
    view: memoryview, block_bytes: int, crcs: Sequence[int], first_block: int
) -> int | None:
    """Return the offset in `view` of the first block whose CRC-32C is not that in `crcs`, or None.

    `view` has bytes, and begins with block `first_block`; its last block may be shorter.
    """
    mode, starts = block_bytes > _KEEP_LOCK_BYTES, range(0, len(view), block_bytes)
    actual = [_crc32c(view[at : at + block_bytes], 0, mode) for at in starts]
    expected = list(crcs[first_block : first_block + len(actual)])
    if actual == expected:
        return None
    return block_bytes * next(i for i, crc in enumerate(actual) if expected[i : i + 1] != [crc])


class BlockHasher:
    """CRC-32C of each block of a payload that is appended in pieces of any length.

    Blocks are counted from the start of the payload; the last may be shorter, and an empty
    payload has none. Copies no bytes. Not thread-safe. `also` gets each piece, at most one block,
    while it is in the processor's cache.
    """

    __slots__ = ("_also", "_block_bytes", "_crc", "_crcs", "_filled_bytes")

    def __init__(
        self, block_bytes: int, also: Callable[[memoryview], object] | None = None
    ) -> None:
        self._also = also
        self._block_bytes = block_bytes
        self._crcs: array[int] = array("I")
        self._crc = self._filled_bytes = 0

    def update(self, data: Buffer) -> int:
        """Append a C-contiguous buffer of any element type to the payload; return its CRC-32C.

        Each byte is hashed once: the result is combined from those of the blocks.
        """
        view = memoryview(data)
        if not view.nbytes:
            # A view with a zero in its shape cannot be cast.
            return 0
        if view.ndim != 1 or view.format != "B":
            view = view.cast("B")
        size = self._block_bytes
        # The end of a block that an earlier buffer began.
        head_bytes = min(-self._filled_bytes % size, len(view))
        head = crc32c_of(view[:head_bytes])
        if head_bytes:
            self._crc = combine(self._crc, head, head_bytes)
            self._filled_bytes += head_bytes
            if self._filled_bytes == size:
                self._crcs.append(self._crc)
                self._crc = self._filled_bytes = 0
        if head_bytes and self._also is not None:
            self._also(view[:head_bytes])
        rest_bytes, mode = len(view) - head_bytes, size > _KEEP_LOCK_BYTES
        crcs = []
        for at in range(head_bytes, len(view), size):
            block = view[at : at + size]
            crcs.append(_crc32c(block, 0, mode))
            if self._also is not None:
                self._also(block)
        rest = combine_blocks(crcs, size, rest_bytes)
        if rest_bytes % size:
            self._crc, self._filled_bytes = crcs.pop(), rest_bytes % size
        self._crcs.extend(crcs)
        return combine(head, rest, rest_bytes) if head_bytes else rest

    def finish(self) -> array[int]:
        """Return the checksums of all blocks (type code "I"), and start a new payload."""
        crcs = self._crcs
        if self._filled_bytes:
            crcs.append(self._crc)
        self._crcs = array("I")
        self._crc = self._filled_bytes = 0
        return crcs


def combine(crc_a: int, crc_b: int, length_b: int) -> int:
    """Return the CRC-32C of A followed by B, where B has `length_b` bytes.

    As `crc32_combine` of zlib (Mark Adler): the CRC of A times x^(8 length_b), plus that of B.
    """
    return _multiply(_power(length_b), crc_a) ^ crc_b if crc_a else crc_b


def combine_many(crcs: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the CRC-32C of a concatenation; piece i has checksum `crcs[i]`, `lengths[i]` bytes."""
    combined = 0
    for crc, length in zip(crcs, lengths, strict=True):
        combined = combine(combined, crc, length)
    return combined


def combine_blocks(crcs: Sequence[int], block_bytes: int, total_bytes: int) -> int:
    """Return the CRC-32C of a payload of `total_bytes` from the checksums of its blocks."""
    count = -(-total_bytes // block_bytes)
    if count != len(crcs):
        raise ValueError(f"{len(crcs)} checksums for {count} blocks")
    if count <= 1:
        return int(crcs[0]) if count else 0
    *whole, last = map(int, crcs)
    low, second, third, high = _shift_tables(block_bytes)
    combined = 0
    for crc in whole:
        combined = crc ^ (
            low[combined & 255]
            ^ second[combined >> 8 & 255]
            ^ third[combined >> 16 & 255]
            ^ high[combined >> 24]
        )
    return combine(combined, last, total_bytes - (count - 1) * block_bytes)


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the CRC's (zlib's `multmodp`)."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """Return x^(8 length) modulo the polynomial, by which `length` more bytes multiply a CRC."""
    if not length:
        return _ONE
    half = _power(length // 2)
    square = _multiply(half, half)
    return _multiply(square, _ONE_BYTE) if length & 1 else square


@lru_cache(maxsize=16)
def _shift_tables(length: int) -> list[list[int]]:
    """Return tables of the images of each byte of a CRC, lowest first, `length` bytes later.

    The map is linear over GF(2): the image of a byte is the sum of the images of its bits.
    """
    tables = [[0] for _ in range(4)]
    for bit in range(32):
        image = _multiply(_power(length), 1 << bit)
        tables[bit // 8] += [other ^ image for other in tables[bit // 8]]
    return tables
