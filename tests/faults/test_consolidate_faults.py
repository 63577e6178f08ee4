"""An export is old or new after every fault, never a mixture, and the next run makes it whole."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import cli_tools
import consolidate_cases as cases
import pytest
import rank_threads as threads
import torch
from consolidate_cases import tensors_of
from dcp_cases import seeded
from fault_tools import Opener, each_fault
from limits import HANG_S

import ckpt_storage
from ckpt_storage import ConsolidateOptions, Timeouts, errors
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.export import output as run_module
from ckpt_storage.export.consolidate import ConsolidateSpec, ConsolidationReport, run_consolidate
from ckpt_storage.format.exports import is_file_record
from ckpt_storage.store import Location
from ckpt_storage.store.backend import Backend, Content, Settings
from ckpt_storage.store.registry import backend_of
from ckpt_storage.testing.faults import Action, FaultBackend, Rule, SimulatedCrash

quick = threads.quick
pytestmark = pytest.mark.usefixtures("quick")

Wrap = Callable[[int, Backend], Backend]

GUARD = "zz-export-under-way.safetensors"

ACTIONS: dict[Action, str] = {
    "crash_before": "",
    "crash_after": "",
    # What is one step of a storage is never half done (`create`, `replace`).
    "torn": "put_part|delete|delete_folder|make_folders",
    "error": "",
    "lost_answer": "",
}


def model(version: int) -> dict[str, torch.Tensor]:
    """Return a model of four tensors, of which two files are made."""
    return {f"w{i}": seeded(10 * version + i, 300, 100) for i in range(4)}


Ended = ConsolidationReport | BaseException


class Folder:
    """Exports of two versions of a checkpoint to folders that can be had again and again."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._number = 0
        self._wrap: Wrap | None = None
        self._rank = threading.local()
        monkeypatch.setattr(run_module, "open_store", Opener(self._wrapped))
        for version in (1, 2):
            ckpt_storage.save({"model": model(version)}, root / f"v{version}", sync_files=False)
        self.run(1, "old")
        self.whole: dict[int, cases.Tensors] = {}
        for version in (1, 2):
            self.run(version, f"whole{version}")
            self.whole[version] = tensors_of(self.files(f"whole{version}"))

    def _wrapped(self, location: Location, backend: Backend) -> Backend:
        is_output = not location.path.endswith(("v1", "v2"))
        return self._wrap(self._rank.value, backend) if self._wrap and is_output else backend

    def fresh(self, kind: str) -> str:
        """Return a new output folder; for "replace" with an export of version 1 in it."""
        self._number += 1
        folder = f"out{self._number}"
        if kind == "replace":
            shutil.copytree(self.root / "old", self.root / folder)
        return folder

    def files(self, output: str) -> dict[str, bytes]:
        return cases.files_in(self.root / output)

    def run(
        self,
        version: int,
        output: str,
        *,
        world_size: int = 1,
        wrap: Wrap | None = None,
        file_count: int = 2,
    ) -> list[Ended]:
        self._wrap = wrap
        job = ConsolidateSpec(
            source=Location.of(self.root / f"v{version}"),
            target=Location.of(self.root / output),
            timeouts=Timeouts.of(30),
            thread_count=1,
            options=ConsolidateOptions(max_file_bytes=480_000 // file_count),
        )

        def body(ranks: RankGroup) -> ConsolidationReport:
            self._rank.value = ranks.rank
            with ranks.operation("the test", timeouts=job.timeouts) as operation:
                operation.meet(job.terms())
                return run_consolidate(operation, job)

        ended = threads.run(threads.group(threads.SharedStore(), world_size), body)
        return [one.error or one.value for one in ended]

    def version_in(self, output: str) -> int | None:
        """Return which version a reader of the index sees, None if none; fails for a mixture.

        Files without an index lie beside one that no library reads, so none takes them for all.
        """
        files = self.files(output)
        if cases.INDEX not in files:
            assert GUARD in files or not _weights_in(files)
            return None
        found = tensors_of(files)
        (version,) = [version for version, whole in self.whole.items() if whole == found]
        return version

    def check_goes_on(self, output: str, **options: Any) -> ConsolidationReport:
        """Export version 2, which must end well; return the report."""
        report = self.run(2, output, **options)[0]
        assert isinstance(report, ConsolidationReport), repr(report)
        assert self.version_in(output) == 2
        return report


def _weights_in(files: Iterable[str]) -> list[str]:
    return [name for name in files if name.endswith(".safetensors") and name != GUARD]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Two checkpoints and an export of the first, on a disk."""
    return Folder(tmp_path, monkeypatch)


@pytest.mark.parametrize(("kind", "world_size", "faulty"), [("first", 3, 1), ("replace", 2, 0)])
def test_every_fault_of_a_rank_is_survived(
    folder: Folder, kind: str, world_size: int, faulty: int
) -> None:
    """Old or new after each, all ranks end, and the next run makes the same, with no leftovers."""
    played: dict[int, FaultBackend] = {}
    reference = folder.fresh(kind)
    # One file of two ranks; four of three, of which two are shared.
    file_count = {2: 1, 3: 4}[world_size]
    export = partial(folder.run, 2, world_size=world_size, file_count=file_count)

    def playing(*rules: Rule) -> Wrap:
        def wrap(rank: int, backend: Backend) -> Backend:
            played[rank] = FaultBackend(backend, rules if rank == faulty else ())
            return played[rank]

        return wrap

    export(reference, wrap=playing())
    calls = played[faulty].script.calls
    whole = folder.files(reference)
    assert folder.version_in(reference) == 2
    for at, rule in each_fault(calls, ACTIONS):
        output = folder.fresh(kind)
        ended = export(output, wrap=playing(rule))
        version = folder.version_in(output)
        failed = [one for one in ended if isinstance(one, BaseException)]
        assert len(failed) in {0, world_size}, at
        assert all(isinstance(one, errors.CheckpointError | SimulatedCrash) for one in failed), at
        assert version in ({1, 2} if kind == "replace" else {None, 2}) if failed else {2}, at
        if failed and rule.action == "error" and "abort_upload" not in at:
            assert not _half_written(folder.files(output)), at
        again = folder.run(2, output, file_count=file_count)[0]
        assert isinstance(again, ConsolidationReport), f"{at}: {again!r}"
        assert _content(folder.files(output)) == _content(whole), at
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
    """Opening and loading refuse it and say what to do; `verify` tells it from its checkpoint."""
    shutil.copytree(folder.root / "v2", folder.root / "run")
    output, url = "run/hf", str(folder.root / "run/hf")
    folder.run(2, output, wrap=dying_at("complete_upload", 3), file_count=4)
    assert len(_weights_in(folder.files(output))) == 3
    assert folder.version_in(output) is None
    for read in (ckpt_storage.open_checkpoint, partial(ckpt_storage.load, {"w0": seeded(1, 9)})):
        with pytest.raises(
            errors.CheckpointInProgressError, match=r"or its writer died.*call it again"
        ):
            read(url)
    (problem,) = ckpt_storage.verify(url).problems
    assert "still being written" in problem.message
    told = cli_tools.call("verify", url)
    assert (told.exit_code, "still being written" in told.stdout) == (1, True)
    above = ckpt_storage.verify(str(folder.root / "run"))
    assert (above.ok, [export.is_unfinished for export in above.exports]) == (True, [True])
    told = cli_tools.call("verify", str(folder.root / "run"))
    assert (told.exit_code, "The export hf is not finished" in told.stdout) == (0, True)
    folder.check_goes_on(output, file_count=4)
    assert ckpt_storage.verify(str(folder.root / "run")).ok


def test_files_get_their_names_together(folder: Folder) -> None:
    """Who lists sees none of a new export before all are written; other ranks keep them all."""
    output = folder.fresh("replace")
    before = _weights_in(folder.files(output))
    folder.run(2, output, wrap=dying_at("complete_upload"), file_count=4)
    files = folder.files(output)
    assert _weights_in(files) == before
    assert len([name for name in files if ".tmp-" in name]) == 4
    report = folder.check_goes_on(output, world_size=3, file_count=4)
    assert len(report.resumed) == 4
    assert not any(report.rank_bytes)


def test_a_record_of_other_content_is_not_trusted(folder: Folder) -> None:
    """Leftovers of version 1 are no part of version 2's export, though of the same lengths."""
    output = folder.fresh("first")
    folder.run(1, output, wrap=dying_at("put.*", path="index"))
    assert folder.version_in(output) is None
    assert not folder.check_goes_on(output).resumed
    assert len(_weights_in(folder.files(output))) == 2


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
    assert isinstance(ended, errors.ConsolidationError)
    assert "taken over" in str(ended)
    assert folder.version_in(output) == 2


@pytest.mark.parametrize(
    ("what", "kind"), [("missing", "first"), ("cut", "replace"), ("flipped", "replace")]
)
def test_a_damaged_shard_publishes_nothing(folder: Folder, what: str, kind: str) -> None:
    """Both ranks raise an error that names file and tensor; the old export stays as it was."""
    output = folder.fresh(kind)
    before = _weights_in(folder.files(output))
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
        assert isinstance(one, errors.IntegrityError | errors.RankFailedError), ended
        assert all(what in str(one) for what in (shard.name, "model.w", "rank 0"))
    assert folder.version_in(output) == (1 if before else None)
    assert _weights_in(folder.files(output)) == before
    folder.check_goes_on(output)


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
            assert has_left.wait(HANG_S)

    class Member(FaultBackend):
        """Sends its parts to an upload that is gone."""

        def put_part(self, path: str, *args: Any, **more: Any) -> str:
            assert is_gone.wait(HANG_S)
            return super().put_part(path, *args, **more)

        def close(self) -> None:
            has_left.set()
            super().close()

    def wrap(rank: int, backend: Backend) -> Backend:
        return Member(backend) if rank else Keeper(backend)

    for one in folder.run(2, folder.fresh("replace"), world_size=2, wrap=wrap, file_count=1):
        assert isinstance(one, errors.IntegrityError | errors.RankFailedError), one
        assert shard.name in str(one)


def test_an_output_that_only_one_node_has_is_refused(folder: Folder) -> None:
    """A rank that does not see what rank 0 writes to the output ends it before it began."""
    output = folder.fresh("first")

    def wrap(rank: int, backend: Backend) -> Backend:
        own = Location.of(folder.root / f"node{rank}")
        return backend_of(own, Settings(sync_files=False)) if rank else backend

    for one in folder.run(2, output, world_size=2, wrap=wrap):
        assert isinstance(one, errors.CheckpointError)
        assert "what rank 0 writes there is not seen" in str(one)
    assert folder.files(output) == {}
