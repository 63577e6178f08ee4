"""Calls in threads that can be left behind."""

from __future__ import annotations

from reentry import interrupt_each_line

from ckpt_storage.store.threads import TimedPool


def test_a_signal_handler_may_use_the_pool_it_interrupts() -> None:
    """A save in a handler makes calls in the middle of a call of the same store."""
    pool = TimedPool("test")
    answers: list[int] = []

    def call(value: int) -> None:
        answers.append(pool.run(lambda: value, timeout_s=5.0, what="call", repeatable=False))

    interrupt_each_line(lambda: call(1), lambda: call(2))
    pool.close()
    assert answers.count(1) == 1
    assert answers.count(2) > 1
