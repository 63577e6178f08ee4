"""Fast-LLM 543: a slow storage on one rank ran into the training group's own timeout."""

from __future__ import annotations

import importlib
import re
import time
from pathlib import Path
from typing import Any

import dcp_cases
import front_door_cases as cases
import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import assert_holds, seeded
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_storage
from ckpt_storage.testing.ranks import RankPool
from ckpt_storage.testing.s3_server import FaultRule, S3Server

GROUP_TIMEOUT_S = 2.0
SLOW_S = 5.0


def state_of(rank: int) -> dict[str, Any]:
    """Return a state of which both ranks write a part."""
    return {"w": seeded(1, 1000), f"of-{rank}": seeded(rank, 10)}


def together(rank: int, folder: str, where: str) -> None:
    """Wait for the other rank without the group: on a busy machine it may be seconds behind."""
    (Path(folder) / f"{where}-{rank}").touch()
    end = time.monotonic() + 30
    while not (Path(folder) / f"{where}-{1 - rank}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def save_as_stock(rank: int, folder: str, url: str, options: dict[str, Any]) -> str:
    """Write as rank 0 and wait as the others, on the default group; return what that raises."""
    with cases.default_group(rank, 2, folder, timeout_s=GROUP_TIMEOUT_S):
        try:
            if rank == 0:
                with fsspec.open(f"{url}/plain", "wb", **options) as file:
                    file.write(b"x" * 1000)
            dist.barrier()
        except RuntimeError as error:
            return str(error)
    return "saved"


def save_by_dcp(rank: int, folder: str, url: str, options: dict[str, Any]) -> str:
    """Save by `dcp.save` with our writer, whose collectives run on the default group."""
    with cases.default_group(rank, 2, folder, timeout_s=GROUP_TIMEOUT_S):
        writer = ckpt_storage.CheckpointStorageWriter(f"{url}/dcp", storage_options=options)
        try:
            dcp.save(state_of(rank), storage_writer=writer)
        except (RuntimeError, CheckpointException) as error:
            return str(error)
    return "saved"


def save_by_ours(rank: int, folder: str, url: str, options: dict[str, Any]) -> str:
    """Save by `ckpt_storage.save` on the same group, and train on it before and after."""
    with cases.default_group(rank, 2, folder, timeout_s=GROUP_TIMEOUT_S):
        total = torch.ones(1)
        together(rank, folder, "before")
        dist.all_reduce(total)
        ckpt_storage.save(state_of(rank), f"{url}/ours", storage_options=options)
        together(rank, folder, "after")
        dist.all_reduce(total)
        assert total.item() == 4.0
        by = [ckpt_storage.load]
        assert_holds(f"{url}/ours", state_of(rank), by, storage_options=options)
    return "saved"


def run_with_slow_server(ranks: RankPool, folder: Path, job: Any, key: str) -> list[str]:
    """Run a job whose first write of an object with `key` in its name is answered late."""
    folder.mkdir()
    with S3Server() as server:
        server.create_bucket("bucket")
        rule = FaultRule(op="put|part|complete", key=key, action="delay", delay_s=SLOW_S)
        server.faults([rule])
        # Under load the import alone takes longer than the group's timeout.
        ranks.run(dcp_cases.do, importlib.import_module, "s3fs", world_size=2)
        results = ranks.run(
            job, str(folder), "s3://bucket/run", server.storage_options, world_size=2
        )
        assert [record.key for record in server.requests if record.fault == "delay"]
    return results


def test_regression_fast_llm_543_waiting_on_the_training_group_times_out(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The pattern fails here: the waiting rank's collective dies while rank 0 still writes."""
    for name, job, key in (("plain", save_as_stock, "plain"), ("dcp", save_by_dcp, "__0_")):
        results = run_with_slow_server(ranks, tmp_path / name, job, key)
        assert results != ["saved", "saved"], name
        # The rank that waits times out; the other may only hear that it has gone.
        assert re.search("timed out|timeout|closed|reset", "\n".join(results), re.IGNORECASE)


def test_regression_fast_llm_543_save_outlasts_the_training_groups_timeout(
    ranks: RankPool, tmp_path: Path
) -> None:
    """`save` on that group, with storage that takes more than twice its timeout, succeeds."""
    results = run_with_slow_server(ranks, tmp_path / "ours", save_by_ours, "__0_")
    assert results == ["saved", "saved"]
