"""What every rank is told when ranks disagree, when one of them fails, and when one is killed.

Each rank is a process. What it must be told follows from what the test lets go wrong.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import front_door_cases as cases
import pytest
import torch
from saver_cases import until
from torch.distributed.checkpoint import DefaultSavePlanner

import ckpt_storage
from ckpt_storage import CheckpointManager
from ckpt_storage.testing.ranks import RankPool

WITHIN_S = 10.0
"""What is promised where another rank of the host lives."""


def told(error: ckpt_storage.CheckpointError) -> dict[str, Any]:
    """Return what a user can see of an error."""
    kind = type(error).__name__
    return {"kind": kind, "text": str(error), "rank": error.rank, "phase": error.phase}


def disagree(rank: int, folder: str) -> list[dict[str, Any]]:
    """Save to another URL on each rank; restore with a `check` that only rank 1 spells wrong."""
    url, check = f"{folder}/from the load of {rank}", "reed" if rank == 1 else "read"
    unlike = cases.caught(ckpt_storage.save, cases.state_of(1), url, timeout=20.0)
    with CheckpointManager(folder, timeout=20.0) as manager:
        return [told(unlike), told(cases.caught(manager.restore, {"step": 0}, check=check))]


def test_all_ranks_hear_of_what_one_means_otherwise(ranks: RankPool, tmp_path: Path) -> None:
    """A URL that mentions a load changes no advice; a wrong argument names the rank."""
    ckpt_storage.save({"step": 1}, tmp_path / "step-00000001", sync_files=False)
    results = ranks.run(disagree, str(tmp_path), world_size=2)
    for unlike, refused in results:
        assert unlike["kind"] == "RankMismatchError"
        assert "Nothing was written" in unlike["text"], unlike
        assert "Load again" not in unlike["text"], unlike
        assert refused["rank"] == 1
        assert "'reed'" in refused["text"]
    assert [one["kind"] for _, one in results] == ["RankFailedError", "InvalidInputError"]


def look_where_to_resume(rank: int, root: str) -> str | dict[str, Any]:
    """Ask what would be restored; rank 0 cannot read it where its record is damaged."""
    del rank
    with CheckpointManager(root, timeout=20.0) as manager:
        try:
            info = manager.resume_info()
        except ckpt_storage.CheckpointError as error:
            return told(error)
    return "nothing" if info is None else info.name


def test_all_ranks_hear_where_to_resume_and_why_not(ranks: RankPool, tmp_path: Path) -> None:
    """`resume_info` gives all ranks one answer; what rank 0 fails with in it, all ranks raise."""
    assert ranks.run(look_where_to_resume, str(tmp_path), world_size=2) == ["nothing"] * 2
    for step in (1, 12):
        ckpt_storage.save({"step": step}, tmp_path / f"step-{step:08}", sync_files=False)
    assert ranks.run(look_where_to_resume, str(tmp_path), world_size=2) == ["step-00000012"] * 2
    (tmp_path / "file").touch()
    for one in ranks.run(look_where_to_resume, str(tmp_path / "file"), world_size=2):
        assert isinstance(one, dict), one
        assert one["rank"] == 0, one
        assert str(tmp_path / "file") in one["text"]


def wait_for_a_late_rank(rank: int, folder: str) -> list[str]:
    """Save while rank 1 never comes; return what rank 0 logged meanwhile."""
    if rank == 1:
        return []
    with mock.patch.object(logging.getLogger("ckpt_storage"), "warning") as warning:
        cases.caught(ckpt_storage.save, {"step": 1}, f"{folder}/run", timeout=2.0)
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


def test_who_has_not_come_is_logged_while_one_waits(ranks: RankPool, tmp_path: Path) -> None:
    """Long before the deadline rank 0 logs which rank it waits for, and for which save."""
    texts, _ = ranks.run(wait_for_a_late_rank, str(tmp_path), world_size=2)
    assert any("Rank 1" in text and f"{tmp_path}/run" in text for text in texts), texts


def test_ranks_wait_ten_minutes_for_one_another_by_default() -> None:
    """The default deadline of the plan phase is ten minutes."""
    assert ckpt_storage.Timeouts().plan == pytest.approx(600.0)


def look_alone_first(rank: int, root: str) -> tuple[list[int | None], str]:
    """Let rank 0 alone make managers and a saver that send nothing; then work together."""
    if rank == 0:
        for _ in range(2):
            with CheckpointManager(root, timeout=20.0) as alone:
                assert alone.latest() is None
        ckpt_storage.AsyncSaver(mode="thread", timeout=20.0).close()
    steps = []
    for step in (1, 2):
        with CheckpointManager(root, timeout=20.0, mode="thread", every_steps=1) as manager:
            assert manager.should_save(step)
            manager.save_async(step, {"step": step}, sync_files=False).result(20.0)
            info = manager.resume_info()
            steps.append(None if info is None else info.step)
    with ckpt_storage.AsyncSaver(mode="thread", timeout=20.0) as saver:
        saver.save({"step": 1}, f"{root}/other-1", sync_files=False).result(20.0)
        refusal = cases.caught(ckpt_storage.AsyncSaver, mode="thread", timeout=20.0)
        with ckpt_storage.AsyncSaver(mode="thread", timeout=20.0, name="other") as other:
            other.save({"step": 1}, f"{root}/run", sync_files=False).result(20.0)
        ckpt_storage.save_async({"step": 1}, f"{root}/run-2", sync_files=False).result(20.0)
    assert isinstance(refusal, ckpt_storage.InvalidInputError)
    return steps, str(refusal)


def test_what_one_rank_makes_alone_shifts_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """Managers that only look and idle savers may be rank 0's alone; names are open once."""
    for steps, refusal in ranks.run(look_alone_first, str(tmp_path), world_size=2):
        assert steps == [1, 2]
        assert "'default'" in refusal
        assert "name=" in refusal


def die_while_saving(rank: int, folder: str, victim: int, kind: str) -> dict[str, Any]:
    """Let one rank be killed in the middle of its write; return what another is told, and when."""
    with cases.default_group(rank, 3, folder, kind=kind):
        ckpt_storage.save({"step": 0}, f"{folder}/first", sync_files=False)
        planner = KilledInWrite(f"{folder}/killed") if rank == victim else None
        error = cases.caught(
            ckpt_storage.save, {f"of {rank}": torch.zeros(9)}, f"{folder}/run", planner=planner
        )
        seconds = time.time() - float(Path(f"{folder}/killed").read_text(encoding="ascii"))
        Path(f"{folder}/told-{rank}").write_text(
            json.dumps({**told(error), "seconds": seconds}), encoding="utf-8"
        )
        # To take the group down would ask the store that may be gone.
        os._exit(0)


class KilledInWrite(DefaultSavePlanner):
    """A planner whose process is killed when it hands out what is to be written."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def resolve_data(self, write_item: Any) -> Any:
        """Be killed once the others have written and all have told which phase they are in."""
        run = Path(self.path).parent / "run"
        until(lambda: len(list(run.glob("**/__*.distcp"))) >= 2, "the others write")
        time.sleep(0.5)
        Path(self.path).write_text(str(time.time()), encoding="ascii")
        os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


@pytest.mark.parametrize(("victim", "kind"), [(1, "file"), (0, "tcp")], ids=str)
def test_a_rank_that_is_killed_in_its_write_is_named_within_ten_seconds(
    ranks: RankPool, tmp_path: Path, victim: int, kind: str
) -> None:
    """With every deadline at its default, also where rank 0 dies and the store with it."""
    ranks.outcomes(die_while_saving, str(tmp_path), victim, kind, world_size=3, timeout_s=150.0)
    for rank in {0, 1, 2} - {victim}:
        one = json.loads((tmp_path / f"told-{rank}").read_text(encoding="utf-8"))
        assert one["rank"] == victim, one
        assert one["phase"] in {"write", "commit"}, one
        assert f"{tmp_path}/run" in one["text"], one
        assert one["seconds"] < WITHIN_S, one
    target = {"step": 1}
    ckpt_storage.load(target, tmp_path / "first")
    assert target == {"step": 0}


def disagree_and_leave(rank: int, folder: str) -> None:
    """Disagree on the URL while rank 0, which hosts the store, would leave at once."""
    with cases.default_group(rank, 2, folder, kind="tcp"):
        ckpt_storage.save({"step": 0}, f"{folder}/first", sync_files=False)
        if rank == 1:
            Path(f"{folder}/pid").write_text(str(os.getpid()), encoding="ascii")
        else:
            until(Path(f"{folder}/pid").exists, "rank 1 comes")
            time.sleep(0.3)  # it says what it means; a second later it reads the verdict
            stopped = Path(f"{folder}/pid").read_text(encoding="ascii")
            os.kill(int(stopped), signal.SIGSTOP)
            subprocess.Popen(["/bin/sh", "-c", f"sleep 1; kill -CONT {stopped}"])
        error = cases.caught(ckpt_storage.save, {"step": 1}, f"{folder}/of {rank}", timeout=20.0)
        Path(f"{folder}/told-{rank}").write_text(json.dumps(told(error)), encoding="utf-8")
        os._exit(0)


def test_all_ranks_read_who_said_what_before_rank_0_leaves(ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0 hosts the store and raises a mismatch only once the others have read it."""
    ranks.outcomes(disagree_and_leave, str(tmp_path), world_size=2)
    for rank in (0, 1):
        one = json.loads((tmp_path / f"told-{rank}").read_text(encoding="utf-8"))
        assert one["kind"] == "RankMismatchError", one
        assert all(f"of {other}" in one["text"] for other in (0, 1)), one
