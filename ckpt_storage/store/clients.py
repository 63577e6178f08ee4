"""fsspec file systems: built once per process, address and options, and called with a deadline.

Knows fsspec, its event loop and what fork does to both; knows no storage's requests. Built
file systems are kept for the life of the process, since fsspec has no way to close one, in a
dict keyed by process id: a child of fork, or an object that was pickled, builds its own and
never touches an inherited loop or socket. Called by `remote` and the dialects.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from ckpt_storage.errors import CheckpointError, InvalidInputError

from .location import Location, missing_backend
from .redaction import Scrubber
from .timed import moved

__all__ = ["Client", "ForeignFs", "endpoint_of", "frozen", "known_client_count"]

A = TypeVar("A")
T = TypeVar("T")

ForeignFs: TypeAlias = Any
"""A file system of fsspec or of a package that plugs into it; none of them ships types."""

_GRACE_S = 5.0
"""How long beyond the deadline a caller waits for a loop that is held up before it gives up."""

_AT_ONCE = 16
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


@dataclass(frozen=True, slots=True)
class _Built:
    """One file system and the options that it was built with, which its key refers to."""

    fs: ForeignFs
    options: Mapping[str, Any] = field(repr=False)


# Entries of other process ids came by fork. They stay: dropping one would close sockets that
# the parent uses, through a loop that does not run here.
_BUILT: dict[tuple[int, Hashable], _Built] = {}
_LOCKS: dict[int, threading.Lock] = {}


def _lock() -> threading.Lock:
    """Return this process's lock; one inherited by fork may be held by a thread that is gone."""
    return _LOCKS.setdefault(os.getpid(), threading.Lock())


def known_client_count() -> int:
    """Return how many file systems this process has built and keeps."""
    return sum(process_id == os.getpid() for process_id, _ in _BUILT)


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

    def __repr__(self) -> str:
        return f"Client({self._location.url!r})"

    @property
    def fs(self) -> ForeignFs:
        """The file system of this process, built on first use.

        Raises `InvalidInputError` if the backend is missing or refuses the options.
        """
        key = (os.getpid(), self._key)
        built = _BUILT.get(key)
        if built is None:
            with _lock():
                built = _BUILT.get(key)
                if built is None:
                    built = self._keep(key)
        return built.fs

    @property
    def root(self) -> str:
        """The location's path as its file system spells it, without a slash at the end."""
        import fsspec.core  # noqa: PLC0415  # costs time that a local checkpoint need not spend

        return str(fsspec.core.strip_protocol(self._location.target)).rstrip("/")

    def refresh(self) -> None:
        """Build the file system anew if it was built, so that credentials are looked up again."""
        key = (os.getpid(), self._key)
        with _lock():
            if key in _BUILT:
                self._keep(key)

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

    def _keep(self, key: tuple[int, Hashable]) -> _Built:
        built = _BUILT[key] = _Built(self._build(), self._options)
        return built

    def _build(self) -> ForeignFs:
        import fsspec.core  # noqa: PLC0415  # costs time that a local checkpoint need not spend

        failure: CheckpointError
        try:
            fs, _ = fsspec.core.url_to_fs(
                self._location.target, **self._options, skip_instance_cache=True
            )
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
        else:
            return fs
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
