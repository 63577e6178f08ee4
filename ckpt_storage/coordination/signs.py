"""Signs of life: what each rank was last heard to do, and who has fallen silent."""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_storage.options import Phase


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
