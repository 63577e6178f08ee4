"""Resumable uploads to Google Cloud Storage go on after lost answers and partly kept parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

import pytest
from gcs_server import MULTIPLE, GcsState, Stored, gcs_served
from remote_tools import ONCE, POLICY, send

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.backend import Settings
from ckpt_storage.store.backends.gcs import GcsBackend
from ckpt_storage.store.store import Store

PARTS = [b"a" * (2 * MULTIPLE), b"b" * (2 * MULTIPLE), b"c" * (MULTIPLE + 17)]
WHOLE = b"".join(PARTS)
Served: TypeAlias = tuple[GcsState, dict[str, str]]


@pytest.fixture
def running() -> Iterator[Served]:
    """A server, with the options that reach it."""
    with gcs_served() as (state, address):
        yield state, {"endpoint_url": address, "token": "anon"}


def opened(options: dict[str, str], policy: RetryPolicy = ONCE) -> Store:
    """Return a store, without retries unless told."""
    return open_store("gs://bucket/run", storage_options=options, retry=policy)


FIRST = f"put 0-{2 * MULTIPLE - 1}/*"
SECOND = f"put {2 * MULTIPLE}-"
LAST = f"put {4 * MULTIPLE}-{5 * MULTIPLE + 16}/{5 * MULTIPLE + 17}"


@pytest.mark.parametrize(
    "faults",
    [
        [("begin", "lost")],
        [(FIRST, "lost")],
        [(FIRST, "half")],
        [(FIRST, "half"), (SECOND, "503")],
        [(SECOND, "half"), ("put 786432-", "lost")],
        [(LAST, "half")],
        [(LAST, "lost")],
        [(LAST, "lost"), ("put */", "lost"), ("put */", "503")],
    ],
    ids=str,
)
def test_an_upload_arrives_whole_through_faults(
    running: Served, faults: list[tuple[str, str]]
) -> None:
    """Whatever the session kept, the rest follows, and nothing is sent twice or left out."""
    state, options = running
    state.faults = list(faults)
    upload = opened(options, POLICY).upload("saves/a/x")
    upload.complete(send(upload, PARTS))
    assert state.faults == []
    assert {name: found.data for name, found in state.objects.items()} == {"run/saves/a/x": WHOLE}


def test_the_object_is_invisible_until_complete(running: Served) -> None:
    """Of the last part at least a byte is held back, as the last byte shows the object."""
    state, options = running
    for last in (b"c" * MULTIPLE, b"c", b"c" * (2 * MULTIPLE)):
        upload = opened(options).upload("saves/a/x")
        total_bytes = send(upload, [b"a" * MULTIPLE, last])
        assert state.objects == {}
        upload.complete(total_bytes)
        assert state.objects.pop("run/saves/a/x").data == b"a" * MULTIPLE + last


def test_a_session_that_is_gone_without_its_object_is_an_error(
    running: Served,
) -> None:
    """An upload that the server dropped is no success, whatever others put there."""
    state, options = running
    upload = opened(options).upload("saves/a/x")
    total_bytes = send(upload, [PARTS[0], b"end"])
    state.sessions.clear()
    state.objects["run/saves/a/x"] = Stored(PARTS[0] + b"end", {}, 1, time.time())
    with pytest.raises(StorageError, match="Save again"):
        upload.complete(total_bytes)


def test_an_abort_takes_back_only_what_a_lost_answer_showed(running: Served) -> None:
    """Neither session nor object stays; what another put meanwhile has another generation."""
    state, options = running
    replaced = ("delete", "replaced")
    for parts, last, more in (
        ([b"small"], "insert", []),
        ([PARTS[0], b"end"], "put 524288-524290/", []),
        ([b"small"], "insert", [replaced]),
    ):
        state.faults = [(last, "lost"), ("look", "503"), *more]
        upload = opened(options).upload("saves/a/x")
        with pytest.raises(StorageError):
            upload.complete(send(upload, parts))
        assert len(state.objects) == 1
        upload.abort()
        upload.abort()
        assert (state.faults, state.sessions) == ([], {})
        assert [found.data for found in state.objects.values()] == [b"another's"] * len(more)


def test_a_session_refuses_a_name_that_was_taken_meanwhile(
    running: Served,
) -> None:
    """That nothing is there holds when the session ends, not only when it begins."""
    state, options = running
    backend = GcsBackend(Location.of("gs://bucket/run", options), Settings())
    begin = partial(backend.begin_upload, "x", write_id="mine", if_absent=True, copies=False)
    token = begin()
    backend.put("x", [memoryview(b"another's")])
    with pytest.raises(FileExistsError):
        backend.put_part("x", token, 0, 0, [memoryview(b"end")], last=True)
    with pytest.raises(FileExistsError):
        begin()
    assert state.objects["run/x"].data == b"another's"
