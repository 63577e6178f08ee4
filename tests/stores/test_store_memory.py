"""memory:// keeps every promise of a backend, and shows the files of fsspec's own."""

from __future__ import annotations

import uuid

import fsspec
import pytest

from ckpt_storage.store import Location, open_store
from ckpt_storage.store.backend import Settings
from ckpt_storage.store.backends.memory import MemoryBackend
from ckpt_storage.testing.store_suite import StoreSuite


class TestMemory(StoreSuite):
    """Two backends on one root of this process."""

    @pytest.fixture
    def location(self) -> Location:
        """A root that no other test uses."""
        return Location.of(f"memory://{uuid.uuid4().hex}/run")

    @pytest.fixture
    def backend(self, location: Location) -> MemoryBackend:
        """One client."""
        return MemoryBackend(location, Settings())

    @pytest.fixture
    def other(self, location: Location) -> MemoryBackend:
        """Another one."""
        return MemoryBackend(location, Settings())


def test_users_of_fsspec_see_the_same_files() -> None:
    """What a store writes, fsspec's own file system reads, and the other way round."""
    place = uuid.uuid4().hex
    store = open_store(f"memory://{place}/run")
    fs = fsspec.filesystem("memory")
    store.put("x", b"ours")
    fs.pipe_file(f"/{place}/run/y", b"theirs")
    assert fs.cat_file(f"/{place}/run/x") == b"ours"
    assert store.get("y").data == b"theirs"
    assert [entry.path for entry in store.list("")] == ["x", "y"]
    store.close()
