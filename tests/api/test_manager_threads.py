"""The manager's thread and its uses: every wish is granted, nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckpt_storage.errors import CheckpointError
from ckpt_storage.manager.job import Job
from ckpt_storage.manager.root import Uses
from ckpt_storage.store.deadline import Deadline

LONG_S = 60.0


def keeper_of(job: Callable[[Deadline], object], timeout_s: float = LONG_S) -> Job:
    """Return a housekeeper."""
    return Job(job, name="ckpt-storage test", timeout_s=timeout_s)


def test_a_wish_during_a_run_gets_a_run_of_its_own() -> None:
    """What is asked for while a run is under way is done by one that begins later, once."""
    begun, go = threading.Semaphore(0), threading.Semaphore(0)
    runs: list[int] = []

    def job(deadline: Deadline) -> None:
        del deadline
        begun.release()
        assert go.acquire(timeout=LONG_S)
        runs.append(1)

    keeper = keeper_of(job)
    assert keeper.wait(0), "nothing was asked for"
    keeper.wake()
    assert begun.acquire(timeout=LONG_S)
    keeper.wake()
    keeper.wake()
    go.release()
    assert begun.acquire(timeout=LONG_S)
    assert not keeper.wait(0.01), "the second run has not ended"
    go.release()
    assert keeper.wait(LONG_S)
    assert len(runs) == 2
    keeper.close(LONG_S)
    keeper.wake()
    assert len(runs) == 2


def test_closing_stops_a_run_that_takes_too_long() -> None:
    """The run's deadline says so; what was asked for and not begun is given up."""
    begun = threading.Event()
    ends: list[str] = []

    def job(deadline: Deadline) -> None:
        begun.set()
        deadline.sleep(LONG_S)
        try:
            deadline.check("The job")
        except CheckpointError as error:
            ends.append(str(error))
            raise

    keeper = keeper_of(job)
    keeper.wake()
    assert begun.wait(LONG_S)
    keeper.wake()
    keeper.close(0.0)
    assert ["was stopped" in text for text in ends] == [True]
    assert not [t for t in threading.enumerate() if t.name == "ckpt-storage test"]
    keeper.close(0.0)


def test_a_user_waits_until_a_deletion_has_ended() -> None:
    """`take` returns as soon as the name is no longer being deleted, and no deletion begins."""
    uses = Uses()
    taken = threading.Event()
    ends: list[Callable[[], None]] = []

    def use() -> None:
        ends.append(uses.take("x", "it is being saved", timeout_s=LONG_S))
        taken.set()

    with uses.deleting("x") as may:
        assert may
        with uses.deleting("x") as other:
            assert not other
        thread = threading.Thread(target=use)
        thread.start()
        assert not taken.wait(0.05)
    assert taken.wait(LONG_S / 6), "nobody woke it"
    thread.join()
    assert uses.now() == {"x": "it is being saved"}
    end = uses.take("x", "it is being loaded", timeout_s=1)
    ends[0]()
    ends[0]()
    assert uses.now() == {"x": "it is being loaded"}
    with uses.deleting("x") as may:
        assert not may
    end()
    assert uses.now() == {}
