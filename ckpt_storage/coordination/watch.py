"""The thread of each rank that watches over one operation.

It looks for failure reports and for ends of processes on this host, tells and hears signs of life,
and removes what earlier operations left on the board.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_storage.errors import CheckpointError, RankFailedError
from ckpt_storage.store.deadline import Deadline

from .board import Board, BoardError
from .failures import COORDINATOR, Report, lost_board, name_ranks
from .signs import Siblings, Signs

log = logging.getLogger("ckpt_storage")

_STOP_S = 0.25

_NEWS_S = 0.02
"""How soon a new phase is told: a save begins several at once, and each word costs three looks."""

_TIDY_KEYS = 32
"""How many keys of earlier operations are removed between two looks."""


@dataclass(eq=False, kw_only=True)
class Watch:
    """Watches one operation on one rank, on a connection to the board that nobody else uses.

    The coordinator watches all others, they watch the coordinator.

    `board` is a twin of the operation's; `stop` gives it back. `prefix` begins the operation's
    keys. `signs` are this rank's, and what it hears of others'. `phase` returns the deadline of the
    present phase. `on_report` is called once, from the thread. `silence_s` is how long a rank may
    give no sign of life, `look_s` the longest pause between two looks. `debris` are keys to remove.
    """

    board: Board
    prefix: str
    what: str
    rank: int
    world_size: int
    signs: Signs
    phase: Callable[[], Deadline]
    on_report: Callable[[Report], None]
    silence_s: float
    look_s: float
    siblings: Siblings
    debris: list[str]
    _is_sound: bool = True
    _has_ended: threading.Event = field(default_factory=threading.Event)
    _has_news: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def keys(self) -> list[str]:
        """What this rank's watch may have left on the board."""
        return [f"{self.prefix}/life/{self.rank}", f"{self.prefix}/failed"]

    def start(self) -> None:
        """Begin to watch. Raises `RuntimeError` where no thread is to be had."""
        self.signs.start_listening()
        name = f"ckpt-storage watch: {self.what}"
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
            self.siblings.close()
            return self.board
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            return None
        if self._is_sound:
            return self.board
        self.board.close()
        return None

    def _run(self) -> None:
        failure: CheckpointError | None = None
        try:
            self._watch()
            # What is left was left by operations that all ranks have gone on from.
            end_s = time.monotonic() + _STOP_S / 2
            while self.debris and time.monotonic() < end_s:
                self._tidy()
        except BoardError as error:
            self._is_sound = False
            if not self._has_ended.is_set():
                failure = lost_board(error, self.phase(), self.what)
        except Exception as error:  # nobody else would notice that this thread ended
            self._is_sound = False
            log.exception("The watch over %s failed.", self.what)
            failure = CheckpointError(f"{type(error).__name__}: {error}")
        finally:
            self.siblings.close()
        if failure is not None:
            self.on_report(Report(rank=self.rank, error=failure))

    def _watch(self) -> None:
        board, limit_s = self.board, self.silence_s
        watched = [rank for rank in range(self.world_size) if rank != self.rank]
        watched = watched if self.rank == COORDINATOR else [COORDINATOR]
        # The coordinator reads every rank's sign: thousands of them need longer for a round.
        beat_s = min(max(1.0, self.world_size / 2_000), limit_s / 4)
        next_beat_s = 0.0
        told: Deadline | None = None
        while not self._pause():
            # Before the look for reports: who reports and then ends has told its reason.
            ended = self.siblings.ended()
            data = board.get(f"{self.prefix}/failed", limit_s)
            if data is not None:
                report: Report = pickle.loads(data)  # noqa: S301  # our own ranks
                if report.rank != self.rank:
                    self.on_report(report)
                return
            if any(self._gave_up_on(rank) for rank in ended):
                return
            self._tidy()
            # A new phase is told soon: a rank that dies in it is named with it.
            phase = self.phase()
            if phase is told and time.monotonic() < next_beat_s:
                continue
            told, next_beat_s = phase, time.monotonic() + beat_s
            board.set(f"{self.prefix}/life/{self.rank}", self.signs.pack(), limit_s)
            for rank in watched:
                self.signs.heard(rank, board.get(f"{self.prefix}/life/{rank}", limit_s))
            silent = self.signs.silent(watched, limit_s)
            if silent:
                self._report_silent(silent)
                return

    def _pause(self) -> bool:
        """Wait until the next look; return whether there is none."""
        first_s = min(_NEWS_S, self.look_s)
        if not self._has_ended.wait(first_s):
            self._has_news.wait(self.look_s - first_s)
            self._has_news.clear()
        return self._has_ended.is_set()

    def _tidy(self) -> None:
        for key in self.debris[:_TIDY_KEYS]:
            self.board.delete(key, self.silence_s)
            self.debris.remove(key)

    def _report(self, error: RankFailedError) -> None:
        report = Report(rank=self.rank, error=error)
        self.board.set_first(f"{self.prefix}/failed", pickle.dumps(report), self.silence_s)
        self.on_report(report)

    def _gave_up_on(self, rank: int) -> bool:
        """Report a rank of this host whose process has ended, unless its part was done."""
        board, limit_s = self.board, self.silence_s
        if board.has_all([f"{self.prefix}/left/{rank}"], limit_s):
            return False
        self.signs.heard(rank, board.get(f"{self.prefix}/life/{rank}", limit_s))
        sign = self.signs.known().get(rank)
        phase = self.phase().phase if sign is None else sign.phase
        if rank != COORDINATOR and phase == "commit":
            # The commit needs it no more; whether it takes place is rank 0's to tell.
            return False
        known = self.signs.describe(rank)
        self._report(
            RankFailedError(
                f"Rank {rank} of {self.world_size} died in the {phase} phase of {self.what}: its "
                f"process has ended without a word. {known[:1].upper()}{known[1:]}.",
                failures={rank: known},
                is_silent=True,
                rank=rank,
                phase=phase,
                next_step="See what ended that process (a crash, a signal, out of memory).",
            )
        )
        return True

    def _report_silent(self, ranks: list[int]) -> None:
        known = {rank: self.signs.describe(rank) for rank in ranks}
        phase = self.phase().phase
        self._report(
            RankFailedError(
                f"{name_ranks(ranks)} of {self.world_size} gave no sign of life for "
                f"{self.silence_s:g} s in the {phase} phase of {self.what}: "
                f"{'; '.join(known.values())}.",
                failures=known,
                is_silent=True,
                rank=ranks[0],
                phase=phase,
                next_step="See whether those processes were killed or stopped (out of memory?); "
                "if they only had no time for it, raise Timeouts.silence.",
            )
        )
