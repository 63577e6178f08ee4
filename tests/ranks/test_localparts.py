"""Plain tensors that name the parts of a global tensor they hold keep saying so (torch 2.15)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_storage
from ckpt_storage.loads import resolving
from ckpt_storage.loads.resolving import mark_parts, parts_of
from ckpt_storage.saves.planning import structure_of
from ckpt_storage.testing.ranks import RankPool

is_asked = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None
needs_torch = pytest.mark.skipif(not is_asked, reason="this torch has no CheckpointableTensor")


def marked(start: int, count: int, *, rows: int = 8, width: int = 3) -> torch.Tensor:
    """Return rows of a global tensor of numbers in order, which say where they lie."""
    whole = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width)
    parts = ((rows, width), ((start, 0),), ((0, 0),), ((count, width),))
    return mark_parts(whole[start : start + count].clone(), parts)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of torch that asks tensors for their parts."""
    monkeypatch.setattr(resolving, "_is_known", True)


@pytest.mark.usefixtures("asked")
def test_a_state_with_parts_is_planned_anew_each_time() -> None:
    """What such a tensor holds is no matter of its shape: no plan is remembered for it."""
    paths = {"part": ("part",)}
    assert structure_of({"part": torch.ones(2)}, paths, rank=0, world_size=1) is not None
    assert structure_of({"part": marked(0, 2)}, paths, rank=0, world_size=1) is None


def test_releases_that_ask_nothing_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch takes a tensor for a whole one, whatever its attributes, so is it here."""
    monkeypatch.setattr(resolving, "_is_known", False)
    assert parts_of(marked(2, 3)) is None


def pieces(rank: int, world_size: int, *, empty: bool = False) -> dict[str, Any]:
    """Return the rows of one rank, and a tensor of which each rank has two parts."""
    count = 8 // world_size
    one = marked(rank * count, count)
    whole = torch.arange(12, dtype=torch.float32)
    if world_size == 1:
        two = mark_parts(whole.clone(), ((12,), ((0,),), ((0,),), ((12,),)))
    else:
        starts = (3 * rank, 6 + 3 * rank)
        two = torch.cat([whole[start : start + 3] for start in starts])
        parts = ((12,), tuple((start,) for start in starts), ((0,), (3,)), ((3,), (3,)))
        mark_parts(two, parts)
    if empty:
        one.zero_()
        two.zero_()
    return {"rows": one, "two": two, "step": 5}


def save_and_load(rank: int, folder: str, how: str) -> None:
    """Save parts on two ranks and load them again on the same two."""
    state = pieces(rank, 2)
    for number in range(2):  # the second time by what the first one left
        url = f"{folder}/step-{number}"
        if how == "save":
            ckpt_storage.save(state, url)
        else:
            with ckpt_storage.AsyncSaver(mode=how) as saver:  # type: ignore[arg-type]  # a parameter
                saver.save(state, url).result()
        target = pieces(rank, 2, empty=True)
        ckpt_storage.load(target, url)
        for name in ("rows", "two"):
            assert torch.equal(target[name], state[name]), (how, number, name)


@needs_torch
@pytest.mark.parametrize("how", ["save", "thread", "process"])
def test_parts_are_saved_as_parts(ranks: RankPool, tmp_path: Path, how: str) -> None:
    """Every rank's parts are in the checkpoint; one process reads the whole."""
    ranks.run(save_and_load, str(tmp_path), how, world_size=2)
    target: dict[str, Any] = {"rows": torch.zeros(8, 3), "two": torch.zeros(12)}
    ckpt_storage.load(target, tmp_path / "step-1")
    assert torch.equal(target["rows"].flatten(), torch.arange(24.0))
    assert torch.equal(target["two"], torch.arange(12.0))
