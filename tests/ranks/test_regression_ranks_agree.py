"""Ranks that act alone: own clocks, own folders (accelerate 969), own waits (Fast-LLM 543)."""

from __future__ import annotations

import importlib
import pickle
import re
import shutil
import time
from pathlib import Path
from typing import Any

import dcp_cases
import front_door_cases as cases
import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import assert_holds, failures_of, files_below, seeded
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_storage
from ckpt_storage import CheckpointStorageWriter, RankMismatchError
from ckpt_storage.testing.ranks import RankPool
from ckpt_storage.testing.s3_server import FaultRule, S3Server


def path_of(rank: int, folder: str) -> str:
    """Return the path that a rank makes from its clock."""
    return f"{folder}/2026-01-01T00-00-{rank:02}"


def save_by_stock(rank: int, folder: str) -> str:
    """Save by torch's writer, to a path of each rank's own."""
    dcp.save(cases.state_of(1), storage_writer=dcp.FileSystemWriter(path_of(rank, folder)))
    return "saved"


def load_by_stock(_rank: int, folder: str) -> list[str]:
    """Load by torch's reader what rank 0 saved; return each rank's exception."""
    target = cases.state_of(1, zeros=True)
    try:
        dcp.load(target, storage_reader=dcp.FileSystemReader(path_of(0, folder)))
    except CheckpointException as error:
        return [f"{type(one).__name__}: {one}" for one in failures_of(error).values()]
    return []


def test_regression_own_clocks_stock_save_succeeds_and_cannot_be_loaded(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The pattern fails here: every rank reports success, and loading misses a file."""
    assert ranks.run(save_by_stock, str(tmp_path), world_size=2) == ["saved", "saved"]
    for told in ranks.run(load_by_stock, str(tmp_path), world_size=2):
        assert any("FileNotFoundError" in text and ".distcp" in text for text in told)


def save_by_ours(rank: int, folder: str) -> tuple[dict[str, list[int]], str]:
    """Save by `save`, to a path of each rank's own; then together."""
    error = cases.caught(ckpt_storage.save, cases.state_of(1), path_of(rank, folder), timeout=20.0)
    assert isinstance(error, RankMismatchError)
    pickle.loads(pickle.dumps(error))
    return error.values, str(error)


def save_by_dcp(rank: int, folder: str) -> tuple[dict[str, list[int]], str]:
    """Save by `dcp.save` with our writer, to a path of each rank's own."""
    with pytest.raises(CheckpointException) as caught:
        dcp.save(cases.state_of(1), storage_writer=CheckpointStorageWriter(path_of(rank, folder)))
    error: Any = failures_of(caught.value)[rank]
    assert isinstance(error, RankMismatchError)
    return error.values, str(error)


@pytest.mark.parametrize("job", [save_by_ours, save_by_dcp])
def test_regression_own_clocks_are_refused_on_all_ranks_before_anything_is_made(
    ranks: RankPool, tmp_path: Path, job: Any
) -> None:
    """All ranks raise an error that lists each path with its ranks, and no name was made."""
    for values, text in ranks.run(job, str(tmp_path), world_size=3):
        assert sorted(values.values()) == [[0], [1], [2]]
        for rank in range(3):
            assert any(value.endswith(f"{rank:02}") for value in values)
        assert "broadcast" in text
    assert files_below(tmp_path) == set()
    assert list(tmp_path.iterdir()) == []


def prepare_as_everybody(rank: int, folder: str) -> str:
    """Remove and make the folder as each rank did; return what that raised."""
    if rank == 0:
        Path(folder).mkdir()
    dist.barrier()
    exists = Path(folder).exists()  # both ranks see it
    dist.barrier()
    try:
        if rank == 0 and exists:
            shutil.rmtree(folder)
        dist.barrier()
        if rank == 1 and exists:
            shutil.rmtree(folder)
    except FileNotFoundError as error:
        return type(error).__name__
    finally:
        dist.barrier()
    return "prepared"


def test_regression_969_every_rank_preparing_the_folder_crashes_one(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The pattern fails here: the rank that comes second finds nothing to remove."""
    results = ranks.run(prepare_as_everybody, str(tmp_path / "run"), world_size=2)
    assert results == ["prepared", "FileNotFoundError"]


def save_over_and_over(rank: int, folder: str) -> list[tuple[str, str]]:
    """Save to one folder five times; return this rank's calls that make or remove anything."""
    with cases.faulty_disk([]) as made:
        for step in range(5):
            cases.save(rank, folder, step, overwrite=True)
    return [(call.operation, call.path) for posix in made for call in posix.script.calls]


def test_regression_969_only_the_coordinator_prepares_the_folder(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Four ranks save five times to one existing folder; only rank 0 makes or removes folders."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "note.txt").write_text("not ours")
    calls = ranks.run(save_over_and_over, str(path), world_size=4)
    cases.assert_loads(path, 4, dcp_cases.load_stock)
    assert (path / "note.txt").read_text() == "not ours"
    names = {name for of_rank in calls for name, _ in of_rank}
    assert "mkdir" in names, sorted(names)
    for rank, of_rank in enumerate(calls):
        folders = [call for call in of_rank if call[0] in {"mkdir", "rmdir", "remove_folder"}]
        assert bool(folders) == (rank == 0), (rank, folders)


GROUP_TIMEOUT_S = 2.0
SLOW_S = 5.0


def slow_state(rank: int) -> dict[str, Any]:
    """Return a state of which both ranks write a part."""
    return {"w": seeded(1, 1000), f"of-{rank}": seeded(rank, 10)}


def together(rank: int, folder: str, where: str) -> None:
    """Wait for the other rank without the group: on a busy machine it may be seconds behind."""
    (Path(folder) / f"{where}-{rank}").touch()
    end = time.monotonic() + 30
    while not (Path(folder) / f"{where}-{1 - rank}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def save_slowly_as_stock(rank: int, folder: str, url: str, options: dict[str, Any]) -> str:
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


def save_slowly_by_dcp(rank: int, folder: str, url: str, options: dict[str, Any]) -> str:
    """Save by `dcp.save` with our writer, whose collectives run on the default group."""
    with cases.default_group(rank, 2, folder, timeout_s=GROUP_TIMEOUT_S):
        writer = ckpt_storage.CheckpointStorageWriter(f"{url}/dcp", storage_options=options)
        try:
            dcp.save(slow_state(rank), storage_writer=writer)
        except (RuntimeError, CheckpointException) as error:
            return str(error)
    return "saved"


def save_slowly_by_ours(rank: int, folder: str, url: str, options: dict[str, Any]) -> str:
    """Save by `ckpt_storage.save` on the same group, and train on it before and after."""
    with cases.default_group(rank, 2, folder, timeout_s=GROUP_TIMEOUT_S):
        total = torch.ones(1)
        together(rank, folder, "before")
        dist.all_reduce(total)
        ckpt_storage.save(slow_state(rank), f"{url}/ours", storage_options=options)
        together(rank, folder, "after")
        dist.all_reduce(total)
        assert total.item() == 4.0
        by = [ckpt_storage.load]
        assert_holds(f"{url}/ours", slow_state(rank), by, storage_options=options)
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
    for name, job, key in (
        ("plain", save_slowly_as_stock, "plain"),
        ("dcp", save_slowly_by_dcp, "__0_"),
    ):
        results = run_with_slow_server(ranks, tmp_path / name, job, key)
        assert results != ["saved", "saved"], name
        # The rank that waits times out; the other may only hear that it has gone.
        assert re.search("timed out|timeout|closed|reset", "\n".join(results), re.IGNORECASE)


def test_regression_fast_llm_543_save_outlasts_the_training_groups_timeout(
    ranks: RankPool, tmp_path: Path
) -> None:
    """`save` on that group, with storage that takes more than twice its timeout, succeeds."""
    results = run_with_slow_server(ranks, tmp_path / "ours", save_slowly_by_ours, "__0_")
    assert results == ["saved", "saved"]
