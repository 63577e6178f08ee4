"""A process that gets no more threads reports that, and goes on when it gets some again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from remote_tools import ONCE, options_of
from s3_server import S3Server

from ckpt_storage import StorageError
from ckpt_storage.store import open_store


class Limit:
    """Whether threads of the package can be started now; those of a test's server always can."""

    def __init__(self) -> None:
        self.is_reached = False
        self.start = threading.Thread.start

    def start_or_raise(self, thread: threading.Thread) -> None:
        """Start a thread, or do as CPython where pthread_create says EAGAIN."""
        if self.is_reached and thread.name.startswith("ckpt-storage"):
            raise RuntimeError("can't start new thread")
        self.start(thread)


def _start_of(limit: Limit) -> Callable[[threading.Thread], None]:
    """Return a function, since one becomes a method of the class that it is set on."""

    def start(thread: threading.Thread) -> None:
        limit.start_or_raise(thread)

    return start


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """A limit that is not reached yet."""
    found = Limit()
    monkeypatch.setattr(threading.Thread, "start", _start_of(found))
    return found


def test_a_local_store_goes_on(tmp_path: Path, limit: Limit) -> None:
    """The error names the thread and the limit; the next call works."""
    store = open_store(tmp_path, retry=ONCE)
    limit.is_reached = True
    with pytest.raises(StorageError, match="could not start the thread") as raised:
        store.put("a", b"1")
    assert raised.value.retryable
    limit.is_reached = False
    store.put("a", b"1")
    assert store.get("a").data == b"1"


def test_an_object_store_goes_on(limit: Limit) -> None:
    """The event loop of all object stores is made anew at the next call."""
    with S3Server() as server:
        server.create_bucket("bkt")
        options = {**options_of(server), "config_kwargs": {"user_agent_extra": "no-thread"}}
        store = open_store("s3://bkt/run", storage_options=options, retry=ONCE)
        with pytest.MonkeyPatch.context() as patch:
            from ckpt_storage.store.backends import client_registry  # noqa: PLC0415  # as it is now

            patch.setattr(client_registry.REGISTRY, "_loop", None)  # as in a new process
            store.close()
            # The worker of the pool can be started, the loop's thread cannot.
            original = limit.start

            def start(thread: threading.Thread) -> None:
                if thread.name == "ckpt-storage loop":
                    raise RuntimeError("can't start new thread")
                original(thread)

            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(StorageError, match="could not start the thread"):
                store.put("a", b"1")
            patch.setattr(threading.Thread, "start", original)
            store.put("a", b"1")
            assert store.get("a").data == b"1"
