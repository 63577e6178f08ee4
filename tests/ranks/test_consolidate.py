"""Ranks export exactly the tensors that were saved, whoever saved them, after a save or alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import consolidate_cases as cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from consolidate_cases import check, check_report, files_in
from dcp_cases import seeded
from safetensors import safe_open
from test_dcp_memory import Peak
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt_storage
from ckpt_storage import AsyncSaver, ConsolidateOptions, ConsolidationError, SaveState
from ckpt_storage.errors import InvalidInputError, RankMismatchError
from ckpt_storage.export.consolidate import consolidate
from ckpt_storage.options import ProgressEvent
from ckpt_storage.testing.ranks import RankPool

MIB = 1 << 20
TIMEOUT_S = 60.0


def weights(folder: Path) -> dict[str, bytes]:
    """Return the files of an export but its documents."""
    found = files_in(folder)
    return {name: data for name, data in found.items() if not name.startswith(".ckpt-storage/")}


def test_every_dtype_and_sharding_arrives(ranks: RankPool, tmp_path: Path) -> None:
    """Every dtype in every shape and sharding arrives bit by bit; one process makes the same."""
    url = tmp_path / "run"
    reports = ranks.run(cases.save_and_export, url, {"max_file_bytes": 300_000}, world_size=4)
    files = files_in(url / "hf")
    check(files, cases.whole_state())
    check_report(reports[0], files)
    assert len(reports[0].files) > 2
    assert all(report == reports[0] for report in reports)
    assert len(reports[0].rank_bytes) == 4
    assert sum(reports[0].rank_bytes) == reports[0].total_bytes
    consolidate(url, tmp_path / "one", max_file_bytes=300_000)
    assert weights(tmp_path / "one") == weights(url / "hf")


def save_stock(_rank: int, url: Path) -> None:
    """Save with torch's own writer, which keeps strides: only what is contiguous."""
    dcp.save(contiguous(cases.sharded_state(["bfloat16"])), storage_writer=stock(url))


def contiguous(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a state that are no views."""
    return {name: value for name, value in state.items() if "turned" not in name}


def stock(url: Path) -> dcp.FileSystemWriter:
    """Return torch's writer."""
    return dcp.FileSystemWriter(url, sync_files=False)


def save_torch_safetensors(_rank: int, url: Path) -> None:
    """Save torch's sharded safetensors."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: PLC0415  # prints

    state = {k: v for k, v in cases.sharded_state(["bfloat16"]).items() if "large" in k}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(url), save_distributed=True))


def test_checkpoints_of_stock_dcp_are_exported(ranks: RankPool, tmp_path: Path) -> None:
    """What `FileSystemWriter` saved is exported; without a save id, changed files make it anew."""
    url = tmp_path / "run"
    ranks.run(save_stock, url, world_size=2)
    first = ranks.run(cases.export, url, world_size=2)[0]
    check(files_in(url / "hf"), contiguous(cases.whole_state(["bfloat16"])))
    assert (first.source_format, first.save_id) == ("dcp", None)
    assert ranks.run(cases.export, url, world_size=3)[0].resumed == ("model.safetensors",)
    ranks.run(save_stock, url, world_size=2)
    again = ranks.run(cases.export, url, world_size=2)[0]
    assert not again.resumed
    assert again.fingerprint != first.fingerprint


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torchs_sharded_safetensors_are_exported(ranks: RankPool, tmp_path: Path) -> None:
    """What `HuggingFaceStorageWriter(save_distributed=True)` saved is exported."""
    ranks.run(save_torch_safetensors, tmp_path / "run", world_size=2)
    report = ranks.run(cases.export, tmp_path / "run", world_size=2)[0]
    state = {k: v for k, v in cases.whole_state(["bfloat16"]).items() if "large" in k}
    check(files_in(tmp_path / "run" / "hf"), state)
    assert report.source_format == "dcp_safetensors"


def model() -> dict[str, Any]:
    """Return a small model."""
    return {"model": {f"w{i}": seeded(i, 4000, 50) for i in range(6)}}


def disagree(rank: int, url: Path, limit: str) -> None:
    """Consolidate with a function that answers differently, and an option of rank 1's own."""
    consolidate(url, max_file_bytes=limit if rank else "5GB", rename=lambda fqn: f"{rank}.{fqn}")


def test_ranks_that_disagree_are_told_so(ranks: RankPool, tmp_path: Path) -> None:
    """What differs, or is wrong on one rank, is an error on all that names it; nothing is made."""
    ckpt_storage.save(model(), tmp_path / "run")
    outcomes = ranks.outcomes(disagree, tmp_path / "run", "5GB", world_size=2)
    assert {type(outcome.error) for outcome in outcomes} == {RankMismatchError}
    zero, one = ranks.outcomes(disagree, tmp_path / "run", "much", world_size=2)
    assert "much" in str(zero.error)
    assert "ank 1" in str(zero.error)
    assert isinstance(one.error, InvalidInputError)
    assert files_in(tmp_path / "run" / "hf") == {}


def export_in_a_group(rank: int, url: Path) -> tuple[Any, list[ProgressEvent]]:
    """Consolidate on ranks 1 and 2, and note the progress."""
    events: list[ProgressEvent] = []
    group = dist.new_group([1, 2], backend="gloo")
    report = consolidate(url, process_group=group, progress=events.append) if rank else None
    return report, events


def test_a_group_of_some_ranks_exports(ranks: RankPool, tmp_path: Path) -> None:
    """`process_group=` of two of three ranks: these do it, each told of its own bytes."""
    ckpt_storage.save(model(), tmp_path / "run")
    (nothing, _), *told = ranks.run(export_in_a_group, tmp_path / "run", world_size=3)
    assert nothing is None
    assert told[0][0] == told[1][0]
    check(files_in(tmp_path / "run" / "hf"), model()["model"])
    for rank, (report, events) in enumerate(told):
        last = events[-1]
        assert (last.phase, last.rank) == ("consolidate", rank)
        assert last.done_bytes == last.total_bytes == report.rank_bytes[rank]
        assert last.save_id is not None


LIMIT_MIB = 64
SLACK_MIB = 64
ROWS = 300 * MIB // 2 // 8192


def save_big(rank: int, path: Path) -> None:
    """Save one tensor of 300 MiB, in column shards."""
    local = torch.full((ROWS, 4096), rank + 0.5, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
    ckpt_storage.save({"w": tensor}, path, sync_files=False)


def peak_of_a_consolidation(_rank: int, path: Path) -> float:
    """Consolidate after a small one that starts what the first one starts."""
    ckpt_storage.save({"x": torch.ones(8)}, path / "warm")
    consolidate(path / "warm")
    with Peak() as peak:
        consolidate(path / "run", memory_limit_bytes=LIMIT_MIB * MIB)
    return peak.mib


def test_one_large_tensor_is_never_in_memory(ranks: RankPool, tmp_path: Path) -> None:
    """300 MiB in two shards are exported within 64 MiB of buffers and what a process needs."""
    ranks.run(save_big, tmp_path / "run", world_size=2)
    (peak_mib,) = ranks.run(peak_of_a_consolidation, tmp_path, world_size=1)
    assert peak_mib < LIMIT_MIB + SLACK_MIB
    with safe_open(tmp_path / "run" / "hf" / "model.safetensors", framework="pt") as found:
        part = found.get_slice("w")
        assert part.get_shape() == [ROWS, 8192]
        corners = torch.stack([part[:1, :1], part[:1, -1:], part[-1:, :1], part[-1:, -1:]])
    assert corners.flatten().tolist() == [0.5, 1.5, 0.5, 1.5]


def state() -> dict[str, Any]:
    """Return a model with other things beside it."""
    return {
        "model": {"a.weight": torch.arange(1000.0).reshape(10, 100), "b": torch.ones(3)},
        "optimizer": {"moment": torch.zeros(4)},
        "step": 1,
    }


def saved(_rank: int, folder: str, mode: Any) -> tuple[str | None, str]:
    """Save with an export at its usual place, or in the background to several files elsewhere."""
    if mode is None:
        info = ckpt_storage.save(state(), f"{folder}/one", consolidate=True, timeout=TIMEOUT_S)
        assert info.save_id == ckpt_storage.list_checkpoints(folder)[0].save_id
        return info.export, "COMMITTED"
    options = ConsolidateOptions(max_file_bytes=3000, output=f"{folder}/out")
    with AsyncSaver(mode=mode, timeout=TIMEOUT_S) as saver:
        handle = saver.save(state(), f"{folder}/one", consolidate=options)
        return handle.result().export, handle.state.name


@pytest.mark.parametrize("mode", [None, "thread", "process"])
def test_a_save_exports_what_it_committed(ranks: RankPool, tmp_path: Path, mode: Any) -> None:
    """Saves in the foreground, in threads and workers export, with all options, and say where."""
    outcomes = ranks.run(saved, str(tmp_path), mode, world_size=2)
    output = tmp_path / ("out" if mode else "one/hf")
    assert outcomes == [(output.as_uri(), "COMMITTED")] * 2
    check(files_in(output), state()["model"])
    assert len(list(output.glob("*.safetensors"))) == (2 if mode else 1)
    assert ckpt_storage.verify(str(tmp_path / "one")).ok


def failed(rank: int, folder: str) -> tuple[str, Any, str]:
    """Fail after the commit; return the error, what it carries, and the state of the save."""
    options = ConsolidateOptions(include=["nothing.like.it"])
    with AsyncSaver(mode="process", timeout=TIMEOUT_S) as saver:
        handle = saver.save(state(), f"{folder}/one", consolidate=options)
        error = handle.exception()
        assert isinstance(error, ConsolidationError), (rank, error)
        return str(error), error.info.save_id, handle.state.name


def test_a_failed_export_leaves_the_checkpoint_committed(ranks: RankPool, tmp_path: Path) -> None:
    """The error carries the committed checkpoint, the state stays COMMITTED, on all ranks."""
    committed = []
    for text, save_id, save_state in ranks.run(failed, str(tmp_path), world_size=2):
        assert "nothing.like.it" in text
        assert "is committed" in text
        assert save_state == SaveState.COMMITTED.name
        committed.append(save_id)
    assert committed == [ckpt_storage.list_checkpoints(str(tmp_path))[0].save_id] * 2
    target = state()
    target["model"]["b"].zero_()
    ckpt_storage.load(target, str(tmp_path / "one"))
    assert torch.equal(target["model"]["b"], torch.ones(3))
