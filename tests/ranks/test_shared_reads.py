"""Reads that ranks share: the storage sends what several need once; all get it, or an error."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import cut, seeded
from limits import HANG_S, JOB_S
from on_ranks import on_ranks
from rank_pool import RankPool
from s3_server import S3Server
from saver_cases import until
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

import ckpt_storage
from ckpt_storage import CheckpointError, PhaseTimeoutError, RankFailedError, Timeouts
from ckpt_storage.coordination.operation_rounds import OperationRounds
from ckpt_storage.coordination.peers import Peers
from ckpt_storage.loads import session, sharing
from ckpt_storage.store.backend import Range
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.transfer.ranges import RangeReader

KIB, MIB = 1 << 10, 1 << 20
URL, SMALL_URL = "s3://bucket/model", "s3://bucket/small"
SHAPES = [(4, 9), (700, 300), (40, 5000), (64, 64, 8), (3, 100_000)]


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


def small() -> dict[str, Any]:
    return {f"t{number}": seeded(number, *shape) for number, shape in enumerate(SHAPES)}


def _save_columns(_rank: int, options: dict[str, Any]) -> None:
    # Several chunks of each tensor.
    state = {name: cut(tensor, Shard(1)) for name, tensor in small().items()}
    dcp_cases.save(state, SMALL_URL, storage_options=options)


@pytest.fixture(scope="module")
def server(ranks: RankPool) -> Iterator[S3Server]:
    """An S3 server that holds the model, saved by one process, and the small state."""
    with S3Server() as running:
        running.create_bucket("bucket")
        dcp_cases.save(model(), URL, storage_options=running.storage_options)
        ranks.run(_save_columns, running.storage_options, world_size=3)
        yield running


@pytest.fixture
def options(server: S3Server) -> dict[str, Any]:
    return server.storage_options


def sent_bytes(server: S3Server) -> int:
    """Return the bytes of payload that the server has sent since it was last asked."""
    found = sum(r.bytes_out for r in server.requests if r.key.endswith(".distcp"))
    server.reset_counters()
    return found


@contextmanager
def eager() -> Iterator[None]:
    """Share anything at all, in units of 64 KiB."""
    with (
        patch.multiple(sharing, _MIN_SAVED_BYTES=1, _MAX_GAP_BYTES=KIB),
        patch.object(session, "unit_for", lambda _: 64 * KIB),
    ):
        yield


def load_replicated(
    _rank: int, options: dict[str, Any], load: Any = ckpt_storage.load, **more: Any
) -> None:
    dcp_cases.assert_holds(URL, model(), [load], storage_options=options, **more)


def load_for_itself(rank: int, options: dict[str, Any]) -> None:
    load_replicated(rank, options, shared_reads="never")
    load_replicated(rank, options, dcp_cases.load)
    connect = Peers.connect

    def connects(self: Peers, *args: Any, **kw: Any) -> None:
        connect(self, *args, **kw)
        if rank == 1:
            raise RankFailedError("no way", failures={})

    with patch.object(Peers, "connect", connects):
        load_replicated(rank, options)


def test_replicated_state_is_read_once_from_the_storage(ranks: RankPool, server: S3Server) -> None:
    """Three ranks fetch little more than the model; each all where it may or can not share.

    That is with "never", under `dcp.load`, where a rank cannot be reached, and where two ranks
    would spare less than 64 MiB.
    """
    model_bytes = sum(v.nbytes for v in model().values() if isinstance(v, torch.Tensor))
    sent_bytes(server)
    options = server.storage_options
    ranks.run(load_replicated, options, world_size=3)
    assert 40 * MIB < model_bytes <= sent_bytes(server) <= 1.05 * model_bytes
    ranks.run(load_for_itself, options, world_size=3)
    assert sent_bytes(server) >= 3 * 3 * model_bytes
    ranks.run(load_replicated, options, world_size=2)
    assert sent_bytes(server) >= 2 * model_bytes
    # Columns of a tensor need all its blocks: fetched once, they give each rank its own.
    ranks.run(load_columns, options, world_size=3)
    assert sent_bytes(server) <= 2 * 1.05 * model_bytes


def load_from_path(_rank: int, path: str, how: str) -> int:
    """Load the model in each way; return the bytes that this rank read from its files."""
    counted = 0
    read = LocalBackend.read

    def count(self: LocalBackend, name: str, ranges: Iterable[Range]) -> int:
        def counting() -> Iterator[Range]:
            nonlocal counted
            for start, target in ranges:
                counted += target.nbytes if name.endswith(".distcp") else 0
                yield start, target

        return read(self, name, counting())

    with patch.object(LocalBackend, "read", count):
        for load in (ckpt_storage.load, dcp_cases.load):
            dcp_cases.assert_holds(path, model(), [load], shared_reads=how)
    return counted


def test_always_shares_from_paths_and_under_dcp_load(ranks: RankPool, tmp_path: Path) -> None:
    """Of two loads, each byte is read once by some rank; "auto" reads it on every rank.

    Stock torch reads replicated bytes on every rank.
    """
    path = str(tmp_path / "c")
    dcp_cases.save(model(), path)
    model_bytes = sum(v.nbytes for v in model().values() if isinstance(v, torch.Tensor))
    counts = ranks.run(load_from_path, path, "always", world_size=3)
    assert 2 * model_bytes <= sum(counts) <= 2 * 1.05 * model_bytes
    counts = ranks.run(load_from_path, path, "auto", world_size=3)
    assert sum(counts) >= 3 * 2 * model_bytes


def socket_count() -> int:
    links = list[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing
            links.append(str(descriptor.readlink()))
    return sum(link.startswith("socket:") for link in links)


@on_ranks(3)
def test_shared_reads_leave_no_socket_open(tmp_path: Path) -> None:
    """The connections between the ranks end with the load; those to their store stay."""
    path, counts = str(tmp_path / "c"), []
    dcp_cases.save(model(), path)
    for _ in range(4):
        with patch.object(Peers, "connect", autospec=True, side_effect=Peers.connect) as connect:
            dcp_cases.assert_holds(path, model(), [ckpt_storage.load], shared_reads="always")
        assert connect.call_count == 1
        counts.append(socket_count())
    # Two for the other ranks would stay of each load; the store has two, or three.
    until(lambda: socket_count() <= counts[0] + 1, f"the end of sockets: {counts}")


@on_ranks()
def test_a_failure_in_shared_reads_under_dcp_load_is_told_to_all(rank: int, path: Path) -> None:
    """Damage that one rank reads ends `dcp.load` on all ranks, within the deadline."""
    del rank
    with pytest.raises(CheckpointException, match="damaged"):
        dcp_cases.load({"w": torch.zeros(1 << 20)}, path, shared_reads="always", timeout=HANG_S)


@pytest.mark.deadline
@on_ranks()
def test_a_rank_that_is_late_for_shared_reads_under_dcp_load_is_named(
    rank: int, tmp_path: Path
) -> None:
    """It fails as the other has; it does not wait for the other to read once more."""
    path, ended = str(tmp_path / "c"), tmp_path / "ended"
    dcp_cases.save(model(), path)
    timeout = Timeouts(plan=5.0 if rank else 0.5)
    reader = ckpt_storage.CheckpointStorageReader(path, shared_reads="always", timeout=timeout)

    def read(*args: Any) -> Any:
        if rank:
            until(ended.exists, "the end on rank 0")
        try:
            return type(reader).read_data(reader, *args)
        finally:
            ended.touch()

    with patch.object(reader, "read_data", read), pytest.raises(CheckpointException) as raised:
        dcp.load(model(), storage_reader=reader)
    for error, _ in raised.value.failures.values():
        assert isinstance(error, PhaseTimeoutError)
        assert "Rank 1 of the group's 2 has not arrived" in str(error)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    dcp_cases.save({"w": seeded(1, 1 << 20)}, tmp_path / "c")
    (file,) = tmp_path.glob("c/**/*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return tmp_path / "c"


def load_columns(rank: int, options: dict[str, Any]) -> None:
    """Load the large tensor by columns, and the others whole; each load frees its gloo group."""
    expected = model()
    expected["big"] = cut(expected["big"], Shard(1))
    if rank == 1:
        del expected["odd"]
    make, groups = dist.ProcessGroupGloo, list[Any]()

    def made(*args: Any) -> Any:
        group = make(*args)
        groups.append(weakref.ref(group))
        return group

    with patch.object(dist, "ProcessGroupGloo", made):
        for _ in range(2):
            dcp_cases.assert_holds(URL, expected, [ckpt_storage.load], storage_options=options)
    gc.collect()
    assert [group() for group in groups] == [None, None]


def load_small(rank: int, options: dict[str, Any], seed: int = 0, **more: Any) -> None:
    """Load each tensor by rows, by columns or whole, as the seed says; some ranks want all."""
    drawn, own = random.Random(seed), random.Random(f"{seed} {rank}")
    state: dict[str, Any] = {}
    for name, tensor in small().items():
        dim = drawn.choice([0, 1, None]) if seed else None
        part = tensor if dim is None else cut(tensor, Shard(dim))
        if not seed or own.random() < 0.7:
            state[name] = tensor if own.random() < 0.3 else part
    dcp_cases.assert_holds(SMALL_URL, state, [ckpt_storage.load], storage_options=options, **more)


def load_anyhow(rank: int, options: dict[str, Any]) -> int:
    with eager(), patch.object(Peers, "send", autospec=True, side_effect=Peers.send) as sent:
        for seed in range(1, 13):
            load_small(rank, options, seed, thread_count=1 + seed % 2)
    return sent.call_count


def test_every_rank_gets_what_it_wants(server: S3Server) -> None:
    """Whatever up to 8 ranks want, with windows of 1 and 2: each gets it, none waits."""
    with RankPool(8, timeout_s=JOB_S) as pool:
        for world_size in (2, 3, 8):
            sent = pool.run(load_anyhow, server.storage_options, world_size=world_size)
            assert min(sent) > 0, world_size


def left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("shared reads")]


PLACES: dict[str, tuple[Any, str]] = {
    "sending": (Peers, "send"),
    "receiving": (Peers, "receive"),
    "own": (RangeReader, "run"),
}
KINDS = (RuntimeError, KeyboardInterrupt, CheckpointError)


@on_ranks()
def test_what_raises_on_one_rank_ends_the_reads_of_all(rank: int, options: dict[str, Any]) -> None:
    """It is an error of ours but for an interrupt; all are told; the next load works.

    Rank 1 fails in each kind of thread in each way.
    """
    failed = OperationRounds.fail

    def slowly(self: OperationRounds, error: CheckpointError) -> None:
        time.sleep(0.2 if "it broke" in str(error) else 0.0)
        failed(self, error)

    for (where, (holder, name)), kind in itertools.product(PLACES.items(), KINDS):
        inner = getattr(holder, name)

        def fail(*args: Any, **kw: Any) -> Any:
            thread = threading.current_thread()
            is_own = thread is threading.main_thread() and left()
            if rank == 1 and (is_own if where == "own" else where in thread.name):  # noqa: B023  # called at once
                raise kind("it broke")  # noqa: B023  # as above
            return inner(*args, **kw)  # noqa: B023  # as above

        with (
            eager(),
            patch.object(holder, name, fail),
            patch.object(OperationRounds, "fail", slowly),
            pytest.raises((CheckpointError, KeyboardInterrupt)) as raised,
        ):
            load_small(rank, options, timeout=HANG_S)
        mine = KeyboardInterrupt if kind is KeyboardInterrupt else CheckpointError
        assert raised.type is (mine if rank else RankFailedError)
        assert "it broke" in str(raised.value)
        assert left() == []
    with eager():
        load_small(rank, options)


@on_ranks(3)
def test_bytes_changed_between_ranks_are_read_again(rank: int, options: dict[str, Any]) -> None:
    """A receiver checks what peers send, and reads a piece that does not match from the storage."""
    original = Peers.send

    def send(self: Peers, to: int, data: memoryview, tag: int, deadline: Any) -> None:
        if rank == 0 and to == 2:
            data = memoryview(bytearray(data))
            data[len(data) // 2] ^= 1
        original(self, to, data, tag, deadline)

    warned = patch.object(sharing.log, "warning")
    with eager(), patch.object(Peers, "send", send), warned as warning:
        load_small(rank, options, timeout=HANG_S)
    warnings = [call.args[0] for call in warning.call_args_list]
    assert any("is read from the storage" in text for text in warnings) == (rank == 2)


def _load_without_rank_1(
    rank: int, options: dict[str, Any], when: str, how: int | None
) -> tuple[Any, str, float]:
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def end(*_: Any, **__: Any) -> None:
        if how is None:
            time.sleep(8.0)
        else:
            os.kill(os.getpid(), how)

    if rank == 1:
        setattr(Peers, when, end)
    begin_s = time.monotonic()
    timeouts = Timeouts(load=60 if how else 3, silence=4)
    with eager(), pytest.raises((RankFailedError, PhaseTimeoutError)) as caught:
        load_small(rank, options, timeout=timeouts)
    seconds = time.monotonic() - begin_s
    with suppress(ProcessLookupError):
        os.kill(pids[1], signal.SIGKILL)
    return caught.value.rank, str(caught.value), seconds


@pytest.mark.deadline
@pytest.mark.parametrize(
    ("world_size", "when", "how"),
    [
        (3, "send", signal.SIGKILL),
        (3, "receive", signal.SIGKILL),
        (2, "receive", signal.SIGSTOP),
        (2, "send", None),
    ],
)
def test_a_rank_that_is_lost_ends_the_load_of_all(
    ranks: RankPool, server: S3Server, world_size: int, when: str, how: int | None
) -> None:
    """The others name one that died or was stopped; one that sends nothing has a deadline."""
    given = server.storage_options, when, how
    outcomes = ranks.outcomes(_load_without_rank_1, *given, world_size=world_size)
    assert outcomes[1].failure is not None
    for outcome in {0: outcomes[0], world_size - 1: outcomes[-1]}.values():
        if outcome.rank != 1:
            assert outcome.value is not None, outcome.failure
            who, text, seconds = outcome.value
            assert how is None or (who == 1 and "rank 1" in text.lower())
            assert seconds < (40 if how else 3 + 5)
