"""Plain torchrun on two nodes: two agents side by side."""

from __future__ import annotations

import sys
from pathlib import Path

from integration_tools import EXAMPLES, finish_all
from servers import free_port

import ckpt_storage

SCRIPT = str(EXAMPLES / "torchrun_nodes.py")


def node(number: int, address: str, port: int, url: str) -> list[str]:
    """Return the command of one node."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--node-rank", str(number), "--nproc-per-node", "1"]
    return [*command, "--master-addr", address, "--master-port", str(port), SCRIPT, url]


def test_two_agents_share_a_folder(tmp_path: Path) -> None:
    """Ranks of two torchrun agents write one checkpoint, and resume from it."""
    url = str(tmp_path / "run")
    for word in ("saved", "resumed"):
        port = free_port()
        commands = [node(number, "127.0.0.1", port, url) for number in (0, 1)]
        for code, output in finish_all(commands, tmp_path):
            assert code == 0, output
            assert f"{word} step-00000004" in output
    infos = ckpt_storage.list_checkpoints(url)
    assert [info.name for info in infos] == ["step-00000004", "step-00000008"]
    assert ckpt_storage.verify(infos[-1].url).ok
