"""Signs of life: what each rank was last heard to do, and the thread that tells and hears them."""

from __future__ import annotations

import logging
import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_storage.errors import CheckpointError, RankFailedError
from ckpt_storage.options import Phase
from ckpt_storage.store.deadline import Deadline

from .board import Board, BoardError
from .failures import COORDINATOR, Report, lost_board, name_ranks

if TYPE_CHECKING:
    from .boardoperation import BoardOperation

log = logging.getLogger("ckpt_storage")

_STOP_S = 0.25

_NEWS_S = 0.02
"""How soon a new phase is told: a save begins several at once, and each word costs three looks."""

_TIDY_KEYS = 32
"""How many keys of earlier operations are removed between two looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The process that speaks for a rank; `host` tells hosts and pid namespaces apart."""

    host: tuple[str, str, int]
    pid: int

    @classmethod
    def of(cls, pid: int) -> RankProcess | None:
        """Return a process of this host; None where hosts cannot be told apart."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            return cls(
                host=(socket.gethostname(), boot, Path("/proc/self/ns/pid").stat().st_ino), pid=pid
            )
        except OSError:
            return None


class Siblings:
    """The other ranks whose processes run on this host, watched until `close`."""

    def __init__(self, own: RankProcess | None, ranks: Mapping[int, RankProcess]) -> None:
        self._ranks: dict[int, int] = {}
        self._gone: list[int] = []
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
        if self._ranks:
            poll = select.poll()
            for descriptor in self._ranks:
                poll.register(descriptor, select.POLLIN)
            gone += [self._forget(descriptor) for descriptor, _ in poll.poll(0)]
        return gone

    def close(self) -> None:
        """Watch no more."""
        for descriptor in list(self._ranks):
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> int:
        os.close(descriptor)
        return self._ranks.pop(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rank said last: its phase, what is done and planned in it, seconds without progress.

    `heard_s` is the instant at which it was heard, on this process's monotonic clock.
    """

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


class Signs:
    """Own progress, and what was heard of others; safe in any thread."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._own = Sign(rank=rank, phase="plan", host=socket.gethostname(), pid=os.getpid())
        self._moved_s = self._start_s = clock()
        self._count = 0
        self._raw: dict[int, bytes] = {}
        self._signs: dict[int, Sign] = {}
        # Second-hand word of the slowest. It must not count as a sign of life: two ranks that
        # pass on what each heard of the other would keep a dead one alive.
        self._told: Sign | None = None

    def begin(self, phase: Phase, total_bytes: int) -> None:
        """Note that this rank enters a phase."""
        with self._lock:
            self._own = replace(self._own, phase=phase)
            if phase != "commit":  # which moves no bytes: what was written stays on show
                self._own = replace(self._own, done_bytes=0, total_bytes=total_bytes, done_files=0)
            self._moved_s = self._clock()

    def expect(self, total_bytes: int) -> None:
        """Note how many bytes the phase has in all, once that is known."""
        with self._lock:
            self._own = replace(self._own, total_bytes=total_bytes)

    def advanced(self, byte_count: int) -> None:
        """Note progress of this rank."""
        with self._lock:
            self._own = replace(self._own, done_bytes=self._own.done_bytes + byte_count)
            self._moved_s = self._clock()

    def ended_file(self) -> None:
        """Note that this rank has completed one file."""
        with self._lock:
            self._own = replace(self._own, done_files=self._own.done_files + 1)
            self._moved_s = self._clock()

    def start_listening(self) -> None:
        """Count silence of all others from now on."""
        with self._lock:
            self._start_s = self._clock()

    def pack(self) -> bytes:
        """Return this rank's sign for the board; no two are equal."""
        heard = self._heard()
        self._count += 1
        return pickle.dumps((self._count, heard[self._own.rank], _slowest(heard.values())))

    def heard(self, rank: int, packed: bytes | None) -> None:
        """Take in what lies on the board for `rank`; the same as last time is no sign of life."""
        with self._lock:
            if packed is None or self._raw.get(rank) == packed:
                return
            self._raw[rank] = packed
            _, sign, slowest = pickle.loads(packed)  # noqa: S301  # our own ranks
            now_s = self._clock()
            self._signs[rank] = replace(sign, heard_s=now_s)
            is_news = slowest.rank not in {rank, self._own.rank}
            self._told = replace(slowest, heard_s=now_s) if is_news else None

    def known(self) -> Mapping[int, Sign]:
        """Return the last sign of every rank heard of, this one's included."""
        told, heard = self._told, self._heard()
        return heard if told is None else {told.rank: told, **heard}

    def _heard(self) -> dict[int, Sign]:
        """Return this rank's sign and those that it heard from their ranks themselves."""
        with self._lock:
            now_s, own = self._clock(), self._own
            total_bytes = max(own.total_bytes, own.done_bytes)
            own = replace(own, total_bytes=total_bytes, idle_s=now_s - self._moved_s, heard_s=now_s)
            return {**self._signs, own.rank: own}

    def silent(self, ranks: Sequence[int], limit_s: float) -> list[int]:
        """Return those of `ranks` that were not heard for `limit_s` seconds."""
        with self._lock:
            now_s = self._clock()
            heard_s = {rank: sign.heard_s for rank, sign in self._signs.items()}
            return [
                rank
                for rank in ranks
                if now_s - max(heard_s.get(rank, 0.0), self._start_s) > limit_s
            ]

    def describe(self, rank: int) -> str:
        """Return one phrase on what is known of a rank, for an error."""
        with self._lock:
            sign, now_s = self._signs.get(rank), self._clock()
        if sign is None:
            return f"rank {rank} (no sign of life in {now_s - self._start_s:.1f} s)"
        return (
            f"rank {rank} (process {sign.pid} on {sign.host}; last heard "
            f"{now_s - sign.heard_s:.1f} s ago in the {sign.phase} phase with {sign.done_bytes} of "
            f"{sign.total_bytes} bytes done, without progress for {sign.idle_s:.1f} s then)"
        )


def _slowest(signs: Iterable[Sign]) -> Sign:
    return max(signs, key=lambda sign: (sign.left_bytes, sign.idle_s))


class Watch:
    """The thread of one rank that watches over one operation; the coordinator watches all others.

    It looks for failure reports and for ends of processes on this host, tells and hears signs of
    life, and removes what earlier operations left on the board. The others watch the coordinator.

    `board` is a twin of the operation's that nobody else uses; `stop` gives it back. `look_s` is
    the longest pause between two looks. `debris` are keys to remove.
    """

    def __init__(
        self,
        operation: BoardOperation,
        board: Board,
        siblings: Siblings,
        *,
        look_s: float,
        debris: list[str],
    ) -> None:
        self._operation = operation
        self._board = board
        self._siblings = siblings
        self._look_s = look_s
        self._debris = debris
        self._prefix = f"op/{operation.id}"
        self._silence_s = operation.timeouts.silence
        self._is_sound = True
        self._has_ended = threading.Event()
        self._has_news = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def keys(self) -> list[str]:
        """What this rank's watch may have left on the board."""
        return [f"{self._prefix}/life/{self._operation.rank}", f"{self._prefix}/failed"]

    def start(self) -> None:
        """Begin to watch. Raises `RuntimeError` where no thread is to be had."""
        self._operation.life.start_listening()
        name = f"ckpt-storage watch: {self._operation.what}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._thread = thread

    def nudge(self) -> None:
        """Have it told soon what this rank is about: it has begun a phase; from any thread."""
        self._has_news.set()

    def stop(self) -> Board | None:
        """Let the thread end, which it does at once unless the board hangs; return the board.

        None where a call failed on it or is under way. The thread should not be inside a call of
        torch's when the interpreter ends: that aborts.
        """
        self._has_ended.set()
        self._has_news.set()
        if self._thread is None:
            self._siblings.close()
            return self._board
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            return None
        if self._is_sound:
            return self._board
        self._board.close()
        return None

    def _run(self) -> None:
        operation = self._operation
        failure: CheckpointError | None = None
        try:
            self._watch()
            # What is left was left by operations that all ranks have gone on from.
            end_s = time.monotonic() + _STOP_S / 2
            while self._debris and time.monotonic() < end_s:
                self._tidy()
        except BoardError as error:
            self._is_sound = False
            if not self._has_ended.is_set():
                failure = lost_board(error, operation.deadline, operation.what)
        except Exception as error:  # nobody else would notice that this thread ended
            self._is_sound = False
            log.exception("The watch over %s failed.", operation.what)
            failure = CheckpointError(f"{type(error).__name__}: {error}")
        finally:
            self._siblings.close()
        if failure is not None:
            operation.take_report(Report(rank=operation.rank, error=failure))

    def _watch(self) -> None:
        board, operation, limit_s = self._board, self._operation, self._silence_s
        life, world_size = operation.life, operation.world_size
        watched = list(range(1, world_size)) if operation.is_coordinator else [COORDINATOR]
        # The coordinator reads every rank's sign: thousands of them need longer for a round.
        beat_s = min(max(1.0, world_size / 2_000), limit_s / 4)
        next_beat_s = 0.0
        told: Deadline | None = None
        while not self._pause():
            # Before the look for reports: who reports and then ends has told its reason.
            ended = self._siblings.ended()
            data = board.get(f"{self._prefix}/failed", limit_s)
            if data is not None:
                report: Report = pickle.loads(data)  # noqa: S301  # our own ranks
                if report.rank != operation.rank:
                    operation.take_report(report)
                return
            if any(self._gave_up_on(rank) for rank in ended):
                return
            self._tidy()
            # A new phase is told soon: a rank that dies in it is named with it.
            phase = operation.deadline
            if phase is told and time.monotonic() < next_beat_s:
                continue
            told, next_beat_s = phase, time.monotonic() + beat_s
            board.set(f"{self._prefix}/life/{operation.rank}", life.pack(), limit_s)
            for rank in watched:
                life.heard(rank, board.get(f"{self._prefix}/life/{rank}", limit_s))
            silent = life.silent(watched, limit_s)
            if silent:
                phase_name = operation.current_phase
                self._report(
                    silent,
                    phase_name,
                    f"gave no sign of life for {limit_s:g} s in the {phase_name} phase of "
                    f"{operation.what}",
                    "See whether those processes were killed or stopped (out of memory?); if they "
                    "only had no time for it, raise Timeouts.silence.",
                )
                return

    def _pause(self) -> bool:
        """Wait until the next look; return whether there is none."""
        first_s = min(_NEWS_S, self._look_s)
        if not self._has_ended.wait(first_s):
            self._has_news.wait(self._look_s - first_s)
            self._has_news.clear()
        return self._has_ended.is_set()

    def _tidy(self) -> None:
        for key in self._debris[:_TIDY_KEYS]:
            self._board.delete(key, self._silence_s)
            self._debris.remove(key)

    def _gave_up_on(self, rank: int) -> bool:
        """Report a rank of this host whose process has ended, unless its part was done."""
        board, operation, limit_s = self._board, self._operation, self._silence_s
        if board.has_all([f"{self._prefix}/left/{rank}"], limit_s):
            return False
        operation.life.heard(rank, board.get(f"{self._prefix}/life/{rank}", limit_s))
        sign = operation.life.known().get(rank)
        phase = operation.current_phase if sign is None else sign.phase
        if rank != COORDINATOR and phase == "commit":
            # The commit needs it no more; whether it takes place is rank 0's to tell.
            return False
        self._report(
            [rank],
            phase,
            f"died in the {phase} phase of {operation.what}: its process has ended without a word",
            "See what ended that process (a crash, a signal, out of memory).",
        )
        return True

    def _report(self, ranks: list[int], phase: Phase, how: str, next_step: str) -> None:
        """Tell all ranks that some were lost."""
        operation = self._operation
        known = {rank: operation.life.describe(rank) for rank in ranks}
        error = RankFailedError(
            f"{name_ranks(ranks)} of {operation.world_size} {how}: {'; '.join(known.values())}.",
            failures=known,
            is_silent=True,
            rank=ranks[0],
            phase=phase,
            next_step=next_step,
        )
        report = Report(rank=operation.rank, error=error)
        self._board.set_first(f"{self._prefix}/failed", pickle.dumps(report), self._silence_s)
        operation.take_report(report)
