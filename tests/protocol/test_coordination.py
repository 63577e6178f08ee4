"""Ranks meet and fail together, as threads over a store in memory."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import HANG_S, SLACK_S
from rank_threads import (
    LONG,
    POLL_S,
    TERMS,
    Ended,
    Fault,
    SharedStore,
    each,
    errors,
    group,
    quick,
    run,
    together,
    values,
    wait_until,
    whole,
)

from ckpt_storage.coordination import operation_rounds as rounds_module
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.rounds import ByRank, Failed
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    PhaseTimeoutError,
    RankFailedError,
    RankMismatchError,
    StorageError,
)
from ckpt_storage.options import Timeouts

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")

SILENCE_S = 2.0
"""Longer than a thread of a live rank goes without the processor on a busy machine."""


def test_ranks_that_disagree_are_listed_by_value() -> None:
    """Each rank raises the same mismatch, which maps each value to its ranks."""

    def body(ranks: RankGroup) -> None:
        with ranks.operation("the test", timeouts=LONG) as operation:
            operation.meet({"overwrite": "False", "the URL": f"s3://b/{ranks.rank // 2}"})

    for error in errors(run(group(SharedStore(), 5), body)):
        assert isinstance(error, RankMismatchError)
        assert error.values == {"s3://b/0": [0, 1], "s3://b/1": [2, 3], "s3://b/2": [4]}
        assert "the URL" in str(error)
        assert "0-1" in str(error)


@pytest.mark.deadline
@pytest.mark.parametrize(("missing", "named"), [([2, 3], "Ranks 2-3 "), ([0], "Rank 0 ")])
def test_a_rank_that_does_not_arrive_is_named_by_all_that_do(
    missing: list[int], named: str
) -> None:
    """Ranks that have arrived raise an error that names the missing ranks, within the deadline."""
    came = [one for one in group(SharedStore(), 4) if one.rank not in missing]
    ended = run(came, lambda ranks: together(ranks, Timeouts(plan=0.5)))
    for error, one in zip(errors(ended), ended, strict=True):
        assert isinstance(error, PhaseTimeoutError)
        assert (error.phase, error.rank) == ("plan", missing[0])
        assert named in str(error)
        assert one.wall_s < 0.5 + SLACK_S


@pytest.mark.deadline
def test_a_rank_that_waits_itself_is_not_named() -> None:
    """A member whose deadline is before that of rank 0 names the rank that both wait for."""
    ranks = group(SharedStore(), 4)

    def body(one: RankGroup) -> list[bytes]:
        return together(one, Timeouts(plan=HANG_S if one.is_coordinator else 0.5))

    for error in errors(run([one for one in ranks if one.rank != 2], body)):
        assert "Rank 2 of the group's 4 has not arrived" in str(error)
        assert error.rank == 2


FAILURES = ("early", "met", "gather", "broadcast", "exchange", "last")


def failing(at: str, who: int, error: BaseException, phase: Any = "write") -> list[Ended]:
    """Let one of three ranks fail at a step of an operation; return how all ended."""

    def body(ranks: RankGroup) -> None:
        with ranks.operation("the test", timeouts=LONG) as operation:
            whole(operation, at, error if ranks.rank == who else None, phase)
            # A rank that waits for nothing raises it as well.
            while True:
                operation.phase(phase).check("looking")
                time.sleep(POLL_S)

    return run(group(SharedStore(), 3), body)


@pytest.mark.parametrize("at", FAILURES)
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_is_named_by_all(who: int, at: str) -> None:
    """Wherever a rank fails, it raises its own error and all others one that says it."""
    own = StorageError("the disk is full", kind="no-space")
    for rank, error in enumerate(errors(failing(at, who, own))):
        assert "the disk is full" in str(error)
        if rank == who:
            assert error is own
        else:
            assert isinstance(error, RankFailedError)
            assert (error.rank, error.is_silent) == (who, False)
            assert list(error.failures) == [who]


@pytest.mark.parametrize(
    ("at", "who", "error", "kind"),
    [
        ("met", 2, CheckpointNotFoundError("None."), CheckpointNotFoundError),
        ("met", 0, StorageError("no place"), RankFailedError),
        ("gather", 0, StorageError("no place"), StorageError),
    ],
)
def test_what_is_wrong_with_the_checkpoint_is_raised_as_it_is_by_all(
    at: str, who: int, error: CheckpointError, kind: type[CheckpointError]
) -> None:
    """So is an error of rank 0 where it decides for all, but not one in its own planning."""
    raised = errors(failing(at, who, error, "plan"))
    own = raised.pop(who)
    assert (type(own), own.rank) == (type(error), who)
    assert [(type(peer), peer.rank) for peer in raised] == [(kind, who)] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_of_another_thread_ends_the_operation_of_all(who: int) -> None:
    """As if the rank had raised."""

    def body(ranks: RankGroup) -> None:
        with ranks.operation("the test", timeouts=LONG) as operation:
            operation.meet(TERMS)
            if ranks.rank == who:
                error = CheckpointError("the worker died")
                threading.Timer(0.05, operation.failed, [error]).start()
            while True:
                operation.all_gather(b"")

    for error in errors(run(group(SharedStore(), 3), body)):
        assert "the worker died" in str(error)
        assert error.rank == who


class OddError(CheckpointError):
    """An error that cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__("odd")
        self.lock = threading.Lock()


@pytest.mark.parametrize("at", ["early", "gather"])
@pytest.mark.parametrize(("who", "kind"), [(0, OddError), (1, KeyboardInterrupt), (0, SystemExit)])
def test_errors_that_do_not_pickle_reach_all(kind: type[BaseException], who: int, at: str) -> None:
    """The failing rank raises its own error, the others one with its text, and none waits."""
    made = kind()
    text = str(made) or kind.__name__
    ended = failing(at, who, made)
    assert ended.pop(who).error is made
    assert all(text in str(error) for error in errors(ended))


@pytest.mark.deadline
def test_a_rank_that_falls_silent_is_named_with_phase_bytes_and_age() -> None:
    """All live ranks raise an error that says which rank fell silent, where and since when."""
    each((0, 3), _check_silent_rank)


def _check_silent_rank(who: int) -> None:
    store, hold = SharedStore(), threading.Event()
    operations: dict[int, Operation] = {}

    def has_received(rank: int) -> bool:
        last = operations[rank].progress().get(who) if rank in operations else None
        return last is not None and last.done_bytes == 250

    def body(ranks: RankGroup) -> None:
        rank = ranks.rank
        with ranks.operation("the test", timeouts=Timeouts(silence=SILENCE_S)) as operation:
            operations[rank] = operation
            operation.meet(TERMS)
            operation.phase("write", total_bytes=1000)
            operation.advanced(1000 if rank != who else 250)
            if rank == who:
                wait_until(
                    lambda: all(map(has_received, [0] if who else [1, 2, 3])),
                    "the heartbeat did not arrive",
                )
                store.silent.add(who)
                assert hold.wait(HANG_S)
                return
            try:
                operation.all_gather(b"")
            finally:
                if rank == (1 if who == 0 else 0):
                    hold.set()

    ended = run(group(store, 4), body)
    ended.pop(who)
    for error, one in zip(errors(ended), ended, strict=True):
        assert isinstance(error, RankFailedError)
        assert (error.is_silent, error.rank, list(error.failures)) == (True, who, [who])
        for part in ("write phase", "250 of 1000 bytes", " s ago", f"rank {who} "):
            assert part in str(error), error
        assert one.wall_s < SILENCE_S + SLACK_S


@pytest.mark.deadline
def test_a_busy_rank_fails_the_operation_at_its_deadline_not_before() -> None:
    """A rank that lives but makes no progress is named by a timeout, and not as silent."""
    each((0, 1), _check_busy_rank)


def _check_busy_rank(who: int) -> None:
    timeouts = Timeouts(silence=SILENCE_S, write=1.3 * SILENCE_S)
    done, all_have_met = threading.Event(), threading.Barrier(3)

    def body(ranks: RankGroup) -> None:
        with ranks.operation("the test", timeouts=timeouts) as operation:
            operation.meet(TERMS)
            # Deadlines in the order of the ranks' patience, however slow a thread is.
            all_have_met.wait(HANG_S)
            operation.phase("write", total_bytes=10)
            if ranks.rank == who:
                assert done.wait(HANG_S)
                return
            try:
                operation.all_gather(b"")
            finally:
                done.set()

    ended = run(group(SharedStore(), 3), body)
    ended.pop(who)
    for error, one in zip(errors(ended), ended, strict=True):
        for part in ("0 of 10 bytes", "write phase", f"ank {who} "):
            assert part in str(error)
        assert 1.3 * SILENCE_S <= one.wall_s < 1.3 * SILENCE_S + SLACK_S
    assert any(isinstance(one.error, PhaseTimeoutError) for one in ended)


@pytest.mark.deadline
def test_a_rank_that_loses_the_store_is_named_within_the_deadline() -> None:
    """By itself, and by the others unless they lost the store as well."""
    each(itertools.product(("fails", "hangs"), ("before", "in the middle")), _check_lost_store)


def _lose_store(store: SharedStore, lose: Callable[[], object], when: str) -> list[Ended]:
    """Run an operation of three ranks that lose the store before it or in its write."""

    def body(ranks: RankGroup) -> None:
        timeouts = Timeouts(plan=1.0, write=1.0, silence=2.0)
        with ranks.operation("the test", timeouts=timeouts) as operation:
            operation.meet(TERMS)
            operation.phase("write")
            if ranks.rank == 2:
                lose()
            operation.all_gather(b"")

    ranks = group(store, 3)
    if when == "before":
        lose()
    return run(ranks, body)


def _check_lost_store(how: str, when: str) -> None:
    store = SharedStore()
    hanging = Fault(effect="hangs", rank=2, key="", count=10**6)
    loses: dict[str, Callable[[], object]] = {
        "fails": lambda: store.cut(2),
        "hangs": lambda: store.add_fault(hanging),
    }
    try:
        ended = _lose_store(store, loses[how], when)
    finally:
        hanging.released.set()
    for rank, (error, one) in enumerate(zip(errors(ended), ended, strict=True)):
        kinds = (RankFailedError,) if rank == 2 else (PhaseTimeoutError, RankFailedError)
        assert isinstance(error, kinds)
        assert error.rank == 2
        assert "ank 2" in str(error)
        assert one.wall_s < 1.0 + SLACK_S


@pytest.mark.deadline
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_store_that_all_lose_is_an_error_of_each_rank(when: str) -> None:
    """Each names itself, as nobody knows more, within the deadline."""
    store = SharedStore()
    ended = _lose_store(store, lambda: store.cut(0, 1, 2), when)
    for rank, (error, one) in enumerate(zip(errors(ended), ended, strict=True)):
        assert isinstance(error, RankFailedError)
        assert (error.rank, error.is_silent) == (rank, True)
        assert one.wall_s < 1.0 + SLACK_S


Plan = list[tuple[str | None, float]]
"""Where each rank fails in one operation (None: nowhere), and how long it comes after the last."""

PLANS = st.lists(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.none(), st.sampled_from(FAILURES)),
            st.sampled_from([0.0, 0.0, 0.01, 0.03]),
        ),
        min_size=3,
        max_size=3,
    ),
    min_size=1,
    max_size=5,
)


def _follow(ranks: RankGroup, plans: Sequence[Plan]) -> list[BaseException | None]:
    seen: list[BaseException | None] = []
    for number, plan in enumerate(plans):
        at, pause_s = plan[ranks.rank]
        time.sleep(pause_s)
        seen.append(None)
        try:
            with ranks.operation(f"operation {number}", timeouts=LONG) as operation:
                error = StorageError(f"failed in {number}", rank=ranks.rank)
                whole(operation, at or "", error if at else None)
        except CheckpointError as caught:
            seen[-1] = caught
    return seen


@settings(max_examples=40, deadline=None, derandomize=True)
@given(plans=PLANS)
def test_ranks_stay_together_whatever_fails_before(plans: list[Plan]) -> None:
    """After any failures no rank hangs, none meets another operation, and no old key stays."""
    store = SharedStore()
    ranks = group(store, 3)
    seen = values(run(ranks, lambda one: _follow(one, plans)))
    for number, plan in enumerate(plans):
        for rank, (at, _) in enumerate(plan):
            error = seen[rank][number]
            assert error is not None or at is None, (number, rank)
            if error is not None:
                assert f"failed in {number}" in str(error), (number, rank, error)
                assert not isinstance(error, RankMismatchError)
    values(run(ranks, together))
    assert len(store.numbers()) == 1, store.key_names()


def test_the_coordinator_stays_until_all_have_read_the_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that is slow to read still finds the outcome, and the coordinator is still there."""
    left = threading.Event()
    monkeypatch.setattr(rounds_module, "_FINISH_S", HANG_S)

    def body(ranks: RankGroup) -> bytes:
        with ranks.operation("the test", timeouts=LONG) as operation:
            operation.meet(TERMS)
            if ranks.rank == 1:
                time.sleep(0.3)
                assert not left.is_set()
            answer = operation.broadcast(b"done")
        if ranks.is_coordinator:
            left.set()
        return answer

    assert values(run(group(SharedStore(), 2), body)) == [b"done"] * 2


@pytest.mark.parametrize("is_late", [False, True])
def test_what_failed_is_void_only_once_all_ranks_have_left(*, is_late: bool) -> None:
    """While a rank may still write, what a save wrote is not deleted."""
    may_leave = threading.Event()
    if not is_late:
        may_leave.set()

    def body(ranks: RankGroup) -> bool:
        reported = contextlib.suppress(CheckpointError)
        with reported, ranks.operation("the test", timeouts=LONG) as operation:
            operation.meet(TERMS)
            if ranks.is_coordinator:
                operation.must_discard = True
                raise CheckpointError("rank 0 failed")
            may_leave.wait(HANG_S)
            operation.broadcast(b"")
        may_leave.set()
        return operation.must_discard

    assert values(run(group(SharedStore(), 2), body)) == [not is_late, False]


@pytest.mark.deadline
def test_the_coordinator_leaves_soon_after_its_deadline_when_a_rank_died_at_the_end() -> None:
    """A rank that dies before it read the outcome keeps the coordinator no longer than promised."""
    gone, store = threading.Event(), SharedStore()

    def body(ranks: RankGroup) -> bytes:
        timeouts = Timeouts(plan=1.0, commit=1.0, silence=0.5)
        with ranks.operation("the test", timeouts=timeouts) as operation:
            operation.meet(TERMS)
            operation.phase("commit")
            if ranks.rank == 1:
                store.silent.add(1)
                assert gone.wait(HANG_S)
                return b"dead"
            answer = operation.broadcast(b"done")
        gone.set()
        return answer

    ended = run(group(store, 2), body)
    assert ended[0].value == b"done"
    assert ended[0].wall_s < 1.0 + SLACK_S


def test_a_coordinator_that_ends_overwrites_no_failure() -> None:
    """A rank that looks late learns why another one failed, also if the coordinator is through."""
    store, failed = SharedStore(), threading.Event()

    def body(ranks: RankGroup) -> None:
        try:
            with ranks.operation("the test", timeouts=LONG) as operation:
                operation.meet(TERMS)
                if ranks.rank == 1:
                    raise StorageError("no space")
                assert failed.wait(HANG_S)
        finally:
            failed.set()

    first, second = run(group(store, 2), body)
    assert (first.error, type(second.error)) == (None, StorageError)
    (name,) = [name for name in store.key_names() if name.endswith("/1/2/release")]
    assert isinstance(pickle.loads(store.store.get(f"test/{name}")[1:]), Failed)


def test_operations_of_one_process_take_turns() -> None:
    """A second operation of one process waits for the first, and gives up at its deadline."""
    alone = RankGroup.alone()
    with (
        alone.operation("the first", timeouts=LONG),
        pytest.raises(PhaseTimeoutError, match="the second"),
        alone.operation("the second", timeouts=Timeouts(plan=0.05)),
    ):
        pytest.fail("the second began")


def test_values_of_several_slices_are_removed_whole() -> None:
    """Payloads, answers by rank, and an answer for all ranks, once all have met again."""
    store, large = SharedStore(), bytes(9 << 20)
    ranks = group(store, 2)

    def body(ranks: RankGroup) -> list[int]:
        with ranks.operation("the test", timeouts=LONG) as operation:
            operation.meet(TERMS)
            answer = operation.exchange(large, ByRank)
            return [len(answer), len(operation.broadcast(large))]

    assert values(run(ranks, body)) == [[len(large)] * 2] * 2
    assert [name for name in store.key_names() if "#" in name]
    values(run(ranks, together))
    assert store.numbers() == {2}, store.key_names()


def _stores(folder: Any) -> Iterator[Callable[[], dist.Store]]:
    timeout = timedelta(seconds=20)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)
    yield lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)
    yield lambda: dist.FileStore(str(folder / "store"), -1)
    kept = dist.HashStore()
    yield lambda: kept


def test_torchs_stores_carry_operations_and_large_payloads(tmp_path: Any) -> None:
    """Over each kind of store 20 MB travel whole, and all operations do as in memory."""
    large = random.Random(3).randbytes(20_000_000)

    def body(ranks: RankGroup) -> bool:
        with ranks.operation("the test", timeouts=LONG) as operation:
            operation.meet(TERMS)
            own = large if ranks.rank == 1 else b"small"
            back = operation.exchange(own, lambda gathered: ByRank([b"small", gathered[1]]))
            return bool(back == (large if ranks.rank == 1 else b"small"))

    for make in _stores(tmp_path):
        ranks = group(make, 2)
        assert values(run(ranks, body)) == [True, True], make
        assert values(run(ranks, together)) == [[b"0", b"1"]] * 2, make
