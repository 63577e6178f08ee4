"""From rank reports to one manifest: the coordinator's check that a save is complete (I8).

Work grows with reports, tensors and different ways of cutting them; what grows with items is done
on arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ckpt_storage.commit.reporttable import RankReport
from ckpt_storage.errors import CheckpointError, IntegrityError, RankFailedError, StorageError
from ckpt_storage.format.boxes import Box, Grid, compact, find_grid
from ckpt_storage.format.coverage import find_flaw
from ckpt_storage.format.manifest import Manifest, TensorRecord
from ckpt_storage.format.rank_manifest import BoxKey
from ckpt_storage.store.store import Store

from .reporttable import Planned, ReportTable, incomplete

_MOST_ELEMENTS = (1 << 62) - 1

Layout = tuple[Grid | None, Sequence[tuple[Box, int]] | None]
"""How a tensor is cut: a grid, or boxes with their owners."""


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
    table = ReportTable(reports, planned)
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
            layout = known[key] = _grid(shape, table, number) or _layout(fqn, shape, table, number)
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
        ties=_agreed_ties(reports, tensors),
    )


def _grid(shape: tuple[int, ...], table: ReportTable, number: int) -> Layout | None:
    """Return the grid that the chunks of a tensor make, by arrays; None if there may be none."""
    owners, words = table.chunks(number)
    if words is None or 0 in shape or math.prod(shape) > _MOST_ELEMENTS:
        return None
    offsets, sizes = np.hsplit(words, 2)
    solid = (sizes != 0).all(axis=1)
    offsets, sizes, owners = offsets[solid], sizes[solid], owners[solid]
    if not len(owners):
        return None
    places = np.zeros(len(owners), dtype=np.int64)
    cell_count = 1
    cuts: list[Sequence[int]] = []
    for dim, size in enumerate(shape):
        starts, at = np.unique(offsets[:, dim], return_inverse=True)
        cell_count *= len(starts)
        if starts[0] != 0 or starts[-1] >= size or cell_count > len(offsets):
            return None
        if not np.array_equal(np.diff(starts, append=size)[at], sizes[:, dim]):
            return None
        places = places * len(starts) + at
        cuts.append(compact(starts))
    # Sorted, and of equal ones the first: so ascending positions and as many as cells means all.
    found, kept = np.unique(places, return_index=True)
    if len(found) != cell_count:
        return None
    return Grid(tuple(cuts), compact(owners[kept])), None


def _layout(fqn: str, shape: tuple[int, ...], table: ReportTable, number: int) -> Layout:
    """Return how chunks of any form make up a tensor; says exactly what is wrong if they do not."""
    boxes: dict[Box, int] = {}
    for box, owner in table.boxes(number):
        boxes.setdefault(box, owner)
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


def _agreed_ties(
    reports: Sequence[RankReport], tensors: Mapping[str, TensorRecord]
) -> dict[str, str]:
    """Return alias -> target of what is the same memory on all ranks; no target is an alias.

    A rank reports the chunks of names that it ties itself. So a tensor of which chunks are missing
    is one that a rank, which wrote them, does not tie. Besides, dtype, shape, boxes and checksums
    must be equal: then it does not matter by which chain of claims two names came together.
    """
    roots = _roots(reports)
    chunks: dict[str, dict[BoxKey, int]] = {}
    for report in reports:
        for name, box, crc in report.tied:
            chunks.setdefault(name, {}).setdefault(box, crc)
    groups: dict[object, list[str]] = {}
    for name, root in roots.items():
        tensor, held = tensors.get(name), chunks.get(name, {})
        if tensor is not None and held and len(held) == tensor.chunk_count:
            same = (root, tensor.dtype, tensor.shape, frozenset(held.items()))
            groups.setdefault(same, []).append(name)
    return {alias: group[0] for group in groups.values() for alias in group[1:]}


def _roots(reports: Sequence[RankReport]) -> dict[str, str]:
    """Return name -> the first name of all that claims join, in the order in which names came."""
    roots: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    for report in reports:
        for alias, target in report.ties.items():
            for name in (target, alias):
                if name not in roots:
                    roots[name] = name
                    members[name] = [name]
            kept, gone = roots[target], roots[alias]
            if kept != gone:
                for name in members[gone]:
                    roots[name] = kept
                members[kept] += members.pop(gone)
    return roots
