"""What tests of integrations share: processes that end for sure, and packages that may be missing.

A framework that is not installed skips its tests, loudly; where the environment variable CI is set
it fails them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from limits import JOB_S
from servers import free_port

import ckpt_storage

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STOP_S = 40.0
"""torchrun gives its ranks 30 seconds to end."""


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        missing(f"{package} is not installed: pip install -e '.[test]'")


def missing(reason: str) -> None:
    """Fail with `reason` where CI is set, skip elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)


def sound(url: str) -> list[str]:
    """Return the names of the committed checkpoints, all of which are sound."""
    infos = ckpt_storage.list_checkpoints(url)
    assert all(ckpt_storage.verify(info.url).ok for info in infos)
    return [info.name for info in infos]


def torchrun(*arguments: str, ranks: int = 2) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*command, "--master-addr", "127.0.0.1", "--master-port", str(free_port()), *arguments]


def finish(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] = {},
    *,
    limit_s: float = JOB_S,
) -> tuple[int, str]:
    """Run a command to its end in `folder`; return its exit code and everything it printed."""
    return finish_all([command], folder, environment, limit_s=limit_s)[0]


def finish_all(
    commands: Sequence[Sequence[str]],
    folder: Path,
    environment: Mapping[str, str] = {},
    *,
    limit_s: float = JOB_S,
) -> list[tuple[int, str]]:
    """Run commands side by side, each a process group that is ended whatever happens."""
    inherited = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    outputs = [folder / f"output-{number}.txt" for number in range(len(commands))]
    processes = []
    try:
        for command, file in zip(commands, outputs, strict=True):
            with file.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        codes = [process.wait(timeout=limit_s) for process in processes]
    finally:
        for process in processes:
            # torchrun's ranks are in sessions of their own; it ends them if it is asked to.
            process.terminate()
        for process in processes:
            _end(process)
    texts = [file.read_text(errors="replace") for file in outputs]
    return list(zip(codes, texts, strict=True))


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
