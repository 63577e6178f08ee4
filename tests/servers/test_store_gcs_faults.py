"""Resumable uploads to Google Cloud Storage go on after lost answers and partly kept parts."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from remote_tools import ONCE, POLICY, send
from servers import served

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import open_store
from ckpt_storage.store.store import Store

MULTIPLE = 256 * 1024


@dataclass(frozen=True)
class Stored:
    """One object as it lies in the bucket."""

    data: bytes
    metadata: dict[str, str]
    generation: int
    changed_s: float


@dataclass
class Session:
    """One resumable upload."""

    name: str
    metadata: dict[str, str]
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False


@dataclass
class GcsState:
    """What the server holds, and the faults it has in store, by the first words of a request.

    Requests are "begin", "insert", "put SPAN" of a session, "look NAME" and "delete". It keeps to
    the documented protocol where emulators do not: a question about a session's state changes
    nothing, an ended session says so, and every write is checked against its condition.
    """

    objects: dict[str, Stored] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    generations: Iterator[int] = field(default_factory=lambda: itertools.count(1_790_000_000_000))

    def fault_of(self, what: str) -> str:
        """Return the fault for a request and forget it, or ""."""
        with self.lock:
            for position, (pattern, fault) in enumerate(self.faults):
                if what.startswith(pattern):
                    del self.faults[position]
                    return fault
        return ""

    def put(self, name: str, data: bytes, metadata: dict[str, str], condition: str | None) -> bool:
        """Put an object if its generation is `condition` ("0": none is there); tell if so."""
        with self.lock:
            found = self.objects.get(name)
            if condition is not None and int(condition) != (found.generation if found else 0):
                return False
            self.objects[name] = Stored(data, metadata, next(self.generations), time.time())
            return True


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    state: GcsState

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def parse_request(self) -> bool:
        """Take path, query and body apart, too."""
        if not super().parse_request():
            return False
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.name = unquote(parts.path.rpartition("/o/")[2])
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return True

    def _answer(self, status: int, document: object = None, **headers: str) -> None:
        body = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:  # No Content
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, reason: str) -> None:
        """Send an error as the JSON API spells it."""
        said = {"code": status, "message": reason, "errors": [{"reason": reason}]}
        self._answer(status, {"error": said})

    def _lose(self) -> None:
        """Close the connection in place of an answer."""
        self.close_connection = True

    def _described(self, name: str) -> dict[str, Any]:
        """Return what is told of an object."""
        found = self.state.objects[name]
        return {
            "kind": "storage#object",
            "name": name,
            "size": str(len(found.data)),
            "metadata": found.metadata,
            "generation": str(found.generation),
            "updated": datetime.fromtimestamp(found.changed_s, UTC).isoformat(),
        }

    def do_DELETE(self) -> None:
        """Cancel a session or delete an object."""
        if "upload_id" in self.query:
            gone = self.state.sessions.pop(self.query["upload_id"], None)
            return self._answer(499 if gone else 404)
        if self.state.fault_of("delete") == "replaced":
            self.state.put(self.name, b"another's", {}, None)
        condition = self.query.get("ifGenerationMatch")
        with self.state.lock:
            found = self.state.objects.get(self.name)
            if found and condition and int(condition) != found.generation:
                return self._refuse(412, "conditionNotMet")
            self.state.objects.pop(self.name, None)
        return self._answer(204) if found else self._refuse(404, "notFound")

    def do_POST(self) -> None:
        """Begin a session, or insert a whole object."""
        if self.query["uploadType"] == "resumable":
            fault = self.state.fault_of("begin")
            if fault == "503":
                return self._refuse(503, "backendError")
            key, metadata = f"session-{time.monotonic_ns()}", json.loads(self.body)["metadata"]
            self.state.sessions[key] = Session(self.query["name"], metadata)
            address = f"http://{self.headers['Host']}/upload/x?upload_id={key}"
            return self._lose() if fault == "lost" else self._answer(200, {}, Location=address)
        fault = self.state.fault_of("insert")
        boundary = self.headers["Content-Type"].partition('boundary="')[2].rstrip('"')
        _, head, content, _ = self.body.split(f"--{boundary}".encode())
        document = json.loads(head.partition(b"\r\n\r\n")[2])
        data = content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
        condition = self.query.get("ifGenerationMatch")
        with self.state.lock:
            if not self.state.put(document["name"], data, document["metadata"], condition):
                return self._refuse(412, "conditionNotMet")
            described = self._described(document["name"])
        return self._lose() if fault == "lost" else self._answer(200, described)

    def do_PUT(self) -> None:
        """Take bytes of a session, tell what it holds, or end it."""
        session = self.state.sessions.get(self.query["upload_id"])
        span, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        fault = self.state.fault_of(f"put {span}/{total}")
        if fault == "503":
            return self._refuse(503, "backendError")
        if session is None:
            return self._refuse(410, "gone")
        if not session.ended and span != "*":
            assert int(span.partition("-")[0]) == len(session.data), "a gap or an overlap"
            session.data += self.body[:MULTIPLE] if fault == "half" else self.body
        if not session.ended and total != "*" and len(session.data) == int(total):
            self.state.put(session.name, bytes(session.data), session.metadata, None)
            session.ended = True
        if fault == "lost":
            return self._lose()
        if session.ended:
            return self._answer(200, self._described(session.name))
        held = {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {}
        return self._answer(308, **held)

    def do_GET(self) -> None:
        """Tell what is known of an object."""
        if self.state.fault_of(f"look {self.name}"):
            return self._refuse(503, "backendError")
        with self.state.lock:
            if self.name not in self.state.objects:
                return self._refuse(404, "notFound")
            described = self._described(self.name)
        return self._answer(200, described)


PARTS = [b"a" * (2 * MULTIPLE), b"b" * (2 * MULTIPLE), b"c" * (MULTIPLE + 17)]
WHOLE = b"".join(PARTS)
Served: TypeAlias = tuple[GcsState, dict[str, str]]


@pytest.fixture
def running() -> Iterator[Served]:
    """A server, with the options that reach it."""
    state = GcsState()
    with served(type("BoundHandler", (_Handler,), {"state": state})) as place:
        yield state, {"endpoint_url": f"http://{place}", "token": "anon"}


def opened(options: dict[str, str], policy: RetryPolicy = ONCE) -> Store:
    """Return a store, without retries unless told."""
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
    assert {name: found.data for name, found in state.objects.items()} == {"run/saves/a/x": WHOLE}


def test_the_object_is_invisible_until_complete(running: Served) -> None:
    """Of the last part at least a byte is held back, as the last byte shows the object."""
    state, options = running
    for last in (b"c" * MULTIPLE, b"c", b"c" * (2 * MULTIPLE)):
        upload = opened(options).upload("saves/a/x")
        total_bytes = send(upload, [b"a" * MULTIPLE, last])
        assert state.objects == {}
        upload.complete(total_bytes)
        assert state.objects.pop("run/saves/a/x").data == b"a" * MULTIPLE + last


def test_a_session_that_is_gone_without_its_object_is_an_error(
    running: Served,
) -> None:
    """An upload that the server dropped is no success, whatever others put there."""
    state, options = running
    upload = opened(options).upload("saves/a/x")
    total_bytes = send(upload, [PARTS[0], b"end"])
    state.sessions.clear()
    state.objects["run/saves/a/x"] = Stored(PARTS[0] + b"end", {}, 1, time.time())
    with pytest.raises(StorageError, match="Save again"):
        upload.complete(total_bytes)


def test_an_abort_takes_back_only_what_a_lost_answer_showed(running: Served) -> None:
    """Neither session nor object stays; what another put meanwhile has another generation."""
    state, options = running
    replaced = ("delete", "replaced")
    for parts, last, more in (
        ([b"small"], "insert", []),
        ([PARTS[0], b"end"], "put 524288-524290/", []),
        ([b"small"], "insert", [replaced]),
    ):
        state.faults = [(last, "lost"), ("look", "503"), *more]
        upload = opened(options).upload("saves/a/x")
        with pytest.raises(StorageError):
            upload.complete(send(upload, parts))
        assert len(state.objects) == 1
        upload.abort()
        upload.abort()
        assert (state.faults, state.sessions) == ([], {})
        assert [found.data for found in state.objects.values()] == [b"another's"] * len(more)
