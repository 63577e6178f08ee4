"""torch_checkpointing on our storage: round trips, kills, damage, jobs that collide, its reader."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from copy_cases import flip
from integration_tools import EXAMPLES, finish, finish_all, need, sound, torchrun
from s3_server import S3Server

import ckpt_storage
from ckpt_storage import CheckpointExistsError, CommitConflictError, IntegrityError

need("torch_checkpointing")

# ruff: noqa: E402  # these need it
from checkpointing_job import run, weight
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_writer import CallbackArgs
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.logging_utils import EventLogger
from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

from ckpt_storage.integrations.checkpointing_streams import ReadStream
from ckpt_storage.integrations.torch_checkpointing import (
    CheckpointStorage,
    CheckpointStorageConfig,
    commit_on_every_rank,
    manager_config,
)

SUPPORT = Path(__file__).parents[1] / "support"
JOB = str(SUPPORT / "checkpointing_job.py")
CPU = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


def job(folder: Path, *, ranks: int = 2, **options: Any) -> dict[int, dict[str, Any]]:
    """Run a job; return what each rank that lived to say it said."""
    _, output = finish(command(ranks, **options), folder, CPU)
    return answers_in(output)


def command(ranks: int, **options: Any) -> list[str]:
    return torchrun(JOB, json.dumps(options), ranks=ranks)


def answers_in(output: str) -> dict[int, dict[str, Any]]:
    lines = [line for line in output.splitlines() if line.startswith('{"rank"')]
    answers = [json.loads(line) for line in lines]
    assert answers, output
    return {answer["rank"]: answer for answer in answers}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("place", ["disk", "s3"])
def test_two_ranks_save_and_load_and_one_rank_loads(
    mode: str, place: str, tmp_path: Path, server: S3Server
) -> None:
    """Both saves can be read by themselves, by two ranks and by one; all bytes are sound."""
    url, options = str(tmp_path / "run"), None
    if place == "s3":
        url, options = "s3://bucket/run", server.storage_options
    said = job(tmp_path, url=url, mode=mode, steps=[1, 2], load=2, storage_options=options)
    assert sorted(said) == [0, 1]
    for answer in said.values():
        assert answer["saves"] == ["ok", "ok"]
        assert (answer["is_equal"], answer["bias"]) == (True, [2.0] * 3)
    infos = ckpt_storage.list_checkpoints(url, storage_options=options)
    assert [info.name for info in infos] == ["step-1", "step-2"]
    for info in infos:
        assert ckpt_storage.verify(info.url, storage_options=options).ok
    for step in (1, 2):
        alone = run({"url": url, "load": step, "storage_options": options})
        assert (alone["is_equal"], alone["bias"]) == (True, [float(step)] * 3)


@pytest.mark.parametrize(
    ("fault", "is_there"),
    [("write", False), ("before the commit", False), ("after the commit", True)],
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_kill_leaves_a_whole_checkpoint_or_none(
    mode: str, fault: str, *, is_there: bool, tmp_path: Path
) -> None:
    """Whoever writes is killed in the second save; the first stays, and nothing half is seen."""
    url = str(tmp_path / "run")
    _, output = finish(command(2, url=url, mode=mode, steps=[1, 2], fault=fault), tmp_path, CPU)
    # A trainer that writes itself is killed, and torchrun ends the other before it can say more.
    said = answers_in(output) if mode == "async" else {}
    for answer in said.values():
        assert answer["saves"][0] == "ok"
        assert answer["saves"][1] != "ok"
    there = [1, 2] if is_there else [1]
    for step in there:
        assert run({"url": url, "load": step})["is_equal"]
    if is_there:
        # For torch's own readers; it was killed before it could.
        ckpt_storage.publish(f"{url}/step-2")
    assert sound(url) == [f"step-{step}" for step in there]
    if not is_there:
        assert run({"url": url, "steps": [2], "load": 2})["saves"] == ["ok"]
        assert sound(url) == ["step-1", "step-2"]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("fault", ["error", "overtaken"])
def test_an_error_of_one_rank_is_raised_on_all(mode: str, fault: str, tmp_path: Path) -> None:
    """A rank whose own write is stopped by the failure raises the failure, and names its rank."""
    said = job(tmp_path, url=str(tmp_path / "run"), mode=mode, steps=[1, 2], fault=fault)
    assert said[0]["saves"][1].startswith("RankFailedError")
    assert said[1]["saves"][1].startswith("StorageError")
    for answer in said.values():
        assert "The disk is on fire." in answer["saves"][1]
    assert sound(str(tmp_path / "run")) == ["step-1"]


def test_of_two_jobs_at_one_name_one_wins(tmp_path: Path) -> None:
    """Every rank of the other raises why, and what is there is whole."""
    url = str(tmp_path / "run")
    commands = [command(2, url=url, mode="sync", steps=[1]) for _ in range(2)]
    outcomes = []
    for _, output in finish_all(commands, tmp_path, CPU):
        said = answers_in(output)
        assert sorted(said) == [0, 1]
        (outcome,) = {answer["saves"][0].partition(":")[0] for answer in said.values()}
        outcomes.append(outcome)
    outcomes.remove("ok")
    assert outcomes in (["CommitConflictError"], ["CheckpointExistsError"])
    assert sound(url) == ["step-1"]


def make_storage(url: str | Path, **options: Any) -> CheckpointStorage:
    return CheckpointStorageConfig(url=str(url), **options).create_storage()


def commit(storage: CheckpointStorage, path: Path) -> None:
    commit_on_every_rank(CallbackArgs(path=str(path), storage=storage, event_logger=EventLogger()))


def test_the_later_of_two_writers_of_one_name_does_not_commit(tmp_path: Path) -> None:
    """What committed first stays as it is."""
    first, second = make_storage(tmp_path), make_storage(tmp_path)
    for storage in (first, second):
        storage.mkdir(tmp_path / "step-1")
    first.write(tmp_path / "step-1" / "a.bin", b"first")
    second.write(tmp_path / "step-1" / "a.bin", b"second")
    commit(second, tmp_path / "step-1")
    with pytest.raises(CommitConflictError):
        commit(first, tmp_path / "step-1")
    reader = make_storage(tmp_path)
    assert reader.exists(tmp_path / "step-1")
    assert reader.read(tmp_path / "step-1" / "a.bin") == b"second"


def test_a_committed_name_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    """The checkpoint that is there stays sound."""
    said = run({"url": str(tmp_path / "run"), "steps": [1]})
    before = sorted(path for path in tmp_path.rglob("*"))
    again = run({"url": str(tmp_path / "run"), "steps": [1]})
    assert said["saves"] == ["ok"]
    assert again["saves"][0].startswith(CheckpointExistsError.__name__)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert sound(str(tmp_path / "run")) == ["step-1"]


def test_a_flipped_bit_anywhere_is_named(tmp_path: Path) -> None:
    """In what their loader reads: it raises, and the error names the file."""
    url = tmp_path / "run"
    run({"url": str(url), "steps": [1]})
    (shard,) = (path for path in url.rglob("*.distcp") if path.stat().st_size > 100_000)
    size = shard.stat().st_size
    for at in (2000, size // 3, size // 2, size - 3000):
        flip(shard, at)
        with pytest.raises(IntegrityError, match=r"files\.model_0\.pt|\.distcp"):
            run({"url": str(url), "load": 1})
        flip(shard, at)
    assert run({"url": str(url), "load": 1})["is_equal"]


def test_tools_know_these_checkpoints(tmp_path: Path) -> None:
    """A copy is loaded by their loader; entries are their files; none is there after deletion."""
    run({"url": str(tmp_path / "run"), "steps": [1]})
    with ckpt_storage.open_checkpoint(tmp_path / "run" / "step-1") as checkpoint:
        names = {entry.fqn for entry in checkpoint.entries()}
    assert names == {"files.model_0.pt", "files.metadata.pkl"}
    ckpt_storage.copy(tmp_path / "run" / "step-1", tmp_path / "copy" / "step-1")
    assert run({"url": str(tmp_path / "copy"), "load": 1})["is_equal"]
    assert ckpt_storage.delete(tmp_path / "copy" / "step-1")
    assert not make_storage(tmp_path / "copy").exists(tmp_path / "copy" / "step-1")


@pytest.mark.parametrize("ranks", [1, 2])
def test_their_loader_reads_checkpoints_of_ours(ranks: int, tmp_path: Path) -> None:
    """What `ckpt_storage.save` wrote, on as many ranks."""
    said = job(tmp_path, ranks=ranks, url=str(tmp_path / "run"), steps=[3], load=3, reads_ours=True)
    for answer in said.values():
        assert (answer["is_equal"], answer["bias"]) == (True, [3.0] * 3)


def test_a_large_file_has_several_chunks_and_any_range_is_read(tmp_path: Path) -> None:
    """Across chunks, from any position, into memory of the caller; an empty file, too."""
    storage, folder = make_storage(tmp_path), tmp_path / "step-1"
    data = torch.arange(9 << 20, dtype=torch.int64).numpy().tobytes()
    with storage.stream_write(folder / "sub" / "large.bin") as stream:
        for start in range(0, len(data), 7_000_001):
            stream.write(data[start : start + 7_000_001])
    storage.write(folder / "empty.bin", b"")
    assert not make_storage(tmp_path).exists(folder), "it is not committed"
    commit(storage, folder)
    commit(storage, folder)
    reader = make_storage(tmp_path)
    assert [reader.exists(folder / name) for name in ("sub", "empty.bin", "none")] == [
        True,
        True,
        False,
    ]
    assert reader.read(folder / "empty.bin") == b""
    assert reader.read(folder / "sub" / "large.bin") == data
    ranged = ReadArgs(pre_read_full_file=False)
    with reader.stream_read(folder / "sub" / "large.bin", ranged) as stream:
        for start, length in ((0, 10), ((32 << 20) - 5, 10), (len(data) - 3, 10)):
            assert stream.seek(start) == start
            assert stream.read(length) == data[start : start + length]
    with pytest.raises(FileNotFoundError):
        reader.getsize(folder / "other.bin")


def test_a_whole_file_is_read_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their loader adds no threads to those of the reads."""
    monkeypatch.setenv("TORCH_CKPT_PARALLEL_FILL_CHUNK_MB", "1")
    url, lengths = tmp_path / "run", []
    state = {"model": {"weight": torch.zeros(1 << 20)}}
    manager = CheckpointManager(manager_config(url, is_async=False))
    manager.save(str(url / "step-1"), state)
    read = ReadStream.readinto

    def reading(stream: ReadStream, buffer: Any) -> int:
        lengths.append(read(stream, buffer))
        return lengths[-1]

    monkeypatch.setattr(ReadStream, "readinto", reading)
    manager.load(str(url / "step-1"), into=state)
    manager.close()
    (length,) = lengths
    assert length > 4 << 20


def test_a_job_without_the_callback_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its saves commit nothing, which the end of its writer logs."""
    caplog.set_level(logging.WARNING, logger="ckpt_storage")
    config = manager_config(tmp_path, is_async=False)
    config.finalize_callback = None
    manager = CheckpointManager(config)
    manager.save(str(tmp_path / "step-1"), {"step": 1})
    manager.close()
    del manager
    assert "pass commit_on_every_rank as finalize_callback" in caplog.text
    assert ckpt_storage.list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("path", ["/elsewhere/step-1/a.bin", "s3:/bucket/run/step-1/a.bin"])
def test_a_path_that_is_not_below_the_root_is_refused(path: str, tmp_path: Path) -> None:
    """Before anything is written anywhere."""
    with pytest.raises(ckpt_storage.InvalidInputError, match="not below"):
        make_storage(tmp_path / "run").write(Path(path), b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_is_refused(tmp_path: Path) -> None:
    """Their default, a rename by rank 0, is no commit of ours."""
    config = manager_config(tmp_path, is_async=False)
    config.save.writer_config.write_to_temp_dir = True
    manager = CheckpointManager(config)
    with pytest.raises(ckpt_storage.InvalidInputError, match="write_to_temp_dir=False"):
        manager.save(str(tmp_path / "step-1"), {"step": 1})
    assert ckpt_storage.list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("method", ["delete", "rmdir", "ls", "isdir", "glob"])
def test_what_their_savers_do_not_call_is_refused(tmp_path: Path, method: str) -> None:
    """An error names the functions of this package that list and delete checkpoints."""
    with pytest.raises(ckpt_storage.StorageError, match=r"Use ckpt_storage\.delete and"):
        getattr(make_storage(tmp_path), method)(tmp_path / "step-1")


def test_the_seam_is_the_one_that_this_was_written_for() -> None:
    """Abstract methods and parameters of their storage, as in 0.1.1."""
    methods = {
        "stream_read": ["self", "path", "read_args"],
        "stream_write": ["self", "path"],
        "write": ["self", "path", "data"],
        "delete": ["self", "path"],
        "mkdir": ["self", "path", "recursive"],
        "rmdir": ["self", "path"],
        "rename": ["self", "src_path", "dst_path", "is_directory", "background_cleanup"],
        "ls": ["self", "path"],
        "exists": ["self", "path"],
        "getsize": ["self", "path"],
        "isdir": ["self", "path"],
        "remap_path": ["self", "path"],
    }
    abstract: frozenset[str] = Storage.__abstractmethods__
    assert abstract == set(methods)
    for name, parameters in methods.items():
        assert list(inspect.signature(getattr(Storage, name)).parameters) == parameters, name
    assert StorageConfig.__abstractmethods__ == {"create_storage"}
    assert {"path", "storage", "event_logger"} == set(inspect.signature(CallbackArgs).parameters)


def test_a_manager_in_one_process(tmp_path: Path) -> None:
    """The lines of the documentation."""
    config = manager_config(
        tmp_path / "run", is_async=False, items={"model": ItemSpec(resharder=DefaultResharder())}
    )
    manager = CheckpointManager(config)
    manager.save(str(tmp_path / "run" / "step-1"), {"model": {"weight": weight(1)}, "step": 1})
    target = {"weight": torch.zeros_like(weight(1))}
    found = manager.load(str(tmp_path / "run" / "step-1"), into={"model": target, "step": 0})
    assert torch.equal(target["weight"], weight(1))
    assert found["step"] == 1
    manager.close()


def test_the_example_resumes(tmp_path: Path) -> None:
    """With the losses of a run that was not interrupted."""
    script, url = str(EXAMPLES / "torch_checkpointing_job.py"), str(tmp_path / "run")
    outputs = []
    for root, steps in ((url, 5), (url, 8), (str(tmp_path / "whole"), 8)):
        code, output = finish([sys.executable, script, root, str(steps)], tmp_path, CPU)
        assert code == 0, output
        outputs.append([line for line in output.splitlines() if line.startswith("step ")])
    assert outputs[1] == outputs[2][4:]
    assert sound(url) == ["step-2", "step-4", "step-6", "step-8"]
