"""The ranks' own gloo group: for bytes between ranks that are too many for the board.

Knows gloo and operations; knows nothing of what is sent. Called by consolidation, for ranks that
cannot read one another's files. The training group, whatever its backend, takes no part.

Made on first use, and anew after an operation failed: a gloo group is of no use after one wait
that timed out. Not by `torch.distributed.new_group`: with `use_local_synchronization=True` its name
depends on how many groups each member has been in, so members of unequal history wait for one
another for ever; without, ranks outside the group would have to call it, too.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from .coordination import Coordinator
from .coordination_torch import StoreBoard, coordinator_of
from .deadline import Deadline
from .errors import CheckpointError, InvalidInputError, RankFailedError
from .hostmemory import HostMemory, HostMemoryError, Offer, host_identity
from .operation import Operation
from .options import Timeouts
from .sharedreads import Links, Wish
from .store.timed import AbandonedError, TimedPool

__all__ = ["DefaultGroupSharers", "OperationSharers", "Peers", "peers_of"]

log = logging.getLogger("ckpt_storage")

_T = TypeVar("_T")

_WORD_S = 2.0
"""Within this every live rank hears of a failure."""

_NOTICE_S = 5.0
"""Beyond `Timeouts.silence`, how long it may take until a silent rank is named on all others."""

_JOIN_S = 60.0
"""Where ranks cannot reach one another within this, each reads for itself."""


_MEET_S = 20.0
"""One that comes no more, as its planner failed under `dcp.load`, is not waited for any longer.

All come from one collective of torch's; so whoever comes at all comes soon."""


class Peers:
    """Point-to-point messages between the ranks of a Coordinator.

    All ranks `join` in the same operation before they send. Several threads may send and receive
    at a time, if no two use one tag with one rank. Every wait ends by its deadline, and
    soon after the operation failed on another rank.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        # Weakly: `peers_of` keeps one for as long as there is the Coordinator.
        self._coordinator = weakref.ref(coordinator)
        self._group: dist.ProcessGroupGloo | None = None
        self._was_lost = False
        self._word_s = _WORD_S
        self._key = ""
        self._pool = TimedPool("ckpt-storage peers")

    @property
    def key(self) -> str:
        """What the present group is known by among its ranks; empty without one."""
        return self._key

    def join(self, operation: Operation, deadline: Deadline, *, limit_s: float = math.inf) -> None:
        """Make the group if any rank has none; all ranks, as one step of `operation`.

        Making it takes at most `limit_s` seconds.

        Raises `RankFailedError`, `PhaseTimeoutError`, `InvalidInputError` (a Coordinator whose
        ranks share no store).
        """
        coordinator = self._coordinator()
        if coordinator is None or coordinator.world_size == 1:
            return
        board = coordinator.board
        if not isinstance(board, StoreBoard):
            raise InvalidInputError(
                "These ranks have no store over which they could find one another.",
                next_step="Use a Coordinator of a process group.",
            )
        # What is found dead is found by its silence; sockets tell only that somebody is gone.
        self._word_s = operation.timeouts.silence + _NOTICE_S
        keys = operation.gather(self._key.encode())
        fresh = os.urandom(8).hex()
        same = len(set(keys)) == 1 and keys[0] != b""
        key: str = pickle.loads(  # noqa: S301  # our own ranks
            operation.broadcast(pickle.dumps(keys[0].decode() if same else fresh))
        )
        if key == self._key:
            return
        self.drop()
        twin = board.twin()
        rank, world_size = coordinator.rank, coordinator.world_size
        seconds = max(1.0, min(limit_s, deadline.remaining_s()))
        timeout = timedelta(seconds=seconds)
        self._group = self._run(
            lambda: dist.ProcessGroupGloo(
                dist.PrefixStore(f"ckpt_storage/peers/{key}", twin.root()),
                rank,
                world_size,
                timeout,
            ),
            deadline,
            "The ranks' own gloo group was not made",
            word_s=_WORD_S,
        )
        self._key = key

    def send(self, to: int, data: memoryview, tag: int, deadline: Deadline) -> None:
        """Send `data` to rank `to`, which receives it under the same `tag`."""
        group, tensor = self._joined(deadline), _tensor(data)

        def begin() -> dist.Work:
            return group.send([tensor], to, tag)  # type: ignore[attr-defined,no-any-return]  # a stub

        self._await(begin, deadline, f"Sending to rank {to}", to)

    def receive(self, source: int, into: memoryview, tag: int, deadline: Deadline) -> None:
        """Fill `into` (writable) with what rank `source` sends under `tag`, of that length."""
        group, tensor = self._joined(deadline), _tensor(into)

        def begin() -> dist.Work:
            return group.recv([tensor], source, tag)  # type: ignore[attr-defined,no-any-return]  # a stub

        self._await(begin, deadline, f"Receiving from {source}", source)

    def receive_any(self, into: memoryview, tag: int, deadline: Deadline) -> int:
        """Fill `into` (writable) with what any rank sends under `tag`; return which rank did."""
        group, tensor = self._joined(deadline), _tensor(into)

        def begin() -> dist.Work:
            return group.recv_anysource([tensor], tag)  # type: ignore[attr-defined,no-any-return]  # a stub

        work = self._await(begin, deadline, "Receiving from any rank", None)
        source: int = work._source_rank()  # noqa: SLF001  # torch's own way, in dist.recv
        return source

    def drop(self) -> None:
        """Forget the group; called after a failed operation, idempotent, never waits."""
        self._group, self._key, self._was_lost = None, "", False

    def _joined(self, deadline: Deadline) -> dist.ProcessGroupGloo:
        group = self._group
        if group is None and self._was_lost:
            # Another thread found the group broken; what broke it is what is to be told.
            self._hear(deadline, "Reaching the other ranks", self._word_s)
            raise RankFailedError(
                "The ranks' own gloo group broke.",
                failures={},
                phase=deadline.phase,
                next_step="See what became of the other ranks.",
            )
        if group is None:
            raise InvalidInputError("The ranks have not joined.", next_step="Call join first.")
        return group

    def _lose(self) -> None:
        self._was_lost = True
        self._group, self._key = None, ""

    def _hear(self, deadline: Deadline, what: str, seconds: float) -> None:
        """Raise why the operation failed, once that is known: words are slower than sockets.

        A socket's end does not tell who died: a rank that lost another one closes all of its own.
        Returns if nothing is known after `seconds`.
        """
        if deadline.is_watched:
            deadline.sleep(seconds)
        deadline.check(what)

    def _await(
        self, begin: Callable[[], dist.Work], deadline: Deadline, what: str, rank: int | None
    ) -> dist.Work:
        # One that times out in gloo itself breaks the group; the margin lets ours be first.
        limit = timedelta(seconds=deadline.remaining_s() + 60.0)

        def call() -> dist.Work:
            # The beginning fails, too, once the peer is known to be gone.
            work = begin()
            work.wait(limit)
            return work

        return self._run(call, deadline, what, rank)

    def _run(
        self,
        call: Callable[[], _T],
        deadline: Deadline,
        what: str,
        rank: int | None = None,
        *,
        word_s: float | None = None,
    ) -> _T:
        try:
            return self._pool.run(
                call,
                timeout_s=deadline.remaining_s(),
                what=what,
                repeatable=False,
                cancelled=deadline.has_failed,
            )
        except AbandonedError:
            self._lose()
            deadline.check(what)
            raise deadline.error(what) from None
        except CheckpointError:
            raise
        except Exception as error:
            # Torch raises RuntimeErrors of several kinds when a peer is gone.
            self._lose()
            self._hear(deadline, what, self._word_s if word_s is None else word_s)
            raise RankFailedError(
                f"{what} failed: {error}",
                failures={} if rank is None else {rank: str(error)},
                rank=rank,
                phase=deadline.phase,
                next_step="See what became of that rank.",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one rank wishes: as `Wish` has it, where it runs, and what it offers its mates."""

    verifies: bool
    maps: bool | None
    files: Mapping[str, str]
    host: str
    offer: str | None


def _map_in_vain(answers: Sequence[_Answer]) -> bool:
    """Return whether ranks that wish to map have mates that do not, or that have other files.

    The same path leads elsewhere for a process with other mounts, or once a file was replaced.
    """
    hosts: dict[str, list[_Answer]] = {}
    for answer in answers:
        if answer.maps is not None:
            hosts.setdefault(answer.host, []).append(answer)
    for mates in hosts.values():
        if len({mate.maps for mate in mates}) > 1:
            return True
        known: dict[str, str] = {}
        for mate in mates:
            if any(known.setdefault(path, it) != it for path, it in mate.files.items()):
                return True
    return False


class OperationSharers:
    """The ranks of an operation, as those that share reads: all join or none does."""

    def __init__(self, operation: Operation, peers: Peers) -> None:
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
                return
            try:
                yield found
            except BaseException:
                # What is under way between these ranks belongs to nobody now.
                self._peers.drop()
                raise

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
                files=wish.files,
                host=host_identity() or f"rank {self._operation.rank}",
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
                if found is not None:
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


_peers: weakref.WeakKeyDictionary[Coordinator, Peers] = weakref.WeakKeyDictionary()


def peers_of(coordinator: Coordinator) -> Peers:
    """Return the messages between the ranks of a Coordinator, the same each time."""
    found = _peers.get(coordinator)
    if found is None:
        found = _peers[coordinator] = Peers(coordinator)
    return found


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
