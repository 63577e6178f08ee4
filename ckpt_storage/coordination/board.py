"""Shared key-value memory of the ranks of one group: the place where they leave word.

`coordination_torch` puts a process group's store behind `Board`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from ckpt_storage.errors import CheckpointError

__all__ = ["Board", "BoardError", "LocalBoard"]


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
