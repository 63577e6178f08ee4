"""The Hugging Face Trainer over our storage: interrupted and resumed, on one rank and on two."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from copy_cases import flip
from fork_server import run_script
from integration_tools import ROOT, need, sound

import ckpt_storage

need("accelerate")
need("peft")

JOB = ROOT / "tests/support/trainer_job.py"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}


PEFTS_WARNING = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
"""PEFT asks the model under a name that transformers has deprecated."""


def job(folder: Path, *, ranks: int | None = None, **options: Any) -> tuple[int, str]:
    """Run a Trainer; return the exit code and what it printed."""
    return run_script(JOB, json.dumps(options), folder=folder, environment=ENVIRONMENT, ranks=ranks)


def losses_of(output: str) -> dict[str, float]:
    """Return the losses by step that a job reported."""
    line = next(line for line in output.splitlines() if line.startswith("report "))
    losses: dict[str, float] = json.loads(line.removeprefix("report "))["losses"]
    return losses


@pytest.mark.parametrize("kind", ["fsdp", "lora"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """Under FSDP2 on two ranks and with LoRA on two: the losses are those of the whole run."""
    options = {kind: True}
    whole, url = str(tmp_path / "whole"), str(tmp_path / "run")
    code, output = job(tmp_path, ranks=2, url=whole, **options)
    assert code == 0, output
    expected = losses_of(output)
    code, output = job(tmp_path, ranks=2, url=url, interrupt_at=5, **options)
    assert code == 7, output
    code, output = job(tmp_path, ranks=2, url=url, resume=True, **options)
    assert code == 0, output
    assert losses_of(output) == {step: expected[step] for step in "45678"}
    assert "missing keys" not in output
    assert sound(url) == ["step-00000003", "step-00000006", "step-00000008"]
    states = {"trainer_files.rng_state_0.pth", "trainer_files.rng_state_1.pth"}
    assert {name for name in names_at(f"{url}/step-00000008") if "rng_state" in name} == states


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """Two ranks resume from the one before, bit for bit, say so, and save the damaged step anew."""
    options: dict[str, Any] = {"ranks": 2, "lr_scheduler_type": "constant"}
    whole, url = str(tmp_path / "whole"), str(tmp_path / "run")
    code, output = job(tmp_path, url=whole, **options)
    assert code == 0, output
    expected = losses_of(output)
    code, output = job(tmp_path, url=url, steps=6, **options)
    assert code == 0, output
    # Each shard holds parameters of its rank; of the last bytes some are a tensor's.
    for shard in Path(url, "step-00000006").glob("saves/*/*.distcp"):
        flip(shard, shard.stat().st_size // 2)
    code, output = job(tmp_path, url=url, resume=True, **options)
    assert code == 0, output
    assert "LOST. These could not be loaded: step-00000006: " in output
    assert losses_of(output) == {step: expected[step] for step in "45678"}
    assert sound(url) == ["step-00000003", "step-00000006", "step-00000008"]


Q_PROJ = "self_attn.q_proj"
SHARDED = {
    False: f"model.model.layers.0.{Q_PROJ}.weight",
    True: f"model.base_model.model.model.layers.0.{Q_PROJ}.lora_A.weight",
}
"""A weight of a model, and of an adapter."""


@pytest.mark.parametrize("lora", [False, True])
def test_fsdp_checkpoints_hold_shards_and_resume_on_one_rank(tmp_path: Path, *, lora: bool) -> None:
    """Two ranks store a half of each trained weight; one rank without FSDP goes on from them."""
    url = str(tmp_path / "run")
    code, output = job(tmp_path, ranks=2, url=url, fsdp=True, steps=3, lora=lora)
    assert code == 0, output
    items = ckpt_storage.CheckpointStorageReader(f"{url}/step-00000003").read_metadata()
    weight = items.state_dict_metadata[SHARDED[lora]]
    assert len(getattr(weight, "chunks", [])) == 2
    code, output = job(tmp_path, url=url, resume=True, lora=lora)
    assert code == 0, output
    assert list(losses_of(output)) == list("45678")


@pytest.mark.parametrize("lora", [False, True])
def test_one_signalled_rank_makes_all_save_at_one_step_and_stop(
    tmp_path: Path, *, lora: bool
) -> None:
    """`enable_jit_checkpoint`: the checkpoint goes to the URL, and the next job goes on from it."""
    url = str(tmp_path / "run")
    options = {"url": url, "enable_jit_checkpoint": True, "save_steps": 500, "steps": 400}
    options["lora"] = lora
    code, output = job(tmp_path, ranks=2, signal_at=4, **options)
    assert code == 0, output
    (name,) = sound(url)
    step = int(name.removeprefix("step-"))
    assert 4 < step < 400
    code, output = job(tmp_path, ranks=2, resume=True, **{**options, "steps": step + 1})
    assert code == 0, output
    assert list(losses_of(output)) == [str(step + 1)]


def train(url: Path | str, **options: Any) -> tuple[Any, dict[int, float]]:
    """Train in this process; return the Trainer and the losses by step."""
    run: Any = importlib.import_module("trainer_job").run
    trainer, losses = run(str(url), **options)
    return trainer, losses


def names_at(url: str) -> set[str]:
    """Return the names of the values of a checkpoint."""
    return set(ckpt_storage.CheckpointStorageReader(url).read_metadata().state_dict_metadata)


def weights_at(url: str) -> dict[str, torch.Tensor]:
    """Return the model's weights of a checkpoint."""
    with ckpt_storage.open_checkpoint(url) as checkpoint:
        names = [name for name in checkpoint if name.startswith("model.")]
        return {name.removeprefix("model."): checkpoint[name].torch() for name in names}


def rising(trainer: Any) -> None:
    """Let a Trainer's first evaluation be the best."""
    values = iter(range(1, 100))
    trainer.evaluate = lambda *_args, **_options: {"eval_loss": float(next(values))}


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "metric_for_best_model": "loss",
    "greater_is_better": False,
}


@pytest.mark.filterwarnings(PEFTS_WARNING)
@pytest.mark.parametrize("lora", [False, True])
def test_the_best_weights_are_loaded_at_the_end_and_kept(tmp_path: Path, *, lora: bool) -> None:
    """`load_best_model_at_end` with `save_total_limit=1`: the best and the last checkpoint stay."""
    trainer, _ = train(
        tmp_path / "run",
        **BEST,
        load_best_model_at_end=True,
        save_total_limit=1,
        prepare=rising,
        lora=lora,
    )
    assert trainer.state.best_global_step == 2
    assert trainer.state.best_model_checkpoint.endswith("/step-00000002")
    assert sound(str(tmp_path / "run")) == ["step-00000002", "step-00000008"]
    best = weights_at(str(tmp_path / "run/step-00000002"))
    assert best
    state = trainer.model.state_dict()
    if lora:
        peft: Any = importlib.import_module("peft")
        state = peft.get_peft_model_state_dict(trainer.model)
    assert all(torch.equal(state[name], value) for name, value in best.items())


def test_metrics_travel_with_the_save(tmp_path: Path) -> None:
    """`CheckpointManager.best` and `KeepBest` see what the Trainer evaluated."""
    train(tmp_path / "run", **BEST, prepare=rising)
    infos = ckpt_storage.list_checkpoints(tmp_path / "run")
    assert [info.metrics["eval_loss"] for info in infos] == [1.0, 2.0, 3.0, 4.0]


def test_save_strategy_best_saves_better_steps_only(tmp_path: Path) -> None:
    """A step that is no better than the best so far is not saved."""
    train(tmp_path / "run", **{**BEST, "save_strategy": "best"}, prepare=rising)
    assert sound(str(tmp_path / "run")) == ["step-00000002"]


def test_save_only_model_stores_no_optimizer(tmp_path: Path, caplog: Any) -> None:
    """A run that resumes from such a checkpoint begins with a new optimizer, and says so."""
    train(tmp_path / "run", save_only_model=True, steps=3)
    names = names_at(str(tmp_path / "run/step-00000003"))
    assert not [name for name in names if name.startswith("optimizer")]
    _, losses = train(tmp_path / "run", resume=True, steps=4)
    assert list(losses) == [4]
    assert "optimizer and schedule begin anew" in caplog.text


def test_the_url_of_a_checkpoint_resumes_from_it(tmp_path: Path) -> None:
    """Not from the newest; steps above it are replaced."""
    url = tmp_path / "run"
    _, whole = train(url)
    _, losses = train(url, resume=str(url / "step-00000003"))
    assert losses == {step: whole[step] for step in range(4, 9)}


def test_a_folder_of_a_plain_trainer_resumes_as_before(tmp_path: Path) -> None:
    """The way from the Trainer's own checkpoints to these."""
    tools: Any = importlib.import_module("trainer_job")
    _, whole = train(tmp_path / "whole")
    arguments = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    trainer = tools.plain_trainer(tmp_path / "stock", **arguments)
    trainer.train()
    _, losses = train(tmp_path / "run", resume=str(tmp_path / "stock/checkpoint-3"))
    assert list(losses) == [4, 5, 6, 7, 8]
    assert losses.keys() <= whole.keys()


@pytest.mark.filterwarnings(PEFTS_WARNING)
def test_an_adapter_is_stored_without_its_base(tmp_path: Path) -> None:
    """Names are PEFT's own; a step of LoRA holds the adapter and its optimizer."""
    trainer, _ = train(tmp_path / "run", lora=True, steps=3)
    stored = weights_at(str(tmp_path / "run/step-00000003"))
    peft: Any = importlib.import_module("peft")
    expected = peft.get_peft_model_state_dict(trainer.model)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings(PEFTS_WARNING)
def test_frozen_weights_of_adapters_can_be_stored(tmp_path: Path) -> None:
    """With `frozen_of_adapters` the base is there, too."""
    train(tmp_path / "run", lora=True, steps=3, storage={"frozen_of_adapters": True})
    assert any("embed_tokens" in name for name in weights_at(str(tmp_path / "run/step-00000003")))


def test_nothing_is_saved_in_the_folder_of_the_trainer(tmp_path: Path) -> None:
    """One process stores its random states under the Trainer's name for them."""
    trainer, _ = train(tmp_path / "run", steps=3)
    assert not list(Path(trainer.args.output_dir).glob("checkpoint-*"))
    assert "trainer_files.rng_state.pth" in names_at(str(tmp_path / "run/step-00000003"))


def test_states_of_callbacks_and_the_scaler_are_restored(tmp_path: Path) -> None:
    """What the Trainer writes beside the weights travels with the checkpoint."""
    tools: Any = importlib.import_module("trainer_job")
    counting = tools.CountingCallback()
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    train(tmp_path / "run", steps=3, callbacks=[counting], scaler=scaler)
    restored = tools.CountingCallback()
    later = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainer, _ = train(
        tmp_path / "run",
        steps=4,
        callbacks=[restored],
        scaler=later,
        resume=True,
        restore_callback_states_from_checkpoint=True,
    )
    callbacks = trainer.callback_handler.callbacks
    (seen,) = [each for each in callbacks if isinstance(each, tools.CountingCallback)]
    assert seen.count == counting.count + 1
    assert later.get_scale() == 512.0


def test_a_run_that_did_not_resume_replaces_nothing(tmp_path: Path) -> None:
    """Training anew over the checkpoints of another run ends with an error, and they stay."""
    train(tmp_path / "run", steps=3)
    before = ckpt_storage.list_checkpoints(tmp_path / "run")
    with pytest.raises(ckpt_storage.CheckpointExistsError, match="step-00000003"):
        train(tmp_path / "run", steps=3)
    assert ckpt_storage.list_checkpoints(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hub_strategy", {"push_to_hub": True, "hub_strategy": "every_save", "hub_token": "x"}),
        ("save_total_limit", {"save_total_limit": 2, "storage": {"keep": "latest"}}),
        ("MLflowCallback", {"callbacks": ["MLflowCallback"]}),
    ],
)
def test_an_argument_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Before training begins, and nothing is written."""
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "1")
    transformers: Any = importlib.import_module("transformers")
    if "storage" in options:
        options = {**options, "storage": {"keep": ckpt_storage.KeepLatest(2)}}
    if "callbacks" in options:
        callback = type("MLflowCallback", (transformers.TrainerCallback,), {})()
        options = {"callbacks": [callback]}
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda *_args, **_options: None)
    with pytest.raises(ckpt_storage.InvalidInputError, match=name):
        train(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_method_with_other_parameters_is_refused_by_name() -> None:
    """A release of transformers that changed what is overridden is not served silently."""
    from ckpt_storage.integrations.transformers import with_checkpoint_storage  # noqa: PLC0415  # costs seconds

    transformers: Any = importlib.import_module("transformers")

    class Moved(transformers.Trainer):  # type: ignore[misc]
        def _load_best_model(self, where: str) -> None: ...

        def _save_checkpoint(self, model: Any) -> None: ...

    with pytest.raises(ckpt_storage.InvalidInputError, match="_save_checkpoint"):
        with_checkpoint_storage(Moved, "memory://run")


def test_a_class_that_saves_above_the_storage_is_refused() -> None:
    """Its files would come after the checkpoint was collected."""
    from ckpt_storage.integrations.transformers import with_checkpoint_storage  # noqa: PLC0415  # costs seconds

    transformers: Any = importlib.import_module("transformers")
    stored: Any = with_checkpoint_storage(transformers.Trainer, "memory://run")
    with pytest.raises(ckpt_storage.InvalidInputError, match="apply with_checkpoint_storage last"):
        type("Late", (stored,), {"_save_checkpoint": lambda *_: None})
