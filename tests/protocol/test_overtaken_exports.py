"""A run that another one overtakes in its output folder shows nothing there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_storage
from ckpt_storage import ConsolidationError
from ckpt_storage.export import folder as folders
from ckpt_storage.format.exports import GUARD, GUARD_NAME, HOLDER_PATH, Holder
from ckpt_storage.format.names import INDEX_NAME

CALLS: dict[str, Callable[..., object]] = {
    "export": ckpt_storage.consolidate,
    "safetensors": partial(ckpt_storage.convert, to="safetensors"),
    "dcp": partial(ckpt_storage.convert, to="dcp"),
}


@pytest.mark.parametrize("moment", ["hold", "check_unchanged", "publish"])
@pytest.mark.parametrize("call", CALLS)
def test_an_overtaken_run_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, moment: str
) -> None:
    """Before a file gets its name, and before the last write, it looks who holds the folder."""
    source, output = tmp_path / "run", tmp_path / "out"
    ckpt_storage.save({"w": torch.ones(8)}, source)
    kind = folders.ExportFolder if call == "export" else folders.PlainFolder
    original: Any = getattr(kind, moment)

    def take_over() -> None:
        if (output / HOLDER_PATH).exists():
            holder = Holder(run_id="b" * 32, fingerprint="a" * 64)
            (output / HOLDER_PATH).write_bytes(holder.encode())

    def overtaken(*arguments: Any) -> Any:
        if moment != "hold":
            take_over()
        result = original(*arguments)
        take_over()
        return result

    monkeypatch.setattr(kind, moment, overtaken)
    with pytest.raises(ConsolidationError, match="taken over"):
        CALLS[call](source, output)
    index = output / INDEX_NAME
    assert not index.exists() or b'"w"' not in index.read_bytes()
    assert not (output / ".metadata").exists()
    if moment == "hold" or (call, moment) == ("export", "check_unchanged"):
        assert not [*output.glob("model*.safetensors"), *output.glob("*.distcp")]


def test_the_guard_of_a_removal_does_not_outlive_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal puts its guard after an export of one file has looked; the export deletes it."""
    source, output = tmp_path / "run", tmp_path / "out"
    ckpt_storage.save({"w": torch.ones(8)}, source)
    ckpt_storage.consolidate(source, output)
    hold = folders.ExportFolder.hold

    def hold_beside_a_removal(*arguments: Any) -> Any:
        (output / GUARD_NAME).write_bytes(GUARD)
        return hold(*arguments)

    monkeypatch.setattr(folders.ExportFolder, "hold", hold_beside_a_removal)
    ckpt_storage.consolidate(source, output, dtype="float16")
    assert not (output / GUARD_NAME).exists()
