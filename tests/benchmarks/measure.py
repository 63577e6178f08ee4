"""Contenders that take turns on all ranks, and what each run cost."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _nothing() -> None:
    """Do nothing before or after a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to do what a scenario measures; only `run` is timed, `after` checks what came."""

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run on all ranks, from the last one's begin to the last one's end; None: not known."""

    seconds: float
    cpu_s: float  # of all ranks and their ended children
    extra_bytes: int | None  # the largest rank's peak beyond what it held before
    request_count: int | None  # what the benchmark's own server saw


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a scenario found: the runs of each contender; the first contender is the floor."""

    what: str
    moved_bytes: int
    runs: Mapping[str, Sequence[Run]]

    def rows(self) -> list[list[str]]:
        """Return a heading and one row of text for each contender."""
        rows = [
            ["who", "median s", "min", "max", "x floor", "GB/s", "CPU s", "extra MiB", "requests"]
        ]
        floor_s = 0.0
        for name, runs in self.runs.items():
            seconds = [run.seconds for run in runs]
            middle_s = statistics.median(seconds)
            floor_s = floor_s or middle_s
            times = [f"{one:.4f}" for one in (middle_s, min(seconds), max(seconds))]
            speeds = [f"{middle_s / floor_s:.2f}", f"{self.moved_bytes / middle_s / 1e9:.2f}"]
            costs = [
                _median([run.cpu_s for run in runs], 1, ".2f"),
                _median([run.extra_bytes for run in runs], 1 << 20, ".0f"),
                _median([run.request_count for run in runs], 1, ".0f"),
            ]
            rows.append([name, *times, *speeds, *costs])
        return rows


def _median(values: Sequence[float | None], unit: float, spec: str) -> str:
    known = [value for value in values if value is not None]
    return format(statistics.median(known) / unit, spec) if known else ""


class Meter:
    """Measures one action on all ranks at once; every rank has one and calls it alike."""

    def __init__(self, count: Any) -> None:
        # Rank 0 reads the server's count of requests.
        self._count = count if dist.get_rank() == 0 else None
        # Torch's background saves use the default group meanwhile.
        self._group = dist.new_group(backend="gloo")

    def take_turns(self, contenders: Sequence[Contender], run_count: int) -> dict[str, list[Run]]:
        """Run all `run_count` times, in an order that rotates; if often, once before to warm up."""
        found: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
        warm_up_count = int(run_count > 1)
        for turn in range(run_count + warm_up_count):
            first = turn % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                contender.before()
                run = self._measure(contender)
                contender.after()
                dist.barrier()
                if turn >= warm_up_count:
                    found[contender.name].append(run)
        return found

    def _measure(self, contender: Contender) -> Run:
        requests = self._request_count()
        held = _forget_peak()
        dist.barrier(self._group)
        cpu_s, start = _cpu_s(), time.perf_counter()
        contender.run()
        own_cpu_s = _cpu_s() - cpu_s
        dist.barrier(self._group)
        seconds = time.perf_counter() - start
        peak = _status_bytes("VmHWM")
        extra = -1 if held is None or peak is None else max(0, peak - held)
        sums = torch.tensor([own_cpu_s], dtype=torch.float64)
        largest = torch.tensor([seconds, float(extra)], dtype=torch.float64)
        dist.all_reduce(sums, group=self._group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        after = self._request_count()
        return Run(
            seconds=float(largest[0]),
            cpu_s=float(sums[0]),
            extra_bytes=None if largest[1] < 0 else int(largest[1]),
            request_count=None if requests is None or after is None else after - requests,
        )

    def _request_count(self) -> int | None:
        return None if self._count is None else int(self._count.value)


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _forget_peak() -> int | None:
    """Let the kernel's peak of resident bytes begin anew; return what is resident now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _status_bytes("VmRSS")
    return None


def _status_bytes(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
