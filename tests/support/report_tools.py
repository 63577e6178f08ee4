"""Reports of ranks that wrote no byte, for tests of what is made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_storage.commit.report import RankReport
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.rank_manifest import ItemTable, RankManifest, ShardFile

SAVE_ID = "20260101T000000Z-0123456789abcdef"
BLOCK_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Written:
    """A chunk of a float32 tensor that a rank wrote; a blob where `offsets` is None."""

    fqn: str
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    dtype: str = "float32"
    crc: int = 0


def manifest_of(rank: int, world_size: int, items: Sequence[Written]) -> RankManifest:
    """Return the manifest of a rank that wrote these items, one after another."""
    fqns = list(dict.fromkeys(item.fqn for item in items))
    place_of = {fqn: at for at, fqn in enumerate(fqns)}
    dtypes = list(dict.fromkeys(item.dtype for item in items if item.offsets is not None))
    lengths = [4 * math.prod(item.sizes) if item.sizes is not None else 5 for item in items]
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += -(-length // 64) * 64 + 64
    blocks = sum(-(-length // BLOCK_BYTES) for length in lengths)
    table = ItemTable(
        fqn=[place_of[item.fqn] for item in items],
        dtype=[-1 if item.offsets is None else dtypes.index(item.dtype) for item in items],
        offsets=[item.offsets for item in items],
        sizes=[item.sizes for item in items],
        item_start=starts,
        item_bytes=[length + 64 for length in lengths],
        payload_start=[start + 64 for start in starts],
        payload_bytes=lengths,
        block_crcs=[7] * blocks,
        frame_crcs=[9] * (len(items) + 1),
    )
    file = ShardFile(
        path=f"saves/{SAVE_ID}/__{rank}_0.distcp",
        size_bytes=at + 64,
        crc32c=rank + 1,
        block_bytes=BLOCK_BYTES,
        items=table,
    )
    return RankManifest(
        save_id=SAVE_ID,
        rank=rank,
        world_size=world_size,
        fqns=fqns,
        dtypes=dtypes,
        files=[file] if items else [],
        host="here",
        pid=1,
    )


def reports_of(ranks: Sequence[Sequence[Written]], *, with_places: bool = True) -> list[RankReport]:
    """Return the reports of ranks that wrote these items."""
    found = []
    for rank, items in enumerate(ranks):
        manifest = manifest_of(rank, len(ranks), items)
        path = f"saves/{SAVE_ID}/ranks/rank-{rank:05d}.json"
        ref = FileRef(path=path, size_bytes=100 + rank, crc32c=rank)
        report = RankReport.of(manifest, ref, with_places=with_places)
        found.append(report)
    return found
