"""A checkpoint that is overwritten all the time, read all the time."""

from __future__ import annotations

import operator
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from commit_tools import cleaned
from posix_faults import FaultPosix
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan

import ckpt_storage
import ckpt_storage.saves.session
from ckpt_storage import CheckpointStorageReader, CheckpointStorageWriter, verify
from ckpt_storage.commit import slotlog
from ckpt_storage.errors import CheckpointGoneError, CommitConflictError
from ckpt_storage.inspect import verify as verification
from ckpt_storage.source import model
from ckpt_storage.store import open_store

ROUNDS = 30


@pytest.fixture
def folder(memory_path: Path) -> Path:
    return memory_path / "id"


def save(number: int, folder: Path) -> None:
    state = {"a": torch.full((5000,), number), "b": torch.full((9,), float(number)), "n": number}
    writer = CheckpointStorageWriter(folder, overwrite=True, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)


def loaded(reader: dcp.StorageReader) -> int:
    state = {"a": torch.zeros(5000, dtype=torch.int64), "b": torch.zeros(9), "n": None}
    dcp.load(state, storage_reader=reader, no_dist=True)
    number = state["n"]
    assert isinstance(number, int)
    assert torch.equal(state["a"], torch.full((5000,), number))
    assert torch.equal(state["b"], torch.full((9,), float(number)))
    return number


def is_gone(error: BaseException) -> bool:
    """Return whether a load failed because two newer saves came while it was under way."""
    told = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
    # Torch turns what `read_metadata` raises into an AssertionError with its text.
    return all(
        isinstance(one, CheckpointGoneError)
        or (isinstance(one, AssertionError) and "is gone" in str(one))
        for one, _ in told
    )


def is_gone_for_stock(error: BaseException) -> bool:
    """Return whether torch's own reader missed a file that was there when it began."""
    assert isinstance(error, CheckpointException)
    return all(isinstance(failure, FileNotFoundError) for failure, _ in error.failures.values())


def test_readers_see_whole_checkpoints_while_it_is_overwritten(folder: Path) -> None:
    """Ours, torch's and `verify`: each look is at one save, never an older one than before."""
    save(0, folder)
    done = threading.Event()
    looks: Counter[str] = Counter()

    def write() -> None:
        try:
            for number in range(1, ROUNDS + 1):
                save(number, folder)
        finally:
            done.set()

    def look(name: str, once: Callable[[], int], gone: Callable[[BaseException], bool]) -> None:
        latest = 0
        while not done.is_set():
            try:
                number = once()
            except BaseException as error:  # torch's is no Exception
                if not gone(error):
                    raise
                looks[f"{name}, overtaken"] += 1
                continue
            assert number >= latest
            latest = number
            looks[name] += 1

    def verified() -> int:
        report = verify(folder)
        if [problem.file for problem in report.problems] == [".metadata"]:
            # Looked at between a commit and its publication.
            assert "shows save" in report.problems[0].message
            looks["verify, before publication"] += 1
        else:
            assert report.ok, report.problems
        return 0

    jobs: list[Callable[[], None]] = [
        write,
        lambda: look("ours", lambda: loaded(CheckpointStorageReader(folder)), is_gone),
        lambda: look("stock", lambda: loaded(dcp.FileSystemReader(folder)), is_gone_for_stock),
        lambda: look("verify", verified, is_gone),
    ]
    with ThreadPoolExecutor(len(jobs)) as threads:
        for future in [threads.submit(job) for job in jobs]:
            future.result()
    assert min(looks["ours"], looks["stock"], looks["verify"]) > 0
    assert loaded(CheckpointStorageReader(folder)) == ROUNDS
    assert loaded(dcp.FileSystemReader(folder)) == ROUNDS
    # A look between a commit and its publication may have kept some from being freed.
    cleaned(open_store(folder))
    assert len(list((folder / "saves").iterdir())) == 2


def test_a_load_that_was_overtaken_says_that_the_save_is_gone(folder: Path) -> None:
    """Its shards were freed meanwhile: no damage, and loading again gives what is there now."""
    save(0, folder)
    reader = CheckpointStorageReader(folder)

    def overtaken(plan: Callable[[], LoadPlan]) -> LoadPlan:
        save(1, folder)
        save(2, folder)
        return plan()

    planner = dcp_cases.planner(dcp.DefaultLoadPlanner, create_local_plan=overtaken)
    state = {"a": torch.zeros(5000, dtype=torch.int64)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    ((failure, _),) = caught.value.failures.values()
    assert isinstance(failure, CheckpointGoneError)
    assert "overwritten by save" in str(failure)
    assert "Load again" in (failure.next_step or "")
    assert loaded(reader) == 2


@pytest.mark.parametrize(
    ("module", "name"), [(verification, "read_manifest"), (model, "read_rank_manifest")]
)
def test_a_verification_that_was_overtaken_begins_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    """What was freed under its hands is no damage: it reports on the save that is there now."""
    save(0, folder)
    read = getattr(module, name)
    looks: list[int] = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        looks.append(1)
        if len(looks) == 1:
            save(1, folder)
            save(2, folder)
        return read(*args, **kwargs)

    monkeypatch.setattr(module, name, slow)
    report = verify(folder)
    assert report.ok, report.problems
    assert len(looks) == 2
    head = slotlog.read_log(open_store(folder)).head
    assert head is not None
    assert report.save_id == head.save_id


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("load", "manifest.json"),
        ("dcp.load", "manifest.json"),
        ("open_checkpoint", "manifest.json"),
        ("load", ".distcp"),
    ],
)
def test_a_reader_whose_save_was_freed_reads_the_new_head(
    tmp_path: Path, way: str, name: str
) -> None:
    """It looks again, and gives the values of the save that is there now."""
    ckpt_storage.save({"w": torch.zeros(4)}, tmp_path)
    left = [torch.ones(4), torch.full((4,), 2.0)]

    class Overwriting(FaultPosix):
        """Saves over the checkpoint just before one of its files is opened."""

        def open_read(self, path: str) -> int:
            while left and path.endswith(name):
                ckpt_storage.save({"w": left.pop(0)}, tmp_path, overwrite=True)
            return super().open_read(path)

    with patch("ckpt_storage.store.backends.local.Posix", Overwriting):
        if way == "open_checkpoint":
            with ckpt_storage.open_checkpoint(tmp_path) as checkpoint:
                found = checkpoint["w"].torch()
        else:
            state = {"w": torch.empty(4)}
            (ckpt_storage.load if way == "load" else dcp_cases.load)(state, tmp_path)
            found = state["w"]
    assert torch.equal(found, torch.full((4,), 2.0))


def test_verify_of_what_was_opened_says_that_it_was_deleted(tmp_path: Path) -> None:
    """A handle verifies the save that it was opened on, or says what became of it."""
    ckpt_storage.save({"a": torch.ones(2)}, tmp_path / "c")
    with ckpt_storage.open_checkpoint(tmp_path / "c") as opened:
        shutil.rmtree(tmp_path / "c" / "commits")
        with pytest.raises(ckpt_storage.CheckpointGoneError, match="was deleted since"):
            opened.verify()


@pytest.mark.parametrize("place", ["session.ShardsWriter", "session.commit_save"])
def test_a_save_whose_checkpoint_is_deleted_meanwhile_loses_to_the_deletion(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Its files are gone while it writes, or before it commits: a conflict, and no fault."""
    called = operator.attrgetter(place)(ckpt_storage.saves)

    def late(*arguments: Any, **named: Any) -> Any:
        ckpt_storage.delete(folder)
        return called(*arguments, **named)

    monkeypatch.setattr(f"ckpt_storage.saves.{place}", late)
    with pytest.raises(CommitConflictError, match="was deleted") as caught:
        ckpt_storage.save({"w": torch.ones(3)}, folder)
    assert caught.value.winner["type"] == "deleted"
    with pytest.raises(CheckpointGoneError):
        ckpt_storage.open_checkpoint(folder)
