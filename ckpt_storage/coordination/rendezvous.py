"""The first round of an operation: the coordinator compares the operations of all ranks."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .coordinator import Coordinator
from .identity import Identity, find_disagreement
from .keyvalue import LostStoreError
from .liveness import RankProcess
from .operation_rounds import OperationRounds
from .rounds import Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The payload of the first round. `terms` are further values that ranks must share."""

    identity: Identity
    terms: Mapping[str, str]
    value: Any
    process: RankProcess | None


class Rendezvous:
    """The first round of an operation on the coordinator."""

    def __init__(self, rounds: OperationRounds, coordinator: Coordinator) -> None:
        self._rounds = rounds
        self._lane = rounds.lane
        self._coordinator = coordinator

    def decide(self, own: Arrival, decide: Callable[[list[Any]], Any]) -> Any:  # noqa: ANN401  # as `decide` returns
        """Collect the arrivals; decide for all ranks, or abandon the number. Return the answer."""
        lane = self._lane
        arrivals: dict[int, Arrival] = {lane.rank: own, **self._coordinator.collect()}
        missing = [rank for rank in range(lane.world_size) if rank not in arrivals]
        self._abandon_if_different(arrivals, is_complete=not missing)
        if missing:
            known = lane.find_elsewhere(missing, self._rounds.phases.patience_s)
            raise self._rounds.phases.late(lane.names_of(missing), "not arrived", known)
        self._coordinator.claim()
        if not lane.has_met:
            self._publish_processes(arrivals)
        values = [arrivals[rank].value for rank in range(lane.world_size)]
        # Payloads of all ranks are large; no reference to them is kept here.
        del arrivals
        decision = decide(values)
        del values
        return self._coordinator.answer(decision)

    def _publish_processes(self, arrivals: Mapping[int, Arrival]) -> None:
        """Write the processes of each host under a key of the session; they do not change in it."""
        by_host: dict[str, dict[int, RankProcess]] = {}
        for rank, arrival in arrivals.items():
            if arrival.process is not None:
                by_host.setdefault(arrival.process.host, {})[rank] = arrival.process
        lane = self._lane
        packed = {lane.host_key(host): pickle.dumps(of) for host, of in by_host.items()}
        lane.keys.set_many(packed, self._rounds.phases.patience_s)

    def _abandon_if_different(self, arrivals: Mapping[int, Arrival], *, is_complete: bool) -> None:
        """Abandon the number if the operations of ranks differ, or their terms.

        Raises why this rank fails, or `NumberAbandonedError` if it goes on under the next number.
        """
        names = self._lane.names
        identities = {names[rank]: arrivals[rank].identity for rank in sorted(arrivals)}
        self._lane.identities[self._lane.number] = identities
        abandonment = find_disagreement(
            identities,
            {names[rank]: arrivals[rank].terms for rank in sorted(arrivals)},
            read_earlier=self._read_earlier,
            phase="load" if identities[names[self._lane.rank]].kind == "the load" else "plan",
            is_complete=is_complete,
        )
        if abandonment is not None:
            failed = Failed(
                rank=self._rounds.global_rank,
                error=abandonment.error,
                identity=abandonment.identity,
                is_decision=True,
            )
            self._coordinator.abandon(failed)

    def _read_earlier(self) -> list[Mapping[int, Identity]]:
        """Return the identities of ranks under each of the last numbers that failed.

        A payload may be large, so it is read once; a rank may have arrived after the failure.
        """
        lane, patience_s = self._lane, self._rounds.phases.patience_s
        earlier = list[Mapping[int, Identity]]()
        for number in lane.recent_failed_numbers():
            identities = lane.identities.setdefault(number, {})
            unknown = [rank for rank in self._rounds.others if lane.names[rank] not in identities]
            first_round = lane.round(lane.prefix(number), 1)
            arrived = first_round.arrived(unknown, patience_s)
            arrivals: dict[int, Arrival] = first_round.payloads(arrived, patience_s)
            identities |= {lane.names[rank]: arrival.identity for rank, arrival in arrivals.items()}
            earlier.append(identities)
        return earlier


def read_local_processes(rounds: OperationRounds) -> Mapping[int, RankProcess]:
    """Return the processes of this host by rank, which the coordinator published; else none."""
    own = RankProcess.own()
    with contextlib.suppress(LostStoreError):
        packed = own and rounds.lane.keys.get(
            rounds.lane.host_key(own.host), rounds.phases.patience_s
        )
        if packed:
            return pickle.loads(packed)  # type: ignore[no-any-return]  # noqa: S301  # our own ranks
    return {}
