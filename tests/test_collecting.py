"""The collector rests while it is told to, and never longer."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.planner import ReadItem

from ckpt_storage import load, save
from ckpt_storage.collecting import collector_paused
from ckpt_storage.resolving import target_resolver


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_rests_during_the_block_alone() -> None:
    """Also where the block fails, and where one lies in another."""
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_one_that_rested_before_is_not_woken() -> None:
    """Trainers that collect at steps of their own choice keep their choice."""
    gc.disable()
    with collector_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_it_rests_until_the_last_thread_leaves() -> None:
    """Blocks of two threads that overlap are one."""
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert entered.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join(10)
    assert gc.isenabled()


def test_it_works_while_storage_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load pauses it to plan, not to read; and it works afterwards."""
    seen: dict[str, bool] = {}

    def planning(*args: object) -> Callable[[ReadItem], torch.Tensor]:
        seen["plan"] = gc.isenabled()
        return target_resolver(*args)  # type: ignore[arg-type]

    def reading(*_: object, **__: object) -> None:
        seen["read"] = gc.isenabled()

    monkeypatch.setattr("ckpt_storage.loads.target_resolver", planning)
    monkeypatch.setattr("ckpt_storage.reader.run_fetches", reading)
    save({"w": torch.ones(3)}, tmp_path / "run")
    load({"w": torch.zeros(3)}, tmp_path / "run")
    assert seen == {"plan": False, "read": True}
    assert gc.isenabled()
