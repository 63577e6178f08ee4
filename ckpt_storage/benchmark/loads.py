"""Loads of a whole model: as saved, into another sharding, with a cold cache, a slice, a check.

Knows our loaders, the floor and the peers. Called by `scenarios` on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from ckpt_storage.checkpoint import open_checkpoint
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.loading import load
from ckpt_storage.saving import save
from ckpt_storage.store import open_store
from ckpt_storage.verification import verify

from .bench import Bench, get_own, our_name, put_own
from .compare import Comparison, Contender
from .peers import Peer
from .plain import PlainDisk
from .workload import State, check_same, own_views, state_bytes, zeroed

_PARTIAL_FQN = "layers.0.w1"
_PARTIAL_ROWS = 256


def measure_load(
    bench: Bench,
    *,
    what: str = "load",
    is_cold: bool = False,
    target_sharding: Literal["rows", "columns"] | None = None,
) -> Comparison:
    """Measure a load of the whole state, into the sharding it was saved with or into another."""
    settings = bench.settings
    state = bench.state(filled=True)
    target = bench.state(filled=False, sharding=target_sharding)
    expected = bench.state(filled=True, sharding=target_sharding) if target_sharding else state

    def checked(name: str) -> None:
        check_same(target, expected, name)
        zeroed(target)

    def before() -> None:
        if is_cold and isinstance(bench.plain, PlainDisk) and bench.rank == 0:
            bench.plain.forget_cached()
        dist.barrier()

    def contender(name: str, run: Callable[[], object]) -> Contender:
        return Contender(name=name, run=run, before=before, after=functools.partial(checked, name))

    put_own(bench, state, "load-floor")
    first = settings.engines[0]
    ours_at = bench.root.join("load-ours")
    save(state, ours_at.target, **bench.options(first))
    peers = bench.peers
    for peer in peers:
        peer.save(state, bench.root.join(f"load-{peers.index(peer)}"))
    dist.barrier()
    floor = functools.partial(get_own, bench, target, "load-floor")
    if target_sharding is not None:
        floor = functools.partial(_get_resharded, bench, target, state, "load-floor")
    contenders = [
        contender(
            bench.plain.name.replace(
                "write, fsync", "map, copy" if target_sharding else "read into place"
            ),
            floor,
        ),
        *(
            contender(
                our_name(engine),
                functools.partial(load, target, ours_at.target, **bench.options(engine)),
            )
            for engine in settings.engines
        ),
        *(
            contender(
                peer.name,
                functools.partial(peer.load, target, bench.root.join(f"load-{number}")),
            )
            for number, peer in enumerate(peers)
        ),
    ]
    found = bench.compare(what, state_bytes(state), contenders)
    for folder in ("load-floor", "load-ours", *(f"load-{at}" for at in range(len(peers)))):
        bench.clear(folder)
    return found


def _get_resharded(bench: Bench, target: State, saved: State, folder: str) -> None:
    """Look at all ranks' row shards and copy this rank's columns out of each: the plain way."""
    count, rank = dist.get_world_size(), bench.rank
    file_bytes = state_bytes(saved) // count
    for other in range(count):
        whole, start = bench.plain.whole(f"{folder}/{other}", file_bytes), 0
        for name, tensor in target.items():
            local = tensor.to_local()
            rows, width = saved[name].to_local().shape
            shard = torch.frombuffer(
                whole, dtype=local.dtype, count=rows * width, offset=start
            ).view(rows, width)
            start += shard.nbytes
            columns = local.shape[1]
            local[other * rows : (other + 1) * rows] = shard[
                :, rank * columns : (rank + 1) * columns
            ]


def measure_partial(bench: Bench) -> Comparison:
    """Measure the read of 1 MiB of one tensor, by a process that has read from it before."""
    state = bench.state(filled=True, sharding="rows")
    at = bench.root.join("partial")
    dcp_at = bench.root.join("partial-dcp")
    save(state, at.target, **bench.options(bench.settings.engines[0]))
    peers = [peer for peer in bench.peers if peer.name in {"torch FileSystem", "torch Fsspec"}]
    for peer in peers[:1]:
        peer.save(state, dcp_at)
    bench.plain.put(f"partial-floor/{bench.rank}", own_views(state))
    dist.barrier()
    row_bytes = state[_PARTIAL_FQN].shape[1] * state[_PARTIAL_FQN].element_size()
    rows = min(_PARTIAL_ROWS, state[_PARTIAL_FQN].shape[0] // 2)
    buffer = memoryview(bytearray(rows * row_bytes))

    checkpoint = open_checkpoint(at.target, storage_options=bench.root.storage_options)

    def alone(action: Callable[[], object]) -> Callable[[], object]:
        return action if bench.rank == 0 else lambda: None

    def one_key(peer: Peer) -> None:
        whole = torch.empty(tuple(state[_PARTIAL_FQN].shape), dtype=torch.bfloat16)
        peer.load_alone(_PARTIAL_FQN, whole, dcp_at)

    contenders = [
        Contender(
            name=bench.plain.name.replace("write, fsync", "read"),
            run=alone(lambda: bench.plain.get("partial-floor/0", [buffer])),
        ),
        Contender(
            name="ckpt_storage",
            run=alone(lambda: checkpoint[_PARTIAL_FQN][:rows]),
        ),
        *(
            Contender(name=f"{peer.name}, all of it", run=alone(functools.partial(one_key, peer)))
            for peer in peers
        ),
    ]
    found = bench.compare("one slice of a tensor", len(buffer), contenders)
    for folder in ("partial", "partial-dcp", "partial-floor"):
        bench.clear(folder)
    return found


def measure_verify(bench: Bench) -> Comparison:
    """Measure a check of every byte, by one rank, against one that only reads every file."""
    state = bench.state(filled=True)
    at = bench.root.join("verify")
    save(state, at.target, **bench.options(bench.settings.engines[0]))
    dist.barrier()
    store = open_store(at)
    sizes = {f"verify/{entry.path}": entry.size_bytes for entry in store.list("")}
    store.close()
    buffer = memoryview(bytearray(max(sizes.values())))

    def alone(action: Callable[[], object]) -> Callable[[], object]:
        return action if bench.rank == 0 else lambda: None

    def read_all() -> None:
        for path, size_bytes in sizes.items():
            if size_bytes:
                bench.plain.get(path, [buffer[:size_bytes]])

    def checked() -> None:
        found = verify(
            at.target,
            storage_options=bench.root.storage_options,
            memory_limit_bytes=bench.settings.memory_limit_bytes,
        )
        if not found.ok:
            raise RuntimeError(f"verify found {found.problems[0].message}")

    contenders = [
        Contender(
            name=bench.plain.name.replace("write, fsync", "read every file"), run=alone(read_all)
        ),
        Contender(name="ckpt_storage", run=alone(checked)),
    ]
    found = bench.compare("verify, by one rank", sum(sizes.values()), contenders)
    bench.clear("verify")
    return found


def measure_cold_load(bench: Bench) -> Comparison:
    """Measure a load after the kernel was told to forget what it caches."""
    if not bench.root.is_local:
        raise InvalidInputError(
            "Only a local disk has a cache to be cold.", next_step="Leave load-cold out."
        )
    return measure_load(bench, what="load, cold cache", is_cold=True)
