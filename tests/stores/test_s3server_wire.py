"""The S3 server of `ckpt_storage.testing` understands digests, framings and other clients."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]
from s3clients import BUCKET, ask, checksum, refused, running, upload

from ckpt_storage.testing.s3server import S3Server


@pytest.fixture
def options() -> dict[str, Any]:
    """How to start the server; tests override it."""
    return {}


@pytest.fixture
def pair(options: dict[str, Any]) -> Iterator[tuple[S3Server, Any]]:
    """A server and a botocore client of it."""
    with running(**options) as found:
        yield found


@pytest.fixture
def server(pair: tuple[S3Server, Any]) -> S3Server:
    """The server of `pair`."""
    return pair[0]


@pytest.fixture
def client(pair: tuple[S3Server, Any]) -> Any:
    """The botocore client of `pair`."""
    return pair[1]


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c", "sha1", "sha256", "md5"])
def test_checksum_is_verified_stored_and_returned(server: S3Server, algorithm: str) -> None:
    """A body that does not have its checksum is refused; a stored one comes back on request."""
    name = f"x-amz-checksum-{algorithm}"
    target = f"/{BUCKET}/k"
    status, _, body = ask(server, "PUT", target, b"body", {name: checksum(algorithm, b"bodx")})
    assert (status, b"BadDigest" in body) == (400, True)
    status, _, body = ask(server, "PUT", target, b"body", {name: "not base64"})
    assert (status, b"InvalidDigest" in body) == (400, True)
    assert server.dump() == {}
    text = checksum(algorithm, b"body")
    assert ask(server, "PUT", target, b"body", {name: text})[0] == 200
    for method in ("GET", "HEAD"):
        _, headers, _ = ask(server, method, target, headers={"x-amz-checksum-mode": "ENABLED"})
        assert headers[name] == text
        assert name not in ask(server, method, target)[1]


@pytest.mark.parametrize("options", [{"min_part_bytes": 1}])
@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "SHA256"])
@pytest.mark.parametrize("kind", ["COMPOSITE", "FULL_OBJECT"])
def test_checksum_of_a_multipart_object(
    server: S3Server, client: Any, algorithm: str, kind: str
) -> None:
    """An upload begun with a checksum gets one of its parts' checksums, or of all its bytes."""
    create = {"ChecksumAlgorithm": algorithm, "ChecksumType": kind}
    if (algorithm, kind) == ("SHA256", "FULL_OBJECT"):
        with pytest.raises(ClientError, match="InvalidRequest"):
            client.create_multipart_upload(Bucket=BUCKET, Key="k", **create)
        return
    lower = algorithm.lower()
    bodies = [b"first", b"second"]
    arguments = upload(client, "k", dict(enumerate(bodies, start=1)), **create)
    if kind == "FULL_OBJECT":
        want = checksum(lower, b"".join(bodies))
    else:
        raw = b"".join(base64.b64decode(checksum(lower, body)) for body in bodies)
        want = checksum(lower, raw) + "-2"
    part = {key: arguments[key] for key in ("Bucket", "Key", "UploadId")}
    other = {"ChecksumSHA1": checksum("sha1", b"x")}
    code = refused(client.upload_part, **part, PartNumber=1, Body=b"x", **other)
    assert code == (400, "InvalidRequest")
    wrong = {f"Checksum{algorithm}": checksum(lower, b"x")}
    assert refused(client.complete_multipart_upload, **arguments, **wrong) == (400, "BadDigest")
    client.complete_multipart_upload(**arguments, **{f"Checksum{algorithm}": want})
    found = client.get_object(Bucket=BUCKET, Key="k", ChecksumMode="ENABLED")
    assert found[f"Checksum{algorithm}"] == want
    assert found["ChecksumType"] == kind
    assert found["Body"].read() == b"firstsecond"
    assert server.dump() == {"k": b"firstsecond"}


# Other clients
