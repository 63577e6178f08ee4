"""What users write, as docs/extending.md shows: backends, a policy and an export format."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from servers import Running
from suites import SuiteAt

import ckpt_storage
from ckpt_storage.store import Backend, Location, Settings
from ckpt_storage.store.store import Store

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from npy_export import export_npy  # from the folder above
from obstore_reads import ObstoreBackend  # from the folder above
from sqlite_backend import SqliteBackend  # from the folder above

ckpt_storage.register_backend("sqlite", SqliteBackend)


class TestSqlite(SuiteAt):
    """A whole backend of one's own, over a database."""

    at = "database"

    @pytest.fixture
    def database(self, tmp_path: Path) -> Running:
        """A database that is not there yet."""
        return Running(url=f"sqlite://{tmp_path}/runs.db/step-1")


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


class TestObstore(SuiteAt):
    """S3 with large reads and puts through obstore."""

    many, at = 30, "moto_root"

    def opened(self, location: Location, settings: Settings) -> Backend:
        """Return the example, which no scheme is registered for."""
        return ObstoreBackend(location, settings)

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


class KeepOdd(ckpt_storage.RetentionPolicy):
    """Keeps what has an odd step."""

    def kept(self, candidates: Sequence[ckpt_storage.Candidate]) -> Mapping[str, str]:
        """Return the odd ones."""
        return {one.name: "it is odd" for one in candidates if one.step % 2}


def test_a_policy_of_ones_own_decides(tmp_path: Path) -> None:
    """`prune` deletes what it does not keep, but for the newest."""
    for step in (1, 2, 3, 4):
        ckpt_storage.save({"step": step}, tmp_path / f"step-{step:08d}")
    report = ckpt_storage.prune(tmp_path, KeepOdd(), dry_run=False)
    assert report.deleted == ("step-00000002",)


def test_an_export_format_of_ones_own(tmp_path: Path) -> None:
    """The files of the example are what NumPy reads, and nothing else lies beside them."""
    model = {"w": torch.rand(300, 7), "b": torch.arange(5)}
    ckpt_storage.save({"model": model, "step": 3}, tmp_path / "checkpoint")
    source, target = str(tmp_path / "checkpoint"), str(tmp_path / "out")
    assert sorted(export_npy(source, target)) == ["model.b.npy", "model.w.npy"]
    assert np.array_equal(np.load(tmp_path / "out" / "model.w.npy"), model["w"].numpy())
    assert np.array_equal(np.load(tmp_path / "out" / "model.b.npy"), model["b"].numpy())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.b.npy",
        "model.w.npy",
    ]
