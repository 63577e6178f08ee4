"""What keeping the weights of every step takes: bytes on the disk, bytes read, and time.

`python tests/benchmarks/keep.py FOLDER`: a bfloat16 model with fp32 Adam, 10 bytes a parameter,
saved step by step into a new folder there, which is removed. Bytes are exact; of times read the
ratios, whose contenders take turns.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from bandwidth import Bandwidth
from bucket import served_bucket

import ckpt_storage
from ckpt_storage import CheckpointManager, KeepLatest, KeepPart
from ckpt_storage.store.backend import Range
from ckpt_storage.store.backends.local import LocalBackend

_TENSOR_COUNT = 24
_WEIGHTS = 2 / 10


def state_of(parameter_count: int) -> dict[str, Any]:
    """Return a model and its optimizer's state."""
    size = parameter_count // _TENSOR_COUNT
    names = [f"layers.{number}.weight" for number in range(_TENSOR_COUNT)]
    return {
        "model": {name: torch.randn(size).to(torch.bfloat16) for name in names},
        "optimizer": {
            f"{name}.{kind}": torch.randn(size)
            for name in names
            for kind in ("exp_avg", "exp_avg_sq")
        },
    }


def used_bytes(folder: Path) -> int:
    """Return what a folder takes on the disk, each file once, as `du` counts."""
    found = {os.lstat(path).st_ino: os.lstat(path) for path in folder.rglob("*")}
    return sum(one.st_blocks * 512 for one in found.values())


def counted_reads(counts: Counter[str]) -> Callable[..., int]:
    """Return `LocalBackend.read` that counts the bytes of shard files."""
    read = LocalBackend.read

    def counting(self: LocalBackend, path: str, ranges: Iterable[Range]) -> int:
        taken = list(ranges)
        if path.endswith(".distcp"):
            counts["shards"] += sum(view.nbytes for _, view in taken)
        return read(self, path, taken)

    return counting


def keep_run(folder: Path, state: Mapping[str, Any], step_count: int, whole_count: int) -> str:
    """Save steps, prune as a run does, and say what is on the disk."""
    root, counts = folder / "run", Counter[str]()
    for step in range(1, step_count + 1):
        ckpt_storage.save({**state, "step": step}, root / f"step-{step:08d}", sync_files=False)
    before = used_bytes(root)
    plain, LocalBackend.read = LocalBackend.read, counted_reads(counts)  # type: ignore[method-assign]
    begin = time.monotonic()
    report = ckpt_storage.prune(
        root, KeepLatest(whole_count) | KeepPart(drop="optim*"), dry_run=False
    )
    seconds = time.monotonic() - begin
    LocalBackend.read = plain  # type: ignore[method-assign]
    after = used_bytes(root)
    expected = (whole_count + (step_count - whole_count) * _WEIGHTS) / step_count
    shutil.rmtree(root)
    return (
        f"{step_count} steps, {whole_count} whole, {len(report.thinned)} thinned: "
        f"{before:,} -> {after:,} bytes on the disk, {after / before:.3f} of all "
        f"(arithmetic {expected:.3f}); {counts['shards']} bytes of shard files read; "
        f"{seconds / len(report.thinned):.3f} s a thinning"
    )


def in_turns(runs: Mapping[str, Callable[[], Path]], count: int) -> str:
    """Return medians, and the ratio of each contender to the first."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            begin = time.monotonic()
            made = run()
            times[name].append(time.monotonic() - begin)
            shutil.rmtree(made)
    (floor, *_) = (statistics.median(each) for each in times.values())
    return "\n".join(
        f"  {name}: {statistics.median(each):.3f} s ({min(each):.3f} to {max(each):.3f}), "
        f"{statistics.median(each) / floor:.2f}"
        for name, each in times.items()
    )


def saves(folder: Path, state: Mapping[str, Any], count: int) -> str:
    """Compare saves of one file a rank with saves of files by group."""

    def save(groups: list[str]) -> Path:
        ckpt_storage.save(state, folder / "save", groups=groups)
        return folder / "save"

    runs = {
        "one file": functools.partial(save, []),
        "files by group": functools.partial(save, ["optim*"]),
    }
    return in_turns(runs, count)


def copies(folder: Path, state: Mapping[str, Any], count: int) -> str:
    """Compare a copy of all with copies of the weights."""
    source, mixed = folder / "source", folder / "mixed"
    ckpt_storage.save(state, source)
    ckpt_storage.save(state, mixed, groups=[])

    def copy(origin: Path, **options: Any) -> Path:
        ckpt_storage.copy(origin, folder / "copy", **options)
        return folder / "copy"

    part = {"exclude": "optim*"}
    runs = {
        "all": functools.partial(copy, source),
        "weights, linked": functools.partial(copy, source, **part),
        "weights, copies='never'": functools.partial(copy, source, **part, copies="never"),
        "weights out of one file": functools.partial(copy, mixed, **part),
    }
    return in_turns(runs, count)


def lora_of(parameter_count: int) -> dict[str, Any]:
    """Return a frozen model and an adapter with a hundredth of the bytes."""
    size = parameter_count // _TENSOR_COUNT
    frozen = {f"layers.{number}": torch.randn(size) for number in range(_TENSOR_COUNT)}
    return {"base": frozen, "lora": torch.randn(parameter_count // 100)}


def reuses(
    root: str, state: dict[str, Any], count: int, sent: Callable[[], int] | None, **more: Any
) -> str:
    """Compare full saves with those that reuse a frozen model, in rounds of one of each.

    The third save without names is the first that can reuse anything. `sent` returns the bytes
    written so far; None: the bytes of shard files that a save did not reuse are counted.
    """
    runs: dict[str, dict[str, Any]] = {
        "full": {},
        "second, named": {"reuse": True, "stable": "base.*"},
        "third, not named": {"reuse": True},
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    written: dict[str, int] = {}
    for number in range(count):
        for name, options in runs.items():
            url, steps = f"{root}/{number}-{name}", 2 if "second" in name else 3
            with CheckpointManager(url, pruning="manual", **options, **more) as manager:
                for step in range(steps):
                    state["lora"] += 1
                    before = 0 if sent is None else sent()
                    begin = time.monotonic()
                    info = manager.save(step, state)
                times[name].append(time.monotonic() - begin)
                if sent is not None:
                    written[name] = sent() - before
                elif info.stats is not None:
                    written[name] = info.stats.total_bytes - info.stats.reused_bytes
                for step in range(steps):
                    manager.delete(step)
    rows = []
    for name, each in times.items():
        ratios = [seconds / full for seconds, full in zip(each, times["full"], strict=True)]
        rows.append(
            f"  {name}: {statistics.median(each):.3f} s ({min(each):.3f} to {max(each):.3f}); "
            f"of the full save in its round {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}); {written[name]:,} bytes, "
            f"{written[name] / written['full']:.4f}"
        )
    return "\n".join(rows)


def nothing_equal(root: Path, state: dict[str, Any], count: int) -> str:
    """Compare the second and third save of a state that all changes with plain saves.

    The runs take turns step by step; processor time is less disturbed by other work.
    """
    tensors = [*state["model"].values(), *state["optimizer"].values()]
    seconds: dict[str, list[float]] = {"plain": [], "reuse=True": []}
    processor: dict[str, list[float]] = {name: [] for name in seconds}
    for _ in range(count):
        managers = {
            name: CheckpointManager(root / name, reuse=name != "plain", pruning="manual")
            for name in seconds
        }
        for step in range(3):
            for tensor in tensors:
                tensor.add_(1)
            for name, manager in managers.items():
                begin, begin_cpu = time.monotonic(), time.process_time()
                manager.save(step, state)
                if step:
                    seconds[name].append(time.monotonic() - begin)
                    processor[name].append(time.process_time() - begin_cpu)
        for name, manager in managers.items():
            manager.close()
            shutil.rmtree(root / name)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    cpu_medians = {name: statistics.median(each) for name, each in processor.items()}
    return "\n".join(
        f"  {name}: {medians[name]:.3f} s ({min(each):.3f} to {max(each):.3f}), "
        f"{medians[name] / medians['plain']:.2f}; processor {cpu_medians[name]:.3f} s "
        f"({min(processor[name]):.3f} to {max(processor[name]):.3f}), "
        f"{cpu_medians[name] / cpu_medians['plain']:.2f}"
        for name, each in seconds.items()
    )


def reuse(folder: Path, parameter_count: int, count: int, bandwidth: Bandwidth | None) -> None:
    """Print what reuse saves, on a disk and in a bucket, and its cost where nothing stays."""
    state = lora_of(parameter_count)
    print("a frozen model, on a disk")
    print(reuses(str(folder / "lora"), state, count, lambda: used_bytes(folder)))
    reuse_in_bucket(state, count, bandwidth)
    print("a state that all changes, second and third save, on a disk")
    print(nothing_equal(folder / "all", state_of(parameter_count), count))


def reuse_in_bucket(state: dict[str, Any], count: int, bandwidth: Bandwidth | None) -> None:
    """Print what reuse saves in a bucket of the in-memory S3 server, which has its own process."""
    with served_bucket("lora", bandwidth) as (options, received_bytes):
        print("a frozen model, in a bucket of the in-memory S3 server")
        print(reuses("s3://lora", state, count, received_bytes, storage_options=options))


def main() -> None:
    """Measure what the command line asks for and print it."""
    parser = argparse.ArgumentParser(prog="python tests/benchmarks/keep.py", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=int, default=12_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--whole", type=int, default=3)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--reuse", action="store_true", help="measure saves with a base alone")
    parser.add_argument("--bucket", action="store_true", help="of these only those to S3")
    parser.add_argument("--bandwidth-mb", type=float, default=0.0, help="bound of S3, in MB/s")
    parser.add_argument("--url", help="another bucket than that of the in-memory server")
    parser.add_argument("--storage-options", type=json.loads, default={}, metavar="JSON")
    asked = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = Bandwidth(asked.bandwidth_mb * 1e6) if asked.bandwidth_mb else None
    asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        print(f"{asked.parameters:,} parameters, load average {os.getloadavg()[0]:.1f}")
        if asked.url:
            state, options = lora_of(asked.parameters), asked.storage_options
            print(reuses(asked.url, state, asked.runs, None, storage_options=options))
        elif asked.bucket:
            reuse_in_bucket(lora_of(asked.parameters), asked.runs, bandwidth)
        elif asked.reuse:
            reuse(folder, asked.parameters, asked.runs, bandwidth)
        if asked.url or asked.bucket or asked.reuse:
            return
        state = state_of(asked.parameters)
        print("saves\n" + saves(folder, state, asked.runs))
        print("copies\n" + copies(folder, state, asked.runs))
        print(keep_run(folder, state, asked.steps, asked.whole))


if __name__ == "__main__":
    main()
