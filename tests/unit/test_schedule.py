"""When ranks meet: first of all once, and then when one of them calls, all at one turn or none."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_keys import MemoryKeys

from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.manager.notices import Notices
from ckpt_storage.manager.schedule import Call, Schedule
from ckpt_storage.options import Timeouts
from ckpt_storage.testing.upload_facts import together


def test_ranks_compare_at_the_first_step_what_they_were_given() -> None:
    """Also where each knows by itself when to save; and only then do they meet."""
    boards = MemoryKeys()

    def train(rank: int) -> list[int]:
        ranks = RankGroup(boards, rank=rank, world_size=2, look_s=0.001)
        schedule = Schedule(ranks, Notices(), every_steps=5, every_s=None, timeouts=Timeouts())
        due = [schedule.is_due(1)]
        boards_left = ranks.number
        due += [schedule.is_due(step) for step in range(2, 21)]
        assert ranks.number == boards_left, "no second meeting"
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
    board = MemoryKeys()
    turns = [threading.Semaphore(0) for _ in range(world_size)]
    last = notice_at + more
    found: list[list[int]] = [[] for _ in range(world_size)]

    def train(rank: int) -> None:
        now_s = [0.0]
        notices = mock.Mock(are_asked_for=True)
        notices.given.return_value = None
        schedule = Schedule(
            RankGroup(board, rank=rank, world_size=world_size, look_s=0.001),
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
    found = in_step(3, None, long_from=1, notice_at=0, every_s=100.0)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) >= 4
    assert all(5 <= b - a <= 8 for a, b in itertools.pairwise([0, *found[0]]))


@given(world_size=st.integers(1, 4), data=st.data())
def test_all_ranks_meet_at_one_turn_whatever_their_pace(
    world_size: int, data: st.DataObject
) -> None:
    """In any order of turns, with any wishes and looks left out, nobody meets alone or too late.

    In the end all look at each turn, and at no great distance: then they do meet.
    """
    board = MemoryKeys()
    calls = [Call(board, rank=r, world_size=world_size, timeout_s=1) for r in range(world_size)]
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
    board = MemoryKeys()

    def ranks(meeting_id: str) -> list[Call]:
        calls = [Call(board, rank=r, world_size=2, timeout_s=1) for r in range(2)]
        for one in calls:
            one.anew(meeting_id)
        return calls

    ended = ranks("of the first attempt")
    for turn in range(1, 4):
        agreed = [one.look(turn, wants=turn == 1) for one in ended]
    assert agreed == [3, 3]
    assert board.keys
    late, early = ranks("of the second")
    assert early.look(1, wants=False) is None
    assert late.look(5, wants=False) is None
    assert not early.has_promised
    assert not late.has_promised


def test_a_board_that_is_gone_matters_only_to_who_promised() -> None:
    """Before, the next meeting tells; after it, nobody may go on without the word."""
    board = MemoryKeys()
    call = Call(board, rank=0, world_size=2, timeout_s=1)
    gone = mock.patch.object(board, "get", side_effect=LostStoreError("gone"))
    with gone:
        assert call.look(1, wants=False) is None
    assert call.look(2, wants=True) is None
    assert call.has_promised
    with gone, pytest.raises(LostStoreError):
        call.look(3, wants=False)
