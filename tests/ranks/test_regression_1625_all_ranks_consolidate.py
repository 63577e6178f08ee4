"""Consolidation keeps all ranks busy, wherever it goes (pytorch/torchtitan#1625)."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import consolidate_cases as cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from consolidate_cases import check, files_in
from dcp_cases import seeded
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_storage
from ckpt_storage.export.consolidate import consolidate
from ckpt_storage.testing.ranks import RankPool
from ckpt_storage.testing.s3_server import S3Server

MIB = 1 << 20


def model() -> dict[str, torch.Tensor]:
    """Return 32 MiB in four tensors."""
    return {f"w{i}": seeded(i, 1024, 2048) for i in range(4)}


def written_bytes() -> int:
    """Return how many bytes this process has handed to the kernel for writing."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def sharded() -> dict[str, Any]:
    """Return this rank's rows of the model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        for name, tensor in model().items()
    }


def with_torch(_rank: int, folder: Path) -> int:
    """Save and consolidate to one file with torch's functions; return what the latter wrote."""
    writer = HuggingFaceStorageWriter(str(folder / "run"), save_distributed=True)
    dcp.save(sharded(), storage_writer=writer)
    (folder / "out").mkdir(exist_ok=True)
    before = written_bytes()
    consolidate_safetensors_files_on_every_rank(
        str(folder / "run"), str(folder / "out"), dict.fromkeys(model(), 1), num_threads=1
    )
    return written_bytes() - before


def with_ours(_rank: int, folder: Path) -> tuple[int, list[int]]:
    """Save and consolidate to one file with ours; return what the latter wrote, and who wrote."""
    ckpt_storage.save(sharded(), folder / "run")
    before = written_bytes()
    report = consolidate(folder / "run", folder / "out", process_group=dist.group.WORLD)
    return written_bytes() - before, list(report.rank_bytes)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_file_is_written_by_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """With torch one rank writes all; with ours the most is at most 1.05 times the mean."""
    (tmp_path / "torch").mkdir()
    torchs = ranks.run(with_torch, tmp_path / "torch")
    assert max(torchs) > 32 * MIB
    assert all(count < MIB for count in sorted(torchs)[:-1])
    ours = ranks.run(with_ours, tmp_path / "ours")
    written = [count for count, _ in ours]
    shares = ours[0][1]
    assert max(shares) <= 1.05 * sum(shares) / 4
    assert max(written) <= 1.05 * sum(written) / 4 + MIB
    check(files_in(tmp_path / "ours" / "out"), model())


def beside_training(_rank: int, url: Path) -> int:
    """Consolidate in a thread while this thread goes on with collectives; return how many."""
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(consolidate(url)))
    thread.start()
    total, count = torch.zeros(1), 0
    is_over = torch.zeros(1)
    while not is_over:
        total += 1
        dist.all_reduce(total)
        is_over = torch.tensor([0.0 if thread.is_alive() else 1.0])
        dist.all_reduce(is_over, op=dist.ReduceOp.MIN)
        count += 1
    thread.join()
    assert len(ended) == 1
    return count


def test_it_is_safe_beside_training(ranks: RankPool, tmp_path: Path) -> None:
    """Collectives of the trainer on the default group go on while the same ranks consolidate."""
    ckpt_storage.save(model(), tmp_path / "run")
    assert min(ranks.run(beside_training, tmp_path / "run")) > 1
    check(files_in(tmp_path / "run" / "hf"), model())


COLLECTIVE = re.compile("all_|barrier|broadcast|gather|new_|reduce|scatter")


def without_collectives(_rank: int, url: Path) -> None:
    """Consolidate where every collective, and every new group, is an error."""
    with pytest.MonkeyPatch.context() as patch:
        for name in filter(COLLECTIVE.match, dir(dist.distributed_c10d)):
            patch.delattr(dist, name, raising=False)
            patch.delattr(dist.distributed_c10d, name)
        consolidate(url)


def test_no_collective_runs_on_any_group(ranks: RankPool, tmp_path: Path) -> None:
    """No group of the trainer takes part, so neither a GPU nor a short watchdog matters."""
    ckpt_storage.save(model(), tmp_path / "run")
    ranks.run(without_collectives, tmp_path / "run", world_size=2)
    check(files_in(tmp_path / "run" / "hf"), model())


def test_all_ranks_write_one_object_on_s3(ranks: RankPool, tmp_path: Path) -> None:
    """To S3, too, the bytes of one object are divided: at most 1.05 times the mean."""
    big = {"w": torch.arange(110 * MIB, dtype=torch.int16).reshape(-1, 1024)}
    ckpt_storage.save(big, tmp_path / "run", sync_files=False)
    with S3Server() as server:
        server.create_bucket("bkt")
        options = {"output_storage_options": server.storage_options}
        report = ranks.run(cases.export, tmp_path / "run", "s3://bkt/hf", options, world_size=2)[0]
        (name,) = [name for name in server.dump("bkt") if name.endswith(".safetensors")]
        data = server.dump("bkt")[name]
    assert [file.ranks for file in report.files] == [(0, 1)]
    assert max(report.rank_bytes) <= 1.05 * sum(report.rank_bytes) / 2
    assert data.endswith(big["w"].numpy().tobytes())
