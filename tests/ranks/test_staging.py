"""What is staged is the state at the call, in memory that is reused, given back and pinned."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dcp_cases import raw_bytes, same, seeded
from saver_cases import END_S, quick_saver
from torch import nn

from ckpt_storage import load
from ckpt_storage.background import arena as arenas_module
from ckpt_storage.background import staging
from ckpt_storage.background.arena import Arenas, Kind
from ckpt_storage.background.staging import StagingJob
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.format.dtypes import DTYPES

MIB = 1024 * 1024

KINDS = pytest.mark.parametrize("kind", ["private", "shared"])


class Named(torch.Tensor):
    """A subclass that owns its storage."""


class Counter:
    """An object that DCP asks for its state."""

    def __init__(self) -> None:
        self.weight = seeded(90, 4)

    def state_dict(self) -> dict[str, Any]:
        """Return a tensor that is the object's own."""
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; DCP asks that it exists."""


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    """Arenas of the kind that a worker reads, too."""
    with contextlib.closing(Arenas("shared")) as made:
        yield made


def copied(state: Any, arenas: Arenas) -> StagingJob:
    """Return what is staged of a state at once."""
    job = StagingJob(state, arenas)
    job.run()
    return job


def stage(state: Any, arenas: Arenas) -> StagingJob:
    """Return what is staged of a state at once; the next one is staged in its place."""
    job = copied(state, arenas)
    arenas.give_back(job.arena)
    return job


def contents(staged: StagingJob) -> dict[str, bytes]:
    """Return the bytes of each item, by name and offsets."""
    plan, local = staged.staged.kept.plan, staged.staged.part(staged.arena.memory, None)
    return {
        f"{item.fqn}{list(item.offsets) if any(item.offsets) else ''}": b"".join(item.views(7))
        for item in local.source.items(plan)
    }


def starts_of(staged: StagingJob) -> dict[str, int]:
    """Return where the bytes of each item begin."""
    return {index.fqn: row[0] for index, row in staged.staged.rows.items()}


def value(staged: StagingJob, name: str) -> Any:
    """Return a value that is no tensor."""
    return torch.load(io.BytesIO(contents(staged)[name]), weights_only=False)


def shapes_of(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of a kind in every way that they can lie in memory."""
    image = seeded(seed + 8, 2, 3, 4, 5, dtype=dtype)
    return {
        "plain": seeded(seed, 7, 5, dtype=dtype),
        "scalar": seeded(seed + 1, dtype=dtype),
        "one": seeded(seed + 2, 1, dtype=dtype),
        "empty": seeded(seed + 3, 0, 4, dtype=dtype),
        "transposed": seeded(seed + 4, 6, 3, dtype=dtype).t(),
        "column": seeded(seed + 5, 50, 40, dtype=dtype)[:, 3],
        "stepped": seeded(seed + 6, 50, dtype=dtype)[1::7],
        "expanded": seeded(seed + 7, 3, 1, dtype=dtype).expand(3, 40),
        "expanded column": seeded(seed + 10, 50, 40, dtype=dtype)[:2, 3:4].expand(2, 3),
        "windows": seeded(seed + 9, 12, dtype=dtype).as_strided((4, 6), (2, 1)),
        "permuted": image.permute(0, 2, 3, 1),
        "inner": image[1:, :, 1:3],
    }


def spoil(value: object) -> None:
    """Overwrite every tensor of a state, and empty its containers."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
            raw.copy_(255 - raw)
    elif isinstance(value, dict | list):
        for item in list(value.values() if isinstance(value, dict) else value):
            spoil(item)
        value.clear()
    elif isinstance(value, tuple):
        for item in value:
            spoil(item)
    elif isinstance(value, set):
        value.clear()
    elif isinstance(value, np.ndarray):
        value.fill(7)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_is_independent_of_the_original(arenas: Arenas, name: str) -> None:
    """Tensors of every kind and memory layout keep their values when the originals change."""
    state = shapes_of(1, getattr(torch, name))
    expected = {key: raw_bytes(tensor) for key, tensor in state.items()}
    staged = stage(state, arenas)
    for tensor in state.values():
        spoil(tensor)
    assert contents(staged) == expected


def test_the_second_stage_reuses_memory_and_plan_and_tells_new_values(arenas: Arenas) -> None:
    """Stage after stage gives the values of its moment, in the same arena, by one local plan."""
    state: dict[str, Any] = {"a": seeded(1, 300, 300).t(), "b": [seeded(50, 9), 1]}
    seen: list[tuple[object, object]] = []
    for step in range(3):
        state["a"].add_(1)
        state["b"][1] = step
        expected = raw_bytes(state["a"])
        staged = stage(state, arenas)
        state["a"].zero_()
        assert contents(staged)["a"] == expected
        assert value(staged, "b.1") == step
        seen.append((staged.arena, staged.staged.kept))
    assert all(arena is seen[0][0] and plan is seen[0][1] for arena, plan in seen)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda state: state.update(b=seeded(5, 4, 3).t()), id="strides"),
        pytest.param(lambda state: state.update(b=state["a"][1:]), id="new partial tie"),
        pytest.param(lambda state: state.update(b=nn.Parameter(state["b"])), id="parameter"),
        pytest.param(lambda state: state.update(c=state["c"].conj()), id="conjugated"),
    ],
)
def test_a_changed_structure_is_noticed(
    arenas: Arenas, change: Callable[[dict[str, Any]], object]
) -> None:
    """A tensor of another kind, size or place, or another tie, is staged as it is now."""
    state: dict[str, Any] = {
        "a": seeded(1, 3, 4),
        "b": seeded(2, 3, 4),
        "c": seeded(3, 4, dtype=torch.complex64),
    }
    stage(state, arenas)
    change(state)
    flat = {
        (f"{key}.{inner}" if inner else key): tensor
        for key, value in state.items()
        for inner, tensor in (value.items() if isinstance(value, dict) else [("", value)])
    }
    expected = {key: raw_bytes(tensor) for key, tensor in flat.items()}
    assert contents(stage(state, arenas)) == expected


def test_values_are_serialised_at_the_call(arenas: Arenas) -> None:
    """What is no tensor is saved as it was, Stateful objects and arrays included."""
    counter = Counter()
    state: dict[str, Any] = {"set": {1, 2}, "numpy": np.arange(5), "counter": counter}
    weight = raw_bytes(counter.weight)
    staged = stage(state, arenas)
    spoil(state["set"])
    spoil(state["numpy"])
    spoil(counter.weight)
    assert value(staged, "set") == {1, 2}
    assert np.array_equal(value(staged, "numpy"), np.arange(5))
    assert contents(staged)["counter.weight"] == weight


def test_the_same_elements_are_copied_once(arenas: Arenas) -> None:
    """Equal views of one memory take its bytes once, other views their own; ties are told."""
    base = seeded(1, 1000, 8)
    state = {
        "whole": base,
        "again": base,
        "parameter": nn.Parameter(base),
        "rows": base[3:9],
        "turned": base.t(),
        "subclass": base.as_subclass(Named),
    }
    expected = {key: raw_bytes(tensor.as_subclass(torch.Tensor)) for key, tensor in state.items()}
    staged = stage(state, arenas)
    assert contents(staged) == expected
    starts = starts_of(staged)
    assert len({starts[name] for name in ("whole", "again", "parameter", "subclass")}) == 1
    assert len(set(starts.values())) == 3
    assert staged.staged.ties["again"] == staged.staged.ties["parameter"] == "whole"


def test_a_list_is_refused(arenas: Arenas) -> None:
    """A state that is no mapping is an error."""
    with pytest.raises(InvalidInputError, match="is a list, not a dict"):
        stage([seeded(1, 3)], arenas)


def test_an_item_that_was_not_planned_is_refused_by_name(arenas: Arenas) -> None:
    """A planner whose `finish_plan` adds an item is told which."""
    staged = stage({"a": seeded(1, 3)}, arenas)
    other = stage({"b": seeded(1, 3)}, arenas).staged.kept.plan
    local = staged.staged.part(staged.arena.memory, None)
    with pytest.raises(InvalidInputError, match="b is not in the local plan"):
        list(local.source.items(other))


def test_a_worker_gets_states_of_many_structures(tmp_path: Path) -> None:
    """Arenas that grow and local plans that change reach it with each save."""
    with quick_saver("process") as saver:
        for step in range(5):
            kind = step % 3
            state = {f"w{kind}": seeded(step, 700_000 * (kind + 1)), "step": [step, {kind}]}
            saver.save(state, tmp_path / f"{step}", sync_files=False).result(END_S)
            target: dict[str, Any] = {f"w{kind}": torch.zeros(700_000 * (kind + 1)), "step": [0, 0]}
            load(target, tmp_path / f"{step}", unsafe_pickle=True)
            assert same(target, state)


class FakeRuntime:
    """What is called of the CUDA runtime; memory that is unlocked after it is unmapped faults."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802, ARG002
        """Note the call, and answer as told."""
        self.calls.append(("register", address))
        assert size_bytes > 0
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Read the memory, and note the call."""
        assert len(ctypes.string_at(address, 1)) == 1
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """A machine that seems to have CUDA."""
    runtime = FakeRuntime()
    monkeypatch.setattr(arenas_module, "cuda_runtime", lambda: runtime)
    return runtime


def test_memory_that_cannot_be_had_is_an_error() -> None:
    """A state larger than the address space is refused with the phase; others can be staged."""
    with contextlib.closing(Arenas()) as arenas:
        with pytest.raises(CheckpointError, match="host memory") as caught:
            arenas.take(1 << 60)
        assert caught.value.phase == "stage"
        assert arenas.take(1).size_bytes > 0


@KINDS
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
