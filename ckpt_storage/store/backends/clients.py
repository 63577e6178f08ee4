"""fsspec file systems: built in the first call, one set for all stores of equal options.

An asynchronous one has one instance, on the event loop of this module. A synchronous one has one
for each call under way and each open upload. A child of fork touches nothing that it inherited.
"""

from __future__ import annotations

import abc
import asyncio
import atexit
import collections
import contextlib
import difflib
import inspect
import os
import selectors
import threading
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from ckpt_storage.errors import CheckpointError, InvalidInputError, StorageError
from ckpt_storage.store.backend import Backend, ObjectInfo, Settings, ShortReadError
from ckpt_storage.store.location import Location, endpoint_of, missing_backend
from ckpt_storage.store.problems import explain, meaning_of
from ckpt_storage.store.redaction import scrubber
from ckpt_storage.store.threads import start_thread

from .drafts import is_draft_name

P = ParamSpec("P")
T = TypeVar("T")

ForeignFs: TypeAlias = Any
"""A file system of fsspec or of a package that plugs into it; none of them ships types."""

_GRACE_S = 5.0
"""How long beyond the deadline a caller waits for a loop that is held up before it gives up."""

_ANSWER_S = 0.5
"""How long the end of the interpreter waits for a loop that may be held up."""

_EARLIER = 0.9
_CALLS_AT_ONCE = 4
"""On a synchronous file system, each with a connection; servers refuse clients that have many."""

_OF_FSSPEC = ("listings_expiry_time", "max_paths", "protocol", "use_listings_cache")
_IDLE_COUNT = 8
_ONE_FOR_ALL = frozenset({"gs", "memory", "s3"})
"""Schemes whose file system does not depend on the bucket."""

_OUTAGES = frozenset({"bad-response", "connection", "credentials", "throttled", "timeout"})
"""What a client that connects as it is made raises about the server, and not about its options."""

_ANSWER_KINDS = frozenset({"exists", "not-found", "permission"})
"""Errors of a client that works: the storage answered."""


def _start(run: Callable[[], object], name: str, delay_s: float = 0.0) -> None:
    """Run something, perhaps later, in a thread that nobody waits for. Raises `StorageError`."""
    thread = threading.Timer(delay_s, run)
    thread.name, thread.daemon = f"ckpt-storage {name}", True
    start_thread(thread)


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

        try:
            _start(run, "lookup")
        except StorageError as error:
            future.set_exception(error)
        return future


def _finalizers(fs: ForeignFs) -> list[Any]:
    """Return what a library has registered to close its connections, were the object collected."""
    callbacks = [ref.__callback__ for ref in weakref.getweakrefs(fs)]
    return [one for one in callbacks if isinstance(one, weakref.finalize)]


def _end(instances: list[ForeignFs], delay_s: float = 0.0) -> None:
    """Close the connections of instances that nobody sends requests through any more."""

    def end() -> None:
        for fs in instances:
            calls = _finalizers(fs)
            if not getattr(fs, "async_impl", False):
                client = getattr(fs, "client", None)  # of paramiko; webdav4's has one of httpx
                calls.append(getattr(getattr(client, "http", client), "close", object))
            for call in calls:
                with contextlib.suppress(Exception):
                    call()

    # Without a thread for it, or in an interpreter that ends, the system closes them.
    with contextlib.suppress(StorageError):
        _start(end, "closing", delay_s)


class _Shared:
    """The instances of one file system; of an asynchronous one the first in `free` serves all."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.users: weakref.WeakSet[ClientBackend] = weakref.WeakSet()
        self.free: list[ForeignFs] = []
        self.turns = threading.BoundedSemaphore(_CALLS_AT_ONCE)


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
        self.lock = threading.Lock()
        self.shared: dict[Hashable, _Shared] = {}
        self.making = collections.defaultdict[type, threading.Lock](threading.Lock)
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of all asynchronous file systems."""
        with self.lock:
            if self._loop is None:
                # The list of sockets that epoll keeps would be shared with a child of fork.
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
        self._leave_all()
        # They are kept: dropping one would close sockets that the parent uses.
        self._inherited += [self.shared, self._loop]
        self._begin()

    def _before_exit(self) -> None:
        """Have no library wait for a loop that is held up."""
        answered = threading.Event()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(answered.set)
            if not answered.wait(_ANSWER_S):
                self._leave_all()

    def _leave_all(self) -> None:
        """Have nothing closed, by anyone."""
        for shared in list(self.shared.values()):
            for finalizer in [one for fs in shared.free for one in _finalizers(fs)]:
                finalizer.detach()


_process = _Process()

_SEEN_PLACES: set[Hashable] = set()
"""Buckets that were seen to exist, by this process or the one that it was forked from."""


class ClientBackend(Backend):
    """A backend over the file system of one location, in whichever process it is asked."""

    def __init__(
        self, location: Location, settings: Settings, *, options: Mapping[str, Any] | None = None
    ) -> None:
        """Take `options` of the file system in place of the location's."""
        import fsspec  # noqa: PLC0415  # costs time that a local checkpoint need not spend

        self._location = location
        self._options = dict(location.storage_options if options is None else options)
        # A request ends, and frees its memory, before its caller gives the call up.
        self._timeout_s = _EARLIER * settings.request_timeout_s
        self._scrub = scrubber(location.storage_options, location.target)
        self.endpoint = endpoint_of(location)
        # As it is registered with fsspec.
        self._family: Any = fsspec.get_filesystem_class(location.protocol)
        self._is_async = bool(getattr(self._family, "async_impl", False))
        # The path as the file system spells it.
        self._root = str(self._family._strip_protocol(location.target)).rstrip("/")  # noqa: SLF001  # fsspec's own way
        place = location.target.partition("://")[2].partition("/")[0]
        if location.protocol == "az":
            # container@account; the file system depends on the account only.
            place = place.partition("@")[2]
        elif location.protocol in _ONE_FOR_ALL:
            place = ""
        # With the class: another may be registered for the protocol meanwhile.
        self._key = (location.protocol, self._family, place, _frozen(self._options))

    def explain(self, error: BaseException) -> StorageError | None:
        """Tell an absent bucket from an absent object, where the answer is the same for both.

        The bucket is looked for once a process. Without the right to look, the object is absent.
        """
        bucket = self._bucket if self._may_lack_bucket(error) else ""
        if not bucket or (self._key, bucket) in _SEEN_PLACES:
            return None
        try:
            self._look_at_bucket()
        except Exception as failure:  # noqa: BLE001  # clients raise any type
            meaning = explain(failure, "look", self._location.url, scrub=self._scrub)
            if meaning.kind in {"permission", "unsupported"}:
                return None
            return self._no_bucket(bucket) if meaning.kind == "not-found" else meaning
        _SEEN_PLACES.add((self._key, bucket))
        return None

    def _no_bucket(self, bucket: str) -> StorageError:
        where = f" at {self.endpoint}" if self.endpoint else ""
        what = f"There is no {bucket!r}{where}, in which {self._location.url} would lie."
        step = "Check the name, or create it first: this package never creates one."
        return StorageError(what, path=self._location.url, next_step=step)

    @property
    @abc.abstractmethod
    def _bucket(self) -> str:
        """The bucket or container that has to be there before anything is saved; "" for none."""

    @abc.abstractmethod
    def _may_lack_bucket(self, error: BaseException) -> bool:
        """Return whether an error may mean that there is no such bucket."""

    @abc.abstractmethod
    def _look_at_bucket(self) -> None:
        """Ask for something that a bucket always answers; raise what a missing one does."""

    @abc.abstractmethod
    def _pages(self, prefix: str, *, recursive: bool) -> Iterator[Sequence[ObjectInfo]]:
        """Yield what is below a folder, as it comes; what is a folder has a path ending in "/"."""

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        for page in self._pages(prefix, recursive=recursive):
            for info in page:
                name = info.path.rpartition("/")[2]
                # Consoles make folders as empty objects, also the one that is listed.
                is_child = not recursive and info.path.strip("/") != prefix
                is_shown = not is_draft_name(name) if name else is_child
                if is_shown:
                    yield info

    @contextlib.contextmanager
    def _turn(self) -> Iterator[ForeignFs]:
        """Give an instance, a synchronous one for this call alone, when few calls are under way.

        A call that hangs keeps its turn; others wait for one for half of a call's time at most.
        """
        turns = self._shared().turns
        has_turn = not self._is_async and turns.acquire(timeout=self._timeout_s / 2)
        try:
            fs, is_sound = self._take(), False
            try:
                fs.invalidate_cache()
                yield fs
                is_sound = True
            except (CheckpointError, ShortReadError):
                is_sound = True
                raise
            except Exception as error:
                is_sound = meaning_of(error).kind in _ANSWER_KINDS
                raise
            finally:
                self._give_back(fs, is_sound=is_sound)
        finally:
            if has_turn:
                turns.release()

    def _take(self) -> ForeignFs:
        """Return an instance that is the caller's until it is given back, if it is synchronous."""
        free = self._shared().free
        if not self._is_async:
            with contextlib.suppress(IndexError):
                return free.pop()
            return self._build()
        if not free:
            # Of two threads that build it at once, both go on with one.
            free.append(self._build())
        return free[0]

    def _give_back(self, fs: ForeignFs, *, is_sound: bool = True) -> None:
        """Let others have an instance; one that is not sound is closed."""
        shared = _process.shared.get(self._key)
        if self._is_async:
            if not is_sound and shared is not None and any(fs is one for one in shared.free):
                self.refresh()
        elif is_sound and shared is not None:
            shared.free.append(fs)
        else:
            _end([fs])

    def refresh(self) -> None:
        """Build the file system anew at its next use: credentials are looked up again then."""
        shared = _process.shared.get(self._key)
        if shared is not None:
            dropped, shared.free = shared.free, []
            # Others may still have calls under way on one that is shared.
            _end(dropped, self._timeout_s + _GRACE_S if self._is_async else 0.0)

    def drop_caches(self, path: str) -> None:
        """Build the file system anew at its next use: it connects again, and caches nothing yet."""
        self.refresh()

    def close(self) -> None:
        """Use the file system no more, until it is asked for again; end those long unused."""
        known = _process.shared
        with _process.lock:
            if self._key in known:
                shared = known[self._key] = known.pop(self._key)
                shared.users.discard(self)
            idle = [key for key, one in known.items() if not one.users]
            ended = [known.pop(key) for key in idle[: max(0, len(idle) - _IDLE_COUNT)]]
        for one in ended:
            _end(one.free)

    def _run(
        self,
        operation: Callable[Concatenate[ForeignFs, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **more: P.kwargs,
    ) -> T:
        """Run one request on the loop; at the deadline cancel it and raise `TimeoutError`."""
        fs = self._take()
        timed = asyncio.wait_for(operation(fs, *args, **more), self._timeout_s)
        future = asyncio.run_coroutine_threadsafe(timed, fs.loop)
        try:
            return future.result(self._timeout_s + _GRACE_S)
        finally:
            # After an interrupt nobody waits for it any more; without effect once it is done.
            future.cancel()
            # It holds its exception, and the traceback of that holds this frame.
            del future

    def _shared(self) -> _Shared:
        with _process.lock:
            shared = _process.shared.get(self._key)
            if shared is None:
                shared = _process.shared[self._key] = _Shared(self._options)
            shared.users.add(self)
        return shared

    def _build(self) -> ForeignFs:
        """Return a new instance. Those of one class are made one at a time.

        Some clients, such as smbclient, fill a pool of the whole process without a lock.
        """
        self._check_names()
        with _process.lock:
            making = _process.making[self._family]
        if not making.acquire(timeout=self._timeout_s / 2):
            raise TimeoutError(f"another client of {self._location.protocol}:// is being made")
        try:
            return self._made()
        finally:
            making.release()

    def _made(self) -> ForeignFs:
        family, target = self._family, self._location.target
        if self._is_async:
            loop = _process.loop()
            # Not every class takes a loop, or passes it on.
            family = type(family)(family.__name__, (family,), {"loop": property(lambda _: loop)})
        try:
            parsed: Mapping[str, Any] = family._get_kwargs_from_urls(target)  # noqa: SLF001  # of every class of fsspec
            # A value in both the URL and the options must be the same.
            parsed = {k: value for k, value in parsed.items() if value != self._options.get(k)}
            return family(**parsed, **self._options, skip_instance_cache=True)
        except CheckpointError:
            raise
        except ImportError as error:
            failure = missing_backend(self._location.protocol, error.name or str(error))
        except Exception as error:
            if meaning_of(error).kind in _OUTAGES:
                raise
            # Clients refuse options with any type.
            text = self._scrub(" ".join(str(error).split()))
            url, kind = self._location.url, type(error).__name__
            what = f"No client for {url} could be made: {kind}: {text.rstrip('.')}."
            failure = InvalidInputError(what, path=url, next_step="Check storage_options.")
        # Raised here, not where it was caught: the foreign one may carry credentials.
        raise failure

    def _check_names(self) -> None:
        """Refuse an option that looks like a misspelt one: many classes swallow what is unknown."""
        known = set(_OF_FSSPEC)
        for kind in self._family.__mro__:
            known.update(inspect.signature(kind.__init__).parameters)
        for name in self._options.keys() - known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
            if near:
                url, kind = self._location.url, self._family.__name__
                what = f"storage_options for {url} has {name!r}, which is no option of {kind}."
                raise InvalidInputError(what, path=url, next_step=f"Did you mean {near[0]!r}?")


def _frozen(value: object) -> Hashable:
    """Return a key that is equal for equal options; objects count by identity."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _frozen(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    is_plain = isinstance(value, str | bytes | int | float | bool | None)
    return type(value).__name__, repr(value) if is_plain else f"{id(value):x}"
