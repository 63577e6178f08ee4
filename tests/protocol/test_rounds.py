"""Operations of ranks that skip one, come late, cancel or lose requests; who learns what.

The next operation of all ranks goes on.
"""

from __future__ import annotations

import itertools
import queue
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import rank_threads as threads
from limits import HANG_S, SLACK_S
from rank_threads import (
    LONG,
    TERMS,
    Fault,
    SharedStore,
    each,
    group,
    run,
    values,
)

from ckpt_storage.background.messages import HeartbeatRequest
from ckpt_storage.background.worker import _send_heartbeats
from ckpt_storage.coordination import operation as operation_module
from ckpt_storage.coordination import operation_rounds
from ckpt_storage.coordination.failure_detector import FailureDetector
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.heartbeats import Heartbeats, heartbeat_keys
from ckpt_storage.coordination.identity import Identity
from ckpt_storage.coordination.keyvalue import StoreClient
from ckpt_storage.coordination.lane import Lane
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.processes import RankProcess
from ckpt_storage.coordination.rounds import ByRank, UndecidedError
from ckpt_storage.errors import (
    CheckpointError,
    PhaseTimeoutError,
    RankFailedError,
    RankMismatchError,
    SaveCancelledError,
)
from ckpt_storage.options import Timeouts

quick = threads.quick
pytestmark = pytest.mark.usefixtures("quick")

SHORT = Timeouts(plan=0.15, silence=5.0)
LAST = "/last"


def save(
    ranks: RankGroup,
    mark: int,
    *,
    step: int | None = None,
    url: str = LAST,
    timeouts: Timeouts = LONG,
    is_by_rank: bool = False,
    inside: Callable[[Operation, str], object] = lambda _operation, _stage: None,
) -> Any:
    """Run an operation of the shape of a save; return what was committed, or the error.

    What is committed are the marks of all ranks. `is_by_rank`: each rank has a plan of its own.
    `inside` is called in each stage.
    """

    def decide(_: object) -> ByRank[str] | None:
        inside(operation, "deciding")
        return ByRank(["a plan"] * ranks.world_size) if is_by_rank else None

    def commit(marks: list[int]) -> set[int]:
        inside(operation, "committing")
        return set(marks)

    try:
        with ranks.operation(f"the save to {url}", timeouts=timeouts) as operation:
            inside(operation, "begun")
            operation.identify(Identity(kind="the save", url=url, step=step))
            operation.meet(TERMS, decide=decide)
            operation.phase("write")
            inside(operation, "writing")
            operation.phase("commit")
            return operation.exchange(mark, commit, is_commit=True, is_last=True)
    except CheckpointError as error:
        return error


def rolling(ranks: RankGroup, step: int, **options: Any) -> Any:
    """Save a step to a URL that stays the same."""
    return save(ranks, step, step=step, **options)


def numbered(ranks: RankGroup, step: int, **options: Any) -> Any:
    """Save a step to a URL of its own; the step is not known."""
    return save(ranks, step, url=f"/step-{step}", **options)


def unnumbered(ranks: RankGroup, step: int, **options: Any) -> Any:
    """Save a step to a URL that stays the same; the step is not known."""
    return save(ranks, step, **options)


# Ranks that skip a call.


@pytest.mark.parametrize("skipping", [0, 1, 2])
def test_a_skipped_save_fails_for_the_others_and_no_later_one(skipping: int) -> None:
    """The error names both steps and their ranks; the rank ahead keeps its call."""
    steps = {rank: [100, 200, 300] for rank in range(3)} | {skipping: [200, 300]}
    ended = values(
        run(
            group(SharedStore(), 3),
            lambda ranks: [rolling(ranks, step) for step in steps[ranks.rank]],
        )
    )
    assert ended.pop(skipping) == [{200}, {300}]
    for error, *saved in ended:
        assert isinstance(error, RankMismatchError)
        behind = [rank for rank in range(3) if rank != skipping]
        assert error.values == {"100": behind, "200": [skipping]}
        assert saved == [{200}, {300}]


@pytest.mark.deadline
@pytest.mark.parametrize("steps", [(100, 200, None), (200, 100, None), (100, None, 200)])
def test_ranks_of_unequal_steps_wait_for_a_dead_rank_until_their_deadline_and_no_longer(
    steps: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is abandoned when all have arrived, or then; each error has both steps."""
    # Members give up after the coordinator, also on a slow machine.
    monkeypatch.setattr(operation_module, "_MEMBER_GRACE_S", 3.0)
    ranks = group(SharedStore(), 3)
    live = [rank for rank in ranks if steps[rank.rank] is not None]
    timeouts = Timeouts(plan=0.5)
    for outcome in run(live, lambda of: rolling(of, steps[of.rank] or 0, timeouts=timeouts)):
        assert isinstance(outcome.value, RankMismatchError)
        values_of = {str(step): [rank] for rank, step in enumerate(steps) if step is not None}
        assert outcome.value.values == values_of
        assert outcome.wall_s < 0.5 + SLACK_S
    assert values(run(ranks, lambda of: rolling(of, 300))) == [{300}] * 3


def test_the_rank_ahead_says_why_its_number_was_abandoned() -> None:
    """It has time left, and waits under the next number for ranks that do not come."""

    def body(ranks: RankGroup) -> Any:
        if ranks.rank == 1:
            return rolling(ranks, 100)
        return rolling(ranks, 200, timeouts=Timeouts(plan=2.0))

    behind, ahead = values(run(list(reversed(group(SharedStore(), 2))), body))
    assert isinstance(behind, RankMismatchError)
    assert isinstance(ahead, PhaseTimeoutError)
    assert "'200': ranks 0; '100': ranks 1" in ahead.__notes__[-1]


@pytest.mark.deadline
def test_the_rank_ahead_keeps_its_deadline() -> None:
    """It waits no longer than its own call may, however many numbers are given up meanwhile."""
    begin = threading.Event()

    def body(ranks: RankGroup) -> Any:
        if ranks.rank == 1:
            begin.wait(HANG_S)
            return rolling(ranks, 900, timeouts=Timeouts(plan=0.6))
        ended = []
        for step in range(100, 500, 100):
            ended.append(rolling(ranks, step, timeouts=Timeouts(plan=0.2)))
            begin.set()
        return ended

    ended = run(group(SharedStore(), 2), body)
    assert all(isinstance(error, CheckpointError) for error in values(ended)[0])
    assert isinstance(ended[1].value, PhaseTimeoutError)
    assert ended[1].value.rank == 0
    assert ended[1].wall_s < 0.6 + 4 * 0.5 + SLACK_S


@pytest.mark.parametrize("skipped", [1, 2, 5])
def test_urls_bring_ranks_in_step_where_steps_are_not_known(skipped: int) -> None:
    """After k skipped calls the next k fail, and those after them are committed by all."""
    steps = [100 * number for number in range(1, 2 * skipped + 4)]

    def body(ranks: RankGroup) -> dict[int, Any]:
        own = steps[skipped:] if ranks.rank == 1 else steps
        return {step: numbered(ranks, step) for step in own}

    for ended in values(run(group(SharedStore(), 3), body)):
        saved = {step for step, value in ended.items() if value == {step}}
        assert saved >= set(steps[2 * skipped :])
        assert all(value == {step} for step, value in ended.items() if step in saved)
        assert all(
            isinstance(value, CheckpointError) for step, value in ended.items() if step not in saved
        )


# Ranks that are late.


def test_a_late_rank_fails_what_the_others_gave_up_and_takes_part_in_the_next() -> None:
    """However many calls it is behind; nothing of a call enters another one."""
    each(itertools.product((rolling, unnumbered, numbered), (1, 3)), _check_late_rank)


def _check_late_rank(call: Callable[..., Any], late_count: int) -> None:
    gave_up = threading.Event()

    def body(ranks: RankGroup) -> list[Any]:
        if ranks.rank == 1:
            assert gave_up.wait(HANG_S)
        timeouts = LONG if ranks.rank == 1 else SHORT
        ended = [call(ranks, number, timeouts=timeouts) for number in range(late_count)]
        if ranks.rank == 0:
            gave_up.set()
        return ended + [call(ranks, number) for number in range(late_count, late_count + 2)]

    for ended in values(run(group(SharedStore(), 2), body)):
        assert all(isinstance(error, CheckpointError) for error in ended[:late_count])
        assert ended[late_count:] == [{late_count}, {late_count + 1}]


def test_a_rank_that_skipped_several_saves_passes_all_of_them() -> None:
    """Its next call takes part in the others' next."""
    gave_up = threading.Event()

    def body(ranks: RankGroup) -> list[Any]:
        if ranks.rank == 1:
            assert gave_up.wait(HANG_S)
            return [rolling(ranks, step) for step in (400, 500)]
        ended = [rolling(ranks, step, timeouts=SHORT) for step in (100, 200, 300)]
        gave_up.set()
        assert all(isinstance(error, PhaseTimeoutError) for error in ended)
        return [rolling(ranks, step) for step in (400, 500)]

    assert values(run(group(SharedStore(), 2), body)) == [[{400}, {500}]] * 2


# Calls that raise before they have sent anything.


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("call", [rolling, unnumbered])
def test_a_call_that_raises_at_once_fails_it_for_all(
    call: Callable[..., Any], failing: int, *, is_first: bool
) -> None:
    """In the first operation as well as later; the next one goes on."""

    def raise_begun(operation: Operation, stage: str) -> None:
        if (operation.rank, stage) == (failing, "begun"):
            raise CheckpointError("no state")

    def body(ranks: RankGroup) -> list[Any]:
        before = [] if is_first else [call(ranks, 0)]
        return [*before, call(ranks, 1, inside=raise_begun), call(ranks, 2)]

    for ended in values(run(group(SharedStore(), 3), body)):
        *before, error, after = ended
        assert (before, after) == ([] if is_first else [{0}], {2})
        assert "no state" in str(error)
        assert error.rank == failing


def test_calls_without_the_store_count_all_the_same() -> None:
    """The others give them up at their deadline, and no state of one call enters another."""
    each(
        [
            ("nothing", 0, False),
            ("nothing", 1, True),
            ("a failure", 0, True),
            ("a failure", 1, False),
            ("a save", 0, False),
            ("a save", 1, True),
        ],
        _check_calls_without_the_store,
    )


def _check_calls_without_the_store(before: str, failing: int, raises: bool) -> None:  # noqa: FBT001  # of a case
    store, turns = SharedStore(), threading.Barrier(3)

    def raise_begun(_: Operation, stage: str) -> None:
        if stage == "begun":
            raise CheckpointError("no state")

    def body(ranks: RankGroup) -> list[Any]:
        is_failing = ranks.rank == failing
        if before == "a save":
            assert unnumbered(ranks, 0) == {0}
        elif before == "a failure":
            assert isinstance(unnumbered(ranks, 0, inside=raise_begun), CheckpointError)
        errors, more = [], {"inside": raise_begun} if is_failing and raises else {}
        for mark in (1, 2):
            turns.wait(HANG_S)
            store.cut(failing)
            turns.wait(HANG_S)
            errors.append(unnumbered(ranks, mark, timeouts=Timeouts(plan=0.2, silence=0.2), **more))
        turns.wait(HANG_S)
        store.mend()
        turns.wait(HANG_S)
        return [errors, unnumbered(ranks, 3), unnumbered(ranks, 4)]

    for rank, (errors, *after) in enumerate(values(run(group(store, 3), body))):
        assert all(isinstance(error, CheckpointError) for error in errors)
        named = {error.rank for error in errors}
        assert failing in {rank, 0} or named == {failing}
        assert after == [{3}, {4}]


# Requests that are lost.


def _requests_of_a_save() -> list[tuple[int, str, str]]:
    """Return rank, method and key of each request of a first and a second save of two ranks."""
    store = SharedStore()
    ranks = group(store, 2)
    for step in (1, 2):
        values(run(ranks, lambda one, step=step: rolling(one, step)))  # type: ignore[misc]  # a default
    seen = dict.fromkeys(
        (request.rank, request.method, request.key.partition("/")[2] or request.key)
        for rank in range(2)
        for request in store.requests_of(rank)
    )
    return list(seen)


@pytest.mark.parametrize("effect", ["request lost", "reply lost", "broken", "swallowed"])
def test_each_request_of_a_save_may_be_lost_once(
    effect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save goes on, and so does the next one."""
    monkeypatch.setattr(operation_rounds, "_FINISH_S", 0.1)

    def check(rank: int, method: str, key: str) -> None:
        store = SharedStore()
        pattern = f"(^|/){re.escape(key)}$"
        fault = store.add_fault(Fault(effect=effect, rank=rank, method=method, key=pattern))
        ended = run(group(store, 2), lambda ranks: [rolling(ranks, step) for step in (1, 2)])
        assert values(ended) == [[{1}, {2}]] * 2, fault
        assert fault.seen.is_set(), fault

    each(_requests_of_a_save(), check)


@pytest.mark.parametrize("effect", ["request lost", "reply lost"])
def test_requests_that_are_lost_for_good_leave_no_wrong_outcome(
    effect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank says "failed" of what is committed, or the reverse; the next save is committed."""
    monkeypatch.setattr(operation_rounds, "_FINISH_S", 0.1)
    timeouts = Timeouts(plan=1.5, write=1.5, commit=1.5, silence=1.5)

    def check(rank: int, method: str, key: str) -> None:
        store = SharedStore()
        pattern = f"(^|/){re.escape(key)}$"
        store.add_fault(Fault(effect=effect, rank=rank, method=method, key=pattern, count=2))
        ended = values(
            run(
                group(store, 2),
                lambda ranks: [rolling(ranks, step, timeouts=timeouts) for step in (1, 2, 3)],
            )
        )
        for step, of_ranks in enumerate(zip(*ended, strict=True), 1):
            sure = [value for value in of_ranks if not isinstance(value, UndecidedError)]
            is_committed = any(value == {step} for value in sure)
            assert all((value == {step}) == is_committed for value in sure), ended
        assert [of_rank[-1] for of_rank in ended] == [{3}] * 2, ended

    each(_requests_of_a_save(), check)


def test_a_failure_whose_release_is_lost_reaches_all_ranks_before_the_deadline() -> None:
    """The coordinator reads the verdict while it waits, and writes the release."""
    store = SharedStore()
    store.add_fault(Fault(effect="request lost", rank=1, key="/1/2/release$", count=1_000))

    def inside(operation: Operation, stage: str) -> None:
        if (operation.rank, stage) == (1, "writing"):
            raise CheckpointError("The disk is on fire.")

    timeouts = Timeouts(plan=HANG_S, write=30.0, commit=30.0, silence=HANG_S)
    ended = values(
        run(group(store, 3), lambda ranks: rolling(ranks, 1, timeouts=timeouts, inside=inside))
    )
    for error in (ended[0], ended[2]):
        assert isinstance(error, RankFailedError), error
        assert (error.rank, "on fire" in str(error)) == (1, True)


def test_a_failure_that_only_the_claim_reads_reaches_all_ranks_before_the_deadline() -> None:
    """A rank fails after the coordinator's last poll, and loses the store before the release."""
    store = SharedStore()
    claim = Fault(effect="hangs", rank=0, key="/1/2/verdict$", spares_reads=True)
    store.add_fault(claim)
    store.add_fault(Fault(effect="request lost", rank=1, key="/1/2/release$", count=1_000))

    def cancel(operation: Operation) -> None:
        assert claim.seen.wait(HANG_S)
        operation.failed(SaveCancelledError("cancelled by the user"))
        claim.released.set()

    def inside(operation: Operation, stage: str) -> None:
        if (operation.rank, stage) == (1, "writing"):
            threading.Thread(target=cancel, args=[operation], daemon=True).start()

    ended = run(group(store, 3), lambda ranks: rolling(ranks, 1, inside=inside))
    for rank in (ended[0], ended[2]):
        error = rank.value
        assert isinstance(error, SaveCancelledError), error
        assert error.rank == 1
        assert rank.wall_s < LONG.silence


# Cancels from another thread.


STAGES = ("begun", "waiting", "deciding", "writing", "reported", "committing")


def _cancelling(canceller: int, stage: str) -> Callable[[Operation, str], None]:
    """Return what has one of two ranks cancel in a stage, while the other one waits for that."""
    cancelled, ready = threading.Event(), threading.Barrier(2)

    def cancel(operation: Operation) -> None:
        operation.failed(SaveCancelledError("cancelled by the user"))
        cancelled.set()

    def cancel_when_ready(operation: Operation) -> None:
        ready.wait(HANG_S)
        cancel(operation)

    # In some stages the canceller waits for the other rank, which comes once that is cancelled.
    held_in = {"waiting": "begun", "reported": "writing"}.get(stage)
    is_decided = stage in {"deciding", "committing"}

    def inside(operation: Operation, reached: str) -> None:
        if reached == stage and is_decided:
            ready.wait(HANG_S)
            assert cancelled.wait(HANG_S)
        elif operation.rank != canceller:
            assert reached != held_in or cancelled.wait(HANG_S)
        elif reached == held_in:
            threading.Timer(0.1, cancel, [operation]).start()
        elif reached == "begun" and is_decided:
            threading.Thread(target=cancel_when_ready, args=[operation], daemon=True).start()
        elif reached == stage:
            cancel(operation)

    return inside


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("canceller", [0, 1])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_cancel_in_any_stage_ends_the_save_for_all_or_for_none(
    canceller: int, stage: str, *, is_first: bool
) -> None:
    """Without effect once the coordinator commits. The next save goes on."""
    inside = _cancelling(canceller, stage)

    def body(ranks: RankGroup) -> list[Any]:
        before = [] if is_first else [unnumbered(ranks, 0)]
        return [*before, unnumbered(ranks, 1, inside=inside), unnumbered(ranks, 2)]

    for ended in values(run(group(SharedStore(), 2), body)):
        *before, outcome, after = ended
        assert (before, after) == ([] if is_first else [{0}], {2})
        if stage == "committing":
            assert outcome == {1}
        else:
            assert isinstance(outcome, SaveCancelledError)
            assert outcome.rank == canceller


@pytest.mark.parametrize("canceller", [0, 1])
def test_a_cancel_whose_request_is_overtaken_by_the_save_fails_no_commit(canceller: int) -> None:
    """It waits in the store while the coordinator claims its round, and the commit as well."""
    store = SharedStore()
    # Not a poll of the coordinator, which reads the verdict.
    hanging = Fault(effect="hangs", rank=canceller, key="/2/1/verdict$", spares_reads=True)
    sending = threading.Event()
    committed = threading.Event()

    def cancel(operation: Operation) -> None:
        # Before the coordinator's own claim: the next request for this verdict is the cancel's.
        store.add_fault(hanging)
        sending.set()
        operation.failed(SaveCancelledError("cancelled by the user"))

    def inside(operation: Operation, stage: str) -> None:
        if stage == "begun" and operation.rank == canceller:
            threading.Timer(0.1, cancel, [operation]).start()
        elif stage == "begun":
            assert hanging.seen.wait(HANG_S)
        elif stage == "committing":
            hanging.released.set()
            time.sleep(0.3)
            committed.set()

    ranks = group(store, 2)
    assert values(run(ranks, lambda one: unnumbered(one, 0))) == [{0}] * 2
    ended = values(run(ranks, lambda one: unnumbered(one, 1, inside=inside)))
    is_committed = committed.is_set()
    hanging.released.set()
    assert all((value == {1}) == is_committed for value in ended), ended


# Loads.


def load(ranks: RankGroup, timeouts: Timeouts = LONG, *, is_read: bool = False) -> Any:
    """Run an operation that only reads; return what it read, or the error."""
    try:
        with ranks.operation(f"the load from {LAST}", timeouts=timeouts) as operation:
            operation.identify(Identity(kind="the load", url=LAST, is_read=is_read))
            return operation.meet(TERMS, decide=lambda _: "read")
    except CheckpointError as error:
        return error


@pytest.mark.parametrize("alone", [0, 1])
def test_a_choice_that_one_rank_began_alone_fails_no_choice_of_all(alone: int) -> None:
    """Ranks that come to a number which another rank left after its deadline take the next."""
    ranks, choose = group(SharedStore(), 3), partial(load, is_read=True)
    (ended,) = values(run([ranks[alone]], partial(choose, timeouts=SHORT))[:1])
    assert isinstance(ended, PhaseTimeoutError)
    assert values(run(ranks, choose)) == ["read"] * 3


def test_calls_that_a_rank_was_late_for_are_no_later_calls() -> None:
    """The others ended them, also before there was a session; what all save then is of one call."""
    calls = (("load",), ("load", "save"), ("save", "load"), ("load", "load", "save"))
    callers = (rolling, unnumbered, numbered)
    each(itertools.product(callers, calls, (0, 1), ("", "session")), _check_late_calls)


def _check_late_calls(
    call: Callable[..., Any], early: tuple[str, ...], late: int, before: str
) -> None:
    store, ended = SharedStore(), threading.Barrier(3)
    readers = group(store, 3, lane="load")

    def body(ranks: RankGroup) -> list[Any]:
        if before:
            assert call(ranks, 0) == {0}
            assert load(readers[ranks.rank]) == "read"
        is_late = ranks.rank == late
        if is_late:
            ended.wait(HANG_S)
        results = [
            load(readers[ranks.rank], SHORT)
            if kind == "load"
            else call(ranks, mark, timeouts=Timeouts(plan=20.0) if is_late else SHORT)
            for mark, kind in enumerate(early, 1)
        ]
        if not is_late:
            ended.wait(HANG_S)
        results += [call(ranks, mark, timeouts=Timeouts(plan=20.0)) for mark in (11, 12, 13)]
        return [*results, load(readers[ranks.rank]), load(readers[ranks.rank])]

    for results in values(run(group(store, 3), body)):
        *first, eleventh, twelfth, thirteenth, _, read = results
        assert all(isinstance(result, CheckpointError) for result in first), results
        assert (eleventh, twelfth, thirteenth, read) == ({11}, {12}, {13}, "read")


# The commit.


def test_a_member_that_sees_no_end_of_a_claimed_commit_cannot_tell() -> None:
    """It says neither "failed" nor "committed"; the coordinator's outcome stands."""
    gave_up = threading.Event()

    def inside(_: Operation, stage: str) -> None:
        if stage == "committing":
            assert gave_up.wait(HANG_S)

    def body(ranks: RankGroup) -> list[Any]:
        timeouts = LONG if ranks.is_coordinator else Timeouts(commit=0.3)
        first = rolling(ranks, 1, timeouts=timeouts, inside=inside)
        gave_up.set()
        return [first, rolling(ranks, 2)]

    (committed, *after), (undecided, *others) = values(run(group(SharedStore(), 2), body))
    assert committed == {1}
    assert isinstance(undecided, UndecidedError)
    assert after == others == [{2}]


def test_a_member_that_waits_for_an_unclaimed_commit_fails_it_for_all() -> None:
    """As long as the coordinator has not claimed it, "failed" is true."""
    done = threading.Event()

    def inside(operation: Operation, stage: str) -> None:
        if stage == "writing" and operation.rank == 0:
            assert done.wait(HANG_S)

    def body(ranks: RankGroup) -> list[Any]:
        timeouts = LONG if ranks.is_coordinator else Timeouts(commit=0.3)
        first = rolling(ranks, 1, timeouts=timeouts, inside=inside)
        done.set()
        return [first, rolling(ranks, 2)]

    for error, after in values(run(group(SharedStore(), 2), body)):
        assert isinstance(error, PhaseTimeoutError)
        assert error.rank == 0
        assert after == {2}


@pytest.mark.deadline
def test_an_outcome_that_did_not_reach_the_store_is_published_by_the_next_call() -> None:
    """The members that wait for it return then; the coordinator does not wait for them before."""
    store = SharedStore()
    store.add_fault(
        Fault(effect="request lost", rank=0, method="set", key="/1/2/release$", count=2)
    )
    ended = run(group(store, 3), lambda ranks: [rolling(ranks, step) for step in (1, 2)])
    assert values(ended) == [[{1}, {2}]] * 3
    assert all(one.wall_s < SLACK_S for one in ended)


@pytest.mark.parametrize("round_number", [1, 2])
@pytest.mark.parametrize("is_claimed", [True, False])
def test_a_coordinator_that_fails_before_or_after_its_claim_fails_all(
    round_number: int, *, is_claimed: bool
) -> None:
    """No rank waits for its deadline; the next save goes on."""
    store = SharedStore()

    def inside(operation: Operation, stage: str) -> None:
        claimed = ("deciding", "committing")[round_number - 1]
        if is_claimed and (stage, operation.lane.number) == (claimed, 1):
            raise CheckpointError("no space")

    if not is_claimed:
        # Its listener reads the same key at the same time.
        verdict = f"/1/{round_number}/verdict$"
        store.add_fault(Fault(effect="reply lost", rank=0, key=verdict, count=2, spares_reads=True))
    ended = run(
        group(store, 3), lambda ranks: [rolling(ranks, step, inside=inside) for step in (1, 2)]
    )
    for error, after in values(ended):
        expected = "no space" if is_claimed else "cannot reach the key-value store"
        assert expected in str(error)
        assert after == {2}


# Keys, requests, threads.


def test_neither_keys_nor_threads_grow_with_the_operations() -> None:
    """After each save that all ranks made, only its own keys are left, whatever failed before."""
    store, choices = SharedStore(), random.Random(5)
    ranks = group(store, 3)
    thread_count = threads.listener_count()
    sizes: list[int] = []

    def fail(failing: int, where: str, operation: Operation, stage: str) -> None:
        if (operation.rank, stage) == (failing, where):
            if where == "writing" and choices.random() < 0.5:
                operation.failed(SaveCancelledError("cancelled by the user"))
            else:
                raise CheckpointError("no space")

    for number in range(50):
        if choices.random() < 0.4:
            where = choices.choice(("begun", "deciding", "writing", "committing"))
            failing = choices.randrange(3) if where in {"begun", "writing"} else 0
            inside = partial(fail, failing, where)
            ended = values(run(ranks, lambda one: rolling(one, number, inside=inside)))  # noqa: B023  # called in this turn
            assert all(isinstance(error, CheckpointError) for error in ended), ended
        else:
            assert values(run(ranks, lambda one: rolling(one, number))) == [{number}] * 3  # noqa: B023  # the same
            assert store.numbers() == {number + 1}, store.key_names()
            sizes.append(len(store.key_names()))
    assert set(sizes) == {min(sizes)}
    threads.wait_until(lambda: threads.listener_count() <= thread_count, "threads are left")


def test_saves_that_fail_one_after_another_leave_the_keys_of_the_last() -> None:
    """All ranks have met in each: a storage that is down for a day does not fill the store."""
    store = SharedStore()

    def fail(operation: Operation, stage: str) -> None:
        if (operation.rank, stage) == (1, "writing"):
            raise CheckpointError("no space")

    run(group(store, 3), lambda one: [rolling(one, step, inside=fail) for step in range(5)])
    assert store.numbers() == {5}, store.key_names()


def test_a_call_that_the_coordinator_skipped_leaves_no_key() -> None:
    """Others have counted its end, in a number that the coordinator left before."""
    store = SharedStore()
    steps = {rank: [100, 200, 300] for rank in range(3)} | {0: [200, 300]}
    run(group(store, 3), lambda one: [rolling(one, step) for step in steps[one.rank]])
    assert store.numbers() == {3}, store.key_names()


def test_an_answer_that_a_rank_does_not_take_is_removed() -> None:
    """It may be a large plan."""
    store = SharedStore()
    fault = store.add_fault(
        Fault(effect="request lost", rank=1, method="compare_set", key="/to/1$", count=2)
    )
    ended = run(
        group(store, 2), lambda ranks: [rolling(ranks, step, is_by_rank=True) for step in (1, 2, 3)]
    )
    assert [of_rank[1:] for of_rank in values(ended)] == [[{2}, {3}]] * 2
    assert fault.seen.is_set()
    (last,) = [key for key in store.key_names() if "/to/" in key]
    assert last.endswith("/3/1/to/1")


def test_a_save_costs_a_member_twelve_requests_at_most() -> None:
    """And the number does not grow with the ranks."""
    for world_size in (2, 5):
        store = SharedStore()
        ranks = group(store, world_size)
        for step in (1, 2):
            values(run(ranks, lambda one, step=step: rolling(one, step)))  # type: ignore[misc]  # a default
        before = [len(store.requests_of(rank)) for rank in range(world_size)]
        assert values(run(ranks, lambda one: rolling(one, 3))) == [{3}] * world_size
        for rank in range(1, world_size):
            sent = store.requests_of(rank)[before[rank] :]
            assert len(sent) <= 12, sent


def test_the_coordinator_polls_with_growing_pauses() -> None:
    """It sends about a hundred requests in the first second that it waits."""
    store = SharedStore()

    def body(ranks: RankGroup) -> Any:
        if ranks.rank == 1:
            time.sleep(1.0)  # what is waited for
        return rolling(ranks, 1)

    assert values(run(group(store, 2), body)) == [{1}] * 2
    polls = [one for one in store.requests_of(0) if one.key.endswith("/1/1/from/1")]
    assert 2 < len(polls) < 130


def test_a_poll_begins_at_the_first_request_with_a_missing_key() -> None:
    """Keys of earlier requests are not checked again."""
    store = SharedStore()
    keys, names = store.keys_of(0), [f"key {number}" for number in range(3_000)]
    keys.set_many(dict.fromkeys(names[:2_000], b""), HANG_S)
    missing = keys.skip_present(names, HANG_S)
    assert (missing[0], len(missing)) == ("key 1024", 1_976)
    before = len(store.requests)
    assert keys.skip_present(missing, HANG_S) == missing
    assert len(store.requests) == before + 1
    assert list(keys.skip_present(names[:2_000], HANG_S)) == []


# Heartbeats.


@pytest.mark.deadline
@pytest.mark.parametrize("watching", [0, 1])
def test_a_process_that_was_stopped_takes_no_other_for_dead(watching: int) -> None:
    """Silence is counted in looks, each a fresh read: the others' heartbeats went on."""
    store, silence_s = SharedStore(), 0.4
    over = threading.Event()

    def inside(operation: Operation, stage: str) -> None:
        if stage == "writing":
            if operation.rank == watching:
                time.sleep(silence_s)  # it has heard the others
                with store.stopped(watching):
                    time.sleep(3 * silence_s)
                time.sleep(silence_s)
                over.set()
            else:
                assert over.wait(HANG_S)

    def body(ranks: RankGroup) -> Any:
        silence = silence_s if ranks.rank == watching else HANG_S
        # Beats as frequent as those of a rank whose limit is short.
        return rolling(ranks, 1, timeouts=Timeouts(silence=silence), inside=inside)

    assert values(run(group(store, 2), body)) == [{1}] * 2


@pytest.mark.deadline
def test_the_worker_keeps_a_silent_trainer_alive() -> None:
    """As long as it sends heartbeats; without them the rank is named."""
    store, silence_s = SharedStore(), 0.6
    over, is_named = threading.Event(), threading.Event()
    begun: dict[int, Operation] = {}
    failures: list[CheckpointError | None] = []

    def beat_as_worker() -> None:
        threads.wait_until(lambda: 1 in begun, "not begun")
        lane = begun[1].lane
        # The worker's process has a connection of its own.
        client = StoreClient(partial(store.connect, 101))  # type: ignore[arg-type]  # as much as is used
        progress = Heartbeats(1)
        progress.number = lane.number
        while not over.wait(0.1):
            heartbeat_keys(client).set(lane.heartbeat_key(1), progress.pack(), HANG_S)

    def inside(operation: Operation, stage: str) -> None:
        if stage == "writing":
            begun[operation.rank] = operation
            if operation.rank == 1:
                store.silent.add(1)
                time.sleep(3 * silence_s)
                # Not asserted here: the operation would turn that into its own error.
                failures.append(operation.failure())
                over.set()
                assert is_named.wait(HANG_S)

    def body(ranks: RankGroup) -> Any:
        try:
            return rolling(ranks, 1, timeouts=Timeouts(silence=silence_s), inside=inside)
        finally:
            is_named.set()

    worker = threading.Thread(target=beat_as_worker, daemon=True)
    worker.start()
    error, _ = values(run(group(store, 2), body))
    worker.join(HANG_S)
    assert failures == [None]
    assert isinstance(error, RankFailedError)
    assert (error.rank, error.is_silent) == (1, True)


def test_a_worker_does_not_replace_heartbeats_of_its_trainer() -> None:
    """They relay the progress of other ranks; its own are sent while the trainer sends none."""
    store, trainer, slow = SharedStore(), Heartbeats(0), Heartbeats(2)
    slow.begin("write", 100)
    trainer.receive(slow.pack())
    keys, key, seen = heartbeat_keys(store.keys_of(0).client), "session/0", list[bool]()

    class Beats(threading.Event):
        """The trainer sends a heartbeat before each of the first five beats of the worker."""

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout == 1.0
            if seen or keys.get(key, HANG_S):
                member = Heartbeats(1)
                member.receive(keys.get(key, HANG_S) or b"")
                seen.append(2 in member.known())
            if len(seen) < 5:
                keys.set(key, trainer.pack(), HANG_S)
            return len(seen) == 8

    address = SimpleNamespace(connect=partial(store.connect, 101))
    request = HeartbeatRequest(store=address, key=key, number=0, beat_s=1.0)  # type: ignore[arg-type]  # as much as is used
    _send_heartbeats(request, Heartbeats(0, process_id=1), Beats())
    assert seen == [True] * 5 + [False] * 3


def test_processes_of_this_host_are_watched_as_soon_as_ranks_have_met() -> None:
    """In the first operation as well: the end of a process is reported, not its silence."""
    own, lost = RankProcess.own(), queue.SimpleQueue[tuple[list[int], str]]()
    assert own is not None
    lane = Lane(SharedStore().keys_of(0), rank=0, global_ranks=range(2))
    detector = FailureDetector(
        lane,
        Heartbeats(0),
        on_lost=lambda ranks, how: lost.put((list(ranks), how)),
        on_error=lambda error: pytest.fail(str(error)),
        silence_s=600.0,
        name="watch",
    )
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        lane.processes = {1: replace(own, pid=process.pid)}
        detector.note_met()
        process.kill()
        assert lost.get(timeout=HANG_S) == ([1], "died")
    detector.stop()


# Groups of some of the ranks.

NAMES = (4, 7, 9)


@pytest.mark.deadline
def test_errors_name_global_ranks() -> None:
    """In a group of some of the job's ranks as well, whatever went wrong."""
    hows = "missing", "failing", "skipping", "silent", "busy", "without the store", "cancelling"
    each(itertools.product(hows, range(3)), _check_names)


def _check_names(how: str, who: int) -> None:
    store, done = SharedStore(), threading.Event()
    ranks = group(store, 3, NAMES)
    timeouts = Timeouts(
        # A rank that is ahead waits for the others, which may end before their first heartbeat.
        plan={"missing": 0.5, "skipping": 5.0}.get(how, HANG_S),
        write=0.5,
        commit=0.8,
        silence=0.5 if how == "silent" else 5.0,
    )

    def raise_error(_: Operation) -> None:
        raise CheckpointError("no space")

    def fall_silent(operation: Operation) -> None:
        store.silent.add(who)
        be_busy(operation)

    def be_busy(_: Operation) -> None:
        assert done.wait(HANG_S)

    misbehave: dict[str, Callable[[Operation], object]] = {
        "failing": raise_error,
        "silent": fall_silent,
        "busy": be_busy,
        "without the store": lambda _: store.cut(who),
        "cancelling": lambda operation: operation.failed(SaveCancelledError("by the user")),
    }

    def inside(operation: Operation, stage: str) -> None:
        if operation.rank == who and stage == "writing" and how in misbehave:
            misbehave[how](operation)

    def body(one: RankGroup) -> Any:
        step = 200 if how == "skipping" and one.rank == who else 100
        try:
            return rolling(one, step, timeouts=timeouts, inside=inside)
        finally:
            if one.rank != who:
                done.set()

    came = [one for one in ranks if how != "missing" or one.rank != who]
    for one, error in zip(came, values(run(came, body)), strict=True):
        assert isinstance(error, CheckpointError)
        # That process hosts the store of all groups.
        text = str(error).replace("hosts the store: rank 0", "")
        named = {int(rank) for rank in re.findall(r"\branks? (\d+)", text, re.IGNORECASE)}
        assert named <= set(NAMES), error
        assert error.rank in {*NAMES, None}
        if one.rank != who and how != "skipping":
            assert error.rank == NAMES[who], error
        behind = [name for name in NAMES if name != NAMES[who]]
        mismatch = {"100": behind, "200": [NAMES[who]]}
        assert not isinstance(error, RankMismatchError) or error.values == mismatch
        hosts = {0} if how == "without the store" else set()
        assert set(getattr(error, "failures", {})) <= {*NAMES, *hosts}
