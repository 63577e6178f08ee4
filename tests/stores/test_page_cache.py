"""Saves that leave nothing in the kernel's cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_stores import local_store
from posix_faults import FaultPosix

import ckpt_storage
from ckpt_storage.cli.app import app
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.export.options import ConsolidateOptions
from ckpt_storage.format.exports import GUARD_NAME
from ckpt_storage.store import open_store
from ckpt_storage.store.backends.posix import Posix

STATE = {"a": torch.arange(1 << 20)}


def test_a_file_is_dropped_once_it_is_durable(tmp_path: Path) -> None:
    """After the fsync, and before it has its name; only by the word that there is."""
    posix = FaultPosix()
    upload = local_store(tmp_path, posix=posix, page_cache="drop").upload("x")
    upload.write_part(0, 0, [memoryview(b"data")], last=True)
    upload.complete(4)
    calls = [call.operation for call in posix.script.calls]
    assert calls.index("fsync") < calls.index("forget") < calls.index("rename")
    word: Any = "away"
    with pytest.raises(InvalidInputError, match=r"page_cache is 'away'.*'drop'"):
        open_store(tmp_path, page_cache=word)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that the kernel is told to forget."""
    names: list[str] = []

    def forget(self: Posix, fd: int) -> None:
        del self
        names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)  # noqa: PTH115  # of a number

    monkeypatch.setattr(Posix, "forget", forget)
    return names


def by_saver(path: Path, **more: Any) -> None:
    with ckpt_storage.AsyncSaver(mode="thread") as saver:
        saver.save(STATE, path, **more).result()


def by_manager(path: Path, **more: Any) -> None:
    with ckpt_storage.CheckpointManager(path, mode="thread") as manager:
        manager.save(1, STATE, **more)
        manager.save_async(2, STATE, **more).result()


def by_dcp(path: Path, **more: Any) -> None:
    writer = ckpt_storage.CheckpointStorageWriter(path, **more)
    torch.distributed.checkpoint.save(STATE, storage_writer=writer)


def by_command(source: Path, target: Path, *, page_cache: str) -> None:
    with pytest.raises(SystemExit) as ended:
        app.main(["cp", str(source), str(target), "--page-cache", page_cache])
    assert not ended.value.code


SAVES: dict[str, Callable[..., object]] = {
    "save": lambda path, **more: ckpt_storage.save(STATE, path, **more),
    "save_async": lambda path, **more: ckpt_storage.save_async(STATE, path, **more).result(),
    "saver": by_saver,
    "manager": by_manager,
    "dcp": by_dcp,
}
EXPORTS: dict[str, Callable[..., object]] = {
    "consolidate": ckpt_storage.consolidate,
    "copy": ckpt_storage.copy,
    "convert": lambda *places, **more: ckpt_storage.convert(*places, to="dcp", **more),
    "$ cp": by_command,
}


@pytest.mark.parametrize("way", [*SAVES, *EXPORTS])
def test_all_that_writes_tensors_has_the_option(tmp_path: Path, seen: list[str], way: str) -> None:
    """Files with tensors are written so; the default keeps all."""
    if way in SAVES:
        SAVES[way](tmp_path / "a")
        assert not seen
        SAVES[way](tmp_path / "b", page_cache="drop")
        count = 2 if way == "manager" else 1
    else:
        ckpt_storage.save(STATE, tmp_path / "a", sync_files=False)
        EXPORTS[way](tmp_path / "a", tmp_path / "b", page_cache="drop")
        count = 1
    kinds = ".distcp.tmp-", ".safetensors.tmp-"
    tensors = {name for name in seen if any(kind in name for kind in kinds)}
    assert len({name for name in tensors if GUARD_NAME not in name}) == count


@pytest.mark.parametrize(("of_save", "of_export"), [("drop", None), ("keep", "drop")])
def test_an_export_after_a_save_is_as_the_save_unless_told(
    tmp_path: Path, seen: list[str], of_save: Any, of_export: Any
) -> None:
    """What the save leaves in the cache the export reads; its own files may go all the same."""
    options = ConsolidateOptions(page_cache=of_export)
    ckpt_storage.save(STATE, tmp_path / "a", page_cache=of_save, consolidate=options)
    assert any(".distcp" in name for name in seen) == (of_save == "drop")
    assert any(".safetensors" in name for name in seen)
