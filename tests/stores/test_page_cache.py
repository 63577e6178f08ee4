"""Saves that leave nothing in the kernel's cache."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_stores import local_store

import ckpt_storage
from ckpt_storage.cli.app import app
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.export.options import ConsolidateOptions
from ckpt_storage.store import open_store
from ckpt_storage.store.backends.posix import Posix
from ckpt_storage.testing.posix_faults import FaultPosix

MIB = 1 << 20


def test_a_file_is_dropped_once_it_is_durable(tmp_path: Path) -> None:
    """After the fsync, and before it has its name."""
    posix = FaultPosix()
    upload = local_store(tmp_path, posix=posix, page_cache="drop").upload("x")
    upload.write_part(0, 0, [memoryview(b"data")], last=True)
    upload.complete(4)
    calls = [call.operation for call in posix.script.calls]
    assert calls.index("fsync") < calls.index("forget") < calls.index("rename")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that the kernel is told to forget."""
    names: list[str] = []

    def forget(self: Posix, fd: int) -> None:
        del self
        names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)  # noqa: PTH115  # of a number

    monkeypatch.setattr(Posix, "forget", forget)
    return names


def inside(made: Any, call: Callable[[Any], object]) -> None:
    """Call with a manager or saver, and close it."""
    with made:
        call(made)


manager = functools.partial(ckpt_storage.CheckpointManager, mode="thread")
WAYS: dict[str, Callable[..., object]] = {
    "save": ckpt_storage.save,
    "save_async": lambda *given, **more: ckpt_storage.save_async(*given, **more).result(),
    "saver": lambda *given, **more: inside(
        ckpt_storage.AsyncSaver(mode="thread"), lambda saver: saver.save(*given, **more).result()
    ),
    "manager": lambda state, path, **more: inside(
        manager(path), lambda made: made.save(1, state, **more)
    ),
    "manager-async": lambda state, path, **more: inside(
        manager(path), lambda made: made.save_async(1, state, **more).result()
    ),
    "dcp": lambda state, path, **more: torch.distributed.checkpoint.save(
        state, storage_writer=ckpt_storage.CheckpointStorageWriter(path, **more)
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_of_saving_has_the_option(
    tmp_path: Path, seen: list[str], way: Callable[..., object]
) -> None:
    """Shard files are written so, documents are not; the default keeps all."""
    way({"a": torch.arange(MIB)}, tmp_path / "a")
    assert not seen
    way({"a": torch.arange(MIB)}, tmp_path / "b", page_cache="drop")
    assert seen
    assert all(".distcp" in name for name in seen)


def test_another_word_is_refused(tmp_path: Path) -> None:
    """And says which there are."""
    word: Any = "away"
    with pytest.raises(InvalidInputError, match="page_cache is 'away'") as caught:
        open_store(tmp_path, page_cache=word)
    assert "'drop'" in str(caught.value.next_step)


def by_command(source: Path, target: Path, *, page_cache: str) -> None:
    """Copy by the command."""
    with pytest.raises(SystemExit) as ended:
        app.main(["cp", str(source), str(target), "--page-cache", page_cache])
    assert not ended.value.code


@pytest.mark.parametrize(
    "way",
    [
        ckpt_storage.consolidate,
        ckpt_storage.copy,
        functools.partial(ckpt_storage.convert, to="dcp"),
        by_command,
    ],
    ids=["consolidate", "copy", "convert", "$ cp"],
)
def test_what_else_writes_weights_has_the_option(
    tmp_path: Path, seen: list[str], way: Callable[..., object]
) -> None:
    """From Python and from the command line."""
    ckpt_storage.save({"a": torch.arange(MIB)}, tmp_path / "a", sync_files=False)
    way(tmp_path / "a", tmp_path / "out", page_cache="drop")
    assert any(".safetensors" in name or ".distcp" in name for name in seen)


@pytest.mark.parametrize(("of_save", "of_export"), [("drop", None), ("keep", "drop")])
def test_an_export_after_a_save_is_as_the_save_unless_told(
    tmp_path: Path, seen: list[str], of_save: Any, of_export: Any
) -> None:
    """What the save leaves in the cache the export reads; its own files may go all the same."""
    ckpt_storage.save(
        {"a": torch.arange(MIB)},
        tmp_path / "a",
        page_cache=of_save,
        consolidate=ConsolidateOptions(page_cache=of_export),
    )
    assert any(".distcp" in name for name in seen) == (of_save == "drop")
    assert any(".safetensors" in name for name in seen)
