"""The key-value store that the ranks of a group share, and how a rank waits for a key.

It is the store of a `torch.distributed` group. No collective runs, whatever the group's backend.
"""

from __future__ import annotations

import base64
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_storage.errors import CheckpointError, RankFailedError, SaveCancelledError, StorageError
from ckpt_storage.store.calls import TimedPool
from ckpt_storage.store.deadline import Deadline

if TYPE_CHECKING:
    import torch.distributed as dist

_T = TypeVar("_T")

COORDINATOR = 0
"""The rank that decides and commits: the first of the group, as in DCP."""

_PIECE_BYTES = 4 << 20
"""The server of a TCPStore refuses values of more than 8 MiB."""

_WHOLE, _IN_PIECES, _TEXT = b"w", b"p", b"t"

_NOTHING = "-"
"""No value of ours; what a store answers that holds nothing under a key."""

_FIRST_LOOK_S = 0.0002
"""A look takes about as long, and ranks of one host are seldom further apart."""

_GROWTH = 1.25
"""From look to look a pause grows by this: what comes is noticed a quarter of the wait late."""

_LEAST_PATIENCE_S = 0.5
_SPARE_PATIENCE_S = 1.0


class LostStoreError(RankFailedError):
    """The store that ranks share fails or does not answer: its host is gone or stopped."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"The store that the ranks share cannot be reached: rank {COORDINATOR}, or the "
            f"launcher that hosts the store, is gone or stopped ({message}).",
            failures={COORDINATOR: message},
            is_silent=True,
            rank=COORDINATOR,
            next_step=f"See what became of rank {COORDINATOR} and its host.",
        )


class KeyValues:
    """A `torch.distributed` store; safe in any thread.

    Every call ends within `timeout_s` seconds or raises `LostStoreError`; one that hangs is left
    behind in a thread. All threads share one connection, which `connect` makes on first use, and
    anew once a call failed. All keys begin with `prefix`.
    """

    def __init__(self, connect: Callable[[], dist.Store], prefix: str) -> None:
        self.connect = connect
        self._prefix = prefix
        self._store: dist.Store | None = None
        self._process_id = os.getpid()
        self._pool = TimedPool("ckpt-storage keys")
        self._piece_counts: dict[str, int] = {}

    @classmethod
    def of(cls, process_group: dist.ProcessGroup, prefix: str) -> KeyValues:
        """Return the store of a group, over a connection of our own: torch waits on its own."""
        # Torch's stub of a store leaves `clone` out.
        return cls(store_of(process_group).clone, prefix)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Drop the connection and the threads that wait; a later call connects anew."""
        self._store = None
        self._pool.close()
        self._pool = TimedPool("ckpt-storage keys")

    def set(self, key: str, value: bytes, timeout_s: float) -> None:
        """Put `value` (of any size) under `key`; readers see all of it or nothing."""
        pieces = [value[at : at + _PIECE_BYTES] for at in range(0, len(value), _PIECE_BYTES)]
        if len(pieces) > 1:
            self._piece_counts[key] = len(pieces)
            for number, piece in enumerate(pieces):
                self._run("set", f"{key}#{number}", piece, timeout_s=timeout_s)
            value = str(len(pieces)).encode()
        # The key itself comes last.
        kind = _IN_PIECES if len(pieces) > 1 else _WHOLE
        self._run("set", key, kind + value, timeout_s=timeout_s)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Return what lies under `key`, None if nothing does."""
        head = self._look(key, timeout_s)
        if head is None or head[:1] == _WHOLE:
            return None if head is None else head[1:]
        if head[:1] == _TEXT:
            return base64.b64decode(head[1:])
        count = self._piece_counts[key] = int(head[1:])
        pieces = [self._look(f"{key}#{number}", timeout_s) for number in range(count)]
        # Who removes a value begins with its pieces.
        return None if None in pieces else b"".join(piece for piece in pieces if piece is not None)

    def _look(self, key: str, timeout_s: float) -> bytes | None:
        # Not `get`: it waits for what another rank has removed just now, for as long as the store's
        # own timeout, and keeps its connection from all other calls. This is one request, and puts
        # nothing where there is nothing.
        found: bytes = self._run("compare_set", key, _NOTHING, _NOTHING, timeout_s=timeout_s)
        return None if found == _NOTHING.encode() else found

    def has_all(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Return whether something lies under every key."""
        return not keys or bool(self._run("check", *keys, timeout_s=timeout_s))

    def set_first(self, key: str, value: bytes, timeout_s: float) -> None:
        """Put `value` (a few MiB at most) under `key` unless somebody was faster."""
        # Torch takes only text here.
        text = (_TEXT + base64.b64encode(value)).decode()
        self._run("compare_set", key, "", text, timeout_s=timeout_s)

    def delete(self, key: str, timeout_s: float) -> None:
        """Remove `key`; one that is not there is no error."""
        pieces = [f"{key}#{number}" for number in range(self._piece_counts.pop(key, 0))]
        for name in [*pieces, key]:
            self._run("delete_key", name, timeout_s=timeout_s)

    def _run(self, name: str, *args: Any, timeout_s: float) -> Any:  # noqa: ANN401  # as torch's call
        def call() -> Any:  # noqa: ANN401  # as above
            if self._process_id != os.getpid():
                # The parent's: two processes on one connection take each other's answers.
                self._store, self._process_id = None, os.getpid()
            store = self._store
            if store is None:
                store = self._store = self.connect()
            if name == "check":
                return store.check([f"{self._prefix}/{key}" for key in args])
            return getattr(store, name)(f"{self._prefix}/{args[0]}", *args[1:])

        try:
            return self._pool.run(call, timeout_s=timeout_s, what=f"call {name}", repeatable=True)
        except Exception as error:
            # Torch raises RuntimeErrors of several kinds here, depending on the store. A connection
            # that broke stays broken, and one that hangs keeps all others waiting.
            self._store = None
            how = f"no answer in {timeout_s:.1f} s" if isinstance(error, StorageError) else error
            raise LostStoreError(str(how)) from error


def store_of(process_group: dist.ProcessGroup) -> dist.Store:
    """Return the store that the members of a group share; nobody else sees its keys."""
    import torch.distributed as dist  # noqa: PLC0415  # a process without ranks needs no torch

    with contextlib.suppress(AttributeError, RuntimeError):
        return process_group.get_group_store()
    # Older torch, and groups whose backend keeps none: the default group's, below the group's name.
    root = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # no public way to it
    return dist.PrefixStore(f"group/{process_group.group_name}", root)


class Waits:
    """How one rank waits in one operation. `deadline` is set anew with each phase.

    Args:
        keys: where messages are left.
        deadline: of the present phase.
        silence_s: how long the store may take to answer.
        look_s: longest pause between two looks.
        grace_s: how long after the deadline this rank names others. A late rank should name
            itself first, then the coordinator name it, then anybody else.

    """

    def __init__(
        self,
        keys: KeyValues,
        deadline: Deadline,
        *,
        silence_s: float,
        look_s: float,
        grace_s: float,
    ) -> None:
        self.keys = keys
        self.deadline = deadline
        self.look_s = look_s
        self.grace_s = grace_s
        self.failure: CheckpointError | None = None
        self._silence_s = silence_s
        self._has_ended = False
        self._wake = threading.Event()

    def fail(self, error: CheckpointError) -> None:
        """End all waits with `error`; from any thread."""
        self.failure = error
        self._wake.set()

    def end(self) -> None:
        """End the waits of threads that the operation has left behind; from any thread."""
        self._has_ended = True
        self._wake.set()

    def patience_s(self) -> float:
        """Return how long one look may take before the store counts as lost."""
        left_s = self.deadline.remaining_s() + _SPARE_PATIENCE_S
        return max(_LEAST_PATIENCE_S, min(self._silence_s, left_s))

    def until(self, look: Callable[[], _T | None], late: Callable[[], CheckpointError]) -> _T:
        """Return what `look` finds; raise why the operation failed, or what `late` returns."""
        pause_s = _FIRST_LOOK_S
        while True:
            try:
                found = look()
            except LostStoreError as error:
                # Somebody's wish does not say what became of a message that was on its way.
                if self.failure is None or isinstance(self.failure, SaveCancelledError):
                    raise
                raise self.failure from error
            if found is not None:
                return found
            if self.failure is not None:
                raise self.failure
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
        while not self.keys.has_all(keys, self.patience_s()):
            if time.monotonic() > end_s:
                return False
            time.sleep(pause_s)
            pause_s = min(_GROWTH * pause_s, self.look_s)
        return True

    def missing(self, keys: Mapping[int, str]) -> list[int]:
        """Return the ranks under whose key nothing lies."""
        return [r for r, key in keys.items() if not self.keys.has_all([key], self.patience_s())]

    def get(self, key: str) -> bytes | None:
        """Return what lies under `key`."""
        return self.keys.get(key, self.patience_s())

    def set(self, key: str, value: bytes) -> None:
        """Leave a message."""
        self.keys.set(key, value, self.patience_s())
