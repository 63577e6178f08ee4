"""Every way in which torch drives the writer: sync, thread, process; ids; plan caching."""

# ruff: noqa: SLF001  # torch's caches and processes have no public handle

from __future__ import annotations

import functools
import inspect
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded, zeros_like
from torch.distributed.checkpoint import _async_process_executor as process_mode
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_storage import CheckpointStorageWriter
from ckpt_storage.testing.ranks import RankPool

Mode = Literal["sync", "thread", "process"]

TRACED = (
    "reset",
    "storage_meta",
    "set_up_storage_writer",
    "prepare_local_plan",
    "prepare_global_plan",
    "write_data",
    "finish",
)
STEP_COUNT = 5
CACHED_STEPS = {1, 3, 4}
"""The steps whose plan torch takes for unchanged: a change of dtype alone it does not see."""


class TracedWriter(CheckpointStorageWriter):
    """A writer that notes each call, with thread and process, in a file that outlives a process."""

    def __init__(self, path: str, trace: Path) -> None:
        super().__init__(path, overwrite=True, sync_files=False)
        self.trace = trace


def _traced(name: str) -> Callable[..., Any]:
    method = getattr(CheckpointStorageWriter, name)

    @functools.wraps(method)
    def call(self: TracedWriter, *args: Any, **kwargs: Any) -> Any:
        # DCP's own calls only, not the writer's to itself.
        if inspect.stack()[1].filename != inspect.getfile(CheckpointStorageWriter):
            word = name
            if name == "prepare_local_plan" and not args[0].usable:
                word = f"{name}(cached)"
            with self.trace.open("a", encoding="utf-8") as file:
                file.write(f"{word} {threading.current_thread().name} {os.getpid()}\n")
        return method(self, *args, **kwargs)

    return call


for _name in TRACED:
    setattr(TracedWriter, _name, _traced(_name))


def full_state(step: int) -> dict[str, Any]:
    """Return the whole state of one step, as every rank knows it."""
    dtype = torch.bfloat16 if step >= 3 else torch.float32
    state: dict[str, Any] = {
        "sharded": seeded(step, 10, 6, dtype=dtype),
        "replicated": seeded(100 + step, 7, dtype=dtype),
        "nested": {"step": step, "words": ["a", f"b{step}"]},
    }
    if step >= 2:
        state["more"] = seeded(200 + step, 3)
    return state


def local_state(step: int) -> dict[str, Any]:
    """Return what this rank holds of the state."""
    mesh = init_device_mesh("cpu", (2,))
    state = full_state(step)
    state["sharded"] = distribute_tensor(state["sharded"], mesh, [Shard(0)])
    return state


def save_once(
    mode: Mode,
    state: dict[str, Any],
    writer: CheckpointStorageWriter,
    planner: SavePlanner,
    checkpoint_id: str | None,
) -> None:
    """Save in one mode and wait until it is committed."""
    arguments: dict[str, Any] = {
        "storage_writer": writer,
        "planner": planner,
        "checkpoint_id": checkpoint_id,
    }
    if mode == "sync":
        dcp.save(state, **arguments)
        return
    kind = AsyncCheckpointerType.THREAD if mode == "thread" else AsyncCheckpointerType.PROCESS
    response = dcp.async_save(state, async_checkpointer_type=kind, **arguments)
    response.result(timeout=60)  # type: ignore[union-attr]  # no stager, so a plain future


def planner_for(case: str, *, caching: bool) -> SavePlanner:
    """Return a planner whose cache no other case shares."""
    planner = dcp.DefaultSavePlanner(enable_plan_caching=caching)
    planner._cached_plans_key = case
    return planner


def save_steps(
    rank: int, folder: Path, case: str, mode: Mode, *, with_id: bool, caching: bool
) -> None:
    """Save all steps with one writer; each is loaded back after it, and all at the end."""
    root = folder / case
    writer = TracedWriter(str(root), folder / f"{case}-{rank}.trace")
    for step in range(STEP_COUNT):
        # A planner is made for each save, as by a training loop; what it caches is global.
        planner = planner_for(case, caching=caching)
        save_once(mode, local_state(step), writer, planner, f"step-{step}" if with_id else None)
        if not with_id:
            assert_loads(root, step)
    if with_id:
        for step in range(STEP_COUNT):
            assert_loads(root / f"step-{step}", step)


def assert_loads(path: Path, step: int) -> None:
    """Load on all ranks and compare with what was saved."""
    saved = local_state(step)
    target = {key: zeros_like(value) for key, value in full_state(step).items()}
    mesh = init_device_mesh("cpu", (2,))
    target["sharded"] = distribute_tensor(target["sharded"], mesh, [Shard(0)])
    dcp_cases.load(target, path)
    target["sharded"] = target["sharded"].to_local()
    saved["sharded"] = saved["sharded"].to_local()
    assert same(target, saved), f"{path} is not what step {step} saved"


def end_process_mode() -> None:
    """End the process that torch keeps for process mode, which serves one world only."""
    daemon, process_mode._CHECKPOINT_PROCESS = process_mode._CHECKPOINT_PROCESS, None
    if daemon is not None:
        daemon._send(process_mode._CheckpointSaveProcessControlOpts.TERMINATE)
        daemon._save_process.join(20)


def save_steps_of_all(rank: int, folder: Path, cases: list[tuple[str, Mode, bool, bool]]) -> int:
    """Run several cases, then end the process that torch keeps for process mode.

    Returns the process id of the rank.
    """
    try:
        for case, mode, with_id, caching in cases:
            save_steps(rank, folder, case, mode, with_id=with_id, caching=caching)
    finally:
        end_process_mode()
    return os.getpid()


@pytest.mark.parametrize("mode", ["sync", "thread", "process"])
def test_every_save_of_one_writer_lands_where_it_belongs(
    ranks: RankPool, tmp_path: Path, mode: Mode
) -> None:
    """In each mode, with and without ids and plan caching, all states come back."""
    cases = [
        (f"{mode}-id{with_id:d}-caching{caching:d}", mode, with_id, caching)
        for with_id, caching in itertools.product([True, False], [True, False])
    ]
    pids = ranks.run(save_steps_of_all, tmp_path, cases, world_size=2, timeout_s=120)
    for case, _, with_id, caching in cases:
        last = STEP_COUNT - 1
        path = tmp_path / case / f"step-{last}" if with_id else tmp_path / case
        target = zeros_like(full_state(last))
        dcp_cases.load_stock(target, path)
        assert same(target, full_state(last))
        for rank, pid in enumerate(pids):
            lines = (tmp_path / f"{case}-{rank}.trace").read_text(encoding="utf-8").splitlines()
            calls, threads, processes = zip(*(line.split() for line in lines), strict=True)
            expected = calls_of(coordinator=rank == 0, with_id=with_id, caching=caching)
            assert list(calls) == [call for step in expected for call in step]
            assert set(threads) == {
                "AsyncCheckpointExecutor_0" if mode == "thread" else "MainThread"
            }
            assert (set(processes) == {str(pid)}) is (mode != "process")


def calls_of(*, coordinator: bool, with_id: bool, caching: bool) -> list[list[str]]:
    """Return the calls that torch 2.13 makes on one rank, for each step."""
    return [
        [
            *(["reset"] if with_id else []),
            "storage_meta",
            "set_up_storage_writer",
            "prepare_local_plan" + ("(cached)" if caching and step in CACHED_STEPS else ""),
            *(["prepare_global_plan"] if coordinator else []),
            "write_data",
            *(["finish"] if coordinator else []),
        ]
        for step in range(STEP_COUNT)
    ]
