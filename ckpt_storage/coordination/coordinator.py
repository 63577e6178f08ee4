"""The coordinator in a round: it collects payloads, compares operations, claims and answers."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .identity import find_disagreement
from .keyvalue import COORDINATOR, LostStoreError
from .operation_rounds import OperationRounds
from .phases import Late
from .rounds import Arrival, ByRank, Failed, Released

log = logging.getLogger("ckpt_storage")


class Coordinator:
    """The rank of an operation that decides for all ranks; as `Member`.

    `describe` returns what the last heartbeat of a global rank says.
    """

    def __init__(self, rounds: OperationRounds, describe: Callable[[int], str]) -> None:
        self._rounds = rounds
        self._describe = describe

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401  # of any kind
        """Return the values of all ranks, and claim the round."""
        rounds = self._rounds
        if not rounds.others:
            return [value]
        values = self._collect()
        missing = [rank for rank in rounds.others if rank not in values]
        if missing:
            late = rounds.lane.global_ranks_of(missing)
            known = "; ".join(self._describe(rank) for rank in late[:8])
            raise rounds.phases.late(late, "not reported", f": {known}")
        self._claim()
        return [value, *(values[rank] for rank in rounds.others)]

    def _collect(self) -> dict[int, Any]:
        """Return the payloads of the other ranks; without those that are late at the deadline."""
        rounds, phases = self._rounds, self._rounds.phases
        current, arrived = rounds.current(), rounds.others
        missing: Sequence[str] = [current.arrival_key_of(rank) for rank in rounds.others]

        def find_late() -> Late:
            present = current.arrived(rounds.others, phases.patience_s)
            late = rounds.lane.global_ranks_of(sorted({*rounds.others} - {*present}))
            return late, "not arrived", ""

        def have_arrived() -> bool:
            nonlocal missing
            rounds.raise_failure()
            if current.read_verdict(phases.patience_s) is not None:
                self._claim()  # raises the failure
            phases.log_late(find_late)
            missing = rounds.lane.keys.skip_present(missing, phases.patience_s)
            return not missing

        if not rounds.poll(have_arrived, phases.end_s):
            arrived = current.arrived(rounds.others, phases.patience_s)
        return current.payloads(arrived, phases.patience_s)

    def _claim(self) -> None:
        """Claim the round for the coordinator. Raises the error of a rank that failed it before."""
        rounds = self._rounds
        try:
            verdict = rounds.current().claim(rounds.phases.patience_s)
        except LostStoreError:
            # The claim may have arrived, so that only this rank can release the round.
            rounds.has_claimed = True
            raise
        if isinstance(verdict, Failed):
            rounds.note_failed(verdict, rounds.current())
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
        if not rounds.has_claimed:
            self._claim()
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
        except LostStoreError as error:
            if not rounds.is_commit:
                raise
            # The outcome stands; ranks that do not learn it ask the storage.
            log.warning("Reporting the outcome of %s failed: %s", rounds.phases.what, error)
            rounds.lane.remember(release, current)
            rounds.lose(error)
        rounds.end_round(is_last=is_last)
        return own

    # The first round.

    def convene(self, own: Arrival, decide: Callable[[list[Any]], Any]) -> Any:  # noqa: ANN401  # as `decide` returns
        """Collect the arrivals; decide for all ranks, or abandon the number. Return the answer."""
        rounds, lane = self._rounds, self._rounds.lane
        arrivals: dict[int, Arrival] = {lane.rank: own, **self._collect()}
        missing = [rank for rank in range(lane.world_size) if rank not in arrivals]
        self._abandon_if_different(arrivals, is_complete=not missing)
        if missing:
            known = lane.find_elsewhere(missing, rounds.phases.patience_s)
            raise rounds.phases.late(lane.global_ranks_of(missing), "not arrived", known)
        self._claim()
        if not lane.has_met:
            processes = {rank: arrival.process for rank, arrival in arrivals.items()}
            lane.publish_processes(processes, rounds.phases.patience_s)
        values = [arrivals[rank].value for rank in range(lane.world_size)]
        # Payloads of all ranks are large; no reference to them is kept here.
        del arrivals
        decision = decide(values)
        del values
        return self.answer(decision)

    def _abandon_if_different(self, arrivals: Mapping[int, Arrival], *, is_complete: bool) -> None:
        """Abandon the number if the operations of ranks differ, or their terms.

        Raises why this rank fails, or `NumberAbandonedError` if it goes on under the next number.
        """
        rounds, lane = self._rounds, self._rounds.lane
        identities = {lane.global_ranks[rank]: arrivals[rank].identity for rank in sorted(arrivals)}
        abandonment = find_disagreement(
            identities,
            {lane.global_ranks[rank]: arrivals[rank].terms for rank in sorted(arrivals)},
            earlier=lane.earlier,
            phase="load" if identities[rounds.global_rank].kind == "the load" else "plan",
            is_complete=is_complete,
        )
        lane.earlier.append(identities)
        if abandonment is None:
            return
        failed = Failed(
            rank=rounds.global_rank,
            error=abandonment.error,
            identity=abandonment.identity,
            is_decision=True,
        )
        verdict = rounds.current().fail(failed, rounds.phases.patience_s)
        assert isinstance(verdict, Failed)  # noqa: S101  # only this rank claims
        rounds.note_failed(verdict, rounds.current())
        rounds.raise_failure()
