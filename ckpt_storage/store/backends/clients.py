"""fsspec file systems: built when first asked, once per process, address and options.

They are kept in a dict keyed by process id: a child of fork, or an object that was pickled, builds
its own and never touches an inherited loop or socket. One that no open store uses is dropped, which
closes its connections, a minute after its last use; eight such are kept at most.

An asynchronous file system serves all threads. Of a synchronous one there are up to four
instances, each of which serves one call at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.store.location import Location
from ckpt_storage.store.redaction import Scrubber
from ckpt_storage.store.schemes import missing_backend
from ckpt_storage.store.timed import moved

A = TypeVar("A")
T = TypeVar("T")

ForeignFs: TypeAlias = Any
"""A file system of fsspec or of a package that plugs into it; none of them ships types."""

_GRACE_S = 5.0
"""How long beyond the deadline a caller waits for a loop that is held up before it gives up."""

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


@dataclass(slots=True, eq=False)
class Instance:
    """One instance of a file system: None until it is built. `since_s`: of the call that has it."""

    fs: ForeignFs = None
    since_s: float | None = None


class _Built:
    """The instances of one file system, the options its key refers to, and who uses them."""

    def __init__(self, options: Mapping[str, Any], call_s: float) -> None:
        self.options = options
        self.users: weakref.WeakSet[Client] = weakref.WeakSet()
        self.used_s = time.monotonic()
        self._call_s = call_s
        self._instances: list[Instance] = []
        self._changed = threading.Condition()

    def shared(self, build: Callable[[], ForeignFs]) -> ForeignFs:
        """Return the one instance that all threads use."""
        with self._changed:
            known = self._instances
        if not known:
            made = Instance(build())
            with self._changed:
                known = self._instances = self._instances or [made]
        return known[0].fs

    def take(self, wanted: Instance | None) -> Instance:
        """Wait for `wanted`, or for any instance if it is None or gone, and keep others off it."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                # A call that has had its time was given up; its instance stays with it.
                self._instances = [
                    one
                    for one in self._instances
                    if one.since_s is None or now_s - one.since_s < self._call_s
                ]
                is_kept = wanted in self._instances
                those = [one for one in self._instances if one is wanted or not is_kept]
                found = next((one for one in those if one.since_s is None), None)
                if found is None and not is_kept and len(those) < _INSTANCE_COUNT:
                    found = Instance()
                if found is not None:
                    found.since_s = now_s
                    # The one that was used last comes last.
                    self._instances = [one for one in self._instances if one is not found]
                    self._instances.append(found)
                    return found
                first_s = min(one.since_s or now_s for one in those)
                self._changed.wait(max(0.001, first_s + self._call_s - now_s))

    def give_back(self, instance: Instance) -> None:
        """Let others use an instance, or end it if it is kept no more."""
        with self._changed:
            instance.since_s = None
            is_kept = instance in self._instances
            self._changed.notify_all()
        if not is_kept:
            _end([instance.fs])

    def drop(self) -> list[ForeignFs]:
        """Keep no instance any more; return those to end, which no call has."""
        with self._changed:
            dropped, self._instances = self._instances, []
            self._changed.notify_all()
        return [one.fs for one in dropped if one.since_s is None]


# Entries of other process ids came by fork. They stay: dropping one would close sockets that
# the parent uses, through a loop that does not run here.
_BUILT: dict[tuple[int, Hashable], _Built] = {}
_LOCKS: dict[int, threading.Lock] = {}
_TIMERS: dict[int, threading.Timer] = {}
_here = threading.local()


def _lock() -> threading.Lock:
    """Return this process's lock; one inherited by fork may be held by a thread that is gone."""
    return _LOCKS.setdefault(os.getpid(), threading.Lock())


def known_client_count() -> int:
    """Return how many file systems this process keeps."""
    return sum(process_id == os.getpid() for process_id, _ in _BUILT)


def _drop_idle() -> list[ForeignFs]:
    """Return this process's file systems to end, kept no more; called with the lock held.

    What stays idle has a thread that comes back for it, one for all.
    """
    now_s, process_id = time.monotonic(), os.getpid()
    idle = [
        (built.used_s, key)
        for key, built in _BUILT.items()
        if key[0] == process_id and not built.users
    ]
    idle.sort(key=lambda one: one[0], reverse=True)
    late = [
        key
        for place, (used_s, key) in enumerate(idle)
        if place >= _IDLE_COUNT or now_s - used_s >= _IDLE_S
    ]
    dropped = [fs for key in late for fs in _BUILT.pop(key).drop()]
    if len(late) < len(idle) and process_id not in _TIMERS:
        oldest_s = idle[len(idle) - len(late) - 1][0]
        timer = threading.Timer(oldest_s + _IDLE_S - now_s, _look_again)
        timer.name, timer.daemon = "ckpt-storage idle", True
        _TIMERS[process_id] = timer
        timer.start()
    return dropped


def _look_again() -> None:
    with _lock():
        _TIMERS.pop(os.getpid(), None)
        unused = _drop_idle()
    _end(unused)


def _end(file_systems: Sequence[ForeignFs]) -> None:
    """End the connections of file systems that nobody uses; s3fs and gcsfs do so by themselves."""
    for fs in file_systems:
        service = getattr(fs, "service_client", None)
        client = getattr(fs, "client", None)
        close = getattr(getattr(client, "http", client), "close", None)
        # What it says does not matter: nobody sends a request through it any more.
        with contextlib.suppress(Exception):
            if service is not None:  # adlfs
                asyncio.run_coroutine_threadsafe(service.close(), fs.loop)
            elif close is not None:  # webdav4, and those of fsspec's own that have a client
                close()


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
        self._is_shared = bool(getattr(self.family, "async_impl", False))

    def __repr__(self) -> str:
        return f"Client({self._location.url!r})"

    @property
    def fs(self) -> ForeignFs:
        """The file system of this process, built on first use.

        Raises `InvalidInputError` if the backend is missing or refuses the options.
        """
        mine: tuple[Client, ForeignFs] | None = getattr(_here, "mine", None)
        if mine is not None and mine[0] is self:
            return mine[1]
        return self._entry().shared(self._build)

    @contextlib.contextmanager
    def turn(self, wanted: Instance | None = None) -> Iterator[Instance | None]:
        """Have an instance of a synchronous file system for this thread alone: `wanted`, or any.

        Of an asynchronous one, None. Waiting does not count as time of the call.
        """
        if self._is_shared:
            yield None
            return
        built = self._entry()
        instance = built.take(wanted)
        before = getattr(_here, "mine", None)
        try:
            moved()
            if instance.fs is None:
                instance.fs = self._build()
            _here.mine = self, instance.fs
            yield instance
        finally:
            _here.mine = before
            built.give_back(instance)

    def _entry(self) -> _Built:
        key = (os.getpid(), self._key)
        built, unused = _BUILT.get(key), []
        if built is None or self not in built.users:
            with _lock():
                built = _BUILT.setdefault(key, _Built(self._options, self.request_timeout_s))
                built.users.add(self)
                unused = _drop_idle()
            _end(unused)
        built.used_s = time.monotonic()
        return built

    @property
    def family(self) -> type:
        """The class of the file system, as it is registered with fsspec. Builds nothing."""
        import fsspec  # noqa: PLC0415  # costs time that a local checkpoint need not spend

        found: type = self._checked(lambda: fsspec.get_filesystem_class(self._location.protocol))
        return found

    def close(self) -> None:
        """Use the file system no more, until it is asked for again."""
        with _lock():
            built = _BUILT.get((os.getpid(), self._key))
            if built is not None:
                built.users.discard(self)
            unused = _drop_idle()
        _end(unused)

    @property
    def root(self) -> str:
        """The location's path as its file system spells it, without a slash at the end."""
        import fsspec.core  # noqa: PLC0415  # costs time that a local checkpoint need not spend

        return str(fsspec.core.strip_protocol(self._location.target)).rstrip("/")

    def refresh(self) -> None:
        """Build the file system anew at its next use, so that credentials are looked up again."""
        built = _BUILT.get((os.getpid(), self._key))
        dropped = built.drop() if built is not None else []
        if not self._is_shared:  # others may still use one that is shared
            _end(dropped)

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

    def _build(self) -> ForeignFs:
        import fsspec.core  # noqa: PLC0415  # costs time that a local checkpoint need not spend

        self._check_names()
        fs, _ = self._checked(
            lambda: fsspec.core.url_to_fs(
                self._location.target, **self._options, skip_instance_cache=True
            )
        )
        return fs

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


async def in_daemon_thread(call: Callable[[], object]) -> None:
    """Run a call that blocks the loop's thread in one of its own, which holds up no exit.

    The threads of `asyncio.to_thread` are joined when the interpreter ends.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def run() -> None:
        failure: BaseException | None = None
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, failure)

    threading.Thread(target=run, name="ckpt-storage credentials", daemon=True).start()
    await ended


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
