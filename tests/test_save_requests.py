"""What a save asks of an object storage: how many requests, how many at a time, how much memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from remote_tools import options_of

from ckpt_storage import CheckpointStorageWriter, RetryPolicy, sending, verify
from ckpt_storage.deadline import Deadline
from ckpt_storage.filewriter import ShardFileWriter
from ckpt_storage.options import Engine, TransferOptions
from ckpt_storage.pacing import BUDGET, Pacer
from ckpt_storage.store import open_store
from ckpt_storage.testing.s3server import FaultRule, S3Server

MIB = 1 << 20
PART_BYTES = 5 * MIB
ENGINES: tuple[Engine, ...] = ("fsspec", "obstore")
EACH_ENGINE = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server with a bucket."""
    with S3Server() as running:
        running.create_bucket("bkt")
        yield running


def save(
    server: S3Server, state: dict[str, Any], engine: Engine, name: str = "run", **options: Any
) -> Counter[str]:
    """Save in this process alone; return how often each operation was asked for."""
    server.reset_counters()
    writer = CheckpointStorageWriter(
        f"s3://bkt/{name}",
        storage_options=options_of(server),
        engine=engine,
        retry=RetryPolicy(first_delay_s=0.0, max_delay_s=0.01),
        part_bytes=PART_BYTES,
        **options,
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    return Counter(request.op for request in server.requests)


def is_sound(server: S3Server, name: str = "run") -> bool:
    """Return whether every byte of a checkpoint is as it was saved."""
    return verify(f"s3://bkt/{name}", storage_options=options_of(server)).ok


@EACH_ENGINE
def test_a_save_costs_its_parts_and_a_fixed_number_of_requests(
    server: S3Server, engine: Engine
) -> None:
    """Neither more tensors nor more bytes cost anything but parts; nothing is listed.

    A shard file is one PUT, or one upload: begun once, completed once, a PUT for each part. Nobody
    looks whether it is there.
    """
    save(server, {"t": torch.ones(3)}, engine, "before")  # finds out what the storage can do
    few = save(server, {f"t{i}": torch.ones(3) for i in range(10)}, engine, "few")
    many = save(server, {f"t{i}": torch.ones(3) for i in range(2000)}, engine, "many")
    large = save(server, {"w": torch.ones(4 * PART_BYTES, dtype=torch.uint8)}, engine, "large")
    of_files = [request.op for request in server.requests if "distcp" in request.key]
    assert Counter(of_files) == {"create_upload": 1, "part": 5, "complete": 1}
    assert few == many
    assert large - Counter(of_files) == many - Counter(["put"])
    assert few.keys() <= {"put", "get", "head"}
    assert few.total() <= 15
    assert all(is_sound(server, name) for name in ("few", "many", "large"))


@EACH_ENGINE
def test_a_storage_that_asks_for_less_gets_fewer_requests_at_a_time(
    server: S3Server, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SlowDown reaches whoever decides on the number; the save succeeds.

    obstore repeats parts by itself and tells nobody: there only its own pauses make it fewer.
    """
    pacers: list[Pacer] = []

    class Kept(Pacer):
        """A pacer that the test can ask."""

        def __init__(self, *args: Any, **kw: Any) -> None:
            super().__init__(*args, **kw)
            self.heard = 0
            pacers.append(self)

        def slowed_down(self) -> None:
            """Count."""
            self.heard += 1
            super().slowed_down()

    monkeypatch.setattr(sending, "Pacer", Kept)
    server.faults([FaultRule(op="part", action="status", times=3)])
    state = {"w": torch.ones(6 * PART_BYTES, dtype=torch.uint8)}
    save(server, state, engine, thread_count=4, memory_limit_bytes=256 * MIB)
    (pacer,) = pacers
    assert isinstance(pacer, Kept)
    assert pacer.heard == (3 if engine == "fsspec" else 0)
    assert server.stats().count["part"] == 7 + 3
    assert is_sound(server)


@EACH_ENGINE
def test_a_save_keeps_to_its_memory_limit(server: S3Server, engine: Engine) -> None:
    """With 64 MiB allowed, no more than that is ever claimed, and all of it is given back."""
    BUDGET.reset()
    limit_bytes = 64 * MIB
    options = TransferOptions.for_storage(
        is_remote=True,
        local_threads=1,
        local_part_bytes=MIB,
        thread_count=None,
        part_bytes=None,
        memory_limit_bytes=limit_bytes,
    )
    store = open_store("s3://bkt/run", storage_options=options_of(server), engine=engine)
    content = memoryview(bytes(range(256)) * (256 << 10))
    file = ShardFileWriter(
        store,
        "saves/x",
        options=options,
        planned_bytes=len(content),
        deadline=Deadline("write", 60),
    )
    file.payload([content])
    file.finish()
    store.close()
    assert server.dump()["run/saves/x"] == content
    assert limit_bytes // 2 <= BUDGET.peak_bytes <= limit_bytes
    assert BUDGET.held_bytes == 0
