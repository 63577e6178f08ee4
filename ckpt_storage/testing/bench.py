"""Save and load against stock torch and against the plainest fast code, in one interleaved run.

`python -m ckpt_storage.testing.bench FOLDER` on one machine: gloo ranks, row-sharded bfloat16
tensors of Llama shapes. Prints medians, spread and ratios; judges nothing. The floor is one
`write` and `fsync` of each rank's own bytes, and one read into place. Knows the plug-ins only
by their public names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt_storage.reader import CheckpointStorageReader
from ckpt_storage.writer import CheckpointStorageWriter

_WIDTH, _HIDDEN, _WORDS = 2048, 5632, 32000
_SHAPES = {
    "wq": (_WIDTH, _WIDTH),
    "wk": (_WIDTH, _WIDTH),
    "wv": (_WIDTH, _WIDTH),
    "wo": (_WIDTH, _WIDTH),
    "w1": (_HIDDEN, _WIDTH),
    "w2": (_WIDTH, _HIDDEN),
    "w3": (_HIDDEN, _WIDTH),
}

State = dict[str, DTensor]
Contender = tuple[Callable[[State, str], None], Callable[[State, str], None]]


def _state(layer_count: int, rank_count: int, *, filled: bool) -> State:
    mesh = init_device_mesh("cpu", (rank_count,))
    shapes = {f"layers.{i}.{n}": s for i in range(layer_count) for n, s in _SHAPES.items()}
    shapes["embedding"] = (_WORDS, _WIDTH)
    state = {}
    for name, (rows, columns) in shapes.items():
        local = torch.zeros(rows // rank_count, columns, dtype=torch.bfloat16)
        if filled:
            local.normal_()
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state


def _views(state: State) -> list[memoryview]:
    flats = (tensor.to_local().reshape(-1).view(torch.uint8) for tensor in state.values())
    return [memoryview(flat.numpy()) for flat in flats]  # type: ignore[arg-type]  # numpy 2 on 3.11


def _floor_save(state: State, folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(f"{folder}/{dist.get_rank()}", os.O_WRONLY | os.O_CREAT)
    for view in _views(state):
        os.write(descriptor, view)
    os.fsync(descriptor)
    os.close(descriptor)


def _floor_load(state: State, folder: str) -> None:
    descriptor = os.open(f"{folder}/{dist.get_rank()}", os.O_RDONLY)
    for view in _views(state):
        os.readv(descriptor, [view])
    os.close(descriptor)


def _stock_save(state: State, folder: str) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))


def _stock_load(state: State, folder: str) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))


def _our_save(state: State, folder: str) -> None:
    dcp.save(state, storage_writer=CheckpointStorageWriter(folder))


def _our_load(state: State, folder: str) -> None:
    dcp.load(state, storage_reader=CheckpointStorageReader(folder))


CONTENDERS: dict[str, Contender] = {
    "floor": (_floor_save, _floor_load),
    "stock torch": (_stock_save, _stock_load),
    "ckpt_storage": (_our_save, _our_load),
}


def _timed_s(action: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def _rank(rank: int, rank_count: int, layer_count: int, run_count: int, root: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/rendezvous", rank_count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=rank_count)
    state = _state(layer_count, rank_count, filled=True)
    target = _state(layer_count, rank_count, filled=False)
    times: dict[tuple[str, str], list[float]] = {}
    for run in range(run_count + 1):
        # Each takes over the page cache that another has just freed: let them take turns.
        names = list(CONTENDERS)
        for name in names[run % len(names) :] + names[: run % len(names)]:
            save, load = CONTENDERS[name]
            folder = f"{root}/{name.replace(' ', '-')}"
            save_s = _timed_s(lambda save=save, folder=folder: save(state, folder))  # type: ignore[misc]  # bound
            load_s = _timed_s(lambda load=load, folder=folder: load(target, folder))  # type: ignore[misc]  # bound
            same = all(torch.equal(state[k].to_local(), target[k].to_local()) for k in state)
            if not same:
                raise RuntimeError(f"{name} loaded other values than it saved")
            for tensor in target.values():
                tensor.to_local().zero_()
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder)
            if run:  # the first one warms files, pages and imports up
                times.setdefault((name, "save"), []).append(save_s)
                times.setdefault((name, "load, warm cache"), []).append(load_s)
    if rank == 0:
        _print(times, sum(view.nbytes for view in _views(state)) * rank_count, rank_count)
    dist.barrier()
    dist.destroy_process_group()


def _print(times: dict[tuple[str, str], list[float]], state_bytes: int, rank_count: int) -> None:
    lines = [
        f"{state_bytes / 1e9:.2f} GB bfloat16 on {rank_count} ranks, torch {torch.__version__}",
        "| what | who | median s | min | max | x floor | x stock |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for what in ("save", "load, warm cache"):
        medians = {name: statistics.median(times[name, what]) for name in CONTENDERS}
        for name, median in medians.items():
            runs = times[name, what]
            lines.append(
                f"| {what} | {name} | {median:.3f} | {min(runs):.3f} | {max(runs):.3f} "
                f"| {median / medians['floor']:.2f} | {median / medians['stock torch']:.2f} |"
            )
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> None:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="an empty folder on the disk to measure")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=11, help="11 layers are about 1.2 GB")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    root = Path(options.folder)
    root.mkdir(parents=True, exist_ok=True)
    arguments = (options.ranks, options.layers, options.runs, str(root))
    mp.spawn(_rank, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]  # torch
    (root / "rendezvous").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
