"""CRC-32C of a buffer and of each of its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crc32c import crc32c as _crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Up to this length the interpreter's lock is kept: 16 MiB take well under a millisecond. A thread
# that gives the lock away gets it back only after `sys.getswitchinterval()` (5 ms) when another
# runs Python.
_KEEP_LOCK_BYTES = 16 << 20
_KEEP_LOCK, _RELEASE_LOCK = 0, 1


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
