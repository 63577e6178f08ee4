"""Which data plane serves a location: obstore where it means the same, else fsspec, and why.

Knows which families obstore has, and where it cannot be used; knows no option of any storage.
Called by `remote`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import Engine, RetryPolicy

from .location import Location
from .obstore_client import ObstoreClient, is_cut_off
from .obstore_plan import ObstorePlan, UntranslatableError
from .redaction import Scrubber

__all__ = ["obstore_client"]

_LOG = logging.getLogger(__name__)

_FAMILIES = {"az": "Azure", "gs": "Google Cloud Storage", "s3": "S3"}
_BESIDE = {"gs": ", its uploads by gcsfs"}
"""What obstore's plane leaves to another of what moves much; see `dialect_obstore`."""

_ALIASES = {"az": ("abfs", "az"), "gs": ("gcs", "gs"), "s3": ("s3", "s3a")}

_OLDEST = (0, 11)
"""The first version whose clients take `read_timeout`; others may have come with other packages."""

# What was logged, by process, so that each location is told of once: without its options, which
# may be credentials that are new each time.
_TOLD: set[tuple[int, tuple[str, str]]] = set()


def obstore_client(
    location: Location,
    *,
    engine: Engine,
    request_timeout_s: float,
    policy: RetryPolicy | None,
) -> ObstoreClient | None:
    """Return the client that serves a remote location; None where fsspec does.

    The choice is logged once for each location. Asks nothing of the storage but, once per process,
    AWS for the region of a bucket. Raises `InvalidInputError` if obstore was asked for and
    cannot follow.
    """
    if engine == "fsspec" or (engine == "auto" and location.protocol not in _FAMILIES):
        return None
    try:
        plan = _plan(location, request_timeout_s)
    except UntranslatableError as reason:
        # It names what was given, and what was given in the wrong place may be a credential.
        told = Scrubber(location.storage_options, location.target)(str(reason))
        if engine == "obstore":
            raise InvalidInputError(
                f"engine='obstore' cannot serve {location.url}: {told}.",
                path=location.url,
                next_step=_next_step(reason),
            ) from None
        _tell(location, "%s is served by fsspec, not by obstore: %s.", told)
        return None
    _tell(location, "%s is served by obstore%s.", _BESIDE.get(location.protocol, ""))
    return ObstoreClient(plan, request_timeout_s=request_timeout_s, policy=policy)


def _plan(location: Location, request_timeout_s: float) -> ObstorePlan:
    """Return how obstore is to be built; raises `UntranslatableError`."""
    if location.protocol not in _FAMILIES:
        raise UntranslatableError(f"{location.protocol}://", "is no storage that obstore knows")
    if importlib.util.find_spec("obstore") is None:
        raise UntranslatableError("The package obstore", "is not installed")
    if (version := _version()) < _OLDEST:
        raise UntranslatableError(
            f"The installed obstore {'.'.join(map(str, version))}",
            f"is older than {'.'.join(map(str, _OLDEST))}",
        )
    if is_cut_off():
        raise UntranslatableError("This process", "came by fork from one that had used obstore")
    options = {**_defaults(location.protocol), **location.storage_options}
    if location.protocol == "s3":
        from .obstore_s3 import plan_s3 as plan_family  # noqa: PLC0415  # one family is loaded
    elif location.protocol == "az":
        from .obstore_azure import (  # noqa: PLC0415  # one family is loaded
            plan_azure as plan_family,
        )
    else:
        from .obstore_gcs import plan_gcs as plan_family  # noqa: PLC0415  # one family is loaded
    return plan_family(location, options, os.environ, request_timeout_s=request_timeout_s)


def _version() -> tuple[int, ...]:
    """Return the first two numbers of obstore's version."""
    return _version_by(importlib.metadata.version)


@functools.cache
def _version_by(look_up: Callable[[str], str]) -> tuple[int, ...]:
    """Return what `look_up` tells; it searches the whole path, 3 ms here, so each is asked once."""
    try:
        text = look_up("obstore")
    except importlib.metadata.PackageNotFoundError:
        return _OLDEST
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _defaults(protocol: str) -> Mapping[str, Any]:
    """Return what fsspec's own configuration gives to every file system of a protocol."""
    from fsspec.config import conf  # noqa: PLC0415  # a local checkpoint needs none of it

    found: dict[str, Any] = {}
    for name in _ALIASES[protocol]:
        found |= conf.get(name, {})
    return found


def _next_step(reason: UntranslatableError) -> str:
    if "not installed" in reason.why:
        return "Run: pip install 'ckpt-storage[fast]', or leave engine='auto'."
    if "is older than" in reason.why:
        return "Run: pip install -U 'ckpt-storage[fast]', or leave engine='auto'."
    if "by fork" in reason.why:
        return "Start processes by 'spawn' or 'forkserver', or leave engine='auto'."
    if "is not given" in reason.why:
        return f"Give {reason.what}, or pass engine='fsspec'."
    if reason.what.startswith("storage_options"):
        return "Drop the option, or pass engine='fsspec'."
    return "Pass engine='fsspec', or leave engine='auto'."


def _tell(location: Location, message: str, detail: object) -> None:
    key = (os.getpid(), (location.url, str(detail)))
    if key not in _TOLD:
        _TOLD.add(key)
        _LOG.info(message, location.url, detail)
