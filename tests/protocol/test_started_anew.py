"""Ranks that a launcher starts anew, over the store of those before them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from memory_keys import MemoryKeys
from test_coordination import (  # noqa: F401  # `quick` is taken in by pytest
    END_S,
    LOOK_S,
    TERMS,
    group,
    operations_on,
    quick,
    run,
    together,
    values,
)

from ckpt_storage import PhaseTimeoutError, RankFailedError
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.options import Timeouts


class EndedBoard(MemoryKeys):
    """A board as a process sees it that is ended as soon as it has left a message."""

    def __init__(self, board: MemoryKeys) -> None:
        self._values, self._lock = board._values, board._lock  # noqa: SLF001  # the same memory
        self._has_ended = False

    def set(self, key: str, value: bytes, timeout_s: float) -> None:
        """Leave a message, the last one."""
        if not self._has_ended:
            super().set(key, value, timeout_s)
        self._has_ended = True

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Come to no answer."""
        if self._has_ended:
            raise LostStoreError(f"ended before it read {key} within {timeout_s} s")
        return super().get(key, timeout_s)

    def has_all(self, keys: object, timeout_s: float) -> bool:
        """Come to no answer."""
        raise LostStoreError(f"ended before it looked for {keys} within {timeout_s} s")

    def delete(self, key: str, timeout_s: float) -> None:
        """Take nothing back."""
        raise LostStoreError(f"ended before it took {key} back within {timeout_s} s")


def leave_message(board: MemoryKeys, rank: int, *, number: int, url: str) -> None:
    """Leave on the board what a rank leaves that is ended in its operation `number`."""
    ended = RankGroup(EndedBoard(board), rank=rank, world_size=3)
    ended.number = number - 1
    with (
        pytest.raises(RankFailedError),
        ended.operation("the test", timeouts=Timeouts()) as operation,
    ):
        operation.meet({"the checkpoint's URL": url})


def leave_job(board: MemoryKeys, *, number: int, url: str) -> None:
    """Leave what a job leaves that is ended while its ranks meet: a call, and answers to it."""
    for rank in range(3):
        leave_message(board, rank, number=number, url=url)
    assert board.keys[0] == "call"
    assert [key.split("/")[::2] for key in board.keys[1:]] == [["here", "1"], ["here", "2"]]


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("url", [*TERMS.values(), "memory://other"])
@pytest.mark.parametrize("first", ["the coordinator", "the others"])
def test_messages_of_ranks_that_were_ended_are_not_taken_for_their_successors(
    number: int, url: str, first: str
) -> None:
    """All meet, and no operation fails, whatever operation those were in that were ended."""
    board = MemoryKeys()
    leave_job(board, number=number, url=url)
    old = set(board.keys) - {"call"}
    call = board.get("call", END_S)

    def wait_for(found: Callable[[], bool]) -> None:
        end_s = time.monotonic() + END_S / 2
        while not found():
            assert time.monotonic() < end_s, board.keys
            time.sleep(LOOK_S)

    def body(ranks: RankGroup) -> list[list[bytes]]:
        if ranks.is_coordinator and first == "the others":
            time.sleep(20 * LOOK_S)  # the others answer the old call meanwhile
        elif not ranks.is_coordinator and first == "the coordinator":
            wait_for(lambda: board.get("call", END_S) != call)
        return [together(ranks) for _ in range(3)]

    assert values(run(group(board, 3), body)) == [[[b"0", b"1", b"2"]] * 3] * 3
    left = MemoryKeys()
    for key in set(board.keys) - old:
        left.set(key, b"", END_S)
    assert len(operations_on(left)) == 1, board.keys


def test_a_rank_that_is_not_started_anew_is_named() -> None:
    """What its predecessor left is not taken for its coming; once it has come, all meet."""
    board = MemoryKeys()
    leave_job(board, number=1, url=TERMS["the checkpoint's URL"])
    ranks = group(board, 3)
    present = [ranks[0], ranks[2]]

    def alone(coordinator: RankGroup) -> str:
        with pytest.raises(PhaseTimeoutError) as caught:
            together(coordinator, Timeouts(plan=0.5))
        return str(caught.value)

    told = values(run(present, alone))
    assert all("Rank 1 of 3 has not come" in one for one in told), told

    def all_come(coordinator: RankGroup) -> list[bytes]:
        if coordinator.rank == 1:
            with pytest.raises(PhaseTimeoutError, match="given up before"):
                together(coordinator)
        return together(coordinator)

    assert values(run(ranks, all_come)) == [[b"0", b"1", b"2"]] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_interrupted_while_others_wait_is_named_at_once(rank: int) -> None:
    """It tells those that are there, and does not wait for those that are not."""
    board = MemoryKeys()

    def body(ranks: RankGroup) -> str:
        if ranks.rank == rank:
            with pytest.raises(SystemExit), ranks.operation("the test", timeouts=Timeouts()):
                raise SystemExit
            return "SystemExit"
        with pytest.raises(RankFailedError) as caught:
            together(ranks)
        assert caught.value.rank == rank
        return str(caught.value)

    begin_s = time.monotonic()
    told = values(run(group(board, 3), body))
    assert time.monotonic() - begin_s < END_S / 2
    assert all("SystemExit" in one for one in told), told
