"""Coordinators over torch process groups: the group's store as the board that ranks share.

No collective runs on the caller's group, whatever its backend.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from ckpt_storage.errors import StorageError
from ckpt_storage.store.timed import TimedPool

from .board import BoardError

_T = TypeVar("_T")

_PIECE_BYTES = 4 << 20
"""The server of a TCPStore refuses values of more than 8 MiB."""

_WHOLE, _IN_PIECES, _TEXT = b"w", b"p", b"t"

_NOTHING = "-"
"""No value of ours; what a store answers that holds nothing under a key."""


class StoreBoard:
    """A `Board` on a `torch.distributed` store; calls that hang are left behind in a thread."""

    def __init__(
        self, connect: Callable[[], dist.Store], prefix: str, *, pool: TimedPool | None = None
    ) -> None:
        self._connect = connect
        self._prefix = prefix
        self._root: dist.Store | None = None
        self._process_id = os.getpid()
        # Of twins the threads are common: each operation makes a twin, and would start one anew.
        self._pool = pool or TimedPool("ckpt-storage board")
        self._owns_pool = pool is None
        self._piece_counts: dict[str, int] = {}

    def root(self) -> dist.Store:
        """Return the store without our prefix, connected; may hang as long as connecting does."""
        if self._process_id != os.getpid():
            # The parent's: two processes that ask on one connection take each other's answers.
            self._root, self._process_id = None, os.getpid()
        root = self._root
        if root is None:
            # Returned as it is: another thread, whose call failed, may drop it at any time.
            root = self._root = self._connect()
        return root

    def twin(self) -> StoreBoard:
        """Return a board over a connection of its own: one client serves one call at a time.

        Connects in its first call: a server that is gone is tried for as long as that may take.
        """
        # Torch's stub of a store leaves `clone` out.
        return StoreBoard(lambda: self.root().clone(), self._prefix, pool=self._pool)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Drop the connection, of the first of twins also the threads that wait.

        A call under way ends by itself; a later one connects anew.
        """
        self._root = None
        if self._owns_pool:
            self._pool.close()
            self._pool = TimedPool("ckpt-storage board")

    def _open(self) -> dist.Store:
        return dist.PrefixStore(self._prefix, self.root())

    def set(self, key: str, value: bytes, timeout_s: float) -> None:
        """Put a value, in pieces if it is large; the key itself comes last."""
        pieces = [value[at : at + _PIECE_BYTES] for at in range(0, len(value), _PIECE_BYTES)]
        head = _WHOLE + value
        if len(pieces) > 1:
            head = _IN_PIECES + str(len(pieces)).encode()
            self._piece_counts[key] = len(pieces)
            for number, piece in enumerate(pieces):
                self._put(_piece(key, number), piece, timeout_s)
        self._put(key, head, timeout_s)

    def _put(self, key: str, value: bytes, timeout_s: float) -> None:
        # torch's stub says str; every store takes bytes.
        self._run(lambda: self._open().set(key, value), key, timeout_s)  # type: ignore[arg-type]

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Return a value, joined."""
        head = self._look(key, timeout_s)
        if head is None or head[:1] == _WHOLE:
            return None if head is None else head[1:]
        if head[:1] == _TEXT:
            return base64.b64decode(head[1:])
        count = self._piece_counts[key] = int(head[1:])
        pieces = [self._look(_piece(key, i), timeout_s) for i in range(count)]
        # Who removes a value begins with its pieces.
        return None if None in pieces else b"".join(piece for piece in pieces if piece is not None)

    def _look(self, key: str, timeout_s: float) -> bytes | None:
        # Not `get`: it waits for what another rank has removed just now, for as long as the store's
        # own timeout, and keeps its connection from all other calls. This is one request, and puts
        # nothing where there is nothing.
        def look() -> bytes | None:
            found: bytes = self._open().compare_set(key, _NOTHING, _NOTHING)
            return None if found == _NOTHING.encode() else found

        return self._run(look, key, timeout_s)

    def has_all(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Return whether all are there."""
        if not keys:
            return True
        return self._run(lambda: self._open().check(list(keys)), keys[0], timeout_s)

    def set_first(self, key: str, value: bytes, timeout_s: float) -> None:
        """Put a value unless somebody was faster; values of a few MiB at most."""
        # Torch takes only text here.
        text = (_TEXT + base64.b64encode(value)).decode()
        self._run(lambda: self._open().compare_set(key, "", text), key, timeout_s)

    def delete(self, key: str, timeout_s: float) -> None:
        """Remove a value and what belongs to it."""
        names = [_piece(key, i) for i in range(self._piece_counts.pop(key, 0))]

        def remove() -> None:
            for name in [*names, key]:
                self._open().delete_key(name)

        self._run(remove, key, timeout_s)

    def _run(self, call: Callable[[], _T], key: str, timeout_s: float) -> _T:
        try:
            return self._pool.run(call, timeout_s=timeout_s, what=f"look at {key}", repeatable=True)
        except StorageError as error:
            raise BoardError(f"The ranks' store did not answer in {timeout_s:.1f} s.") from error
        except Exception as error:
            # Torch raises RuntimeErrors of several kinds here, depending on the store. A connection
            # that broke stays broken: the next call makes a new one.
            self._root = None
            raise BoardError(f"The ranks' store failed: {error}") from error


def _piece(key: str, number: int) -> str:
    return f"{key}#{number}"


def store_of(process_group: dist.ProcessGroup) -> dist.Store:
    """Return the store that the members of a group share; nobody else sees its keys."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return process_group.get_group_store()
    # Older torch, and groups whose backend keeps none: the default group's, below the group's name.
    root = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # no public way to it
    return dist.PrefixStore(f"group/{process_group.group_name}", root)
