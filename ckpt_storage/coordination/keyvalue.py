"""The key-value store that the ranks of a group share: that of their `torch.distributed` group.

No collective runs, whatever the group's backend.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_storage.errors import RankFailedError, StorageError
from ckpt_storage.store.threads import TimedPool, park_if_exiting

from .connections import interruptible, open_connection

if TYPE_CHECKING:
    import torch.distributed as dist

COORDINATOR = 0
"""The rank that decides and commits: the first of the group, as in DCP."""

_SLICE_BYTES = 4 << 20
"""The server of a TCPStore refuses values of more than 8 MiB, so larger values are cut."""

_SET_KEYS, _SET_BYTES, _GET_KEYS, _CHECK_KEYS = 128, 128 << 10, 256, 1024
"""Limits of one request: the server parses an unfinished request from its start at every read."""

_ECHOED_BYTES = 32 << 10
"""Values up to this cost less in the reply to a compare-and-set than a second request."""

_WHOLE, _SLICED = b"w", b"p"

_ABSENT = "-"
"""Never a value of ours: the reply of a store that has no value under a key."""

_MAX_WRITES = 4
"""How often a write is repeated whose connection breaks each time."""

_RECONNECT_S = 0.1
_CONNECT_S = 60.0
_PROBE_S = 5.0
_FOREVER_S = 30 * 86_400.0


class LostStoreError(RankFailedError):
    """The key-value store does not respond to this rank, even over a new connection."""

    def __init__(self, message: str) -> None:
        # Else the process of global rank 0 hosts the store of the default group.
        self._is_hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = "the launcher" if self._is_hosted_by_launcher else f"rank {COORDINATOR}"
        super().__init__(
            f"This rank cannot reach the key-value store that the ranks share ({message}).",
            is_silent=True,
            next_step=f"Check the network, and the process that hosts the store: {host}.",
        )

    def public(self) -> RankFailedError:
        """Return this error as a public class."""
        failures = {} if self.rank is None else {self.rank: "cannot reach the key-value store"}
        if not self._is_hosted_by_launcher:
            failures.setdefault(COORDINATOR, "hosts the key-value store, which does not answer")
        error = RankFailedError(
            "", failures=failures, is_silent=True, rank=self.rank, phase=self.phase
        )
        error.args, error.next_step = self.args, self.next_step
        return error.with_traceback(self.__traceback__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """The address of the store for another process of this host: a TCP address, or a file."""

    host: str = ""
    port: int = 0
    path: str = ""

    def connect(self) -> dist.Store:
        """Return a connection to the store, without the prefixes of a group."""
        import torch.distributed as dist  # noqa: PLC0415  # as below

        if self.path:
            return dist.FileStore(self.path)
        timeout = timedelta(seconds=_CONNECT_S)
        return dist.TCPStore(self.host, self.port, timeout=timeout, wait_for_workers=False)


class StoreClient:
    """The connections of this process to one `torch.distributed` store; safe in any thread.

    One `connection` carries requests. Each `wait` holds a connection of its own while it lasts: a
    client of torch's serves one call at a time. A connection is replaced after a call that failed.
    `address` is for other processes, None if only this process can reach the store.
    """

    def __init__(
        self, connect: Callable[[], dist.Store], address: StoreAddress | None = None
    ) -> None:
        self.address = address
        self.connection: dist.Store | None = None
        self._connect = connect
        self._has_failed = False
        self._waiting: list[dist.Store] = []
        self._process_id = os.getpid()
        self._pool = TimedPool("ckpt-storage keys")

    @classmethod
    def of_group(cls, process_group: dist.ProcessGroup) -> StoreClient:
        """Return a client of the store that the members of a group share."""
        store = store_of(process_group)
        root = _root_of(store)
        host, path = getattr(root, "host", ""), getattr(root, "path", "")
        port = getattr(root, "port", 0)
        address = StoreAddress(host=host, port=port, path=path) if host or path else None
        # Over connections of our own: torch waits on its own. Its stub omits `clone`.
        return cls(store.clone, address)  # type: ignore[attr-defined]

    def connect(self) -> dist.Store:
        """Return a new connection, which the caller owns. Raises `OSError` if no server listens."""
        if self._has_failed and self.address is not None and self.address.port:
            # A client of torch's would try for as long as the timeout of the group's store. Not
            # before a failure: each connection costs the store's server a reverse name lookup.
            where = self.address.host, self.address.port
            socket.create_connection(where, timeout=_PROBE_S).close()
        return open_connection(self._connect, self.address.port if self.address else 0)

    def call(  # as the method's own
        self,
        name: str,
        *args: Any,  # noqa: ANN401  # as the method's own
        timeout_s: float,
        is_idempotent: bool = True,
        is_root: bool = False,
    ) -> Any:  # noqa: ANN401  # as above
        """Return what method `name` of the store returns, within `timeout_s` seconds.

        An idempotent call that fails is repeated once over a new connection. A call that hangs is
        abandoned in its thread. `is_root`: keys have none of the group's prefixes. Raises
        `LostStoreError`.
        """

        def run() -> Any:  # noqa: ANN401  # as above
            self._forget_parent()
            store = self.connection
            if store is None:
                store = self.connection = self.connect()
            with interruptible():
                return getattr(_root_of(store) if is_root else store, name)(*args)

        # A first attempt that hangs may use half of the time.
        limits_s = [timeout_s / 2, timeout_s / 2] if is_idempotent else [timeout_s]
        failure: Exception | None = None
        for limit_s in limits_s:
            try:
                return self._pool.run(run, timeout_s=limit_s, what=f"call {name}", repeatable=True)
            except Exception as error:  # noqa: BLE001  # torch's differ from store to store
                # A broken connection stays broken; a connection that hangs blocks all other calls.
                self.connection, failure, self._has_failed = None, error, True
        is_silent = isinstance(failure, StorageError)
        reason = f"no answer in {timeout_s:.1f} s" if is_silent else str(failure)
        raise LostStoreError(reason) from failure

    def wait(self, key: str, timeout_s: float, is_over: Callable[[], bool]) -> bool:
        """Wait until `key` exists; return whether it does. For a thread that may be abandoned.

        Connects again after a broken connection, until `timeout_s` have passed or `is_over()`. If
        the store's process is stopped, torch's client returns only once that process continues.
        """
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0 and not is_over():
            self._forget_parent()
            try:
                store = self._waiting.pop()
            except IndexError:
                store = None
            begin_s = time.monotonic()
            try:
                store = store or self.connect()
                begin_s = time.monotonic()
                with interruptible():
                    store.wait([key], timedelta(seconds=left_s))
            except Exception:  # noqa: BLE001  # torch's differ from store to store
                self._has_failed = True
                if time.monotonic() < begin_s + left_s:
                    time.sleep(min(_RECONNECT_S, left_s))
                continue
            self._waiting.append(store)
            return True
        return False

    def _forget_parent(self) -> None:
        """In a child of fork, drop the parent's connections: two processes would mix replies."""
        if self._process_id != os.getpid():
            self.connection, self._process_id = None, os.getpid()
            self._waiting.clear()


class KeyValues:
    """The keys below one prefix of a store.

    Each method but `wait` takes the seconds that it may last and raises `LostStoreError` beyond.
    """

    def __init__(self, client: StoreClient, prefix: str, *, is_root: bool = False) -> None:
        self.client = client
        self._prefix = prefix
        self._run = partial(client.call, is_root=is_root)

    def set(self, key: str, value: bytes, timeout_s: float) -> None:
        """Write `value`, of any size, under `key`; readers see all of it or nothing.

        Lost without an error if the connection has broken since the last call.
        """
        self._call("set", key, self._envelope(key, value, timeout_s), timeout_s=timeout_s)

    def set_surely(self, key: str, value: bytes, timeout_s: float) -> None:
        """Write `value` under `key`, and make sure that the store has it."""
        self.write_surely(lambda: self.set(key, value, timeout_s), key, timeout_s)

    def write_surely(self, write: Callable[[], None], last_key: str, timeout_s: float) -> None:
        """Call `write`, which sets `last_key` last, until the store has all that it sets.

        Torch's client gets no reply to a `set`. A reply to a later request over the same connection
        shows that the store has read all earlier requests.
        """
        for _ in range(_MAX_WRITES):
            connection = self.client.connection
            write()
            is_there = self.has_all([last_key], timeout_s)
            if is_there and connection is not None and self.client.connection is connection:
                return
        raise LostStoreError(f"{last_key} was lost {_MAX_WRITES} times")

    def set_polled(self, key: str, value: bytes, timeout_s: float) -> None:
        """As `set_surely`, for a new key that other ranks poll, in one request if `value` is small.

        It wakes no rank that waits: torch's TCPStore without libuv wakes them after a `set` alone.
        """
        if len(value) > _ECHOED_BYTES or self.set_first(key, value, timeout_s) != value:
            self.set_surely(key, value, timeout_s)

    def set_many(self, values: Mapping[str, bytes], timeout_s: float) -> None:
        """Write each value under its key, many in one request; each request has `timeout_s`."""
        batch: dict[str, bytes] = {}
        size_bytes = 0
        for key, value in values.items():
            envelope = self._envelope(key, value, timeout_s)
            if batch and (len(batch) == _SET_KEYS or size_bytes + len(envelope) > _SET_BYTES):
                self._set_batch(batch, timeout_s)
                batch, size_bytes = {}, 0
            batch[key] = envelope
            size_bytes += len(envelope)
        if batch:
            self._set_batch(batch, timeout_s)

    def _set_batch(self, batch: Mapping[str, bytes], timeout_s: float) -> None:
        names = [self.name_of(key) for key in batch]
        self._run("multi_set", names, list(batch.values()), timeout_s=timeout_s)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Return the value under `key`, None if there is none."""
        envelope = self._compare_set(key, _ABSENT, _ABSENT, timeout_s)
        return None if envelope == _ABSENT.encode() else self._opened(key, envelope, timeout_s)

    def get_awaited(self, key: str, timeout_s: float) -> bytes | None:
        """As `get`, for a key that ranks may wait for, in two requests.

        Torch's TCPStore with libuv wakes waiting ranks at a compare-and-set of an absent key.
        """
        return self.get(key, timeout_s) if self.has_all([key], timeout_s) else None

    def get_many(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of `keys`, which `has_all` has shown; each request has `timeout_s`."""
        values: list[bytes] = []
        for at in range(0, len(keys), _GET_KEYS):
            batch = keys[at : at + _GET_KEYS]
            names = [self.name_of(key) for key in batch]
            envelopes = self._run("multi_get", names, timeout_s=timeout_s)
            for key, envelope in zip(batch, envelopes, strict=True):
                value = self._opened(key, bytes(envelope), timeout_s)
                if value is None:
                    raise LostStoreError(f"{key} is incomplete")
                values.append(value)
        return values

    def has_all(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Return whether every key exists."""
        return not self.skip_present(keys, timeout_s)

    def skip_present(self, keys: Sequence[str], timeout_s: float) -> Sequence[str]:
        """Return `keys` from the first request on in which a key is missing; none if all exist."""
        names = [self.name_of(key) for key in keys]
        at = 0
        while at < len(names) and self._run(
            "check", names[at : at + _CHECK_KEYS], timeout_s=timeout_s
        ):
            at += _CHECK_KEYS
        return keys[at:]

    def present(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Return those of `keys` that exist: halves with a missing key are checked again."""
        if not keys or self.has_all(keys, timeout_s):
            return list(keys)
        if len(keys) == 1:
            return []
        middle = len(keys) // 2
        halves = keys[:middle], keys[middle:]
        return [key for half in halves for key in self.present(half, timeout_s)]

    def set_first(self, key: str, value: bytes, timeout_s: float) -> bytes:
        """Write `value` (a few MiB at most) under `key` unless it exists; return the stored value.

        Values of different ranks differ, so a caller that gets its own value back was first.
        """
        return self._compare_set(key, "", _WHOLE + value, timeout_s)[1:]

    def count(self, key: str, by: int, timeout_s: float) -> int:
        """Add `by` to a counter and return it. Not repeated: a lost reply may have counted."""
        count: int = self._call("add", key, by, timeout_s=timeout_s, is_idempotent=by == 0)
        return count

    def delete(self, key: str, timeout_s: float, *, size_bytes: int = 0) -> None:
        """Remove `key`, whose value has `size_bytes` or fits one request; it may be missing."""
        # The slices first: to a reader that misses a slice the value is absent.
        for name in [*_slice_keys(key, size_bytes), key]:
            self._call("delete_key", name, timeout_s=timeout_s)

    def wait(self, key: str, timeout_s: float, is_over: Callable[[], bool]) -> bool:
        """Wait until `key` exists; return whether it does. As `StoreClient.wait`."""
        return self.client.wait(self.name_of(key), timeout_s, is_over)

    def name_of(self, key: str) -> str:
        """Return the key's whole name in the store."""
        return f"{self._prefix}/{key}"

    def _call(self, name: str, key: str, *args: Any, timeout_s: float, **kw: Any) -> Any:  # noqa: ANN401  # as the call's own
        return self._run(name, self.name_of(key), *args, timeout_s=timeout_s, **kw)

    def _compare_set(self, key: str, old: str, new: str | bytes, timeout_s: float) -> bytes:
        # Also for reading: torch's `get` waits for a key that is missing, for as long as the
        # store's own timeout, and blocks its connection.
        return bytes(self._call("compare_set", key, old, new, timeout_s=timeout_s))

    def _envelope(self, key: str, value: bytes, timeout_s: float) -> bytes:
        """Store the slices of a large value; return the bytes to store under `key` itself."""
        slice_keys = _slice_keys(key, len(value))
        if not slice_keys:
            return _WHOLE + value

        def write() -> None:
            for number, slice_key in enumerate(slice_keys):
                piece = value[number * _SLICE_BYTES : (number + 1) * _SLICE_BYTES]
                self._call("set", slice_key, piece, timeout_s=timeout_s)

        self.write_surely(write, slice_keys[-1], timeout_s)
        return _SLICED + str(len(value)).encode()

    def _opened(self, key: str, envelope: bytes, timeout_s: float) -> bytes | None:
        """Return the value of the bytes under `key`; None if a slice has been removed."""
        if envelope[:1] == _WHOLE:
            return envelope[1:]
        slices = []
        for slice_key in _slice_keys(key, int(envelope[1:])):
            piece = self._compare_set(slice_key, _ABSENT, _ABSENT, timeout_s)
            if piece == _ABSENT.encode():
                return None
            slices.append(piece)
        return b"".join(slices)


def _slice_keys(key: str, size_bytes: int) -> list[str]:
    """Return the keys of a value's slices; none if it is stored under `key` itself."""
    if size_bytes <= _SLICE_BYTES:
        return []
    return [f"{key}#{number}" for number in range(-(-size_bytes // _SLICE_BYTES))]


class KeyListener:
    """Waits for one key after another and calls `on_key(key)` for each, in a daemon thread.

    A wait cannot be cancelled: it ends when a rank writes the key. So a rank that abandons an
    operation writes its release. If the store does not answer, the thread is abandoned.
    """

    def __init__(self, on_key: Callable[[str], None], keys: KeyValues, name: str) -> None:
        self._on_key = on_key
        self._keys = keys
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def listen(self, key: str) -> None:
        """Wait for `key` next; from any thread."""
        self._queue.put(key)

    def close(self) -> None:
        """Call nothing any more; the thread ends with its present wait."""
        self._is_closed = True
        self._queue.put(None)

    def _run(self) -> None:
        while (key := self._queue.get()) is not None and not self._is_closed:
            is_present = self._keys.wait(key, _FOREVER_S, lambda: self._is_closed)
            park_if_exiting()
            if is_present and not self._is_closed:
                self._on_key(key)


def _root_of(store: dist.Store) -> dist.Store:
    """Return the store below all prefixes, over the same connection."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return store


def store_of(process_group: dist.ProcessGroup) -> dist.Store:
    """Return the store that the members of a group share; no other rank sees its keys."""
    import torch.distributed as dist  # noqa: PLC0415  # a process without ranks needs no torch

    with contextlib.suppress(AttributeError, RuntimeError):
        return process_group.get_group_store()
    # Older torch, and backends without a store: the default group's, below the group's name.
    root = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # no public way to it
    return dist.PrefixStore(f"group/{process_group.group_name}", root)
