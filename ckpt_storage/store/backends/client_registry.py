"""Instances of fsspec file systems in this process: who shares them, and how they end.

An asynchronous file system has one instance, on the event loop of this module; a synchronous file
system has one for each running call and each open upload. A child of fork uses nothing that it
inherited.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import os
import selectors
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeAlias, TypeVar

from ckpt_storage.errors import StorageError
from ckpt_storage.store.threads import start_thread

P = ParamSpec("P")
T = TypeVar("T")

ForeignFs: TypeAlias = Any
"""A file system of fsspec or of a package that plugs into it; none of them ships types."""

_LOOP_CHECK_S = 0.5
"""How long the exit of the interpreter waits for an event loop that may be blocked."""

_CALLS_AT_ONCE = 4
"""On a synchronous file system, each with a connection; servers refuse clients that have many."""


def _start(run: Callable[[], object], name: str, delay_s: float = 0.0) -> None:
    """Run a function in a daemon thread, after a delay. Raises `StorageError`."""
    thread = threading.Timer(delay_s, run)
    thread.name, thread.daemon = f"ckpt-storage {name}", True
    start_thread(thread)


class _DaemonThreads(ThreadPoolExecutor):
    """Executor of an event loop, for calls such as DNS lookups, whose threads delay no exit."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call at once, in a thread of its own."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
                future.set_exception(error)

        try:
            _start(run, "lookup")
        except StorageError as error:
            future.set_exception(error)
        return future


def _finalizers(fs: ForeignFs) -> list[Any]:
    """Return the finalizers by which a library closes connections when `fs` is collected."""
    callbacks = [ref.__callback__ for ref in weakref.getweakrefs(fs)]
    return [callback for callback in callbacks if isinstance(callback, weakref.finalize)]


def close_instances(instances: list[ForeignFs], delay_s: float = 0.0) -> None:
    """Close the connections of instances that are no longer used, in a thread."""

    def close() -> None:
        for fs in instances:
            calls = _finalizers(fs)
            if not getattr(fs, "async_impl", False):
                client = getattr(fs, "client", None)  # of paramiko; webdav4's has one of httpx
                calls.append(getattr(getattr(client, "http", client), "close", object))
            for call in calls:
                with contextlib.suppress(Exception):
                    call()

    # Without a thread, and at the end of the process, the operating system closes them.
    with contextlib.suppress(StorageError):
        _start(close, "closing", delay_s)


class Instances:
    """The instances with equal options; an asynchronous class has one, which serves all calls."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        # Keys compare objects in options by identity, so the objects must stay alive.
        self.options = options
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.free: list[ForeignFs] = []
        self.slots = threading.BoundedSemaphore(_CALLS_AT_ONCE)


class _Registry:
    """All instances of this process by their options, the longest unused first."""

    def __init__(self) -> None:
        self._inherited: list[object] = []
        self._begin()
        os.register_at_fork(after_in_child=self._after_fork)
        # The first finalizer registers an exit handler; handlers registered later run before it.
        weakref.finalize(self, object)
        atexit.register(self._before_exit)

    def _begin(self) -> None:
        # An inherited lock may be held by a thread that does not exist here.
        self.lock = threading.Lock()
        self.instances: dict[Hashable, Instances] = {}
        self.construction = collections.defaultdict[type, threading.Lock](threading.Lock)
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of all asynchronous file systems."""
        with self.lock:
            if self._loop is None:
                # An epoll set would be shared with a child of fork.
                loop = asyncio.SelectorEventLoop(selectors.PollSelector())
                loop.set_default_executor(_DaemonThreads())
                try:
                    _start(loop.run_forever, "loop")
                except StorageError:
                    # The next call tries again.
                    loop.close()
                    raise
                self._loop = loop
            return self._loop

    def _after_fork(self) -> None:
        self._detach_finalizers()
        # Keep references: finalizing these objects would close the parent's sockets.
        self._inherited += [self.instances, self._loop]
        self._begin()

    def _before_exit(self) -> None:
        """Keep libraries from waiting for an event loop that is blocked."""
        responded = threading.Event()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(responded.set)
            if not responded.wait(_LOOP_CHECK_S):
                self._detach_finalizers()

    def _detach_finalizers(self) -> None:
        for instances in list(self.instances.values()):
            for finalizer in [each for fs in instances.free for each in _finalizers(fs)]:
                finalizer.detach()


REGISTRY = _Registry()
