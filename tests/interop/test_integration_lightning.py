"""Lightning over our storage: real trainers, one process and FSDP2 on two."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import run_script
from integration_tools import EXAMPLES, ROOT, need

import ckpt_storage

need("lightning")

# Lightning warns on import, and of CPUs, in ways that are its own.
pytestmark = pytest.mark.filterwarnings("ignore")

SHARDED = """
import json, sys
import lightning_fit
import torch
from torch.distributed.tensor import DTensor

url, steps, ranks, resume, out = json.loads(sys.argv[1])
torch.manual_seed(len(out))
model = lightning_fit.Regression()
trainer = lightning_fit.sharded_trainer(url, steps, ranks)
trainer.fit(model, lightning_fit.data(), ckpt_path=resume)
full = {
    name: value.full_tensor() if isinstance(value, DTensor) else value
    for name, value in model.state_dict().items()
}
if trainer.global_rank == 0:
    torch.save({"state": full, "losses": model.losses}, out)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{EXAMPLES}:{ROOT}"}


def adapter(**options: Any) -> Any:
    return importlib.import_module("ckpt_storage.integrations.lightning").CheckpointStorageIO(
        **options
    )


def test_a_run_that_failed_resumes_bit_for_bit(tmp_path: Path) -> None:
    """`fit` goes on from the newest checkpoint with the losses of a run that did not fail."""
    script = EXAMPLES / "lightning_fit.py"
    code, output = run_script(script, folder=tmp_path, environment=ENVIRONMENT)
    assert code == 0, output
    assert "ended by a fault in the middle of training" in output
    assert "resumed from step=4.ckpt" in output
    assert "losses are bit-identical to those of the whole run" in output
    assert "kept: step=6.ckpt, step=8.ckpt" in output


def test_sharded_ranks_save_and_resume_on_another_number(tmp_path: Path) -> None:
    """What two FSDP2 ranks saved, one rank loads; both end with the weights of one run."""

    def fit(steps: int, ranks: int, resume: str | None, out: str) -> dict[str, Any]:
        job = json.dumps([str(tmp_path / "run"), steps, ranks, resume, str(tmp_path / out)])
        script = tmp_path / "job.py"
        script.write_text(SHARDED, encoding="utf-8")
        code, output = run_script(
            script, job, folder=tmp_path, environment=ENVIRONMENT, ranks=ranks
        )
        assert code == 0, output
        loaded: dict[str, Any] = torch.load(tmp_path / out)
        return loaded

    whole = fit(6, 2, None, "whole")
    assert [one.name for one in ckpt_storage.list_checkpoints(tmp_path / "run")] == [
        "step=4.ckpt",
        "step=6.ckpt",
    ]
    rank_files = list((tmp_path / "run" / "step=4.ckpt").glob("saves/*/*.distcp"))
    assert len(rank_files) == 2
    again = fit(6, 1, str(tmp_path / "run" / "step=4.ckpt"), "again")
    assert sorted(again["losses"]) == [4, 5]
    # Losses are each rank's own, of its part of the batch; weights are everybody's.
    for name, value in whole["state"].items():
        torch.testing.assert_close(again["state"][name], value, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_is_replaced_loaded_and_removed(tmp_path: Path) -> None:
    """The three calls of a `CheckpointIO`, with Lightning's own kinds of values."""
    io = adapter()
    for epoch in (1, 2):
        io.save_checkpoint(
            {"epoch": epoch, "state_dict": {"w": torch.full((2,), epoch)}}, tmp_path / "x"
        )
    loaded = io.load_checkpoint(str(tmp_path / "x"), map_location="cpu")
    assert loaded["epoch"] == 2
    assert torch.equal(loaded["state_dict"]["w"], torch.tensor([2, 2]))
    io.remove_checkpoint(tmp_path / "x")
    with pytest.raises(ckpt_storage.CheckpointGoneError, match="was deleted"):
        io.load_checkpoint(tmp_path / "x")
    with pytest.raises(ckpt_storage.CheckpointNotFoundError):
        io.load_checkpoint(tmp_path / "never")


def test_unsafe_values_need_weights_only_false(tmp_path: Path) -> None:
    """Objects are handed over only to who says that the writer is trusted."""
    io = adapter()
    io.save_checkpoint({"where": Path("x"), "state_dict": {"w": torch.ones(1)}}, tmp_path / "x")
    with pytest.raises(ckpt_storage.UnsafeContentError):
        io.load_checkpoint(tmp_path / "x")
    assert io.load_checkpoint(tmp_path / "x", weights_only=False)["where"] == Path("x")


def test_the_weights_are_consolidated_under_their_own_names(tmp_path: Path) -> None:
    """A checkpoint of Lightning's becomes safetensors without Lightning's own key."""
    need("safetensors")
    from safetensors.torch import load_file  # noqa: PLC0415  # optional

    weight = torch.rand(3, 2)
    adapter().save_checkpoint({"state_dict": {"net.weight": weight}, "epoch": 1}, tmp_path / "x")
    ckpt_storage.consolidate(tmp_path / "x")
    found = load_file(tmp_path / "x" / "hf" / "model.safetensors")
    assert list(found) == ["net.weight"]
    assert torch.equal(found["net.weight"], weight)
