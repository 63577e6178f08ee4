"""An endpoint that answers with pages, as a console or a proxy does, is no storage."""

from __future__ import annotations

from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from servers import served

import ckpt_storage
from ckpt_storage import CheckpointError, CheckpointManager, RetryPolicy, StorageError

PAGES = {
    "html": b"<!DOCTYPE html><html><body>Welcome<br>to the console</body></html>",
    "json": b'{"status": "ok"}',
    "nothing": b"",
}
RETRY = RetryPolicy(attempt_count=1)


def console(page: bytes) -> AbstractContextManager[str]:
    """Answer every request with 200 and a page; give host and port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(page)

    return served(Handler)


def options_of(storage: str, place: str) -> tuple[str, dict[str, Any]]:
    """Return a root and the options that take its requests to `place`."""
    address = f"http://{place}"
    if storage == "s3":
        inner = {"endpoint_url": address, "region_name": "us-east-1"}
        return "s3://bucket/run", {"key": "k", "secret": "s", "client_kwargs": inner}
    if storage == "gs":
        return "gs://bucket/run", {"endpoint_url": address, "token": "anon"}
    if storage == "az":
        text = (
            "DefaultEndpointsProtocol=http;AccountName=me;AccountKey=bWU=;"
            f"BlobEndpoint={address}/me;"
        )
        return "az://container/run", {"connection_string": text}
    return "webdav://run", {"base_url": address}


@pytest.mark.parametrize(
    ("storage", "page"),
    [
        ("s3", "html"),
        ("s3", "nothing"),
        ("gs", "json"),
        ("az", "nothing"),
        ("webdav", "html"),
    ],
)
def test_pages_are_not_taken_for_an_empty_root(storage: str, page: str) -> None:
    """No call that reads or writes takes a page for an answer; the error names the endpoint."""
    with console(PAGES[page]) as place:
        root, options = options_of(storage, place)

        def restore() -> object:
            with CheckpointManager(root, storage_options=options, retry=RETRY) as manager:
                return manager.restore({"a": 1})

        for call in (
            restore,
            lambda: ckpt_storage.list_checkpoints(root, storage_options=options, retry=RETRY),
            lambda: ckpt_storage.save({"a": 1}, root, storage_options=options, retry=RETRY),
        ):
            with pytest.raises(StorageError) as caught:
                call()
            assert caught.value.kind not in {"not-found", "exists"}
            assert place in str(caught.value)
        with pytest.raises(CheckpointError) as refused:
            ckpt_storage.open_checkpoint(root, storage_options=options, retry=RETRY)
        assert not isinstance(refused.value, FileNotFoundError)
