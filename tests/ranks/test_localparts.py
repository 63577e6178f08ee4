"""Plain tensors that name the parts of a global tensor they hold keep saying so (torch 2.15)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_storage
from ckpt_storage.loads import resolving
from ckpt_storage.saves.planning import structure_of
from ckpt_storage.testing.ranks import RankPool

is_asked = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None
needs_torch = pytest.mark.skipif(not is_asked, reason="this torch has no CheckpointableTensor")

_NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def marked(tensor: torch.Tensor, *parts: object) -> torch.Tensor:
    """Make a tensor say which parts of which global tensor it holds."""
    for name, value in zip(_NAMES, parts, strict=True):
        setattr(tensor, name, value)
    return tensor


@pytest.mark.parametrize("known", [True, False])
def test_what_a_tensor_says_of_its_parts_counts_where_torch_asks(
    monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """Then no plan is kept for it; other releases take it for a whole one."""
    monkeypatch.setattr(resolving, "_is_known", known)
    state = {"part": marked(torch.ones(2, 3), (8, 3), ((0, 0),), ((0, 0),), ((2, 3),))}
    kept = structure_of(state, {"part": ("part",)}, rank=0, world_size=1)
    assert (kept is None) is known


def pieces(rank: int, *, empty: bool = False) -> dict[str, Any]:
    """Return four of eight rows, and a tensor of which each rank has two parts."""
    rows = torch.arange(24.0).reshape(8, 3)[rank * 4 : rank * 4 + 4].clone()
    whole, starts = torch.arange(12.0), (3 * rank, 6 + 3 * rank)
    two = torch.cat([whole[start : start + 3] for start in starts])
    if empty:
        rows.zero_()
        two.zero_()
    marked(rows, (8, 3), ((rank * 4, 0),), ((0, 0),), ((4, 3),))
    marked(two, (12,), tuple((start,) for start in starts), ((0,), (3,)), ((3,), (3,)))
    return {"rows": rows, "two": two, "step": 5}


def save_and_load(rank: int, folder: str) -> None:
    """Save parts on two ranks in each way and load them again on the same two."""
    state = pieces(rank)
    for number, how in enumerate(["save", "save", "thread", "process"]):
        url = f"{folder}/step-{number}"
        if how == "save":
            ckpt_storage.save(state, url)
        else:
            with ckpt_storage.AsyncSaver(mode=how) as saver:  # type: ignore[arg-type]  # a parameter
                saver.save(state, url).result()
        target = pieces(rank, empty=True)
        ckpt_storage.load(target, url)
        for name in ("rows", "two"):
            assert torch.equal(target[name], state[name]), (how, name)


@needs_torch
def test_parts_are_saved_as_parts(ranks: RankPool, tmp_path: Path) -> None:
    """Every rank's parts are in the checkpoint; one process reads the whole."""
    ranks.run(save_and_load, str(tmp_path), world_size=2)
    for number in range(4):
        target: dict[str, Any] = {"rows": torch.zeros(8, 3), "two": torch.zeros(12)}
        ckpt_storage.load(target, tmp_path / f"step-{number}")
        assert torch.equal(target["rows"].flatten(), torch.arange(24.0))
        assert torch.equal(target["two"], torch.arange(12.0))
