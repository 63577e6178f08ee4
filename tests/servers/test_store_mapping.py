"""Foreign exceptions become errors with the right kind, next step and no credential in them."""

from __future__ import annotations

import errno
import http.client
import pickle
import socket
import ssl
from types import SimpleNamespace
from typing import Any

import aiohttp
import azure.core.exceptions as azure_errors
import botocore.exceptions as boto_errors  # type: ignore[import-untyped]
import google.auth.exceptions as google_errors
import httpx
import pytest
import requests
from fsspec.exceptions import FSTimeoutError
from gcsfs.retry import HttpError
from webdav4.client import InsufficientStorage

from ckpt_storage.errors import StorageError, UnsupportedByStoreError
from ckpt_storage.store.problems import HttpFailure, explain
from ckpt_storage.store.redaction import Scrubber

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


def mapped(error: BaseException, path: str = "s3://bkt/run/x") -> StorageError:
    """Return what the border makes of an exception, as if it had been raised."""
    scrub = Scrubber({"secret": SECRET})
    return explain(error, "read", path, endpoint="host.example:9000", timeout_s=30, scrub=scrub)


def s3_error(code: str, status: int | None = 400, message: str = "said so") -> Exception:
    """Return botocore's error for an answer."""
    answer: dict[str, Any] = {"Error": {"Code": code, "Message": message}}
    if status is not None:
        answer["ResponseMetadata"] = {"HTTPStatusCode": status}
    error: Exception = boto_errors.ClientError(answer, "GetObject")
    return error


def azure_error(status: int, code: str) -> Exception:
    """Return Azure's error for an answer."""
    kind = {404: azure_errors.ResourceNotFoundError, 409: azure_errors.ResourceExistsError}
    error = kind.get(status, azure_errors.HttpResponseError)(message="said so")
    error.status_code = status
    error.error_code = SimpleNamespace(value=code)  # type: ignore[attr-defined]  # storage adds it
    return error


def caused(outer: Exception, cause: BaseException) -> Exception:
    """Return `outer` as raised from `cause`."""
    outer.__cause__ = cause
    return outer


# google-auth types its exceptions only half.
GOOGLE: Any = google_errors

CASES: list[tuple[BaseException, str, bool]] = [
    (s3_error("NoSuchKey", 404), "not-found", False),
    (s3_error("404", None), "not-found", False),
    (s3_error("NoSuchBucket", 404), "other", False),
    (s3_error("403", 403), "permission", False),
    (s3_error("ExpiredToken", 400), "credentials", True),
    (s3_error("Unheard", 503), "throttled", True),
    (s3_error("Unheard", 599), "other", True),
    (s3_error("Unheard", 400), "other", False),
    (s3_error("InternalError", 200), "other", True),
    (s3_error("PreconditionFailed", 412), "precondition", False),
    (s3_error("ConditionalRequestConflict", 409), "throttled", True),
    (s3_error("InvalidRange", 416), "range", False),
    (s3_error("NotImplemented", 501), "unsupported", False),
    (boto_errors.NoCredentialsError(), "credentials", False),
    (boto_errors.EndpointConnectionError(endpoint_url="http://x"), "connection", True),
    (boto_errors.ReadTimeoutError(endpoint_url="http://x"), "timeout", True),
    (azure_error(404, "BlobNotFound"), "not-found", False),
    (azure_error(404, "ContainerNotFound"), "other", False),
    (azure_error(409, "BlobAlreadyExists"), "exists", False),
    (azure_error(412, "ConditionNotMet"), "precondition", False),
    (azure_error(403, "AuthenticationFailed"), "credentials", False),
    (azure_errors.ServiceResponseTimeoutError("slow"), "timeout", True),
    (azure_errors.IncompleteReadError("short"), "connection", True),
    (HttpFailure(status=404, code="notFound"), "not-found", False),
    (HttpFailure(status=403, code="rateLimitExceeded"), "throttled", True),
    (HttpFailure(status=412, code="conditionNotMet"), "precondition", False),
    (HttpError({"code": 401, "message": "Invalid Credentials"}), "credentials", True),
    (GOOGLE.RefreshError("expired"), "credentials", True),
    (aiohttp.ClientPayloadError("cut"), "connection", True),
    (aiohttp.ServerTimeoutError("slow"), "timeout", True),
    (httpx.ReadTimeout("slow"), "timeout", True),
    (requests.exceptions.ConnectionError("no route"), "connection", True),
    (http.client.IncompleteRead(b""), "connection", True),
    (InsufficientStorage("x"), "no-space", False),
    (FSTimeoutError(), "timeout", True),
    (FileExistsError("x"), "exists", False),
    (PermissionError("x"), "permission", False),
    (ConnectionResetError("x"), "connection", True),
    (socket.gaierror(-2, "Name or service not known"), "connection", True),
    (OSError(errno.EROFS, "x"), "permission", False),
    *((OSError(number, "x"), "no-space", False) for number in (errno.ENOSPC, errno.EDQUOT)),
    (OSError(errno.ENOTSUP, "x"), "unsupported", False),
    *((OSError(number, "x"), "other", True) for number in (errno.ESTALE, errno.EIO)),
    (OSError(12345, "x"), "other", False),
    (OSError("no number"), "other", True),
    (ssl.SSLCertVerificationError("self-signed"), "connection", False),
    (caused(OSError("x"), s3_error("SlowDown", 503)), "throttled", True),
    (TypeError("unexpected keyword"), "other", False),
]


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    CASES,
    ids=[f"{number}-{type(case[0]).__name__}" for number, case in enumerate(CASES)],
)
def test_an_exception_has_its_kind(error: BaseException, kind: str, retryable: bool) -> None:  # noqa: FBT001  # a parameter
    """Code, status and type decide; the error names object and next step on one line."""
    failure = mapped(error)
    assert (failure.kind, failure.retryable) == (kind, retryable)
    assert failure.path == "s3://bkt/run/x"
    assert "s3://bkt/run/x" in str(failure)
    if isinstance(error, OSError):
        assert errno.errorcode.get(error.errno or 0, "") in str(failure)
    assert failure.next_step
    assert str(failure).endswith(failure.next_step)
    assert "\n" not in str(failure)
    assert isinstance(failure, UnsupportedByStoreError) == (kind == "unsupported")
    copy = pickle.loads(pickle.dumps(failure))
    assert (copy.kind, str(copy)) == (kind, str(failure))


@pytest.mark.parametrize(
    "error",
    [
        ValueError(f"secret {SECRET} refused"),
        StorageError(f"secret {SECRET} refused"),
        s3_error("AccessDenied", 403, f"X-Amz-Signature={SECRET}"),
        OSError(f"GET https://host/x?sig={SECRET.replace('/', '%2F')}&y=1"),
        caused(RuntimeError("Authorization: Bearer abcdefgh12345678"), ValueError(SECRET)),
        RuntimeError("http://user:hunter2@host/x failed"),
        RuntimeError(f"{SECRET}\n" * 1000),
    ],
    ids=["value", "own words", "query", "quoted", "cause", "password", "long"],
)
def test_no_credential_of_a_foreign_message_stays(error: Exception) -> None:
    """Values of options, signatures, headers and passwords in URLs are hidden."""
    failure = mapped(error)
    shown = f"{failure} {failure!r} {failure.__dict__} {pickle.dumps(failure)!r}"
    for secret in (SECRET, "%2FK7MDENG", "abcdefgh12345678", "hunter2"):
        assert secret not in shown
    assert failure.__context__ is None
    assert failure.__cause__ is None


def test_the_place_and_the_endpoint_are_told_where_they_matter() -> None:
    """Of a program's mistake the file and line, of the way to a server its address; no secret."""
    with pytest.raises(ZeroDivisionError) as caught:
        divmod(1, 0)
    assert "ZeroDivisionError in test_store_mapping.py:" in str(mapped(caught.value))
    for error, shown in ((TimeoutError(), True), (s3_error("NoSuchKey", 404), False)):
        assert ("host.example:9000" in str(mapped(error))) == shown
    failure = mapped(FileNotFoundError("x"), f"s3://bkt/{SECRET}/x")
    assert SECRET not in f"{failure} {failure.path}"
    assert (failure.path or "").startswith("s3://bkt/")
