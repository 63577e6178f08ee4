"""Ranks for tests: processes that join a gloo group, run functions together and always end.

A `RankPool` forks them from a process that has imported torch. Functions and their arguments are
pickled, so a function must be defined at the top level of a module.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist

from ckpt_storage.errors import InvalidInputError

__all__ = ["RankOutcome", "RankPool", "RanksFailedError", "run_ranks"]

T = TypeVar("T")

_STOP_TIMEOUT_S = 10.0

_PRELOADED = [
    "torch",
    "torch.distributed.checkpoint",
    "ckpt_storage.loads.load",
    "ckpt_storage.saves.save",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome(Generic[T]):
    """The result of a rank, or its failure.

    `failure` is None for a rank that returned `value`; otherwise the text of its traceback, or how
    it died. `error` is the exception, if it can be pickled.
    """

    rank: int
    value: T | None = None
    failure: str | None = None
    error: BaseException | None = None


class RanksFailedError(AssertionError):
    """At least one rank did not return; `outcomes` has those of all ranks, in order."""

    def __init__(self, outcomes: Sequence[RankOutcome[Any]]) -> None:
        self.outcomes = tuple(outcomes)
        failed = [outcome for outcome in outcomes if outcome.failure is not None]
        texts = [f"rank {outcome.rank}:\n{outcome.failure}" for outcome in failed]
        super().__init__(f"{len(failed)} of {len(outcomes)} ranks failed.\n" + "\n".join(texts))


_Job = tuple[Callable[..., Any], tuple[Any, ...], int, str, float]
"""Function, arguments, world size, the file of the rendezvous and the timeout of a collective."""


class RankPool:
    """`world_size` live processes that run functions as ranks; a context manager.

    Each function has a process group of its own. A process starts with the first job that needs it,
    and again after a job in which a rank died or timed out. All end, with their child processes, on
    `close`, at interpreter exit, and with this process however it ends.
    """

    def __init__(self, world_size: int, *, timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._folder = tempfile.mkdtemp(prefix="rank-pool-")
        self._job_count = 0
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []
        # Runs before multiprocessing's exit handler, which would wait for these processes.
        self._finalize = Finalize(self, _discard, (self._ranks, self._folder), exitpriority=100)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; idempotent."""
        self._finalize()

    def run(
        self,
        function: Callable[..., T],
        *args: object,
        world_size: int | None = None,
        timeout_s: float | None = None,
    ) -> list[T]:
        """Return the results of `function(rank, *args)` on all ranks.

        The default group has the first `world_size` processes. Raises `RanksFailedError` unless
        all ranks return in time.
        """
        outcomes = self.outcomes(function, *args, world_size=world_size, timeout_s=timeout_s)
        if any(outcome.failure is not None for outcome in outcomes):
            raise RanksFailedError(outcomes)
        return [outcome.value for outcome in outcomes]  # type: ignore[misc]  # T may be None

    def outcomes(
        self,
        function: Callable[..., T],
        *args: object,
        world_size: int | None = None,
        timeout_s: float | None = None,
    ) -> list[RankOutcome[T]]:
        """Run `function(rank, *args)` on each rank and return the outcomes.

        A rank that dies or does not return within `timeout_s` has a failure that says so. Raises
        `InvalidInputError` for more ranks than the pool has, or a closed pool.
        """
        count = self.world_size if world_size is None else world_size
        if not 1 <= count <= self.world_size or not self._finalize.still_active():
            what = f"{count} ranks cannot run in a pool of {self.world_size}."
            step = "Make a RankPool that is large enough, and use it before closing it."
            raise InvalidInputError(what, next_step=step)
        self._start(count)
        self._job_count += 1
        rendezvous = str(Path(self._folder) / f"job-{self._job_count}")
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        # A rank that hangs in a collective raises before its job times out.
        job: _Job = (function, args, count, rendezvous, limit_s / 2)
        # Pickled here, so that a pickling error is raised to the caller.
        packed = pickle.dumps(job)
        for _, connection in self._ranks[:count]:
            connection.send_bytes(packed)
        end = time.monotonic() + limit_s
        pending: dict[Any, int] = {self._ranks[rank][1]: rank for rank in range(count)}
        late = "It did not end in time."
        outcomes: list[RankOutcome[T]]
        outcomes = [RankOutcome(rank=rank, failure=late) for rank in range(count)]
        is_broken = False
        while pending and (ready := wait(list(pending), max(0.0, end - time.monotonic()))):
            for readable in ready:
                rank = pending.pop(readable)
                process, connection = self._ranks[rank]
                try:
                    outcomes[rank] = connection.recv()
                except (EOFError, OSError):
                    is_broken = True
                    process.join(_STOP_TIMEOUT_S)
                    died = f"It died with exit code {process.exitcode}."
                    outcomes[rank] = RankOutcome(rank=rank, failure=died)
        if pending or is_broken:
            _kill(self._ranks)
        return outcomes

    def _start(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        for rank in range(len(self._ranks), count):
            ours, theirs = context.Pipe()
            # The fork server has the environment of its start.
            args = (rank, theirs, dict(os.environ))
            process = context.Process(target=_rank_main, args=args, name=f"rank {rank}")
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def run_ranks(
    world_size: int, function: Callable[..., T], *args: object, timeout_s: float = 60.0
) -> list[RankOutcome[T]]:
    """Run `function(rank, *args)` on `world_size` new processes that form a gloo group.

    Returns the outcomes, in order of rank; all processes have ended.
    """
    with RankPool(world_size, timeout_s=timeout_s) as pool:
        return pool.outcomes(function, *args)


def _discard(ranks: list[tuple[ForkServerProcess, Connection]], folder: str) -> None:
    """End the processes and their children, and remove the folder."""
    for _, connection in ranks:
        connection.close()
    end = time.monotonic() + _STOP_TIMEOUT_S
    for process, _ in ranks:
        process.join(max(0.0, end - time.monotonic()))
    _kill(ranks)
    shutil.rmtree(folder, ignore_errors=True)


def _kill(ranks: list[tuple[ForkServerProcess, Connection]]) -> None:
    """Kill the processes and their children, and clear the list."""
    for process, connection in ranks:
        connection.close()
        if process.pid is not None:
            process.kill()
            # Its children outlive it. Until `setsid` it has no process group of its own.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    for process, _ in ranks:
        process.join(_STOP_TIMEOUT_S)
        process.close()
    ranks.clear()


def _rank_main(rank: int, connection: Connection, environment: dict[str, str]) -> None:
    """Run jobs until the other end of the pipe is closed."""
    os.environ.clear()
    os.environ.update(environment)
    # A process group of its own, so that children of a job can be killed with it.
    os.setsid()
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    # Imported objects stay: without them, a collection after each job takes little time.
    gc.freeze()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    while True:
        try:
            packed = connection.recv_bytes()
        except EOFError:
            # An orderly exit of torch takes seconds; the parent kills children of jobs.
            os._exit(0)
        connection.send(_outcome(rank, packed))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _outcome(rank: int, packed: bytes) -> RankOutcome[Any]:
    """Run a job; return its outcome, which can be pickled."""
    try:
        value = _run_in_group(rank, *pickle.loads(packed))  # from our own parent
        pickle.dumps(value)
        return RankOutcome(rank=rank, value=value)
    except BaseException as error:  # noqa: BLE001  # DCP's own is a BaseException
        copy = None
        with contextlib.suppress(Exception):  # any failure means: no pickle
            copy = pickle.loads(pickle.dumps(error))  # our own bytes
        return RankOutcome(rank=rank, failure=traceback.format_exc(), error=copy)
    finally:
        # Garbage of a job, such as shared memory, must not accumulate.
        gc.collect()


def _run_in_group(
    rank: int,
    function: Callable[..., T],
    args: tuple[Any, ...],
    world_size: int,
    rendezvous: str,
    timeout_s: float,
) -> T:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(rendezvous, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        # A rank that returns early would break connections that others still establish.
        dist.barrier()
        return function(rank, *args)
    finally:
        dist.destroy_process_group()
