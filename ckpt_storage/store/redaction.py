"""Removes credentials from everything that is printed, logged, raised or pickled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import quote, quote_plus

# Shorter values would blank out parts of paths.
_LEAST_SECRET_CHARS = 6
_LEAST_LINE_CHARS = 16

_HARMLESS_VALUES = frozenset({"anonymous", "browser", "google_default"})

_SECRET_NAME = re.compile(
    r"auth|conn|cookie|cred|header|key|pass|pin|priv|pwd|sas|secret|sig|token", re.IGNORECASE
)

_IN_URLS = (
    # Signatures of presigned URLs, behind "?" or "#"; and "user:password@".
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
"""A URL without its colon or a slash, and a bare "user:password@host". After a scheme a password
may contain slashes, as secret keys of AWS do."""


def without_secrets(text: str) -> str:
    """Return `text` without signatures and passwords of its URLs."""
    for pattern, replacement in _IN_URLS:
        text = pattern.sub(replacement, text)
    return text


def without_password(text: str) -> str:
    """Return a user's URL, however misspelt, without secrets."""
    return _MANGLED.sub(r"\1***@", without_secrets(text))


def scrubber(storage_options: object, *urls: str) -> Callable[[str], str]:
    """Return a function that hides the credentials of options and URLs in a text."""
    values = {*_secrets_in(storage_options), *_secrets_in(urls)}
    # The longest first, as a secret may contain another.
    spelt = sorted({form for value in values for form in _spellings(value)}, key=len, reverse=True)

    def scrub(text: str) -> str:
        for value in spelt:
            text = text.replace(value, "***")
        return without_secrets(text)

    return scrub


def _secrets_in(options: object, name: str = "") -> Iterator[str]:
    """Yield every string inside `options` that may be a credential."""
    has_secret_name = _SECRET_NAME.search(name) is not None
    if isinstance(options, Mapping):
        for key, value in options.items():
            # Values below a secret name are as secret.
            yield from _secrets_in(value, name if has_secret_name else str(key))
    elif isinstance(options, list | tuple | set | frozenset):
        for value in options:
            yield from _secrets_in(value, name)
    elif isinstance(options, str | bytes):
        text = options if isinstance(options, str) else options.decode("utf-8", "replace")
        yield from _password_of(text)
        for key, _, value in (field.partition("=") for field in text.split(";")):
            if _SECRET_NAME.search(key) and len(value) >= _LEAST_SECRET_CHARS:
                yield value
        is_long = len(text) >= _LEAST_SECRET_CHARS and text not in _HARMLESS_VALUES
        if has_secret_name and is_long:
            yield text


def _password_of(url: str) -> Iterator[str]:
    user_info, at, _ = url.partition("://")[2].partition("/")[0].rpartition("@")
    password = user_info.partition(":")[2]
    if at and password:
        yield password


def _spellings(value: str) -> Iterator[str]:
    """Yield the spellings in which libraries print `value`."""
    yield from (value, quote(value, safe=""), quote(value), quote_plus(value))
    yield from (value.replace("\n", "\\n"), value.replace("\n", ""))
    yield from (line for line in value.splitlines() if len(line) >= _LEAST_LINE_CHARS)
