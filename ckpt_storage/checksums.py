"""CRC-32C of a buffer and of each of its blocks, by the faster of two libraries.

`crc32c` is always there. `fastcrc`, of the extra `fast`, uses wider vectors where the processor
has them; whether that pays here is measured at the first long buffer. Knows no block length, no
document and no file. Called by `integrity` and by the bench's floors.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from crc32c import crc32c as _crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("ckpt_storage")

Digest = Callable[["Buffer", int], int]
"""Returns the CRC-32C of what a checksum stands for followed by the bytes of a buffer."""

# Up to this length crc32c keeps the interpreter's lock: 16 MiB take well under a millisecond. A
# thread that gives the lock away gets it back only after `sys.getswitchinterval()` (5 ms) when
# another runs Python, which made a 64 KiB block cost 1.2 ms instead of 5 us beside a busy thread.
_KEEP_LOCK_BYTES = 16 << 20
_KEEP_LOCK, _RELEASE_LOCK = 0, 1

# From 16 KiB on fastcrc gives the lock away at each call (its README says so). Nothing is lost by
# that while no other thread wants it. One that does shows in the time a call takes; then fastcrc
# gets less at a time for a while: a block of 64 KiB is five calls, which take half as long again.
_LONG_BYTES = 16 << 10
_PIECE_BYTES = 13 << 10
_LATE_S = 0.5e-3
_SLOWEST_BYTES_S = 1e9
_LOCK_KEPT_S = 1.0

# How much is hashed between two looks at the clock, each of which costs as much as a quarter of a
# block of 64 KiB; and the most, beyond which a wait for the lock would not show.
_LOOK_BYTES = 256 << 10
_MOST_UNSEEN_BYTES = 1 << 20

_TRIAL_BYTES, _TRIAL_BLOCKS = 64 << 10, 4
_TRIALS = 7
# Nearly as fast is no reason to change: the trial is short.
_WORTH_IT = 0.95


class _Lock:
    """Whether this process' other threads want the interpreter's lock, as far as that shows."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._wanted_until_s = -math.inf

    @property
    def is_wanted(self) -> bool:
        """Whether it is better kept now."""
        return self.clock() < self._wanted_until_s

    def came_late(self, begin_s: float, size_bytes: int) -> bool:
        """Return whether a call for so much, begun then, waited for the lock; remember it."""
        now_s = self.clock()
        if now_s - begin_s < _LATE_S + size_bytes / _SLOWEST_BYTES_S:
            return False
        self._wanted_until_s = now_s + _LOCK_KEPT_S
        return True


_lock = _Lock()


def crc32c_of(data: Buffer, crc: int = 0) -> int:
    """Return the CRC-32C of what `crc` stands for followed by the bytes of `data`.

    `data` is any C-contiguous buffer. Other Python threads may run meanwhile.
    """
    view = memoryview(data)
    size = view.nbytes
    fast = _faster() if size >= _LONG_BYTES else None
    if fast is None:
        return _crc32c(data, crc, _KEEP_LOCK if size <= _KEEP_LOCK_BYTES else _RELEASE_LOCK)
    if size > _KEEP_LOCK_BYTES:
        return fast(data, crc)
    if view.ndim != 1 or view.format != "B":
        view = view.cast("B")
    for start in range(0, size, _MOST_UNSEEN_BYTES):
        part = view[start : start + _MOST_UNSEEN_BYTES]
        if _lock.is_wanted:
            crc = _in_pieces(fast, part, crc)
        else:
            begin_s = _lock.clock()
            crc = fast(part, crc)
            _lock.came_late(begin_s, len(part))
    return crc


def crcs_of_blocks(view: memoryview, block_bytes: int) -> list[int]:
    """Return the CRC-32C of each block of `view`, which is of bytes; the last may be shorter."""
    if block_bytes > _MOST_UNSEEN_BYTES:
        starts = range(0, len(view), block_bytes)
        return [crc32c_of(view[at : at + block_bytes]) for at in starts]
    fast = _faster() if min(block_bytes, len(view)) >= _LONG_BYTES else None
    if fast is None:
        return _plainly(view, block_bytes)
    crcs = [] if _lock.is_wanted else _until_late(fast, view, block_bytes)
    done_bytes = len(crcs) * block_bytes
    if done_bytes < len(view):
        crcs += _by_pieces(fast, view[done_bytes:], block_bytes)
    return crcs


# One call a block, or a piece, and little else: what Python does around it costs a tenth of the
# checksum.


def _plainly(view: memoryview, block_bytes: int) -> list[int]:
    starts = range(0, len(view), block_bytes)
    return [_crc32c(view[at : at + block_bytes], 0, _KEEP_LOCK) for at in starts]


def _until_late(fast: Digest, view: memoryview, block_bytes: int) -> list[int]:
    """Return the checksums of all blocks, or of those up to the first that waited for the lock."""
    group_bytes = max(1, _LOOK_BYTES // block_bytes) * block_bytes
    crcs: list[int] = []
    for start in range(0, len(view), group_bytes):
        begin_s = _lock.clock()
        starts = range(start, min(start + group_bytes, len(view)), block_bytes)
        crcs += [fast(view[at : at + block_bytes], 0) for at in starts]
        if _lock.came_late(begin_s, group_bytes):
            break
    return crcs


def _by_pieces(fast: Digest, view: memoryview, block_bytes: int) -> list[int]:
    pieces = _pieces(block_bytes)
    crcs = []
    for at in range(0, len(view), block_bytes):
        crc = 0
        for start, stop in pieces:
            # Pieces behind the end of a short block are empty and change nothing.
            crc = fast(view[at + start : at + stop], crc)
        crcs.append(crc)
    return crcs


def _in_pieces(fast: Digest, view: memoryview, crc: int) -> int:
    for at in range(0, len(view), _PIECE_BYTES):
        crc = fast(view[at : at + _PIECE_BYTES], crc)
    return crc


@lru_cache(maxsize=16)
def _pieces(block_bytes: int) -> tuple[tuple[int, int], ...]:
    starts = range(0, block_bytes, _PIECE_BYTES)
    return tuple((start, min(start + _PIECE_BYTES, block_bytes)) for start in starts)


@cache
def _faster() -> Digest | None:
    """Return fastcrc's function if it is there, right and worth it here; else None.

    Two threads that ask first at the same time both try, and keep either's answer.
    """
    try:
        from fastcrc.crc32 import iscsi  # noqa: PLC0415  # only those who hash load it
    except ModuleNotFoundError as error:
        if error.name != "fastcrc":
            log.warning("fastcrc cannot be imported, crc32c is used: %s", error)
        return None
    except Exception as error:  # noqa: BLE001  # whatever ails it, crc32c does the same work
        log.warning("fastcrc cannot be imported, crc32c is used: %s", error)
        return None
    return iscsi if is_worth_it(iscsi) else None


def is_worth_it(fast: Digest, clock: Callable[[], float] = time.perf_counter) -> bool:
    """Tell whether `fast` takes clearly less time than crc32c for blocks in cache, as used here.

    Takes about 200 us; logs a warning if `fast` computes something else.
    """
    sample = memoryview(bytes(range(256)) * (_TRIAL_BLOCKS * _TRIAL_BYTES // 256))
    if _in_pieces(fast, sample, 1) != _crc32c(sample, 1, _KEEP_LOCK):
        log.warning("fastcrc computes another CRC-32C than crc32c, which is used")
        return False
    took_s = _least_s(lambda: _by_pieces(fast, sample, _TRIAL_BYTES), clock)
    return took_s < _WORTH_IT * _least_s(lambda: _plainly(sample, _TRIAL_BYTES), clock)


def _least_s(action: Callable[[], object], clock: Callable[[], float]) -> float:
    least_s = math.inf
    for _ in range(_TRIALS):
        start = clock()
        action()
        least_s = min(least_s, clock() - start)
    return least_s
