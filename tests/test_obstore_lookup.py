"""Credentials that obstore's plane looks up: in time, told of as what they are, not piled up."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest

from ckpt_storage.errors import InvalidInputError, StorageError
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location, obstore_client, open_store
from ckpt_storage.store.base import Store
from ckpt_storage.store.dialect_obstore import capabilities_of
from ckpt_storage.store.obstore_client import ObstoreClient
from ckpt_storage.store.obstore_plan import Provider
from ckpt_storage.store.obstore_s3 import plan_s3
from ckpt_storage.testing.s3server import S3Server

WAIT_S = 20.0
ONCE = RetryPolicy(attempt_count=1)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """One server for all tests."""
    with S3Server() as running:
        running.create_bucket("bkt")
        yield running


def opened(server: S3Server, request_timeout_s: float = WAIT_S) -> Store:
    """Return a store through obstore whose credentials are those of the environment's files."""
    options = {"client_kwargs": server.storage_options["client_kwargs"]}
    return open_store(
        Location.of("s3://bkt/run", options),
        engine="obstore",
        timeouts=Timeouts(request=request_timeout_s),
        retry=ONCE,
    )


@pytest.fixture
def process_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return what makes a command the `credential_process` of the default profile."""

    def be(command: str) -> None:
        config = tmp_path / "config"
        config.write_text(f"[default]\ncredential_process = {command}\n")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "absent"))

    return be


@dataclasses.dataclass(frozen=True, eq=False)
class Scripted:
    """Makes a provider that does what the test says."""

    look: Provider

    def __call__(self) -> Provider:
        """Return it."""
        return self.look


def client_with(
    server: S3Server, look: Provider, request_timeout_s: float = WAIT_S
) -> ObstoreClient:
    """Return a client of obstore whose credentials are what `look` returns."""
    location = Location.of("s3://bkt/run", server.storage_options)
    plan = plan_s3(
        location, dict(location.storage_options), {}, request_timeout_s=request_timeout_s
    )
    made = dataclasses.replace(plan, make_provider=Scripted(look))
    return ObstoreClient(made, request_timeout_s=request_timeout_s, policy=ONCE)


def credential(server: S3Server, valid_s: float) -> Mapping[str, Any]:
    """Return good credentials that end after `valid_s` seconds."""
    options = server.storage_options
    return {
        "access_key_id": options["key"],
        "secret_access_key": options["secret"],
        "token": None,
        "expires_at": datetime.now(UTC) + timedelta(seconds=valid_s),
    }


def get(client: ObstoreClient, name: str) -> bytes:
    """Return an object below `run`."""
    return bytes(client.run("read", lambda made: obstore.get(made, f"run/{name}").bytes()))


def test_a_lookup_that_hangs_is_given_up_and_named(
    server: S3Server, process_of: Callable[[str], None]
) -> None:
    """I12: a read whose credentials never come ends long before the program that is asked."""
    process_of("/bin/sleep 15")
    start_s = time.monotonic()
    with pytest.raises(StorageError) as caught:
        opened(server, 1.0).read("f")
    # The program's own time is the only yardstick: a lookup without a deadline takes all of it.
    assert time.monotonic() - start_s < 15
    assert caught.value.kind == "timeout"
    assert "lookup of credentials did not end within 0.8 s" in str(caught.value)
    assert "credential_process" in (caught.value.next_step or "")


def test_who_waits_for_a_lookup_that_hangs_waits_no_longer(server: S3Server) -> None:
    """Requests that queue behind a lookup share its failure, instead of one wait after another."""
    never, asked = threading.Event(), []

    def look() -> Mapping[str, Any]:
        asked.append(1)
        never.wait(WAIT_S)
        return credential(server, 3600)

    client = client_with(server, look, 1.0)
    try:
        with ThreadPoolExecutor(6) as threads:
            futures = [threads.submit(get, client, "f") for _ in range(6)]
            errors = [future.exception() for future in futures]
    finally:
        never.set()
    assert len(errors) == 6
    assert {type(error).__name__ for error in errors} == {"LookupFailure"}
    assert len(asked) < 6


@pytest.mark.parametrize("command", ["/absent/program", "/bin/echo no-json"])
def test_a_lookup_that_fails_is_no_answer_about_the_object(
    server: S3Server, process_of: Callable[[str], None], command: str
) -> None:
    """A program that is absent, or says nonsense, is a matter of credentials: nothing is absent."""
    process_of(command)
    with pytest.raises(StorageError) as caught:
        opened(server).read("f")
    assert caught.value.kind == "credentials"
    assert "lookup of credentials failed" in str(caught.value)


def test_an_answer_is_told_although_a_lookup_failed(server: S3Server) -> None:
    """A 404 to a request that was signed stays one, whatever another thread's lookup came to."""
    looked = [credential(server, 3600)]
    client = client_with(server, lambda: looked[0])
    with pytest.raises(Exception, match=r"404|NoSuchKey|not exist"):
        get(client, "absent")

    def fail_then_answer(made: Any) -> object:
        lookup = client._built("read").lookup  # noqa: SLF001  # what a thread of obstore's calls
        assert lookup is not None
        looked.clear()
        lookup._found = None  # noqa: SLF001  # as if they had come to their end
        with pytest.raises(Exception, match="lookup of credentials"):
            lookup()
        return obstore.get(made, "run/absent")

    with pytest.raises(Exception, match=r"404|NoSuchKey|not exist"):
        client.run("read", fail_then_answer)


def test_credentials_are_looked_up_again_before_they_end(server: S3Server) -> None:
    """Those that end within minutes are replaced by the next request; others are kept."""
    asked = []

    def look() -> Mapping[str, Any]:
        asked.append(1)
        return credential(server, 30 if len(asked) == 1 else 3600)

    client = client_with(server, look)
    for _ in range(4):
        with pytest.raises(Exception, match=r"404|NoSuchKey|not exist"):
            get(client, "absent")
    # obstore itself may have asked once for those that were about to end.
    assert 2 <= len(asked) <= 3


def test_clients_of_tokens_that_changed_do_not_pile_up(server: S3Server) -> None:
    """A job that passes fresh credentials for each save keeps a few clients, not all of them."""
    for number in range(30):
        options = {**server.storage_options, "token": f"session-{number}"}
        store = open_store(Location.of("s3://rotated/run", options), engine="obstore", retry=ONCE)
        with pytest.raises(StorageError):
            store.read("absent")
    kept = [key for key in obstore_client._BUILT if "rotated" in repr(key)]  # noqa: SLF001
    assert 0 < len(kept) <= 8
    assert "session-0'" not in repr(obstore_client._BUILT)  # noqa: SLF001


def test_calls_through_obstore_are_watched_from_outside() -> None:
    """I12: one call may be two requests or wait for an upload's end, so none times itself."""
    assert not any(capabilities_of(family).self_timed for family in ("s3", "azure", "gcs"))


@pytest.mark.parametrize("engine", ["auto", "obstore"])
def test_a_key_given_as_a_connection_string_is_not_shown(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What is wrong with a connection string is said without a word of it."""
    pytest.importorskip("adlfs")
    caplog.set_level(logging.INFO)
    key = "aGVsbG9zdXBlcnNlY3JldGtleWFjY291bnQ=="
    told = ""
    try:
        open_store(Location.of("az://cont/x", {"connection_string": key}), engine=engine)
    except InvalidInputError as error:
        told = str(error)
    for piece in (key, key.rstrip("="), key[:12]):
        assert piece.lower() not in (caplog.text + told).lower()
