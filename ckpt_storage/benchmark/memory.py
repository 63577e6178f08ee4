"""How resident memory goes while something runs: one curve, of the rank that takes most.

Knows the operating system's counters; knows no checkpoint. Called by `compare` on every rank, for
runs of their own: to look every few milliseconds takes time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

_LOOK_S = 0.005
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Resident bytes beyond what was held at the begin, and when that was seen."""

    seconds: tuple[float, ...]
    extra_bytes: tuple[int, ...]


def watched(action: Callable[[], object], group: dist.ProcessGroup) -> Curve | None:
    """Run `action` on all ranks of the group; return the curve of the rank with the highest peak.

    None where the system does not tell. Raises what `action` raises.
    """
    dist.barrier(group)
    own = _curve(action)
    curves: list[Curve | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(curves, own, group)
    known = [curve for curve in curves if curve is not None]
    return max(known, key=lambda curve: max(curve.extra_bytes), default=None)


def _curve(action: Callable[[], object]) -> Curve | None:
    held_bytes = _resident_bytes()
    if held_bytes is None:
        action()
        return None
    seconds, extra = [0.0], [0]
    start_s = time.perf_counter()
    ended = threading.Event()

    def look() -> None:
        now_bytes = _resident_bytes()
        if now_bytes is not None:
            seconds.append(time.perf_counter() - start_s)
            extra.append(now_bytes - held_bytes)

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            look()

    watcher = threading.Thread(target=watch, name="memory of a benchmark", daemon=True)
    watcher.start()
    try:
        action()
    finally:
        ended.set()
        watcher.join(_JOIN_S)
    look()
    return Curve(seconds=tuple(seconds), extra_bytes=tuple(extra))


def _resident_bytes() -> int | None:
    with suppress(OSError):
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return None
