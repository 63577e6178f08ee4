"""What consolidation costs, against the plainest copy of the bytes and against torch.

`python -m ckpt_storage.testing.exportbench FOLDER` on one machine: gloo ranks, bfloat16 tensors of
Llama shapes, sharded by rows or columns, local files. The shards are written once, then contenders
take turns. Prints medians, spread and ratios; judges nothing. The floor is a loop that reads as
many bytes as there are, checksums and writes them, one file a rank; fsynced, as ours is, and not,
as torch's function is. Knows contenders only by their public names.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import crc32c
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt_storage.consolidating import consolidate
from ckpt_storage.saving import save

State = dict[str, DTensor]

_PIECE_BYTES = 1 << 20
_LAYER_SHAPES = {
    "q": (2048, 2048),
    "k": (512, 2048),
    "v": (512, 2048),
    "o": (2048, 2048),
    "gate": (8192, 2048),
    "up": (8192, 2048),
    "down": (2048, 8192),
}
_EMBEDDING = (32_000, 2048)


def _state(layer_count: int, rank_count: int, dim: int) -> State:
    mesh = init_device_mesh("cpu", (rank_count,))
    shapes = {f"layers.{i}.{n}": s for i in range(layer_count) for n, s in _LAYER_SHAPES.items()}
    shapes["embedding"] = _EMBEDDING
    state = {}
    for name, shape in shapes.items():
        sizes = [size // rank_count if at == dim else size for at, size in enumerate(shape)]
        local = torch.empty(sizes, dtype=torch.bfloat16).normal_()
        state[name] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    return state


def _floor(root: Path, output: Path, *, synced: bool) -> None:
    """Read, checksum and write this rank's own shard file: its share of all bytes."""
    output.mkdir(exist_ok=True)
    rank = dist.get_rank()
    (source,) = root.glob(f"ours/saves/*/__{rank}_0.distcp")
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with source.open("rb", buffering=0) as reader, (output / str(rank)).open("wb", 0) as writer:
        while count := reader.readinto(buffer):
            crc32c.crc32c(buffer[:count])
            writer.write(buffer[:count])
        if synced:
            os.fsync(writer.fileno())


def _torch(root: Path, output: Path, *, files: dict[str, int]) -> None:
    output.mkdir(exist_ok=True)
    dist.barrier()
    consolidate_safetensors_files_on_every_rank(
        str(root / "torch"), str(output), files, num_threads=1
    )


def _ours(root: Path, output: Path, *, files: dict[str, int]) -> None:
    consolidate(str(root / "ours"), str(output), fqn_to_index_mapping=files)


def _timed(export: Callable[[Path, Path], None], root: Path, output: Path) -> float:
    dist.barrier()
    start = time.perf_counter()
    export(root, output)
    dist.barrier()
    return time.perf_counter() - start


def _divided(state: State, file_count: int) -> dict[str, int]:
    """Return which of `file_count` files each tensor goes into: in order, of about equal bytes."""
    total_bytes = sum(tensor.numel() for tensor in state.values())
    files, seen_bytes = {}, 0
    for name, tensor in state.items():
        files[name] = 1 + min(file_count - 1, seen_bytes * file_count // total_bytes)
        seen_bytes += tensor.numel()
    return files


def _rank(rank: int, rank_count: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    root = Path(folder)
    store = dist.FileStore(f"{folder}/rendezvous", rank_count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=rank_count)
    state = _state(options.layers, rank_count, {"rows": 0, "columns": 1}[options.sharding])
    dcp.save(
        state, storage_writer=HuggingFaceStorageWriter(f"{folder}/torch", save_distributed=True)
    )
    save(state, f"{folder}/ours")
    files = _divided(state, options.files)
    state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    state.clear()
    contenders: dict[str, Callable[[Path, Path], None]] = {
        "floor, fsynced": functools.partial(_floor, synced=True),
        "floor": functools.partial(_floor, synced=False),
        "torch": functools.partial(_torch, files=files),
        "ckpt_storage": functools.partial(_ours, files=files),
    }
    times: dict[str, list[float]] = {}
    for run in range(options.runs + 1):
        names = list(contenders)
        for name in names[run % len(names) :] + names[: run % len(names)]:
            output = root / f"{name.replace(', ', '-')}-{run}"
            seconds = _timed(contenders[name], root, output)
            if run:  # the first of each warms up
                times.setdefault(name, []).append(seconds)
            if rank == 0:
                shutil.rmtree(output)
            # What others wrote without waiting must not be written at the cost of the next.
            os.sync()
            dist.barrier()
    if rank == 0:
        size = f"{state_bytes / 1e9:.2f} GB bfloat16 by {options.sharding}"
        sys.stdout.write(
            f"{size} on {rank_count} ranks to {options.files} files, torch {torch.__version__}\n"
        )
        sys.stdout.write("| who | median s | min | max | torch / this |\n")
        sys.stdout.write("| --- | --- | --- | --- | --- |\n")
        torch_s = statistics.median(times["torch"])
        for name, seen in times.items():
            median_s = statistics.median(seen)
            sys.stdout.write(
                f"| {name} | {median_s:.3f} | {min(seen):.3f} | {max(seen):.3f} "
                f"| {torch_s / median_s:.2f} |\n"
            )
    dist.destroy_process_group()


def main() -> None:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="a folder on the disk to measure; used and removed again")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=9, help="9 layers are 1.22 GB")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sharding", choices=["rows", "columns"], default="rows")
    options = parser.parse_args()
    root = Path(options.folder)
    root.mkdir(parents=True)
    try:
        mp.spawn(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            _rank, (options.ranks, options, str(root)), nprocs=options.ranks
        )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
