"""Accelerate over our storage: two processes, one of them killed, both resumed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from integration_tools import EXAMPLES, ROOT, finish, need, torchrun
from warm import run_script

import ckpt_storage

need("accelerate")

SCRIPT = str(EXAMPLES / "accelerate_loop.py")
CPU = {"ACCELERATE_USE_CPU": "true"}


def train(folder: Path, url: str, last: int, *, ranks: int = 2) -> tuple[int, str]:
    """Train up to a step; return exit code and output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **CPU}
    return run_script(SCRIPT, url, str(last), folder=folder, environment=environment, ranks=ranks)


def losses_in(output: str) -> dict[tuple[int, int], str]:
    """Return what was printed, by rank and step, to the last bit."""
    # torchrun's ranks write without buffers: a line's end may follow another's line.
    found = re.findall(r"rank (\d+) step (\d+) loss (-?0x[0-9a-f.]+p[+-]\d+)", output)
    return {(int(rank), int(step)): loss for rank, step, loss in found}


def test_a_killed_loop_resumes_bit_for_bit(tmp_path: Path) -> None:
    """A rank is killed in the second epoch; each later loss is that of an undisturbed run."""
    code, output = train(tmp_path, str(tmp_path / "whole"), 9)
    assert code == 0, output
    whole = losses_in(output)
    assert len(whole) == 2 * 9

    url = str(tmp_path / "run")
    code, output = finish(torchrun(SCRIPT, url, "9", "8"), tmp_path, CPU)
    assert code != 0
    assert "SIGKILL" in output or "exitcode: -9" in output, output
    assert len({step for _, step in losses_in(output)}) == 8

    code, output = train(tmp_path, url, 9)
    assert code == 0, output
    # The save of step 6 may have been in flight.
    names = set(re.findall(r"rank [01] resumed from (step-\d{8})", output))
    assert names <= {"step-00000003", "step-00000006"}
    assert len(names) == 1, output
    resumed = losses_in(output)
    step = int(names.pop().rpartition("-")[2])
    assert set(resumed) == {(rank, n) for rank in (0, 1) for n in range(step + 1, 10)}
    assert resumed == {key: whole[key] for key in resumed}
    infos = ckpt_storage.list_checkpoints(url)
    assert [info.name for info in infos] == ["step-00000006", "step-00000009"]
    for info in infos:
        assert ckpt_storage.verify(info.url).ok
