"""An in-memory S3 server with faults, for tests, examples and benchmarks.

Speaks enough of S3 for botocore and s3fs, path style only, and is strict where checkpoints depend
on it: preconditions hold atomically, an upload is invisible until complete, digests are verified,
and what is not implemented is refused with 501. Any credentials are accepted and signatures are not
verified.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import selectors
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any, Literal, Self

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import MIB

from ._s3faults import CrashWhen, Effect, FaultRule, Journal, RequestRecord, ServerStats, Ticket
from ._s3http import Disconnected, Head, Response, Wire, body_bytes
from ._s3link import Link
from ._s3memory import BufferPool, Payload
from ._s3model import S3Error, S3State
from ._s3objects import ObjectOperations
from ._s3request import Request, Settings, is_bucket_name, refuse_unsupported, route
from ._s3uploads import UploadOperations
from ._s3xml import error_document

__all__ = ["FaultRule", "RequestRecord", "S3Server", "ServerStats", "main"]

_LOG = logging.getLogger(__name__)
_REGION = "us-east-1"
_BACKLOG = 512
_CONTROL_PREFIX = "/_"


class S3Server:
    """One server on one port, started and stopped as a context manager or by `start` and `stop`.

    `port` 0 takes a free one. `etag` "opaque" gives every object a random ETag of its own, which
    costs no time and tells two writes of equal bytes apart; "md5" is what AWS does.
    `ignore_preconditions` models a store from before conditional writes: it overwrites silently.
    `omit_condition_element` leaves `<Condition>` out of a 412, as Ceph does. `min_part_bytes` is
    the least size of a part that is not the last, and `list_page_count` the most entries of one
    listing; tests lower them to get many parts and pages from little data.

    With `bandwidth_bytes_s` all connections together carry so many bytes a second, each way.

    Out of process, `POST /_fault` takes a JSON list of rules with the fields of `FaultRule`, and
    `GET /_stats` returns `stats()`; neither gets a sequence number.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        etag: Literal["opaque", "md5"] = "opaque",
        ignore_preconditions: bool = False,
        omit_condition_element: bool = False,
        min_part_bytes: int = 5 * MIB,
        list_page_count: int = 1000,
        bandwidth_bytes_s: float | None = None,
    ) -> None:
        self._address = (host, port)
        self._settings = Settings(
            etag=etag,
            ignore_preconditions=ignore_preconditions,
            omit_condition_element=omit_condition_element,
            list_page_count=list_page_count,
        )
        self._state = S3State(min_part_bytes=min_part_bytes)
        self._stopping = threading.Event()
        self._journal = Journal()
        self._pool = BufferPool()
        self._links: tuple[Link, Link] | None = None
        if bandwidth_bytes_s is not None:
            wait = self._stopping.wait
            self._links = (Link(bandwidth_bytes_s, wait=wait), Link(bandwidth_bytes_s, wait=wait))
        self._operations = {
            **ObjectOperations(self._state, self._settings).table,
            **UploadOperations(self._state, self._settings).table,
        }
        self._request_ids = itertools.count(1)
        self._connections: dict[threading.Thread, Wire] = {}
        self._acceptor: threading.Thread | None = None
        self._wake: socket.socket | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"S3Server({self.endpoint_url})"

    @property
    def endpoint_url(self) -> str:
        """Address of the server; its port is the real one once it was started."""
        return f"http://{self._address[0]}:{self._address[1]}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Keyword arguments with which `s3fs.S3FileSystem` reaches the server."""
        return {
            "key": "test",
            "secret": "test",
            "client_kwargs": {"endpoint_url": self.endpoint_url, "region_name": _REGION},
        }

    def start(self) -> None:
        """Listen and serve in background threads; a server starts once."""
        if self._acceptor is not None:
            raise InvalidInputError(
                f"{self!r} was started before.", next_step="Make another S3Server."
            )
        listener = socket.create_server(self._address, backlog=_BACKLOG)
        listener.settimeout(0)
        self._address = (self._address[0], listener.getsockname()[1])
        self._wake, woken = socket.socketpair()
        self._acceptor = threading.Thread(
            target=self._accept, args=(listener, woken), name="s3server-accept", daemon=True
        )
        self._acceptor.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Close all sockets and join all threads; later calls do nothing.

        Raises `TimeoutError` naming the threads that did not end in time.
        """
        self._stopping.set()
        if self._acceptor is None or self._wake is None:
            return
        deadline = time.monotonic() + timeout_s
        self._wake.close()
        self._acceptor.join(timeout_s)
        for wire in self._connections.values():
            wire.interrupt()
        threads = [self._acceptor, *self._connections]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if stuck := [thread.name for thread in threads if thread.is_alive()]:
            raise TimeoutError(f"{self!r}: {', '.join(stuck)} did not end in {timeout_s} s")
        self._connections.clear()

    def create_bucket(self, name: str) -> None:
        """Create a bucket if it is missing; raises `InvalidInputError` for a name S3 refuses."""
        if not is_bucket_name(name):
            raise InvalidInputError(
                f"{name!r} is no bucket name.",
                next_step="Use 3 to 63 lower-case letters, digits, dots and hyphens.",
            )
        self._state.create_bucket(name)

    def faults(self, rules: Iterable[FaultRule]) -> None:
        """Replace all fault rules; an empty list ends them."""
        self._journal.set_rules(rules)

    def reset_counters(self) -> None:
        """Forget all requests; the next one has sequence number 1."""
        self._journal.reset()

    def crash_at(self, seq: int, when: CrashWhen = "before") -> None:
        """Play the end of a client at request `seq`: no later request is done until `recover`.

        Those are cut with RST. Request `seq` itself is cut too ("before"), done with its answer
        lost ("after"), or cut once half its body was read ("torn", "before" if it has none).
        """
        self._journal.set_crash((seq, when))

    def recover(self) -> None:
        """End the crash; counters and rules stay."""
        self._journal.set_crash(None)

    @property
    def requests(self) -> list[RequestRecord]:
        """All requests since the counters were reset, in order of arrival."""
        return self._journal.records()

    def wait_for(
        self, satisfied: Callable[[list[RequestRecord]], bool], *, timeout_s: float = 30.0
    ) -> None:
        """Wait until `satisfied(requests)` holds; it runs under a lock and must be quick.

        Raises `TimeoutError`.
        """
        if not self._journal.wait_for(satisfied, timeout_s=timeout_s):
            raise TimeoutError(f"{self!r} did not see the requests waited for in {timeout_s} s")

    def stats(self) -> ServerStats:
        """Add up the requests since the counters were reset; count the uploads open now."""
        return self._journal.stats(self._state.open_upload_count())

    def dump(self, bucket: str | None = None) -> dict[str, bytes]:
        """Return copies of all objects of a bucket (None: of the only one) by key, in order."""
        names = list(self._state.buckets())
        if bucket is None and len(names) == 1:
            bucket = names[0]
        if bucket not in names:
            raise InvalidInputError(
                f"{self!r} has no bucket {bucket!r}.", next_step=f"Name one of {names}."
            )
        return {
            key: stored.payload.to_bytes() for key, stored in self._state.objects(bucket).items()
        }

    def corrupt(self, bucket: str, key: str, mutate: Callable[[bytes], bytes]) -> None:
        """Replace stored bytes by `mutate` of them; ETag, time and checksums stay as they were.

        Raises `KeyError` if there is no such object.
        """
        try:
            self._state.mutate(bucket, key, mutate)
        except S3Error as error:
            raise KeyError(f"{bucket}/{key}") from error

    def _accept(self, listener: socket.socket, woken: socket.socket) -> None:
        with listener, woken, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while not self._stopping.is_set():
                if all(key.fileobj is not listener for key, _ in selector.select()):
                    continue
                try:
                    sock, _ = listener.accept()
                except OSError:
                    # The client is gone again, or descriptors ran out; some may be closed soon.
                    self._stopping.wait(0.01)
                    continue
                self._connect(sock)

    def _connect(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(None)
            wire = Wire(sock, self._pool, self._stopping, self._links)
        except OSError:
            sock.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(wire,), name=f"s3server-{sock.fileno()}", daemon=True
        )
        # Threads are not taken out when they end, but here: so `stop` joins every one.
        self._connections = {
            known: its for known, its in self._connections.items() if known.is_alive()
        }
        self._connections[thread] = wire
        thread.start()

    def _serve(self, wire: Wire) -> None:
        try:
            while self._serve_one(wire):
                pass
        except Disconnected:
            pass
        finally:
            wire.close()

    def _serve_one(self, wire: Wire) -> bool:
        try:
            head = wire.read_head()
            is_control = head.path.startswith(_CONTROL_PREFIX)
            control = self._control(head, wire.read_body(head).payload) if is_control else None
        except S3Error as error:
            self._send(wire, self._refusal("", error), is_last=True)
            return False
        if control is not None:
            self._send(wire, control, is_last=not head.keep_alive)
            return head.keep_alive
        request = route(head)
        ticket = self._journal.begin(request.op, request.bucket, request.key)
        return self._serve_request(wire, request, ticket)

    def _serve_request(self, wire: Wire, request: Request, ticket: Ticket) -> bool:
        effect = ticket.effect
        is_last = not request.head.keep_alive
        if effect.action == "reset":
            raise wire.reset()
        self._hold(effect)
        try:
            body = wire.read_body(request.head, limit_bytes=_body_limit(effect, request))
        except S3Error as error:
            # Where the next request starts is not known any more.
            response, is_last = self._refusal(request.head.path, error), True
        else:
            ticket.record(bytes_in=body.payload.size_bytes)
            if body.is_cut:
                raise wire.reset()
            response = self._answer(dataclasses.replace(request, body=body), effect)
        if effect.action == "lost":
            raise wire.reset()
        if request.head.method == "HEAD":
            size_bytes = response.payload.size_bytes
            response = dataclasses.replace(response, payload=Payload(), announced_bytes=size_bytes)
        cut_bytes = None
        sent_bytes = response.payload.size_bytes
        if effect.rule is not None and effect.action == "truncate":
            cut_bytes = effect.rule.limit_bytes
            sent_bytes = min(cut_bytes, sent_bytes)
        # Before it is sent, so that a client that has its answer finds it in the log.
        ticket.record(status=response.status, bytes_out=sent_bytes)
        self._send(wire, response, is_last=is_last, limit_bytes=cut_bytes)
        return not is_last

    def _hold(self, effect: Effect) -> None:
        if effect.rule is None or effect.action not in ("delay", "hang"):
            return
        if self._stopping.wait(effect.rule.delay_s if effect.action == "delay" else None):
            raise Disconnected("the server stops")

    def _answer(self, request: Request, effect: Effect) -> Response:
        try:
            if (injected := _injected(effect)) is not None:
                return self._refusal(request.head.path, injected)
            refuse_unsupported(request, self._settings)
            if effect.action == "ignore_range":
                request = dataclasses.replace(request, ignores_range=True)
            return self._operations[request.op](request)
        except S3Error as error:
            return self._refusal(request.head.path, error)
        except Exception as error:  # noqa: BLE001 - a bug here must answer, not hang the test
            _LOG.exception("%s failed", request.op)
            return self._refusal(
                request.head.path,
                S3Error(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalError", repr(error)),
            )

    def _refusal(self, resource: str, error: S3Error) -> Response:
        has_condition = not self._settings.omit_condition_element
        return Response(
            status=error.status,
            headers=[("Content-Type", "application/xml")],
            payload=error_document(error, resource=resource, has_condition=has_condition),
        )

    def _send(
        self, wire: Wire, response: Response, *, is_last: bool, limit_bytes: int | None = None
    ) -> None:
        wire.send(
            response,
            request_id=next(self._request_ids),
            keep_alive=not is_last,
            limit_bytes=limit_bytes,
        )

    def _control(self, head: Head, payload: Payload) -> Response:
        status = HTTPStatus.OK
        answer: object = None
        if (head.method, head.path) == ("POST", "/_fault"):
            try:
                self.faults(FaultRule.from_json(json.loads(payload.to_bytes())))
            except ValueError as error:
                status, answer = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        elif (head.method, head.path) == ("GET", "/_stats"):
            answer = dataclasses.asdict(self.stats())
        else:
            status = HTTPStatus.NOT_FOUND
        return Response(
            status=status,
            headers=[("Content-Type", "application/json")],
            payload=Payload.of_bytes(json.dumps(answer).encode()),
        )


def _body_limit(effect: Effect, request: Request) -> int | None:
    if effect.action == "torn":
        return body_bytes(request.head.headers) // 2
    if effect.action == "reset_body" and effect.rule is not None:
        return effect.rule.limit_bytes
    return None


def _injected(effect: Effect) -> S3Error | None:
    if effect.action == "expired_token":
        return S3Error(HTTPStatus.FORBIDDEN, "ExpiredToken", "The provided token has expired.")
    if effect.action == "status" and effect.rule is not None:
        return S3Error(effect.rule.status, effect.rule.code, "injected by a fault rule")
    return None


def _wait_for_end(stop_fd: int) -> None:
    # A pipe that closes means that whoever started the server is gone; /dev/null, a file or a
    # terminal says nothing of the kind, and a background job must not read its terminal.
    with selectors.DefaultSelector() as selector:
        selector.register(stop_fd, selectors.EVENT_READ)
        with contextlib.suppress(OSError, ValueError):
            mode = os.fstat(sys.stdin.fileno()).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == stop_fd or not os.read(key.fd, 4096):
                    return


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or, where standard input is a pipe, its end.

    Prints one JSON line with `endpoint_url` and `storage_options` once it listens. Must run in the
    main thread, whose signal handlers it replaces meanwhile.
    """
    parser = argparse.ArgumentParser(prog="python -m ckpt_storage.testing.s3server")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--bucket", action="append", default=[], help="create it; may be repeated")
    parser.add_argument(
        "--bandwidth", type=float, metavar="BYTES", help="bytes a second each way, of all together"
    )
    options = parser.parse_args(arguments)
    stop_read, stop_write = socket.socketpair()
    stop_write.settimeout(0)
    previous_fd = signal.set_wakeup_fd(stop_write.fileno())
    previous = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        with (
            stop_read,
            stop_write,
            S3Server(port=options.port, bandwidth_bytes_s=options.bandwidth) as server,
        ):
            for name in options.bucket:
                server.create_bucket(name)
            ready = {"endpoint_url": server.endpoint_url, "storage_options": server.storage_options}
            sys.stdout.write(json.dumps(ready) + "\n")
            sys.stdout.flush()
            _wait_for_end(stop_read.fileno())
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
