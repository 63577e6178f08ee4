"""Locations as users spell them, and foreign exceptions as errors: kinds, advice, no secret."""

from __future__ import annotations

import errno
import http.client
import importlib.util
import pickle
import socket
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import azure.core.exceptions as azure_errors
import botocore.exceptions as boto_errors
import google.auth.exceptions as google_errors
import httpx
import pytest
import requests
import torch
from fsspec.exceptions import FSTimeoutError
from fsspec.registry import _registry
from gcsfs.retry import HttpError
from webdav4.client import InsufficientStorage

from ckpt_storage import list_checkpoints, save
from ckpt_storage.errors import (
    CheckpointError,
    InvalidInputError,
    StorageError,
    UnsupportedByStoreError,
)
from ckpt_storage.store import open_store
from ckpt_storage.store.location import Location
from ckpt_storage.store.problems import HttpFailure, explain
from ckpt_storage.store.redaction import scrubber

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


SPELLINGS = {
    "file:///mnt/run": "/mnt/run /mnt/other/../run file://localhost/mnt/run FILE:///mnt/run",
    "file:///mnt/a:b/run": "/mnt/a:b/run",
    "s3://bucket/run": "s3://bucket/run s3a://bucket/run/",
    "s3://bucket//a//b": "s3://bucket//a//b/",
    "gs://bucket/run": "gcs://bucket/run",
    "az://container/run": "abfs://container/run",
    "az://box@me.dfs.core.windows.net/run": "abfss://box@me.dfs.core.windows.net/run",
    "memory://run": "memory://run/",
    "webdav://folder/run": "webdav://folder/run",
}


@pytest.mark.parametrize("url", SPELLINGS)
def test_spellings_of_a_root_become_one(url: str) -> None:
    """Scheme, slashes and dots are brought into one form; keys of objects stay as they are."""
    for given in [url, *SPELLINGS[url].split()]:
        location = Location.of(given)
        assert (location.url, location.protocol) == (url, url.partition(":")[0])


def test_accounts_in_urls_of_azure_share_no_container() -> None:
    """Each account has containers of its own; a copy would read the target's own account."""
    opened = [
        open_store(Location.of(f"abfs://box@{account}.dfs.core.windows.net/run", {"anon": True}))
        for account in ("me", "me", "you")
    ]
    assert opened[0].can_copy_objects_of(opened[1])
    assert not opened[0].can_copy_objects_of(opened[2])


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means the working folder of the moment, whatever it becomes later."""
    monkeypatch.chdir(tmp_path)
    location = Location.of("runs/../run")
    monkeypatch.chdir("/")
    assert location.path == str(tmp_path / "run")
    assert Location.of(Path("~/run")).path == str(Path.home() / "run")


def test_path_through_a_link_and_back_means_what_the_file_system_means(tmp_path: Path) -> None:
    """The folder above a linked folder is the one above its target; plain folders just fold."""
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    (tmp_path / "link" / "inner").mkdir()
    save({"x": torch.arange(3)}, f"{tmp_path}/link/../run")
    assert [info.name for info in list_checkpoints(tmp_path / "far")] == ["run"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "link"]
    for text, path in (("link/inner/../x", "far/deep/x"), ("far/../x", "x"), ("no/../x", "x")):
        assert Location.of(f"{tmp_path}/{text}").path == f"{tmp_path}/{path}"


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("", "Give a folder or a URL"),
        ("/mnt/a\0b", "Give a folder or a URL"),
        (b"/mnt/run", "Give a str"),
        (None, "Give a str"),
        (Path("s3://bucket/run"), "'s3://bucket/run'"),
        (Path("file:///mnt/run"), "'file:///mnt/run'"),
        ("gs:/bucket/run", "'gs://bucket/run'"),
        ("file:/mnt/run", "'file:///mnt/run'"),
        ("file://mnt/run", "'file:///mnt/run'"),
        ("s3://", "s3://BUCKET/PREFIX"),
        ("s3://bucket/a/../b", "without them"),
        ("simplecache::s3://bucket/run", "caches must not stand before it"),
        ("https://host/run", "s3://BUCKET/PREFIX"),
        ("zip://x", "takes writes"),
        ("s4://bucket/run", "Did you mean s3://?"),
        ("zzzqqq://bucket/run", "Install the fsspec backend that provides zzzqqq://"),
        (Path(f"sftp://u:{SECRET}@host/run"), "'sftp://***@host/run'"),
        (f"sftp:/u:{SECRET}@host/run", "'sftp://***@host/run'"),
        (f"file://u:{SECRET}@host/run", "three slashes"),
        (f"zzzqqq://u:{SECRET}@host/run#{SECRET}", "Install the fsspec backend"),
        (f"s3://key:{SECRET}@bucket/run", "storage_options"),
        (f"sftp://u:{SECRET}@host/run", "storage_options"),
        (f"az://container/run?sig={SECRET}", "storage_options"),
        (f"s3://bucket/run?{SECRET}", "storage_options"),
        (f"s3://bucket/run#{SECRET}", "storage_options"),
    ],
)
def test_what_names_no_root_is_refused_with_advice(given: str | Path, advice: str) -> None:
    """The error is one line that ends in what to write instead, and shows no secret."""
    with pytest.raises(InvalidInputError) as caught:
        Location.of(given)
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [part for part in SECRET.split("/") if part in str(caught.value)]


@pytest.mark.parametrize(
    ("url", "module", "command"),
    [
        ("s3://bucket/run", "s3fs", "pip install 'ckpt-storage[s3]'"),
        ("dropbox://folder/run", "dropboxdrivefs", "pip install 'dropboxdrivefs'"),
    ],
)
def test_a_missing_backend_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, command: str
) -> None:
    """Where the package behind a scheme is not installed, the error says what to run."""
    found = importlib.util.find_spec
    monkeypatch.delitem(_registry, "s3", raising=False)  # another test may have loaded it
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else found(name)
    )
    with pytest.raises(InvalidInputError) as caught:
        Location.of(url)
    assert module in str(caught.value)
    assert str(caught.value).endswith(command)


@pytest.mark.parametrize(
    ("base", "checkpoint_id", "joined"),
    [
        ("/mnt/run", "step-1", "file:///mnt/run/step-1"),
        ("/mnt/run", "a//b/", "file:///mnt/run/a/b"),
        ("/mnt/run", "./a", "file:///mnt/run/a"),
        ("/mnt/run", "step:1", "file:///mnt/run/step:1"),
        ("/mnt/run", None, "file:///mnt/run"),
        ("/mnt/run", "/other", "file:///other"),
        ("/mnt/run", "s3://bucket/x", "s3://bucket/x"),
        ("s3://bucket/run/", "step-1/", "s3://bucket/run/step-1"),
        ("s3://bucket/run", "a//b", "s3://bucket/run/a//b"),
        ("s3://bucket/run", "/mnt/x", "file:///mnt/x"),
    ],
)
def test_a_checkpoint_id_is_joined_or_replaces(
    base: str, checkpoint_id: str | Path | None, joined: str
) -> None:
    """A name is joined to the base; an absolute path or a full URL takes its place."""
    assert Location.of(base).join(checkpoint_id).url == joined


@pytest.mark.parametrize("base", ["/mnt/run", "s3://bucket/run"])
def test_a_checkpoint_id_cannot_climb_and_is_checked_like_a_path(base: str) -> None:
    """None leads out of its base by dots; a mangled URL does not become the name of a folder."""
    refused: list[Any] = [Path("s3://bucket/x"), "s3:/bucket/x", 7, "a\0b"]
    for checkpoint_id in ["..", "a/../../x", Path("../x"), *refused]:
        match = None if checkpoint_id in refused else "leads out of"
        with pytest.raises(InvalidInputError, match=match):
            Location.of(base).join(checkpoint_id)


def test_options_stay_with_their_storage_and_show_nowhere() -> None:
    """A URL of another storage drops them; they travel in pickles, and stand in no text."""
    options = {"key": "AKIAEXAMPLE", "secret": SECRET, "client_kwargs": {"a": 1}}
    base = Location.of("s3://bucket/run", options)
    for url, kept in (("a", options), ("s3://other/a", options), ("gs://other/a", {})):
        assert base.join(url).storage_options == kept
    assert Location.of("/mnt/run", options).join("s3://bucket/a").storage_options == options
    copy = pickle.loads(pickle.dumps(base))
    assert (copy, copy.storage_options) == (base, options)
    for location in (base, Location.of("sftp://user:hunter-two@host/run")):
        shown = f"{location!r} {location} {location.url} {location.path}"
        assert not [one for one in (SECRET, "AKIAEXAMPLE", "hunter-two") if one in shown]
    with pytest.raises(InvalidInputError, match="passed twice"):
        open_store(Location.of("memory://x"), storage_options={})
    for scheme in ("az", "s3", "gs"):
        with pytest.raises(InvalidInputError, match="'protocol'"):
            Location.of(f"{scheme}://bucket/run", {"protocol": "http"})


def test_words_and_names_are_not_hidden() -> None:
    """Only values under telling names are credentials."""
    scrub = scrubber(
        {"profile": "training", "cache": "/data/cache/of-run-12", "client_id": SECRET}, "s3://b"
    )
    for text in (
        "The read of s3://training-data/run failed at host:9000/a@b.",
        "/data/cache/of-run-12/job:7/x@best 10:30:00 a@b.c",
        SECRET,
    ):
        assert scrub(text) == text


def test_options_are_hidden_in_every_encoding() -> None:
    """The values of options are hidden as they are, quoted, and inside connection strings."""
    options = {
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": "http://user:p4ssw0rd@host:9000"},
        "connection_string": "AccountName=me;AccountKey=c2VjcmV0LWtleQ==;",
        "auth": ("somebody", "hunter-two"),
        "token": {"private_key": "-----BEGIN-----\nMIIEvQIBADANBgkqhkiG9w0\n-----END-----"},
    }
    scrub = scrubber(options)
    shown = scrub(
        f"{SECRET} wJalrXUtnFEMI%2FK7MDENG%2BbPxRfiCYEXAMPLEKEY p4ssw0rd c2VjcmV0LWtleQ== "
        "hunter-two MIIEvQIBADANBgkqhkiG9w0"
    )
    assert set(shown.split()) == {"***"}
    assert scrub("http://host:9000 answers") == "http://host:9000 answers"
    assert SECRET not in repr(scrub)


@pytest.mark.parametrize(
    ("url", "options", "match"),
    [
        (
            "s3://bucket/run",
            {"endpoint_ulr": SECRET},
            "'endpoint_ulr'.*Did you mean 'endpoint_url'",
        ),
        ("gs://b/run", {"tokens": SECRET}, "'tokens'.*Did you mean 'token'"),
        ("s3://b/run", {"config_kwargs": {"bad_option": SECRET}}, "bad_option.*storage_options"),
    ],
)
def test_an_option_that_cannot_be_is_refused(url: str, options: dict[str, Any], match: str) -> None:
    """Classes of fsspec swallow what they do not know; this package names the nearest, no value."""
    with pytest.raises(CheckpointError, match=match) as caught:
        open_store(url, storage_options=options).get("x")
    assert SECRET not in str(caught.value)


def mapped(error: BaseException, path: str = "s3://bkt/run/x") -> StorageError:
    """Return what the border makes of an exception, as if it had been raised."""
    scrub = scrubber({"secret": SECRET})
    return explain(error, "read", path, endpoint="host.example:9000", timeout_s=30, scrub=scrub)


def s3_error(code: str, status: int | None = 400, message: str = "said so") -> Exception:
    answer: dict[str, Any] = {"Error": {"Code": code, "Message": message}}
    if status is not None:
        answer["ResponseMetadata"] = {"HTTPStatusCode": status}
    error: Exception = boto_errors.ClientError(answer, "GetObject")
    return error


def azure_error(status: int, code: str) -> Exception:
    kind = {404: azure_errors.ResourceNotFoundError, 409: azure_errors.ResourceExistsError}
    error = kind.get(status, azure_errors.HttpResponseError)(message="said so")
    error.status_code = status
    error.error_code = SimpleNamespace(value=code)  # type: ignore[attr-defined]  # storage adds it
    return error


def caused(outer: Exception, cause: BaseException) -> Exception:
    outer.__cause__ = cause
    return outer


# google-auth types its exceptions only half.
GOOGLE: Any = google_errors

KINDS: dict[tuple[str, bool], list[BaseException]] = {
    ("not-found", False): [
        *(s3_error("NoSuchKey", 404), s3_error("404", None), azure_error(404, "BlobNotFound")),
        HttpFailure(status=404, code="notFound"),
    ],
    ("exists", False): [azure_error(409, "BlobAlreadyExists"), FileExistsError("x")],
    ("precondition", False): [
        *(s3_error("PreconditionFailed", 412), azure_error(412, "ConditionNotMet")),
        HttpFailure(status=412, code="conditionNotMet"),
    ],
    ("range", False): [s3_error("InvalidRange", 416)],
    ("unsupported", False): [s3_error("NotImplemented", 501), OSError(errno.ENOTSUP, "x")],
    ("permission", False): [
        *(s3_error("403", 403), PermissionError("x"), OSError(errno.EROFS, "x"))
    ],
    ("credentials", False): [
        *(boto_errors.NoCredentialsError(), azure_error(403, "AuthenticationFailed"))
    ],
    ("credentials", True): [
        *(s3_error("ExpiredToken", 400), GOOGLE.RefreshError("expired")),
        HttpError({"code": 401, "message": "Invalid Credentials"}),
    ],
    ("no-space", False): [
        *(OSError(errno.ENOSPC, "x"), OSError(errno.EDQUOT, "x"), InsufficientStorage("x")),
        s3_error("XMinioStorageFull", 507),
    ],
    ("throttled", True): [
        *(s3_error("Unheard", 503), s3_error("ConditionalRequestConflict", 409)),
        HttpFailure(status=403, code="rateLimitExceeded"),
        caused(OSError("x"), s3_error("SlowDown", 503)),
    ],
    ("timeout", True): [
        boto_errors.ReadTimeoutError(endpoint_url="http://x"),
        *(azure_errors.ServiceResponseTimeoutError("slow"), aiohttp.ServerTimeoutError("slow")),
        *(httpx.ReadTimeout("slow"), FSTimeoutError()),
    ],
    ("connection", True): [
        boto_errors.EndpointConnectionError(endpoint_url="http://x"),
        *(azure_errors.IncompleteReadError("short"), aiohttp.ClientPayloadError("cut")),
        *(requests.exceptions.ConnectionError("no route"), http.client.IncompleteRead(b"")),
        *(ConnectionResetError("x"), socket.gaierror(-2, "Name or service not known")),
    ],
    ("connection", False): [ssl.SSLCertVerificationError("self-signed")],
    ("other", True): [
        *(s3_error("Unheard", 599), s3_error("InternalError", 200), OSError("no number")),
        *(OSError(errno.ESTALE, "x"), OSError(errno.EIO, "x")),
    ],
    ("refused", False): [s3_error("Unheard", 400), s3_error("InvalidRequest", 400)],
    ("other", False): [
        s3_error("NoSuchBucket", 404),
        *(azure_error(404, "ContainerNotFound"), OSError(12345, "x")),
        *(TypeError("unexpected keyword"), s3_error("PermanentRedirect", 301)),
    ],
}
CASES = [(error, *of) for of, errors in KINDS.items() for error in errors]


@pytest.mark.parametrize(("error", "kind", "retryable"), CASES)
def test_an_exception_has_its_kind(error: BaseException, kind: str, retryable: bool) -> None:  # noqa: FBT001  # a parameter
    """Code, status and type decide; the error names object and next step on one line."""
    failure = mapped(error)
    assert (failure.kind, failure.retryable) == (kind, retryable)
    assert failure.path == "s3://bkt/run/x"
    assert "s3://bkt/run/x" in str(failure)
    if isinstance(error, OSError):
        assert errno.errorcode.get(error.errno or 0, "") in str(failure)
    assert failure.next_step
    assert str(failure).endswith(failure.next_step)
    assert "\n" not in str(failure)
    assert isinstance(failure, UnsupportedByStoreError) == (kind == "unsupported")
    copy = pickle.loads(pickle.dumps(failure))
    assert (copy.kind, str(copy)) == (kind, str(failure))


SPELT = [
    f"https://host/x?X-Amz-Signature={SECRET}&y=1",
    f"sftp://user:{SECRET.replace('/', '')}@host/path",
    f"s3://key:{SECRET}@bucket/run",
    f"s3://bucket/run?{SECRET}",
    f"s3://bucket/run#{SECRET}",
]
"""URLs with a signature or a password that nobody told."""

TOLD: list[Exception] = [
    *(ValueError(f"secret {SECRET} refused"), StorageError(f"secret {SECRET} refused")),
    s3_error("AccessDenied", 403, f"X-Amz-Signature={SECRET}"),
    OSError(f"GET https://host/x?sig={SECRET.replace('/', '%2F')}&y=1"),
    RuntimeError("http://user:hunter2@host/x failed"),
    RuntimeError(f"{SECRET}\n" * 1000),
]


@pytest.mark.parametrize("error", [*map(RuntimeError, SPELT), *TOLD])
def test_no_credential_of_a_foreign_message_stays(error: Exception) -> None:
    """Values of options, and signatures and passwords in URLs, are hidden."""
    options = {"secret": SECRET} if error in TOLD else {}
    failure = explain(error, "read", "s3://bkt/run/x", scrub=scrubber(options))
    shown = f"{failure} {failure!r} {failure.__dict__} {pickle.dumps(failure)!r}"
    hidden = [SECRET[:8], *SECRET.split("/"), "%2FK7MDENG", "hunter2"]
    assert [one for one in hidden if one in shown] == []
    assert "***" in shown
    assert failure.__context__ is None
    assert failure.__cause__ is None


def test_of_a_page_no_more_is_scrubbed_than_is_shown() -> None:
    """Looking for credentials takes time that grows with the square of a text."""
    lengths: list[int] = []

    def scrub(text: str) -> str:
        lengths.append(len(text))
        return text

    explain(RuntimeError("x" * 1_000_000), "read", "s3://bkt/run/x", scrub=scrub)
    assert max(lengths) <= 20_000


def test_the_place_and_the_endpoint_are_told_where_they_matter() -> None:
    """Of a program's mistake the file and line, of the way to a server its address; no secret."""
    with pytest.raises(ZeroDivisionError) as caught:
        divmod(1, 0)
    assert "ZeroDivisionError in test_location.py:" in str(mapped(caught.value))
    advice = {"AccessDenied": "right to read, write", "PermanentRedirect": "region_name"}
    for code, advised in {**advice, "XMinioStorageFull": "quota"}.items():
        assert advised in (mapped(s3_error(code)).next_step or "")
        assert code in str(mapped(s3_error(code)))
    for error, shown in ((TimeoutError(), True), (s3_error("NoSuchKey", 404), False)):
        assert ("host.example:9000" in str(mapped(error))) == shown
    failure = mapped(FileNotFoundError("x"), f"s3://bkt/{SECRET}/x")
    assert SECRET not in f"{failure} {failure.path}"
    assert (failure.path or "").startswith("s3://bkt/")
