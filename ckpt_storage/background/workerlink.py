"""The trainer's end of its worker process: starts it, sends saves, watches it, speaks for it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait

import torch.distributed as dist

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import COORDINATOR, as_checkpoint_errors
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.coordination.signs import Sign
from ckpt_storage.coordination.storeboard import StoreAddress, StoreBoard, store_of
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    ConsolidationError,
    InvalidInputError,
    RankFailedError,
    StorageError,
)
from ckpt_storage.options import Phase
from ckpt_storage.progress import reporting
from ckpt_storage.saves.saving import SaveOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.timed import TimedPool, halted

from .handle import SaveStatus
from .stagewire import PackedState, pack
from .staging import StagedState
from .worker import Beat, Cancel, Outcome, Request, Setup
from .workerprocess import WorkerProcess

log = logging.getLogger("ckpt_storage")

_LOOK_S = 0.1
_RESOLVE_S = 1.5
_SHOWN = frozenset({"write", "commit", "consolidate"})
"""Phases whose bytes users are shown; those of a commit are what was written."""


class WorkerLink:
    """One rank's worker, started at once and again after it died; used by one save at a time.

    `coordinator` is over the board that the workers use, to speak for a worker that is gone.
    Raises `InvalidInputError` where no worker can be had.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, lane: str, *, silence_s: float
    ) -> None:
        group_coordinator = Ranks.of(process_group, lane=lane)
        rank, world_size = group_coordinator.rank, group_coordinator.world_size
        address: StoreAddress | None = None
        self.coordinator = Ranks.alone()
        if world_size > 1:
            group = process_group or dist.group.WORLD
            assert group is not None  # noqa: S101  # or the coordinator were a lone one
            address = StoreAddress.of(store_of(group))
            # The stores' prefixes cannot be read back: the workers' keys have one of their own.
            lane = f"ckpt_storage/workers/{group.group_name}/{lane}"
            board = StoreBoard(address.connect, lane)
            self.coordinator = Ranks(board, rank=rank, world_size=world_size)
        self._setup = Setup(
            address=address,
            lane=lane,
            rank=rank,
            world_size=world_size,
            log_level=log.getEffectiveLevel(),
        )
        self._silence_s = silence_s
        self._pool = TimedPool("ckpt-storage pipe")
        self._sending = threading.Lock()
        self._child: WorkerProcess | None = None
        try:
            self._child = WorkerProcess(self._setup)
        except InvalidInputError:
            raise
        except CheckpointError as error:
            # The next save tries again, and tells the other ranks.
            log.warning("%s", error)

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if one runs."""
        child = self._child
        return child.pid if child is not None and child.is_alive() else None

    def close(self) -> None:
        """End the worker; after its last save, idempotent."""
        self._end_child()
        self.coordinator.close()
        self._pool.close()

    def save(
        self,
        status: SaveStatus,
        staged: StagedState,
        options: SaveOptions,
        *,
        url: str | os.PathLike[str],
        number: int,
    ) -> CheckpointInfo:
        """Let the worker run one save, and return or raise how it ended.

        `number` counts the saves of this saver, the same on every rank.
        A worker that dies, or gives no sign of life, is ended, and the other ranks are told.
        """
        run = _Run(number=number, status=status, options=options, url=url)
        with self._told(run):
            # Callables of the trainer stay here: they get what the worker's beats tell.
            sent = dataclasses.replace(options, progress=None)
            request = Request(number=run.number, url=os.fspath(run.url), options=_pickled(sent))
            packed = pack(staged)
            child = self._live_child()
        try:
            try:
                outcome = self._attempt(child, request, packed, run)
            except _GoneError as gone:
                if run.beat is not None:
                    raise
                # It never took the save up, so no other rank knows of it.
                log.warning("The worker process of rank %d %s.", status.rank, gone)
                self._end_child()  # it may be stopped, not dead
                with self._told(run):
                    child = self._live_child()
                outcome = self._attempt(child, request, packed, run)
        except _GoneError as gone:
            return self._after_death(child, run, str(gone))
        if not outcome.is_clean:
            # A thread of it may still read the state that is given up now.
            self._end_child()
        if outcome.error is not None:
            raise outcome.error
        assert outcome.info is not None  # noqa: S101  # there is one or the other
        return outcome.info

    @contextlib.contextmanager
    def _told(self, run: _Run) -> Iterator[None]:
        """Tell the other ranks of what fails inside: no worker has the save yet."""
        try:
            what = f"the save to {run.status.url}"
            with as_checkpoint_errors(what, run.status.rank, in_background=True):
                yield
        except CheckpointError as error:
            error.phase = error.phase or "stage"
            self._stand_in(run, error)
            raise

    def _attempt(
        self, child: WorkerProcess, request: Request, packed: PackedState, run: _Run
    ) -> Outcome:
        """Hand a save to the worker and wait for its outcome. Raises `_GoneError`."""
        run.status.on_cancel(lambda error: self._cancel(child, run.number, error))
        with run.shown():
            try:
                self._pool.run(
                    lambda: self._send(child, request, packed),
                    timeout_s=self._silence_s + child.slack_s,
                    what="handing over",
                    repeatable=False,
                    cancelled=lambda: not child.is_alive(),
                )
            except (OSError, StorageError):
                raise _GoneError(child.how()) from None
            return self._outcome(child, run)

    def _send(self, child: WorkerProcess, request: Request, packed: PackedState) -> None:
        with self._sending:
            child.control.send(request)
        child.sender.send(packed)

    def _cancel(self, child: WorkerProcess, number: int, error: CheckpointError) -> None:
        with self._sending, contextlib.suppress(OSError):
            child.control.send(Cancel(number=number, error=error))

    def _outcome(self, child: WorkerProcess, run: _Run) -> Outcome:
        """Wait for the outcome, watching exit code, beats and the sum of all deadlines."""
        heard_s = time.monotonic()
        end_s = heard_s + run.limit_s()
        while True:
            halted()
            ready = wait([child.control, child.sentinel], _LOOK_S)
            now = time.monotonic()
            if child.control in ready:
                try:
                    message = child.control.recv()
                except (EOFError, OSError):
                    raise _GoneError(child.how()) from None
                if message.number != run.number:
                    continue
                if isinstance(message, Outcome):
                    return message
                child.has_beaten, heard_s = True, now
                run.take(message)
            elif child.sentinel in ready:
                raise _GoneError(child.how())
            quiet_s = self._silence_s + child.slack_s
            if now - heard_s > quiet_s:
                raise _GoneError(f"gave no sign of life for {quiet_s:g} s and was ended")
            if now > end_s:
                raise _GoneError(f"did not end the save within {run.limit_s():g} s and was ended")

    def _after_death(self, child: WorkerProcess, run: _Run, how: str) -> CheckpointInfo:
        pid = child.pid
        self._end_child()
        rank, phase = self.coordinator.rank, run.phase
        error: CheckpointError = RankFailedError(
            f"The worker process {pid} of rank {rank} {how} in the {phase} phase of the save to "
            f"{run.status.url}.",
            failures={rank: how},
            rank=rank,
            phase=phase,
            next_step="See why (out of memory?). Training can go on, and the next save starts a "
            "new worker."
            if run.beat is not None
            else "It never took the save up: see what it printed. The trainer's script must be "
            "importable (`if __name__ == '__main__':`); mode='thread' needs no worker.",
        )
        info = run.beat.info if run.beat is not None else None
        if info is not None:
            self._stand_in(run, error)
            raise _unexported(run, error, info)
        if rank == COORDINATOR and phase == "commit":
            info, error = self._look_up(run, error)
        word = self._stand_in(run, error, info)
        if rank != COORDINATOR and phase != "plan":
            # It had perhaps written all, and the coordinator committed.
            info, error = self._judge(run, error, word)
        if info is None:
            raise error
        if run.options.consolidate:
            raise _unexported(run, error, info)
        log.warning("%s It had committed before.", error)
        return info

    def _judge(
        self, run: _Run, error: CheckpointError, word: CheckpointInfo | CheckpointError | None
    ) -> tuple[CheckpointInfo | None, CheckpointError]:
        """Return what became of a save, given the coordinator's word on it, if there was one."""
        if isinstance(word, CheckpointInfo):
            return word, error
        if word is None:
            return self._look_up(run, error)
        return None, word if isinstance(word, CommitUnknownError) else error

    def _look_up(
        self, run: _Run, error: CheckpointError
    ) -> tuple[CheckpointInfo | None, CheckpointError]:
        """Find out whether a worker that died while it committed had done so."""
        save_id = run.beat.save_id or "" if run.beat is not None else ""
        try:
            settings = run.options.settings(run.url)
            record = settings.record_of(save_id, Deadline("commit", _RESOLVE_S))
        except CheckpointError as failure:
            error.add_note(f"Looking for the outcome failed too: {failure}")
        else:
            if record is not None:
                return CheckpointInfo.of(settings.base.url, record), error
        unknown = CommitUnknownError(
            f"{error} Whether save {save_id} is committed cannot be told.",
            save_id=save_id,
            rank=error.rank,
            phase="commit",
            next_step="Load, or list the checkpoints: the save is committed if it shows there.",
        )
        return None, unknown

    def _stand_in(
        self, run: _Run, error: CheckpointError, info: CheckpointInfo | None = None
    ) -> CheckpointInfo | CheckpointError | None:
        """Tell the other ranks what the worker cannot tell any more.

        Returns what the coordinator says of the save, to a rank whose worker may have done its
        part; None if it says nothing for as long as it may be silent.
        """
        beat = run.beat
        is_last_word = self.coordinator.rank == COORDINATOR and run.phase == "commit"
        word: CheckpointInfo | CheckpointError | None = None
        try:
            with self.coordinator.operation(
                f"the save to {run.status.url}",
                timeouts=run.options.timeouts,
                number=run.number,
            ) as operation:
                operation.stand_in(
                    error,
                    nonce=beat.nonce if beat is not None else "",
                    operation_id=beat.operation_id if beat is not None else "",
                    outcome=pickle.dumps(info or error) if is_last_word else None,
                )
                if self.coordinator.rank != COORDINATOR and run.phase != "plan":
                    operation.phase("commit", self._silence_s)
                    word = pickle.loads(operation.outcome())  # noqa: S301  # our own ranks
                raise error
        except CheckpointError as raised:
            if raised is not error:
                log.warning("Telling the other ranks failed: %s", raised)
        return word

    def _live_child(self) -> WorkerProcess:
        child = self._child
        if child is not None and not child.is_alive():
            log.warning(
                "The worker process of rank %d %s; a new one is started.",
                self.coordinator.rank,
                child.how(),
            )
            self._end_child()
        if self._child is None:
            self._child = WorkerProcess(self._setup)
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


@dataclasses.dataclass(slots=True)
class _Run:
    """One save in the worker, as far as its beats tell."""

    number: int
    status: SaveStatus
    options: SaveOptions
    url: str | os.PathLike[str]
    beat: Beat | None = None
    _report: Callable[[int], None] | None = None
    _shown_bytes: int = 0
    _shown_phase: Phase = "write"
    _stack: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    @property
    def phase(self) -> str:
        sign = self._sign
        return sign.phase if sign is not None else "plan"

    @property
    def _sign(self) -> Sign | None:
        return None if self.beat is None else self.beat.signs.get(self.status.rank)

    def limit_s(self) -> float:
        """Return how long the worker's own deadlines may take, and a bit."""
        t = self.options.timeouts
        return 2 * t.plan + 2 * t.write + 2 * t.commit + t.consolidate + t.silence

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let the handle follow the beats, and the user's progress too."""
        self.status.follow(self._known)
        with self._stack:
            yield

    def _known(self) -> tuple[Mapping[int, Sign], str | None]:
        beat = self.beat
        return ({}, None) if beat is None else (beat.signs, beat.save_id)

    def take(self, beat: Beat) -> None:
        """Take in a sign of life."""
        self.beat = beat
        sign = self._sign
        if sign is None or sign.phase not in _SHOWN or not self.options.progress:
            return
        shown: Phase = "consolidate" if sign.phase == "consolidate" else "write"
        if self._report is None or shown != self._shown_phase:
            if not sign.total_bytes:
                return  # not planned yet
            self._shown_phase, self._shown_bytes = shown, 0
            self._report = self._stack.enter_context(
                reporting(
                    self.options.progress,
                    phase=shown,
                    rank=sign.rank,
                    total_bytes=sign.total_bytes,
                    save_id=beat.save_id,
                    with_bar=sign.rank == COORDINATOR,
                )
            )
        if sign.done_bytes > self._shown_bytes:
            self._report(sign.done_bytes - self._shown_bytes)
            self._shown_bytes = sign.done_bytes


def _unexported(run: _Run, error: CheckpointError, info: CheckpointInfo) -> ConsolidationError:
    return ConsolidationError(
        f"The save to {run.status.url} is committed, but its consolidation failed: {error}",
        info=info,
        rank=error.rank,
        phase="consolidate",
        next_step="The checkpoint can be loaded; call consolidate to go on with it.",
    )


class _GoneError(Exception):
    """The worker is gone; the message says how."""


def _pickled(options: SaveOptions) -> bytes:
    try:
        return pickle.dumps(options)
    except BaseException as error:
        raise InvalidInputError(
            f"The planner or another argument cannot be sent to the worker process: {error}.",
            phase="stage",
            next_step="Define its class at the top of a module, or use mode='thread'.",
        ) from error
