"""One operation of all ranks: phases, steps, outcome, and giving up together.

No collective takes part. A collective waits as long as its group says, cannot be woken, names
nobody and leaves its group broken. Here each wait is a loop that looks at its deadline, at the
report of a rank that failed, and at the heartbeats of those it waits for.
"""

from __future__ import annotations

import logging
import math
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_storage.errors import (
    CheckpointError,
    PhaseTimeoutError,
    RankFailedError,
    SaveCancelledError,
)
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.store.deadline import Deadline

from .failures import Report, name_ranks, told_by, travelling
from .keyvalue import COORDINATOR, LostStoreError
from .liveness import FailureDetector, Heartbeats
from .meeting import Meeting

if TYPE_CHECKING:
    from .group import RankGroup

log = logging.getLogger("ckpt_storage")

_T = TypeVar("_T")

_COORDINATOR_GRACE_S = 1.0
_MEMBER_GRACE_S = 3.0
"""A late rank should name itself first, then the coordinator name it, then anybody else."""

_FIRST_LOOK_S = 0.0002
"""A look takes about as long, and ranks of one host are seldom further apart."""

_GROWTH = 1.25
"""From look to look a pause grows by this: what comes is noticed a quarter of the wait late."""

_STEP_LOOK_S = 0.004
"""Longest pause between two looks for the next step of a small world: a save has five steps."""

_LEAST_PATIENCE_S, _SPARE_PATIENCE_S = 0.5, 1.0

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


class Operation:
    """One save, load or export of all ranks, as one rank sees it.

    All ranks call `meet` first, and then the same steps (`gather`, `scatter`, `broadcast`,
    `all_gather`, `outcome`) in the same order, in one thread; values travel pickled, but the
    coordinator's own. What transfers call is safe in any thread: `failure`, `failed`, `advanced`,
    `expect`.

    `what` names it in messages ("the save to s3://..."). `id` is empty until the ranks have met.
    `deadline` is that of this rank's phase. `verdict` is the error that was reported first, the
    same on all ranks, once all is over; None where ranks had not met or cannot reach one another.
    `is_void`: what the save wrote on all ranks is to be deleted; reset if a rank was not heard of
    at the end, as it may still write. `lost` tells why this rank need not wait for others: it
    cannot go on itself.
    """

    def __init__(self, group: RankGroup, what: str, timeouts: Timeouts) -> None:
        self.what = what
        self.rank = group.rank
        self.world_size = group.world_size
        self.is_coordinator = group.is_coordinator
        self.timeouts = timeouts
        self.id = ""
        self.deadline = Deadline("plan", timeouts.plan, watch=self)
        self.save_id: str | None = None
        self.verdict: CheckpointError | None = None
        self.is_void = False
        self.lost: Callable[[], CheckpointError | None] = lambda: None
        self.group: RankGroup = group
        self.heartbeats: Heartbeats = Heartbeats(group.rank)
        self.advanced = self.heartbeats.advanced
        self.expect = self.heartbeats.expect
        self.progress = self.heartbeats.known
        self.others = [rank for rank in range(group.world_size) if rank != group.rank]
        self.own_keys: list[str] = []
        self.look_s = min(group.look_s, _STEP_LOOK_S + group.world_size / 20_000)
        self._grace_s = _COORDINATOR_GRACE_S if group.is_coordinator else _MEMBER_GRACE_S
        self._meeting = Meeting(self)
        self._detector: FailureDetector | None = None
        self._step = 0
        self._is_given = True
        self._failure: CheckpointError | None = None
        self._reporter: int | None = None
        self._wish: CheckpointError | None = None
        self._has_ended = False
        self._wake = threading.Event()
        self._lock = threading.Lock()

    def leave(self, error: BaseException | None = None) -> None:
        """End it on this rank; an `error` is told to all ranks, unless they told it."""
        have_left = False
        try:
            if error is not None:
                have_left = self._report(error)
            else:
                # Beyond this phase's deadline nobody may be kept waiting.
                left_s = self.deadline.remaining_s() + _MEMBER_GRACE_S
                have_left = self._leave(min(_LEAVE_S, left_s))
        except LostStoreError as lost:
            log.warning("After %s: %s", self.what, lost)
        finally:
            self._has_ended = True
            # Who has not left may still write.
            self.is_void = self.is_void and have_left
            self._wake.set()
            if self._detector is not None:
                self._detector.stop()
            self.group.debris += self.own_keys

    def key(self, *parts: object) -> str:
        """Return a key of this operation in the store that ranks share."""
        return "/".join(["op", self.id, *map(str, parts)])

    # What ends it.

    def failure(self) -> CheckpointError | None:
        """Return why the operation cannot go on; None while it can."""
        return self._failure

    def failed(self, error: CheckpointError) -> None:
        """End the operation on all ranks with `error`, from any thread; one that ended stays so.

        Before all ranks have met, it takes effect when they do.
        """
        with self._lock:
            if not self.id:
                self._wish = self._wish or error
                return
        if self._failure is None and not self._has_ended:
            error.rank = self.rank if error.rank is None else error.rank
            error.phase = error.phase or self.deadline.phase
            self._tell(travelling(error))
            self.take_report(Report(rank=self.rank, error=error))

    def take_report(self, report: Report) -> None:
        """End the operation on this rank: another one, or this rank itself, tells why."""
        is_own = report.rank == self.rank
        with self._lock:
            if self._failure is None:
                self._reporter = report.rank
                self._failure = report.error if is_own else told_by(report, self.what)
                self._wake.set()

    # Waiting.

    def patience_s(self) -> float:
        """Return how long one look may take before the store counts as lost."""
        left_s = self.deadline.remaining_s() + _SPARE_PATIENCE_S
        return max(_LEAST_PATIENCE_S, min(self.timeouts.silence, left_s))

    def get(self, key: str) -> bytes | None:
        """Return what lies under `key`."""
        return self.group.keys.get(key, self.patience_s())

    def has_all(self, keys: Sequence[str]) -> bool:
        """Return whether something lies under every key."""
        return self.group.keys.has_all(keys, self.patience_s())

    def put(self, key: str, value: bytes) -> None:
        """Leave a message, which a later operation removes."""
        if self.world_size > 1:
            self.own_keys.append(key)
            self.group.keys.set(key, value, self.patience_s())

    def until(self, look: Callable[[], _T | None], late: Callable[[], CheckpointError]) -> _T:
        """Return what `look` finds; raise why the operation failed, or late what `late` returns."""
        pause_s = _FIRST_LOOK_S
        while True:
            try:
                found = look()
            except LostStoreError as error:
                # Somebody's wish does not say what became of a message that was on its way.
                if self._failure is None or isinstance(self._failure, SaveCancelledError):
                    raise
                raise self._failure from error
            if found is not None:
                return found
            if (failure := self._failure or self.lost()) is not None:
                raise failure
            if self._has_ended:
                raise CheckpointError("What was waited for belongs to an operation that has ended.")
            if time.monotonic() > self.deadline.at_monotonic_s + self._grace_s:
                raise late()
            self._wake.wait(pause_s)
            pause_s = min(_GROWTH * pause_s, self.look_s)

    def _within(self, seconds: float, keys: Sequence[str], *, failed_s: float = math.inf) -> bool:
        """Wait for all `keys`, after a failure `failed_s` at most; return whether they came."""
        end_s, pause_s = time.monotonic() + seconds, _FIRST_LOOK_S
        while not self.has_all(keys):
            if self._failure is not None:
                end_s = min(end_s, time.monotonic() + failed_s)
            if time.monotonic() > end_s:
                return False
            time.sleep(pause_s)
            pause_s = min(_GROWTH * pause_s, self.look_s)
        return True

    def missing(self, keys: Mapping[int, str]) -> list[int]:
        """Return the ranks under whose key nothing lies."""
        return [rank for rank, key in keys.items() if not self.has_all([key])]

    def late(self, ranks: Sequence[int], did_not: str, known: str = "") -> PhaseTimeoutError:
        """Return the error that says what `ranks` have not done by the deadline."""
        deadline, verb = self.deadline, "has" if len(ranks) == 1 else "have"
        return PhaseTimeoutError(
            f"{name_ranks(ranks)} of {self.world_size} {verb} {did_not} within "
            f"{deadline.timeout_s:g} s in the {deadline.phase} phase of {self.what}{known}.",
            timeout_s=deadline.timeout_s,
            rank=ranks[0] if ranks else None,
            phase=deadline.phase,
            next_step="Look at what those ranks are doing; if they are only slow, raise "
            f"Timeouts.{deadline.phase}.",
        )

    # Phases and steps.

    def phase(
        self, phase: Phase, timeout_s: float | None = None, *, total_bytes: int = 0
    ) -> Deadline:
        """Begin a phase on this rank and return its deadline; by default as `timeouts` say."""
        seconds: float = getattr(self.timeouts, phase) if timeout_s is None else timeout_s
        self.deadline = Deadline(phase, seconds, watch=self)
        self.heartbeats.begin(phase, total_bytes)
        if self._detector is not None:
            self._detector.nudge()
        return self.deadline

    def meet(self, terms: Mapping[str, str]) -> None:
        """Wait for all ranks and check that they mean the same; the first of all steps.

        `terms` maps the name of everything ranks must share to its value, as text. Raises
        `RankMismatchError` listing value -> ranks, `RankFailedError` if a rank failed before it
        came here, `PhaseTimeoutError` naming ranks that did not come; on all ranks that came.
        """
        found = "alone"
        if self.world_size > 1:
            found = self._meeting.come({"the operation": " ".join(self.what.split()[:2]), **terms})
        with self._lock:
            self.id = found
            wish = self._wish
        if wish is not None:
            raise wish
        if self.world_size > 1:
            self.own_keys += [self.key("life", self.rank), self.key("failed")]
            self._detector = FailureDetector(self)

    def gather(self, value: _T) -> list[_T]:
        """Send `value` to the coordinator; it gets all in order of rank, others an empty list.

        Others return at once. Raises `RankFailedError`, `PhaseTimeoutError` naming the missing.
        """
        packed = b"" if self.is_coordinator else pickle.dumps(value)
        self._is_given = False
        step = self._next_step("gather")
        self._is_given = True
        if not self.is_coordinator:
            self.put(f"{step}/{self.rank}", packed)
            return []
        keys = {rank: f"{step}/{rank}" for rank in self.others}
        self._await(keys)
        got = {rank: self._take(key) for rank, key in keys.items()}
        return [value, *(pickle.loads(got.pop(rank)) for rank in keys)]  # noqa: S301  # our own ranks

    def scatter(self, values: Sequence[_T]) -> _T:
        """Give each rank its own of the coordinator's `values` (others pass none)."""
        packed = [pickle.dumps(value) for value in values[1:]]
        step = self._next_step("scatter")
        if self.is_coordinator:
            for rank in self.others:
                self.put(f"{step}/{rank}", packed[rank - 1])
            return values[COORDINATOR]
        self._await({COORDINATOR: f"{step}/{self.rank}"})
        found: _T = pickle.loads(self._take(f"{step}/{self.rank}"))  # noqa: S301  # as above
        return found

    def broadcast(self, value: _T) -> _T:
        """Return the coordinator's `value` on every rank (others pass anything)."""
        packed = pickle.dumps(value)
        step = self._next_step("broadcast")
        if self.is_coordinator:
            self.put(step, packed)
        else:
            self._await({COORDINATOR: step})
            packed = self._read(step)
        found: _T = pickle.loads(packed)  # noqa: S301  # as above
        return found

    def all_gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in order of rank, on every rank."""
        packed = self.broadcast(self.gather(pickle.dumps(value)))
        return [pickle.loads(one) for one in packed]  # noqa: S301  # as above

    def announce(self, outcome: object) -> None:
        """Tell all ranks how it ended; the coordinator's last word, also after errors."""
        self.put(self.key("outcome"), pickle.dumps(outcome))

    def outcome(self) -> Any:  # noqa: ANN401  # what was announced
        """Return what the coordinator announces; on the other ranks. Raises as `gather`."""
        key = self.key("outcome")
        try:
            self._await({COORDINATOR: key})
        except LostStoreError:
            raise  # it would not answer the next look either
        except CheckpointError as error:
            # Its last word may still come. Who cancels asks a coordinator that may be committing.
            is_wish = isinstance(error, SaveCancelledError)
            seconds = self.timeouts.silence if is_wish else _LAST_WORD_S
            if self.is_last_word(error) or not self._within(seconds, [key]):
                raise
        return pickle.loads(self._read(key))  # noqa: S301  # as above

    def is_last_word(self, error: CheckpointError) -> bool:
        """Return whether the coordinator failed, and `error`, raised by `outcome`, is how.

        It may be committing where it only noticed that others are silent, or where its save was
        cancelled from another thread; but not without what this rank was to give.
        """
        if not self._is_given:
            return True
        is_silence = isinstance(error, RankFailedError) and error.is_silent
        is_wish = isinstance(error, SaveCancelledError)
        return self._reporter == COORDINATOR and not is_silence and not is_wish

    def _next_step(self, name: str) -> str:
        if self._failure is not None:
            # Another rank that has not heard of it yet would go on with what this one sends.
            raise self._failure
        self._step += 1
        return self.key(f"{self._step}-{name}")

    def _read(self, key: str) -> bytes:
        data = self.get(key)
        if data is None:
            raise CheckpointError(
                f"{self.what}: a message between ranks is gone ({key}).",
                next_step="Make sure that all ranks call the same operations in the same order.",
            )
        return data

    def _take(self, key: str) -> bytes:
        data = self._read(key)
        self.group.keys.delete(key, self.patience_s())
        return data

    def _await(self, keys: Mapping[int, str]) -> None:
        """Wait until something lies under each key, put there by the rank it is listed for."""

        def late() -> PhaseTimeoutError:
            missing = self.missing(keys)
            known = "; ".join(self.heartbeats.describe(rank) for rank in missing[:8])
            return self.late(missing, "not ended it", f": {known}")

        names = list(keys.values())
        self.until(lambda: self.has_all(names) or None, late)

    # Leaving.

    def _report(self, error: BaseException) -> bool:
        """Tell all ranks why this one leaves, unless they told it; return as `_leave`."""
        if isinstance(error, LostStoreError) or isinstance(error.__cause__, LostStoreError):
            return False  # there is nowhere to tell it
        self.id = self.id or self._meeting.late_id
        was_answered = self._meeting.is_over and not self.id
        if self._failure is None:
            if isinstance(error, CheckpointError):
                error.phase = error.phase or self.deadline.phase
                if error.rank is None and not was_answered:
                    error.rank = self.rank
            cause = travelling(error)
            cause.phase = cause.phase or self.deadline.phase
            if self.world_size == 1:
                self.verdict = cause
            elif self.id:
                self._tell(cause)
            elif not was_answered:
                self._come_failed(cause, is_interrupt=not isinstance(error, Exception))
        if self.id and self.world_size > 1:
            first = self.group.keys.get(self.key("failed"), _REPORT_S)
            self.verdict = pickle.loads(first).error if first is not None else None  # noqa: S301  # our own ranks
        return self._leave(_LEAVE_FAILED_S)

    def _tell(self, error: CheckpointError) -> None:
        # Before its first step a coordinator plans for itself.
        decides = self.is_coordinator and self._step > 0 and error.phase in {"plan", "commit"}
        report = pickle.dumps(Report(rank=self.rank, error=error, decides=decides))
        if self.world_size > 1:
            self.group.keys.set_first(self.key("failed"), report, _REPORT_S)

    def _come_failed(self, error: CheckpointError, *, is_interrupt: bool) -> None:
        """Tell the ranks that this one failed before it met them; it stays in step with them."""
        if is_interrupt:
            # An interrupted process must not wait for ranks that are not there.
            self.deadline = Deadline(self.deadline.phase, _INTERRUPTED_S)
            self._grace_s = 0.0
        log.error("Rank %d failed, and waits to tell the others: %s", self.rank, error)
        try:
            self._meeting.come(None, error)
        except CheckpointError as answered:
            log.debug("The ranks were told: %s", answered)

    def _leave(self, timeout_s: float) -> bool:
        """Say that this rank has read the outcome; return whether all have, where it is rank 0."""
        if self.world_size == 1 or not self.id:
            return True
        left, have_left = {rank: self.key("left", rank) for rank in self.others}, True
        if self.is_coordinator:
            self.own_keys += left.values()
            # Who is gone leaves no word; of a failure the others have heard by now.
            have_left = self._within(timeout_s, list(left.values()), failed_s=_LEAVE_FAILED_S)
            if not have_left:
                missing = name_ranks(self.missing(left))
                log.warning("After %s nothing was heard of %s.", self.what, missing)
        self.own_keys.append(self.key("left", self.rank))
        self.group.keys.set(self.own_keys[-1], b"left", timeout_s)
        return have_left
