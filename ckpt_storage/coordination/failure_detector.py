"""The failure detector of an operation: it sends heartbeats, and watches the other ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from ckpt_storage.errors import CheckpointError

from .heartbeats import Heartbeats, beat_interval_s, heartbeat_keys
from .keyvalue import COORDINATOR, LostStoreError
from .lane import Lane
from .processes import LocalProcesses

log = logging.getLogger("ckpt_storage")

_STOP_S = 0.25
"""How long an operation that ends waits for its failure detector."""

_NUDGE_S = 0.02
"""Phases that begin within this time share one heartbeat."""


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

    Requests: per beat (`beat_interval_s`) each rank sets its key and reads that of the coordinator,
    which reads the keys of all, 256 in a request: `2 * world_size / beat_s` small requests a
    second. A worker process reads its rank's key once per beat.

    Raises `RuntimeError` where the process cannot have another thread.
    """

    def __init__(
        self,
        lane: Lane,
        heartbeats: Heartbeats,
        *,
        on_lost: Callable[[Sequence[int], str], None],
        on_error: Callable[[CheckpointError], None],
        silence_s: float,
        name: str,
    ) -> None:
        self._lane = lane
        self._keys = heartbeat_keys(lane.keys.client)
        self._heartbeats = heartbeats
        self._on_lost = on_lost
        self._on_error = on_error
        self._processes = LocalProcesses()
        self._processes.add(lane.processes)
        self._silence_s = silence_s
        self._beat_s = beat_interval_s(lane.world_size, silence_s)
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

    def note_met(self) -> None:
        """Note that all ranks have met, so that the lane knows the processes of this host.

        A rank without any heartbeat counts as silent from now on.
        """
        self._has_met = True
        with self._lock:
            if self._wake_write >= 0:
                self._processes.add(self._lane.processes)
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
                packed = self._keys.get(self._lane.heartbeat_key(rank), self._silence_s)
                if packed is not None and packed != self._values.get(rank):
                    self._heartbeats.receive(packed)
                self._on_lost([rank], "died")

    def _send(self) -> None:
        key = self._lane.heartbeat_key(self._lane.rank)
        self._keys.set(key, self._heartbeats.pack(), self._silence_s)

    def _check_heartbeats(self) -> None:
        """Read the heartbeats of the watched ranks; report those that are silent for too long."""
        watched = range(1)
        if self._lane.is_coordinator:
            # Before all have met, most ranks of a large job have no heartbeat yet.
            watched = range(1, self._lane.world_size if self._has_met else 1)
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
        rank_of = {self._lane.heartbeat_key(rank): rank for rank in ranks}
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
