"""Which ranks are alive: processes of this host, heartbeats, and the thread that watches both."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import Phase

from .keyvalue import COORDINATOR, KeyValues, LostStoreError, StoreClient

log = logging.getLogger("ckpt_storage")

_STOP_S = 0.25
"""How long an operation that ends waits for its failure detector."""

_NUDGE_S = 0.02
"""Phases that begin within this time share one heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The process of a rank; `host` is the name of a host and pid namespace."""

    host: str
    pid: int

    @classmethod
    def own(cls) -> RankProcess | None:
        """Return this process; None if its host cannot be identified."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespace = Path("/proc/self/ns/pid").stat().st_ino
        except OSError:
            return None
        return cls(host=f"{socket.gethostname()} {boot} {namespace}", pid=os.getpid())


class LocalProcesses:
    """Processes of other ranks on this host; a descriptor of each becomes ready when it ends."""

    def __init__(self) -> None:
        self._rank_of: dict[int, int] = {}  # by descriptor
        self._ended: list[int] = []

    def add(self, processes: Mapping[int, RankProcess]) -> None:
        """Watch the processes of this host among `processes`, by rank."""
        own = RankProcess.own()
        for rank, process in processes.items():
            if own is None or process.host != own.host or process.pid == own.pid:
                continue
            try:
                self._rank_of[os.pidfd_open(process.pid)] = rank
            except ProcessLookupError:
                self._ended.append(rank)
            except (OSError, AttributeError):  # before Linux 5.3, or out of descriptors
                continue

    @property
    def descriptors(self) -> list[int]:
        """What to wait for until a process ends."""
        return list(self._rank_of)

    def take_ended(self) -> list[int]:
        """Return the ranks whose process has ended, each once."""
        ended, self._ended = self._ended, []
        for descriptor in wait(self.descriptors, 0):
            assert isinstance(descriptor, int)  # noqa: S101  # as passed
            os.close(descriptor)
            ended.append(self._rank_of.pop(descriptor))
        return ended

    def close(self) -> None:
        """Close the descriptors."""
        while self._rank_of:
            os.close(self._rank_of.popitem()[0])


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


class FailureDetector:
    """A thread that sends this rank's heartbeats and watches those of other ranks.

    The members watch the coordinator; the coordinator watches all members once they have met.
    Processes of the same host are watched through descriptors, so their end is noticed at once. A
    rank counts as silent after a number of checks without a new heartbeat, each a fresh read.
    Checks, not seconds: a process that was stopped itself first reads the heartbeats that arrived
    meanwhile. The worker process of a rank sends heartbeats under the same key while its trainer is
    busy in C code and sends none, so that this rank does not count as dead.

    `on_lost(ranks, how)` is called for ranks that are dead or silent, again at each check;
    `on_error` once this rank cannot watch any more; both in the detector's thread.

    Requests: per beat (`beat_interval_s`) each rank sets one key and reads one; the coordinator
    reads one key of each rank, 256 in a request: `2 * world_size / beat_s` small requests a second.
    A worker process reads one key per beat.

    Raises `RuntimeError` where the process cannot have another thread.
    """

    def __init__(
        self,
        keys: KeyValues,
        heartbeats: Heartbeats,
        *,
        on_lost: Callable[[Sequence[int], str], None],
        on_error: Callable[[CheckpointError], None],
        rank: int,
        world_size: int,
        key_of: Callable[[int], str],
        processes: Mapping[int, RankProcess],
        silence_s: float,
        name: str,
    ) -> None:
        self._keys = keys
        self._heartbeats = heartbeats
        self._on_lost = on_lost
        self._on_error = on_error
        self._rank = rank
        self._world_size = world_size
        self._key_of = key_of
        self._processes = LocalProcesses()
        self._processes.add(processes)
        self._silence_s = silence_s
        self._beat_s = beat_interval_s(world_size, silence_s)
        self._allowed_misses = math.ceil(silence_s / self._beat_s)
        self._misses: dict[int, int] = {}
        self._values: dict[int, bytes] = {}
        self._has_met = False
        self._ended = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._close()
            raise

    def note_met(self, processes: Mapping[int, RankProcess]) -> None:
        """Note that all ranks have met, and watch `processes`, which were not known before.

        A rank without any heartbeat counts as silent from now on.
        """
        self._has_met = True
        with self._lock:
            if self._wake_write >= 0:
                self._processes.add(processes)
        self.nudge()

    def nudge(self) -> None:
        """Send a heartbeat soon, as this rank has begun a phase; from any thread."""
        with self._lock, contextlib.suppress(OSError):
            os.write(self._wake_write, b"n")

    def stop(self) -> None:
        """End the thread; wait a moment for it."""
        self._ended.set()
        self.nudge()
        # An interpreter that ends must not find it in a call of torch's.
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            self._watch()
        except LostStoreError as error:
            if self._ended.is_set():
                return
            # The coordinator may host the store, and its end is the cause.
            if COORDINATOR in self._processes.take_ended():
                self._on_lost([COORDINATOR], "died")
            else:
                self._on_error(error)
        except Exception as error:  # no other thread would notice the end of this thread
            log.exception("The failure detector of rank %d failed.", self._heartbeats.rank)
            self._on_error(CheckpointError(f"{type(error).__name__}: {error}"))
        finally:
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._processes.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_read = self._wake_write = -1

    def _watch(self) -> None:
        next_beat_s = 0.0
        while not self._ended.is_set():
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                next_beat_s = now_s + self._beat_s
                self._send()
                self._check_heartbeats()
            timeout_s = max(0.0, next_beat_s - time.monotonic())
            ready = wait([self._wake_read, *self._processes.descriptors], timeout_s)
            if self._wake_read in ready:
                # Phases of a small save follow one another fast: one heartbeat for all of them.
                has_ended = self._ended.wait(_NUDGE_S)
                os.read(self._wake_read, 4096)
                if not has_ended:
                    self._send()
            for rank in self._processes.take_ended():
                packed = self._keys.get(self._key_of(rank), self._silence_s)
                if packed is not None and packed != self._values.get(rank):
                    self._heartbeats.receive(packed)
                self._on_lost([rank], "died")

    def _send(self) -> None:
        key = self._key_of(self._rank)
        self._keys.set(key, self._heartbeats.pack(), self._silence_s)

    def _check_heartbeats(self) -> None:
        """Read the heartbeats of the watched ranks; report those that are silent for too long."""
        watched = range(1)
        if self._rank == COORDINATOR:
            # Before all have met, most ranks of a large job have no heartbeat yet.
            watched = range(1, self._world_size if self._has_met else 1)
        beating = self._find_beating(watched)
        silent = []
        for rank in watched:
            if rank in beating or not (self._has_met or rank in self._misses):
                continue
            self._misses[rank] = self._misses.get(rank, 0) + 1
            if self._misses[rank] > self._allowed_misses:
                silent.append(rank)
        if silent:
            self._on_lost(silent, f"sent no heartbeat for {self._silence_s:g} s")

    def _find_beating(self, ranks: Sequence[int]) -> set[int]:
        """Return the ranks that have sent a heartbeat of this operation since the last check."""
        rank_of = {self._key_of(rank): rank for rank in ranks}
        # A heartbeat's key is never deleted in a session.
        new = [key for key, rank in rank_of.items() if rank not in self._values]
        absent = {*new} - {*self._keys.present(new, self._silence_s)}
        keys = [key for key in rank_of if key not in absent]
        beating = set()
        for key, value in zip(keys, self._keys.get_many(keys, self._silence_s), strict=True):
            rank = rank_of[key]
            if self._values.get(rank) != value and self._heartbeats.receive(value):
                beating.add(rank)
                self._misses[rank] = 0
            self._values[rank] = value
        return beating


def beat_interval_s(world_size: int, silence_s: float) -> float:
    """Return the time between two heartbeats: a quarter of the silence limit at most."""
    return min(max(1.0, world_size / 2_000), silence_s / 4)


def heartbeat_keys(client: StoreClient) -> KeyValues:
    """Return where ranks send heartbeats, without the prefixes of a group.

    A worker process knows the address of the store, but no prefixes.
    """
    return KeyValues(client, "ckpt_storage/alive", is_root=True)
