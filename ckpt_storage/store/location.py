"""Where a checkpoint lies: what users pass, checked and brought into one form. Asks no storage."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ckpt_storage.errors import InvalidInputError

from .redaction import without_secrets

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

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SCHEME_ONLY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(:|//)")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::|::[A-Za-z][A-Za-z0-9+.-]*://|://.*::")
_TAIL = re.compile(r"[?#].*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Location:
    """One root: a folder on a file system or a prefix on a storage.

    protocol: the scheme in its kept spelling: "file" for every local path, "s3", "gs",
        "az", "memory", or any other fsspec protocol.
    target: what is opened: an absolute local path, or a URL, perhaps with a password.
    storage_options: handed to the fsspec backend; never printed.
    """

    protocol: str
    target: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(
        cls,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the location that a user's path or URL means.

        Raises `InvalidInputError`, with what to write instead, for anything that names
        no root one could save to.
        """
        text = _text_of(url)
        options = dict(storage_options or {})
        match = _SCHEME.match(text)
        if match is None:
            return cls(protocol="file", target=_absolute(text), storage_options=options)
        given, rest = match.group(1).lower(), text[match.end() :]
        protocol = kept_scheme(given)
        if protocol == "file":
            target = _file_url_path(rest)
        else:
            _check_scheme(protocol, given, without_secrets(f"{given}://{rest}"))
            _check_options(protocol, given, options)
            target = f"{protocol}://{_checked_rest(protocol, rest)}"
        return cls(protocol=protocol, target=target, storage_options=options)

    def join(self, checkpoint_id: str | os.PathLike[str] | None) -> Location:
        """Return the location of `checkpoint_id` below this one.

        An absolute path or full URL replaces this location; the storage options stay
        unless it lies on another kind of storage. None and "" mean this location.
        Raises `InvalidInputError`.
        """
        if checkpoint_id is None or (isinstance(checkpoint_id, str) and not checkpoint_id):
            return self
        text = _text_of(checkpoint_id)
        if text.startswith(("/", "~")) or _SCHEME.match(text):
            other = Location.of(text)
            keeps = self.is_local or other.protocol == self.protocol
            options = self.storage_options if keeps else {}
            return dataclasses.replace(other, storage_options=options)
        parts = [part for part in text.rstrip("/").split("/") if part != "."]
        if ".." in parts:
            raise InvalidInputError(
                f"The checkpoint id {without_secrets(text)!r} leads out of {self.url} by '..'.",
                next_step="Give a name below it, an absolute path or a full URL.",
            )
        below = "/".join(part for part in parts if part or not self.is_local)
        if not self.is_local and (tail := _TAIL.search(below)):
            raise _has_tail(below[: tail.start()])
        if not below.strip("/"):
            return self
        return self.child(below)

    def child(self, name: str) -> Location:
        """Return the location of a folder that a listing of this one showed, whatever its name."""
        separator = "" if self.target.endswith("/") else "/"
        return dataclasses.replace(self, target=f"{self.target}{separator}{name}")

    @property
    def is_local(self) -> bool:
        """Whether this is a path of the operating system's file systems."""
        return self.protocol == "file"

    @property
    def path(self) -> str:
        """The absolute local path; elsewhere what follows the scheme, without credentials."""
        return self.target if self.is_local else _shown(self.protocol, self.target)

    @property
    def url(self) -> str:
        """The name of this root, the same for every spelling of it, without credentials."""
        return f"{self.protocol}://{self.path}"

    def scope(self) -> Hashable:
        """Return a key for what is one storage: a file system's device, or a bucket and options.

        What a probe finds out below one root holds for all roots of the same scope. The
        options enter as a digest only.
        """
        if self.is_local:
            folder = Path(self.target)
            while not folder.exists() and folder != folder.parent:
                folder = folder.parent
            return (self.protocol, folder.stat().st_dev)
        options = repr(sorted(self.storage_options.items(), key=lambda item: item[0]))
        digest = hashlib.sha256(options.encode()).hexdigest()
        return (self.protocol, self.path.partition("/")[0], digest)

    def __repr__(self) -> str:
        return f"Location({self.url!r})"


def anchored(url: str | os.PathLike[str]) -> str:
    """Return `url` as another thread or process may use it: it depends on no working folder.

    Raises `InvalidInputError` as `Location.of`.
    """
    location = Location.of(url)
    return location.target if location.is_local else os.fspath(url)


def _text_of(url: object) -> str:
    """Return the text of a path or URL after the checks that every spelling must pass."""
    if not isinstance(url, str | os.PathLike):
        raise InvalidInputError(
            f"A {type(url).__name__} is no path or URL.",
            next_step="Give a str such as 's3://bucket/run', or a pathlib.Path.",
        )
    text = os.fspath(url)
    if not isinstance(text, str):
        raise InvalidInputError(
            "A path of bytes cannot be used.", next_step="Decode it: os.fsdecode(path)."
        )
    if not text.strip():
        raise InvalidInputError(
            "The path is empty.", next_step="Give a folder or a URL such as 's3://bucket/run'."
        )
    if "\0" in text:
        raise InvalidInputError(
            f"The path {without_secrets(text)!r} contains a NUL character.", next_step="Remove it."
        )
    if _CHAIN.search(text):
        raise InvalidInputError(
            f"{without_secrets(text)!r} is a chain of file systems ('::').",
            next_step="Give the URL of the storage itself; caches must not stand before it.",
        )
    _check_colon(text, is_text=isinstance(url, str))
    return text


def _check_colon(text: str, *, is_text: bool) -> None:
    """Refuse what a URL becomes when it goes through `pathlib` or loses its slashes."""
    first = text.strip().partition("/")[0]
    match = _SCHEME_ONLY.match(text.strip())
    if match is None or _SCHEME.match(text):
        return
    scheme = match.group(1).lower()
    kept = kept_scheme(scheme)
    if match.group(2) == "//":
        is_mangled = kept in BUCKETS | USERS
    else:
        is_mangled = kept in known_schemes() if is_text else first.endswith(":")
    if is_mangled:
        rest = text.strip()[match.end() :].lstrip("/")
        slashes = ":///" if kept == "file" else "://"
        hint = without_secrets(f"{scheme}{slashes}{rest}")
        raise InvalidInputError(
            f"{without_secrets(text)!r} is neither a path nor a URL.",
            next_step=f"Pass the URL as a str: {hint!r} (pathlib folds its slashes).",
        )


def _absolute(text: str) -> str:
    """Return a path from the root, without "." and ".."; a link before ".." is followed first."""
    path = os.path.join(os.getcwd(), os.path.expanduser(text))  # noqa: PTH109, PTH111, PTH118  # a Path would drop nothing but dots
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            before = "/" + "/".join(parts)
            # Where "link/.." leads, only the file system says.
            if os.path.islink(before):  # noqa: PTH114  # as above
                parts = [*filter(None, os.path.realpath(before).split("/"))]
            del parts[-1:]
        elif part not in {"", "."}:
            parts.append(part)
    return "/" + "/".join(parts)


def _file_url_path(rest: str) -> str:
    """Return the path of a `file://` URL, which has an empty host or none but localhost."""
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if not path.startswith("/"):
        shown = without_secrets(f"file://{rest}").removeprefix("file://")
        raise InvalidInputError(
            f"'file://{shown}' names a host, or is a relative path.",
            next_step=f"Write three slashes for an absolute path: 'file:///{shown}'.",
        )
    return _absolute(path)


def _checked_rest(protocol: str, rest: str) -> str:
    """Return what follows `scheme://`, with trailing slashes dropped and the rest kept as is."""
    shown = without_secrets(f"{protocol}://{rest}")
    if protocol == "memory":
        rest = rest.lstrip("/")
    if protocol in BUCKETS and not rest.partition("/")[0]:
        raise InvalidInputError(
            f"{shown!r} names no bucket.",
            next_step=f"Write {protocol}://BUCKET/PREFIX.",
        )
    _check_user_info(protocol, rest)
    if tail := _TAIL.search(rest):
        raise _has_tail(without_secrets(f"{protocol}://{rest[: tail.start()]}"))
    if {".", ".."} & set(rest.split("/")):
        raise InvalidInputError(
            f"{shown!r} contains '.' or '..', which storages treat differently.",
            next_step="Write the URL without them.",
        )
    return rest.rstrip("/")


def _check_user_info(protocol: str, rest: str) -> None:
    """Refuse credentials where the scheme's URLs hold none, and those that cannot be parsed."""
    authority = rest.partition("/")[0]
    user, at, host = authority.rpartition("@")
    port = host.rpartition("]")[2].partition(":")[2]
    if protocol in USERS:
        # A password with a slash ends the authority early, so that its host has an odd port.
        is_wrong = bool(port) and not port.isdigit()
    else:
        # A secret key may contain slashes; a colon otherwise stands in ARNs and ports only.
        is_wrong = ":" in user or bool(at and protocol != "az")
        if port and not host.startswith("arn:"):
            is_wrong |= protocol in BUCKETS or "@" in rest
    if is_wrong:
        raise InvalidInputError(
            f"This {protocol}:// URL takes no credentials, or not as they are spelt in it.",
            next_step="Pass them as storage_options=, or by the environment.",
        )


def _has_tail(shown: str) -> InvalidInputError:
    return InvalidInputError(
        f"{shown!r} has a query or fragment ('?' or '#') behind it, which no URL takes here.",
        next_step="Pass credentials such as a SAS token as storage_options=; rename a folder "
        "that bears such a character.",
    )


def _shown(protocol: str, target: str) -> str:
    """Return a remote target without scheme, user, password and query."""
    rest = target.partition("://")[2]
    authority, slash, below = rest.partition("/")
    if protocol != "az" or ":" in authority.partition("@")[0]:
        # Of az:// the part before "@" is the container.
        authority = authority.rpartition("@")[2]
    return f"{authority}{slash}{below}"


def kept_scheme(scheme: str) -> str:
    """Return the spelling of a scheme that is kept: "s3" for "S3A"."""
    return _SPELT_ALIKE.get(scheme.lower(), scheme.lower())


def is_scheme(text: str) -> bool:
    """Return whether a text may stand before "://"."""
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", text) is not None


@functools.cache
def installed_backends() -> Mapping[str, Sequence[EntryPoint]]:
    """Return the backends that installed packages bring, by scheme."""
    from importlib.metadata import entry_points  # noqa: PLC0415  # local users need none

    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        found.setdefault(kept_scheme(entry.name), []).append(entry)
    return found


def known_schemes() -> dict[str, str]:
    """Map every scheme to the class of fsspec that serves it, "" where nothing is to install."""
    from fsspec.registry import (  # noqa: PLC0415  # import of this package stays cheap
        known_implementations,
        registry,
    )

    found = {protocol: str(entry["class"]) for protocol, entry in known_implementations.items()}
    return {**found, **dict.fromkeys([*registry, *installed_backends(), *SERVED], "")}


def _check_scheme(protocol: str, given: str, shown: str) -> None:
    """Refuse a scheme that does not exist, has no backend installed or cannot be written to.

    `given` is how it was spelt, `shown` the URL without credentials. Raises `InvalidInputError`.
    """
    if protocol in SERVED or protocol in installed_backends():
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
    schemes = known_schemes()
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


def _check_options(protocol: str, given: str, options: Mapping[str, Any]) -> None:
    """Refuse an option that fsspec would take for the scheme, in the place of the URL's."""
    meant = options.get("protocol", given)
    if not isinstance(meant, str) or kept_scheme(meant) != protocol:
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
