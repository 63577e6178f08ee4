"""The coordinator in a round: it collects payloads, claims the round and answers."""

from __future__ import annotations

import logging
import pickle
import time
from typing import Any

from .keyvalue import COORDINATOR, LostStoreError
from .operation_rounds import OperationRounds
from .rounds import ByRank, Failed, Released

log = logging.getLogger("ckpt_storage")

_LOOK_S = 1.0
"""How often the coordinator checks for arrivals: the key that announces them is a hint."""


class Coordinator:
    """The rank of an operation that decides for all ranks."""

    def __init__(self, rounds: OperationRounds) -> None:
        self._rounds = rounds

    def collect(self) -> dict[int, Any]:
        """Return the payloads of the other ranks; without those that are late at the deadline."""
        rounds, phases = self._rounds, self._rounds.phases
        current = rounds.current()
        keys = [current.arrival_key_of(rank) for rank in rounds.others]
        look_s = max(_LOOK_S, rounds.lane.world_size / 1_000)
        while True:
            rounds.raise_failure()
            if rounds.lane.keys.has_all(keys, phases.patience_s):
                rounds.free_listener(current.all_key)
                return current.payloads(rounds.others, phases.patience_s)
            if time.monotonic() > phases.end_s:
                arrived = current.arrived(rounds.others, phases.patience_s)
                return current.payloads(arrived, phases.patience_s)
            phases.log_late(self._late_names)
            end_s = min(phases.end_s, time.monotonic() + look_s)
            rounds.wait_for(lambda: rounds.has_signal, end_s)
            with rounds.changed:
                rounds.has_signal = False
            # The key that announces a failure is a hint, too.
            verdict = current.read_verdict(phases.patience_s)
            if isinstance(verdict, Failed):
                rounds.free_listener(current.all_key)
                rounds.note_failed(verdict, rounds.round_number)

    def _late_names(self) -> list[int]:
        rounds = self._rounds
        arrived = rounds.current().arrived(rounds.others, rounds.phases.patience_s)
        return rounds.lane.names_of(sorted({*rounds.others} - {*arrived}))

    def claim(self) -> None:
        """Take the decision of this round. Raises why a rank failed before."""
        rounds = self._rounds
        try:
            verdict = rounds.current().claim(rounds.phases.patience_s)
        except LostStoreError:
            # The claim may have arrived, so that only this rank can release the round.
            rounds.has_claimed = True
            raise
        if isinstance(verdict, Failed):
            rounds.note_failed(verdict, rounds.round_number)
            rounds.raise_failure()
        with rounds.changed:
            rounds.has_claimed = True

    def answer(self, decision: Any, *, is_last: bool = False) -> Any:  # noqa: ANN401  # as `decide` returns
        """Release the round with the coordinator's decision; return its own answer."""
        rounds = self._rounds
        own = ByRank.answer_for(COORDINATOR, decision)
        if rounds.lane.world_size == 1:
            return own
        current, patience_s = rounds.current(), rounds.phases.patience_s
        has_arrivals = rounds.has_claimed
        if not has_arrivals:
            self.claim()
        if not rounds.is_commit:
            rounds.raise_failure()
        answers: dict[int, bytes] = {}
        if isinstance(decision, ByRank):
            answers = {rank: pickle.dumps(decision.answers[rank]) for rank in rounds.others}
            release = Released(is_by_rank=True, is_last=is_last)
        else:
            release = Released(answer=decision, is_last=is_last)
        try:
            size_bytes = current.release(release, patience_s, answers)
            rounds.lane.own(current.release_key, size_bytes=size_bytes)
            if not has_arrivals:
                # No member arrives in such a round, and this rank's listener waits for that.
                rounds.lane.keys.set(current.all_key, b"", patience_s)
        except LostStoreError as error:
            if not rounds.is_commit:
                raise
            # The outcome stands; ranks that do not learn it ask the storage.
            log.warning("Reporting the outcome of %s failed: %s", rounds.phases.what, error)
            rounds.lane.remember(release, rounds.round_number)
            rounds.lose(error)
        rounds.end_round(is_last=is_last)
        return own

    def abandon(self, failed: Failed) -> None:
        """End the first round, as the operations of ranks differ.

        Raises why this rank fails, or `NumberAbandonedError` if it goes on under the next number.
        """
        rounds = self._rounds
        verdict = rounds.current().fail(failed, rounds.phases.patience_s)
        assert isinstance(verdict, Failed)  # noqa: S101  # only this rank claims
        rounds.note_failed(verdict, 1)
        rounds.raise_failure()
