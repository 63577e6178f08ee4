"""When ranks meet: first of all once, and soon again when steps become long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from ckpt_storage.coordination.board import LocalBoard
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.manager.notices import Notices
from ckpt_storage.manager.schedule import Schedule
from ckpt_storage.options import Timeouts
from ckpt_storage.testing.upload_facts import together


class TwoRanks:
    """Stands for the ranks of a group: the other one has no notice, and says what this one says."""

    world_size = 2
    rank = 0
    is_coordinator = True
    id = "a meeting"

    def __init__(self) -> None:
        self.terms: list[Mapping[str, str]] = []
        self.board = LocalBoard()
        self.costs_s = 0.0
        self.pay: Callable[[float], None] = lambda _: None

    @contextmanager
    def operation(self, what: str, *, timeouts: Timeouts) -> Iterator[Any]:
        """Run one."""
        del what, timeouts
        yield self

    def meet(self, terms: Mapping[str, str]) -> None:
        """Note that the ranks met."""
        self.terms.append(terms)

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the words of both."""
        self.pay(self.costs_s)
        return [payload, b""]

    def broadcast(self, payload: bytes) -> bytes:
        """Return the coordinator's."""
        return payload


class Run:
    """A training loop whose steps take as long as they are told to."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 0.0
        self.step = 0
        self.ranks = TwoRanks()
        self.ranks.pay = self.pass_time
        chosen: dict[str, Any] = {"every_steps": None, "every_s": 1e9, **options}
        self.schedule = Schedule(
            self.ranks,  # type: ignore[arg-type]  # as much of one as is needed
            Notices(),
            timeouts=Timeouts(),
            terms={"the root's URL": "memory://r"},
            clock=lambda: self.now_s,
            **chosen,
        )

    def pass_time(self, seconds: float) -> None:
        """Let the clock go on."""
        self.now_s += seconds

    def steps(self, count: int, each_s: float) -> list[int]:
        """Run some steps; return those at which ranks met."""
        met = []
        for _ in range(count):
            self.now_s += each_s
            self.step += 1
            before = len(self.ranks.terms)
            self.schedule.is_due(self.step)
            if len(self.ranks.terms) > before:
                met.append(self.step)
        return met


def test_ranks_meet_at_the_first_step_and_compare_what_they_were_given() -> None:
    """Also where each knows by itself when to save; and only then."""
    run = Run(every_steps=5, every_s=None)
    assert run.steps(100, 0.1) == [1]
    (terms,) = run.ranks.terms
    assert terms["every_steps"] == "5"
    assert terms["the root's URL"] == "memory://r"


def test_long_steps_are_looked_at_one_by_one() -> None:
    """Ranks meet at each step that takes a second or more, from the first meeting among them on."""
    run = Run()
    run.steps(10_000, 0.001)
    met = run.steps(400, 20.0)
    assert met[1:] == list(range(met[0] + 1, 10_401))
    assert Run().steps(20, 1.0) == list(range(1, 21))


def test_a_resumed_run_looks_again_as_soon_as_a_new_one() -> None:
    """The number of the step that training begins at says nothing about how long steps take."""
    run = Run()
    run.step = 100_000
    assert run.steps(10, 0.001)[:2] == [100_001, 100_003]


def test_meetings_take_a_hundredth_of_the_time_at_most() -> None:
    """Where they are slow, ranks meet less often; where steps are short, once a second."""
    run = Run()
    assert 10 <= len(run.steps(10_000, 0.002)) <= 10_000 * 0.002 + 10
    run.ranks.costs_s = 0.02
    run.steps(1000, 0.01)
    met = run.steps(10_000, 0.01)
    assert 2 * len(met) * run.ranks.costs_s <= 0.011 * 10_000 * 0.01
    run.steps(1000, 20.0)
    assert len(run.steps(10, 20.0)) == 10, "a long step pays for its meeting"


class Told:
    """Stands for `Notices`: says what it is told to."""

    are_asked_for = True

    def __init__(self) -> None:
        self.notice: str | None = None

    def given(self, *, asks_hook: bool = True) -> str | None:
        """Return the notice."""
        del asks_hook
        return self.notice


def in_step(world_size: int, noticed: int, *, long_from: int, notice_at: int) -> list[list[int]]:
    """Run ranks as threads that keep pace; return the steps at which each was told to save.

    Steps take a millisecond each, from `long_from` on 20 s, by clocks of their own.
    """
    board = LocalBoard()
    turns = [threading.Semaphore(0) for _ in range(world_size)]
    last = notice_at + 40
    found: list[list[int]] = [[] for _ in range(world_size)]

    def train(rank: int) -> None:
        now_s = [0.0]
        notices = Told()
        schedule = Schedule(
            Ranks(board, rank=rank, world_size=world_size, look_s=0.001),
            notices,  # type: ignore[arg-type]  # as much of them as is needed
            every_steps=None,
            every_s=None,
            timeouts=Timeouts(),
            clock=lambda: now_s[0],
        )
        for step in range(1, last):
            now_s[0] += 20.0 if step >= long_from else 0.001
            if rank == noticed and step == notice_at:
                notices.notice = "SIGTERM"
            if schedule.is_due(step):
                found[rank].append(step)
            # As in an all-reduce: nobody ends the next step before all have begun it.
            for other in turns:
                other.release()
            for _ in range(world_size):
                assert turns[rank].acquire(timeout=60)

    outcomes = together([partial(train, rank) for rank in range(world_size)])
    assert outcomes == [None] * world_size
    return found


@pytest.mark.parametrize("noticed", [0, 2])
@pytest.mark.parametrize("after", range(0, 12, 3))
def test_a_notice_is_answered_within_three_steps_that_became_long(noticed: int, after: int) -> None:
    """Also while the next meeting was agreed on for short steps: no rank waits, and all save."""
    at = 600 + after
    found = in_step(3, noticed, long_from=600, notice_at=at)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 1
    assert at <= found[0][0] <= at + 3
