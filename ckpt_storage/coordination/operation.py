"""One operation of all ranks: phases, rounds, heartbeats, and giving up together.

No collective takes part. A collective waits as long as its group says, cannot be woken, names
nobody and leaves its group broken. Here a thread waits for the next release in the key-value store,
so that a failure anywhere reaches a rank that waits, and one that works.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.store.deadline import Deadline

from .conversation import Conversation
from .failures import mismatch_error, ranks_lost_error
from .identity import GivenUp, Identity, find_disagreement
from .keyvalue import COORDINATOR, LostStoreError
from .lane import Lane
from .liveness import FailureDetector, Heartbeats, RankProcess
from .phases import Phases
from .rounds import ByRank, Failed, LateRanksError, NumberGivenUpError, SupersededError

log = logging.getLogger("ckpt_storage")

_T = TypeVar("_T")

_COORDINATOR_GRACE_S = 1.0
_MEMBER_GRACE_S = 3.0
"""How long after its deadline a rank gives up waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """What a rank sends in the first round."""

    identity: Identity
    terms: Mapping[str, str]
    value: Any
    process: RankProcess | None


class Operation:
    """One save, load or export of all ranks, as one rank sees it.

    All ranks call `meet` first, and then the same rounds (`exchange`, `all_gather`, `barrier`,
    `broadcast`, or `gather` and then `broadcast`) in the same order, in one thread; values travel
    pickled, except the coordinator's own. Safe in any thread: `failure`, `failed`, `advanced`,
    `expect`, `progress`.

    `what` names it in messages ("the save to s3://..."). `rank` is the rank in the group,
    `global_rank` the one that messages name. `deadline` is that of this rank's phase. `is_void`:
    the files of all ranks are to be deleted; reset if a rank has not acknowledged the end, as it
    may still write.
    """

    def __init__(self, lane: Lane, what: str, timeouts: Timeouts) -> None:
        self.lane = lane
        self.rank = lane.rank
        self.global_rank = lane.names[lane.rank]
        self.coordinator_rank = lane.names[COORDINATOR]
        self.world_size = lane.world_size
        self.is_coordinator = lane.is_coordinator
        self.timeouts = timeouts
        self.save_id: str | None = None
        self.is_void = False
        self.heartbeats = Heartbeats(self.global_rank)
        self.advanced = self.heartbeats.advanced
        self.expect = self.heartbeats.expect
        self.progress = self.heartbeats.known
        self._phases = Phases(
            what, timeouts, self, rank=self.global_rank, world_size=lane.world_size
        )
        self._phases.grace_s = _COORDINATOR_GRACE_S if lane.is_coordinator else _MEMBER_GRACE_S
        self._talk = Conversation(lane, self._phases)
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
    def id(self) -> str:
        """What this operation is known by among its ranks; empty before they have met."""
        return f"{self.lane.session}/{self.lane.number}" if self._has_met else ""

    @property
    def verdict(self) -> CheckpointError | None:
        """The error that was reported first, the same on all ranks, once the operation is over."""
        return self._talk.verdict

    def identify(self, identity: Identity) -> None:
        """Say what this operation is about, so that a failure from now on fails it and no other."""
        self._talk.identity = identity

    # Failures.

    def failure(self) -> CheckpointError | None:
        """Return why the operation cannot go on; None while it can."""
        return self._talk.failure or self._talk.loss

    def failed(self, error: CheckpointError) -> None:
        """Fail the operation on all ranks; as `Conversation.fail`."""
        self._talk.fail(error)

    def report(self, error: CheckpointError) -> None:
        """Report a failure that this rank does not raise, in place of the one that it does."""
        self._talk.report(error)

    def set_local_failure(self, local_failure: Callable[[], CheckpointError | None]) -> None:
        """Have waits end when `local_failure()` says that this rank cannot go on."""
        self._talk.local_failure = local_failure

    def needs(self, rank: int) -> bool:
        """Return whether this rank still waits for something of another one."""
        return self._talk.needs(rank)

    def ranks_lost(self, ranks: Sequence[int], how: str) -> None:
        """Report ranks of the group that are dead or silent."""
        names = self.lane.names_of(ranks)
        known = {name: self.heartbeats.describe(name) for name in names}
        last = self.progress().get(names[0])
        phase = self.deadline.phase if last is None else last.phase
        if not self._has_met:
            known = dict.fromkeys(names, "its process has ended")
        error = ranks_lost_error(names, self.world_size, how, self.what, phase, known)
        self._talk.lose_ranks(error, with_coordinator=COORDINATOR in ranks)

    def detection_failed(self, error: CheckpointError) -> None:
        """Take note that this rank cannot watch the others any more."""
        self._talk.lose(error)

    # Phases.

    def phase(
        self, phase: Phase, timeout_s: float | None = None, *, total_bytes: int = 0
    ) -> Deadline:
        """Begin a phase on this rank and return its deadline; by default as `timeouts` say."""
        deadline = self._phases.begin(phase, timeout_s)
        self.heartbeats.begin(phase, total_bytes)
        if self._detector is not None:
            self._detector.nudge()
        return deadline

    # Rounds.

    def meet(
        self,
        terms: Mapping[str, str],
        *,
        identity: Identity | None = None,
        value: Any = None,  # noqa: ANN401  # of any kind
        decide: Callable[[list[Any]], Any] = lambda _: None,
    ) -> Any:  # noqa: ANN401  # what `decide` returned
        """Wait for all ranks, check that they mean the same, and `exchange`; the first round.

        `terms` maps the name of all else that ranks must share to its value, as text. A rank that
        finds its number given up for another `identity` tries the next number, within the time it
        has. Raises `RankMismatchError` listing value -> ranks, `RankFailedError` if a rank failed
        before it arrived, `PhaseTimeoutError` naming the ranks that did not arrive.
        """
        talk = self._talk
        identity = talk.identity = identity or talk.identity or Identity(kind=self.what)
        self.phase("plan")
        if self.world_size == 1:
            talk.raise_pending()
            self._has_met = True
            return ByRank.answer_for(COORDINATOR, decide([value]))
        arrival = _Arrival(
            identity=identity, terms=dict(terms), value=value, process=RankProcess.own()
        )
        packed = b"" if self.is_coordinator else pickle.dumps(arrival)
        while True:
            try:
                talk.begin_number()
                self._detect_failures()
                talk.raise_pending()
                if self.is_coordinator:
                    answer, processes = self._lead_first_round(arrival, decide)
                else:
                    talk.arrive(packed)
                    answer, processes = talk.await_release()
            except (NumberGivenUpError, SupersededError):
                continue
            self._has_met = True
            self._talk.describe = lambda name: f": {self.heartbeats.describe(name)}"
            self.lane.met(processes)
            assert self._detector is not None  # noqa: S101  # made with the number
            self._detector.all_have_met()
            return answer

    def _detect_failures(self) -> None:
        """Send heartbeats, and watch the other ranks, from now on."""
        self.heartbeats.number = self.lane.number
        if self._detector is None:
            self._detector = FailureDetector(
                self.lane.keys,
                self,
                self.heartbeats,
                rank=self.rank,
                world_size=self.world_size,
                key_of=self.lane.heartbeat_key,
                processes=self.lane.processes,
                silence_s=self.timeouts.silence,
                name=f"ckpt-storage watch: {self.what}",
            )

    def _lead_first_round(
        self, arrival: _Arrival, decide: Callable[[list[Any]], Any]
    ) -> tuple[Any, Mapping[int, RankProcess] | None]:
        """Collect what the ranks came for; decide for all of them, or give the number up."""
        arrivals: dict[int, _Arrival] = {self.rank: arrival}
        late: CheckpointError | None = None
        try:
            arrivals |= self._talk.collect()
        except LateRanksError as error:
            arrivals |= error.payloads
            late = self._phases.late(self.lane.names_of(error.missing), "not come")
        self._give_up_if_different(arrivals, is_complete=late is None)
        if late is not None:
            raise late
        self._talk.claim()
        # The processes of a session do not change, so they are shared once.
        processes = None if self.lane.has_met else _processes_by_rank(arrivals)
        values = [arrivals[rank].value for rank in range(self.world_size)]
        # Payloads of all ranks are large; no reference to them is kept here.
        del arrivals
        decision = decide(values)
        del values
        return self._talk.answer(_with_processes(decision, processes))  # type: ignore[no-any-return]  # a pair

    def _give_up_if_different(self, arrivals: Mapping[int, _Arrival], *, is_complete: bool) -> None:
        """Give the number up if ranks came for different operations, or disagree on their terms.

        Raises why this rank fails, or `_NumberGivenUpError` if it goes on under the next number.
        """
        names = self.lane.names
        phase = "load" if kind_of(self.what) == "the load" else "plan"
        identities = {names[rank]: one.identity for rank, one in sorted(arrivals.items())}
        given_up = find_disagreement(
            identities, read_earlier=self._read_earlier, phase=phase, is_complete=is_complete
        )
        if given_up is None and is_complete:
            terms = {names[rank]: one.terms for rank, one in sorted(arrivals.items())}
            error = mismatch_error(terms, phase=phase)
            given_up = None if error is None else GivenUp(error=error, identity=None)
        if given_up is None:
            return
        failed = Failed(
            rank=self.global_rank,
            error=given_up.error,
            identity=given_up.identity,
            is_decision=True,
        )
        self._talk.give_up(failed)

    def _read_earlier(self) -> Mapping[int, set[Identity]]:
        """Return what the ranks came for under the numbers that failed since all ranks met."""
        lane, earlier = self.lane, dict[int, set[Identity]]()
        for first_round in lane.failed_rounds():
            ranks = first_round.arrived(self._talk.others, self._phases.patience_s)
            payloads = first_round.payloads(ranks, self._phases.patience_s)
            for rank, packed in zip(ranks, payloads, strict=True):
                identity = pickle.loads(packed).identity  # noqa: S301  # our own ranks
                earlier.setdefault(lane.names[rank], set()).add(identity)
        earlier[self.global_rank] = set(lane.own_identities[:-1])
        return earlier

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
            self._talk.begin_commit()
        values = self.gather(value)
        if not self.is_coordinator:
            return self._talk.await_release()
        decision = decide(values)
        del values
        return self._talk.answer(decision, is_last=is_last)

    def gather(self, value: _T) -> list[_T]:
        """Send `value` to the coordinator; it gets all in order of rank, others an empty list.

        Others return at once. `broadcast` must follow: it ends the round.
        """
        self._talk.raise_failure()
        if self.world_size == 1:
            return [value]
        if not self.is_coordinator:
            self._talk.arrive(pickle.dumps(value))
            return []
        try:
            values: dict[int, _T] = self._talk.collect()
        except LateRanksError as error:
            names = self.lane.names_of(error.missing)
            known = "; ".join(self.heartbeats.describe(name) for name in names[:8])
            raise self._phases.late(names, "not ended it", f": {known}") from None
        self._talk.claim()
        return [value, *(values[rank] for rank in self._talk.others)]

    def broadcast(self, value: _T) -> _T:
        """Return the coordinator's `value` on every rank (others pass anything)."""
        if not self.is_coordinator:
            return self._talk.await_release()  # type: ignore[no-any-return]  # the coordinator's
        return self._talk.answer(value)  # type: ignore[no-any-return]  # its own value

    def all_gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in order of rank, on every rank."""
        return self.exchange(value, list)  # type: ignore[no-any-return]  # what `list` returns

    def barrier(self, *, is_last: bool = False) -> None:
        """Wait until all ranks have come here."""
        self.exchange(None, lambda _: None, is_last=is_last)

    # The end.

    def finish(self, error: BaseException | None = None) -> None:
        """End the operation on this rank; an `error` is reported to all ranks, unless it is known.

        Sets `verdict` and `is_void`. Raises nothing.
        """
        is_acknowledged = False
        try:
            is_acknowledged = self._talk.finish(error)
        except LostStoreError as lost_store:
            log.warning("After %s: %s", self.what, lost_store)
        finally:
            # A rank that has not acknowledged the end may still be writing.
            self.is_void = self.is_void and is_acknowledged
            if self._detector is not None:
                self._detector.stop()
            self._talk.close()
            if self._has_met and self.world_size > 1 and error is None:
                self.lane.delete_old(self._phases.patience_s)


def kind_of(what: str) -> str:
    """Return the kind of an operation: "the save" of "the save to s3://..."."""
    return " ".join(what.split()[:2])


def _processes_by_rank(arrivals: Mapping[int, _Arrival]) -> list[dict[int, RankProcess]]:
    """Return for each rank the processes of its host, by rank."""
    by_host: dict[object, dict[int, RankProcess]] = {}
    for rank, arrival in arrivals.items():
        if arrival.process is not None:
            by_host.setdefault(arrival.process.host, {})[rank] = arrival.process
    return [
        {} if process is None else by_host[process.host]
        for process in (arrivals[rank].process for rank in range(len(arrivals)))
    ]


def _with_processes(
    decision: Any,  # noqa: ANN401  # as `decide` returns
    processes: Sequence[Mapping[int, RankProcess]] | None,
) -> Any:  # noqa: ANN401  # pairs of an answer and processes
    if isinstance(decision, ByRank):
        others: Sequence[Any] = processes or [None] * len(decision.answers)
        return ByRank(list(zip(decision.answers, others, strict=True)))
    if processes is None:
        return decision, None
    return ByRank([(decision, of_rank) for of_rank in processes])
