"""What one run cost: seconds, processor time, memory and, where the server tells, requests.

Knows the operating system's counters and the counters of `testing.s3server`; knows no checkpoint.
Called by `compare` on every rank.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .memory import Curve, watched
from .plugins import PluginClock

_ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run on all ranks.

    seconds: from the last rank's begin to the last rank's end. cpu_s: user and system time of all
    ranks and their ended children. extra_bytes: the largest rank's peak of resident memory beyond
    what it held at the begin, None where the system does not tell. request_count, sent_bytes and
    received_bytes: what the bench's own server saw, None for any other storage. plugin_s: how long
    the rank that was so longest was inside a DCP plug-in, None if none was looked at.
    """

    seconds: float
    cpu_s: float
    extra_bytes: int | None
    request_count: int | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    plugin_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Measurements of one contender: median and extremes of seconds, medians of the rest.

    seconds: those of every run, in order.
    """

    seconds: tuple[float, ...]
    median_s: float
    min_s: float
    max_s: float
    cpu_s: float
    extra_bytes: int | None
    request_count: int | None
    sent_bytes: int | None
    received_bytes: int | None
    plugin_s: float | None

    @classmethod
    def of(cls, runs: Sequence[Measurement]) -> Summary:
        """Return the summary of at least one run."""
        seconds = tuple(run.seconds for run in runs)
        inside = [run.plugin_s for run in runs if run.plugin_s is not None]
        return cls(
            seconds=seconds,
            median_s=statistics.median(seconds),
            min_s=min(seconds),
            max_s=max(seconds),
            cpu_s=statistics.median(run.cpu_s for run in runs),
            extra_bytes=_median([run.extra_bytes for run in runs]),
            request_count=_median([run.request_count for run in runs]),
            sent_bytes=_median([run.sent_bytes for run in runs]),
            received_bytes=_median([run.received_bytes for run in runs]),
            plugin_s=statistics.median(inside) if inside else None,
        )


def _median(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return int(statistics.median(known)) if known else None


class Meter:
    """Measures one action on all ranks at once; every rank has one and calls it alike."""

    def __init__(self, server_url: str | None) -> None:
        self.plugins = PluginClock()
        self._server_url = server_url if dist.get_rank() == 0 else None
        # Torch's background saves use the default group meanwhile.
        self._group = dist.new_group(backend="gloo")

    def measure(self, action: Callable[[], object]) -> Measurement:
        """Run `action` on all ranks, together; return what it cost, on rank 0 as on the others."""
        before = self._served()
        held = _forget_peak()
        self.plugins.forget()
        dist.barrier(self._group)
        cpu_s, start = _cpu_s(), time.perf_counter()
        action()
        own_cpu_s = _cpu_s() - cpu_s
        dist.barrier(self._group)
        seconds = time.perf_counter() - start
        peak = _peak_bytes()
        extra = -1 if held is None or peak is None else max(0, peak - held)
        after = self._served()
        sums = torch.tensor([own_cpu_s], dtype=torch.float64)
        inside_s = self.plugins.seconds
        inside = -1.0 if inside_s is None else inside_s
        largest = torch.tensor([seconds, float(extra), inside], dtype=torch.float64)
        dist.all_reduce(sums, group=self._group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        counts = (
            [None] * 3
            if before is None or after is None
            else [new - old for new, old in zip(after, before, strict=True)]
        )
        return Measurement(
            seconds=float(largest[0]),
            cpu_s=float(sums[0]),
            extra_bytes=None if largest[1] < 0 else int(largest[1]),
            request_count=counts[0],
            sent_bytes=counts[1],
            received_bytes=counts[2],
            plugin_s=None if largest[2] < 0 else float(largest[2]),
        )

    def watch(self, action: Callable[[], object]) -> Curve | None:
        """Run `action` on all ranks; return how the memory of the one that took most went."""
        return watched(action, self._group)

    def _served(self) -> tuple[int, int, int] | None:
        """Return requests, bytes received and bytes sent by the bench's server until now."""
        if self._server_url is None:
            return None
        address = f"{self._server_url}/_stats"
        with urllib.request.urlopen(address, timeout=_ANSWER_TIMEOUT_S) as answer:  # noqa: S310  # our own http server
            stats = json.load(answer)
        return (
            sum(stats["count"].values()),
            sum(stats["bytes_in"].values()),
            sum(stats["bytes_out"].values()),
        )


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _forget_peak() -> int | None:
    """Let the kernel's peak of resident bytes begin anew; return what is resident now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _status_bytes("VmRSS")
    return None


def _peak_bytes() -> int | None:
    with suppress(OSError):
        return _status_bytes("VmHWM")
    return None


def _status_bytes(name: str) -> int | None:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
