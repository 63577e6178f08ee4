"""What a trainer does with the words of its worker, and without them."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import Any, cast

import pytest

from ckpt_storage.background import link
from ckpt_storage.background.worker import Step
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.coordination.liveness import RankProgress
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import Phase, Timeouts


class Child:
    """A worker that asks for one step, and is gone before that has ended."""

    has_spoken = True
    process = types.SimpleNamespace(pid=1)

    def __init__(self, committed: object = None) -> None:
        self.committed = committed
        self.gone = threading.Event()
        self.told = threading.Event()

    def send(self, message: object, *, file: int | None = None) -> None:
        """Take what the pipe holds, though nobody reads it."""

    def close(self) -> None:
        """Be ended, and leave time for it to be noticed."""
        self.gone.set()
        self.told.wait(0.5)

    def messages(self, limit_s: float) -> Iterator[Step]:
        """Ask, and be gone."""
        del limit_s
        yield Step(name="gather_bytes", args=(b"part",), facts={"committed": self.committed})
        self.gone.wait()
        raise link.GoneError("gave no sign of life")


def job() -> Any:
    """Return a save that is staged."""
    options = types.SimpleNamespace(timeouts=Timeouts(), progress=None)
    arena = types.SimpleNamespace(size_bytes=1, file=0)
    staging = types.SimpleNamespace(staged=None, arena=arena)
    return types.SimpleNamespace(options=options, url="/x", packed=b"", staging=staging)


def served(child: Child, operation: Operation) -> object:
    """Return what the trainer's thread ends with, within 10 seconds."""
    run = link._Run(cast("Any", child), operation, job())  # noqa: SLF001  # the unit
    ends: list[object] = []

    def serve() -> None:
        try:
            ends.append(run.serve())
        except link.GoneError as error:
            ends.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    thread.join(10)
    return ends[0] if ends else None


def test_a_worker_that_is_gone_is_noticed_though_others_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store that ranks share may not answer just then."""
    child, operation = Child(), Operation(RankGroup.alone(1, 2), "the save", Timeouts())
    operation.id = "1"

    def gather(part: bytes) -> list[bytes]:
        child.gone.set()
        assert child.told.wait(10)
        return [part]

    def tell(error: CheckpointError) -> None:
        child.told.set()
        raise LostStoreError("no answer in 3 s") from error

    monkeypatch.setattr(operation, "gather_bytes", gather)
    monkeypatch.setattr(operation, "_tell", tell)
    assert isinstance(served(child, operation), link.GoneError)


@pytest.mark.parametrize("committed", [None, "what was committed"])
def test_a_worker_that_dies_once_its_part_is_told_fails_only_a_consolidation(
    monkeypatch: pytest.MonkeyPatch, committed: object
) -> None:
    """Its rank's part is written, and the others commit without it; not so what comes after."""
    child = Child(committed)
    operation = Operation(RankGroup.alone(1, 2), "the save", Timeouts())
    operation.id = "1"
    operation.phase("write")
    told: list[CheckpointError] = []

    def gather(part: bytes) -> None:
        del part
        child.gone.set()
        child.told.wait(0.5)

    monkeypatch.setattr(operation, "gather_bytes", gather)
    monkeypatch.setattr(operation, "_tell", told.append)
    assert isinstance(served(child, operation), link.GoneError)
    assert len(told) == (committed is not None)


def test_a_worker_that_is_ended_for_an_error_here_is_no_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks are told why a step failed here, not that its worker was killed for it."""
    child, operation = Child(), Operation(RankGroup.alone(1, 2), "the save", Timeouts())
    operation.id = "1"
    told: list[CheckpointError] = []

    def gather(_part: bytes) -> list[bytes]:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(operation, "gather_bytes", gather)
    monkeypatch.setattr(operation, "_tell", told.append)
    with pytest.raises(RuntimeError, match="can't start"):
        link.Worker.run(cast("Any", child), operation, job())
    assert told == []


def test_a_beat_of_the_phase_before_counts_for_nothing() -> None:
    """One may be under way while this rank's trainer begins the next phase."""
    operation = Operation(RankGroup.alone(), "the save", Timeouts())
    run = link._Run(cast("Any", Child()), operation, job())  # noqa: SLF001  # the unit
    operation.phase("consolidate")
    with contextlib.ExitStack() as shown:
        phases: list[Phase] = ["commit", "consolidate"]
        for phase, done_bytes in zip(phases, (9, 2), strict=True):
            beat = RankProgress(rank=0, phase=phase, done_bytes=done_bytes)
            run._take_beat(beat, shown)  # noqa: SLF001  # as above
    assert operation.heartbeats.own().done_bytes == 2
