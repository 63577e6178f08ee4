"""Ranks export, convert and copy exactly what was saved, after a save or by themselves.

Consolidation keeps all ranks busy, wherever it goes (pytorch/torchtitan#1625).
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import consolidate_cases as cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from consolidate_cases import check, check_report, files_in
from copy_cases import files_below, head_of, save, save_files
from dcp_cases import assert_holds, cut, seeded
from front_door_cases import caught
from limits import HANG_S, SLACK_S
from on_ranks import gathered, on_ranks
from rank_pool import RankPool
from s3_server import S3Server
from safetensors import safe_open
from saver_cases import quick_saver
from test_dcp_memory import peak_mib
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt_storage
from ckpt_storage import ConsolidateOptions, SaveState, errors
from ckpt_storage.export.consolidate import consolidate
from ckpt_storage.export.conversion import TargetFormat
from ckpt_storage.export.convert import convert
from ckpt_storage.export.copy import copy
from ckpt_storage.export.folder import ExportFolder
from ckpt_storage.options import ProgressEvent, Timeouts
from ckpt_storage.store.upload import Upload

MIB = 1 << 20
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


def _save_foreign(_rank: int, folder: Path) -> None:
    # The first keeps strides, so views are left out.
    state = cases.sharded_state(["bfloat16"])
    plain = {name: value for name, value in state.items() if "turned" not in name}
    dcp.save(plain, storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=False))
    large = {name: value for name, value in state.items() if "large" in name}
    writer = HuggingFaceStorageWriter(str(folder / "dcp_safetensors"), save_distributed=True)
    dcp.save(large, storage_writer=writer)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_checkpoints_of_torchs_writers_are_exported(ranks: RankPool, tmp_path: Path) -> None:
    """Shards of both of torch's writers; without a save id, changed files make the export anew."""
    ranks.run(_save_foreign, tmp_path, world_size=2)
    for kind in ("dcp_safetensors", "dcp"):
        url = tmp_path / kind
        first = ranks.run(cases.export, url, world_size=2)[0]
        state = cases.whole_state(["bfloat16"])
        kept = [n for n in state if "large" in n or (kind == "dcp" and "turned" not in n)]
        check(files_in(url / "hf"), {name: state[name] for name in kept})
        assert (first.source_format, first.save_id) == (kind, None)
        again = ranks.run(cases.export, url, world_size=3)[0]
        assert again.resumed == ("model.safetensors",)
    ranks.run(_save_foreign, tmp_path, world_size=2)
    last = ranks.run(cases.export, tmp_path / "dcp", world_size=2)[0]
    assert not last.resumed
    assert last.fingerprint != first.fingerprint


def model() -> dict[str, Any]:
    return {"model": {f"w{i}": seeded(i, 4000, 50) for i in range(6)}}


@on_ranks()
def test_ranks_that_disagree_are_told_so(rank: int, tmp_path: Path) -> None:
    """What differs, or is wrong on one rank, is an error on all that names it; nothing is made."""
    url = tmp_path / "run"
    ckpt_storage.save(model(), url)
    error = caught(consolidate, url, rename=lambda fqn: f"{rank}.{fqn}")
    assert isinstance(error, errors.RankMismatchError)
    error = caught(consolidate, url, max_file_bytes="much" if rank else "5GB")
    assert type(error) is (errors.InvalidInputError if rank else errors.RankFailedError)
    assert "much" in str(error)
    assert error.rank == 1
    assert files_in(url / "hf") == {}


@on_ranks()
def test_a_wrong_timeout_of_a_rank_is_an_error_on_all(rank: int, tmp_path: Path) -> None:
    """Copies and conversions: no rank waits for the one that has none."""
    world = dist.group.WORLD
    ckpt_storage.save(model(), tmp_path / "run")
    options: dict[str, Any] = {"process_group": world, "timeout": "soon" if rank else HANG_S}
    for call in (copy, partial(convert, to="safetensors")):
        error = caught(call, tmp_path / "run", tmp_path / "to", **options)
        assert type(error) is (errors.InvalidInputError if rank else errors.RankFailedError)
        assert "soon" in str(error)


@on_ranks(3)
def test_a_group_of_some_ranks_exports(rank: int, tmp_path: Path) -> None:
    """`process_group=` of two of three ranks: these do it, each told of its own bytes."""
    ckpt_storage.save(model(), tmp_path / "run")
    group = dist.new_group([1, 2], backend="gloo")
    report = None
    if rank:
        events: list[ProgressEvent] = []
        report = consolidate(tmp_path / "run", process_group=group, progress=events.append)
        last = events[-1]
        assert (last.phase, last.rank) == ("consolidate", rank - 1)
        assert last.done_bytes == last.total_bytes == report.rank_bytes[rank - 1]
        assert last.save_id is not None
        check(files_in(tmp_path / "run" / "hf"), model()["model"])
    reports = gathered(report)
    assert reports[0] is None
    assert reports[1] == reports[2]


LIMIT_MIB = 64
SLACK_MIB = 64
ROWS = 300 * MIB // 2 // 8192


def _save_columns(rank: int, path: Path) -> None:
    local = torch.full((ROWS, 4096), rank + 0.5, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
    ckpt_storage.save({"w": tensor}, path, sync_files=False)


def _peak_mib(_rank: int, path: Path) -> float:
    # What the first consolidation starts does not count.
    ckpt_storage.save({"x": torch.ones(8)}, path / "warm")
    consolidate(path / "warm")
    return peak_mib(consolidate, path / "run", memory_limit_bytes=LIMIT_MIB * MIB)


def test_one_large_tensor_is_never_in_memory(ranks: RankPool, tmp_path: Path) -> None:
    """300 MiB in two shards are exported within 64 MiB of buffers and what a process needs."""
    ranks.run(_save_columns, tmp_path / "run", world_size=2)
    assert ranks.run(_peak_mib, tmp_path, world_size=1)[0] < LIMIT_MIB + SLACK_MIB
    with safe_open(tmp_path / "run" / "hf" / "model.safetensors", framework="pt") as found:
        part = found.get_slice("w")
        assert part.get_shape() == [ROWS, 8192]
        corners = [float(part[row][column]) for row in (0, -1) for column in (0, -1)]
    assert corners == [0.5, 1.5, 0.5, 1.5]


def state() -> dict[str, Any]:
    return {
        "model": {"a.weight": torch.arange(1000.0).reshape(10, 100), "b": torch.ones(3)},
        "optimizer": {"moment": torch.zeros(4)},
        "step": 1,
    }


@pytest.mark.parametrize("mode", [None, "thread", "process"])
@on_ranks()
def test_a_save_exports_what_it_committed(tmp_path: Path, mode: Any) -> None:
    """Saves in the foreground, in threads and workers export, with all options, and say where."""
    url, output = tmp_path / "one", tmp_path / ("out" if mode else "one/hf")
    if mode is None:
        info = ckpt_storage.save(state(), url, consolidate=True, timeout=HANG_S)
    else:
        options = ConsolidateOptions(max_file_bytes=3000, output=output)
        with quick_saver(mode) as saver:
            handle = saver.save(state(), url, consolidate=options)
            info = handle.result()
            assert handle.state is SaveState.COMMITTED
    assert info.export == output.as_uri()
    assert info.save_id == ckpt_storage.list_checkpoints(tmp_path)[0].save_id
    check(files_in(output), state()["model"])
    assert len(list(output.glob("*.safetensors"))) == (2 if mode else 1)
    assert ckpt_storage.verify(url).ok


@on_ranks()
def test_a_failed_export_leaves_the_checkpoint_committed(tmp_path: Path) -> None:
    """The error carries the committed checkpoint, the state stays COMMITTED, on all ranks."""
    options = ConsolidateOptions(include=["nothing.like.it"])
    with quick_saver("process") as saver:
        handle = saver.save(state(), tmp_path / "one", consolidate=options)
        error = handle.exception()
        assert isinstance(error, errors.ConsolidationError), error
    assert "nothing.like.it" in str(error)
    assert "is committed" in str(error)
    assert handle.state is SaveState.COMMITTED
    assert error.info.save_id == ckpt_storage.list_checkpoints(tmp_path)[0].save_id
    assert_holds(tmp_path / "one", state(), [ckpt_storage.load])


def _consolidate_and_die(
    rank: int, url: Path, victim: int, holder: type, name: str
) -> tuple[str, float]:
    if rank == victim:
        setattr(holder, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    start_s = time.monotonic()
    timeouts = Timeouts(consolidate=60, plan=60, silence=SILENCE_S)
    return str(caught(consolidate, url, timeout=timeouts)), time.monotonic() - start_s


@pytest.mark.deadline
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
    outcomes = ranks.outcomes(_consolidate_and_die, url, victim, holder, name, world_size=3)
    assert "died" in str(outcomes.pop(victim).failure)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        text, seconds = outcome.value
        assert f"ank {victim}" in text, text
        assert seconds < SILENCE_S + SLACK_S
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


@on_ranks(3)
def test_ranks_move_as_one_process_does(rank: int, tmp_path: Path) -> None:
    """Three ranks make the files that one makes, commit once, and all get the report."""
    world, src, file = dist.group.WORLD, tmp_path / "src", tmp_path / "state.pt"
    if rank == 0:
        save(STATE, src)
        torch.save(STATE, file)
    gathered()
    told: list[Any] = [copy(src, tmp_path / "copy", process_group=world)]
    formats: list[TargetFormat] = ["dcp", "safetensors", "torch_save", "ckpt_storage"]
    for to in formats:
        source, target = file if to == "ckpt_storage" else src, tmp_path / f"three-{to}"
        told.append(convert(source, target, process_group=world, to=to, **OPTIONS))
        if rank == 0:
            convert(source, tmp_path / f"one-{to}", to=to, **OPTIONS)
    caught(convert, src, tmp_path / "refused", process_group=world, to="safetensors")
    name = "long" * 20
    other = tmp_path / f"{rank}-{name}.pt"
    error = caught(convert, src, other, process_group=world, to="torch_save", **OPTIONS)
    assert isinstance(error, errors.RankMismatchError)
    assert all(f"{one}-{name}.pt" in str(error) for one in range(3))
    assert gathered(told) == [told] * 3
    assert not list((tmp_path / "refused").glob("*.safetensors"))
    one, three = (tmp_path / f"{count}-torch_save" for count in ("one", "three"))
    assert one.read_bytes() == three.read_bytes()
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


def large_model() -> dict[str, torch.Tensor]:
    return {f"w{i}": seeded(i, 1024, 2048) for i in range(4)}


def written_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(4)
def test_regression_1625_one_file_is_written_by_all_ranks(tmp_path: Path) -> None:
    """With torch one rank writes all; with ours the most is at most 1.05 times the mean."""
    torchs, ours, out = tmp_path / "torch", tmp_path / "ours", tmp_path / "out"
    state = {name: cut(tensor) for name, tensor in large_model().items()}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(torchs), save_distributed=True))
    out.mkdir(exist_ok=True)
    before = written_bytes()
    consolidate_safetensors_files_on_every_rank(
        str(torchs), str(out), dict.fromkeys(large_model(), 1), num_threads=1
    )
    written = sorted(gathered(written_bytes() - before))
    assert written[-1] > 32 * MIB
    assert all(count < MIB for count in written[:-1])
    ckpt_storage.save(state, ours)
    before = written_bytes()
    shares = consolidate(ours, process_group=dist.group.WORLD).rank_bytes
    written = gathered(written_bytes() - before)
    assert max(shares) <= 1.05 * sum(shares) / 4
    assert max(written) <= 1.05 * sum(written) / 4 + MIB
    check(files_in(ours / "hf"), large_model())


@on_ranks(4)
def test_regression_1625_it_is_safe_beside_training(tmp_path: Path) -> None:
    """Collectives of the trainer on the default group go on while the same ranks consolidate."""
    ckpt_storage.save(large_model(), tmp_path)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(consolidate, tmp_path)
        total, count, is_over = torch.zeros(1), 0, torch.zeros(1)
        while not is_over:
            dist.all_reduce(total)
            is_over = torch.tensor([float(ended.done())])
            dist.all_reduce(is_over, op=dist.ReduceOp.MIN)
            count += 1
        ended.result()
    assert count > 1
    check(files_in(tmp_path / "hf"), large_model())


COLLECTIVE = re.compile("all_|barrier|broadcast|gather|new_|reduce|scatter")


@on_ranks()
def test_regression_1625_no_collective_runs_on_any_group(tmp_path: Path) -> None:
    """No group of the trainer takes part, so neither a GPU nor a short watchdog matters."""
    ckpt_storage.save(large_model(), tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        for name in filter(COLLECTIVE.match, dir(dist.distributed_c10d)):
            patch.delattr(dist, name, raising=False)
            patch.delattr(dist.distributed_c10d, name)
        consolidate(tmp_path)
    check(files_in(tmp_path / "hf"), large_model())


def test_regression_1625_all_ranks_write_one_object_on_s3(ranks: RankPool, tmp_path: Path) -> None:
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
