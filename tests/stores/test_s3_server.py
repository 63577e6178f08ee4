"""The S3 server of `ckpt_storage.testing` is strict, fails as told, and ends cleanly."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import ClientError  # type: ignore[import-untyped]
from servers import ask, free_port

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.testing.s3_server import FaultRule, S3Server, crash_rules

BUCKET = "bkt"


def connect(server: S3Server) -> Any:
    """Return a botocore client of the server, to be closed."""
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )


@pytest.fixture
def client(server: S3Server) -> Iterator[Any]:
    """A botocore client of the server."""
    with contextlib.closing(connect(server)) as made:
        yield made


def refused(call: Callable[..., Any], **arguments: Any) -> tuple[int, str]:
    """Return HTTP status and S3 code with which a botocore call is refused."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    answer = caught.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def put(client: Any, key: str, body: bytes = b"x") -> None:
    """Store an object with botocore."""
    client.put_object(Bucket=BUCKET, Key=key, Body=body)


def test_upload_rules(server: S3Server, client: Any) -> None:
    """A completion that breaks a rule is refused with S3's code and leaves the upload open."""
    made = client.create_multipart_upload(Bucket=BUCKET, Key="k")
    name = {"Bucket": BUCKET, "Key": "k", "UploadId": made["UploadId"]}
    first, second, third = (
        {
            "PartNumber": number,
            "ETag": client.upload_part(**name, PartNumber=number, Body=body)["ETag"],
        }
        for number, body in enumerate((b"small", b"b" * (5 << 20), b"c"), 1)
    )
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
        call = {**name, "MultipartUpload": {"Parts": parts}}
        assert refused(client.complete_multipart_upload, **call) == (400, code)
    for number in (0, 10_001):
        bad = {**name, "PartNumber": number, "Body": b""}
        assert refused(client.upload_part, **bad) == (400, "InvalidArgument")
    assert (
        ask(server.endpoint_url, "POST", f"/{BUCKET}/k?uploadId={name['UploadId']}", b"<no")[0]
        == 400
    )
    client.complete_multipart_upload(**name, MultipartUpload={"Parts": [second, third]})
    assert server.dump(BUCKET) == {"k": b"b" * (5 << 20) + b"c"}


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("PUT", "k", {"If-None-Match": '"etag"'}),
        ("PUT", "k", {"If-Match": "*"}),
        ("DELETE", "k", {"If-Match": "*"}),
        ("GET", "k", {"If-Range": '"etag"'}),
        ("GET", "k?versionId=1", {}),
        ("GET", "?acl", {}),
        ("PATCH", "k", {}),
        ("PUT", "k", {"x-amz-checksum-sha256": "AAAA"}),
    ],
)
def test_what_is_not_implemented_is_refused(
    server: S3Server, client: Any, method: str, target: str, headers: dict[str, str]
) -> None:
    """A condition or feature the server lacks is 501 and changes nothing; it is never ignored."""
    client.put_object(Bucket=BUCKET, Key="k", Body=b"old")
    status, _, body = ask(server.endpoint_url, method, f"/{BUCKET}/{target}", headers=headers)
    assert status == 501
    assert b"<Code>NotImplemented</Code>" in body
    assert server.dump(BUCKET) == {"k": b"old"}


def test_rule_counts_its_matches(server: S3Server, client: Any) -> None:
    """A rule lets `after` matches pass and hits the next `times`; other keys do not count."""
    server.faults([FaultRule(op="put", key="^a", after=1, times=2, action="status")])
    codes = []
    for key in ("a1", "b", "a2", "a3", "b", "a4"):
        try:
            put(client, key)
            codes.append("")
        except ClientError as error:
            codes.append(error.response["Error"]["Code"])
    assert codes == ["", "", "SlowDown", "SlowDown", "", ""]
    assert list(server.dump(BUCKET)) == ["a1", "a4", "b"]
    assert [request.key for request in server.requests if request.fault] == ["a2", "a3"]
    server.faults([FaultRule(op="put", action="status")])
    server.faults([])
    put(client, "a2")


@pytest.mark.parametrize("action", ["delay", "hang"])
def test_stop_ends_what_hangs(action: Any) -> None:
    """A request that hangs or waits long is cut when the server stops, without an answer."""
    with S3Server() as server:
        server.faults([FaultRule(action=action, delay_s=3600.0)])
        host, _, port = server.endpoint_url.removeprefix("http://").partition(":")
        sock = socket.create_connection((host, int(port)), timeout=30)
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        server.wait_for(lambda requests: len(requests) == 1)
        assert server.requests[0].status == 0
    with sock, contextlib.suppress(ConnectionResetError):
        assert sock.recv(65536) == b""
    with pytest.raises(TimeoutError, match="did not see"):
        server.wait_for(lambda requests: len(requests) == 2, timeout_s=0.0)


def test_bad_rules_are_refused() -> None:
    """A rule that can mean nothing is refused."""
    action: Any = "explode"
    with pytest.raises(InvalidInputError, match="no fault rule"):
        FaultRule(action=action)


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_crash_points(server: S3Server, when: Any) -> None:
    """From request n on nothing is done; n itself is done only if the crash comes after it."""
    script = [("PUT", "a"), ("PUT", "b"), ("DELETE", "a"), ("PUT", "c")]
    states: list[set[str]] = [set(), {"a"}, {"a", "b"}, {"b"}, {"b", "c"}]
    for n in range(1, len(script) + 1):
        for key in "abc":
            ask(server.endpoint_url, "DELETE", f"/{BUCKET}/{key}")
        server.reset_counters()
        server.faults(crash_rules(n, when))
        answered = 0
        for method, key in script:
            body = b"x" * 200_001 if method == "PUT" else b""
            with contextlib.suppress(ConnectionError):
                ask(server.endpoint_url, method, f"/{BUCKET}/{key}", body)
                answered += 1
        assert answered == n - 1
        assert set(server.dump(BUCKET)) == states[n if when == "after" else n - 1]
        records = server.requests
        assert [record.fault == "" for record in records] == [True] * (n - 1) + [False] * (5 - n)
        if when == "torn":
            assert records[n - 1].bytes_in == (100_000 if script[n - 1][0] == "PUT" else 0)
        server.faults([])
        assert ask(server.endpoint_url, "PUT", f"/{BUCKET}/c", b"y")[0] == 200


def test_stop_leaves_no_thread_and_no_port() -> None:
    """A stopped server has closed its connections, idle ones too, and its port is free."""
    before = set(threading.enumerate())
    with S3Server(port=free_port()) as server:
        server.create_bucket(BUCKET)
        client = connect(server)
        put(client, "k")
        assert set(threading.enumerate()) - before
        with pytest.raises(InvalidInputError, match="started before"):
            server.__enter__()
    assert set(threading.enumerate()) <= before
    client.close()
    port = int(server.endpoint_url.rpartition(":")[2])
    with S3Server(port=port) as second:
        assert second.endpoint_url == server.endpoint_url


@pytest.mark.parametrize("end", ["stdin", "SIGTERM"])
def test_command_serves_until_told(end: str) -> None:
    """The command prints where it listens, serves, and ends with 0."""
    command = [sys.executable, "-W", "error", "-m", "ckpt_storage.testing.s3_server"]
    with subprocess.Popen(
        [*command, "--port", "0", "--bucket", BUCKET], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        url = ready["endpoint_url"]
        assert ready["storage_options"]["client_kwargs"]["endpoint_url"] == url
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        connection.request("HEAD", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        connection.close()
        if end == "stdin":
            process.stdin.close()
        else:
            os.kill(process.pid, getattr(signal, end))
        assert process.wait(30) == 0
