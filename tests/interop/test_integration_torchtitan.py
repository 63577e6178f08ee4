"""torchtitan's trainer with our checkpoint manager, on two CPU ranks."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from copy_cases import flip
from fork_server import run_script
from integration_tools import ROOT, missing

import ckpt_storage

if not os.environ.get("CKPT_STORAGE_TORCHTITAN") and importlib.util.find_spec("torchtitan") is None:
    missing("torchtitan is not installed: name its folder in CKPT_STORAGE_TORCHTITAN")

SUPPORT = Path(__file__).parents[1] / "support"
JOB = str(SUPPORT / "titan_on_cpu.py")

MANAGER = """
import sys
sys.path.insert(0, sys.argv[1])
import titan_on_cpu
titan_on_cpu.stand_in_for_gpus()
import torch
import torch.distributed as dist
from ckpt_storage import CheckpointExistsError
from ckpt_storage.integrations.torchtitan import CheckpointStorageManager

dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=0, world_size=1)

class Part:
    def __init__(self, value):
        self.value = value
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]

def manager(fill):
    model = torch.nn.Linear(64, 64)
    torch.nn.init.constant_(model.weight, fill)
    states = {"train_state": Part(int(fill))}
    made = CheckpointStorageManager(
        CheckpointStorageManager.Config(enable=True, folder=sys.argv[2], keep_latest_k=0),
        dataloader=Part(0), model_parts=[model], optimizers=Part(0), lr_schedulers=Part(0),
        states=states, sd_adapter=None,
    )
    return made, model, states["train_state"]

for word in sys.argv[4:]:
    kind, _, number = word.partition("=")
    made, model, train_state = manager(-1.0 if kind == "folder" else float(number or -1))
    if kind == "load":
        found = made.load(int(number or -1))
        print("loaded", found, model.weight[0, 0].item(), train_state.value)
    elif kind == "folder":
        made.folder, made.keep_latest_k = number, 2
        made.last_save_model_only = False
        for step in (1, 2, 3):
            made.save(step, last_step=True)
    elif kind == "fail":
        try:
            made.load()
        except Exception as error:
            print(error, *error.__notes__)
    elif kind == "again":
        made.load(int(number))
        made.last_save_model_only = False
        made.save(int(number) + 1, last_step=True)
    else:
        # The seed, as torchtitan saves it, is the model alone.
        made.last_save_model_only = kind == "seed"
        try:
            made.save(int(number), last_step=True)
        except CheckpointExistsError:
            print("refused", number)
    made.close()
dist.destroy_process_group()
"""


def do(url: Path, *words: str) -> str:
    """Let one rank's manager, without a trainer, save and load; return what was printed."""
    script = url.parent / "manager.py"
    script.write_text(MANAGER, encoding="utf-8")
    (url.parent / "rendezvous").unlink(missing_ok=True)
    arguments = [str(SUPPORT), str(url), str(url.parent / "rendezvous"), *words]
    environment = titan_environment(url.parent)
    code, output = run_script(script, *arguments, folder=url.parent, environment=environment)
    assert code == 0, output
    return output


def titan_environment(folder: Path) -> dict[str, str]:
    titan = os.environ.get("CKPT_STORAGE_TORCHTITAN", "")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [titan, str(ROOT)])),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
    }


def damage(checkpoint: Path) -> None:
    """Flip one bit in the middle of each shard file."""
    shards = list(checkpoint.glob("saves/*/*.distcp"))
    assert shards
    for shard in shards:
        flip(shard, shard.stat().st_size // 2)


def run(url: Path, steps: int, mode: str, *excluded: str, ranks: int = 2) -> str:
    """Train up to `steps` and return what was printed."""
    code, output = run_script(
        *(JOB, str(url), str(steps), mode, *excluded),
        folder=url.parent,
        environment=titan_environment(url.parent),
        ranks=ranks,
    )
    assert code == 0, output
    return output


def test_a_folder_that_is_set_later_is_saved_to(tmp_path: Path) -> None:
    """Engines such as verl's set `folder` and `keep_latest_k` once the manager is made."""
    url = tmp_path / "first"
    do(url, f"folder={tmp_path / 'second'}", "seed=0")
    names = [info.name for info in ckpt_storage.list_checkpoints(tmp_path / "second")]
    assert names == ["step-2", "step-3"]
    assert ckpt_storage.list_checkpoints(url)[0].name == "step-0"


def test_a_fresh_start_beside_exports_is_said(tmp_path: Path) -> None:
    """A root whose only step holds Hugging Face files begins anew, with a warning that names it."""
    url = tmp_path / "run"
    (url / "step-4").mkdir(parents=True)
    (url / "step-4/model.safetensors").write_bytes(b"")
    output = do(url, "load")
    assert "holds step-4, none of which can be resumed from" in output
    assert "loaded False" in output


def test_a_step_with_the_model_alone_names_the_setting(tmp_path: Path) -> None:
    """A longer run that would resume from it fails, and the error says what to set."""
    url = tmp_path / "run"
    output = do(url, "seed=4", "fail")
    assert "last_save_model_only=False" in output


def test_a_job_resumes_past_damage_and_keeps_the_newest(tmp_path: Path) -> None:
    """Two FSDP ranks save in worker processes, resume in another mode, and keep two checkpoints."""
    url = tmp_path / "run"
    run(url, 3, "async_with_pinned_mem")
    infos = ckpt_storage.list_checkpoints(url)
    assert [info.name for info in infos] == ["step-2", "step-3"]
    weights = {"tok_embeddings.weight": torch.zeros(2048, 256)}
    ckpt_storage.load(weights, url / "step-3")
    assert weights["tok_embeddings.weight"].count_nonzero() > 0

    damage(url / "step-3")
    others = ["test", "unsharded", "warmstart"]
    for name in others:
        ckpt_storage.save({"x": torch.zeros(1)}, url / name)
    output = run(url, 6, "async")
    assert f"Resumed from file://{url}/step-2. What was trained since then is LOST. " in output
    assert "These could not be loaded: step-3: " in output
    names = [info.name for info in ckpt_storage.list_checkpoints(url)]
    assert names == ["step-4", "step-6", *others], output
    assert ckpt_storage.verify(url / "step-6").ok


def test_a_job_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Without the dataloader's state, one rank goes on from what two FSDP ranks saved."""
    url = tmp_path / "run"
    run(url, 2, "async")
    first = ckpt_storage.list_checkpoints(url)
    # A run that began at step 0 would be refused at step 2, which is there.
    run(url, 4, "async", "dataloader", ranks=1)
    infos = ckpt_storage.list_checkpoints(url)
    assert [info.name for info in infos] == ["step-2", "step-4"]
    assert infos[:1] == first
    assert ckpt_storage.verify(infos[1].url).ok


def test_what_is_loaded_and_replaced(tmp_path: Path) -> None:
    """Nothing of an empty folder, a step that is asked for, else the newest with its states.

    A run that went back to step 9 replaces step 10; one that began anew replaces nothing.
    """
    words = ["load", "save=9", "save=10", "load", "load=9", "again=9", "load=10", "save=10"]
    output = do(tmp_path / "run", *words)
    told = [line for line in output.splitlines() if line.startswith(("loaded", "refused"))]
    assert told == [
        "loaded False -1.0 -1",
        "loaded True 10.0 10",
        "loaded True 9.0 9",
        "loaded True 9.0 9",
        "refused 10",
    ]


def test_a_seed_is_loaded_without_other_states(tmp_path: Path) -> None:
    """Step 0 holds the model alone; so it is loaded, also where all that came after is damaged."""
    url = tmp_path / "run"
    output = do(url, "seed=0", "load", "save=2")
    assert "loaded True 0.0 -1" in output
    damage(url / "step-2")
    output = do(url, "load")
    assert "loaded True 0.0 -1" in output
    assert "step-2" in output
