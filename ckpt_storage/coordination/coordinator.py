"""What the coordinator does in a round: it collects payloads, claims the round and answers."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Sequence
from typing import Any

from .conversation import Conversation
from .keyvalue import COORDINATOR, LostStoreError
from .rounds import ByRank, Failed, LateRanksError, Released

log = logging.getLogger("ckpt_storage")

_LOOK_S = 1.0
"""How often the coordinator looks for arrivals itself: the key that announces them is a hint."""

_SMALL_WORLD = 64
"""Up to so many ranks, a first look costs less than the hint."""


class Coordinator:
    """The rank of one operation that decides."""

    def __init__(self, conversation: Conversation) -> None:
        self._talk = conversation

    def collect(self) -> dict[int, Any]:
        """Return the payloads of the other ranks. Raises `LateRanksError` with those it has."""
        talk = self._talk
        current = talk.current()
        keys = [current.arrival_key_of(rank) for rank in talk.others]
        look_s = max(_LOOK_S, talk.lane.world_size / 1_000)
        is_due = talk.lane.world_size <= _SMALL_WORLD
        while True:
            if not is_due:
                end_s = min(talk.phases.end_s, time.monotonic() + look_s)
                talk.wait_for(lambda: talk.has_signal, end_s)
                with talk.changed:
                    talk.has_signal = False
                # The key that announces a failure is a hint, too.
                failed = current.failure(talk.phases.patience_s)
                if failed is not None:
                    talk.free_listener(current.all_key)
                    talk.note_failed(failed, talk.round_number)
            is_due = False
            talk.raise_failure()
            if talk.lane.keys.has_all(keys, talk.phases.patience_s):
                talk.free_listener(current.all_key)
                return self._payloads(talk.others)
            if time.monotonic() > talk.phases.end_s:
                missing = self._missing()
                arrived = [rank for rank in talk.others if rank not in missing]
                raise LateRanksError(missing, self._payloads(arrived))
            talk.phases.log_late(lambda: talk.lane.names_of(self._missing()))

    def _missing(self) -> list[int]:
        talk = self._talk
        arrived = set(talk.current().arrived(talk.others, talk.phases.patience_s))
        return [rank for rank in talk.others if rank not in arrived]

    def _payloads(self, ranks: Sequence[int]) -> dict[int, Any]:
        talk = self._talk
        packed = talk.current().payloads(ranks, talk.phases.patience_s)
        return {
            rank: pickle.loads(payload)  # noqa: S301  # our own ranks
            for rank, payload in zip(ranks, packed, strict=True)
        }

    def claim(self) -> None:
        """Take the decision of this round. Raises why a rank failed before."""
        talk = self._talk
        try:
            failed = talk.current().claim(talk.phases.patience_s)
        except LostStoreError:
            # The claim may have arrived, so that only this rank can release the round.
            talk.has_claimed = True
            raise
        if failed is not None:
            talk.note_failed(failed, talk.round_number)
            talk.raise_failure()
        with talk.changed:
            talk.has_claimed = True

    def answer(self, decision: Any, *, is_last: bool = False) -> Any:  # noqa: ANN401  # as `decide` returns
        """Release the round with the coordinator's decision; return its own answer."""
        talk = self._talk
        own = ByRank.answer_for(COORDINATOR, decision)
        if talk.lane.world_size == 1:
            return own
        has_arrivals = talk.has_claimed
        if not has_arrivals:
            self.claim()
        if not talk.is_commit:
            talk.raise_failure()
        answers: dict[int, bytes] = {}
        if isinstance(decision, ByRank):
            answers = {rank: pickle.dumps(decision.answers[rank]) for rank in talk.others}
            release = Released(is_by_rank=True, is_last=is_last)
        else:
            release = Released(answer=decision, is_last=is_last)
        try:
            talk.current().release(release, talk.phases.patience_s, answers)
            if not has_arrivals:
                # No member arrives in such a round, and this rank's listener waits for that.
                talk.lane.keys.set(talk.current().all_key, b"", talk.phases.patience_s)
        except LostStoreError as error:
            if not talk.is_commit:
                talk.may_have_answered = True
                raise
            # The outcome stands; ranks that do not learn it ask the storage.
            log.warning("Reporting the outcome of %s failed: %s", talk.phases.what, error)
            talk.lane.remember(release, talk.round_number)
        talk.end_round(is_last=is_last)
        return own

    def give_up(self, failed: Failed) -> None:
        """End the first round for an operation that the coordinator has found to be mixed.

        Raises why this rank fails, or `NumberGivenUpError` if it goes on under the next number.
        """
        talk = self._talk
        talk.own_errors[failed.nonce] = failed.error
        counts = talk.current().fail(failed, talk.phases.patience_s)
        assert counts is not None  # noqa: S101  # only this rank claims
        talk.note_failed(counts, 1)
        talk.raise_failure()
