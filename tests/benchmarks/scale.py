"""What a save and a load cost with thousands of ranks, found by simulation in one process.

Makes what N ranks would report of M tensors and runs it through the real codecs, the real commit
and the real reader; no tensor has bytes. Measures what the coordinator does and what every rank
does; what the ranks' network and disks do is not in it. Run as
`python tests/benchmarks/scale.py --ranks 2048 --tensors 500`. With `--messages` it measures the
messages between ranks in place of that (see `messages`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import os
import pickle
import resource
import statistics
import time
from array import array
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from messages import run
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_storage import CheckpointStorageReader
from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit.assembly import assemble, commit_save, planned_of
from ckpt_storage.commit.report import RankReport
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.format.names import rank_manifest_path, shard_path
from ckpt_storage.format.rank_manifest import RankManifest, ShardFile
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.opening import open_source
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.backend import Content
from ckpt_storage.store.store import Store

_BLOCK_BYTES = 64 << 10
_COLUMNS = (4096, 14336, 1024, 128)


class World:
    """Tensors of a language model, cut by rows as FSDP does; one in four is whole on one rank."""

    def __init__(self, rank_count: int, tensor_count: int) -> None:
        self.rank_count = rank_count
        self.shapes: dict[str, tuple[int, ...]] = {}
        for at in range(tensor_count):
            rows = 8 * rank_count if at % 3 else 3 * rank_count + 5
            shape = (4096,) if at % 4 == 3 else (rows, _COLUMNS[at % 4])  # one in four
            self.shapes[f"model.layers.{at // 9}.block{at % 9}.weight"] = shape

    def chunks(self, rank: int) -> Iterator[tuple[str, Box]]:
        """Yield what a rank holds, by the rule of `torch.chunk`."""
        for at, (fqn, shape) in enumerate(self.shapes.items()):
            if len(shape) == 1:
                if at % self.rank_count == rank:
                    yield fqn, Box((0,), shape)
                continue
            step = -(-shape[0] // self.rank_count)
            start = min(rank * step, shape[0])
            yield fqn, Box((start, 0), (min(step, shape[0] - start), shape[1]))

    def manifest(self, rank: int, save_id: str) -> RankManifest:
        chunks = dict(self.chunks(rank))
        boxes = {box: at for at, box in enumerate(dict.fromkeys(chunks.values()))}
        lengths = [2 * box.volume for box in chunks.values()]
        padded = (-(-(length + 1600) // 64) * 64 for length in lengths)
        *starts, end = itertools.accumulate(padded, initial=0)
        count = len(chunks)
        blocks = sum(-(-length // _BLOCK_BYTES) for length in lengths)
        # As those of real bytes, which do not shrink when a document is deflated.
        random = np.random.default_rng(rank)

        def crcs(count: int) -> array[int]:
            return array("I", random.integers(1 << 32, size=count, dtype=np.uint32).tobytes())

        file = ShardFile(
            path=shard_path(save_id, rank, 0),
            size_bytes=end,
            crc32c=rank,
            block_bytes=_BLOCK_BYTES,
            fqn=range(count),
            dtype=[0] * count,
            box=[boxes[box] for box in chunks.values()],
            item_start=starts,
            item_bytes=[length + 1536 for length in lengths],
            payload_start=[start + 704 for start in starts],
            payload_bytes=lengths,
            block_crcs=crcs(blocks),
            frame_crcs=crcs(count + 1),
        )
        return RankManifest(
            save_id=save_id,
            rank=rank,
            world_size=self.rank_count,
            fqns=list(chunks),
            dtypes=["bfloat16"],
            boxes=list(boxes),
            files=[file],
        )

    def metadata(self, *, with_chunks: bool) -> Metadata:
        state = {
            fqn: TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.bfloat16), size=torch.Size(shape), chunks=[]
            )
            for fqn, shape in self.shapes.items()
        }
        if with_chunks:
            for rank in range(self.rank_count):
                for fqn, box in self.chunks(rank):
                    state[fqn].chunks.append(
                        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                    )
        paths = {fqn: tuple(fqn.split(".", 1)) for fqn in self.shapes}
        return Metadata(state_dict_metadata=dict(state), planner_data=paths)


Figures = dict[str, float]
"""What was measured, by the names that `simulate` gives."""


def simulate(rank_count: int, tensor_count: int, *, stock_metadata: bool = False) -> Figures:
    """Return what a save of `tensor_count` tensors by `rank_count` ranks costs, run in memory.

    `stock_metadata` writes `.metadata`, whose cost grows with the items. `report_*` is of one rank.
    `coordinator_s` is all between the last report and the end of the save, `gather_s` (unpickling
    the reports) included; `written_*` is the coordinator's. `metadata_*` is what `read_metadata`
    takes on each rank, `places_s` finds the bytes of one.
    """
    world = World(rank_count, tensor_count)
    url = f"memory://scale-{os.urandom(8).hex()}"
    store = _watched(Location.of(url), [])
    ticket = dataclasses.replace(commit.begin(store, overwrite=False), world_size=rank_count)
    report_s: list[float] = []
    packed: list[bytes] = []
    item_count = 0
    for rank in range(rank_count):
        manifest = world.manifest(rank, ticket.save_id)
        started = time.perf_counter()
        path, document = rank_manifest_path(ticket.save_id, rank), seal(manifest.to_body())
        if rank == _RANK:
            # Thousands of them would fill the memory.
            store.put(path, document)
        ref = FileRef(path=path, size_bytes=len(document), crc32c=crc32c_of(document))
        report = RankReport.of(manifest, ref, with_places=stock_metadata)
        report_s.append(time.perf_counter() - started)
        item_count += report.item_count
        packed.append(pickle.dumps(report))
    metadata = world.metadata(with_chunks=stock_metadata)
    gc.collect()
    before = _sizes(store)
    started = time.perf_counter()
    reports = [pickle.loads(data) for data in packed]  # made above
    gather_s = time.perf_counter() - started
    commit_save(store, ticket, metadata=metadata, reports=reports, user={})
    coordinator_s = time.perf_counter() - started
    started = time.perf_counter()
    assemble(reports, planned_of(metadata))
    assemble_s = time.perf_counter() - started
    written = {path: size for path, size in _sizes(store).items() if path not in before}
    del reports
    answers: list[int] = []
    opener = functools.partial(_watched, answers=answers)
    with patch("ckpt_storage.loads.session.open_store", opener):
        started = time.perf_counter()
        CheckpointStorageReader(url).read_metadata()
        metadata_s = time.perf_counter() - started
    source = open_source(store, TransferOptions(thread_count=1, part_bytes=1 << 20))
    keys = [(fqn, box.offsets) for fqn, box in world.chunks(_RANK)]
    started = time.perf_counter()
    source.places(keys)
    places_s = time.perf_counter() - started
    return {
        "rank_count": rank_count,
        "tensor_count": tensor_count,
        "item_count": item_count,
        "report_s": statistics.median(report_s),
        "report_bytes": sum(map(len, packed)) // rank_count,
        "gather_s": gather_s,
        "assemble_s": assemble_s,
        "coordinator_s": coordinator_s,
        "written_bytes": sum(written.values()),
        "write_count": len(written),
        "metadata_s": metadata_s,
        "metadata_bytes": sum(answers),
        "metadata_read_count": len(answers),
        "places_s": places_s,
        "peak_resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


_RANK = 0
"""The rank whose document is stored and whose load is measured; those of others are never read."""


class _Watched:
    """A store that notes the bytes of each answer to a reader; 0 for absent objects too.

    It says that looks cost requests, so that nobody looks for shards not written.
    """

    def __init__(self, store: Store, answers: list[int]) -> None:
        self._store = store
        self._answers = answers
        self.capabilities = dataclasses.replace(store.capabilities, is_remote=True)

    def __getattr__(self, name: str) -> Any:  # whatever the store has
        found = getattr(self._store, name)
        if name == "bounded":
            return lambda *args: _Watched(found(*args), self._answers)
        if name not in _READS:
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:  # of any signature
            came = 0
            try:
                answer = found(*args, **kwargs)
                if name == "read":
                    came = sum(view.nbytes for _, view in args[1])
                elif isinstance(answer, Content):
                    came = len(answer.data)
            finally:
                # Appended, not added: two threads may look at once.
                self._answers.append(came)
            return answer

        return counted


def _watched(location: Location, answers: list[int], **options: Any) -> Store:
    return cast("Store", _Watched(open_store(location, **options), answers))


_READS = frozenset({"get", "read", "stat", "list"})


def _sizes(store: Store) -> dict[str, int]:
    return {entry.path: entry.size_bytes or 0 for entry in store.list("")}


def main() -> None:
    """Print the figures, one line of JSON for each world."""
    parser = argparse.ArgumentParser(prog="python tests/benchmarks/scale.py")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--tensors", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--stock-metadata", action="store_true", help="write .metadata too")
    messages = parser.add_argument_group("the messages of a save, in place of its documents")
    messages.add_argument("--messages", action="store_true")
    messages.add_argument("--payload-bytes", type=int, default=20_000, help="of a rank and round")
    messages.add_argument("--saves", type=int, default=5, help="of each kind")
    messages.add_argument("--largest", type=int, default=10_000, help="ranks to extrapolate to")
    options = parser.parse_args()
    if options.messages:
        run(options.ranks, options.payload_bytes, options.saves, options.largest)
        return
    for sizes in itertools.product(options.ranks, options.tensors):
        print(json.dumps(simulate(*sizes, stock_metadata=options.stock_metadata)), flush=True)


if __name__ == "__main__":
    main()
