"""Connections of torch's client to a store, and the end of the calls in them at exit.

Before Python 3.14 a thread that returns from torch's C++ code while the interpreter is finalized
brings the process down, and torch offers no way to end a call. So as the interpreter exits, the
sockets of connections are shut down, and threads return from their calls while they still can.
Where the system does not show the sockets (all but Linux), nothing is done, and a thread that
connects cannot be called back. torch logs a warning for each socket.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch.distributed as dist

_T = TypeVar("_T")

_DESCRIPTORS = Path("/proc/self/fd")

_END_S = 1.0
"""How long an exiting interpreter waits for threads to return from their calls."""

_sockets: dict[str, int] = {}
"""The names of our sockets, as the system shows them, and the ports of their peers."""

_threads_in_calls: set[int] = set()
_parked_threads: set[int] = set()
_hooks: list[object] = []


def _forget_parent() -> None:
    """Forget what a child of fork has in common with its parent: a shutdown would end both."""
    for kept in (_sockets, _threads_in_calls, _parked_threads):
        kept.clear()


os.register_at_fork(after_in_child=_forget_parent)


def open_connection(connect: Callable[[], dist.Store], port: int) -> dist.Store:
    """Return a new connection to a store; `port` is that of its server, 0 if it has none."""
    if not port:
        return connect()
    if not _hooks:
        _hooks.append(atexit.register(_end_calls))
    before = _socket_names()
    store = connect()
    # What another thread opened meanwhile to the same server is one of ours, too.
    present = _socket_names()
    is_ours = partial(_is_connected_to, port)
    _sockets.update(
        (name, port)
        for name, descriptor in present.items()
        if name not in before and _with_socket(descriptor, name, is_ours)
    )
    for name in list(_sockets):
        if name not in present:
            _sockets.pop(name, None)
    return store


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the call in the block end as the interpreter exits; its thread then blocks for ever."""
    thread = threading.get_ident()
    _threads_in_calls.add(thread)
    try:
        yield
    finally:
        _threads_in_calls.discard(thread)
        if thread in _parked_threads:
            threading.Event().wait()


def _end_calls() -> None:
    """Shut our sockets down; wait until the threads have returned from their calls."""
    _parked_threads.update(_threads_in_calls)
    if not _parked_threads:
        return
    present = _socket_names()
    for name, port in list(_sockets.items()):
        if name in present:
            _with_socket(present[name], name, partial(_shut_down, port))
    end_s = time.monotonic() + _END_S
    while _parked_threads & _threads_in_calls and time.monotonic() < end_s:
        time.sleep(0.005)


def _socket_names() -> dict[str, int]:
    """Return the names of this process's sockets, and the descriptor of each."""
    names: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for path in _DESCRIPTORS.iterdir():
            with contextlib.suppress(OSError):
                names[str(path.readlink())] = int(path.name)
    return {name: descriptor for name, descriptor in names.items() if name.startswith("socket:")}


def _with_socket(descriptor: int, name: str, action: Callable[[socket.socket], _T]) -> _T | None:
    """Return what `action` returns for a socket; None if it fails, or the socket is closed."""
    # Of a type that does not block, the object leaves the socket as it is; else it makes it
    # non-blocking, for torch as well, if the process has set `socket.setdefaulttimeout`.
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    with (
        contextlib.suppress(OSError),
        socket.socket(type=kind, fileno=os.dup(descriptor)) as duplicate,
    ):
        # The descriptor may be that of another file by now.
        if str((_DESCRIPTORS / str(duplicate.fileno())).readlink()) == name:
            return action(duplicate)
    return None


def _is_connected_to(port: int, connection: socket.socket) -> bool:
    address: tuple[object, ...] = connection.getpeername()
    return address[1:2] == (port,)


def _shut_down(port: int, connection: socket.socket) -> None:
    if _is_connected_to(port, connection):
        connection.shutdown(socket.SHUT_RDWR)
