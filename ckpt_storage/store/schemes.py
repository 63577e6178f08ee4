"""The schemes of URLs: how they are spelt, and which of them lead to a storage."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_storage.errors import InvalidInputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "ckpt_storage.backends"
"""The group in which a package's metadata name backends, by scheme."""

SERVED: set[str] = set()
"""Schemes of registered backends: whatever they were before, these serve them now."""

BUCKETS = frozenset({"az", "gs", "s3"})
USERS = frozenset({"arrow_hdfs", "ftp", "hdfs", "sftp", "smb", "ssh", "webhdfs"})
"""Schemes whose URLs may hold `user:password@`; in az:// a container stands before "@"."""

_SPELT_ALIKE = {"abfs": "az", "abfss": "az", "gcs": "gs", "local": "file", "s3a": "s3"}
_EXTRAS = {"az": "azure", "gs": "gcs", "s3": "s3"}
_READ_ONLY = frozenset(
    "data gist git github http https libarchive reference tar zip".split()  # noqa: SIM905  # short
)
_WRAPPERS = frozenset(
    "async_wrapper asyncwrapper blockcache cached dir filecache generic simplecache".split()  # noqa: SIM905  # as above
)


def kept(scheme: str) -> str:
    """Return the spelling of a scheme that is kept: "s3" for "S3A"."""
    return _SPELT_ALIKE.get(scheme.lower(), scheme.lower())


def is_scheme(text: str) -> bool:
    """Return whether a text may stand before "://"."""
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", text) is not None


@functools.cache
def installed() -> Mapping[str, Sequence[EntryPoint]]:
    """Return the backends that installed packages bring, by scheme."""
    from importlib.metadata import entry_points  # noqa: PLC0415  # local users need none

    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        found.setdefault(kept(entry.name), []).append(entry)
    return found


def known() -> dict[str, str]:
    """Map every scheme to the class of fsspec that serves it, "" where nothing is to install."""
    from fsspec.registry import (  # noqa: PLC0415  # import of this package stays cheap
        known_implementations,
        registry,
    )

    found = {protocol: str(entry["class"]) for protocol, entry in known_implementations.items()}
    return {**found, **dict.fromkeys([*registry, *installed(), *SERVED], "")}


def check(protocol: str, given: str, shown: str) -> None:
    """Refuse a scheme that does not exist, has no backend installed or cannot be written to.

    `given` is how it was spelt, `shown` the URL without credentials. Raises `InvalidInputError`.
    """
    if protocol in SERVED or protocol in installed():
        return
    if protocol in _READ_ONLY:
        raise InvalidInputError(
            f"{given}:// can only be read.",
            next_step="Give a storage that takes writes; for an object store write "
            "s3://BUCKET/PREFIX and pass its address as storage_options={'endpoint_url': ...}."
            if protocol.startswith("http")
            else "Give a storage that takes writes.",
        )
    if protocol in _WRAPPERS:
        raise InvalidInputError(
            f"{given}:// is a wrapper around another file system.",
            next_step="Give the URL of the storage itself.",
        )
    schemes = known()
    if protocol not in schemes:
        near = difflib.get_close_matches(given, sorted({*schemes, *_SPELT_ALIKE}), 1, 0.5)
        hint = f"Did you mean {near[0]}://? " if near else ""
        raise InvalidInputError(
            f"No storage is known by the scheme of {shown!r}.",
            next_step=f"{hint}Install the fsspec backend that provides {given}://, or register "
            "one of your own (register_backend).",
        )
    module = schemes[protocol].partition(":")[0].split(".")[0]
    if module and importlib.util.find_spec(module) is None:
        raise missing_backend(protocol, module)


def check_options(protocol: str, given: str, options: Mapping[str, Any]) -> None:
    """Refuse an option that fsspec would take for the scheme, in the place of the URL's."""
    meant = options.get("protocol", given)
    if not isinstance(meant, str) or kept(meant) != protocol:
        raise InvalidInputError(
            f"storage_options has 'protocol': {meant!r}, and the URL begins with {given}://.",
            next_step="Leave the option out: the URL names the storage. A server that is to be "
            "reached over plain HTTP is named by its address, with http://.",
        )


def missing_backend(protocol: str, package: str) -> InvalidInputError:
    """Return the error that says which package a scheme needs and how to install it."""
    extra = _EXTRAS.get(protocol)
    install = f"ckpt-storage[{extra}]" if extra else package
    return InvalidInputError(
        f"{protocol}:// needs the package {package}, which is not installed.",
        next_step=f"Run: pip install '{install}'",
    )
