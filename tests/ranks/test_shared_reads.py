"""Reads that ranks share: the storage sends what several need once, every rank gets it right."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator
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
from ckpt_storage.testing.ranks import RankPool
from ckpt_storage.testing.s3_server import S3Server

MIB = 1 << 20
URL = "s3://bucket/model"
BIG_ROWS = 10_240


def model() -> dict[str, Any]:
    """Return 41 MiB: one large tensor, odd ones, many small ones, an empty one, plain values."""
    state: dict[str, Any] = {
        "big": seeded(1, BIG_ROWS, 1024, dtype=torch.float32),
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
    """Return the bytes of payload that the server has sent since it was reset."""
    return sum(r.bytes_out for r in server.requests if r.key.endswith(".distcp"))


def load_replicated(
    _rank: int, options: dict[str, Any], shared: str = "auto", door: str = "load", **more: Any
) -> None:
    """Load the whole model on this rank and compare it with the original."""
    target = zeros_like(model())
    more = {"storage_options": options, "shared_reads": shared, **more}
    if door == "load":
        ckpt_storage.load(target, URL, **more)
    else:
        dcp_cases.load(target, URL, **more)
    expected = model()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert same(target[name], value), name
        else:
            assert target[name] == value, name


def test_replicated_state_is_read_once_from_the_storage(ranks: RankPool, server: S3Server) -> None:
    """Ranks that all load the whole model fetch together little more than it has bytes."""
    server.reset_counters()
    ranks.run(load_replicated, server.storage_options, world_size=3)
    assert model_bytes() > 40 * MIB
    assert model_bytes() <= sent_bytes(server) <= 1.05 * model_bytes()


@pytest.mark.parametrize(("shared", "door"), [("never", "load"), ("auto", "dcp.load")])
def test_never_is_never(ranks: RankPool, server: S3Server, shared: str, door: str) -> None:
    """With shared_reads='never', and under `dcp.load`, every rank fetches all for itself."""
    server.reset_counters()
    ranks.run(load_replicated, server.storage_options, shared, door, world_size=3)
    assert sent_bytes(server) >= 3 * model_bytes()


def test_little_is_not_shared(ranks: RankPool, server: S3Server) -> None:
    """Two ranks that would spare 41 MiB read for themselves."""
    server.reset_counters()
    ranks.run(load_replicated, server.storage_options, "auto", world_size=2)
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
        local = target["big"].to_local()
        wanted = torch.chunk(expected["big"], dist.get_world_size(), 1)
        assert same(local, wanted[rank].contiguous())
        assert all(same(target[f"small.{i}"], expected[f"small.{i}"]) for i in range(300))
        assert rank == 1 or same(target["odd"], expected["odd"])


def test_ranks_of_unequal_needs_share_what_they_have_in_common(
    ranks: RankPool, server: S3Server
) -> None:
    """Columns of a tensor need all its blocks: fetched once, they give each rank its own."""
    server.reset_counters()
    ranks.run(load_columns, server.storage_options, world_size=3)
    assert sent_bytes(server) <= 2 * 1.05 * model_bytes()


def load_without_transport(rank: int, options: dict[str, Any]) -> None:
    """Load where the ranks' own group cannot be made on one rank."""
    from ckpt_storage.coordination.peers import Peers  # noqa: PLC0415  # in the rank
    from ckpt_storage.errors import RankFailedError as Failed  # noqa: PLC0415  # in the rank

    original = Peers.join

    def join(self: Peers, *args: Any, **kw: Any) -> None:
        original(self, *args, **kw)
        if rank == 1:
            raise Failed("no way", failures={})

    Peers.join = join  # type: ignore[method-assign]
    try:
        load_replicated(rank, options)
    finally:
        Peers.join = original  # type: ignore[method-assign]


def test_ranks_that_cannot_reach_one_another_read_for_themselves(
    ranks: RankPool, server: S3Server
) -> None:
    """Where one rank cannot join, all load all the same, each on its own."""
    server.reset_counters()
    ranks.run(load_without_transport, server.storage_options, world_size=3)
    assert sent_bytes(server) >= 3 * model_bytes()


def load_with_a_wire_that_lies(rank: int, options: dict[str, Any]) -> str:
    """Load where rank 0 checks nothing and turns a bit of what it sends; return the error."""
    from ckpt_storage.coordination.peers import Peers  # noqa: PLC0415  # in the rank

    original = Peers.send

    def send(self: Peers, to: int, data: memoryview, tag: int, deadline: Any) -> None:
        if rank == 0 and len(data) > MIB and to == 2:
            data = memoryview(bytearray(data))
            data[12_345] ^= 1
        original(self, to, data, tag, deadline)

    Peers.send = send  # type: ignore[method-assign]
    target = zeros_like(model())
    try:
        timeout = Timeouts.of(20)
        ckpt_storage.load(target, URL, storage_options=options, timeout=timeout, verify=rank != 0)
    except ckpt_storage.CheckpointError as error:
        return str(error)
    finally:
        Peers.send = original  # type: ignore[method-assign]
    return ""


def test_a_bit_turned_between_ranks_is_told(ranks: RankPool, server: S3Server) -> None:
    """What peers send is held to the checkpoint's checksums; every rank raises."""
    texts = ranks.run(load_with_a_wire_that_lies, server.storage_options, world_size=3)
    assert [text for text in texts if "damaged" not in text] == []


def killed(*_args: Any, **_kw: Any) -> Any:
    """Stand for a step in which this process is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS = {
    "sends": ("coordination.peers", "Peers", "send"),
    "receives": ("coordination.peers", "Peers", "receive"),
}
"""When a rank is killed: by what it calls then."""


def load_beside_one_that_dies(rank: int, options: dict[str, Any], when: str) -> tuple[str, float]:
    """Load; rank 1 is killed in a step of it. Return what the others raise, and when."""
    if rank == 1:
        module, name, method = DEATHS[when]
        owner = getattr(importlib.import_module(f"ckpt_storage.{module}"), name)
        setattr(owner, method, killed)
    target = zeros_like(model())
    begin = time.monotonic()
    try:
        timeouts = Timeouts(load=60, silence=4)
        ckpt_storage.load(target, URL, storage_options=options, timeout=timeouts)
    except RankFailedError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("when", DEATHS)
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


TWICE = "s3://bucket/twice"
TWICE_ROWS = 18_432


def load_above_the_threshold(_rank: int, options: dict[str, Any]) -> None:
    """Load a tensor of 72 MiB whole, and compare it."""
    expected = seeded(5, TWICE_ROWS, 1024, dtype=torch.float32)
    target = {"w": torch.zeros_like(expected)}
    ckpt_storage.load(target, TWICE, storage_options=options)
    assert same(target["w"], expected)


def test_two_ranks_share_what_spares_64_mib(ranks: RankPool, server: S3Server) -> None:
    """Two ranks that load 72 MiB, replicated, fetch them once together, by default."""
    state = {"w": seeded(5, TWICE_ROWS, 1024, dtype=torch.float32)}
    dcp_cases.save(state, TWICE, storage_options=server.storage_options)
    server.reset_counters()
    ranks.run(load_above_the_threshold, server.storage_options, world_size=2)
    assert 72 * MIB <= sent_bytes(server) <= 1.05 * 72 * MIB


def load_with_a_sink_that_breaks(rank: int, options: dict[str, Any], where: str) -> str:
    """Load where rank 1 cannot deliver; return what is raised, or what is left behind."""
    from ckpt_storage.loads import exchange  # noqa: PLC0415  # in the rank

    original = vars(exchange)["put"]

    def put(*args: Any) -> None:
        if rank == 1 and where in threading.current_thread().name:
            raise RuntimeError("the sink broke")
        original(*args)

    vars(exchange)["put"] = put
    begin = time.monotonic()
    try:
        target = zeros_like(model())
        ckpt_storage.load(target, URL, storage_options=options, timeout=Timeouts(load=60))
    except ckpt_storage.CheckpointError as error:
        left = [t.name for t in threading.enumerate() if t.name.startswith("shared reads")]
        return f"{left} {time.monotonic() - begin < 20} {error}"
    finally:
        vars(exchange)["put"] = original
    return "loaded"


@pytest.mark.parametrize("where", ["passing on", "receiving"])
def test_whatever_a_sink_raises_all_ranks_hear_of_it(
    ranks: RankPool, server: S3Server, where: str
) -> None:
    """Every rank raises what one's sink raised, soon, and none leaves a thread that receives."""
    options = server.storage_options
    for text in ranks.run(load_with_a_sink_that_breaks, options, where, world_size=3):
        assert text.startswith("[] True"), text
        assert "the sink broke" in text
