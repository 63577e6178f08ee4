"""TRL's trainers are Trainers: SFTTrainer with LoRA, killed and resumed.

TRL needs `datasets`, which is in the folder of torchtitan's packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

from integration_tools import ROOT, missing, need, sound
from warm import run_script

FOLDERS = os.environ.get("CKPT_STORAGE_TORCHTITAN", "")
if not any(Path(folder, "trl").is_dir() for folder in FOLDERS.split(os.pathsep)) and (
    importlib.util.find_spec("trl") is None
):
    missing("trl is not installed: name its folder in CKPT_STORAGE_TORCHTITAN")
need("peft")


def job(folder: Path, **options: object) -> tuple[int, str]:
    paths = [FOLDERS, str(ROOT), str(ROOT / "tests/support")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    script = ROOT / "tests/support/trl_job.py"
    return run_script(script, json.dumps(options), folder=folder, environment=environment)


def losses_of(output: str) -> dict[str, float]:
    line = next(line for line in output.splitlines() if line.startswith("report "))
    losses: dict[str, float] = json.loads(line.removeprefix("report "))["losses"]
    return losses


def test_a_killed_fine_tune_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The later losses are those of a run that was not killed."""
    code, output = job(tmp_path, url=str(tmp_path / "whole"))
    assert code == 0, output
    whole = losses_of(output)
    url = str(tmp_path / "run")
    code, output = job(tmp_path, url=url, interrupt_at=5)
    assert code == 7, output
    code, output = job(tmp_path, url=url)
    assert code == 0, output
    assert losses_of(output) == {step: whole[step] for step in "45678"}
    assert sound(url) == ["step-00000003", "step-00000006", "step-00000008"]
