"""`convert` asks for many small chunks at a time, and refuses before it touches the target."""

from __future__ import annotations

import itertools
import pkgutil
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from copy_cases import files_below
from dcp_cases import seeded
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckpt_storage import open_checkpoint
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    FormatError,
    InvalidInputError,
    StorageError,
)
from ckpt_storage.export.convert import TargetFormat, convert
from ckpt_storage.transfer import ranges


class RowByRow(dcp.DefaultSavePlanner):
    """Cuts every matrix into its rows, as so many ranks would."""

    def create_local_plan(self) -> SavePlan:
        """Plan one item a row."""
        items = [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size([row, 0]), row),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(
                        torch.Size([row, 0]), torch.Size([1, value.size(1)])
                    ),
                    properties=TensorProperties.create_from_tensor(value),
                    size=value.size(),
                ),
            )
            for fqn, value in self.state_dict.items()
            for row in range(value.size(0))
        ]
        self.plan = SavePlan(items, planner_data={fqn: (fqn,) for fqn in self.state_dict})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return a row."""
        offset = write_item.index.offset
        assert offset is not None
        return self.state_dict[write_item.index.fqn][offset[0] : offset[0] + 1]


def quiet(call: Callable[[], Any]) -> Any:
    """Call torch without what it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def row_by_row(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Save matrices, each row a chunk of its own."""
    writer = dcp.FileSystemWriter(folder)
    quiet(lambda: dcp.save(state, storage_writer=writer, planner=RowByRow(), no_dist=True))


@pytest.mark.parametrize("to", ["dcp_safetensors", "torch_save"])
def test_small_chunks_are_read_together(
    tmp_path: Path, to: TargetFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 chunks of 40 bytes take a handful of batches, not one each, whatever the target."""
    state = {f"w{number}": seeded(number, 10, 10) for number in range(30)}
    row_by_row(state, tmp_path / "source")
    batches = itertools.count()
    run = ranges.RangeReader.run

    def counted(*arguments: Any, **options: Any) -> None:
        next(batches)
        run(*arguments, **options)

    monkeypatch.setattr(ranges.RangeReader, "run", counted)
    convert(tmp_path / "source", tmp_path / "target", to=to)
    files = 10 if to == "dcp_safetensors" else 1
    assert next(batches) <= 2 * files + 2
    if to == "torch_save":
        found = torch.load(tmp_path / "target")
    else:
        with open_checkpoint(tmp_path / "target") as opened:
            found = opened.load(kind="torch")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[fqn], state[fqn]) for fqn in state)


def test_items_that_do_not_fit_a_window_are_read_in_their_turn(tmp_path: Path) -> None:
    """Small and large tensors, empty ones and objects come out as they went in."""
    state = {
        "a": seeded(1, 3),
        "b": seeded(2, 3_000_000),
        "c": torch.empty((0, 4)),
        "d": seeded(3, 2, 2),
        "e": seeded(4, 5).t(),
        "f": seeded(5, 400_000),
        "g": seeded(6, 1),
    }
    quiet(lambda: dcp.save(state | {"n": 3}, checkpoint_id=tmp_path / "source", no_dist=True))
    least = 16 << 20
    convert(tmp_path / "source", tmp_path / "ours", to="ckpt_storage", memory_limit_bytes=least)
    with open_checkpoint(tmp_path / "ours") as opened:
        found = opened.load(kind="torch")
    assert found.pop("n") == 3
    assert all(torch.equal(found[fqn], state[fqn]) for fqn in state)
    convert(tmp_path / "ours", tmp_path / "st", to="safetensors", exclude=["n"])
    found = load_file(tmp_path / "st" / "model.safetensors")
    assert all(torch.equal(found[fqn], state[fqn]) for fqn in state)


@pytest.mark.parametrize("unsupported", ["error", "drop"])
def test_a_name_that_safetensors_lacks_leaves_the_target_alone(
    tmp_path: Path, unsupported: Any
) -> None:
    """A tensor named `__metadata__` is among what the format cannot hold."""
    source, target = tmp_path / "source", tmp_path / "target"
    quiet(lambda: dcp.save({"__metadata__": seeded(1, 3)}, checkpoint_id=source, no_dist=True))
    quiet(lambda: dcp.save({"w": seeded(1, 3)}, checkpoint_id=tmp_path / "old", no_dist=True))
    convert(tmp_path / "old", target, to="safetensors")
    before = files_below(target)
    with pytest.raises(InvalidInputError):
        convert(source, target, to="safetensors", unsupported=unsupported, overwrite=True)
    assert files_below(target) == before


def test_a_source_that_lacks_a_file_leaves_the_target_alone(tmp_path: Path) -> None:
    """What is to be replaced is deleted only once it is known where all values lie."""
    source, target = tmp_path / "source", tmp_path / "target"
    quiet(lambda: dcp.save({"w": seeded(1, 3)}, checkpoint_id=source, no_dist=True))
    convert(source, target, to="safetensors")
    before = files_below(target)
    for file in source.glob("*.distcp"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"missing|is gone"):
        convert(source, target, to="safetensors", overwrite=True)
    assert files_below(target) == before


def _converting_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Callable[[], Exception]
) -> list[str]:
    """Convert while taking the slot fails; return what is left of the attempt."""
    source, target = tmp_path / "source", tmp_path / "target"
    quiet(lambda: dcp.save({"w": seeded(1, 3)}, checkpoint_id=source, no_dist=True))

    def refuse(*_: object, **__: object) -> None:
        raise failure()

    monkeypatch.setattr("ckpt_storage.commit.attempt.take_slot", refuse)
    with pytest.raises(CheckpointError):
        convert(source, target, to="ckpt_storage")
    return [path for path in files_below(target) if path.startswith("saves/")]


def test_a_commit_that_surely_failed_leaves_no_attempt_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody converts to that folder again to free it."""
    failure = partial(StorageError, "refused", kind="permission")
    assert _converting_meets(tmp_path, monkeypatch, failure) == []


def test_a_commit_of_unknown_outcome_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot may be there, and names them."""
    failure = partial(CommitUnknownError, "unknown", save_id="s", slot=1)
    assert _converting_meets(tmp_path, monkeypatch, failure) != []


@pytest.mark.parametrize(
    "step",
    ["commit.attempt.take_slot", "commit.publishing.publish_head", "export.convert.ConvertReport"],
)
def test_an_interrupt_once_the_slot_is_taken_leaves_the_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Ctrl-C in or after the commit deletes nothing that is committed."""
    source, target = tmp_path / "source", tmp_path / "target"
    quiet(lambda: dcp.save({"w": seeded(1, 3)}, checkpoint_id=source, no_dist=True))
    name = f"ckpt_storage.{step}"
    real = pkgutil.resolve_name(name)

    def interrupted(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, target, to="ckpt_storage")
    monkeypatch.undo()
    with open_checkpoint(target) as opened:
        assert torch.equal(opened.load(kind="torch")["w"], seeded(1, 3))


def test_a_compressed_record_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    """torch.save compresses nothing; a few bytes that become gigabytes are no checkpoint."""
    torch.save({"w": torch.ones(3)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as source,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in source.namelist():
            bomb.writestr(name, source.read(name))
        bomb.writestr("bomb/big", b"0" * 200_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="compressed record"):
            convert(tmp_path / "bomb.pt", tmp_path / "target", to="dcp")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50_000_000
