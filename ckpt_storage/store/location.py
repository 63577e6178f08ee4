"""Where a checkpoint lies: what users pass, checked and brought into one form. Asks no storage."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import multiprocessing
import os
import re
from collections.abc import Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.format.names import path_flaw, unsafe_path_error

from .redaction import without_password

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "ckpt_storage.backends"
"""The group in which a package's metadata name backends, by scheme."""

REGISTERED: dict[str, Any] = {}
"""Openers of registered backends: whatever a scheme was before, these serve it now."""

BUCKETS = frozenset({"az", "gs", "s3"})
USERS = frozenset({"arrow_hdfs", "ftp", "hdfs", "sftp", "smb", "ssh", "webhdfs"})
"""Schemes whose URLs may hold `user:password@`; in az:// a container stands before "@"."""

_SPELT_ALIKE = {"abfs": "az", "abfss": "az", "gcs": "gs", "local": "file", "s3a": "s3"}
_EXTRAS = {"az": "azure", "gs": "gcs", "s3": "s3"}
_NO_STORAGES = frozenset(
    "async_wrapper asyncwrapper blockcache cached data dir filecache generic gist git github http "  # noqa: SIM905  # short
    "https libarchive reference simplecache tar zip".split()
)
"""What only reads, or wraps another file system."""

READ_ONLY = frozenset({"http", "https", "zip"})
"""Of these, what `Location.to_read` takes."""

_UNREAD_ARCHIVES = frozenset({"libarchive", "tar"})

_ENDPOINT_NAMES = {
    "az": (
        ("account_host", "BlobEndpoint", "account_name", "AccountName"),
        ("AZURE_STORAGE_ACCOUNT_NAME",),
    ),
    "gs": (("endpoint_url",), ("STORAGE_EMULATOR_HOST",)),
    "s3": (("endpoint_url",), ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
}
"""By scheme: the options that name an endpoint, and the variables of the environment."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MANGLED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(:|//)")
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
        cls, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the location of a user's path or URL, where a checkpoint may be saved.

        Raises `InvalidInputError`, with what to write instead, for anything that names
        no such root.
        """
        return cls._parse(url, storage_options, _NO_STORAGES)

    @classmethod
    def to_read(
        cls, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the location as `of`, also on a storage that takes no writes."""
        return cls._parse(url, storage_options, _NO_STORAGES - READ_ONLY)

    @classmethod
    def _parse(
        cls,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        refused: AbstractSet[str],
    ) -> Self:
        text = _text_of(url)
        options = dict(storage_options or {})
        match = _SCHEME.match(text)
        if match is None:
            return cls(protocol="file", target=_absolute(text), storage_options=options)
        scheme, rest = match.group(1).lower(), text[match.end() :]
        protocol = kept_scheme(scheme)
        if protocol == "file":
            target = _file_url_path(rest)
        else:
            _check_scheme(protocol, scheme, refused, without_password(f"{scheme}://{rest}"))
            if "protocol" in options:
                # fsspec would follow it instead of the URL.
                raise _bad("storage_options has 'protocol'.", "Leave it out: the URL names it.")
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
            parse = Location.to_read if self.protocol in READ_ONLY else Location.of
            other = parse(text)
            keeps = self.is_local or other.protocol == self.protocol
            options = self.storage_options if keeps else {}
            return dataclasses.replace(other, storage_options=options)
        parts = [part for part in text.rstrip("/").split("/") if part != "."]
        if ".." in parts:
            what = f"The checkpoint id {without_password(text)!r} leads out of {self.url} by '..'."
            raise _bad(what, "Give a name below it, an absolute path or a full URL.")
        below = "/".join(part for part in parts if part or not self.is_local)
        if not self.is_local:
            _check_tail(below)
        return self._below(below) if below.strip("/") else self

    def child(self, name: str) -> Location:
        """Return the location of a folder that a listing of this one showed.

        Raises `UnsafeContentError` for a name that leads elsewhere, and `InvalidInputError` for a
        name that clients cut, as "a?b".
        """
        if flaw := path_flaw(name):
            step = "Rename or delete that folder with a tool of the storage."
            raise unsafe_path_error(name, where=self.url, flaw=flaw, next_step=step)
        if not self.is_local:
            _check_tail(name)
        return self._below(name)

    def _below(self, name: str) -> Location:
        separator = "" if self.target.endswith("/") else "/"
        return dataclasses.replace(self, target=f"{self.target}{separator}{name}")

    @property
    def is_local(self) -> bool:
        """Whether this is a path of the operating system's file systems."""
        return self.protocol == "file"

    @property
    def path(self) -> str:
        """The absolute local path; elsewhere what follows the scheme, without credentials."""
        if self.is_local:
            return self.target
        authority, slash, below = self.target.partition("://")[2].partition("/")
        if self.protocol != "az" or ":" in authority.partition("@")[0]:
            # Of az:// the part before "@" is the container.
            authority = authority.rpartition("@")[2]
        return f"{authority}{slash}{below}"

    @property
    def url(self) -> str:
        """The name of this root, the same for every spelling of it, without credentials."""
        return f"{self.protocol}://{self.path}"

    def scope(self) -> Hashable:
        """Return a key for what is one storage: a file system's device, or a bucket and options.

        What a probe finds out below one root holds for all roots of the same scope.
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


def redacted_url(url: object) -> str:
    """Return a user's `url` for messages, without credentials, whatever was passed."""
    try:
        return Location.to_read(url).url  # type: ignore[arg-type]  # it raises for all else
    except CheckpointError:
        return "a place that cannot be used"


def address_of(location: Location) -> str:
    """Return the endpoint URL of the options or the environment, or ""."""
    options = location.storage_options
    text = str(options.get("connection_string") or "")
    connection = dict(part.partition("=")[::2] for part in text.split(";"))
    inner = options.get("client_kwargs") or {}
    names, variables = _ENDPOINT_NAMES.get(location.protocol, (("base_url", "host"), ()))
    values = [source.get(name) for source in (options, inner, connection) for name in names]
    if location.protocol == "az":
        # As in az://CONTAINER@ACCOUNT.blob.core.windows.net/PREFIX.
        values.append(location.path.partition("/")[0].partition("@")[2].partition(".")[0])
    values += [os.environ.get(name) for name in variables]
    value = next((value for value in values if isinstance(value, str) and value), "")
    return value if not value or "://" in value else f"//{value}"


def endpoint_of(location: Location) -> str:
    """Return the host, or account, that requests go to; "" for a local path or a default.

    By it and its URL, ranks agree on a storage. Holds no credentials.
    """
    address = "" if location.is_local else address_of(location)
    if address or location.protocol in {*_ENDPOINT_NAMES, "file", "memory"}:
        return urlsplit(address).netloc.rpartition("@")[2]
    return location.path.partition("/")[0]


def _bad(what: str, next_step: str) -> InvalidInputError:
    return InvalidInputError(what, next_step=next_step)


def _text_of(url: object) -> str:
    """Return the text of a path or URL after the checks that every spelling must pass."""
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(text, str):
        step = "Give a str such as 's3://bucket/run', or a pathlib.Path."
        raise _bad(f"A {type(url).__name__} is no path or URL.", step)
    shown = without_password(text)
    if not text.strip() or "\0" in text:
        step = "Give a folder or a URL such as 's3://bucket/run'."
        raise _bad(f"The path {shown!r} is empty or contains a NUL character.", step)
    if _CHAIN.search(text):
        step = "Give the URL of the storage itself; caches must not stand before it."
        raise _bad(f"{shown!r} is a chain of file systems ('::').", step)
    # What a URL becomes when it goes through `pathlib` or loses its slashes.
    mangled = None if _SCHEME.match(text) else _MANGLED.match(text.strip())
    if mangled is not None:
        scheme = mangled.group(1).lower()
        kept = kept_scheme(scheme)
        is_colon = mangled.group(2) == ":"
        if kept == "data" and "," in text:
            step = "Give a folder or a URL such as 's3://bucket/run'."
            raise _bad(f"{shown!r} is a data URL, which holds bytes and is no storage.", step)
        is_alone = is_colon and text.strip().partition("/")[0].endswith(":")
        if is_alone or kept in BUCKETS | USERS or (is_colon and kept in {"file", "memory"}):
            rest = text.strip()[mangled.end() :].lstrip("/")
            hint = without_password(f"{scheme}{':///' if kept == 'file' else '://'}{rest}")
            step = f"Pass the URL as a str: {hint!r} (pathlib folds its slashes)."
            raise _bad(f"{shown!r} is neither a path nor a URL.", step)
    return text


def _absolute(text: str) -> str:
    """Return a path from the root, without "." and ".."; links before ".." are followed first."""
    path = os.path.join(os.getcwd(), os.path.expanduser(text))  # noqa: PTH109, PTH111, PTH118  # a Path would drop nothing but dots
    parts = path.split("/")
    if ".." in parts:
        # Where "link/.." leads, only the file system says.
        return os.path.realpath(path)
    return "/" + "/".join(part for part in parts if part not in {"", "."})


def _file_url_path(rest: str) -> str:
    """Return the path of a `file://` URL, which has an empty host or none but localhost."""
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if not path.startswith("/"):
        shown = without_password(f"file://{rest}").removeprefix("file://")
        step = f"Write three slashes for an absolute path: 'file:///{shown}'."
        raise _bad(f"'file://{shown}' names a host, or is a relative path.", step)
    return _absolute(path)


def _checked_rest(protocol: str, rest: str) -> str:
    """Return what follows `scheme://`, with trailing slashes dropped and the rest kept as is."""
    shown = without_password(f"{protocol}://{rest}")
    if protocol == "memory":
        rest = rest.lstrip("/")
    if protocol in BUCKETS and not rest.partition("/")[0]:
        raise _bad(f"{shown!r} names no bucket.", f"Write {protocol}://BUCKET/PREFIX.")
    _check_user_info(protocol, rest)
    _check_tail(rest)
    if {".", ".."} & set(rest.split("/")):
        step = "Write the URL without them."
        raise _bad(f"{shown!r} contains '.' or '..', which storages treat differently.", step)
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
        what = f"This {protocol}:// URL takes no credentials, or not as they are spelt in it."
        raise _bad(what, "Pass them as storage_options=, or by the environment.")


def _check_tail(rest: str) -> None:
    if _TAIL.search(rest):
        shown = without_password(_TAIL.sub("", rest))
        step = "Pass a SAS token as storage_options=; rename a folder that bears such a character."
        raise _bad(f"A query or fragment ('?' or '#') is behind {shown!r}; no URL takes one.", step)


def kept_scheme(scheme: str) -> str:
    """Return the spelling of a scheme that is kept: "s3" for "S3A"."""
    return _SPELT_ALIKE.get(scheme.lower(), scheme.lower())


@functools.cache
def installed_backends() -> Mapping[str, EntryPoint]:
    """Return the backends that installed packages bring, by scheme."""
    from importlib.metadata import entry_points  # noqa: PLC0415  # local users need none

    return {kept_scheme(entry.name): entry for entry in entry_points(group=ENTRY_POINTS)}


def _check_scheme(protocol: str, scheme: str, refused: AbstractSet[str], shown: str) -> None:
    """Refuse a scheme that does not exist, has no backend installed or is no storage."""
    ours = {*REGISTERED, *installed_backends()}
    if protocol in ours:
        return
    if protocol in refused:
        step = (
            "Give the URL of a storage that takes writes, without a wrapper; for an object store "
        )
        step += "write s3://BUCKET/PREFIX and pass storage_options={'endpoint_url': ...}."
        if protocol in _UNREAD_ARCHIVES:
            step = "Unpack the archive and give the folder, or pack it as a zip archive and read "
            step += "it by zip://PATH_INSIDE with storage_options={'fo': 'run.zip'}."
        raise _bad(f"{scheme}:// can only be read, or wraps another file system.", step)
    from fsspec.registry import known_implementations, registry  # noqa: PLC0415  # costs time

    if protocol not in {*known_implementations, *registry}:
        names = sorted({*known_implementations, *registry, *ours, *_SPELT_ALIKE})
        # One with another first letter is hardly what was meant.
        alike = [name for name in names if name[0] == scheme[0]]
        near = difflib.get_close_matches(scheme, alike, 1, 0.5)
        hint = f"Did you mean {near[0]}://? " if near else ""
        step = f"{hint}Install the fsspec backend that provides {scheme}://, or register_backend()."
        # A child of multiprocessing and our own worker bear a name; a script's process does not.
        if multiprocessing.current_process().name != "MainProcess":
            step = "This is a worker process. If register_backend() was called in another process, "
            step += "call it where this process imports it too, not below "
            step += (
                "`if __name__ == '__main__'`, or name the backend in a package's metadata, in the "
            )
            step += f"group {ENTRY_POINTS}."
        raise _bad(f"No storage is known by the scheme of {shown!r}.", step)
    if protocol not in registry:
        module = known_implementations[protocol]["class"].partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(module) is None:
            raise missing_backend(protocol, module)


def missing_backend(protocol: str, package: str) -> InvalidInputError:
    """Return the error that says which package a scheme needs and how to install it."""
    extra = _EXTRAS.get(protocol)
    step = f"Run: pip install '{f'ckpt-storage[{extra}]' if extra else package}'"
    return _bad(f"{protocol}:// needs the package {package}, which is not installed.", step)
