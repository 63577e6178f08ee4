"""What is staged is the state at the call, in memory that is reused, given back and pinned."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from dcp_cases import assert_holds, planner, raw_bytes, seeded
from fake_cuda import DEVICE, FakeCuda, on_device
from limits import HANG_S
from reentry import interrupt_each_line
from saver_cases import Hold, hold_here, quick_saver, save_spoilt
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from ckpt_storage import load
from ckpt_storage.background import staging
from ckpt_storage.background.arenas import Arena, Arenas, Kind
from ckpt_storage.background.staging import StagingJob
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.saves import devices

MIB = 1024 * 1024


class Owner:
    """An object that DCP asks for its state: a tensor that is the object's own."""

    def __init__(self, seed: int) -> None:
        self.weight = seeded(seed, 4)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


class Named(torch.Tensor):
    """A subclass that owns its storage."""


def copied(state: Any, arenas: Arenas) -> StagingJob:
    job = StagingJob(state, arenas)
    job.run()
    return job


def starts_of(staged: StagingJob) -> dict[str, int]:
    return {index.fqn: place.start for index, place in staged.staged.places.items()}


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda _: None,
    "strides": lambda state: state.update(b=seeded(5, 4, 3).t()),
    "new partial tie": lambda state: state.update(b=state["a"][1:]),
    "parameter": lambda state: state.update(b=nn.Parameter(state["b"])),
    "conjugated": lambda state: state.update(c=state["c"].conj()),
}


def test_each_save_stages_its_own_values_and_structure(tmp_path: Path) -> None:
    """A tensor of another kind, size or place, or another tie, is staged as it is now."""
    with quick_saver("thread") as saver:
        for (name, change), seed in itertools.product(CHANGES.items(), (1, 11)):
            state: dict[str, Any] = {
                "a": seeded(seed, 3, 4),
                "b": seeded(seed + 1, 3, 4),
                "c": seeded(seed + 2, 4, dtype=torch.complex64),
            }
            if seed > 1:
                change(state)
            expected = {key: tensor.detach().clone() for key, tensor in state.items()}
            save_spoilt(state, tmp_path / f"{name} {seed}", saver)
            assert_holds(tmp_path / f"{name} {seed}", expected)


def test_values_are_serialised_at_the_call(tmp_path: Path) -> None:
    """What is no tensor is saved as it was, Stateful objects and arrays included."""
    owner = Owner(90)
    state: dict[str, Any] = {"set": {1, 2}, "numpy": np.arange(5), "owner": owner}
    with quick_saver("thread") as saver:
        hold_here(hold := Hold(tmp_path, "write", 0))
        saver.save(state, tmp_path / "run", sync_files=False)
        state["set"].clear()
        state["numpy"].fill(7)
        owner.weight.zero_()
        hold.go()
    target: dict[str, Any] = {"set": None, "numpy": None, "owner": Owner(0)}
    load(target, tmp_path / "run", unsafe_pickle=True)
    assert (target["set"], target["numpy"].tolist()) == ({1, 2}, [*range(5)])
    assert torch.equal(target["owner"].weight, seeded(90, 4))


def test_the_same_elements_are_copied_once() -> None:
    """Equal views of one memory take its bytes once; arena and plan are reused."""
    base = seeded(1, 1000, 8)
    state = {
        "whole": base,
        "again": base,
        "parameter": nn.Parameter(base),
        "rows": base[3:9],
        "turned": base.t(),
        "subclass": base.as_subclass(Named),
    }
    with contextlib.closing(Arenas("shared")) as arenas:
        staged = copied(state, arenas)
        arenas.release(staged.arena)
        del state["subclass"]  # a plan with one is not kept
        first, again = copied(state, arenas), copied(state, arenas)
        assert first.arena is staged.arena
        assert again.staged.cached is first.staged.cached
    starts = starts_of(staged)
    assert len({starts[name] for name in ("whole", "again", "parameter", "subclass")}) == 1
    assert len(set(starts.values())) == 3


def test_a_list_and_an_item_that_was_not_planned_are_refused(tmp_path: Path) -> None:
    """A state that is no mapping is an error; a planner that adds an item is told which."""

    def add(finish: Callable[[SavePlan], SavePlan], plan: SavePlan) -> SavePlan:
        plan = finish(plan)
        added = replace(plan.items[0], index=MetadataIndex("b", [0]))
        return replace(plan, items=[*plan.items, added])

    with quick_saver("thread", on_error="warn") as saver:
        with pytest.raises(InvalidInputError, match="is a list, not a dict"):
            saver.save([seeded(1, 3)], tmp_path / "list")  # type: ignore[arg-type]  # that is the point
        handle = saver.save({"a": seeded(1, 3)}, tmp_path / "run", planner=planner(finish_plan=add))
        error = handle.exception(HANG_S)
        assert isinstance(error, InvalidInputError)
        assert "b is not in the local plan" in str(error)


def test_a_worker_gets_states_of_many_structures(tmp_path: Path) -> None:
    """Arenas that grow and local plans that change reach it with each save."""
    with quick_saver("process") as saver:
        for step in range(5):
            kind = step % 3
            state = {f"w{kind}": seeded(step, 700_000 * (kind + 1)), "step": [step, {kind}]}
            saver.save(state, tmp_path / f"{step}", sync_files=False).result(HANG_S)
            assert_holds(tmp_path / f"{step}", state, [load], unsafe_pickle=True)


@pytest.mark.parametrize("name", ["acquire and release", "close"])
def test_arenas_may_be_used_in_the_middle_of_a_call(name: str) -> None:
    """A finalizer or a signal handler that uses or closes them there neither hangs nor leaks."""
    arenas = Arenas("shared")
    made: list[Arena] = []

    def use() -> None:
        made.append(arena := arenas.acquire(1))
        arenas.release(arena)

    interrupt_each_line(use, use if name.startswith("acquire") else arenas.close)
    arenas.close()
    assert {arena.file for arena in made} == {None}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A machine that seems to have CUDA."""
    monkeypatch.setattr(devices, "_warned", set())
    yield FakeCuda(monkeypatch)
    # Arenas that errors keep are unlocked while it still seems so.
    gc.collect()


def test_memory_that_cannot_be_had_is_an_error() -> None:
    """A state larger than the address space is refused with the phase; others can be staged."""
    with contextlib.closing(Arenas()) as arenas:
        with pytest.raises(CheckpointError, match="host memory") as caught:
            arenas.acquire(1 << 60)
        assert caught.value.phase == "stage"
        assert arenas.acquire(1).size_bytes > 0


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_pages_are_locked_once_and_unlocked_before_they_go(kind: Kind, cuda: FakeCuda) -> None:
    """An arena is registered at the first need, and unregistered when its last view dies."""
    with contextlib.closing(Arenas(kind)) as arenas:
        arena = arenas.acquire(MIB)
        assert cuda.calls == []
        arena.pin(DEVICE)
        arena.pin(DEVICE)
        assert cuda.calls == ["cudaHostRegister"]
        view = torch.from_numpy(arena.memory[64:128])
        arenas.release(arena)
        del arena
        assert arenas.acquire(5 * MIB).size_bytes > 5 * MIB
        assert cuda.calls == ["cudaHostRegister"]
        del view
        gc.collect()
        assert cuda.calls == ["cudaHostRegister", "cudaHostUnregister"]


def gpu_state() -> dict[str, Any]:
    return {str(seed): on_device(seeded(seed, 500)) for seed in range(5)}


def assert_staged(job: StagingJob, state: dict[str, Any]) -> None:
    for name, start in starts_of(job).items():
        staged = bytes(job.arena.memory[start : start + state[name].nbytes])
        assert staged == raw_bytes(state[name].as_subclass(torch.Tensor))


def test_copies_from_a_gpu_are_enqueued_and_awaited_once(cuda: FakeCuda) -> None:
    """The memory is locked once, no copy blocks, and the stream is awaited at the end.

    Every call is made while the tensors' device is current.
    """
    state = gpu_state()
    with contextlib.closing(Arenas("shared")) as arenas:
        for pins in (["cudaHostRegister"], []):
            job = copied(state, arenas)
            assert_staged(job, state)
            arenas.release(job.arena)
            fork = ["Stream", "current_stream", "wait_stream"]
            assert cuda.calls == [*fork, *pins, "stream", "copy", "synchronize"]
            cuda.calls.clear()


def test_warm_up_locks_the_memory_of_all_saves(cuda: FakeCuda, tmp_path: Path) -> None:
    """No later save registers memory."""
    state = gpu_state()
    with quick_saver("thread", max_pending=2) as saver:
        saver.warm_up(state)
        assert cuda.calls.count("cudaHostRegister") == 2
        assert "copy" not in cuda.calls
        saver.save(state, tmp_path / "run", sync_files=False).result(HANG_S)
        assert cuda.calls.count("cudaHostRegister") == 2


def test_a_copy_in_a_thread_makes_no_context_on_device_0(cuda: FakeCuda) -> None:
    """The thread that copies makes every call while the tensors' device is current."""
    state = gpu_state()
    with contextlib.closing(Arenas()) as arenas:
        job = StagingJob(state, arenas)
        job.start()
        job.wait(HANG_S)
        assert_staged(job, state)
    assert "copy" in cuda.calls


def test_memory_that_cannot_be_locked_is_used_as_it_is(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed registration is warned of once, and no later kernel raises its error."""
    cuda.failing.add("cudaHostRegister")
    state = gpu_state()
    with contextlib.closing(Arenas()) as arenas:
        jobs = [copied(state, arenas) for _ in range(2)]
        for job in jobs:
            assert_staged(job, state)
    assert cuda.last_error == 0
    assert caplog.text.count("page-locked") == 1


@pytest.mark.parametrize("failure", ["copy", "synchronize"])
def test_an_arena_is_reused_only_after_a_failed_copy_has_ended(
    cuda: FakeCuda, failure: str
) -> None:
    """The streams are awaited before the memory is given back."""
    cuda.failing.add(failure)
    with contextlib.closing(Arenas()) as arenas:
        job = StagingJob(gpu_state(), arenas)
        with pytest.raises(CheckpointError, match="could not be copied"):
            job.run()
        assert cuda.calls[-1] == "query"
        arenas.release(job.arena)
        assert arenas.acquire(1) is job.arena


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_arena_that_a_device_may_still_write_to_is_not_reused(
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_lost: bool,
) -> None:
    """If the streams do not end, or their device is lost, the memory stays mapped and unused."""
    retired: list[object] = []
    monkeypatch.setattr(staging, "_SYNCHRONIZE_S", 0.05)
    monkeypatch.setattr("ckpt_storage.background.arenas._RETIRED", retired)
    cuda.failing |= {"synchronize"} | ({"query"} if is_lost else set())
    cuda.is_idle = False
    with contextlib.closing(Arenas()) as arenas:
        job = StagingJob(gpu_state(), arenas)
        with pytest.raises(CheckpointError, match="synchronize fails"):
            job.run()
        arenas.release(job.arena)
        assert arenas.acquire(1) is not job.arena
    assert "stay mapped" in caplog.text
    assert retired.pop() is job.arena.memory


def test_a_copy_that_is_interrupted_is_never_taken_for_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exit in the thread that copies fails the save."""

    def exits(*_: object) -> NoReturn:
        raise SystemExit

    monkeypatch.setattr(torch, "_foreach_copy_", exits)
    with quick_saver("thread", on_error="warn") as saver:
        handle = saver.save({"a": seeded(1, 50_000)}, tmp_path / "run", block_until_staged=False)
        assert "SystemExit" in str(handle.exception(HANG_S))
