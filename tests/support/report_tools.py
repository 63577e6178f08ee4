"""Reports of ranks that wrote no byte, for tests of what is made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_storage.commit.report import RankReport
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.rank_manifest import RankManifest, ShardFile, Vocabulary

SAVE_ID = "20260101T000000Z-0123456789abcdef"
BLOCK_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Written:
    """A chunk of a float32 tensor that a rank wrote; a blob where `offsets` is None."""

    fqn: str
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    dtype: str = "float32"


def manifest_of(rank: int, world_size: int, items: Sequence[Written]) -> RankManifest:
    """Return the manifest of a rank that wrote these items, one after another."""
    known = Vocabulary()
    numbers, lengths, starts, at = [], [], [], 0
    for item in items:
        box = None if item.offsets is None else Box(item.offsets, item.sizes or ())
        numbers.append(known.numbers(item.fqn, None if box is None else item.dtype, box))
        lengths.append(5 if box is None else 4 * math.prod(box.sizes))
        starts.append(at)
        at += -(-lengths[-1] // 64) * 64 + 64
    blocks = sum(-(-length // BLOCK_BYTES) for length in lengths)
    file = ShardFile(
        path=f"saves/{SAVE_ID}/__{rank}_0.distcp",
        size_bytes=at + 64,
        crc32c=rank + 1,
        block_bytes=BLOCK_BYTES,
        fqn=[fqn for fqn, _, _ in numbers],
        dtype=[dtype for _, dtype, _ in numbers],
        box=[box for _, _, box in numbers],
        item_start=starts,
        item_bytes=[length + 64 for length in lengths],
        payload_start=[start + 64 for start in starts],
        payload_bytes=lengths,
        block_crcs=[7] * blocks,
        frame_crcs=[9] * (len(items) + 1),
    )
    return RankManifest(
        save_id=SAVE_ID,
        rank=rank,
        world_size=world_size,
        fqns=list(known.fqns),
        dtypes=list(known.dtypes),
        boxes=list(known.boxes),
        files=[file] if items else [],
        host="here",
        pid=1,
    )


def reports_of(ranks: Sequence[Sequence[Written]]) -> list[RankReport]:
    reports = []
    for rank, items in enumerate(ranks):
        path = f"saves/{SAVE_ID}/ranks/rank-{rank:05d}.json"
        ref = FileRef(path=path, size_bytes=100 + rank, crc32c=rank)
        manifest = manifest_of(rank, len(ranks), items)
        reports.append(RankReport.of(manifest, ref, with_places=True))
    return reports
