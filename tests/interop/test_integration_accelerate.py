"""accelerate's state in our storage: a loop that is killed, FSDP2, and all that it prepares."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import run_script
from integration_tools import EXAMPLES, ROOT, need, sound
from safetensors.torch import load_file

import ckpt_storage
from ckpt_storage import (
    AsyncSaver,
    CheckpointManager,
    InvalidInputError,
    KeepBest,
    UnsafeContentError,
)

need("accelerate")
need("transformers")

# ruff: noqa: E402  # these need it
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from ckpt_storage.integrations.accelerate import collect_state, load_state, save_state

ENVIRONMENT = {
    **os.environ,
    "ACCELERATE_USE_CPU": "true",
    "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests/support"])),
}

LOOP = """
import json, os, runpy, signal, sys
from accelerate import Accelerator
script, url, kill_at = json.loads(sys.argv[1])
backward, counts = Accelerator.backward, []
def counting(self, loss, **options):
    counts.append(loss)
    if len(counts) == kill_at and self.is_last_process:
        os.kill(os.getpid(), signal.SIGKILL)
    backward(self, loss, **options)
Accelerator.backward = counting
sys.argv = [script, url, "9"]
runpy.run_path(script, run_name="__main__")
"""


def loop(folder: Path, url: str, kill_at: int | None = None) -> tuple[int, str]:
    """Run the example to step 9 on two ranks."""
    script = folder / "loop.py"
    script.write_text(LOOP, encoding="utf-8")
    job = json.dumps([str(EXAMPLES / "accelerate_loop.py"), url, kill_at])
    return run_script(script, job, folder=folder, environment=ENVIRONMENT, ranks=2)


def losses_in(output: str) -> dict[tuple[int, int], float]:
    """Return what was printed, by rank and step, to the last bit."""
    # Ranks write without buffers: a line's end may follow another's line.
    lines = re.findall(r"rank (\d+) step (\d+) loss (\d+\.\d+(?:e-\d+)?)", output)
    return {(int(rank), int(step)): float(loss) for rank, step, loss in lines}


def test_a_killed_loop_resumes_bit_for_bit(tmp_path: Path) -> None:
    """A rank is killed in the second epoch; each later loss is that of an undisturbed run."""
    code, output = loop(tmp_path, str(tmp_path / "whole"))
    assert code == 0, output
    whole = losses_in(output)
    assert len(whole) == 2 * 9
    url = str(tmp_path / "run")
    code, output = loop(tmp_path, url, kill_at=9)
    assert code != 0
    code, output = loop(tmp_path, url)
    assert code == 0, output
    resumed = losses_in(output)
    # The save of step 6 may have been in flight.
    (name,) = set(re.findall(r"resumed from (step-\d{8})", output))
    assert name in {"step-00000003", "step-00000006"}
    step = int(name.rpartition("-")[2])
    assert resumed == {key: loss for key, loss in whole.items() if key[1] > step}
    assert sound(url) == ["step-00000006", "step-00000009"]


def job(folder: Path, *, ranks: int | None, **options: Any) -> dict[str, Any]:
    """Run a loop; return what rank 0 reported."""
    script = ROOT / "tests/support/accelerate_job.py"
    code, output = run_script(
        script, json.dumps(options), folder=folder, environment=ENVIRONMENT, ranks=ranks
    )
    assert code == 0, output
    line = next(line for line in output.splitlines() if line.startswith("report "))
    report: dict[str, Any] = json.loads(line.removeprefix("report "))
    return report


def test_sharded_ranks_save_and_another_number_resumes(tmp_path: Path) -> None:
    """Two FSDP2 ranks store a half of each weight; one rank goes on from them."""
    url = str(tmp_path / "run")
    whole = job(tmp_path, ranks=2, url=url, fsdp=True, steps=3)
    items = ckpt_storage.CheckpointStorageReader(f"{url}/step-2").read_metadata()
    assert len(getattr(items.state_dict_metadata["model.0.weight"], "chunks", [])) == 2
    alone = job(tmp_path, ranks=None, url=url, steps=4, resume_at=3)
    assert list(alone["losses"]) == ["4"]
    again = job(tmp_path, ranks=2, url=f"{url}-2", fsdp=True, steps=3)
    assert again == whole


class Counter:
    """An object that a user registers."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def prepared(value: Any = 0) -> tuple[Accelerator, Any, Any, Any, Counter]:
    """Return an accelerator, and what was prepared and registered."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001  # as its own tests do
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counter = Counter(value)
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, optimizer, scheduler, counter


def test_all_that_is_prepared_or_registered_is_restored(tmp_path: Path) -> None:
    """Weights, moments, schedule, scaler, random states and registered objects."""
    accelerator, model, optimizer, scheduler, _ = prepared(7)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    save_state(accelerator, tmp_path / "step-1")
    drawn = random.random(), torch.rand(1)
    saved = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()

    accelerator, model, optimizer, scheduler, counter = prepared()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    load_state(accelerator, tmp_path / "step-1")
    assert (random.random(), torch.rand(1)) == drawn
    assert counter.value == 7
    assert accelerator.scaler.get_scale() == 512.0
    assert scheduler.state_dict() == saved[2]
    assert all(torch.equal(value, saved[0][name]) for name, value in model.state_dict().items())
    moments = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(moments, saved[1]["state"][0]["exp_avg"])


def test_a_state_is_saved_in_the_background(tmp_path: Path) -> None:
    """`collect_state` gives an `AsyncSaver` what `save_state` saves."""
    accelerator, *_ = prepared(7)
    with AsyncSaver(mode="thread") as saver:
        saver.save(collect_state(accelerator), tmp_path / "step-1").result()
    accelerator, *_, counter = prepared()
    load_state(accelerator, tmp_path / "step-1")
    assert counter.value == 7


def test_the_best_is_kept_and_exported(tmp_path: Path) -> None:
    """A manager keeps the best of `collect_state`; its weights become safetensors."""
    accelerator, model, *_ = prepared()
    with CheckpointManager(tmp_path / "run", keep=KeepBest("loss", "min")) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
            manager.save(step, collect_state(accelerator), metrics={"loss": loss})
        manager.prune()
    # The newest is always kept.
    assert sound(str(tmp_path / "run")) == ["step-00000002", "step-00000003"]
    ckpt_storage.consolidate(tmp_path / "run/step-00000002", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_objects_of_other_classes_need_unsafe_pickle(tmp_path: Path) -> None:
    """A registered object's state is not unpickled without it."""
    accelerator, *_ = prepared(Path("x"))
    save_state(accelerator, tmp_path / "step-1")
    accelerator, *_, counter = prepared()
    with pytest.raises(UnsafeContentError, match="unsafe_pickle"):
        load_state(accelerator, tmp_path / "step-1")
    load_state(accelerator, tmp_path / "step-1", unsafe_pickle=True)
    assert counter.value == Path("x")


def test_an_object_that_was_not_saved_is_named(tmp_path: Path) -> None:
    """A second registered object has no file in the checkpoint."""
    accelerator, *_ = prepared()
    save_state(accelerator, tmp_path / "step-1")
    accelerator, *_ = prepared()
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(InvalidInputError, match=r"no custom_checkpoint_1\.pkl"):
        load_state(accelerator, tmp_path / "step-1")


def test_hooks_that_take_weights_are_refused(tmp_path: Path) -> None:
    """They would be given none; nothing is written."""
    accelerator, *_ = prepared()
    accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(InvalidInputError, match="hooks"):
        save_state(accelerator, tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()


def test_their_own_save_state_takes_a_url_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Accelerator.save_state("s3://...")` writes to the folder `s3:`, as the page warns."""
    monkeypatch.chdir(tmp_path)
    accelerator, *_ = prepared()
    accelerator.save_state("s3://bucket/run")
    assert (tmp_path / "s3:/bucket/run/model.safetensors").is_file()


def test_the_functions_of_accelerate_have_the_parameters_that_are_used() -> None:
    """A release that changed them fails here by name."""
    inspect: Any = importlib.import_module("inspect")
    module: Any = importlib.import_module("accelerate.checkpointing")
    names = list(inspect.signature(module.save_accelerator_state).parameters)
    shared = ["optimizers", "schedulers", "dataloaders", "process_index"]
    assert names[:8] == ["output_dir", "model_states", *shared, "step", "scaler"]
    names = list(inspect.signature(module.load_accelerator_state).parameters)
    assert names[:7] == ["input_dir", "models", *shared, "scaler"]
    accelerator, *_ = prepared()
    for name in ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"):
        assert isinstance(getattr(accelerator, name), list), name
