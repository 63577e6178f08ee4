"""Key-value memory that the ranks of one group share, and how a rank waits on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError
from ckpt_storage.store.deadline import Deadline

_T = TypeVar("_T")

_FIRST_LOOK_S = 0.0002
"""A look takes about as long, and ranks of one host are seldom further apart."""

_GROWTH = 1.25
"""From look to look a pause grows by this: what comes is noticed a quarter of the wait late."""

_LEAST_PATIENCE_S = 0.5
_SPARE_PATIENCE_S = 1.0


class BoardError(CheckpointError):
    """The memory that ranks share cannot be reached, or does not answer in time."""


class Board(Protocol):
    """Key-value memory; every call ends within `timeout_s` seconds or raises `BoardError`."""

    def set(self, key: str, value: bytes, timeout_s: float) -> None:
        """Put `value` (of any size) under `key`; readers see all of it or nothing."""

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Return what lies under `key`, None if nothing does."""

    def has_all(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Return whether something lies under every key."""

    def set_first(self, key: str, value: bytes, timeout_s: float) -> None:
        """Put `value` under `key` unless somebody was faster."""

    def delete(self, key: str, timeout_s: float) -> None:
        """Remove `key`; one that is not there is no error."""

    def twin(self) -> Board:
        """Return a board of the same content, on which a call never waits for one on this."""

    def close(self) -> None:
        """Let go of connection and threads; idempotent, never waits."""


class LocalBoard:
    """A board for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes, timeout_s: float) -> None:  # noqa: ARG002  # Board
        """Put a value."""
        with self._lock:
            self._values[key] = bytes(value)

    def get(self, key: str, timeout_s: float) -> bytes | None:  # noqa: ARG002  # Board
        """Return a value."""
        with self._lock:
            return self._values.get(key)

    def has_all(self, keys: Sequence[str], timeout_s: float) -> bool:  # noqa: ARG002  # Board
        """Return whether all are there."""
        with self._lock:
            return all(key in self._values for key in keys)

    def set_first(self, key: str, value: bytes, timeout_s: float) -> None:  # noqa: ARG002  # Board
        """Put a value where there is none."""
        with self._lock:
            self._values.setdefault(key, bytes(value))

    def delete(self, key: str, timeout_s: float) -> None:  # noqa: ARG002  # Board
        """Remove a value."""
        with self._lock:
            self._values.pop(key, None)

    def twin(self) -> LocalBoard:
        """Return this board: none of its calls waits."""
        return self

    def close(self) -> None:
        """Do nothing."""

    @property
    def keys(self) -> list[str]:
        """What is there, sorted."""
        with self._lock:
            return sorted(self._values)


class Waits:
    """How one rank waits in one operation. `deadline` is set anew with each phase.

    Args:
        board: where messages are left.
        deadline: of the present phase.
        silence_s: how long the board's server may take to answer.
        look_s: longest pause between two looks.
        grace_s: how long after the deadline this rank names others. A late rank should name
            itself first, then the coordinator name it, then anybody else.

    """

    def __init__(
        self, board: Board, deadline: Deadline, *, silence_s: float, look_s: float, grace_s: float
    ) -> None:
        self.board = board
        self.deadline = deadline
        self.look_s = look_s
        self.silence_s = silence_s
        self.grace_s = grace_s
        self.on_look: Callable[[], object] = lambda: None
        self._failure: CheckpointError | None = None
        self._has_ended = False
        self._wake = threading.Event()

    @property
    def failure(self) -> CheckpointError | None:
        """Why there is nothing to wait for any more."""
        return self._failure

    def fail(self, error: CheckpointError) -> None:
        """End all waits with `error`; from any thread."""
        self._failure = error
        self._wake.set()

    def end(self) -> None:
        """End the waits of threads that the operation has left behind; from any thread."""
        self._has_ended = True
        self._wake.set()

    def patience_s(self) -> float:
        """Return how long one look at the board may take before its server counts as gone."""
        left_s = self.deadline.remaining_s() + _SPARE_PATIENCE_S
        return max(_LEAST_PATIENCE_S, min(self.silence_s, left_s))

    def until(self, look: Callable[[], _T | None], late: Callable[[], PhaseTimeoutError]) -> _T:
        """Return what `look` finds; raise why the operation failed, or what `late` returns."""
        pause_s = _FIRST_LOOK_S
        while True:
            found = look()
            if found is not None:
                return found
            self.on_look()
            if self._failure is not None:
                raise self._failure
            if self._has_ended:
                raise CheckpointError("What was waited for belongs to an operation that has ended.")
            if time.monotonic() > self.deadline.at_monotonic_s + self.grace_s:
                raise late()
            self._wake.wait(pause_s)
            pause_s = min(_GROWTH * pause_s, self.look_s)

    def within(self, seconds: float, keys: Sequence[str]) -> bool:
        """Wait for all `keys` for some seconds, whatever fails; return whether they came."""
        end_s = time.monotonic() + seconds
        pause_s = _FIRST_LOOK_S
        while not self.board.has_all(keys, self.patience_s()):
            if time.monotonic() > end_s:
                return False
            time.sleep(pause_s)
            pause_s = min(_GROWTH * pause_s, self.look_s)
        return True

    def missing(self, keys: Mapping[int, str]) -> list[int]:
        """Return the ranks under whose key nothing lies."""
        return [
            rank for rank, key in keys.items() if not self.board.has_all([key], self.patience_s())
        ]

    def get(self, key: str) -> bytes | None:
        """Return what lies under `key`."""
        return self.board.get(key, self.patience_s())

    def set(self, key: str, value: bytes) -> None:
        """Leave a message."""
        self.board.set(key, value, self.patience_s())

    def delete(self, key: str) -> None:
        """Remove a message."""
        self.board.delete(key, self.patience_s())
