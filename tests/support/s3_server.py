"""A small S3 server in memory with fault injection: path style, any credentials.

It is strict where checkpoints depend on it: conditions are atomic, an upload is invisible until it
is complete, checksums are verified, and unknown requests, parameters and conditions get 501.
"""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import socketserver
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Literal, Self, cast, get_args
from urllib.parse import parse_qsl, unquote

from s3_objects import Answer, Request, S3Error, S3Objects
from s3_rules import customer_key_options

from ckpt_storage.errors import InvalidInputError

__all__ = ["Action", "CrashWhen", "FaultRule", "RequestRecord", "S3Server", "crash_rules"]

_STOP_TIMEOUT_S = 10.0
_RESET = struct.pack("ii", 1, 0)

Action = Literal[
    "delay", "flip", "hang", "ignore_range", "lost", "reset", "status", "torn", "truncate"
]
CrashWhen = Literal["before", "after", "torn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """The requests that get a fault, and the fault.

    The regular expression `op` must match a request's whole op name, and `key` any part of its key.
    The first `after` matches pass, the next `times` get the fault (0: all). The first rule that
    applies wins, and later rules do not count that request; so a list of rules is a sequence.

    * `status`: do nothing, respond with `status` and `code`; 200: an error in a success response.
    * `delay`: wait `delay_s` seconds, then serve as usual. `hang`: never respond.
    * `flip`: change a byte of the request's body, then serve as usual.
    * `reset`: reset the connection before the work is done; `lost`: after it is done.
    * `torn`: read half of the body, if there is any, then reset; nothing is stored.
    * `truncate`: do the work, announce the whole response, send half of it, close.
    * `ignore_range`: respond to a ranged read with 200 and the whole object.
    """

    op: str = ".*"
    key: str = ""
    after: int = 0
    times: int = 1
    action: Action
    status: int = 503
    code: str = "SlowDown"
    delay_s: float = 1.0

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            step = f"Name one of {', '.join(get_args(Action))}."
            raise InvalidInputError(f"{self!r} is no fault rule.", next_step=step)


def crash_rules(number: int, when: CrashWhen) -> list[FaultRule]:
    """Return rules for a client that dies before, after or within its nth request, from 1 on."""
    moments: dict[CrashWhen, Action] = {"before": "reset", "after": "lost", "torn": "torn"}
    # Both rules count the requests before; the second applies to all after the first's request.
    return [
        FaultRule(after=number - 1, action=moments[when]),
        FaultRule(after=number - 1, times=0, action="reset"),
    ]


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A request; body bytes, status (0 without a response) and the action of its fault, or ""."""

    seq: int
    op: str
    bucket: str
    key: str
    bytes_in: int = 0
    bytes_out: int = 0
    status: int = 0
    fault: str = ""


@dataclass(kw_only=True, eq=False, repr=False)
class S3Server(S3Objects):
    """A server on the loopback interface, run as a context manager; `port` 0: any free port.

    The other settings are those of `S3Objects`. `faults` sets the rules of fault injection.
    """

    port: int = 0
    stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _listener: _Listener | None = field(default=None, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _log: list[RequestRecord] = field(default_factory=list, init=False)
    _rules: list[FaultRule] = field(default_factory=list, init=False)
    _matches: Counter[int] = field(default_factory=Counter, init=False)

    def __enter__(self) -> Self:
        if self._listener is not None:
            raise InvalidInputError("The server was started before.", next_step="Make another.")
        self._listener = listener = _Listener(("127.0.0.1", self.port), _Connection)
        acceptor = threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True)
        listener.owner, listener.threads = self, {acceptor: listener.socket}
        self.port = listener.server_address[1]
        acceptor.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        if self._listener is None:
            return
        self.stopping.set()
        self._listener.shutdown()
        self._listener.server_close()
        for thread, sock in self._listener.threads.items():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join(_STOP_TIMEOUT_S)
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} of the server did not end in time")

    @property
    def endpoint_url(self) -> str:
        """Address of the server; with port 0 it is known after the start."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Keyword arguments of `s3fs.S3FileSystem` for this server."""
        client = {"endpoint_url": self.endpoint_url, "region_name": "us-east-1"}
        extra = customer_key_options() if self.profile == "sse-c" else {}
        return {"key": "test", "secret": "test", "client_kwargs": client, **extra}

    def faults(self, rules: Iterable[FaultRule]) -> None:
        """Replace all fault rules and reset their counts; an empty list ends all faults."""
        with self._changed:
            self._rules = list(rules)
            self._matches.clear()

    def reset_counters(self) -> None:
        """Forget all requests; the next request has sequence number 1."""
        with self._changed:
            self._log = []

    @property
    def requests(self) -> list[RequestRecord]:
        """All requests since the counters were reset, in order of arrival."""
        return list(self._log)

    def wait_for(
        self, satisfied: Callable[[list[RequestRecord]], bool], *, timeout_s: float = 30.0
    ) -> None:
        """Wait until `satisfied(requests)`, called under a lock; or raise `TimeoutError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: satisfied(self._log), timeout_s):
                raise TimeoutError(f"the expected requests did not arrive within {timeout_s} s")

    def begin(self, op: str, bucket: str, key: str) -> tuple[RequestRecord, FaultRule]:
        """Log a request; return its record and its rule, which counts if `fault` is set."""
        with self._changed:
            record = RequestRecord(seq=len(self._log) + 1, op=op, bucket=bucket, key=key)
            self._log.append(record)
            self._changed.notify_all()
            for index, rule in enumerate(self._rules):
                if re.fullmatch(rule.op, op) and re.search(rule.key, key):
                    self._matches[index] += 1
                    hits = self._matches[index] - rule.after
                    if hits > 0 and (rule.times == 0 or hits <= rule.times):
                        record.fault = rule.action
                        return record, rule
            return record, FaultRule(action="delay")

    def note(self, record: RequestRecord, **figures: int) -> None:
        """Set attributes of a record."""
        with self._changed:
            for name, value in figures.items():
                setattr(record, name, value)
            self._changed.notify_all()


class _Listener(socketserver.ThreadingTCPServer):
    """Accepts connections, with a thread for each."""

    allow_reuse_address = True
    request_queue_size = 512
    owner: S3Server
    threads: dict[threading.Thread, socket.socket]

    def process_request(self, request: Any, client_address: Any) -> None:
        arguments = (request, client_address)
        thread = threading.Thread(target=self.process_request_thread, args=arguments, daemon=True)
        self.threads[thread] = request
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        # No shutdown, which would turn a reset into an orderly end.
        request.close()

    def handle_error(self, *args: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*args)


class _Connection(http.server.BaseHTTPRequestHandler):
    """A connection, used by a single thread."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_args: object) -> None:
        """Log nothing."""

    def _serve(self) -> None:
        owner = cast("_Listener", self.server).owner
        path, _, query = self.path.partition("?")
        bucket, _, key = unquote(path).removeprefix("/").partition("/")
        request = Request(
            method=self.command,
            bucket=bucket,
            key=key,
            query=dict(parse_qsl(query, keep_blank_values=True)),
            headers={name.lower(): text.strip() for name, text in self.headers.items()},
        )
        record, rule = owner.begin(request.op, bucket, key)
        answer = self._answer(owner, request, record, rule)
        data = b"" if self.command == "HEAD" else answer.body
        if record.fault == "truncate":
            data = data[: len(data) // 2]
        # Logged before it is sent, so that a client with a response finds it in the log.
        owner.note(record, bytes_out=len(data), status=answer.status)
        self.send_response(answer.status)
        for name, text in answer.headers.items():
            self.send_header(name, text)
        if answer.status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection |= record.fault == "truncate"

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _serve  # noqa: N815 - as inherited

    def _answer(
        self, owner: S3Server, request: Request, record: RequestRecord, rule: FaultRule
    ) -> Answer:
        fault, headers = record.fault, {**request.headers}
        if fault in {"delay", "hang"} and owner.stopping.wait(
            rule.delay_s if fault == "delay" else None
        ):
            raise ConnectionAbortedError
        if fault == "ignore_range":
            headers.pop("range", None)
        body = b"" if fault == "reset" else self._body(headers, is_torn=fault == "torn")
        if fault == "flip" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        owner.note(record, bytes_in=len(body))
        if fault == "status":
            return S3Error(rule.status, rule.code, "injected by a fault rule").answer()
        if fault not in {"reset", "torn"}:
            answer = owner.answer(replace(request, headers=headers, body=body))
            if fault != "lost":
                return answer
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        raise ConnectionAbortedError

    def _body(self, headers: dict[str, str], *, is_torn: bool) -> bytes:
        """Read the body; trailers are added to the headers."""

        def read(count: int) -> bytes:
            if len(data := self.rfile.read(count)) < count:
                raise ConnectionAbortedError
            return data

        size = int(headers.get("content-length", 0))
        if is_torn or "x-amz-decoded-content-length" not in headers:
            return read(size // 2 if is_torn else size)
        # The framing that clients built on the AWS CRT send.
        pieces = []
        while count := int(self.rfile.readline().partition(b";")[0], 16):
            pieces.append(read(count))
            self.rfile.readline()
        while line := self.rfile.readline().strip().decode():
            name, _, text = line.partition(":")
            headers[name.lower()] = text.strip()
        return b"".join(pieces)
