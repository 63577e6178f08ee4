"""One operation of all ranks: phases, rounds, and giving up together.

No collective takes part. A collective waits as long as its group says, cannot be woken, names
nobody and leaves its group broken. Here a thread waits for the next release in the key-value store,
so that a failure anywhere reaches a rank that waits, and one that works.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.store.deadline import Deadline

from .failures import (
    error_for_peers,
    mismatch_error,
    name_ranks,
    picklable_copy,
    ranks_lost_error,
)
from .identity import GivenUp, Identity, find_disagreement
from .keyvalue import COORDINATOR, LostStoreError
from .lane import Lane
from .listener import KeyListener
from .liveness import FailureDetector, Heartbeats, RankProcess
from .rounds import Failed, Release, Released, Round, Superseded

log = logging.getLogger("ckpt_storage")

_T = TypeVar("_T")

_COORDINATOR_GRACE_S = 1.0
_MEMBER_GRACE_S = 3.0
"""Beyond its deadline: a late rank should name itself first, then the coordinator name it."""

_MIN_PATIENCE_S, _EXTRA_PATIENCE_S = 0.5, 1.0
"""Bounds of how long one request may take before the store counts as lost."""

_REPORT_S = 3.0
"""How long a failing rank tries to report before it raises."""

_INTERRUPTED_S = 1.5
"""How long an interrupted rank that has not met the others tries to report."""

_FINISH_S, _FINISH_FAILED_S = 10.0, 1.0
"""How long the coordinator stays for ranks that have not acknowledged the end.

It may host the store that they read the outcome from.
"""

_LOOK_S = 1.0
"""How often the coordinator looks for arrivals itself: the key that announces them is a hint."""

_SMALL_WORLD = 64
"""Up to so many ranks, a first look costs less than the hint."""

_LOCAL_LOOK_S = 0.2
"""How often a waiting rank looks whether its own worker still lives."""

_LOG_S = 60.0
"""How often a rank that waits for others logs who is missing."""


class UndecidedError(CheckpointError):
    """This rank cannot see what became of a commit that may have begun; the storage can."""


class _NumberGivenUpError(Exception):
    """The number was given up for another operation; the next number may be for this one."""


class _SupersededError(Exception):
    """The session belongs to an earlier incarnation of the job."""


class _LateRanksError(Exception):
    """Some ranks have not arrived by the deadline; `payloads` are those of the others."""

    def __init__(self, missing: Sequence[int], payloads: dict[int, Any]) -> None:
        super().__init__(missing)
        self.missing = missing
        self.payloads = payloads


@dataclass(frozen=True, slots=True)
class ByRank(Generic[_T]):
    """What `decide` returns if each rank gets an answer of its own, in the order of ranks."""

    answers: Sequence[_T]


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
    `global_rank` the one that messages name. `deadline` is that of this rank's phase. `verdict` is
    the error that was reported first, the same on all ranks, once the operation is over. `is_void`:
    the files of all ranks are to be deleted; reset if a rank has not acknowledged the end, as it
    may still write. `local_failure` says why this rank cannot go on by itself: its worker is gone.
    """

    def __init__(self, lane: Lane, what: str, timeouts: Timeouts) -> None:
        self.what = what
        self.lane = lane
        self.rank = lane.rank
        self.global_rank = lane.names[lane.rank]
        self.coordinator_rank = lane.names[COORDINATOR]
        self.world_size = lane.world_size
        self.is_coordinator = lane.is_coordinator
        self.timeouts = timeouts
        self.deadline = Deadline("plan", timeouts.plan, watch=self)
        self.save_id: str | None = None
        self.verdict: CheckpointError | None = None
        self.is_void = False
        self.local_failure: Callable[[], CheckpointError | None] = lambda: None
        self.heartbeats = Heartbeats(self.global_rank)
        self.advanced = self.heartbeats.advanced
        self.expect = self.heartbeats.expect
        self.progress = self.heartbeats.known
        self._identity: Identity | None = None
        self._others = [rank for rank in range(lane.world_size) if rank != lane.rank]
        self._grace_s = _COORDINATOR_GRACE_S if lane.is_coordinator else _MEMBER_GRACE_S
        self._detector: FailureDetector | None = None
        self._listener: KeyListener | None = None
        self._has_met = self._is_complete = self._is_reported = False
        self._logged_s = time.monotonic()
        # The round that comes next, and what is known of it; changed under the condition.
        self._changed = threading.Condition()
        self._round: Round | None = None
        self._round_number = 0
        self._has_arrived = self._has_claimed = self._is_commit = False
        self._release: Release | None = None
        self._has_signal = False
        # Why all ranks raise, and why this rank alone cannot go on.
        self._failure: CheckpointError | None = None
        self._loss: CheckpointError | None = None
        self._pending: CheckpointError | None = None
        self._present_keys: set[str] = set()

    def identify(self, identity: Identity) -> None:
        """Say what this operation is about, so that a failure from now on fails it and no other."""
        self._identity = identity

    @property
    def id(self) -> str:
        """What this operation is known by among its ranks; empty before they have met."""
        return f"{self.lane.session}/{self.lane.number}" if self._has_met else ""

    # Failures.

    def failure(self) -> CheckpointError | None:
        """Return why the operation cannot go on; None while it can."""
        return self._failure or self._loss

    def failed(self, error: CheckpointError) -> None:
        """End the operation on all ranks with `error`, from any thread.

        Without effect once it is over, and once the coordinator commits. Before this rank has a
        number, the error waits until it has.
        """
        with self._changed:
            if self._is_complete or self._failure is not None:
                return
            if self._round is None:
                self._pending = self._pending or error
                return
        if self.world_size == 1:
            self._note_failure(error)
            return
        while True:
            number = self.lane.number
            try:
                self._fail(error)
            except _NumberGivenUpError:
                with self._changed:
                    if self.lane.number != number:
                        continue
                    # The operation is about to take the next number.
                    self._pending = self._pending or error
            except LostStoreError as lost_store:
                self._note_loss(lost_store)
            return

    def _fail(self, error: CheckpointError) -> None:
        """Report a failure in the first round that the coordinator has not claimed.

        Afterwards `_failure` is the error that counts. Without effect in a commit that the
        coordinator has claimed. Raises `_NumberGivenUpError` if the number was given up for another
        operation, `LostStoreError`.
        """
        failed = self._failed_release(error)
        with self._changed:
            number, is_commit = self._round_number, self._is_commit
        while True:
            counts = self.lane.round(number).fail(failed, _REPORT_S)
            if counts is not None:
                self._note_failed(counts, number, own=error if counts == failed else None)
                return
            if is_commit:
                return
            if self.is_coordinator:
                # This rank has claimed the round, and writes the failure when it raises it.
                self._note_failure(error)
                return
            number, is_commit = number + 1, False

    def _failed_release(self, error: CheckpointError) -> Failed:
        error.rank = self.global_rank if error.rank is None else error.rank
        error.phase = error.phase or self.deadline.phase
        return Failed(
            rank=self.global_rank,
            error=picklable_copy(error),
            identity=self._identity,
            is_decision=self._has_claimed and error.phase in {"plan", "commit"},
        )

    def _note_failed(self, failed: Failed, number: int, own: CheckpointError | None = None) -> None:
        """Take note of the failure that ended round `number`; `own` if this rank reported it."""
        own_identity = self._identity
        if number == 1 and failed.identity is not None and own_identity is not None:
            if not failed.identity.agrees_with(own_identity):
                raise _NumberGivenUpError
        with self._changed:
            self.verdict = self.verdict or failed.error
        self._note_failure(own or error_for_peers(failed, self.what))

    def _note_failure(self, error: CheckpointError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _note_loss(self, error: CheckpointError) -> None:
        with self._changed:
            self._loss = self._loss or error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        failure = self._failure or self._loss or self.local_failure()
        if failure is not None:
            raise failure

    def _patience_s(self) -> float:
        """Return how long one request may take before the store counts as lost."""
        left_s = self.deadline.remaining_s() + _EXTRA_PATIENCE_S
        return max(_MIN_PATIENCE_S, min(self.timeouts.silence, left_s))

    def _end_s(self) -> float:
        return self.deadline.at_monotonic_s + self._grace_s

    # What the failure detector asks and reports.

    def needs(self, rank: int) -> bool:
        """Return whether this rank still waits for something of another one."""
        with self._changed:
            current, is_over = self._round, self._is_complete
        if is_over or current is None:
            return False
        if rank == COORDINATOR:
            return current.read_release(self._patience_s()) is None
        return not current.arrived([rank], self._patience_s())

    def ranks_lost(self, ranks: Sequence[int], how: str) -> None:
        """Report ranks of the group that are dead or silent."""
        names = [self.lane.names[rank] for rank in ranks]
        known = {name: self.heartbeats.describe(name) for name in names}
        last = self.progress().get(names[0])
        phase = self.deadline.phase if last is None else last.phase
        if not self._has_met:
            known = dict.fromkeys(names, "its process has ended")
        error = ranks_lost_error(names, self.world_size, how, self.what, phase, known)
        try:
            self._fail(error)
        except _NumberGivenUpError:
            return
        except LostStoreError:
            self._note_loss(error)
        if COORDINATOR in ranks:
            # It may have claimed a commit, and then nobody reports the outcome.
            self._note_loss(error)

    def detection_failed(self, error: CheckpointError) -> None:
        """Take note that this rank cannot watch the others any more."""
        self._note_loss(error)

    # Phases.

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

    # The first round.

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
        identity = self._identity = identity or self._identity or Identity(kind=self.what)
        self.phase("plan")
        if self.world_size == 1:
            with self._changed:
                self._round_number = 1
            self._raise_pending()
            self._has_met = True
            return _answer_for(COORDINATOR, decide([value]))
        arrival = _Arrival(
            identity=identity, terms=dict(terms), value=value, process=RankProcess.own()
        )
        packed = b"" if self.is_coordinator else pickle.dumps(arrival)
        while True:
            try:
                self._begin_number()
                self._raise_pending()
                if self.is_coordinator:
                    answer, processes = self._lead_first_round(arrival, decide)
                else:
                    self._arrive(packed)
                    answer, processes = self._await_release()
            except (_NumberGivenUpError, _SupersededError):
                continue
            self._has_met = True
            self.lane.met(processes)
            assert self._detector is not None  # noqa: S101  # made with the number
            self._detector.all_have_met()
            return answer

    def _raise_pending(self) -> None:
        if self._pending is not None:
            raise self._pending

    def _begin_number(self) -> None:
        """Take the next number of the lane, and watch the other ranks under it."""
        lane = self.lane
        with self._changed:
            self._round = None
        if self._listener is None:
            name = f"ckpt-storage listen: {self.what}"
            self._listener = KeyListener(self._on_key, lane.keys, name=name)
        lane.join(self._await_key, self._patience_s())
        lane.report_earlier(self._patience_s())
        with self._changed:
            lane.number += 1
            if self._identity is not None:
                lane.own_identities.append(self._identity)
            self.heartbeats.number = lane.number
            self._enter_round(1)
        if lane.is_superseded(self._patience_s()):
            # Also after the requests above: rank 0 may have made a session meanwhile.
            raise _SupersededError
        if self._detector is None:
            self._detector = FailureDetector(
                lane.keys,
                self,
                self.heartbeats,
                rank=self.rank,
                world_size=self.world_size,
                key_of=lane.heartbeat_key,
                processes=lane.processes,
                silence_s=self.timeouts.silence,
                name=f"ckpt-storage watch: {self.what}",
            )

    def _await_key(self, key: str) -> None:
        """Wait for a key that the coordinator writes before this rank has a number."""
        assert self._listener is not None  # noqa: S101  # made before
        self._listener.listen(key)
        if not self._wait_for(lambda: key in self._present_keys, self._end_s()):
            self._raise_failure()
            raise self._late([self.coordinator_rank], "not come")

    def _lead_first_round(
        self, arrival: _Arrival, decide: Callable[[list[Any]], Any]
    ) -> tuple[Any, Mapping[int, RankProcess] | None]:
        """Collect what the ranks came for; decide for all of them, or give the number up."""
        arrivals: dict[int, _Arrival] = {self.rank: arrival}
        late: CheckpointError | None = None
        try:
            arrivals |= self._collect()
        except _LateRanksError as error:
            arrivals |= error.payloads
            late = self._late(self._names(error.missing), "not come")
        self._give_up_if_different(arrivals, is_complete=late is None)
        if late is not None:
            raise late
        self._claim()
        # The processes of a session do not change, so they are shared once.
        processes = None if self.lane.has_met else _processes_by_rank(arrivals)
        values = [arrivals[rank].value for rank in range(self.world_size)]
        # Payloads of all ranks are large; no reference to them is kept here.
        del arrivals
        decision = decide(values)
        del values
        return self._answer(_with_processes(decision, processes))  # type: ignore[no-any-return]  # a pair

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
        counts = self._current().fail(failed, self._patience_s())
        assert counts is not None  # noqa: S101  # only this rank claims
        self._note_failed(counts, 1, own=given_up.error if counts == failed else None)
        self._raise_failure()

    def _read_earlier(self) -> Mapping[int, set[Identity]]:
        """Return what the ranks came for under the numbers that failed since all ranks met."""
        lane, earlier = self.lane, dict[int, set[Identity]]()
        for first_round in lane.failed_rounds():
            ranks = first_round.arrived(self._others, self._patience_s())
            payloads = first_round.payloads(ranks, self._patience_s())
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
        with self._changed:
            self._is_commit = is_commit
        values = self.gather(value)
        if not self.is_coordinator:
            return self._await_release()
        decision = decide(values)
        del values
        return self._answer(decision, is_last=is_last)

    def gather(self, value: _T) -> list[_T]:
        """Send `value` to the coordinator; it gets all in order of rank, others an empty list.

        Others return at once. `broadcast` must follow: it ends the round.
        """
        self._raise_failure()
        if self.world_size == 1:
            return [value]
        if not self.is_coordinator:
            self._arrive(pickle.dumps(value))
            return []
        try:
            values: dict[int, _T] = self._collect()
        except _LateRanksError as error:
            names = self._names(error.missing)
            known = "; ".join(self.heartbeats.describe(name) for name in names[:8])
            raise self._late(names, "not ended it", f": {known}") from None
        self._claim()
        return [value, *(values[rank] for rank in self._others)]

    def broadcast(self, value: _T) -> _T:
        """Return the coordinator's `value` on every rank (others pass anything)."""
        if not self.is_coordinator:
            return self._await_release()  # type: ignore[no-any-return]  # the coordinator's
        return self._answer(value)  # type: ignore[no-any-return]  # its own value

    def all_gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in order of rank, on every rank."""
        return self.exchange(value, list)  # type: ignore[no-any-return]  # what `list` returns

    def barrier(self, *, is_last: bool = False) -> None:
        """Wait until all ranks have come here."""
        self.exchange(None, lambda _: None, is_last=is_last)

    # Any rank in a round.

    def _enter_round(self, number: int) -> None:
        with self._changed:
            current = self._round = self.lane.round(number)
            self._round_number = number
            self._has_arrived = self._has_claimed = self._is_commit = self._has_signal = False
            self._release = None
        assert self._listener is not None  # noqa: S101  # made with the number
        if self.is_coordinator:
            self.lane.own(*current.shared_keys)
        self._listener.listen(current.all_key if self.is_coordinator else current.release_key)

    def _end_round(self, *, is_last: bool) -> None:
        if is_last:
            self._is_complete = True
        else:
            self._enter_round(self._round_number + 1)

    def _current(self) -> Round:
        assert self._round is not None  # noqa: S101  # `meet` comes first
        return self._round

    def _on_key(self, key: str) -> None:
        """Note that a key exists that this rank waits for; called in the listener's thread."""
        with self._changed:
            current, number = self._round, self._round_number
            if current is None or key not in {current.release_key, current.all_key}:
                self._present_keys.add(key)
                self._changed.notify_all()
                return
        try:
            is_release = key == current.release_key
            read = current.read_release if is_release else current.failure
            release: Release | None = read(self._patience_s())
        except LostStoreError as error:
            self._note_loss(error)
            return
        if isinstance(release, Failed) and number > 1:
            self._note_failed(release, number)
        with self._changed:
            if self._round is current:
                self._release, self._has_signal = release, True
            self._changed.notify_all()

    def _wait_for(self, value_of: Callable[[], _T], end_s: float) -> _T | None:
        """Wait until `value_of()` is true and return it; None at `end_s`, or after a failure."""
        with self._changed:
            while not (value := value_of()):
                left_s = end_s - time.monotonic()
                if left_s <= 0 or self._failure or self._loss or self.local_failure():
                    return None
                self._changed.wait(min(left_s, _LOCAL_LOOK_S))
            return value

    # What a member does in a round.

    def _arrive(self, packed: bytes) -> None:
        current = self._current()
        with self._changed:
            self._has_arrived = True
        self.lane.own(current.arrival_key)
        current.arrive(packed, self._patience_s())

    def _await_release(self) -> Any:  # noqa: ANN401  # the coordinator's answer
        """Return the coordinator's answer, and enter the next round."""
        if self.world_size == 1:
            return None
        is_extended = False
        while (release := self._wait_for(lambda: self._release, self._log_end_s())) is None:
            if self._failure is not None:
                raise self._failure
            is_commit = self._is_commit and self._has_arrived
            cause = self._loss or self.local_failure()
            if cause is None and time.monotonic() < self._end_s():
                self._log_late([self.coordinator_rank])
                continue
            if cause is None and not is_extended and not is_commit and self._is_claimed():
                # All have arrived, and the coordinator has a phase's time to decide.
                is_extended = True
                self.phase(self.deadline.phase)
                continue
            cause = cause or self._late([self.coordinator_rank], "not answered")
            release = self._give_up_waiting(cause, is_commit=is_commit)
            break
        return self._opened(release)

    def _give_up_waiting(self, cause: CheckpointError, *, is_commit: bool) -> Release:
        """Fail for `cause`; return a release that was written meanwhile.

        In a commit that the coordinator has claimed, or whose verdict cannot be read, raises
        `UndecidedError`.
        """
        try:
            if not isinstance(cause, LostStoreError):
                self._fail(cause)
            if self._failure is not None:
                raise self._failure
            release = self._current().read_release(self._patience_s()) if is_commit else None
        except LostStoreError as error:
            release, cause = None, error
        if release is not None:
            return release
        if not is_commit:
            raise cause
        raise UndecidedError(str(cause)) from cause

    def _is_claimed(self) -> bool:
        try:
            return self._current().is_claimed(self._patience_s())
        except LostStoreError as error:
            self._note_loss(error)
            return False

    def _opened(self, release: Release) -> Any:  # noqa: ANN401  # the coordinator's answer
        """Return the answer of a release and enter the next round. Raises what it reports."""
        if isinstance(release, Superseded):
            raise _SupersededError
        if isinstance(release, Failed):
            if self._round_number == 1 and self.lane.is_superseded(self._patience_s()):
                raise _SupersededError
            self._note_failed(release, self._round_number)
            self._raise_failure()
        assert isinstance(release, Released)  # noqa: S101  # all else has been raised
        answer = release.answer
        if release.is_by_rank:
            packed = self._current().take_answer(self._patience_s())
            if packed is None:
                raise CheckpointError(
                    f"{self.what}: the coordinator's answer to rank {self.global_rank} is gone.",
                    next_step="Make sure that all ranks call the same operations in one order.",
                )
            answer = pickle.loads(packed)  # noqa: S301  # our own ranks
        self._end_round(is_last=release.is_last)
        return answer

    # What the coordinator does in a round.

    def _collect(self) -> dict[int, Any]:
        """Return the payloads of the other ranks. Raises `_LateRanksError` with those it has."""
        current = self._current()
        keys = [current.arrival_key_of(rank) for rank in self._others]
        look_s = max(_LOOK_S, self.world_size / 1_000)
        is_due = self.world_size <= _SMALL_WORLD
        while True:
            if not is_due:
                end_s = min(self._end_s(), time.monotonic() + look_s)
                self._wait_for(lambda: self._has_signal, end_s)
                with self._changed:
                    self._has_signal = False
                # The key that announces a failure is a hint, too.
                failed = current.failure(self._patience_s())
                if failed is not None:
                    self._note_failed(failed, self._round_number)
            is_due = False
            self._raise_failure()
            if self.lane.keys.has_all(keys, self._patience_s()):
                return self._payloads(self._others)
            is_late = time.monotonic() > self._end_s()
            if not is_late and not self._is_log_due():
                continue
            arrived = current.arrived(self._others, self._patience_s())
            missing = [rank for rank in self._others if rank not in set(arrived)]
            if is_late:
                raise _LateRanksError(missing, self._payloads(arrived))
            self._log_late(self._names(missing))

    def _payloads(self, ranks: Sequence[int]) -> dict[int, Any]:
        packed = self._current().payloads(ranks, self._patience_s())
        return {
            rank: pickle.loads(payload)  # noqa: S301  # our own ranks
            for rank, payload in zip(ranks, packed, strict=True)
        }

    def _claim(self) -> None:
        """Take the decision of this round. Raises why a rank failed before."""
        failed = self._current().claim(self._patience_s())
        if failed is not None:
            self._note_failed(failed, self._round_number)
            self._raise_failure()
        with self._changed:
            self._has_claimed = True

    def _answer(self, decision: Any, *, is_last: bool = False) -> Any:  # noqa: ANN401  # as `decide` returns
        """Release the round with the coordinator's decision; return its own answer."""
        own = _answer_for(COORDINATOR, decision)
        if self.world_size == 1:
            return own
        has_arrivals = self._has_claimed
        if not has_arrivals:
            self._claim()
        if not self._is_commit:
            self._raise_failure()
        answers: dict[int, bytes] = {}
        if isinstance(decision, ByRank):
            answers = {rank: pickle.dumps(decision.answers[rank]) for rank in self._others}
            release = Released(is_by_rank=True, is_last=is_last)
        else:
            release = Released(answer=decision, is_last=is_last)
        try:
            self._current().release(release, self._patience_s(), answers)
            if not has_arrivals:
                # No member arrives in such a round, and this rank's listener waits for that.
                self.lane.keys.set(self._current().all_key, b"", self._patience_s())
        except LostStoreError as error:
            if not self._is_commit:
                raise
            # The outcome stands; ranks that do not learn it ask the storage.
            log.warning("Reporting the outcome of %s failed: %s", self.what, error)
            self.lane.remember(release, self._round_number)
        self._end_round(is_last=is_last)
        return own

    # What is said of ranks that are not there.

    def _names(self, ranks: Sequence[int]) -> list[int]:
        return [self.lane.names[rank] for rank in ranks]

    def _late(self, names: Sequence[int], did_not: str, known: str = "") -> PhaseTimeoutError:
        """Return the error that says what global ranks have not done by the deadline."""
        deadline, verb = self.deadline, "has" if len(names) == 1 else "have"
        return PhaseTimeoutError(
            f"{name_ranks(names)} of {self.world_size} {verb} {did_not} within "
            f"{deadline.timeout_s:g} s in the {deadline.phase} phase of {self.what}{known}.",
            timeout_s=deadline.timeout_s,
            rank=names[0] if names else None,
            phase=deadline.phase,
            next_step="Look at what those ranks are doing; if they are only slow, raise "
            f"Timeouts.{deadline.phase}.",
        )

    def _log_interval_s(self) -> float:
        """Once a minute, and at least four times before the deadline."""
        return min(_LOG_S, self.deadline.timeout_s / 5)

    def _is_log_due(self) -> bool:
        return time.monotonic() >= self._logged_s + self._log_interval_s()

    def _log_end_s(self) -> float:
        return min(self._end_s(), max(time.monotonic(), self._logged_s) + self._log_interval_s())

    def _log_late(self, names: Sequence[int]) -> None:
        """Log which ranks this one waits for."""
        if not self._is_log_due():
            return
        self._logged_s = time.monotonic()
        log.warning(
            "%s of %d: not arrived in %s yet; rank %d waits, %.0f s are left.",
            *(name_ranks(names), self.world_size, self.what, self.global_rank),
            self.deadline.remaining_s(),
        )

    # The end.

    def finish(self, error: BaseException | None = None) -> None:
        """End the operation on this rank; an `error` is reported to all ranks, unless it is known.

        Sets `verdict` and `is_void`. Raises nothing.
        """
        is_acknowledged = self.world_size == 1
        try:
            if error is not None:
                self._report(error)
            elif not self._is_complete:
                self._close_round()
            self._is_complete = True
            has_store = not isinstance(error or self._loss, LostStoreError)
            if self.world_size > 1 and self._round is not None and has_store:
                is_acknowledged = self._acknowledge(is_failed=error is not None)
        except LostStoreError as lost_store:
            log.warning("After %s: %s", self.what, lost_store)
        finally:
            self._is_complete = True
            # A rank that has not acknowledged the end may still be writing.
            self.is_void = self.is_void and is_acknowledged
            with self._changed:
                self._changed.notify_all()
            if self._detector is not None:
                self._detector.stop()
            if self._listener is not None:
                self._listener.close()
            if self._has_met and self.world_size > 1 and error is None:
                self.lane.delete_old(self._patience_s())

    def _close_round(self) -> None:
        """Release the round that nobody will use: threads of all ranks wait for it."""
        if self.is_coordinator and self._round is not None:
            self._round.release(Released(is_last=True), self._patience_s())
            self.lane.keys.set(self._round.all_key, b"", self._patience_s())

    def report(self, error: CheckpointError) -> None:
        """Report a failure that this rank does not raise, in place of the one that it does."""
        with contextlib.suppress(LostStoreError):
            self._report(error)

    def _report(self, error: BaseException) -> None:
        """Report why this rank raises, unless all ranks have failed for another reason."""
        if self._is_reported:
            return
        self._is_reported = True
        if isinstance(error, LostStoreError):
            # The failure detector may learn in a moment that the host of the store has ended.
            self._wait_for(lambda: False, time.monotonic() + _LOCAL_LOOK_S)
        reported: CheckpointError = (
            error if isinstance(error, CheckpointError) else picklable_copy(error)
        )
        failed = self._failed_release(reported)
        if self.world_size == 1 or self._is_complete:
            self.verdict = self.verdict or failed.error
            return
        number = self._round_number
        try:
            if self._loss is not None and self._failure is None:
                # There is nobody to report to, or no way.
                self.lane.remember(failed, number if self._has_claimed else 0)
            elif self._has_claimed:
                # An error of this rank, or one that it noted while it decided.
                self.verdict = self.verdict or failed.error
                self._current().release(failed, _REPORT_S)
            elif self._failure is None:
                self._report_open(reported, is_interrupt=not isinstance(error, Exception))
        except PhaseTimeoutError as late:
            log.debug("No rank learned why rank %d failed: %s", self.global_rank, late)
        except LostStoreError:
            self.lane.remember(failed, number if self._has_claimed else 0)
            raise
        finally:
            self.lane.ended(failed)

    def _report_open(self, error: CheckpointError, *, is_interrupt: bool) -> None:
        """Report a failure in the first round that is open, of the number that the ranks use."""
        has_number = self._round is not None
        if not has_number:
            if is_interrupt:
                # An interrupted process must not wait for ranks that are not there.
                self.deadline = Deadline(self.deadline.phase, _INTERRUPTED_S)
                self._grace_s = 0.0
            log.error("Rank %d failed, and reports it: %s", self.global_rank, error)
        while True:
            try:
                if not has_number:
                    self._begin_number()
                self._fail(error)
            except (_NumberGivenUpError, _SupersededError):
                has_number = False
            else:
                return

    def _acknowledge(self, *, is_failed: bool) -> bool:
        """Count this rank as done; return, on the coordinator, whether all ranks are."""
        keys, patience_s = self.lane.keys, self._patience_s()
        prefix = f"{self.lane.session}/{self.lane.number}"
        count_key, all_key = f"{prefix}/done", f"{prefix}/all_done"
        if keys.count(count_key, patience_s) == self.world_size:
            keys.set(all_key, b"", patience_s)
        if not self.is_coordinator:
            return True
        self.lane.own(count_key, all_key)
        if is_failed:
            self.lane.own(*self.lane.round(self._round_number + 1).shared_keys)
        limit_s = min(_FINISH_S, self.deadline.remaining_s() + _MEMBER_GRACE_S)
        end_s = time.monotonic() + (_FINISH_FAILED_S if is_failed else limit_s)
        assert self._listener is not None  # noqa: S101  # made with the number
        self._listener.listen(all_key)
        with self._changed:
            while all_key not in self._present_keys and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            is_acknowledged = all_key in self._present_keys
        if not is_acknowledged:
            log.warning("After %s some ranks have not acknowledged the end.", self.what)
        return is_acknowledged


def kind_of(what: str) -> str:
    """Return the kind of an operation: "the save" of "the save to s3://..."."""
    return " ".join(what.split()[:2])


def _answer_for(rank: int, decision: Any) -> Any:  # noqa: ANN401  # as `decide` returns
    return decision.answers[rank] if isinstance(decision, ByRank) else decision


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
        others = processes or [None] * len(decision.answers)
        return ByRank(list(zip(decision.answers, others, strict=True)))
    if processes is None:
        return decision, None
    return ByRank([(decision, of_rank) for of_rank in processes])
