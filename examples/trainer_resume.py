"""Hugging Face Trainer with LoRA: killed and started again, it continues bit for bit.

    python examples/trainer_resume.py s3://bucket/run adapter
    torchrun --nproc-per-node 2 examples/trainer_resume.py s3://bucket/run adapter

Checkpoints go to the URL. At the end the folder `adapter` holds what `PeftModel.from_pretrained`
reads.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ckpt_storage
from ckpt_storage.integrations.transformers import with_checkpoint_storage


def base_model() -> LlamaForCausalLM:
    """Return a little language model; yours comes from `from_pretrained`."""
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def texts() -> list[dict[str, torch.Tensor]]:
    """Return some texts of random tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(64, (16,), generator=generator) for _ in range(24)]
    return [{"input_ids": text, "labels": text} for text in tokens]


def main(url: str, adapter: str) -> None:
    """Train to step 8, from the newest checkpoint below `url` if any exists, and export."""
    # Dropout draws random numbers, so a resumed run must restore the generator.
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=8,
            per_device_train_batch_size=2,
            save_steps=3,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        # These two lines differ from a script with a plain Trainer, and the export.
        trainer_class = with_checkpoint_storage(Trainer, url)
        trainer = trainer_class(
            model=get_peft_model(base_model(), lora), args=arguments, train_dataset=texts()
        )
        trainer.train(resume_from_checkpoint=True)
    newest = ckpt_storage.list_checkpoints(url)[-1]
    ckpt_storage.consolidate(newest.url, adapter)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
