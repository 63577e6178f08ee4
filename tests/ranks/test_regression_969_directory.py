"""accelerate 969: every rank removed and made the checkpoint's directory, and one lost the race."""

from __future__ import annotations

import shutil
from pathlib import Path

import dcp_cases
import front_door_cases as cases
import torch.distributed as dist

from ckpt_storage.testing.ranks import RankPool


def prepare_as_everybody(rank: int, folder: str) -> str:
    """Remove and make the folder as each rank did; return what that raised."""
    if rank == 0:
        Path(folder).mkdir()
    dist.barrier()
    exists = Path(folder).exists()  # both ranks see it
    dist.barrier()
    try:
        if rank == 0 and exists:
            shutil.rmtree(folder)
        dist.barrier()
        if rank == 1 and exists:
            shutil.rmtree(folder)
    except FileNotFoundError as error:
        return type(error).__name__
    finally:
        dist.barrier()
    return "prepared"


def test_regression_969_every_rank_preparing_the_folder_crashes_one(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The pattern fails here: the rank that comes second finds nothing to remove."""
    results = ranks.run(prepare_as_everybody, str(tmp_path / "run"), world_size=2)
    assert results == ["prepared", "FileNotFoundError"]


def save_over_and_over(rank: int, folder: str) -> list[tuple[str, str]]:
    """Save to one folder five times; return this rank's calls that make or remove anything."""
    with cases.faulty_disk([]) as made:
        for step in range(5):
            cases.save(rank, folder, step, overwrite=True)
    return [(call.operation, call.path) for posix in made for call in posix.script.calls]


def test_regression_969_only_the_coordinator_prepares_the_folder(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Four ranks save five times to one existing folder; only rank 0 makes or removes folders."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "note.txt").write_text("not ours")
    calls = ranks.run(save_over_and_over, str(path), world_size=4)
    target = cases.state_of(4, zeros=True)
    dcp_cases.load_stock(target, path)
    cases.assert_state(target, 4)
    assert (path / "note.txt").read_text() == "not ours"
    names = {name for of_rank in calls for name, _ in of_rank}
    assert "mkdir" in names, sorted(names)
    for rank, of_rank in enumerate(calls):
        folders = [call for call in of_rank if call[0] in {"mkdir", "rmdir", "remove_folder"}]
        assert bool(folders) == (rank == 0), (rank, folders)
