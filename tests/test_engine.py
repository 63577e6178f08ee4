"""Which data plane serves a location: what means the same to obstore, and what is said of it."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import Engine
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.engine import obstore_client
from ckpt_storage.store.obstore_client import ObstoreClient
from ckpt_storage.store.obstore_gcs import plan_gcs
from ckpt_storage.store.obstore_plan import UntranslatableError
from ckpt_storage.store.obstore_s3 import plan_s3
from ckpt_storage.store.remote import RemoteStore

KEY = "AKIAEXAMPLEKEYID"
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
GIVEN = {"key": KEY, "secret": SECRET}
HTTP = {**GIVEN, "endpoint_url": "http://127.0.0.1:9"}
ACCOUNT = {"account_name": "someone", "account_key": "c2VjcmV0LWtleQ=="}
CONNECTION = "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=c2VjcmV0LWtleQ=="


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this machine's own certificates, and AWS itself, out of the tests."""
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    monkeypatch.setattr(
        "ckpt_storage.store.obstore_region.address_of", lambda *_: "http://127.0.0.1:9/"
    )


def engine_of(url: str, options: Mapping[str, Any], engine: Engine = "auto") -> str:
    """Return which data plane serves a location."""
    return RemoteStore(Location.of(url, options), request_timeout_s=5, engine=engine).engine


def reason_of(url: str, options: Mapping[str, Any]) -> str:
    """Return why obstore cannot serve a location."""
    with pytest.raises(InvalidInputError) as caught:
        engine_of(url, options, "obstore")
    return str(caught.value)


def client_of(url: str, options: Mapping[str, Any]) -> ObstoreClient:
    """Return the client that obstore serves a location with."""
    location = Location.of(url, options)
    client = obstore_client(location, engine="obstore", request_timeout_s=5, policy=None)
    assert client is not None
    return client


def config_of(options: Mapping[str, Any], url: str = "s3://bkt/run") -> dict[str, Any]:
    """Return what obstore's own store says it is configured with."""
    found: dict[str, Any] = client_of(url, options).run("read", lambda made: dict(made.config))
    return found


@pytest.mark.parametrize(
    "options",
    [
        HTTP,
        {**HTTP, "token": "session", "use_ssl": False},
        {**GIVEN, "client_kwargs": {"endpoint_url": "http://h:1", "region_name": "eu-west-1"}},
        {**HTTP, "client_kwargs": {"verify": False, "aws_session_token": "session"}},
        # Certificates do not matter without TLS.
        {**HTTP, "client_kwargs": {"verify": "/ca.pem"}},
        {"username": KEY, "password": SECRET, "endpoint_url": "https://minio.example.org"},
        {"anon": True, "endpoint_url": "http://127.0.0.1:9"},
        {**GIVEN, "client_kwargs": {"region_name": "eu-central-1"}},
        {**HTTP, "config_kwargs": {"connect_timeout": 2, "read_timeout": 3.5}},
        {**HTTP, "config_kwargs": {"s3": {"addressing_style": "virtual"}}},
        {**HTTP, "config_kwargs": {"signature_version": "s3v4", "max_pool_connections": 5}},
        {**HTTP, "requester_pays": True},
        {**HTTP, "s3_additional_kwargs": {"ServerSideEncryption": "AES256"}},
        {**HTTP, "default_block_size": 5, "use_listings_cache": False, "version_aware": False},
    ],
    ids=repr,
)
def test_options_of_s3fs_that_mean_the_same_take_obstore(options: Mapping[str, Any]) -> None:
    """Credentials, addresses, timeouts and what every object bears are translated."""
    assert engine_of("s3://bkt/run", options) == "obstore"
    assert engine_of("s3://bkt/run", options, "obstore") == "obstore"
    assert engine_of("s3://bkt/run", options, "fsspec") == "fsspec"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({**HTTP, "version_aware": True}, "storage_options['version_aware']"),
        ({**HTTP, "something_new": 1}, "storage_options['something_new']"),
        (
            {**GIVEN, "endpoint_url": "https://h", "client_kwargs": {"verify": "/ca.pem"}},
            "storage_options['client_kwargs']['verify']",
        ),
        (
            {**HTTP, "client_kwargs": {"api_version": "2006-03-01"}},
            "storage_options['client_kwargs']['api_version']",
        ),
        (
            {**HTTP, "config_kwargs": {"proxies": {"http": "p:1"}}},
            "storage_options['config_kwargs']['proxies']",
        ),
        (
            {**HTTP, "config_kwargs": {"s3": {"use_accelerate_endpoint": True}}},
            "storage_options['config_kwargs']['s3']['use_accelerate_endpoint']",
        ),
        ({**HTTP, "config_kwargs": {"retries": {"mode": "adaptive"}}}, "['retries']"),
        ({**HTTP, "config_kwargs": {"signature_version": "s3"}}, "['signature_version']"),
        ({**HTTP, "s3_additional_kwargs": {"ACL": "private"}}, "['s3_additional_kwargs']['ACL']"),
        (
            {**HTTP, "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}},
            "needs SSEKMSKeyId",
        ),
        ({"key": KEY, "endpoint_url": "http://h"}, "storage_options['key']"),
        (
            {**HTTP, "client_kwargs": {"endpoint_url": "http://other"}},
            "endpoint_url is given twice",
        ),
        ({**GIVEN, "endpoint_url": "http://h/below"}, "more than a host"),
        ({**HTTP, "profile": "nobody"}, "storage_options['profile']"),
        ({**GIVEN, "client_kwargs": {"region_name": "cn-north-1"}}, "The region"),
        ({**GIVEN, "use_ssl": False, "client_kwargs": {"region_name": "eu-west-1"}}, "use_ssl"),
    ],
    ids=repr,
)
def test_options_of_s3fs_that_obstore_cannot_follow_take_fsspec(
    options: Mapping[str, Any], named: str
) -> None:
    """The first such option is named with the next step, and no credential is."""
    if "profile" not in options:
        assert engine_of("s3://bkt/run", options) == "fsspec"
    text = reason_of("s3://bkt/run", options)
    assert named in text
    assert "engine='fsspec'" in text or "engine='auto'" in text
    assert SECRET not in text
    assert KEY not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_SKIP_SIGNATURE", "true"),
        ("AWS_S3_EXPRESS", "true"),
        ("AWS_ENDPOINT", "http://elsewhere"),
        ("AWS_SERVER_SIDE_ENCRYPTION", "AES256"),
        ("AWS_USE_FIPS_ENDPOINT", "true"),
        ("AWS_USE_DUALSTACK_ENDPOINT", "true"),
    ],
)
def test_variables_that_only_one_of_the_two_obeys_take_fsspec(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is set for another program must not change where data goes or how it is signed."""
    monkeypatch.setenv(name, value)
    assert engine_of("s3://bkt/run", HTTP) == "fsspec"
    assert name in reason_of("s3://bkt/run", HTTP)


def test_the_environment_means_to_obstore_what_it_means_to_botocore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Address and region come from the variables that botocore reads, in its order."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://general:1")
    assert config_of({})["endpoint"] == "http://general:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://for-s3:2")
    assert config_of({})["endpoint"] == "http://for-s3:2"
    assert config_of({"endpoint_url": "http://given:3"})["endpoint"] == "http://given:3"
    # Only obstore reads it.
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    assert config_of({})["region"] == "us-east-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    assert config_of({})["region"] == "eu-west-3"


@pytest.mark.parametrize(
    ("endpoint", "signing", "unsigned"),
    [
        ("http://127.0.0.1:9", None, True),
        ("http://localhost:9", None, True),
        ("https://store.example.org", None, True),
        ("http://store.example.org", None, False),
        ("http://store.example.org", False, True),
        ("https://store.example.org", True, False),
    ],
)
def test_bodies_are_signed_where_somebody_could_change_them(
    endpoint: str,
    signing: bool | None,  # noqa: FBT001  # a parameter
    unsigned: bool,  # noqa: FBT001  # a parameter
) -> None:
    """TLS, and the machine itself, protect a body; plain HTTP elsewhere does not."""
    tuned = {} if signing is None else {"s3": {"payload_signing_enabled": signing}}
    options = {**GIVEN, "endpoint_url": endpoint, "config_kwargs": tuned}
    location = Location.of("s3://bkt/run", options)
    plan = plan_s3(location, options, {}, request_timeout_s=5)
    assert plan.config["unsigned_payload"] is unsigned


def test_a_profile_is_looked_up_by_botocore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Region and credentials of a profile count; its settings for s3 are left to s3fs."""
    file = tmp_path / "config"
    file.write_text(
        f"[profile good]\nregion = eu-north-1\naws_access_key_id = {KEY}\n"
        f"aws_secret_access_key = {SECRET}\n"
        "[profile odd]\nregion = eu-north-1\ns3 =\n    addressing_style = path\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    options = {"endpoint_url": "http://127.0.0.1:9", "profile": "good"}
    assert config_of(options)["region"] == "eu-north-1"
    assert "The setting s3" in reason_of("s3://bkt/run", {**options, "profile": "odd"})


@pytest.mark.parametrize(
    "options",
    [
        ACCOUNT,
        {"account_name": "someone", "sas_token": "?sv=2024&sig=abc"},
        {"connection_string": CONNECTION},
        {"account_name": "someone", "anon": True},
        {"account_name": "a", "client_id": "i", "client_secret": "s", "tenant_id": "t"},
        {**ACCOUNT, "account_host": "someone.blob.core.chinacloudapi.cn", "blocksize": 1},
    ],
    ids=",".join,
)
def test_options_of_adlfs_that_mean_the_same_take_obstore(options: Mapping[str, Any]) -> None:
    """Keys, signatures, connection strings and service principals are translated."""
    pytest.importorskip("adlfs")
    assert engine_of("az://container/run", options) == "obstore"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"account_name": "someone"}, "azure.identity"),
        ({**ACCOUNT, "version_aware": True}, "storage_options['version_aware']"),
        ({**ACCOUNT, "location_mode": "secondary"}, "storage_options['location_mode']"),
        ({"connection_string": CONNECTION + ";Odd=1"}, "The connection string has a field"),
    ],
    ids=repr,
)
def test_options_of_adlfs_that_obstore_cannot_follow_are_named(
    options: Mapping[str, Any], named: str
) -> None:
    """What azure.identity would look up, and what obstore has not, is left to adlfs."""
    pytest.importorskip("adlfs")
    text = reason_of("az://container/run", options)
    assert named in text
    assert "c2VjcmV0LWtleQ" not in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"token": "google_default", "project": "mine"}, None),
        ({"token": "anon"}, "storage_options['token']"),
        ({}, "storage_options['token']"),
        ({"token": "cloud"}, "storage_options['token']"),
        ({"token": "google_default", "endpoint_url": "http://127.0.0.1:9"}, "endpoint_url"),
        ({"token": "google_default", "requester_pays": True}, "requester_pays"),
    ],
    ids=repr,
)
def test_options_of_gcsfs_are_translated_or_named(
    options: Mapping[str, Any], named: str | None
) -> None:
    """Emulators speak another API than obstore, and a search of gcsfs's own stays its own."""
    pytest.importorskip("gcsfs")
    location = Location.of("gs://bucket/run", options)
    if named is None:
        plan = plan_gcs(location, options, {}, request_timeout_s=5)
        assert (plan.bucket, plan.prefix) == ("bucket", "run")
        return
    with pytest.raises(UntranslatableError) as caught:
        plan_gcs(location, options, {}, request_timeout_s=5)
    assert named in caught.value.what


def test_the_choice_is_logged_once_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line a location says which plane serves it, and why not the other; no credential."""
    caplog.set_level(logging.INFO, logger="ckpt_storage")
    for _ in range(3):
        engine_of("s3://logged-bucket/run", HTTP)
        engine_of("s3://logged-bucket/other", {**HTTP, "version_aware": True})
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "s3://logged-bucket/run is served by obstore.",
        (
            "s3://logged-bucket/other is served by fsspec, not by obstore: "
            "storage_options['version_aware'] has no counterpart in obstore."
        ),
    ]
    assert SECRET not in caplog.text


def test_the_log_tells_what_google_cloud_storage_leaves_to_gcsfs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Uploads there never go by obstore, and nobody is told that they do."""
    pytest.importorskip("gcsfs")
    caplog.set_level(logging.INFO, logger="ckpt_storage")
    assert engine_of("gs://logged-bucket/run", {"token": "google_default"}) == "obstore"
    assert [record.getMessage() for record in caplog.records] == [
        "gs://logged-bucket/run is served by obstore, its uploads by gcsfs."
    ]


def test_a_missing_obstore_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, auto takes fsspec, and asking for obstore names the extra."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "obstore" else real(name)
    )
    assert engine_of("s3://bkt/run", HTTP) == "fsspec"
    assert "pip install 'ckpt-storage[fast]'" in reason_of("s3://bkt/run", HTTP)


@pytest.mark.parametrize(
    ("version", "engine"),
    [("0.8.2", "fsspec"), ("0.10.1", "fsspec"), ("0.11.0", "obstore"), ("1.0b1", "obstore")],
)
def test_an_obstore_that_is_too_old_says_how_to_renew_it(
    monkeypatch: pytest.MonkeyPatch, version: str, engine: Engine
) -> None:
    """Another package may have brought one that lacks what is needed: auto takes fsspec."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    assert engine_of("s3://bkt/run", HTTP) == engine
    if engine == "fsspec":
        text = reason_of("s3://bkt/run", HTTP)
        assert f"obstore {version.rpartition('.')[0]} is older than 0.11" in text
        assert "pip install -U 'ckpt-storage[fast]'" in text


def test_a_store_opened_by_auto_hides_its_credentials() -> None:
    """Neither store, plan nor client shows a credential in its repr."""
    store = RemoteStore(Location.of("s3://bkt/run", HTTP), request_timeout_s=5, engine="obstore")
    client = client_of("s3://bkt/run", HTTP)
    plan = plan_s3(Location.of("s3://bkt/run", HTTP), HTTP, {}, request_timeout_s=5)
    for shown in (store, client, plan, client.run("read", lambda made: made)):
        assert SECRET not in repr(shown)
        assert KEY not in repr(shown)


_LAZY = """
import json, sys
from ckpt_storage.store import open_store
from ckpt_storage.testing.s3server import S3Server

with S3Server() as server:
    server.create_bucket("bkt")
    store = open_store("s3://bkt/run", storage_options=server.storage_options)
    store.write("saves/a/x", b"data")
    store.create("commits/1", b"data")
    target = memoryview(bytearray(4))
    store.read_into("saves/a/x", 0, target, size_bytes=4)
    upload = store.start_upload("saves/a/y", part_bytes=5 << 20)
    upload.write_part(0, 0, [memoryview(bytes(5 << 20))], last=False)
    upload.write_part(1, 5 << 20, [memoryview(b"tail")], last=True)
    upload.complete((5 << 20) + 4)
    before = sorted({"s3fs", "aiobotocore", "botocore"} & set(sys.modules))
    listed = len(store.list("saves"))
    print(json.dumps([before, listed]))
"""


def test_what_obstore_does_imports_no_s3fs() -> None:
    """Reading and writing start without the other plane, which a listing then loads."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    told = subprocess.run(
        [sys.executable, "-c", _LAZY], check=True, capture_output=True, env=environment, timeout=60
    )
    assert json.loads(told.stdout) == [[], 2]


def test_local_paths_need_no_engine(tmp_path: Path) -> None:
    """The engine is that of remote storages; a path is served by the local store."""
    assert type(open_store(tmp_path, engine="obstore")).__name__ == "RetryStore"
