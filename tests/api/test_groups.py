"""Shard files by group of names: which there are, what lies in them, and who reads them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import spec_reader
import torch
from dcp_cases import seeded
from rank_pool import run_ranks
from saver_cases import quick_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

import ckpt_storage
from ckpt_storage import InvalidInputError, StorageError, open_checkpoint
from ckpt_storage.format.documents import unseal
from ckpt_storage.format.rank_manifest import RankManifest
from ckpt_storage.saves.groups import choose_groups
from ckpt_storage.saves.shardfile import ShardFileWriter

MIB = 1 << 20


def state_of(model_bytes: int = MIB, optimizer_bytes: int = 2 * MIB) -> dict[str, Any]:
    return {
        "model": {"w": seeded(1, model_bytes // 4), "b": seeded(2, 5)},
        "optimizer": {"m": seeded(3, optimizer_bytes // 4), "lr": 0.1},
        "step": 7,
    }


def names_of(path: Path) -> dict[str, set[str]]:
    """Return the names of the values in the files of each group."""
    found: dict[str, set[str]] = {}
    with open_checkpoint(path) as checkpoint:
        groups = {file.path: file.group or "" for file in checkpoint.files}
    for document in path.glob("saves/*/ranks/*.json"):
        body = unseal(document.read_bytes(), path=str(document))
        manifest = RankManifest.from_body(body, where=str(document))
        for file in manifest.files:
            fqns = {manifest.fqns[number] for number in file.fqn}
            found.setdefault(groups[file.path], set()).update(fqns)
    return found


SPLIT = {
    "": {"model.w", "model.b", "step"},
    "optim*": {"optimizer.m", "optimizer.lr"},
}


def test_the_optimizer_lies_in_a_file_of_its_own(tmp_path: Path) -> None:
    """By default; the manifest says which file is of which group."""
    ckpt_storage.save(state_of(), tmp_path / "run")
    assert names_of(tmp_path / "run") == SPLIT
    with open_checkpoint(tmp_path / "run") as checkpoint:
        groups = [file.group for file in checkpoint.files]
    assert groups == [None, "optim*"]
    assert ckpt_storage.verify(tmp_path / "run").ok


def test_every_reader_finds_all_of_both_files(tmp_path: Path) -> None:
    """Ours, torch's own, and the one that was made from the format's page."""
    state = state_of(300_000, 400_000)
    with pytest.MonkeyPatch.context() as patch:
        # The page's reader takes a second for each megabyte.
        patch.setattr("ckpt_storage.saves.groups._GROUP_MIN_BYTES", 1000)
        ckpt_storage.save(state, tmp_path / "run")
    for load in (dcp_cases.load, dcp_cases.load_stock):
        load(found := dcp_cases.zeros_like(state), tmp_path / "run")
        assert dcp_cases.same(found, state)
    stranger = spec_reader.read(tmp_path / "run")
    assert stranger.groups == ["", "optim*"]
    assert stranger.tensors["optimizer.m"][1].tobytes() == dcp_cases.raw_bytes(
        state["optimizer"]["m"]
    )


@pytest.mark.parametrize(
    ("sizes", "groups", "expected"),
    [
        ({"model": 2, "optim.m": 2}, ["optim*"], ("optim*",)),
        ({"model": 2, "optim.m": 1}, ["optim*"], ()),
        ({"model": 1, "optim.m": 2}, ["optim*"], ()),
        ({"model": 2, "optim.m": 2}, [], ()),
        ({"model": 2}, ["optim*"], ()),
        ({"model": 2, "optim.m": 2, "ema": 1}, ["optim*", "ema"], ("optim*",)),
        ({"model": 2, "optim.m": 2, "step": 0}, ["optim*", "model"], ("optim*", "model")),
        ({"optim.a": 2, "optim.b": 2}, ["optim.a", "optim*"], ("optim.a", "optim*")),
    ],
)
def test_groups_of_a_mebibyte_a_rank_have_files(
    sizes: dict[str, int], groups: list[str], expected: tuple[str, ...]
) -> None:
    """Two ranks: two MiB are enough and one byte less is not; the first pattern counts."""
    held = {2: 2 * MIB, 1: 2 * MIB - 1, 0: 0}
    pairs = [(name, held[size]) for name, size in sizes.items()]
    assert choose_groups(pairs, groups, world_size=2) == expected


def save_on_rank(rank: int, folder: str) -> None:
    """Save a model that rank 0 alone stores, and optimizer state of which rank 0 has little."""
    lengths = (MIB // 64, MIB)
    state = {"model": seeded(1, MIB), f"optim.{rank}": seeded(rank, lengths[rank])}
    ckpt_storage.save(state, f"{folder}/run")


def test_the_average_of_all_ranks_decides_for_each(tmp_path: Path) -> None:
    """A rank with a little of a group has a file of it too; one without the rest has none."""
    outcomes = run_ranks(2, save_on_rank, str(tmp_path))
    assert [one.failure for one in outcomes] == [None, None]
    with open_checkpoint(tmp_path / "run") as checkpoint:
        found = [(file.rank, file.group) for file in checkpoint.files]
    assert found == [(0, None), (0, "optim*"), (1, "optim*")]
    assert ckpt_storage.verify(tmp_path / "run").ok


def test_a_save_of_known_structure_has_the_groups_that_it_asks_for(tmp_path: Path) -> None:
    """Its plan comes from the cache; the groups of the save before it do not."""
    ckpt_storage.save(state_of(), tmp_path / "a")
    ckpt_storage.save(state_of(), tmp_path / "b", groups=["model*"])
    ckpt_storage.save(state_of(), tmp_path / "c", groups=[])
    assert set(names_of(tmp_path / "b")) == {"", "model*"}
    assert set(names_of(tmp_path / "c")) == {""}


@pytest.mark.parametrize("door", ["writer", "thread", "process", "manager"])
def test_every_front_door_splits(tmp_path: Path, door: str) -> None:
    """DCP's writer, both kinds of background saves, and a manager."""
    path = tmp_path / "step-00000001"
    if door == "writer":
        dcp_cases.save(state_of(), path)
    elif door == "manager":
        with ckpt_storage.CheckpointManager(tmp_path) as manager:
            manager.save(1, state_of())
    else:
        with quick_saver(door) as saver:  # type: ignore[arg-type]  # a str
            saver.save(state_of(), path).result()
    assert names_of(path) == SPLIT


@pytest.mark.parametrize("groups", ["optim*", [""], ["a", "a"], [1], None])
def test_groups_that_cannot_be_are_refused(tmp_path: Path, groups: Any) -> None:
    """A text alone, no text, a pattern twice, and what is no text."""
    with pytest.raises(InvalidInputError, match="groups is"):
        ckpt_storage.save(state_of(), tmp_path / "run", groups=groups)
    assert list(tmp_path.iterdir()) == []


class Planner(DefaultSavePlanner):
    """Notes whether it is called by two threads at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.busy, self.was_busy = threading.Lock(), False

    def resolve_data(self, write_item: WriteItem) -> Any:
        is_free = self.busy.acquire(blocking=False)
        self.was_busy |= not is_free
        threading.Event().wait(0.01)
        if is_free:
            self.busy.release()
        return super().resolve_data(write_item)


def test_a_planner_is_called_by_one_thread_at_a_time(tmp_path: Path) -> None:
    """Though the files are written side by side: users' planners know nothing of threads."""
    state = {f"{kind}{n}": seeded(n, MIB // 8) for kind in ("model", "optim") for n in range(9)}
    planner = Planner()
    ckpt_storage.save(state, tmp_path / "run", planner=planner)
    assert len(names_of(tmp_path / "run")) == 2
    assert not planner.was_busy


def test_a_file_that_fails_ends_the_other(tmp_path: Path) -> None:
    """The save fails with its error, and nothing of either file stays."""
    begun = threading.Event()

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            if write_item.index.fqn == "optim":
                begun.wait(30)
                raise StorageError("the optimizer is gone")
            if write_item.index.fqn == "model9":
                begun.set()
            return super().resolve_data(write_item)

    written: list[str] = []
    payload = ShardFileWriter.payload

    def noted(self: ShardFileWriter, views: Any, also: Any) -> None:
        written.append("payload")
        payload(self, views, also)

    state = {f"model{n}": seeded(n, MIB // 4) for n in range(200)} | {"optim": seeded(0, MIB)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardFileWriter, "payload", noted)
        with pytest.raises(StorageError, match="the optimizer is gone"):
            ckpt_storage.save(state, tmp_path / "run", planner=Failing())
    assert len(written) < 200
    assert not [path for path in (tmp_path / "run").rglob("*") if "distcp" in path.name]


def test_groups_are_one_of_the_terms_of_a_save(tmp_path: Path) -> None:
    """Ranks with different ones write nothing."""
    outcomes = run_ranks(2, save_unlike, str(tmp_path))
    assert all("Ranks disagree on groups" in str(one.value) for one in outcomes)
    assert list(tmp_path.iterdir()) == []


def save_unlike(rank: int, folder: str) -> str:
    try:
        ckpt_storage.save({"w": torch.ones(3)}, f"{folder}/run", groups=[f"{rank}*"])
    except ckpt_storage.RankMismatchError as error:
        return str(error)
    return ""
