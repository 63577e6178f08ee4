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


@pytest.mark.parametrize("moment", ["check_unchanged", "publish"])
@pytest.mark.parametrize("kind", ["ExportFolder", "PlainFolder"])
def test_an_overtaken_run_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, moment: str
) -> None:
    """Before files get their names, and before the last write, it looks who holds the folder."""
    source, output = tmp_path / "run", tmp_path / "out"
    ckpt_storage.save({"w": torch.ones(8)}, source)
    original: Any = getattr(getattr(folders, kind), moment)

    def overtaken(*arguments: Any) -> None:
        if (output / HOLDER_PATH).exists():
            holder = Holder(run_id="b" * 32, fingerprint="a" * 64)
            (output / HOLDER_PATH).write_bytes(holder.encode())
        original(*arguments)

    monkeypatch.setattr(getattr(folders, kind), moment, overtaken)
    run: Callable[[], object] = partial(ckpt_storage.consolidate, source, output)
    if kind == "PlainFolder":
        run = partial(ckpt_storage.convert, source, output, to="safetensors")
    with pytest.raises(ConsolidationError, match="taken over"):
        run()
    index = output / INDEX_NAME
    assert not index.exists() or b'"w"' not in index.read_bytes()
    if moment == "check_unchanged":
        assert not list(output.glob("model*.safetensors"))


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
