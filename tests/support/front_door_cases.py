"""What ranks do in tests of `save` and `load`: states, planners that fail, storages that fail.

Functions here run in the processes of a `RankPool`, so they are importable and take plain values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_storage
from ckpt_storage.testing.faults import Rule
from ckpt_storage.testing.posix_faults import FaultPosix

SHAPE = (37, 11)


class Counter(torch.nn.Module):
    """A `Stateful` that knows how often it was asked and told."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.asked = 0
        self.told = 0

    def state_dict(  # type: ignore[override]  # the protocol asks no more
        self, *_args: Any, **_more: Any
    ) -> dict[str, Any]:
        self.asked += 1
        return {"count": torch.tensor(self.count)}

    def load_state_dict(self, state_dict: Any, *_args: Any, **_more: Any) -> Any:
        self.told += 1
        self.count = int(state_dict["count"])


def whole() -> torch.Tensor:
    """Return the tensor that is saved in shards."""
    return seeded(5, *SHAPE)


def state_of(step: int, *, zeros: bool = False) -> dict[str, Any]:
    """Return a state of every kind of value, or a target of the same form."""
    tensor = torch.zeros(SHAPE) if zeros else whole()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        tensor = distribute_tensor(tensor, mesh, [Shard(0)])
    return {
        "model": {"sharded": tensor, "same": torch.zeros(9) if zeros else seeded(step, 9)},
        "counter": Counter(0 if zeros else step),
        "step": 0 if zeros else step,
        "blob": {"name": None, "set": None} if zeros else {"name": f"step {step}", "set": {1, 2.5}},
    }


def assert_state(state: dict[str, Any], step: int) -> None:
    """Assert that a loaded target has the values of `step`."""
    tensor = state["model"]["sharded"]
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    assert same(full, whole())
    assert same(state["model"]["same"], seeded(step, 9))
    assert (state["counter"].count, state["step"]) == (step, step)
    assert state["blob"] == {"name": f"step {step}", "set": {1, 2.5}}


def save(_rank: int, path: str | Path, step: int, **options: Any) -> str | None:
    """Save and return the save id."""
    options = {"sync_files": False} | options
    return ckpt_storage.save(state_of(step), path, **options).save_id


def assert_loads(
    path: Path | str, step: int, load: Callable[..., object] = ckpt_storage.load, **options: Any
) -> None:
    """Load, and assert that it is the state of that step."""
    target = state_of(step, zeros=True)
    load(target, path, **options)
    assert_state(target, step)
    if load is ckpt_storage.load:
        assert (target["counter"].asked, target["counter"].told) == (1, 1)


def load_both_ways(_rank: int, path: Path, step: int) -> None:
    """Load with `load` and with stock `dcp.load`, and compare both with the original."""
    assert_loads(path, step)
    assert_loads(path, step, lambda state, at: dcp.load(state, checkpoint_id=at))


class Locked(Exception):  # noqa: N818  # a failure of a user's
    """An exception that does not pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def fail(kind: str) -> Any:
    """Raise an exception of a kind."""
    if kind == "CheckpointException":
        raise CheckpointException("boom", {0: (ValueError("boom"), None)})  # type: ignore[dict-item]
    raise {"ValueError": ValueError, "OSError": OSError, "unpicklable": Locked}[kind]("boom")


class FailingState(Counter):
    """A `Stateful` that fails."""

    def __init__(self, kind: str) -> None:
        super().__init__(1)
        self.kind = kind

    def state_dict(self, *_args: Any, **_more: Any) -> dict[str, Any]:  # type: ignore[override]  # the protocol asks no more
        found: dict[str, Any] = fail(self.kind)
        return found


def caught(
    function: Callable[..., Any], *args: Any, **options: Any
) -> ckpt_storage.CheckpointError:
    """Return what a call raised, caught as users do."""
    seen: Exception | None = None
    try:
        function(*args, **options)
    except Exception as error:  # noqa: BLE001  # that this catches all is what is tested
        seen = error
    assert isinstance(seen, ckpt_storage.CheckpointError), repr(seen)
    return seen


Told = tuple[str, str, int]


def told_of(function: Callable[..., Any], *args: Any, **options: Any) -> Told:
    """Return kind, text and rank of what a call raised; -1 for no rank."""
    error = caught(function, *args, **options)
    return type(error).__name__, str(error), -1 if error.rank is None else error.rank


def fail_often(
    rank: int, path: str, failures: list[tuple[int, str, str]], function: str
) -> list[Told]:
    """Save or load with each failure (rank, place, kind), then well; return what one is told."""
    told = []
    for who, where, kind in failures:
        state = state_of(1, zeros=function == "load")
        planner: Any = dcp.DefaultSavePlanner() if function == "save" else dcp.DefaultLoadPlanner()
        if rank == who and where == "state_dict":
            state["counter"] = FailingState(kind)
        elif rank == who:
            setattr(planner, where, lambda *_, kind=kind, **__: fail(kind))
        more = {"sync_files": False} if function == "save" else {}
        call = getattr(ckpt_storage, function)
        told.append(told_of(call, state, path, planner=planner, timeout=20.0, **more))
    if function == "save":
        save(rank, path + "-next", 1)
    else:
        state = state_of(1, zeros=True)
        ckpt_storage.load(state, path)
        assert_state(state, 1)
    return told


@contextmanager
def faulty_disk(rules: Sequence[Rule]) -> Iterator[list[FaultPosix]]:
    """Let all local stores that are made inside play `rules`; give their system calls."""
    made: list[FaultPosix] = []

    def make() -> FaultPosix:
        made.append(FaultPosix(rules))
        return made[-1]

    with patch("ckpt_storage.store.backends.local.Posix", make):
        yield made


@contextmanager
def default_group(
    rank: int, world_size: int, folder: str, *, timeout_s: float = 30.0, kind: str = "file"
) -> Iterator[None]:
    """Replace the pool's default group by one of our own inside; ranks beyond it have none."""
    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        if rank < world_size:
            _init(rank, world_size, Path(folder), timeout_s, kind)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # What runs a job destroys the default group at the end.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _init(rank: int, world_size: int, folder: Path, timeout_s: float, kind: str) -> None:
    wait = timedelta(seconds=30)
    store: dist.Store
    # A short timeout is for what is tested, not for ranks that begin a moment apart.
    meeting = dist.FileStore(str(folder / "meeting"), world_size)
    if kind == "file":
        store = dist.FileStore(str(folder / "rendezvous"), world_size)
    elif rank == 0:
        server = store = dist.TCPStore(
            "127.0.0.1", 0, world_size, is_master=True, timeout=wait, wait_for_workers=False
        )
        meeting.set("port", str(server.port))
    else:
        port = int(meeting.get("port"))
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=wait)
    meeting.set(f"here {rank}", "")
    meeting.wait([f"here {other}" for other in range(world_size)], wait)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
