"""Heartbeats: the progress of a rank, as it sends it to the others."""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpt_storage.options import Phase

from .keyvalue import KeyValues, StoreClient


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """The last heartbeat of a rank; `heard_s` is its arrival on this process's monotonic clock."""

    rank: int
    phase: Phase
    done_bytes: int = 0
    total_bytes: int = 0
    done_files: int = 0
    retry_count: int = 0
    idle_s: float = 0.0
    host: str = ""
    pid: int = 0
    heard_s: float = 0.0

    @property
    def left_bytes(self) -> int:
        """Bytes that are still to be done."""
        return self.total_bytes - self.done_bytes


class Heartbeats:
    """Progress of this rank, and of others as they report it; safe in any thread.

    Ranks are global ranks. `number` is that of the operation: heartbeats of earlier
    operations are ignored.
    """

    def __init__(self, rank: int, *, process_id: int | None = None) -> None:
        """Begin without progress; `process_id` is that of the rank, None: of this process."""
        self.rank = rank
        self.number = 0
        self._lock = threading.RLock()  # a signal handler may ask in the middle of a call
        pid = os.getpid() if process_id is None else process_id
        self._own = RankProgress(rank=rank, phase="plan", host=socket.gethostname(), pid=pid)
        self._moved_s = self._since_s = time.monotonic()
        self._counter = itertools.count()
        self._others: dict[int, RankProgress] = {}
        # The relayed progress of the slowest rank. It does not count as a heartbeat: two ranks that
        # relay a dead rank's progress to each other would keep it alive.
        self._relayed: RankProgress | None = None

    def begin(self, phase: Phase, total_bytes: int) -> None:
        """Note that this rank enters a phase."""
        with self._lock:
            self._own = replace(self._own, phase=phase)
            # The commit moves no bytes: the written bytes stay visible.
            if phase != "commit":
                self._own = replace(self._own, done_bytes=0, total_bytes=total_bytes, done_files=0)
            self._moved_s = time.monotonic()

    def expect(self, total_bytes: int) -> None:
        """Note how many bytes the phase has in all, once that is known."""
        with self._lock:
            self._own = replace(self._own, total_bytes=total_bytes)

    def advanced(self, byte_count: int = 0, *, file_count: int = 0) -> None:
        """Note bytes and files that this rank has done."""
        with self._lock:
            done_bytes = self._own.done_bytes + byte_count
            done_files = self._own.done_files + file_count
            self._own = replace(self._own, done_bytes=done_bytes, done_files=done_files)
            self._moved_s = time.monotonic()

    def retried(self, count: int = 1) -> None:
        """Note storage requests that this rank repeats."""
        with self._lock:
            self._own = replace(self._own, retry_count=self._own.retry_count + count)

    def own(self) -> RankProgress:
        """Return the progress of this rank."""
        with self._lock:
            now_s, own = time.monotonic(), self._own
            total_bytes = max(own.total_bytes, own.done_bytes)
            return replace(
                own, total_bytes=total_bytes, idle_s=now_s - self._moved_s, heard_s=now_s
            )

    def pack(self) -> bytes:
        """Return this rank's next heartbeat; no two are equal.

        It relays the progress of the slowest rank, None in a worker process, which knows no other.
        """
        own, slowest = self.own(), None
        with self._lock:
            others = list(self._others.values())
        if others:
            slowest = max(own, *others, key=lambda progress: (progress.left_bytes, progress.idle_s))
            # Idle until now: the receiver uses the time of arrival.
            slowest = replace(slowest, idle_s=slowest.idle_s + own.heard_s - slowest.heard_s)
        return pickle.dumps((self.number, next(self._counter), own, slowest))

    @staticmethod
    def number_of(packed: bytes) -> int:
        """Return the number of the operation that a heartbeat belongs to."""
        number: int = pickle.loads(packed)[0]  # noqa: S301  # our own ranks
        return number

    def receive(self, packed: bytes) -> bool:
        """Note a heartbeat of another rank; return whether it is of this operation."""
        number, _, progress, slowest = pickle.loads(packed)  # noqa: S301  # our own ranks
        if number < self.number:
            return False
        with self._lock:
            now_s = time.monotonic()
            self._others[progress.rank] = replace(progress, heard_s=now_s)
            if slowest is not None:
                is_third = slowest.rank not in {progress.rank, self.rank}
                self._relayed = replace(slowest, heard_s=now_s) if is_third else None
        return True

    def known(self) -> Mapping[int, RankProgress]:
        """Return the last progress of each rank that reported any, this rank included."""
        own = self.own()
        with self._lock:
            relayed = {} if self._relayed is None else {self._relayed.rank: self._relayed}
            return {**relayed, **self._others, own.rank: own}

    def describe(self, rank: int) -> str:
        """Return one phrase on the last progress of a rank, for an error."""
        with self._lock:
            last, now_s = self._others.get(rank), time.monotonic()
        if last is None:
            return f"rank {rank} (no heartbeat in {now_s - self._since_s:.1f} s)"
        return (
            f"rank {rank} (process {last.pid} on {last.host}; last heartbeat "
            f"{now_s - last.heard_s:.1f} s ago in the {last.phase} phase with {last.done_bytes} "
            f"of {last.total_bytes} bytes done, without progress for {last.idle_s:.1f} s then)"
        )


def beat_interval_s(world_size: int, silence_s: float) -> float:
    """Return the time between two heartbeats: a quarter of the silence limit at most."""
    return min(max(1.0, world_size / 2_000), silence_s / 4)


def heartbeat_keys(client: StoreClient) -> KeyValues:
    """Return where ranks send heartbeats, without the prefixes of a group.

    A worker process knows the address of the store, but no prefixes.
    """
    return KeyValues(client, "ckpt_storage/alive", is_root=True)
