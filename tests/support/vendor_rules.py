"""Rules of Google's and Microsoft's storages that their emulators lack, as a layer in front."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from typing import TypeAlias

from servers import served

Answer: TypeAlias = tuple[int, Mapping[str, str], bytes]
Layer: TypeAlias = Callable[[str, str, Mapping[str, str], bytes], Answer | bytes]
"""Takes method, target, headers and body; returns a refusal, or the body that goes on."""

_OWN = {"connection", "transfer-encoding"}


@contextlib.contextmanager
def behind(url: str, layer: Layer) -> Iterator[str]:
    """Serve what lies at `url` through a layer; give the URL of the layer."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            verdict = layer(self.command, self.path, dict(self.headers.items()), body)
            if isinstance(verdict, bytes):
                verdict = self.forwarded(verdict)
            status, headers, content = verdict
            self.send_response(status)
            for name, text in headers.items():
                if name.lower() not in _OWN | {"content-length"}:
                    self.send_header(name, text)
            # The answer to a HEAD tells the length of the body that it does not have.
            lengths = {name.lower(): text for name, text in headers.items()}
            is_head = self.command == "HEAD"
            length = lengths.get("content-length", "0") if is_head else str(len(content))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(content)

        def forwarded(self, body: bytes) -> Answer:
            connection = HTTPConnection(url.removeprefix("http://"), timeout=30)
            try:
                heads = {
                    name: text for name, text in self.headers.items() if name.lower() not in _OWN
                }
                connection.request(self.command, self.path, body, heads)
                response = connection.getresponse()
                return response.status, dict(response.getheaders()), response.read()
            finally:
                connection.close()

        do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815  # as inherited

    with served(Handler) as place:
        yield f"http://{place}"


def gcs_retention() -> Layer:
    """Google, "Bucket Lock" (retention policies): what is there is neither replaced nor deleted.

    The request fails with 403 and the reason "retentionPolicyNotMet".
    """
    names: set[bytes] = set()
    text = {"code": 403, "message": "is subject to bucket's retention policy"}
    text |= {"errors": [{"reason": "retentionPolicyNotMet"}]}
    refusal = 403, {"Content-Type": "application/json"}, json.dumps({"error": text}).encode()

    def layer(method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer | bytes:
        del headers
        if method == "DELETE" and "/o/" in target:
            return refusal
        name = re.search(rb'"name": "([^"]*)"', body) if method == "POST" else None
        if name is None:
            return body
        # Of what is there, an upload under this condition is refused with 412 all the same.
        if name[1] in names and "ifGenerationMatch=0" not in target:
            return refusal
        names.add(name[1])
        return body

    return layer


def azure_immutability() -> Layer:
    """Microsoft, "Immutable storage for blob data" (error codes): what is there stays.

    Replacing and deleting it fails with 409 and the code BlobImmutableDueToPolicy.
    """
    names: set[str] = set()
    code = "BlobImmutableDueToPolicy"
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>by policy</Message></Error>'
    heads = {"x-ms-error-code": code, "Content-Type": "application/xml"}
    refusal = 409, heads, text.encode()

    def layer(method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer | bytes:
        path, _, query = target.partition("?")
        if method == "DELETE":
            return refusal
        if method != "PUT" or "comp=block" in query.split("&"):
            return body
        # Of what is there, a write under this condition is refused with 409 all the same.
        if path in names and not headers.get("If-None-Match"):
            return refusal
        names.add(path)
        return body

    return layer


def flipping(marks: bytes) -> Layer:
    """Change one byte of the first body that holds `marks`, as a wire does."""
    left = [marks]

    def layer(method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer | bytes:
        del method, target, headers
        if not left or left[0] not in body:
            return body
        at = body.index(left.pop())
        return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]

    return layer
