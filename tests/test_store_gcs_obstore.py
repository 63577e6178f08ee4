"""Google Cloud Storage through obstore keeps what every store promises, and survives faults.

The server speaks Google's XML API as obstore does, and the JSON API for what gcsfs does beside it.
Only the address is put into the plan by the tests: a service account's key file, the tokens it
brings and their renewal are what users have.
"""

from __future__ import annotations

import dataclasses
import json
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from gcs_server import BUCKET, GcsState, gcs_served

import ckpt_storage
from ckpt_storage.errors import IntegrityError, StorageError, UnsupportedByStoreError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location, obstore_gcs, open_store
from ckpt_storage.store.base import Store
from ckpt_storage.store.obstore_plan import ObstorePlan
from ckpt_storage.store.remote import RemoteStore
from ckpt_storage.testing.store_suite import StoreSuite

POLICY = RetryPolicy(attempt_count=4, first_delay_s=0.01, max_delay_s=0.05)


@dataclasses.dataclass(frozen=True)
class Served:
    """A server, and the options that reach it with a service account's key file."""

    state: GcsState
    options: Mapping[str, Any]

    def plain(self, url: str = f"gs://{BUCKET}/run", request_timeout_s: float = 20) -> Store:
        """Return a store without retries."""
        location = Location.of(url, self.options)
        return RemoteStore(location, request_timeout_s=request_timeout_s, engine="obstore")

    def retrying(self, url: str = f"gs://{BUCKET}/run") -> Store:
        """Return the store that users get."""
        return open_store(url, storage_options=self.options, engine="obstore", retry=POLICY)

    def xml(self, method: str) -> list[str]:
        """Return the names that were asked for through the XML API by a method."""
        with self.state.lock:
            asked = [what.split(" ", 2) for what in self.state.seen]
        return [words[2] for words in asked if words[:2] == ["xml", method]]


@pytest.fixture(scope="module")
def key_pem() -> str:
    """A private key; making one takes a while."""
    return (
        rsa.generate_private_key(65537, 2048)
        .private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        .decode()
    )


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[GcsState, str]]:
    """One server for all tests."""
    with gcs_served() as found:
        yield found


@pytest.fixture
def served(
    running: tuple[GcsState, str],
    key_pem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Served:
    """The server with an empty bucket, no faults, no token given yet and no memory."""
    state, address = running
    state.objects.clear()
    state.faults.clear()
    state.seen.clear()
    state.tokens = set()
    account = {
        "type": "service_account",
        "project_id": "test",
        "client_email": "somebody@test",
        "private_key_id": "1",
        "private_key": key_pem,
        "token_uri": f"{address}/token",
    }
    key_file = tmp_path / "key.json"
    key_file.write_text(json.dumps(account))
    real: Callable[..., ObstorePlan] = obstore_gcs.plan_gcs

    def with_address(
        location: Location,
        options: Mapping[str, Any],
        environ: Mapping[str, str],
        *,
        request_timeout_s: float,
    ) -> ObstorePlan:
        left = {name: value for name, value in options.items() if name != "endpoint_url"}
        plan = real(location, left, environ, request_timeout_s=request_timeout_s)
        return dataclasses.replace(
            plan,
            config={**plan.config, "base_url": address},
            client_options={**plan.client_options, "allow_http": True},
        )

    monkeypatch.setattr(obstore_gcs, "plan_gcs", with_address)
    return Served(state, {"endpoint_url": address, "token": str(key_file)})


class TestGcsByObstore(StoreSuite):
    """The suite of all stores."""

    @pytest.fixture
    def root(self) -> str:
        """A prefix of its own."""
        return f"gs://{BUCKET}/{uuid.uuid4().hex}/run"

    @pytest.fixture
    def store(self, served: Served, root: str) -> Store:
        """A store on the root."""
        return served.plain(root)

    @pytest.fixture
    def other(self, served: Served, root: str) -> Store:
        """A second store, with a client of its own: another timeout makes another key."""
        return served.plain(root, request_timeout_s=21)


class TestGcsByObstoreBehindRetries(TestGcsByObstore):
    """What users get where obstore is installed."""

    @pytest.fixture
    def store(self, served: Served, root: str) -> Store:
        """A store as `open_store` makes it."""
        return served.retrying(root)


def test_the_tests_reach_the_server_through_obstore(served: Served) -> None:
    """What is written and read goes by the XML API, with a token of the key file's."""
    store = served.plain()
    store.write("saves/a/x", b"data")
    store.create("commits/1", b"one")
    assert store.read("saves/a/x") == b"data"
    assert store.stat("saves/a/x").size_bytes == 4
    assert served.xml("PUT") == ["run/saves/a/x", "run/commits/1"]
    assert served.xml("GET") == served.xml("HEAD") == ["run/saves/a/x"]
    # One for reads and one for writes, which are two clients.
    assert served.state.seen.count("token") == 2


@pytest.mark.parametrize("fault", ["503", "429", "500", "reset", "lost"])
def test_a_write_survives_passing_faults(served: Served, fault: str) -> None:
    """Throttling, server errors, cut connections and lost answers are retried, by us alone."""
    served.state.faults = [("xml PUT", fault)] * 2
    served.retrying().write("saves/a/x", b"data" * 1000)
    assert served.state.objects["run/saves/a/x"].data == b"data" * 1000
    assert len(served.xml("PUT")) == 3


@pytest.mark.parametrize("fault", ["503", "429", "500", "reset", "short", "whole"])
def test_a_ranged_read_survives_passing_faults(served: Served, fault: str) -> None:
    """Bodies that end early are read again; an ignored range is cut out of the whole."""
    store = served.retrying()
    data = random.Random(1).randbytes(2000)
    store.write("saves/a/x", data)
    served.state.faults = [("xml GET", fault)] * 2
    target = bytearray(1000)
    store.read_into("saves/a/x", 500, memoryview(target), size_bytes=2000)
    assert bytes(target) == data[500:1500]
    assert store.read("saves/a/x") == data
    assert served.state.faults == []


def test_a_body_that_always_ends_early_is_an_error(served: Served) -> None:
    """Bytes that never came are not made up: the read fails, and says that it may be tried."""
    store = served.plain()
    store.write("saves/a/x", bytes(2000))
    served.state.faults = [("xml GET", "short")] * 9
    with pytest.raises(StorageError) as caught:
        store.read_into("saves/a/x", 0, memoryview(bytearray(2000)), size_bytes=2000)
    assert (caught.value.kind, caught.value.retryable) == ("connection", True)
    with pytest.raises(StorageError):
        store.read("saves/a/x")


def test_a_wrong_length_is_found_without_another_request(served: Served) -> None:
    """The answer to a ranged read tells the object's length, which is compared."""
    store = served.plain()
    store.write("saves/a/x", bytes(2000))
    served.state.seen.clear()
    with pytest.raises(IntegrityError):
        store.read_into("saves/a/x", 0, memoryview(bytearray(10)), size_bytes=2001)
    assert served.state.seen == ["token", "xml GET run/saves/a/x"]


@pytest.mark.parametrize(
    ("fault", "kind", "retryable"),
    [
        ("400", "other", False),
        ("401", "credentials", True),
        ("403", "permission", False),
        ("404", "not-found", False),
        ("412", "precondition", False),
        ("429", "throttled", True),
        ("500", "other", True),
        ("503", "throttled", True),
        ("reset", "connection", True),
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_what_the_server_says_is_told_in_our_words(
    served: Served,
    method: str,
    fault: str,
    kind: str,
    retryable: bool,  # noqa: FBT001  # a parameter
) -> None:
    """Statuses mean the same as through gcsfs."""
    store = served.plain()
    store.write("saves/a/x", b"data")
    served.state.faults = [(f"xml {method}", fault)]
    with pytest.raises((StorageError, UnsupportedByStoreError)) as caught:
        store.read("saves/a/x") if method == "GET" else store.write("saves/a/x", b"data")
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)
    assert "saves/a/x" in str(caught.value)


def test_a_bucket_that_is_not_there_is_no_absent_object(served: Served) -> None:
    """It would read as "no checkpoint here yet"."""
    with pytest.raises(StorageError) as caught:
        served.plain("gs://nothing-here/run").read("saves/a/x")
    assert caught.value.kind == "other"
    assert "create it first" in str(caught.value)


def test_a_create_is_decided_by_the_server_in_one_request(served: Served) -> None:
    """The condition goes with the only put, whatever the size; nothing is looked at before."""
    store = served.plain()
    store.create("commits/1", bytes(12 << 20))
    with pytest.raises(StorageError) as caught:
        store.create("commits/1", b"two")
    assert caught.value.kind == "exists"
    assert served.state.seen == ["token", "xml PUT run/commits/1", "xml PUT run/commits/1"]
    assert len(served.state.objects["run/commits/1"].data) == 12 << 20


def test_a_lost_create_is_an_error_and_sent_once(served: Served) -> None:
    """The caller reads back who won; a second put would meet our own object."""
    served.state.faults = [("xml PUT", "lost")]
    with pytest.raises(StorageError) as caught:
        served.retrying().create("commits/1", b"ours")
    assert caught.value.kind == "connection"
    assert served.xml("PUT") == ["run/commits/1"]
    assert served.retrying().read("commits/1") == b"ours"


def test_a_throttled_create_is_repeated(served: Served) -> None:
    """A refusal proves that nothing was done."""
    served.state.faults = [("xml PUT", "503"), ("xml PUT", "429")]
    served.retrying().create("commits/1", b"ours")
    assert served.state.objects["run/commits/1"].data == b"ours"


def test_a_compare_and_swap_is_by_generation(served: Served) -> None:
    """Content that came back is another version all the same, as its ETag would not tell."""
    store = served.plain()
    store.replace(".metadata", b"one")
    seen = store.read_version(".metadata")
    assert seen.token == str(served.state.objects["run/.metadata"].generation)
    store.replace(".metadata", b"two")
    store.replace(".metadata", b"one")
    with pytest.raises(StorageError) as caught:
        store.replace(".metadata", b"three", if_match=seen.token)
    assert caught.value.kind == "precondition"
    fresh = store.read_version(".metadata")
    store.replace(".metadata", b"three", if_match=fresh.token)
    assert served.state.objects["run/.metadata"].data == b"three"


def test_a_lost_compare_and_swap_is_not_repeated(served: Served) -> None:
    """A second one would find the generation that the first made."""
    store = served.retrying()
    store.replace(".metadata", b"one")
    seen = store.read_version(".metadata")
    served.state.faults = [("xml PUT", "lost")]
    with pytest.raises(StorageError):
        store.replace(".metadata", b"two", if_match=seen.token)
    assert store.read(".metadata") == b"two"
    assert len(served.xml("PUT")) == 2


def test_a_checkpoint_is_saved_loaded_and_overwritten(served: Served) -> None:
    """Documents and reads go by obstore, shard files by gcsfs, and both see one bucket."""
    url = f"gs://{BUCKET}/whole/a"
    given: dict[str, Any] = {"storage_options": served.options, "retry": POLICY}
    for value in (1.0, 2.0):
        state = {"w": torch.full((300, 300), value)}
        ckpt_storage.save(state, url, overwrite=True, engine="obstore", **given)
    target = {"w": torch.zeros(300, 300)}
    ckpt_storage.load(target, url, engine="obstore", **given)
    assert torch.equal(target["w"], state["w"])
    assert ckpt_storage.verify(url, **given).ok
    found = ckpt_storage.list_checkpoints(f"gs://{BUCKET}/whole", **given)
    assert [info.name for info in found] == ["a"]
    put = {name.removeprefix("whole/a/") for name in served.xml("PUT")}
    assert {"commits/00000001.json", "commits/00000002.json", ".metadata"} <= put
    assert not any(name.endswith(".distcp") for name in put)
    assert any(name.endswith(".distcp") for name in served.xml("GET"))
    # The second `.metadata` replaced what was read, in one request each.
    assert served.xml("PUT").count("whole/a/.metadata") == 2


def test_a_token_that_the_server_takes_no_more_is_renewed(served: Served) -> None:
    """Credentials are looked up anew once, and the request is repeated."""
    store = served.retrying()
    store.write("saves/a/x", b"data")
    served.state.tokens = set()
    assert store.read("saves/a/x") == b"data"
    assert served.state.seen.count("token") == 2


def test_a_token_that_cannot_be_had_is_told_as_that(served: Served) -> None:
    """No answer of the token's server is taken for one of the storage's."""
    served.state.faults = [("token", "403")] * 9
    with pytest.raises(StorageError) as caught:
        served.plain().read("saves/a/x")
    assert caught.value.kind == "credentials"
    assert served.xml("GET") == []
