"""Keeping credentials out of everything that is printed, logged, raised or pickled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import quote, quote_plus

# Shorter ones would blank parts of paths; where they are named they are hidden all the same.
_LEAST_SECRET_CHARS = 6
_LEAST_LINE_CHARS = 16

_HARMLESS_OPTION = re.compile(
    "account_(host|name)|addressing_style|(base|endpoint)_url|host|project|region(_name)?|user(name)?"
)
"""Options that messages may show: they help to find the mistake and open no door."""

_HARMLESS_VALUES = frozenset({"anonymous", "browser", "google_default"})

_RANDOM = re.compile(
    r"(?=\S*[a-z])(?=\S*[A-Z])(?=\S*[0-9])(?!\S*://)[A-Za-z0-9+=_.~-][A-Za-z0-9+/=_.~-]{19,}"
    r"|[0-9A-Fa-f]{32,}"
)
"""What is hidden whatever its option is called: long, and neither plain text, a path nor a name."""

_TELLING_NAME = re.compile(
    r"auth|conn|cookie|cred|header|key|pass|pin|priv|pwd|sas|secret|sig|token", re.IGNORECASE
)

_IN_URLS = (
    # What follows "?" or "#": signatures of presigned URLs. And "user:password@".
    (re.compile(r"(?<=://)([^\s?#'\"]*[?#])[^\s'\"]+"), r"\1***"),
    (re.compile(r"(?<=://)[^/\s@?#]*:(?![0-9]*/)[^\s@]*@"), "***@"),
)

_MANGLED = re.compile(
    r"""(?x)
    (?<![^\s'"(=,])
    ((?:[A-Za-z][A-Za-z0-9+.-]*(?: :/* | // ))?)
    (?:(?<=[:/])[^/\s@'":]*:[^\s@'"]+ | [^/\s@'":]+:[^/\s@'"]+)@
    """
)
"""A URL that lost a slash or its colon, and a bare "user:password@host". After a scheme a password
may hold slashes: those of AWS do."""


def without_secrets(text: str) -> str:
    """Return `text` without signatures and passwords of the URLs in it."""
    for pattern, replacement in _IN_URLS:
        text = pattern.sub(replacement, text)
    return text


def without_password(text: str) -> str:
    """Return what a user gave as a URL, however misspelt, without secrets."""
    return _MANGLED.sub(r"\1***@", without_secrets(text))


def scrubber(storage_options: object, *urls: str) -> Callable[[str], str]:
    """Return what hides the credentials in options and URLs, however they are encoded in a text."""
    values = {*_secrets_in(storage_options), *_secrets_in(urls)}
    # A secret may contain another; the longest goes first, so that no rest of it stays.
    spelt = sorted({form for value in values for form in _spellings(value)}, key=len, reverse=True)

    def scrub(text: str) -> str:
        for value in spelt:
            text = text.replace(value, "***")
        return without_secrets(text)

    return scrub


def _secrets_in(options: object, name: str = "") -> Iterator[str]:
    """Yield every string inside `options` that may be a credential."""
    is_telling = _TELLING_NAME.search(name) is not None
    if isinstance(options, Mapping):
        for key, value in options.items():
            # What lies below a telling name is as secret as it is.
            yield from _secrets_in(value, name if is_telling else str(key))
    elif isinstance(options, list | tuple | set | frozenset):
        for value in options:
            yield from _secrets_in(value, name)
    elif isinstance(options, str | bytes):
        text = options if isinstance(options, str) else options.decode("utf-8", "replace")
        yield from _password_of(text)
        for key, _, value in (field.partition("=") for field in text.split(";")):
            if _TELLING_NAME.search(key) and len(value) >= _LEAST_SECRET_CHARS:
                yield value
        is_long = len(text) >= _LEAST_SECRET_CHARS and text not in _HARMLESS_VALUES
        is_secret = is_long if is_telling else _RANDOM.fullmatch(text)
        if is_secret and not _HARMLESS_OPTION.fullmatch(name):
            yield text


def _password_of(url: str) -> Iterator[str]:
    user_info, at, _ = url.partition("://")[2].partition("/")[0].rpartition("@")
    password = user_info.partition(":")[2]
    if at and password:
        yield password


def _spellings(value: str) -> Iterator[str]:
    """Yield the forms in which libraries print `value`."""
    yield from (value, quote(value, safe=""), quote(value), quote_plus(value))
    yield from (value.replace("\n", "\\n"), value.replace("\n", ""))
    yield from (line for line in value.splitlines() if len(line) >= _LEAST_LINE_CHARS)
