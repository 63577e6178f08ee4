"""A server of Google Cloud Storage's JSON API for tests: one bucket, with faults.

It keeps to the documented protocol where emulators do not: a question about a session's state
changes nothing, an ended session says so, and every write of an object is checked against its
condition under one lock.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["BUCKET", "MULTIPLE", "GcsState", "gcs_served"]

BUCKET = "bucket"
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
    condition: str | None = None
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False


@dataclass
class GcsState:
    """What the server holds, and the faults it has in store, by the first words of a request.

    seen: what was asked for, in order: "begin", "insert", "put SPAN" of a session, "look NAME",
    "delete", "list".
    """

    objects: dict[str, Stored] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    generations: Iterator[int] = field(default_factory=lambda: itertools.count(1_790_000_000_000))

    def fault_of(self, what: str) -> str:
        """Return the fault for a request and forget it, or ""."""
        with self.lock:
            self.seen.append(what)
            for position, (pattern, fault) in enumerate(self.faults):
                if what.startswith(pattern):
                    del self.faults[position]
                    return fault
        return ""

    def put(
        self, name: str, data: bytes, metadata: dict[str, str], condition: str | None
    ) -> Stored | None:
        """Put an object if its generation is `condition` ("0": none is there); None if not."""
        with self.lock:
            found = self.objects.get(name)
            if condition is not None and int(condition) != (found.generation if found else 0):
                return None
            made = Stored(data, metadata, next(self.generations), time.time())
            self.objects[name] = made
            return made


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    state: GcsState

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_DELETE(self) -> None:
        """Cancel a session or delete an object."""
        parts = urlsplit(self.path)
        if "upload_id" in parts.query:
            gone = self.state.sessions.pop(parse_qs(parts.query)["upload_id"][0], None)
            return self._answer(499 if gone else 404)
        name = unquote(parts.path.rpartition("/o/")[2])
        if self.state.fault_of("delete") == "replaced":
            self.state.put(name, b"another's", {}, None)
        condition = parse_qs(parts.query).get("ifGenerationMatch", [None])[0]
        with self.state.lock:
            found = self.state.objects.get(name)
            if found and condition and int(condition) != found.generation:
                return self._refuse(412, "conditionNotMet")
            gone_too = self.state.objects.pop(name, None)
        return self._answer(204) if gone_too else self._refuse(404, "notFound")

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

    def do_POST(self) -> None:
        """Begin a session, or insert a whole object."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        query = parse_qs(urlsplit(self.path).query)
        if query["uploadType"] == ["resumable"]:
            fault = self.state.fault_of("begin")
            if fault == "503":
                return self._refuse(503, "backendError")
            key = f"session-{len(self.state.sessions)}-{time.monotonic_ns()}"
            metadata, name = json.loads(body)["metadata"], query["name"][0]
            condition = query.get("ifGenerationMatch", [None])[0]
            if condition and name in self.state.objects:
                return self._refuse(412, "conditionNotMet")
            self.state.sessions[key] = Session(name, metadata, condition)
            if fault == "lost":
                return self._lose()
            host = self.headers["Host"]
            return self._answer(200, {}, Location=f"http://{host}/upload/x?upload_id={key}")
        fault = self.state.fault_of("insert")
        boundary = self.headers["Content-Type"].partition('boundary="')[2].rstrip('"')
        _, head, content, _ = body.split(f"--{boundary}".encode())
        document = json.loads(head.partition(b"\r\n\r\n")[2])
        data = content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
        name = document["name"]
        with self.state.lock:
            condition = query.get("ifGenerationMatch", [None])[0]
            if self.state.put(name, data, document["metadata"], condition) is None:
                return self._refuse(412, "conditionNotMet")
            described = self._described(name)
        return self._lose() if fault == "lost" else self._answer(200, described)

    def do_PUT(self) -> None:
        """Take bytes of a session, tell what it holds, or end it."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        session = self.state.sessions.get(parse_qs(urlsplit(self.path).query)["upload_id"][0])
        span, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        fault = self.state.fault_of(f"put {span}/{total}")
        if fault == "503":
            return self._refuse(503, "backendError")
        if session is None:
            return self._refuse(410, "gone")
        if not session.ended and span != "*":
            assert int(span.partition("-")[0]) == len(session.data), "a gap or an overlap"
            session.data += body[:MULTIPLE] if fault == "half" else body
        if not session.ended and total != "*" and len(session.data) == int(total):
            data, described = bytes(session.data), session.metadata
            if self.state.put(session.name, data, described, session.condition) is None:
                return self._refuse(412, "conditionNotMet")
            session.ended = True
        if fault == "lost":
            return self._lose()
        if session.ended:
            return self._answer(200, self._described(session.name))
        held = {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {}
        return self._answer(308, **held)

    def do_GET(self) -> None:
        """Tell what is known of an object, or list what a prefix has."""
        path = urlsplit(self.path).path
        if path.endswith("/o"):
            return self._listed(parse_qs(urlsplit(self.path).query))
        name = unquote(path.rpartition("/o/")[2])
        if self.state.fault_of(f"look {name}"):
            return self._refuse(503, "backendError")
        with self.state.lock:
            if name not in self.state.objects:
                return self._refuse(404, "notFound")
            described = self._described(name)
        return self._answer(200, described)

    def _listed(self, query: dict[str, list[str]]) -> None:
        self.state.fault_of("list")
        prefix, delimiter, after = (
            query.get(key, [""])[0] for key in ("prefix", "delimiter", "pageToken")
        )
        with self.state.lock:
            below = [name for name in sorted(self.state.objects) if name.startswith(prefix)]
            below = [name for name in below if name > after]
            rest = below[int(query["maxResults"][0]) :]
            below = below[: len(below) - len(rest)]
            folders, items = set(), []
            for name in below:
                child, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
                if cut:
                    folders.add(f"{prefix}{child}{cut}")
                else:
                    items.append(self._described(name))
        found = {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}
        self._answer(200, {**found, "nextPageToken": below[-1]} if rest else found)


@contextmanager
def gcs_served() -> Iterator[tuple[GcsState, str]]:
    """Run a server until the block ends; give its state and its address."""
    state = GcsState()
    handler = type("BoundHandler", (_Handler,), {"state": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)
