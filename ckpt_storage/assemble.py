"""From rank reports to one manifest: the coordinator's check that a save is complete (I8).

Knows documents, no torch; the only storage call is `check_files`' look at file lengths. Called
by `writer` on the coordinator.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import integrity
from .documents import FileRef
from .errors import CheckpointError, IntegrityError, RankFailedError, StorageError
from .manifest import INLINE_LIMIT_BYTES, Manifest, RankManifest, TensorRecord
from .regions import Box, covers_exactly, find_grid
from .store.base import Store
from .tiednames import agreed_ties

PlannerPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank sends the coordinator: its manifest file, and that file's bytes, compressed."""

    rank: int
    ref: FileRef
    packed: bytes

    @classmethod
    def of(cls, rank: int, path: str, document: bytes) -> RankReport:
        """Return the report on `document`, which is stored at `path`."""
        ref = FileRef(path=path, size_bytes=len(document), crc32c=integrity.crc32c_of(document))
        return cls(rank=rank, ref=ref, packed=zlib.compress(document, 1))

    def manifest(self) -> RankManifest:
        """Return the rank manifest; raises `IntegrityError` if it did not arrive as it was sent."""
        body = integrity.unseal(zlib.decompress(self.packed), path=self.ref.path)
        return RankManifest.from_body(body, where=self.ref.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the global plan promises: tensors by FQN with their shapes, and blobs."""

    tensors: Mapping[str, tuple[int, ...]]
    blobs: frozenset[str]
    planner_data: Mapping[str, PlannerPath] | None


def read_report(result: Sequence[object]) -> RankReport | None:
    """Return the report in what DCP gathered of one rank, None if there is none."""
    for entry in result:
        data = getattr(entry, "storage_data", None)
        if isinstance(data, RankReport):
            return data
    return None


def check_files(store: Store, manifest: Manifest) -> None:
    """Raise `IntegrityError` naming rank and file if the coordinator does not see what was written.

    Asked only where a look costs no request: it finds ranks that wrote to a disk of their own.
    """
    if not store.capabilities.cheap_stat:
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
) -> list[RankManifest]:
    """Return the rank manifests in order of rank.

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
    manifests = []
    for rank, report in enumerate(filter(None, reports)):
        manifest = report.manifest()
        if (manifest.save_id, manifest.rank, manifest.world_size) != (save_id, rank, world_size):
            raise CheckpointError(
                f"Rank {rank} reports rank {manifest.rank} of {manifest.world_size} and save "
                f"{manifest.save_id}; this is save {save_id} of {world_size} ranks.",
                rank=rank,
                phase="commit",
                next_step="Nothing was committed; make sure one job saves to this id.",
            )
        manifests.append(manifest)
    return manifests


def assemble(
    manifests: Sequence[RankManifest],
    reports: Sequence[RankReport],
    planned: Planned,
    settled_ties: Mapping[str, str],
) -> Manifest:
    """Return the manifest of the whole checkpoint, without `stock`.

    `settled_ties` is what the front doors know of ties, {} without them.

    Raises `IntegrityError` naming tensor, region and ranks if the chunks do not cover every
    planned tensor exactly, a planned blob is not there, or something is that was not planned. A
    box that several ranks wrote (a planner that does not deduplicate replicas) counts once, for
    the lowest rank.
    """
    boxes: dict[str, dict[Box, int]] = {fqn: {} for fqn in planned.tensors}
    dtypes: dict[str, str] = {}
    blobs: dict[str, int] = {}
    for manifest in manifests:
        for fqn, dtype, box in _items(manifest):
            if box is None:
                if fqn not in planned.blobs:
                    raise _incomplete(
                        f"Rank {manifest.rank} wrote {fqn}, which is not in the plan.", fqn
                    )
                blobs.setdefault(fqn, manifest.rank)
                continue
            if fqn not in boxes:
                raise _incomplete(
                    f"Rank {manifest.rank} wrote {fqn}, which is not in the plan.", fqn
                )
            boxes[fqn].setdefault(box, manifest.rank)
            if dtypes.setdefault(fqn, dtype) != dtype:
                raise _incomplete(
                    f"Rank {manifest.rank} wrote {fqn} as {dtype}; others as {dtypes[fqn]}.", fqn
                )
    for fqn in planned.blobs:
        if fqn not in blobs:
            raise _incomplete(f"No rank wrote {fqn}, which is in the plan.", fqn)
    tensors = {
        fqn: _tensor(fqn, dtypes, planned.tensors[fqn], boxes[fqn]) for fqn in planned.tensors
    }
    inline = sum(report.ref.size_bytes for report in reports) < INLINE_LIMIT_BYTES
    first = manifests[0]
    return Manifest(
        save_id=first.save_id,
        world_size=first.world_size,
        tensors=tensors,
        blobs=blobs,
        planner_data=planned.planner_data,
        files=[(file.ref(), m.rank) for m in manifests for file in m.files],
        ranks=[report.ref for report in reports],
        stock=None,
        inline_ranks=list(manifests) if inline else None,
        ties=agreed_ties(manifests, tensors, settled_ties),
    )


def _items(manifest: RankManifest) -> Iterator[tuple[str, str, Box | None]]:
    for file in manifest.files:
        items = file.items
        for fqn, dtype, offsets, sizes in zip(
            items.fqn, items.dtype, items.offsets, items.sizes, strict=True
        ):
            if offsets is None or sizes is None:
                yield manifest.fqns[fqn], "", None
            else:
                yield manifest.fqns[fqn], manifest.dtypes[dtype], Box(tuple(offsets), tuple(sizes))


def _tensor(
    fqn: str, dtypes: Mapping[str, str], shape: tuple[int, ...], boxes: Mapping[Box, int]
) -> TensorRecord:
    if fqn not in dtypes:
        raise _incomplete(f"No rank wrote any chunk of {fqn}, which is in the plan.", fqn)
    empty = 0 in shape
    held = list(boxes) if empty else [box for box in boxes if not box.is_empty]
    owners = [boxes[box] for box in held]
    if not empty:
        coverage = covers_exactly(shape, held)
        if coverage.overlap is not None:
            a, b = coverage.overlap
            raise _incomplete(
                f"Chunks of {fqn} overlap: {held[a]} of rank {owners[a]} and {held[b]} of rank "
                f"{owners[b]}.",
                fqn,
            )
        if coverage.outside is not None:
            raise _incomplete(
                f"Rank {owners[coverage.outside]} wrote {held[coverage.outside]} of {fqn}, whose "
                f"shape is {list(shape)}.",
                fqn,
            )
        if not coverage.is_exact:
            raise _incomplete(
                f"The chunks of {fqn} leave a gap at {coverage.gap} of its shape {list(shape)}; "
                f"ranks {sorted(set(owners))} wrote chunks of it.",
                fqn,
            )
    grid = None if empty else find_grid(shape, held)
    if grid is None:
        return TensorRecord(
            fqn=fqn,
            dtype=dtypes[fqn],
            shape=shape,
            chunks=list(zip(held, owners, strict=True)),
        )
    by_rank = type(grid)(grid.cuts, tuple(owners[i] for i in grid.owners))
    return TensorRecord(fqn=fqn, dtype=dtypes[fqn], shape=shape, grid=by_rank)


def _incomplete(what: str, fqn: str) -> IntegrityError:
    return IntegrityError(
        what,
        fqn=fqn,
        phase="commit",
        next_step="Nothing was committed. Check the save planner and the sharding of this value.",
    )


def stock_entries(
    manifests: Sequence[RankManifest],
) -> Iterator[tuple[str, tuple[int, ...] | None, str, int, int]]:
    """Yield (fqn, chunk offsets or None for a blob, path, start, length) of every item."""
    for manifest, file in itertools.chain.from_iterable(
        ((manifest, file) for file in manifest.files) for manifest in manifests
    ):
        items = file.items
        for fqn, offsets, start, length in zip(
            items.fqn, items.offsets, items.item_start, items.item_bytes, strict=True
        ):
            yield (
                manifest.fqns[fqn],
                None if offsets is None else tuple(offsets),
                file.path,
                start,
                length,
            )
