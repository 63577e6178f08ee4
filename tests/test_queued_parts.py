"""Parts that one thread queues to obstore: when their memory is free, and what ends a put."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from remote_tools import options_of

from ckpt_storage.errors import InvalidInputError, StorageError
from ckpt_storage.store import open_store
from ckpt_storage.store.obstore_feed import MOST_VIEWS, Feed
from ckpt_storage.store.queueing import Queueing
from ckpt_storage.testing.s3server import FaultRule, S3Server

CHUNK = 64
PART_BYTES = 5 << 20


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server with a bucket."""
    with S3Server() as running:
        running.create_bucket("bkt")
        yield running


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds that other threads bring about."""
    end_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def upload_of(server: S3Server) -> tuple[Any, Any]:
    """Return an upload as savers get it, and the one of obstore within."""
    store = open_store("s3://bkt/run", storage_options=options_of(server), engine="obstore")
    upload = store.start_upload("x", part_bytes=PART_BYTES)
    assert isinstance(upload, Queueing)
    whole: Any = upload
    return whole, whole._inner._inner  # noqa: SLF001  # no caller needs it


@pytest.mark.parametrize("view_count", [1, 3, MOST_VIEWS + 1])
def test_memory_is_free_once_all_of_a_part_has_come_back(view_count: int) -> None:
    """Not before the last view, and once; the part that ends the object is lent, not copied."""
    feed, freed = Feed(CHUNK), []
    views = [memoryview(bytes(1)) for _ in range(view_count - 1)] + [memoryview(bytes(7))]
    assert feed.lend(0, views, last=True, freed=lambda: freed.append(1))
    taken = list(feed)
    assert b"".join(taken) == bytes(view_count + 6)
    assert not freed
    assert feed.is_ended
    assert feed.idle_s > 0
    while taken:
        assert not freed
        taken.pop()
        gc.collect()
    assert freed == [1]
    assert feed.idle_s == 0


def test_a_stopped_feed_gives_back_what_nobody_took() -> None:
    """What was queued is free, and no more is taken."""
    feed, freed = Feed(CHUNK), []
    assert feed.lend(0, [memoryview(bytes(CHUNK))], last=False, freed=lambda: freed.append(1))
    feed.stop()
    assert freed == [1]
    later = [memoryview(bytes(CHUNK))]
    assert not feed.lend(CHUNK, later, last=False, freed=lambda: freed.append(2))
    assert freed == [1]


@pytest.mark.parametrize("offset", [0, CHUNK - 1, 2 * CHUNK])
def test_parts_are_queued_in_order(offset: int) -> None:
    """A part sent twice or too early is a mistake, and nothing of it is taken."""
    feed = Feed(CHUNK)
    assert feed.lend(0, [memoryview(bytes(CHUNK))], last=False, freed=lambda: None)
    with pytest.raises(InvalidInputError, match="in order"):
        feed.lend(offset, [memoryview(bytes(CHUNK))], last=False, freed=lambda: None)
    assert feed.end_bytes == CHUNK


def test_a_put_that_sends_nothing_any_more_is_given_up(server: S3Server) -> None:
    """It is an error for who waits, can never complete, and leaves nothing behind."""
    server.faults([FaultRule(op="part", action="delay", delay_s=2.0, times=0)])
    upload, inner = upload_of(server)
    freed = threading.Event()
    view = memoryview(bytes(PART_BYTES))
    assert upload.queue_part(0, 0, [view], last=False, freed=freed.set)
    upload.check()
    eventually(lambda: server.stats().count.get("part", 0) > 0)
    inner._patience_s = 0.0  # noqa: SLF001  # minutes by default
    with pytest.raises(StorageError, match="x"):
        upload.check()
    inner._patience_s = 20.0  # noqa: SLF001  # as above
    with pytest.raises(StorageError):
        upload.complete(PART_BYTES)
    upload.abort()
    assert freed.wait(20)
    assert server.dump() == {}
    assert server.stats().open_uploads == 0


def test_an_answer_to_the_end_that_got_lost_is_looked_for(server: S3Server) -> None:
    """The client completes by itself after the last part; that it failed then is not believed."""
    server.faults([FaultRule(op="complete", action="lost", times=0)])
    upload, _ = upload_of(server)
    freed = threading.Semaphore(0)
    for number in range(2):
        view = memoryview(bytes([number]) * PART_BYTES)
        last = number == 1
        offset = number * PART_BYTES
        assert upload.queue_part(number, offset, [view], last=last, freed=freed.release)
    for _ in range(2):
        assert freed.acquire(timeout=60)
    upload.check()
    upload.complete(2 * PART_BYTES)
    assert server.dump()["run/x"] == bytes(PART_BYTES) + b"\1" * PART_BYTES
