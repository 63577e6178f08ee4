"""What only the Rust client does: parts without a copy, one put an object, no life after fork."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from remote_tools import PART_BYTES, PARTS, emptied, ops, plain, retrying, send, served_by

from ckpt_storage.errors import InvalidInputError, StorageError
from ckpt_storage.store.obstore_feed import Feed, StoppedError
from ckpt_storage.store.retry import RetryStore
from ckpt_storage.testing.s3server import FaultRule, S3Server

WAIT_S = 20.0


@pytest.fixture(scope="module")
def shared() -> Iterator[S3Server]:
    """One server for all tests, so that they share clients."""
    with S3Server() as running:
        running.create_bucket("bkt")
        yield running


@pytest.fixture
def server(shared: S3Server) -> Iterator[S3Server]:
    """The server with an empty bucket, no faults and no memory of requests."""
    with served_by("obstore"):
        emptied(shared)
        yield shared


def brought(feed: Feed, offset: int, *views: bytes | bytearray) -> threading.Thread:
    """Bring bytes in a thread of its own."""
    thread = threading.Thread(
        target=feed.put,
        args=(offset, [memoryview(view) for view in views]),
        kwargs={"timeout_s": WAIT_S},
        daemon=True,
    )
    thread.start()
    return thread


def test_whole_chunks_are_lent_and_come_back() -> None:
    """A part returns only when the last reference to its memory is dropped."""
    feed = Feed(10)
    memory = bytearray(b"0123456789abcdefghij")
    thread = brought(feed, 0, memory)
    taken = [next(feed), next(feed)]
    assert [bytes(piece) for piece in taken] == [b"0123456789", b"abcdefghij"]
    memory[0:1] = b"X"
    assert bytes(taken[0][:1]) == b"X"
    taken.pop(0)
    assert thread.is_alive()
    taken.clear()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_what_fills_no_chunk_is_copied() -> None:
    """The rest of a part stays with obstore until more comes, so it must not be the caller's."""
    feed = Feed(10)
    memory = bytearray(b"0123456")
    brought(feed, 0, memory).join(WAIT_S)
    memory[:] = b"overwri"
    assert next(feed) == b"0123456"


def test_bytes_come_out_in_order_whatever_order_they_came_in() -> None:
    """Parts of several threads, of any length, in any order and number of views, are in place."""
    source = random.Random(7)
    for _ in range(20):
        data = source.randbytes(source.randrange(1, 3000))
        cuts = sorted({0, len(data), *(source.randrange(len(data)) for _ in range(5))})
        spans = list(itertools.pairwise(cuts))
        source.shuffle(spans)
        feed = Feed(source.choice([1, 7, 100, 5000]))
        out = bytearray()
        reader = threading.Thread(target=lambda feed=feed, out=out: drain(feed, out))
        reader.start()
        with ThreadPoolExecutor(len(spans)) as threads:
            jobs = [threads.submit(put_pieces, feed, data, span) for span in spans]
            assert [job.result(WAIT_S) for job in jobs] == [None] * len(jobs)
        feed.end()
        reader.join(WAIT_S)
        assert feed.end_bytes == len(data)
        assert bytes(out) == data


def test_few_parts_that_came_early_are_kept_and_the_others_wait() -> None:
    """What is copied is beside any budget of memory, so it is two chunks and no more."""
    feed = Feed(10)
    for number in (1, 2):
        feed.put(10 * number, [memoryview(bytes([number]) * 10)], timeout_s=WAIT_S)
    with pytest.raises(TimeoutError, match="before byte 30"):
        feed.put(30, [memoryview(bytes([3]) * 10)], timeout_s=0.2)
    # One that is there already may come again.
    feed.put(20, [memoryview(bytes([2]) * 10)], timeout_s=WAIT_S)
    out = bytearray()
    waiting = [brought(feed, 10 * number, bytes([number]) * 10) for number in (5, 4, 3)]
    reader = threading.Thread(target=lambda: drain(feed, out))
    reader.start()
    feed.put(0, [memoryview(bytes(10))], timeout_s=WAIT_S)
    for thread in waiting:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    feed.end()
    reader.join(WAIT_S)
    assert out == b"".join(bytes([number]) * 10 for number in range(6))


def test_who_waits_for_a_turn_is_let_go_by_the_end() -> None:
    """A part whose predecessor never comes does not wait when the upload is given up."""
    feed = Feed(10)
    thread = brought(feed, 10, bytes(30))
    assert thread.is_alive()
    feed.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def put_pieces(feed: Feed, data: bytes, span: tuple[int, int]) -> None:
    """Bring one span in views of three bytes."""
    start, stop = span
    views = [memoryview(data)[at : min(stop, at + 3)] for at in range(start, stop, 3)]
    feed.put(start, views, timeout_s=WAIT_S)


def drain(feed: Feed, out: bytearray) -> None:
    """Take all there is."""
    while True:
        try:
            out += next(feed)
        except StopIteration:
            return


def test_a_part_that_was_brought_is_not_brought_again() -> None:
    """The same part again is ignored; one that overlaps it is a mistake."""
    feed = Feed(10)
    for _ in range(2):
        brought(feed, 0, b"0123").join(WAIT_S)
    with pytest.raises(InvalidInputError, match="sent before"):
        feed.put(2, [memoryview(b"2345")], timeout_s=WAIT_S)
    feed.end()
    assert list(feed) == [b"0123"]


def test_a_stopped_feed_lets_everybody_go() -> None:
    """Who waits for a part returns, and obstore is told to discard what it has."""
    feed = Feed(10)
    thread = brought(feed, 0, b"0123456789")
    feed.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    with pytest.raises(StoppedError):
        next(feed)


def test_a_part_that_does_not_come_back_is_a_timeout() -> None:
    """A caller waits no longer than it may."""
    feed = Feed(10)
    held: list[object] = []
    taker = threading.Thread(target=lambda: held.append(next(feed)))
    taker.start()
    with pytest.raises(TimeoutError):
        feed.put(0, [memoryview(b"0123456789")], timeout_s=0.2)
    taker.join(WAIT_S)


def test_parts_wait_until_they_are_on_the_storage(server: S3Server) -> None:
    """`write_part` returns after the server has answered, so buffers may be used again."""
    server.faults([FaultRule(op="part", action="delay", delay_s=0.5, times=1)])
    upload = plain(server).start_upload("saves/a/x", part_bytes=PART_BYTES)
    buffer = bytearray(PARTS[1])
    upload.write_part(0, 0, [memoryview(buffer)], last=False)
    assert [request.status for request in server.requests if request.op == "part"] == [200]
    buffer[:] = bytes(PART_BYTES)
    upload.write_part(1, PART_BYTES, [memoryview(b"tail")], last=True)
    upload.complete(PART_BYTES + 4)
    assert server.dump() == {"run/saves/a/x": PARTS[1] + b"tail"}


@pytest.mark.parametrize("times", [1, 3])
def test_throttled_parts_are_repeated(server: S3Server, times: int) -> None:
    """SlowDown is waited for inside the upload, as often as the policy says."""
    server.faults([FaultRule(op="part", times=times, action="status", status=503, code="SlowDown")])
    upload = retrying(server).start_upload("saves/a/x", part_bytes=PART_BYTES)
    upload.complete(send(upload, PARTS))
    assert server.dump() == {"run/saves/a/x": b"".join(PARTS)}
    assert ops(server)["part"] == 3 + times


def test_other_throttled_requests_are_heard_of(server: S3Server) -> None:
    """Reads and small puts are repeated by our own layer, which tells whoever paces requests."""
    slow = [
        FaultRule(op=op, times=2, action="status", status=503, code="SlowDown")
        for op in ("put", "get")
    ]
    server.faults(slow)
    heard: list[str] = []
    whole = retrying(server)
    assert isinstance(whole, RetryStore)
    store = whole.with_deadline(time.monotonic() + WAIT_S, throttled=lambda: heard.append("again"))
    store.write("saves/a/x", b"content")
    assert len(heard) == 2
    target = bytearray(7)
    store.read_into("saves/a/x", 0, memoryview(target), size_bytes=7)
    assert (bytes(target), len(heard)) == (b"content", 4)
    upload = store.start_upload("saves/a/y", part_bytes=PART_BYTES)
    server.faults(slow)
    upload.write_part(0, 0, [memoryview(b"small")], last=True)
    upload.complete(5)
    assert len(heard) == 6


def test_a_part_that_fails_for_good_is_the_end_of_its_upload(server: S3Server) -> None:
    """The failure is told once, with its kind, nothing is repeated, and nothing stays."""
    server.faults([FaultRule(op="part", times=0, action="status", status=403, code="AccessDenied")])
    upload = retrying(server).start_upload("saves/a/x", part_bytes=PART_BYTES)
    with pytest.raises(StorageError, match="AccessDenied") as caught:
        upload.complete(send(upload, PARTS))
    assert (caught.value.kind, caught.value.retryable) == ("permission", False)
    upload.abort()
    assert server.dump() == {}
    assert server.stats().open_uploads == 0


def test_a_hanging_part_ends_at_its_deadline(server: S3Server) -> None:
    """Every thread that waits for a part is told, and abort leaves nothing once it answers."""
    server.faults([FaultRule(op="part", times=0, action="hang")])
    upload = plain(server, request_timeout_s=3.0).start_upload("saves/a/x", part_bytes=PART_BYTES)
    start_s = time.monotonic()
    with pytest.raises(StorageError) as caught:
        upload.complete(send(upload, PARTS))
    assert time.monotonic() - start_s < WAIT_S
    assert caught.value.kind == "timeout"
    server.faults([])
    upload.abort()
    assert server.dump() == {}
    assert server.stats().open_uploads == 0


def test_an_abort_that_fails_is_made_up_for(server: S3Server) -> None:
    """If obstore's own abort is refused, open uploads of the name are found and aborted."""
    upload = plain(server).start_upload("saves/a/x", part_bytes=PART_BYTES)
    send(upload, PARTS)
    server.faults([FaultRule(op="abort", times=1, action="status", status=403)])
    upload.abort()
    assert server.stats().open_uploads == 0


def test_an_upload_that_nobody_holds_is_aborted(server: S3Server) -> None:
    """A program that drops an upload leaves neither a thread nor an open upload."""
    upload = plain(server).start_upload("saves/a/x", part_bytes=PART_BYTES)
    upload.write_part(0, 0, [memoryview(PARTS[0])], last=False)
    assert server.stats().open_uploads == 1
    del upload
    server.wait_for(lambda requests: any(request.op == "abort" for request in requests))
    assert server.stats().open_uploads == 0


_KILLED = """
import sys, signal, os
from ckpt_storage.store import Location
from ckpt_storage.store.remote import RemoteStore

options = {"key": "k", "secret": "s", "endpoint_url": sys.argv[1]}
store = RemoteStore(Location.of("s3://bkt/run", options), request_timeout_s=20, engine="obstore")
upload = store.start_upload("saves/dead/x", part_bytes=5 << 20)
upload.write_part(0, 0, [memoryview(bytes(5 << 20))], last=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_leaves_is_found(server: S3Server) -> None:
    """Its open upload is below its folder, and whoever frees the folder aborts it."""
    command = [sys.executable, "-c", _KILLED, server.endpoint_url]
    ended = subprocess.run(command, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert server.stats().open_uploads == 1
    assert plain(server).abort_uploads("saves/other") == 0
    assert plain(server).abort_uploads("saves/dead") == 1
    assert server.stats().open_uploads == 0


_FORKED = """
import logging, os, sys
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.store import open_store

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
options = {"key": "k", "secret": "s", "endpoint_url": sys.argv[1]}
store = open_store("s3://bkt/run", storage_options=options)
store.write("parent", b"before")
child = os.fork()
if child == 0:
    again = open_store("s3://bkt/run/again", storage_options=options)
    again.write("child", store.read("parent"))
    try:
        open_store("s3://bkt/other", storage_options=options, engine="obstore")
    except InvalidInputError as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_child_of_fork_takes_the_other_plane_and_says_so(server: S3Server) -> None:
    """Obstore's threads do not outlive a fork, so a child would wait for ever."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORKED]
    told = subprocess.run(
        [*command, server.endpoint_url], check=True, timeout=60, capture_output=True, text=True
    ).stdout
    assert server.dump() == {"run/parent": b"before", "run/again/child": b"before"}
    assert "s3://bkt/run is served by obstore." in told
    assert (
        "s3://bkt/run/again is served by fsspec, not by obstore: This process came by fork" in told
    )
    assert "Start processes by 'spawn'" in told


def many(views: Sequence[bytes]) -> list[memoryview]:
    """Return views of many pieces."""
    return [memoryview(view) for view in views]


def test_a_part_of_many_pieces_arrives_whole(server: S3Server) -> None:
    """Thousands of small views are one part of one request."""
    pieces = [bytes([i % 251]) * 4096 for i in range(PART_BYTES // 4096)]
    upload = plain(server).start_upload("saves/a/x", part_bytes=PART_BYTES)
    upload.write_part(0, 0, many(pieces), last=False)
    upload.write_part(1, PART_BYTES, many([b"a", b"", b"bc"]), last=True)
    upload.complete(PART_BYTES + 3)
    assert server.dump() == {"run/saves/a/x": b"".join(pieces) + b"abc"}
    assert ops(server)["part"] == 2
