"""How the ranks of one group meet before an operation.

Rank 0 calls, each rank answers with its terms, rank 0 judges and tells all (decision 4). Each side
believes only what stands under a random name of its own: answers stand under the call's token, the
verdict under the answer's nonce. So nothing that a dead process left is ever believed.

Operations are numbered on each rank. A rank that comes to one which the others have given up is
told so alone, and its next answer is awaited. A rank that missed a whole call comes with another
number but the same terms. It is admitted, and all go on from the highest number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError, RankFailedError

from .failures import check_terms, lost, name_ranks, of_rank, travelling
from .keyvalue import COORDINATOR, LostStoreError
from .liveness import RankProcess, Siblings

if TYPE_CHECKING:
    from .operation import Operation

log = logging.getLogger("ckpt_storage")

_WITHDRAW_S = 1.0

_STAY_S = 3.0
"""How long rank 0, which may host the store, stays for those that have not read an error."""

_LOG_S = 60.0
"""How often a rank that waits for others says who is missing."""

_CALL = "call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank says to a call: its terms, or why it failed before it came; its process."""

    number: int
    nonce: str
    terms: Mapping[str, str] | None = None
    error: CheckpointError | None = None
    process: RankProcess | None = None

    @property
    def verdict_key(self) -> str:
        """Where rank 0 puts its verdict; who has read it removes it."""
        return f"verdict/{self.nonce}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What rank 0 tells a rank: the operation's id, or an error; and who else is on its host."""

    number: int
    operation_id: str = ""
    error: CheckpointError | None = None
    siblings: Mapping[int, RankProcess] = field(default_factory=dict)


class Meeting:
    """The beginning of one operation on one rank.

    `late_id` is the id of an operation that began with this rank just as it gave up waiting.
    `is_over`: the verdict is known, or will not be waited for.
    """

    def __init__(self, operation: Operation) -> None:
        self.is_over = False
        self.late_id = ""
        self._operation = operation
        self._group = operation.group
        self._told_alone: set[str] = set()
        self._logged_s = time.monotonic()

    def come(self, terms: Mapping[str, str] | None, error: CheckpointError | None = None) -> str:
        """Meet all ranks and return the operation's id; without `terms`: to tell of `error`."""
        group, process = self._group, RankProcess.own()
        nonce = os.urandom(16).hex()
        own = Answer(number=group.number, nonce=nonce, terms=terms, error=error, process=process)
        # Whose process has ended since the ranks last met will not come.
        with contextlib.closing(Siblings(group.siblings)) as siblings:
            come = self._call if group.is_coordinator else self._answer
            verdict = come(own, siblings)
        self.is_over = True
        group.siblings = verdict.siblings or group.siblings
        group.number = verdict.number
        if verdict.error is not None:
            raise verdict.error
        return verdict.operation_id

    # Members.

    def _answer(self, own: Answer, siblings: Siblings) -> Verdict:
        """Answer each call, also those of dead processes, until there is a verdict."""
        operation, packed = self._operation, pickle.dumps(own)

        def look() -> Verdict | None:
            verdict = self._verdict(own)
            if verdict is not None:
                return verdict
            call = operation.get(_CALL)
            key = _answer_key((call or b"").decode(), operation.rank)
            if call is not None and key not in operation.own_keys:
                operation.put(key, packed)
            if COORDINATOR in siblings.ended():
                raise self._gone(COORDINATOR)
            self._log_late({COORDINATOR: own.verdict_key})
            return None

        try:
            verdict = operation.until(look, lambda: operation.late([COORDINATOR], "not answered"))
        except BaseException:
            if own.error is None:
                self._withdraw(own)
            raise
        # This tells rank 0, too, that it was read.
        self._group.keys.delete(own.verdict_key, operation.patience_s())
        return verdict

    def _verdict(self, own: Answer) -> Verdict | None:
        data = self._operation.get(own.verdict_key)
        verdict: Verdict | None = None if data is None else pickle.loads(data)  # noqa: S301  # ours
        return verdict

    def _withdraw(self, own: Answer) -> None:
        """Take back the answers, and look whether the operation began all the same."""
        self.is_over = True
        with contextlib.suppress(LostStoreError):
            for key in self._operation.own_keys:
                self._group.keys.delete(key, _WITHDRAW_S)
            verdict = self._verdict(own)
            if verdict is not None:
                self.late_id = verdict.operation_id

    # The coordinator.

    def _call(self, own: Answer, siblings: Siblings) -> Verdict:
        """Call, collect the answers, judge them and tell all; return the verdict."""
        group, operation = self._group, self._operation
        token = os.urandom(16).hex()
        came = {group.rank: own}
        try:
            group.keys.set(_CALL, token.encode(), operation.patience_s())
            late = self._collect(token, came, siblings)
        except LostStoreError:
            raise
        except BaseException as failure:
            # An interrupt: those who came must not wait for what will not be.
            self.is_over = True
            told = of_rank(group.rank, travelling(failure), operation.what)
            with contextlib.suppress(LostStoreError, PhaseTimeoutError):
                self._take(token, came)
            with contextlib.suppress(LostStoreError):
                self._tell(came, Verdict(number=own.number, error=told))
            raise
        if len(came) < group.world_size:
            group.given_up = own
        verdict = self._judge(token, came, late)
        self._tell(came, verdict)
        if verdict.error is not None:
            self._stay(came)
        return replace(verdict, siblings=_by_host(came)[_host(own)])

    def _collect(
        self, token: str, came: dict[int, Answer], siblings: Siblings
    ) -> CheckpointError | None:
        """Take in all answers; return why some are not waited for any more."""
        operation = self._operation
        keys = {rank: _answer_key(token, rank) for rank in operation.others}
        gone: list[int] = []

        def look() -> bool | None:
            if operation.has_all([key for rank, key in keys.items() if rank not in came]):
                self._take(token, came)
            gone.extend(rank for rank in siblings.ended() if rank not in came)
            self._log_late(keys)
            return True if gone or len(came) == operation.world_size else None

        # Out of time, those are judged who have answered.
        with contextlib.suppress(PhaseTimeoutError):
            operation.until(look, lambda: operation.late([], "not come"))
        try:
            self._take(token, came)
        except PhaseTimeoutError as own_lateness:
            return own_lateness
        missing = [rank for rank in keys if rank not in came]
        if gone and gone[0] in missing:
            return self._gone(gone[0])
        return operation.late(missing, "not come") if missing else None

    def _take(self, token: str, came: dict[int, Answer]) -> None:
        """Take in who has answered; raise if they are in a later operation than this rank."""
        group = self._group
        for rank in self._operation.others:
            data = None if rank in came else self._operation.get(_answer_key(token, rank))
            if data is None:
                continue
            answer: Answer = pickle.loads(data)  # noqa: S301  # our own ranks
            if answer.nonce in self._told_alone:
                continue
            order = _order(answer, came[group.rank], group.given_up)
            if order == "later":
                raise self._over(group.rank)
            if order == "same":
                came[rank] = answer
            else:
                # Its own number: the next operation that it calls is the one that waits for it.
                self._told_alone.add(answer.nonce)
                self._tell({rank: answer}, Verdict(number=answer.number, error=self._over(rank)))

    def _judge(
        self, token: str, came: Mapping[int, Answer], late: CheckpointError | None
    ) -> Verdict:
        number, what = max(one.number for one in came.values()), self._operation.what
        try:
            for rank, answer in sorted(came.items()):
                if answer.error is not None:
                    raise of_rank(rank, answer.error, what)
            terms = {rank: one.terms for rank, one in sorted(came.items()) if one.terms is not None}
            check_terms(terms, phase="load" if what.startswith("the load ") else "plan")
            if late is not None:
                raise late
        except CheckpointError as error:
            return Verdict(number=number, error=error)
        return Verdict(number=number, operation_id=token)

    def _tell(self, came: Mapping[int, Answer], verdict: Verdict) -> None:
        packed = {
            host: pickle.dumps(replace(verdict, siblings=found))
            for host, found in _by_host(came).items()
        }
        for rank, answer in came.items():
            if rank != self._group.rank:
                self._operation.put(answer.verdict_key, packed[_host(answer)])

    def _stay(self, came: Mapping[int, Answer]) -> None:
        """Wait a moment until all that came have read the error: this rank may host the store."""
        unread = [one.verdict_key for rank, one in came.items() if rank != self._group.rank]
        end_s = time.monotonic() + _STAY_S
        with contextlib.suppress(LostStoreError):
            while unread and time.monotonic() < end_s:
                time.sleep(self._operation.look_s)
                unread = [key for key in unread if self._operation.get(key) is not None]

    # What is said of those that are not there.

    def _log_late(self, keys: Mapping[int, str]) -> None:
        """Log once a minute, and at least four times before the deadline, who has not come."""
        operation, deadline = self._operation, self._operation.deadline
        now_s = time.monotonic()
        if now_s < self._logged_s + min(_LOG_S, deadline.timeout_s / 5):
            return
        self._logged_s = now_s
        log.warning(
            "%s of %d: not there for %s yet, says rank %d; %.0f s are left.",
            name_ranks(operation.missing(keys)),
            operation.world_size,
            operation.what,
            operation.rank,
            deadline.remaining_s(),
        )

    def _gone(self, rank: int) -> RankFailedError:
        operation = self._operation
        phase, known = operation.deadline.phase, {rank: "its process has ended"}
        return lost([rank], operation.world_size, "died", operation.what, phase, known)

    def _over(self, rank: int) -> PhaseTimeoutError:
        return PhaseTimeoutError(
            f"Rank {rank} came to an operation ({self._operation.what} is under way or next) that "
            "the other ranks had given up before.",
            rank=rank,
            phase="plan",
            next_step="See why this rank was late; if it was only slow, raise Timeouts.plan.",
        )


def _answer_key(token: str, rank: int) -> str:
    return f"here/{token}/{rank}"


def _host(answer: Answer) -> object:
    return None if answer.process is None else answer.process.host


def _by_host(came: Mapping[int, Answer]) -> dict[object, dict[int, RankProcess]]:
    """Return the processes of the ranks that answered, by host; of none where it is unknown."""
    found: dict[object, dict[int, RankProcess]] = {}
    for rank, answer in came.items():
        processes = found.setdefault(_host(answer), {})
        if answer.process is not None:
            processes[rank] = answer.process
    return found


def _order(
    answer: Answer, own: Answer, given_up: Answer | None
) -> Literal["earlier", "same", "later"]:
    """Return which operation a rank has come to, compared with the coordinator's."""
    terms = answer.terms
    if answer.number == own.number:
        return "same"
    past = given_up if given_up is not None and answer.number <= given_up.number else None
    if past is not None and terms in (None, past.terms or {}):
        # Late for what was given up. Its state is older than what the others bring now.
        return "earlier"
    if terms is None or terms == own.terms:
        # Equal terms mean this operation; a rank that missed a whole call has a lower number.
        return "same"
    return "earlier" if answer.number < own.number else "later"
