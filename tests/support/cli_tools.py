"""What the tests of the command line share: checkpoints to look at, and two ways to call it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
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
    """Save one checkpoint for each step below `root`."""
    for step in STEPS:
        save(state_at(step), root / f"step-{step:08d}")
    return root


def call(*arguments: str | Path, env: Mapping[str, str | None] | None = None) -> Result:
    """Call the command line in this process."""
    return CliRunner().invoke(app, [str(one) for one in arguments], env=env)


def answer(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """Call a command with `--json` and return what it printed, once its keys are as documented."""
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    body: dict[str, Any] = json.loads(result.stdout)
    check_documented(body)
    return body


def documented_keys() -> dict[str, set[str]]:
    """Return the keys that the docs promise, by schema; keys of inner objects with a dot."""
    found: dict[str, set[str]] = {}
    for match in re.finditer(
        r"^\| `(ckpt_storage\.cli\.[a-z_]+/[0-9]+)` \| (.*) \|$", DOCS.read_text(), re.MULTILINE
    ):
        found[match[1]] = set(re.findall(r"`([a-z0-9_.]+)`", match[2]))
    return found


def _keys_of(value: Any, prefix: str = "") -> set[str]:
    if isinstance(value, list):
        return {key for one in value for key in _keys_of(one, prefix)}
    if not isinstance(value, dict):
        return set()
    found = {f"{prefix}{key}" for key in value}
    for key, one in value.items():
        found |= _keys_of(one, f"{prefix}{key}.")
    return found


FREE = {
    "ls": ("checkpoints.metrics.",),
    "show": ("metrics.",),
    "cat": ("values.",),
    "cp": ("failed_exports.",),
    "consolidate": ("ties.",),
    "prune": ("skipped.", "failed."),
}
"""Objects whose keys are names: of metrics, of values."""


def check_documented(body: dict[str, Any]) -> None:
    """Fail if an answer has a key that the docs do not promise, or lacks one that they do."""
    promised = documented_keys()[body["schema"]]
    schema = body["schema"]
    found = {key for key in _keys_of(body) - {"schema"} if not _is_free(schema, key)}
    assert found <= promised, f"{schema}: {sorted(found - promised)} are not documented"
    optional = {key for key in promised if "." in key or key in {"files", "history"}}
    assert promised - optional <= found, f"{schema}: {sorted(promised - found)} are missing"


def _is_free(schema: str, key: str) -> bool:
    command = schema.rpartition(".")[2].partition("/")[0]
    return key.startswith(FREE.get(command, ("\0",)))


def process(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Call the command line in a process of its own."""
    command = [sys.executable, "-m", "ckpt_storage", *map(str, arguments)]
    environment = {**os.environ, **options.pop("env", {})}
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        **options,
    )
