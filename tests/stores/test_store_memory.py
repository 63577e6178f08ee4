"""memory:// keeps every promise of a backend, and shows the files of fsspec's own."""

from __future__ import annotations

import uuid

import fsspec
import pytest
from servers import Running
from suites import SuiteAt

from ckpt_storage.store import open_store


class TestMemory(SuiteAt):
    """Two backends on one root of this process."""

    at = "memory_root"

    @pytest.fixture
    def memory_root(self) -> Running:
        """A root that no other test uses."""
        return Running(url=f"memory://{uuid.uuid4().hex}/run")


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
