"""The S3 server of `ckpt_storage.testing` keeps S3's promises about objects and conditions."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError  # type: ignore[import-untyped]
from s3clients import BUCKET, MIB, ask, connect, fetch, refused, running, upload

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.testing._s3link import PIECE_BYTES, Link
from ckpt_storage.testing._s3memory import BufferPool
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


def test_bucket_life(server: S3Server, client: Any) -> None:
    """A bucket is created once, found, listed, and deleted only when it is empty."""
    assert refused(client.head_bucket, Bucket="other") == (404, "404")
    client.create_bucket(Bucket="other")
    client.head_bucket(Bucket="other")
    assert [found["Name"] for found in client.list_buckets()["Buckets"]] == [BUCKET, "other"]
    assert refused(client.create_bucket, Bucket="other") == (409, "BucketAlreadyOwnedByYou")
    client.put_object(Bucket="other", Key="k", Body=b"x")
    assert refused(client.delete_bucket, Bucket="other") == (409, "BucketNotEmpty")
    client.delete_object(Bucket="other", Key="k")
    client.delete_bucket(Bucket="other")
    assert refused(client.put_object, Bucket="other", Key="k") == (404, "NoSuchBucket")
    assert refused(client.create_multipart_upload, Bucket="other", Key="k")[1] == "NoSuchBucket"
    assert ask(server, "PUT", "/Bad_Name")[0] == 400
    with pytest.raises(InvalidInputError, match="Bad_Name"):
        server.create_bucket("Bad_Name")


@pytest.mark.parametrize("size_bytes", [0, 1, 65_535, 65_536, 3 * MIB + 7])
def test_object_round_trip(server: S3Server, client: Any, size_bytes: int) -> None:
    """What was put comes back byte for byte, and is gone after a delete, which may repeat."""
    body = random.Random(size_bytes).randbytes(size_bytes)
    before_s = int(time.time())
    etag = client.put_object(
        Bucket=BUCKET, Key="a/ü +%?", Body=body, Metadata={"who": "me"}, ContentType="text/x"
    )["ETag"]
    found = client.head_object(Bucket=BUCKET, Key="a/ü +%?")
    assert found["ContentLength"] == size_bytes
    assert found["ETag"] == etag
    assert found["Metadata"] == {"who": "me"}
    assert found["ContentType"] == "text/x"
    assert before_s <= found["LastModified"].timestamp() <= time.time()
    date = parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
    assert before_s <= date.timestamp() <= time.time()
    assert fetch(client, "a/ü +%?") == body
    assert server.dump() == {"a/ü +%?": body}
    for _ in range(2):
        client.delete_object(Bucket=BUCKET, Key="a/ü +%?")
    assert refused(client.get_object, Bucket=BUCKET, Key="a/ü +%?") == (404, "NoSuchKey")
    assert refused(client.head_object, Bucket=BUCKET, Key="a/ü +%?") == (404, "404")
    assert server.dump() == {}


def test_buffer_is_used_again_once_it_is_garbage() -> None:
    """A segment that still exists keeps its memory; one that does not gives it to the next."""
    pool = BufferPool()
    kept, dropped = pool.take(100_000), pool.take(100_000)
    kept.view[:], dropped.view[:] = b"k" * 100_000, b"d" * 100_000
    del dropped
    assert bytes(pool.take(90_000).view) == b"d" * 90_000
    assert bytes(kept.view) == b"k" * 100_000


def test_buffers_are_reused_without_leaks(client: Any) -> None:
    """A buffer used again never shows in an object that still exists."""
    bodies = {f"k{n}": random.Random(n).randbytes(100_000 + n) for n in range(8)}
    for _ in range(3):
        for key, body in bodies.items():
            client.put_object(Bucket=BUCKET, Key="scratch", Body=b"\xff" * 131_072)
            client.put_object(Bucket=BUCKET, Key=key, Body=body)
    assert {key: fetch(client, key) for key in bodies} == bodies


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


def test_range_beyond_the_end_or_not_a_range(server: S3Server, client: Any) -> None:
    """A range with no byte in it is 416, nonsense is the whole object, several are 501."""
    client.put_object(Bucket=BUCKET, Key="k", Body=b"0123456789")
    client.put_object(Bucket=BUCKET, Key="empty", Body=b"")
    for key, text in [("k", "10-"), ("k", "-0"), ("empty", "0-")]:
        code = refused(client.get_object, Bucket=BUCKET, Key=key, Range=f"bytes={text}")
        assert code == (416, "InvalidRange")
    for text in ("bytes=5-2", "bytes=-", "lines=1-2"):
        status, _, body = ask(server, "GET", f"/{BUCKET}/k", headers={"Range": text})
        assert (status, body) == (200, b"0123456789")
    assert ask(server, "GET", f"/{BUCKET}/k", headers={"Range": "bytes=0-1,3-4"})[0] == 501


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


@pytest.mark.parametrize("options", [{"list_page_count": n} for n in (1, 2, 5)])
@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "zz"])
def test_listing_with_a_delimiter(client: Any, prefix: str, options: dict[str, int]) -> None:
    """Keys that have the delimiter behind the prefix are rolled up once, on whatever page."""
    keys = ["a", "a/", "a/b", "a/b/1", "a/b/2", "a/c", "a/d/x/y", "a0", "b/1", "b/2", "c"]
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"")
    inside = [key for key in keys if key.startswith(prefix)]
    want_prefixes = {
        prefix + key[len(prefix) :].split("/")[0] + "/"
        for key in inside
        if "/" in key[len(prefix) :]
    }
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=BUCKET, Prefix=prefix, Delimiter="/"
    )
    found_keys: list[str] = []
    found_prefixes: list[str] = []
    for page in pages:
        entries = [entry["Key"] for entry in page.get("Contents", [])]
        rolled = [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
        assert len(entries) + len(rolled) == page["KeyCount"] <= options["list_page_count"]
        found_keys += entries
        found_prefixes += rolled
    assert found_keys == [key for key in inside if "/" not in key[len(prefix) :]]
    assert found_prefixes == sorted(want_prefixes)


def test_copy(client: Any) -> None:
    """A copy has the bytes, its own ETag, and metadata as the directive says."""
    client.put_object(Bucket=BUCKET, Key="a", Body=b"abc", Metadata={"n": "1"})
    source = {"Bucket": BUCKET, "Key": "a"}
    client.copy_object(Bucket=BUCKET, Key="b", CopySource=source)
    client.copy_object(
        Bucket=BUCKET, Key="c", CopySource=source, MetadataDirective="REPLACE", Metadata={"n": "2"}
    )
    found = {key: client.head_object(Bucket=BUCKET, Key=key) for key in "abc"}
    assert {key: head["Metadata"]["n"] for key, head in found.items()} == {
        "a": "1",
        "b": "1",
        "c": "2",
    }
    assert len({head["ETag"] for head in found.values()}) == 3
    assert fetch(client, "b") == fetch(client, "c") == b"abc"
    itself = {"Bucket": BUCKET, "Key": "a", "CopySource": source}
    assert refused(client.copy_object, **itself) == (400, "InvalidRequest")
    missing = {"Bucket": BUCKET, "Key": "d", "CopySource": {"Bucket": BUCKET, "Key": "nope"}}
    assert refused(client.copy_object, **missing) == (404, "NoSuchKey")
    other = {"Bucket": BUCKET, "Key": "d", "CopySource": source}
    for condition in ({"CopySourceIfMatch": "no"}, {"CopySourceIfNoneMatch": found["a"]["ETag"]}):
        code = refused(client.copy_object, **other, **condition)
        assert code == (412, "PreconditionFailed")


def test_bulk_delete(server: S3Server, client: Any) -> None:
    """Many keys go in one request, missing ones too; a request without a digest is refused."""
    for key in ("a", "b&<>", "c"):
        client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    named = {"Objects": [{"Key": key} for key in ("a", "b&<>", "nope")]}
    told = client.delete_objects(Bucket=BUCKET, Delete=named)
    assert [entry["Key"] for entry in told["Deleted"]] == ["a", "b&<>", "nope"]
    assert list(server.dump()) == ["c"]
    body = b"<Delete><Object><Key>c</Key></Object></Delete>"
    assert ask(server, "POST", f"/{BUCKET}?delete", body)[0] == 400
    conditional = {"Objects": [{"Key": "c", "ETag": "x"}]}
    assert refused(client.delete_objects, Bucket=BUCKET, Delete=conditional)[0] == 501
    assert list(server.dump()) == ["c"]
    quiet = {"Objects": [{"Key": "c"}], "Quiet": True}
    assert "Deleted" not in client.delete_objects(Bucket=BUCKET, Delete=quiet)
    assert server.dump() == {}


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


def test_aborted_upload_is_gone(server: S3Server, client: Any) -> None:
    """After an abort every operation on the upload says NoSuchUpload."""
    arguments = upload(client, "k", {1: b"x"})
    name = {key: arguments[key] for key in ("Bucket", "Key", "UploadId")}
    client.abort_multipart_upload(**name)
    gone = (404, "NoSuchUpload")
    assert refused(client.abort_multipart_upload, **name) == gone
    assert refused(client.list_parts, **name) == gone
    assert refused(client.upload_part, **name, PartNumber=1, Body=b"") == gone
    assert refused(client.complete_multipart_upload, **arguments) == gone
    assert (server.dump(), server.stats().open_uploads) == ({}, 0)


def test_uploads_and_parts_are_listed_in_pages(client: Any) -> None:
    """Pages of two list every open upload under a prefix and every part once, in order."""
    made = [
        (key, client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"])
        for key in ("p/a", "p/b", "p/b", "p/c&", "q")
    ]
    pages = client.get_paginator("list_multipart_uploads").paginate(
        Bucket=BUCKET, Prefix="p/", PaginationConfig={"PageSize": 2}
    )
    found = [(entry["Key"], entry["UploadId"]) for page in pages for entry in page["Uploads"]]
    assert sorted(found) == sorted(made[:4])
    assert [key for key, _ in found] == ["p/a", "p/b", "p/b", "p/c&"]
    name = {"Bucket": BUCKET, "Key": "q", "UploadId": made[4][1]}
    for number in (5, 1, 3):
        client.upload_part(**name, PartNumber=number, Body=b"x" * number)
    parts = client.get_paginator("list_parts").paginate(**name, PaginationConfig={"PageSize": 2})
    assert [(part["PartNumber"], part["Size"]) for page in parts for part in page["Parts"]] == [
        (1, 1),
        (3, 3),
        (5, 5),
    ]


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


def test_conditional_reads(client: Any) -> None:
    """A read can ask for one version, and not to be sent what it has."""
    etag = client.put_object(Bucket=BUCKET, Key="k", Body=b"x")["ETag"]
    assert fetch(client, "k", IfMatch=etag) == b"x"
    assert fetch(client, "k", IfNoneMatch='"other"') == b"x"
    for call in (client.get_object, client.head_object):
        assert refused(call, Bucket=BUCKET, Key="k", IfMatch='"other"')[0] == 412
        assert refused(call, Bucket=BUCKET, Key="k", IfNoneMatch=etag)[0] == 304


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


@pytest.mark.parametrize("kind", ["put", "complete"])
def test_exactly_one_of_eight_racing_creates_wins(server: S3Server, kind: str) -> None:
    """Of eight threads that create one key at once one wins, and its bytes are what is stored."""
    barrier = threading.Barrier(8)
    results: list[tuple[str, bytes]] = []

    def create(body: bytes) -> None:
        client = connect(server)
        arguments = upload(client, "slot", {1: body}) if kind == "complete" else {}
        barrier.wait(30)
        try:
            if kind == "complete":
                client.complete_multipart_upload(**arguments, IfNoneMatch="*")
            else:
                client.put_object(Bucket=BUCKET, Key="slot", Body=body, IfNoneMatch="*")
            results.append(("won", body))
        except ClientError as error:
            results.append((error.response["Error"]["Code"], body))
        finally:
            client.close()

    threads = [threading.Thread(target=create, args=(b"%d" % n * 70_000,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(code for code, _ in results) == ["PreconditionFailed"] * 7 + ["won"]
    assert server.dump() == {"slot": next(body for code, body in results if code == "won")}


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


@pytest.mark.parametrize("options", [{"omit_condition_element": True}])
def test_condition_element_can_be_left_out(client: Any) -> None:
    """With `omit_condition_element` a 412 does not say which condition failed."""
    client.put_object(Bucket=BUCKET, Key="k", Body=b"1")
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=BUCKET, Key="k", Body=b"2", IfNoneMatch="*")
    assert caught.value.response["Error"]["Code"] == "PreconditionFailed"
    assert "Condition" not in caught.value.response["Error"]


# A link with a bound


def test_a_link_carries_one_byte_after_the_other() -> None:
    """Who comes while it is busy waits its turn; what it did not carry while idle is lost."""
    now = [100.0]
    waits: list[float] = []
    link = Link(1000.0, clock=lambda: now[0], wait=waits.append)
    link.carry(500)
    link.carry(250)
    now[0] = 200.0
    link.carry(100)
    assert waits == pytest.approx([0.5, 0.75, 0.1])


def test_what_had_its_time_is_not_waited_for() -> None:
    """A clock that went on meanwhile leaves nothing to wait."""
    times = iter([0.0, 5.0])
    waits: list[float] = []
    Link(1000.0, clock=lambda: next(times), wait=waits.append).carry(100)
    assert waits == []


@pytest.mark.parametrize("bytes_s", [0.0, -1.0, math.inf, math.nan])
def test_a_link_that_carries_nothing_is_refused(bytes_s: float) -> None:
    """When the server is made, not at its first request."""
    with pytest.raises(InvalidInputError, match="A link of"):
        S3Server(bandwidth_bytes_s=bytes_s)


def test_all_connections_share_the_link_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The links are asked for the bodies both ways, in pieces, and objects stay what they were."""
    with running(bandwidth_bytes_s=1e12) as (server, client):
        assert server._links is not None  # noqa: SLF001
        carried: tuple[list[int], list[int]] = ([], [])
        for link, counts in zip(server._links, carried, strict=True):  # noqa: SLF001
            monkeypatch.setattr(link, "carry", counts.append)
        body = random.Random(1).randbytes(3 * MIB + 5)
        client.put_object(Bucket=BUCKET, Key="k", Body=body)
        assert client.get_object(Bucket=BUCKET, Key="k")["Body"].read() == body
        for counts in carried:
            assert len(body) <= sum(counts) < len(body) + 100_000
            assert max(counts) <= PIECE_BYTES
