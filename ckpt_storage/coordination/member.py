"""A member in a round: it arrives, and waits for the release."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from ckpt_storage.errors import CheckpointError

from .heartbeats import Heartbeats, heartbeat_keys
from .keyvalue import COORDINATOR, LostStoreError
from .operation_rounds import OperationRounds
from .phases import Late
from .rounds import (
    CLAIMED,
    Arrival,
    Failed,
    NumberAbandonedError,
    Release,
    Released,
    Superseded,
    UndecidedError,
)

_MAX_LOOKUPS = 1024
"""Of how many members, one request, a member checks whether they have arrived."""


class Member:
    """A rank of an operation that is not the coordinator.

    `describe` returns what the last heartbeat of a global rank says.
    """

    def __init__(self, rounds: OperationRounds, describe: Callable[[int], str]) -> None:
        self._rounds = rounds
        self._describe = describe
        self._coordinator = rounds.lane.global_ranks[COORDINATOR]

    def convene(self, own: Arrival, _decide: object) -> Any:  # noqa: ANN401  # the coordinator's answer
        """Send the payload of the first round; return the answer."""
        self.gather(own)
        return self.answer()

    def gather(self, value: object) -> list[Any]:
        """Send this member's payload of the present round; return an empty list.

        In a commit whose verdict cannot be read, raises `UndecidedError`.
        """
        rounds, packed = self._rounds, pickle.dumps(value)
        current = rounds.current()
        rounds.lane.own(current.arrival_key, size_bytes=len(packed))
        try:
            current.arrive(packed, rounds.phases.patience_s)
        except LostStoreError as error:
            if not rounds.is_commit:
                raise
            # The coordinator may have the payload: it is a failure only by the verdict.
            try:
                rounds.fail_round(error)
            except LostStoreError as lost_store:
                rounds.lose(lost_store)
                raise UndecidedError(str(error)) from error
            if rounds.failure is not None:
                raise rounds.failure from error
        return []

    def answer(self, _decision: object = None, *, is_last: bool = False) -> Any:  # noqa: ANN401, ARG002  # as the coordinator's
        """Wait for the coordinator's answer and return it; enter the next round.

        In a commit whose outcome cannot be seen, raises `UndecidedError`.
        """
        rounds, phases = self._rounds, self._rounds.phases
        release: Release | None = None
        can_extend = not rounds.is_commit
        while release is None:
            release = rounds.wait_for(lambda: rounds.release, min(phases.end_s, phases.log_s))
            if release is not None:
                break
            if rounds.failure is not None:
                raise rounds.failure
            cause = rounds.loss or rounds.local_failure()
            if cause is None and time.monotonic() < phases.end_s:
                phases.log_late(self._find_late_coordinator)
                continue
            try:
                release = self._read_late_release(cause, can_extend=can_extend)
            except LostStoreError as error:
                self._raise_lost(error)
            can_extend = False
        return self._open(release)

    def _read_late_release(
        self, cause: CheckpointError | None, *, can_extend: bool
    ) -> Release | None:
        """Return the release if it exists; else fail the round for `cause`, or because it is late.

        Returns None if the coordinator gets more time to decide.
        """
        rounds, phases = self._rounds, self._rounds.phases
        if isinstance(cause, LostStoreError):
            raise cause
        current = rounds.current()
        # A process that was stopped reads what has arrived before it judges.
        release = current.read_release(phases.patience_s)
        if release is not None:
            return release
        if cause is None and can_extend and current.read_verdict(phases.patience_s) == CLAIMED:
            # All have arrived, and the coordinator has a phase's time to decide.
            phases.begin(phases.deadline.phase)
            return None
        cause = cause or phases.late(*self._find_late_coordinator() or self._find_late_members())
        rounds.fail_round(cause)
        if rounds.failure is not None:
            raise rounds.failure
        release = current.read_release(phases.patience_s)
        if release is None:
            raise self._undecided(cause)
        return release

    def _find_late_coordinator(self) -> Late | None:
        """Return the coordinator as late; None if it has arrived, and waits for members."""
        rounds, lane = self._rounds, self._rounds.lane
        patience_s = rounds.phases.patience_s
        late = [self._coordinator]
        if rounds.current().number > 1:
            return late, "not answered", f": {self._describe(self._coordinator)}"
        with suppress(LostStoreError):
            heartbeats = heartbeat_keys(lane.keys.client)
            beat = heartbeats.get(lane.heartbeat_key(COORDINATOR), patience_s)
            if beat is not None and Heartbeats.number_of(beat) == lane.number:
                return None
        return late, "not arrived", lane.find_elsewhere([COORDINATOR], patience_s)

    def _find_late_members(self) -> Late:
        """Return members that have not arrived: the coordinator, whose deadline is later, waits."""
        rounds = self._rounds
        members = rounds.others[1 : 1 + _MAX_LOOKUPS]
        arrived = rounds.current().arrived(members, rounds.phases.patience_s)
        late = rounds.lane.global_ranks_of(sorted({*members} - {*arrived}))
        return (late, "not arrived", "") if late else ([self._coordinator], "not answered", "")

    def _raise_lost(self, error: LostStoreError) -> NoReturn:
        """Raise why the operation failed on this rank, which has lost the store."""
        rounds = self._rounds
        rounds.lose(error)
        if rounds.failure is not None:
            raise rounds.failure
        raise self._undecided(rounds.loss or error)

    def _undecided(self, cause: CheckpointError) -> CheckpointError:
        """Return what this rank raises if it cannot fail the round for `cause`."""
        if not self._rounds.is_commit:
            return cause
        error = UndecidedError(str(cause))
        error.__cause__ = cause
        return error

    def _open(self, release: Release) -> Any:  # noqa: ANN401  # the coordinator's answer
        """Return the answer of a release and enter the next round. Raises the failure in it."""
        rounds = self._rounds
        if isinstance(release, Superseded):
            raise NumberAbandonedError
        if isinstance(release, Failed):
            rounds.note_failed(release, rounds.current())
            rounds.raise_failure()
        assert isinstance(release, Released)  # noqa: S101  # all else has been raised
        answer = release.answer
        if release.is_by_rank:
            packed = rounds.current().read_answer(rounds.phases.patience_s)
            if packed is None:
                raise CheckpointError(
                    f"{rounds.phases.what}: the answer to rank {rounds.global_rank} was deleted.",
                    next_step="Call the same operations in the same order on all ranks.",
                )
            rounds.lane.own(rounds.current().answer_key, size_bytes=len(packed))
            answer = pickle.loads(packed)  # noqa: S301  # our own ranks
        rounds.end_round(is_last=release.is_last)
        return answer
