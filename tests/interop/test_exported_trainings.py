"""What a Trainer saved and `consolidate` exported is read by the libraries with nothing added."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_tools import need

import ckpt_storage

need("accelerate")
need("peft")

pytestmark = pytest.mark.filterwarnings(
    # PEFT asks the model under a name that transformers has deprecated.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def train(url: Path, **options: Any) -> Any:
    """Train three steps in this process; return the Trainer."""
    trainer, _ = importlib.import_module("trainer_job").run(str(url), steps=3, **options)
    return trainer


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415  # costs time
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  # as above

    words = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?")


def test_an_exported_adapter_is_read_by_peft(tmp_path: Path) -> None:
    """`PeftModel.from_pretrained` gives the trained model from the export and the base."""
    trained = train(tmp_path / "run", lora=True).model.eval()
    ckpt_storage.consolidate(tmp_path / "run/step-00000003", tmp_path / "adapter")
    library: Any = importlib.import_module("peft").PeftModel
    base = importlib.import_module("trainer_job").model_of(lora=False)
    found = library.from_pretrained(base, str(tmp_path / "adapter")).eval()
    text = torch.arange(16)[None]
    assert torch.equal(found(text).logits, trained(text).logits)
    assert not torch.equal(found.unload()(text).logits, trained(text).logits)


def test_an_exported_fine_tune_is_read_by_transformers(tmp_path: Path) -> None:
    """`AutoModelForCausalLM` and `AutoTokenizer` find all that they need in the export."""
    trained = train(tmp_path / "run", tokenizer=tokenizer()).model.eval()
    ckpt_storage.consolidate(tmp_path / "run/step-00000003", tmp_path / "model")
    library: Any = importlib.import_module("transformers")
    found = library.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    words = library.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = torch.tensor([words("world hello")["input_ids"]])
    assert text.tolist() == [[1, 0]]
    assert torch.equal(found(text).logits, trained(text).logits)
