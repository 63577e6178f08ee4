"""States, planners that hold a save in a given step, and processes, for tests of the saver.

A save is held where a test needs it by a patch, in thread mode in this process, in process mode in
the worker: by a planner, when it is unpickled there. For the outcome it is the trainer that waits.
A process that is held writes its process id into a folder, and resumes when `go` is called.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from dcp_cases import seeded
from limits import HANG_S
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ckpt_storage import AsyncSaver, SaveHandle, Timeouts, load
from ckpt_storage.background import worker_process
from ckpt_storage.background.priorities import IoClass
from ckpt_storage.background.start import run_worker
from ckpt_storage.commit import assembly
from ckpt_storage.coordination.member import Member
from ckpt_storage.saves import shards
from ckpt_storage.saves.rank_save import RankSave

MODES: tuple[Literal["thread", "process"], ...] = ("thread", "process")

SILENCE_S = 3.0
"""For tests of ranks and workers that fall silent."""

Where = Literal["local plan", "global plan", "write", "commit", "committed", "outcome"]


def quick_timeouts(**other: float) -> Timeouts:
    """Return timeouts that only a hanging test exceeds, but for the `other` phases."""
    phases = dict.fromkeys(("plan", "stage", "write", "commit", "silence"), HANG_S / 2)
    return Timeouts(**{**phases, **other})


def state_of(rank: int, step: int, *, count: int = 1000) -> dict[str, Any]:
    """Return what a rank has in a step; no two are alike."""
    return {
        f"w{rank}": seeded(1000 * step + rank, count),
        f"words{rank}": {"step": step, "list": [step, "a"]},
    }


def loaded(url: str | Path, rank: int, *, count: int = 1000) -> dict[str, Any]:
    """Return what a rank has in a checkpoint, read without the other ranks."""
    target = {f"w{rank}": torch.zeros(count), f"words{rank}": {"step": -1, "list": [-1, ""]}}
    alone: Any = None
    if dist.is_initialized():
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    load(target, url, process_group=alone)
    return target


def until(look: Callable[[], object], what: str, limit_s: float = HANG_S) -> None:
    end = time.monotonic() + limit_s
    while not look():
        if time.monotonic() > end:
            raise AssertionError(f"It never happened: {what}.")
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


_SHARED = "/dev/shm/"  # noqa: S108  # what is looked for
_GONE = " (deleted)"


def named_memory(pid: int) -> set[str]:
    """Return the files in `/dev/shm` that a process has mapped or open, without unlinked files.

    By process: other tests and programs come and go there meanwhile.
    """
    process = Path(f"/proc/{pid}")
    paths = {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
    for link in (process / "fd").iterdir():
        try:
            paths.add(str(link.readlink()))
        except FileNotFoundError:  # closed meanwhile; also the descriptor that lists this folder
            continue
    return {path for path in paths if path.startswith(_SHARED) and not path.endswith(_GONE)}


def left_of(paths: set[str]) -> set[str]:
    return {path for path in paths if os.path.lexists(path)}


@dataclass(frozen=True, slots=True)
class Hold:
    """A step of one rank's save, held until `go` is called, in any process."""

    folder: str | Path
    where: Where
    rank: int

    @property
    def _mark(self) -> Path:
        return Path(self.folder) / f"at-{self.where.replace(' ', '-')}-{self.rank}"

    @property
    def _go(self) -> Path:
        return Path(self.folder) / f"go-{self.rank}"

    def here(self) -> None:
        temporary = self._mark.with_suffix(".tmp")
        temporary.write_text(str(os.getpid()), encoding="ascii")
        temporary.rename(self._mark)
        until(self._go.exists, f"the call to resume {self.where}")

    def reached(self) -> int:
        """Wait until somebody is held, and return the id of the process."""
        until(self._mark.exists, f"rank {self.rank} comes to {self.where}")
        return int(self._mark.read_text(encoding="ascii"))

    def go(self) -> None:
        self._go.touch()


_current: list[Hold] = []
"""What is held next in this process; each hold takes place once."""


def hold_here(hold: Hold) -> None:
    _patch()
    _current[:] = [hold]


def _pass(where: Where | None) -> None:
    if _current and _current[0].where == where:
        _current.pop().here()


@functools.cache
def _patch() -> None:
    """Let saves look whether they are held; once a process."""
    _stop(RankSave, "propose", "local plan")
    _stop(shards, "write_shard", "write")
    answer = Member.answer

    def stopping(self: Member, *decision: object, **options: Any) -> Any:
        if self._rounds.is_commit:
            _pass("outcome")
        return answer(self, *decision, **options)

    Member.answer = stopping  # type: ignore[method-assign]  # for the process
    _stop(assembly, "commit", "commit", "committed")


def _stop(holder: Any, name: str, before: Where, after: Where | None = None) -> None:
    inner = getattr(holder, name)

    @functools.wraps(inner)
    def stopping(*args: Any, **options: Any) -> Any:
        _pass(before)
        result = inner(*args, **options)
        _pass(after)
        return result

    setattr(holder, name, stopping)


class HeldPlanner(DefaultSavePlanner):
    """A planner whose save is held, in this process or in the worker it is sent to."""

    def __init__(self, hold: Hold) -> None:
        super().__init__()
        self._hold = hold

    def __getstate__(self) -> dict[str, Any]:
        if self._hold.where != "outcome":
            _current.clear()  # it is the worker that is held
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._hold.where != "outcome":
            hold_here(self._hold)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _pass("global plan")
        return super().create_global_plan(all_plans)


def held(hold: Hold) -> HeldPlanner:
    hold_here(hold)
    return HeldPlanner(hold)


class BrokenPlanner(DefaultSavePlanner):
    """A planner that fails once the ranks have planned."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:  # noqa: ARG002  # torch's
        raise ZeroDivisionError("the planner divides by zero")


class ExitingPlanner(DefaultSavePlanner):
    """A planner that wants to end the process that plans."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:  # noqa: ARG002  # torch's
        sys.exit(3)


class ForkedWorker:
    """A worker that is forked from a server which has imported torch: as `subprocess.Popen`."""

    gate: Path | None = None
    """It starts once this file exists."""

    def __init__(self, pipe_fd: int, nice: int | None, io_class: IoClass | None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ckpt_storage.background.worker"])
        pipe = Connection(os.dup(pipe_fd))
        self._process = context.Process(
            target=_run_worker, args=(self.gate, pipe, nice, io_class), daemon=True
        )
        self._process.start()
        pipe.close()
        self.pid = self._process.pid
        self.kill = self._process.kill
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._process.exitcode if self.returncode is None else self.returncode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return code


def _run_worker(
    gate: Path | None, pipe: Connection, nice: int | None, io_class: IoClass | None
) -> None:
    if gate is not None:
        until(gate.exists, "the start of the worker")
    run_worker(pipe.fileno(), os.getppid(), nice, io_class)


def quick_saver(mode: Literal["thread", "process"], **options: Any) -> AsyncSaver:
    """Return a saver with deadlines that suit a test, and workers that start in no time."""
    worker_process.__dict__["start_process"] = ForkedWorker
    return AsyncSaver(mode=mode, **{"timeout": quick_timeouts(), **options})


def save_step(
    saver: AsyncSaver, folder: str | Path, rank: int, step: int, **options: Any
) -> SaveHandle:
    return saver.save(
        state_of(rank, step), f"{folder}/step-{step}", **{"sync_files": False, **options}
    )


def summary_of(error: BaseException | None) -> tuple[str, int | None, str | None]:
    return (type(error).__name__, getattr(error, "rank", None), getattr(error, "phase", None))


def save_spoilt(state: dict[str, Any], path: Path, saver: AsyncSaver | None = None) -> None:
    """Save in a thread, and overwrite all tensors before anything is written."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        saver = saver or stack.enter_context(quick_saver("thread"))
        hold_here(hold := Hold(folder, "write", 0))
        handle = saver.save(state, path, sync_files=False)
        for tensor in flatten_state_dict(state)[0].values():
            if isinstance(tensor, torch.Tensor):
                raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                raw.fill_(0xA5)
        hold.reached()
        hold.go()
        handle.result(HANG_S)
