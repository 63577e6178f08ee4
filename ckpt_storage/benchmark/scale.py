"""What a save and a load cost with thousands of ranks, found by simulation in one process.

Makes what N ranks would report of M tensors and runs it through the real codecs, the real commit
and the real reader; no tensor has bytes. Measures what the coordinator does and what every rank
does; what the ranks' network and disks do is not in it. Run as `python -m
ckpt_storage.benchmark.scale`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import pickle
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast, get_args

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from ckpt_storage import commit, integrity, layout
from ckpt_storage.assemble import assemble
from ckpt_storage.committing import commit_save
from ckpt_storage.deadline import Deadline
from ckpt_storage.documents import FileRef
from ckpt_storage.manifest import RankManifest
from ckpt_storage.opening import open_source
from ckpt_storage.options import RetryPolicy, TransferOptions
from ckpt_storage.rankreport import RankReport
from ckpt_storage.reader import CheckpointStorageReader
from ckpt_storage.stockwrite import planned_of
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.base import Store, Version

from .scaleworld import Sharding, World

__all__ = ["ScaleFigures", "Sharding", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFigures:
    """What was measured. Seconds are of one process; `report` figures are per rank.

    `coordinator_s` is all of the storage's work on the coordinator between the last report and the
    end of the save, `gather_s` (unpickling the reports) included; `assemble_s` is the part of it
    that checks the reports. `written_bytes` and `write_count` are the coordinator's. `metadata_s`
    and `metadata_bytes` are what `read_metadata` takes on each rank, in `metadata_read_count` reads
    counted at the store; `inlined_bytes` is what of `report_bytes` are documents, which
    the manifest then holds. `plan_s` the local plan of the
    front doors' load planner for one rank of the same world, `places_s` finding its bytes.
    """

    rank_count: int
    tensor_count: int
    sharding: Sharding
    item_count: int
    report_s: float
    report_bytes: int
    inlined_bytes: int
    gather_s: float
    assemble_s: float
    coordinator_s: float
    written_bytes: int
    write_count: int
    has_stock_metadata: bool
    metadata_s: float
    metadata_bytes: int
    metadata_read_count: int
    plan_s: float
    places_s: float
    resident_bytes: int | None
    peak_resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StockFigures:
    """The same for torch's own planner and writer: steps of rank 0, and what every rank reads."""

    rank_count: int
    tensor_count: int
    item_count: int
    planner_s: float
    finish_s: float
    written_bytes: int
    metadata_s: float
    plan_s: float


def simulate(
    rank_count: int,
    tensor_count: int,
    *,
    sharding: Sharding = "mixed",
    stock_metadata: bool = False,
) -> ScaleFigures:
    """Return what a save of `tensor_count` tensors by `rank_count` ranks costs.

    Runs in memory. `stock_metadata` writes `.metadata`, whose cost grows with the items.
    """
    world = World(rank_count, tensor_count, sharding)
    url = f"memory://scale-{os.urandom(8).hex()}"
    store = _without_shards(open_store(Location.of(url)))
    grant = commit.begin(store, overwrite=False, probe=lambda _: True)
    report_s: list[float] = []
    packed: list[bytes] = []
    item_count = inlined_bytes = 0
    for rank in range(rank_count):
        manifest = world.manifest(rank, grant.save_id)
        report, seconds = _reported(store, manifest, with_places=stock_metadata)
        item_count += report.item_count
        inlined_bytes += len(report.document or b"")
        report_s.append(seconds)
        packed.append(pickle.dumps([_result(report)]))
    metadata = world.metadata(with_chunks=stock_metadata)
    gc.collect()
    before = _sizes(store)
    started = time.perf_counter()
    results = [pickle.loads(data) for data in packed]  # noqa: S301  # made above
    gather_s = time.perf_counter() - started
    deadline = Deadline("commit", 3600.0)
    record = commit_save(
        store,
        grant,
        world_size=rank_count,
        metadata=metadata,
        results=results,
        storage_meta=StorageMeta(),
        settled_ties={},
        user={},
        deadline=deadline,
        retry=RetryPolicy(),
    )
    coordinator_s = time.perf_counter() - started
    resident_bytes = _resident_bytes()
    reports = [result[0].storage_data for result in results]
    started = time.perf_counter()
    assemble(reports, planned_of(metadata), {})
    assemble_s = time.perf_counter() - started
    written = {path: size for path, size in _sizes(store).items() if path not in before}
    del results, reports
    reader = _CountedReader(url)
    started = time.perf_counter()
    found = reader.read_metadata()
    metadata_s = time.perf_counter() - started
    plan_s, places_s = _loaded(store, world, found)
    return ScaleFigures(
        rank_count=rank_count,
        tensor_count=tensor_count,
        sharding=sharding,
        item_count=item_count,
        report_s=statistics.median(report_s),
        report_bytes=sum(map(len, packed)) // rank_count,
        inlined_bytes=inlined_bytes // rank_count,
        gather_s=gather_s,
        assemble_s=assemble_s,
        coordinator_s=coordinator_s,
        written_bytes=sum(written.values()),
        write_count=len(written),
        has_stock_metadata=record.stock_entries != 0,
        metadata_s=metadata_s,
        metadata_bytes=sum(reader.answers),
        metadata_read_count=len(reader.answers),
        plan_s=plan_s,
        places_s=places_s,
        resident_bytes=resident_bytes,
        peak_resident_bytes=_peak_resident_bytes(),
    )


_RANK = 0
"""The rank whose document is stored and whose load is measured; those of others are never read."""


def _reported(
    store: Store, manifest: RankManifest, *, with_places: bool
) -> tuple[RankReport, float]:
    """Return what a rank reports, and the seconds that encoding, storing and reporting took."""
    started = time.perf_counter()
    path = layout.rank_manifest_path(manifest.save_id, manifest.rank)
    document = integrity.seal(manifest.to_body())
    if manifest.rank == _RANK:
        # Thousands of them would fill the memory.
        store.write(path, document)
    ref = FileRef(path=path, size_bytes=len(document), crc32c=integrity.crc32c_of(document))
    report = RankReport.of(manifest, ref, document, with_places=with_places)
    return report, time.perf_counter() - started


def _result(report: RankReport) -> WriteResult:
    return WriteResult(
        index=MetadataIndex(f"ckpt_storage.rank.{report.rank}"),
        size_in_bytes=sum(ref.size_bytes for ref in report.files),
        storage_data=report,
    )


def _loaded(store: Store, world: World, metadata: Metadata) -> tuple[float, float]:
    """Return the seconds of the local load plan, and of finding the bytes, for one rank."""
    from ckpt_storage.loadplanner import _items, _parts  # noqa: PLC0415  # as the planner does it

    started = time.perf_counter()
    items: list[ReadItem] = []
    for fqn, box in world.chunks(_RANK):
        chunks = metadata.state_dict_metadata[fqn].chunks  # type: ignore[union-attr]  # no blobs
        own = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        items += _items(fqn, _parts(chunks, [own]))  # type: ignore[arg-type]  # lazy ones
    plan_s = time.perf_counter() - started
    options = TransferOptions.for_storage(
        is_remote=False,
        local_threads=1,
        local_part_bytes=1 << 20,
        thread_count=None,
        part_bytes=None,
        memory_limit_bytes=None,
    )
    source = open_source(store, deadline=Deadline("load", 3600.0), options=options)
    keys = [(item.storage_index.fqn, tuple(item.storage_index.offset or ())) for item in items]
    started = time.perf_counter()
    source.places(keys)
    return plan_s, time.perf_counter() - started


class _Remote:
    """A store that costs a request for each look, so that nobody looks for shards not written."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.capabilities = dataclasses.replace(store.capabilities, cheap_stat=False)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the store has
        return getattr(self._store, name)


def _without_shards(store: Store) -> Store:
    return cast("Store", _Remote(store))


class _Counted:
    """A store that notes the bytes of each answer to a reader; 0 for absent objects too."""

    def __init__(self, store: Store, answers: list[int]) -> None:
        self._store = store
        self._answers = answers

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the store has
        found = getattr(self._store, name)
        if name == "with_deadline":
            return lambda *args: _Counted(found(*args), self._answers)
        if name not in _READS:
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # of any signature
            came = 0
            try:
                answer = found(*args, **kwargs)
                came = _bytes_of(answer) if name != "read_into" else args[2].nbytes
            finally:
                # Appended, not added: two threads may look at once.
                self._answers.append(came)
            return answer

        return counted


_READS = frozenset({"read", "read_version", "read_into", "stat", "list"})


def _bytes_of(answer: object) -> int:
    if isinstance(answer, Version):
        return len(answer.data)
    return len(answer) if isinstance(answer, bytes) else 0


class _CountedReader(CheckpointStorageReader):
    """The real reader, whose store is counted."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.answers: list[int] = []

    def _open_store(self) -> Store:
        return cast("Store", _Counted(super()._open_store(), self.answers))


def simulate_stock(
    rank_count: int, tensor_count: int, *, sharding: Sharding = "mixed"
) -> StockFigures:
    """Return what the same save costs with torch's planner and `FileSystemWriter`.

    Takes some 2 KiB of memory and 50 us for each item.
    """
    world = World(rank_count, tensor_count, sharding)
    plans = [SavePlan(world.items(rank)) for rank in range(rank_count)]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.is_coordinator = True
    started = time.perf_counter()
    plans, metadata = planner.create_global_plan(plans)
    planner_s = time.perf_counter() - started
    results = [
        [
            WriteResult(item.index, 1 << 20, _StorageInfo(f"__{rank}_0.distcp", at << 20, 1 << 20))
            for at, item in enumerate(plan.items)
        ]
        for rank, plan in enumerate(plans)
    ]
    own = next(iter(results))
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder)
        started = time.perf_counter()
        writer.finish(metadata, results)
        finish_s = time.perf_counter() - started
        written_bytes = (Path(folder) / ".metadata").stat().st_size
        started = time.perf_counter()
        found = FileSystemReader(folder).read_metadata()
        metadata_s = time.perf_counter() - started
    started = time.perf_counter()
    for fqn, box in world.chunks(_RANK):
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        entry = cast("TensorStorageMetadata", found.state_dict_metadata[fqn])
        create_read_items_for_chunk_list(fqn, entry, [chunk])
    return StockFigures(
        rank_count=rank_count,
        tensor_count=tensor_count,
        item_count=len(own) * rank_count,
        planner_s=planner_s,
        finish_s=finish_s,
        written_bytes=written_bytes,
        metadata_s=metadata_s,
        plan_s=time.perf_counter() - started,
    )


def _sizes(store: Store) -> dict[str, int]:
    return {entry.path: entry.size_bytes or 0 for entry in store.list("")}


def _resident_bytes() -> int | None:
    """Return the memory of this process that is in RAM; None where no file tells."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except FileNotFoundError:
        return None
    return int(pages) * resource.getpagesize()


def _peak_resident_bytes() -> int:
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def main(arguments: Sequence[str], out: TextIO) -> None:
    """Print the figures, one line of JSON for each world."""
    parser = argparse.ArgumentParser(prog="python -m ckpt_storage.benchmark.scale")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--tensors", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--sharding", choices=get_args(Sharding), default="mixed")
    parser.add_argument("--stock-metadata", action="store_true", help="write .metadata too")
    parser.add_argument("--peers", action="store_true", help="stock torch too, up to 300,000 items")
    given = parser.parse_args(arguments)
    for rank_count in given.ranks:
        for tensor_count in given.tensors:
            ours = simulate(
                rank_count,
                tensor_count,
                sharding=given.sharding,
                stock_metadata=given.stock_metadata,
            )
            out.write(json.dumps(dataclasses.asdict(ours)) + "\n")
            out.flush()
            if given.peers and rank_count * tensor_count <= _STOCK_MOST_ITEMS:
                stock = simulate_stock(rank_count, tensor_count, sharding=given.sharding)
                out.write(json.dumps({"stock": dataclasses.asdict(stock)}) + "\n")
                out.flush()


_STOCK_MOST_ITEMS = 300_000


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdout)
