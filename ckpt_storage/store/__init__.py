"""Storages behind one protocol, and the one function that opens them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import PageCache, RetryPolicy, Timeouts, check_page_cache

from .backend import Settings
from .location import Location, anchored

if TYPE_CHECKING:
    from .backend import Backend
    from .base import Store

__all__ = ["Location", "anchored", "endpoint_of", "open_store"]


def endpoint_of(location: Location) -> str:
    """Return the host, or account, that requests go to; "" for a local path or a default.

    By it and its URL, ranks agree on a storage. Holds no credentials.
    """
    if location.is_local:
        return ""
    from .backends import clients  # noqa: PLC0415  # local users need no fsspec

    return clients.endpoint_of(location, location.storage_options)


def open_store(  # all but the first are named
    url: str | os.PathLike[str] | Location,
    *,
    storage_options: Mapping[str, Any] | None = None,
    commit_location: Location | None = None,
    sync_files: bool = True,
    page_cache: PageCache = "keep",
    timeouts: Timeouts | None = None,
    retry: RetryPolicy | None = None,
) -> Store:
    """Return the store at a path or URL, with deadlines and retries around it.

    Nothing is asked of the storage yet. Commit objects go to `commit_location` if it is given
    (see `split`). `sync_files=False` leaves out fsync on local paths, `page_cache="drop"` has
    uploads there leave nothing in the kernel's cache.
    With a `Location`, `storage_options` must not be given again. Raises
    `InvalidInputError`.
    """
    if isinstance(url, Location):
        if storage_options is not None:
            raise InvalidInputError(
                "storage_options were given twice.",
                next_step="Leave them out where a Location is passed: it carries them.",
            )
        location = url
    else:
        location = Location.of(url, storage_options)
    check_page_cache(page_cache)
    request_timeout_s = (timeouts or Timeouts()).request
    store: Store
    backend = _backend(location, Settings(request_timeout_s=request_timeout_s))
    if backend is not None:
        from .store import Store as Facade  # noqa: PLC0415  # stores load when one is opened

        store = Facade(backend, url=location.url, policy=retry, request_timeout_s=request_timeout_s)
    else:
        from .retry import RetryStore  # noqa: PLC0415  # stores load when one is opened

        store = RetryStore(
            _plain_store(
                location,
                sync_files=sync_files,
                page_cache=page_cache,
                request_timeout_s=request_timeout_s,
            ),
            policy=retry,
            request_timeout_s=request_timeout_s,
        )
    if commit_location is not None:
        from .split import SplitStore  # noqa: PLC0415  # few need it

        commits = open_store(commit_location, sync_files=sync_files, timeouts=timeouts, retry=retry)
        store = SplitStore(store, commits)
    return store


def _backend(location: Location, settings: Settings) -> Backend | None:
    """Return the backend of a location, None where there is none yet."""
    if location.protocol == "memory":
        from .backends.memory import MemoryBackend  # noqa: PLC0415  # loads fsspec

        return MemoryBackend(location, settings)
    return None


def _plain_store(
    location: Location,
    *,
    sync_files: bool,
    page_cache: PageCache,
    request_timeout_s: float,
) -> Store:
    if location.is_local:
        from .local import LocalStore  # noqa: PLC0415  # stores load when one is opened

        return LocalStore(location.target, sync_files=sync_files, page_cache=page_cache)
    from .remote import RemoteStore  # noqa: PLC0415  # stores load when one is opened

    return RemoteStore(location, request_timeout_s=request_timeout_s)
