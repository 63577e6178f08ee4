"""How the ranks of a load that may share reads find one another.

Knows operations, what a rank wishes and offers, and the ways between ranks; knows no request and no
tensor. Made by `loading` (the ranks of its operation) and by `reader` (those of the default group,
under `dcp.load`); `loadreads` asks for the links.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass

import torch.distributed as dist

from .coordination import Coordinator
from .coordination_torch import coordinator_of
from .deadline import Deadline
from .errors import CheckpointError
from .hostmemory import HostMemory, HostMemoryError, Offer
from .namelessmemory import host_identity
from .operation import Operation
from .options import Timeouts
from .peers import Peers, peers_of
from .sharedreads import Links, Wish

__all__ = [
    "DefaultGroupSharers",
    "MapLeave",
    "MapWish",
    "OperationSharers",
    "leave_to_map",
    "own_host",
]

log = logging.getLogger("ckpt_storage")

_JOIN_S = 60.0
"""Where ranks cannot reach one another within this, each reads for itself."""

_MEET_S = 20.0
"""One that comes no more, as its planner failed under `dcp.load`, is not waited for any longer.

All come from one collective of torch's; so whoever comes at all comes soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one rank wishes: as `Wish` has it, where it runs, and what it offers its mates."""

    verifies: bool
    maps: bool | None
    claims: str | None
    is_last: bool
    host: str
    offer: str | None


def _map_in_vain(answers: Sequence[_Answer]) -> bool:
    """Return whether ranks that wish to map have mates that do not."""
    hosts: dict[str, set[bool]] = {}
    for answer in answers:
        if answer.maps is not None:
            hosts.setdefault(answer.host, set()).add(answer.maps)
    return any(len(ways) > 1 for ways in hosts.values())


def _tables(offers: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Return for each host which of its ranks' tables all of them claim checks in."""
    tables: dict[str, str] = {}
    for host, claims in offers:
        if claims is not None:
            tables.setdefault(host, claims)
    return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class MapWish:
    """What a rank tells with its plan: whether it maps what is shared.

    With None there is nothing that it shares; with False it goes the way of a `Wish`, for which the
    coordinator has to know its plan. `claims` and `is_last` as of a `Wish`.
    """

    host: str
    maps: bool | None
    claims: str | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MapLeave:
    """What a rank is told: that all who share map, in which table it claims its checks.

    With `ends_all` nothing of any rank's load can fail once all have told that they have read.
    """

    claims: str | None
    ends_all: bool


def leave_to_map(wishes: Sequence[MapWish]) -> list[MapLeave] | None:
    """Return each rank's leave; None if nobody maps, or not all that have something to share.

    Each maps for itself: where mates have other files, or cannot reach the table, they only check
    more. So nothing else has to be agreed on.
    """
    if {wish.maps for wish in wishes} - {None} != {True}:
        return None
    tables = _tables((wish.host, wish.claims) for wish in wishes)
    ends_all = all(wish.is_last for wish in wishes)
    return [MapLeave(claims=tables.get(wish.host), ends_all=ends_all) for wish in wishes]


def own_host(rank: int) -> str:
    """Return what is equal for ranks that can reach one another's memory."""
    return host_identity() or f"rank {rank}"


class OperationSharers:
    """The ranks of an operation, as those that share reads: all join or none does.

    With `has_ended` all ranks have told that their reads ended well, and that nothing of the load
    can fail after them.
    """

    def __init__(self, operation: Operation, peers: Peers) -> None:
        self.has_ended = False
        self._operation = operation
        self._peers = peers

    @contextmanager
    def joined(
        self, wish: Wish | None, deadline: Deadline, *, otherwise: Callable[[], Wish | None]
    ) -> Iterator[Links | None]:
        """Give the links between the ranks, None on all ranks if any cannot take part.

        All ranks, as steps of the operation, whose deadline it is. Raises what that failed with.
        """
        with ExitStack() as stack:
            memory = self._memory(wish, stack)
            answers = self._told(wish, memory)
            if answers is not None and _map_in_vain(answers):
                if wish is not None and wish.maps:
                    wish = otherwise()
                    memory = self._memory(wish, stack)
                answers = self._told(wish, memory)
            found = None
            if wish is not None and answers is not None:
                found = self._met(wish, memory, answers, deadline)
            if found is None or found.memory is None:
                # Nobody looks into it: let it go before the reads.
                stack.close()
                memory = None
            if found is None or found.transport is None:
                yield found
                if found is not None and found.ends_together:
                    # What a rank copied counts once the others have checked their part of it.
                    self._operation.all_gather(b"")
                    assert answers is not None  # noqa: S101  # of which the links were made
                    self.has_ended = all(answer.is_last for answer in answers)
                return
            try:
                yield found
            except BaseException:
                # What is under way between these ranks belongs to nobody now.
                self._peers.drop()
                raise

    def all_have_read(self, *, ends_all: bool) -> None:
        """Wait until all ranks, which map by leave, have told that their reads ended well."""
        self._operation.all_gather(b"")
        self.has_ended = ends_all

    def _memory(self, wish: Wish | None, stack: ExitStack) -> HostMemory | None:
        if wish is None or wish.maps or not host_identity():
            return None
        rank, bytes_, count = self._operation.rank, wish.buffer_bytes, wish.buffer_count
        try:
            memory = HostMemory(rank, buffer_bytes=bytes_, buffer_count=count)
        except HostMemoryError as error:
            log.warning("Rank %d shares no memory with others: %s", rank, error)
            return None
        stack.callback(memory.close)
        return memory

    def _told(self, wish: Wish | None, memory: HostMemory | None) -> list[_Answer] | None:
        """Return what every rank wishes, None on all ranks if any cannot take part."""
        answer = None
        if wish is not None:
            answer = _Answer(
                verifies=wish.verifies,
                maps=wish.maps,
                claims=wish.claims,
                is_last=wish.is_last,
                host=own_host(self._operation.rank),
                offer=None if memory is None else memory.offer.pack(),
            )
        told = json.dumps(None if answer is None else asdict(answer)).encode()
        found = [json.loads(text) for text in self._operation.all_gather(told)]
        return None if None in found else [_Answer(**each) for each in found]

    def _met(
        self,
        wish: Wish,
        memory: HostMemory | None,
        answers: Sequence[_Answer],
        deadline: Deadline,
    ) -> Links | None:
        """Return how the ranks reach one another; the same kind of answer on all."""
        operation = self._operation
        host = answers[operation.rank].host
        mates = {
            rank: answer.offer
            for rank, answer in enumerate(answers)
            if answer.host == host and rank != operation.rank
        }
        # One that verifies would take what another one has not: it checks what is sent, itself.
        are_alike = len({answer.verifies for answer in answers}) == 1
        # By now all of a host do, but for those that share nothing.
        maps = any(answer.maps for answer in answers if answer.host == host)
        links = Links(
            transport=None,
            memory=None,
            deadline=deadline,
            ends_together=any(answer.maps for answer in answers),
            claims=_tables((answer.host, answer.claims) for answer in answers).get(host),
        )
        if are_alike and maps and len(mates) == operation.world_size - 1:
            return links
        has_reached = are_alike and (maps or self._has_reached(mates, memory))
        if wish.among == "host":
            has_reached = has_reached and wish.partners <= mates.keys()
        votes = operation.all_gather(b"yes" if has_reached else b"no")
        can_use_memory = set(votes) == {b"yes"}
        links = dataclasses.replace(links, memory=memory if can_use_memory and not maps else None)
        if wish.among == "host":
            return links if can_use_memory else None
        if can_use_memory and len({answer.host for answer in answers}) == 1:
            return links
        if not self._have_group(deadline):
            return None
        return dataclasses.replace(links, transport=self._peers)

    def _has_reached(self, offers: Mapping[int, str | None], memory: HostMemory | None) -> bool:
        if not offers:
            return True
        if memory is None:
            return False
        found = {rank: Offer.unpack(text) for rank, text in offers.items() if text is not None}
        if len(found) < len(offers):
            return False
        try:
            memory.reach(found)
        except HostMemoryError as error:
            log.warning("Rank %d shares no memory with others: %s", self._operation.rank, error)
            return False
        return True

    def _have_group(self, deadline: Deadline) -> bool:
        """Make the ranks' own group, if there is none; return whether all are in it."""
        operation, can_share = self._operation, True
        try:
            self._peers.join(operation, deadline, limit_s=_JOIN_S)
        except CheckpointError as error:
            failure = operation.failure()
            if failure is not None:
                raise failure from error
            deadline.check("Joining the ranks that share reads")
            log.warning("Each rank reads for itself: %s", error)
            can_share = False
        if set(operation.all_gather(b"yes" if can_share else b"no")) == {b"yes"}:
            return True
        self._peers.drop()
        return False


class DefaultGroupSharers:
    """The ranks of the default group, for a load that no operation surrounds (`dcp.load`)."""

    def __init__(self, rank: int, what: str, timeouts: Timeouts) -> None:
        self._rank = rank
        self._what = what
        self._timeouts = timeouts

    @staticmethod
    def are(world_size: int, rank: int) -> bool:
        """Return whether a load of that many ranks, and this one's number in it, is of them."""
        if not (dist.is_available() and dist.is_initialized()):
            return False
        return (dist.get_world_size(), dist.get_rank()) == (world_size, rank)

    @contextmanager
    def joined(
        self, wish: Wish | None, deadline: Deadline, *, otherwise: Callable[[], Wish | None]
    ) -> Iterator[Links | None]:
        """Make an operation of the block; ranks that do not meet read for themselves."""
        coordinator = coordinator_of(None, lane="reads")
        timeouts = self._bounded(load_s=deadline.timeout_s)
        with ExitStack() as stack:
            operation = self._met(stack, coordinator, timeouts)
            if operation is None:
                deadline.check("Meeting the ranks that share reads")
                yield None
                return
            if coordinator.rank != self._rank:
                wish = None
            watched = operation.phase("load", deadline.remaining_s())
            sharers = OperationSharers(operation, peers_of(coordinator))
            with sharers.joined(wish, watched, otherwise=otherwise) as found:
                yield found
                if found is not None and not found.ends_together:
                    # Nobody leaves the operation while another may still need to hear from it.
                    operation.all_gather(b"")

    def absent(self, error: BaseException) -> None:
        """Tell the others, who wait, that this rank failed with `error` and does not come."""
        coordinator = coordinator_of(None, lane="reads")
        try:
            with coordinator.operation(self._what, timeouts=self._bounded()):
                raise CheckpointError(  # noqa: TRY301  # what leaves the block is told
                    f"{type(error).__name__}: {error}"
                ) from error
        except CheckpointError as told:
            log.debug("Told the ranks that share reads: %s", told)

    def _bounded(self, load_s: float | None = None) -> Timeouts:
        timeouts = self._timeouts
        return dataclasses.replace(
            timeouts, plan=min(_MEET_S, timeouts.plan), load=load_s or timeouts.load
        )

    def _met(
        self, stack: ExitStack, coordinator: Coordinator, timeouts: Timeouts
    ) -> Operation | None:
        """Return the operation that all ranks have come to, entered in `stack`; None if not all."""
        with ExitStack() as trial:
            try:
                operation = trial.enter_context(
                    coordinator.operation(self._what, timeouts=timeouts)
                )
                operation.meet({})
            except CheckpointError as error:
                log.warning("Each rank reads for itself: %s", error)
                with suppress(CheckpointError):
                    trial.__exit__(type(error), error, error.__traceback__)
                return None
            stack.enter_context(trial.pop_all())
            return operation
