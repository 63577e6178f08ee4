"""Ranks that agree, meet and give up together, as threads over a board in memory."""

from __future__ import annotations

import contextlib
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_keys import MemoryKeys

from ckpt_storage.coordination import operation as operation_module
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import KeyValues, LostStoreError
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    PhaseTimeoutError,
    RankFailedError,
    RankMismatchError,
    StorageError,
)
from ckpt_storage.options import Timeouts

LOOK_S = 0.002
END_S = 60.0
"""After this a thread hangs; far longer than any test here takes."""

LONG = Timeouts()
SLACK_S = 5.0
"""What is promised beyond a deadline."""

SILENCE_S = 2.0
"""Longer than a thread of a live rank goes without the processor on a busy machine."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what ranks wait for each other beyond their deadlines."""
    monkeypatch.setattr(operation_module, "_COORDINATOR_GRACE_S", 0.2)
    monkeypatch.setattr(operation_module, "_MEMBER_GRACE_S", 0.6)
    monkeypatch.setattr(operation_module, "_LEAVE_FAILED_S", 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one rank ended: its value or its error, and after how long."""

    value: Any = None
    error: BaseException | None = None
    wall_s: float = 0.0


def group(board: KeyValues, world_size: int) -> list[RankGroup]:
    """Return the Coordinators of all ranks over one board."""
    return [
        RankGroup(board, rank=rank, world_size=world_size, look_s=LOOK_S)
        for rank in range(world_size)
    ]


def run(coordinators: Sequence[RankGroup], body: Callable[[RankGroup], object]) -> list[Ended]:
    """Run `body` as every rank, each in a thread; fail if one does not end."""
    ended: dict[int, Ended] = {}

    def main(coordinator: RankGroup) -> None:
        begin = time.monotonic()
        value, failure = None, None
        try:
            value = body(coordinator)
        except BaseException as error:  # noqa: BLE001  # what a rank raised is what is tested
            failure = error
        wall_s = time.monotonic() - begin
        ended[coordinator.rank] = Ended(value=value, error=failure, wall_s=wall_s)

    threads = [
        threading.Thread(target=main, args=(coordinator,), name=f"rank {coordinator.rank}")
        for coordinator in coordinators
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    end = time.monotonic() + END_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    hung = [thread.name for thread in threads if thread.is_alive()]
    assert not hung, f"{hung} hang; ended: {ended}"
    return [ended[coordinator.rank] for coordinator in coordinators]


def values(ended: Sequence[Ended]) -> list[Any]:
    """Return what the ranks returned; raise what one raised."""
    for one in ended:
        if one.error is not None:
            raise one.error
    return [one.value for one in ended]


def errors(ended: Sequence[Ended]) -> list[CheckpointError]:
    """Return what the ranks raised; each must have raised an error of ours that travels."""
    found = []
    for rank, one in enumerate(ended):
        assert isinstance(one.error, CheckpointError), (rank, one)
        again = pickle.loads(pickle.dumps(one.error))
        assert (type(again), str(again)) == (type(one.error), str(one.error))
        found.append(one.error)
    return found


def operations_on(board: MemoryKeys) -> set[str]:
    """Return the ids of operations of which word is left; fail on any word of none.

    Heartbeats of life do not count: a rank's last may come when all is over.
    """
    left = [key.split("/") for key in board.keys if "/life/" not in key and key != "call"]
    assert {parts[0] for parts in left} <= {"op", "here"}, board.keys
    return {parts[1] for parts in left}


TERMS = {"the checkpoint's URL": "memory://x"}


def whole(operation: Operation) -> list[bytes]:
    """Take every kind of step once; return what the last one gave."""
    own = b"%d" % operation.rank
    operation.meet(TERMS)
    gathered = operation.gather(own)
    assert gathered == ([b"%d" % i for i in range(operation.world_size)] if gathered else [])
    assert operation.scatter([item * 2 for item in gathered]) == own * 2
    assert operation.broadcast(b"word" if operation.is_coordinator else b"") == b"word"
    return operation.all_gather(own)


def together(coordinator: RankGroup, timeouts: Timeouts = LONG) -> list[bytes]:
    """Run an operation of all steps."""
    with coordinator.operation("the test", timeouts=timeouts) as operation:
        return whole(operation)


@pytest.mark.parametrize("world_size", [1, 5])
def test_every_rank_gets_what_all_gave(world_size: int) -> None:
    """Gather, scatter, broadcast and all_gather move each rank's bytes to where they belong."""
    board = MemoryKeys()
    assert (
        values(run(group(board, world_size), together))
        == [[b"%d" % rank for rank in range(world_size)]] * world_size
    )


def test_operations_leave_nothing_but_the_last_ones_words() -> None:
    """After many operations the board holds no more keys than after one."""
    board = MemoryKeys()
    ranks = group(board, 3)
    for _ in range(5):
        values(run(ranks, together))
        assert len(operations_on(board)) == 1


def test_ranks_that_disagree_are_listed_by_value() -> None:
    """Each rank raises the same mismatch, which maps each value to its ranks."""

    def body(coordinator: RankGroup) -> None:
        with coordinator.operation("the test", timeouts=LONG) as operation:
            operation.meet({"overwrite": "False", "the URL": f"s3://b/{coordinator.rank // 2}"})

    for error in errors(run(group(MemoryKeys(), 5), body)):
        assert isinstance(error, RankMismatchError)
        assert error.values == {"s3://b/0": [0, 1], "s3://b/1": [2, 3], "s3://b/2": [4]}
        assert "the URL" in str(error)
        assert "0-1" in str(error)


@pytest.mark.parametrize("missing", [[2, 3], [0]], ids=["two", "the coordinator"])
def test_a_rank_that_does_not_come_is_named_by_all_that_did(missing: list[int]) -> None:
    """Ranks that came raise an error that names the missing ones, within the deadline."""
    timeouts = Timeouts(plan=0.5)

    def body(coordinator: RankGroup) -> None:
        if coordinator.rank not in missing:
            together(coordinator, timeouts)

    ended = run(group(MemoryKeys(), 4), body)
    came = [one for rank, one in enumerate(ended) if rank not in missing]
    for error, one in zip(errors(came), came, strict=True):
        assert isinstance(error, PhaseTimeoutError)
        assert error.phase == "plan"
        assert error.rank == missing[0]
        named = "Rank 2-3 " if missing == [2, 3] else f"Rank {missing[0]} "
        assert named.replace("Rank 2-3", "Ranks 2-3") in str(error)
        assert one.wall_s < 0.5 + SLACK_S


FAILURES = ("early", "met", "gather", "scatter", "broadcast", "last")


def failing(operation: Operation, at: str, error: BaseException) -> None:
    """Do what `whole` does up to the step `at`, and raise there."""
    own = b"%d" % operation.rank
    if at == "early":
        raise error
    operation.meet(TERMS)
    if at == "met":
        raise error
    gathered = operation.gather(own)
    if at == "gather":
        raise error
    operation.scatter([item * 2 for item in gathered])
    if at == "scatter":
        raise error
    operation.broadcast(b"word")
    if at == "broadcast":
        raise error
    operation.gather(own)
    raise error


@pytest.mark.parametrize("at", FAILURES)
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_is_named_by_all(who: int, at: str) -> None:
    """Wherever a rank fails, it raises its own error and all others one that says it."""
    board = MemoryKeys()

    def body(coordinator: RankGroup) -> None:
        with coordinator.operation("the test", timeouts=LONG) as operation:
            operation.phase("write")
            if coordinator.rank == who:
                failing(operation, at, StorageError("the disk is full", kind="no-space"))
            whole(operation)
            # A rank that needs nothing of the failed one any more learns it at a look.
            while True:
                operation.phase("write").check("looking")
                time.sleep(LOOK_S)

    ranks = group(board, 3)
    ended = run(ranks, body)
    for rank, error in enumerate(errors(ended)):
        assert "the disk is full" in str(error)
        if rank == who:
            assert isinstance(error, StorageError)
        else:
            assert isinstance(error, RankFailedError)
            assert (error.rank, error.is_silent) == (who, False)
            assert list(error.failures) == [who]
    assert values(run(ranks, together)) == [[b"0", b"1", b"2"]] * 3


def test_what_is_wrong_with_the_checkpoint_is_raised_as_it_is_by_all() -> None:
    """An error about the checkpoint itself has the same type on every rank."""

    def body(coordinator: RankGroup) -> None:
        with coordinator.operation("the test", timeouts=LONG) as operation:
            operation.meet(TERMS)
            if coordinator.rank == 2:
                raise CheckpointNotFoundError("Nothing is there.")
            operation.all_gather(b"")

    for error in errors(run(group(MemoryKeys(), 3), body)):
        assert isinstance(error, CheckpointNotFoundError)


@pytest.mark.parametrize("who", [0, 1])
def test_what_another_thread_tells_ends_the_operation_of_all(who: int) -> None:
    """As if the rank had raised."""

    def body(coordinator: RankGroup) -> None:
        with coordinator.operation("the test", timeouts=LONG) as operation:
            operation.meet(TERMS)
            if coordinator.rank == who:
                threading.Timer(
                    0.05, operation.failed, [CheckpointError("the worker died")]
                ).start()
            while True:
                operation.all_gather(b"")

    for rank, error in enumerate(errors(run(group(MemoryKeys(), 3), body))):
        assert "the worker died" in str(error)
        assert error.rank == who, rank


@pytest.mark.parametrize("step", ["planning for itself", "deciding for all"])
def test_an_error_of_rank_0_is_every_ranks_only_where_it_decides(step: str) -> None:
    """What fails in its own planning names it elsewhere, like what fails on any rank."""

    def body(coordinator: RankGroup) -> None:
        with coordinator.operation("the test", timeouts=LONG) as operation:
            operation.meet(TERMS)
            operation.phase("plan")
            if step == "deciding for all":
                operation.gather(b"")
            if coordinator.is_coordinator:
                raise StorageError("no place")
            operation.scatter([])

    kind = StorageError if step == "deciding for all" else RankFailedError
    told = errors(run(group(MemoryKeys(), 3), body))
    assert [type(error) for error in told] == [StorageError, kind, kind]
    assert [error.rank for error in told] == [0, 0, 0]


class OddError(CheckpointError):
    """An error that cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__("odd")
        self.lock = threading.Lock()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("kind", [OddError, KeyboardInterrupt])
def test_errors_that_do_not_pickle_reach_all(kind: type[BaseException], who: int) -> None:
    """The failing rank raises its own error, the others one with its text, and none waits."""
    made = kind()
    said = str(made)

    def body(coordinator: RankGroup) -> None:
        with coordinator.operation("the test", timeouts=LONG) as operation:
            if coordinator.rank == who:
                failing(operation, "gather", made)
            whole(operation)

    ended = run(group(MemoryKeys(), 3), body)
    assert ended[who].error is made
    for rank, one in enumerate(ended):
        if rank != who:
            assert isinstance(one.error, CheckpointError), one
            assert type(made).__name__ in str(one.error) or said in str(one.error)


class Deaf(MemoryKeys):
    """A board on which some ranks' signs of life get lost from a moment on."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[int] = set()

    def set(self, key: str, value: bytes, timeout_s: float) -> None:
        """Put a value, unless it is a sign of life of a lost rank."""
        if "/life/" not in key or int(key.rpartition("/")[2]) not in self.lost:
            super().set(key, value, timeout_s)


@pytest.mark.parametrize("who", [0, 3])
def test_a_rank_that_falls_silent_is_named_with_phase_bytes_and_age(who: int) -> None:
    """All live ranks raise an error that says which rank fell silent, where and since when."""
    board = Deaf()
    hold = threading.Event()
    timeouts = Timeouts(silence=SILENCE_S)
    operations: dict[int, Operation] = {}

    def has_heard(rank: int) -> bool:
        sign = operations[rank].progress.get(who) if rank in operations else None
        return sign is not None and sign.done_bytes == 250

    def body(coordinator: RankGroup) -> None:
        rank = coordinator.rank
        with coordinator.operation("the test", timeouts=timeouts) as operation:
            operations[rank] = operation
            operation.meet(TERMS)
            operation.phase("write", total_bytes=1000)
            operation.advanced(1000 if rank != who else 250)
            if rank == who:
                end = time.monotonic() + END_S / 2
                while not all(map(has_heard, [0] if who else [1, 2, 3])):
                    assert time.monotonic() < end, "the bytes were not told"
                    time.sleep(LOOK_S)
                board.lost.add(who)
                assert hold.wait(END_S)
                return
            try:
                operation.all_gather(b"")
            finally:
                if rank == (1 if who == 0 else 0):
                    hold.set()

    ended = run(group(board, 4), body)
    for rank, one in enumerate(ended):
        if rank == who:
            continue
        assert isinstance(one.error, RankFailedError), (rank, one)
        assert one.error.is_silent
        assert one.error.rank == who
        assert list(one.error.failures) == [who]
        for part in ("write phase", "250 of 1000 bytes", " s ago", f"rank {who} "):
            assert part in str(one.error), one.error
        assert one.wall_s < SILENCE_S + SLACK_S


@pytest.mark.parametrize("who", [0, 1])
def test_a_busy_rank_is_given_up_at_its_deadline_not_before(who: int) -> None:
    """A rank that lives but makes no progress is named by a timeout, and not as silent."""
    timeouts = Timeouts(silence=SILENCE_S, write=2 * SILENCE_S)
    done = threading.Event()

    def body(coordinator: RankGroup) -> None:
        with coordinator.operation("the test", timeouts=timeouts) as operation:
            operation.meet(TERMS)
            operation.phase("write", total_bytes=10)
            if coordinator.rank == who:
                assert done.wait(END_S)
                return
            try:
                operation.all_gather(b"")
            finally:
                done.set()

    ended = run(group(MemoryKeys(), 3), body)
    seen = [one for rank, one in enumerate(ended) if rank != who]
    for error, one in zip(errors(seen), seen, strict=True):
        assert "0 of 10 bytes" in str(error)
        assert "write phase" in str(error)
        assert f"ank {who} " in str(error)
        assert 2 * SILENCE_S <= one.wall_s < 2 * SILENCE_S + SLACK_S
    assert any(isinstance(one.error, PhaseTimeoutError) for one in seen)


class Broken(MemoryKeys):
    """A store whose server goes away: every call fails, or none ends in its time."""

    how = "works"

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in {"set", "get", "has_all", "set_first", "delete"}:
            return found

        def call(*args: Any) -> Any:
            if self.how == "hangs":
                time.sleep(args[-1])  # the timeout
            if self.how != "works":
                raise LostStoreError("no answer")
            return found(*args)

        return call


@pytest.mark.parametrize("how", ["fails", "hangs"])
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_lost_board_is_a_failure_that_names_the_coordinator(how: str, when: str) -> None:
    """A board that fails or hangs becomes an error naming rank 0, within the deadline."""
    board = Broken()
    timeouts = Timeouts(plan=2.0, write=2.0, silence=2.0)
    ranks = group(board, 3)
    if when == "before":
        board.how = how

    def body(coordinator: RankGroup) -> None:
        with coordinator.operation("the test", timeouts=timeouts) as operation:
            operation.meet(TERMS)
            operation.phase("write")
            if coordinator.rank == 2:
                board.how = how
            operation.all_gather(b"")

    ended = run(ranks, body)
    for error, one in zip(errors(ended), ended, strict=True):
        assert isinstance(error, RankFailedError)
        assert error.rank == 0
        assert error.is_silent
        assert one.wall_s < 2.0 + SLACK_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One operation: which rank fails where (None: it does not), and when ranks come to it."""

    at: tuple[str | None, ...]
    pauses_s: tuple[float, ...]


def _plans(world_size: int) -> st.SearchStrategy[list[Plan]]:
    place = st.one_of(st.none(), st.none(), st.sampled_from(FAILURES))
    pause = st.sampled_from([0.0, 0.0, 0.01, 0.03])
    plan = st.builds(
        lambda at, pauses: Plan(at=tuple(at), pauses_s=tuple(pauses)),
        st.lists(place, min_size=world_size, max_size=world_size),
        st.lists(pause, min_size=world_size, max_size=world_size),
    )
    return st.lists(plan, min_size=1, max_size=5)


def _follow(coordinator: RankGroup, plans: Sequence[Plan]) -> list[BaseException | None]:
    seen: list[BaseException | None] = []
    for number, plan in enumerate(plans):
        time.sleep(plan.pauses_s[coordinator.rank])
        at = plan.at[coordinator.rank]
        error: BaseException | None = None
        try:
            with coordinator.operation(f"operation {number}", timeouts=LONG) as operation:
                if at is not None:
                    failing(operation, at, StorageError(f"failed in {number}", rank=operation.rank))
                whole(operation)
        except CheckpointError as caught:
            error = caught
        seen.append(error)
    return seen


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans=_plans(3))
def test_ranks_stay_together_whatever_fails_before(plans: list[Plan]) -> None:
    """After any sequence of failures no rank hangs, and none meets another operation."""
    board = MemoryKeys()
    ranks = group(board, 3)
    seen = values(run(ranks, lambda coordinator: _follow(coordinator, plans)))
    for number, plan in enumerate(plans):
        for rank, at in enumerate(plan.at):
            error = seen[rank][number]
            if not any(plan.at):
                assert error is None, (number, rank, error)
            elif at is not None:
                assert error is not None, (number, rank)
            if error is not None:
                assert f"failed in {number}" in str(error), (number, rank, error)
                assert not isinstance(error, RankMismatchError)
    values(run(ranks, together))
    assert len(operations_on(board)) == 1, board.keys


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_after_the_others_gave_up_loses_that_operation_only(late: int) -> None:
    """A rank whose word comes too late for one operation is in step again by the third."""
    gave_up = threading.Barrier(3)

    def body(coordinator: RankGroup) -> list[str]:
        ended = []
        if coordinator.rank == late:
            gave_up.wait(END_S)
        for step in range(4):
            plan_s = 0.3 if step == 0 and coordinator.rank != late else 2.0
            try:
                with coordinator.operation(
                    f"step {step}", timeouts=Timeouts(plan=plan_s)
                ) as operation:
                    operation.meet({"the URL": f"step-{step}"})
                ended.append("met")
            except CheckpointError as error:
                ended.append(type(error).__name__)
            if step == 0 and coordinator.rank != late:
                gave_up.wait(END_S)
        return ended

    board = MemoryKeys()
    ranks = group(board, 3)
    for ended in values(run(ranks, body)):
        # Where rank 0 is late, the others wait for it in the next operation.
        assert ended[2:] == ["met", "met"]
        assert late or ended[1] == "met"


def test_the_coordinator_stays_until_all_have_read_the_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that is slow to read still finds the outcome, and the coordinator is still there."""
    left = threading.Event()
    monkeypatch.setattr(operation_module, "_LEAVE_S", END_S)

    def body(coordinator: RankGroup) -> bytes:
        with coordinator.operation("the test", timeouts=LONG) as operation:
            operation.meet(TERMS)
            if coordinator.rank == 1:
                time.sleep(0.3)
                assert not left.is_set()
            word = operation.broadcast(b"done")
        if coordinator.is_coordinator:
            left.set()
        return word

    assert values(run(group(MemoryKeys(), 2), body)) == [b"done"] * 2


@pytest.mark.parametrize("is_late", [False, True])
def test_what_failed_is_void_only_once_all_ranks_have_left(*, is_late: bool) -> None:
    """While a rank may still write, what a save wrote is not deleted."""
    may_leave = threading.Event()
    if not is_late:
        may_leave.set()

    def body(coordinator: RankGroup) -> bool:
        told = contextlib.suppress(CheckpointError)
        with told, coordinator.operation("the test", timeouts=LONG) as operation:
            operation.meet(TERMS)
            if coordinator.is_coordinator:
                operation.is_void = True
                raise CheckpointError("rank 0 failed")
            may_leave.wait(END_S)
            operation.broadcast(b"")
        may_leave.set()
        return operation.is_void

    ended = values(run(group(MemoryKeys(), 2), body))
    assert ended == [not is_late, False]


def test_the_coordinator_leaves_soon_after_its_deadline_when_a_rank_died_at_the_end() -> None:
    """A rank that dies before it read the outcome keeps the coordinator no longer than promised."""
    timeouts = Timeouts(plan=1.0, commit=1.0, silence=0.5)
    gone = threading.Event()
    board = Deaf()

    def body(coordinator: RankGroup) -> bytes:
        with coordinator.operation("the test", timeouts=timeouts) as operation:
            operation.meet(TERMS)
            operation.phase("commit")
            if coordinator.rank == 1:
                board.lost.add(1)
                assert gone.wait(END_S)
                return b"dead"
            word = operation.broadcast(b"done")
        gone.set()
        return word

    ended = run(group(board, 2), body)
    assert ended[0].value == b"done"
    assert ended[0].wall_s < 1.0 + SLACK_S


def test_operations_of_one_process_take_turns() -> None:
    """A second operation of one process waits for the first, and gives up at its deadline."""
    alone = RankGroup.alone()
    with (
        alone.operation("the first", timeouts=LONG),
        pytest.raises(PhaseTimeoutError, match="the second"),
        alone.operation("the second", timeouts=Timeouts(plan=0.05)),
    ):
        pytest.fail("the second began")


# Torch's stores as boards.


def _stores(folder: Any) -> Iterator[tuple[str, Callable[[], dist.Store]]]:
    timeout = timedelta(seconds=20)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)
    yield ("tcp", lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout))
    yield "file", lambda: dist.FileStore(str(folder / "store"), -1)
    kept = dist.HashStore()
    yield "hash", lambda: kept


def test_torchs_stores_carry_operations_and_large_payloads(tmp_path: Any) -> None:
    """Over each kind of store 20 MB travel whole, and all operations do as in memory."""
    large = random.Random(3).randbytes(20_000_000)

    def body(coordinator: RankGroup) -> bool:
        with coordinator.operation("the test", timeouts=LONG) as operation:
            operation.meet(TERMS)
            gathered = operation.gather(large if coordinator.rank == 1 else b"small")
            back = operation.scatter([b"small", gathered[1]] if gathered else [])
            return back == (large if coordinator.rank == 1 else b"small")

    for name, make in _stores(tmp_path):
        ranks = [
            RankGroup(KeyValues(make, "test"), rank=rank, world_size=2, look_s=LOOK_S)
            for rank in range(2)
        ]
        assert values(run(ranks, body)) == [True, True], name
        assert values(run(ranks, together)) == [[b"0", b"1"]] * 2, name
