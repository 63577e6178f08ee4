"""What reads cost on local and on remote storage, by which they are planned."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_storage.options import KIB, MIB
from ckpt_storage.store.store import Store

REMOTE_READ_BYTES = 16 * MIB
"""One ranged read of a remote file: the wait for its first byte is an eighth of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCosts:
    """Costs of reads, by which neighbours share a request if that takes less time than two.

    gap_bytes: the longest gap that is read, and not skipped by another request.
    copy_bytes: bytes that are copied out of a buffer in the time of a request.
    part_min_bytes, window_bytes: limits of one request: the least where a load is split over
        several streams, the most where it goes through a buffer.
    """

    gap_bytes: int
    copy_bytes: int
    part_min_bytes: int
    window_bytes: int


# A call with its thread and the open of the file takes 50 us; copies run at 5 GB/s. Windows stay
# in a processor's caches between read, check and copy; each takes 0.1 ms of Python.
LOCAL_COSTS = ReadCosts(
    gap_bytes=128 * KIB, copy_bytes=250_000, part_min_bytes=8 * MIB, window_bytes=4 * MIB
)

# Object stores: 30 ms to the first byte (Amazon's guide to S3 performance). On a slow network gaps
# cost in full, so their limit is less than what a connection carries in that time.
REMOTE_COSTS = ReadCosts(
    gap_bytes=512 * KIB, copy_bytes=150_000_000, part_min_bytes=2 * MIB, window_bytes=16 * MIB
)


def costs_for(store: Store) -> ReadCosts:
    """Return the costs of a store."""
    return REMOTE_COSTS if store.capabilities.is_remote else LOCAL_COSTS
