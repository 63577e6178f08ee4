"""Saves in the background: `save_async` and `AsyncSaver`. All ranks make the same calls."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_storage.coordination.failures import as_checkpoint_errors
from ckpt_storage.coordination.group import RankGroup, group_of
from ckpt_storage.errors import CheckpointError, InvalidInputError, PhaseTimeoutError
from ckpt_storage.options import (
    DEFAULT_GROUPS,
    PageCache,
    Progress,
    Replicas,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    UnsafeValues,
)
from ckpt_storage.saves.options import Chained, SaveOptions
from ckpt_storage.store import anchored, redacted_url

from .handle import SaveHandle, SaveStatus, check_process
from .interpreter_exit import flush, flush_at_exit
from .priorities import IoClass, check_priorities
from .save_queue import PendingSave, SaveQueue
from .staging import StagingJob
from .worker_process import START_S, WorkerProcess
from .worker_save import pack_options

Mode = Literal["process", "thread"]
OnError = Literal["raise", "warn"]

_SLACK_S = 60.0
_PENDING_OF_FUNCTION = 2

EXIT_TIMEOUT_S = 600.0
"""How long an interpreter that ends waits for saves in flight, as long as they make progress."""


class AsyncSaver:
    """Saves in the background, in order; a context manager that every rank of the group makes.

    `save` copies the state into reused host memory and returns; the rest happens in a thread, or
    in a worker process of this rank. Saves of one saver commit in the order of their calls.
    No collective runs on any process group, and every wait has a deadline. If a worker is killed, a
    rank dies or a storage hangs, the save fails with an error that names it; training can go on.

    Args:
        process_group: the ranks that save; default: the default group, else this process.
        mode: "process": each rank starts a worker now, and another worker if that dies. The
            trainer makes the local plan and copies the state; the worker writes it, and the worker
            of rank 0 also makes the global plan and commits. A consolidation runs in the trainer,
            in the saver's thread. If a worker is killed before its shard is written, or the worker
            of rank 0 before it commits, the save fails on all ranks; if the worker of rank 0 is
            killed in the commit, the storage is asked for the outcome. The script must be
            importable (`if __name__ == "__main__":`), planners must pickle. "thread": a thread of
            this process.
        timeout: seconds, `timedelta` or `Timeouts`; default an hour a phase
            (`plan`: four minutes).
        max_pending: saves that may be in flight; the next call of `save` waits for the oldest.
            Each needs host memory for one state.
        on_error: "raise": the next `wait`, `close` or `save` raises the error of a failed save,
            unless `result` or `exception` of its handle was called; `save` raises it once the new
            save has begun, so that no save is lost to an earlier one. "warn": the error is logged.
            `SaveHandle.result` raises it in both cases.
        exit_timeout_s: how long an ending interpreter waits for saves that make progress.
        check_staging: for debugging: compare each copy with the state at the call, and fail the
            save, naming the tensors, if something wrote to them while they were copied. `save`
            hashes the state before it returns, which takes longer than the copy.
        worker_nice: the nice value of the worker, from -20 to 19, so that it takes less processor
            time from the training and its data loaders (10, say); default: that of the trainer.
        worker_ionice: "best-effort" (at the lowest level) or "idle": the class in which the kernel
            orders the worker's disk accesses, on Linux and with a scheduler that has classes. What
            the system refuses is logged.
        name: the same on every rank, and different for savers that are open at the same time.

    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        mode: Mode = "process",
        timeout: float | timedelta | Timeouts | None = None,
        max_pending: int = 1,
        on_error: OnError = "raise",
        exit_timeout_s: float = EXIT_TIMEOUT_S,
        check_staging: bool = False,
        worker_nice: int | None = None,
        worker_ionice: IoClass | None = None,
        name: str = "default",
    ) -> None:
        for name_, value, is_right, right in (
            ("mode", mode, mode in {"process", "thread"}, "'process' or 'thread'"),
            ("on_error", on_error, on_error in {"raise", "warn"}, "'raise' or 'warn'"),
            ("max_pending", max_pending, max_pending >= 1, "1 or more"),
            ("exit_timeout_s", exit_timeout_s, 0 <= exit_timeout_s < math.inf, "finite seconds"),
        ):
            if not is_right:
                raise InvalidInputError(f"{name_} is {value!r}.", next_step=f"Give {right}.")
        check_priorities(worker_nice, worker_ionice, has_worker=mode == "process")
        self._timeouts = Timeouts.of(timeout)
        self._on_error = on_error
        self._max_pending = max_pending
        ranks = RankGroup.of(process_group, lane=f"async/{name}", is_owned=True)
        silence_s = self._timeouts.silence
        start_worker = None
        if mode == "process":
            start_worker = partial(
                WorkerProcess,
                ranks.global_rank,
                ranks.rank,
                silence_s,
                nice=worker_nice,
                io_class=worker_ionice,
            )
        self._queue = SaveQueue(ranks, start_worker)
        self._saves: list[SaveStatus] = []
        # Errors of saves that have ended, for the next call to raise.
        self._failures: list[CheckpointError] = []
        self._closed = False
        self._keeps_arenas = True
        # A signal handler may save in the middle of a save.
        self._turn = threading.RLock()
        self._exit_timeout_s = exit_timeout_s
        self._checks_staging = check_staging
        # Does not wait: the saves in flight of a saver that is collected end, then its worker.
        self._finalizer = weakref.finalize(self, self._queue.close)
        self._finalizer.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            flush(self._saves)
        try:
            self.close(None if error is None else 0)
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"Closing the saver failed too: {failure}")

    def save(  # the public surface, all keyword-only
        self,
        state: Mapping[str, Any],
        url: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        step: int | None = None,
        consolidate: Chained = None,
        storage_options: Mapping[str, Any] | None = None,
        planner: SavePlanner | None = None,
        progress: Progress = None,
        thread_count: int | None = None,
        part_bytes: int | None = None,
        memory_limit_bytes: int | None = None,
        page_cache: PageCache = "keep",
        sync_files: bool = True,
        stock_metadata: StockMetadata = "auto",
        unsafe_values: UnsafeValues = "warn",
        replicas: Replicas = "warn",
        groups: Sequence[str] = DEFAULT_GROUPS,
        base: str | os.PathLike[str] | None = None,
        stable: str | Sequence[str] = (),
        retry: RetryPolicy | None = None,
        block_until_staged: bool = True,
    ) -> SaveHandle:
        """Begin to save `state` to `url`; all ranks call. Arguments as for `ckpt_storage.save`.

        A `planner` is copied shallowly, so that saves in flight do not share its state.

        Returns once the state is copied and may be changed; with `block_until_staged=False` at
        once: then whatever writes to the state, the optimizer or a forward pass that updates
        buffers, runs inside `step_guard` or after `handle.wait_staged`.

        Raises `InvalidInputError` for a state that cannot be staged, and the save fails on all
        ranks; `PhaseTimeoutError` if `max_pending` earlier saves do not end in time. With
        `on_error="raise"` it raises the error of an earlier save, with a note that this save has
        begun all the same: do not repeat the call; `wait` and `close` wait for it.
        """
        options = SaveOptions.of(locals(), timeouts=self._timeouts).with_step_of(state)
        handle = self.begin(state, url, options, block_until_staged=block_until_staged)
        self.raise_earlier(handle)
        return handle

    def begin(
        self,
        state: Mapping[str, Any],
        url: str | os.PathLike[str],
        options: SaveOptions,
        *,
        block_until_staged: bool,
        prepare: Callable[[SaveOptions], SaveOptions] = lambda options: options,
    ) -> SaveHandle:
        """Begin a save with the options that `prepare` returns, once there is room for it.

        An error of `prepare` fails the save on all ranks.

        Errors of earlier saves are kept for `raise_earlier`, `wait` and `close`.
        """
        self._check_process()
        self._check_open()
        # The deadlines of all phases, and the start of a worker, of this save and earlier saves.
        t, rank = options.timeouts, self._queue.ranks.global_rank
        save_s = t.stage + 2 * t.plan + 2 * t.write + 2 * t.commit + t.consolidate + t.silence
        save_s += START_S if self._queue.has_worker else 0.0
        limit_s = (len(self._saves) + 1) * save_s + _SLACK_S
        if not self._turn.acquire(timeout=limit_s):
            raise PhaseTimeoutError(
                f"The save to {redacted_url(url)} waited {limit_s:g} s for another thread's save.",
                timeout_s=limit_s,
                rank=rank,
                phase="stage",
                next_step="Call save in one thread, the same saves in the same order on all ranks.",
            )
        try:
            status = SaveStatus(redacted_url(url), rank, limit_s=limit_s)
            if not self._keeps_arenas:
                status.add_done_callback(self._release_idle_arenas)
            job = PendingSave(status=status, options=options, url=url)
            try:
                self._make_room(status, t)
                with as_checkpoint_errors(f"the staging for {status.url}", rank):
                    job.options = prepare(options)
                    self._stage(job, state, block_until_staged=block_until_staged)
            except BaseException as error:
                # The other ranks wait for this rank in this save: the queue sends them the error.
                status.mark_outcome_consumed()  # raised here, and not again by the next save
                job.refuse(error)
                self._queue.put(job)
                raise
            self._queue.put(job)
            return status
        finally:
            self._turn.release()

    def raise_earlier(self, begun: SaveHandle) -> None:
        """Raise the error of an earlier save, if one failed; `begun` is the save that goes on."""
        self._raise_failures(f"The save to {begun.url} has begun all the same, and goes on.")

    def _make_room(self, status: SaveStatus, timeouts: Timeouts) -> None:
        """Wait until another save may be in flight. Raises `PhaseTimeoutError`."""
        try:
            # Errors of these saves only, because every rank waits for the same saves here.
            surplus = max(0, len(self._saves) - self._max_pending + 1)
            self._settle(self._saves[:surplus], None)
        finally:
            self._saves.append(status)
            flush_at_exit(status, self._exit_timeout_s, timeouts)

    def _stage(
        self, job: PendingSave, state: Mapping[str, Any], *, block_until_staged: bool
    ) -> None:
        queue = self._queue
        # Relative paths are below the trainer's working folder at the time of the call.
        job.url, job.options = anchored(job.url), job.options.anchored()
        planner = job.options.planner
        if planner is not None:
            planner = _shallow_copy(planner)
        if queue.has_worker:
            # The planner that will be set up holds the state, and is not sent to the worker.
            job.packed_options = pack_options(job.options)
        else:
            job.options = replace(job.options, planner=planner)
        job.staging = self._plan(state, planner, job.status.url, is_checked=self._checks_staging)
        if block_until_staged:
            job.staging.run()
            job.status.mark_staged()
        else:
            job.staging.start()

    def _plan(
        self,
        state: Mapping[str, Any],
        planner: SavePlanner | None,
        url: str = "",
        *,
        is_checked: bool = False,
    ) -> StagingJob:
        ranks = self._queue.ranks
        return StagingJob(
            *(state, self._queue.arenas, planner),
            url=url,
            rank=ranks.rank,
            world_size=ranks.world_size,
            is_checked=is_checked,
        )

    def warm_up(self, state: Mapping[str, Any], *, planner: SavePlanner | None = None) -> None:
        """Allocate the memory of `max_pending` saves of `state` now; optional, saves nothing.

        The first saves then take no longer than later saves. Each rank may call it or not: it sends
        nothing to other ranks. The cost is that of a first copy without the copying: the kernel
        clears `max_pending` times the bytes of the state, and the driver page-locks them if tensors
        are on a CUDA device. The memory stays until `close`. `planner` is as for `save`.

        Raises `InvalidInputError` for a state that cannot be staged, `CheckpointError` if the
        memory cannot be allocated.
        """
        self._check_process()
        self._check_open()
        count = self._max_pending - sum(not save.done() for save in self._saves[:])
        if count <= 0:
            return
        with as_checkpoint_errors("the warm-up", self._queue.ranks.rank):
            job = self._plan(state, None if planner is None else _shallow_copy(planner))
            job.warm_up(self._queue.arenas, count)

    @contextlib.contextmanager
    def step_guard(self) -> Iterator[None]:
        """Wait until no state is being copied, then run the block, which may write to the state.

        With `block_until_staged=False` the first code that writes to a saved tensor belongs in it:
        the optimizer's step, and a forward pass that updates buffers (running statistics, averages,
        caches). Raises `PhaseTimeoutError` if the copying does not end in time.
        """
        self._check_process()
        for save in self._saves[:]:
            try:
                save.wait_staged(self._timeouts.stage)
            except CheckpointError:
                # A copy that failed has ended; `result` and the next `save` raise its error.
                if not save.is_staged():
                    raise
        yield

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save has ended, each at most `timeout` seconds.

        Raises `PhaseTimeoutError` naming a save that has not ended, and with `on_error="raise"` the
        first error that no caller has got from its handle.
        """
        self._check_process()
        try:
            self._settle(self._saves[:], timeout)
        except PhaseTimeoutError as late:
            if not self._failures:
                raise
            self._failures[-1].add_note(str(late))
        self._raise_failures()

    def close(self, timeout: float | None = None) -> None:
        """Wait for all saves as `wait`, then end the worker and free the memory; idempotent."""
        if self._closed:
            return
        self._check_process()
        try:
            self.wait(timeout)
        finally:
            self._closed = True
            self._finalizer()

    @property
    def worker_pid(self) -> int | None:
        """Process id of this rank's worker; None in thread mode, and while no worker runs."""
        worker = self._queue.worker
        return None if worker is None else worker.pid

    def _check_process(self) -> None:
        check_process(self._queue.process_id, "The AsyncSaver")

    def _release_idle_arenas(self, _: SaveHandle) -> None:
        if all(save.done() for save in self._saves[:]):
            self._queue.arenas.free_unused()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError(
                "The AsyncSaver is closed.", next_step="Make a new one, or save before close()."
            )

    def _settle(self, saves: list[SaveStatus], timeout: float | None) -> None:
        """Wait until saves have ended, and keep their errors. Raises `PhaseTimeoutError`."""
        for save in saves:
            error = save.await_end(timeout)
            with contextlib.suppress(ValueError):  # another thread waited for it as well
                self._saves.remove(save)
            if error is not None and not save.outcome_is_consumed and self._on_error == "raise":
                save.mark_outcome_consumed()
                self._failures.append(error)

    def _raise_failures(self, *notes: str) -> None:
        """Raise the first error that was not raised yet; the others are its notes."""
        failures, self._failures = self._failures, []
        if failures:
            others = (f"Another save failed, too: {error}" for error in failures[1:])
            for note in (*notes, *others):
                failures[0].add_note(note)
            raise failures[0]


def _shallow_copy(planner: SavePlanner) -> SavePlanner:
    """Return a planner with the same attributes, which can be set up apart from the first.

    Not `copy.copy`: a planner's own `__getstate__` is for the worker process.
    """
    copied: SavePlanner = object.__new__(type(planner))
    state = object.__getstate__(planner)
    for attributes in state if isinstance(state, tuple) else (state,):
        for name, value in (attributes or {}).items():
            object.__setattr__(copied, name, value)
    return copied


_savers: weakref.WeakKeyDictionary[object, AsyncSaver] = weakref.WeakKeyDictionary()
_lock = threading.RLock()

# A forked child has none of its parent's threads, and makes savers of its own.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release)
os.register_at_fork(after_in_child=_savers.clear)
os.register_at_fork(after_in_child=_lock.release)


def save_async(  # all that `save` takes, and one argument more
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    overwrite: bool = False,
    step: int | None = None,
    consolidate: Chained = None,
    storage_options: Mapping[str, Any] | None = None,
    planner: SavePlanner | None = None,
    progress: Progress = None,
    thread_count: int | None = None,
    part_bytes: int | None = None,
    memory_limit_bytes: int | None = None,
    page_cache: PageCache = "keep",
    sync_files: bool = True,
    stock_metadata: StockMetadata = "auto",
    unsafe_values: UnsafeValues = "warn",
    replicas: Replicas = "warn",
    groups: Sequence[str] = DEFAULT_GROUPS,
    base: str | os.PathLike[str] | None = None,
    stable: str | Sequence[str] = (),
    retry: RetryPolicy | None = None,
    block_until_staged: bool = True,
) -> SaveHandle:
    """Begin to save `state` to `url` in a thread of its own; all ranks of the group call.

    As `AsyncSaver(mode="thread").save`, with one saver for each group: at most two saves are in
    flight, and they commit in the order of the calls. The copies of the state are freed when no
    save is in flight; an `AsyncSaver` keeps its memory for the next save, which is faster.
    Arguments as for `ckpt_storage.save`. The handle's `result` raises the error of a failed save,
    which is also logged.
    """
    options = SaveOptions.of(locals(), timeouts=Timeouts.of(timeout)).with_step_of(state)
    # Without a process group the key is the class.
    group: object = group_of(process_group) or AsyncSaver
    with _lock:
        saver = _savers.get(group)
        if saver is None:
            saver = _savers[group] = AsyncSaver(
                process_group,
                mode="thread",
                max_pending=_PENDING_OF_FUNCTION,
                on_error="warn",
                name="save_async",
            )
            # No caller closes this saver.
            saver._keeps_arenas = False  # noqa: SLF001  # of this module
    return saver.begin(state, url, options, block_until_staged=block_until_staged)
