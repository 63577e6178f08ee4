"""Plain torchrun on two nodes: two agents side by side, and two hosts made of namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
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


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Two hosts with names, networks and disks of their own; yields what to put before a command.

    `shared` is one folder on both, `local` a disk of each host's own under one path.
    """
    (tmp_path / "shared").mkdir()
    (tmp_path / "local").mkdir()
    tag = f"ckpt{os.getpid()}"
    with ExitStack() as stack:

        def do(*command: str) -> None:
            subprocess.run(command, check=True, capture_output=True, timeout=30)

        try:
            for number in (0, 1):
                do("ip", "netns", "add", f"{tag}n{number}")
                stack.callback(
                    subprocess.run,
                    ["ip", "netns", "delete", f"{tag}n{number}"],
                    check=False,
                    capture_output=True,
                    timeout=30,
                )
            do("ip", "link", "add", f"{tag}v0", "netns", f"{tag}n0", "type", "veth", "peer",
               "name", f"{tag}v1", "netns", f"{tag}n1")  # fmt: skip
            for number in (0, 1):
                inside = ["ip", "-n", f"{tag}n{number}"]
                do(*inside, "address", "add", f"192.0.2.{number + 1}/30", "dev", f"{tag}v{number}")
                do(*inside, "link", "set", f"{tag}v{number}", "up")
                do(*inside, "link", "set", "lo", "up")
            do("unshare", "--mount", "--uts", "true")
        except (OSError, subprocess.SubprocessError) as error:
            # Not `missing`: whether a runner may do this is not for a package to decide.
            pytest.skip(f"this machine makes no namespaces: {error}")
        # Gloo takes the network of the host's name, which nobody resolves here.
        script = 'hostname "$1"; mount -t tmpfs none "$2"; export GLOO_SOCKET_IFNAME="$3"; '
        script += 'shift 3; exec "$@"'
        yield [
            ["ip", "netns", "exec", f"{tag}n{number}", "unshare", "--mount", "--uts",
             "sh", "-c", script, "sh", f"node{number}", str(tmp_path / "local"), f"{tag}v{number}"]
            for number in (0, 1)
        ]  # fmt: skip


def test_two_hosts_share_a_mount(tmp_path: Path, hosts: list[list[str]]) -> None:
    """Over a real network, with one folder on both hosts, the checkpoint is whole."""
    url = str(tmp_path / "shared" / "run")
    commands = [[*hosts[n], *node(n, "192.0.2.1", 29400, url)] for n in (0, 1)]
    for (code, output), name in zip(
        finish_all(commands, tmp_path), ("node0", "node1"), strict=True
    ):
        assert code == 0, output
        assert f"on {name} saved step-00000004" in output
    assert ckpt_storage.verify(f"{url}/step-00000004").ok


def test_disks_of_each_nodes_own_are_refused(tmp_path: Path, hosts: list[list[str]]) -> None:
    """Where one path means another disk on each host, nothing is committed and both are told."""
    url = str(tmp_path / "local" / "run")
    commands = [[*hosts[n], *node(n, "192.0.2.1", 29400, url)] for n in (0, 1)]
    for code, output in finish_all(commands, tmp_path):
        assert code != 0
        assert "node1" in output or "rank 1" in output.lower(), output
        assert "saved step" not in output
        assert "ckpt_storage.errors." in output, output
