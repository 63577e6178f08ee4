"""The shipped tools of tests: an S3 server, and backends that fail to order."""

from __future__ import annotations

import contextlib
import http.client
import inspect
import re
import socket
import threading
import uuid
from asyncio import selector_events
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from limits import HANG_S
from s3_server import FaultRule, S3Server, crash_rules
from servers import ask, free_port

from ckpt_storage.errors import InvalidInputError, StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location
from ckpt_storage.store.backend import Backend
from ckpt_storage.store.backends.memory import MemoryBackend
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import FaultBackend, Rule, SimulatedCrash

BUCKET = "bkt"


def told(
    server: S3Server,
    method: str,
    target: str,
    body: bytes = b"x",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    status, _, content = ask(server.endpoint_url, method, f"/{BUCKET}/{target}", body, headers)
    found = re.search(rb"<Code>(\w+)</Code>", content)
    return status, found[1].decode() if found else ""


def test_upload_rules(server: S3Server) -> None:
    """A completion that breaks a rule is refused with S3's code and leaves the upload open."""
    answer = ask(server.endpoint_url, "POST", f"/{BUCKET}/k?uploads")[2].decode()
    upload = f"k?uploadId={answer.partition('<UploadId>')[2].partition('<')[0]}"
    sent = []
    for number, body in enumerate((b"small", b"b" * (5 << 20), b"c"), 1):
        target = f"/{BUCKET}/{upload}&partNumber={number}"
        sent.append((number, ask(server.endpoint_url, "PUT", target, body)[1]["etag"]))
    first, second, third = sent

    def complete(*parts: tuple[int, str]) -> tuple[int, str]:
        rows = [f"<Part><PartNumber>{n}</PartNumber><ETag>{tag}</ETag></Part>" for n, tag in parts]
        kind = "CompleteMultipartUpload"
        return told(server, "POST", upload, f"<{kind}>{''.join(rows)}</{kind}>".encode())

    for parts, code in (
        ([first, second, third], "EntityTooSmall"),
        ([first, third], "EntityTooSmall"),
        ([second, (3, '"nope"')], "InvalidPart"),
        ([second, (4, third[1])], "InvalidPart"),
        ([third, second], "InvalidPartOrder"),
        ([second, second], "InvalidPartOrder"),
        ([], "MalformedXML"),
    ):
        assert complete(*parts) == (400, code)
    for number in (0, 10_001):
        refused = told(server, "PUT", f"{upload}&partNumber={number}")
        assert refused == (400, "InvalidArgument")
    assert told(server, "POST", upload, b"<no")[0] == 400
    assert complete(second, third) == (200, "")
    assert server.dump(BUCKET) == {"k": b"b" * (5 << 20) + b"c"}


def test_what_is_not_implemented_is_refused(server: S3Server) -> None:
    """A condition or feature the server lacks is 501 and changes nothing; it is never ignored."""
    told(server, "PUT", "k", b"old")
    asked: list[tuple[str, str, dict[str, str]]] = [
        ("PUT", "k", {"If-None-Match": '"etag"'}),
        ("PUT", "k", {"If-Match": "*"}),
        ("DELETE", "k", {"If-Match": "*"}),
        ("GET", "k", {"If-Range": '"etag"'}),
        ("GET", "k?versionId=1", {}),
        ("GET", "?acl", {}),
        ("PATCH", "k", {}),
        ("PUT", "k", {"x-amz-checksum-sha256": "AAAA"}),
    ]
    for method, target, headers in asked:
        assert told(server, method, target, b"", headers) == (501, "NotImplemented")
    assert server.dump(BUCKET) == {"k": b"old"}


def test_rule_counts_its_matches(server: S3Server) -> None:
    """A rule lets `after` matches pass and hits the next `times`; other keys do not count."""
    server.faults([FaultRule(op="put", key="^a", after=1, times=2, action="status")])
    codes = [told(server, "PUT", key)[1] for key in ("a1", "b", "a2", "a3", "b", "a4")]
    assert codes == ["", "", "SlowDown", "SlowDown", "", ""]
    assert list(server.dump(BUCKET)) == ["a1", "a4", "b"]
    assert [request.key for request in server.requests if request.fault] == ["a2", "a3"]
    server.faults([FaultRule(op="put", action="status")])
    server.faults([])
    assert told(server, "PUT", "a2") == (200, "")
    action: Any = "explode"
    with pytest.raises(InvalidInputError, match="no fault rule"):
        FaultRule(action=action)


@pytest.mark.parametrize("action", ["delay", "hang"])
def test_stop_ends_what_hangs(action: Any) -> None:
    """A request that hangs or waits long is cut when the server stops, without an answer."""
    with S3Server() as server:
        server.faults([FaultRule(action=action, delay_s=3600.0)])
        host, _, port = server.endpoint_url.removeprefix("http://").partition(":")
        sock = socket.create_connection((host, int(port)), timeout=30)
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        server.wait_for(lambda requests: len(requests) == 1, timeout_s=HANG_S)
        assert server.requests[0].status == 0
    with sock, contextlib.suppress(ConnectionResetError):
        assert sock.recv(65536) == b""
    with pytest.raises(TimeoutError, match="did not arrive"):
        server.wait_for(lambda requests: len(requests) == 2, timeout_s=0.0)


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_crash_points(server: S3Server, when: Any) -> None:
    """From request n on nothing is done; n itself is done only if the crash comes after it."""
    script = [("PUT", "a"), ("PUT", "b"), ("DELETE", "a"), ("PUT", "c")]
    states: list[set[str]] = [set(), {"a"}, {"a", "b"}, {"b"}, {"b", "c"}]
    for n in range(1, len(script) + 1):
        for key in "abc":
            ask(server.endpoint_url, "DELETE", f"/{BUCKET}/{key}")
        server.reset_counters()
        server.faults(crash_rules(n, when))
        answered = 0
        for method, key in script:
            body = b"x" * 200_001 if method == "PUT" else b""
            with contextlib.suppress(ConnectionError):
                ask(server.endpoint_url, method, f"/{BUCKET}/{key}", body)
                answered += 1
        assert answered == n - 1
        assert set(server.dump(BUCKET)) == states[n if when == "after" else n - 1]
        records = server.requests
        assert [record.fault == "" for record in records] == [True] * (n - 1) + [False] * (5 - n)
        if when == "torn":
            assert records[n - 1].bytes_in == (100_000 if script[n - 1][0] == "PUT" else 0)
        server.faults([])
        assert ask(server.endpoint_url, "PUT", f"/{BUCKET}/c", b"y")[0] == 200


def test_stop_leaves_no_thread_and_no_port() -> None:
    """A stopped server has closed its connections, idle ones too, and its port is free."""
    before = set(threading.enumerate())
    with S3Server(port=free_port()) as server:
        server.create_bucket(BUCKET)
        idle = http.client.HTTPConnection(server.endpoint_url.removeprefix("http://"), timeout=30)
        idle.request("PUT", f"/{BUCKET}/k", b"x")
        assert idle.getresponse().read() == b""
        assert set(threading.enumerate()) - before
        with pytest.raises(InvalidInputError, match="started before"):
            server.__enter__()
    assert set(threading.enumerate()) <= before
    idle.close()
    port = int(server.endpoint_url.rpartition(":")[2])
    with S3Server(port=port) as second:
        assert second.endpoint_url == server.endpoint_url


OBEY_NO_RULE = {"capabilities", "close", "copy_source", "durability_problem", "endpoint", "explain"}


@pytest.fixture
def memory() -> MemoryBackend:
    made = MemoryBackend(Location.of(f"memory://{uuid.uuid4().hex}"))
    made.put("x", [memoryview(b"data")])
    return made


def opened(backend: FaultBackend) -> Store:
    return Store(backend, url="memory://x", policy=RetryPolicy(attempt_count=1))


def test_every_method_of_the_seam_plays_the_script(memory: MemoryBackend) -> None:
    """None is passed through unseen, but those that ask nothing of a storage."""
    methods = inspect.getmembers(Backend, inspect.isfunction)
    names = {name for name, _ in methods if not name.startswith("_")} - OBEY_NO_RULE
    for name in names:
        broken = FaultBackend(memory, [Rule(action="error", hit_count=None)])
        _, *wanted = inspect.signature(getattr(Backend, name)).parameters.values()
        named = {one.name: False for one in wanted if one.kind is one.KEYWORD_ONLY}
        method: Callable[..., Iterable[object]] = getattr(broken, name)
        with pytest.raises(StorageError):
            # A listing begins when its first entry is asked for.
            list(method(*["x"] * (len(wanted) - len(named)), **named))
        assert [call.operation for call in broken.script.calls] in ([name], [f"{name}_match"])


def test_a_crash_passes_the_facade_and_ends_everything(memory: MemoryBackend) -> None:
    """The caller sees the death itself; later calls of any thread die too, and change nothing."""
    backend = FaultBackend(memory, [Rule(action="crash_after", operation="put_absent")])
    store = opened(backend)
    store.put("y", b"before")
    for put, path in ((store.create, "z"), (store.put, "late")):
        with pytest.raises(SimulatedCrash):
            put(path, b"dying")
    store.close()
    assert sorted(info.path for info in memory.list("", recursive=True)) == ["x", "y", "z"]
    assert [call.operation for call in backend.script.calls] == ["put", "put_absent"]


def test_half_of_an_operation_is_done_or_refused(memory: MemoryBackend) -> None:
    """Bytes, paths and listings are halved; a test that asks for half a completion is told so."""
    store = opened(FaultBackend(memory, [Rule(action="short", hit_count=None)]))
    assert store.get("x").data == b"da"
    assert store.stat("x").size_bytes == 2
    target = bytearray(4)
    store.read("x", [(0, memoryview(target))])
    assert bytes(target) == b"da\0\0"
    store.put("y", b"data")
    assert [info.path for info in store.list("")] == ["x"]
    store.delete(["x", "y"])
    assert [info.path for info in memory.list("", recursive=True)] == ["y"]
    with pytest.raises(InvalidInputError, match="complete_upload cannot be short"):
        FaultBackend(memory, [Rule(action="short")]).complete_upload("x", "", [], write_id="")
    store.close()


def test_transports_of_asyncio_have_a_largest_read() -> None:
    """The S3 backend raises it; without this attribute its reads would be short again."""
    assert selector_events._SelectorTransport.max_size == 256 * 1024  # type: ignore[attr-defined]  # noqa: SLF001  # no public way
