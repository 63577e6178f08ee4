"""Libraries that serve models load no part of a first export whose writer died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors
import torch
from fault_tools import Faulty
from integration_tools import need

import ckpt_storage
from ckpt_storage.errors import CheckpointError
from ckpt_storage.export import output as run_module
from ckpt_storage.testing.faults import Rule, SimulatedCrash

need("transformers")


def vllm_files(folder: Path) -> set[str]:
    """Return what vLLM reads: the files that it lists, of which the index, if any, names which."""
    listed = {path.name for path in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return listed
    return listed & {*json.loads(index.read_text())["weight_map"].values()}


def by_index(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def test_no_library_loads_a_part_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a death between files each library fails or finds nothing; a new call ends that."""
    from transformers import (  # noqa: PLC0415  # seconds that a collection need not take
        AutoModelForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
    )

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    state = LlamaForCausalLM(config).state_dict()
    url, output = tmp_path / "run", tmp_path / "hf"
    ckpt_storage.save({"model": state}, url, sync_files=False)
    faulty = Faulty(
        output.as_uri(), Rule(action="crash_before", operation="complete_upload", skip_count=2)
    )
    monkeypatch.setattr(run_module, "open_store", faulty)
    with pytest.raises((SimulatedCrash, CheckpointError)):
        ckpt_storage.consolidate(url, output, max_file_bytes=30_000)
    config.save_pretrained(output)
    assert len(list(output.glob("*.safetensors"))) == 2
    assert vllm_files(output) == set()
    with pytest.raises(OSError, match="still-being-written"):
        AutoModelForCausalLM.from_pretrained(output)
    with pytest.raises(FileNotFoundError, match="still-being-written"):
        by_index(output)

    faulty.play()
    ckpt_storage.consolidate(url, output, max_file_bytes=30_000)
    assert vllm_files(output) == {path.name for path in output.glob("*.safetensors")}
    loaded = AutoModelForCausalLM.from_pretrained(output).state_dict()
    for found in (by_index(output), loaded):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())
