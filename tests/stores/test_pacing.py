"""The memory that all transfers of a process share, and the number of requests under way."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_storage.errors import PhaseTimeoutError
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.pacing import BUDGET, Budget, Pacer


def soon() -> Deadline:
    """Return a deadline that is far enough for a test, counted from now."""
    return Deadline("write", 30)


def wait_for(count: int, budget: Budget) -> None:
    """Wait until that many claims wait."""
    end = time.monotonic() + 20
    while waiting(budget) != count:
        assert time.monotonic() < end
        time.sleep(0.001)


def begun(action: Callable[[], object]) -> threading.Thread:
    """Start a thread."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def waiting(budget: Budget) -> int:
    """Return how many claims wait."""
    return len(budget._queue)  # noqa: SLF001  # what no caller needs to know


def test_a_large_claim_is_not_overtaken() -> None:
    """What came later and would fit waits behind it."""
    budget = Budget()
    order: list[str] = []
    budget.acquire(60, limit_bytes=100, deadline=soon())

    def claim(name: str, byte_count: int) -> None:
        budget.acquire(byte_count, limit_bytes=100, deadline=soon())
        order.append(name)

    large = begun(lambda: claim("large", 90))
    wait_for(1, budget)
    small = begun(lambda: claim("small", 10))
    wait_for(2, budget)
    assert order == []
    budget.release(60)
    large.join(20)
    small.join(20)
    assert sorted(order) == ["large", "small"]
    assert budget.held_bytes == 100


def test_what_is_larger_than_the_limit_is_let_through_alone() -> None:
    """It waits until nothing else is held, or until its deadline, and then claims nothing."""
    budget = Budget()
    budget.acquire(1, limit_bytes=10, deadline=soon())
    with pytest.raises(PhaseTimeoutError, match="memory"):
        budget.acquire(50, limit_bytes=10, deadline=Deadline("write", 0.05))
    assert (waiting(budget), budget.held_bytes) == (0, 1)
    thread = begun(lambda: budget.acquire(50, limit_bytes=10, deadline=soon()))
    wait_for(1, budget)
    budget.release(1)
    thread.join(20)
    assert budget.held_bytes == 50


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads
def test_a_forked_child_holds_nothing() -> None:
    """The process's budget starts anew in a child, even if a thread of the parent had its lock."""

    def child(found: Any) -> None:
        BUDGET.acquire(1, limit_bytes=1, deadline=Deadline("write", 5))
        found.send(BUDGET.held_bytes)

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    BUDGET.acquire(7, limit_bytes=1 << 40, deadline=soon())
    try:
        with BUDGET._changed:  # noqa: SLF001  # as a thread in the middle of a claim has it
            process = context.Process(target=child, args=(theirs,))
            process.start()
        assert ours.poll(20)
        assert ours.recv() == 1
        process.join(20)
    finally:
        BUDGET.release(7)
    assert process.exitcode == 0


def test_a_slow_down_halves_the_number_once_for_all_that_were_under_way() -> None:
    """Sixteen requests that are refused together are one word; one later is another."""
    now_s = [0.0]
    pacer = Pacer(16, clock=lambda: now_s[0])
    for _ in range(16):
        pacer.succeeded(1.0, 1000)
    for after_s, count, limit in ((1.0, 16, 8), (2.0, 1, 4), (2.0, 1, 2), (2.0, 1, 1), (2.0, 1, 1)):
        now_s[0] += after_s
        for _ in range(count):
            pacer.slowed_down()
        assert pacer.limit() == limit
