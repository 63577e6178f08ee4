"""What a read costs on a kind of storage, in the few numbers by which reads are planned.

Neighbours share a request where the gap between them takes less time than another request.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_storage.options import KIB, MIB
from ckpt_storage.store.store import Store

REMOTE_READ_BYTES = 16 * MIB
"""One ranged read of a remote file: the wait for its first byte is an eighth of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCosts:
    """Seconds and bytes per second of one stream of reads, and what follows from them.

    `copy_bytes_s` is the rate at which bytes are copied from a buffer to where they belong.
    `part_min_bytes` and `window_bytes` bound one request: from below where a load is split over
    several streams, from above where it goes through a buffer.
    """

    request_s: float
    stream_bytes_s: float
    copy_bytes_s: float
    part_min_bytes: int
    window_bytes: int
    gap_max_bytes: int

    @property
    def gap_bytes(self) -> int:
        """Bytes one reads over rather than ask anew."""
        return min(self.gap_max_bytes, int(self.request_s * self.stream_bytes_s))

    @property
    def direct_min_bytes(self) -> int:
        """Below this, a request of its own costs more than a copy out of a shared one."""
        return min(self.window_bytes // 2, int(self.request_s * self.copy_bytes_s))

    def part_bytes(self, total_bytes: int, stream_count: int, most_bytes: int) -> int:
        """Return the size of a part with which `total_bytes` keep all streams busy to the end."""
        fair = total_bytes // max(1, stream_count)
        return max(min(self.part_min_bytes, most_bytes), min(most_bytes, fair))


# A call with its thread and the opening of the file; a cold NVMe drive; windows that stay in a
# processor's last-level cache between read, check and copy.
LOCAL_COSTS = ReadCosts(
    request_s=50e-6,
    stream_bytes_s=3e9,
    copy_bytes_s=5e9,
    part_min_bytes=8 * MIB,
    window_bytes=8 * MIB,
    gap_max_bytes=128 * KIB,
)

# Object stores: first byte and rate of one connection as Amazon's guide to S3 performance has them.
# Where the network is the limit, gaps cost in full, so they may be less than the product.
REMOTE_COSTS = ReadCosts(
    request_s=0.03,
    stream_bytes_s=90e6,
    copy_bytes_s=5e9,
    part_min_bytes=2 * MIB,
    window_bytes=16 * MIB,
    gap_max_bytes=512 * KIB,
)


def costs_for(store: Store) -> ReadCosts:
    """Return the costs of a store."""
    return REMOTE_COSTS if store.capabilities.is_remote else LOCAL_COSTS
