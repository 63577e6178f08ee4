"""The S3 server of `ckpt_storage.testing`: conditions, parts and checksums are as on S3."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]
from s3clients import BUCKET, MIB, ask, checksum, refused, running, upload

from ckpt_storage.testing.s3_server import S3Server


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


def test_upload_rules(server: S3Server, client: Any) -> None:
    """A completion that breaks a rule is refused with S3's code and leaves the upload open."""
    arguments = upload(client, "k", {1: b"small", 2: b"b" * (5 * MIB), 3: b"c"})
    first, second, third = arguments["MultipartUpload"]["Parts"]
    cases = [
        ([first, second, third], "EntityTooSmall"),
        ([first, third], "EntityTooSmall"),
        ([second, {**third, "ETag": '"nope"'}], "InvalidPart"),
        ([second, {**third, "PartNumber": 4}], "InvalidPart"),
        ([third, second], "InvalidPartOrder"),
        ([second, second], "InvalidPartOrder"),
        ([], "MalformedXML"),
    ]
    for parts, code in cases:
        call = {**arguments, "MultipartUpload": {"Parts": parts}}
        assert refused(client.complete_multipart_upload, **call) == (400, code)
    name = {key: arguments[key] for key in ("Bucket", "Key", "UploadId")}
    for number in (0, 10_001):
        bad = {**name, "PartNumber": number, "Body": b""}
        assert refused(client.upload_part, **bad) == (400, "InvalidArgument")
    assert ask(server, "POST", f"/{BUCKET}/k?uploadId={name['UploadId']}", b"<no")[0] == 400
    call = {**arguments, "MultipartUpload": {"Parts": [second, third]}}
    client.complete_multipart_upload(**call)
    assert server.dump() == {"k": b"b" * (5 * MIB) + b"c"}


@pytest.mark.parametrize("options", [{"min_part_bytes": 1}])
def test_part_copied_from_a_range(server: S3Server, client: Any) -> None:
    """A part copied on the server has exactly the range named; a range outside is refused."""
    body = bytes(range(100))
    source = {"Bucket": BUCKET, "Key": "src"}
    client.put_object(**source, Body=body)
    name = {"Bucket": BUCKET, "Key": "dst"}
    name["UploadId"] = client.create_multipart_upload(**name)["UploadId"]
    etags = [
        client.upload_part_copy(**name, PartNumber=n, CopySource=source, CopySourceRange=text)
        for n, text in ((1, "bytes=90-99"), (2, "bytes=0-0"))
    ]
    etags.append(client.upload_part_copy(**name, PartNumber=3, CopySource=source))
    for text in ("bytes=90-100", "bytes=5-", "bytes=9-3", "0-3"):
        bad = {**name, "PartNumber": 4, "CopySource": source, "CopySourceRange": text}
        assert refused(client.upload_part_copy, **bad) == (400, "InvalidArgument")
    claims = [
        {"PartNumber": number, "ETag": found["CopyPartResult"]["ETag"]}
        for number, found in enumerate(etags, start=1)
    ]
    client.delete_object(**source)
    client.complete_multipart_upload(**name, MultipartUpload={"Parts": claims})
    assert server.dump() == {"dst": body[90:] + body[:1] + body}


# Preconditions


def test_conditional_writes(server: S3Server, client: Any) -> None:
    """Put, complete and copy honour If-None-Match and If-Match, and a refusal changes nothing."""
    client.put_object(Bucket=BUCKET, Key="src", Body=b"src")

    def put(key: str, **condition: str) -> Any:
        return client.put_object(Bucket=BUCKET, Key=key, Body=b"put", **condition)["ETag"]

    def complete(key: str, **condition: str) -> Any:
        arguments = upload(client, key, {1: b"complete"})
        return client.complete_multipart_upload(**arguments, **condition)["ETag"]

    def copy(key: str, **condition: str) -> Any:
        source = {"Bucket": BUCKET, "Key": "src"}
        answer = client.copy_object(Bucket=BUCKET, Key=key, CopySource=source, **condition)
        return answer["CopyObjectResult"]["ETag"]

    for write in (put, complete, copy):
        key = write.__name__
        missing = refused(lambda: write(key, IfMatch='"x"'))  # noqa: B023 - called at once
        assert missing == (404, "NoSuchKey")
        etag = write(key, IfNoneMatch="*")
        before = server.dump()[key]
        for condition in ({"IfNoneMatch": "*"}, {"IfMatch": '"x"'}):
            with pytest.raises(ClientError) as caught:
                write(key, **condition)
            error = caught.value.response["Error"]
            assert error["Code"] == "PreconditionFailed"
            assert error["Condition"] == ("If-Match" if "IfMatch" in condition else "If-None-Match")
        assert server.dump()[key] == before
        assert client.head_object(Bucket=BUCKET, Key=key)["ETag"] == etag
        assert write(key, IfMatch=etag) != etag
    # A refused completion leaves its upload: one for If-Match on nothing and two on the object.
    assert server.open_upload_count == 3


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("PUT", "k", {"If-None-Match": '"etag"'}),
        ("PUT", "k", {"If-Match": "*"}),
        ("PUT", "k", {"If-Match": '"a"', "If-None-Match": "*"}),
        ("PUT", "k", {"If-Unmodified-Since": "Mon, 01 Jan 2035 00:00:00 GMT"}),
        ("DELETE", "k", {"If-Match": "*"}),
        ("GET", "k", {"If-Modified-Since": "Mon, 01 Jan 2001 00:00:00 GMT"}),
        ("GET", "k", {"If-Range": '"etag"'}),
        ("GET", "k?versionId=1", {}),
        ("GET", "k?partNumber=1", {}),
        ("PUT", "k?tagging", {}),
        ("GET", "?acl", {}),
        ("GET", "", {}),
        ("PATCH", "k", {}),
        ("PUT", "k", {"x-amz-checksum-sha256": "AAAA"}),
    ],
)
def test_what_is_not_implemented_is_refused(
    server: S3Server, client: Any, method: str, target: str, headers: dict[str, str]
) -> None:
    """A condition or feature the server lacks is 501 and changes nothing; it is never ignored."""
    client.put_object(Bucket=BUCKET, Key="k", Body=b"old")
    status, _, body = ask(server, method, f"/{BUCKET}/{target}", headers=headers)
    assert status == 501
    assert b"<Code>NotImplemented</Code>" in body
    assert server.dump() == {"k": b"old"}


@pytest.mark.parametrize("options", [{"ignore_preconditions": True}])
def test_server_that_ignores_preconditions(server: S3Server, client: Any) -> None:
    """With `ignore_preconditions` every conditional write overwrites, as old servers do."""
    client.put_object(Bucket=BUCKET, Key="k", Body=b"1")
    client.put_object(Bucket=BUCKET, Key="k", Body=b"2", IfNoneMatch="*")
    assert server.dump() == {"k": b"2"}
    client.put_object(Bucket=BUCKET, Key="k", Body=b"3", IfMatch='"wrong"')
    assert server.dump() == {"k": b"3"}
    client.complete_multipart_upload(**upload(client, "k", {1: b"4"}), IfNoneMatch="*")
    assert server.dump() == {"k": b"4"}


# Checksums


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c"])
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
@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C"])
@pytest.mark.parametrize("kind", ["COMPOSITE", "FULL_OBJECT"])
def test_checksum_of_a_multipart_object(
    server: S3Server, client: Any, algorithm: str, kind: str
) -> None:
    """An upload begun with a checksum gets one of its parts' checksums, or of all its bytes."""
    create = {"ChecksumAlgorithm": algorithm, "ChecksumType": kind}
    lower = algorithm.lower()
    bodies = [b"first", b"second"]
    arguments = upload(client, "k", dict(enumerate(bodies, start=1)), **create)
    if kind == "FULL_OBJECT":
        want = checksum(lower, b"".join(bodies))
    else:
        raw = b"".join(base64.b64decode(checksum(lower, body)) for body in bodies)
        want = checksum(lower, raw) + "-2"
    part = {key: arguments[key] for key in ("Bucket", "Key", "UploadId")}
    other = "crc32" if lower == "crc32c" else "crc32c"
    given = {f"Checksum{other.upper()}": checksum(other, b"x")}
    code = refused(client.upload_part, **part, PartNumber=1, Body=b"x", **given)
    assert code == (400, "InvalidRequest")
    wrong = {f"Checksum{algorithm}": checksum(lower, b"x")}
    assert refused(client.complete_multipart_upload, **arguments, **wrong) == (400, "BadDigest")
    client.complete_multipart_upload(**arguments, **{f"Checksum{algorithm}": want})
    found = client.get_object(Bucket=BUCKET, Key="k", ChecksumMode="ENABLED")
    assert found[f"Checksum{algorithm}"] == want
    assert found["ChecksumType"] == kind
    assert found["Body"].read() == b"firstsecond"
    assert server.dump() == {"k": b"firstsecond"}
