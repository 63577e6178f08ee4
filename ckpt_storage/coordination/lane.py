"""A lane: the operations of one kind that the ranks of a group run one after another.

Each rank counts them, and the number is part of every key: operations are never matched by their
URLs. A session keeps out the processes of an earlier incarnation of the job, whose keys are still
in the store: torchrun's restart keeps it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .identity import Identity
from .keyvalue import COORDINATOR, KeyValues, LostStoreError
from .processes import RankProcess
from .rounds import CLAIMED, Failed, Release, Round, Superseded

_MAX_ROUNDS = 64
"""How many rounds of an earlier operation a rank tries to fail."""

_MAX_EARLIER = 16
"""How many failed numbers the coordinator remembers to find which rank is behind."""

_DELETE_S = 5.0
"""How long the removal of an old key may take; the rest is removed after a later operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unreported:
    """A call of this rank that ended without a report to the other ranks.

    `owned` is the round that this rank has claimed as coordinator.
    """

    number: int
    owned: Round | None
    release: Release


class Lane:
    """The state of one rank on one lane.

    `rank` and `world_size` are those of the group. `number` is that of the last operation that this
    rank took part in, or abandoned. `has_met`: an operation of this session had all ranks.
    `processes` are those of the ranks of this host, from then on. `earlier` are the identities by
    global rank that the coordinator has compared since the last operation that had all ranks.
    `find_elsewhere` describes, for an error, which of some ranks are in another lane's operation.
    """

    def __init__(self, keys: KeyValues, *, rank: int, global_ranks: Sequence[int]) -> None:
        self.keys = keys
        self.rank = rank
        self.global_ranks = global_ranks
        self.world_size = len(global_ranks)
        self.is_coordinator = rank == COORDINATOR
        self.number = 0
        self.session = ""
        self.has_met = False
        self.processes: Mapping[int, RankProcess] = {}
        self.find_elsewhere: Callable[[Sequence[int], float], str] = lambda *_: ""
        self.earlier: deque[Mapping[int, Identity]] = deque(maxlen=_MAX_EARLIER)
        self._nonce = os.urandom(16).hex()
        self._old_session: bytes | None = None
        # Calls that ended before all ranks met in this session also count in the next session.
        self._ended: list[Failed] = []
        self._unreported: list[_Unreported] = []
        self._old_keys: dict[tuple[int, str], int] = {}  # sizes by number and key

    def heartbeat_key(self, rank: int) -> str:
        """Return the key in `heartbeat_keys` of a rank, in all operations of the session."""
        return f"{self.session}/{rank}"

    def prefix(self, number: int | None = None) -> str:
        """Return the prefix of the keys of the present operation, or of that of a number."""
        return f"{self.session}/{self.number if number is None else number}"

    def first_round(self, prefix: str) -> Round:
        """Return the first round of the operation of a prefix."""
        return Round(self.keys, prefix, 1, rank=self.rank)

    def global_ranks_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the global ranks of ranks of the group."""
        return [self.global_ranks[rank] for rank in ranks]

    # Sessions.

    def join(self, wait: Callable[[str], None], timeout_s: float) -> None:
        """Enter the session of this incarnation of the job; called before each number.

        `wait` waits for a key, or raises; each request has `timeout_s`. Raises `LostStoreError`.
        """
        if self.is_coordinator and not self.session:
            self._open(timeout_s)
        while not self.has_met and not self.is_coordinator:
            token = self.keys.get_awaited("session", timeout_s)
            if token is None:
                wait("session")
                continue
            session = token.decode()
            if session == self.session:
                return
            if session.rpartition("-")[2] == _restart_count():
                slot, nonce = f"{session}/join/{self.rank}", self._nonce.encode()
                if self.keys.set_first(slot, nonce, timeout_s) == nonce:
                    self._enter(session)
                    return
            # An earlier process of this rank was in that session.
            wait(f"{session}/superseded")

    def _open(self, timeout_s: float) -> None:
        """Make a session; release the ranks that wait in the session before."""
        session = f"{self._nonce}-{_restart_count()}"
        token = self.keys.get_awaited("session", timeout_s)
        if token is not None and token.decode() != session:
            self._old_session = token
        self.keys.set_surely("session", session.encode(), timeout_s)
        if self._old_session is not None:
            old = self._old_session.decode()
            self.keys.set_surely(f"{old}/superseded", session.encode(), timeout_s)
            number, has_verdict = 1, True
            while has_verdict:
                # A rank of this incarnation may wait under any number up to the first that has no
                # verdict.
                first_round = self.first_round(f"{old}/{number}")
                has_verdict = first_round.read_verdict(timeout_s) is not None
                first_round.release(Superseded(), timeout_s)
                number += 1
        self._enter(session)

    def _enter(self, session: str) -> None:
        self.session, self.number = session, 0
        self.earlier.clear()
        self._unreported = [
            _Unreported(number=number, owned=None, release=failed)
            for number, failed in enumerate(self._ended, 1)
        ]

    def is_superseded(self, timeout_s: float) -> bool:
        """Return whether a newer incarnation of the job has made another session."""
        if self.has_met or self.is_coordinator:
            return False
        token = self.keys.get_awaited("session", timeout_s)
        return token is not None and token.decode() != self.session

    def publish_processes(
        self, processes: Mapping[int, RankProcess | None], timeout_s: float
    ) -> None:
        """Write the processes of ranks, those of each host under a key; they stay in a session."""
        by_host: dict[str, dict[int, RankProcess]] = {}
        for rank, process in processes.items():
            if process is not None:
                by_host.setdefault(process.host, {})[rank] = process
        packed = {self._host_key(host): pickle.dumps(of) for host, of in by_host.items()}
        self.keys.set_many(packed, timeout_s)

    def note_met(self, timeout_s: float) -> None:
        """Note that all ranks have met; read the processes of this host at the first time."""
        own = RankProcess.own()
        if not self.has_met and own is not None:
            with contextlib.suppress(LostStoreError):
                packed = self.keys.get(self._host_key(own.host), timeout_s)
                self.processes = pickle.loads(packed) if packed else {}  # noqa: S301  # our own ranks
        self.has_met = True
        self.earlier.clear()
        self._ended.clear()

    def _host_key(self, host: str) -> str:
        return f"{self.session}/host/{host}"

    # Calls that were not reported to the other ranks.

    def note_ended(self, failed: Failed) -> None:
        """Note that a call of this rank failed: it counts in the session where all ranks meet.

        A read does not count: it may take the number of a later read of the others.
        """
        is_read = failed.identity is not None and failed.identity.is_read
        if not self.has_met and not is_read:
            self._ended.append(failed)

    def remember(
        self, release: Release, owned: Round | None = None, *, has_number: bool = True
    ) -> None:
        """Keep a release that could not be written, for the next call to write.

        Without `has_number` the call had not taken a number yet: it counts as the next number.
        """
        if not self.session:
            return
        number = self.number
        if not has_number:
            number = max([number, *(earlier.number for earlier in self._unreported)]) + 1
        self._unreported.append(_Unreported(number=number, owned=owned, release=release))

    def report_earlier(self, timeout_s: float) -> None:
        """Write the releases that earlier calls could not write: other ranks may wait for them.

        An operation that continued without this rank fails in the first round that is still open.
        """
        while self._unreported:
            earlier = self._unreported[0]
            self.number = max(self.number, earlier.number)
            first_open = self.first_round(self.prefix(earlier.number))
            if earlier.owned is not None:
                earlier.owned.release(earlier.release, timeout_s)
                # Members that have read an earlier answer wait in the round after it.
                first_open = earlier.owned.next()
            if isinstance(earlier.release, Failed):
                self._fail_open_round(first_open, earlier.release, timeout_s)
            self._unreported.pop(0)

    def _fail_open_round(self, current: Round, failed: Failed, timeout_s: float) -> None:
        while current.number < _MAX_ROUNDS:
            if current.fail(failed, timeout_s) != CLAIMED:
                return
            if self.is_coordinator and current.read_release(timeout_s) is None:
                # This rank's own claim, whose reply was lost.
                current.release(failed, timeout_s)
                return
            current = current.next()

    # Keys of operations that are over.

    def own(self, *keys: str, size_bytes: int = 0) -> None:
        """Note keys of the present operation, which this rank removes later."""
        self._old_keys.update({(self.number, key): size_bytes for key in keys})

    def delete_old(self, timeout_s: float) -> None:
        """Remove keys of operations before the present one, in which all ranks have met.

        Before that a release must stay: a rank may read it several operations late.
        """
        with contextlib.suppress(LostStoreError):
            for (number, key), size_bytes in list(self._old_keys.items()):
                if number >= self.number:
                    break
                self.keys.delete(key, min(timeout_s, _DELETE_S), size_bytes=size_bytes)
                del self._old_keys[number, key]


def _restart_count() -> str:
    """Return how often torchrun has restarted the job, the same on all ranks."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
