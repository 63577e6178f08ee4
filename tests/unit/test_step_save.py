"""The save of a step by a manager, from its begin to its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckpt_storage import CheckpointInfo, StorageError
from ckpt_storage.background.handle import SaveStatus
from ckpt_storage.manager.names import StepNames
from ckpt_storage.manager.root import Root
from ckpt_storage.manager.step_save import StepSave
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.store import Location

INFO = CheckpointInfo(url="file:///c", name="c", format="ckpt_storage", save_id="s1", slot=1)


class Saver:
    """Begins a save whose end the test decides."""

    def __init__(self) -> None:
        self.status = SaveStatus("file:///c", 0, limit_s=1.0)
        self.status.follow(lambda: ({}, "s1"), lambda _: None)

    def begin(
        self, _: object, __: object, options: SaveOptions, *, prepare: Any, **___: object
    ) -> SaveStatus:
        prepare(options)
        return self.status

    def raise_earlier(self, _: object) -> None: ...


@pytest.mark.parametrize("fails", [False, True])
def test_only_a_committed_save_counts(tmp_path: Path, *, fails: bool) -> None:
    """A failed one, which may have an id, starts no prune and no copy; its name is free again."""
    committed: list[str] = []
    root, saver = Root(Location.of(tmp_path), StepNames()), Saver()
    arguments: Mapping[str, Any] = {"step": 3, "metrics": None}
    save = StepSave(root, arguments, committed.append, restores=0)
    backend: Any = saver
    save.begin(backend, {}, block_until_staged=True)
    assert root.in_use.reasons() == {"step-00000003": "it is being saved"}
    if fails:
        saver.status.fail(StorageError("no space"))
    else:
        saver.status.succeed(INFO)
    assert committed == ([] if fails else ["step-00000003"])
    assert root.in_use.reasons() == {}
