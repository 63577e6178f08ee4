"""An export is old or new after every fault, never a mixture, and the next run makes it whole."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cli_tools
import consolidate_cases as cases
import pytest
import torch
from consolidate_cases import files_in, tensors_of
from dcp_cases import seeded
from fault_tools import Opener
from rank_threads import MemoryKeys

import ckpt_storage
from ckpt_storage import ConsolidateOptions, Timeouts
from ckpt_storage.coordination import operation as operation_module
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointInProgressError,
    ConsolidationError,
    IntegrityError,
    RankFailedError,
)
from ckpt_storage.export import output as run_module
from ckpt_storage.export.consolidate import ConsolidateJob, ConsolidationReport, run_consolidate
from ckpt_storage.format.exports import is_file_record
from ckpt_storage.store import Location
from ckpt_storage.store.backend import Backend, Content, Settings
from ckpt_storage.store.registry import backend_of
from ckpt_storage.testing.faults import Action, Call, FaultBackend, Rule, SimulatedCrash

Wrap = Callable[[int, Backend], Backend]

END_S = 60.0
ACTIONS: dict[Action, str] = {
    "crash_before": "",
    "crash_after": "",
    # What is one step of a storage is never half done (`create`, `replace`).
    "torn": "put_part|delete|delete_folder|make_folders",
    "error": "",
    "lost_answer": "",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what ranks wait for each other after a failure."""
    monkeypatch.setattr(operation_module, "_COORDINATOR_GRACE_S", 0.1)
    monkeypatch.setattr(operation_module, "_MEMBER_GRACE_S", 0.2)
    monkeypatch.setattr(operation_module, "_LEAVE_FAILED_S", 0.05)


def model(version: int) -> dict[str, torch.Tensor]:
    """Return a model of four tensors, of which two files are made."""
    return {f"w{i}": seeded(10 * version + i, 300, 100) for i in range(4)}


Ended = ConsolidationReport | BaseException


class Folder:
    """Exports of two versions of a checkpoint to folders that can be had again and again."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._number = 0
        self._wrap: Wrap = lambda _, backend: backend
        self._rank = threading.local()
        monkeypatch.setattr(run_module, "open_store", Opener(self._wrapped))
        for version in (1, 2):
            ckpt_storage.save({"model": model(version)}, root / f"v{version}", sync_files=False)
        self.run(1, "old")
        self.whole: dict[int, cases.Tensors] = {}
        for version in (1, 2):
            self.run(version, f"whole{version}")
            self.whole[version] = tensors_of(files_in(root / f"whole{version}"))

    def _wrapped(self, location: Location, backend: Backend) -> Backend:
        is_output = not location.path.endswith(("v1", "v2"))
        return self._wrap(self._rank.value, backend) if is_output else backend

    def fresh(self, kind: str) -> str:
        """Return a new output folder; for "replace" with an export of version 1 in it."""
        self._number += 1
        folder = f"out{self._number}"
        if kind == "replace":
            shutil.copytree(self.root / "old", self.root / folder)
        return folder

    def run(
        self,
        version: int,
        output: str,
        *,
        world_size: int = 1,
        wrap: Wrap | None = None,
        file_count: int = 2,
    ) -> list[Ended]:
        self._wrap = wrap or (lambda _, backend: backend)
        board = MemoryKeys()
        job = ConsolidateJob(
            source=Location.of(self.root / f"v{version}"),
            target=Location.of(self.root / output),
            timeouts=Timeouts.of(30),
            thread_count=1,
            options=ConsolidateOptions(max_file_bytes=480_000 // file_count),
        )
        ended: dict[int, Ended] = {}

        def rank_main(rank: int) -> None:
            self._rank.value = rank
            coordinator = RankGroup(board, rank=rank, world_size=world_size, look_s=0.002)
            try:
                with coordinator.operation("the test", timeouts=job.timeouts) as operation:
                    operation.meet(job.terms())
                    ended[rank] = run_consolidate(operation, job)
            except BaseException as error:  # noqa: BLE001  # the death of a process, too
                ended[rank] = error

        threads = [
            threading.Thread(target=rank_main, args=(rank,), daemon=True)
            for rank in range(world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(END_S)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        return [ended[rank] for rank in range(world_size)]

    def version_of(self, files: Mapping[str, bytes]) -> int | None:
        """Return which version a reader of the index sees, None if none; fails for a mixture.

        A folder with weight files has an index. That of an export that is not complete names none
        of them: vLLM loads the files that it names, transformers raises for one that is missing.
        """
        here = {name for name in files if name.endswith(".safetensors")}
        if cases.INDEX not in files:
            assert not here
            return None
        if not here.intersection(json.loads(files[cases.INDEX])["weight_map"].values()):
            return None
        found = tensors_of(files)
        (version,) = [version for version, whole in self.whole.items() if whole == found]
        return version


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Two checkpoints and an export of the first, on a disk."""
    return Folder(tmp_path, monkeypatch)


@pytest.mark.parametrize(("kind", "world_size", "faulty"), [("first", 3, 1), ("replace", 2, 0)])
def test_every_fault_of_a_rank_is_survived(
    folder: Folder, kind: str, world_size: int, faulty: int
) -> None:
    """Old or new after each, all ranks end, and the next run makes the same, with no leftovers."""
    dry: dict[int, FaultBackend] = {}

    def watch(rank: int, backend: Backend) -> Backend:
        dry[rank] = FaultBackend(backend)
        return dry[rank]

    reference = folder.fresh(kind)
    # One file of two ranks; four of three, of which two are shared.
    file_count = {2: 1, 3: 4}[world_size]
    folder.run(2, reference, world_size=world_size, wrap=watch, file_count=file_count)
    calls: Sequence[Call] = dry[faulty].script.calls
    whole = files_in(folder.root / reference)
    assert folder.version_of(whole) == 2
    for action, (number, call) in itertools.product(ACTIONS, enumerate(calls)):
        if ACTIONS[action] and call.operation not in ACTIONS[action].split("|"):
            continue
        at = f"{kind} {action} at {number} ({call.operation} {call.path})"
        output = folder.fresh(kind)
        rule = Rule(action=action, skip_count=number)

        def wrap(rank: int, backend: Backend, rule: Rule = rule) -> Backend:
            return FaultBackend(backend, [rule] if rank == faulty else [])

        ended = folder.run(2, output, world_size=world_size, wrap=wrap, file_count=file_count)
        files = files_in(folder.root / output)
        version = folder.version_of(files)
        failed = [one for one in ended if isinstance(one, BaseException)]
        assert len(failed) in {0, world_size}, at
        assert all(isinstance(one, CheckpointError | SimulatedCrash) for one in failed), at
        assert version in ({1, 2} if kind == "replace" else {None, 2}) if failed else {2}, at
        if failed and action == "error" and call.operation != "abort_upload":
            assert not _half_written(files), at
        again = folder.run(2, output, file_count=file_count)[0]
        assert isinstance(again, ConsolidationReport), f"{at}: {again!r}"
        assert _content(files_in(folder.root / output)) == _content(whole), at
        shutil.rmtree(folder.root / output)


def _half_written(files: Mapping[str, bytes]) -> list[str]:
    """Return temporary files but those that a record says are sealed."""
    records = [json.loads(data)["body"] for name, data in files.items() if is_file_record(name)]
    sealed = {record["file"]["path"] for record in records}
    drafts = [name for name in files if ".tmp-" in name]
    return [name for name in drafts if name[1:].partition(".tmp-")[0] not in sealed]


def dying_at(operation: str, skip_count: int = 0, path: str = "") -> Wrap:
    """Return what lets the process die before one operation on the output."""
    rule = Rule(action="crash_before", operation=operation, path=path, skip_count=skip_count)
    return lambda _, backend: FaultBackend(backend, [rule])


def _content(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return what must be the same however often a run died; who and when does not count."""
    kept: dict[str, Any] = {}
    for name, data in files.items():
        kept[name] = None if name.startswith(".ckpt-storage/") else data
        if name.endswith("output.json"):
            body = json.loads(data)["body"]
            kept[name] = (body["files"], body["index"])
    return kept


def test_an_unfinished_first_export_is_taken_for_a_whole_by_nobody(folder: Folder) -> None:
    """Opening and loading refuse it and say what to do, `verify` calls it unsound."""
    shutil.copytree(folder.root / "v2", folder.root / "run")
    output = "run/hf"

    folder.run(2, output, wrap=dying_at("complete_upload", 3), file_count=4)
    files = files_in(folder.root / output)
    assert len([name for name in files if name.endswith(".safetensors")]) == 3
    assert folder.version_of(files) is None
    url = str(folder.root / output)
    for read in (ckpt_storage.open_checkpoint, partial(ckpt_storage.load, {"w0": seeded(1, 9)})):
        with pytest.raises(CheckpointInProgressError, match=r"or its writer died.*call it again"):
            read(url)
    for checked in (url, str(folder.root / "run")):
        (problem,) = ckpt_storage.verify(checked).problems
        assert "still being written" in problem.message
        told = cli_tools.call("verify", checked)
        assert (told.exit_code, "still being written" in told.stdout) == (1, True)
    assert isinstance(folder.run(2, output, file_count=4)[0], ConsolidationReport)
    assert folder.version_of(files_in(folder.root / output)) == 2
    assert ckpt_storage.verify(str(folder.root / "run")).ok


def test_files_get_their_names_together(folder: Folder) -> None:
    """Who lists sees none of a new export before all are written; other ranks keep them all."""
    output = folder.fresh("replace")
    before = {name for name in files_in(folder.root / output) if name.endswith(".safetensors")}
    folder.run(2, output, wrap=dying_at("complete_upload"), file_count=4)
    files = files_in(folder.root / output)
    assert {name for name in files if name.endswith(".safetensors")} == before
    assert len([name for name in files if ".tmp-" in name]) == 4
    report = folder.run(2, output, world_size=3, file_count=4)[0]
    assert isinstance(report, ConsolidationReport)
    assert len(report.resumed) == 4
    assert not any(report.rank_bytes)
    assert folder.version_of(files_in(folder.root / output)) == 2


def test_a_record_of_other_content_is_not_trusted(folder: Folder) -> None:
    """Leftovers of version 1 are no part of version 2's export, though of the same lengths."""
    output = folder.fresh("first")

    folder.run(1, output, wrap=dying_at("put.*", path="index"))
    assert folder.version_of(files_in(folder.root / output)) is None
    (ended,) = folder.run(2, output)
    assert isinstance(ended, ConsolidationReport)
    assert not ended.resumed
    assert folder.version_of(files_in(folder.root / output)) == 2
    assert len(list((folder.root / output).glob("*.safetensors"))) == 2


def test_a_slower_consolidation_does_not_undo_a_later_one(folder: Folder) -> None:
    """One that was overtaken publishes nothing and says by whom."""
    output = folder.fresh("replace")
    overtaken: list[Ended] = []
    looks: list[str] = []

    class Overtaken(FaultBackend):
        """Lets another consolidation run just before the holder is looked at."""

        def get(self, path: str, *, max_bytes: int | None) -> Content:
            """Read; once this one holds the folder, the holder has just changed when it is read."""
            if path.endswith("job.json"):
                looks.append(path)
                if len(looks) == 2:  # the first is for whose place it takes
                    overtaken.extend(folder.run(2, output))
            return super().get(path, max_bytes=max_bytes)

    (ended,) = folder.run(1, output, wrap=lambda _, backend: Overtaken(backend), file_count=4)
    assert isinstance(overtaken[0], ConsolidationReport)
    assert isinstance(ended, ConsolidationError)
    assert "taken over" in str(ended)
    assert folder.version_of(files_in(folder.root / output)) == 2


@pytest.mark.parametrize(
    ("what", "kind"), [("missing", "first"), ("cut", "replace"), ("flipped", "replace")]
)
def test_a_damaged_shard_publishes_nothing(folder: Folder, what: str, kind: str) -> None:
    """Both ranks raise an error that names file and tensor; the old export stays as it was."""
    output = folder.fresh(kind)
    before = files_in(folder.root / output)
    (shard,) = (folder.root / "v2").glob("saves/*/*.distcp")
    data = shard.read_bytes()
    try:
        if what == "missing":
            shard.unlink()
        else:
            changed = data[:-200] if what == "cut" else data[:-5000] + b"?" + data[-4999:]
            shard.write_bytes(changed)
        ended = folder.run(2, output, world_size=2, file_count=1)
    finally:
        shard.write_bytes(data)
    for one in ended:
        assert isinstance(one, IntegrityError | RankFailedError), ended
        assert all(what in str(one) for what in (shard.name, "model.w", "rank 0"))
    files = files_in(folder.root / output)
    assert folder.version_of(files) == (1 if before else None)
    weights = [name for name in files if name.endswith(".safetensors")]
    assert weights == [name for name in before if name.endswith(".safetensors")]
    assert isinstance(folder.run(2, output)[0], ConsolidationReport)


def test_a_rank_whose_upload_was_given_up_raises_why(folder: Folder) -> None:
    """It joins after the keeper of a shared file discarded it, and before the keeper has ended."""
    (shard,) = (folder.root / "v2").glob("saves/*/*.distcp")
    shard.write_bytes(shard.read_bytes()[:-200])
    is_gone, has_left = threading.Event(), threading.Event()

    class Keeper(FaultBackend):
        """Ends a discarded upload only when the other rank has ended."""

        def abort_upload(self, path: str, token: str) -> None:
            super().abort_upload(path, token)
            is_gone.set()
            assert has_left.wait(END_S)

    class Member(FaultBackend):
        """Sends its parts to an upload that is gone."""

        def put_part(self, path: str, *args: Any, **more: Any) -> str:
            assert is_gone.wait(END_S)
            return super().put_part(path, *args, **more)

        def close(self) -> None:
            has_left.set()
            super().close()

    def wrap(rank: int, backend: Backend) -> Backend:
        return Member(backend) if rank else Keeper(backend)

    for one in folder.run(2, folder.fresh("replace"), world_size=2, wrap=wrap, file_count=1):
        assert isinstance(one, IntegrityError | RankFailedError), one
        assert shard.name in str(one)


def test_an_output_that_only_one_node_has_is_refused(folder: Folder) -> None:
    """A rank that does not see what rank 0 writes to the output ends it before it began."""
    output = folder.fresh("first")

    def wrap(rank: int, backend: Backend) -> Backend:
        own = Location.of(folder.root / f"node{rank}")
        return backend_of(own, Settings(sync_files=False)) if rank else backend

    for one in folder.run(2, output, world_size=2, wrap=wrap):
        assert isinstance(one, CheckpointError)
        assert "what rank 0 writes there is not seen" in str(one)
    assert files_in(folder.root / output) == {}
