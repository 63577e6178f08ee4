"""A save that goes on with a consolidation: in the foreground, in threads and in workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_storage
from ckpt_storage import (
    AsyncSaver,
    ConsolidateOptions,
    ConsolidationError,
    InvalidInputError,
    SaveState,
)
from ckpt_storage.testing.ranks import RankPool

TIMEOUT_S = 60.0


def state() -> dict[str, Any]:
    """Return a model with other things beside it."""
    return {
        "model": {"a.weight": torch.arange(1000.0).reshape(10, 100), "b": torch.ones(3)},
        "optimizer": {"moment": torch.zeros(4)},
        "step": 1,
    }


def check(folder: str | None) -> None:
    """Check that the export in a local folder holds the model and nothing else."""
    assert folder is not None
    found: dict[str, torch.Tensor] = {}
    for file in Path(folder.removeprefix("file://")).glob("*.safetensors"):
        found |= load_file(file)
    expected = state()["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def saved(rank: int, folder: str) -> str | None:
    """Save with an export at its usual place; return where that is."""
    assert rank >= 0
    info = ckpt_storage.save(state(), f"{folder}/one", consolidate=True, timeout=TIMEOUT_S)
    assert info.save_id == ckpt_storage.list_checkpoints(folder)[0].save_id
    return info.export


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_exports_what_it_committed(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    """`save(consolidate=True)` leaves checkpoint and export, and says where on every rank."""
    exports = ranks.run(saved, str(tmp_path), world_size=world_size)
    assert exports == [(tmp_path / "one" / "hf").as_uri()] * world_size
    check(exports[0])
    assert ckpt_storage.verify(str(tmp_path / "one")).ok


def saved_in_background(rank: int, folder: str, mode: Any) -> tuple[str | None, str]:
    """Save in the background to a folder of its own, in several files."""
    assert rank >= 0
    options = ConsolidateOptions(max_file_bytes=3000, output=f"{folder}/out")
    with AsyncSaver(mode=mode, timeout=TIMEOUT_S) as saver:
        handle = saver.save(state(), f"{folder}/one", consolidate=options)
        return handle.result().export, handle.state.name


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_background_save_exports_too(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """Threads and workers consolidate what they saved, with all options."""
    outcomes = ranks.run(saved_in_background, str(tmp_path), mode, world_size=2)
    assert outcomes == [((tmp_path / "out").as_uri(), "COMMITTED")] * 2
    check(outcomes[0][0])
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2


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


@pytest.mark.parametrize("wrong", [3, "nosuch://bucket", "{here}"])
def test_a_wrong_export_is_refused_before_anything_is_saved(tmp_path: Path, wrong: Any) -> None:
    """What is no output, or lies inside the checkpoint's own folders, is refused at once."""
    url = str(tmp_path / "one")
    if wrong == "{here}":
        wrong = f"{url}/saves"
    with pytest.raises(InvalidInputError):
        ckpt_storage.save(state(), url, consolidate=wrong)
    assert not (tmp_path / "one").exists()
