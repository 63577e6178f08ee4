"""Ranks that a launcher starts anew, over the store of those before them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
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
from ckpt_storage.coordination import meeting
from ckpt_storage.coordination.board import BoardError, LocalBoard
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.options import Timeouts


class EndedBoard(LocalBoard):
    """A board as a process sees it that is ended as soon as it has left its word."""

    def __init__(self, board: LocalBoard) -> None:
        self._values, self._lock = board._values, board._lock  # noqa: SLF001  # the same memory
        self._has_ended = False

    def set(self, key: str, value: bytes, timeout_s: float) -> None:
        """Leave a word, the last one."""
        super().set(key, value, timeout_s)
        self._has_ended = True

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Come to no answer."""
        if self._has_ended:
            raise BoardError(f"ended before it read {key} within {timeout_s} s")
        return super().get(key, timeout_s)

    def delete(self, key: str, timeout_s: float) -> None:
        """Take nothing back."""
        raise BoardError(f"ended before it took {key} back within {timeout_s} s")


def leave_word(board: LocalBoard, rank: int, *, number: int, url: str) -> None:
    """Leave on the board what a rank leaves that is ended in its operation `number`."""
    ended = Ranks(EndedBoard(board), rank=rank, world_size=3)
    with (
        pytest.raises(RankFailedError),
        ended.operation("the test", timeouts=Timeouts(), number=number) as operation,
    ):
        operation.meet({"the checkpoint's URL": url})


def leave_last_word(board: LocalBoard, *, number: int, rank: int = 0) -> None:
    """Leave on the board what a rank leaves that is interrupted before it meets the others."""
    ended = Ranks(board, rank=rank, world_size=3)
    with pytest.raises(SystemExit), ended.operation("the test", timeouts=Timeouts(), number=number):
        raise SystemExit


def until_asked(board: LocalBoard, count: int) -> None:
    """Wait until somebody was answered or asked; else the words that were left play no part."""
    end_s = time.monotonic() + END_S / 2
    while sum(key.startswith("answer/") for key in board.keys) < count:
        assert time.monotonic() < end_s, board.keys
        time.sleep(LOOK_S)


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("url", [*TERMS.values(), "memory://other"])
def test_word_of_ranks_that_were_ended_is_not_taken_for_their_successors(
    number: int, url: str
) -> None:
    """All meet, and no operation fails, whatever operation those were in that were ended."""
    board = LocalBoard()
    for rank in (1, 2):
        leave_word(board, rank, number=number, url=url)
    assert board.keys == ["hello/1", "hello/2"]

    def body(coordinator: Ranks) -> list[list[bytes]]:
        if coordinator.rank > 0:
            until_asked(board, 2)
        return [together(coordinator) for _ in range(3)]

    assert values(run(group(board, 3), body)) == [[[b"0", b"1", b"2"]] * 3] * 3
    assert len(operations_on(board)) == 1, board.keys


def test_a_rank_that_is_not_started_anew_is_named() -> None:
    """What its predecessor left is not taken for its coming; once it has come, all meet."""
    board = LocalBoard()
    leave_word(board, 1, number=1, url=TERMS["the checkpoint's URL"])
    ranks = group(board, 3)
    present = [ranks[0], ranks[2]]

    def alone(coordinator: Ranks) -> str:
        with pytest.raises(PhaseTimeoutError) as caught:
            together(coordinator, Timeouts(plan=0.5))
        return str(caught.value)

    told = values(run(present, alone))
    assert all("Rank 1 of 3 has not come" in one for one in told), told

    def all_come(coordinator: Ranks) -> list[bytes]:
        if coordinator.rank == 1:
            with pytest.raises(PhaseTimeoutError, match="given up before"):
                together(coordinator)
        return together(coordinator)

    assert values(run(ranks, all_come)) == [[b"0", b"1", b"2"]] * 3


@pytest.fixture
def started_after() -> Iterator[Callable[[], None]]:
    """Give a call after which this process began just now, as far as ranks know."""
    with mock.patch.object(meeting, "process_start_s") as start:
        start.return_value = 0.0

        def now() -> None:
            start.return_value = time.time()

        yield now


@pytest.mark.parametrize("number", [1, 2])
def test_last_word_of_a_rank_0_that_was_ended_is_not_taken_for_its_successors(
    started_after: Callable[[], None], number: int
) -> None:
    """Those that come before the new one wait for it; nor is it taken for one of a later call."""
    board = LocalBoard()
    leave_last_word(board, number=number)
    assert board.keys == ["hello/0"]
    started_after()

    def body(coordinator: Ranks) -> list[list[bytes]]:
        end_s = time.monotonic() + END_S / 2
        while coordinator.rank == 0 and not {"hello/1", "hello/2"} <= set(board.keys):
            assert time.monotonic() < end_s, board.keys
            time.sleep(LOOK_S)
        if coordinator.rank == 0:
            time.sleep(20 * LOOK_S)  # the others look meanwhile
        return [together(coordinator) for _ in range(3)]

    assert values(run(group(board, 3), body)) == [[[b"0", b"1", b"2"]] * 3] * 3
    assert "hello/0" not in board.keys


@pytest.mark.parametrize("is_old", [True, False])
def test_last_word_of_another_rank_counts_unless_that_was_started_anew(
    started_after: Callable[[], None], *, is_old: bool
) -> None:
    """Rank 0 waits for the new process of a rank, and does not wait for one that was ended."""
    board = LocalBoard()
    leave_last_word(board, number=1, rank=1)
    assert board.keys == ["hello/1"]
    data = board.get("hello/1", END_S)
    assert data is not None
    question = f"answer/{pickle.loads(data).nonce}"
    if is_old:
        started_after()

    def body(coordinator: Ranks) -> list[list[bytes]]:
        if coordinator.rank == 1:
            end_s = time.monotonic() + END_S / 4
            while question not in board.keys:
                assert time.monotonic() < end_s, "the old word was not asked"
                time.sleep(LOOK_S)
        return [together(coordinator) for _ in range(3)]

    if is_old:
        assert values(run(group(board, 3), body)) == [[[b"0", b"1", b"2"]] * 3] * 3
        return
    ranks = group(board, 3)
    for one in run([ranks[0], ranks[2]], together):
        assert isinstance(one.error, RankFailedError)
        assert "SystemExit" in str(one.error)


@pytest.mark.parametrize("silence_s", [0.2, END_S])
def test_last_word_of_this_rank_0_counts(
    started_after: Callable[[], None], silence_s: float
) -> None:
    """At once if this process was there already; soon if clocks say that it was not."""
    board = LocalBoard()
    leave_last_word(board, number=1)
    if silence_s < END_S:
        started_after()

    def body(coordinator: Ranks) -> str:
        with pytest.raises(RankFailedError) as caught:
            together(coordinator, Timeouts(silence=silence_s))
        assert caught.value.rank == 0
        return str(caught.value)

    begin_s = time.monotonic()
    told = values(run(group(board, 3)[1:], body))
    assert time.monotonic() - begin_s < END_S / 2
    assert all("SystemExit" in one for one in told), told
