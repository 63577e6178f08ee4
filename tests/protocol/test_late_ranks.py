"""A rank that is late for an operation which the others gave up: nothing of it enters the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from memory_keys import MemoryKeys
from rank_threads import END_S, group, run, values

from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import Timeouts

SHORT = Timeouts(plan=0.3, silence=5)
LONG = Timeouts(plan=8, silence=5)

Terms = Callable[[int], dict[str, str]]


def tried(ranks: RankGroup, timeouts: Timeouts, terms: dict[str, str], said: bytes) -> Any:
    """Run one operation; return what all said, or the error."""
    try:
        with ranks.operation("the save to x", timeouts=timeouts) as operation:
            operation.meet(terms)
            return operation.all_gather(said)
    except CheckpointError as error:
        return error


def after_giving_up(late: Callable[[RankGroup], list[Any]], terms: Terms, steps: range) -> Any:
    """Let rank 0 give up step 1 and go on with `steps`; rank 1 does `late` once it gave up."""
    gave_up = threading.Event()

    def body(ranks: RankGroup) -> list[Any]:
        if ranks.rank == 1:
            gave_up.wait(END_S)
            return late(ranks)
        first = tried(ranks, SHORT, terms(1), b"1")
        gave_up.set()
        assert isinstance(first, CheckpointError)
        return [tried(ranks, LONG, terms(step), b"%d" % step) for step in steps]

    return values(run(group(MemoryKeys(), 2), body))


def same_url(_step: int) -> dict[str, str]:
    """Return terms of saves to one URL."""
    return {"url": "x"}


def own_url(step: int) -> dict[str, str]:
    """Return terms of saves to a URL of their own each."""
    return {"url": f"x{step}"}


@pytest.mark.parametrize("terms", [same_url, own_url])
def test_a_late_rank_is_not_taken_for_one_of_the_next_save(terms: Terms) -> None:
    """A state that comes to save 1 after the others gave it up never enters save 2."""

    def late(ranks: RankGroup) -> list[Any]:
        return [tried(ranks, LONG, terms(step), b"%d" % step) for step in (1, 2)]

    ours, others = after_giving_up(late, terms, range(2, 3))
    assert isinstance(others[0], CheckpointError)
    assert ours == others[1:] == [[b"2", b"2"]]


@pytest.mark.parametrize("terms", [same_url, own_url])
def test_a_late_failure_harms_no_later_operation(terms: Terms) -> None:
    """A rank that fails in save 1 after the others gave it up takes part in saves 2 to 4."""

    def failing(ranks: RankGroup) -> list[Any]:
        with (
            pytest.raises(CheckpointError, match="my own"),
            ranks.operation("the save to x", timeouts=LONG),
        ):
            raise CheckpointError("my own")
        return [tried(ranks, LONG, terms(step), b"%d" % step) for step in (2, 3, 4)]

    ours, others = after_giving_up(failing, terms, range(2, 5))
    assert ours == others == [[b"%d" % step] * 2 for step in (2, 3, 4)]


def test_a_rank_that_missed_a_call_takes_part_in_the_next() -> None:
    """Where each save has a URL of its own, one that was never called costs only itself."""

    def other(ranks: RankGroup) -> list[Any]:
        return [tried(ranks, LONG, own_url(step), b"%d" % step) for step in (2, 3)]

    ours, others = after_giving_up(other, own_url, range(2, 4))
    assert ours == others == [[b"%d" % step] * 2 for step in (2, 3)]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_after_the_others_gave_up_loses_that_operation_only(late: int) -> None:
    """Of three ranks one whose word comes too late is in step again by the third operation."""
    gave_up = threading.Barrier(3)

    def body(ranks: RankGroup) -> list[Any]:
        if ranks.rank == late:
            gave_up.wait(END_S)
        timeouts = Timeouts(plan=2.0 if ranks.rank == late else 0.3)
        ended = [tried(ranks, timeouts, own_url(0), b"")]
        if ranks.rank != late:
            gave_up.wait(END_S)
        timeouts = Timeouts(plan=2.0)
        return ended + [tried(ranks, timeouts, own_url(step), b"") for step in (1, 2, 3)]

    for ended in values(run(group(MemoryKeys(), 3), body)):
        # Where rank 0 is late, the others wait for it in the next operation.
        assert ended[2:] == [[b""] * 3] * 2
        assert late == 0 or ended[1] == [b""] * 3
