"""A rank that is late for an operation which the others gave up: nothing of it enters the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from memory_keys import MemoryKeys

from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import Timeouts

END_S = 30.0
SHORT = Timeouts(plan=0.3, silence=5)
LONG = Timeouts(plan=8, silence=5)


def run(bodies: list[Callable[[], Any]]) -> list[Any]:
    """Run each body in a thread of its own; return what each returned or raised."""
    ended: list[Any] = [None] * len(bodies)

    def one(number: int) -> None:
        try:
            ended[number] = bodies[number]()
        except Exception as error:  # noqa: BLE001  # looked at by the test
            ended[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END_S)
        assert not thread.is_alive()
    return ended


def tried(group: RankGroup, timeouts: Timeouts, terms: dict[str, str], said: bytes) -> Any:
    """Run one operation; return what all said, or the error."""
    try:
        with group.operation("the save to x", timeouts=timeouts) as operation:
            operation.meet(terms)
            return operation.all_gather(said)
    except CheckpointError as error:
        return error


@pytest.mark.parametrize("url", ["same", "new"])
def test_a_late_rank_is_not_taken_for_one_of_the_next_save(url: str) -> None:
    """A state that comes to save 1 after the others gave it up never enters save 2."""
    board = MemoryKeys()
    ranks = [RankGroup(board, rank=rank, world_size=2, look_s=0.005) for rank in range(2)]
    gave_up = threading.Event()
    terms = [{"url": "x"}, {"url": "x" if url == "same" else "y"}]

    def coordinator() -> list[Any]:
        ended = [tried(ranks[0], SHORT, terms[0], b"first")]
        gave_up.set()
        ended.append(tried(ranks[0], LONG, terms[1], b"second"))
        return ended

    def late() -> list[Any]:
        gave_up.wait(END_S)
        return [
            tried(ranks[1], LONG, terms[0], b"first"),
            tried(ranks[1], LONG, terms[1], b"second"),
        ]

    ours, others = run([coordinator, late])
    assert isinstance(ours[0], CheckpointError)
    assert isinstance(others[0], CheckpointError)
    assert ours[1] == others[1] == [b"second", b"second"]


@pytest.mark.parametrize("same_url", [True, False])
def test_a_late_failure_harms_no_later_operation(*, same_url: bool) -> None:
    """A rank that fails in save 1 after the others gave it up takes part in saves 2 to 4."""
    board = MemoryKeys()
    ranks = [RankGroup(board, rank=rank, world_size=2, look_s=0.005) for rank in range(2)]
    gave_up = threading.Event()

    def terms(step: int) -> dict[str, str]:
        return {"url": "x" if same_url else f"x{step}"}

    def good(group: RankGroup) -> list[Any]:
        return [tried(group, LONG, terms(step), b"%d" % step) for step in (2, 3, 4)]

    def coordinator() -> list[Any]:
        first = tried(ranks[0], SHORT, terms(1), b"1")
        gave_up.set()
        return [first, *good(ranks[0])]

    def failing() -> list[Any]:
        gave_up.wait(END_S)
        with (
            pytest.raises(CheckpointError, match="my own"),
            ranks[1].operation("the save to x", timeouts=LONG),
        ):
            raise CheckpointError("my own")
        return good(ranks[1])

    ours, others = run([coordinator, failing])
    assert isinstance(ours[0], CheckpointError)
    assert ours[1:] == others == [[b"%d" % step] * 2 for step in (2, 3, 4)]


def test_a_rank_that_missed_a_call_takes_part_in_the_next() -> None:
    """Where each save has a URL of its own, one that was never called costs only itself."""
    board = MemoryKeys()
    ranks = [RankGroup(board, rank=rank, world_size=2, look_s=0.005) for rank in range(2)]
    gave_up = threading.Event()

    def coordinator() -> list[Any]:
        first = tried(ranks[0], SHORT, {"url": "1"}, b"1")
        gave_up.set()
        return [first, *(tried(ranks[0], LONG, {"url": n}, b"x") for n in "23")]

    def other() -> list[Any]:
        gave_up.wait(END_S)
        return [tried(ranks[1], LONG, {"url": n}, b"x") for n in "23"]

    ours, others = run([coordinator, other])
    assert isinstance(ours[0], CheckpointError)
    assert ours[1:] == others == [[b"x", b"x"]] * 2
