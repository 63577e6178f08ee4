"""Plain `dcp.async_save` with our writer: saves that overlap do not mix, and failures surface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from dcp_cases import load, same
from saver_cases import END_S, BrokenPlanner, state_of, until
from test_dcp_modes import end_process_mode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckpt_storage import CheckpointStorageWriter
from ckpt_storage.testing.ranks import RankPool

KINDS = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}


class Meeting(DefaultSavePlanner):
    """A planner whose save writes only once the other save writes as well."""

    def __init__(self, folder: str, own: str, other: str) -> None:
        super().__init__()
        self.own, self.other = Path(folder) / own, Path(folder) / other

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Wait for the other."""
        self.own.touch()
        until(self.other.exists, f"the save that makes {self.other}")
        return super().resolve_data(write_item)


def _save(state: dict[str, Any], writer: CheckpointStorageWriter, mode: str, **options: Any) -> Any:
    return dcp.async_save(
        state, storage_writer=writer, async_checkpointer_type=KINDS[mode], **options
    )


def _overlapping(rank: int, folder: str, mode: str) -> None:
    """Begin two saves with one writer, then wait for both."""
    writer = CheckpointStorageWriter(folder, sync_files=False)
    # Torch's thread mode runs collectives of both saves on one group: with one rank only they may
    # meet in the middle. Its worker processes take one save after another.
    meets = mode == "thread"
    try:
        futures = [
            _save(
                state_of(rank, step),
                writer,
                mode,
                checkpoint_id=f"step-{step}",
                planner=Meeting(folder, f"{step}", f"{1 - step}") if meets else None,
            )
            for step in range(2)
        ]
        for future in futures:
            future.result(END_S)
    finally:
        end_process_mode()
    for step in range(2):
        target = state_of(rank, 5)
        load(target, f"{folder}/step-{step}")
        assert same(target, state_of(rank, step))


@pytest.mark.parametrize(("mode", "world_size"), [("thread", 1), ("process", 2)])
def test_overlapping_saves_of_one_writer_do_not_mix(
    ranks: RankPool, tmp_path: Path, mode: str, world_size: int
) -> None:
    """Each save goes to its own place with its own state, while the other is being written."""
    ranks.run(_overlapping, str(tmp_path), mode, world_size=world_size)


def _failing(rank: int, folder: str, mode: str) -> str:
    """Fail on the last rank, then save; return what the future raised."""
    writer = CheckpointStorageWriter(folder, sync_files=False)
    try:
        planner = BrokenPlanner() if rank == 1 else None
        future = _save(state_of(rank, 0), writer, mode, checkpoint_id="a", planner=planner)
        error = future.exception(END_S)
        assert error is not None
        _save(state_of(rank, 1), writer, mode, checkpoint_id="b").result(END_S)
    finally:
        end_process_mode()
    if mode == "thread":
        assert isinstance(error, CheckpointException)
    return str(error)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_failure_is_in_the_future_of_every_rank(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """A failure of one rank is raised by all futures; the next save of the writer works."""
    for text in ranks.run(_failing, str(tmp_path), mode, world_size=2):
        assert "divides by zero" in text
    assert not (tmp_path / "a" / "commits" / "00000001.json").exists()
    assert (tmp_path / "b" / "commits" / "00000001.json").exists()
