"""Resumable uploads to Google Cloud Storage go on after lost answers and partly kept parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest
from gcs_server import MULTIPLE, GcsState, Stored, gcs_served

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.backend import Settings
from ckpt_storage.store.backends.gcs import GcsBackend
from ckpt_storage.store.store import Store

PARTS = [b"a" * (2 * MULTIPLE), b"b" * (2 * MULTIPLE), b"c" * (MULTIPLE + 17)]
WHOLE = b"".join(PARTS)
POLICY = RetryPolicy(attempt_count=4, first_delay_s=0.01, max_delay_s=0.05)
ONCE = RetryPolicy(attempt_count=1)


@pytest.fixture
def running() -> Iterator[tuple[GcsState, dict[str, str]]]:
    """A server, with the options that reach it."""
    with gcs_served() as (state, address):
        yield state, {"endpoint_url": address, "token": "anon"}


def opened(options: dict[str, str], policy: RetryPolicy = ONCE) -> Store:
    """Return a store, without retries unless told."""
    return open_store("gs://bucket/run", storage_options=options, retry=policy)


def upload_through(store: Store) -> None:
    """Upload three parts, the last one of odd length."""
    upload = store.upload("saves/a/x")
    offset = 0
    for number, part in enumerate(PARTS):
        upload.write_part(number, offset, [memoryview(part)], last=number == len(PARTS) - 1)
        offset += len(part)
    upload.complete(offset)


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
    running: tuple[GcsState, dict[str, str]], faults: list[tuple[str, str]]
) -> None:
    """Whatever the session kept, the rest follows, and nothing is sent twice or left out."""
    state, options = running
    state.faults = list(faults)
    upload_through(opened(options, POLICY))
    assert state.faults == []
    assert {name: found.data for name, found in state.objects.items()} == {"run/saves/a/x": WHOLE}


def test_the_object_is_invisible_until_complete(running: tuple[GcsState, dict[str, str]]) -> None:
    """Of the last part at least a byte is held back, as the last byte shows the object."""
    state, options = running
    for last in (b"c" * MULTIPLE, b"c", b"c" * (2 * MULTIPLE)):
        upload = opened(options).upload("saves/a/x")
        upload.write_part(0, 0, [memoryview(b"a" * MULTIPLE)], last=False)
        upload.write_part(1, MULTIPLE, [memoryview(last)], last=True)
        assert state.objects == {}
        upload.complete(MULTIPLE + len(last))
        assert state.objects.pop("run/saves/a/x").data == b"a" * MULTIPLE + last


def test_a_session_that_is_gone_without_its_object_is_an_error(
    running: tuple[GcsState, dict[str, str]],
) -> None:
    """An upload that the server dropped is no success, whatever others put there."""
    state, options = running
    upload = opened(options).upload("saves/a/x")
    upload.write_part(0, 0, [memoryview(PARTS[0])], last=False)
    upload.write_part(1, len(PARTS[0]), [memoryview(b"end")], last=True)
    state.sessions.clear()
    state.objects["run/saves/a/x"] = Stored(PARTS[0] + b"end", {}, 1, time.time())
    with pytest.raises(StorageError, match="Save again"):
        upload.complete(len(PARTS[0]) + 3)


def test_an_abort_takes_back_what_a_lost_answer_showed(
    running: tuple[GcsState, dict[str, str]],
) -> None:
    """Neither session nor object stays when nobody could tell whether completing had worked."""
    state, options = running
    for parts, last in (([b"small"], "insert"), ([PARTS[0], b"end"], "put 524288-524290/")):
        state.faults = [(last, "lost"), ("look", "503")]
        upload = opened(options).upload("saves/a/x")
        offset = 0
        for number, part in enumerate(parts):
            upload.write_part(number, offset, [memoryview(part)], last=number == len(parts) - 1)
            offset += len(part)
        with pytest.raises(StorageError):
            upload.complete(offset)
        assert len(state.objects) == 1
        upload.abort()
        upload.abort()
        assert state.objects == {}
        assert state.sessions == {}


def test_an_abort_does_not_delete_what_another_put_meanwhile(
    running: tuple[GcsState, dict[str, str]],
) -> None:
    """The deletion holds for the generation that was looked at, and for no later one."""
    state, options = running
    state.faults = [("insert", "lost"), ("look", "503"), ("delete", "replaced")]
    upload = opened(options).upload("saves/a/x")
    upload.write_part(0, 0, [memoryview(b"small")], last=True)
    with pytest.raises(StorageError):
        upload.complete(5)
    upload.abort()
    assert state.faults == []
    assert {name: found.data for name, found in state.objects.items()} == {
        "run/saves/a/x": b"another's"
    }


def test_a_folder_is_deleted_page_by_page(running: tuple[GcsState, dict[str, str]]) -> None:
    """The names of one page are deleted before the next page is asked for."""
    state, options = running
    names = [f"run/a/{number:04d}" for number in range(1500)]
    state.objects = {name: Stored(b"", {}, 1, 0.0) for name in (*names, "run/ab")}
    opened(options).delete_folder("a")
    assert list(state.objects) == ["run/ab"]
    assert state.seen == ["list", *["delete"] * 1000, "list", *["delete"] * 500]


def test_a_session_refuses_a_name_that_was_taken_meanwhile(
    running: tuple[GcsState, dict[str, str]],
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
