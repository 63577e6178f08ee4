"""What a Trainer saved and `consolidate` exported is read by the libraries with nothing added."""

from __future__ import annotations

import importlib
import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import run_script
from integration_tools import EXAMPLES, ROOT, need
from s3_server import S3Server

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
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=words, unk_token="?", pad_token="?")


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


def start_example(folder: Path, server: S3Server, **job: Any) -> tuple[int, str]:
    """Run the example with LoRA on a bucket; `kill_at` names the step before which it is killed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    script = ROOT / "tests/support/killed_trainer.py"
    job = {"script": str(EXAMPLES / "trainer_resume.py"), "kill_at": None, **job}
    return run_script(script, json.dumps(job), folder=folder, environment=environment)


def test_the_example_on_s3_is_killed_and_resumes_bit_for_bit(
    tmp_path: Path, server: S3Server
) -> None:
    """Losses and adapter are those of a run that was not killed; PEFT reads the export."""
    outputs = [tmp_path / name for name in ("whole", "run")]
    for output in outputs:
        job = {"url": f"s3://bucket/{output.name}", "adapter": str(output)}
        job |= {"losses": str(tmp_path / f"{output.name}.json")}
        if output.name == "run":
            code, text = start_example(tmp_path, server, kill_at=5, **job)
            assert code == -9, text
            assert not output.exists()
        code, text = start_example(tmp_path, server, **job)
        assert code == 0, text
    whole, run = (json.loads(output.with_suffix(".json").read_text()) for output in outputs)
    assert list(whole) == list("12345678")
    assert run == whole
    weights = [output / "adapter_model.safetensors" for output in outputs]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    base = runpy.run_path(str(EXAMPLES / "trainer_resume.py"))["base_model"]()
    library: Any = importlib.import_module("peft").PeftModel
    model = library.from_pretrained(base, str(tmp_path / "run"))
    assert any(value.any() for name, value in model.named_parameters() if "lora_B" in name)
