"""What obstore raises, turned into what `mapping` judges: statuses, codes and types.

obstore tells status, code and cause of a failure in its text only: the server's answer as it came,
and the Rust error as it is printed for debugging. This is the one place that reads that text.
Called by `obstore_client`.
"""

from __future__ import annotations

import errno
import re
import ssl
from xml.sax.saxutils import unescape

from .mapping import HttpFailure

__all__ = ["CrashedError", "is_crash", "is_whole_answer", "translated"]

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([\w.-]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_TIMING = re.compile(r" in [0-9.]+ ?(?:ns|us|µs|ms|s)\b")
"""How long an attempt took: two ranks that failed alike say so in equal words without it."""
_CAUSE = re.compile(r"\bkind: (Timeout|Connect|Request|Interrupted|Decode)\b")
_DEBUG = "\n\nDebug source"

_BY_TYPE = {
    "AlreadyExistsError": 412,
    "NotImplementedError": 501,
    "NotModifiedError": 412,
    "NotSupportedError": 501,
    "PermissionDeniedError": 403,
    "PreconditionError": 412,
    "UnauthenticatedError": 401,
}
"""Statuses that some of obstore's types stand for, where the text tells none."""


_BY_MARK = {
    # An answer that sends elsewhere without saying where to: the bucket has another region.
    "BareRedirect": (301, "PermanentRedirect"),
    "StartTooLarge": (416, "InvalidRange"),
}
"""What the Rust error says where obstore has judged an answer itself: status and code."""


class CrashedError(Exception):
    """The Rust client failed in itself; what became of its request is not known."""


def is_crash(error: BaseException) -> bool:
    """Return whether `error` is a panic of Rust's, which Python gets as no `Exception`."""
    return type(error).__module__.partition(".")[0] == "pyo3_runtime"


def translated(error: Exception) -> Exception:
    """Return the exception that says what `error` of obstore's says; others as they are."""
    kind = type(error)
    is_absent = kind is FileNotFoundError and _DEBUG in str(error)
    if kind.__module__.partition(".")[0] != "obstore" and not is_absent:
        return error
    text, _, debug = str(error).partition(_DEBUG)
    text = _TIMING.sub("", text)
    status = _STATUS.search(text)
    if status is not None:
        code, message = _CODE.search(text), _MESSAGE.search(text)
        return HttpFailure(
            status=int(status[1]),
            code=code[1] if code else "",
            message=unescape(message[1]) if message else "",
        )
    known = next((found for mark, found in _BY_MARK.items() if mark in debug), None)
    if known is None:
        known = (404 if is_absent else _BY_TYPE.get(kind.__name__, 0), "")
    if known[0]:
        return HttpFailure(status=known[0], code=known[1], message=text)
    return _network_failure(text, debug) or error


def is_whole_answer(error: Exception) -> bool:
    """Return whether a server answered a read of a range with the whole object."""
    return str(error).partition(_DEBUG)[2].rstrip(" }\n,").endswith("source: NotPartial")


def _network_failure(text: str, debug: str) -> Exception | None:
    if "kind: ConnectionRefused" in debug:
        # Proof that nothing was done.
        return ConnectionRefusedError(errno.ECONNREFUSED, text)
    if "InvalidCertificate" in debug:
        return ssl.SSLCertVerificationError(text)
    cause = _CAUSE.search(debug)
    if "TimedOut" in debug or (cause is not None and cause[1] == "Timeout"):
        return TimeoutError(text)
    if cause is not None:
        return ConnectionError(text)
    return None
