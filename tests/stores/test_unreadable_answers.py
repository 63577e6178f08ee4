"""Answers that are no HTTP, or not the storage's: a kind of their own, never a server's "no"."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterator

import pytest
from limits import HANG_S
from remote_tools import KEY, ONCE, SECRET

import ckpt_storage
from ckpt_storage import StorageError, Timeouts
from ckpt_storage.store import open_store
from ckpt_storage.store.store import Store


@contextlib.contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """Answer each request by the bytes that `answer` makes of its first line; yield the address."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                length = 0
                while (header := self.rfile.readline().strip()) != b"":
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                # A client may wait for a first answer before it sends a body.
                self.wfile.write(answer(line))
                self.rfile.read(length)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, allow_reuse_address = True, True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)


def s3_at(place: str) -> Store:
    inner = {"endpoint_url": f"http://{place}", "region_name": "us-east-1"}
    options = {"key": KEY, "secret": SECRET, "client_kwargs": inner}
    limit = Timeouts(request=HANG_S)
    return open_store("s3://bkt/run", storage_options=options, retry=ONCE, timeouts=limit)


def swift(line: bytes) -> bytes:
    """Answer as Swift 2.30 does for a key that is absent, byte for byte.

    Its answer to HEAD has the body of a chunked one behind it. RFC 9110, section 9.3.2: "the server
    MUST NOT send content in the response".
    """
    page = b"<?xml version='1.0' encoding='UTF-8'?>\n<Error><Code>NoSuchKey</Code>"
    page += b"<Message>The specified key does not exist.</Message></Error>"
    head = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/xml\r\n"
    head += b"Date: Sat, 28 Nov 2026 23:29:14 GMT\r\n"
    if line.startswith(b"HEAD"):
        return head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(page) + page


def test_a_head_that_cannot_be_read_is_asked_again_as_a_get() -> None:
    """On Swift a name that is absent is "not-found", as on every other server."""
    with answering(swift) as place, contextlib.closing(s3_at(place)) as store:
        for _ in range(3):
            with pytest.raises(StorageError) as caught:
                store.stat("x")
            assert caught.value.kind == "not-found"


def test_an_answer_that_is_no_http_is_named() -> None:
    """It is neither a status nor a refusal: the error names the endpoint, and what to check."""
    banner = b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"
    with answering(lambda _: banner) as place, contextlib.closing(s3_at(place)) as store:
        for call in (
            lambda: store.stat("x"),
            lambda: store.get("x"),
            lambda: store.list(""),
            lambda: store.put("x", b"data"),
        ):
            with pytest.raises(StorageError) as caught:
                call()
            assert caught.value.kind == "bad-response"
            assert caught.value.retryable
            assert place in str(caught.value)
            assert "status 400" not in str(caught.value)
            assert "endpoint_url" in (caught.value.next_step or "")


def test_a_page_in_place_of_an_answer_is_named() -> None:
    """A console or a proxy that answers 200 is not asked again."""
    page = b"<html>Welcome</html>"
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(page)
    with answering(lambda _: answer + page) as place, contextlib.closing(s3_at(place)) as store:
        with pytest.raises(StorageError) as caught:
            store.get("x")
        assert (caught.value.kind, caught.value.retryable) == ("bad-response", False)


def test_an_answer_without_a_text_shows_none() -> None:
    """Ceph's errors have a code and no message; "None" is no message."""
    page = b"<Error><Code>AccessDenied</Code><RequestId>tx0</RequestId></Error>"
    head = b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\n"
    answer = head + b"Content-Length: %d\r\n\r\n" % len(page) + page
    with answering(lambda _: answer) as place, contextlib.closing(s3_at(place)) as store:
        with pytest.raises(StorageError, match="AccessDenied, status 403") as caught:
            store.get("x")
        assert "None" not in str(caught.value)


def test_a_save_to_a_port_of_something_else_says_so() -> None:
    """What a user sees: the kind, the endpoint, the next step."""
    with answering(lambda _: b"+PONG\r\n") as place:
        inner = {"endpoint_url": f"http://{place}", "region_name": "us-east-1"}
        options = {"key": KEY, "secret": SECRET, "client_kwargs": inner}
        with pytest.raises(StorageError, match="no HTTP response") as caught:
            ckpt_storage.save({"step": 1}, "s3://bkt/run", storage_options=options, retry=ONCE)
        assert caught.value.kind == "bad-response"
