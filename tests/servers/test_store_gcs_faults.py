"""Resumable uploads to Google Cloud Storage go on after lost answers and partly kept parts."""

from __future__ import annotations

import base64
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from crc32c import crc32c
from remote_tools import ONCE, POLICY, send
from servers import served

from ckpt_storage.errors import IntegrityError, InvalidInputError, StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import open_store
from ckpt_storage.store.store import Store
from ckpt_storage.testing.upload_facts import kind_of

MULTIPLE = 256 * 1024


@dataclass
class Session:
    """One resumable upload."""

    name: str
    metadata: dict[str, str]
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False


Answer: TypeAlias = tuple[int, Any, dict[str, str]]
"""Status, document and headers."""


def refusal(status: int, reason: str) -> Answer:
    said = {"code": status, "message": reason, "errors": [{"reason": reason}]}
    return status, {"error": said}, {}


@dataclass
class Bucket:
    """Objects with what is told of them, and the faults in store, by the first words of a request.

    Requests are "begin", "insert", "put SPAN/TOTAL" of a session and "look". It keeps to the
    documented protocol where emulators do not: a question about a session's state changes nothing,
    an ended session says so, and every write is checked against its condition.
    """

    objects: dict[str, tuple[bytes, dict[str, Any]]] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1_790_000_000_000))
    requester_pays: bool = False

    def fault_of(self, what: str) -> str:
        """Return the fault for a request and forget it, or ""."""
        found = next((fault for fault in self.faults if what.startswith(fault[0])), ("", ""))
        if found[0]:
            self.faults.remove(found)
        return found[1]

    def put(
        self,
        name: str,
        data: bytes,
        metadata: object,
        condition: str | None = None,
        checksum: str | None = None,
    ) -> Answer:
        """Put an object if its generation is `condition` ("0": none is there)."""
        if condition not in {None, self.objects[name][1]["generation"] if self.has(name) else "0"}:
            return refusal(412, "conditionNotMet")
        described = {
            "kind": "storage#object",
            "name": name,
            "size": str(len(data)),
            "metadata": metadata,
            "crc32c": base64.b64encode(crc32c(data).to_bytes(4, "big")).decode(),
            "generation": str(next(self.numbers)),
            "updated": datetime.now(UTC).isoformat(),
        }
        # Google, "Data validation and change detection" (Server-side validation): a request whose
        # checksum does not match fails with 400.
        if checksum not in {None, described["crc32c"]}:
            return refusal(400, "invalid")
        self.objects[name] = data, described
        return 200, described, {}

    def delete(self, name: str, condition: str) -> Answer:
        if self.objects[name][1]["generation"] != condition:
            return refusal(412, "conditionNotMet")
        del self.objects[name]
        return 200, None, {}

    def has(self, name: str) -> bool:
        return name in self.objects

    def begin(self, name: str, metadata: dict[str, str]) -> Answer:
        key = str(next(self.numbers))
        self.sessions[key] = Session(name, metadata)
        return 200, {}, {"Location": f"/upload/x?upload_id={key}"}

    def take(self, key: str, span: str, body: bytes) -> Answer:
        """Take bytes of a session, tell what it holds, or end it."""
        session = self.sessions.get(key)
        where, _, total = span.partition("/")
        if session is None:
            return refusal(410, "gone")
        if not session.ended and where != "*":
            assert int(where.partition("-")[0]) == len(session.data), "a gap or an overlap"
            session.data += body
        if not session.ended and total != "*" and len(session.data) == int(total):
            session.ended = True
            return self.put(session.name, bytes(session.data), session.metadata)
        if session.ended:
            return 200, self.objects[session.name][1], {}
        held = {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {}
        return 308, None, held


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def answer(self) -> None:
        """Answer a request, or as its fault says: not at all, with 503, or to half of its bytes."""
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        # Google, "Requester Pays" (Requirements): a request without a project to bill fails.
        with self.bucket.lock:
            if self.bucket.requester_pays and "userProject" not in query:
                fault, told = "", refusal(400, "required")
            else:
                fault, told = self.bucket_answer(query, unquote(parts.path), body)
        if fault == "lost":
            self.close_connection = True
            return
        status, document, headers = refusal(503, "backendError") if fault == "503" else told
        if "Location" in headers:
            headers = {"Location": f"http://{self.headers['Host']}{headers['Location']}"}
        content = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_DELETE = do_GET = do_POST = do_PUT = answer  # noqa: N815  # names of the base class

    def bucket_answer(self, query: dict[str, str], path: str, body: bytes) -> tuple[str, Answer]:
        """Return the fault of a request, and what the bucket does of it and answers."""
        bucket, key = self.bucket, query.get("upload_id", "")
        if self.command == "DELETE" and key:
            gone = bucket.sessions.pop(key, None)
            return "", (499, None, {}) if gone else refusal(404, "notFound")
        if self.command == "DELETE":
            return "", bucket.delete(path.rpartition("/o/")[2], query["ifGenerationMatch"])
        if self.command == "GET":
            name = path.rpartition("/o/")[2]
            told: Answer = refusal(404, "notFound")
            if path.endswith("/o"):
                told = 200, {"kind": "storage#objects"}, {}
            elif bucket.has(name):
                told = 200, bucket.objects[name][1], {}
            return bucket.fault_of("look"), told
        if self.command == "PUT":
            span = self.headers["Content-Range"].removeprefix("bytes ")
            fault = bucket.fault_of(f"put {span}")
            body = body[:MULTIPLE] if fault == "half" else body
            body = flipped(body) if fault == "flip" else body
            return fault, refusal(503, "") if fault == "503" else bucket.take(key, span, body)
        condition = query.get("ifGenerationMatch")
        if query["uploadType"] == "resumable":
            fault = bucket.fault_of("begin")
            metadata = json.loads(body)["metadata"]
            return fault, bucket.begin(query["name"], metadata)
        boundary = self.headers["Content-Type"].partition('boundary="')[2].rstrip('"')
        _, head, content, _ = body.split(f"--{boundary}".encode())
        document = json.loads(head.partition(b"\r\n\r\n")[2])
        data = content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
        fault = bucket.fault_of("insert")
        data = flipped(data) if fault == "flip" else data
        how = document["metadata"], condition, document.get("crc32c")
        return fault, bucket.put(document["name"], data, *how)


def flipped(data: bytes) -> bytes:
    """Return data whose last byte changed on its way."""
    return data[:-1] + bytes([data[-1] ^ 1])


PARTS = [b"a" * (2 * MULTIPLE), b"b" * (2 * MULTIPLE), b"c" * (MULTIPLE + 17)]
WHOLE = b"".join(PARTS)
Served: TypeAlias = tuple[Bucket, dict[str, str]]


@pytest.fixture
def running() -> Iterator[Served]:
    state = Bucket()
    with served(type("BoundHandler", (Handler,), {"bucket": state})) as place:
        yield state, {"endpoint_url": f"http://{place}", "token": "anon"}


def opened(options: dict[str, str], policy: RetryPolicy = ONCE) -> Store:
    return open_store("gs://bucket/run", storage_options=options, retry=policy)


FIRST = f"put 0-{2 * MULTIPLE - 1}/*"
SECOND = f"put {2 * MULTIPLE}-"
LAST = f"put {4 * MULTIPLE}-{5 * MULTIPLE + 16}/{5 * MULTIPLE + 17}"


@pytest.mark.parametrize(
    "faults",
    [
        [("begin", "lost")],
        [(FIRST, "lost")],
        [(FIRST, "half")],
        [(FIRST, "half"), (SECOND, "503")],
        [(SECOND, "half"), ("put 786432-", "lost")],
        [(LAST, "half")],
        [(LAST, "lost")],
        [(LAST, "lost"), ("put */", "lost"), ("put */", "503")],
    ],
    ids=str,
)
def test_an_upload_arrives_whole_through_faults(
    running: Served, faults: list[tuple[str, str]]
) -> None:
    """Whatever the session kept, the rest follows, and nothing is sent twice or left out."""
    state, options = running
    state.faults = list(faults)
    upload = opened(options, POLICY).upload("saves/a/x")
    upload.complete(send(upload, PARTS))
    assert state.faults == []
    assert {name: data for name, (data, _) in state.objects.items()} == {"run/saves/a/x": WHOLE}


def test_the_object_is_invisible_until_complete(running: Served) -> None:
    """Of the last part at least a byte is held back, as the last byte shows the object."""
    state, options = running
    for last in (b"c" * MULTIPLE, b"c", b"c" * (2 * MULTIPLE)):
        upload = opened(options).upload("saves/a/x")
        total_bytes = send(upload, [b"a" * MULTIPLE, last])
        assert state.objects == {}
        upload.complete(total_bytes)
        assert state.objects.pop("run/saves/a/x")[0] == b"a" * MULTIPLE + last


def test_a_session_that_is_gone_without_its_object_is_an_error(running: Served) -> None:
    """An upload that the server dropped is no success, whatever others put there."""
    state, options = running
    upload = opened(options).upload("saves/a/x")
    total_bytes = send(upload, [PARTS[0], b"end"])
    state.sessions.clear()
    state.put("run/saves/a/x", PARTS[0] + b"end", {})
    with pytest.raises(StorageError, match="Save again"):
        upload.complete(total_bytes)


def test_an_abort_cancels_the_session(running: Served) -> None:
    """Nobody lists sessions, so nothing else would ever end it; twice is once."""
    state, options = running
    upload = opened(options).upload("saves/a/x")
    send(upload, PARTS)
    assert len(state.sessions) == 1
    upload.abort()
    upload.abort()
    assert (state.sessions, state.objects) == ({}, {})


def test_a_version_is_deleted_only_while_it_is_there(running: Served) -> None:
    """What took its place meanwhile has another generation, and stays."""
    state, options = running
    store = opened(options)
    store.put("x", b"ours")
    version = store.stat("x").version or ""
    store.put("x", b"another's")
    assert kind_of(store.delete_version, "x", version) == "precondition"
    assert [data for data, _ in state.objects.values()] == [b"another's"]
    store.delete_version("x", store.stat("x").version or "")
    assert state.objects == {}


def test_a_put_whose_bytes_change_on_their_way_is_refused(running: Served) -> None:
    """Its checksum goes with it; nothing is stored."""
    state, options = running
    state.faults = [("insert", "flip")]
    assert kind_of(opened(options).put, "x", b"data") == "refused"
    assert state.objects == {}


def test_an_upload_whose_bytes_change_on_their_way_is_no_success(running: Served) -> None:
    """The checksum of the object tells; what came is taken back."""
    state, options = running
    state.faults = [(FIRST, "flip")]
    upload = opened(options, POLICY).upload("x")
    size_bytes = send(upload, PARTS)
    with pytest.raises(IntegrityError, match="other bytes"):
        upload.complete(size_bytes)
    upload.abort()
    assert state.objects == {}


def test_the_requester_pays_with_a_project(running: Served) -> None:
    """The project goes with each request; without one that is known, no request is made."""
    state, options = running
    state.requester_pays = True
    payer: dict[str, Any] = {**options, "requester_pays": True}
    assert kind_of(opened(options).put, "x", b"data") == "refused"
    with pytest.raises(InvalidInputError, match="requester_pays"):
        opened({**payer, "project": ""}).put("x", b"data")
    for known in ({**payer, "project": "mine"}, {**payer, "requester_pays": "mine"}):
        store = opened(known, POLICY)
        upload = store.upload("x")
        upload.complete(send(upload, PARTS))
        assert state.objects["run/x"][0] == WHOLE


def test_a_requester_that_pays_needs_a_project(running: Served) -> None:
    """Without a project the request would say "None"."""
    _, options = running
    more: dict[str, Any] = {**options, "requester_pays": True}
    with pytest.raises(InvalidInputError, match="project"):
        open_store("gs://bkt/run", storage_options=more, retry=ONCE).stat("a")
