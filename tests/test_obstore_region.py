"""Where a bucket of AWS lies: AWS's own word, asked once, and what happens without it."""

from __future__ import annotations

import http.server
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import Engine
from ckpt_storage.store import Location
from ckpt_storage.store.engine import obstore_client
from ckpt_storage.store.obstore_region import RegionUnknownError, address_of, region_of
from ckpt_storage.store.remote import RemoteStore

GIVEN = {"key": "AKIAEXAMPLEKEYID", "secret": "wJalrXUtnFEMI"}
WAIT_S = 20.0


@dataclass(slots=True)
class FakeAws:
    """What a server answers, and what it was asked."""

    url: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def tells(self, region: str, status: int = 200) -> None:
        """Answer with a region from now on."""
        self.status = status
        self.headers["x-amz-bucket-region"] = region


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    aws: FakeAws


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_HEAD(self) -> None:  # http.server's name
        """Answer as told."""
        self._answer()

    def do_GET(self) -> None:  # http.server's name
        """Answer as told; nobody should ask."""
        self._answer()

    def _answer(self) -> None:
        aws = self.server.aws
        aws.asked.append((self.command, self.path, dict(self.headers)))
        if aws.hangs:
            aws.released.wait(WAIT_S)
        self.send_response(aws.status)
        for name, value in aws.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's
        """Say nothing."""


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAws]:
    """A server in AWS's place, on a port of its own, so that nothing it told is known yet."""
    for name in ("AWS_DEFAULT_REGION", "HTTP_PROXY", "REQUESTS_CA_BUNDLE", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    told = FakeAws()
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.aws = told
        told.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(
            "ckpt_storage.store.obstore_region.address_of",
            lambda bucket, region: f"{told.url}/{bucket}?{region or ''}",
        )
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield told
        told.released.set()
        server.shutdown()
        thread.join(WAIT_S)


def engine_of(options: Mapping[str, Any], engine: Engine = "auto", timeout_s: float = 5) -> str:
    """Return which data plane serves a location."""
    location = Location.of("s3://bkt/run", options)
    return RemoteStore(location, request_timeout_s=timeout_s, engine=engine).engine


def region_in_use(options: Mapping[str, Any]) -> str:
    """Return the region that obstore's own store is configured with."""
    location = Location.of("s3://bkt/run", options)
    client = obstore_client(location, engine="obstore", request_timeout_s=5, policy=None)
    assert client is not None
    found: str = client.run("read", lambda made: made.config["region"])
    return found


def in_region(name: str) -> dict[str, Any]:
    """Return options that name a region."""
    return {**GIVEN, "client_kwargs": {"region_name": name}}


@pytest.mark.parametrize("status", [200, 301, 307, 400, 403])
@pytest.mark.parametrize("elsewhere", [None, "/another/place"])
def test_a_region_is_in_every_answer(aws: FakeAws, status: int, elsewhere: str | None) -> None:
    """Refusals and redirections tell it as well; no redirection is followed."""
    aws.tells("ap-southeast-2", status)
    if elsewhere is not None:
        aws.headers["Location"] = elsewhere
    assert region_in_use(GIVEN) == "ap-southeast-2"
    assert [(method, path) for method, path, _ in aws.asked] == [("HEAD", "/bkt?")]


def test_it_is_asked_without_credentials(aws: FakeAws) -> None:
    """The request bears no signature and no key."""
    aws.tells("eu-west-1")
    assert engine_of(GIVEN) == "obstore"
    ((_, _, headers),) = aws.asked
    assert "Authorization" not in headers
    assert GIVEN["key"] not in str(headers)


def test_it_is_asked_once_for_each_bucket(aws: FakeAws) -> None:
    """Stores that are opened at once, and later ones, share one request."""
    aws.tells("eu-west-1")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: engine_of(GIVEN), range(8)))
    assert found == ["obstore"] * 8
    assert region_of("bkt", likely=None, timeout_s=5) == "eu-west-1"
    assert len(aws.asked) == 1
    assert region_of("other", likely=None, timeout_s=5) == "eu-west-1"
    assert len(aws.asked) == 2


def from_options(_: pytest.MonkeyPatch, __: Path) -> dict[str, Any]:
    """Name a region by options."""
    return in_region("us-west-2")


def from_environment(monkeypatch: pytest.MonkeyPatch, _: Path) -> dict[str, Any]:
    """Name a region by the environment."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    return GIVEN


def from_profile(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """Name a region by a profile."""
    (folder / "config").write_text("[profile mine]\nregion = us-west-2\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    return {**GIVEN, "profile": "mine"}


Source = Callable[[pytest.MonkeyPatch, Path], dict[str, Any]]


@pytest.mark.parametrize("source", [from_options, from_environment, from_profile])
def test_a_wrong_region_is_corrected(
    aws: FakeAws,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    source: Source,
) -> None:
    """As with s3fs, a configured region says only whom to ask; the log tells of the other."""
    caplog.set_level(logging.INFO, logger="ckpt_storage")
    aws.tells("eu-central-1", 301)
    assert region_in_use(source(monkeypatch, tmp_path)) == "eu-central-1"
    assert [path for _, path, _ in aws.asked] == ["/bkt?us-west-2"]
    assert "The bucket bkt lies in eu-central-1, not in us-west-2 as configured." in caplog.text


def test_aws_may_be_named_as_the_endpoint(aws: FakeAws) -> None:
    """What is signed for another region would be refused there, too."""
    aws.tells("eu-central-1")
    options = {**GIVEN, "endpoint_url": "https://s3.eu-central-1.amazonaws.com"}
    assert region_in_use(options) == "eu-central-1"


@pytest.mark.parametrize(
    ("status", "headers", "why"),
    [
        (404, {}, "answers 404 and names no region"),
        (200, {"x-amz-bucket-region": ""}, "answers 200 and names no region"),
        (301, {"Location": "/elsewhere"}, "answers 301 and names no region"),
    ],
)
def test_without_a_region_s3fs_serves(
    aws: FakeAws,
    caplog: pytest.LogCaptureFixture,
    status: int,
    headers: dict[str, str],
    why: str,
) -> None:
    """The log says why, an explicit obstore is told what to give, and nobody asks again at once."""
    caplog.set_level(logging.INFO, logger="ckpt_storage")
    aws.status, aws.headers = status, headers
    assert engine_of(GIVEN) == "fsspec"
    assert f"{aws.url}/bkt? {why}" in caplog.text
    with pytest.raises(InvalidInputError, match="region_name") as caught:
        engine_of(GIVEN, "obstore")
    assert "Give storage_options['client_kwargs']['region_name']" in str(caught.value)
    assert len(aws.asked) == 1


def test_a_failed_question_is_asked_again_later(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that could not be found is found once it is there."""
    monkeypatch.setattr("ckpt_storage.store.obstore_region._FAILED_FOR_S", 0.0)
    aws.status = 404
    assert engine_of(GIVEN) == "fsspec"
    aws.tells("eu-west-1")
    assert engine_of(GIVEN) == "obstore"


@pytest.mark.parametrize(
    ("address", "why"),
    [("http://127.0.0.1:9/", "refused"), ("http://no such host/", "no answer")],
)
def test_an_address_that_does_not_answer_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    address: str,
    why: str,
) -> None:
    """Without a network nothing is raised, and a region that was given is trusted."""
    caplog.set_level(logging.INFO, logger="ckpt_storage")
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    monkeypatch.setattr("ckpt_storage.store.obstore_region.address_of", lambda *_: address)
    assert engine_of(GIVEN) == "fsspec"
    assert why in caplog.text
    assert region_in_use(in_region("us-west-2")) == "us-west-2"
    # What only the environment says is often a default, and wrong for the bucket.
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert engine_of(GIVEN) == "fsspec"


def test_a_hanging_server_is_waited_for_no_longer_than_a_request(aws: FakeAws) -> None:
    """The store opens, by fsspec, within the time of one request."""
    aws.hangs = True
    start_s = time.monotonic()
    assert engine_of(GIVEN, timeout_s=0.5) == "fsspec"
    assert time.monotonic() - start_s < WAIT_S / 2


@pytest.mark.parametrize("region", ["cn-north-1", "us-iso-east-1", "evil.example/eu-west-1"])
def test_a_region_with_addresses_of_its_own_is_left_to_s3fs(aws: FakeAws, region: str) -> None:
    """No address is made of what obstore does not know."""
    aws.tells(region)
    assert engine_of(GIVEN) == "fsspec"


@pytest.mark.parametrize(
    "options",
    [
        {**GIVEN, "endpoint_url": "http://127.0.0.1:9"},
        {**GIVEN, "version_aware": True},
        {**GIVEN, "client_kwargs": {"verify": "/ca.pem"}},
        in_region("cn-north-1"),
    ],
    ids=repr,
)
def test_nobody_is_asked_where_it_does_not_matter(aws: FakeAws, options: Mapping[str, Any]) -> None:
    """Servers of one's own take any region, and s3fs finds it by itself."""
    aws.tells("eu-west-1")
    engine_of(options)
    engine_of(GIVEN, "fsspec")
    assert aws.asked == []


@pytest.mark.parametrize(
    ("bucket", "region", "address"),
    [
        ("bkt", None, "https://bkt.s3.amazonaws.com/"),
        ("bkt", "us-gov-west-1", "https://bkt.s3.us-gov-west-1.amazonaws.com/"),
        ("with.dots", None, "https://s3.amazonaws.com/with.dots"),
        ("Old_Name", "us-east-1", "https://s3.us-east-1.amazonaws.com/Old_Name"),
        ("a/../b?c", None, "https://s3.amazonaws.com/a%2F..%2Fb%3Fc"),
    ],
)
def test_addresses_are_those_of_aws(bucket: str, region: str | None, address: str) -> None:
    """The bucket is part of the host where a certificate covers it, else of the path."""
    assert address_of(bucket, region) == address


def test_only_what_is_not_known_is_an_error_of_its_own(aws: FakeAws) -> None:
    """Callers get one type, whatever went wrong."""
    aws.status = 500
    with pytest.raises(RegionUnknownError, match="answers 500"):
        region_of("bkt", likely=None, timeout_s=5)
