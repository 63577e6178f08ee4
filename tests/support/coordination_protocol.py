"""The coordination protocol between ranks as a model, rule by rule.

A rank runs a call in phases. A phase is a generator that yields requests to the key-value store
and to the storage, gets their replies, and returns the next phase; one request is one atomic
step. `coordination_model` searches all orders of these steps.

A failure takes two requests: a `compare_set` of the verdict (`fail`), then a `set` of the release
(`publish`). A poll of the coordinator takes two: it reads the verdict (`poll`), then the payloads
(`look`).

The model has one lane. In a lane of saves all calls are saves or loads, in a lane of reads all are
choices of a restore: lanes share no key, so calls in other lanes change nothing.

Abstractions. A repeated request (`set`, `compare_set`, reads) that fails once is like a
success, so a request fails only for good. A poll that would see nothing is left out: the
coordinator waits until its next poll would see a failure or all payloads. Other terms than the
operation (options) are left out: a mismatch fails all ranks, as operations that are neither equal
nor ordered do. The nonce of a rank is its incarnation. The number of restarts in a token, which
only saves calls, is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator
from typing import Any, Literal, NamedTuple

Identity = tuple[int, int]
"""Step (0: unknown) and place."""

UNKNOWN: Identity = (-1, -1)
"""The identity in the failure of a call that does not know what it would have saved."""

COMMITTED: Identity = (-2, -2)
"""Stands among the pending failures for a release that is still to be published."""

Request = tuple[Any, ...]
Reply = Any

DOWN, OVER, CLAIMED, OK, SUPERSEDED, ABSENT = "down", "over", "claimed", "ok", "superseded", 0

LATE = "late"
"""Marks the failure of a read whose deadline has passed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of the protocol; each can be dropped."""

    session: bool = True
    """Rank 0 makes a new token, and supersedes the token that it read."""
    join_slot: bool = True
    """A member joins a session only as the first process of its rank."""
    walk: bool = True
    """Rank 0 supersedes each number that a member of a stale session may wait in."""
    look_again: bool = True
    """A member that has met nobody in a session looks for a newer session before it arrives."""
    count_early: bool = True
    """Calls that ended before all ranks met count in the session that the member joins."""
    step: bool = True
    """The step is part of the identity."""
    claim: bool = True
    """The coordinator claims the verdict before it commits."""
    keep_call: bool = True
    """A rank whose number was abandoned for another operation keeps its call."""
    keep_keys: bool = True
    """Keys of an abandoned number stay until a later number is released ok."""
    count_failed: bool = True
    """A call that raises before it sent anything takes its number."""
    release_failed: bool = True
    """It also releases that number with its error."""
    report_pending: bool = True
    """A call that could not reach the store is failed by the next call."""
    poll_verdict: bool = True
    """The coordinator reads the verdict in each poll, not the release."""
    publish_failure: bool = True
    """A coordinator that reads a failure in the verdict also writes the release."""
    fail_next: bool = True
    """A failure that lost round 1 to the claim fails round 2."""
    doubt: bool = True
    """Behind a claim, no record on the storage means "unknown", not "failed"."""
    publish_again: bool = True
    """A release of a commit that did not reach the store is repeated by the next call."""
    add_once: bool = True
    """`add` is never repeated."""
    memory: bool = True
    """Which of unordered identities is behind follows from those of earlier numbers."""
    long_memory: bool = True
    """That memory goes back to the last number that was released ok."""
    moved_on: bool = True
    """That memory counts only ranks that changed their operation since."""
    pass_over: bool = True
    """A read passes over a number that ranks of the same read gave up at their deadline."""
    reads_uncounted: bool = True
    """A read that ended before all ranks met does not count in the session."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """Ranks, their calls, and the faults that may hit them.

    Attributes:
        operations: "steps": one URL, steps 100, 200, ...; "none": one URL, steps unknown;
            "urls": a URL for each call, steps unknown; "mixed": as "steps", rank 0 knows none;
            "sides": the members 0 and 2 save to one URL, rank 1 to another, each time;
            "reads": reads of one URL; "read urls": of a URL for each call.
        lockstep: Whether no rank begins a call before all ranks have ended the previous call.
        fresh: Whether there is no session yet.
        acknowledge: Whether ranks report that they left a number.
        is_live: Whether I2 is checked.

    """

    name: str
    faults: tuple[str, ...]
    budget: int = 1
    world: int = 3
    calls: int = 3
    operations: Literal["steps", "none", "urls", "mixed", "sides", "reads", "read urls"] = "steps"
    lockstep: bool = False
    fresh: bool = False
    acknowledge: bool = False
    is_live: bool = True

    def identity(self, rank: int, call: int) -> Identity:
        """Return what the rank's call saves or reads."""
        if self.operations in ("urls", "read urls"):
            return (0, call)
        if self.operations == "sides":
            return (0, rank % 2)
        is_known = self.operations == "steps" or (self.operations == "mixed" and rank)
        return (100 * (call + 1) if is_known else 0, 0)

    @property
    def is_read(self) -> bool:
        """Return whether the calls only read."""
        return self.operations in ("reads", "read urls")


class Rank(NamedTuple):
    """What a rank remembers between phases.

    `has_met`: it has read an ok release of this session. `pending` are failures of numbers that
    did not reach the store, `early` the operations of calls that ended before all ranks met,
    `superseding` the session that rank 0 has to supersede.
    `raising`: 1 if the call raises at once, 2 if it does so before its operation is known.
    """

    incarnation: int = 0
    token: int = 0
    has_met: bool = False
    number: int = 0
    call: int = 0
    raising: int = 0
    has_reported: bool = False
    superseding: int = 0
    pending: tuple[tuple[int, Identity], ...] = ()
    early: tuple[Identity, ...] = ()


class Local(NamedTuple):
    """A rank at a request: the phase, how it began, and the replies that it got since."""

    rank: Rank
    phase: str = "idle"
    replies: tuple[Reply, ...] = ()
    is_over: bool = False
    is_broken: bool = False


Phase = Generator[Request, Reply, tuple[str, Rank]]


def are_equal(a: Identity, b: Identity, rules: Rules) -> bool:
    return a[1] == b[1] and (not rules.step or a[0] == b[0] or 0 in (a[0], b[0]))


def _ordered(a: Identity, b: Identity, rules: Rules) -> bool:
    return rules.step and a[0] > 0 and b[0] > 0 and a[0] != b[0]


def is_failed(value: Reply) -> bool:
    return isinstance(value, tuple)


def decide(now: list[Any], before: list[list[Any]], rules: Rules) -> Reply:
    """Return the coordinator's decision over the identities that arrived (None: not yet).

    Returns:
        OK, the identity for which the number is abandoned, or None: go on waiting.

    """
    present = [identity for identity in now if identity is not None]
    for a, b in itertools.combinations(present, 2):
        if _ordered(a, b, rules):
            return min(present, key=lambda identity: identity[0] or 1 << 30)
    if len(present) < len(now):
        return None
    if all(are_equal(a, b, rules) for a, b in itertools.combinations(present, 2)):
        return OK
    if rules.memory:
        for mover, holder in itertools.permutations(range(len(now)), 2):
            identity = now[holder]
            for earlier in before:
                has_moved = now[mover] != identity != earlier[holder]
                if earlier[mover] == identity and (has_moved or not rules.moved_on):
                    return identity
    return UNKNOWN


class Protocol:
    """The phases of a call, for a rank of a scenario under rules."""

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self.scenario = scenario
        self.rules = rules

    def own(self, me: int, rank: Rank) -> Identity:
        return self.scenario.identity(me, rank.call)

    def begin(self, me: int, rank: Rank) -> Phase:
        """Join the session, unless the rank has."""
        if me == 0 and not rank.has_met:
            return (yield from self._make_session(rank))
        if rank.token:
            return "settle", rank
        token = yield ("wait", ("session",))
        if token in (OVER, DOWN):
            return "unsent", rank
        if self.rules.join_slot:
            process = yield ("join", (token, "join", me), rank.incarnation)
            if process == DOWN:
                return "unsent", rank
            if process != rank.incarnation:
                newer = yield ("wait", (token, "superseded"))
                return ("unsent" if newer in (OVER, DOWN) else "begin"), rank
        return "settle", self._joined(rank, token)

    def _joined(self, rank: Rank, token: int) -> Rank:
        pending = tuple(enumerate(rank.early, 1)) if self.rules.count_early else ()
        return rank._replace(token=token, number=len(pending), pending=pending)

    def _make_session(self, rank: Rank) -> Phase:
        token = rank.incarnation
        old = rank.superseding or (yield ("get", ("session",)))
        if old == DOWN:
            return "unsent", rank
        if not self.rules.session:
            token = old or token
        # First the session: a restart may come between.
        if (yield ("set", (("session",), token))) == DOWN:
            return "unsent", rank._replace(superseding=old)
        if old not in (ABSENT, token) and (yield from self._supersede(old, token)) == DOWN:
            return "unsent", rank._replace(superseding=old)
        rank = self._joined(rank, token)._replace(has_met=True, early=(), superseding=0)
        return "settle", rank

    def _supersede(self, old: int, token: int) -> Generator[Request, Reply, Reply]:
        if (yield ("set", ((old, "superseded"), token))) == DOWN:
            return DOWN
        for number in itertools.count(1):
            # A member passes a number only when its verdict is set, and then looks whether
            # the session is superseded: it waits in none behind the first without a verdict.
            verdict = yield ("get", (old, number, 1, "verdict"))
            released = yield ("set", ((old, number, 1, "release"), SUPERSEDED))
            if DOWN in (verdict, released):
                return DOWN
            if verdict == ABSENT or not self.rules.walk:
                break
        return OK

    def unsent(self, me: int, rank: Rank) -> Phase:
        """End a call that sent nothing, and that failed no other rank's."""
        yield ("end", "failed")
        identity = self.own(me, rank)
        early = self._early(rank, identity)
        number = rank.number
        pending = rank.pending
        if rank.token and self.rules.count_failed:
            number += 1
            pending += ((number, identity),) if self.rules.report_pending else ()
        return "idle", rank._replace(
            call=rank.call + 1, raising=0, number=number, pending=pending, early=early
        )

    def _early(self, rank: Rank, identity: Identity) -> tuple[Identity, ...]:
        """Return the calls that count in the session where all ranks meet, and this call."""
        is_counted = not (self.scenario.is_read and self.rules.reads_uncounted)
        return rank.early if rank.has_met or not is_counted else (*rank.early, identity)

    def settle(self, me: int, rank: Rank) -> Phase:
        """Fail the numbers of earlier calls that could not reach the store."""
        if not rank.pending:
            return ("fail1" if rank.raising else "enter"), rank
        number, identity = rank.pending[0]
        if identity == COMMITTED:
            if (yield ("release", (rank.token, number, 2))) == DOWN:
                return "unsent", rank
            return "settle", rank._replace(pending=rank.pending[1:])
        verdict = yield from self._fail((rank.token, number, 1), identity)
        if verdict == CLAIMED:
            if me == 0:
                verdict = yield ("disown", (rank.token, number, 1), identity)
            if verdict != DOWN:
                verdict = yield from self._fail((rank.token, number, 2), identity)
            if verdict == CLAIMED and me == 0:
                verdict = yield ("disown", (rank.token, number, 2), identity)
        if verdict == DOWN:
            return "unsent", rank
        return "settle", rank._replace(pending=rank.pending[1:])

    def enter(self, me: int, rank: Rank) -> Phase:
        """Take the next number, unless there is a newer session; a read may pass over it."""
        if not rank.has_met and self.rules.look_again:
            # After the failures of earlier numbers: rank 0 supersedes first, then reads these.
            session = yield ("get", ("session",))
            if session == DOWN:
                return "unsent", rank
            if session != rank.token:
                return "begin", rank._replace(token=0)
        if self.scenario.is_read and self.rules.pass_over:
            released = yield ("get", (rank.token, rank.number + 1, 1, "release"))
            if released == DOWN:
                return "unsent", rank
            if released == (self.own(me, rank), LATE):
                return "begin", rank._replace(number=rank.number + 1)
        return "arrive", rank

    def arrive(self, me: int, rank: Rank) -> Phase:
        """Send the payload of round 1, also after the deadline; the coordinator only notes it."""
        payload = (
            (rank.token, rank.number + 1, 1, "from", me),
            (self.own(me, rank), rank.incarnation),
        )
        if me == 0:
            yield ("note", *payload)
        # A cancel is noticed before the payload is sent.
        if "cancel" in self.scenario.faults and (yield ("is_over",)):
            return "fail1", rank
        if me and (yield ("arrive", *payload)) == DOWN:
            return "fail1", rank
        return ("wait1" if me else "collect1"), rank

    def wait1(self, me: int, rank: Rank) -> Phase:
        """Wait for the release of round 1."""
        value = yield ("wait", (rank.token, rank.number + 1, 1, "release"))
        if value in (OVER, DOWN):
            return "fail1", rank
        if value == SUPERSEDED:
            return "begin", rank._replace(token=0)
        if is_failed(value):
            return self._abandoned(me, rank, value[0])
        return "report", rank._replace(has_met=True, early=())

    def collect1(self, me: int, rank: Rank) -> Phase:
        """Decide over those that arrived, as the coordinator."""
        round_ = (rank.token, rank.number + 1, 1)
        decision = yield from self._poll(round_)
        if decision == OVER:
            decision = yield ("look at present", round_)
        if decision in (OVER, DOWN):
            return "fail1", rank
        if decision == OK:
            decision = yield from self._claim(round_)
            if decision == CLAIMED:
                decision = yield ("release", round_)
            if decision == OK:
                return "collect2", rank
        elif not is_failed(decision[0]):
            decision = yield from self._fail(round_, decision)
        if decision in (DOWN, CLAIMED):
            return "fail1", rank
        return self._abandoned(me, rank, decision[0])

    def _poll(self, round_: tuple[int, int, int]) -> Generator[Request, Reply, Reply]:
        """Poll once, as the coordinator: the verdict, then the payloads."""
        verdict = yield ("poll", round_)
        if is_failed(verdict):
            return (yield from self._claim(round_))
        return verdict if verdict in (OVER, DOWN) else (yield ("look", round_))

    def _claim(self, round_: tuple[int, int, int]) -> Generator[Request, Reply, Reply]:
        """Set the verdict unless the round has failed; write the release of that failure."""
        verdict = yield ("claim", round_)
        if not is_failed(verdict) or not self.rules.publish_failure:
            return verdict
        return verdict if (yield ("publish", round_, verdict)) == OK else DOWN

    def _fail(
        self, round_: tuple[int, int, int], identity: Identity, *marks: str
    ) -> Generator[Request, Reply, Reply]:
        """Set the verdict, then the release; return the verdict."""
        verdict = yield ("fail", round_, identity, *marks)
        if not is_failed(verdict):
            return verdict
        return verdict if (yield ("publish", round_, verdict)) == OK else DOWN

    def _abandoned(self, me: int, rank: Rank, identity: Identity) -> tuple[str, Rank]:
        own = self.own(me, rank)
        is_mine = identity == UNKNOWN or are_equal(identity, own, self.rules)
        if is_mine or not self.rules.keep_call:
            return "failed", rank
        # A rank whose deadline has passed fails the next number.
        return "begin", rank._replace(number=rank.number + 1)

    def report(self, me: int, rank: Rank) -> Phase:
        """Write, and send the payload of the commit round, as a member."""
        round_ = (rank.token, rank.number + 1, 2)
        if (yield ("is_over",)):
            return "fail2", rank
        rank = rank._replace(has_reported=True)
        if (yield ("arrive", (*round_, "from", me), (rank.incarnation, rank.call))) == DOWN:
            return "fail2", rank
        return "wait2", rank

    def wait2(self, me: int, rank: Rank) -> Phase:
        """Wait for the outcome."""
        del me
        value = yield ("wait", (rank.token, rank.number + 1, 2, "release"))
        if value in (OVER, DOWN):
            return "fail2", rank
        return ("failed" if is_failed(value) else "committed"), rank

    def collect2(self, me: int, rank: Rank) -> Phase:
        """Commit when all have reported, as the coordinator."""
        round_ = (rank.token, rank.number + 1, 2)
        decision = yield from self._poll(round_)
        if decision == OK:
            decision = (yield from self._claim(round_)) if self.rules.claim else CLAIMED
        if decision in (OVER, DOWN):
            return "fail2", rank
        if decision != CLAIMED:
            return "failed", rank
        is_committed = yield ("commit", round_, (rank.incarnation, rank.call))
        if is_committed == DOWN:
            is_committed = yield ("ask", round_)
        if is_committed:
            if (yield ("release", round_)) == DOWN and self.rules.publish_again:
                rank = rank._replace(pending=(*rank.pending, (round_[1], COMMITTED)))
            return "committed", rank
        gone = yield ("disown", round_, self.own(me, rank))
        return ("unreachable" if gone == DOWN else "failed"), rank

    def fail1(self, me: int, rank: Rank) -> Phase:
        """Fail round 1."""
        round_ = (rank.token, rank.number + 1, 1)
        identity = UNKNOWN if rank.raising == 2 else self.own(me, rank)
        if rank.raising and not (self.rules.release_failed and self.rules.count_failed):
            yield ("end", "failed")
            number = rank.number + self.rules.count_failed
            return "idle", rank._replace(call=rank.call + 1, raising=0, number=number)
        is_late = self.scenario.is_read and (yield ("is_over",))
        verdict = yield from self._fail(round_, identity, *[LATE] * is_late)
        if verdict == DOWN:
            return "unreachable", rank
        if verdict != CLAIMED:
            return "failed", rank
        if me == 0 and (yield ("disown", round_, identity)) == DOWN:
            return "unreachable", rank
        if self.rules.fail_next:
            return "fail2", rank
        value = yield ("wait for good", (*round_, "release"))
        return ("failed" if is_failed(value) else "report"), rank

    def fail2(self, me: int, rank: Rank) -> Phase:
        """Fail the commit round; behind a claim, ask the storage."""
        round_ = (rank.token, rank.number + 1, 2)
        is_late = self.scenario.is_read and (yield ("is_over",))
        verdict = yield from self._fail(round_, self.own(me, rank), *[LATE] * is_late)
        if verdict == DOWN:
            return "unreachable", rank
        if verdict != CLAIMED or not (rank.has_reported or me == 0):
            return "failed", rank
        if me and self.scenario.is_read:
            # The other ranks may have read all the same.
            return "failed", rank
        if me == 0:
            # The claim is its own, and its reply was lost: there is no commit, and will be none.
            gone = yield ("disown", round_, self.own(me, rank))
            return ("unreachable" if gone == DOWN else "failed"), rank
        value = yield ("wait", (*round_, "release"))
        if value in (OVER, DOWN):
            value = yield ("ask", round_)
            outcome = "committed" if value else "unknown" if self.rules.doubt else "failed"
            return outcome, rank
        return ("failed" if is_failed(value) else "committed"), rank

    def unreachable(self, me: int, rank: Rank) -> Phase:
        """End a call that could not reach the store; the next call fails its number."""
        outcome = "failed"
        if me and rank.has_reported:
            is_committed = yield ("ask", (rank.token, rank.number + 1, 2))
            outcome = "committed" if is_committed else "unknown"
        if self.rules.report_pending:
            failure = (rank.number + 1, self.own(me, rank))
            rank = rank._replace(pending=(*rank.pending, failure))
        return outcome, rank

    def _end(self, me: int, rank: Rank, outcome: str) -> Phase:
        if self.scenario.acknowledge:
            yield from self._acknowledge(rank)
        yield ("end", outcome)
        if self.scenario.acknowledge and me == 0 and outcome == "failed":
            yield ("linger", (rank.token, rank.number + 1))
        return "idle", rank._replace(
            call=rank.call + 1,
            number=rank.number + 1,
            raising=0,
            has_reported=False,
            early=self._early(rank, self.own(me, rank)),
        )

    def _acknowledge(self, rank: Rank) -> Generator[Request, Reply, None]:
        request = ("add", (rank.token, rank.number + 1, "left"))
        if (yield request) == DOWN and not self.rules.add_once:
            yield request

    def failed(self, me: int, rank: Rank) -> Phase:
        """Raise that the save failed."""
        return (yield from self._end(me, rank, "failed"))

    def unknown(self, me: int, rank: Rank) -> Phase:
        """Raise that the outcome is unknown."""
        return (yield from self._end(me, rank, "unknown"))

    def committed(self, me: int, rank: Rank) -> Phase:
        """Return OK."""
        return (yield from self._end(me, rank, "committed"))
