"""One round between the ranks of an operation: all arrive, the coordinator decides, all go on.

Each round has these keys in the store that ranks share:

`from/RANK`  the payload of a member.
`verdict`    written once, by compare-and-set: by the coordinator, which claims the round once all
             have arrived, or by the first rank that fails, with its error.
`to/RANK`    answers that differ by rank; written by the coordinator before the release.
`release`    the answer, or the failure; every rank waits for this key alone.

The coordinator polls `from/RANK` and `verdict`. It releases an answer only after it has claimed the
round, so an operation cannot both fail and go on. The release of a failure is written by each rank
that tries to set the verdict and reads the failure there.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from ckpt_storage.errors import CheckpointError

from .identity import Identity
from .keyvalue import KeyValues
from .processes import RankProcess

_T = TypeVar("_T")

_COORDINATOR = b"coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The payload of the first round. `terms` are further values that ranks must share."""

    identity: Identity
    terms: Mapping[str, str]
    value: Any
    process: RankProcess | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A verdict and release: the round failed with the error of global rank `rank`.

    In the first round `identity` names the operation that is abandoned; None: that of each rank.
    `is_decision`: the coordinator raised the error when it decided for all ranks.
    """

    rank: int
    error: CheckpointError
    identity: Identity | None = None
    is_decision: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A release: ranks go on with `answer`, or each with its own answer.

    `is_last`: the operation has no further round.
    """

    answer: Any = None
    is_by_rank: bool = False
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """A release: this session belongs to an earlier incarnation of the job."""


Release = Failed | Released | Superseded

CLAIMED: Literal["claimed"] = "claimed"
"""A verdict: the coordinator decides the round."""

Verdict = Failed | Literal["claimed"]


class UndecidedError(CheckpointError):
    """The rank does not see the outcome of a commit that may have begun; the storage shows it."""


class NumberAbandonedError(Exception):
    """The operation cannot use this number, and may take the next number.

    It was abandoned for another operation, or its session is that of an earlier incarnation.
    """


@dataclass(frozen=True, slots=True)
class ByRank(Generic[_T]):
    """A decision that gives each rank an answer of its own, in the order of ranks."""

    answers: Sequence[_T]

    @staticmethod
    def answer_for(rank: int, decision: Any) -> Any:  # noqa: ANN401  # as decisions are
        """Return the answer that a decision, for all ranks or by rank, gives one rank."""
        return decision.answers[rank] if isinstance(decision, ByRank) else decision


class Round:
    """The keys of one round, as one rank uses them. Each method raises `LostStoreError`.

    `operation` is the prefix of the keys of the operation, in which rounds have a `number` from 1.
    """

    def __init__(self, keys: KeyValues, operation: str, number: int, *, rank: int) -> None:
        self.operation = operation
        self.number = number
        self._keys = keys
        self._rank = rank
        prefix = self._prefix = f"{operation}/{number}"
        self._verdict_key = f"{prefix}/verdict"
        self.release_key = f"{prefix}/release"
        self.arrival_key = self.arrival_key_of(rank)
        self.answer_key = f"{prefix}/to/{rank}"
        # No single member owns these.
        self.shared_keys = [self._verdict_key, self.release_key]

    def next(self) -> Round:
        """Return the next round of the operation."""
        return Round(self._keys, self.operation, self.number + 1, rank=self._rank)

    def arrival_key_of(self, rank: int) -> str:
        """Return the key of a member's payload."""
        return f"{self._prefix}/from/{rank}"

    def arrive(self, payload: bytes, timeout_s: float) -> None:
        """Send this member's payload."""
        self._keys.set_polled(self.arrival_key, payload, timeout_s)

    def arrived(self, ranks: Sequence[int], timeout_s: float) -> list[int]:
        """Return those of `ranks` that have sent their payload."""
        rank_of = {self.arrival_key_of(rank): rank for rank in ranks}
        return [rank_of[key] for key in self._keys.present(list(rank_of), timeout_s)]

    def payloads(self, ranks: Sequence[int], timeout_s: float) -> dict[int, Any]:
        """Return the payloads of `ranks`, which have arrived."""
        packed = self._keys.get_many([self.arrival_key_of(rank) for rank in ranks], timeout_s)
        return {rank: _unpickled(payload) for rank, payload in zip(ranks, packed, strict=True)}

    def claim(self, timeout_s: float) -> Verdict:
        """Claim the round for the coordinator, unless it has a verdict; return the verdict."""
        return self._set_verdict(_COORDINATOR, timeout_s)

    def read_verdict(self, timeout_s: float) -> Verdict | None:
        """Return the verdict, None if there is none yet."""
        packed = self._keys.get(self._verdict_key, timeout_s)
        return None if packed is None else _unpacked(packed)

    def fail(self, failed: Failed, timeout_s: float) -> Verdict:
        """Fail the round for all ranks, unless it has a verdict; return the verdict."""
        return self._set_verdict(pickle.dumps(failed), timeout_s)

    def _set_verdict(self, packed: bytes, timeout_s: float) -> Verdict:
        """Set the verdict unless there is one; return it. Writes the release of a failure.

        The rank that failed may have ended, or lost the store, before it wrote the release.
        """
        verdict = _unpacked(self._keys.set_first(self._verdict_key, packed, timeout_s))
        if isinstance(verdict, Failed):
            self.release(verdict, timeout_s)
        return verdict

    def release(
        self, release: Release, timeout_s: float, answers: Mapping[int, bytes] | None = None
    ) -> int:
        """Let all ranks go on or fail; for the owner of the verdict. Return the release's size."""
        if answers:
            by_key = {f"{self._prefix}/to/{rank}": answer for rank, answer in answers.items()}
            write = partial(self._keys.set_many, by_key, timeout_s)
            self._keys.write_surely(write, next(reversed(by_key)), timeout_s)
        packed = pickle.dumps(release)
        self._keys.set_surely(self.release_key, packed, timeout_s)
        return len(packed)

    def read_release(self, timeout_s: float) -> Release | None:
        """Return the release, None if there is none yet."""
        packed = self._keys.get_awaited(self.release_key, timeout_s)
        return None if packed is None else _unpickled(packed)

    def read_awaited_release(self, timeout_s: float) -> Release | None:
        """Return the release after a wait for its key has ended; None if it was deleted since."""
        packed = self._keys.get(self.release_key, timeout_s)
        return None if packed is None else _unpickled(packed)

    def read_answer(self, timeout_s: float) -> bytes | None:
        """Return the answer for this rank, None if there is none."""
        return self._keys.get(self.answer_key, timeout_s)


def _unpacked(verdict: bytes) -> Verdict:
    return CLAIMED if verdict == _COORDINATOR else _unpickled(verdict)


def _unpickled(packed: bytes) -> Any:  # noqa: ANN401  # of any kind
    return pickle.loads(packed)  # noqa: S301  # our own ranks
