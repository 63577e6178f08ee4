"""How many requests a load makes: the S3 server's own log is the witness."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded, zeros_like
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ckpt_storage import CheckpointStorageReader
from ckpt_storage.testing.s3server import S3Server

URL = "s3://bucket/run"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def server() -> Iterator[S3Server]:
    """An S3 server with a bucket."""
    with S3Server() as running:
        running.create_bucket("bucket")
        yield running


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
            plan.items[0],
            storage_offsets=torch.Size([512, 0]),
            lengths=torch.Size([256, 1024]),
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
    assert sum(documents.values()) == 3  # two slots and the manifest
