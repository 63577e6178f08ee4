"""Backends over fsspec file systems, whose instances are built in the first call and shared."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import difflib
import inspect
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import fsspec

from ckpt_storage.errors import CheckpointError, InvalidInputError, StorageError
from ckpt_storage.store.backend import Backend, ObjectInfo, Settings, ShortReadError
from ckpt_storage.store.location import Location, endpoint_of, missing_backend
from ckpt_storage.store.problems import explain, meaning_of
from ckpt_storage.store.redaction import scrubber

from .client_registry import REGISTRY, ForeignFs, Instances, close_instances
from .temp_files import is_temp_name

P = ParamSpec("P")
T = TypeVar("T")

_GRACE_S = 5.0
"""How long after the timeout a caller waits for an event loop that is blocked."""

_CLIENT_TIMEOUT_FRACTION = 0.9
"""A request ends, and frees its memory, before its caller abandons the call."""

_OF_FSSPEC = ("listings_expiry_time", "max_paths", "protocol", "use_listings_cache")
_IDLE_COUNT = 8
_ONE_FOR_ALL = frozenset({"gs", "memory", "s3"})
"""Schemes whose file system does not depend on the bucket."""

_OUTAGES = frozenset({"bad-response", "connection", "credentials", "throttled", "timeout"})
"""Errors of a client's construction that are the server's, not the options'."""

_ERRORS_OF_A_LIVE_CONNECTION = frozenset({"exists", "not-found", "permission"})
"""Responses of the storage, after which the instance is still usable."""

_SEEN_PLACES: set[Hashable] = set()
"""Buckets that exist, as seen by this process or its parent before a fork."""


class ClientBackend(Backend):
    """A backend over the file system of one location; usable after a fork, too."""

    def __init__(
        self, location: Location, settings: Settings, *, options: Mapping[str, Any] | None = None
    ) -> None:
        """Take `options` of the file system in place of the location's."""
        self._location = location
        self._options = dict(location.storage_options if options is None else options)
        self._timeout_s = _CLIENT_TIMEOUT_FRACTION * settings.request_timeout_s
        self._scrub = scrubber(location.storage_options, location.target)
        self.endpoint = endpoint_of(location)
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
        # With the class, as another class may be registered for the protocol later.
        self._key = (location.protocol, self._family, place, _frozen(self._options))

    def explain(self, error: BaseException) -> StorageError | None:
        """Distinguish an absent bucket from an absent object, if the response is the same for both.

        The bucket is looked up once per process. Without the right to, the object is absent.
        """
        bucket = self._bucket if self._may_lack_bucket(error) else ""
        if not bucket or (self._key, bucket) in _SEEN_PLACES:
            return None
        try:
            self._check_bucket()
        except Exception as failure:  # noqa: BLE001  # clients raise any type
            meaning = explain(failure, "look", self._location.url, scrub=self._scrub)
            if meaning.kind in {"permission", "unsupported"}:
                return None
            if meaning.kind != "not-found":
                return meaning
            where = f" at {self.endpoint}" if self.endpoint else ""
            what = f"There is no {bucket!r}{where}, in which {self._location.url} would lie."
            step = "Check the name, or create it first: this package never creates one."
            return StorageError(what, path=self._location.url, next_step=step)
        _SEEN_PLACES.add((self._key, bucket))
        return None

    @property
    @abc.abstractmethod
    def _bucket(self) -> str:
        """The bucket or container that must exist before a save; "" for none."""

    @abc.abstractmethod
    def _may_lack_bucket(self, error: BaseException) -> bool:
        """Return whether an error may mean that there is no such bucket."""

    @abc.abstractmethod
    def _check_bucket(self) -> None:
        """Send a request that every bucket answers; raise the error for an absent one."""

    @abc.abstractmethod
    def _pages(self, prefix: str, *, recursive: bool) -> Iterator[Sequence[ObjectInfo]]:
        """Yield the pages of a listing; folders have a path that ends in "/"."""

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        for page in self._pages(prefix, recursive=recursive):
            for info in page:
                name = info.path.rpartition("/")[2]
                # Consoles create empty objects for folders, also for the listed folder.
                is_child = not recursive and info.path.strip("/") != prefix
                is_shown = not is_temp_name(name) if name else is_child
                if is_shown:
                    yield info

    @contextlib.contextmanager
    def _borrowed_client(self) -> Iterator[ForeignFs]:
        """Yield an instance, a synchronous one for this call alone, while few calls are running.

        A call that hangs keeps its slot; others wait for a slot for half of their timeout at most.
        """
        slots = self._instances().slots
        has_slot = not self._is_async and slots.acquire(timeout=self._timeout_s / 2)
        try:
            fs, healthy = self._acquire(), False
            try:
                fs.invalidate_cache()
                yield fs
                healthy = True
            except (CheckpointError, ShortReadError):
                healthy = True
                raise
            except Exception as error:
                healthy = meaning_of(error).kind in _ERRORS_OF_A_LIVE_CONNECTION
                raise
            finally:
                self._release(fs, healthy=healthy)
        finally:
            if has_slot:
                slots.release()

    def _acquire(self) -> ForeignFs:
        """Return an instance; a synchronous one is the caller's until it is released."""
        free = self._instances().free
        if not self._is_async:
            with contextlib.suppress(IndexError):
                return free.pop()
            return self._build()
        if not free:
            # Two threads that build it at once both use the first.
            free.append(self._build())
        return free[0]

    def _release(self, fs: ForeignFs, *, healthy: bool = True) -> None:
        """Return an instance to the others; close it if it is not healthy."""
        known = REGISTRY.instances.get(self._key)
        if self._is_async:
            if not healthy and known is not None and any(fs is other for other in known.free):
                self.refresh()
        elif healthy and known is not None:
            known.free.append(fs)
        else:
            close_instances([fs])

    def refresh(self) -> None:
        """Build the file system again at its next use, which looks up credentials again."""
        known = REGISTRY.instances.get(self._key)
        if known is not None:
            dropped, known.free = known.free, []
            # Other threads may still have calls in flight on a shared instance.
            close_instances(dropped, self._timeout_s + _GRACE_S if self._is_async else 0.0)

    def drop_caches(self, path: str) -> None:
        """Build the file system again at its next use: with new connections and empty caches."""
        self.refresh()

    def close(self) -> None:
        """Stop using the file system until the next call; close those that are long unused."""
        known = REGISTRY.instances
        with REGISTRY.lock:
            if self._key in known:
                instances = known[self._key] = known.pop(self._key)
                instances.users.discard(self)
            idle = [key for key, instances in known.items() if not instances.users]
            closed = [known.pop(key) for key in idle[: max(0, len(idle) - _IDLE_COUNT)]]
        for instances in closed:
            close_instances(instances.free)

    def _run(
        self,
        operation: Callable[Concatenate[ForeignFs, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **more: P.kwargs,
    ) -> T:
        """Run one request on the loop; at the deadline cancel it and raise `TimeoutError`."""
        fs = self._acquire()
        timed = asyncio.wait_for(operation(fs, *args, **more), self._timeout_s)
        future = asyncio.run_coroutine_threadsafe(timed, fs.loop)
        try:
            return future.result(self._timeout_s + _GRACE_S)
        finally:
            # Ends the request after an interrupt; without effect once it is done.
            future.cancel()
            # Its exception's traceback refers to this frame: break the cycle.
            del future

    def _instances(self) -> Instances:
        with REGISTRY.lock:
            instances = REGISTRY.instances.get(self._key)
            if instances is None:
                instances = REGISTRY.instances[self._key] = Instances(self._options)
            instances.users.add(self)
        return instances

    def _build(self) -> ForeignFs:
        """Return a new instance. Those of one class are constructed one at a time.

        Some clients, such as smbclient, fill a pool of the whole process without a lock.
        """
        self._check_names()
        with REGISTRY.lock:
            construction = REGISTRY.construction[self._family]
        if not construction.acquire(timeout=self._timeout_s / 2):
            raise TimeoutError(f"another client of {self._location.protocol}:// is being made")
        try:
            return self._construct()
        finally:
            construction.release()

    def _construct(self) -> ForeignFs:
        family, target = self._family, self._location.target
        if self._is_async:
            loop = REGISTRY.loop()
            # Not every class accepts a loop, or passes it on.
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
            # Clients refuse options with exceptions of any type.
            text = self._scrub(" ".join(str(error).split()))
            url, kind = self._location.url, type(error).__name__
            what = f"No client for {url} could be made: {kind}: {text.rstrip('.')}."
            failure = InvalidInputError(what, path=url, next_step="Check storage_options.")
        # Raised outside of the handler: the foreign exception may hold credentials.
        raise failure

    def _check_names(self) -> None:
        """Refuse an option that looks misspelt: many classes ignore unknown ones."""
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
    """Return a key that is equal for equal options; objects are compared by identity."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _frozen(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    is_plain = isinstance(value, str | bytes | int | float | bool | None)
    return type(value).__name__, repr(value) if is_plain else f"{id(value):x}"
