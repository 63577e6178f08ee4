"""The Hugging Face Trainer over our storage: interrupted and resumed, on one rank and on two."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_tools import EXAMPLES, ROOT, need, sound
from warm import run_script

import ckpt_storage

need("accelerate")

SCRIPT = EXAMPLES / "trainer_resume.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{EXAMPLES}:{ROOT}"}

DAMAGED = """
import json, pathlib, sys
import torch.distributed as dist
import trainer_resume

url, out = json.loads(sys.argv[1])
whole = trainer_resume.train(url, out, interrupt_at=7)
rank = dist.get_rank()
if rank == 0:
    # Each shard holds parameters of its rank; of the last bytes some are a tensor's.
    for shard in pathlib.Path(url, "step-00000006").glob("saves/*/*.distcp"):
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
dist.barrier()
resumed = trainer_resume.train(url, out)
print(json.dumps([rank, min(resumed), all(whole[n] == resumed[n] for n in (4, 5, 6, 7))]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupted_training_resumes_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    """In the middle of an epoch, with dropout, each later loss is that of an undisturbed run."""
    url = str(tmp_path / "checkpoints")
    count = None if ranks == 1 else ranks
    code, output = run_script(SCRIPT, url, folder=tmp_path, environment=ENVIRONMENT, ranks=count)
    assert code == 0, output
    assert "interrupted at step 5" in output
    assert "resumed after step 3" in output
    assert "losses are bit-identical to those of the whole run" in output
    assert "committed: step-00000003, step-00000006, step-00000008" in output
    assert "the Trainer's own checkpoints: none" in output
    assert "missing keys" not in output
    assert sound(f"{url}/run") == ["step-00000003", "step-00000006", "step-00000008"]
    rng = {f"rng.{rank}" for rank in range(ranks)}
    reader = ckpt_storage.CheckpointStorageReader(f"{url}/run/step-00000008")
    names = set(reader.read_metadata().state_dict_metadata)
    assert {name for name in names if name.startswith("rng.")} == rng


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """Two ranks resume from the one before, bit for bit, say so, and save the damaged step anew."""
    script, url = tmp_path / "job.py", str(tmp_path / "run")
    script.write_text(DAMAGED, encoding="utf-8")
    job = json.dumps([url, str(tmp_path / "out")])
    code, output = run_script(script, job, folder=tmp_path, environment=ENVIRONMENT, ranks=2)
    assert code == 0, output
    for rank in (0, 1):
        assert json.dumps([rank, 4, True]) in output, output
    assert "not from what comes first: step-00000006 could not be loaded" in output
    assert sound(url) == ["step-00000003", "step-00000006", "step-00000008"]


def hf() -> Any:
    """Return transformers, which takes seconds to import: not while tests are collected."""
    return importlib.import_module("transformers")


def callback_at(url: Path | str, **options: Any) -> Any:
    from ckpt_storage.integrations.transformers import CheckpointStorageCallback  # noqa: PLC0415  # as `hf`

    return CheckpointStorageCallback(url, **options)


def arguments(folder: Path, **more: Any) -> Any:
    return hf().TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **more)


def begin(callback: Any, args: Any) -> dict[str, Any]:
    """Let a Trainer be made with the callback, and begin to train; return what is trained."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    now = {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
    }
    state, control = hf().TrainerState(), hf().TrainerControl()
    callback.on_init_end(args, state, control)
    callback.on_train_begin(args, state, control, **now)
    return now


def test_a_run_that_did_not_resume_replaces_nothing(tmp_path: Path) -> None:
    """Training anew over the checkpoints of another run ends with an error, and they stay."""
    args = arguments(tmp_path / "out")

    def train() -> None:
        callback = callback_at(tmp_path / "run", timeout=60)
        now = begin(callback, args)
        control = hf().TrainerControl(should_save=True)
        callback.on_step_end(args, hf().TrainerState(global_step=5), control, **now)
        callback.close()

    train()
    before = ckpt_storage.list_checkpoints(tmp_path / "run")
    with pytest.raises(ckpt_storage.CheckpointExistsError, match="step-00000005"):
        train()
    assert ckpt_storage.list_checkpoints(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("load_best_model_at_end", {"eval_strategy": "steps", "load_best_model_at_end": True}),
        ('save_strategy="best"', {"save_strategy": "best", "metric_for_best_model": "loss"}),
    ],
)
def test_what_cannot_be_served_is_refused_before_training(
    tmp_path: Path, name: str, more: dict[str, Any]
) -> None:
    """Arguments with which training would end otherwise than they say are an error at once."""
    callback = callback_at(tmp_path / "run")
    args = arguments(tmp_path, **more)
    with pytest.raises(ckpt_storage.InvalidInputError, match=name):
        hf().Trainer(model=torch.nn.Linear(2, 2), args=args, callbacks=[callback], eval_dataset=[1])
    callback.close()


def test_the_trainers_fsdp_cannot_resume_and_says_so_before(tmp_path: Path) -> None:
    """It trains and saves; what it saved is refused when it is to be resumed, not in the middle."""
    callback = callback_at(tmp_path / "run")
    args = arguments(tmp_path)
    args.fsdp = "full_shard"
    begin(callback, args)
    assert callback.resume_folder() is None
    state = {"trainer": "{}", "rng": {"0": (1,)}}
    ckpt_storage.save(state, tmp_path / "run/step-00000004", sync_files=False)
    with pytest.raises(ckpt_storage.InvalidInputError, match="FSDP"):
        callback.resume_folder()
    callback.close()


def test_the_second_load_goes_where_the_first_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user in the root's URL is the user of every load, and in no message."""
    asked: list[str] = []

    def restore(manager: ckpt_storage.CheckpointManager, state: object, *, step: int) -> None:
        del state
        asked.append(manager.target_of(step))
        raise ckpt_storage.IntegrityError("stop")

    monkeypatch.setattr(ckpt_storage.CheckpointManager, "restore", restore)
    callback = callback_at("sftp://me:secret@host/run")
    callback._resumed_step = 5  # noqa: SLF001  # a restore would need the host
    with pytest.raises(ckpt_storage.IntegrityError, match="stop"):
        begin(callback, arguments(Path("unused")))
    assert asked == ["sftp://me:secret@host/run/step-00000005"]
    assert callback._manager.url_of(5) == "sftp://host/run/step-00000005"  # noqa: SLF001
    callback.close()
