"""Reads that ranks share: the storage sends what several need once, every rank gets it right."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed as dist
from dcp_cases import same, seeded, zeros_like
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_storage
from ckpt_storage import RankFailedError, Timeouts
from ckpt_storage.coordination.peers import Peers
from ckpt_storage.testing.ranks import RankPool
from ckpt_storage.testing.s3_server import S3Server

MIB = 1 << 20
URL = "s3://bucket/model"


def model() -> dict[str, Any]:
    """Return 41 MiB: one large tensor, odd ones, many small ones, an empty one, plain values."""
    state: dict[str, Any] = {
        "big": seeded(1, 10_240, 1024, dtype=torch.float32),
        "odd": seeded(2, 333, 77, 5, dtype=torch.bfloat16),
        "scalar": seeded(3, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "step": 7,
    }
    state.update({f"small.{i}": seeded(100 + i, 256, dtype=torch.float16) for i in range(300)})
    return state


def model_bytes() -> int:
    """Return the bytes of all tensors."""
    return sum(v.nbytes for v in model().values() if isinstance(v, torch.Tensor))


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """An S3 server that holds the model, saved by one process."""
    with S3Server() as running:
        running.create_bucket("bucket")
        dcp_cases.save(model(), URL, storage_options=running.storage_options)
        yield running


def sent_bytes(server: S3Server) -> int:
    """Return the bytes of payload that the server has sent since it was last asked."""
    found = sum(r.bytes_out for r in server.requests if r.key.endswith(".distcp"))
    server.reset_counters()
    return found


Load = Callable[..., Any]


def load_replicated(
    _rank: int, options: dict[str, Any], load: Load = ckpt_storage.load, **more: Any
) -> None:
    """Load the whole model on this rank and compare it with the original."""
    expected = model()
    target = zeros_like(expected)
    load(target, URL, storage_options=options, **more)
    assert same(target, expected)


def load_for_itself(_rank: int, options: dict[str, Any]) -> None:
    """Load in three ways that share nothing."""
    load_replicated(_rank, options, shared_reads="never")
    load_replicated(_rank, options, dcp_cases.load)
    join = Peers.join

    def joins(self: Peers, *args: Any, **kw: Any) -> None:
        join(self, *args, **kw)
        if _rank == 1:
            raise RankFailedError("no way", failures={})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Peers, "join", joins)
        load_replicated(_rank, options)


def test_replicated_state_is_read_once_from_the_storage(ranks: RankPool, server: S3Server) -> None:
    """Three ranks fetch little more than the model; each all where it may or can not share.

    That is with "never", under `dcp.load`, where a rank cannot be reached, and where two ranks
    would spare less than 64 MiB.
    """
    sent_bytes(server)
    options = server.storage_options
    ranks.run(load_replicated, options, world_size=3)
    assert model_bytes() > 40 * MIB
    assert model_bytes() <= sent_bytes(server) <= 1.05 * model_bytes()
    ranks.run(load_for_itself, options, world_size=3)
    assert sent_bytes(server) >= 3 * 3 * model_bytes()
    ranks.run(load_replicated, options, world_size=2)
    assert sent_bytes(server) >= 2 * model_bytes()


def load_columns(rank: int, options: dict[str, Any]) -> None:
    """Load the large tensor by columns, and the others whole, twice, over one group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = model()
    for _ in range(2):
        target = zeros_like(expected)
        whole = torch.zeros_like(expected["big"])
        target["big"] = distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)
        if rank == 1:
            del target["odd"]
        ckpt_storage.load(target, URL, storage_options=options)
        wanted = torch.chunk(expected["big"], dist.get_world_size(), 1)
        assert same(target["big"].to_local(), wanted[rank].contiguous())
        assert all(same(target[f"small.{i}"], expected[f"small.{i}"]) for i in range(300))
        assert rank == 1 or same(target["odd"], expected["odd"])


def test_ranks_of_unequal_needs_share_what_they_have_in_common(
    ranks: RankPool, server: S3Server
) -> None:
    """Columns of a tensor need all its blocks: fetched once, they give each rank its own."""
    sent_bytes(server)
    ranks.run(load_columns, server.storage_options, world_size=3)
    assert sent_bytes(server) <= 2 * 1.05 * model_bytes()


def load_with_a_wire_that_lies(rank: int, options: dict[str, Any]) -> str:
    """Load where rank 0 checks nothing and turns a bit of what it sends; return the error."""
    original = Peers.send

    def send(self: Peers, to: int, data: memoryview, tag: int, deadline: Any) -> None:
        if rank == 0 and len(data) > MIB and to == 2:
            data = memoryview(bytearray(data))
            data[12_345] ^= 1
        original(self, to, data, tag, deadline)

    more: dict[str, Any] = {"timeout": Timeouts.of(20), "verify": rank != 0}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Peers, "send", send)
        try:
            ckpt_storage.load(zeros_like(model()), URL, storage_options=options, **more)
        except ckpt_storage.CheckpointError as error:
            return str(error)
    return ""


def test_a_bit_turned_between_ranks_is_told(ranks: RankPool, server: S3Server) -> None:
    """What peers send is held to the checkpoint's checksums; every rank raises."""
    texts = ranks.run(load_with_a_wire_that_lies, server.storage_options, world_size=3)
    assert [text for text in texts if "damaged" not in text] == []


def load_beside_one_that_dies(rank: int, options: dict[str, Any], when: str) -> tuple[str, float]:
    """Load; rank 1 is killed in a step of it. Return what the others raise, and when."""
    if rank == 1:
        setattr(Peers, when, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    begin = time.monotonic()
    try:
        timeouts = Timeouts(load=60, silence=4)
        ckpt_storage.load(zeros_like(model()), URL, storage_options=options, timeout=timeouts)
    except RankFailedError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("when", ["send", "receive"])
def test_a_rank_that_dies_ends_the_load_of_all(
    ranks: RankPool, server: S3Server, when: str
) -> None:
    """The live ranks raise an error that names the dead one, long before the deadline."""
    options = server.storage_options
    outcomes = ranks.outcomes(load_beside_one_that_dies, options, when, world_size=3)
    assert outcomes[1].failure is not None
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value is not None, outcome.failure
        text, seconds = outcome.value
        assert "rank 1" in text.lower()
        assert seconds < 40  # silence is 4 s, the deadline 60 s
