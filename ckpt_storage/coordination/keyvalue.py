"""The key-value store that the ranks of a group share: that of their `torch.distributed` group.

No collective runs, whatever the group's backend.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_storage.errors import RankFailedError, StorageError
from ckpt_storage.store.threads import TimedPool

if TYPE_CHECKING:
    import torch.distributed as dist

COORDINATOR = 0
"""The rank that decides and commits: the first of the group, as in DCP."""

_PIECE_BYTES = 4 << 20
"""The server of a TCPStore refuses values of more than 8 MiB."""

_WHOLE, _IN_PIECES, _TEXT = b"w", b"p", b"t"

_NOTHING = "-"
"""No value of ours; what a store answers that holds nothing under a key."""


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

    def close(self) -> None:
        """Drop the connection and the threads that wait; a later call connects anew."""
        self._store = None
        self._pool.close()
        self._pool = TimedPool("ckpt-storage keys")

    def set(self, key: str, value: bytes, timeout_s: float) -> None:
        """Put `value` (of any size) under `key`; readers see all of it or nothing."""
        kind = _WHOLE
        if len(value) > _PIECE_BYTES:
            starts = range(0, len(value), _PIECE_BYTES)
            self._piece_counts[key] = len(starts)
            for number, at in enumerate(starts):
                piece = value[at : at + _PIECE_BYTES]
                self._run("set", f"{key}#{number}", piece, timeout_s=timeout_s)
            kind, value = _IN_PIECES, str(len(starts)).encode()
        # The key itself comes last.
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
