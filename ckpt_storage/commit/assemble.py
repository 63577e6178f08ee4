"""From rank reports to one manifest: the coordinator's check that a save is complete (I8).

Work grows with reports, tensors and different ways of cutting them; what grows with items is done
on arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt_storage.commit.reporttable import RankReport
from ckpt_storage.errors import CheckpointError, IntegrityError, RankFailedError, StorageError
from ckpt_storage.format.boxes import Box, Grid, compact, find_grid
from ckpt_storage.format.coverage import find_flaw
from ckpt_storage.format.documents import Counts
from ckpt_storage.format.manifest import Manifest, TensorRecord
from ckpt_storage.store.store import Store

from .reporttable import Chunks, Planned, ReportTable, incomplete
from .ties import agreed_ties

_MOST = (1 << 62) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Chunks that hold every element of a tensor once.

    `kept` are their positions in what was given: in C order of the cells of the grid that `cuts`
    make or, where that is None, in C order of their first elements.
    """

    kept: Counts
    cuts: tuple[Sequence[int], ...] | None

    def grid(self, owners: Counts) -> Grid | None:
        """Return the grid, given the owners of what was given."""
        return None if self.cuts is None else Grid(self.cuts, compact(owners[self.kept]))


def find_tiling(shape: Sequence[int], offsets: Counts, sizes: Counts) -> Tiling | None:
    """Return how chunks tile a tensor of `shape`, which has elements; None if that is not plain.

    Chunks are rows of `offsets` and `sizes`, all with elements. Of equal chunks the first counts.
    """
    ndim = len(shape)
    if not len(offsets) or math.prod(shape) > _MOST:
        return None
    if ndim == 0:
        return Tiling(kept=np.zeros(1, dtype=np.int64), cuts=())
    return _grid(shape, offsets, sizes) or _intervals(shape, offsets, sizes)


def _grid(shape: Sequence[int], offsets: Counts, sizes: Counts) -> Tiling | None:
    places = np.zeros(len(offsets), dtype=np.int64)
    cell_count = 1
    cuts: list[Sequence[int]] = []
    for dim, size in enumerate(shape):
        starts, at = np.unique(offsets[:, dim], return_inverse=True)
        cell_count *= len(starts)
        if starts[0] != 0 or starts[-1] >= size or cell_count > len(offsets):
            return None
        expected = np.diff(starts, append=size)
        if not np.array_equal(expected[at], sizes[:, dim]):
            return None
        places = places * len(starts) + at
        cuts.append(compact(starts))
    # Sorted, and of equal ones the first: so ascending positions and as many as cells means all.
    found, kept = np.unique(places, return_index=True)
    return Tiling(kept=kept, cuts=tuple(cuts)) if len(found) == cell_count else None


def _intervals(shape: Sequence[int], offsets: Counts, sizes: Counts) -> Tiling | None:
    """Recognise chunks that are intervals in C order, as flattened shards are."""
    limits = np.asarray(shape, dtype=np.int64)
    if (offsets < 0).any() or (sizes < 1).any():
        return None
    if (sizes > limits).any() or (offsets > limits - sizes).any():
        return None
    # One box is contiguous if, before the first dimension that is longer than 1, all are 1 (that
    # is what first means) and behind it all are whole.
    first = np.argmax(sizes > 1, axis=1)
    behind = np.arange(len(shape)) > first[:, None]
    ones = (sizes == 1).all(axis=1)
    if not (ones | ((sizes == limits) | ~behind).all(axis=1)).all():
        return None
    strides = np.ones(len(shape), dtype=np.int64)
    strides[:-1] = np.cumprod(limits[:0:-1])[::-1]
    starts, kept = np.unique(offsets @ strides, return_index=True)
    volumes = sizes.prod(axis=1)
    # What else begins there must be the same chunk.
    at = np.searchsorted(starts, offsets @ strides)
    if not np.array_equal(volumes[kept][at], volumes):
        return None
    ends = starts + volumes[kept]
    whole = starts[0] == 0 and ends[-1] == math.prod(shape)
    return Tiling(kept=kept, cuts=None) if whole and (ends[:-1] == starts[1:]).all() else None


Layout = tuple[Grid | None, Sequence[tuple[Box, int]] | None]


def check_files(store: Store, manifest: Manifest) -> None:
    """Raise `IntegrityError` naming rank and file if the coordinator does not see what was written.

    Asked only where a look costs no request: it finds ranks that wrote to a disk of their own.
    """
    if store.capabilities.is_remote:
        return
    for ref, rank in [*manifest.files, *zip(manifest.ranks, itertools.count(), strict=False)]:
        try:
            size_bytes: int | None = store.stat(ref.path).size_bytes
        except StorageError as error:
            if error.kind != "not-found":
                raise
            size_bytes = None
        if size_bytes != ref.size_bytes:
            seen = "does not see it" if size_bytes is None else f"sees {size_bytes} bytes"
            raise IntegrityError(
                f"Rank {rank} wrote {ref.path} with {ref.size_bytes} bytes; the coordinator "
                f"{seen}.",
                rank=rank,
                path=ref.path,
                phase="commit",
                next_step=f"Nothing was committed. {store.url} must be on a file system that all "
                "ranks share.",
            )


def check_reports(
    reports: Sequence[RankReport | None], *, save_id: str, world_size: int
) -> list[RankReport]:
    """Return the reports, which are of all ranks and of this save.

    Raises `RankFailedError` naming every rank that did not report, and `CheckpointError` for a
    report of another save or world.
    """
    missing = [rank for rank, report in enumerate(reports) if report is None]
    if missing or len(reports) != world_size:
        missing += list(range(len(reports), world_size))
        raise RankFailedError(
            f"Ranks {missing} of {world_size} did not report what they wrote.",
            failures=dict.fromkeys(missing, "no report"),
            phase="commit",
            next_step="Look at those ranks' logs; nothing was committed; save again.",
        )
    whole = [report for report in reports if report is not None]
    for rank, report in enumerate(whole):
        if (report.save_id, report.rank, report.world_size) != (save_id, rank, world_size):
            raise CheckpointError(
                f"Rank {rank} reports rank {report.rank} of {report.world_size} and save "
                f"{report.save_id}; this is save {save_id} of {world_size} ranks.",
                rank=rank,
                phase="commit",
                next_step="Nothing was committed; make sure one job saves to this id.",
            )
    return whole


def assemble(reports: Sequence[RankReport], planned: Planned) -> Manifest:
    """Return the manifest of the whole checkpoint, without `stock`.

    Raises `IntegrityError` naming tensor, region and ranks if the chunks do not cover every
    planned tensor exactly, a planned blob is not there, or something is that was not planned. A
    box that several ranks wrote (a planner that does not deduplicate replicas) counts once, for
    the lowest rank.
    """
    table = ReportTable.of(reports, planned)
    for fqn in planned.blobs:
        if fqn not in table.blobs:
            raise incomplete(f"No rank wrote {fqn}, which is in the plan.", fqn)
    known: dict[tuple[tuple[int, ...], bytes], Layout] = {}
    tensors: dict[str, TensorRecord] = {}
    for number, (fqn, shape) in enumerate(planned.tensors.items()):
        dtype = table.dtype(number)
        if dtype is None:
            raise incomplete(f"No rank wrote any chunk of {fqn}, which is in the plan.", fqn)
        key = (shape, table.key(number))
        layout = known.get(key)
        if layout is None:
            layout = known[key] = _layout(fqn, shape, table, table.chunks(number))
        grid, chunks = layout
        tensors[fqn] = TensorRecord(fqn=fqn, dtype=dtype, shape=shape, grid=grid, chunks=chunks)
    first = reports[0]
    return Manifest(
        save_id=first.save_id,
        world_size=first.world_size,
        tensors=tensors,
        blobs=table.blobs,
        planner_data=planned.planner_data,
        files=[(ref, report.rank) for report in reports for ref in report.files],
        ranks=[report.ref for report in reports],
        stock=None,
        hosts=[report.host for report in reports],
        ties=agreed_ties(reports, tensors),
    )


def _layout(fqn: str, shape: tuple[int, ...], table: ReportTable, chunks: Chunks) -> Layout:
    """Return how chunks tile a tensor, after making sure that they do."""
    if 0 not in shape and chunks.offsets is not None and chunks.sizes is not None:
        solid = (chunks.sizes != 0).all(axis=1)
        offsets, sizes, owners = chunks.offsets[solid], chunks.sizes[solid], chunks.owners[solid]
        tiling = find_tiling(shape, offsets, sizes)
        if tiling is not None and tiling.cuts is not None:
            return tiling.grid(owners), None
        if tiling is not None:
            kept = Chunks(
                owners=owners[tiling.kept],
                offsets=offsets[tiling.kept],
                sizes=sizes[tiling.kept],
            )
            return None, list(zip(table.boxes(kept), kept.owners.tolist(), strict=True))
    held: dict[Box, int] = {}
    for box, owner in zip(table.boxes(chunks), chunks.owners.tolist(), strict=True):
        held.setdefault(box, owner)
    return _checked(fqn, shape, held)


def _checked(fqn: str, shape: tuple[int, ...], boxes: Mapping[Box, int]) -> Layout:
    """Return the layout that boxes and their owners make; says exactly what is wrong if none."""
    empty = 0 in shape
    held = list(boxes) if empty else [box for box in boxes if not box.is_empty]
    owners = [boxes[box] for box in held]
    flaw = find_flaw(shape, held)
    if flaw is not None:
        if flaw.outside is not None:
            what = (
                f"Rank {owners[flaw.outside]} wrote {held[flaw.outside]} of {fqn}, whose shape is"
            )
        elif flaw.holders:
            overlap = " and ".join(f"{held[at]} of rank {owners[at]}" for at in flaw.holders[:2])
            what = f"Chunks of {fqn} overlap: {overlap}. Its shape is"
        else:
            ranks = f"ranks {sorted(set(owners))} wrote chunks of it"
            what = f"The chunks of {fqn} leave a gap at {flaw.at}; {ranks}. Its shape is"
        raise incomplete(f"{what} {list(shape)}.", fqn)
    grid = None if empty else find_grid(shape, held)
    if grid is None:
        return None, list(zip(held, owners, strict=True))
    return Grid(grid.cuts, tuple(owners[i] for i in grid.owners)), None
