"""Resumable uploads to Google Cloud Storage go on after lost answers and partly kept parts.

The server here keeps to the documented protocol where fake-gcs-server does not: a question
about a session's state changes nothing, and an ended session says so.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.base import Store
from ckpt_storage.store.remote import RemoteStore

MULTIPLE = 256 * 1024
PARTS = [b"a" * (2 * MULTIPLE), b"b" * (2 * MULTIPLE), b"c" * (MULTIPLE + 17)]
WHOLE = b"".join(PARTS)
POLICY = RetryPolicy(attempt_count=4, first_delay_s=0.01, max_delay_s=0.05)


@dataclass
class Session:
    """One resumable upload."""

    name: str
    metadata: dict[str, str]
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False


@dataclass
class State:
    """What the server holds, and the faults it has in store, by the first words of a request."""

    objects: dict[str, tuple[bytes, dict[str, str]]] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def fault_of(self, what: str) -> str:
        """Return the fault for a request and forget it, or ""."""
        self.seen.append(what)
        for position, (pattern, fault) in enumerate(self.faults):
            if what.startswith(pattern):
                del self.faults[position]
                return fault
        return ""


class Handler(BaseHTTPRequestHandler):
    """The few requests of the JSON API that an upload makes."""

    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def answer(self, status: int, document: object = None, **headers: str) -> None:
        """Send an answer."""
        body = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, reason: str) -> None:
        """Send an error as Google spells it."""
        said = {"code": status, "message": reason, "errors": [{"reason": reason}]}
        self.answer(status, {"error": said})

    def lose(self) -> None:
        """Close the connection in place of an answer."""
        self.close_connection = True

    def described(self, name: str) -> dict[str, Any]:
        """Return what is told of an object."""
        data, metadata = self.state.objects[name]
        return {"name": name, "size": str(len(data)), "metadata": metadata}

    def do_POST(self) -> None:
        """Begin a session, or insert a whole object."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        query = parse_qs(urlsplit(self.path).query)
        if query["uploadType"] == ["resumable"]:
            fault = self.state.fault_of("begin")
            if fault == "503":
                return self.refuse(503, "backendError")
            key = f"session-{len(self.state.sessions)}"
            metadata = json.loads(body)["metadata"]
            self.state.sessions[key] = Session(name=query["name"][0], metadata=metadata)
            if fault == "lost":
                return self.lose()
            host = self.headers["Host"]
            return self.answer(200, {}, Location=f"http://{host}/upload/x?upload_id={key}")
        fault = self.state.fault_of("insert")
        boundary = self.headers["Content-Type"].partition('boundary="')[2].rstrip('"')
        _, head, content, _ = body.split(f"--{boundary}".encode())
        document = json.loads(head.partition(b"\r\n\r\n")[2])
        data = content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
        self.state.objects[document["name"]] = (data, document["metadata"])
        return (
            self.lose() if fault == "lost" else self.answer(200, self.described(document["name"]))
        )

    def do_PUT(self) -> None:
        """Take bytes of a session, tell what it holds, or end it."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        session = self.state.sessions.get(parse_qs(urlsplit(self.path).query)["upload_id"][0])
        span, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        fault = self.state.fault_of(f"put {span}/{total}")
        if fault == "503":
            return self.refuse(503, "backendError")
        if session is None:
            return self.refuse(410, "gone")
        if not session.ended and span != "*":
            assert int(span.partition("-")[0]) == len(session.data), "a gap or an overlap"
            kept = body[:MULTIPLE] if fault == "half" else body
            session.data += kept
        if not session.ended and total != "*" and len(session.data) == int(total):
            session.ended = True
            self.state.objects[session.name] = (bytes(session.data), session.metadata)
        if fault == "lost":
            return self.lose()
        if session.ended:
            return self.answer(200, self.described(session.name))
        held = {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {}
        return self.answer(308, **held)

    def do_GET(self) -> None:
        """Tell what is known of an object."""
        name = unquote(urlsplit(self.path).path.rpartition("/o/")[2])
        if name not in self.state.objects:
            return self.refuse(404, "notFound")
        return self.answer(200, self.described(name))

    def do_DELETE(self) -> None:
        """Cancel a session or delete an object."""
        parts = urlsplit(self.path)
        if "upload_id" in parts.query:
            gone = self.state.sessions.pop(parse_qs(parts.query)["upload_id"][0], None)
            return self.answer(499 if gone else 404)
        self.state.objects.pop(unquote(parts.path.rpartition("/o/")[2]), None)
        return self.answer(204)


@pytest.fixture
def running() -> Iterator[tuple[State, dict[str, str]]]:
    """A server, with the options that reach it."""
    state = State()
    handler = type("BoundHandler", (Handler,), {"state": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            port = server.server_address[1]
            yield state, {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon"}
        finally:
            server.shutdown()
            thread.join(10)


def plain(options: dict[str, str]) -> Store:
    """Return a store without retries."""
    return RemoteStore(Location.of("gs://bucket/run", options), request_timeout_s=20)


def upload_through(store: Store) -> None:
    """Upload three parts, the last one of odd length."""
    upload = store.start_upload("saves/a/x", part_bytes=2 * MULTIPLE)
    offset = 0
    for number, part in enumerate(PARTS):
        upload.write_part(number, offset, [memoryview(part)], last=number == len(PARTS) - 1)
        offset += len(part)
    upload.complete(offset)


FIRST = f"put 0-{2 * MULTIPLE - 1}/*"
SECOND = f"put {2 * MULTIPLE}-"
LAST = f"put {5 * MULTIPLE}-{5 * MULTIPLE + 16}/{5 * MULTIPLE + 17}"


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [("begin", "503")],
        [("begin", "lost")],
        [(FIRST, "503")],
        [(FIRST, "lost")],
        [(FIRST, "half")],
        [(FIRST, "half"), (SECOND, "503")],
        [(SECOND, "half"), ("put 786432-", "lost")],
        [(LAST, "503")],
        [(LAST, "lost")],
        [(LAST, "lost"), ("put */", "lost"), ("put */", "503")],
    ],
    ids=str,
)
def test_an_upload_arrives_whole_through_faults(
    running: tuple[State, dict[str, str]], faults: list[tuple[str, str]]
) -> None:
    """Whatever the session kept, the rest follows, and nothing is sent twice or left out."""
    state, options = running
    state.faults = list(faults)
    upload_through(open_store("gs://bucket/run", storage_options=options, retry=POLICY))
    assert state.faults == []
    assert {name: data for name, (data, _) in state.objects.items()} == {"run/saves/a/x": WHOLE}


def test_the_object_is_invisible_until_complete(running: tuple[State, dict[str, str]]) -> None:
    """Of the last part at least a byte is held back, as the last byte shows the object."""
    state, options = running
    for last in (b"c" * MULTIPLE, b"c", b"c" * (2 * MULTIPLE)):
        upload = plain(options).start_upload("saves/a/x", part_bytes=MULTIPLE)
        upload.write_part(0, 0, [memoryview(b"a" * MULTIPLE)], last=False)
        upload.write_part(1, MULTIPLE, [memoryview(last)], last=True)
        assert state.objects == {}
        upload.complete(MULTIPLE + len(last))
        assert state.objects.pop("run/saves/a/x")[0] == b"a" * MULTIPLE + last


def test_a_session_that_is_gone_without_its_object_is_an_error(
    running: tuple[State, dict[str, str]],
) -> None:
    """An upload that the server dropped is no success, whatever others put there."""
    state, options = running
    upload = plain(options).start_upload("saves/a/x", part_bytes=2 * MULTIPLE)
    upload.write_part(0, 0, [memoryview(PARTS[0])], last=False)
    upload.write_part(1, len(PARTS[0]), [memoryview(b"end")], last=True)
    state.sessions.clear()
    state.objects["run/saves/a/x"] = (PARTS[0] + b"end", {})
    with pytest.raises(StorageError, match="Save again"):
        upload.complete(len(PARTS[0]) + 3)


def test_an_abort_takes_back_what_a_lost_answer_showed(
    running: tuple[State, dict[str, str]],
) -> None:
    """Neither session nor object stays when completing was given up."""
    state, options = running
    for parts in ([b"small"], [PARTS[0], b"end"]):
        state.faults = [("insert", "lost")] * 3 + [("put 524288-524290/", "lost")] * 3
        upload = plain(options).start_upload("saves/a/x", part_bytes=2 * MULTIPLE)
        offset = 0
        for number, part in enumerate(parts):
            upload.write_part(number, offset, [memoryview(part)], last=number == len(parts) - 1)
            offset += len(part)
        with pytest.raises(StorageError):
            upload.complete(offset)
        assert len(state.objects) == 1
        upload.abort()
        upload.abort()
        assert state.objects == {}
        assert state.sessions == {}
