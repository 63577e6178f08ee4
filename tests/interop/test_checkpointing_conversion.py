"""From the native layout of torch_checkpointing to ours and back."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import run_script
from integration_tools import ROOT, need
from safetensors.torch import load_file

import ckpt_storage
from ckpt_storage import CheckpointNotFoundError, FormatError, UnsafeContentError
from ckpt_storage.testing.s3_server import S3Server

need("torch_checkpointing")

# ruff: noqa: E402  # these need it
from checkpointing_job import ROWS, run, weight

from ckpt_storage.integrations.torch_checkpointing import (
    CheckpointStorageConfig,
    convert_from_native,
    convert_to_native,
)

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests/support"])),
}


def job(folder: Path, *, ranks: int | None = 2, **options: Any) -> list[dict[str, Any]]:
    """Run a job of torch_checkpointing; return what each rank printed."""
    script = ROOT / "tests/support/checkpointing_job.py"
    code, output = run_script(
        script, json.dumps(options), folder=folder, environment=ENVIRONMENT, ranks=ranks
    )
    assert code == 0, output
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"rank"')]


def loaded(url: str | Path) -> dict[str, Any]:
    """Load what a job saved, by our loader."""
    model = {"weight": torch.zeros(ROWS, 16), "bias": torch.zeros(3)}
    state: dict[str, Any] = {"model": model, "step": 0}
    ckpt_storage.load(state, url)
    return state


@pytest.mark.parametrize("ranks", [None, 2])
def test_the_native_layout_becomes_a_checkpoint_of_ours(tmp_path: Path, ranks: int | None) -> None:
    """DTensors of two ranks and plain tensors of one arrive whole, and so does an int."""
    job(tmp_path, ranks=ranks, url=str(tmp_path / "native"), native=True, steps=[4])
    convert_from_native(tmp_path / "native/step-4", tmp_path / "ours")
    assert ckpt_storage.verify(tmp_path / "ours").ok
    state = loaded(tmp_path / "ours")
    assert torch.equal(state["model"]["weight"], weight(4))
    assert state["model"]["bias"].tolist() == [4.0] * 3
    assert state["step"] == 4


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_checkpoint_of_ours_becomes_the_native_layout(tmp_path: Path, ranks: int | None) -> None:
    """Their manager loads it on one rank, and into DTensors on two."""
    state = {"model": {"weight": weight(5), "bias": torch.full((3,), 5.0)}, "step": 5}
    ckpt_storage.save(state, tmp_path / "ours")
    (tmp_path / "native").mkdir()
    convert_to_native(tmp_path / "ours", tmp_path / "native/step-5")
    for answer in job(tmp_path, ranks=ranks, url=str(tmp_path / "native"), native=True, load=5):
        assert (answer["is_equal"], answer["bias"]) == (True, [5.0] * 3)
    convert_from_native(tmp_path / "native/step-5", tmp_path / "again")
    assert torch.equal(loaded(tmp_path / "again")["model"]["weight"], weight(5))


def test_their_files_on_our_storage_are_converted(tmp_path: Path, server: S3Server) -> None:
    """`storage_config` names where the native files are, a bucket too."""
    options = server.storage_options
    run({"url": "s3://bucket/run", "steps": [6], "storage_options": options})
    config = CheckpointStorageConfig(url="s3://bucket/run", storage_options=options)
    convert_from_native("s3://bucket/run/step-6", tmp_path / "ours", storage_config=config)
    with ckpt_storage.open_checkpoint(tmp_path / "ours") as checkpoint:
        assert torch.equal(checkpoint["model.weight"].torch(), weight(6))


def test_a_file_of_one_rank_is_no_source(tmp_path: Path) -> None:
    """`convert` names the DTensor in it, and the function that reads the files of all ranks."""
    job(tmp_path, url=str(tmp_path / "native"), native=True, steps=[1])
    file = tmp_path / "native/step-1/model_0.pt"
    with pytest.raises(FormatError, match="holds weight as a DTensor") as caught:
        ckpt_storage.convert(file, tmp_path / "ours", to="ckpt_storage")
    assert "convert_from_native" in str(caught.value)


def test_values_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    """An item without metadata is that of all ranks only if their files are equal."""
    job(tmp_path, url=str(tmp_path / "native"), native=True, steps=[1], same=False)
    with pytest.raises(FormatError, match="different values of step"):
        convert_from_native(tmp_path / "native/step-1", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    """Metadata of two ranks, and a file that holds less than its rank's part."""
    job(tmp_path, url=str(tmp_path / "native"), native=True, steps=[1])
    file = tmp_path / "native/step-1/model_1.pt"
    state = torch.load(file, weights_only=True)
    del state["weight"]
    torch.save(state, file)
    with pytest.raises(FormatError, match=r"model has 32768 of 65536 elements of \[.weight.\]"):
        convert_from_native(tmp_path / "native/step-1", tmp_path / "ours")


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    """Their own loader unpickles everything."""
    job(tmp_path, ranks=None, url=str(tmp_path / "native"), native=True, steps=[1])
    metadata = tmp_path / "native/step-1/metadata.pkl"
    metadata.write_bytes(pickle.dumps({"version": print}))
    with pytest.raises(UnsafeContentError, match=r"builtins\.print"):
        convert_from_native(tmp_path / "native/step-1", tmp_path / "ours")


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    """It is named."""
    with pytest.raises(CheckpointNotFoundError, match="nothing"):
        convert_from_native(tmp_path / "nothing", tmp_path / "ours")


def test_their_checkpoints_are_pruned_followed_and_exported(tmp_path: Path) -> None:
    """`prune` and `follow` read the same commits; `consolidate` exports a converted checkpoint."""
    url = tmp_path / "run"
    run({"url": str(url), "steps": [1, 2, 3]})
    ckpt_storage.prune(url, keep=ckpt_storage.KeepLatest(2), names="step-{step}", dry_run=False)
    assert [info.name for info in ckpt_storage.follow(url, poll_s=0.1, idle_s=0.1)] == [
        "step-2",
        "step-3",
    ]
    config = CheckpointStorageConfig(url=str(url))
    convert_from_native(url / "step-3", tmp_path / "ours", storage_config=config)
    ckpt_storage.consolidate(tmp_path / "ours", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(weights["weight"], weight(3))
