"""Examples of loops without an adapter of ours: accelerate, torchrun on two nodes, Ray Train."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from fork_server import run_script
from integration_tools import EXAMPLES, ROOT, finish, finish_all, need, sound, torchrun
from servers import free_port

import ckpt_storage

LOOP = str(EXAMPLES / "accelerate_loop.py")
CPU = {"ACCELERATE_USE_CPU": "true"}


def trained(folder: Path, url: str) -> tuple[str, dict[tuple[int, int], str]]:
    """Train to step 9 on two ranks; return what was printed, and losses by rank and step."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **CPU}
    code, output = run_script(LOOP, url, "9", folder=folder, environment=environment, ranks=2)
    assert code == 0, output
    return output, losses_in(output)


def losses_in(output: str) -> dict[tuple[int, int], str]:
    """Return what was printed, by rank and step, to the last bit."""
    # torchrun's ranks write without buffers: a line's end may follow another's line.
    found = re.findall(r"rank (\d+) step (\d+) loss (-?0x[0-9a-f.]+p[+-]\d+)", output)
    return {(int(rank), int(step)): loss for rank, step, loss in found}


def test_a_killed_loop_of_accelerate_resumes_bit_for_bit(tmp_path: Path) -> None:
    """A rank is killed in the second epoch; each later loss is that of an undisturbed run."""
    need("accelerate")
    _, whole = trained(tmp_path, str(tmp_path / "whole"))
    assert len(whole) == 2 * 9

    url = str(tmp_path / "run")
    code, output = finish(torchrun(LOOP, url, "9", "8"), tmp_path, CPU)
    assert code != 0
    assert "SIGKILL" in output or "exitcode: -9" in output, output
    assert len({step for _, step in losses_in(output)}) == 8

    output, resumed = trained(tmp_path, url)
    # The save of step 6 may have been in flight.
    (name,) = set(re.findall(r"rank [01] resumed from (step-\d{8})", output))
    assert name in {"step-00000003", "step-00000006"}
    step = int(name.rpartition("-")[2])
    assert resumed == {key: loss for key, loss in whole.items() if key[1] > step}
    assert sound(url) == ["step-00000006", "step-00000009"]


def test_agents_of_two_nodes_share_a_folder(tmp_path: Path) -> None:
    """Ranks of two torchrun agents write one checkpoint, and resume from it."""
    url = str(tmp_path / "run")
    for word in ("saved", "resumed"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
        command += ["--master-port", str(free_port())]
        script = [str(EXAMPLES / "torchrun_nodes.py"), url]
        nodes = [[*command, "--node-rank", node, *script] for node in ("0", "1")]
        for code, output in finish_all(nodes, tmp_path):
            assert code == 0, output
            assert f"{word} step-00000004" in output
    assert sound(url) == ["step-00000004", "step-00000008"]


@pytest.mark.timeout(400)
def test_workers_of_ray_resume_after_one_died(tmp_path: Path) -> None:
    """The job ends at its last step, having gone on from the newest committed checkpoint."""
    need("ray")
    url = str(tmp_path / "run")
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), url]
    code, output = finish(command, tmp_path, deadline_s=300.0)
    assert code == 0, output
    assert "Trained to step 8, resumed at step 3." in output
    assert sound(url) == ["step-00000003", "step-00000006", "step-00000008"]
    assert f"Ray points to {ckpt_storage.list_checkpoints(url)[-1].url}\n" in output
