"""Scripts in processes that need not import torch again: each is forked from one that has.

A script runs as `python script.py` would: its own arguments, environment, folder, output and exit
code. What happens before it imports torch is not tested this way; such tests start an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from servers import free_port

__all__ = ["run_script"]

_PRELOADED = [
    "torch",
    "torch.distributed.checkpoint",
    "ckpt_storage.loads.load",
    "ckpt_storage.saves.save",
    "s3fs",
]


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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    end = time.monotonic() + deadline_s
    outputs = [folder / f"output-{number}.txt" for number in range(len(places))]
    processes: list[ForkServerProcess] = []
    with contextlib.ExitStack() as stack:
        for place, output in zip(places, outputs, strict=True):
            job = str(script), [*arguments], str(folder), {**environment, **place}, str(output)
            processes.append(context.Process(target=_run, args=job, daemon=False))
            stack.callback(_kill, processes[-1])
            processes[-1].start()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
    text = "".join(one.read_text(errors="replace") for one in outputs if one.exists())
    assert None not in codes, f"did not end within {deadline_s} s:\n{text}"
    return next((code for code in codes if code), 0), text


def _kill(process: ForkServerProcess) -> None:
    """End it and what it started."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join(10)


def _run(
    script: str, arguments: list[str], folder: str, environment: dict[str, str], output: str
) -> None:
    """Become the interpreter that runs a script; never returns."""
    os.setsid()
    with open(output, "wb") as file:  # noqa: PTH123  # a descriptor is what is wanted
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [item for item in environment.get("PYTHONPATH", "").split(os.pathsep) if item]
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    # A child of multiprocessing has one; an interpreter that a shell starts has none.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # noqa: SLF001  # no public way
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)  # noqa: T201  # as the interpreter does
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # what an interpreter does at its end
    atexit._run_exitfuncs()  # noqa: SLF001  # as above
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
