"""What the tests of the command line share: checkpoints to look at, and two ways to call it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch
from click.testing import CliRunner, Result
from copy_cases import save

from ckpt_storage.cli.app import app

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"

STEPS = (900, 1000, 1100)


def state_at(step: int) -> dict[str, Any]:
    """Return the state of a step; names hold what a terminal may misread."""
    return {
        "model": {
            "w": torch.arange(12, dtype=torch.float32).reshape(3, 4) + step,
            "b[0]": torch.tensor([1.0, float("nan"), float("inf"), -2.0]),
            "h": torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
        },
        "step": step,
        "config": {"layers": [1, 2], "name": "tiny"},
    }


def make_run(root: Path) -> Path:
    for step in STEPS:
        save(state_at(step), root / f"step-{step:08d}")
    return root


def call(*arguments: str | Path, env: Mapping[str, str | None] | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)


def answer(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """Call a command with `--json` and return what it printed, once its keys are as documented."""
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    body: dict[str, Any] = json.loads(result.stdout)
    check_documented(body)
    return body


FREE = {
    *("ls checkpoints.metrics.", "show metrics.", "cat values."),
    *("ls checkpoints.stats.phase_s.", "show stats.phase_s.", "consolidate stats.phase_s."),
    *("consolidate ties.", "prune skipped.", "prune failed."),
    *("ls checkpoints.usage.group_bytes.", "show usage.group_bytes."),
    *("ls checkpoints.part.", "show part."),
    "verify link_counts.",
}
"""Objects whose keys are names: of metrics, of values."""


def check_documented(body: dict[str, Any]) -> None:
    """Fail if an answer has undocumented keys, or lacks documented keys."""
    schema = body.pop("schema")
    (row,) = re.findall(rf"^\| `{re.escape(schema)}` \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    promised = set(re.findall(r"`([a-z0-9_.]+)`", row))
    keys = _keys_of(schema.split(".")[-1].split("/")[0], body)
    assert keys <= promised, f"{schema}: {sorted(keys - promised)} are not documented"
    lacking = {key for key in promised - keys if "." not in key} - {"files", "history"}
    assert not lacking, f"{schema}: {sorted(lacking)} are missing"


def _keys_of(command: str, value: Any, prefix: str = "") -> set[str]:
    if isinstance(value, list):
        return {key for item in value for key in _keys_of(command, item, prefix)}
    if not isinstance(value, dict) or f"{command} {prefix}" in FREE:
        return set()
    inner = (_keys_of(command, item, f"{prefix}{key}.") for key, item in value.items())
    return {f"{prefix}{key}" for key in value}.union(*inner)


def process(
    *arguments: str | Path, code: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    what = ["-c", code] if code else ["-m", "ckpt_storage"]
    command = [sys.executable, *what, *map(str, arguments)]
    options = {"timeout": 120, "text": True, "stdout": PIPE, "stderr": PIPE, **options}
    options["env"] = {**os.environ, **options.get("env", {})}
    return subprocess.run(command, check=False, **options)
