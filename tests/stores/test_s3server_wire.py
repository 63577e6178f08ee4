"""The S3 server of `ckpt_storage.testing` understands digests, framings and other clients."""

from __future__ import annotations

import base64
import hashlib
import http.client
import random
from collections.abc import Iterator
from typing import Any

import pytest
import s3fs
from botocore.exceptions import ClientError  # type: ignore[import-untyped]
from s3clients import BUCKET, MIB, ask, checksum, refused, running, upload

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


@pytest.fixture
def fs(server: S3Server) -> Iterator[Any]:
    """An s3fs file system on `server`."""
    found = s3fs.S3FileSystem(**server.storage_options, skip_instance_cache=True)
    yield found
    found.close_session(found.loop, found.s3)


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


def test_content_md5_and_odd_checksums(server: S3Server) -> None:
    """Content-MD5 is verified; unknown, several and merely announced checksums are refused."""
    target = f"/{BUCKET}/k"
    md5 = checksum("md5", b"body")
    assert ask(server, "PUT", target, b"bodx", {"Content-MD5": md5})[0] == 400
    assert (
        ask(server, "PUT", target, b"body", {"x-amz-checksum-crc64nvme": "AAAAAAAAAAA="})[0] == 501
    )
    two = {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-crc32c": "AAAAAA=="}
    assert ask(server, "PUT", target, b"", two)[0] == 400
    assert ask(server, "PUT", target, b"", {"x-amz-sdk-checksum-algorithm": "CRC32"})[0] == 400
    assert server.dump() == {}
    assert ask(server, "PUT", target, b"body", {"Content-MD5": md5})[0] == 200


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


def chunked(body: bytes, size_bytes: int, end: str, signature: str = "") -> bytes:
    """Frame a body in chunks; `end` is what follows the last one."""
    pieces = [body[at : at + size_bytes] for at in range(0, len(body), size_bytes)]
    framed = [b"%x%s\r\n%s\r\n" % (len(piece), signature.encode(), piece) for piece in pieces]
    return b"".join(framed) + f"0{signature}\r\n{end}\r\n".encode()


@pytest.mark.parametrize("http_chunk_bytes", [None, 7, 100_000])
@pytest.mark.parametrize("size_bytes", [0, 5, 200_000])
def test_aws_chunked_body_with_a_trailer(
    server: S3Server, size_bytes: int, http_chunk_bytes: int | None
) -> None:
    """S3's own chunks, bare or inside HTTP's, are taken apart and their trailer is verified."""
    body = random.Random(1).randbytes(size_bytes)
    headers = {
        "Content-Encoding": "gzip,aws-chunked",
        "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "x-amz-decoded-content-length": str(size_bytes),
        "x-amz-trailer": "x-amz-checksum-crc32c",
        "x-amz-sdk-checksum-algorithm": "CRC32C",
    }

    def put(key: str, end: str) -> tuple[int, str]:
        framed = chunked(body, 65_536, end)
        extra: dict[str, str] = {}
        if http_chunk_bytes is not None:
            framed = chunked(framed, http_chunk_bytes, "")
            extra["Transfer-Encoding"] = "chunked"
        answer = ask(server, "PUT", f"/{BUCKET}/{key}", framed, {**headers, **extra})
        return answer[0], answer[2].partition(b"<Code>")[2].partition(b"<")[0].decode()

    good = checksum("crc32c", body)
    assert put("k", f"x-amz-checksum-crc32c:{good}\r\n") == (200, "")
    other = checksum("crc32c", b"other")
    assert put("bad", f"x-amz-checksum-crc32c:{other}\r\n") == (400, "BadDigest")
    assert put("none", "") == (400, "MalformedTrailerError")
    assert server.dump() == {"k": body}
    _, found, _ = ask(server, "GET", f"/{BUCKET}/k", headers={"x-amz-checksum-mode": "enabled"})
    assert found["content-encoding"] == "gzip"
    assert found["x-amz-checksum-crc32c"] == good


def test_other_framings(server: S3Server) -> None:
    """Signed chunks, plain HTTP chunks and Expect: 100-continue all carry the body."""
    body = bytes(range(256)) * 10
    signed = {
        "x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
        "x-amz-decoded-content-length": str(len(body)),
    }
    framed = chunked(body, 1000, "", signature=";chunk-signature=" + "0" * 64)
    assert ask(server, "PUT", f"/{BUCKET}/signed", framed, signed)[0] == 200
    plain = chunked(body, 999, "")
    assert ask(server, "PUT", f"/{BUCKET}/plain", plain, {"Transfer-Encoding": "chunked"})[0] == 200
    assert ask(server, "PUT", f"/{BUCKET}/expect", body, {"Expect": "100-continue"})[0] == 200
    assert server.dump() == dict.fromkeys(("expect", "plain", "signed"), body)
    short = {**signed, "x-amz-decoded-content-length": str(len(body) + 1)}
    long = {**signed, "x-amz-decoded-content-length": str(len(body) - 1)}
    for headers in (short, long):
        status, found, _ = ask(server, "PUT", f"/{BUCKET}/bad", framed, headers)
        assert (status, found["connection"]) == (400, "close")
    assert "bad" not in server.dump()


@pytest.mark.parametrize(
    "lines", ["GET /\r\n\r\n", "GET / HTTP/1.1\r\nno colon\r\n\r\n", "x" * 200_000]
)
def test_what_is_no_http_is_refused(server: S3Server, lines: str) -> None:
    """A broken head gets 400, and the server goes on serving others."""
    connection = http.client.HTTPConnection(server.endpoint_url.removeprefix("http://"), timeout=30)
    connection.connect()
    connection.sock.sendall(lines.encode())
    assert connection.sock.recv(12) == b"HTTP/1.1 400"
    connection.close()
    assert ask(server, "HEAD", f"/{BUCKET}")[0] == 200


def test_etag_is_random_by_default(client: Any) -> None:
    """Two objects with equal bytes have different ETags."""
    put = {"Bucket": BUCKET, "Key": "k", "Body": b"body"}
    assert client.put_object(**put)["ETag"] != client.put_object(**put)["ETag"]


@pytest.mark.parametrize("options", [{"etag": "md5", "min_part_bytes": 1}])
def test_etag_can_be_md5(client: Any) -> None:
    """With `etag="md5"` an ETag is what AWS computes, for objects of parts too."""
    put = {"Bucket": BUCKET, "Key": "k", "Body": b"body"}
    digest = hashlib.md5(b"body", usedforsecurity=False)
    assert client.put_object(**put)["ETag"] == f'"{digest.hexdigest()}"'
    done = client.complete_multipart_upload(**upload(client, "m", {1: b"body", 2: b"body"}))
    both = hashlib.md5(digest.digest() * 2, usedforsecurity=False)
    assert done["ETag"] == f'"{both.hexdigest()}-2"'


# Other clients


def test_s3fs(server: S3Server, fs: Any) -> None:
    """s3fs makes buckets, writes in one piece and in parts, reads ranges, lists, moves, removes."""
    fs.mkdir("made")
    assert sorted(fs.ls("")) == [BUCKET, "made"]
    body = random.Random(2).randbytes(11 * MIB)
    fs.pipe_file(f"{BUCKET}/d/small", b"small")
    fs.pipe_file(f"{BUCKET}/d/large", body, chunksize=5 * MIB)
    with fs.open(f"{BUCKET}/d/e/opened", "wb", block_size=5 * MIB) as file:
        file.write(body)
    assert fs.cat_file(f"{BUCKET}/d/large") == body
    name = f"{BUCKET}/d/e/opened"
    assert fs.cat_ranges([name, name], [3, -5], [9, None]) == [body[3:9], body[-5:]]
    assert fs.find(f"{BUCKET}/d") == [
        f"{BUCKET}/d/e/opened",
        f"{BUCKET}/d/large",
        f"{BUCKET}/d/small",
    ]
    assert sorted(fs.ls(f"{BUCKET}/d", detail=False)) == [
        f"{BUCKET}/d/{name}" for name in ("e", "large", "small")
    ]
    for size_bytes in (3, 6 * MIB):
        fs.pipe_file(f"{BUCKET}/x{size_bytes}", b"x" * size_bytes, mode="create")
        with pytest.raises(FileExistsError):
            fs.pipe_file(f"{BUCKET}/x{size_bytes}", b"y" * size_bytes, mode="create")
    fs.mv(f"{BUCKET}/d/small", f"{BUCKET}/moved")
    fs.rm(f"{BUCKET}/d", recursive=True)
    assert server.dump(BUCKET) == {"moved": b"small", "x3": b"xxx", f"x{6 * MIB}": b"x" * 6 * MIB}
    fs.rmdir("made")
    assert fs.ls("") == [BUCKET]
