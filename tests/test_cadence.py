"""When ranks meet: first of all once, and soon again when steps become long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckpt_storage.cadence import Cadence
from ckpt_storage.options import Timeouts
from ckpt_storage.preemption import Notices


class TwoRanks:
    """Stands for the ranks of a group: the other one has no notice, and says what this one says."""

    world_size = 2
    is_coordinator = True

    def __init__(self) -> None:
        self.terms: list[Mapping[str, str]] = []

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
        chosen: dict[str, Any] = {"every_steps": None, "every_s": 1e9, **options}
        self.cadence = Cadence(
            self.ranks,  # type: ignore[arg-type]  # as much of one as is needed
            Notices(),
            timeouts=Timeouts(),
            terms={"the root's URL": "memory://r"},
            clock=lambda: self.now_s,
            **chosen,
        )

    def steps(self, count: int, each_s: float) -> list[int]:
        """Run some steps; return those at which ranks met."""
        met = []
        for _ in range(count):
            self.now_s += each_s
            self.step += 1
            before = len(self.ranks.terms)
            self.cadence.is_due(self.step)
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


def test_steps_that_become_long_are_looked_at_soon() -> None:
    """After thousands of short steps few long ones pass before ranks meet; then each is seen."""
    run = Run()
    assert len(run.steps(10_000, 0.001)) >= 10_000 / 16
    met = run.steps(40, 20.0)
    assert met[0] - 10_000 <= 16
    assert met[1:] == list(range(met[0] + 1, 10_041))


def test_long_steps_that_come_again_are_counted_with() -> None:
    """Short steps between long ones: the next meeting is chosen as if all were long."""
    run = Run()
    run.steps(1000, 0.001)
    run.steps(40, 20.0)
    met = run.steps(20, 0.001)
    assert len(met) == 20, "a long one may come at any step"
    run.steps(3000, 0.001)
    assert len(run.steps(160, 0.001)) <= 20, "in time that is forgotten"
