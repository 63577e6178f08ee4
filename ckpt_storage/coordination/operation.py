"""One operation of all ranks: phases, steps, outcome, and giving up together.

No collective takes part. A collective waits as long as its group says, cannot be woken, names
nobody and leaves its group broken. Here each wait is a loop that looks at its deadline, at the
report of a rank that failed, and at the heartbeats of those it waits for.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
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

from .failures import Report, name_ranks, told_by, travelling
from .keyvalue import COORDINATOR, LostStoreError, Waits
from .liveness import FailureDetector, Heartbeats, RankProgress, Siblings
from .meeting import Meeting

if TYPE_CHECKING:
    from .group import RankGroup

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


class Operation:
    """One save, load or export of all ranks, as one rank sees it; a context manager.

    All ranks call `meet` first, and then the same steps (`gather`, `scatter`, `broadcast`,
    `all_gather`, `outcome`) in the same order, in one thread. An exception that leaves the block is
    reported to all ranks, which raise within seconds wherever they are. What transfers call is safe
    in any thread: `failure`, `failed`, `advanced`, `expect`, `ended_file`.

    `what` names it in messages ("the save to s3://..."). `id` is empty until the ranks have met.
    `save_id` is that of the save, once it is known, and `committed` what was committed, while the
    operation goes on after that. `verdict` is the error that was reported first, the same on all
    ranks; it is set when the operation has ended with an error, None where the ranks had not met or
    cannot reach one another. `is_void`: what the save wrote on all ranks is to be deleted; false
    again once it ended without a word of one.
    """

    def __init__(self, group: RankGroup, what: str, timeouts: Timeouts) -> None:
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
        self.group = group
        self.heartbeats = Heartbeats(group.rank)
        self.advanced = self.heartbeats.advanced
        self.expect = self.heartbeats.expect
        self.ended_file = self.heartbeats.ended_file
        self.waits = Waits(
            group.keys,
            Deadline("plan", timeouts.plan, watch=self),
            silence_s=timeouts.silence,
            look_s=min(group.look_s, _STEP_LOOK_S + group.world_size / 20_000),
            grace_s=_COORDINATOR_GRACE_S if group.is_coordinator else _MEMBER_GRACE_S,
        )
        self._others = [rank for rank in range(group.world_size) if rank != group.rank]
        self._meeting = Meeting(self)
        self._detector: FailureDetector | None = None
        self._step = 0
        self._is_given = True
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
                have_left = self._leave(
                    min(_LEAVE_S, self.deadline.remaining_s() + _MEMBER_GRACE_S)
                )
            else:
                have_left = self._report(error)
        except LostStoreError as lost:
            log.warning("After %s: %s", self.what, lost)
        finally:
            self._has_ended = True
            # Who has not left may still write.
            self.is_void = self.is_void and have_left
            self.waits.end()
            if self._detector is not None:
                self._detector.stop()
            self.group.debris += [*self._keys, *self._meeting.keys]

    @property
    def deadline(self) -> Deadline:
        """Of the phase that this rank is in, which knows of others' failures."""
        return self.waits.deadline

    @property
    def progress(self) -> Mapping[int, RankProgress]:
        """How far each rank is that this rank has heard of."""
        return self.heartbeats.known()

    def key(self, *parts: object) -> str:
        """Return a key of this operation in the store that ranks share."""
        return "/".join(["op", self.id, *map(str, parts)])

    # What ends it.

    def failure(self) -> CheckpointError | None:
        """Return why the operation cannot go on; None while it can."""
        return self.waits.failure

    def failed(self, error: CheckpointError) -> None:
        """End the operation on all ranks with `error`, from any thread; one that ended stays so.

        Before all ranks have met, it takes effect when they do.
        """
        with self._lock:
            if not self.id:
                self._wish = self._wish or error
                return
        if self.waits.failure is None and not self._has_ended:
            error.rank = self.rank if error.rank is None else error.rank
            error.phase = error.phase or self.deadline.phase
            self._tell(travelling(error))
            self._set_failure(error, self.rank)

    def take_report(self, report: Report) -> None:
        """End the operation on this rank: another one, or this rank's detector, tells why."""
        is_own = report.rank == self.rank
        self._set_failure(report.error if is_own else told_by(report, self.what), report.rank)

    def _set_failure(self, error: CheckpointError, reporter: int) -> None:
        with self._lock:
            if self.waits.failure is None:
                self._reporter = reporter
                self.waits.fail(error)

    # Phases and steps.

    def phase(
        self, phase: Phase, timeout_s: float | None = None, *, total_bytes: int = 0
    ) -> Deadline:
        """Begin a phase on this rank and return its deadline.

        The default timeout is that of the operation's `Timeouts`.
        """
        seconds: float = getattr(self.timeouts, phase) if timeout_s is None else timeout_s
        self.waits.deadline = Deadline(phase, seconds, watch=self)
        self.heartbeats.begin(phase, total_bytes)
        if self._detector is not None:
            self._detector.nudge()
        return self.waits.deadline

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
            self._keys += [self.key("life", self.rank), self.key("failed")]
            self._detector = FailureDetector(self, Siblings(self.group.siblings))

    def gather(self, payload: bytes) -> list[bytes]:
        """Send `payload` to the coordinator; it gets all in order of rank, others an empty list.

        Others return at once. Raises `RankFailedError`, `PhaseTimeoutError` naming the missing.
        """
        self._is_given = False
        step = self._next_step("gather")
        self._is_given = True
        if not self.is_coordinator:
            self._put(f"{step}/{self.rank}", payload)
            return []
        keys = {rank: f"{step}/{rank}" for rank in self._others}
        self._await(keys)
        got = {rank: self._take(key) for rank, key in keys.items()}
        return [got.get(rank, payload) for rank in range(self.world_size)]

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        """Give each rank its own of the coordinator's `payloads` (others pass none)."""
        step = self._next_step("scatter")
        if self.is_coordinator:
            for rank in self._others:
                self._put(f"{step}/{rank}", payloads[rank])
            return payloads[self.rank]
        self._await({COORDINATOR: f"{step}/{self.rank}"})
        return self._take(f"{step}/{self.rank}")

    def broadcast(self, payload: bytes) -> bytes:
        """Return the coordinator's `payload` on every rank (others pass anything)."""
        step = self._next_step("broadcast")
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
        """Tell all ranks how the operation ended; the coordinator's last word, also after errors.

        A rank that fails while the coordinator commits may report it too late: then this counts.
        """
        self._put(self.key("outcome"), outcome)

    def outcome(self) -> bytes:
        """Return what the coordinator announces; on the other ranks.

        Raises as `gather`; unless that is the coordinator's last word, only after a moment in
        which that may still come.
        """
        key = self.key("outcome")
        try:
            self._await({COORDINATOR: key})
        except LostStoreError:
            raise  # it would not answer the next look either
        except CheckpointError as error:
            # Who cancels asks a coordinator that lives, and may be in the middle of the commit.
            is_wish = isinstance(error, SaveCancelledError)
            seconds = self.timeouts.silence if is_wish else _LAST_WORD_S
            if self.is_last_word(error) or not self.waits.within(seconds, [key]):
                raise
        return self._read(key)

    def is_last_word(self, error: CheckpointError) -> bool:
        """Return whether the coordinator failed, and `error`, raised by `outcome`, is how.

        It is not where the coordinator only noticed that others are silent, or where its save was
        cancelled from another thread: it may be committing. Without what this rank was to give it
        has failed in any case.
        """
        if not self._is_given:
            return True
        is_silence = isinstance(error, RankFailedError) and error.is_silent
        is_wish = isinstance(error, SaveCancelledError)
        return self._reporter == COORDINATOR and not is_silence and not is_wish

    def _next_step(self, name: str) -> str:
        if self.waits.failure is not None:
            # Another rank that has not heard of it yet would go on with what this one sends.
            raise self.waits.failure
        self._step += 1
        return self.key(f"{self._step}-{name}")

    def _put(self, key: str, payload: bytes) -> None:
        if self.world_size > 1:
            self._keys.append(key)
            self.waits.set(key, payload)

    def _read(self, key: str) -> bytes:
        data = self.waits.get(key)
        if data is None:
            raise CheckpointError(
                f"{self.what}: a message between ranks is gone ({key}).",
                next_step="Make sure that all ranks call the same operations in the same order.",
            )
        return data

    def _take(self, key: str) -> bytes:
        data = self._read(key)
        self.group.keys.delete(key, self.waits.patience_s())
        return data

    def _await(self, keys: Mapping[int, str]) -> None:
        """Wait until something lies under each key, put there by the rank it is listed for."""

        def late() -> PhaseTimeoutError:
            missing = self.waits.missing(keys)
            known = "; ".join(self.heartbeats.describe(rank) for rank in missing[:8])
            return self.late(missing, "not ended it", f": {known}")

        names = list(keys.values())
        self.waits.until(
            lambda: self.group.keys.has_all(names, self.waits.patience_s()) or None, late
        )

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

    # Leaving.

    def _report(self, error: BaseException) -> bool:
        """Tell all ranks why this one leaves, unless they told it; return as `_leave`."""
        if isinstance(error, LostStoreError) or isinstance(error.__cause__, LostStoreError):
            return False  # there is nowhere to tell it
        self.id = self.id or self._meeting.late_id
        was_answered = self._meeting.is_over and not self.id
        if self.waits.failure is None:
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
        """Tell the ranks that this one failed before it met them.

        As in any operation it waits until they have come: one that went on alone would from
        then on meet them in different operations.
        """
        if is_interrupt:
            # An interrupted process must not wait for ranks that are not there.
            self.waits.deadline = Deadline(self.deadline.phase, _INTERRUPTED_S)
            self.waits.grace_s = 0.0
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
        have_left = not self.is_coordinator or self._await_left(timeout_s)
        self._keys.append(self.key("left", self.rank))
        self.group.keys.set(self._keys[-1], b"left", timeout_s)
        return have_left

    def _await_left(self, timeout_s: float) -> bool:
        keys = {rank: self.key("left", rank) for rank in self._others}
        self._keys += keys.values()
        end_s = time.monotonic() + timeout_s
        while not self.waits.within(self.group.look_s, list(keys.values())):
            if self.waits.failure is not None:
                # Who is gone leaves no word; the others have heard of it by now.
                end_s = min(end_s, time.monotonic() + _LEAVE_FAILED_S)
            if time.monotonic() > end_s:
                missing = name_ranks(self.waits.missing(keys))
                log.warning("After %s nothing was heard of %s.", self.what, missing)
                return False
        return True
