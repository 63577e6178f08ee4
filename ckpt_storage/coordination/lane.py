"""A lane: the operations of one kind that the ranks of a group run one after another.

Each rank counts them, and the number is part of every key: operations are never matched by what
they are about. A session keeps out the processes of an earlier incarnation of the job, whose keys
are still in the store: torchrun's restart keeps it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .identity import Identity
from .keyvalue import COORDINATOR, KeyValues, LostStoreError
from .liveness import RankProcess
from .rounds import Failed, Release, Round, Superseded

_MAX_ROUNDS = 64
"""How many rounds of an operation a rank looks through to report that it has left."""

_MAX_EARLIER = 16
"""How many numbers the coordinator looks back to find which rank is behind."""

_DELETE_S = 5.0
"""How long the removal of an old key may take; the rest is removed after a later operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unreported:
    """A call of this rank that ended without the other ranks learning of it.

    `round_number` is the round that this rank owns as coordinator; 0: none.
    """

    number: int
    round_number: int
    release: Release


class Lane:
    """The state of one rank on one lane.

    `rank` and `world_size` are those of the group, `names` its global ranks. `number` is that of
    the last operation that this rank took part in, or gave up. `has_met`: an operation of this
    session had all ranks. `processes` are those of the other ranks of this host, from then on.
    """

    def __init__(self, keys: KeyValues, *, rank: int, names: Sequence[int]) -> None:
        self.keys = keys
        self.rank = rank
        self.names = names
        self.world_size = len(names)
        self.is_coordinator = rank == COORDINATOR
        self.number = 0
        self.session = ""
        self.has_met = False
        self.processes: Mapping[int, RankProcess] = {}
        self.own_identities: list[Identity] = []
        self._met_number = 0
        self._nonce = os.urandom(16).hex()
        self._old_session: bytes | None = None
        # Calls that ended before all ranks met in this session: they count in the next one, too.
        self._ended: list[Failed] = []
        self._unreported: list[_Unreported] = []
        self._old_keys: list[tuple[int, str]] = []
        self._old_answers: list[tuple[int, Round]] = []

    def heartbeat_key(self, rank: int) -> str:
        """Return where a rank sends its heartbeats, in all operations."""
        return f"{self.session}/alive/{rank}"

    def round(self, number: int) -> Round:
        """Return a round of the present operation."""
        return self._round_of(self.session, self.number, number)

    def failed_rounds(self) -> list[Round]:
        """Return the first rounds of the last numbers that failed since all ranks met."""
        first = max(self._met_number + 1, self.number - _MAX_EARLIER)
        return [self._round_of(self.session, number, 1) for number in range(first, self.number)]

    def _round_of(self, session: str, number: int, round_number: int) -> Round:
        prefix = f"{session}/{number}/{round_number}"
        return Round(self.keys, prefix, rank=self.rank, world_size=self.world_size)

    def names_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the global ranks of ranks of the group."""
        return [self.names[rank] for rank in ranks]

    def begin(self, identity: Identity | None) -> None:
        """Take the next number."""
        self.number += 1
        if identity is not None:
            self.own_identities.append(identity)

    # Sessions.

    def join(self, wait: Callable[[str], None], timeout_s: float) -> None:
        """Enter the session of this incarnation of the job, at the begin of each number.

        `wait` waits for a key, or raises; each request has `timeout_s`. Raises `LostStoreError`.
        """
        if self.is_coordinator:
            if not self.session:
                self._open(timeout_s)
            return
        while not self.has_met:
            token = self.keys.get("session", timeout_s)
            if token is None:
                wait("session")
                continue
            session = token.decode()
            if session == self.session:
                return
            if session.rpartition("-")[2] != _incarnation():
                wait(f"{session}/superseded")
                continue
            nonce = self._nonce.encode()
            if self.keys.set_first(f"{session}/join/{self.rank}", nonce, timeout_s) == nonce:
                self._enter(session)
                return
            # A process of this rank that is gone was in that session.
            wait(f"{session}/superseded")

    def _open(self, timeout_s: float) -> None:
        """Make a session; release those that wait in the session before.

        Repeated by the next call if a request fails.
        """
        session = f"{self._nonce}-{_incarnation()}"
        token = self.keys.get("session", timeout_s)
        if token is not None and token.decode() != session:
            self._old_session = token
        self.keys.set_surely("session", session.encode(), timeout_s)
        if self._old_session is not None:
            old = self._old_session.decode()
            self.keys.set_surely(f"{old}/superseded", session.encode(), timeout_s)
            number, is_open = 1, False
            while not is_open:
                # A rank of this incarnation may wait under any number up to the first open one.
                first_round = self._round_of(old, number, 1)
                is_open = not first_round.is_decided(timeout_s)
                first_round.release(Superseded(), timeout_s)
                number += 1
        self._enter(session)

    def _enter(self, session: str) -> None:
        self.session, self.number, self._met_number = session, 0, 0
        self.own_identities.clear()
        self._unreported = [
            _Unreported(number=number, round_number=0, release=failed)
            for number, failed in enumerate(self._ended, 1)
        ]

    def is_superseded(self, timeout_s: float) -> bool:
        """Return whether a newer incarnation of the job has made another session."""
        if self.has_met or self.is_coordinator:
            return False
        token = self.keys.get("session", timeout_s)
        return token is not None and token.decode() != self.session

    def met(self, processes: Mapping[int, RankProcess] | None) -> None:
        """Note that all ranks have met in the present operation."""
        self.has_met = True
        self.processes = processes or self.processes
        self._met_number = self.number
        self.own_identities.clear()
        self._ended.clear()

    # Calls that the other ranks have not heard of.

    def ended(self, failed: Failed) -> None:
        """Note that a call of this rank failed; the lane must be told of each before all met."""
        if not self.has_met:
            self._ended.append(failed)

    def remember(self, release: Release, round_number: int = 0, *, has_number: bool = True) -> None:
        """Keep a release that could not be written, for the next call to write.

        Without `has_number` the call had not taken a number yet: it counts as the next one.
        """
        if not self.session:
            return
        number = self.number
        if not has_number:
            number = max([number, *(earlier.number for earlier in self._unreported)]) + 1
        self._unreported.append(
            _Unreported(number=number, round_number=round_number, release=release)
        )

    def report_earlier(self, timeout_s: float) -> None:
        """Write what earlier calls could not: other ranks may still wait for it.

        An operation that went on without this rank fails in the first round that is still open.
        """
        while self._unreported:
            earlier = self._unreported[0]
            self.number = max(self.number, earlier.number)
            if earlier.round_number:
                owned = self._round_of(self.session, earlier.number, earlier.round_number)
                owned.release(earlier.release, timeout_s)
                if isinstance(earlier.release, Failed):
                    # An answer that was released before may have been read.
                    following = earlier.round_number + 1
                    next_round = self._round_of(self.session, earlier.number, following)
                    next_round.fail(earlier.release, timeout_s)
            elif isinstance(earlier.release, Failed):
                for round_number in range(1, _MAX_ROUNDS):
                    current = self._round_of(self.session, earlier.number, round_number)
                    if current.fail(earlier.release, timeout_s) is not None:
                        break
                    if self.is_coordinator and current.read_release(timeout_s) is None:
                        # Our own claim, whose reply was lost.
                        current.release(earlier.release, timeout_s)
                        break
            self._unreported.pop(0)

    # Keys that are of no use any more.

    def own(self, *keys: str) -> None:
        """Note keys of the present operation, which this rank removes later."""
        self._old_keys += [(self.number, key) for key in keys]

    def own_answer(self, current: Round) -> None:
        """Note a round of the present operation whose answer this rank may not have taken."""
        self._old_answers.append((self.number, current))

    def delete_old(self, timeout_s: float) -> None:
        """Remove keys of operations before the present one, in which all ranks have met.

        Before that a release must stay: a rank may come to it several operations late.
        """
        with contextlib.suppress(LostStoreError):
            while self._old_keys and self._old_keys[0][0] < self.number:
                self.keys.delete(self._old_keys[0][1], min(timeout_s, _DELETE_S))
                self._old_keys.pop(0)
            while self._old_answers and self._old_answers[0][0] < self.number:
                self._old_answers[0][1].take_answer(min(timeout_s, _DELETE_S))
                self._old_answers.pop(0)


def _incarnation() -> str:
    """Return how often torchrun has restarted the job, the same on all ranks."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
