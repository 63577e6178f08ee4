"""Scripts in processes that need not import torch again: forks of a `Nursery`.

A script runs as `python script.py` would: its own arguments, environment, folder, output and exit
code. What happens before it imports torch is not tested this way; such tests start an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

from nursery import Nursery, ended
from servers import free_port

__all__ = ["run_script"]


@functools.cache
def _nursery() -> Nursery:
    """Return the nursery of this process, which ends with it."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    modules = ("torch.distributed.checkpoint", "ckpt_storage.loads.load", "ckpt_storage.saves.save")
    return stack.enter_context(Nursery(*modules, "s3fs", "warm", flags=()))


def run_script(
    script: Path | str,
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str],
    ranks: int | None = None,
    deadline_s: float = 120.0,
) -> tuple[int, str]:
    """Run a script alone, or on `ranks` ranks with the environment that torchrun gives them.

    Returns the exit code, the first that is not 0, and all that was printed.
    """
    places: list[dict[str, str]] = [{}]
    if ranks is not None:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        group |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
        group |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
        places = [{**group, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(ranks)]
    logs = [folder / f"output-{number}" for number in range(len(places))]
    for place, log in zip(places, logs, strict=True):
        for ending in ("out", "err", "code"):
            Path(f"{log}.{ending}").unlink(missing_ok=True)
        job = str(script), arguments, str(folder), {**environment, **place}
        _nursery().start(log, _run, *job)
    codes = ended(logs, deadline_s)
    outputs = [Path(f"{log}.out") for log in logs]
    text = "".join(path.read_text(errors="replace") for path in outputs if path.exists())
    assert None not in codes, f"did not end within {deadline_s} s:\n{text}"
    return next((code for code in codes if code), 0), text


def _run(script: str, arguments: tuple[str, ...], folder: str, environment: dict[str, str]) -> None:
    """Run a script in a new fork, which ends as an interpreter does."""
    os.dup2(1, 2)  # one output
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [item for item in environment.get("PYTHONPATH", "").split(os.pathsep) if item]
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
