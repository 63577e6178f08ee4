"""Finds the backend of a URL, and opens stores."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeAlias

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import PageCache, RetryPolicy, Timeouts, check_choice

from .backend import Backend, Settings
from .location import (
    BUCKETS,
    REGISTERED,
    Location,
    installed_backends,
    kept_scheme,
    missing_backend,
)
from .redaction import scrubber
from .store import Store

Opener: TypeAlias = Callable[[Location, Settings], Backend]
"""Makes the backend of a root, as every backend's class does; sends no request."""

_BUILT_IN = BUCKETS | {"file", "memory"}


def register_backend(scheme: str, opener: Opener, *, replace: bool = False) -> None:
    """Register `opener(location, settings)` as the maker of backends for `scheme://...`.

    The first call of a store calls it, by that call's deadline. Registration holds for this
    process: other processes register too, or find the backend in a package's metadata, in the
    group `ckpt_storage.backends`. Raises `InvalidInputError` if the scheme has a backend, unless
    `replace` is set.
    """
    name = kept_scheme(scheme)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        step = "Give what stands before '://', such as 'mystore'."
        raise InvalidInputError(f"{scheme!r} is no scheme of URLs.", next_step=step)
    if not replace and name in {*REGISTERED, *_BUILT_IN, *installed_backends()}:
        step = "Pass replace=True to replace it."
        raise InvalidInputError(f"{scheme}:// has a backend already.", next_step=step)
    REGISTERED[name] = opener


def open_store(
    url: str | os.PathLike[str] | Location,
    *,
    storage_options: Mapping[str, Any] | None = None,
    sync_files: bool = True,
    page_cache: PageCache = "keep",
    timeouts: Timeouts | None = None,
    retry: RetryPolicy | None = None,
) -> Store:
    """Return the store at a path or URL, with deadlines and retries around it.

    No request is sent yet, and no backend is made. `sync_files=False` omits fsync on local paths,
    `page_cache="drop"` keeps uploads there out of the kernel's cache. A `Location` comes without
    `storage_options`. Raises `InvalidInputError`.
    """
    if isinstance(url, Location):
        if storage_options is not None:
            step = "Do not pass them with a Location, which has its own."
            raise InvalidInputError("storage_options were passed twice.", next_step=step)
        location = url
    else:
        location = Location.of(url, storage_options)
    check_choice("page_cache", page_cache, PageCache)
    limit_s = (timeouts or Timeouts()).request
    settings = Settings(request_timeout_s=limit_s, sync_files=sync_files, page_cache=page_cache)
    return Store(
        lambda: backend_of(location, settings),
        url=location.url,
        scrub=scrubber(location.storage_options, location.target),
        policy=retry,
        request_timeout_s=limit_s,
        scope=location.scope,
    )


def backend_of(location: Location, settings: Settings) -> Backend:
    """Return a new backend of a root: registered, of a package, built in, or over fsspec.

    Raises `InvalidInputError` if what it needs is not installed.
    """
    opener: Opener | None = REGISTERED.get(location.protocol)
    entry = installed_backends().get(location.protocol)
    if opener is None and entry is not None:
        try:
            opener = entry.load()
        except (AttributeError, ImportError) as error:
            scheme = location.protocol
            what = f"The backend of {scheme}://, {entry.value}, cannot be loaded: {error}."
            step = "Repair or uninstall the package that brings it."
            raise InvalidInputError(what, next_step=step) from error
    return (opener or _built_in(location))(location, settings)


_CLASSES = {
    "adlfs.AzureBlobFileSystem": "azure.AzureBackend",
    "fsspec.HTTPFileSystem": "web.WebBackend",
    "gcsfs.GCSFileSystem": "gcs.GcsBackend",
    "s3fs.S3FileSystem": "s3.S3Backend",
}
"""Backends by a base class of the file system."""


def _built_in(location: Location) -> Opener:
    backend = "local.LocalBackend"
    if not location.is_local:
        import fsspec  # noqa: PLC0415  # local users need none

        try:
            kinds = fsspec.get_filesystem_class(location.protocol).__mro__
        except ImportError as error:
            # Its cause is the error that names the package.
            package = getattr(error.__cause__, "name", None) or error.name or str(error)
            raise missing_backend(location.protocol, package) from None
        names = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in kinds]
        backend = next(
            (_CLASSES[name] for name in names if name in _CLASSES), "generic.FsspecBackend"
        )
        # Classes derived from fsspec's memory store elsewhere.
        if names[0] == "fsspec.MemoryFileSystem":
            backend = "memory.MemoryBackend"
    module, _, name = backend.partition(".")
    opener: Opener = getattr(import_module(f"ckpt_storage.store.backends.{module}"), name)
    return opener
