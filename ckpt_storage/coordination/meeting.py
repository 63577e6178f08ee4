"""How ranks meet: each comes with its terms, the coordinator compares them and answers all.

The protocol is design note 4.

Operations are numbered on each rank. A rank that comes to one which the others have given up is
told so at once, instead of meeting them in the next; one that missed a call altogether comes with
another number but the same terms, and is counted right again.

A launcher that starts ranks anew keeps their store, with the words of those that it ended. So in
the first meeting the coordinator asks those that came whether they live, and takes its
predecessor's last word away; a rank that finds one from before its own start waits for that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError

from .agreement import Hello, check_agreement
from .board import BoardError, Waits
from .failures import COORDINATOR, name_ranks, of_rank
from .signs import RankProcess, start_ticks

log = logging.getLogger("ckpt_storage")

_WITHDRAW_S = 1.0

_STAY_S = 3.0
"""How long rank 0, which may host the store, stays for those that have not read an error."""

_LOG_S = 60.0
"""How often who waits for ranks that have not come says so."""

_IMPORTED_S = time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a rank says when it comes: its terms, or why it failed before it came; its process.

    `is_waiting` is whether it then waits for an answer; `said_s` when it said so (Unix seconds, by
    its own clock).
    """

    number: int
    nonce: str
    hello: Hello | None = None
    error: CheckpointError | None = None
    is_waiting: bool = True
    said_s: float = field(default_factory=time.time)
    process: RankProcess | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What the coordinator answers an arrival: the operation's id, or why there is none.

    `is_question`: neither yet. Who waits removes it, and shows by that that it lives. `siblings`
    are the processes of all ranks of the host of who came.
    """

    number: int
    operation_id: str = ""
    error: CheckpointError | None = None
    is_question: bool = False
    siblings: Mapping[int, RankProcess] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The last operation that the coordinator began without a rank that did not come."""

    number: int
    terms: Mapping[str, str]


def process_start_s() -> float:
    """Return when this process began (Unix seconds), or imported this where that is not told."""
    ticks = start_ticks("self")
    if ticks is None:
        return _IMPORTED_S
    began_s = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + began_s


class Meeting:
    """The beginning of one operation on one rank.

    `keys` are those that this rank left on the board and nobody may have removed. `number` is
    that of the operation, as all ranks count once they have met. `late_id` is the id of an
    operation that began with this rank just as it gave up waiting. `has_met` is whether this rank
    has met the others before or here: then no words of earlier processes are left for it.
    """

    def __init__(
        self,
        waits: Waits,
        *,
        rank: int,
        world_size: int,
        what: Callable[[], str],
        number: int,
        given_up: GivenUp | None = None,
        has_met: bool = False,
        process: RankProcess | None = None,
    ) -> None:
        self.number = number
        self.given_up = given_up
        self.has_met = has_met
        self.nonce = os.urandom(16).hex()
        self.keys: list[str] = []
        self.is_over = False
        self.late_id = ""
        self.siblings: Mapping[int, RankProcess] = {}
        self._process = process
        self._waits = waits
        self._rank = rank
        self._world_size = world_size
        self._what = what
        # By nonce: who was asked whether it lives, and whether it does.
        self._lives: dict[str, bool] = {}
        self._old_nonce = ""
        self._old_until_s = 0.0
        self._logged_s = time.monotonic()

    def come(self, hello: Hello | None, error: CheckpointError | None = None) -> str:
        """Meet all ranks, and return the operation's id.

        Raises `RankMismatchError`, `RankFailedError`, `PhaseTimeoutError`; on all ranks.
        """
        arrival = Arrival(
            number=self.number, nonce=self.nonce, hello=hello, error=error, process=self._process
        )
        answer = self._welcome(arrival) if self._rank == COORDINATOR else self._greet(arrival)
        self.is_over = True
        self.number = answer.number
        if answer.error is not None:
            raise answer.error
        self.siblings = answer.siblings
        self.has_met = True
        return answer.operation_id

    def leave_word(self, error: CheckpointError) -> None:
        """Say that this rank failed, without waiting for anybody; for interrupts."""
        arrival = Arrival(number=self.number, nonce=self.nonce, error=error, is_waiting=False)
        self._waits.board.set(self._own_key, pickle.dumps(arrival), _WITHDRAW_S)
        if self._rank == COORDINATOR:
            self.keys.append(self._own_key)

    def id_given(self, nonce: str, seconds: float) -> str:
        """Return the id that was given to a process that is gone and came with `nonce`, if any."""
        self.nonce = nonce
        key = self._answer_key
        if self._waits.get(self._own_key) is None and self._waits.within(seconds, [key]):
            self.keys.append(key)
            answer = self._answer()
            return "" if answer is None else answer.operation_id
        return ""

    @property
    def _own_key(self) -> str:
        return f"hello/{self._rank}"

    @property
    def _answer_key(self) -> str:
        return f"answer/{self.nonce}"

    def _greet(self, arrival: Arrival) -> _Answer:
        """Come to the coordinator and return its answer."""
        waits = self._waits
        old = None if self.has_met else self._last_word()
        if old is not None and old.said_s < process_start_s():
            # Of the process that was rank 0 before: its successor takes the word away. If nobody
            # does, clocks differ.
            self._old_nonce, self._old_until_s = old.nonce, time.monotonic() + waits.silence_s
        waits.set(self._own_key, pickle.dumps(arrival))

        def look() -> _Answer | None:
            found = self._answer_or_sign() or self._refused()
            if found is None:
                self._log_late({COORDINATOR: self._answer_key})
            return found

        try:
            answer = waits.until(
                look,
                lambda: self._late([COORDINATOR], "not answered"),
            )
        except BaseException:
            self._withdraw()
            raise
        waits.delete(self._answer_key)
        return answer

    def _withdraw(self) -> None:
        """Take back what was said, so that nobody takes it for a word of a later operation."""
        self.is_over = True
        with contextlib.suppress(BoardError):
            self._waits.board.delete(self._own_key, _WITHDRAW_S)
            answer = self._answer()
            if answer is not None:
                self.late_id = answer.operation_id

    def _answer(self) -> _Answer | None:
        data = self._waits.get(self._answer_key)
        answer: _Answer | None = None if data is None else pickle.loads(data)  # noqa: S301  # ours
        return answer

    def _answer_or_sign(self) -> _Answer | None:
        """Return the answer; to a question, give a sign of life."""
        answer = self._answer()
        if answer is None or not answer.is_question:
            return answer
        self._waits.delete(self._answer_key)
        return None

    def _refused(self) -> _Answer | None:
        """Return what a coordinator that was interrupted left as its last word, if it did."""
        arrival = self._last_word()
        if arrival is None or arrival.error is None or arrival.number != self.number:
            return None
        if arrival.nonce == self._old_nonce and time.monotonic() < self._old_until_s:
            return None
        self._waits.delete(self._own_key)
        error = of_rank(COORDINATOR, arrival.error, self._what())
        return _Answer(number=self.number, error=error)

    def _last_word(self) -> Arrival | None:
        data = self._waits.get(f"hello/{COORDINATOR}")
        arrival: Arrival | None = None if data is None else pickle.loads(data)  # noqa: S301  # ours
        return arrival

    def _welcome(self, own: Arrival) -> _Answer:
        """Collect the word of every rank, judge them and answer all; return the answer."""
        if not self.has_met:
            # The last word of a process that was rank 0 before.
            self._waits.delete(self._own_key)
        came: dict[int, Arrival] = {self._rank: own}
        failure: BaseException | None = None
        late: list[PhaseTimeoutError] = []
        try:
            while len(came) < self._world_size:
                self._await_others(came, late)
                if self._take_arrivals(came, own) == "over":
                    late.append(self._over(self._rank))
                if late:
                    break
        except BoardError:
            raise
        except BaseException as error:  # noqa: BLE001  # raised again once all are answered
            failure = error
        if failure is not None:
            # An interrupt: those who came must not wait for what will not be.
            with contextlib.suppress(BoardError):
                self._take_arrivals(came, own)
                self._reply(came, self._refusal(own, failure))
            raise failure
        if len(came) < self._world_size:
            terms = own.hello.terms if own.hello is not None else {}
            self.given_up = GivenUp(number=own.number, terms=terms)
        else:
            # Also if they disagree: all that came live, and nothing else is left.
            self.has_met = True
        answer = self._judge(came, late)
        self._reply(came, answer)
        if answer.error is not None:
            self._stay(came)
        return replace(answer, siblings=_of_host(came, own))

    def _stay(self, came: Mapping[int, Arrival]) -> None:
        """Wait a moment until all that came have read the error: this rank may host the store."""
        others = [one for rank, one in came.items() if rank != self._rank and one.is_waiting]
        unread = [f"answer/{one.nonce}" for one in others]
        end_s = time.monotonic() + _STAY_S
        with contextlib.suppress(BoardError):
            while unread and time.monotonic() < end_s:
                time.sleep(self._waits.look_s)
                # Who has read it removes it.
                unread = [key for key in unread if self._waits.get(key) is not None]

    def _await_others(self, came: Mapping[int, Arrival], late: list[PhaseTimeoutError]) -> None:
        waits = self._waits
        keys = {rank: f"hello/{rank}" for rank in range(self._world_size) if rank not in came}
        gone = {} if self.has_met else dict(keys)

        def look() -> bool | None:
            if not waits.board.has_all(list(keys.values()), waits.patience_s()):
                self._log_late(keys)
                return None
            for rank in list(gone):
                if self._gives_sign(keys[rank]):
                    del gone[rank]
            return None if gone else True

        def give_up() -> PhaseTimeoutError:
            missing = waits.missing(keys)
            late.append(self._late(missing or list(gone), "not come"))
            return late[-1]

        try:
            waits.until(look, give_up)
        except PhaseTimeoutError:
            if not late:
                raise

    def _gives_sign(self, key: str) -> bool:
        """Ask who left the word under `key` whether it lives, once; return whether it has shown it.

        Its word stays, until it is taken or another process of its rank leaves one.
        """
        data = self._waits.get(key)
        if data is None:
            return False
        arrival: Arrival = pickle.loads(data)  # noqa: S301  # our own ranks
        question, nonce = f"answer/{arrival.nonce}", arrival.nonce
        if nonce not in self._lives:
            # An interrupted one answers no question; it counts unless that was before this process.
            lives = not arrival.is_waiting and arrival.said_s >= process_start_s()
            self._lives[nonce] = lives
            if not lives:
                self.keys.append(question)
                asked = _Answer(number=arrival.number, is_question=True)
                self._waits.set(question, pickle.dumps(asked))
        elif not self._lives[nonce]:
            self._lives[nonce] = self._waits.get(question) is None
        return self._lives[nonce]

    def _take_arrivals(self, came: dict[int, Arrival], own: Arrival) -> Literal["on", "over"]:
        """Take in who has come; "over" if the others are in a later operation than this rank."""
        for rank in range(self._world_size):
            key = f"hello/{rank}"
            data = None if rank in came else self._waits.get(key)
            if data is None:
                continue
            arrival: Arrival = pickle.loads(data)  # noqa: S301  # our own ranks
            if not self._lives.get(arrival.nonce, True):
                continue
            order = _order(arrival, own, self.given_up)
            if order == "later":
                return "over"
            self._waits.delete(key)
            if order == "same":
                came[rank] = arrival
            else:
                # Its own number: the next operation that it calls is the one that waits for it.
                answer = _Answer(number=arrival.number, error=self._over(rank))
                self._reply({rank: arrival}, answer)
        return "on"

    def _reply(self, came: Mapping[int, Arrival], answer: _Answer) -> None:
        packed: dict[object, bytes] = {}
        for rank, arrival in came.items():
            if rank != self._rank:
                kernel = arrival.process and arrival.process.kernel
                if kernel not in packed:
                    told = replace(answer, siblings=_of_host(came, arrival))
                    packed[kernel] = pickle.dumps(told)
                key = f"answer/{arrival.nonce}"
                self.keys.append(key)
                self._waits.set(key, packed[kernel])

    def _judge(self, came: Mapping[int, Arrival], late: Sequence[PhaseTimeoutError]) -> _Answer:
        number = max(arrival.number for arrival in came.values())
        try:
            for rank, arrival in sorted(came.items()):
                if arrival.error is not None:
                    raise of_rank(rank, arrival.error, self._what())
            hellos = [arrival.hello for _, arrival in sorted(came.items()) if arrival.hello]
            is_load = self._what().startswith("the load ")
            check_agreement(hellos, phase="load" if is_load else "plan")
            if late:
                raise late[0]
        except CheckpointError as error:
            return _Answer(number=number, error=error)
        return _Answer(number=number, operation_id=os.urandom(8).hex())

    def _refusal(self, own: Arrival, failure: BaseException) -> _Answer:
        cause = (
            failure
            if isinstance(failure, CheckpointError)
            else CheckpointError(f"{type(failure).__name__} ended it.", phase="plan")
        )
        return _Answer(number=own.number, error=of_rank(self._rank, cause, self._what()))

    def _log_late(self, keys: Mapping[int, str]) -> None:
        """Log once a minute, and at least four times before the deadline, who has not come."""
        deadline = self._waits.deadline
        now_s = time.monotonic()
        if now_s < self._logged_s + min(_LOG_S, deadline.timeout_s / 5):
            return
        self._logged_s = now_s
        log.warning(
            "%s of %d: not there for %s yet, says rank %d; %.0f s are left.",
            name_ranks(self._waits.missing(keys)),
            self._world_size,
            self._what(),
            self._rank,
            deadline.remaining_s(),
        )

    def _late(self, ranks: Sequence[int], did_what: str) -> PhaseTimeoutError:
        deadline = self._waits.deadline
        verb = "has" if len(ranks) == 1 else "have"
        return PhaseTimeoutError(
            f"{name_ranks(ranks)} of {self._world_size} {verb} {did_what} within "
            f"{deadline.timeout_s:g} s in the {deadline.phase} phase of {self._what()}.",
            timeout_s=deadline.timeout_s,
            rank=ranks[0] if ranks else None,
            phase=deadline.phase,
            next_step="Look at what the late are doing; if they are only slow, raise "
            f"Timeouts.{deadline.phase}.",
        )

    def _over(self, rank: int) -> PhaseTimeoutError:
        return PhaseTimeoutError(
            f"Rank {rank} came to an operation ({self._what()} is under way or next) that the "
            "other ranks had given up before.",
            rank=rank,
            phase="plan",
            next_step="See why this rank was late; if it was only slow, raise Timeouts.plan.",
        )


def _of_host(came: Mapping[int, Arrival], arrival: Arrival) -> Mapping[int, RankProcess]:
    """Return the processes of the ranks on the host of who came."""
    own = arrival.process
    found = {rank: one.process for rank, one in came.items() if one.process is not None}
    return {rank: one for rank, one in found.items() if own and one.kernel == own.kernel}


def _order(
    arrival: Arrival, own: Arrival, given_up: GivenUp | None
) -> Literal["earlier", "same", "later"]:
    """Return which operation a rank has come to, compared with the coordinator's."""
    if arrival.number == own.number:
        return "same"
    terms = None if arrival.hello is None else arrival.hello.terms
    is_past = given_up is not None and arrival.number <= given_up.number
    if is_past and given_up is not None and terms in (None, given_up.terms):
        # Late for what was given up. Its state is older than what the others bring now.
        return "earlier"
    if terms is None or (own.hello is not None and terms == own.hello.terms):
        # One that missed a call altogether counts less, and means the same.
        return "same"
    return "earlier" if arrival.number < own.number else "later"
