"""The rounds of one operation on one rank: the present round, and how the operation fails and ends.

A rank fails an operation by taking the verdict of a round (see `rounds`). If the coordinator has
claimed that round, the failure goes to the next round; a commit that the coordinator has claimed
cannot fail any more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError
from ckpt_storage.store.deadline import Deadline

from .failures import error_for_peers, picklable_copy
from .identity import Identity
from .keyvalue import COORDINATOR, KeyListener, LostStoreError
from .lane import Lane
from .phases import Phases
from .rounds import (
    CLAIMED,
    Failed,
    NumberAbandonedError,
    Release,
    Released,
    Round,
)

log = logging.getLogger("ckpt_storage")

_T = TypeVar("_T")

_REPORT_S = 3.0
"""How long a failing rank tries to report before it raises."""

_INTERRUPTED_S = 1.5
"""How long an interrupted rank that has not met the others tries to report."""

_MIN_POLL_S, _MAX_POLL_S = 0.001, 0.1
"""The shortest and the longest pause of `OperationRounds.poll`."""

_LOCAL_LOOK_S = 0.2
"""How often a waiting rank checks whether its own worker process is alive."""

_FINISH_S, _FINISH_EXTRA_S, _FINISH_FAILED_S = 10.0, 3.0, 1.0
"""How long the coordinator waits until all ranks have acknowledged the end: at most, beyond the
deadline, and after a failure.

It may host the store that they read the outcome from.
"""


class OperationRounds:
    """The rounds of one operation on one rank.

    `failure` is why all ranks raise, `loss` why this rank alone cannot continue: it has lost the
    store or the coordinator. `verdict` is the error that was reported first after all ranks had
    met, the same on all ranks. `passed` is why this rank left the number before.
    `local_failure` returns why this rank's worker process is gone.
    `others` are the other ranks of the group. Of the present round: `has_claimed`, `is_commit`,
    and `release` once it was read. Safe in any thread: `fail`, `lose`, `needs`. All else is called
    in the thread of the operation.
    """

    def __init__(self, lane: Lane, phases: Phases) -> None:
        self.lane = lane
        self.phases = phases
        self.identity: Identity | None = None
        self.verdict: CheckpointError | None = None
        self.failure: CheckpointError | None = None
        self.loss: CheckpointError | None = None
        self.is_over = False
        self.passed: CheckpointError | None = None
        self._abandonment: CheckpointError | None = None
        self.local_failure: Callable[[], CheckpointError | None] = lambda: None
        self.others = [rank for rank in range(lane.world_size) if rank != lane.rank]
        self.global_rank = lane.global_ranks[lane.rank]
        self._listener: KeyListener | None = None
        self._own_errors: dict[str, CheckpointError] = {}  # by text, as copies of them are received
        self._is_reported = self._is_failure_known = False
        # The present round, and what is known of it; changed under the condition.
        self.changed = threading.Condition()
        self._round: Round | None = None
        self.has_claimed = self.is_commit = False
        self.release: Release | None = None
        self._present_keys: set[str] = set()

    # Failures.

    def fail(self, error: CheckpointError) -> None:
        """Fail the operation on all ranks, from any thread.

        Without effect once it is over, and once the coordinator commits. While this rank has no
        number, the thread of the operation reports the error as soon as it has.
        """
        with self.changed:
            if self.is_over or self.failure is not None:
                return
        try:
            self.fail_round(error)
        except NumberAbandonedError:
            self._note_failure(error)
        except LostStoreError as lost_store:
            self.lose(lost_store)

    def lose(self, error: CheckpointError) -> None:
        """Note why this rank cannot continue, from any thread."""
        error.rank = self.global_rank if error.rank is None else error.rank
        with self.changed:
            self.loss = self.loss or error
            self.changed.notify_all()

    def lose_ranks(self, error: CheckpointError, *, with_coordinator: bool) -> None:
        """Fail the operation because ranks are dead or silent, from any thread."""
        try:
            self.fail_round(error)
        except NumberAbandonedError:
            return
        except LostStoreError:
            self.lose(error)
        if with_coordinator:
            # It may have claimed a commit, and then no rank reports the outcome.
            self.lose(error)

    def fail_round(self, error: CheckpointError) -> None:
        """Report a failure in the first round that the coordinator has not claimed.

        Afterwards `failure` is the error that counts. Without effect in a commit that the
        coordinator has claimed. Raises `NumberAbandonedError` if this rank has no number, or it was
        abandoned for another operation; `LostStoreError`.
        """
        failed = self._failed(error)
        with self.changed:
            tried = self._round
            self._own_errors[str(error)] = error
        while tried is not None:
            verdict = tried.fail(failed, _REPORT_S)
            with self.changed:
                # The operation may have entered the next round meanwhile, in its own thread.
                present = self._round
            if present is None or present.operation != tried.operation:
                break
            is_current = present.number == tried.number
            if verdict != CLAIMED:
                self.note_failed(verdict, tried)
                return
            if is_current and self.is_commit:
                return
            if is_current and self.lane.is_coordinator:
                # This rank has claimed the round, and reports the failure when it raises it.
                self._note_failure(error)
                return
            tried = max(tried.next(), present, key=lambda each: each.number)
        raise NumberAbandonedError

    def _failed(self, error: CheckpointError) -> Failed:
        error.rank = self.global_rank if error.rank is None else error.rank
        error.phase = error.phase or self.phases.deadline.phase
        return Failed(
            rank=self.global_rank,
            error=picklable_copy(error),
            identity=self.identity,
            is_decision=self.has_claimed and error.phase in {"plan", "commit"},
        )

    def note_failed(self, failed: Failed, ended: Round) -> None:
        """Note the failure that ended a round, of this rank or of another rank.

        Raises `NumberAbandonedError` if it is that of another operation.
        """
        error = self._own_errors.get(str(failed.error), failed.error)
        if failed.rank != self.global_rank:
            error = error_for_peers(failed.rank, failed.error, self.phases.what, failed.is_decision)
        abandoned, own_identity = failed.identity if ended.number == 1 else None, self.identity
        if abandoned and own_identity and not abandoned.agrees_with(own_identity):
            self._abandonment = error
            raise NumberAbandonedError
        with self.changed:
            if ended.number > 1:
                self.verdict = self.verdict or failed.error
            self._is_failure_known = True
        self._note_failure(error)

    def _note_failure(self, error: CheckpointError) -> None:
        """Note why all ranks raise."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def raise_failure(self) -> None:
        """Raise why the operation cannot continue on this rank, if it cannot."""
        error = self.failure or self.loss or self.local_failure()
        if error is not None:
            raise error

    def needs(self, rank: int) -> bool:
        """Return whether this rank still waits for `rank`; from any thread."""
        with self.changed:
            current = self._round
        if current is None or self.is_over:
            return False
        if rank == COORDINATOR:
            return current.read_release(self.phases.patience_s) is None
        return not current.arrived([rank], self.phases.patience_s)

    # Numbers and rounds.

    def begin_number(self) -> None:
        """Take the next number of the lane and enter its first round.

        Raises `NumberAbandonedError` if there is a newer session, or if ranks have left this number
        of the same read after their deadline; `PhaseTimeoutError` if there is no session in time;
        why the number before was abandoned if the deadline has passed.
        """
        lane = self.lane
        with self.changed:
            self._round = None
        abandonment, self._abandonment = self._abandonment, None
        if abandonment is not None and self.phases.deadline.remaining_s() <= 0:
            # The report of this error takes the next number.
            raise abandonment
        self.passed = abandonment or self.passed
        if self._listener is None:
            name = f"ckpt-storage listen: {self.phases.what}"
            self._listener = KeyListener(self._on_key, lane.keys, name=name)
        lane.join(self._await_key, self.phases.patience_s)
        lane.report_earlier(self.phases.patience_s)
        with self.changed:
            lane.number += 1
            self._enter_round(lane.first_round(lane.prefix()))
        if lane.is_superseded(self.phases.patience_s):
            # Also after the requests above: rank 0 may have made a session meanwhile.
            raise NumberAbandonedError
        if self.identity is not None and self.identity.is_read:
            release = self.current().read_release(self.phases.patience_s)
            if (
                isinstance(release, Failed)
                and release.identity == self.identity
                and isinstance(release.error, PhaseTimeoutError)
            ):
                self._abandonment = release.error
                raise NumberAbandonedError

    def _await_key(self, key: str) -> None:
        """Wait for a key that the coordinator writes before this rank has a number."""
        assert self._listener is not None  # noqa: S101  # made before
        self._listener.listen(key)
        phases, coordinator = self.phases, self.lane.global_ranks[COORDINATOR]
        elsewhere = partial(self.lane.find_elsewhere, [COORDINATOR], phases.patience_s)
        while not self.wait_for(lambda: key in self._present_keys, min(phases.end_s, phases.log_s)):
            self.raise_failure()
            if time.monotonic() >= phases.end_s:
                raise phases.late([coordinator], "not arrived", elsewhere())
            phases.log_late(lambda: ([coordinator], "not arrived", elsewhere()))

    def _enter_round(self, current: Round) -> None:
        with self.changed:
            self._round = current
            self.has_claimed = self.is_commit = False
            self.release = None
        assert self._listener is not None  # noqa: S101  # made with the number
        if self.lane.is_coordinator:
            self.lane.own(*current.shared_keys, _count_key(current))
        self._listener.listen(current.release_key)

    def end_round(self, *, is_last: bool) -> None:
        """Enter the next round, unless the operation has no further round."""
        if is_last:
            self.is_over = True
        else:
            self._enter_round(self.current().next())

    def current(self) -> Round:
        """Return the present round."""
        assert self._round is not None  # noqa: S101  # `meet` comes first
        return self._round

    def _on_key(self, key: str) -> None:
        """Note that an awaited key exists; called in the listener's thread."""
        with self.changed:
            self._present_keys.add(key)
            self.changed.notify_all()
            current, is_own = self._round, self.has_claimed
        if current is None or key != current.release_key or is_own:
            return
        try:
            release = current.read_awaited_release(self.phases.patience_s)
        except LostStoreError as error:
            self.lose(error)
            return
        if isinstance(release, Failed) and current.number > 1:
            self.note_failed(release, current)
        with self.changed:
            if self._round is current:
                self.release = release
            self.changed.notify_all()

    def poll(self, is_over: Callable[[], bool], end_s: float) -> bool:
        """Repeat a request until it returns True; return whether it has by `end_s`.

        Each pause is a twentieth of the time that this call has waited, within the limits above.
        """
        begin_s = time.monotonic()
        while not is_over():
            now_s = time.monotonic()
            if now_s > end_s:
                return False
            with self.changed:
                self.changed.wait(min(max(_MIN_POLL_S, (now_s - begin_s) / 20), _MAX_POLL_S))
        return True

    def wait_for(self, get_value: Callable[[], _T], end_s: float) -> _T | None:
        """Wait until `get_value()` is true and return it; None at `end_s`, or after a failure."""
        with self.changed:
            while not (value := get_value()):
                left_s = end_s - time.monotonic()
                if left_s <= 0 or self.failure or self.loss or self.local_failure():
                    return None
                self.changed.wait(min(left_s, _LOCAL_LOOK_S))
            return value

    # The end.

    def finish(self, error: BaseException | None) -> bool:
        """End the operation on this rank; return, on the coordinator, whether all ranks have.

        An `error` is reported to all ranks, unless they know it. Raises `LostStoreError`.
        """
        if error is not None:
            self._report(error)
        elif (
            not self.is_over
            and self.lane.is_coordinator
            and self._round is not None
            and self._round.claim(self.phases.patience_s) == CLAIMED
        ):
            # Threads of all ranks wait for this round, which no rank uses.
            self._round.release(Released(is_last=True), self.phases.patience_s)
        self.is_over = True
        if self.lane.world_size == 1:
            return True
        has_lost_store = isinstance(error, LostStoreError) or isinstance(self.loss, LostStoreError)
        if self._round is None or has_lost_store:
            return False
        return self._acknowledge(is_failed=error is not None)

    def close(self) -> None:
        """Stop listening; the thread ends with its present wait."""
        self.is_over = True
        if self._listener is not None:
            self._listener.close()

    def report(self, error: CheckpointError) -> None:
        """Report `error` to the other ranks in place of the exception that this rank raises."""
        with contextlib.suppress(LostStoreError):
            self._report(error)

    def _report(self, error: BaseException) -> None:
        """Report why this rank raises, unless all ranks have failed for another reason."""
        if self._is_reported:
            return
        self._is_reported = True
        if isinstance(error, LostStoreError):
            # The failure detector may learn in a moment that the host of the store has ended.
            self.wait_for(lambda: False, time.monotonic() + _LOCAL_LOOK_S)
        reported = error if isinstance(error, CheckpointError) else picklable_copy(error)
        failed = self._failed(reported)
        if self.lane.world_size == 1 or self.is_over:
            self.verdict = self.verdict or failed.error
            return
        try:
            if self.loss is not None and self.failure is None:
                # No rank can be reached.
                self._remember(failed)
            elif self.has_claimed:
                self.verdict = self.verdict or failed.error
                self.current().release(failed, _REPORT_S)
                # Members that have read an earlier answer wait in the next round.
                self.current().next().fail(failed, _REPORT_S)
            elif not self._is_failure_known:
                self._report_open(reported, is_interrupt=not isinstance(error, Exception))
        except LostStoreError:
            self._remember(failed)
            raise
        finally:
            if self._round is not None and not self.lane.is_coordinator:
                # An answer that this rank has not read.
                self.lane.own(self._round.answer_key)
            self.lane.note_ended(failed)

    def _remember(self, failed: Failed) -> None:
        """Let the next call of this rank report a failure that other ranks wait for."""
        owned = self._round if self.has_claimed else None
        self.lane.remember(failed, owned, has_number=self._round is not None)

    def _report_open(self, error: CheckpointError, *, is_interrupt: bool) -> None:
        """Report a failure in the first round that is open, of the number that the ranks use."""
        has_number = self._round is not None
        if not has_number:
            if is_interrupt:
                # An interrupted process must not wait for ranks that are not there.
                self.phases.deadline = Deadline(self.phases.deadline.phase, _INTERRUPTED_S)
                self.phases.grace_s = 0.0
            log.error("Rank %d failed, and reports it: %s", self.global_rank, error)
        while True:
            try:
                if not has_number:
                    self.begin_number()
                self.fail_round(error)
            except NumberAbandonedError:
                has_number = False
            except LostStoreError:
                raise
            except CheckpointError as no_session:
                log.debug("No rank learned why rank %d failed: %s", self.global_rank, no_session)
                return
            else:
                return

    def _acknowledge(self, *, is_failed: bool) -> bool:
        """Count this rank as done; return, on the coordinator, whether all ranks are."""
        keys, patience_s = self.lane.keys, self.phases.patience_s
        count_key = _count_key(self.current())
        keys.count(count_key, 1, patience_s)
        if not self.lane.is_coordinator:
            return True
        if is_failed:
            self.lane.own(*self.current().next().shared_keys)
        limit_s = min(_FINISH_S, self.phases.deadline.remaining_s() + _FINISH_EXTRA_S)
        end_s = time.monotonic() + (_FINISH_FAILED_S if is_failed else limit_s)
        is_acknowledged = self.poll(
            lambda: keys.count(count_key, 0, patience_s) == self.lane.world_size, end_s
        )
        if not is_acknowledged:
            log.warning("After %s some ranks have not acknowledged the end.", self.phases.what)
        return is_acknowledged


def _count_key(current: Round) -> str:
    """Return the key that counts the ranks that have acknowledged the end of an operation."""
    return f"{current.operation}/done"
