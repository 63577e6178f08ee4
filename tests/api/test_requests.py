"""What saves, loads, opening, listing and slicing ask of S3: requests, bytes, and memory."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import dcp_cases
import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from commit_tools import IN_TURN, take_in_turn
from dcp_cases import same, seeded
from remote_tools import ops, options_of
from s3_server import FaultRule, S3Server
from safetensors.torch import save_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_storage
from ckpt_storage import CheckpointGoneError, CheckpointStorageWriter, RetryPolicy, verify
from ckpt_storage.inspect.checkpoint import open_checkpoint
from ckpt_storage.transfer.pacing import Pacer

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)

KIB = 1024
MIB = 1024 * KIB
BLOCK_BYTES = 64 * KIB

STATE: dict[str, Any] = {
    "rows": seeded(1, 4096, 1024),  # 16 MiB; a row has 4 KiB, a block 16 rows
    "wide": seeded(2, 64, 131_072, dtype=torch.bfloat16),  # a row has 4 blocks
    **{f"norm.{i}": seeded(10 + i, 100) for i in range(200)},
    "step": 7,
}


URL = "s3://bucket/run/step-7"


class Watched:
    """An open checkpoint, and what has been asked of its server since it was opened."""

    def __init__(self, filled: S3Server, url: str = URL) -> None:
        self.server = filled
        # What a process knows of a place, it knows by its options.
        agent = {"config_kwargs": {"user_agent_extra": uuid.uuid4().hex}}
        filled.reset_counters()
        self.checkpoint = open_checkpoint(url, storage_options={**filled.storage_options, **agent})
        self.opening = self.asked()

    def asked(self) -> list[tuple[str, str, int]]:
        """Return operation, file and bytes sent of the requests since the last look."""
        found = [(r.op, r.key.rpartition("/")[2], r.bytes_out) for r in self.server.requests]
        self.server.reset_counters()
        return found

    def read(self, name: str, index: Any) -> list[int]:
        """Index a tensor, hold it against what was saved, and return the bytes of each read."""
        self.asked()
        assert same(self.checkpoint[name].torch(index), STATE[name][index])
        asked = self.asked()
        assert {op for op, *_ in asked} == {"get"}
        return [size for *_, size in asked]


@pytest.fixture(scope="module")
def filled() -> Iterator[S3Server]:
    with S3Server() as running:
        running.create_bucket("bucket")
        ckpt_storage.save(STATE, URL, storage_options=running.storage_options)
        yield running


@pytest.fixture
def watched(filled: S3Server) -> Watched:
    return Watched(filled)


def test_opening_and_listing_take_four_requests(watched: Watched) -> None:
    """Slot 1, no slot 2, the manifest, one for `.metadata`."""
    assert len(watched.opening) == 4
    opened = watched.checkpoint
    assert len(list(opened)) == len(STATE)
    assert [(opened[name].shape, opened[name].sharding) for name in STATE if name != "step"]
    assert all((repr(opened), str(opened.tree()), opened._repr_html_(), opened.info, opened.files))
    assert watched.asked() == []


@pytest.mark.parametrize(
    ("name", "index"),
    [
        *(("rows", np.s_[start : start + 256]) for start in (0, 16, 256, 1000, 3840)),
        ("rows", np.s_[3::48, ::7]),
        ("rows", np.s_[100]),
        ("wide", np.s_[:, 100:200]),
        ("wide", np.s_[5:60:7, ::40_000]),
        ("wide", np.s_[2, 3]),
    ],
    ids=str,
)
def test_a_slice_reads_the_blocks_it_touches(watched: Watched, name: str, index: Any) -> None:
    """No other block is read, none twice, in one request a run; one more for a rank manifest."""
    tensor = STATE[name]
    places = np.arange(tensor.numel()).reshape(tensor.shape)[index].ravel()
    blocks = {int(place) * tensor.element_size() // BLOCK_BYTES for place in places}
    runs = len([block for block in blocks if block - 1 not in blocks])
    assert len(watched.read(name, index)) == runs + 1
    sizes = watched.read(name, index)
    assert (len(sizes), sum(sizes)) == (runs, len(blocks) * BLOCK_BYTES)


def test_many_small_tensors_share_requests(watched: Watched) -> None:
    """Two hundred tensors that lie side by side are loaded, or compared, by a handful of reads."""
    loaded = watched.checkpoint.load(prefix="norm.")
    assert len(loaded) == 200
    assert all(np.array_equal(loaded[name], STATE[name].numpy()) for name in loaded)
    asked = watched.asked()
    assert len(asked) <= 3
    assert sum(size for *_, size in asked) < 400 * KIB
    other = open_checkpoint(URL, storage_options=watched.server.storage_options)
    watched.asked()
    found = watched.checkpoint.diff(other, prefix="norm.")
    assert (found.is_equal, found.same_count) == (True, 200)
    assert len(watched.asked()) <= 5


def test_a_stock_checkpoint_is_read_and_its_replacement_noticed(filled: S3Server) -> None:
    """A row costs its bytes, `.metadata` is read once; saved over, an open checkpoint says so."""
    url = "s3://bucket/stock/step-3"
    options = filled.storage_options
    for rows in (300, 301):
        state = {"a": seeded(rows, rows, 500)}
        dcp.save(state, storage_writer=FsspecWriter(url, **options), no_dist=True)
        if rows == 300:
            watched = Watched(filled, url)
            opened, asked = watched.checkpoint, [(op, name) for op, name, _ in watched.opening]
            assert asked.count(("get", ".metadata")) == 1
            assert [op for op, _ in asked].count("list") == 2, "`commits/` once, too"
            for row in (7, 9):
                found = opened["a"][row : row + 2, ::3]
                assert np.array_equal(found, state["a"].numpy()[row : row + 2, ::3])
                told = watched.asked()
                assert sum(size for *_, size in told) < 8 * KIB
                # The item's head, the rows, and whether file and description are as they were.
                assert Counter(op for op, *_ in told) == {"get": 1 + (row == 7), "head": 2}
    with pytest.raises(CheckpointGoneError, match="written again"):
        opened["a"][:]
    fresh = open_checkpoint(url, storage_options=options)
    assert np.array_equal(fresh["a"].numpy(), state["a"].numpy())


def test_thousands_of_small_tensors_take_few_requests(filled: S3Server) -> None:
    """2,000 tensors of 1 KiB and a large one: two dozen requests, each value right."""
    state: dict[str, Any] = {f"t{i}": seeded(i, 256) for i in range(2000)}
    state["large"] = seeded(7, 3 << 20)
    options = filled.storage_options
    dcp_cases.save(state, "s3://bucket/many", storage_options=options)
    filled.reset_counters()
    dcp_cases.assert_holds("s3://bucket/many", state, [dcp_cases.load], storage_options=options)
    keys = [request.key for request in filled.requests]
    assert sum(key.endswith(".distcp") for key in keys) <= 24
    # Two slots, the manifest and that of the rank.
    assert sum(not key.endswith((".distcp", ".metadata")) for key in keys) == 4


def test_the_header_of_a_weight_file_costs_one_request(filled: S3Server, tmp_path: Path) -> None:
    """Forty weight files cost one read each, and no question for their length."""
    names = {f"model-{number:02}.safetensors" for number in range(40)}
    files = fsspec.filesystem("s3", **filled.storage_options)
    for name in names:
        save_file({name: seeded(1, 8)}, tmp_path / name)
        files.pipe_file(f"s3://bucket/weights/{name}", (tmp_path / name).read_bytes())
    watched = Watched(filled, "s3://bucket/weights")
    assert len(watched.checkpoint) == 40
    asked = [(op, name) for op, name, _ in watched.opening if name.endswith(".safetensors")]
    assert sorted(asked) == sorted(("get", name) for name in names)


PART_BYTES = 5 * MIB


def counted_save(
    server: S3Server, state: dict[str, Any], name: str = "run", **options: Any
) -> Counter[str]:
    server.reset_counters()
    saving = CheckpointStorageWriter(
        f"s3://bkt/{name}",
        storage_options=options_of(server),
        part_bytes=PART_BYTES,
        **{"retry": RetryPolicy(first_delay_s=0.0, max_delay_s=0.01), **options},
    )
    dcp.save(state, storage_writer=saving, no_dist=True)
    return Counter(request.op for request in server.requests)


def is_sound(server: S3Server, name: str = "run") -> bool:
    return verify(f"s3://bkt/{name}", storage_options=options_of(server)).ok


def test_a_save_costs_its_parts_and_a_fixed_number_of_requests(server: S3Server) -> None:
    """Neither more tensors nor more bytes cost anything but parts."""
    counted_save(server, {"t": torch.ones(3)}, "before")  # finds out what the storage can do
    few = counted_save(server, {f"t{i}": torch.ones(3) for i in range(10)}, "few")
    many = counted_save(server, {f"t{i}": torch.ones(3) for i in range(2000)}, "many")
    large = counted_save(server, {"w": torch.ones(4 * PART_BYTES, dtype=torch.uint8)}, "large")
    of_files = [request.op for request in server.requests if "distcp" in request.key]
    assert Counter(of_files) == {"create_upload": 1, "part": 5, "complete": 1}
    assert few == many
    assert large - Counter(of_files) == many - Counter(["put"])
    assert few.keys() <= {"put", "get", "head", "list"}
    assert few["list"] == 1
    assert few.total() <= 16
    assert all(is_sound(server, name) for name in ("few", "many", "large"))


def test_a_storage_that_asks_for_less_gets_fewer_requests_at_a_time(server: S3Server) -> None:
    """The pacer hears of each SlowDown, and the save succeeds."""
    server.faults([FaultRule(op="part", action="status", times=3)])
    state = {"w": torch.ones(10 * PART_BYTES, dtype=torch.uint8)}
    limits: list[int] = []

    def slowed_down(pacer: Pacer) -> None:
        limits.append(pacer.limit())
        slower(pacer)
        limits.append(pacer.limit())

    slower = Pacer.slowed_down
    with mock.patch.object(Pacer, "slowed_down", slowed_down):
        counted_save(server, state, thread_count=8, memory_limit_bytes=256 * MIB)
    assert len(limits) == 6
    assert min(limits) <= max(limits) // 2
    assert ops(server)["part"] == 11 + 3
    assert is_sound(server)


def test_an_attempt_that_cannot_be_claimed_leaves_nothing(server: S3Server) -> None:
    """The save fails with the storage's own error, and neither a file nor an upload is left."""
    counted_save(server, {"t": torch.ones(3)}, "before")
    before = server.dump("bkt")
    server.faults([FaultRule(op="put", key="begun", action="status", status=403, times=0)])
    with pytest.raises(CheckpointException, match=r"begun\.json"):
        counted_save(server, {"w": torch.ones(4 * PART_BYTES, dtype=torch.uint8)})
    assert (server.dump("bkt"), server.open_upload_count) == (before, 0)


def test_a_commit_that_the_storage_refuses_leaves_nothing(server: S3Server) -> None:
    """Shard files and documents of the attempt are deleted, and the storage's error is raised."""
    counted_save(server, {"t": torch.ones(3)}, "before")
    before = server.dump("bkt")
    server.faults([FaultRule(op="put", key="manifest", action="status", status=403, times=0)])
    with pytest.raises(CheckpointException, match=r"manifest\.json"):
        counted_save(server, {"t": torch.ones(3)})
    assert server.dump("bkt") == before


def test_documents_of_the_commit_and_what_follows_go_side_by_side(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group can be made in either order, and so no request of it waits for another."""
    groups = {}
    for order in IN_TURN:
        with monkeypatch.context() as patch:
            take_in_turn(patch, order)
            counted_save(server, {"t": torch.ones(3)}, order.replace(" ", "-"))
        groups[order] = [
            request.key.rpartition("/")[2]
            for request in server.requests
            if "probe" not in request.key
        ]
    files = ["__0_0.distcp", "rank-00000.json"]
    documents = ["stock.metadata", "manifest.json"]
    slot, shown = ["00000001.json"], [".metadata", ".metadata"]
    after = ["00000002.json"]
    begun = ["begun.json"]
    # What is looked at before the first write goes beside the probe of the endpoint.
    writes = {order: names[names.index("begun.json") :] for order, names in groups.items()}
    expected = [begun, files, documents, slot, shown, after]
    assert writes[IN_TURN[0]] == [name for group in expected for name in group]
    turned = [begun, files, documents[::-1], slot, shown, after]
    assert writes[IN_TURN[1]] == [name for group in turned for name in group]
