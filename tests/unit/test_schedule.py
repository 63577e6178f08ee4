"""When ranks meet to save: at first, and when one calls, all at one turn; on notice of a signal."""

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
from manager_cases import manager_of
from rank_threads import SharedStore, group

from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.manager.schedule import Call, Notices, Schedule
from ckpt_storage.options import Timeouts
from ckpt_storage.testing.upload_facts import together


def test_ranks_compare_at_the_first_step_what_they_were_given() -> None:
    """Also where each knows by itself when to save; and only then do they meet."""
    groups = group(SharedStore(), 2)

    def train(rank: int) -> list[int]:
        ranks = groups[rank]
        schedule = Schedule(ranks, Notices(), every_steps=5, every_s=None, timeouts=Timeouts())
        due = [schedule.is_due(1)]
        number = ranks.lane.number
        due += [schedule.is_due(step) for step in range(2, 21)]
        assert ranks.lane.number == number, "no second meeting"
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
    groups = group(SharedStore(), world_size)
    turns = [threading.Semaphore(0) for _ in range(world_size)]
    last = notice_at + more
    found: list[list[int]] = [[] for _ in range(world_size)]

    def train(rank: int) -> None:
        now_s = [0.0]
        notices = mock.Mock(are_asked_for=True)
        notices.given.return_value = None
        schedule = Schedule(
            groups[rank],
            notices,
            every_steps=None,
            every_s=every_s,
            timeouts=Timeouts(),
            clock=lambda: now_s[0],
        )
        for step in range(1, last):
            now_s[0] += 20.0 if step >= long_from else 0.001
            if rank == noticed and step == notice_at:
                notices.given.return_value = "SIGTERM"
            if schedule.is_due(step):
                found[rank].append(step)
                schedule.saved()
            # As in an all-reduce: nobody ends the next step before all have begun it.
            for other in turns:
                other.release()
            for _ in range(world_size):
                assert turns[rank].acquire(timeout=60)

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


@given(world_size=st.integers(1, 4), data=st.data())
def test_all_ranks_meet_at_one_turn_whatever_their_pace(
    world_size: int, data: st.DataObject
) -> None:
    """In any order of turns, with any wishes and looks left out, nobody meets alone or too late.

    In the end all look at each turn, and at no great distance: then they do meet.
    """
    groups = group(SharedStore(), world_size)
    calls = [Call(ranks, timeout_s=1) for ranks in groups]
    for epoch in range(2):
        turns = [0] * world_size
        came: dict[int, int] = {}
        drawn = 0
        while len(came) < world_size:
            drawn += 1
            waiting = [r for r in range(world_size) if r not in came]
            if drawn < 40:
                rank = data.draw(st.sampled_from(waiting))
            else:
                rank = min(waiting, key=lambda r: turns[r])
            call = calls[rank]
            if epoch and not turns[rank]:
                call.anew("second")  # others may be on their way already
            turns[rank] += 1
            is_asked = call.has_promised or drawn >= 40 or data.draw(st.booleans())
            wants = is_asked and (drawn >= 40 or data.draw(st.integers(0, 3)) == 0)
            agreed = call.look(turns[rank], wants=wants) if is_asked else None
            assert agreed is None or agreed >= turns[rank]
            if agreed == turns[rank]:
                came[rank] = turns[rank]
            assert drawn < 2000
        assert len(set(came.values())) == 1


def test_what_ranks_left_that_were_ended_is_no_call() -> None:
    """Those after them share their board, and would meet alone at a turn that others are past."""
    board = SharedStore()

    def ranks(meeting_id: str) -> list[Call]:
        calls = [Call(ranks, timeout_s=1) for ranks in group(board, 2)]
        for one in calls:
            one.anew(meeting_id)
        return calls

    ended = ranks("of the first attempt")
    for turn in range(1, 4):
        agreed = [one.look(turn, wants=turn == 1) for one in ended]
    assert agreed == [3, 3]
    assert board.key_names()
    late, early = ranks("of the second")
    assert early.look(1, wants=False) is None
    assert late.look(5, wants=False) is None
    assert not early.has_promised
    assert not late.has_promised


def test_a_board_that_is_gone_matters_only_to_who_promised() -> None:
    """Before, the next meeting tells; after it, nobody may go on without the word."""
    ranks = group(SharedStore(), 2)[0]
    call = Call(ranks, timeout_s=1)
    gone = mock.patch.object(ranks.keys, "get", side_effect=LostStoreError("gone"))
    with gone:
        assert call.look(1, wants=False) is None
    assert call.look(2, wants=True) is None
    assert call.has_promised
    with gone, pytest.raises(LostStoreError):
        call.look(3, wants=False)


LONG_S = 60.0


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
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_S, check=False
    )


def test_a_forked_child_is_ended_by_the_signal() -> None:
    """A child inherits the handler, and the signal does to it what it did before there was one."""
    found = run("""
import os, signal
from ckpt_storage.manager.schedule import Notices
notices = Notices([signal.SIGTERM])
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
assert notices.given() is None
os.kill(os.getpid(), signal.SIGTERM)
assert notices.given() == "SIGTERM"
print("both lived as long as they should")
""")
    assert found.stdout.startswith("both"), found.stderr


def test_handlers_of_others_are_called_past_those_that_closed(taken: list[int]) -> None:
    """What was there before the first one comes back after both, and is called meanwhile."""
    first, second = Notices([signal.SIGUSR1]), Notices([signal.SIGUSR1])
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
        thread.submit(manager.close).result(LONG_S)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert taken == [signal.SIGUSR1] * 2
        refused = thread.submit(manager_of, tmp_path, signals=[signal.SIGUSR1])
        with pytest.raises(InvalidInputError, match="main thread"):
            refused.result(LONG_S)
    with pytest.raises(InvalidInputError, match="cannot be taken"):
        manager_of(tmp_path, signals=[signal.SIGUSR1, signal.SIGKILL])


def test_a_hook_asks_for_one_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the hook says counts; that it fails does not end training. One step has one answer."""
    away = RuntimeError("the metadata server is away")
    with manager_of(tmp_path, preemption=mock.Mock(side_effect=[None, away, "soon"])) as manager:
        clock_s = itertools.count()
        manager._schedule._clock = lambda: float(next(clock_s))  # noqa: SLF001  # not public
        ask = manager.should_save
        assert len([step for step in range(1, 200) if ask(step) and ask(step)]) == 1
        assert manager.preempted == "the preemption hook on rank 0"
    assert "the metadata server is away" in caplog.text


def test_a_hook_that_hangs_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """It is asked on a thread of its own, once at a time; what it says later counts."""
    go, said = threading.Event(), threading.Event()
    count = 0

    def hook() -> object:
        nonlocal count
        count += 1
        assert go.wait(LONG_S)
        said.set()
        return count == 2

    notices = Notices((), hook)
    assert [notices.given() for _ in range(100)] == [None] * 100
    assert count == 1
    go.set()
    assert said.wait(LONG_S)
    while notices.given() is None:
        assert count <= 2
    assert notices.given() == "the preemption hook"
    notices.close()
    assert not [thread for thread in threading.enumerate() if "preemption" in thread.name]

    # Closing does not wait for one that hangs, and what it raises afterwards harms nobody.
    late = threading.Event()
    notices = Notices((), lambda: late.wait(LONG_S) and 1 / 0)
    assert notices.given() is None
    (thread,) = [thread for thread in threading.enumerate() if "preemption" in thread.name]
    notices.close()
    assert thread.is_alive()
    with caplog.at_level(logging.CRITICAL, "ckpt_storage"):
        late.set()
        thread.join(LONG_S)
    assert not thread.is_alive()
