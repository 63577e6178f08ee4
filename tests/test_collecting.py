"""The collector rests while it is told to, and never longer."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem

from ckpt_storage import (
    CheckpointStorageReader,
    CheckpointStorageWriter,
    committing,
    load,
    save,
)
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
    monkeypatch.setattr("ckpt_storage.loadreads.run_fetches", reading)
    save({"w": torch.ones(3)}, tmp_path / "run")
    load({"w": torch.zeros(3)}, tmp_path / "run")
    assert seen == {"plan": False, "read": True}
    assert gc.isenabled()


@pytest.mark.parametrize("step", ["assemble", "stock_metadata", "_check_readable"])
def test_it_rests_while_the_documents_of_a_save_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """And works while they are written, and while the files are looked for."""
    seen: dict[str, bool] = {}

    def noted(name: str) -> None:
        original = getattr(committing, name)

        def noting(*args: object) -> object:
            seen[name] = gc.isenabled()
            return original(*args)

        monkeypatch.setattr(committing, name, noting)

    for name in (step, "check_files", "side_by_side"):
        noted(name)
    save({"w": torch.ones(3)}, tmp_path / "run")
    assert seen == {step: False, "check_files": True, "side_by_side": True}
    assert gc.isenabled()


def small_state(count: int) -> dict[str, torch.Tensor]:
    """Return so many tensors of a few bytes."""
    return {f"w{number}": torch.ones(3) for number in range(count)}


def by_front_doors(state: dict[str, torch.Tensor], at: str) -> None:
    """Save and load by `save` and `load`."""
    save(state, at, overwrite=True)
    load(state, at)


def by_dcp(state: dict[str, torch.Tensor], at: str) -> None:
    """Save and load by torch's calls with our plug-ins."""
    dcp.save(state, storage_writer=CheckpointStorageWriter(at, overwrite=True), no_dist=True)
    dcp.load(state, storage_reader=CheckpointStorageReader(at), no_dist=True)


@pytest.mark.parametrize("saved_and_loaded", [by_front_doors, by_dcp])
def test_nothing_of_a_state_waits_for_the_collector(
    tmp_path: Path, saved_and_loaded: Callable[[dict[str, torch.Tensor], str], None]
) -> None:
    """What was saved and loaded ends with its last user, though the collector never runs."""
    gc.disable()
    state = small_state(3)
    refs = [weakref.ref(tensor) for tensor in state.values()]
    saved_and_loaded(state, str(tmp_path / "run"))
    saved_and_loaded(state, str(tmp_path / "run"))
    del state
    assert [ref() for ref in refs] == [None] * 3


@pytest.mark.parametrize("saved_and_loaded", [by_front_doors, by_dcp])
def test_what_is_left_to_the_collector_does_not_grow_with_a_state(
    tmp_path: Path, saved_and_loaded: Callable[[dict[str, torch.Tensor], str], None]
) -> None:
    """Plans and metadata of thousands of tensors are freed when a call ends, not some time later.

    Else they count as long-lived, and the collector soon looks through all that a process holds.
    """
    left = []
    for count in (10, 10, 200):
        state = small_state(count)
        saved_and_loaded(state, str(tmp_path / "run"))
        gc.collect()
        gc.disable()
        saved_and_loaded(state, str(tmp_path / "run"))
        left.append(gc.collect())
    assert left[2] - left[1] < 190


def test_a_load_of_many_tensors_hardly_wakes_it(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What lives as long as a load is made in a few bounded steps, which wait for nothing."""
    # Releases of Python differ in what they begin with.
    request.addfinalizer(partial(gc.set_threshold, *gc.get_threshold()))
    gc.set_threshold(700, 10, 10)
    state = small_state(3000)
    save(state, tmp_path / "run")
    load(state, tmp_path / "run")
    gc.collect()
    begun = []

    def noted(phase: str, _: object) -> None:
        if phase == "start":
            begun.append(phase)

    gc.callbacks.append(noted)
    try:
        load(state, tmp_path / "run")
    finally:
        gc.callbacks.remove(noted)
    assert len(begun) < 25
