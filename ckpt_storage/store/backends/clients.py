"""fsspec file systems: built in the first call, one set for all stores of equal options.

An asynchronous file system has one instance, on an event loop of its own in a daemon thread. Of a
synchronous one there are up to four, each of which serves one call at a time. What no open store
uses is closed after a minute; eight such are kept at most. A child of fork builds its own and
touches nothing that it inherited.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import difflib
import inspect
import math
import os
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar
from urllib.parse import urlsplit

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.store.location import Location, missing_backend
from ckpt_storage.store.redaction import Scrubber
from ckpt_storage.store.timed import moved

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
_INSTANCE_COUNT = 4
"""How many threads at a time use one synchronous file system, each an instance of its own."""
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

        _start(threading.Thread(target=run, name="ckpt-storage lookup"))
        return future


def _start(thread: threading.Thread) -> None:
    thread.daemon = True
    thread.start()


def _start_late(thread: threading.Thread) -> None:
    with contextlib.suppress(RuntimeError):  # an interpreter that ends takes no new thread
        _start(thread)


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

    _start(threading.Thread(target=serve, name="ckpt-storage loop"))
    return loop


def _finalizers(fs: ForeignFs) -> list[weakref.finalize[..., Any]]:
    """Return what a library has registered to close its connections, were the object collected."""
    callbacks = [ref.__callback__ for ref in weakref.getweakrefs(fs)]
    return [one for one in callbacks if isinstance(one, weakref.finalize)]


@dataclass(slots=True, eq=False)
class Instance:
    """One instance of a file system: None until it is built. `since_s`: of the call that has it."""

    fs: ForeignFs = None
    since_s: float = math.inf

    @property
    def is_free(self) -> bool:
        """Whether no call has it for itself."""
        return self.since_s == math.inf

    def end(self) -> None:
        """Close its connections; may take long."""
        calls: list[Callable[[], object]] = [*_finalizers(self.fs)]
        if not getattr(self.fs, "async_impl", False):
            client = getattr(self.fs, "client", None)  # of paramiko; webdav4's has one of httpx
            calls.append(getattr(getattr(client, "http", client), "close", object))
        for call in calls:
            # What it says does not matter: nobody sends a request through it any more.
            with contextlib.suppress(Exception):
                call()


class _Held:
    """The instances of one file system, the options that its key refers to, and its clients."""

    def __init__(self, options: Mapping[str, Any], *, is_async: bool, call_s: float) -> None:
        self.options = options
        self.users: weakref.WeakSet[Client] = weakref.WeakSet()
        self.used_s = time.monotonic()
        self.loop = _new_loop() if is_async else None
        self._call_s = call_s
        self._instances: list[Instance] = []
        self._changed = threading.Condition()

    def shared(self, build: Callable[[], ForeignFs]) -> Instance:
        """Return the one instance that all threads use."""
        known = self._instances
        if not known:
            made = Instance(build())
            with self._changed:
                known = self._instances = self._instances or [made]
            if known[0] is not made:  # two threads built one at the same time
                made.end()
        return known[0]

    def take(self, wanted: Instance | None) -> Instance:
        """Wait for `wanted`, or for any instance if it is None or gone, and keep others off it."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                # A call that has had its time was given up; its instance stays with it.
                kept = [one for one in self._instances if now_s - one.since_s < self._call_s]
                those = [wanted] if wanted in kept else kept
                if wanted not in kept and len(kept) < _INSTANCE_COUNT:
                    those = [*kept, Instance()]
                found = next((one for one in those if one.is_free), None)
                self._instances = kept if found is None or found in kept else [*kept, found]
                if found is not None:
                    found.since_s = now_s
                    return found
                first_s = min(one.since_s for one in those)
                self._changed.wait(max(0.001, first_s + self._call_s - now_s))

    def give_back(self, instance: Instance) -> None:
        """Let others use an instance, or end it if it is kept no more."""
        with self._changed:
            instance.since_s = math.inf
            is_kept = instance in self._instances
            self._changed.notify_all()
        if not is_kept:
            instance.end()

    def drop(self, only: Instance | None = None) -> list[Instance]:
        """Keep `only`, or no instance any more; return those that no call has taken."""
        with self._changed:
            dropped = [one for one in self._instances if only in {None, one}]
            self._instances = [one for one in self._instances if one not in dropped]
            self._changed.notify_all()
        return [one for one in dropped if one.is_free]

    def end(self) -> None:
        """Close all connections and stop the loop, in a thread that nobody waits for."""
        instances, loop = self.drop(), self.loop

        def end() -> None:
            for instance in instances:
                instance.end()
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)

        _start_late(threading.Thread(target=end, name="ckpt-storage closing"))

    def leave(self) -> None:
        """Have nothing closed, by anyone."""
        for finalizer in [one for of in self._instances for one in _finalizers(of.fs)]:
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
        self._timer: threading.Timer | None = None

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
        """End what no client has used for long; what stays idle has a thread that comes again."""
        with self.lock:
            now_s = time.monotonic()
            idle = [(one.used_s, key) for key, one in self.held.items() if not one.users]
            idle.sort(key=lambda one: one[0])
            late = [*idle[:-_IDLE_COUNT], *(one for one in idle if now_s - one[0] >= _IDLE_S)]
            unused = [self.held.pop(key) for _, key in late if key in self.held]
            if len(unused) < len(idle) and self._timer is None:
                next_s = idle[len(unused)][0] + _IDLE_S
                self._timer = threading.Timer(next_s - now_s, self._look_again)
                _start_late(self._timer)
        for held in unused:
            held.end()

    def _look_again(self) -> None:
        self._timer = None
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
        self.request_timeout_s = request_timeout_s
        self.scrub = Scrubber(location.storage_options, location.target)
        authority = location.target.partition("://")[2].partition("/")[0]
        if location.protocol == "az":
            # container@account; the file system depends on the account only.
            authority = authority.partition("@")[2]
        place = "" if location.protocol in _ONE_FOR_ALL else authority
        self._key = (location.protocol, place, frozen(self._options))
        self.endpoint = endpoint_of(location, options)
        self._is_async = bool(getattr(self.family, "async_impl", False))

    def __repr__(self) -> str:
        return f"Client({self._location.url!r})"

    @property
    def fs(self) -> ForeignFs:
        """The file system that all threads share.

        Built on first use. Raises `InvalidInputError` if the backend is missing or refuses the
        options.
        """
        return self._shared(self._held()).fs

    @contextlib.contextmanager
    def turn(self, wanted: Instance | None = None) -> Iterator[Instance]:
        """Have an instance, of a synchronous file system for this thread alone.

        It is `wanted` if that is still kept. Waiting does not count as time of the call.
        """
        held = self._held()
        if self._is_async:
            yield self._shared(held)
            return
        instance = held.take(wanted)
        try:
            moved()
            if instance.fs is None:
                instance.fs = self._build(None)
            yield instance
        finally:
            held.give_back(instance)

    def _shared(self, held: _Held) -> Instance:
        return held.shared(lambda: self._build(held.loop))

    def _held(self) -> _Held:
        held = _process.held.get(self._key)
        if held is None or self not in held.users:
            with _process.lock:
                held = _process.held.get(self._key)
                if held is None:
                    held = _process.held[self._key] = _Held(
                        self._options, is_async=self._is_async, call_s=self.request_timeout_s
                    )
                held.users.add(self)
            _process.end_idle()
        held.used_s = time.monotonic()
        return held

    @property
    def family(self) -> type:
        """The class of the file system, as it is registered with fsspec. Builds nothing."""
        import fsspec  # noqa: PLC0415  # costs time that a local checkpoint need not spend

        found: type = self._checked(lambda: fsspec.get_filesystem_class(self._location.protocol))
        return found

    def close(self) -> None:
        """Use the file system no more, until it is asked for again."""
        held = _process.held.get(self._key)
        if held is not None:
            held.users.discard(self)
        _process.end_idle()

    @property
    def root(self) -> str:
        """The location's path as its file system spells it, without a slash at the end."""
        import fsspec.core  # noqa: PLC0415  # costs time that a local checkpoint need not spend

        return str(fsspec.core.strip_protocol(self._location.target)).rstrip("/")

    def refresh(self, only: Instance | None = None) -> None:
        """Build the file system, or just that instance, anew at its next use.

        Credentials are looked up again then, and connections made.
        """
        held = _process.held.get(self._key)
        dropped = held.drop(only) if held is not None else []
        # Others may still have calls under way on one that is shared.
        wait_s = self.request_timeout_s + _GRACE_S if self._is_async else 0.0
        for instance in dropped:
            _start(threading.Timer(wait_s, instance.end))

    def run(self, operation: Callable[[ForeignFs], Coroutine[Any, Any, T]]) -> T:
        """Run one request of an asynchronous file system on its loop, until the deadline.

        Raises what the request raised, and `TimeoutError` when time is up; the request is
        then cancelled.
        """
        fs = self.fs
        timed = asyncio.wait_for(operation(fs), self.request_timeout_s)
        future = asyncio.run_coroutine_threadsafe(timed, fs.loop)
        try:
            return future.result(self.request_timeout_s + _GRACE_S)
        finally:
            # After an interrupt nobody waits for it any more; without effect once it is done.
            future.cancel()
            # It holds its exception, and the traceback of that holds this frame.
            del future

    def run_all(
        self,
        operation: Callable[[ForeignFs, A], Coroutine[Any, Any, object]],
        items: Sequence[A],
    ) -> None:
        """Run one request for each item, a few at a time; raise what the first failure raised."""

        async def run_some(fs: ForeignFs, some: Sequence[A]) -> None:
            await asyncio.gather(*(operation(fs, item) for item in some))

        for start in range(0, len(items), _AT_ONCE):
            self.run(partial(run_some, some=items[start : start + _AT_ONCE]))
            moved()

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


def endpoint_of(location: Location, options: Mapping[str, Any]) -> str:
    """Return host and port that requests go to, as far as options and environment tell."""
    text = str(options.get("connection_string") or "")
    told = dict(part.partition("=")[::2] for part in text.split(";"))
    inner = options.get("client_kwargs") or {}
    names, variables = _ENDPOINT_NAMES.get(location.protocol, (("base_url", "host"), ()))
    found = [source.get(name) for source in (options, inner, told) for name in names]
    found += [os.environ.get(name) for name in variables]
    value = next((value for value in found if isinstance(value, str) and value), None)
    if value is not None:
        return urlsplit(value if "://" in value else f"//{value}").netloc.rpartition("@")[2]
    if location.protocol in _ENDPOINT_NAMES or location.protocol == "memory":
        return ""
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
