"""The ranks of the fault matrix: real processes, made fast, that tell where they are.

The nursery is one process that has imported torch and forks each rank from there; a rank ends like
any script, so that all that may keep an interpreter from ending does so here too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist
from fault_cells import TIMEOUTS, Where
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import ckpt_storage
from ckpt_storage.coordination.operation import Operation

ELEMENT_COUNT = 50_000
WEIGHT_COUNT = 800_000
"""Elements of a tensor to consolidate: more than the 5 MiB that S3 wants of a part."""

URL = "s3://bucket/run/step-1"

_PR_SET_PDEATHSIG = 1
_OURS = [
    f"ckpt_storage.{name}"
    for name in ("loads.load", "background.saver", "saves.save", "export.consolidate")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank is to do.

    `number` is new for every group of ranks. `hold` names the call in which this rank stops and
    asks the driver how to go on. `version` is the content that a save saves. `files` says which
    weight file each tensor goes into.
    """

    address: str
    number: int
    operation: str
    rank: int
    world_size: int
    storage_options: Mapping[str, Any]
    port: int
    launcher_hosts: bool
    hold: Where
    version: int
    files: Mapping[str, int] | None
    log_path: str

    @property
    def common(self) -> dict[str, Any]:
        return {"storage_options": dict(self.storage_options), "timeout": TIMEOUTS}

    def own(self, version: int) -> dict[str, Any]:
        return state_of(version, range(self.rank, self.rank + 1))


def state_of(version: int, ranks: range) -> dict[str, Any]:
    """Return the part of the state that `ranks` hold, each in its file; no two are alike."""
    numbers = torch.arange(ELEMENT_COUNT, dtype=torch.int64)
    return {f"w{rank}": numbers + (version * 100 + rank) * 10**6 for rank in ranks}


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
    """How a rank, or a process that it started, talks to the driver; pickles."""

    def __init__(self, address: str, rank: int, number: int) -> None:
        self.address = address
        self.rank = rank
        self.number = number

    def tell(self, what: str, **details: Any) -> None:
        with Client(self.address, "AF_UNIX") as connection:
            connection.send(self._event(what, **details))

    def ask(self, where: str) -> None:
        """Tell the driver where this process is, and stay there until it answers; maybe fail."""
        with Client(self.address, "AF_UNIX") as connection:
            connection.send(self._event(where))
            if connection.recv() == "raise":
                raise OSError(errno.ENOSPC, "No space left on device, says the test")

    def _event(self, what: str, **details: Any) -> tuple[Any, ...]:
        mine = {"pid": os.getpid(), "number": self.number, **details}
        return self.rank, what, time.monotonic(), mine

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        tell_of_waits(self)


def tell_of_waits(line: _Line) -> None:
    """Let this process tell the driver when its operation enters a step in which ranks wait."""
    for name in ("gather", "scatter", "broadcast", "outcome"):
        _wrap(line, name)


def _wrap(line: _Line, name: str) -> None:
    inner = getattr(Operation, name)
    if hasattr(inner, "inner"):
        return
    count = 0

    def step(self: Operation, *args: Any) -> Any:
        nonlocal count
        count += 1
        line.tell(f"{name} {count}")
        return inner(self, *args)

    step.inner = inner  # type: ignore[attr-defined]  # the mark of a wrapped one
    setattr(Operation, name, step)


class _Held:
    """A planner that stops where it was told to; pickles, for savers with a worker process."""

    def __init__(self, line: _Line, where: Where) -> None:
        super().__init__()
        self._line = line
        self._where = where

    def _inner(self, where: Where) -> Any:
        if self._where == where:
            self._line.ask(where)
        return super()

    def create_local_plan(self) -> Any:
        return self._inner("local plan").create_local_plan()

    def create_global_plan(self, plans: Any) -> Any:
        return self._inner("global plan").create_global_plan(plans)


class HeldSavePlanner(_Held, DefaultSavePlanner):
    """A planner of saves."""


class HeldLoadPlanner(_Held, DefaultLoadPlanner):
    """A planner of loads."""


class HeldModel:
    """A `Stateful` whose state is asked for in the call, before the ranks meet."""

    def __init__(self, line: _Line, where: Where, state: dict[str, Any]) -> None:
        self._line = line
        self._where = where
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        if self._where == "call":
            self._line.ask(self._where)
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def save(job: Job, line: _Line, *, is_async: bool = False) -> str:
    """Save, or do it in a background thread; return what was committed."""
    call: Callable[..., Any] = ckpt_storage.save_async if is_async else ckpt_storage.save
    state = {"model": HeldModel(line, job.hold, job.own(job.version))}
    planner = HeldSavePlanner(line, job.hold)
    ended = call(state, URL, overwrite=True, planner=planner, **job.common)
    return f"committed in slot {(ended.result() if is_async else ended).slot}"


def load(job: Job, line: _Line) -> str:
    """Load this rank's part; return which version it is."""
    target = {name: torch.zeros_like(value) for name, value in job.own(0).items()}
    state = {"model": HeldModel(line, job.hold, target)}
    ckpt_storage.load(state, URL, planner=HeldLoadPlanner(line, job.hold), **job.common)
    for version in range(9):
        if all(torch.equal(value, target[name]) for name, value in job.own(version).items()):
            return f"version {version}"
    raise AssertionError("What was loaded is no version at all.")


def check_and_save(job: Job, line: _Line) -> str:
    """Load what is there, save the next version over it, load that; return the first's version."""
    found = load(job, line)
    save(job, line)
    again = load(job, line)
    assert again == f"version {job.version}", f"Saved version {job.version}, loaded {again}."
    return found


def save_weights(job: Job, line: _Line) -> str:
    """Save the model to consolidate, which three ranks hold; return what was committed."""
    state = weights_of(job.version, range(job.rank, 3, job.world_size))
    model = HeldModel(line, "", state)
    return f"committed {ckpt_storage.save({'model': model}, URL, overwrite=True, **job.common)}"


def consolidate(job: Job, line: _Line) -> str:
    """Consolidate; return which files came out."""
    if job.hold == "call":
        line.ask(job.hold)
    asks = [job.hold] if job.hold == "local plan" else []

    def rename(fqn: str) -> str:
        if asks:
            line.ask(asks.pop())
        return fqn

    report = ckpt_storage.consolidate(
        URL, fqn_to_index_mapping=job.files, rename=rename, **job.common
    )
    return f"published {', '.join(file.name for file in report.files)}"


OPERATIONS: dict[str, Callable[[Job, _Line], str]] = {
    "save": save,
    "async save": partial(save, is_async=True),
    "load": load,
    "check and save": check_and_save,
    "save weights": save_weights,
    "consolidate": consolidate,
}


def rank_main(job: Job) -> None:
    """Be one rank: join, wait for the word, run the operation, tell how it ended."""
    _settle(job)
    line = _Line(job.address, job.rank, job.number)
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
    tell_of_waits(line)
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
        line.tell("ended", kind="returned", text=value)


def _settle(job: Job) -> None:
    """Take a session of its own, a log, and the wish to die with the nursery."""
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


def nursery(address: str) -> Job | None:
    """Fork a rank for each job of the driver; return the job in the rank, None in the nursery."""
    torch.set_num_threads(1)
    for name in ("s3fs", "safetensors.torch", *_OURS):
        importlib.import_module(name)  # once, before the forks
    connection = Client(address, "AF_UNIX")
    connection.send((-1, "nursery", time.monotonic(), {}))
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return None
        if (pid := os.fork()) == 0:
            connection.close()
            return job
        threading.Thread(target=_tell_of_end, args=(connection, pid), daemon=True).start()


def _tell_of_end(connection: Connection, pid: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # Messages as small as this one are written at once.
    connection.send((-1, "died", time.monotonic(), {"pid": pid, "code": code}))
