"""What users do with checkpoints, from the first save to the last deletion, on any storage.

The oracles are torch's own reader, safetensors and clients that share nothing with ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from limits import HANG_S
from raw_clients import RawClient
from safetensors.torch import load as parse_safetensors
from servers import Running

import ckpt_storage
from ckpt_storage import CheckpointManager, KeepLatest

State = dict[str, Any]


def state_of(seed: int) -> State:
    """Return 12 MiB that no storage sends in one part, small tensors and values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "rows": torch.randn(3 << 20, generator=generator).reshape(-1, 1024),
            "bias": torch.randn(7, generator=generator).to(torch.bfloat16),
            "empty": torch.empty(0, 3),
        },
        "step": seed,
        "note": "hello",
    }


def zeros() -> State:
    model = {name: torch.zeros_like(value) for name, value in state_of(0)["model"].items()}
    return {"model": model, "step": -1, "note": ""}


def assert_same(loaded: State, seed: int) -> None:
    wanted = state_of(seed)
    assert (loaded["step"], loaded["note"]) == (wanted["step"], wanted["note"])
    for name, value in wanted["model"].items():
        assert torch.equal(loaded["model"][name], value), name


class Journeys:
    """The journeys of users on the root of the fixture that `at` names."""

    at: ClassVar[str]

    @pytest.fixture
    def root(self, request: pytest.FixtureRequest) -> Running:
        running: Running = request.getfixturevalue(self.at)
        return running

    @pytest.fixture
    def options(self, root: Running) -> dict[str, Any]:
        return {"storage_options": dict(root.storage_options)}

    @pytest.fixture
    def raw(self, root: Running) -> RawClient:
        """A client of the same root that shares nothing with ours."""
        client = RawClient.of(root)
        assert client is not None
        return client

    def _loaded(self, url: str, options: dict[str, Any], seed: int) -> None:
        target = zeros()
        ckpt_storage.load(target, url, **options)
        assert_same(target, seed)

    def test_what_was_saved_is_loaded(self, root: Running, options: dict[str, Any]) -> None:
        """A new name takes a save, and gives it back; the name is taken then."""
        url = f"{root.url}/step-1"
        ckpt_storage.save(state_of(1), url, **options)
        self._loaded(url, options, 1)
        with pytest.raises(ckpt_storage.CheckpointExistsError):
            ckpt_storage.save(state_of(2), url, **options)
        self._loaded(url, options, 1)
        assert ckpt_storage.verify(url, **options).ok

    def test_an_overwrite_is_what_everybody_reads(
        self, root: Running, options: dict[str, Any], raw: RawClient, tmp_path: Path
    ) -> None:
        """After three saves at one name, we and torch's own reader load the third."""
        url = f"{root.url}/step-1"
        for seed in (1, 2, 3):
            ckpt_storage.save(state_of(seed), url, overwrite=True, **options)
        self._loaded(url, options, 3)
        assert ckpt_storage.verify(url, **options).ok
        for path, data in raw.files().items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        target = zeros()
        reader = dcp.FileSystemReader(tmp_path / "step-1")
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert_same(target, 3)

    def test_damage_is_found(self, root: Running, options: dict[str, Any], raw: RawClient) -> None:
        """One bit of a shard that another client changed fails `verify` and the load."""
        url = f"{root.url}/step-1"
        ckpt_storage.save(state_of(1), url, **options)
        files = raw.files()
        shard = max(files, key=lambda path: len(files[path]))
        at = len(files[shard]) // 2
        damaged = files[shard][:at] + bytes([files[shard][at] ^ 1]) + files[shard][at + 1 :]
        raw.write(shard, damaged)
        (problem,) = ckpt_storage.verify(url, **options).problems
        assert problem.fqn == "model.rows"
        with pytest.raises(ckpt_storage.IntegrityError):
            ckpt_storage.load(zeros(), url, **options)

    def test_checkpoints_are_listed_and_deleted(
        self, root: Running, options: dict[str, Any], raw: RawClient
    ) -> None:
        """A listing shows what was saved; what is deleted is gone, its files too."""
        for step in (1, 2):
            ckpt_storage.save({"step": step}, f"{root.url}/step-{step}", step=step, **options)
        listed = ckpt_storage.list_checkpoints(root.url, **options)
        assert [info.name for info in listed] == ["step-1", "step-2"]
        ckpt_storage.delete(f"{root.url}/step-1", **options)
        listed = ckpt_storage.list_checkpoints(root.url, **options)
        assert [info.name for info in listed] == ["step-2"]
        with pytest.raises(FileNotFoundError):
            ckpt_storage.load({"step": 0}, f"{root.url}/step-1", **options)
        kept = [path for path in raw.files() if path.startswith("step-1/")]
        assert all(path.startswith("step-1/commits/") for path in kept)

    def test_a_run_is_pruned_and_resumed(self, root: Running, options: dict[str, Any]) -> None:
        """A manager keeps the latest two, and a new manager restores the newest."""
        with CheckpointManager(root.url, keep=KeepLatest(2), timeout=HANG_S, **options) as manager:
            for step in (1, 2, 3, 4):
                manager.save(step, {"step": step})
            assert manager.wait_pruned(60)
            assert manager.last_prune is not None
            assert manager.last_prune.failed == {}
        with CheckpointManager(root.url, timeout=HANG_S, **options) as manager:
            assert [info.step for info in manager.all()] == [3, 4]
            state = {"step": 0}
            restored = manager.restore(state)
            assert restored is not None
            assert (restored.step, state["step"]) == (4, 4)
        report = ckpt_storage.prune(root.url, KeepLatest(1), dry_run=False, **options)
        assert (report.deleted, report.failed) == (("step-00000003",), {})

    def test_an_export_is_what_safetensors_reads(
        self, root: Running, options: dict[str, Any], raw: RawClient
    ) -> None:
        """Consolidation beside the checkpoint; done again it changes nothing."""
        url = f"{root.url}/step-1"
        ckpt_storage.save(state_of(1), url, **options)
        for _ in range(2):
            ckpt_storage.consolidate(url, **options)
            tensors: dict[str, torch.Tensor] = {}
            for path, data in raw.files().items():
                if path.endswith(".safetensors"):
                    tensors |= parse_safetensors(data)
            wanted = state_of(1)["model"]
            assert tensors.keys() == wanted.keys()
            assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
        assert ckpt_storage.verify(url, **options).ok

    def test_a_copy_goes_to_a_disk_and_back(
        self, root: Running, options: dict[str, Any], tmp_path: Path
    ) -> None:
        """What came back is what was saved, also when it is copied within the storage."""
        there, back, beside = (f"{root.url}/{name}" for name in ("a", "b", "c"))
        to_storage = {"destination_storage_options": options["storage_options"]}
        ckpt_storage.save(state_of(1), there, **options)
        ckpt_storage.copy(there, tmp_path / "copy", **options)
        ckpt_storage.copy(tmp_path / "copy", back, **to_storage)
        ckpt_storage.copy(there, beside, **options, **to_storage)
        for url in (str(tmp_path / "copy"), back, beside):
            local = {} if url.startswith(str(tmp_path)) else options
            self._loaded(url, local, 1)
            assert ckpt_storage.verify(url, **local).ok

    def test_a_doctor_agrees(self, root: Running, options: dict[str, Any]) -> None:
        """Where all of this works, `diagnose` says so, and leaves nothing."""
        diagnosis = ckpt_storage.diagnose(root.url, **options)
        assert diagnosis.ok, diagnosis
        assert diagnosis.leftovers == ()
