"""The ranks of the fault matrix: real processes that tell where they are."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner

import ckpt_storage
from ckpt_storage.coordination.operation import Operation

__all__ = ["OPERATIONS", "Job", "rank_main", "state_of"]

ELEMENT_COUNT = 50_000
WEIGHT_COUNT = 800_000
"""Elements of a tensor to consolidate: more than the 5 MiB that S3 wants of a part."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank is to do.

    With `is_held` its planner asks the driver how to go on. `version` is the content that a save
    saves. `files` says which weight file each tensor goes into.
    """

    operation: str
    rank: int
    world_size: int
    url: str
    storage_options: Mapping[str, Any]
    timeouts: ckpt_storage.Timeouts
    port: int
    launcher_hosts: bool
    is_held: bool = False
    version: int = 0
    files: Mapping[str, int] | None = None
    log_path: str = os.devnull


def tensor_of(version: int, rank: int) -> torch.Tensor:
    """Return what `rank` has in `version` of the state; no two are alike anywhere."""
    return torch.arange(ELEMENT_COUNT, dtype=torch.int64) + (version * 100 + rank) * 10**6


def state_of(version: int, ranks: range) -> dict[str, Any]:
    """Return the part of the state that `ranks` hold; each tensor lies in its rank's file."""
    return {f"w{rank}": tensor_of(version, rank) for rank in ranks}


def weights_of(version: int, ranks: range) -> dict[str, Any]:
    """Return the part of a model to consolidate that `ranks` hold; each in its rank's file.

    The first is a little smaller: the bytes of all, divided by three, end in the others' files.
    """
    return {
        f"w{rank}": torch.arange(WEIGHT_COUNT - 1000 * (rank == 0), dtype=torch.int64)
        + (version * 100 + rank) * 10**7
        for rank in ranks
    }


class _Line:
    """How a rank talks to the driver."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def tell(self, what: str, **details: Any) -> None:
        """Tell the driver something, and when."""
        with self._lock:
            self._connection.send((what, time.monotonic(), details))

    def ask(self, where: str) -> None:
        """Tell the driver where this process is, and stay there until it answers; maybe fail."""
        self.tell(where)
        if self._connection.recv() == "raise":
            raise OSError(errno.ENOSPC, "No space left on device, says the test")


def _tell_of(line: _Line, name: str) -> None:
    """Let this process tell the driver when its operation enters a step in which ranks wait."""
    inner, count = getattr(Operation, name), itertools.count(1)

    def step(self: Operation, *args: Any) -> Any:
        line.tell(f"{name} {next(count)}")
        return inner(self, *args)

    setattr(Operation, name, step)


class HeldPlanner(DefaultSavePlanner):
    """A planner that asks the driver before it plans."""

    line: _Line | None = None

    def create_local_plan(self) -> Any:
        """Plan, once the driver says so."""
        if self.line is not None:
            self.line.ask("local plan")
        return super().create_local_plan()


def save(job: Job, line: _Line) -> str:
    """Save; return what was committed."""
    planner = HeldPlanner()
    planner.line = line if job.is_held else None
    info = ckpt_storage.save(
        {"model": _own(job, job.version)},
        job.url,
        overwrite=True,
        planner=planner,
        **_common(job),
    )
    return f"committed in slot {info.slot}"


def load(job: Job, _line: _Line) -> str:
    """Load this rank's part; return which version it is."""
    target = {name: torch.zeros_like(value) for name, value in _own(job, 0).items()}
    ckpt_storage.load({"model": target}, job.url, **_common(job))
    for version in range(9):
        if all(torch.equal(value, target[name]) for name, value in _own(job, version).items()):
            return f"version {version}"
    raise AssertionError("What was loaded is no version at all.")


def check_and_save(job: Job, line: _Line) -> str:
    """Load what is there, save the next version over it, load that; return the first's version."""
    found = load(job, line)
    save(job, line)
    again = load(job, line)
    if again != f"version {job.version}":
        raise AssertionError(f"Saved version {job.version}, loaded {again}.")
    return found


def save_weights(job: Job, _line: _Line) -> str:
    """Save the model to consolidate, which three ranks hold; return what was committed."""
    state = weights_of(job.version, range(job.rank, 3, job.world_size))
    info = ckpt_storage.save({"model": state}, job.url, overwrite=True, **_common(job))
    return f"committed in slot {info.slot}"


def consolidate(job: Job, _line: _Line) -> str:
    """Consolidate; return which files came out."""
    # A function: names keep their "model.".
    report = ckpt_storage.consolidate(
        job.url, fqn_to_index_mapping=job.files, rename=str, **_common(job)
    )
    return f"published {', '.join(file.name for file in report.files)}"


OPERATIONS: dict[str, Callable[[Job, _Line], str]] = {
    "save": save,
    "load": load,
    "check and save": check_and_save,
    "save weights": save_weights,
    "consolidate": consolidate,
}


def _own(job: Job, version: int) -> dict[str, Any]:
    return state_of(version, range(job.rank, job.rank + 1))


def _common(job: Job) -> dict[str, Any]:
    return {"storage_options": dict(job.storage_options), "timeout": job.timeouts}


def rank_main(job: Job, connection: Connection) -> None:
    """Be one rank: join, wait for the word, run the operation, tell how it ended."""
    _settle(job)
    line = _Line(connection)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    if job.launcher_hosts:  # what torchrun's agent sets
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for name in ("gather", "scatter", "broadcast", "outcome"):
        _tell_of(line, name)
    line.ask("ready")
    try:
        value = OPERATIONS[job.operation](job, line)
    except BaseException as error:  # noqa: BLE001  # DCP's own and interrupts are among the subjects
        line.tell(
            "ended",
            kind=type(error).__name__,
            ours=isinstance(error, ckpt_storage.CheckpointError),
            text="\n".join([str(error), *getattr(error, "__notes__", ())]),
            rank=getattr(error, "rank", None),
            failures=sorted(getattr(error, "failures", ())),
            phase=getattr(error, "phase", None),
            committed=getattr(error, "info", None) is not None,
            trace=traceback.format_exc(),
        )
    else:
        line.tell("ended", kind="returned", ours=True, text=value)


def _settle(job: Job) -> None:
    """Take a session of its own, a log, and the wish to die with who forked it."""
    os.setsid()
    # A shell that runs something in the background lets it ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(job.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
