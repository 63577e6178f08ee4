"""Loads of a whole model: as saved, into another sharding, with a cold cache, a slice, a check.

Knows our loaders, the floor and the peers. Called by `scenarios` on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckpt_storage.checkpoint import open_checkpoint
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.loading import load
from ckpt_storage.reader import CheckpointStorageReader
from ckpt_storage.saving import save
from ckpt_storage.store import open_store
from ckpt_storage.verification import verify

from .bench import Bench, get_own, our_name, put_own
from .compare import Comparison, Contender
from .peers import Peer, PlainReader, stock_metadata
from .plain import PlainDisk, Seen, checksum
from .workload import State, check_same, own_views, state_bytes, zeroed

_PARTIAL_FQN = "layers.0.w1"
_PARTIAL_ROWS = 256
_SCRATCH_BYTES = 8 << 20
_CHECKED = "floor + CRC-32C in cache"
_CHECKED_ONCE = "floor + CRC-32C, shared"
"""Each block is hashed by one rank, which is the least that checks it for all."""
_BY_DCP = "that by torch's dcp.load"
"""The floor with checksums as a plug-in that plans, opens and agrees on nothing by itself."""
_PIECE_BYTES = 1 << 20


def measure_load(
    bench: Bench,
    *,
    what: str = "load",
    is_cold: bool = False,
    target_sharding: Literal["rows", "columns"] | None = None,
) -> Comparison:
    """Measure a load of the whole state, into the sharding it was saved with or into another."""
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
    ours_at = bench.root.join("load-ours")
    save(state, ours_at.target, **bench.options())
    peers = bench.peers
    for peer in peers:
        peer.save(state, bench.root.join(f"load-{peers.index(peer)}"))
    dist.barrier()
    reader = CheckpointStorageReader(ours_at.target, **bench.options())
    metadata = stock_metadata(reader.read_metadata())
    floor = functools.partial(get_own, bench, target, "load-floor")
    checked_floor = functools.partial(get_own, bench, target, "load-floor", seen=checksum)
    if target_sharding is not None:
        floor = functools.partial(_get_resharded, bench, target, state, "load-floor")
        checked_floor = functools.partial(floor, seen=checksum)
    checked_name = _CHECKED if target_sharding is None else _CHECKED_ONCE
    contenders = [
        contender(
            bench.floor(_whole_name(bench) if target_sharding else "read into place"),
            floor,
        ),
        contender(checked_name, checked_floor),
        contender(
            _BY_DCP,
            lambda: dcp.load(dict(target), storage_reader=PlainReader(metadata, checked_floor)),
        ),
        contender(our_name(), functools.partial(load, target, ours_at.target, **bench.options())),
        *(
            contender(
                peer.name,
                functools.partial(peer.load, target, bench.root.join(f"load-{number}")),
            )
            for number, peer in enumerate(peers)
        ),
    ]
    found = bench.compare(what, state_bytes(state), contenders, checked=checked_name)
    for folder in ("load-floor", "load-ours", *(f"load-{at}" for at in range(len(peers)))):
        bench.clear(folder)
    return found


def _whole_name(bench: Bench) -> str:
    return "map, copy" if isinstance(bench.plain, PlainDisk) else "fetch, copy"


def _get_resharded(
    bench: Bench, target: State, saved: State, folder: str, seen: Seen | None = None
) -> None:
    """Look at all ranks' row shards and copy this rank's columns out of each: the plain way.

    `seen`, if any, gets every piece on one of the ranks, right before that copies from it.
    """
    count, rank = dist.get_world_size(), bench.rank
    file_bytes = state_bytes(saved) // count
    turn = 0
    for other in range(count):
        whole, start = bench.plain.whole(f"{folder}/{other}", file_bytes), 0
        for name, tensor in target.items():
            local = tensor.to_local()
            rows, width = saved[name].to_local().shape
            row_bytes = width * local.element_size()
            columns = local.shape[1]
            step = rows if seen is None else max(1, _PIECE_BYTES // row_bytes)
            for first in range(0, rows, step):
                last = min(rows, first + step)
                piece = whole[start + first * row_bytes : start + last * row_bytes]
                turn += 1
                if seen is not None and turn % count == rank:
                    seen(piece)
                shard = torch.frombuffer(piece, dtype=local.dtype).view(last - first, width)
                local[other * rows + first : other * rows + last] = shard[
                    :, rank * columns : (rank + 1) * columns
                ]
            start += rows * row_bytes


def measure_partial(bench: Bench) -> Comparison:
    """Measure the read of 1 MiB of one tensor, by a process that has read from it before.

    Ours does so twice: with the checkpoint open already, and opened anew each time, as peers do.
    """
    state = bench.state(filled=True, sharding="rows")
    at = bench.root.join("partial")
    save(state, at.target, **bench.options())
    peers = bench.peers
    for number, peer in enumerate(peers):
        peer.save(state, bench.root.join(f"partial-{number}"))
    bench.plain.put(f"partial-floor/{bench.rank}", own_views(state))
    dist.barrier()
    row_bytes = state[_PARTIAL_FQN].shape[1] * state[_PARTIAL_FQN].element_size()
    rows = min(_PARTIAL_ROWS, state[_PARTIAL_FQN].shape[0] // 2)
    buffer = memoryview(bytearray(rows * row_bytes))

    opened = open_checkpoint(at.target, **bench.options())

    def alone(action: Callable[[], object]) -> Callable[[], object]:
        return action if bench.rank == 0 else lambda: None

    def anew() -> None:
        with open_checkpoint(at.target, **bench.options()) as checkpoint:
            checkpoint[_PARTIAL_FQN][:rows]

    def one_key(peer: Peer, number: int) -> None:
        whole = torch.empty(tuple(state[_PARTIAL_FQN].shape), dtype=torch.bfloat16)
        peer.load_alone({_PARTIAL_FQN: whole}, bench.root.join(f"partial-{number}"))

    contenders = [
        Contender(
            name=bench.floor("read"),
            run=alone(lambda: bench.plain.get("partial-floor/0", [buffer])),
        ),
        Contender(
            name=our_name("already open"),
            run=alone(lambda: opened[_PARTIAL_FQN][:rows]),
        ),
        Contender(name=our_name("opened anew"), run=alone(anew)),
        *(
            Contender(
                name=f"{peer.name}, all of it",
                run=alone(functools.partial(one_key, peer, number)),
            )
            for number, peer in enumerate(peers)
        ),
    ]
    found = bench.compare("one slice of a tensor", len(buffer), contenders)
    opened.close()
    for folder in ("partial", "partial-floor", *(f"partial-{at}" for at in range(len(peers)))):
        bench.clear(folder)
    return found


def measure_verify(
    bench: Bench, *, what: str = "verify, by one rank", is_cold: bool = False
) -> Comparison:
    """Measure a check of every byte, by one rank, against one that only reads every file."""
    state = bench.state(filled=True)
    at = bench.root.join("verify")
    save(state, at.target, **bench.options())
    dist.barrier()
    store = open_store(at)
    sizes = {f"verify/{entry.path}": entry.size_bytes for entry in store.list("")}
    store.close()
    # As any reader does that keeps nothing: memory beyond the cache would take most of the time.
    most_bytes = _SCRATCH_BYTES if isinstance(bench.plain, PlainDisk) else max(sizes.values())
    buffer = memoryview(bytearray(most_bytes))

    def alone(action: Callable[[], object]) -> Callable[[], object]:
        return action if bench.rank == 0 else lambda: None

    def before() -> None:
        if is_cold and isinstance(bench.plain, PlainDisk) and bench.rank == 0:
            bench.plain.forget_cached()
        dist.barrier()

    def read_all(seen: Seen | None = None) -> None:
        for path, size_bytes in sizes.items():
            whole, rest = divmod(size_bytes, most_bytes)
            if size_bytes:
                bench.plain.get(path, [*[buffer] * whole, buffer[:rest]], seen=seen)

    def checked() -> None:
        found = verify(at.target, **bench.options())
        if not found.ok:
            raise RuntimeError(f"verify found {found.problems[0].message}")

    contenders = [
        Contender(
            name=bench.floor("read every file"),
            run=alone(read_all),
            before=before,
        ),
        Contender(name=_CHECKED, run=alone(functools.partial(read_all, checksum)), before=before),
        Contender(name=our_name(), run=alone(checked), before=before),
    ]
    found = bench.compare(what, sum(sizes.values()), contenders, checked=_CHECKED)
    bench.clear("verify")
    return found


def measure_cold_load(bench: Bench) -> Comparison:
    """Measure a load after the kernel was told to forget what it caches."""
    _check_can_be_cold(bench, "load-cold")
    return measure_load(bench, what="load, cold cache", is_cold=True)


def measure_cold_verify(bench: Bench) -> Comparison:
    """Measure a check of every byte after the kernel was told to forget what it caches."""
    _check_can_be_cold(bench, "verify-cold")
    return measure_verify(bench, what="verify, by one rank, cold cache", is_cold=True)


def _check_can_be_cold(bench: Bench, scenario: str) -> None:
    if not isinstance(bench.plain, PlainDisk):
        raise InvalidInputError(
            "Only a local disk has a cache to be cold.", next_step=f"Leave {scenario} out."
        )
    if not bench.plain.can_forget:
        raise InvalidInputError(
            "This system has no call that empties the cache of a file.",
            next_step=f"Leave {scenario} out.",
        )
