"""The one border where the exceptions of clients and systems become `StorageError`s.

Judges by codes, statuses, names of types and error numbers, never by the text of a message.
"""

from __future__ import annotations

import contextlib
import errno
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from ckpt_storage.errors import IntegrityError, StorageError, UnsupportedByStoreError

if TYPE_CHECKING:
    from .backend import PartCopy

_CHAIN_LIMIT = 8
_MESSAGE_LIMIT_CHARS = 600


class HttpFailure(Exception):  # noqa: N818  # it never leaves this layer
    """A response with an error status to a request of a backend itself, not of a client."""

    def __init__(self, *, status: int | None, code: str = "", message: str = "") -> None:
        self.status = status
        self.error_code = code
        self.message = message
        super().__init__(message or code or f"HTTP status {status}")


class ForeignResponse(Exception):  # noqa: N818  # it never leaves this layer
    """A successful response that is not the storage's, but that of a console or a proxy."""

    def __init__(self, missing: str) -> None:
        super().__init__(f"the response has no {missing}, so it is not the storage's")


class UnreadableResponse(Exception):  # noqa: N818  # it never leaves this layer
    """Bytes that are no HTTP response, or an ambiguous response."""

    def __init__(self, flaw: str) -> None:
        super().__init__(f"the bytes received are no HTTP response ({flaw})")


class _Meaning(NamedTuple):
    kind: str
    next_step: str
    retryable: bool


# Kind, whether to try again, next step; and the signs: codes of S3, Azure and Google, statuses of
# HTTP, symbols of `errno`, and "package.Type", the package being the first part of the module
# that defines it. An absent bucket is not "not-found", which would mean "no checkpoint here yet".
# A soft-mounted network file system reports EIO for a passing outage.
_TABLE = """\
connection: Install the authority's certificate or name it (AWS_CA_BUNDLE, SSL_CERT_FILE).
    aiohttp.ClientConnectorCertificateError asyncssh.HostKeyNotVerifiable
    paramiko.BadHostKeyException ssl.SSLCertVerificationError
other again: Try again later; the fault is the storage's.
    InternalError backendError internalError
other: Check storage_options and the URL; if they are right, see the storage's logs.
    aiohttp.InvalidURL botocore.InvalidConfigError botocore.InvalidRegionError
    botocore.NoRegionError botocore.ParamValidationError botocore.ProfileNotFound
    httpx.UnsupportedProtocol httpx2.UnsupportedProtocol
other: Check the name, or create it first: this package never creates one.
    NoSuchBucket ContainerNotFound InvalidBucketName ContainerDisabled
not-found: Check the spelling, and that every host sees the same storage there.
    NoSuchKey NoSuchVersion BlobNotFound ResourceNotFound 404 410 ENOENT asyncssh.SFTPNoSuchFile
    builtins.FileNotFoundError builtins.IsADirectoryError builtins.NotADirectoryError
    webdav4.ResourceNotFound
exists: Choose another name, or find out who wrote it.
    BlobAlreadyExists EEXIST builtins.FileExistsError webdav4.ResourceAlreadyExists
precondition: Something else changed the object meanwhile; read it again.
    ConditionNotMet PreconditionFailed conditionNotMet 409 412
range: The object is shorter than it should be.
    InvalidRange requestedRangeNotSatisfiable 416
permission: Grant the right to read, write, delete and list (S3: s3:ListBucket) below this URL.
    AccessDenied AccountIsDisabled AccountProblem AllAccessDisabled AuthorizationFailure
    AuthorizationPermissionMismatch InsufficientAccountPermissions InvalidObjectState 403
    asyncssh.SFTPPermissionDenied builtins.PermissionError webdav4.ForbiddenOperation
permission: A retention policy or lock holds it: wait for its end, or save to another place.
    BlobImmutableDueToPolicy retentionPolicyNotMet
permission: Check owner and mode of the folder for this process, and that it is not read-only.
    EACCES EPERM EROFS
credentials: Check the credentials in storage_options or the environment.
    AuthenticationFailed InvalidAccessKeyId InvalidAuthenticationInfo InvalidSecurity
    NoAuthenticationInformation SignatureDoesNotMatch asyncssh.PermissionDenied
    azure.ClientAuthenticationError azure.CredentialUnavailableError botocore.NoAuthTokenError
    botocore.PartialCredentialsError botocore.SSOError paramiko.AuthenticationException
credentials: Give credentials, or storage_options={"anon": True} if the bucket is public.
    botocore.NoCredentialsError
credentials: Give credentials, or storage_options={"token": "anon"} if the bucket is public.
    google.DefaultCredentialsError
credentials: Set this machine's clock: it differs too much from the storage's.
    RequestTimeTooSkewed
credentials again: Renew the credentials; a retry looks those of the environment up again.
    ExpiredToken ExpiredTokenException InvalidToken RequestExpired TokenRefreshRequired authError
    401 botocore.CredentialRetrievalError botocore.TokenRetrievalError
    botocore.UnauthorizedSSOTokenError google.RefreshError
no-space: Free space there, have the quota raised, or choose another place.
    InsufficientStorage QuotaExceeded XMinioStorageFull quotaExceeded 507 ENOSPC EDQUOT
    asyncssh.SFTPNoSpaceOnFilesystem webdav4.InsufficientStorage
throttled again: Try again later, or lower thread_count.
    BandwidthLimitExceeded ConditionalRequestConflict OperationAborted RequestLimitExceeded
    ServerBusy ServiceUnavailable SlowDown Throttling ThrottlingException TooManyRequests
    rateLimitExceeded userRateLimitExceeded 423 425 429 503 webdav4.ResourceLocked
timeout again: Check that the storage answers; if it is only slow, raise Timeouts(request=...).
    OperationTimedOut RequestTimeout 408 504 ETIMEDOUT aiohttp.ServerTimeoutError
    azure.ServiceRequestTimeoutError azure.ServiceResponseTimeoutError
    botocore.ConnectTimeoutError botocore.ReadTimeoutError builtins.TimeoutError
    fsspec.FSTimeoutError httpx.TimeoutException httpx2.TimeoutException requests.Timeout
connection again: Check the address (endpoint_url), the network and that the service runs.
    BadDigest IncompleteBody InvalidDigest Md5Mismatch XAmzContentSHA256Mismatch 502 ECONNABORTED
    ECONNREFUSED ECONNRESET EHOSTDOWN EHOSTUNREACH ENETDOWN ENETRESET ENETUNREACH ENOTCONN EPIPE
    EREMOTEIO aiohttp.ClientError asyncio.IncompleteReadError asyncssh.ConnectionLost
    asyncssh.DisconnectError asyncssh.SFTPConnectionLost asyncssh.SFTPNoConnection
    azure.HttpResponseError azure.IncompleteReadError azure.ServiceRequestError
    azure.ServiceResponseError botocore.ConnectionError botocore.FlexibleChecksumError
    botocore.HTTPClientError botocore.IncompleteReadError builtins.ConnectionError
    builtins.EOFError ckpt_storage.ShortReadError concurrent.CancelledError google.TransportError
    http.HTTPException httpx.TransportError httpx2.TransportError paramiko.SSHException
    requests.ConnectionError socket.gaierror ssl.SSLError webdav4.BadGatewayError
unsupported: This storage cannot do that; use another storage, or its native API.
    MethodNotAllowed NotImplemented NotSupported 405 501 ENOSYS ENOTSUP EOPNOTSUPP
    asyncssh.SFTPOpUnsupported builtins.NotImplementedError
unsupported: The folder spans two file systems; choose a folder on one file system.
    EXDEV
other: Set the bucket's region: storage_options={'client_kwargs': {'region_name': ...}}.
    AuthorizationHeaderMalformed IllegalLocationConstraintException PermanentRedirect
    TemporaryRedirect 301
bad-response: Check endpoint_url: is it the storage's API, and not its console or a proxy?
    azure.DeserializationError ckpt_storage.ForeignResponse json.JSONDecodeError
bad-response again: Check endpoint_url: does the storage's API listen there, behind no proxy?
    botocore.ResponseParserError ckpt_storage.UnreadableResponse http.BadStatusLine
other: Part of the path is a file; give a path whose parents are folders.
    EISDIR ENOTDIR
other again: Check the file system and its mount, the kernel log, and the limits (ulimit -n).
    EAGAIN EBUSY EINTR EIO EMFILE ENFILE ENOBUFS ENOLCK ENOMEM ENOTEMPTY ESTALE
"""


def _meanings() -> Iterator[tuple[str, _Meaning]]:
    for row in re.split(r"\n(?=\S)", _TABLE.strip()):
        head, *signs = row.splitlines()
        kind, _, next_step = head.partition(": ")
        name, _, again = kind.partition(" ")
        meaning = _Meaning(name, next_step, bool(again))
        yield from ((sign, meaning) for line in signs for sign in line.split())


_BY_SIGN = dict(_meanings())
_SERVER = _BY_SIGN["InternalError"]
_CERTIFICATE = _BY_SIGN["ssl.SSLCertVerificationError"]
_UNKNOWN = _BY_SIGN["botocore.ProfileNotFound"]
_REFUSED = _UNKNOWN._replace(kind="refused")
# paramiko's, for a closed connection and for most of what a server refuses.
_NO_REASON = _Meaning("other", "Look into the server's log: it gave no reason.", retryable=True)
_UNKNOWN_NUMBER = _Meaning(
    "other", "Check the path, the file system and its mount.", retryable=False
)
_SHOWING_ENDPOINT = frozenset(
    {"bad-response", "connection", "credentials", "other", "refused", "timeout"}
)
_FIRST_CLIENT_STATUS, _FIRST_SERVER_STATUS = 400, 500
_FAILURE_STATUSES = range(300, 600)
_NO_CONNECTION = frozenset(
    {
        "aiohttp.ClientConnectorError",
        "aiohttp.ConnectionTimeoutError",
        "botocore.ConnectTimeoutError",
        "builtins.ConnectionRefusedError",
        "socket.gaierror",
    }
)
"""Failures before the first byte of a request."""


def explain(
    error: BaseException,
    name: str,
    path: str,
    *,
    endpoint: str = "",
    timeout_s: float | None = None,
    scrub: Callable[[str], str] = str,
) -> StorageError:
    """Return the `StorageError` that says what `error` of a call means for the user.

    `name` of the call is a noun, such as "read"; `path` is the object's URL, `timeout_s` the
    deadline of one request. Kind "credentials" with `retryable` set means credentials that may have
    expired. The text and the notes of `error` are kept; `scrub` takes credentials out of them.
    """
    if isinstance(error, StorageError):  # a backend says it exactly
        text = str(error) if error.path else f"The {name} of {path} failed: {error}"
        error.args = (scrub(text),)
        error.path = scrub(error.path or path)
        return error
    chain = list(_chain(error))
    responses = (response_in(link) for link in chain)
    response = next((response for response in responses if response is not None), None)
    if isinstance(response, UnreadableResponse):
        error, chain, response = response, [response], None
    known = (_meaning_of_response(response) if response else None) or _meaning_of_types(chain)
    text = _described(error, response, scrub, is_known=known is not None)
    meaning = known or _UNKNOWN
    shows_endpoint = meaning.kind in _SHOWING_ENDPOINT
    where = f" at {endpoint}" if endpoint and shows_endpoint else ""
    if meaning.kind == "timeout" and response is None and timeout_s is not None:
        text = f"no response within {timeout_s:g} s ({text})"
    raised = UnsupportedByStoreError if meaning.kind == "unsupported" else StorageError
    kind, step, again = meaning
    what = scrub(f"The {name} of {path} failed{where}: {text}.")
    failure = raised(what, kind=kind, retryable=again, path=scrub(path), next_step=step)
    if any(not _NO_CONNECTION.isdisjoint(map(_type_name, type(link).mro())) for link in chain):
        # Proof that nothing was done; the foreign one may carry credentials in its text.
        failure.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "No connection was made")
    return failure


def meaning_of(error: BaseException) -> StorageError:
    """Return the error that an exception becomes, for a backend that decides by it."""
    return explain(error, "request", "")


def is_absence(error: BaseException) -> bool:
    """Return whether an exception means that an object is absent, or lies below a file."""
    return getattr(error, "errno", None) == errno.ENOTDIR or meaning_of(error).kind == "not-found"


@contextlib.contextmanager
def unless_absent() -> Iterator[None]:
    """Ignore an error that means that an object is absent, or lies below a file."""
    try:
        yield
    except Exception as error:
        if not is_absence(error):
            raise


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < _CHAIN_LIMIT:
        seen.add(id(current))
        yield current
        hidden = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or hidden


def response_in(error: BaseException) -> HttpFailure | UnreadableResponse | None:
    """Return the error that a server reported, if this exception carries a response."""
    if isinstance(error, HttpFailure):
        return error
    flaw = error.__cause__
    causes = set() if flaw is None else {_type_name(kind) for kind in type(flaw).mro()}
    is_made_up = _type_name(type(error)) == "aiohttp.ClientResponseError"
    if is_made_up and "aiohttp.HttpProcessingError" in causes:
        # Of a response that it cannot parse, aiohttp makes up a status of 400.
        return UnreadableResponse(" ".join(str(getattr(flaw, "message", flaw)).split()))
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        details = response.get("Error", {})
        status = _number(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
        # Either may be None.
        code, message = str(details.get("Code") or ""), str(details.get("Message") or "")
        return HttpFailure(status=status, code=code, message=message)
    # Elsewhere `code` is a number of the library's own, or of an error that is no response.
    is_gcsfs = type(error).__module__.partition(".")[0] == "gcsfs"
    for holder in (error, response):
        for name in ("status", "status_code", *(["code"] if is_gcsfs else [])):
            status = _number(getattr(holder, name, None))
            if status is not None and status in _FAILURE_STATUSES:
                reported = getattr(error, "error_code", None)
                code = str(getattr(reported, "value", reported) or "")
                message = str(getattr(error, "message", None) or error)
                return HttpFailure(status=status, code=code, message=message)
    return None


def _number(value: object) -> int | None:
    return int(str(value)) if str(value).isdigit() else None


def _meaning_of_response(response: HttpFailure) -> _Meaning | None:
    """Return what a response means, by its code or else by its status."""
    # A code of digits is how botocore reports a response without a body, such as to a HEAD.
    status = response.status if response.status is not None else _number(response.error_code)
    if response.error_code in _BY_SIGN or status is None:
        return _BY_SIGN.get(response.error_code)
    if status >= _FIRST_SERVER_STATUS:
        fallback = _SERVER
    else:
        fallback = _REFUSED if status >= _FIRST_CLIENT_STATUS else _UNKNOWN
    return _BY_SIGN.get(str(status), fallback)


def _meaning_of_types(chain: list[BaseException]) -> _Meaning | None:
    """Return what the types of an exception and its causes, and their error numbers, mean."""
    types = [[_type_name(kind) for kind in type(error).mro()] for error in chain]
    if any("ssl.SSLCertVerificationError" in names for names in types):
        return _CERTIFICATE
    for error, names in zip(chain, types, strict=True):
        number = error.errno if isinstance(error, OSError) else None
        symbol = errno.errorcode.get(number or 0, "")
        # Clients that have types of their own may have numbers of their own.
        signs = [symbol, *names] if _is_of_system(error) else [*names, symbol]
        meaning = next((_BY_SIGN[sign] for sign in signs if sign in _BY_SIGN), None)
        if meaning is not None or number is not None:
            return meaning or _UNKNOWN_NUMBER
    return _NO_REASON if any(type(error) is OSError for error in chain) else None


def _type_name(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _is_of_system(error: BaseException) -> bool:
    return type(error).__module__ == "builtins" and getattr(error, "errno", None) is not None


def _described(
    error: BaseException,
    response: HttpFailure | None,
    scrub: Callable[[str], str],
    *,
    is_known: bool,
) -> str:
    """Return type, code, status and text of an exception, on one line."""
    if response is not None:
        status = "" if response.status is None else f"status {response.status}"
        head = ", ".join(part for part in (response.error_code, status) if part)
        text = response.message
    elif isinstance(error, OSError) and _is_of_system(error):
        symbol = errno.errorcode.get(error.errno or 0, str(error.errno))
        head, text = f"{error.strerror or type(error).__name__} ({symbol})", ""
    else:
        head, text = type(error).__name__, str(error)
        frames = [] if is_known else traceback.extract_tb(error.__traceback__)
        if frames:
            # An unexpected type is a mistake of a program; say where, as no traceback will.
            head += f" in {PurePath(frames[-1].filename).name}:{frames[-1].lineno}"
    text = ". ".join(filter(None, [text, *getattr(error, "__notes__", ())]))
    # A credential that the cut divides would not be known; to scrub a whole page takes minutes.
    text = scrub(" ".join(text.split())[: 20 * _MESSAGE_LIMIT_CHARS])
    line = text[:_MESSAGE_LIMIT_CHARS].rstrip(". ")
    return f"{head}: {line}" if line and line != head else head


def damaged(path: str, text: str, offset: int) -> IntegrityError:
    """Return the error that an object is not what was written."""
    step = "The file is damaged or not the file that was saved."
    return IntegrityError(text, path=path, offset=offset, next_step=step)


def too_long(path: str, shown: str, actual_bytes: int, most_bytes: int) -> IntegrityError:
    """Return the error that an object is longer than may be read of it."""
    what = f"has {actual_bytes} bytes or more, and {most_bytes} at most were to be expected"
    return damaged(path, f"{shown} {what}; it was not read.", 0)


def check_source(copy: PartCopy, actual_bytes: int) -> None:
    """Raise `IntegrityError` unless the source of a copy has the length that the copy expects."""
    end, wanted = copy.start + copy.length, copy.source_bytes
    if end > actual_bytes or wanted not in {None, actual_bytes}:
        of = "" if wanted is None else f" of {wanted}"
        span = f"[{copy.start}, {end}){of}"
        text = f"{copy.source.path} has {actual_bytes} bytes; {span} was to be copied."
        raise damaged(copy.source.path, text, min(actual_bytes, end))


def check_copied(source: str, actual_bytes: int, wanted_bytes: int) -> None:
    """Raise `IntegrityError` unless a whole object that is copied has the length of its source."""
    if actual_bytes != wanted_bytes:
        text = f"{source} has {actual_bytes} bytes; {wanted_bytes} were written."
        raise damaged(source, text, min(actual_bytes, wanted_bytes))


def unable(url: str, shown: str, what: str, next_step: str) -> UnsupportedByStoreError:
    """Return the error that the storage at `url` has no such call."""
    text = f"{url} {what}."
    return UnsupportedByStoreError(text, path=shown, next_step=next_step)


def changed(path: str) -> StorageError:
    """Return the error that another version is there."""
    return StorageError(f"{path} is no longer of the version that was read.", kind="precondition")


def upload_error(path: str, what: str, *, retryable: bool = False) -> StorageError:
    """Return the error that an upload cannot go on."""
    step = "Try again later; the fault is the storage's." if retryable else "Save again."
    what = f"The upload of {path} {what}."
    return StorageError(what, retryable=retryable, path=path, next_step=step)
