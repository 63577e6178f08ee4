"""A call to a meeting: all ranks come to it at one turn, or none does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_keys import MemoryKeys

from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.manager.schedule import Call


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


def test_ranks_that_keep_pace_meet_within_three_turns() -> None:
    """Whoever calls, before or after the others looked at that turn."""
    for world_size in (2, 3, 5):
        for caller in range(world_size):
            board = MemoryKeys()
            calls = [
                Call(board, rank=r, world_size=world_size, timeout_s=1) for r in range(world_size)
            ]
            agreed: set[int | None] = {None}
            turn = 0
            while agreed == {None} or turn not in agreed:
                turn += 1
                agreed = {
                    one.look(turn, wants=rank == caller and turn == 1)
                    for rank, one in enumerate(calls)
                }
                assert turn <= 4
            assert agreed == {turn}
            for one in calls:
                one.anew("next")
            assert board.keys == []


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

    class Gone(MemoryKeys):
        is_gone = True

        def get(self, key: str, timeout_s: float) -> bytes | None:
            if self.is_gone:
                raise LostStoreError("gone")
            return super().get(key, timeout_s)

    board = Gone()
    call = Call(board, rank=0, world_size=2, timeout_s=1)
    assert call.look(1, wants=False) is None
    board.is_gone = False
    assert call.look(2, wants=True) is None
    assert call.has_promised
    board.is_gone = True
    with pytest.raises(LostStoreError):
        call.look(3, wants=False)
