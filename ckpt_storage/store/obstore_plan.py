"""What the Rust client is to be built with, and why it is not: values that translations return.

Knows how options are taken one by one so that none is overlooked; knows no storage's options and
does not import obstore. Called by `engine`, `obstore_client` and the translations
`obstore_s3`, `obstore_gcs` and `obstore_azure`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .location import Location

__all__ = [
    "Given",
    "ObstorePlan",
    "Provider",
    "UntranslatableError",
    "place_of",
    "seconds_of",
]

Provider: TypeAlias = Callable[[], Mapping[str, Any]]
"""Tells obstore the credentials of the moment, in its words, with the moment they end."""

_OFF = (None, False, "", 0)


class UntranslatableError(Exception):
    """Something that was given means nothing, or something else, to obstore.

    `what` names it without its value, which may be a credential.
    """

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} {why}")
        self.what = what
        self.why = why


@dataclass(frozen=True, slots=True, kw_only=True)
class ObstorePlan:
    """How obstore reaches one bucket with the meaning of one set of storage options.

    config: arguments of the store's class, with credentials that never end. make_provider
    returns what looks credentials up, and is called in the process that uses it; None if `config`
    says all. connect_timeout_s and read_timeout_s (longest silence) are seconds.
    """

    family: Literal["s3", "gcs", "azure"]
    bucket: str
    prefix: str
    config: Mapping[str, Any] = field(repr=False)
    client_options: Mapping[str, Any]
    make_provider: Callable[[], Provider] | None = None
    connect_timeout_s: float
    read_timeout_s: float


class Given:
    """Options of which each must be taken; what is left over cannot be translated."""

    def __init__(self, options: Mapping[str, Any], *, where: str = "storage_options") -> None:
        self._left = dict(options)
        self._where = where

    def take(self, name: str) -> Any:  # noqa: ANN401  # options are of any type
        """Return an option's value, or None, and count it as translated."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        """Return an option that must be a str; raises `UntranslatableError`."""
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value or None
        raise UntranslatableError(self.named(name), f"is a {type(value).__name__}")

    def inner(self, name: str) -> Given:
        """Return the options below an option that is a mapping."""
        value = self.take(name) or {}
        if not isinstance(value, Mapping):
            raise UntranslatableError(self.named(name), f"is a {type(value).__name__}")
        return Given(value, where=self.named(name))

    def drop(self, names: frozenset[str]) -> None:
        """Leave out options that change nothing here."""
        for name in names:
            self._left.pop(name, None)

    def must_be_off(self, *names: str) -> None:
        """Raise `UntranslatableError` if one of these is set to anything."""
        for name in names:
            if self.take(name) not in _OFF:
                raise UntranslatableError(self.named(name), "has no counterpart in obstore")

    def end(self) -> None:
        """Raise `UntranslatableError` naming the first option that nobody took."""
        for name in sorted(self._left, key=str):
            raise UntranslatableError(self.named(name), "has no counterpart in obstore")

    def named(self, name: str) -> str:
        """Return how a message names an option."""
        return f"{self._where}[{name!r}]"


def place_of(location: Location) -> tuple[str, str, str]:
    """Return bucket, what follows "@" in its place of the URL, and prefix.

    Raises `UntranslatableError` for a prefix that obstore refuses or would change.
    """
    authority, _, prefix = location.target.partition("://")[2].partition("/")
    bucket, _, host = authority.partition("@")
    if prefix and not all(prefix.split("/")):
        raise UntranslatableError("The URL", "has an empty path segment, which obstore refuses")
    if not prefix.isprintable():
        raise UntranslatableError("The URL", "has characters that obstore changes")
    return bucket, host, prefix


def seconds_of(given: Given, name: str, default_s: float) -> float:
    """Return a timeout in seconds; raises `UntranslatableError` for anything but a number."""
    value = given.take(name)
    if value is None:
        return default_s
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UntranslatableError(given.named(name), "is no positive number of seconds")
    return float(value)
