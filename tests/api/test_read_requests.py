"""How many requests a load makes: the S3 server's own log is the witness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dcp_cases
import fsspec
import pytest
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded, zeros_like
from safetensors.torch import save_file

import ckpt_storage
from ckpt_storage.testing.s3_server import S3Server

URL = "s3://bucket/run"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
    keys = [request.key for request in server.requests]
    assert sum(key.endswith(".distcp") for key in keys) <= 24
    # Two slots, the manifest and that of the rank.
    assert sum(not key.endswith((".distcp", ".metadata")) for key in keys) == 4


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
