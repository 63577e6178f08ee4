"""The S3 server of `ckpt_storage.testing` fails as told, logs what it saw, and ends cleanly."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]
from s3clients import BUCKET, ask, connect, fetch, refused, running
from servers import free_port

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.testing.s3_server import FaultRule, S3Server, crash_rules


@pytest.fixture
def pair() -> Iterator[tuple[S3Server, Any]]:
    """A server and a botocore client of it."""
    with running() as found:
        yield found


@pytest.fixture
def server(pair: tuple[S3Server, Any]) -> S3Server:
    """The server of `pair`."""
    return pair[0]


@pytest.fixture
def client(pair: tuple[S3Server, Any]) -> Any:
    """The botocore client of `pair`."""
    return pair[1]


def socket_to(server: S3Server) -> socket.socket:
    """Open a connection without any HTTP client behind it."""
    host, _, port = server.endpoint_url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def drain(sock: socket.socket) -> tuple[bytes, bool]:
    """Read to the end; return the bytes and whether the end was a reset."""
    data = bytearray()
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        return bytes(data), True
    return bytes(data), False


def put(client: Any, key: str, body: bytes = b"x") -> None:
    """Store an object with botocore."""
    client.put_object(Bucket=BUCKET, Key=key, Body=body)


# Fault rules


def test_rule_counts_its_matches(server: S3Server, client: Any) -> None:
    """A rule lets `after` matches pass and hits the next `times`; other keys do not count."""
    server.faults([FaultRule(op="put", key="^a", after=1, times=2, action="status")])
    codes = []
    for key in ("a1", "b", "a2", "a3", "b", "a4"):
        try:
            put(client, key)
            codes.append("")
        except ClientError as error:
            codes.append(error.response["Error"]["Code"])
    assert codes == ["", "", "SlowDown", "SlowDown", "", ""]
    assert list(server.dump()) == ["a1", "a4", "b"]
    assert [request.key for request in server.requests if request.fault] == ["a2", "a3"]
    server.faults([FaultRule(op="put", action="status")])
    server.faults([])
    put(client, "a2")


@pytest.mark.parametrize("action", ["delay", "hang"])
def test_stop_ends_what_hangs(action: Any) -> None:
    """A request that hangs or waits long is cut when the server stops, without an answer."""
    with S3Server() as server:
        server.faults([FaultRule(action=action, delay_s=3600.0)])
        sock = socket_to(server)
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        server.wait_for(lambda requests: len(requests) == 1)
        assert server.requests[0].status == 0
    with sock:
        assert drain(sock)[0] == b""
    with pytest.raises(TimeoutError, match="did not see"):
        server.wait_for(lambda requests: len(requests) == 2, timeout_s=0.0)


@pytest.mark.parametrize(("action", "done"), [("reset", {}), ("lost", {"k": b"x" * 100_000})])
def test_reset_before_or_after_the_work(
    server: S3Server, action: Any, done: dict[str, bytes]
) -> None:
    """`reset` cuts before the work and `lost` after it; neither sends a byte of an answer."""
    server.faults([FaultRule(op="put", action=action)])
    with socket_to(server) as sock:
        sock.sendall(f"PUT /{BUCKET}/k HTTP/1.1\r\nContent-Length: 100000\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"x" * 100_000)
        assert drain(sock)[0] == b""
    assert server.dump() == done
    assert [(record.status, record.fault) for record in server.requests] == [(0, action)]


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "explode"},
        {"action": "reset", "op": "("},
        {"action": "reset", "after": -1},
        {"action": "reset", "times": "2"},
        {"action": "status", "status": 99},
    ],
)
def test_bad_rules_are_refused(fields: dict[str, Any]) -> None:
    """A rule that can mean nothing is refused."""
    with pytest.raises(InvalidInputError, match="no fault rule"):
        FaultRule(**fields)


# Crash points and the log


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_crash_points(server: S3Server, when: Any) -> None:
    """From request n on nothing is done; n itself is done only if the crash comes after it."""
    script = [("PUT", "a"), ("PUT", "b"), ("DELETE", "a"), ("PUT", "c")]
    states: list[set[str]] = [set(), {"a"}, {"a", "b"}, {"b"}, {"b", "c"}]
    for n in range(1, len(script) + 1):
        for key in "abc":
            ask(server, "DELETE", f"/{BUCKET}/{key}")
        server.reset_counters()
        server.faults(crash_rules(n, when))
        answered = 0
        for method, key in script:
            body = b"x" * 200_001 if method == "PUT" else b""
            with contextlib.suppress(ConnectionError):
                ask(server, method, f"/{BUCKET}/{key}", body)
                answered += 1
        assert answered == n - 1
        assert set(server.dump()) == states[n if when == "after" else n - 1]
        records = server.requests
        assert [record.fault == "" for record in records] == [True] * (n - 1) + [False] * (5 - n)
        if when == "torn":
            assert records[n - 1].bytes_in == (100_000 if script[n - 1][0] == "PUT" else 0)
        server.faults([])
        assert ask(server, "PUT", f"/{BUCKET}/c", b"y")[0] == 200


def test_log_and_counters(server: S3Server, client: Any) -> None:
    """Every request is logged with its op, name, body bytes and status."""
    put(client, "k", b"12345")
    fetch(client, "k", Range="bytes=1-3")
    refused(client.head_object, Bucket=BUCKET, Key="nope")
    seen = [
        (r.seq, r.op, r.bucket, r.key, r.bytes_in, r.bytes_out, r.status) for r in server.requests
    ]
    assert seen == [
        (1, "put", BUCKET, "k", 5, 0, 200),
        (2, "get", BUCKET, "k", 0, 3, 206),
        (3, "head", BUCKET, "nope", 0, 0, 404),
    ]
    server.reset_counters()
    assert server.requests == []
    client.list_objects_v2(Bucket=BUCKET)
    assert [(record.seq, record.op) for record in server.requests] == [(1, "list")]


# Lifecycle


def test_stop_leaves_no_thread_and_no_port() -> None:
    """A stopped server has closed its connections, idle ones too, and its port is free."""
    before = set(threading.enumerate())
    with S3Server(port=free_port()) as server:
        server.create_bucket(BUCKET)
        client = connect(server)
        put(client, "k")
        assert set(threading.enumerate()) - before
        with pytest.raises(InvalidInputError, match="started before"):
            server.__enter__()
    assert set(threading.enumerate()) <= before
    client.close()
    port = int(server.endpoint_url.rpartition(":")[2])
    with S3Server(port=port) as second:
        assert second.endpoint_url == server.endpoint_url


@pytest.mark.parametrize("end", ["stdin", "SIGTERM", "SIGINT"])
def test_command_serves_until_told(end: str) -> None:
    """The command prints where it listens, serves, and ends with 0."""
    command = [sys.executable, "-W", "error", "-m", "ckpt_storage.testing.s3_server"]
    with subprocess.Popen(
        [*command, "--port", "0", "--bucket", BUCKET], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        url = ready["endpoint_url"]
        assert ready["storage_options"]["client_kwargs"]["endpoint_url"] == url
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        connection.request("HEAD", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        connection.close()
        if end == "stdin":
            process.stdin.close()
        else:
            os.kill(process.pid, getattr(signal, end))
        assert process.wait(30) == 0
