"""Lightning over our storage: real trainers, one process and FSDP2 on two."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import run_script
from integration_tools import EXAMPLES, ROOT, need, sound
from s3_server import S3Server

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


KILLED = """
import json, os, signal, sys
import lightning_fit
url, kill_at = json.loads(sys.argv[1])
step = lightning_fit.Regression.training_step
def killed(self, batch, index):
    if self.global_step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch, index)
lightning_fit.Regression.training_step = killed
lightning_fit.main(url)
"""

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{EXAMPLES}:{ROOT}"}


def adapter(**options: Any) -> Any:
    return importlib.import_module("ckpt_storage.integrations.lightning").CheckpointStorageIO(
        **options
    )


def on_server(server: S3Server) -> dict[str, str]:
    """Return the environment of clients of a server."""
    return {
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }


def run_example(folder: Path, url: str, kill_at: int | None = None) -> tuple[int, dict[str, str]]:
    """Run the example; return its exit code and the losses by step, to the last bit."""
    script = folder / "job.py"
    script.write_text(KILLED, encoding="utf-8")
    job = json.dumps([url, kill_at])
    code, output = run_script(script, job, folder=folder, environment=ENVIRONMENT)
    return code, dict(re.findall(r"step (\d+) loss (\S+)", output))


@pytest.mark.parametrize("place", ["disk", "s3"])
def test_a_killed_run_resumes_bit_for_bit(
    tmp_path: Path, place: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`last_checkpoint` finds the newest, of a bucket too; losses are those of a whole run."""
    url = str(tmp_path / "run") if place == "disk" else "s3://bucket/run"
    for name, value in on_server(server).items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    code, whole = run_example(tmp_path, str(tmp_path / "whole"))
    assert (code, list(whole)) == (0, list("01234567"))
    code, _ = run_example(tmp_path, url, kill_at=5)
    assert code == -9
    code, resumed = run_example(tmp_path, url)
    assert code == 0
    assert resumed == {step: whole[step] for step in "4567"}
    options = server.storage_options if place == "s3" else None
    infos = ckpt_storage.list_checkpoints(url, storage_options=options)
    assert [info.name for info in infos] == ["step=6.ckpt", "step=8.ckpt"]


TRAINER = """
import json, os, signal, sys
import lightning, lightning_fit
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from ckpt_storage.integrations.lightning import CheckpointStorageIO, last_checkpoint

kind, url = json.loads(sys.argv[1])

class Logging(lightning_fit.Regression):
    def training_step(self, batch, index):
        if kind == "signal" and self.global_step == 3 and not last_checkpoint(url):
            os.kill(os.getpid(), signal.SIGTERM)
        self.log("score", float(self.global_step), on_step=True)
        return super().training_step(batch, index)
    test_step = training_step

kept = ModelCheckpoint(
    dirpath=url, filename="{step}", every_n_train_steps=2, monitor="score", mode="min", save_top_k=1
)
callbacks = [OnExceptionCheckpoint(url, "preempted")] if kind == "signal" else [kept]
io = CheckpointStorageIO()
trainer = lightning.Trainer(
    plugins=[AsyncCheckpointIO(io) if kind == "background" else io], callbacks=callbacks,
    accelerator="cpu", max_steps=6, logger=False, enable_progress_bar=False,
)
module = Logging()
trainer.fit(module, lightning_fit.data(), ckpt_path=last_checkpoint(url))
if kind == "best":
    trainer.test(module, lightning_fit.data(), ckpt_path="best")
print("best", kept.best_model_path)
"""


def run_trainer(folder: Path, kind: str) -> tuple[int, str]:
    script = folder / "trainer.py"
    script.write_text(TRAINER, encoding="utf-8")
    job = json.dumps([kind, str(folder / "run")])
    return run_script(script, job, folder=folder, environment=ENVIRONMENT)


@pytest.mark.parametrize("kind", ["best", "background"])
def test_the_best_is_kept_and_loaded(tmp_path: Path, kind: str) -> None:
    """`ModelCheckpoint` keeps the best; `AsyncCheckpointIO` around the plug-in saves beside it."""
    code, output = run_trainer(tmp_path, kind)
    assert code == 0, output
    assert sound(str(tmp_path / "run")) == ["step=2.ckpt"]
    assert "best " + str(tmp_path / "run/step=2.ckpt") in output


def test_a_signal_saves_and_the_next_run_resumes(tmp_path: Path) -> None:
    """Lightning's `OnExceptionCheckpoint` saves after SIGTERM, through the plug-in."""
    code, output = run_trainer(tmp_path, "signal")
    assert "step 3 loss" in output
    assert sound(str(tmp_path / "run")) == ["preempted.ckpt"], (code, output)
    code, output = run_trainer(tmp_path, "signal")
    assert code == 0, output
    assert list(dict(re.findall(r"step (\d+) loss (\S+)", output))) == ["4", "5"]


LAST = """
import json, sys
import lightning_fit
from ckpt_storage.integrations import lightning as ours
from lightning.pytorch import callbacks
name, url, steps = json.loads(sys.argv[1])
kind = getattr(ours, name, None) or getattr(callbacks, name)
lightning_fit.keep = lambda url: kind(url, "{step}", every_n_train_steps=2, save_last=True)
trainer = lightning_fit.trainer(url, steps)
trainer.fit(lightning_fit.Regression(), lightning_fit.data(), ckpt_path="last")
"""


@pytest.mark.parametrize(
    ("callback", "place", "steps"),
    [
        ("StorageModelCheckpoint", "s3://bucket/run", "45"),
        ("StorageModelCheckpoint", "run", "45"),
        # Lightning's own finds nothing at a URL: a warning, and training begins anew.
        ("ModelCheckpoint", "s3://bucket/run", "012345"),
        ("ModelCheckpoint", "run", "45"),
    ],
)
def test_last_resumes(
    tmp_path: Path, server: S3Server, callback: str, place: str, steps: str
) -> None:
    """`fit(ckpt_path="last")` begins at 0 the first time, and continues the second time."""
    script = tmp_path / "last.py"
    script.write_text(LAST, encoding="utf-8")
    environment = {**ENVIRONMENT, **on_server(server)}
    for total, trained in ((4, "0123"), (6, steps)):
        job = json.dumps([callback, place, total])
        code, output = run_script(script, job, folder=tmp_path, environment=environment)
        assert code == 0, output
        assert list(dict(re.findall(r"step (\d+) loss (\S+)", output))) == list(trained)


def test_a_module_takes_weights_without_a_trainer(tmp_path: Path) -> None:
    """The lines of the documentation, in place of `load_from_checkpoint`."""
    module = torch.nn.Linear(2, 2)
    adapter().save_checkpoint({"state_dict": module.state_dict(), "epoch": 1}, tmp_path / "x")
    other = torch.nn.Linear(2, 2)
    state = {"state_dict": other.state_dict()}
    ckpt_storage.load(state, tmp_path / "x")
    other.load_state_dict(state["state_dict"])
    assert torch.equal(other.weight, module.weight)


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
        assert "has no step" not in output
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
