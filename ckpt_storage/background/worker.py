"""The worker process of a rank: runs the saves that its trainer sends, one after another.

Started by `workerlink`; ends with its trainer, however that ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import travelling
from ckpt_storage.coordination.operation import BoardOperation, Operation
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.coordination.signs import Sign
from ckpt_storage.coordination.storeboard import StoreAddress, StoreBoard
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.saves.saving import SaveOptions, run_save
from ckpt_storage.store.timed import abandoned_thread_count

from .stagewire import StateReceiver

BEAT_S = 0.25
"""How often a worker tells its trainer how far it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker is started with; `address` is None for a single rank."""

    address: StoreAddress | None
    lane: str
    rank: int
    world_size: int
    log_level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One save; its state follows on the other pipe. `options` are a pickled `SaveOptions`."""

    number: int
    url: str
    options: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The wish to give save `number` up."""

    number: int
    error: CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life while a save is under way, and what is known of it."""

    number: int
    nonce: str = ""
    operation_id: str = ""
    save_id: str | None = None
    info: CheckpointInfo | None = None
    signs: Mapping[int, Sign]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a save ended; `is_clean`: no thread was left behind that may still read the state."""

    number: int
    info: CheckpointInfo | None = None
    error: CheckpointError | None = None
    is_clean: bool = True


class _Worker:
    """The loop of one worker."""

    def __init__(self, setup: Setup, control: Connection, states: Connection) -> None:
        self._control = control
        self._receiver = StateReceiver(states)
        self._sending = threading.Lock()
        self._operation: BoardOperation | None = None
        self._number = 0
        self._ended = threading.Event()
        trainer = multiprocessing.parent_process()
        self._trainer_pid = trainer.pid if trainer is not None else os.getppid()
        self._requests: list[Request] = []
        self._cancel: Cancel | None = None
        self._arrived = threading.Condition()
        if setup.address is None:
            self._coordinator = Ranks.alone()
        else:
            board = StoreBoard(setup.address.connect, setup.lane)
            # The trainer speaks for a worker that dies, not for itself.
            self._coordinator = Ranks(
                board, rank=setup.rank, world_size=setup.world_size, pid=self._trainer_pid
            )

    def serve(self) -> None:
        """Serve until the trainer closes the pipe."""
        threading.Thread(target=self._beat, name="ckpt-storage beat", daemon=True).start()
        threading.Thread(target=self._listen, name="ckpt-storage ears", daemon=True).start()
        while True:
            with self._arrived:
                while not self._requests:
                    self._arrived.wait()
                request = self._requests.pop(0)
            outcome = self._outcome(request)
            self._number, self._operation = 0, None
            with self._sending:
                self._control.send(outcome)

    def _outcome(self, request: Request) -> Outcome:
        self._number = request.number
        # Before any other rank can hear of this save: without it, another worker may begin anew.
        self._tell()
        info: CheckpointInfo | None = None
        failure: CheckpointError | None = None
        # Before anything can fail, so that the next save does not get the state of this one.
        state = self._receive()
        try:
            info = run_save(
                self._coordinator,
                state,
                request.url,
                lambda: _options(request.options),
                watch=self._attach,
                number=request.number,
                in_background=True,
            )
        except CheckpointError as error:
            failure = travelling(error)
        self._tell()
        return Outcome(
            number=request.number,
            info=info,
            error=failure,
            is_clean=abandoned_thread_count() == 0,
        )

    def _receive(self) -> Callable[[], dict[str, Any]]:
        """Take a state off the pipe; return what gives it, or raises why it cannot be had."""
        try:
            state = self._receiver.receive()
        except EOFError:
            os._exit(0)  # the trainer is gone
        except BaseException as error:  # noqa: BLE001  # what the user's own classes raise
            failure = InvalidInputError(
                f"The state cannot be read in the worker process: {type(error).__name__}: {error}.",
                phase="stage",
                next_step="Save plain data in place of own classes, or use mode='thread'.",
            )
        else:
            return lambda: state

        def fail() -> dict[str, Any]:
            raise failure

        return fail

    def _attach(self, operation: Operation) -> None:
        assert isinstance(operation, BoardOperation)  # noqa: S101  # the ranks' own
        self._operation = operation
        # The trainer knows of a commit before it begins: if this process dies in it, the trainer
        # must not take it for a failure.
        operation.on_phase = self._tell
        self._tell()
        self._apply_cancel()

    def _apply_cancel(self) -> None:
        cancel, operation = self._cancel, self._operation
        if cancel is not None and operation is not None and cancel.number == self._number:
            operation.give_up(cancel.error)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            if os.getppid() != self._trainer_pid:
                # Its pipes may still be open in children that it forked.
                os._exit(0)
            self._tell()

    def _tell(self) -> None:
        with self._sending:
            # In this order: the end of a save clears them in the other.
            operation, number = self._operation, self._number
            if number == 0:
                return
            beat = Beat(number=number, signs={})
            if operation is not None:
                beat = Beat(
                    number=number,
                    nonce=operation.nonce,
                    operation_id=operation.id,
                    save_id=operation.save_id,
                    info=operation.committed,
                    signs=operation.signs,
                )
            # Made and sent at once: an older one that came later would turn the phase back.
            self._control.send(beat)

    def _listen(self) -> None:
        try:
            while True:
                message = self._control.recv()
                if isinstance(message, Request):
                    with self._arrived:
                        self._requests.append(message)
                        self._arrived.notify()
                else:
                    self._cancel = message
                    self._apply_cancel()
        except (EOFError, OSError):
            # Nobody is left to save for; threads that hang in a storage must not keep us.
            os._exit(0)


def _options(packed: bytes) -> SaveOptions:
    try:
        options: SaveOptions = pickle.loads(packed)  # noqa: S301  # from our own trainer
    except BaseException as error:
        raise InvalidInputError(
            "The planner or another argument cannot be read in the worker process: "
            f"{type(error).__name__}: {error}.",
            phase="plan",
            next_step="Define its class at the top of a module, or use mode='thread'.",
        ) from error
    return options


def worker_main(setup: Setup, control: Connection, states: Connection) -> None:
    """Run a worker; the target of a spawned process."""
    # An interrupt at the terminal reaches all processes of the job; what it means, the trainer
    # decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_trainer, name="ckpt-storage parent", daemon=True).start()
    logging.getLogger("ckpt_storage").setLevel(setup.log_level)
    _Worker(setup, control, states).serve()


def _end_with_trainer() -> None:
    trainer: Any = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(0)
