"""One operation of all ranks: phases, rounds, heartbeats, and a failure that all ranks share.

No collective takes part. A collective waits as long as its group's timeout, cannot be cancelled,
names no rank and leaves its group broken. Here a thread waits for the next release in the key-value
store, so that a failure anywhere reaches a rank that waits, and a rank that works.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ckpt_storage.errors import CheckpointError
from ckpt_storage.observe.outcome import Outcome, kind_of
from ckpt_storage.observe.report import report
from ckpt_storage.observe.stats import OperationStats, RankTiming
from ckpt_storage.observe.timeline import Timeline
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.store.deadline import Deadline

from .coordinator import Coordinator
from .failure_detector import FailureDetector
from .failures import ranks_lost_error
from .heartbeats import Heartbeats
from .identity import Identity
from .keyvalue import COORDINATOR, LostStoreError
from .lane import Lane
from .member import Member
from .operation_rounds import OperationRounds
from .phases import Phases
from .processes import RankProcess
from .rounds import Arrival, ByRank, NumberAbandonedError

log = logging.getLogger("ckpt_storage")

_T = TypeVar("_T")

_COORDINATOR_GRACE_S = 1.0
_MEMBER_GRACE_S = 3.0
"""How long after its deadline a rank gives up waiting."""


class Operation:
    """One save, load or export of all ranks, as one rank sees it.

    All ranks call `meet` first, and then the same rounds (`exchange`, `all_gather`, `barrier`,
    `broadcast`, or `gather` and then `broadcast`) in the same order, in one thread; values are
    pickled, except the coordinator's own. Safe in any thread: `failure`, `failed`, `advanced`,
    `expect`, `retried`, `progress`.

    `what` names it in messages ("the save to s3://..."). `rank` is the rank in the group,
    `global_rank` the rank that messages name. `deadline` is that of this rank's phase.
    `must_discard`: the files of all ranks are to be deleted; reset if a rank has not acknowledged
    the end, as it may still write. `stats` are set by the code in the block; after an error of
    `begins_anew_after` the caller runs another operation in place of this one.
    """

    def __init__(self, lane: Lane, what: str, timeouts: Timeouts) -> None:
        self.lane = lane
        self.rank = lane.rank
        self.global_rank = lane.global_ranks[lane.rank]
        self.coordinator_rank = lane.global_ranks[COORDINATOR]
        self.world_size = lane.world_size
        self.is_coordinator = lane.is_coordinator
        self.timeouts = timeouts
        self.save_id: str | None = None
        self.must_discard = False
        self.timeline = Timeline()
        self.stats: OperationStats | None = None
        self.begins_anew_after: tuple[type[CheckpointError], ...] = ()
        self._timing: RankTiming | None = None
        self.heartbeats = Heartbeats(self.global_rank)
        self.advanced = self.heartbeats.advanced
        self.expect = self.heartbeats.expect
        self.retried = self.heartbeats.retried
        self.progress = self.heartbeats.known
        self._phases = Phases(
            what, timeouts, self, rank=self.global_rank, world_size=lane.world_size
        )
        self._phases.grace_s = _COORDINATOR_GRACE_S if lane.is_coordinator else _MEMBER_GRACE_S
        self._rounds = OperationRounds(lane, self._phases)
        self.failed = self._rounds.fail
        self.report = self._rounds.report
        self._role: Coordinator | Member = (
            Coordinator(self._rounds, self.heartbeats.describe)
            if lane.is_coordinator
            else Member(self._rounds, self.heartbeats.describe)
        )
        self._detector: FailureDetector | None = None
        self._has_met = False

    @property
    def what(self) -> str:
        """What messages call the operation."""
        return self._phases.what

    @what.setter
    def what(self, what: str) -> None:
        self._phases.what = what

    @property
    def deadline(self) -> Deadline:
        """The deadline of the present phase."""
        return self._phases.deadline

    @property
    def verdict(self) -> CheckpointError | None:
        """The error that was reported first, the same on all ranks, once the operation is over."""
        return self._rounds.verdict

    def identify(self, identity: Identity) -> None:
        """Set the identity: a failure from now on fails this operation and no other."""
        self._rounds.identity = identity

    # Failures.

    def failure(self) -> CheckpointError | None:
        """Return why the operation cannot go on; None while it can."""
        return self._rounds.failure or self._rounds.loss

    def set_local_failure(self, local_failure: Callable[[], CheckpointError | None]) -> None:
        """Let waits end when `local_failure()` returns why this rank cannot go on."""
        self._rounds.local_failure = local_failure

    def _report_lost_ranks(self, ranks: Sequence[int], how: str) -> None:
        """Fail the operation if it needs ranks that are dead or silent."""
        ranks = [rank for rank in ranks if self._rounds.needs(rank)]
        if not ranks:
            return
        lost = self.lane.global_ranks_of(ranks)
        known = {rank: self.heartbeats.describe(rank) for rank in lost}
        last = self.progress().get(lost[0])
        phase = self.deadline.phase if last is None else last.phase
        if how == "died" and not self._has_met:
            known = dict.fromkeys(lost, "its process has ended")
        error = ranks_lost_error(lost, self.world_size, how, self.what, phase, known)
        self._rounds.lose_ranks(error, with_coordinator=COORDINATOR in ranks)

    # Phases.

    def phase(
        self, phase: Phase, timeout_s: float | None = None, *, total_bytes: int = 0
    ) -> Deadline:
        """Begin a phase on this rank and return its deadline; by default as `timeouts` say."""
        deadline = self._phases.begin(phase, timeout_s)
        self.timeline.begin(phase)
        self.heartbeats.begin(phase, total_bytes)
        if self._detector is not None:
            self._detector.nudge()
        return deadline

    # Rounds.

    def meet(
        self,
        terms: Mapping[str, str],
        *,
        value: Any = None,  # noqa: ANN401  # of any kind
        decide: Callable[[list[Any]], Any] = lambda _: None,
    ) -> Any:  # noqa: ANN401  # what `decide` returned
        """Wait for all ranks, compare their operations, and `exchange`; the first round.

        `terms` are further values that ranks must share: name to value, as text. A rank that
        finds its number abandoned for another identity tries the next number, if it has time
        left. Raises `RankMismatchError` listing value -> ranks, `RankFailedError` if a rank failed
        before it arrived, `PhaseTimeoutError` naming the ranks that did not arrive.
        """
        rounds = self._rounds
        rounds.identity = rounds.identity or Identity(kind=self.what)
        self.phase("plan")
        if self.world_size == 1:
            rounds.raise_failure()
            self._has_met = True
            return ByRank.answer_for(COORDINATOR, decide([value]))
        arrival = Arrival(
            identity=rounds.identity, terms=dict(terms), value=value, process=RankProcess.own()
        )
        try:
            while not self._has_met:
                with contextlib.suppress(NumberAbandonedError):
                    rounds.begin_number()
                    self._detect_failures()
                    rounds.raise_failure()
                    answer = self._role.convene(arrival, decide)
                    self._has_met = True
        except CheckpointError as error:
            if rounds.passed is not None:
                error.add_note(f"The number before was abandoned: {rounds.passed}")
            raise
        self.lane.note_met(self._phases.patience_s)
        assert self._detector is not None  # noqa: S101  # made with the number
        self._detector.note_met()
        return answer

    def _detect_failures(self) -> None:
        """Send heartbeats, and watch the other ranks, from now on."""
        self.heartbeats.number = self.lane.number
        if self._detector is None:
            self._detector = FailureDetector(
                self.lane,
                self.heartbeats,
                on_lost=self._report_lost_ranks,
                on_error=self._rounds.lose,
                silence_s=self.timeouts.silence,
                name=f"ckpt-storage watch: {self.what}",
            )

    # Later rounds.

    def exchange(
        self,
        value: _T,
        decide: Callable[[list[_T]], Any],
        *,
        is_commit: bool = False,
        is_last: bool = False,
    ) -> Any:  # noqa: ANN401  # what `decide` returned
        """Send `value` to the coordinator, which answers all ranks with `decide(values)`.

        `values` are in the order of ranks. An answer of `ByRank` gives each rank its own. With
        `is_commit`, a rank that has sent its value and does not learn the outcome raises
        `UndecidedError`, and a cancel has no effect once the coordinator decides. `is_last`: no
        further round follows. Raises why the operation failed, `PhaseTimeoutError` naming ranks.
        """
        if is_commit:
            with self._rounds.changed:
                # It cannot be failed once the coordinator has claimed it.
                self._rounds.is_commit = True
        values = self.gather(value)
        decision = decide(values) if self.is_coordinator else None
        del values
        return self._role.answer(decision, is_last=is_last)

    def gather(self, value: _T) -> list[_T]:
        """Send `value` to the coordinator; it gets all in order of rank, others an empty list.

        Others return at once. `broadcast` must follow: it ends the round.
        """
        self._rounds.raise_failure()
        return self._role.gather(value)

    def broadcast(self, value: _T) -> _T:
        """Return the coordinator's `value` on every rank (others pass anything)."""
        return self._role.answer(value)  # type: ignore[no-any-return]  # the coordinator's

    def all_gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in order of rank, on every rank."""
        return self.exchange(value, list)  # type: ignore[no-any-return]  # what `list` returns

    def barrier(self, *, is_last: bool = False) -> None:
        """Wait until all ranks have called this."""
        self.exchange(None, lambda _: None, is_last=is_last)

    # The end.

    def timing(self) -> RankTiming:
        """Return the share of this rank so far; called once it has moved its bytes."""
        own = self.heartbeats.own()
        self._timing = RankTiming(
            rank=self.global_rank,
            phase_s=self.timeline.phase_s(),
            done_bytes=own.done_bytes,
            retry_count=own.retry_count,
        )
        return self._timing

    def stats_of(self, timings: Sequence[RankTiming]) -> OperationStats:
        """Return the statistics of all ranks, whose `timings` they sent; coordinator only."""
        return OperationStats.of(timings, self.timeline.phase_s())

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Log and count how the operation ends, which the block runs."""
        try:
            yield
        except BaseException as error:
            self._report_end(error)
            raise
        self._report_end(None)

    def _report_end(self, error: BaseException | None) -> None:
        self.timeline.end()
        kind = kind_of(self.what)
        if kind is None:
            return
        identity, own = self._rounds.identity, self._timing or self.timing()
        report(
            Outcome(
                kind=kind,
                url=self.what.split(" ", 3)[-1],
                step=None if identity is None else identity.step,
                save_id=self.save_id,
                world_size=self.world_size,
                is_coordinator=self.is_coordinator,
                coordinator_rank=self.coordinator_rank,
                timeline=self.timeline,
                own=replace(own, phase_s=self.timeline.phase_s()),
                stats=self.stats,
                error=error,
                is_superseded=isinstance(error, self.begins_anew_after),
            )
        )

    def finish(self, error: BaseException | None = None) -> None:
        """End the operation on this rank; an `error` is reported to all ranks, unless it is known.

        Sets `verdict` and `must_discard`. Raises nothing.
        """
        is_acknowledged = False
        try:
            is_acknowledged = self._rounds.finish(error)
        except LostStoreError as lost_store:
            log.warning("After %s: %s", self.what, lost_store)
        finally:
            # A rank that has not acknowledged the end may still be writing.
            self.must_discard = self.must_discard and is_acknowledged
            if self._detector is not None:
                self._detector.stop()
            self._rounds.close()
            is_lost = isinstance(self._rounds.loss or error, LostStoreError)
            is_interrupt = error is not None and not isinstance(error, Exception)
            if self._has_met and self.world_size > 1 and not (is_lost or is_interrupt):
                self.lane.delete_old(self._phases.patience_s)
