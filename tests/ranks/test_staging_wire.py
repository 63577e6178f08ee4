"""A staged state reaches a worker process by reference, whole, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_cases import raw_bytes, same, seeded
from descriptors import open_files
from named_memory import left_of, named_memory
from test_staging_memory import linux
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckpt_storage.background.hostbuffers import HostBuffers
from ckpt_storage.background.stagewire import StateReceiver, StateSender, pack
from ckpt_storage.background.staging import stage
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.testing.ranks import RankPool

ANSWER_S = 60.0


class Counting(Connection):
    """A connection that counts what is written to it."""

    sent_bytes = 0

    def _send(self, buf: Any, *args: Any) -> None:
        self.sent_bytes += len(buf)
        super()._send(buf, *args)  # type: ignore[misc]  # not in typeshed


class Worker:
    """A spawned process that calls a function on each state that it receives."""

    def __init__(self, process: SpawnProcess, connection: Counting) -> None:
        self.process = process
        self.connection = connection
        self.sender = StateSender(connection)

    def send(self, state: dict[str, Any], buffers: HostBuffers) -> Any:
        """Stage and send a state, and return what the worker makes of it."""
        with buffers.lease() as lease:
            self.sender.send(pack(stage(state, lease)))
            return self.answer()

    def answer(self) -> Any:
        """Return what the worker says, within a limit."""
        assert self.connection.poll(ANSWER_S), "the worker does not answer"
        return self.connection.recv()


@contextmanager
def working(function: Callable[..., Any], *args: object) -> Iterator[Worker]:
    """Run a worker, and end it for sure."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    connection = Counting(os.dup(ours.fileno()))
    ours.close()
    process = context.Process(target=worker_main, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        yield Worker(process, connection)
    finally:
        connection.close()
        process.join(ANSWER_S)
        process.kill()
        process.join()
        process.close()


def worker_main(connection: Any, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    """Answer each state with what the function says of it, until the trainer is gone."""
    torch.set_num_threads(1)
    receiver = StateReceiver(connection)
    while True:
        try:
            state = receiver.receive()
        except EOFError:
            return
        try:
            answer = function(state, receiver, *args)
        except Exception as error:  # noqa: BLE001  # told to the test
            answer = repr(error)
        connection.send(answer)
        del state


def contents(state: dict[str, Any], _: StateReceiver) -> Any:
    """Return a state with every tensor as its kind and bytes."""
    return described(state)


def described(value: Any) -> Any:
    """Return a picklable picture of a state that has no tensors in it."""
    if isinstance(value, torch.Tensor):
        return (
            type(value).__name__,
            str(value.dtype),
            tuple(value.shape),
            value.stride(),
            value.requires_grad,
            raw_bytes(value),
        )
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, list):
        return [described(item) for item in value]
    return value


def test_a_worker_sees_every_kind_of_value() -> None:
    """Tensors, Parameters, containers and objects arrive in a spawned process as they were."""
    state: dict[str, Any] = {
        "model": {
            "w": seeded(1, 30, 20),
            "turned": seeded(2, 5, 4).t(),
            "column": seeded(3, 50, 9)[:, 2],
            "expanded": seeded(4, 3, 1).expand(3, 8),
            "p": nn.Parameter(seeded(5, 4)),
            "half": seeded(6, 9, dtype=torch.bfloat16),
            "float8": seeded(7, 9, dtype=torch.float8_e4m3fn),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3.5),
        },
        "list": [1, seeded(8, 3), "x"],
        "set": {1, 2},
        "generator": torch.Generator().manual_seed(1).get_state(),
    }
    expected = described(state)
    # What is packed is what a column is packed to.
    expected["model"]["column"] = described(state["model"]["column"].contiguous())
    with HostBuffers("shared") as buffers, working(contents) as worker:
        for _ in range(2):
            assert worker.send(state, buffers) == expected


@linux
def test_a_killed_worker_is_replaced_and_leaves_nothing() -> None:
    """After SIGKILL a new worker gets the same arena; no name of memory is left."""
    before = named_memory(os.getpid())
    state = {"x": seeded(1, 1000)}
    with HostBuffers("shared") as buffers:
        files = open_files()
        with working(contents) as worker:
            assert worker.send(state, buffers) == described(state)
            pid = worker.process.pid
            assert pid is not None
            names = named_memory(pid) | named_memory(os.getpid())
            os.kill(pid, signal.SIGKILL)
            worker.process.join(ANSWER_S)
            with buffers.lease() as lease:
                packed = pack(stage(state, lease))
                with pytest.raises(OSError, match=r"Broken pipe|reset"):
                    worker.sender.send(packed)
        assert len(open_files() - files) <= 2
        with working(contents) as worker:
            assert worker.send(state, buffers) == described(state)
    assert left_of(names - before) == set()


def test_what_does_not_pickle_is_named_before_it_is_sent() -> None:
    """A container whose type cannot be imported is found by pack, in the trainer, with its FQN."""
    hidden = namedtuple("hidden", ["left"])  # noqa: PYI024  # a type that no module has
    with HostBuffers("shared") as buffers, buffers.lease() as lease:
        staged = stage({"a": [1, {"b": hidden(left=seeded(1, 3))}]}, lease)
        with pytest.raises(InvalidInputError, match=r"a\.1\.b cannot be sent") as caught:
            pack(staged)
    assert caught.value.phase == "stage"


def test_an_object_that_fails_in_the_worker_leaves_the_pipe_in_order() -> None:
    """After a state that cannot be unpickled the next one is received."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, HostBuffers("shared") as buffers, buffers.lease() as lease:
        sender, receiver = StateSender(ours), StateReceiver(theirs)
        sender.send(pack(stage({"x": Fragile()}, lease)))
        with pytest.raises(RuntimeError, match="not here"):
            receiver.receive()
        sender.send(pack(stage({"x": seeded(1, 3)}, lease)))
        assert same(receiver.receive(), {"x": seeded(1, 3)})


def shatter() -> None:
    """Fail, as an import that the worker lacks does."""
    raise RuntimeError("not here")


class Fragile:
    """An object that pickles and does not unpickle."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return (shatter, ())


def planned(state: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return what DCP's own planner makes of a state: names, boxes and bytes."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, is_coordinator=True)
    plan = planner.create_local_plan()
    return [
        (
            item.index.fqn,
            tuple(item.index.offset or ()),
            item.type.name,
            raw_bytes(planner.resolve_data(item)) if item.tensor_data else None,  # type: ignore[arg-type]
        )
        for item in plan.items
    ]


def plan_in_worker(
    state: dict[str, Any], receiver: StateReceiver, rank: int, store: str
) -> tuple[bool, list[Any]]:
    """Return the plan of a state, and whether there was a group; make one for the next."""
    had_group = dist.is_initialized()
    answer = planned(state)
    if not had_group:
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    del receiver
    return had_group, answer


def mesh_rank(rank: int, store: str) -> None:
    """Send DTensors to a worker without a group, then with one, and compare the plans."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    state: dict[str, Any] = {
        "model": {
            "w": nn.Parameter(distribute_tensor(seeded(1, 5, 4), mesh, [Shard(0)])),
            "b": distribute_tensor(seeded(2, 3), mesh, [Replicate()]),
            "g": distribute_tensor(seeded(3, 4, 4), grid, [Replicate(), Shard(0)]),
            "sub": distribute_tensor(seeded(4, 4), grid["shard"], [Shard(0)]),
        },
        "step": 3,
    }
    legacy = ShardedTensor._init_from_local_shards(  # noqa: SLF001  # torch has no other
        [LocalShard.from_tensor_and_offsets(seeded(10 + rank, 2, 3), [2 * rank, 0], rank)], (4, 3)
    )
    with HostBuffers("shared") as buffers, working(plan_in_worker, rank, store) as worker:
        expected = planned(state)
        assert worker.send(state, buffers) == (False, expected)
        assert worker.send(state, buffers) == (True, expected)
        # Only torch's legacy ShardedTensor asks for a group when it is unpickled.
        state["legacy"] = legacy
        assert worker.send(state, buffers) == (True, planned(state))


def test_distributed_tensors_are_planned_alike_in_the_worker(
    ranks: RankPool, tmp_path: Path
) -> None:
    """DCP's planner makes the same plan in a worker without a group, and with its own group."""
    ranks.run(mesh_rank, str(tmp_path / "store"), world_size=2)
