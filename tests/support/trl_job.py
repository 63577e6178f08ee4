"""TRL's SFTTrainer with LoRA: `python trl_job.py '{"url": ..., "interrupt_at": ...}'`.

Prints one line of JSON at the end: the losses by step.
"""

from __future__ import annotations

import json
import sys
import tempfile

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_job import Recorder, model_of
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ckpt_storage.integrations.transformers import with_checkpoint_storage

JOB = json.loads(sys.argv[1])

words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(62)} | {"?": 62, ".": 63}, "?"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers'
    tokenizer_object=words, unk_token="?", pad_token="?", eos_token="."
)
texts = [{"text": " ".join(f"w{(n * k) % 62}" for k in range(12))} for n in range(24)]
recorder = Recorder(JOB["url"], JOB.get("interrupt_at"), None)
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        output_dir=folder,
        max_steps=8,
        per_device_train_batch_size=2,
        save_steps=3,
        logging_steps=1,
        max_length=16,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = with_checkpoint_storage(SFTTrainer, JOB["url"])(  # type: ignore[call-arg]  # TRL's own
        model=model_of(lora=False),
        args=arguments,
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1),
        callbacks=[recorder],
    )
    trainer.train(resume_from_checkpoint=True)
sys.stdout.write(f"report {json.dumps({'losses': recorder.losses})}\n")
