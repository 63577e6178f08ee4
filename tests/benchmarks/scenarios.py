"""What is measured: saves, loads, exports, slices, background saves. Only public names are used."""

from __future__ import annotations

import argparse
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workload
from bandwidth import Bandwidth
from floors import DiskFloor, Floor, FsspecFloor, checksum, load_columns, put_matrices
from measure import Comparison, Contender, Meter
from peers import Peer, peers_for
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from workload import Sharding, State, own_views

import ckpt_storage

_SLICED = "layers.0.w1"
_SLICED_ROWS = 256


@dataclass(frozen=True, slots=True)
class Bench:
    """What every scenario is given: the storage, its floor and the meter of this rank."""

    url: str
    storage_options: Mapping[str, Any]
    floor: Floor
    meter: Meter
    gib: float
    small_count: int
    run_count: int
    with_peers: bool

    @property
    def peers(self) -> list[Peer]:
        return peers_for(self.url, self.storage_options) if self.with_peers else []

    @property
    def options(self) -> dict[str, Any]:
        return {"storage_options": dict(self.storage_options)}

    def at(self, folder: str) -> str:
        return f"{self.url}/{folder}"

    def state(
        self, sharding: Sharding = "rows", *, filled: bool = True, is_small: bool = False
    ) -> State:
        if is_small:
            return workload.small_state(self.small_count, filled=filled)
        return workload.llama_state(self.gib, sharding, filled=filled)

    def saved_by_peers(self, state: State, name: str) -> dict[str, Peer]:
        """Let each peer save to a folder of its own, and wait for all ranks."""
        folders = {f"{name}-{number}": peer for number, peer in enumerate(self.peers)}
        for folder, peer in folders.items():
            dcp.save(dict(state), storage_writer=peer.writer(self.at(folder)))
        dist.barrier()
        return folders

    def clear(self, *folders: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for folder in folders:
                self.floor.clear(folder)
        dist.barrier()

    def compare(self, what: str, moved_bytes: int, contenders: list[Contender]) -> Comparison:
        """Let the contenders take turns; the first is the floor."""
        runs = self.meter.take_turns(contenders, self.run_count)
        return Comparison(what, moved_bytes, runs)


def _save(bench: Bench, what: str, *, is_small: bool = False) -> Comparison:
    """Measure a durable save, planning included."""
    state, url = bench.state(is_small=is_small), bench.at("save")

    def by(writer: Callable[..., Any], **options: Any) -> Callable[[], object]:
        return lambda: dcp.save(dict(state), storage_writer=writer(url, **options))

    own = f"save/{dist.get_rank()}"
    runs: dict[str, Callable[[], object]] = {
        bench.floor.name: lambda: bench.floor.put(own, own_views(state)),
        "ckpt_storage": lambda: ckpt_storage.save(state, url, **bench.options),
        "ckpt_storage, dcp.save": by(ckpt_storage.CheckpointStorageWriter, **bench.options),
        **{peer.name: by(peer.writer) for peer in bench.peers},
    }
    clear = functools.partial(bench.clear, "save")
    contenders = [Contender(name=name, run=run, after=clear) for name, run in runs.items()]
    return bench.compare(what, workload.state_bytes(state), contenders)


def _load(
    bench: Bench,
    what: str,
    *,
    into: Sharding = "rows",
    is_small: bool = False,
    is_cold: bool = False,
) -> Comparison:
    """Measure a load of rows; cold: after the kernel was told to forget what it caches."""
    make = functools.partial(bench.state, is_small=is_small)
    state, target = make(), make(into, filled=False)
    expected = state if into == "rows" else make(into)

    def before() -> None:
        if is_cold and isinstance(bench.floor, DiskFloor) and dist.get_rank() == 0:
            bench.floor.forget_cached()
        dist.barrier()

    def contender(name: str, run: Callable[[], object]) -> Contender:
        def checked() -> None:
            workload.check_same(target, expected, name)
            workload.zero(target)

        return Contender(name=name, run=run, before=before, after=checked)

    def by(reader: Callable[..., Any], url: str, **options: Any) -> Callable[[], object]:
        return lambda: dcp.load(dict(target), storage_reader=reader(url, **options))

    # The floor reads what this rank needs from a file of its own, also where ours must reshard.
    own, url = f"load-floor/{dist.get_rank()}", bench.at("load-ours")
    bench.floor.put(own, own_views(expected))
    ckpt_storage.save(state, url, **bench.options)
    folders = bench.saved_by_peers(state, "load")
    get = functools.partial(bench.floor.get, own, own_views(target))
    ours = by(ckpt_storage.CheckpointStorageReader, url, **bench.options)
    contenders = [
        contender(bench.floor.name, get),
        contender("floor + CRC-32C", functools.partial(get, checksum)),
        *(
            contender("verifying loop", loop)
            for loop in _verifying_loops(bench, state, target, into)
        ),
        contender("ckpt_storage", lambda: ckpt_storage.load(target, url, **bench.options)),
        contender("ckpt_storage, dcp.load", ours),
        *(contender(peer.name, by(peer.reader, bench.at(at))) for at, peer in folders.items()),
    ]
    found = bench.compare(what, workload.state_bytes(state), contenders)
    bench.clear("load-floor", "load-ours", *folders)
    return found


def _verifying_loops(
    bench: Bench, state: State, target: State, into: Sharding
) -> Iterator[Callable[[], object]]:
    """Yield, for columns on a disk, a loop that checks every block of every rank's rows."""
    if into != "columns" or "://" in bench.url:
        return
    folder, rank, rank_count = Path(bench.at("load-floor")), dist.get_rank(), dist.get_world_size()
    own = [tensor.to_local() for tensor in state.values()]
    crcs: list[Any] = [None] * rank_count
    dist.all_gather_object(crcs, put_matrices(folder / f"rows-{rank}", own))

    def columns_of(number: int) -> list[tuple[torch.Tensor, int, int]]:
        columns = []
        for tensor in target.values():
            local = tensor.to_local()
            rows, width = len(local) // rank_count, local.shape[1]
            row_bytes = tensor.shape[1] * local.element_size()
            columns.append((local[number * rows :][:rows], row_bytes, rank * width))
        return columns

    def run() -> None:
        for number in range(rank_count):
            load_columns(folder / f"rows-{number}", crcs[number], columns_of(number))

    yield run


def fewer(bench: Bench) -> Comparison:
    """Measure a load, by the first half of the ranks, of rows that all ranks saved."""
    state, rank = bench.state(), dist.get_rank()
    group = dist.new_group(list(range(max(1, dist.get_world_size() // 2))))
    is_member = group != dist.GroupMember.NON_GROUP_MEMBER
    target, expected = (
        workload.llama_state(bench.gib, "rows", filled=filled, group=group) if is_member else {}
        for filled in (False, True)
    )
    own, url = f"load-floor/{rank}", bench.at("load-ours")
    bench.floor.put(own, own_views(expected))
    ckpt_storage.save(state, url, **bench.options)
    folders = bench.saved_by_peers(state, "load")

    def contender(name: str, run: Callable[[], object]) -> Contender:
        def checked() -> None:
            workload.check_same(target, expected, name)
            workload.zero(target)

        return Contender(name=name, run=run if is_member else _nothing, after=checked)

    def by(reader: Callable[..., Any], url: str) -> Callable[[], object]:
        return lambda: dcp.load(dict(target), storage_reader=reader(url), process_group=group)

    get = functools.partial(bench.floor.get, own, own_views(target))
    contenders = [
        contender(bench.floor.name, get),
        contender("floor + CRC-32C", functools.partial(get, checksum)),
        contender(
            "ckpt_storage",
            lambda: ckpt_storage.load(target, url, process_group=group, **bench.options),
        ),
        *(contender(peer.name, by(peer.reader, bench.at(at))) for at, peer in folders.items()),
    ]
    moved_bytes = workload.state_bytes(state)
    found = bench.compare("load by half as many ranks", moved_bytes, contenders)
    bench.clear("load-floor", "load-ours", *folders)
    return found


def _nothing() -> None:
    """Wait for the other ranks."""


def stall(bench: Bench) -> Comparison:
    """Measure how long a background save holds the trainer up; its rest is not in the time."""
    state = bench.state()
    warm = [torch.empty_like(tensor.to_local()).fill_(0) for tensor in state.values()]
    waits: dict[str, Callable[[], object]] = {}

    def contender(name: str, start: Callable[[str], Callable[[], object]]) -> Contender:
        def run() -> None:
            waits[name] = start(bench.at("stall"))

        def after() -> None:
            waits.pop(name)()
            bench.clear("stall")

        return Contender(name=name, run=run, after=after)

    def copy() -> None:
        torch._foreach_copy_(warm, [tensor.to_local() for tensor in state.values()])

    def torch_async(peer: Peer, kind: AsyncCheckpointerType, url: str) -> Callable[[], object]:
        future = dcp.async_save(
            dict(state), storage_writer=peer.writer(url), async_checkpointer_type=kind
        )
        return future.result  # type: ignore[union-attr]  # no stager, so a future

    def ours(saver: ckpt_storage.AsyncSaver, url: str) -> Callable[[], object]:
        return saver.save(state, url, **bench.options).result

    with (
        ckpt_storage.AsyncSaver(mode="thread") as threads,
        ckpt_storage.AsyncSaver(mode="process", process_group=dist.new_group()) as processes,
    ):
        contenders = [
            Contender(name="floor: one memcpy", run=copy),
            contender("ckpt_storage, thread", functools.partial(ours, threads)),
            contender("ckpt_storage, process", functools.partial(ours, processes)),
        ]
        for peer in bench.peers[:1]:
            for kind in AsyncCheckpointerType:
                start = functools.partial(torch_async, peer, kind)
                contenders.append(contender(f"{peer.name}, {kind.value}", start))
        return bench.compare(
            "trainer blocked by a background save", workload.state_bytes(state), contenders
        )


def _export(bench: Bench, what: str, sharding: Sharding) -> Comparison:
    """Measure the Hugging Face export of a checkpoint to the storage that it lies on."""
    state, rank = bench.state(sharding), dist.get_rank()
    views = own_views(bench.state(sharding, filled=False))
    ckpt_storage.save(state, bench.at("export"), **bench.options)
    bench.floor.put(f"export-floor-in/{rank}", own_views(state))
    first = dist.new_group([0])
    dist.barrier()

    def floor() -> None:
        bench.floor.get(f"export-floor-in/{rank}", views)
        bench.floor.put(f"export-floor/{rank}", views)

    def ours(group: dist.ProcessGroup | None = None) -> None:
        ckpt_storage.consolidate(
            bench.at("export"),
            bench.at("export-hf"),
            process_group=group,
            output_storage_options=bench.storage_options,
            **bench.options,
        )

    def alone() -> None:
        if rank == 0:
            ours(first)

    def clear() -> None:
        bench.clear("export-hf")

    contenders = [
        Contender(name="floor: read, write", run=floor, after=lambda: bench.clear("export-floor")),
        Contender(name="ckpt_storage", run=ours, after=clear),
        Contender(name="ckpt_storage, rank 0 alone", run=alone, after=clear),
    ]
    if bench.with_peers and "://" not in bench.url:
        source, output = bench.at("export-torch"), bench.at("export-torch-hf")
        writer = dcp.HuggingFaceStorageWriter(source, save_distributed=True)
        dcp.save(dict(state), storage_writer=writer)

        def torchs() -> None:
            Path(output).mkdir(parents=True, exist_ok=True)
            dist.barrier()
            consolidate_safetensors_files_on_every_rank(
                source, output, dict.fromkeys(state, 1), num_threads=1
            )

        after = functools.partial(bench.clear, "export-torch-hf")
        contenders.append(Contender(name="torch, every rank", run=torchs, after=after))
    found = bench.compare(what, workload.state_bytes(state), contenders)
    bench.clear("export", "export-floor-in", "export-torch")
    return found


def part(bench: Bench) -> Comparison:
    """Measure the read of 1 MiB of one tensor by one rank, opened already and opened anew."""
    state = bench.state()
    ckpt_storage.save(state, bench.at("slice"), **bench.options)
    bench.floor.put(f"slice-floor/{dist.get_rank()}", own_views(state))
    folders = bench.saved_by_peers(state, "slice")
    rows = min(_SLICED_ROWS, state[_SLICED].shape[0] // 2)
    buffer = memoryview(bytearray(rows * state[_SLICED].shape[1] * state[_SLICED].element_size()))
    opened = ckpt_storage.open_checkpoint(bench.at("slice"), **bench.options)

    def anew() -> None:
        with ckpt_storage.open_checkpoint(bench.at("slice"), **bench.options) as checkpoint:
            checkpoint[_SLICED][:rows]

    def one_key(peer: Peer, folder: str) -> None:
        whole = {_SLICED: torch.empty(tuple(state[_SLICED].shape), dtype=torch.bfloat16)}
        dcp.load(whole, storage_reader=peer.reader(bench.at(folder)), no_dist=True)

    runs: dict[str, Callable[[], object]] = {
        "floor: read": lambda: bench.floor.get("slice-floor/0", [buffer]),
        "ckpt_storage, already open": lambda: opened[_SLICED][:rows],
        "ckpt_storage, opened anew": anew,
        **{
            f"{peer.name}, all of it": functools.partial(one_key, peer, folder)
            for folder, peer in folders.items()
        },
    }
    idle: Callable[[], object] = lambda: None  # noqa: E731  # the other ranks wait
    contenders = [
        Contender(name=name, run=run if dist.get_rank() == 0 else idle)
        for name, run in runs.items()
    ]
    found = bench.compare("one slice of a tensor", len(buffer), contenders)
    opened.close()
    bench.clear("slice", "slice-floor", *folders)
    return found


def _shared(bench: Bench, what: str, sharding: Sharding) -> Comparison:
    """Measure a load of what several ranks need, each for itself and shared."""
    state, target = bench.state(sharding), bench.state(sharding, filled=False)
    url = bench.at("shared")
    ckpt_storage.save(state, url, **bench.options)

    def contender(name: str, shared_reads: Literal["always", "never"]) -> Contender:
        def run() -> None:
            ckpt_storage.load(target, url, shared_reads=shared_reads, **bench.options)

        def checked() -> None:
            workload.check_same(target, state, name)
            workload.zero(target)

        return Contender(name=name, run=run, after=checked)

    contenders = [contender("each rank for itself", "never"), contender("shared", "always")]
    found = bench.compare(what, workload.state_bytes(state), contenders)
    bench.clear("shared")
    return found


SCENARIOS: Mapping[str, Callable[[Bench], Comparison]] = {
    "save": lambda bench: _save(bench, "save"),
    "load": lambda bench: _load(bench, "load"),
    "load-cold": lambda bench: _load(bench, "load, cold cache", is_cold=True),
    "reshard": lambda bench: _load(bench, "load, rows to columns", into="columns"),
    "fewer": fewer,
    "stall": stall,
    "small-save": lambda bench: _save(bench, "save of small tensors", is_small=True),
    "small-load": lambda bench: _load(bench, "load of small tensors", is_small=True),
    "shared": lambda bench: _shared(bench, "load, replicated", "replicated"),
    "shared-hsdp": lambda bench: _shared(bench, "load, two replicas of shards", "hsdp"),
    "slice": part,
    "export": lambda bench: _export(bench, "export", "rows"),
    "export-columns": lambda bench: _export(bench, "export, by columns", "columns"),
}
"""What measures each scenario, by the name that the command line takes."""


def measure(
    rank: int,
    asked: argparse.Namespace,
    url: str,
    options: dict[str, Any],
    count: Any,
    scratch: str,
    bandwidth: Bandwidth | None,
    port: int,
) -> None:
    """Measure on one rank, in a process of its own; rank 0 leaves what it found in `scratch`."""
    # torch's own background saves start a group that looks for these.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=asked.ranks)
    is_local = "://" not in url
    if is_local and bandwidth is not None:
        bandwidth.bound_mount()
    floor = DiskFloor(url) if is_local else FsspecFloor(url, options)
    given = {"gib": asked.gib, "small_count": asked.small, "run_count": asked.runs}
    bench = Bench(url, options, floor, Meter(count), with_peers=asked.peers, **given)
    names = asked.scenario or [
        name
        for name in SCENARIOS
        if (is_local or name != "load-cold")
        and (bandwidth is not None or not name.startswith("shared"))
    ]
    try:
        found = [SCENARIOS[name](bench) for name in names]
        if rank == 0:
            torch.save(found, f"{scratch}/result")
    finally:
        if rank == 0:
            floor.clear("")
        dist.destroy_process_group()
