"""Ranks export, convert and copy exactly what was saved, after a save or by themselves."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import consolidate_cases as cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from consolidate_cases import check, check_report, files_in
from copy_cases import files_below, head_of, save, save_files
from dcp_cases import seeded
from safetensors import safe_open
from test_dcp_memory import Peak
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt_storage
from ckpt_storage import AsyncSaver, ConsolidateOptions, ConsolidationError, SaveState
from ckpt_storage.errors import CheckpointError, InvalidInputError, RankMismatchError
from ckpt_storage.export.consolidate import consolidate
from ckpt_storage.export.convert import TargetFormat, convert
from ckpt_storage.export.copy import copy
from ckpt_storage.export.folder import ExportFolder
from ckpt_storage.options import ProgressEvent, Timeouts
from ckpt_storage.store.upload import Upload
from ckpt_storage.testing.ranks import RankPool

MIB = 1 << 20
TIMEOUT_S = 60.0
SILENCE_S = 2.0


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


def save_foreign(_rank: int, folder: Path) -> None:
    """Save with torch's own writers; the first keeps strides, so views are left out."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: PLC0415  # prints

    state = cases.sharded_state(["bfloat16"])
    plain = {name: value for name, value in state.items() if "turned" not in name}
    dcp.save(plain, storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=False))
    large = {name: value for name, value in state.items() if "large" in name}
    writer = HuggingFaceStorageWriter(str(folder / "dcp_safetensors"), save_distributed=True)
    dcp.save(large, storage_writer=writer)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_checkpoints_of_torchs_writers_are_exported(ranks: RankPool, tmp_path: Path) -> None:
    """Shards of both of torch's writers; without a save id, changed files make the export anew."""
    ranks.run(save_foreign, tmp_path, world_size=2)
    for kind in ("dcp", "dcp_safetensors"):
        url = tmp_path / kind
        first = ranks.run(cases.export, url, world_size=2)[0]
        kept = {
            name: value
            for name, value in cases.whole_state(["bfloat16"]).items()
            if "large" in name or (kind == "dcp" and "turned" not in name)
        }
        check(files_in(url / "hf"), kept)
        assert (first.source_format, first.save_id) == (kind, None)
    url = tmp_path / "dcp"
    first, again = (ranks.run(cases.export, url, world_size=count)[0] for count in (2, 3))
    assert again.resumed == ("model.safetensors",)
    ranks.run(save_foreign, tmp_path, world_size=2)
    again = ranks.run(cases.export, url, world_size=2)[0]
    assert not again.resumed
    assert again.fingerprint != first.fingerprint


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


def consolidate_and_die(
    rank: int, url: Path, victim: int, holder: type, name: str
) -> tuple[str, float]:
    """Consolidate; the victim is killed at a method. Others return their error and how long."""
    if rank == victim:
        setattr(holder, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    start_s = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        consolidate(url, timeout=Timeouts(consolidate=60, plan=60, silence=SILENCE_S))
    return str(caught.value), time.monotonic() - start_s


@pytest.mark.parametrize(
    ("victim", "holder", "name"),
    [(1, Upload, "write_part"), (0, Upload, "complete"), (0, ExportFolder, "publish")],
)
def test_a_killed_rank_is_named_and_a_rerun_completes(
    tmp_path: Path, ranks: RankPool, victim: int, holder: type, name: str
) -> None:
    """The others raise within seconds, nothing is published; the next run leaves nothing over."""
    url = tmp_path / "run"
    ckpt_storage.save(model(), url)
    consolidate(url, tmp_path / "reference")
    outcomes = ranks.outcomes(consolidate_and_die, url, victim, holder, name, world_size=3)
    assert "died" in str(outcomes.pop(victim).failure)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        text, seconds = outcome.value
        assert f"ank {victim}" in text, text
        assert seconds < SILENCE_S + 5.0
    unfinished = files_in(url / "hf")
    index = json.loads(unfinished.get(cases.INDEX, b'{"weight_map": {}}'))
    assert not unfinished.keys() & index["weight_map"].values()
    consolidate(url)
    check(files_in(url / "hf"), model()["model"])
    assert weights(url / "hf").keys() == weights(tmp_path / "reference").keys()


STATE: dict[str, Any] = {f"t{number}": seeded(number, 40_000) for number in range(5)} | {
    "step": {"count": 4}
}
OPTIONS: dict[str, Any] = {"unsupported": "drop", "max_file_bytes": 200_000}


def move_together(_rank: int, folder: Path, formats: list[TargetFormat]) -> list[Any]:
    """Convert to each format, copy, and be refused; return the reports."""
    world = dist.group.WORLD
    told: list[Any] = []
    for to in formats:
        source = folder / ("state.pt" if to == "ckpt_storage" else "src")
        told.append(convert(source, folder / f"three-{to}", process_group=world, to=to, **OPTIONS))
    told.append(copy(folder / "src", folder / "copy", process_group=world))
    with pytest.raises(CheckpointError):
        convert(folder / "src", folder / "refused", process_group=world, to="safetensors")
    return told


def test_ranks_move_as_one_process_does(ranks: RankPool, tmp_path: Path) -> None:
    """Three ranks make the files that one makes, commit once, and all get the report."""
    save(STATE, tmp_path / "src")
    torch.save(STATE, tmp_path / "state.pt")
    formats: list[TargetFormat] = ["dcp", "safetensors", "torch_save", "ckpt_storage"]
    told = ranks.run(move_together, tmp_path, formats, world_size=3)
    assert all(one == told[0] for one in told), told
    assert not list((tmp_path / "refused").glob("*.safetensors"))
    for to in formats[:-1]:
        convert(tmp_path / "src", tmp_path / f"one-{to}", to=to, **OPTIONS)
    assert (tmp_path / "one-torch_save").read_bytes() == (
        tmp_path / "three-torch_save"
    ).read_bytes()
    for to in formats[:2]:
        made, expected = files_below(tmp_path / f"three-{to}"), files_below(tmp_path / f"one-{to}")
        made.pop(".metadata", None), expected.pop(".metadata", None)
        assert made == expected
    found = ckpt_storage.open_checkpoint(tmp_path / "three-ckpt_storage")
    assert all(torch.equal(found[name].torch(), STATE[name]) for name in ("t0", "t4"))
    there, here = files_below(tmp_path / "copy"), files_below(tmp_path / "src")
    assert head_of(there) == head_of(here)
    assert save_files(there) == save_files(here)
    for name in ("three-ckpt_storage", "copy"):
        assert ckpt_storage.verify(tmp_path / name).ok
