"""What is staged is the state at the call, in memory that is reused, given back and pinned."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dcp_cases import assert_holds, planner, raw_bytes, seeded
from reentry import interrupt_each_line
from saver_cases import END_S, Hold, hold_here, quick_saver, save_spoilt
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from ckpt_storage import load
from ckpt_storage.background import staging
from ckpt_storage.background.staging import Arena, Arenas, Kind, StagingJob
from ckpt_storage.errors import CheckpointError, InvalidInputError

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
    return {index.fqn: row[0] for index, row in staged.staged.rows.items()}


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
        arenas.give_back(staged.arena)
        del state["subclass"]  # a plan with one is not kept
        first, again = copied(state, arenas), copied(state, arenas)
        assert first.arena is staged.arena
        assert again.staged.kept is first.staged.kept
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
        error = handle.exception(END_S)
        assert isinstance(error, InvalidInputError)
        assert "b is not in the local plan" in str(error)


def test_a_worker_gets_states_of_many_structures(tmp_path: Path) -> None:
    """Arenas that grow and local plans that change reach it with each save."""
    with quick_saver("process") as saver:
        for step in range(5):
            kind = step % 3
            state = {f"w{kind}": seeded(step, 700_000 * (kind + 1)), "step": [step, {kind}]}
            saver.save(state, tmp_path / f"{step}", sync_files=False).result(END_S)
            assert_holds(tmp_path / f"{step}", state, [load], unsafe_pickle=True)


@pytest.mark.parametrize("name", ["take and give back", "close"])
def test_arenas_may_be_used_in_the_middle_of_a_call(name: str) -> None:
    """A finalizer or a signal handler that uses or closes them there neither hangs nor leaks."""
    arenas = Arenas("shared")
    made: list[Arena] = []

    def use() -> None:
        made.append(arena := arenas.take(1))
        arenas.give_back(arena)

    interrupt_each_line(use, use if name.startswith("take") else arenas.close)
    arenas.close()
    assert {arena.file for arena in made} == {None}


class FakeRuntime:
    """What is called of the CUDA runtime; memory that is unlocked after it is unmapped faults."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size_bytes: int, _flags: int) -> int:  # noqa: N802
        self.calls.append(("register", address))
        assert size_bytes > 0
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert len(ctypes.string_at(address, 1)) == 1
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """A machine that seems to have CUDA."""
    runtime = FakeRuntime()
    monkeypatch.setattr(staging, "cuda_runtime", lambda: runtime)
    return runtime


def test_memory_that_cannot_be_had_is_an_error() -> None:
    """A state larger than the address space is refused with the phase; others can be staged."""
    with contextlib.closing(Arenas()) as arenas:
        with pytest.raises(CheckpointError, match="host memory") as caught:
            arenas.take(1 << 60)
        assert caught.value.phase == "stage"
        assert arenas.take(1).size_bytes > 0


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_pages_are_locked_once_and_unlocked_before_they_go(kind: Kind, cuda: FakeRuntime) -> None:
    """An arena is registered at the first need, and unregistered when its last view dies."""
    with contextlib.closing(Arenas(kind)) as arenas:
        arena = arenas.take(MIB)
        assert cuda.calls == []
        arena.pin()
        arena.pin()
        address = arena.memory.ctypes.data
        assert cuda.calls == [("register", address)]
        view = torch.from_numpy(arena.memory[64:128])
        arenas.give_back(arena)
        del arena
        assert arenas.take(5 * MIB).size_bytes > 5 * MIB
        assert cuda.calls == [("register", address)]
        del view
        gc.collect()
        assert cuda.calls == [("register", address), ("unregister", address)]


def test_copies_from_a_gpu_are_enqueued_and_awaited_once(
    cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stream the memory is locked, no copy blocks, and the stream is awaited at the end."""
    events: list[object] = []
    copy_many = torch._foreach_copy_  # a documented name of torch's

    class Stream:
        def synchronize(self) -> None:
            events.append("synchronize")

    def noted(targets: object, sources: object, non_blocking: object) -> None:
        events.append(non_blocking)
        copy_many(targets, sources, non_blocking)  # type: ignore[arg-type]

    monkeypatch.setattr(staging, "_fork_streams", lambda _: {torch.device("cpu"): Stream()})
    monkeypatch.setattr(staging, "_SMALL_BYTES", 0)
    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    state = {str(seed): seeded(seed, 500) for seed in range(5)}
    with contextlib.closing(Arenas("shared")) as arenas:
        for _ in range(2):
            staged = copied(state, arenas)
            for name, start in starts_of(staged).items():
                found = bytes(staged.arena.memory[start : start + state[name].nbytes])
                assert found == raw_bytes(state[name])
            arenas.give_back(staged.arena)
            assert events == [True, "synchronize"]
            events.clear()
        assert [name for name, _ in cuda.calls] == ["register"]
