"""How many requests a load makes: the S3 server's own log is the witness."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import dcp_cases
import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded, zeros_like
from safetensors.torch import save_file
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

import ckpt_storage
from ckpt_storage import CheckpointStorageReader
from ckpt_storage.testing.s3_server import S3Server

URL = "s3://bucket/run"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def payload_requests(server: S3Server) -> int:
    """Return how many requests for bytes of shard files the server has seen."""
    return sum(request.key.endswith(".distcp") for request in server.requests)


def test_thousands_of_small_tensors_take_few_requests(server: S3Server) -> None:
    """2,000 tensors of 1 KiB and a large one: two dozen requests, each value right."""
    state: dict[str, Any] = {f"t{i}": seeded(i, 256) for i in range(2000)}
    state["large"] = seeded(7, 3 << 20)
    options = server.storage_options
    dcp_cases.save(state, URL, storage_options=options)
    server.reset_counters()
    target = zeros_like(state)
    dcp_cases.load(target, URL, storage_options=options)
    assert same(target, state)
    assert payload_requests(server) <= 24


class OneSlice(dcp.DefaultLoadPlanner):
    """Wants the rows 512 to 767 of one tensor, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(256, 1024)

    def create_local_plan(self) -> LoadPlan:
        """Return a plan of one item."""
        plan = super().create_local_plan()
        item = dataclasses.replace(
            plan.items[0], storage_offsets=torch.Size([512, 0]), lengths=torch.Size([256, 1024])
        )
        return dataclasses.replace(plan, items=[item])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the target of the rows."""
        del read_item
        return self.rows

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do."""


def test_a_slice_takes_one_request_of_its_size(server: S3Server) -> None:
    """1 MiB in the middle of a tensor of 16 MiB is one request for 1 MiB."""
    state = {"w": seeded(1, 4096, 1024), "v": seeded(2, 4096, 1024)}
    options = server.storage_options
    dcp_cases.save(state, URL, storage_options=options)
    server.reset_counters()
    planner = OneSlice()
    reader = CheckpointStorageReader(URL, storage_options=options)
    dcp.load({"w": torch.zeros(4096, 1024)}, storage_reader=reader, planner=planner, no_dist=True)
    assert same(planner.rows, state["w"][512:768].clone())
    requests = [r for r in server.requests if r.key.endswith(".distcp")]
    assert [request.bytes_out for request in requests] == [1 << 20]
    documents = Counter(
        r.key for r in server.requests if not r.key.endswith((".distcp", ".metadata"))
    )
    assert sum(documents.values()) == 4  # two slots, the manifest and that of the rank


def put_folder(server: S3Server, folder: Path) -> None:
    """Copy the files of a folder to the server, below `URL`."""
    files = fsspec.filesystem("s3", **server.storage_options)
    for path in folder.iterdir():
        files.pipe_file(f"{URL}/{path.name}", path.read_bytes())
    server.reset_counters()


def listings(server: S3Server) -> int:
    """Return how many listings the server has seen."""
    return sum(request.op == "list" for request in server.requests)


def test_stock_metadata_is_read_once_and_the_folder_listed_once(
    server: S3Server, tmp_path: Path
) -> None:
    """An open checkpoint of stock DCP reads `.metadata` once and lists for no row it reads."""
    state = {"w": seeded(1, 64, 64)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    put_folder(server, tmp_path)
    with ckpt_storage.open_checkpoint(URL, storage_options=server.storage_options) as opened:
        for row in range(10):
            assert opened["w"][row].tolist() == state["w"][row].tolist()
    assert listings(server) == 2, "`commits/` once, too"
    reads = [r for r in server.requests if r.key == "run/.metadata" and r.op == "get"]
    assert len(reads) == 1


def test_the_header_of_a_weight_file_costs_one_request(server: S3Server, tmp_path: Path) -> None:
    """Forty weight files cost one read each, and no question for their length."""
    for number in range(40):
        save_file({f"w{number}": seeded(number, 8)}, tmp_path / f"model-{number:02}.safetensors")
    put_folder(server, tmp_path)
    with ckpt_storage.open_checkpoint(URL, storage_options=server.storage_options) as opened:
        assert len(opened) == 40
    of_files = [r for r in server.requests if r.key.endswith(".safetensors")]
    assert [r.op for r in of_files] == ["get"] * 40
    assert len({r.key for r in of_files}) == 40
