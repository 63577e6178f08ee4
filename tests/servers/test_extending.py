"""Backends as users write them: the examples of docs/extending.md pass the suite of backends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from servers import Running

import ckpt_storage
from ckpt_storage.store import Backend, Location, Settings
from ckpt_storage.store.store import Store
from ckpt_storage.testing.store_suite import StoreSuite

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from obstore_reads import ObstoreBackend  # from the folder above
from sqlite_backend import SqliteBackend  # from the folder above

ckpt_storage.register_backend("sqlite", SqliteBackend)


class TestSqlite(StoreSuite):
    """A whole backend of one's own, over a database."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        """A database that is not there yet."""
        return SqliteBackend(Location.of(f"sqlite://{tmp_path}/runs.db/step-1"), Settings())

    @pytest.fixture
    def other(self, tmp_path: Path) -> Backend:
        """A second backend of the same database."""
        return SqliteBackend(Location.of(f"sqlite://{tmp_path}/runs.db/step-1"), Settings())


def test_checkpoints_go_to_a_registered_backend(tmp_path: Path) -> None:
    """A URL of its scheme is all that saving, listing, loading and checking need."""
    root = f"sqlite://{tmp_path}/runs.db"
    state = {"w": torch.arange(100.0)}
    ckpt_storage.save(state, f"{root}/step-1")
    fresh = {"w": torch.zeros(100)}
    ckpt_storage.load(fresh, f"{root}/step-1")
    assert torch.equal(fresh["w"], state["w"])
    assert [info.name for info in ckpt_storage.list_checkpoints(root)] == ["step-1"]
    assert ckpt_storage.verify(f"{root}/step-1").ok
    with pytest.raises(ckpt_storage.CheckpointExistsError):
        ckpt_storage.save(state, f"{root}/step-1")


class TestObstore(StoreSuite):
    """S3 with large reads and puts through obstore."""

    @pytest.fixture
    def backend(self, moto_root: Running) -> Backend:
        """A fresh root at moto."""
        return ObstoreBackend(Location.of(moto_root.url, moto_root.storage_options), Settings())

    @pytest.fixture
    def other(self, moto_root: Running) -> Backend:
        """A second backend of the same root."""
        return ObstoreBackend(Location.of(moto_root.url, moto_root.storage_options), Settings())

    def test_large_objects_go_through_obstore(self, store: Store, backend: Backend) -> None:
        """What it cannot get is told by the backend that it derives from."""
        data = bytes(range(256)) * 8192
        store.put("saves/a/x", data)
        target = bytearray(len(data))
        store.read("saves/a/x", [(0, memoryview(target))])
        assert target == data
        assert "_obstore" in vars(backend)
        with pytest.raises(ckpt_storage.StorageError, match="NoSuchKey") as caught:
            store.read("saves/a/y", [(0, memoryview(target))])
        assert caught.value.kind == "not-found"
