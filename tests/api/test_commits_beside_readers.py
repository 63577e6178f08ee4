"""A save that commits between two requests of a reader: the reader sees it, or does not yet."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_tools import Racing, ScriptedBackends

import ckpt_storage
from ckpt_storage import CheckpointInProgressError, CheckpointManager, CheckpointNotFoundError

_MOST_REQUESTS = 100


def _open(root: str) -> None:
    with contextlib.suppress(CheckpointNotFoundError, CheckpointInProgressError):
        ckpt_storage.open_checkpoint(f"{root}/step-00000001")


def _load(root: str) -> None:
    with contextlib.suppress(CheckpointNotFoundError, CheckpointInProgressError):
        ckpt_storage.load({"step": 0}, f"{root}/step-00000001")


def _list(root: str) -> None:
    assert all(info.save_id for info in ckpt_storage.list_checkpoints(root))


def _restore(root: str) -> None:
    with CheckpointManager(root) as manager:
        restored = manager.restore({"step": 0})
    assert restored is None or restored.step == 1


@pytest.mark.parametrize("read", [_open, _load, _list, _restore])
def test_a_commit_beside_a_reader_is_seen_or_not_yet(
    read: Callable[[str], None],
    tmp_path: Path,
    scripted: ScriptedBackends,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No reader reports damage, and none says that the folder is incomplete."""
    for at in range(1, _MOST_REQUESTS):
        root = tmp_path / str(at)
        (root / "step-00000001").mkdir(parents=True)

        def save(url: str = str(root / "step-00000001")) -> None:
            script, scripted._script = scripted._script, None  # noqa: SLF001  # another process
            try:
                ckpt_storage.save({"step": 1}, url)
            finally:
                scripted._script = script  # noqa: SLF001

        caplog.clear()
        script = Racing(at, save)
        with scripted.playing(script), caplog.at_level(logging.WARNING):
            read(str(root))
        warnings = [record for record in caplog.records if record.name == "ckpt_storage"]
        assert not warnings, f"before request {at}: {warnings}"
        if script.count < at:
            assert at > 1
            return
    pytest.fail(f"A reader sends more than {_MOST_REQUESTS} requests.")
