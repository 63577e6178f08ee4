"""How tests talk to an S3 server without any SDK."""

from __future__ import annotations

import http.client
from collections.abc import Mapping

BUCKET = "bkt"


def ask(
    url: str, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send one request; return status, headers in lower case and body."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, target, body, dict(headers or {}))
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, found, answer.read()
    finally:
        connection.close()
