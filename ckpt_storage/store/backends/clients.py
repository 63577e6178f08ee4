"""fsspec file systems: built in the first call, one set for all stores of equal options.

An asynchronous file system has one instance, on the event loop of this module, in a daemon thread.
A synchronous one has one for each call under way and one for each open upload. Eight sets that no
open store uses are kept. A child of fork builds its own and touches nothing that it inherited.
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
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
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
"""On a synchronous file system, each with a connection; servers refuse clients that have many."""

_OF_FSSPEC = ("listings_expiry_time", "max_paths", "protocol", "use_listings_cache")
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
    with contextlib.suppress(RuntimeError):  # an interpreter that ends takes no new thread
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
    _start(loop.run_forever, "loop")
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


class _Shared:
    """The instances of one file system, the options that its key refers to, and its clients.

    free: those that a call may take; of an asynchronous one the first serves all. Calls on lists
    and sets are atomic.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.users: weakref.WeakSet[Client] = weakref.WeakSet()
        self.free: list[ForeignFs] = []
        self.turns = threading.BoundedSemaphore(_CALLS_AT_ONCE)

    def end(self) -> None:
        """Close what no call has, in a thread that nobody waits for."""

        def end() -> None:
            while self.free:
                _end(self.free.pop())

        _start(end, "closing")

    def leave(self) -> None:
        """Have nothing closed, by anyone."""
        for finalizer in [one for fs in self.free for one in _finalizers(fs)]:
            finalizer.detach()


class _Process:
    """What this process has built, the longest unused first."""

    def __init__(self) -> None:
        self._inherited: list[object] = []
        self._begin()
        os.register_at_fork(after_in_child=self._after_fork)
        # A first finalizer has all called at exit; what is registered after that comes before.
        weakref.finalize(self, object)
        atexit.register(self._before_exit)

    def _begin(self) -> None:
        # A lock that came by fork may be held by a thread that is gone.
        self._lock = threading.Lock()
        self.shared: dict[Hashable, _Shared] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of all asynchronous file systems."""
        with self._lock:
            self._loop = self._loop or _new_loop()
            return self._loop

    def _after_fork(self) -> None:
        for shared in self.shared.values():
            shared.leave()
        # They are kept: dropping one would close sockets that the parent uses.
        self._inherited += [self.shared, self._loop]
        self._begin()

    def _before_exit(self) -> None:
        """Have no library wait for a loop that is held up."""
        answered = threading.Event()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(answered.set)
            if not answered.wait(_ANSWER_S):
                for shared in list(self.shared.values()):
                    shared.leave()

    def join(self, key: Hashable, client: Client, options: Mapping[str, Any]) -> _Shared:
        """Return what serves a key, which the client uses from now on."""
        with self._lock:
            shared = self.shared.setdefault(key, _Shared(options))
            shared.users.add(client)
        return shared

    def leave(self, key: Hashable, client: Client) -> None:
        """Let a client use nothing any more; end what has been unused for longest."""
        with self._lock:
            shared = self.shared.pop(key, None)
            if shared is not None:
                shared.users.discard(client)
                self.shared[key] = shared
            idle = [key for key, one in self.shared.items() if not one.users]
            count = max(0, len(idle) - _IDLE_COUNT)
            ended = [self.shared.pop(key) for key in idle[:count]]
        for one in ended:
            one.end()


_process = _Process()


def known_client_count() -> int:
    """Return how many file systems this process keeps."""
    return len(_process.shared)


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
        self.endpoint = endpoint_of(location, options)

        def find() -> type:
            import fsspec  # noqa: PLC0415  # costs time that a local checkpoint need not spend

            found: type = fsspec.get_filesystem_class(location.protocol)
            return found

        self.family: Any = self._checked(find)
        """The class of the file system, as it is registered with fsspec."""
        self.is_async = bool(getattr(self.family, "async_impl", False))
        authority = location.target.partition("://")[2].partition("/")[0]
        if location.protocol == "az":
            # container@account; the file system depends on the account only.
            authority = authority.partition("@")[2]
        place = "" if location.protocol in _ONE_FOR_ALL else authority
        # With the class: another may be registered for the protocol meanwhile.
        self._key = (location.protocol, self.family, place, _frozen(self._options))

    def __repr__(self) -> str:
        return f"Client({self._location.url!r})"

    @property
    def root(self) -> str:
        """The location's path as its file system spells it, without a slash at the end."""
        return str(self.family._strip_protocol(self._location.target)).rstrip("/")  # noqa: SLF001  # fsspec's own way

    @property
    def fs(self) -> ForeignFs:
        """The asynchronous file system that all threads share, built on first use.

        Raises `InvalidInputError` if it refuses the options.
        """
        shared = self._shared()
        found = shared.free[:1]
        if not found:
            made = self._build()
            # Of two threads that build it at once, both go on with one.
            shared.free.append(made)
            found = [*shared.free[:1], made]
        return found[0]

    @contextlib.contextmanager
    def turn(self, *, sound: tuple[type[BaseException], ...]) -> Iterator[ForeignFs]:
        """Give an instance, a synchronous one for this call alone, when few calls are under way.

        It is kept for later calls unless the block raises something other than `sound`.
        A call that hangs keeps its turn; others wait at most half of a call's time for one.
        """
        turns = self._shared().turns
        has_turn = not self.is_async and turns.acquire(timeout=self._timeout_s / 2)
        try:
            fs = self.take()
            try:
                yield fs
            except BaseException as error:
                self.give_back(fs, is_sound=isinstance(error, sound))
                raise
            self.give_back(fs)
        finally:
            if has_turn:
                turns.release()

    def take(self) -> ForeignFs:
        """Return an instance that is the caller's until it is given back, if it is synchronous."""
        if self.is_async:
            return self.fs
        try:
            return self._shared().free.pop()
        except IndexError:
            return self._build()

    def give_back(self, fs: ForeignFs, *, is_sound: bool = True) -> None:
        """Let others have an instance; one that is not sound is closed."""
        shared = _process.shared.get(self._key)
        if self.is_async:
            if not is_sound and shared is not None and any(fs is one for one in shared.free):
                self.refresh()
        elif is_sound and shared is not None:
            shared.free.append(fs)
        else:
            _start(partial(_end, fs), "closing")

    def refresh(self) -> None:
        """Build the file system anew at its next use: credentials are looked up again then."""
        shared = _process.shared.get(self._key)
        if shared is not None:
            dropped, shared.free = shared.free, []
            # Others may still have calls under way on one that is shared.
            wait_s = self._timeout_s + _GRACE_S if self.is_async else 0.0
            for fs in dropped:
                _start(partial(_end, fs), "closing", wait_s)

    def close(self) -> None:
        """Use the file system no more, until it is asked for again."""
        _process.leave(self._key, self)

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

    def _shared(self) -> _Shared:
        shared = _process.shared.get(self._key)
        if shared is None or self not in shared.users:
            shared = _process.join(self._key, self, self._options)
        return shared

    def _check_names(self) -> None:
        """Refuse an option that looks like a misspelt one: many classes swallow what is unknown."""
        known = set(_OF_FSSPEC)
        for kind in self.family.__mro__:
            known.update(inspect.signature(kind.__init__).parameters)
        for name in self._options.keys() - known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
            if near:
                raise InvalidInputError(
                    f"storage_options for {self._location.url} has {name!r}, which is no option "
                    f"of {self.family.__name__}.",
                    path=self._location.url,
                    next_step=f"Did you mean {near[0]!r}?",
                )

    def _build(self) -> ForeignFs:
        self._check_names()
        family, target = self.family, self._location.target
        if self.is_async:
            loop = _process.loop()
            # Not every class takes a loop, or passes it on.
            family = type(family)(family.__name__, (family,), {"loop": property(lambda _: loop)})

        def build() -> ForeignFs:
            told: Mapping[str, Any] = family._get_kwargs_from_urls(target)  # noqa: SLF001  # of every class of fsspec
            # What is told twice must be the same.
            told = {name: told[name] for name in told if told[name] != self._options.get(name)}
            return family(**told, **self._options, skip_instance_cache=True)

        return self._checked(build)

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


def _frozen(value: object) -> Hashable:
    """Return a key that is equal for equal options; objects count by identity."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _frozen(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, str | bytes | int | float | bool | None):
        return type(value).__name__, repr(value)
    return type(value).__name__, f"{id(value):x}"
