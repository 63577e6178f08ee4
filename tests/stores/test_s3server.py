"""The S3 server of `ckpt_storage.testing` keeps S3's promises about objects and conditions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]
from s3clients import BUCKET, MIB, ask, refused, running, upload

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


# Buckets and whole objects


@pytest.mark.parametrize("options", [{"min_part_bytes": 1}])
@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("0-0", 0, 1),
        ("4-9", 4, 10),
        ("7-", 7, None),
        ("-3", -3, None),
        ("5-999", 5, None),
        ("-999", 0, None),
        ("0-", 0, None),
    ],
)
def test_ranged_read(client: Any, text: str, low: int, high: int | None) -> None:
    """A range gives 206, its bytes and Content-Range, across the parts of an object too."""
    body = bytes(range(23))
    parts = {1: body[:5], 2: body[5:6], 3: body[6:17], 4: body[17:]}
    client.complete_multipart_upload(**upload(client, "k", parts))
    found = client.get_object(Bucket=BUCKET, Key="k", Range=f"bytes={text}")
    want = body[low:high]
    assert found["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert found["Body"].read() == want
    start = body.index(want)
    assert found["ContentRange"] == f"bytes {start}-{start + len(want) - 1}/23"
    assert client.head_object(Bucket=BUCKET, Key="k", Range=f"bytes={text}")[
        "ContentLength"
    ] == len(want)


@pytest.mark.parametrize("options", [{"list_page_count": 7}])
def test_listing_pages_in_utf8_order(client: Any) -> None:
    """Pages of any size together list every key once, in the order of their UTF-8 bytes."""
    keys = [f"p/{n % 3}/{n:02}" for n in range(17)] + ["p/ü", "p/\U0001f600", "p/\uff5e", "p/a b&<"]
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=key.encode())
    client.put_object(Bucket=BUCKET, Key="other", Body=b"")
    want = sorted(keys, key=str.encode)
    for page_count in (1, 3, 1000):
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=BUCKET, Prefix="p/", PaginationConfig={"PageSize": page_count}
        )
        found = [entry for page in pages for entry in page.get("Contents", [])]
        assert [entry["Key"] for entry in found] == want
        assert [entry["Size"] for entry in found] == [len(key.encode()) for key in want]
    after = client.list_objects_v2(Bucket=BUCKET, Prefix="p/", StartAfter=want[-3])
    assert [entry["Key"] for entry in after["Contents"]] == want[-2:]
    empty = client.list_objects_v2(Bucket=BUCKET, MaxKeys=0)
    assert (empty["KeyCount"], empty["IsTruncated"]) == (0, False)
    bad = {"Bucket": BUCKET, "ContinuationToken": "!"}
    assert refused(client.list_objects_v2, **bad) == (400, "InvalidArgument")


# Multipart uploads


def test_upload_is_invisible_until_complete(server: S3Server, client: Any) -> None:
    """Parts may come in any order and twice; the object appears when they are complete."""
    parts = {2: b"b" * (5 * MIB), 1: b"a" * (5 * MIB), 3: b"end"}
    arguments = upload(client, "k", parts, Metadata={"n": "1"})
    name = {key: arguments[key] for key in ("Bucket", "Key", "UploadId")}
    again = client.upload_part(**name, PartNumber=3, Body=b"END")["ETag"]
    arguments["MultipartUpload"]["Parts"][2]["ETag"] = again
    assert server.dump() == {}
    assert server.stats().open_uploads == 1
    assert refused(client.head_object, Bucket=BUCKET, Key="k") == (404, "404")
    assert [(part["PartNumber"], part["Size"]) for part in client.list_parts(**name)["Parts"]] == [
        (1, 5 * MIB),
        (2, 5 * MIB),
        (3, 3),
    ]
    etag = client.complete_multipart_upload(**arguments)["ETag"]
    assert etag.endswith('-3"')
    assert server.dump() == {"k": parts[1] + parts[2] + b"END"}
    assert client.head_object(Bucket=BUCKET, Key="k")["Metadata"] == {"n": "1"}
    assert server.stats().open_uploads == 0
    assert refused(client.complete_multipart_upload, **arguments) == (404, "NoSuchUpload")


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
    assert server.stats().open_uploads == 3


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


# A link with a bound
