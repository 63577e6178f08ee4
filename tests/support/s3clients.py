"""How the tests of the S3 server talk to it: botocore and raw HTTP."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from ckpt_storage.testing.s3_server import S3Server

BUCKET = "bkt"
MIB = 1024 * 1024


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


@contextmanager
def running(**options: Any) -> Iterator[tuple[S3Server, Any]]:
    """Run a server that has a bucket; yield it with a botocore client."""
    with S3Server(**options) as server:
        server.create_bucket(BUCKET)
        client = connect(server)
        try:
            yield server, client
        finally:
            client.close()


def ask(
    server: S3Server | str,
    method: str,
    target: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Send one request without any SDK; return status, headers in lower case and body."""
    url = server if isinstance(server, str) else server.endpoint_url
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        named = dict(headers or {})
        if "Transfer-Encoding" not in named:
            named["Content-Length"] = str(len(body))
        connection.putrequest(method, target)
        for name, value in named.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, found, answer.read()
    finally:
        connection.close()


def refused(call: Callable[..., Any], **arguments: Any) -> tuple[int, str]:
    """Return HTTP status and S3 code with which a botocore call is refused."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    answer = caught.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def upload(client: Any, key: str, parts: dict[int, bytes]) -> dict[str, Any]:
    """Upload parts in the order given; return the arguments that complete the upload."""
    made = client.create_multipart_upload(Bucket=BUCKET, Key=key)
    name = {"Bucket": BUCKET, "Key": key, "UploadId": made["UploadId"]}
    etags = {
        number: client.upload_part(**name, PartNumber=number, Body=body)["ETag"]
        for number, body in parts.items()
    }
    claims = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
    return {**name, "MultipartUpload": {"Parts": claims}}
