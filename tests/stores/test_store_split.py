"""Commit objects on one root, everything else on another (`commit_url=`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ckpt_storage import (
    CheckpointStorageReader,
    CheckpointStorageWriter,
    SaveHandle,
    save,
    save_async,
    verify,
)
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.backends.split import SplitBackend
from ckpt_storage.store.store import Store
from ckpt_storage.testing.store_suite import StoreSuite


class TestSplitBackend(StoreSuite):
    """The suite on one folder that is reached in two ways, as a mount and its bucket are."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        """A folder that is not there yet."""
        return str(tmp_path / "run")

    @pytest.fixture
    def backend(self, root: str) -> SplitBackend:
        """A backend whose two parts lie in the same place."""
        return SplitBackend(LocalBackend(root), LocalBackend(root))

    @pytest.fixture
    def other(self, root: str) -> SplitBackend:
        """A second one."""
        return SplitBackend(LocalBackend(root), LocalBackend(root))


def test_each_object_goes_to_its_root(tmp_path: Path) -> None:
    """Slots, `.metadata` and probes go to the commit root, all else to the data root."""
    data, commits = (LocalBackend(str(tmp_path / name)) for name in ("data", "commits"))
    store = Store(SplitBackend(data, commits), url="split://")
    store.make_folders(["commits", "saves/a/ranks"])
    for path in ("commits/00000001.json", ".metadata", ".ckpt-storage-probe-0"):
        store.put(path, b"x")
        assert (tmp_path / "commits" / path).read_bytes() == b"x"
    store.put("saves/a/manifest.json", b"y")
    assert (tmp_path / "data/saves/a/manifest.json").read_bytes() == b"y"
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["saves"]
    assert {entry.path for entry in store.list("")} == {
        ".metadata",
        ".ckpt-storage-probe-0",
        "commits/00000001.json",
        "saves/a/manifest.json",
    }


def test_a_save_with_commit_url_is_read_through_the_data_path(tmp_path: Path) -> None:
    """With `commit_url` naming the same place, readers need to know only the path."""
    writer = CheckpointStorageWriter(tmp_path / "run", commit_url=f"file://{tmp_path}/run")
    dcp.save({"a": torch.arange(5)}, checkpoint_id="one", storage_writer=writer, no_dist=True)
    target = {"a": torch.zeros(5, dtype=torch.int64)}
    reader = CheckpointStorageReader(tmp_path / "run" / "one")
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target["a"], torch.arange(5))
    assert verify(tmp_path / "run" / "one").ok


def test_a_save_exports_what_it_committed_elsewhere(tmp_path: Path) -> None:
    """A save with `commit_url` and `consolidate` exports the commit that it made there."""
    for name, door in (("now", save), ("behind", save_async)):
        state = {"a": torch.tensor([len(name)])}
        began = door(state, tmp_path / name, commit_url=f"{tmp_path}/{name}-log", consolidate=True)
        info = began.result(60) if isinstance(began, SaveHandle) else began
        assert info.export == (tmp_path / name / "hf").as_uri()
        (file,) = (tmp_path / name / "hf").glob("**/*.safetensors")
        assert torch.equal(load_file(file)["a"], state["a"])
