"""A process that has imported what is slow to import, and forks of it that end as scripts do.

A fork goes through the whole shutdown of an interpreter, which children of `multiprocessing` skip.
Its output and its exit code are in files. Tests share one server: `shared_server`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import pickle
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from limits import HANG_S, JOB_S
from servers import free_port

_PR_SET_PDEATHSIG = 1

_PRELOADED = (
    *("torch.distributed.checkpoint", "s3fs", "safetensors.torch", "fork_server", "saver_cases"),
    *("ckpt_storage.loads.load", "ckpt_storage.saves.save", "ckpt_storage.export.consolidate"),
)

_Job = tuple[str, Callable[..., object], tuple[Any, ...]]
"""Path of the log, function and arguments."""


class ForkServer:
    """Starts forks of a process that has imported `modules`; a context manager, which kills all."""

    def __init__(self, *modules: str) -> None:
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            env={**os.environ, **path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._process.kill()  # its forks die with it
        self._process.communicate(timeout=HANG_S)

    def run(
        self, folder: Path, function: Callable[..., object], *args: Any, count: int = 1
    ) -> tuple[list[int | None], list[str], str]:
        """Call `function(number, *args)` in `count` new processes, which ignore Python's warnings.

        Returns their exit codes, the space-separated tokens that they printed, and their standard
        error.
        """
        logs = [folder / f"log-{number}" for number in range(count)]
        for number, log in enumerate(logs):
            self.start(log, _without_warnings, function, number, *args)
        codes = exit_codes(logs, JOB_S)
        out, err = ("".join(Path(f"{log}.{e}").read_text() for log in logs) for e in ("out", "err"))
        return codes, out.split(), err

    def start(self, log: Path, function: Callable[..., object], *args: Any) -> None:
        """Call a function in a new process, whose output goes to `log`.out and `log`.err."""
        assert self._process.stdin is not None
        pickle.dump((str(log), function, args), self._process.stdin)
        self._process.stdin.flush()


@functools.cache
def shared_server() -> ForkServer:
    """Return the fork server of this process, which ends with it."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(ForkServer(*_PRELOADED))


def exit_codes(logs: Iterable[Path], limit_s: float) -> list[int | None]:
    """Wait for the processes with these logs; None for a process that is alive after `limit_s`."""
    files = [Path(f"{log}.code") for log in logs]
    end_s = time.monotonic() + limit_s
    while not all(file.exists() for file in files) and time.monotonic() < end_s:
        time.sleep(0.005)
    return [int(file.read_text()) if file.exists() else None for file in files]


def run_script(
    script: Path | str,
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str],
    ranks: int | None = None,
) -> tuple[int, str]:
    """Run a script alone, or on `ranks` ranks with the environment that torchrun sets.

    It runs as `python script.py` would: own arguments, environment, folder, output and exit code.
    What a script does before it imports torch is not tested this way. Returns the first exit code
    that is not 0, and all output.
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
        start_script(
            log, str(script), *arguments, folder=folder, environment={**environment, **place}
        )
    codes = exit_codes(logs, JOB_S)
    outputs = [Path(f"{log}.out") for log in logs]
    text = "".join(path.read_text(errors="replace") for path in outputs if path.exists())
    assert None not in codes, f"did not end within {JOB_S} s:\n{text}"
    return next((code for code in codes if code), 0), text


def start_script(
    log: Path, script: str, *arguments: str, folder: Path, environment: Mapping[str, str]
) -> None:
    """Start a script as `python script.py`; its output is `log`.out, its exit code `log`.code."""
    shared_server().start(log, _run_script, script, arguments, str(folder), dict(environment))


# What follows runs in the server and its forks.


def _serve() -> _Job | None:
    """Fork a process for each job; return the job in the fork, None in the server at its end."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    while True:
        try:
            job: _Job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return None
        if (pid := os.fork()) == 0:
            return job
        threading.Thread(target=_record_exit_code, args=(pid, job[0]), daemon=True).start()


def _record_exit_code(pid: int, log: str) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    Path(f"{log}.tmp").write_text(str(code))
    Path(f"{log}.tmp").rename(f"{log}.code")


def _detach(log: str) -> None:
    """Give a fork a session and logs of its own; the kernel kills it when the server ends."""
    os.setsid()
    # A shell that runs something in the background lets it ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, name in enumerate((os.devnull, f"{log}.out", f"{log}.err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)


def _without_warnings(function: Callable[..., object], *args: Any) -> None:
    # As `python -W ignore` does, also for interpreters that this process starts.
    sys.warnoptions[:] = ["ignore"]
    warnings.simplefilter("ignore")
    function(*args)


def _run_script(
    script: str, arguments: tuple[str, ...], folder: str, environment: dict[str, str]
) -> None:
    os.dup2(1, 2)  # a single output
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [item for item in environment.get("PYTHONPATH", "").split(os.pathsep) if item]
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def run_pytest(folder: str, arguments: list[str]) -> None:
    """Run pytest in `folder`, with the package that is there, and exit with its code."""
    import pytest  # noqa: PLC0415  # other jobs do without

    os.dup2(1, 2)  # a single output
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    sys.path.insert(0, folder)
    sys.exit(pytest.main(arguments))


if __name__ == "__main__" and (_job := _serve()) is not None:
    _detach(_job[0])
    _job[1](*_job[2])
