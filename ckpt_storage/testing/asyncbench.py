"""What a background save costs the trainer, against one copy of the state and against torch.

`python -m ckpt_storage.testing.asyncbench FOLDER` on one machine: gloo ranks, row-sharded bfloat16
tensors of Llama shapes. The blocked time is that of the call that begins a save; the save is then
waited for, so that no contender runs beside another's. Prints medians, spread, ratios and the
memory over 20 saves; judges nothing. The floor is one copy of each rank's tensors into memory
that is warm already. Knows the savers only by their public names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckpt_storage.saver import AsyncSaver

from .bench import State, _state

_LAYER_BYTES = 101 * 1000 * 1000
_FIRST_BYTES = 131 * 1000 * 1000
_MEMORY_SAVE_COUNT = 20

Begin = Callable[[State, str], Callable[[], object]]
"""Begins a save and returns what waits for its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """One save: seconds in which the trainer was blocked, and until the end of the save."""

    blocked_s: float
    whole_s: float


def _memcpy(state: State) -> Begin:
    warm = [torch.empty_like(tensor.to_local()).fill_(0) for tensor in state.values()]

    def begin(state: State, _folder: str) -> Callable[[], object]:
        torch._foreach_copy_(warm, [tensor.to_local() for tensor in state.values()])
        return lambda: None

    return begin


def _of_torch(kind: AsyncCheckpointerType) -> Begin:
    def begin(state: State, folder: str) -> Callable[[], object]:
        future = dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(folder),
            async_checkpointer_type=kind,
        )
        return future.result  # type: ignore[union-attr]  # not with an async stager

    return begin


def _of_ours(saver: AsyncSaver) -> Begin:
    def begin(state: State, folder: str) -> Callable[[], object]:
        return saver.save(state, folder).result

    return begin


def _timed(begin: Begin, state: State, folder: str) -> _Timed:
    dist.barrier()
    start = time.perf_counter()
    wait = begin(state, folder)
    blocked_s = time.perf_counter() - start
    wait()
    whole_s = time.perf_counter() - start
    dist.barrier()
    return _Timed(blocked_s=blocked_s, whole_s=whole_s)


def _memory_mb(saver: AsyncSaver) -> tuple[float, float]:
    """Return what trainer and worker hold, in MB: all pages, and with shared ones divided."""
    rss = pss = 0
    for pid in (os.getpid(), saver.worker_pid):
        if pid is None:
            continue
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "Rss":
                rss += int(value.split()[0])
            elif name == "Pss":
                pss += int(value.split()[0])
    return rss * 1024 / 1e6, pss * 1024 / 1e6


def _rank(rank: int, rank_count: int, layer_count: int, run_count: int, root: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = dist.FileStore(f"{root}/rendezvous", rank_count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=rank_count)
    state = _state(layer_count, rank_count, filled=True)
    lines = []
    with AsyncSaver(mode="thread") as threads, AsyncSaver(mode="process") as processes:
        contenders: dict[str, Begin] = {
            "one memcpy": _memcpy(state),
            "torch, thread": _of_torch(AsyncCheckpointerType.THREAD),
            "torch, process": _of_torch(AsyncCheckpointerType.PROCESS),
            "ckpt_storage, thread": _of_ours(threads),
            "ckpt_storage, process": _of_ours(processes),
        }
        times: dict[str, list[_Timed]] = {}
        for run in range(run_count + 1):
            # Each takes over the page cache that another has just freed: let them take turns.
            names = list(contenders)
            for name in names[run % len(names) :] + names[: run % len(names)]:
                folder = f"{root}/{name.replace(' ', '-')}-{run}"
                timed = _timed(contenders[name], state, folder)
                times.setdefault(name, []).append(timed)
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(folder, ignore_errors=True)
        lines += _table(times)
        for name, saver in (("thread", threads), ("process", processes)):
            seen = []
            for number in range(_MEMORY_SAVE_COUNT):
                saver.save(state, f"{root}/memory", overwrite=number > 0).result()
                seen.append(_memory_mb(saver))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(f"{root}/memory")
            told = [f"{rss:.0f} RSS / {pss:.0f} PSS" for rss, pss in seen]
            lines.append(
                f"memory of rank 0, {name} mode, MB, after saves 1, 2, 10, {_MEMORY_SAVE_COUNT}: "
                + ", ".join(told[number] for number in (0, 1, 9, -1))
            )
    if rank == 0:
        state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        size = f"{state_bytes / 1e9:.2f} GB bfloat16"
        head = f"{size} on {rank_count} ranks, torch {torch.__version__}"
        sys.stdout.write("\n".join([head, *lines]) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _table(times: dict[str, list[_Timed]]) -> list[str]:
    """Return the comparison as rank 0 saw it; the first save of each stands by itself."""
    lines = [
        "| who | first, s | median s blocked | min | max | x memcpy | s until the end |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    floor_s = statistics.median(timed.blocked_s for timed in times["one memcpy"][1:])
    for name, (first, *later) in times.items():
        blocked = [timed.blocked_s for timed in later]
        median_s = statistics.median(blocked)
        whole_s = statistics.median(timed.whole_s for timed in later)
        lines.append(
            f"| {name} | {first.blocked_s:.3f} | {median_s:.3f} | {min(blocked):.3f} "
            f"| {max(blocked):.3f} | {median_s / floor_s:.2f} | {whole_s:.2f} |"
        )
    return lines


def main() -> None:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="an empty folder on the disk to measure")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gib", type=float, default=1.2, help="size of the whole state")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    root = Path(options.folder)
    root.mkdir(parents=True, exist_ok=True)
    layer_count = max(1, round((options.gib * 2**30 - _FIRST_BYTES) / _LAYER_BYTES))
    arguments = (options.ranks, layer_count, options.runs, str(root))
    # torch's own process mode needs ranks that are no daemons.
    mp.spawn(_rank, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]  # torch
    (root / "rendezvous").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
