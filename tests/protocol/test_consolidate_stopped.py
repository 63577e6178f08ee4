"""A consolidation that slept while another one took its folder over harms nothing when it wakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from consolidate_cases import small_model
from safetensors.torch import load_file

import ckpt_storage
from ckpt_storage.export.folder import ExportFolder

INDEX = "model.safetensors.index.json"
SEVERAL, ONE = 60_000, 10_000_000
"""`max_file_bytes` that make several weight files of a model, and one."""


@pytest.fixture
def export(tmp_path: Path) -> Callable[[int, int], object]:
    """Return what exports a version of the model to one folder, in files of some length."""
    for version in (1, 2, 3):
        ckpt_storage.save(small_model(version), tmp_path / f"run{version}")

    def run(version: int, file_bytes: int) -> object:
        return ckpt_storage.consolidate(
            tmp_path / f"run{version}", tmp_path / "out", max_file_bytes=file_bytes
        )

    return run


@pytest.mark.parametrize("step", ["collect", "index"])
@pytest.mark.parametrize(("mine", "theirs"), [(SEVERAL, SEVERAL), (SEVERAL, ONE), (ONE, SEVERAL)])
def test_who_was_overtaken_after_publishing_deletes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    export: Callable[[int, int], object],
    step: str,
    mine: int,
    theirs: int,
) -> None:
    """An export that came while the last steps of another one slept is whole afterwards."""
    export(1, SEVERAL)
    name = {"collect": "collect", "index": "_put_index"}[step]
    inner: Callable[..., Any] = getattr(ExportFolder, name)

    def overtaken(folder: ExportFolder, *arguments: Any) -> Any:
        monkeypatch.setattr(ExportFolder, name, inner)
        answer = inner(folder, *arguments) if step == "index" else None
        export(3, theirs)
        return answer if step == "index" else inner(folder, *arguments)

    monkeypatch.setattr(ExportFolder, name, overtaken)
    export(2, mine)
    out = tmp_path / "out"
    found: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == small_model(3).keys()
    assert all(torch.equal(found[fqn], tensor) for fqn, tensor in small_model(3).items())
