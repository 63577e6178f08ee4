"""What planners and scripts read of torch's own writer and reader, they find on ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import ckpt_storage
from ckpt_storage import CheckpointExistsError, CheckpointManager
from ckpt_storage import CheckpointStorageReader as Reader
from ckpt_storage import CheckpointStorageWriter as Writer


def _ids_seen(reader: Any, **options: Any) -> object:
    seen: list[Any] = []

    class _Planner(dcp.DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, *more: Any) -> None:
            seen.append(metadata.storage_meta.checkpoint_id)
            super().set_up_planner(state_dict, metadata, *more)

    options |= {"storage_reader": reader, "planner": _Planner(), "no_dist": True}
    dcp.load({"w": torch.zeros(2)}, **options)
    return seen[0]


def test_a_load_planner_finds_the_path_as_it_was_passed(tmp_path: Path) -> None:
    """A planner may join it to a file name; torch's reader gives the path, and so does ours."""
    ckpt_storage.save({"w": torch.ones(2)}, tmp_path / "run", sync_files=False)
    path = tmp_path / "run"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert _ids_seen(dcp.FileSystemReader(tmp_path / "stock")) in {
        tmp_path / "stock",
        str(tmp_path / "stock"),
    }
    assert _ids_seen(Reader(path)) == path
    assert _ids_seen(Reader(str(path))) == str(path)
    url = path.as_uri()
    assert _ids_seen(Reader(url)) == url
    assert _ids_seen(Reader(tmp_path), checkpoint_id="run") == path.as_uri()


def test_a_writer_has_a_save_id(tmp_path: Path) -> None:
    """Torch's writer has a `save_id`; ours is that of the thread's last save."""
    assert hasattr(FileSystemWriter(tmp_path / "stock"), "save_id")
    writer = Writer(tmp_path / "run", sync_files=False)
    assert writer.save_id is None
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    (info,) = ckpt_storage.list_checkpoints(tmp_path)
    assert writer.save_id == info.save_id


def test_a_refusal_says_already_exists(tmp_path: Path) -> None:
    """Scripts look for the words that Python and torch use."""
    ckpt_storage.save({"w": torch.ones(2)}, tmp_path / "run", sync_files=False)
    with pytest.raises(CheckpointExistsError, match="already exists"):
        ckpt_storage.save({"w": torch.ones(2)}, tmp_path / "run", sync_files=False)


def test_a_link_that_leads_to_itself_stops_nothing(tmp_path: Path) -> None:
    """Listing, restoring and pruning a root work beside one; so does reading a checkpoint."""
    with CheckpointManager(tmp_path, keep=ckpt_storage.KeepLatest(1), pruning="manual") as manager:
        for step in (1, 2):
            manager.save(step, {"step": step}, sync_files=False)
        (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "step-00000002" / "loop").symlink_to("loop")
        (tmp_path / "step-00000003").symlink_to("step-00000003")
        assert [info.step for info in ckpt_storage.list_checkpoints(tmp_path)] == [1, 2]
        restored = manager.restore(target := {"step": 0})
        assert restored is not None
        assert target == {"step": 2}
        report = manager.prune()
        assert report is not None
        assert report.deleted
    assert [info.step for info in ckpt_storage.list_checkpoints(tmp_path)] == [2]
    assert ckpt_storage.verify(tmp_path / "step-00000002").ok


@pytest.mark.parametrize(
    ("state", "leaves"),
    [({"w": torch.eye(2).to_sparse()}, []), ({"o": object()}, ["commits", "saves"])],
)
def test_after_a_refused_save_nothing_is_there(
    tmp_path: Path, state: dict[str, Any], leaves: list[str]
) -> None:
    """What the plan shows is refused before a folder is made; a load finds nothing in any case."""
    with pytest.raises(ckpt_storage.InvalidInputError):
        ckpt_storage.save(state, tmp_path / "run", sync_files=False, unsafe_values="refuse")
    assert sorted(path.name for path in (tmp_path / "run").glob("*")) == leaves
    with pytest.raises(ckpt_storage.CheckpointNotFoundError):
        ckpt_storage.load({"w": torch.zeros(2)}, tmp_path / "run")
