"""Saves whose ranks send parts before the coordinator has seen what lies at the place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from test_saves_told_early import END_S, asked, loaded, save

from ckpt_storage import commit
from ckpt_storage.errors import CheckpointError, CheckpointExistsError, StorageError
from ckpt_storage.info import CheckpointInfo
from ckpt_storage.store.base import Store
from ckpt_storage.testing.s3server import S3Server

FULL_PARTS = 2
"""Of the three parts of a rank's upload: the last is sent once the place has been seen."""


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server with a bucket."""
    with S3Server() as running:
        running.create_bucket("bkt")
        yield running


def parts_of(server: S3Server) -> list[str]:
    """Return the files of which parts were sent, one entry a part."""
    return [name for op, name in asked(server) if op == "part"]


def look_late(
    monkeypatch: pytest.MonkeyPatch, server: S3Server, fail: Callable[[], None] = lambda: None
) -> list[list[tuple[str, str]]]:
    """Let the coordinator look at the place only when both ranks have sent what they may.

    Return where it will be put down what was asked of the server by then.
    """
    original, seen = commit.look, []

    def look(store: Store, *, overwrite: bool) -> commit.Looked:
        end_s = time.monotonic() + END_S
        while len(parts_of(server)) < 2 * FULL_PARTS and time.monotonic() < end_s:
            time.sleep(0.01)
        # Who does not wait would go on by now.
        threading.Event().wait(0.5)
        seen.append(asked(server))
        fail()
        return original(store, overwrite=overwrite)

    monkeypatch.setattr(commit, "look", look)
    return seen


def test_parts_are_sent_before_the_place_was_seen_and_nothing_is_completed(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts but the last of each rank are there by then, and no object."""
    save(server, 1)
    server.reset_counters()
    seen = look_late(monkeypatch, server)
    assert all(isinstance(one, CheckpointInfo) for one in save(server, 2))
    (before,) = seen
    assert sorted(name for op, name in before if op == "part") == sorted(
        FULL_PARTS * ["__0_0.distcp", "__1_0.distcp"]
    )
    assert {op for op, _ in before} == {"create_upload", "part"}
    assert loaded(server) == [2, 2]


def test_a_save_that_is_refused_then_leaves_nothing(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks raise that the checkpoint exists, what they sent is discarded, nothing is new."""
    save(server, 1)
    before = keys_of(server)
    look_late(monkeypatch, server)
    server.reset_counters()
    ended = save(server, 2, overwrite=False)
    assert [type(error) for error in ended] == [CheckpointExistsError] * 2, ended
    assert parts_of(server)
    assert keys_of(server) == before
    assert server.stats().open_uploads == 0
    monkeypatch.undo()
    assert loaded(server) == [1, 1]
    assert all(isinstance(one, CheckpointInfo) for one in save(server, 3))
    assert loaded(server) == [3, 3]


def test_a_look_that_fails_then_leaves_nothing(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks raise what rank 0 met."""

    def fail() -> None:
        raise StorageError("The storage is not to be looked at.", kind="permission")

    look_late(monkeypatch, server, fail)
    ended = save(server, 1)
    assert all(isinstance(error, CheckpointError) for error in ended), ended
    assert {error.rank for error in ended} == {0}
    assert all("not to be looked at" in str(error) for error in ended)
    assert keys_of(server) == set()
    assert server.stats().open_uploads == 0


def keys_of(server: S3Server) -> set[str]:
    """Return the names of all objects."""
    return set(server.dump("bkt"))
