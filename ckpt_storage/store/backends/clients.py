"""fsspec file systems: built in the first call, one set for all stores of equal options.

An asynchronous file system has one instance, on an event loop of its own in a daemon thread. A
synchronous one has one for each call under way, four at most, and one for each open upload: servers
refuse clients that connect many times at once. What no open store uses is closed after a minute;
eight such are kept at most. A child of fork builds its own and touches nothing that it
inherited.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import difflib
import inspect
import os
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar
from urllib.parse import urlsplit

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.store.calls import moved
from ckpt_storage.store.location import Location, missing_backend
from ckpt_storage.store.redaction import Scrubber

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

ForeignFs: TypeAlias = Any
"""A file system of fsspec or of a package that plugs into it; none of them ships types."""

_GRACE_S = 5.0
"""How long beyond the deadline a caller waits for a loop that is held up before it gives up."""

_ANSWER_S = 0.5
"""How long the end of the interpreter waits for a loop that may be held up."""

_AT_ONCE = 16
_CALLS_AT_ONCE = 4
"""On one synchronous file system, without writes to open uploads."""

_OF_FSSPEC = ("listings_expiry_time", "max_paths", "protocol", "use_listings_cache")
_IDLE_S = 60.0
_IDLE_COUNT = 8
_ONE_FOR_ALL = frozenset({"gs", "memory", "s3"})
"""Schemes whose file system does not depend on the bucket."""

_ENDPOINT_NAMES = {
    "az": (
        ("account_host", "BlobEndpoint", "account_name", "AccountName"),
        ("AZURE_STORAGE_ACCOUNT_NAME",),
    ),
    "gs": (("endpoint_url",), ("STORAGE_EMULATOR_HOST",)),
    "s3": (("endpoint_url",), ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
}
"""By scheme: the options that name an endpoint, and the variables of the environment."""


def _start(run: Callable[[], object], name: str, delay_s: float = 0.0) -> None:
    """Run something later, in a thread that nobody waits for."""
    thread = threading.Timer(delay_s, run) if delay_s else threading.Thread(target=run)
    thread.name, thread.daemon = f"ckpt-storage {name}", True
    thread.start()


class _DaemonThreads(ThreadPoolExecutor):
    """Runs what a loop hands over, such as look-ups of names, in threads that hold up no exit."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin a call at once, in a thread of its own."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # raised where it is waited for
                future.set_exception(error)

        _start(run, "lookup")
        return future


def _new_loop() -> asyncio.AbstractEventLoop:
    # The list of sockets that epoll keeps would be shared with a child of fork.
    loop = asyncio.SelectorEventLoop(selectors.PollSelector())
    loop.set_default_executor(_DaemonThreads())

    async def cancel_all() -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def serve() -> None:
        loop.run_forever()
        loop.run_until_complete(cancel_all())
        loop.close()

    _start(serve, "loop")
    return loop


def _finalizers(fs: ForeignFs) -> list[weakref.finalize[..., Any]]:
    """Return what a library has registered to close its connections, were the object collected."""
    callbacks = [ref.__callback__ for ref in weakref.getweakrefs(fs)]
    return [one for one in callbacks if isinstance(one, weakref.finalize)]


def _end(fs: ForeignFs) -> None:
    """Close an instance's connections; may take long."""
    calls: list[Callable[[], object]] = [*_finalizers(fs)]
    if not getattr(fs, "async_impl", False):
        client = getattr(fs, "client", None)  # of paramiko; webdav4's has one of httpx
        calls.append(getattr(getattr(client, "http", client), "close", object))
    for call in calls:
        # What it says does not matter: nobody sends a request through it any more.
        with contextlib.suppress(Exception):
            call()


class _Held:
    """The instances of one file system, the options that its key refers to, and its clients.

    free: those that a call may take; of an asynchronous one the first serves all. taken: those
    that a thread has for itself, by identity, with the call. since_s: when calls under way began.
    Calls on all three are atomic; what waits for a call's end waits for `turn`.
    """

    def __init__(self, options: Mapping[str, Any], *, is_async: bool) -> None:
        self.options = options
        self.users: weakref.WeakSet[Client] = weakref.WeakSet()
        self.used_s = time.monotonic()
        self.loop = _new_loop() if is_async else None
        self.free: list[ForeignFs] = []
        self.taken: dict[int, tuple[ForeignFs, object]] = {}
        self.since_s: dict[object, float] = {}
        self.turn = threading.Condition()
        self.has_ended = False

    def enter(self, call: object, limit_s: float) -> None:
        """Wait until few calls are under way. One older than `limit_s` was given up."""
        with self.turn:
            while True:
                now_s = time.monotonic()
                younger = [at_s for at_s in self.since_s.values() if now_s - at_s < limit_s]
                if len(younger) < _CALLS_AT_ONCE:
                    break
                self.turn.wait(min(younger) + limit_s - now_s)
            self.since_s[call] = now_s

    def leave_turn(self, call: object) -> None:
        """Let another call in."""
        with self.turn:
            self.since_s.pop(call, None)
            self.turn.notify()

    def end(self) -> None:
        """Close what no thread has, and stop the loop, in a thread that nobody waits for."""
        self.has_ended = True

        def end() -> None:
            while self.free:
                _end(self.free.pop())
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self.loop.stop)

        with contextlib.suppress(RuntimeError):  # an interpreter that ends takes no new thread
            _start(end, "closing")

    def leave(self) -> None:
        """Have nothing closed, by anyone."""
        for finalizer in [one for fs in self.free for one in _finalizers(fs)]:
            finalizer.detach()


class _Process:
    """What this process has built."""

    def __init__(self) -> None:
        self._inherited: list[Mapping[Hashable, _Held]] = []
        self._begin()
        os.register_at_fork(after_in_child=self._after_fork)
        # A first finalizer has all called at exit; what is registered after that comes before.
        weakref.finalize(self, object)
        atexit.register(self._before_exit)

    def _begin(self) -> None:
        # A lock that came by fork may be held by a thread that is gone.
        self.lock = threading.Lock()
        self.held: dict[Hashable, _Held] = {}
        self._is_timed = False

    def _after_fork(self) -> None:
        for held in self.held.values():
            held.leave()
        # They are kept: dropping one would close sockets that the parent uses.
        self._inherited.append(self.held)
        self._begin()

    def _before_exit(self) -> None:
        """Have no library wait for a loop that is held up."""
        for held in list(self.held.values()):
            answered = threading.Event()
            if held.loop is not None:
                held.loop.call_soon_threadsafe(answered.set)
                if not answered.wait(_ANSWER_S):
                    held.leave()

    def end_idle(self) -> None:
        """End what no client has used for long; what stays idle is looked at again."""
        with self.lock:
            now_s = time.monotonic()
            idle = [(one.used_s, key) for key, one in self.held.items() if not one.users]
            idle.sort(key=lambda one: one[0])
            late = [*idle[:-_IDLE_COUNT], *(one for one in idle if now_s - one[0] >= _IDLE_S)]
            unused = [self.held.pop(key) for _, key in late if key in self.held]
            if len(unused) < len(idle) and not self._is_timed:
                with contextlib.suppress(RuntimeError):  # as above
                    _start(self._look_again, "closing", idle[len(unused)][0] + _IDLE_S - now_s)
                    self._is_timed = True
        for held in unused:
            held.end()

    def _look_again(self) -> None:
        self._is_timed = False
        self.end_idle()


_process = _Process()


def known_client_count() -> int:
    """Return how many file systems this process keeps."""
    return len(_process.held)


class Client:
    """Access to the file system of one location, whichever process asks.

    `options` are the storage options as the backend takes them; `request_timeout_s`
    (seconds) is the deadline of one `run`.
    """

    def __init__(
        self, location: Location, options: Mapping[str, Any], *, request_timeout_s: float
    ) -> None:
        self._location = location
        self._options = dict(options)
        self._timeout_s = request_timeout_s
        self.scrub = Scrubber(location.storage_options, location.target)
        authority = location.target.partition("://")[2].partition("/")[0]
        if location.protocol == "az":
            # container@account; the file system depends on the account only.
            authority = authority.partition("@")[2]
        place = "" if location.protocol in _ONE_FOR_ALL else authority
        # With the class: another may be registered for the protocol meanwhile.
        self._key = (location.protocol, self.family, place, frozen(self._options))
        self.endpoint = endpoint_of(location, options)
        self.is_async = bool(getattr(self.family, "async_impl", False))

    def __repr__(self) -> str:
        return f"Client({self._location.url!r})"

    @property
    def family(self) -> type:
        """The class of the file system, as it is registered with fsspec. Builds nothing."""
        import fsspec  # noqa: PLC0415  # costs time that a local checkpoint need not spend

        found: type = self._checked(lambda: fsspec.get_filesystem_class(self._location.protocol))
        return found

    @property
    def root(self) -> str:
        """The location's path as its file system spells it, without a slash at the end."""
        import fsspec.core  # noqa: PLC0415  # costs time that a local checkpoint need not spend

        return str(fsspec.core.strip_protocol(self._location.target)).rstrip("/")

    @property
    def fs(self) -> ForeignFs:
        """The asynchronous file system that all threads share.

        Built on first use. Raises `InvalidInputError` if the backend is missing or refuses the
        options.
        """
        held = self._held()
        found = held.free[:1]
        if not found:
            made = self._build(held.loop)
            with _process.lock:
                found = held.free[:1]
                held.free = found or [made]
            if found:  # two threads built one at the same time
                _end(made)
        return (found or [made])[0]

    def take(self) -> tuple[ForeignFs, Callable[[], None]]:
        """Return an instance, of a synchronous file system for this thread alone, and its return.

        One that is not returned is kept from others for good; see `refresh`.
        """
        if self.is_async:
            return self.fs, lambda: None
        held, call = self._held(), object()
        held.enter(call, self._timeout_s)
        try:
            try:
                fs = held.free.pop()
            except IndexError:
                fs = self._build(None)
        except BaseException:
            held.leave_turn(call)
            raise
        held.taken[id(fs)] = fs, call

        def give_back() -> None:
            if held.taken.pop(id(fs), None) is not None:
                held.free.append(fs)
            held.leave_turn(call)
            if held.has_ended:
                held.end()

        return fs, give_back

    def keep(self, fs: ForeignFs) -> None:
        """Let other calls in while `fs`, which an open upload needs, is not given back."""
        held = self._held()
        if id(fs) in held.taken:
            held.leave_turn(held.taken[id(fs)][1])

    def refresh(self, only: ForeignFs = None) -> None:
        """Build the file system, or just that instance, anew at its next use.

        Credentials are looked up again then, and connections made.
        """
        held = _process.held.get(self._key)
        dropped: list[ForeignFs] = []
        if held is not None:
            dropped = [fs for fs in held.free if only is None or fs is only]
            held.free = [fs for fs in held.free if fs not in dropped]
            taken = held.taken.pop(id(only), None)
            if taken is not None:
                dropped.append(only)
                held.leave_turn(taken[1])
        # Others may still have calls under way on one that is shared.
        wait_s = self._timeout_s + _GRACE_S if self.is_async else 0.0
        for fs in dropped:
            _start(partial(_end, fs), "closing", wait_s)

    def close(self) -> None:
        """Use the file system no more, until it is asked for again."""
        held = _process.held.get(self._key)
        if held is not None:
            held.users.discard(self)
        _process.end_idle()

    def run(
        self,
        operation: Callable[Concatenate[ForeignFs, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **more: P.kwargs,
    ) -> T:
        """Run one request of an asynchronous file system on its loop, until the deadline.

        Raises what the request raised, and `TimeoutError` when time is up; the request is
        then cancelled.
        """
        fs = self.fs
        timed = asyncio.wait_for(operation(fs, *args, **more), self._timeout_s)
        future = asyncio.run_coroutine_threadsafe(timed, fs.loop)
        try:
            return future.result(self._timeout_s + _GRACE_S)
        finally:
            # After an interrupt nobody waits for it any more; without effect once it is done.
            future.cancel()
            # It holds its exception, and the traceback of that holds this frame.
            del future

    def run_all(
        self, operation: Callable[[ForeignFs, A], Coroutine[Any, Any, object]], items: Sequence[A]
    ) -> None:
        """Run one request for each item, a few at a time; raise what the first failure raised."""

        async def run_some(fs: ForeignFs, some: Sequence[A]) -> None:
            await asyncio.gather(*(operation(fs, item) for item in some))

        for start in range(0, len(items), _AT_ONCE):
            self.run(run_some, items[start : start + _AT_ONCE])
            moved()

    def _held(self) -> _Held:
        held = _process.held.get(self._key)
        if held is None or self not in held.users:
            with _process.lock:
                held = _process.held.get(self._key)
                if held is None:
                    held = _Held(self._options, is_async=self.is_async)
                    _process.held[self._key] = held
                held.users.add(self)
            _process.end_idle()
        held.used_s = time.monotonic()
        return held

    def _build(self, loop: asyncio.AbstractEventLoop | None) -> ForeignFs:
        self._check_names()
        family, target = self.family, self._location.target
        if loop is not None:
            # Not every class takes a loop, or passes it on.
            family = type(family)(family.__name__, (family,), {"loop": property(lambda _: loop)})

        def build() -> ForeignFs:
            told: Mapping[str, Any] = family._get_kwargs_from_urls(target)  # type: ignore[attr-defined]  # noqa: SLF001  # of every class of fsspec
            # What is told twice must be the same.
            told = {name: told[name] for name in told if told[name] != self._options.get(name)}
            return family(**told, **self._options, skip_instance_cache=True)

        return self._checked(build)

    def _check_names(self) -> None:
        """Refuse an option that looks like a misspelt one: many classes swallow what is unknown."""
        known = set(_OF_FSSPEC)
        for kind in self.family.__mro__:
            known.update(inspect.signature(kind.__init__).parameters)  # type: ignore[misc]  # of a class
        for name in self._options.keys() - known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
            if near:
                raise InvalidInputError(
                    f"storage_options for {self._location.url} has {name!r}, which is no option "
                    f"of {self.family.__name__}.",
                    path=self._location.url,
                    next_step=f"Did you mean {near[0]!r}?",
                )

    def _checked(self, call: Callable[[], T]) -> T:
        """Return what fsspec returns; raise `InvalidInputError` for what it raises."""
        failure: CheckpointError
        try:
            return call()
        except ImportError as error:
            # fsspec raises its own from the one that names the package.
            package = getattr(error.__cause__, "name", None) or error.name
            failure = missing_backend(self._location.protocol, package or str(error))
        except CheckpointError:
            raise
        except Exception as error:  # noqa: BLE001  # backends refuse options with any type
            text = self.scrub(" ".join(str(error).split()))
            failure = InvalidInputError(
                f"No client for {self._location.url} could be made: "
                f"{type(error).__name__}: {text.rstrip('.')}.",
                path=self._location.url,
                next_step="Check storage_options.",
            )
        # Raised here, not where it was caught: the foreign one may carry credentials.
        raise failure


def address_of(location: Location, options: Mapping[str, Any]) -> str:
    """Return the URL that requests go to as options and environment tell it, or ""."""
    text = str(options.get("connection_string") or "")
    told = dict(part.partition("=")[::2] for part in text.split(";"))
    inner = options.get("client_kwargs") or {}
    names, variables = _ENDPOINT_NAMES.get(location.protocol, (("base_url", "host"), ()))
    found = [source.get(name) for source in (options, inner, told) for name in names]
    found += [os.environ.get(name) for name in variables]
    value = next((value for value in found if isinstance(value, str) and value), "")
    return value if not value or "://" in value else f"//{value}"


def endpoint_of(location: Location, options: Mapping[str, Any]) -> str:
    """Return host and port that requests go to, as far as options and environment tell."""
    address = address_of(location, options)
    if address or location.protocol in {*_ENDPOINT_NAMES, "memory"}:
        return urlsplit(address).netloc.rpartition("@")[2]
    return location.path.partition("/")[0]


def frozen(value: object) -> Hashable:
    """Return a key that is equal for equal options; objects count by identity."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), frozen(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(frozen(item) for item in value)
    if isinstance(value, str | bytes | int | float | bool | None):
        return type(value).__name__, repr(value)
    return type(value).__name__, f"{id(value):x}"
