"""The thread of each rank that looks for reports, deaths and signs of life during an operation."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence

from ckpt_storage.errors import CheckpointError, RankFailedError
from ckpt_storage.store.deadline import Deadline

from .board import Board, BoardError
from .failures import COORDINATOR, Report, lost_board, name_ranks
from .signs import Siblings, Signs

log = logging.getLogger("ckpt_storage")

_STOP_S = 0.25

_NEWS_S = 0.02
"""How soon a new phase is told: a save begins several at once, and each word costs three looks."""


class Watcher:
    """Watches one operation on one rank, on a connection to the board that nobody else uses.

    The coordinator watches all others, they watch the coordinator.

    Args:
        board: a twin of the operation's; `stop` gives it back.
        prefix: of the operation's keys.
        signs: this rank's, and what it hears of others'.
        phase: returns the deadline of the present phase.
        on_failure: takes an error and the rank that reported it; called once, from the thread.
        silence_s: how long a rank may give no sign of life.
        look_s: longest pause between two looks; `nudge` shortens one.
        siblings: the ranks of this host; closed when the thread ends.

    """

    def __init__(
        self,
        board: Board,
        prefix: str,
        *,
        what: str,
        rank: int,
        world_size: int,
        signs: Signs,
        phase: Callable[[], Deadline],
        on_report: Callable[[Report], None],
        on_failure: Callable[[CheckpointError], None],
        silence_s: float,
        look_s: float,
        siblings: Siblings,
    ) -> None:
        self._board = board
        self._prefix = prefix
        self._what = what
        self._rank = rank
        self._world_size = world_size
        self._signs = signs
        self._phase = phase
        self._on_report = on_report
        self._on_failure = on_failure
        self._silence_s = silence_s
        self._look_s = look_s
        self._siblings = siblings
        self._is_sound = True
        self._has_ended = threading.Event()
        self._has_news = threading.Event()
        others = [other for other in range(world_size) if other != rank]
        self._watched = others if rank == COORDINATOR else [COORDINATOR]
        # The coordinator reads every rank's sign: thousands of them need longer for a round.
        self._beat_s = min(max(1.0, world_size / 2_000), silence_s / 4)
        self._thread = threading.Thread(
            target=self._run, name=f"ckpt-storage watch: {what}", daemon=True
        )

    @property
    def keys(self) -> list[str]:
        """What this rank's watcher may have left on the board."""
        return [f"{self._prefix}/life/{self._rank}", f"{self._prefix}/failed"]

    def start(self) -> None:
        """Begin to watch."""
        self._signs.start_listening()
        self._thread.start()

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
        if self._thread.ident is None:
            # It could not be started: a process may have no more threads.
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
        try:
            self._watch()
        except BoardError as error:
            self._is_sound = False
            if not self._has_ended.is_set():
                self._on_failure(lost_board(error, self._phase(), self._what))
        except Exception as error:  # nobody else would notice that this thread ended
            self._is_sound = False
            log.exception("The watch over %s failed.", self._what)
            self._on_failure(CheckpointError(f"{type(error).__name__}: {error}"))
        finally:
            self._siblings.close()

    def _watch(self) -> None:
        board, limit_s = self._board, self._silence_s
        next_beat_s = 0.0
        told: Deadline | None = None
        while not self._pause():
            # Before the look for reports: who reports and then ends has told its reason.
            ended = self._siblings.ended()
            data = board.get(f"{self._prefix}/failed", limit_s)
            if data is not None:
                self._on_report(pickle.loads(data))  # noqa: S301  # our own ranks
                return
            if any(self._gave_up_on(rank) for rank in ended):
                return
            # A new phase is told soon: a rank that dies in it is named with it.
            phase = self._phase()
            if phase is told and time.monotonic() < next_beat_s:
                continue
            told, next_beat_s = phase, time.monotonic() + self._beat_s
            board.set(f"{self._prefix}/life/{self._rank}", self._signs.pack(), limit_s)
            for rank in self._watched:
                self._signs.heard(rank, board.get(f"{self._prefix}/life/{rank}", limit_s))
            silent = self._signs.silent(self._watched, limit_s)
            if silent:
                self._report(self._silent(silent))
                return

    def _report(self, error: RankFailedError) -> None:
        report = pickle.dumps(Report(rank=self._rank, error=error))
        self._board.set_first(f"{self._prefix}/failed", report, self._silence_s)
        self._on_failure(error)

    def _gave_up_on(self, rank: int) -> bool:
        """Report a rank of this host whose process has ended, unless its part was done."""
        board, limit_s = self._board, self._silence_s
        if board.has_all([f"{self._prefix}/left/{rank}"], limit_s):
            return False
        self._signs.heard(rank, board.get(f"{self._prefix}/life/{rank}", limit_s))
        sign = self._signs.known().get(rank)
        phase = self._phase().phase if sign is None else sign.phase
        if rank != COORDINATOR and phase == "commit":
            # The commit needs it no more; whether it takes place is rank 0's to tell.
            return False
        known = self._signs.describe(rank)
        self._report(
            RankFailedError(
                f"Rank {rank} of {self._world_size} died in the {phase} phase of {self._what}: its "
                f"process has ended without a word. {known[:1].upper()}{known[1:]}.",
                failures={rank: known},
                is_silent=True,
                rank=rank,
                phase=phase,
                next_step="See what ended that process (a crash, a signal, out of memory).",
            )
        )
        return True

    def _pause(self) -> bool:
        """Wait until the next look; return whether there is none."""
        first_s = min(_NEWS_S, self._look_s)
        if not self._has_ended.wait(first_s):
            self._has_news.wait(self._look_s - first_s)
            self._has_news.clear()
        return self._has_ended.is_set()

    def _silent(self, ranks: Sequence[int]) -> RankFailedError:
        known = {rank: self._signs.describe(rank) for rank in ranks}
        phase = self._phase().phase
        return RankFailedError(
            f"{name_ranks(ranks)} of {self._world_size} gave no sign of life for "
            f"{self._silence_s:g} s in the {phase} phase of {self._what}: "
            f"{'; '.join(known.values())}.",
            failures=known,
            is_silent=True,
            rank=ranks[0],
            phase=phase,
            next_step="See whether those processes were killed or stopped (out of memory?); "
            "if they only had no time for it, raise Timeouts.silence.",
        )
