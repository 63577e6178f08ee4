"""The one border where the exceptions of foreign clients become `StorageError`s.

Imports none of them: types are told by their names. Judges by codes, statuses and types, never by
the text of a message.
"""

from __future__ import annotations

import errno
import ssl
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from ckpt_storage.errors import StorageError, UnsupportedByStoreError

from .os_errors import map_os_error
from .redaction import Scrubber

_CHAIN_LIMIT = 8
_MESSAGE_LIMIT_CHARS = 600


class HttpFailure(Exception):  # noqa: N818  # it never leaves this layer
    """An answer that says no, to a request that a dialect made itself."""

    def __init__(self, *, status: int | None, code: str = "", message: str = "") -> None:
        self.status = status
        self.error_code = code
        self.message = message
        super().__init__(message or code or f"HTTP status {status}")


class ForeignAnswer(Exception):  # noqa: N818  # it never leaves this layer
    """A success that this storage does not give: a console or a proxy answers in its place."""

    def __init__(self, missing: str) -> None:
        super().__init__(f"the answer has no {missing}, so it is not the storage's")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What was being done when an exception came: for the message, and where it was sent.

    name: a noun, such as "read". path: the object's URL without credentials. endpoint: host
    and port, or "" if unknown. timeout_s: the deadline of one request.
    """

    name: str
    path: str
    endpoint: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Judgement:
    kind: str
    next_step: str
    retryable: bool = False


def _passing(kind: str, next_step: str) -> _Judgement:
    """Return the judgement that the same request may succeed later."""
    return _Judgement(kind, next_step, retryable=True)


_CREATE_BUCKET = "Check the name, or create it first: this package never creates one."
_RENEW = "Renew the credentials; those found in the environment are looked up again by a retry."
_WRONG_KEY = "Check the credentials in storage_options or the environment."
_CLOCK = "Set this machine's clock: it differs too much from the storage's."
_RIGHTS = "Give these credentials the right to read, write, list and delete below this URL."
_SLOWER = "Try again later, or lower thread_count."
_NETWORK = "Check the address (endpoint_url), the network and that the service runs."
_SLOW = "Check that the storage answers; if it is only slow, raise Timeouts(request=...)."
_REGION = "Set the bucket's region: storage_options={'client_kwargs': {'region_name': ...}}."
_TRUST = "Install the authority's certificate or name it (AWS_CA_BUNDLE, SSL_CERT_FILE)."
_OPTIONS = "Check storage_options and the URL."
_CANNOT = "This storage cannot do that; use another one, or its native API."
_ABSENT = "Check the spelling of the URL."
_NOT_IT = "Check endpoint_url: is it the storage's API, and not its console or a proxy?"
_CHANGED = "Something else changed the object meanwhile; read it again."
_OTHER = "Check storage_options; if they are right, see the storage's logs for this request."
_ROOM = "Free space or raise the quota."

_PERMISSION = _Judgement("permission", _RIGHTS)
_WRONG = _Judgement("credentials", _WRONG_KEY)
_SKEWED = _Judgement("credentials", _CLOCK)
_EXPIRED = _passing("credentials", _RENEW)
_THROTTLED = _passing("throttled", _SLOWER)
_TIMEOUT = _passing("timeout", _SLOW)
_CONNECTION = _passing("connection", _NETWORK)
_CERTIFICATE = _Judgement("connection", _TRUST)
_NOT_FOUND = _Judgement("not-found", _ABSENT)
_EXISTS = _Judgement("exists", "Choose another name, or find out who wrote it.")
_PRECONDITION = _Judgement("precondition", _CHANGED)
_RANGE = _Judgement("range", "The object is shorter than it should be.")
_UNSUPPORTED = _Judgement("unsupported", _CANNOT)
_NO_SPACE = _Judgement("no-space", _ROOM)
_NO_BUCKET = _Judgement("other", _CREATE_BUCKET)
_WRONG_REGION = _Judgement("other", _REGION)
_BAD_OPTIONS = _Judgement("other", _OPTIONS)
_FOREIGN = _Judgement("other", _NOT_IT)
_UNKNOWN = _Judgement("other", _OTHER)
_SERVER = _passing("other", "Try again later; the fault is the storage's.")

# kind "other" for a missing bucket: "not-found" would read as "no checkpoint here yet".
_CODES: Mapping[_Judgement, tuple[str, ...]] = {
    _NO_BUCKET: ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName", "ContainerDisabled"),
    _NOT_FOUND: ("NoSuchKey", "NoSuchVersion", "BlobNotFound", "ResourceNotFound"),
    _PERMISSION: (
        "AccessDenied",
        "AccountIsDisabled",
        "AccountProblem",
        "AllAccessDisabled",
        "AuthorizationFailure",
        "AuthorizationPermissionMismatch",
        "InsufficientAccountPermissions",
        "InvalidObjectState",
    ),
    _WRONG: (
        "AuthenticationFailed",
        "InvalidAccessKeyId",
        "InvalidAuthenticationInfo",
        "InvalidSecurity",
        "NoAuthenticationInformation",
        "SignatureDoesNotMatch",
    ),
    _SKEWED: ("RequestTimeTooSkewed",),
    _EXPIRED: (
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidToken",
        "RequestExpired",
        "TokenRefreshRequired",
        "authError",
    ),
    _THROTTLED: (
        "BandwidthLimitExceeded",
        "ConditionalRequestConflict",
        "OperationAborted",
        "RequestLimitExceeded",
        "ServerBusy",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "rateLimitExceeded",
        "userRateLimitExceeded",
    ),
    _TIMEOUT: ("OperationTimedOut", "RequestTimeout"),
    _CONNECTION: (
        "BadDigest",
        "IncompleteBody",
        "InvalidDigest",
        "Md5Mismatch",
        "XAmzContentSHA256Mismatch",
    ),
    _EXISTS: ("BlobAlreadyExists",),
    _PRECONDITION: ("ConditionNotMet", "PreconditionFailed", "conditionNotMet"),
    _RANGE: ("InvalidRange", "requestedRangeNotSatisfiable"),
    _UNSUPPORTED: ("MethodNotAllowed", "NotImplemented", "NotSupported"),
    _NO_SPACE: ("InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "quotaExceeded"),
    _WRONG_REGION: (
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "PermanentRedirect",
        "TemporaryRedirect",
    ),
    _SERVER: ("InternalError", "backendError", "internalError"),
}
_BY_CODE = {code: judgement for judgement, codes in _CODES.items() for code in codes}

_BY_STATUS = {
    301: _WRONG_REGION,
    401: _EXPIRED,
    403: _PERMISSION,
    404: _NOT_FOUND,
    405: _UNSUPPORTED,
    408: _TIMEOUT,
    409: _PRECONDITION,
    410: _NOT_FOUND,
    412: _PRECONDITION,
    416: _RANGE,
    423: _THROTTLED,
    425: _THROTTLED,
    429: _THROTTLED,
    501: _UNSUPPORTED,
    502: _CONNECTION,
    503: _THROTTLED,
    504: _TIMEOUT,
    507: _NO_SPACE,
}
_FIRST_SERVER_STATUS = 500
_FAILURE_STATUSES = range(300, 600)

# "package.Type", the package being the first part of the module that defines the type.
_TYPES: Mapping[_Judgement, tuple[str, ...]] = {
    _FOREIGN: (
        "azure.DeserializationError",
        "ckpt_storage.ForeignAnswer",
        "json.JSONDecodeError",
    ),
    _CERTIFICATE: (
        "aiohttp.ClientConnectorCertificateError",
        "asyncssh.HostKeyNotVerifiable",
        "paramiko.BadHostKeyException",
        "ssl.SSLCertVerificationError",
    ),
    _WRONG: (
        "asyncssh.PermissionDenied",
        "azure.ClientAuthenticationError",
        "azure.CredentialUnavailableError",
        "botocore.NoAuthTokenError",
        "botocore.NoCredentialsError",
        "botocore.PartialCredentialsError",
        "botocore.SSOError",
        "google.DefaultCredentialsError",
        "paramiko.AuthenticationException",
    ),
    _EXPIRED: (
        "botocore.CredentialRetrievalError",
        "botocore.TokenRetrievalError",
        "botocore.UnauthorizedSSOTokenError",
        "google.RefreshError",
    ),
    _BAD_OPTIONS: (
        "aiohttp.InvalidURL",
        "botocore.InvalidConfigError",
        "botocore.InvalidRegionError",
        "botocore.NoRegionError",
        "botocore.ParamValidationError",
        "botocore.ProfileNotFound",
        "httpx.UnsupportedProtocol",
    ),
    _TIMEOUT: (
        "aiohttp.ServerTimeoutError",
        "azure.ServiceRequestTimeoutError",
        "azure.ServiceResponseTimeoutError",
        "botocore.ConnectTimeoutError",
        "botocore.ReadTimeoutError",
        "builtins.TimeoutError",
        "fsspec.FSTimeoutError",
        "httpx.TimeoutException",
        "requests.Timeout",
    ),
    _CONNECTION: (
        "aiohttp.ClientError",
        "asyncio.IncompleteReadError",
        "asyncssh.ConnectionLost",
        "asyncssh.DisconnectError",
        "azure.HttpResponseError",
        "azure.IncompleteReadError",
        "azure.ServiceRequestError",
        "azure.ServiceResponseError",
        "botocore.ConnectionError",
        "botocore.FlexibleChecksumError",
        "botocore.HTTPClientError",
        "botocore.IncompleteReadError",
        "botocore.ResponseParserError",
        "builtins.ConnectionError",
        "builtins.EOFError",
        "concurrent.CancelledError",
        "google.TransportError",
        "http.HTTPException",
        "httpx.TransportError",
        "paramiko.SSHException",
        "requests.ConnectionError",
        "socket.gaierror",
        "ssl.SSLError",
        "webdav4.BadGatewayError",
    ),
    _NOT_FOUND: (
        "asyncssh.SFTPNoSuchFile",
        "builtins.FileNotFoundError",
        "builtins.IsADirectoryError",
        "builtins.NotADirectoryError",
        "webdav4.ResourceNotFound",
    ),
    _EXISTS: ("builtins.FileExistsError", "webdav4.ResourceAlreadyExists"),
    _PERMISSION: (
        "asyncssh.SFTPPermissionDenied",
        "builtins.PermissionError",
        "webdav4.ForbiddenOperation",
    ),
    _NO_SPACE: ("asyncssh.SFTPNoSpaceOnFilesystem", "webdav4.InsufficientStorage"),
    _THROTTLED: ("webdav4.ResourceLocked",),
    _UNSUPPORTED: ("asyncssh.SFTPOpUnsupported", "builtins.NotImplementedError"),
}
_BY_TYPE = {name: judgement for judgement, names in _TYPES.items() for name in names}


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a server said about a failure."""

    status: int | None
    code: str
    message: str


def map_error(error: BaseException, operation: Operation, scrub: Scrubber) -> StorageError:
    """Return the `StorageError` that says what `error` means for the user.

    Kind "credentials" with `retryable` set means credentials that may have expired: a client
    built anew may find fresh ones. The text of `error` is kept, without credentials.
    """
    chain = list(_chain(error))
    answer = next((found for e in chain if (found := _answer_in(e)) is not None), None)
    judgement = (_judged_answer(answer) if answer else None) or _judged_types(chain)
    text = _described(error, answer, known=judgement is not None)
    verdict = judgement or _UNKNOWN
    shows_endpoint = verdict.kind in {"connection", "timeout", "credentials", "other"}
    where = f" at {operation.endpoint}" if operation.endpoint and shows_endpoint else ""
    if verdict.kind == "timeout" and answer is None and operation.timeout_s is not None:
        text = f"no answer within {operation.timeout_s:g} s ({text})"
    message = scrub(f"The {operation.name} of {operation.path} failed{where}: {text}.")
    raised = UnsupportedByStoreError if verdict.kind == "unsupported" else StorageError
    failure = raised(
        message,
        kind=verdict.kind,
        retryable=verdict.retryable,
        path=scrub(operation.path),
        next_step=verdict.next_step,
    )
    if any(isinstance(link, ConnectionRefusedError) for link in chain):
        # Proof that nothing was done; the foreign one may carry credentials in its text.
        failure.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    return failure


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < _CHAIN_LIMIT:
        seen.add(id(current))
        yield current
        hidden = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or hidden


def _answer_in(error: BaseException) -> _Answer | None:
    """Return what a server said, if this exception carries an answer."""
    if isinstance(error, HttpFailure):
        return _Answer(error.status, error.error_code, error.message)
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        said = response.get("Error", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return _Answer(_number(status), str(said.get("Code", "")), str(said.get("Message", "")))
    # Elsewhere `code` is a number of the library's own, or of an error that is no answer.
    is_gcsfs = type(error).__module__.partition(".")[0] == "gcsfs"
    for holder in (error, response):
        for name in ("status", "status_code", *(["code"] if is_gcsfs else [])):
            status = _number(getattr(holder, name, None))
            if status is not None and status in _FAILURE_STATUSES:
                code = getattr(error, "error_code", None)
                message = getattr(error, "message", None) or str(error)
                return _Answer(status, str(getattr(code, "value", code) or ""), str(message))
    return None


def _number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        return int(value)
    except ValueError:
        return None


def _judged_answer(answer: _Answer) -> _Judgement | None:
    """Return what an answer means, by its code or else by its status."""
    by_code = _BY_CODE.get(answer.code)
    if by_code is not None:
        return by_code
    # A code of digits is how botocore reports an answer without a body, such as to a HEAD.
    status = answer.status if answer.status is not None else _number(answer.code)
    if status is None:
        return None
    fallback = _SERVER if status >= _FIRST_SERVER_STATUS else _UNKNOWN
    return _BY_STATUS.get(status, fallback)


def _judged_types(chain: list[BaseException]) -> _Judgement | None:
    """Return what the types of an exception and its causes mean."""
    if any(isinstance(error, ssl.SSLCertVerificationError) for error in chain):
        return _CERTIFICATE
    for error in chain:
        for kind in type(error).__mro__:
            found = _BY_TYPE.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")
            if found is not None:
                return found
        if isinstance(error, OSError) and error.errno is not None:
            known = map_os_error(error, operation="", path="")
            return _Judgement(known.kind, known.next_step or "", known.retryable)
    return None


def _described(error: BaseException, answer: _Answer | None, *, known: bool) -> str:
    """Return type, code, status and text of an exception, on one line."""
    if answer is not None:
        status = "" if answer.status is None else f"status {answer.status}"
        head = ", ".join(part for part in (answer.code, status) if part)
        text = answer.message
    else:
        head = type(error).__name__
        text = str(error)
        if not known:
            # An unexpected type is a mistake of a program; say where, as no traceback will.
            frames = traceback.extract_tb(error.__traceback__)
            if frames:
                head += f" in {PurePath(frames[-1].filename).name}:{frames[-1].lineno}"
    line = " ".join(text.split())[:_MESSAGE_LIMIT_CHARS].rstrip(". ")
    return f"{head}: {line}" if line and line != head else head
