"""The operation over a board: phases, steps, outcome and giving up together.

No collective takes part. A collective waits as long as its group says, cannot be woken, names
nobody and leaves its group broken. Here each wait is a loop that looks at its deadline, at the
report of a rank that failed, and at the signs of life of those it waits for.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import (
    CheckpointError,
    PhaseTimeoutError,
    RankFailedError,
    SaveCancelledError,
)
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.store.deadline import Deadline

from .board import BoardError, Waits
from .failures import COORDINATOR, Report, late_error, lost_board, name_ranks, told_by, travelling
from .meeting import Meeting
from .signs import Siblings, Sign, Signs, Watch

if TYPE_CHECKING:
    from .ranks import Ranks

log = logging.getLogger("ckpt_storage")

_COORDINATOR_GRACE_S = 1.0
_MEMBER_GRACE_S = 3.0
"""A late rank should name itself first, then the coordinator name it, then anybody else."""

_STEP_LOOK_S = 0.004
"""Longest pause between two looks for the next step of a small world: a save has five steps."""

_LAST_WORD_S = 1.5

_LEAVE_S = 10.0
_LEAVE_FAILED_S = 1.0
"""How long the coordinator stays for ranks that have not read the outcome yet.

It may host the store that they read it from.
"""

_REPORT_S = 3.0
"""How long a failing rank tries to report before it raises."""

_INTERRUPTED_S = 1.5
"""How long a rank that was interrupted before it met the others tries to tell them."""


class BoardOperation:
    """An `Operation` over a board; a context manager.

    An exception that leaves the block is reported to all ranks, which raise within seconds wherever
    they are. `id` is empty until the ranks have met; all keys begin with it. `life`: the signs of
    life that this rank gives and hears.
    """

    def __init__(self, group: Ranks, what: str, timeouts: Timeouts) -> None:
        self.what = what
        self.rank = group.rank
        self.world_size = group.world_size
        self.is_coordinator = group.is_coordinator
        self.timeouts = timeouts
        self.id = ""
        self.save_id: str | None = None
        self.committed: CheckpointInfo | None = None
        self.verdict: CheckpointError | None = None
        self.is_void = False
        self._group = group
        self._waits = Waits(
            group.board,
            Deadline("plan", timeouts.plan, watch=self),
            silence_s=timeouts.silence,
            look_s=min(group.look_s, _STEP_LOOK_S + group.world_size / 20_000),
            grace_s=_COORDINATOR_GRACE_S if group.is_coordinator else _MEMBER_GRACE_S,
        )
        self._meeting = Meeting(group, self._waits, lambda: self.what)
        self.life = Signs(group.rank)
        self._watch: Watch | None = None
        self._looks: list[Callable[[], CheckpointError | None]] = []
        self._step = 0
        self._keys: list[str] = []
        self._reporter: int | None = None
        self._wish: CheckpointError | None = None
        self._has_ended = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        have_left = False
        try:
            if error is None:
                # Beyond this phase's deadline nobody may be kept waiting.
                patience_s = self._waits.deadline.remaining_s() + _MEMBER_GRACE_S
                have_left = self._leave(min(_LEAVE_S, patience_s))
            else:
                have_left = self._report(error)
        except BoardError as lost:
            log.warning("After %s: %s", self.what, lost)
        finally:
            self._has_ended = True
            # Who has not left may still write.
            self.is_void = self.is_void and have_left
            self._waits.end()
            if self._watch is not None:
                self._group.spare_board = self._watch.stop()
            self._group.debris.extend([*self._keys, *self._meeting.keys])

    # What transfers see.

    def failure(self) -> CheckpointError | None:
        """Return why the operation cannot go on; None while it can."""
        for look in self._looks:
            error = look() if self._waits.failure is None else None
            if error is not None and self.id:
                self.failed(error)
            elif error is not None:
                self._wish = self._wish or error
        return self._waits.failure

    def also_watch(self, look: Callable[[], CheckpointError | None]) -> None:
        """End all waits of this rank with what `look` returns, once that is not None.

        `look` is called every few milliseconds, in any thread that waits. Before all ranks have
        met, what it returns takes effect when they do.
        """
        self._looks.append(look)
        self._waits.on_look = self.failure

    def advanced(self, byte_count: int) -> None:
        """Note bytes done in this phase, for the signs of life."""
        self.life.advanced(byte_count)

    def failed(self, error: CheckpointError) -> None:
        """Tell all ranks of a failure before it leaves the block: something of it still hangs."""
        if self.id and self._waits.failure is None:
            error.rank = self.rank if error.rank is None else error.rank
            error.phase = error.phase or self.current_phase
            self._tell(travelling(error))
            self._set_failure(error, self.rank)

    def expect(self, total_bytes: int) -> None:
        """Note how many bytes this rank has to do in this phase."""
        self.life.expect(total_bytes)

    def ended_file(self) -> None:
        """Note a complete file of this phase, for the signs of life."""
        self.life.ended_file()

    @property
    def signs(self) -> Mapping[int, Sign]:
        """The last sign of life of each rank that this rank has heard of."""
        return self.life.known()

    # Phases.

    def phase(
        self, phase: Phase, timeout_s: float | None = None, *, total_bytes: int = 0
    ) -> Deadline:
        """Begin a phase on this rank and return its deadline."""
        seconds: float = getattr(self.timeouts, phase) if timeout_s is None else timeout_s
        self._waits.deadline = Deadline(phase, seconds, watch=self)
        self.life.begin(phase, total_bytes)
        if self._watch is not None:
            self._watch.nudge()
        return self._waits.deadline

    @property
    def current_phase(self) -> Phase:
        """The phase that this rank is in."""
        return self._waits.deadline.phase

    @property
    def deadline(self) -> Deadline:
        """Of the phase that this rank is in."""
        return self._waits.deadline

    # Steps.

    def meet(self, terms: Mapping[str, str]) -> None:
        """Wait for all ranks and check that they mean the same; the first of all steps."""
        with self._over_the_board():
            verdict = self._meeting.come(
                {"the operation": " ".join(self.what.split()[:2]), **terms}
            )
        with self._lock:
            self.id = verdict.operation_id
            wish = self._wish
        if wish is not None:
            raise wish
        if self.world_size == 1:
            return
        # Not a new board each time: at each connection torch's server looks up the name of who
        # calls, and answers nobody until DNS has.
        group = self._group
        twin, group.spare_board = group.spare_board, None
        self._watch = Watch(
            self,
            twin or group.board.twin(),
            Siblings(group.process, verdict.siblings),
            look_s=group.look_s,
            debris=group.debris,
        )
        self._keys += self._watch.keys
        self._watch.start()

    def gather(self, payload: bytes) -> list[bytes]:
        """Send `payload` to the coordinator; it gets all in order of rank, others an empty list."""
        step = self._next_step("gather")
        with self._over_the_board():
            if not self.is_coordinator:
                self._put(f"{step}/{self.rank}", payload)
                return []
            keys = {rank: f"{step}/{rank}" for rank in self._others()}
            self._await(keys)
            got = {rank: self._take(key) for rank, key in keys.items()}
        return [got.get(rank, payload) for rank in range(self.world_size)]

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        """Give each rank its own of the coordinator's `payloads` (others pass none)."""
        step = self._next_step("scatter")
        with self._over_the_board():
            if self.is_coordinator:
                for rank in self._others():
                    self._put(f"{step}/{rank}", payloads[rank])
                return payloads[self.rank]
            self._await({COORDINATOR: f"{step}/{self.rank}"})
            return self._take(f"{step}/{self.rank}")

    def broadcast(self, payload: bytes) -> bytes:
        """Return the coordinator's `payload` on every rank (others pass anything)."""
        step = self._next_step("broadcast")
        with self._over_the_board():
            if self.is_coordinator:
                self._put(step, payload)
                return payload
            self._await({COORDINATOR: step})
            return self._read(step)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in order of rank, on every rank."""
        packed = self.broadcast(pickle.dumps(self.gather(payload)))
        together: list[bytes] = pickle.loads(packed)  # noqa: S301  # our own ranks
        return together

    def announce(self, outcome: bytes) -> None:
        """Tell all ranks how the operation ended; also after errors."""
        with self._over_the_board():
            self._put(self._key("outcome"), outcome)

    def outcome(self) -> bytes:
        """Return what the coordinator announces; on the other ranks."""
        key = self._key("outcome")
        with self._over_the_board():
            try:
                self._await({COORDINATOR: key})
            except BoardError:
                raise  # it would not answer the next look either
            except CheckpointError as error:
                # Who cancels asks a coordinator that lives, and may be in the middle of the commit.
                is_wish = isinstance(error, SaveCancelledError)
                seconds = self.timeouts.silence if is_wish else _LAST_WORD_S
                if self.is_last_word(error) or not self._waits.within(seconds, [key]):
                    raise
            return self._read(key)

    def is_last_word(self, error: CheckpointError) -> bool:
        """Return whether the coordinator failed, and `error` is how."""
        is_silence = isinstance(error, RankFailedError) and error.is_silent
        is_wish = isinstance(error, SaveCancelledError)
        return self._reporter == COORDINATOR and not is_silence and not is_wish

    @contextmanager
    def _over_the_board(self) -> Iterator[None]:
        """Raise that the store is lost as what it means for the operation."""
        try:
            yield
        except BoardError as error:
            failure = self._waits.failure
            if failure is None or isinstance(failure, SaveCancelledError):
                # Somebody's wish does not say what became of a message that was on its way.
                failure = lost_board(error, self.deadline, self.what)
            raise failure from error

    def _key(self, *parts: str) -> str:
        return "/".join(("op", self.id, *parts))

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _next_step(self, name: str) -> str:
        if self._waits.failure is not None:
            # Another rank that has not heard of it yet would go on with what this one sends.
            raise self._waits.failure
        self._step += 1
        return self._key(f"{self._step}-{name}")

    def _put(self, key: str, payload: bytes) -> None:
        self._keys.append(key)
        self._waits.set(key, payload)

    def _read(self, key: str) -> bytes:
        data = self._waits.get(key)
        if data is None:
            raise CheckpointError(
                f"{self.what}: a message between ranks is gone ({key}).",
                next_step="Make sure that all ranks call the same operations in the same order.",
            )
        return data

    def _take(self, key: str) -> bytes:
        data = self._read(key)
        self._waits.delete(key)
        return data

    def _await(self, keys: Mapping[int, str]) -> None:
        """Wait until something lies under each key, put there by the rank it is listed for."""
        names = list(keys.values())
        self._waits.until(
            lambda: self._waits.board.has_all(names, self._waits.patience_s()) or None,
            lambda: self._late(self._waits.missing(keys)),
        )

    def _late(self, ranks: Sequence[int]) -> PhaseTimeoutError:
        what = f"{self.what}: {'; '.join(self.life.describe(rank) for rank in ranks[:8])}"
        return late_error(
            ranks,
            "not ended it",
            world_size=self.world_size,
            deadline=self._waits.deadline,
            what=what,
        )

    # Giving up together.

    def give_up(self, error: CheckpointError) -> None:
        """End the operation on all ranks with `error`, from any thread; one that ended stays so."""
        with self._lock:
            if not self.id:
                self._wish = error
                return
        if not self._has_ended:
            report = pickle.dumps(Report(rank=self.rank, error=error))
            twin = self._group.board.twin()
            try:
                twin.set_first(self._key("failed"), report, _REPORT_S)
            finally:
                twin.close()
            self._set_failure(error, self.rank)

    def _report(self, error: BaseException) -> bool:
        """Tell all ranks why this one leaves, unless they told it; return as `_leave`."""
        if isinstance(error, BoardError) or isinstance(error.__cause__, BoardError):
            return False  # there is nowhere to tell it
        self.id = self.id or self._meeting.late_id
        if self._waits.failure is None:
            self._fail(error)
        first = self._group.board.get(self._key("failed"), _REPORT_S) if self.id else None
        if first is not None:
            self.verdict = pickle.loads(first).error  # noqa: S301  # our own ranks
        return self._leave(_LEAVE_FAILED_S)

    def _fail(self, error: BaseException) -> None:
        was_answered = self._meeting.is_over and not self.id
        if isinstance(error, CheckpointError) and error.rank is None and not was_answered:
            error.rank = self.rank
        if isinstance(error, CheckpointError):
            error.phase = error.phase or self.current_phase
        cause = travelling(error)
        cause.phase = cause.phase or self.current_phase
        if self.id:
            self._tell(cause)
        elif not was_answered:
            if not isinstance(error, Exception):
                # An interrupted process must not wait for ranks that are not there.
                self._waits.deadline = Deadline(self.current_phase, _INTERRUPTED_S)
                self._waits.grace_s = 0.0
            self._come_failed(cause)

    def _tell(self, error: CheckpointError) -> None:
        self._keys.append(self._key("failed"))
        # Before its first step a coordinator plans for itself.
        decides = self.is_coordinator and self._step > 0 and error.phase in {"plan", "commit"}
        report = pickle.dumps(Report(rank=self.rank, error=error, decides=decides))
        self._group.board.set_first(self._key("failed"), report, _REPORT_S)

    def _come_failed(self, error: CheckpointError) -> None:
        """Tell the ranks that this one failed before it met them.

        As in any operation it waits until they have come: one that went on alone would from
        then on meet them in different operations.
        """
        if self.world_size > 1:
            log.error("Rank %d failed, and waits to tell the others: %s", self.rank, error)
        try:
            self._meeting.come(None, error)
        except CheckpointError as answered:
            log.debug("The ranks were told: %s", answered)

    def _leave(self, timeout_s: float) -> bool:
        """Say that this rank has read the outcome; the coordinator waits until all have.

        Returns whether all have; other ranks than the coordinator do not look.
        """
        if self.world_size == 1 or not self.id:
            return True
        have_left = not self.is_coordinator or self._await_left(
            {rank: self._key("left", str(rank)) for rank in self._others()}, timeout_s
        )
        self._keys.append(self._key("left", str(self.rank)))
        self._group.board.set(self._keys[-1], b"left", timeout_s)
        return have_left

    def _await_left(self, keys: Mapping[int, str], timeout_s: float) -> bool:
        self._keys += keys.values()
        end_s = time.monotonic() + timeout_s
        while not self._waits.within(self._group.look_s, list(keys.values())):
            if self._waits.failure is not None:
                # Who is gone leaves no word; the others have heard of it by now.
                end_s = min(end_s, time.monotonic() + _LEAVE_FAILED_S)
            if time.monotonic() > end_s:
                missing = name_ranks(self._waits.missing(keys))
                log.warning("After %s nothing was heard of %s.", self.what, missing)
                return False
        return True

    def _set_failure(self, error: CheckpointError, reporter: int) -> None:
        with self._lock:
            if self._waits.failure is None:
                self._reporter = reporter
                self._waits.fail(error)

    def take_report(self, report: Report) -> None:
        """End the operation on this rank: another one, or this rank's watch, tells why."""
        is_own = report.rank == self.rank
        self._set_failure(report.error if is_own else told_by(report, self.what), report.rank)
