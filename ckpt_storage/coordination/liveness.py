"""Which ranks are alive: processes of this host, heartbeats, and the thread that watches both."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import Phase

from .failures import Report, lost
from .keyvalue import COORDINATOR, LostStoreError

if TYPE_CHECKING:
    from .operation import Operation

log = logging.getLogger("ckpt_storage")

_STOP_S = 0.25
"""How long an operation that ends waits for its watch."""

_NEWS_S = 0.02
"""How soon a new phase is told: a save begins several at once, and each costs three requests."""

_TIDY_KEYS = 32
"""How many keys of earlier operations are removed between two looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The process that speaks for a rank; `host` tells hosts and pid namespaces apart."""

    host: tuple[str, str, int]
    pid: int

    @classmethod
    def own(cls) -> RankProcess | None:
        """Return this process; None where hosts cannot be told apart."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespace = Path("/proc/self/ns/pid").stat().st_ino
        except OSError:
            return None
        return cls(host=(socket.gethostname(), boot, namespace), pid=os.getpid())


class Siblings:
    """The processes of other ranks of this host, watched until `close`."""

    def __init__(self, ranks: Mapping[int, RankProcess]) -> None:
        self._ranks: dict[int, int] = {}  # by descriptor
        self._gone: list[int] = []
        own = RankProcess.own()
        for rank, process in ranks.items():
            if own is None or process.host != own.host or process.pid == own.pid:
                continue
            try:
                self._ranks[os.pidfd_open(process.pid)] = rank
            except ProcessLookupError:
                self._gone.append(rank)
            except (OSError, AttributeError):  # before Linux 5.3, or no descriptor is to be had
                continue

    def ended(self) -> list[int]:
        """Return the ranks whose process has ended, each once."""
        gone, self._gone = self._gone, []
        ready = wait(self._ranks, 0)
        for descriptor in [one for one in self._ranks if one in ready]:
            os.close(descriptor)
            gone.append(self._ranks.pop(descriptor))
        return gone

    def close(self) -> None:
        """Watch no more."""
        while self._ranks:
            os.close(self._ranks.popitem()[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """What a rank said last; `heard_s` is when, on this process's monotonic clock."""

    rank: int
    phase: Phase
    done_bytes: int = 0
    total_bytes: int = 0
    done_files: int = 0
    idle_s: float = 0.0
    host: str = ""
    pid: int = 0
    heard_s: float = 0.0

    @property
    def left_bytes(self) -> int:
        """Bytes that are still to be done."""
        return self.total_bytes - self.done_bytes


class Heartbeats:
    """Own progress, and what was heard of other ranks since `since_s`; safe in any thread."""

    def __init__(self, rank: int) -> None:
        self._lock = threading.Lock()
        self._own = RankProgress(
            rank=rank, phase="plan", host=socket.gethostname(), pid=os.getpid()
        )
        self._moved_s = self.since_s = time.monotonic()
        self._numbers = itertools.count()
        self._raw: dict[int, bytes] = {}
        self._heard: dict[int, RankProgress] = {}
        # Second-hand word of the slowest. It must not count as a heartbeat: two ranks that pass on
        # what each heard of the other would keep a dead one alive.
        self._told: RankProgress | None = None

    def begin(self, phase: Phase, total_bytes: int) -> None:
        """Note that this rank enters a phase."""
        with self._lock:
            self._own = replace(self._own, phase=phase)
            # The commit moves no bytes: what was written stays on show.
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

    def own(self) -> RankProgress:
        """Return how far this rank is."""
        with self._lock:
            now_s, own = time.monotonic(), self._own
            total_bytes = max(own.total_bytes, own.done_bytes)
            return replace(
                own, total_bytes=total_bytes, idle_s=now_s - self._moved_s, heard_s=now_s
            )

    def pack(self) -> bytes:
        """Return this rank's next heartbeat; no two are equal."""
        own = self.own()
        with self._lock:
            every = [own, *self._heard.values()]
        slowest = max(every, key=lambda one: (one.left_bytes, one.idle_s))
        # As of now: who hears it takes what was just told for a sign of progress.
        idle_s = slowest.idle_s + own.heard_s - slowest.heard_s
        return pickle.dumps((next(self._numbers), own, replace(slowest, idle_s=idle_s)))

    def hear(self, rank: int, packed: bytes | None) -> None:
        """Take in the last heartbeat of `rank`; the same as last time is no new one."""
        with self._lock:
            if packed is None or self._raw.get(rank) == packed:
                return
            self._raw[rank] = packed
            _, progress, slowest = pickle.loads(packed)  # noqa: S301  # our own ranks
            now_s = time.monotonic()
            self._heard[rank] = replace(progress, heard_s=now_s)
            is_news = slowest.rank not in {rank, self._own.rank}
            self._told = replace(slowest, heard_s=now_s) if is_news else None

    def known(self) -> Mapping[int, RankProgress]:
        """Return how far every rank is that was heard of, this one included."""
        own = self.own()
        with self._lock:
            told = {} if self._told is None else {self._told.rank: self._told}
            return {**told, **self._heard, own.rank: own}

    def silent(self, ranks: Sequence[int], limit_s: float) -> list[int]:
        """Return those of `ranks` that were not heard for `limit_s` seconds."""
        with self._lock:
            last_s = {rank: max(one.heard_s, self.since_s) for rank, one in self._heard.items()}
        return [r for r in ranks if time.monotonic() - last_s.get(r, self.since_s) > limit_s]

    def describe(self, rank: int) -> str:
        """Return one phrase on what is known of a rank, for an error."""
        with self._lock:
            heard, now_s = self._heard.get(rank), time.monotonic()
        if heard is None:
            return f"rank {rank} (no sign of life in {now_s - self.since_s:.1f} s)"
        return (
            f"rank {rank} (process {heard.pid} on {heard.host}; last heard "
            f"{now_s - heard.heard_s:.1f} s ago in the {heard.phase} phase with {heard.done_bytes} "
            f"of {heard.total_bytes} bytes done, without progress for {heard.idle_s:.1f} s then)"
        )


class FailureDetector:
    """The thread of one rank that watches the others in one operation.

    It looks for failure reports and for ends of processes of this host. It sends and hears
    heartbeats: the coordinator hears all ranks, the others the coordinator. It removes what
    earlier operations left in the shared store. Raises `RuntimeError` where no thread is to be had.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._keys = operation.group.keys
        self._debris = operation.group.debris
        self._silence_s = operation.timeouts.silence
        self._has_ended = threading.Event()
        self._has_news = threading.Event()
        operation.heartbeats.since_s = time.monotonic()
        name = f"ckpt-storage watch: {operation.what}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Have it told soon that this rank has begun a phase; from any thread."""
        self._has_news.set()

    def stop(self) -> None:
        """Let the thread end: inside a call of torch's it would abort an interpreter that ends."""
        self._has_ended.set()
        self._has_news.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        operation = self._operation
        failure: CheckpointError | None = None
        try:
            with contextlib.closing(Siblings(operation.group.siblings)) as siblings:
                self._watch(siblings)
            # What is left was left by operations that all ranks have gone on from.
            end_s = time.monotonic() + _STOP_S / 2
            while self._debris and time.monotonic() < end_s:
                self._tidy()
        except LostStoreError as error:
            failure = None if self._has_ended.is_set() else error
        except Exception as error:  # nobody else would notice that this thread ended
            log.exception("The watch over %s failed.", operation.what)
            failure = CheckpointError(f"{type(error).__name__}: {error}")
        if failure is not None:
            operation.take_report(Report(rank=operation.rank, error=failure))

    def _watch(self, siblings: Siblings) -> None:
        """Watch until the operation ends or has failed."""
        operation, limit_s = self._operation, self._silence_s
        beats, world_size = operation.heartbeats, operation.world_size
        watched = range(1, world_size) if operation.is_coordinator else [COORDINATOR]
        # The coordinator hears every rank: thousands of them need longer for a round.
        beat_s = min(max(1.0, world_size / 2_000), limit_s / 4)
        next_beat_s, told = 0.0, None
        while not self._pause():
            # Before the look for reports: who reports and then ends has told its reason.
            ended = siblings.ended()
            data = self._keys.get(operation.key("failed"), limit_s)
            if data is not None:
                report: Report = pickle.loads(data)  # noqa: S301  # our own ranks
                if report.rank != operation.rank:
                    operation.take_report(report)
                return
            for rank in ended:
                phase = self._lost_in(rank)
                if phase is not None:
                    self._report([rank], phase, "died")
                    return
            self._tidy()
            # A new phase is told soon: a rank that dies in it is named with it.
            deadline = operation.deadline
            if deadline is told and time.monotonic() < next_beat_s:
                continue
            told, next_beat_s = deadline, time.monotonic() + beat_s
            self._keys.set(operation.key("life", operation.rank), beats.pack(), limit_s)
            for rank in watched:
                self._hear(rank)
            silent = beats.silent(watched, limit_s)
            if silent:
                self._report(silent, deadline.phase, f"gave no sign of life for {limit_s:g} s")
                return

    def _pause(self) -> bool:
        """Wait until the next look; return whether there is none."""
        look_s = self._operation.group.look_s
        if not self._has_ended.wait(min(_NEWS_S, look_s)):
            self._has_news.wait(max(0.0, look_s - _NEWS_S))
            self._has_news.clear()
        return self._has_ended.is_set()

    def _tidy(self) -> None:
        for _ in range(min(_TIDY_KEYS, len(self._debris))):
            self._keys.delete(self._debris.pop(0), self._silence_s)

    def _hear(self, rank: int) -> None:
        key = self._operation.key("life", rank)
        self._operation.heartbeats.hear(rank, self._keys.get(key, self._silence_s))

    def _lost_in(self, rank: int) -> Phase | None:
        """Return the phase in which a process ended; None if its part was done."""
        operation = self._operation
        if self._keys.has_all([operation.key("left", rank)], self._silence_s):
            return None
        self._hear(rank)
        last = operation.heartbeats.known().get(rank)
        phase: Phase = operation.deadline.phase if last is None else last.phase
        # The commit needs no other rank; whether it takes place is rank 0's to tell.
        return None if rank != COORDINATOR and phase == "commit" else phase

    def _report(self, ranks: list[int], phase: Phase, how: str) -> None:
        """Tell all ranks that some were lost."""
        operation = self._operation
        known = {rank: operation.heartbeats.describe(rank) for rank in ranks}
        error = lost(ranks, operation.world_size, how, operation.what, phase, known)
        report = Report(rank=operation.rank, error=error)
        self._keys.set_first(operation.key("failed"), pickle.dumps(report), self._silence_s)
        operation.take_report(report)
