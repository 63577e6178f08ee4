"""HTTP/1.1 on one socket, as S3 clients speak it: heads, bodies in every framing, answers, resets.

A body is received straight into the buffer that will hold the object, and an object is sent
straight out of it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote, unquote_plus

from ._s3link import PIECE_BYTES as LINK_BYTES
from ._s3link import Link
from ._s3memory import PIECE_BYTES, BufferPool, Payload, Segment
from ._s3model import S3Error

try:
    import fcntl
    import termios
except ImportError:  # pragma: no cover - not POSIX
    _TIOCOUTQ: int | None = None
else:
    _TIOCOUTQ = getattr(termios, "TIOCOUTQ", None)

__all__ = ["Body", "Disconnected", "Head", "Response", "Wire", "body_bytes"]

_LINE_BUFFER_BYTES = 128 * 1024
_RECEIVE_BYTES = 4 * 1024 * 1024
_GROWTH_BYTES = 1024 * 1024
_JOIN_BELOW_BYTES = 64 * 1024
_BODY_LIMIT_BYTES = 5 * 1024**3
_FLUSH_TIMEOUT_S = 2.0
_MSG_MORE = getattr(socket, "MSG_MORE", 0)


class Disconnected(Exception):  # noqa: N818 - an event, not a failure of the server
    """The connection is gone, or was reset on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Request line and headers; header names in lower case, `path` and `query` decoded."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    keep_alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A decoded body with its trailers; `is_cut` if reading stopped at the limit asked for."""

    payload: Payload = field(default_factory=Payload)
    trailers: Mapping[str, str] = field(default_factory=dict)
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An answer; Date, Server, request id, Content-Length and Connection are added on sending.

    `announced_bytes` is the Content-Length where it is not the payload's: an answer to HEAD.
    """

    status: int = HTTPStatus.OK
    headers: Iterable[tuple[str, str]] = ()
    payload: Payload = field(default_factory=Payload)
    announced_bytes: int | None = None


class _Source(Protocol):
    def readline(self) -> bytes:
        """Return one line without its line end."""

    def readinto(self, view: memoryview) -> int:
        """Fill the view; return how much of it was filled before the end."""


class _Chunks:
    """Decoder of chunked framing: HTTP's own and, in the same grammar, aws-chunked."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._left_bytes = 0
        self._is_ended = False
        self.trailers: dict[str, str] = {}

    def readinto(self, view: memoryview) -> int:
        done = 0
        while done < len(view) and not self._is_ended:
            if not self._left_bytes:
                self._next_chunk()
                continue
            take = min(len(view) - done, self._left_bytes)
            got = self._source.readinto(view[done : done + take])
            done += got
            self._left_bytes -= got
            if got < take:
                raise _malformed("The body ends within a chunk")
            if not self._left_bytes and self._source.readline():
                raise _malformed("A chunk is longer than announced")
        return done

    def readline(self) -> bytes:
        line = bytearray()
        cell = memoryview(bytearray(1))
        while not line.endswith(b"\r\n"):
            if not self.readinto(cell) or len(line) > _LINE_BUFFER_BYTES:
                raise _malformed("The body ends within a line")
            line += cell
        return bytes(line[:-2])

    def _next_chunk(self) -> None:
        size, _, _ = self._source.readline().partition(b";")
        try:
            self._left_bytes = int(size, 16)
        except ValueError:
            raise _malformed("A chunk has no size") from None
        if not self._left_bytes:
            self._is_ended = True
            while line := self._source.readline():
                name, _, value = line.decode("latin-1").partition(":")
                self.trailers[name.strip().lower()] = value.strip()

    def finish(self) -> None:
        """Read the last chunk and the trailers; raises `S3Error` if there are data left."""
        if self.readinto(memoryview(bytearray(1))):
            raise _malformed("The body is longer than announced")


def _malformed(message: str) -> S3Error:
    return S3Error(HTTPStatus.BAD_REQUEST, "IncompleteBody", message)


def _length(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise S3Error(HTTPStatus.BAD_REQUEST, "InvalidArgument", f"{name} is not a length")
    if int(text) > _BODY_LIMIT_BYTES:
        raise S3Error(HTTPStatus.BAD_REQUEST, "EntityTooLarge", "The body exceeds 5 GiB")
    return int(text)


class Wire:
    """One accepted connection, used by one thread; only `interrupt` may come from another."""

    def __init__(
        self,
        sock: socket.socket,
        pool: BufferPool,
        stopping: threading.Event,
        links: tuple[Link, Link] | None = None,
    ) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._pool = pool
        self._stopping = stopping
        # For what comes and for what goes; None where nothing bounds them.
        self._links = links
        self._close_lock = threading.Lock()
        self._buffer = bytearray(_LINE_BUFFER_BYTES)
        self._low = 0
        self._high = 0

    def interrupt(self) -> None:
        """Wake the thread that reads or writes; it then finds the connection gone."""
        with self._close_lock, contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; may be called again."""
        with self._close_lock:
            self._sock.close()

    def reset(self) -> Disconnected:
        """Cut the connection with RST, and return the exception to raise."""
        linger = struct.pack("ii", 1, 0)
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close()
        return Disconnected("reset on purpose")

    def _receive(self, view: memoryview, flags: int = 0) -> int:
        try:
            got = self._sock.recv_into(view, len(view), flags)
        except OSError as error:
            raise Disconnected(str(error)) from error
        if not got:
            raise Disconnected("closed by the client")
        if self._links is not None:
            self._links[0].carry(got)
        return got

    def readline(self) -> bytes:
        """Return one line without its line end; raises `S3Error` if it is overlong."""
        while (end := self._buffer.find(b"\r\n", self._low, self._high)) < 0:
            if self._low:
                kept = self._buffer[self._low : self._high]
                self._buffer[: len(kept)] = kept
                self._low, self._high = 0, len(kept)
            if self._high == len(self._buffer):
                raise _malformed("A line is too long")
            self._high += self._receive(memoryview(self._buffer)[self._high :])
        line = bytes(memoryview(self._buffer)[self._low : end])
        self._low = end + 2
        return line

    def readinto(self, view: memoryview) -> int:
        """Fill the view, from what was read ahead and then from the socket."""
        done = min(len(view), self._high - self._low)
        view[:done] = memoryview(self._buffer)[self._low : self._low + done]
        self._low += done
        while done < len(view):
            most = _RECEIVE_BYTES if self._links is None else LINK_BYTES
            window = view[done : done + most]
            done += self._receive(window, socket.MSG_WAITALL)
        return done

    def read_head(self) -> Head:
        """Read the next request line and headers; raises `S3Error` 400 for what is no HTTP."""
        words = self.readline().decode("latin-1").split(" ")
        headers: dict[str, str] = {}
        while line := self.readline():
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon:
                raise _malformed("A header has no colon")
            headers[name.strip().lower()] = value.strip()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise _malformed("The request line is not HTTP/1")
        path, _, query = words[1].partition("?")
        pairs = (item.partition("=") for item in query.split("&") if item)
        connection = headers.get("connection", "").lower()
        keeps = connection == "keep-alive" if words[2] == "HTTP/1.0" else connection != "close"
        return Head(
            method=words[0],
            path=unquote(path),
            query={unquote_plus(name): unquote_plus(value) for name, _, value in pairs},
            headers=headers,
            keep_alive=keeps,
        )

    def read_body(self, head: Head, *, limit_bytes: int | None = None) -> Body:
        """Read and decode the body that `head` announces, `limit_bytes` bytes at most.

        Raises `S3Error` if the framing is broken; the connection is of no use after that.
        """
        headers = head.headers
        if headers.get("expect", "").lower() == "100-continue":
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        source: Wire | _Chunks = self
        decoders: list[_Chunks] = []
        size_bytes = _length(headers, "content-length") or 0
        is_sized = True
        if "chunked" in headers.get("transfer-encoding", "").lower():
            source = _Chunks(source)
            decoders.append(source)
            is_sized = False
        if _is_aws_chunked(headers):
            source = _Chunks(source)
            decoders.insert(0, source)
            decoded = _length(headers, "x-amz-decoded-content-length")
            if decoded is None:
                raise S3Error(HTTPStatus.LENGTH_REQUIRED, "MissingContentLength")
            size_bytes, is_sized = decoded, True
        wanted = size_bytes if is_sized else _BODY_LIMIT_BYTES
        stop = wanted if limit_bytes is None else min(wanted, limit_bytes)
        payload = self._received(source, stop, PIECE_BYTES if is_sized else _GROWTH_BYTES)
        if limit_bytes is not None:
            return Body(payload=payload, is_cut=True)
        if is_sized and payload.size_bytes < wanted:
            raise _malformed("The body is shorter than announced")
        trailers: dict[str, str] = {}
        for decoder in decoders:
            decoder.finish()
            trailers |= decoder.trailers
        if (promised := headers.get("x-amz-trailer", "").lower()) and promised not in trailers:
            raise S3Error(HTTPStatus.BAD_REQUEST, "MalformedTrailerError", f"No {promised}")
        return Body(payload=payload, trailers=trailers)

    def _received(self, source: _Source, limit_bytes: int, piece_bytes: int) -> Payload:
        pieces: list[Payload] = []
        left_bytes = limit_bytes
        while left_bytes:
            segment: Segment = self._pool.take(min(piece_bytes, left_bytes))
            got = source.readinto(segment.view)
            pieces.append(Payload.of_segment(segment, got))
            left_bytes -= got
            if got < len(segment.view):
                break
        return Payload.joined(pieces)

    def _send(self, data: bytes | memoryview, flags: int = 0) -> None:
        try:
            if self._links is not None:
                view = memoryview(data)
                for at in range(0, len(view), LINK_BYTES):
                    piece = view[at : at + LINK_BYTES]
                    self._links[1].carry(len(piece))
                    self._sock.sendall(piece, flags)
                return
            self._sock.sendall(data, flags)
        except OSError as error:
            raise Disconnected(str(error)) from error

    def send(
        self,
        response: Response,
        *,
        request_id: int,
        keep_alive: bool,
        limit_bytes: int | None = None,
    ) -> None:
        """Send an answer; with `limit_bytes`, only so much of its payload and then RST.

        Raises `Disconnected` if the client is gone, and always after a limit.
        """
        size_bytes = response.payload.size_bytes
        announced = size_bytes if response.announced_bytes is None else response.announced_bytes
        lines = [
            f"HTTP/1.1 {response.status} {_reason(response.status)}",
            f"Date: {formatdate(usegmt=True)}",
            "Server: ckpt-storage",
            f"x-amz-request-id: {request_id:016X}",
            f"Connection: {'keep-alive' if keep_alive else 'close'}",
            *(f"{name}: {value}" for name, value in response.headers),
        ]
        if response.status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            lines.append(f"Content-Length: {announced}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")
        payload = response.payload
        if limit_bytes is not None:
            payload = payload.cut(0, limit_bytes)
        if payload.size_bytes <= _JOIN_BELOW_BYTES:
            self._send(head + payload.to_bytes())
        else:
            self._send(head, _MSG_MORE)
            for view in payload.views():
                self._send(view)
        if limit_bytes is not None:
            self._flush()
            raise self.reset()

    def _flush(self) -> None:
        # RST discards what is not delivered yet; the client shall see exactly the bytes promised.
        if _TIOCOUTQ is None:
            return
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while time.monotonic() < deadline and not self._stopping.wait(0.001):
            unsent = fcntl.ioctl(self._sock.fileno(), _TIOCOUTQ, b"\0" * 4)
            if not any(unsent):
                return


def body_bytes(headers: Mapping[str, str]) -> int:
    """Return the decoded length that the headers announce, 0 if they announce none."""
    name = "x-amz-decoded-content-length" if _is_aws_chunked(headers) else "content-length"
    return _length(headers, name) or 0


def _is_aws_chunked(headers: Mapping[str, str]) -> bool:
    """Tell whether the body has S3's own chunk framing, with or without signatures."""
    return "aws-chunked" in headers.get("content-encoding", "") or headers.get(
        "x-amz-content-sha256", ""
    ).startswith("STREAMING-")


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
