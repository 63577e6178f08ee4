"""Examples of loops without an adapter of ours: torchrun on two nodes, Ray Train."""

from __future__ import annotations

import sys
from pathlib import Path

from integration_tools import EXAMPLES, finish, finish_all, need, sound
from servers import free_port

import ckpt_storage


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


def test_workers_of_ray_resume_after_one_died(tmp_path: Path) -> None:
    """The job resumes from the newest commit; `num_to_keep` of Ray deletes pointers alone."""
    need("ray")
    url = str(tmp_path / "run")
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), url]
    code, output = finish(command, tmp_path)
    assert code == 0, output
    assert "Trained to step 8, resumed at step 3." in output
    assert sound(url) == ["step-00000006", "step-00000008"]
    assert "Ray keeps 1 pointer." in output
    assert f"Ray points to {ckpt_storage.list_checkpoints(url)[-1].url}\n" in output
