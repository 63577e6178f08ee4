"""An exhaustive search of the executions of the coordination protocol.

The search visits every order of the ranks' requests, with up to `budget` faults at any place:
late, skipped, killed and restarted ranks, calls that raise before they sent anything, lost
requests and replies, broken connections, a stopped store, requests that arrive later, and cancels.

* I1 No commit holds payloads of operations that are not equal, or of two incarnations. If no rank
  skipped a call, no commit holds payloads of two calls, even where steps are unknown. (A read may.)
* I2, I5 After the last fault the next call that all ranks make commits. One more may fail for each
  skipped call where steps are unknown, and for each deadline that passes after that, for each late
  read of one of several URLs, for each error
  of an unknown operation, and for each number that an earlier incarnation gave up. In a lane of
  reads this holds for the calls of one rank: the others may be some calls late. A call that is in a
  number while another rank gives it up fails.
* I3 No rank raises "failed" for a save that is, or will be, committed; none returns OK for
  a save that is not.
* I4 Every call ends. No rank waits for its deadline in a number that another rank has left, and
  none in a round that has failed, if the coordinator has entered it and can reach the store.
* I6 The coordinator deletes the files of a failed attempt only after all ranks have left it.

A deadline expires at any time, which is a fault, or where nothing else can happen. Keys of earlier
numbers are deleted at the release of a later number, when all ranks have arrived there. Members
are symmetric. After the last fault a step that commutes with all steps of other ranks is taken
at once. `python coordination_model.py` runs the full form.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from coordination_protocol import (
    ABSENT,
    CLAIMED,
    DOWN,
    LATE,
    OK,
    OVER,
    Local,
    Protocol,
    Rank,
    Reply,
    Request,
    Rules,
    Scenario,
    are_equal,
    decide,
    is_failed,
)


class ViolationError(Exception):
    """An invariant does not hold."""


class Ghost(NamedTuple):
    """What the ranks cannot see, and the invariants are about.

    `commits`: (round, payload per rank); `outcomes`: per rank, per call; `need`: the next call
    that all ranks make after the last fault; `allowance`: how many more may fail.
    """

    commits: tuple[Any, ...] = ()
    outcomes: tuple[tuple[str, ...], ...] = ()
    need: int = 0
    allowance: int = 0
    has_skipped: bool = False
    in_flight: tuple[Any, ...] = ()


class State(NamedTuple):
    """A state of the whole system; stores and ghosts are numbered."""

    store: int
    ghost: int
    locals: tuple[int, ...]
    budget: int


class Result(NamedTuple):
    """How many states and transitions there are, and the first counter-example."""

    states: int
    transitions: int
    violation: str = ""
    trace: tuple[str, ...] = ()
    seconds: float = 0.0


class Table:
    """Numbers for hashable values."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self.values: list[Any] = []

    def __getitem__(self, value: Any) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


Effect = tuple[Reply, dict[Any, Any] | None, Ghost | None]
"""A reply, and the store and the ghost after it, where they change."""

Fault = tuple[str, Local, dict[Any, Any] | None, Ghost | None]
"""The name of a fault, and what the rank, the store and the ghost are after it."""

PROMPT = {"late", "skip", "raise", "raise unknown", "cancel"}
"""Faults after which every rank can still reach the store."""

READS = {"get", "wait", "wait for good", "poll", "look", "look at present", "linger"}
LOOKS = {"look", "look at present"}
WAITS = {"wait", "poll", "look", "linger"}
OF_STORAGE = {"commit", "ask"}
NOTES = {"note"}
"""What the coordinator keeps in its own memory."""


class Search:
    """A breadth-first search of all executions of a scenario."""

    def __init__(self, scenario: Scenario, rules: Rules, *, merge: bool = True) -> None:
        self.scenario = scenario
        self.rules = rules
        self.protocol = Protocol(scenario, rules)
        self.stores, self.ghosts, self.locals = Table(), Table(), Table()
        self.members = range(1, scenario.world)
        self._merge = merge and scenario.world == 3 and scenario.operations != "sides"
        self._advanced: dict[tuple[int, int], Any] = {}
        self._has_sessions = scenario.fresh or "restart" in scenario.faults
        self._has_urls = scenario.operations in ("urls", "read urls")
        self._is_prompt = PROMPT.issuperset(scenario.faults) and not scenario.fresh

    # One rank.

    def advance(self, number: int, me: int) -> tuple[int, Request | None, tuple[Any, ...]]:
        """Run a rank to its next request; return it, and the outcomes of calls that ended."""
        known = self._advanced.get((number, me))
        if known is None:
            known = self._advanced[number, me] = self._advance(self.locals.values[number], me)
        return known

    def _advance(self, local: Local, me: int) -> tuple[int, Request | None, tuple[Any, ...]]:
        ended: tuple[Any, ...] = ()
        while local.phase not in ("idle", "dead"):
            phase = getattr(self.protocol, local.phase)(me, local.rank)
            try:
                request = next(phase)
                for reply in local.replies:
                    request = phase.send(reply)
            except StopIteration as stop:
                name, rank = stop.value
                flags = (False, False) if name == "idle" else (local.is_over, local.is_broken)
                local = Local(rank, name, (), *flags)
                continue
            if request[0] == "end":
                ended += ((local.rank.incarnation, local.rank.call, request[1]),)
            elif request[0] != "is_over":
                return self.locals[local], request, ended
            local = local._replace(replies=(*local.replies, local.is_over))
        return self.locals[local], None, ended

    # The store.

    def apply(self, store: dict[Any, Any], request: Request) -> Reply:  # noqa: C901  # a table
        """Execute a request; None: it has to wait."""
        if request[0] in READS:
            return self._read(store, request)
        kind, key = request[:2]
        if kind == "set":
            store[key[0]] = key[1]
        elif kind in ("arrive", "note"):
            store[key] = request[2]
            if not self.rules.keep_keys and key[2] == 1 and key[4] == 0:
                self._delete(store, *key[:2])
        elif kind in ("fail", "claim"):
            value = CLAIMED if kind == "claim" else request[2:]
            return store.setdefault((*key, "verdict"), value)
        elif kind == "publish":
            store[*key, "release"] = request[2]
        elif kind == "join":
            return store.setdefault(key, request[2])
        elif kind == "disown":
            return store.setdefault((*key, "release"), (request[2],))
        elif kind == "release":
            self._release(store, key)
        elif kind == "add":
            store[key] = store.get(key, 0) + 1
        return OK

    def _read(self, store: dict[Any, Any], request: Request) -> Reply:
        kind, key = request
        if kind == "poll":
            return self._poll(store, key)
        if kind in LOOKS:
            return self._look(store, key, is_complete=kind == "look")
        if kind == "linger":
            return OK if store.get((*key, "left"), 0) >= self.scenario.world else None
        return store.get(key, ABSENT if kind == "get" else None)

    def _delete(self, store: dict[Any, Any], token: int, number: int) -> None:
        for key in [key for key in store if key[0] == token and len(key) > 2]:
            if isinstance(key[1], int) and key[1] < number:
                del store[key]

    def _release(self, store: dict[Any, Any], round_: tuple[int, int, int]) -> None:
        token, number = round_[:2]
        if round_[2] == 1 and self.rules.keep_keys:
            self._delete(store, token, number)
        store[*round_, "release"] = OK

    def _poll(self, store: dict[Any, Any], round_: tuple[int, int, int]) -> Reply:
        value = store.get((*round_, "verdict" if self.rules.poll_verdict else "release"))
        if is_failed(value):
            return value
        return None if self._look(store, round_, is_complete=True) is None else ABSENT

    def _look(
        self, store: dict[Any, Any], round_: tuple[int, int, int], *, is_complete: bool
    ) -> Reply:
        """Return what the coordinator decides; if not all payloads are there, wait (None)."""
        token, number, round_number = round_
        if not all((*round_, "from", m) in store for m in self.members) and is_complete:
            return None
        if round_number == 2:
            return OK
        ranks = range(self.scenario.world)
        now = [store.get((*round_, "from", r), [None])[0] for r in ranks]
        numbers = range(1 if self.rules.long_memory else number - 1, number)
        before = [[store.get((token, n, 1, "seen", r)) for r in ranks] for n in numbers]
        decision = decide(now, before, self.rules)
        if decision != OK:
            # The memory of the coordinator, which no other rank reads.
            store |= {(*round_, "seen", r): identity for r, identity in enumerate(now) if identity}
        return decision or OVER

    # The storage, and the invariants.

    def commit(self, state: State, ghost: Ghost, request: Request) -> Ghost:
        """Create the commit record."""
        round_ = request[1]
        store = dict(self.stores.values[state.store])
        payloads = (request[2], *(store[*round_, "from", m] for m in self.members))
        saved = [self.scenario.identity(r, call) for r, (_, call) in enumerate(payloads)]
        if not all(are_equal(a, b, Rules()) for a, b in itertools.combinations(saved, 2)):
            raise ViolationError(f"I1: a commit holds {saved}")
        if len({incarnation for incarnation, _ in payloads}) > 1:
            raise ViolationError(f"I1: a commit holds payloads of two incarnations: {payloads}")
        ghost = ghost._replace(commits=(*ghost.commits, (round_, payloads)))
        if self.scenario.is_read:
            return ghost
        if not ghost.has_skipped and len({call for _, call in payloads}) > 1:
            raise ViolationError(f"I1: a commit holds payloads of calls {payloads}, none skipped")
        for rank, (_, call) in enumerate(payloads):
            if ghost.outcomes[rank][call] == "failed":
                raise ViolationError(f"I3: rank {rank} said failed of what is committed now")
        return ghost

    def _ended(self, ghost: Ghost, me: int, ended: tuple[Any, ...]) -> Ghost:
        for incarnation, call, outcome in ended:
            is_there = any(payloads[me] == (incarnation, call) for _, payloads in ghost.commits)
            if is_there and outcome == "failed" and not self.scenario.is_read:
                raise ViolationError(f"I3: rank {me} says failed of what is committed")
            if outcome == "committed" and not is_there:
                raise ViolationError(f"I3: rank {me} returns OK of what is not committed")
            ghost = self._with_outcome(ghost, me, call, outcome)
        return ghost

    def _with_outcome(self, ghost: Ghost, me: int, call: int, outcome: str) -> Ghost:
        outcomes = [list(of_rank) for of_rank in ghost.outcomes]
        outcomes[me][call] = outcome
        return ghost._replace(outcomes=tuple(map(tuple, outcomes)))

    def check_end(self, state: State) -> None:
        """Check that every call ended, and the first that should have committed did."""
        ghost = self.ghosts.values[state.ghost]
        locals_ = [self.locals.values[number] for number in state.locals]
        for me, local in enumerate(locals_):
            if local.phase not in ("idle", "dead"):
                raise ViolationError(f"I4: rank {me} waits for ever ({local.phase})")
        last = ghost.need + ghost.allowance
        if (
            not self.scenario.is_live
            or last >= self.scenario.calls
            or any(local.phase == "dead" for local in locals_)
        ):
            return
        if self.scenario.is_read:
            # A rank that was late reads with a later call of the others; its last calls are alone.
            for of_rank in ghost.outcomes:
                if of_rank[ghost.need :].count("failed") <= ghost.allowance:
                    return
        for call in range(ghost.need, last + 1):
            if all(of_rank[call] == "committed" for of_rank in ghost.outcomes):
                return
        raise ViolationError(f"I2: no call of {ghost.need} to {last} committed: {ghost.outcomes}")

    # The system.

    def start(self) -> State:
        """Return the first state."""
        scenario = self.scenario
        rank = Rank(1) if scenario.fresh else Rank(1, 1, has_met=True)
        store = {} if scenario.fresh else {("session",): 1}
        outcomes = (("",) * scenario.calls,) * scenario.world
        return State(
            self.stores[frozenset(store.items())],
            self.ghosts[Ghost(outcomes=outcomes)],
            (self.locals[Local(rank)],) * scenario.world,
            scenario.budget,
        )

    def put(
        self,
        state: State,
        me: int,
        local: Local,
        *,
        store: dict[Any, Any] | None = None,
        ghost: Ghost | None = None,
        is_fault: bool = False,
    ) -> State:
        """Return the state in which a rank, which runs to its next request, is another."""
        number, _, ended = self.advance(self.locals[local], me)
        numbers = (*state.locals[:me], number, *state.locals[me + 1 :])
        if ghost is None:
            ghost = self.ghosts.values[state.ghost]
        if ended:
            ghost = self._ended(ghost, me, ended)
        if is_fault:
            ghost = ghost._replace(need=max(map(self._next_call, numbers)))
        return State(
            state.store if store is None else self.stores[frozenset(store.items())],
            self.ghosts[ghost],
            numbers,
            state.budget - is_fault,
        )

    def _next_call(self, number: int) -> int:
        local: Local = self.locals.values[number]
        if local.phase == "dead":
            return 0
        return local.rank.call + (local.phase != "idle")

    def _can_start(self, state: State, me: int) -> bool:
        local: Local = self.locals.values[state.locals[me]]
        if local.phase != "idle" or local.rank.call >= self.scenario.calls:
            return False
        if not self.scenario.lockstep:
            return True
        others = (self.locals.values[number] for number in state.locals)
        return all(other.phase == "dead" or other.rank.call >= local.rank.call for other in others)

    def steps(self, state: State) -> list[tuple[str, State, bool]]:
        """Return the steps that are no faults, and whether each commutes with all others."""
        steps = []
        for me, number in enumerate(state.locals):
            _, request, _ = self.advance(number, me)
            local: Local = self.locals.values[number]
            if request is None:
                if self._can_start(state, me):
                    label = f"rank {me} calls save {self.scenario.identity(me, local.rank.call)}"
                    steps.append((label, self.put(state, me, local._replace(phase="begin")), True))
                continue
            for reply, store, ghost in self._replies(state, local, request):
                after = local._replace(replies=(*local.replies, reply))
                label = f"rank {me}: {_show(request)} -> {reply}"
                after_state = self.put(state, me, after, store=store, ghost=ghost)
                steps.append((label, after_state, self._commutes(state, local, request)))
                if request[0] == "linger" and reply == OK:
                    self._check_discard(state, request[1])
        return steps

    def _check_discard(self, state: State, key: tuple[int, int]) -> None:
        for number in state.locals[1:]:
            local = self.locals.values[number]
            if local.phase != "dead" and local.rank.number < key[1]:
                raise ViolationError("I6: files are deleted that a rank may still write")

    def _commutes(self, state: State, local: Local, request: Request) -> bool:
        if self._has_sessions or local.is_over or local.is_broken:
            return False
        if request[0] in ("release", "publish"):
            return not any(self.locals.values[number].is_over for number in state.locals)
        return bool(request[0] == "wait" or (request[0] == "arrive" and request[1][2] == 2))

    def _replies(self, state: State, local: Local, request: Request) -> Iterator[Effect]:
        kind = request[0]
        if kind == "commit":
            yield True, None, self.commit(state, self.ghosts.values[state.ghost], request)
        elif kind == "ask":
            commits = self.ghosts.values[state.ghost].commits
            yield any(round_ == request[1] for round_, _ in commits), None, None
        elif local.is_broken and kind != "note":
            yield DOWN, None, None
        else:
            store = dict(self.stores.values[state.store])
            reply = self.apply(store, request)
            ghost = self._after_late(state, request) if kind == "publish" else None
            if reply is not None:
                yield reply, (None if kind in READS - LOOKS else store), ghost
            # A call that raises because it is interrupted waits for no deadline.
            if (local.is_over or local.rank.raising) and kind in WAITS:
                yield OVER, None, None

    def _after_late(self, state: State, request: Request) -> Ghost | None:
        """Return the ghost after a read was given up, which other ranks have begun as well."""
        if LATE not in request[2]:
            return None
        locals_ = (self.locals.values[number] for number in state.locals)
        taking_part = [
            local.rank.call + 1
            for local in locals_
            if local.phase not in ("idle", "dead")
            and not local.is_over
            and local.rank.number + 1 == request[1][1]
        ]
        ghost: Ghost = self.ghosts.values[state.ghost]
        return ghost._replace(need=max([ghost.need, *taking_part]))

    def expiries(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield the deadlines that may expire because nothing else can happen."""
        requests = [self.advance(number, me)[1] for me, number in enumerate(state.locals)]
        # The coordinator lingers for a short time only.
        is_lingering = any(request and request[0] == "linger" for request in requests)
        highest = max(self.locals.values[number].rank.number for number in state.locals)
        for me, request in enumerate(requests):
            local: Local = self.locals.values[state.locals[me]]
            if not request or local.is_over or (is_lingering and request[0] != "linger"):
                continue
            if self._is_prompt and request[0] != "linger" and local.rank.number < highest:
                raise ViolationError(f"I4: rank {me} waits in a number that another has left")
            if self._has_failed(state, request):
                raise ViolationError(f"I4: rank {me} waits in a round that has failed")
            if not self.scenario.budget:
                raise ViolationError(f"I4: rank {me} waits for its deadline, without any fault")
            yield f"deadline of rank {me}", self.put(state, me, local._replace(is_over=True))

    def _has_failed(self, state: State, request: Request) -> bool:
        """Return whether a rank waits in a failed round, and the coordinator could release it."""
        round_ = request[1][:3]
        store = dict(self.stores.values[state.store])
        if request[0] == "linger" or not is_failed(store.get((*round_, "verdict"))):
            return False
        coordinator = self.locals.values[state.locals[0]]
        has_come = coordinator.rank.number + (coordinator.phase != "idle") >= round_[1]
        # A coordinator that lost the store for a moment publishes the failure in its next call.
        is_pending = any(number == round_[1] for number, _ in coordinator.rank.pending)
        in_flight = self.ghosts.values[state.ghost].in_flight
        is_lost = coordinator.phase == "dead" or coordinator.is_broken
        return has_come and not (is_lost or is_pending or in_flight)

    # Faults.

    def faults(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield what the faults of the scenario lead to."""
        for me, number in enumerate(state.locals):
            local: Local = self.locals.values[number]
            if local.phase == "dead":
                continue
            faults = self._of_idle if local.phase == "idle" else self._of_call
            for label, after, store, ghost in faults(state, me, local):
                after_state = self.put(state, me, after, store=store, ghost=ghost, is_fault=True)
                yield f"FAULT rank {me}: {label}", after_state
            if "kill" in self.scenario.faults:
                dead = self.put(state, me, Local(Rank(), "dead"), is_fault=True)
                yield f"FAULT rank {me} is killed", dead
        if "stop" in self.scenario.faults:
            yield "FAULT the store stops", self._stop(state)
        if "restart" in self.scenario.faults:
            yield "FAULT the job restarts", self._restart(state)

    def _of_idle(self, state: State, me: int, local: Local) -> Iterator[Fault]:
        if not self._can_start(state, me):
            return
        faults, rank = self.scenario.faults, local.rank
        ghost = self.ghosts.values[state.ghost]
        if "skip" in faults:
            skipped = self._with_outcome(ghost, me, rank.call, "skipped")
            after = local._replace(rank=rank._replace(call=rank.call + 1))
            skipped = skipped._replace(has_skipped=True)
            skipped = self._with_allowance(skipped) if self._has_urls else skipped
            yield f"skips call {rank.call}", after, None, skipped
        for fault, raising in (("raise", 1), ("raise unknown", 2)):
            if fault in faults:
                after = local._replace(rank=rank._replace(raising=raising), phase="begin")
                more = self._with_allowance(ghost) if raising == 2 or self._has_urls else None
                yield f"call {rank.call} raises at once", after, None, more
        if "raise alone" in faults:
            after = local._replace(phase="unsent")
            yield f"call {rank.call} raises at once, without the store", after, None, None

    def _with_allowance(self, ghost: Ghost) -> Ghost:
        return ghost._replace(allowance=ghost.allowance + 1)

    def _of_call(self, state: State, me: int, local: Local) -> Iterator[Fault]:
        faults = self.scenario.faults
        request = self.advance(state.locals[me], me)[1]
        assert request is not None
        if "late" in faults and not local.is_over:
            ghost = self.ghosts.values[state.ghost]
            # A late read takes the next number, where the others may be at another URL.
            is_apart = self._has_urls and (ghost.has_skipped or self.scenario.is_read)
            more = self._with_allowance(ghost) if is_apart else None
            yield "deadline expires early", local._replace(is_over=True), None, more
        if "cancel" in faults and not local.is_over:
            yield from self._cancel(state, me, local)
        down = local._replace(replies=(*local.replies, DOWN))
        if request[0] == "commit" and "commit" in faults:
            ghost = self.ghosts.values[state.ghost]
            yield "commit request lost", down, None, None
            yield "reply to commit lost", down, None, self.commit(state, ghost, request)
        if request[0] in OF_STORAGE | NOTES or local.is_broken or "lost" not in faults:
            return
        broken = down._replace(is_broken=True)
        yield f"{_show(request)} lost, connection broken", broken, None, None
        if request[0] in READS:
            return
        store = dict(self.stores.values[state.store])
        self.apply(store, request)
        for after, note in ((down, ""), (broken, ", connection broken")):
            yield f"reply to {_show(request)} lost{note}", after, store, None
            if "delay" in faults:
                ghost = self.ghosts.values[state.ghost]
                ghost = ghost._replace(in_flight=(*ghost.in_flight, request))
                yield f"{_show(request)} delayed{note}", after, None, ghost
        yield f"{_show(request)} lost", down, None, None

    def _cancel(self, state: State, me: int, local: Local) -> Iterator[Fault]:
        phase = local.phase.rstrip("12")
        store = dict(self.stores.values[state.store])
        if phase in ("enter", "arrive", "wait", "collect", "report") and local.rank.token:
            round_ = 2 if local.phase in ("report", "wait2", "collect2") else 1
            key = (local.rank.token, local.rank.number + 1, round_)
            verdict = self.apply(store, ("fail", key, self.protocol.own(me, local.rank)))
            if is_failed(verdict):
                # Another thread than that of the call.
                ghost = self.ghosts.values[state.ghost]
                ghost = ghost._replace(in_flight=(*ghost.in_flight, ("publish", key, verdict)))
                yield "is cancelled", local._replace(is_over=True), store, ghost
                return
        yield "is cancelled", local._replace(is_over=True), store, None

    def _stop(self, state: State) -> State:
        for me, number in enumerate(state.locals):
            local = self.locals.values[number]
            request = self.advance(number, me)[1]
            if request is None:
                continue
            ghost = self.ghosts.values[state.ghost]
            is_lost = request[0] not in READS | OF_STORAGE | NOTES
            if "delay" in self.scenario.faults and is_lost:
                ghost = ghost._replace(in_flight=(*ghost.in_flight, request))
            state = self.put(state, me, local._replace(is_broken=True), ghost=ghost)
        return self._spend(state)

    def _spend(self, state: State) -> State:
        ghost = self.ghosts.values[state.ghost]
        need = max(map(self._next_call, state.locals))
        ghost = self.ghosts[ghost._replace(need=need)]
        return state._replace(ghost=ghost, budget=state.budget - 1)

    def _restart(self, state: State) -> State:
        ghost: Ghost = self.ghosts.values[state.ghost]
        calls = [call for _, payloads in ghost.commits for _, call in payloads]
        incarnation = max(self.locals.values[number].rank.incarnation for number in state.locals)
        local = self.locals[Local(Rank(incarnation + 1, call=max(calls, default=-1) + 1))]
        outcomes = (("",) * self.scenario.calls,) * self.scenario.world
        # A new member may take each of these for the failure of its own call, before rank 0 comes.
        items = self.stores.values[state.store]
        stale = {key[:2] for key, value in items if len(key) == 4 and is_failed(value)}
        ghost = ghost._replace(outcomes=outcomes, has_skipped=False, allowance=len(stale))
        after = state._replace(ghost=self.ghosts[ghost], locals=(local,) * self.scenario.world)
        return self._spend(after)

    def landings(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield the effects of delayed requests."""
        ghost: Ghost = self.ghosts.values[state.ghost]
        for index, request in enumerate(ghost.in_flight):
            store = dict(self.stores.values[state.store])
            self.apply(store, request)
            rest = ghost.in_flight[:index] + ghost.in_flight[index + 1 :]
            after = state._replace(
                store=self.stores[frozenset(store.items())],
                ghost=self.ghosts[ghost._replace(in_flight=rest)],
            )
            yield f"delayed {_show(request)} arrives", after

    def successors(self, state: State) -> list[tuple[str, State]]:
        """Return all steps and faults; check the end where there are none."""
        steps = self.steps(state)
        in_flight = self.ghosts.values[state.ghost].in_flight
        if not state.budget and not in_flight:
            for label, after, commutes in steps:
                if commutes:
                    return [(label, after)]
        result = [(label, after) for label, after, _ in steps]
        if not result:
            result += self.expiries(state)
            if not result:
                self.check_end(state)
        if in_flight:
            result += self.landings(state)
        if state.budget:
            result += self.faults(state)
        return result

    # The search.

    def run(self, most: int | None = None) -> Result:
        """Visit all states, or the first `most` of them, up to the first violation."""
        began = time.process_time()
        first = self._canonical(self.start())
        origins: dict[State, tuple[State, str] | None] = {first: None}
        level, transitions = [first], 0
        while level:
            following = []
            for state in level:
                try:
                    successors = self.successors(state)
                except ViolationError as error:
                    return self._violation(origins, state, str(error), transitions, began)
                transitions += len(successors)
                for label, after in successors:
                    key = self._canonical(after)
                    if key not in origins:
                        origins[key] = (state, label)
                        following.append(key)
            level = following if most is None or len(origins) < most else []
        return Result(len(origins), transitions, seconds=time.process_time() - began)

    def _violation(
        self, origins: dict[State, Any], state: State, text: str, transitions: int, began: float
    ) -> Result:
        if self._merge:
            # The names of merged members change from step to step.
            return Search(self.scenario, self.rules, merge=False).run()
        trace: list[str] = []
        origin = origins[state]
        while origin:
            before, label = origin
            trace.insert(0, label)
            origin = origins[before]
        seconds = time.process_time() - began
        return Result(len(origins), transitions, text, tuple(trace), seconds)

    def _canonical(self, state: State) -> State:
        if not self._merge:
            return state
        zero, first, second = state.locals
        if first < second:
            return state
        store = self._swapped_store(state.store)
        if first == second and store >= state.store:
            return state
        return State(store, self._swapped_ghost(state.ghost), (zero, second, first), state.budget)

    def _swapped_store(self, number: int) -> int:
        items = self.stores.values[number]
        return self.stores[frozenset((_swapped_key(key), value) for key, value in items)]

    def _swapped_ghost(self, number: int) -> int:
        ghost: Ghost = self.ghosts.values[number]
        commits = tuple((round_, (a, c, b)) for round_, (a, b, c) in ghost.commits)
        zero, first, second = ghost.outcomes
        in_flight = tuple((r[0], _swapped_key(r[1]), *r[2:]) for r in ghost.in_flight)
        return self.ghosts[
            ghost._replace(commits=commits, outcomes=(zero, second, first), in_flight=in_flight)
        ]


def _swapped_key(key: Any) -> Any:
    is_private = len(key) > 2 and key[-2] in ("from", "join", "seen") and key[-1]
    return (*key[:-1], 3 - key[-1]) if is_private else key


def _show(request: Request) -> str:
    return " ".join(map(str, request))


def search(scenario: Scenario, rules: Rules | None = None) -> Result:
    """Search all executions of a scenario."""
    return Search(scenario, rules or Rules()).run()


def drop(rule: str) -> Result:
    """Search executions without a rule, in the scenario that needs it."""
    return search(DROPPED[rule][0], replace(Rules(), **{rule: False}))


RAISES = ("raise", "raise unknown", "raise alone")
STORE = ("lost", "commit")
KNOWN: tuple[Literal["steps", "none"], ...] = ("steps", "none")

_HALF = Scenario(name="half a failure", faults=("raise", "kill", "lost"), budget=2)
"""A rank sets the verdict, and dies or loses the store before it writes the release."""

_SIDES = Scenario(name="two URLs", faults=(), budget=0, operations="sides", is_live=False)

SHORT = (
    Scenario(name="steps", faults=(*RAISES, "late", "skip", "cancel")),
    Scenario(name="steps in lockstep", faults=(*RAISES, "late", "skip"), lockstep=True),
    Scenario(name="two of late and skip", faults=("late", "skip"), budget=2),
    Scenario(name="dead ranks", faults=("kill", "stop")),
    _HALF,
    Scenario(name="lost requests", faults=STORE),
    Scenario(name="delayed requests", faults=("lost", "delay", "stop"), world=2),
    Scenario(name="steps unknown", faults=(*RAISES, "late", "cancel", "lost"), operations="none"),
    Scenario(
        name="step URLs", faults=("late", "skip", "raise unknown"), operations="urls", calls=4
    ),
    Scenario(
        name="step URLs in lockstep", faults=("late", "skip"), operations="urls", lockstep=True
    ),
    _SIDES,
    Scenario(
        name="one rank knows no step", faults=("late", "skip"), operations="mixed", is_live=False
    ),
    Scenario(name="first calls", faults=("late", "skip", *RAISES), fresh=True),
    Scenario(name="restart", faults=("restart",), fresh=True, calls=2),
    Scenario(name="left", faults=("late", "lost"), acknowledge=True, calls=2),
    Scenario(name="reads", faults=("late", "skip", "raise unknown"), operations="reads", calls=4),
    Scenario(name="reads in lockstep", faults=("late", "skip"), operations="reads", lockstep=True),
    Scenario(name="first reads", faults=("late", "skip"), operations="reads", fresh=True),
    Scenario(name="read URLs", faults=("late", "skip"), operations="read urls", calls=4),
)
"""What the tests search."""

FULL = (
    Scenario(name="two of skip, late, cancel", faults=("late", "skip", "cancel"), budget=2),
    Scenario(name="three of skip and late", faults=("late", "skip"), budget=3, calls=4),
    Scenario(
        name="three of skip in lockstep", faults=("late", "skip"), budget=3, calls=5, lockstep=True
    ),
    Scenario(name="two of raise and late", faults=(*RAISES, "late"), budget=2),
    Scenario(name="two of lost, commit, late", faults=(*STORE, "late"), budget=2),
    Scenario(name="two of lost and skip", faults=("lost", "skip"), budget=2),
    Scenario(name="two of kill, cancel, lost", faults=("kill", "cancel", "lost"), budget=2),
    Scenario(name="two of stop and late", faults=("stop", "late"), budget=2),
    Scenario(name="two delayed requests", faults=("lost", "delay"), budget=2, world=2),
    Scenario(
        name="two faults, steps unknown",
        faults=(*RAISES, "late", "cancel", "lost"),
        budget=2,
        operations="none",
    ),
    Scenario(
        name="two faults, step URLs",
        faults=("late", "skip", "raise"),
        budget=2,
        operations="urls",
        calls=8,
    ),
    Scenario(
        name="three faults of two ranks",
        faults=("late", "skip", "raise", "lost"),
        budget=3,
        world=2,
        calls=4,
    ),
    Scenario(
        name="two faults, reads",
        faults=("late", "skip"),
        budget=2,
        operations="reads",
        calls=4,
    ),
    Scenario(
        name="two faults, reads in lockstep",
        faults=("late", "skip"),
        budget=2,
        operations="reads",
        calls=5,
        lockstep=True,
    ),
    Scenario(
        name="two faults, read URLs",
        faults=("late", "skip"),
        budget=2,
        operations="read urls",
        calls=5,
    ),
    Scenario(
        name="two faults, first reads",
        faults=("late", "skip"),
        budget=2,
        operations="reads",
        calls=4,
        fresh=True,
    ),
    Scenario(
        name="restart of two ranks, reads",
        faults=("restart", "late", "skip"),
        budget=2,
        world=2,
        operations="reads",
        fresh=True,
    ),
    Scenario(name="restart of three ranks", faults=("restart", "late"), fresh=True),
    Scenario(name="left, two faults", faults=("late", "lost"), acknowledge=True, budget=2),
    *(
        Scenario(
            name=f"restart and {fault}",
            faults=("restart", fault),
            budget=2,
            world=2,
            fresh=True,
            operations=operations,
        )
        for fault in ("late", "lost", "skip", "raise alone", "cancel", "kill")
        for operations in KNOWN[: 1 if fault == "skip" else 2]
    ),
)
"""What the full form searches besides."""

_RESTART = Scenario(name="restart", faults=("restart",), fresh=True, world=2)
_LATE = Scenario(name="late", faults=("late",))
_LOST = Scenario(name="lost", faults=("lost",))
_RAISE = Scenario(name="raise", faults=("raise",), lockstep=True)
_SKIP = Scenario(name="skip", faults=("skip",))
_URLS = replace(_SKIP, operations="urls", calls=6)
_READS = Scenario(name="reads", faults=("skip",), operations="reads", world=2)
_LATE_RESTART = replace(_RESTART, faults=("restart", "late"), budget=2, calls=2)

DROPPED = {
    "session": (_RESTART, "I1"),
    "join_slot": (_RESTART, "I3"),
    "walk": (_LATE_RESTART, "I2"),
    "look_again": (_LATE_RESTART, "I2"),
    "count_early": (replace(_LATE, fresh=True, world=2, operations="none"), "I1"),
    "step": (_SKIP, "I1"),
    "claim": (_LATE, "I3"),
    "keep_call": (_SKIP, "I2"),
    "keep_keys": (replace(_SKIP, lockstep=True), "I4"),
    "count_failed": (replace(_RAISE, lockstep=False, operations="none"), "I1"),
    "release_failed": (_RAISE, "I4"),
    "report_pending": (_LOST, "I2"),
    "poll_verdict": (_HALF, "I4"),
    "publish_failure": (_HALF, "I4"),
    "fail_next": (Scenario(name="kill", faults=("kill",)), "I4"),
    "doubt": (_LATE, "I3"),
    "publish_again": (_LOST, "I2"),
    "add_once": (replace(_LOST, acknowledge=True, faults=("late", "lost"), budget=2), "I6"),
    "memory": (_URLS, "I2"),
    "long_memory": (replace(_URLS, budget=2), "I2"),
    "moved_on": (replace(_SIDES, lockstep=True), "I4"),
    "pass_over": (replace(_READS, lockstep=True), "I2"),
    "reads_uncounted": (
        replace(_READS, faults=("skip", "late"), fresh=True, budget=2, calls=4),
        "I2",
    ),
}
"""For each rule a scenario, and the invariant that does not hold there without it."""


def main() -> None:
    """Search all scenarios, and print a counter-example for each dropped rule."""
    parser = argparse.ArgumentParser(description="Search the coordination protocol.")
    parser.add_argument("--short", action="store_true", help="leave out what the tests leave out")
    parser.add_argument("--traces", action="store_true", help="print whole counter-examples")
    options = parser.parse_args()
    are_kept = True
    for scenario in SHORT if options.short else SHORT + FULL:
        result = search(scenario)
        are_kept &= not result.violation
        _report(f"{scenario.name} ({scenario.operations})", result, result.trace)
    for rule, (_, invariant) in DROPPED.items():
        result = drop(rule)
        are_kept &= result.violation.startswith(invariant)
        trace = result.trace if options.traces else result.trace[-8:]
        _report(f"without {rule}", result, trace)
    sys.exit(not are_kept)


def _report(name: str, result: Result, trace: Sequence[str]) -> None:
    counts = f"{result.states:>8} states {result.transitions:>8} transitions"
    lines = [f"{name:45} {counts} {result.seconds:6.1f} s  {result.violation or 'holds'}"]
    lines += [f"    {step}" for step in trace]
    print(*lines, sep="\n", flush=True)  # noqa: T201  # the report of a script


if __name__ == "__main__":
    main()
