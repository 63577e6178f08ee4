"""When ranks meet to decide on a save: at first, at a rank's request, and on notice of a signal."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import HANG_S
from manager_cases import manager_of
from rank_threads import SharedStore, group

from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.errors import InvalidInputError, RankMismatchError
from ckpt_storage.manager.early_rendezvous import EarlyRendezvous
from ckpt_storage.manager.notices import PreemptionNotices
from ckpt_storage.manager.schedule import Schedule
from ckpt_storage.options import Timeouts
from ckpt_storage.testing.upload_facts import together


def test_ranks_compare_their_arguments_at_the_first_step() -> None:
    """Also where each knows by itself when to save; and only then do they meet."""
    store = SharedStore()

    def train(rank: int) -> list[int]:
        ranks = group(store, 2)[rank]
        schedule = Schedule(
            ranks, PreemptionNotices(), every_steps=5, every_s=None, timeouts=Timeouts()
        )
        due = [schedule.is_due(1)]
        met_count = ranks.lane.number
        due += [schedule.is_due(step) for step in range(2, 21)]
        assert ranks.lane.number == met_count, "no second meeting"
        return [step for step, is_due in enumerate(due, 1) if is_due]

    assert together([partial(train, rank) for rank in range(2)]) == [[5, 10, 15, 20]] * 2


def in_step(
    world_size: int,
    noticed: int | None,
    *,
    long_from: int,
    notice_at: int,
    every_s: float | None,
    more: int = 40,
) -> list[list[int]]:
    """Run ranks as threads that keep pace; return the steps at which each was told to save.

    Steps take a millisecond each, from `long_from` on 20 s, by clocks of their own.
    """
    store = SharedStore()
    turns = [threading.Semaphore(0) for _ in range(world_size)]
    last = notice_at + more
    found: list[list[int]] = [[] for _ in range(world_size)]

    def train(rank: int) -> None:
        now_s = [0.0]
        notices = mock.Mock(are_expected=True)
        notices.pending.return_value = None
        schedule = Schedule(
            group(store, world_size)[rank],
            notices,
            every_steps=None,
            every_s=every_s,
            timeouts=Timeouts(),
            clock=lambda: now_s[0],
        )
        for step in range(1, last):
            now_s[0] += 20.0 if step >= long_from else 0.001
            if rank == noticed and step == notice_at:
                notices.pending.return_value = "SIGTERM"
            if schedule.is_due(step):
                found[rank].append(step)
                schedule.restart_timer()
            # As in an all-reduce: nobody ends the next step before all have begun it.
            for other in turns:
                other.release()
            for _ in range(world_size):
                assert turns[rank].acquire(timeout=HANG_S)

    outcomes = together([partial(train, rank) for rank in range(world_size)])
    assert outcomes == [None] * world_size
    return found


@pytest.mark.parametrize("noticed", [0, 2])
@pytest.mark.parametrize("after", [0, 3, 9])
def test_a_notice_is_answered_within_three_steps_that_became_long(noticed: int, after: int) -> None:
    """No rank waits, and all save at one step."""
    at = 300 + after
    found = in_step(3, noticed, long_from=300, notice_at=at, every_s=None)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 1
    assert at <= found[0][0] <= at + 3


def test_a_notice_and_seconds_are_answered_by_all_ranks_at_one_step() -> None:
    """However far apart ranks look at short steps; `every_s` are those of the coordinator."""
    found = in_step(3, 1, long_from=10_000, notice_at=300, every_s=None, more=1000)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 1
    for world_size, most in ((1, 5), (3, 8)):
        first, *others = in_step(world_size, None, long_from=1, notice_at=0, every_s=100.0)
        assert others == [first] * (world_size - 1)
        assert len(first) >= 4
        assert all(5 <= b - a <= most for a, b in itertools.pairwise([0, *first]))


def test_ranks_that_failed_to_meet_meet_at_their_next_step() -> None:
    """A rank that was at another step ends one meeting, not all later ones."""
    store = SharedStore()
    at_next_step = threading.Barrier(2)

    def train(rank: int) -> tuple[str | None, list[str]]:
        ranks = group(store, 2)[rank]
        notices = mock.Mock(are_expected=True)
        notices.pending.return_value = None
        clock_s = itertools.count()
        schedule = Schedule(
            ranks,
            notices,
            every_steps=None,
            every_s=None,
            timeouts=Timeouts(plan=HANG_S),
            clock=lambda: float(next(clock_s)),
        )
        failures: list[str] = []
        for step in range(1, 20):
            at_next_step.wait(HANG_S)
            if rank == 1 and step == 5:
                notices.pending.return_value = "SIGTERM"
            is_apart = rank == 1 and step > 5 and not failures
            try:
                schedule.is_due(step + (1000 if is_apart else 0))
            except RankMismatchError as error:
                failures.append(str(error))
        return schedule.preempted, failures

    for outcome in together([partial(train, rank) for rank in range(2)]):
        assert not isinstance(outcome, BaseException)
        preempted, failures = outcome
        assert (preempted, len(failures)) == ("SIGTERM on rank 1", 1)


def test_the_keys_of_a_rendezvous_are_deleted_after_it() -> None:
    """Its own keys go with the meeting at which all ranks came together."""
    store = SharedStore()
    groups = group(store, 2)
    rendezvous = [EarlyRendezvous(ranks, timeout_s=1) for ranks in groups]
    for turn in range(1, 4):
        agreed = [one.poll(turn, wants_meeting=turn == 1) for one in rendezvous]
    assert agreed == [3, 3]
    assert store.key_names()
    for one in rendezvous:
        one.reset("the meeting")
    assert store.key_names() == []


@given(world_size=st.integers(1, 4), data=st.data())
def test_all_ranks_meet_at_one_turn_whatever_their_pace(
    world_size: int, data: st.DataObject
) -> None:
    """In any order of turns, requests and polls, no rank meets alone or at a turn that is past.

    In the end all ranks poll at each turn and keep pace: then they do meet.
    """
    store = SharedStore()
    groups = group(store, world_size)
    rendezvous = [EarlyRendezvous(ranks, timeout_s=1) for ranks in groups]
    for epoch in range(2):
        turns = [0] * world_size
        met: dict[int, int] = {}
        drawn = 0
        while len(met) < world_size:
            drawn += 1
            waiting = [r for r in range(world_size) if r not in met]
            if drawn < 40:
                rank = data.draw(st.sampled_from(waiting))
            else:
                rank = min(waiting, key=lambda r: turns[r])
            own = rendezvous[rank]
            if epoch and not turns[rank]:
                own.reset("second")  # others may be on their way already
            turns[rank] += 1
            polls = own.is_committed or drawn >= 40 or data.draw(st.booleans())
            wants = polls and (drawn >= 40 or data.draw(st.integers(0, 3)) == 0)
            agreed = own.poll(turns[rank], wants_meeting=wants) if polls else None
            assert agreed is None or agreed >= turns[rank]
            if agreed == turns[rank]:
                met[rank] = turns[rank]
            assert drawn < 2000
        assert len(set(met.values())) == 1


def test_a_request_of_ranks_that_were_killed_is_no_request() -> None:
    """Restarted ranks share their store, and would meet at a turn that some of them are past."""
    store = SharedStore()

    def rendezvous_of(meeting_id: str) -> list[EarlyRendezvous]:
        groups = group(store, 2)
        rendezvous = [EarlyRendezvous(ranks, timeout_s=1) for ranks in groups]
        for one in rendezvous:
            one.reset(meeting_id)
        return rendezvous

    killed = rendezvous_of("of the first attempt")
    for turn in range(1, 4):
        agreed = [one.poll(turn, wants_meeting=turn == 1) for one in killed]
    assert agreed == [3, 3]
    assert store.key_names()
    late, early = rendezvous_of("of the second")
    assert early.poll(1, wants_meeting=False) is None
    assert late.poll(5, wants_meeting=False) is None
    assert not early.is_committed
    assert not late.is_committed


def test_a_lost_store_matters_only_to_a_rank_that_is_committed() -> None:
    """Before that the next meeting raises; afterwards no rank may go on without the agreement."""
    store = SharedStore()
    ranks = group(store, 2)[0]
    rendezvous = EarlyRendezvous(ranks, timeout_s=1)
    lost = mock.patch.object(ranks.keys, "get", side_effect=LostStoreError("gone"))
    with lost:
        assert rendezvous.poll(1, wants_meeting=False) is None
    assert rendezvous.poll(2, wants_meeting=True) is None
    assert rendezvous.is_committed
    with lost, pytest.raises(LostStoreError):
        rendezvous.poll(3, wants_meeting=False)


def test_a_lost_store_ends_no_meeting_that_has_ended() -> None:
    """Keys that cannot be deleted stay; the decision that all ranks took counts."""
    store = SharedStore()
    ranks = group(store, 1)[0]
    rendezvous = EarlyRendezvous(ranks, timeout_s=1)
    assert [rendezvous.poll(turn, wants_meeting=True) for turn in (1, 2, 3)] == [None, None, 3]
    with mock.patch.object(ranks.keys, "delete", side_effect=LostStoreError("gone")):
        rendezvous.reset("the meeting")
    rendezvous.reset("the next meeting")
    assert store.key_names() == []


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """The signals that a handler of the user's gets, which is there before and afterwards."""
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: found.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    yield found
    assert signal.signal(signal.SIGUSR1, before) is mine
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_a_forked_child_is_ended_by_the_signal() -> None:
    """A child inherits the handler, and the signal does to it what it did before there was one."""
    found = run("""
import os, signal
from ckpt_storage.manager.notices import PreemptionNotices
notices = PreemptionNotices([signal.SIGTERM])
read, write = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os.write(write, b"x")
    while True:
        signal.pause()
os.read(read, 1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status
assert notices.pending() is None
os.kill(os.getpid(), signal.SIGTERM)
assert notices.pending() == "SIGTERM"
print("both lived as long as they should")
""")
    assert found.stdout.startswith("both"), found.stderr


def test_handlers_of_others_are_called_past_those_that_closed(taken: list[int]) -> None:
    """What was there before the first one comes back after both, and is called meanwhile."""
    first, second = PreemptionNotices([signal.SIGUSR1]), PreemptionNotices([signal.SIGUSR1])
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert taken == [signal.SIGUSR1]
    second.close()


def test_a_signal_asks_for_one_save(tmp_path: Path, taken: list[int]) -> None:
    """It is due once, `preempted` says why, the handler before ours is called and comes back.

    Also where the manager is closed in another thread: the handler gives way to the next signal.
    """
    manager = manager_of(tmp_path, signals=[signal.SIGUSR1, signal.SIGUSR2])
    assert not manager.should_save(1)
    assert manager.preempted is None
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert len([step for step in range(2, 200) if manager.should_save(step)]) == 1
    assert manager.preempted == "SIGUSR1 on rank 0"
    manager.close()
    manager = manager_of(tmp_path, signals=[signal.SIGUSR1])
    with ThreadPoolExecutor(1) as thread:
        thread.submit(manager.close).result(HANG_S)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert taken == [signal.SIGUSR1] * 2
        refused = thread.submit(manager_of, tmp_path, signals=[signal.SIGUSR1])
        with pytest.raises(InvalidInputError, match="main thread"):
            refused.result(HANG_S)
    with pytest.raises(InvalidInputError, match="cannot be handled"):
        manager_of(tmp_path, signals=[signal.SIGUSR1, signal.SIGKILL])


@pytest.fixture
def python_handler() -> Iterator[None]:
    """Let SIGINT be handled as Python does, whatever the test runner does with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupted() -> bool:
    """Send SIGINT to this process; return whether that raised KeyboardInterrupt."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.usefixtures("python_handler")
def test_an_interrupt_is_a_notice(tmp_path: Path) -> None:
    """With `signals=[SIGINT]` Ctrl-C asks for a save and raises no KeyboardInterrupt."""
    with manager_of(tmp_path, signals=[signal.SIGINT]) as manager:
        assert not interrupted()
        assert manager.should_save(1)
        assert manager.preempted == "SIGINT on rank 0"
    assert interrupted(), "a closed manager leaves SIGINT to Python"


@pytest.mark.usefixtures("python_handler")
def test_a_second_interrupt_ends_the_process() -> None:
    """A SIGINT soon after the first is the same notice, sent twice; a later one is Python's."""
    now_s = 0.0
    notices = PreemptionNotices([signal.SIGINT], clock=lambda: now_s)
    assert not interrupted()
    now_s = 0.5
    assert not interrupted(), "launchers signal a process and its group"
    now_s = 2.0
    assert interrupted()
    notices.close()


@pytest.mark.usefixtures("python_handler")
def test_an_interrupt_is_a_notice_to_every_manager_that_is_open() -> None:
    """Also when the one that was made first is closed."""
    first, second = PreemptionNotices([signal.SIGINT]), PreemptionNotices([signal.SIGINT])
    assert not interrupted()
    assert first.pending() == second.pending() == "SIGINT"
    second.close()
    second = PreemptionNotices([signal.SIGINT])
    first.close()
    assert not interrupted()
    assert second.pending() == "SIGINT"
    second.close()


@pytest.mark.usefixtures("python_handler")
def test_a_signal_that_was_ignored_is_a_notice() -> None:
    """A shell starts background jobs with SIGINT ignored; it is ignored again after `close`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    notices = PreemptionNotices([signal.SIGINT])
    assert not interrupted()
    assert notices.pending() == "SIGINT"
    notices.close()
    assert not interrupted()
    assert signal.signal(signal.SIGINT, before) == signal.SIG_IGN


def test_an_interrupted_child_of_fork_raises_as_python_does() -> None:
    """Also where it has made notices of its own, and closed them."""
    result = run("""
import os, signal
from ckpt_storage.manager.notices import PreemptionNotices
# A shell lets its background jobs ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
notices = PreemptionNotices([signal.SIGINT])
child = os.fork()
if child == 0:
    own = PreemptionNotices([signal.SIGINT])
    os.kill(os.getpid(), signal.SIGINT)
    assert own.pending() == "SIGINT"
    own.close()
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        os._exit(7)
    os._exit(1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
print("raised")
""")
    assert result.stdout.startswith("raised"), result.stderr


def test_a_hook_asks_for_one_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the hook says counts; that it fails does not end training. One step has one answer."""
    away = RuntimeError("the metadata server is away")
    with manager_of(tmp_path, preemption=mock.Mock(side_effect=[None, away, "soon"])) as manager:
        clock_s = itertools.count()
        manager._schedule._clock = lambda: float(next(clock_s))  # noqa: SLF001  # not public
        steps = itertools.count(1)
        first = next(step for step in steps if manager.should_save(step))
        assert manager.should_save(first)
        assert not [step for step in range(first + 1, first + 200) if manager.should_save(step)]
        assert manager.preempted == "the preemption hook on rank 0"
    assert "the metadata server is away" in caplog.text


def test_no_step_waits_for_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the hook blocks, `should_save` waits for nothing; the answer counts at a later step."""
    go = threading.Event()
    waits_s: list[float] = []
    wait = threading.Condition.wait

    def recorded_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
        # `Thread.start` waits without a timeout.
        if threading.current_thread() is threading.main_thread() and timeout:
            waits_s.append(timeout)
        return wait(condition, timeout)

    with manager_of(tmp_path, preemption=lambda: go.wait(HANG_S)) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Condition, "wait", recorded_wait)
            assert not any(manager.should_save(step) for step in range(1, 100))
        assert waits_s == []
        go.set()
        assert next(step for step in itertools.count(100) if manager.should_save(step))


def test_a_hook_that_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Closing goes on without it, and what it raises afterwards harms nobody."""
    late = threading.Event()
    notices = PreemptionNotices((), lambda: late.wait(HANG_S) and 1 / 0)
    assert notices.pending() is None
    (thread,) = [thread for thread in threading.enumerate() if "preemption" in thread.name]
    notices.close()
    assert thread.is_alive()
    with caplog.at_level(logging.CRITICAL, "ckpt_storage"):
        late.set()
        thread.join(HANG_S)
    assert not thread.is_alive()


def test_a_hook_is_asked_again_only_after_it_answered() -> None:
    """It runs once at a time, on one thread, which ends with its answer."""
    go, answered = threading.Event(), threading.Event()
    count = 0

    def hook() -> object:
        nonlocal count
        count += 1
        assert go.wait(HANG_S)
        answered.set()
        return count == 2

    notices = PreemptionNotices((), hook)
    assert [notices.pending() for _ in range(100)] == [None] * 100
    assert count <= 1
    go.set()
    assert answered.wait(HANG_S)
    while notices.pending() is None:
        assert count <= 2
    assert notices.pending() == "the preemption hook"
    notices.close()
    assert not [thread for thread in threading.enumerate() if "preemption" in thread.name]
