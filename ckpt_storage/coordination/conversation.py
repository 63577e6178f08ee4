"""The rounds of one operation on one rank: which round comes next, and how the operation fails.

A rank fails an operation by taking the verdict of a round (see `rounds`). Where the coordinator has
it already, the failure goes to the next round; a commit that the coordinator has claimed cannot be
failed any more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError
from ckpt_storage.store.deadline import Deadline

from .failures import error_for_peers, picklable_copy
from .identity import Identity
from .keyvalue import COORDINATOR, LostStoreError
from .lane import Lane
from .listener import KeyListener
from .phases import Phases
from .rounds import (
    Failed,
    NumberGivenUpError,
    Release,
    Released,
    Round,
    SupersededError,
)

log = logging.getLogger("ckpt_storage")

_T = TypeVar("_T")

_REPORT_S = 3.0
"""How long a failing rank tries to report before it raises."""

_INTERRUPTED_S = 1.5
"""How long an interrupted rank that has not met the others tries to report."""

_LOCAL_LOOK_S = 0.2
"""How often a waiting rank looks whether its own worker still lives."""

_FINISH_S, _FINISH_EXTRA_S, _FINISH_FAILED_S = 10.0, 3.0, 1.0
"""How long the coordinator stays for ranks that have not acknowledged the end: at most, beyond the
deadline, and after a failure.

It may host the store that they read the outcome from.
"""


class Conversation:
    """The rounds of one operation on one rank.

    `failure` is why all ranks raise, `loss` why this rank alone cannot go on: it has lost the store
    or the coordinator. `verdict` is the error that was reported first after all ranks had met, the
    same on all ranks.
    `local_failure` says whether this rank's own worker is gone, `describe` what is known of a rank
    that is late. `others` are the other ranks of the group. Of the round that comes next:
    `has_arrived`, `has_claimed`, `is_commit`, and `release` once it was read. Safe in any thread:
    `fail`, `lose`. All else is called in the thread of the operation.
    """

    def __init__(self, lane: Lane, phases: Phases) -> None:
        self.lane = lane
        self.phases = phases
        self.identity: Identity | None = None
        self.verdict: CheckpointError | None = None
        self.failure: CheckpointError | None = None
        self.loss: CheckpointError | None = None
        self.is_complete = False
        self.local_failure: Callable[[], CheckpointError | None] = lambda: None
        self.describe: Callable[[int], str] = lambda _: ""
        self.others = [rank for rank in range(lane.world_size) if rank != lane.rank]
        self.global_rank = lane.names[lane.rank]
        self.coordinator = lane.names[COORDINATOR]
        self._listener: KeyListener | None = None
        self._is_reported = False
        self._is_failure_known = self.may_have_answered = False
        self.own_errors: dict[str, CheckpointError] = {}  # by the nonce of the release
        # The round that comes next, and what is known of it; changed under the condition.
        self.changed = threading.Condition()
        self._round: Round | None = None
        self.round_number = 0
        self.has_arrived = self.has_claimed = self.is_commit = self.has_signal = False
        self.release: Release | None = None
        self._present_keys: set[str] = set()
        self._pending: CheckpointError | None = None

    # Failures.

    def fail(self, error: CheckpointError) -> None:
        """Fail the operation on all ranks, from any thread.

        Without effect once it is over, and once the coordinator commits. Before this rank has a
        number, the error waits until it has.
        """
        while True:
            with self.changed:
                if self.is_complete or self.failure is not None:
                    return
                if self.lane.world_size == 1:
                    self.note_failure(error)
                    return
                if self._round is None:
                    self._pending = self._pending or error
                    return
                number = self.lane.number
            try:
                self.fail_round(error)
            except NumberGivenUpError:
                with self.changed:
                    if self.lane.number != number:
                        continue
                    # The operation is about to take the next number.
                    self._pending = self._pending or error
            except LostStoreError as lost_store:
                self.lose(lost_store)
            return

    def lose(self, error: CheckpointError) -> None:
        """Note why this rank cannot go on, from any thread."""
        error.rank = self.global_rank if error.rank is None else error.rank
        with self.changed:
            self.loss = self.loss or error
            self.changed.notify_all()

    @property
    def has_lost_store(self) -> bool:
        """Whether the key-value store does not answer this rank any more."""
        return isinstance(self.loss, LostStoreError)

    def lose_ranks(self, error: CheckpointError, *, with_coordinator: bool) -> None:
        """Fail the operation because ranks are dead or silent, from any thread."""
        try:
            self.fail_round(error)
        except NumberGivenUpError:
            return
        except LostStoreError:
            self.lose(error)
        if with_coordinator:
            # It may have claimed a commit, and then nobody reports the outcome.
            self.lose(error)

    def fail_round(self, error: CheckpointError) -> None:
        """Report a failure in the first round that the coordinator has not claimed.

        Afterwards `failure` is the error that counts. Without effect in a commit that the
        coordinator has claimed. Raises `NumberGivenUpError` if the number was given up for another
        operation, `LostStoreError`.
        """
        failed = self._failed_release(error)
        number = 0
        while True:
            with self.changed:
                # The operation may have come further meanwhile, in its own thread.
                number = max(number + 1, self.round_number)
            counts = self.lane.round(number).fail(failed, _REPORT_S)
            if counts is not None:
                self.note_failed(counts, number)
                return
            with self.changed:
                is_current = self.round_number == number
                if is_current and self.lane.is_coordinator and not self.is_commit:
                    # This rank has claimed the round, and reports the failure when it raises it.
                    self.note_failure(error)
                if is_current and (self.lane.is_coordinator or self.is_commit):
                    return

    def _failed_release(self, error: CheckpointError) -> Failed:
        error.rank = self.global_rank if error.rank is None else error.rank
        error.phase = error.phase or self.phases.deadline.phase
        failed = Failed(
            rank=self.global_rank,
            error=picklable_copy(error),
            identity=self.identity,
            is_decision=self.has_claimed and error.phase in {"plan", "commit"},
        )
        self.own_errors[failed.nonce] = error
        return failed

    def note_failed(self, failed: Failed, number: int) -> None:
        """Take note of the failure that ended round `number`, of this rank or another one."""
        given_up, own_identity = failed.identity if number == 1 else None, self.identity
        if given_up and own_identity and not given_up.agrees_with(own_identity):
            raise NumberGivenUpError
        own = self.own_errors.get(failed.nonce)
        with self.changed:
            if number > 1:
                self.verdict = self.verdict or failed.error
            self._is_failure_known = True
        self.note_failure(own or error_for_peers(failed, self.phases.what))

    def note_failure(self, error: CheckpointError) -> None:
        """Take note of why all ranks raise."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def raise_failure(self) -> None:
        """Raise why the operation cannot go on on this rank, if it cannot."""
        error = self.failure or self.loss or self.local_failure()
        if error is not None:
            raise error

    def needs(self, rank: int) -> bool:
        """Return whether this rank still waits for something of another one; from any thread."""
        with self.changed:
            current = self._round
        if current is None or self.is_complete:
            return False
        if rank == COORDINATOR:
            return current.read_release(self.phases.patience_s) is None
        return not current.arrived([rank], self.phases.patience_s)

    # Numbers and rounds.

    def begin_number(self) -> None:
        """Take the next number of the lane and enter its first round.

        Raises `SupersededError`, `PhaseTimeoutError` if there is no session in time.
        """
        lane = self.lane
        with self.changed:
            self._round = None
        if self._listener is None:
            name = f"ckpt-storage listen: {self.phases.what}"
            self._listener = KeyListener(self._on_key, lane.keys, name=name)
        lane.join(self._await_key, self.phases.patience_s)
        lane.report_earlier(self.phases.patience_s)
        with self.changed:
            lane.begin(self.identity)
            self._enter_round(1)
        if lane.is_superseded(self.phases.patience_s):
            # Also after the requests above: rank 0 may have made a session meanwhile.
            raise SupersededError

    def raise_pending(self) -> None:
        """Raise a failure that came before there was a number."""
        if self._pending is not None:
            raise self._pending

    def _await_key(self, key: str) -> None:
        """Wait for a key that the coordinator writes before this rank has a number."""
        assert self._listener is not None  # noqa: S101  # made before
        self._listener.listen(key)
        if not self.wait_for(lambda: key in self._present_keys, self.phases.end_s):
            self.raise_failure()
            raise self.phases.late([self.coordinator], "not come")

    def _enter_round(self, number: int) -> None:
        with self.changed:
            current = self._round = self.lane.round(number)
            self.round_number = number
            self.has_arrived = self.has_claimed = self.is_commit = self.has_signal = False
            self.release = None
        assert self._listener is not None  # noqa: S101  # made with the number
        if self.lane.is_coordinator:
            self.lane.own(*current.shared_keys)
        self._listener.listen(current.all_key if self.lane.is_coordinator else current.release_key)

    def end_round(self, *, is_last: bool) -> None:
        """Go to the next round, if there is one."""
        if is_last:
            self.is_complete = True
        else:
            self._enter_round(self.round_number + 1)

    def current(self) -> Round:
        """Return the round that comes next."""
        assert self._round is not None  # noqa: S101  # `meet` comes first
        return self._round

    def _on_key(self, key: str) -> None:
        """Note that a key exists that this rank waits for; called in the listener's thread."""
        with self.changed:
            self._present_keys.add(key)
            current, number = self._round, self.round_number
            if current is None or key not in {current.release_key, current.all_key}:
                self.changed.notify_all()
                return
        try:
            is_release = key == current.release_key
            read = current.read_release if is_release else current.failure
            release: Release | None = read(self.phases.patience_s)
        except LostStoreError as error:
            self.lose(error)
            return
        if isinstance(release, Failed) and number > 1:
            self.note_failed(release, number)
        with self.changed:
            if self._round is current:
                self.release, self.has_signal = release, True
            self.changed.notify_all()

    def free_listener(self, key: str) -> None:
        """Write a key that this rank has no use for any more, unless its listener has seen it."""
        with self.changed:
            is_free = key in self._present_keys
        if not is_free:
            self.lane.keys.set(key, b"", self.phases.patience_s)

    def wait_for(self, value_of: Callable[[], _T], end_s: float) -> _T | None:
        """Wait until `value_of()` is true and return it; None at `end_s`, or after a failure."""
        with self.changed:
            while not (value := value_of()):
                left_s = end_s - time.monotonic()
                if left_s <= 0 or self.failure or self.loss or self.local_failure():
                    return None
                self.changed.wait(min(left_s, _LOCAL_LOOK_S))
            return value

    def begin_commit(self) -> None:
        """From now on the present round is a commit, which cannot be failed once it is claimed."""
        with self.changed:
            self.is_commit = True

    # The end.

    def finish(self, error: BaseException | None) -> bool:
        """End the operation on this rank; return, on the coordinator, whether all ranks have.

        An `error` is reported to all ranks, unless they know it. Raises `LostStoreError`.
        """
        if error is not None:
            self._report(error)
        elif not self.is_complete:
            self._close_round()
        self.is_complete = True
        if self.lane.world_size == 1:
            return True
        has_store = not isinstance(error, LostStoreError) and not self.has_lost_store
        return self._round is not None and has_store and self._acknowledge(is_failed=bool(error))

    def close(self) -> None:
        """Stop listening; the thread ends with its present wait."""
        self.is_complete = True
        if self._listener is not None:
            self._listener.close()

    def _close_round(self) -> None:
        """Release the round that nobody will use: threads of all ranks wait for it."""
        if self.lane.is_coordinator and self._round is not None:
            if self._round.claim(self.phases.patience_s) is not None:
                # A rank has failed in it, and all others learn that.
                return
            self._round.release(Released(is_last=True), self.phases.patience_s)
            self.lane.keys.set(self._round.all_key, b"", self.phases.patience_s)

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
            self.wait_for(lambda: False, time.monotonic() + _LOCAL_LOOK_S)
        reported: CheckpointError = (
            error if isinstance(error, CheckpointError) else picklable_copy(error)
        )
        failed = self._failed_release(reported)
        if self.lane.world_size == 1 or self.is_complete:
            self.verdict = self.verdict or failed.error
            return
        try:
            if self.loss is not None and self.failure is None:
                # There is nobody to report to, or no way.
                self._remember(failed)
            else:
                self._write(failed, reported, is_interrupt=not isinstance(error, Exception))
        except LostStoreError:
            self._remember(failed)
            raise
        finally:
            if self._round is not None and not self.lane.is_coordinator:
                # An answer that this rank has not read.
                self.lane.own(self._round.answer_key)
            self.lane.ended(failed)

    def _remember(self, failed: Failed) -> None:
        """Have the next call of this rank report a failure that keeps other ranks waiting."""
        owned_round = self.round_number if self.has_claimed else 0
        self.lane.remember(failed, owned_round, has_number=self._round is not None)

    def _write(self, failed: Failed, error: CheckpointError, *, is_interrupt: bool) -> None:
        """Write a failure that the other ranks do not know."""
        if self.has_claimed:
            self.verdict = self.verdict or failed.error
            self.current().release(failed, _REPORT_S)
            if self.may_have_answered:
                # Members that have read the answer wait in the next round.
                self.lane.round(self.round_number + 1).fail(failed, _REPORT_S)
        elif not self._is_failure_known:
            try:
                self._report_open(error, is_interrupt=is_interrupt)
            except PhaseTimeoutError as late:
                log.debug("No rank learned why rank %d failed: %s", self.global_rank, late)

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
            except (NumberGivenUpError, SupersededError):
                has_number = False
            else:
                return

    def _acknowledge(self, *, is_failed: bool) -> bool:
        """Count this rank as done; return, on the coordinator, whether all ranks are."""
        keys, patience_s = self.lane.keys, self.phases.patience_s
        prefix = f"{self.lane.session}/{self.lane.number}"
        count_key, all_key = f"{prefix}/done", f"{prefix}/all_done"
        if keys.count(count_key, patience_s) == self.lane.world_size:
            keys.set(all_key, b"", patience_s)
        if not self.lane.is_coordinator:
            return True
        self.lane.own(count_key, all_key)
        if is_failed:
            self.lane.own(*self.lane.round(self.round_number + 1).shared_keys)
        limit_s = min(_FINISH_S, self.phases.deadline.remaining_s() + _FINISH_EXTRA_S)
        end_s = time.monotonic() + (_FINISH_FAILED_S if is_failed else limit_s)
        assert self._listener is not None  # noqa: S101  # made with the number
        self._listener.listen(all_key)
        with self.changed:
            while all_key not in self._present_keys and (left_s := end_s - time.monotonic()) > 0:
                self.changed.wait(left_s)
            is_acknowledged = all_key in self._present_keys
        if not is_acknowledged:
            self.free_listener(all_key)
            log.warning("After %s some ranks have not acknowledged the end.", self.phases.what)
        return is_acknowledged
