"""How an upload through obstore ends: well only if somebody says so, else without a trace."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import obstore
import pytest
from remote_tools import PART_BYTES, PARTS, emptied, plain, retrying, send, served_by

from ckpt_storage.errors import StorageError
from ckpt_storage.store.base import Stoppable, Upload
from ckpt_storage.store.obstore_upload import ObstoreUpload
from ckpt_storage.testing.s3server import S3Server

WAIT_S = 20.0


class PanicException(BaseException):
    """What a panic of Rust's is in Python."""


PanicException.__module__ = "pyo3_runtime"


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


def opened(server: S3Server) -> ObstoreUpload:
    """Begin an upload, and return that of the dialect."""
    upload: Any = plain(server).start_upload("saves/a/x", part_bytes=PART_BYTES)
    return cast("ObstoreUpload", upload._inner)  # noqa: SLF001  # below the border


def put_by(monkeypatch: pytest.MonkeyPatch, put: Callable[..., object]) -> None:
    """Let `put` be what obstore does."""
    monkeypatch.setattr(obstore, "put", put)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that another thread brings about."""
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.001)


class Outcome:
    """What a call in a thread of its own came to."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001  # asserted on
            self.error = error

    def end(self) -> BaseException | None:
        """Wait for the end and return the error."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.error


@pytest.mark.parametrize("kind", [PanicException, SystemExit, KeyboardInterrupt])
def test_an_upload_whose_client_died_is_not_complete(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """A panic is no `Exception`; the object does not exist, and nobody is told that it does."""

    def put(*arguments: Any, **_: object) -> None:
        deque(arguments[2], maxlen=0)
        raise kind("index out of bounds")

    put_by(monkeypatch, put)
    upload = plain(server).start_upload("saves/a/x", part_bytes=PART_BYTES)
    total_bytes = send(upload, PARTS)
    for _ in range(2):
        with pytest.raises(StorageError, match="index out of bounds") as caught:
            upload.complete(total_bytes)
        assert not caught.value.retryable
    upload.abort()
    assert server.dump() == {}


def test_an_upload_that_ended_takes_no_part(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither after a panic nor after obstore returned early is a part reported as sent."""

    def panic(*_: object, **__: object) -> None:
        raise PanicException("gone")

    put_by(monkeypatch, panic)
    upload = plain(server).start_upload("saves/a/x", part_bytes=PART_BYTES)
    with pytest.raises(StorageError, match="gone"):
        send(upload, PARTS)
    put_by(monkeypatch, lambda *_, **__: None)
    upload = plain(server).start_upload("saves/a/y", part_bytes=PART_BYTES)
    with pytest.raises(StorageError, match="did not say why"):
        send(upload, PARTS)
    assert server.dump() == {}


def test_an_upload_that_was_not_taken_whole_is_not_complete(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That obstore returned is no success if it never came to the end of the parts."""

    def put(*arguments: Any, **_: object) -> None:
        for _part in range(2):
            next(arguments[2])
        gate.wait(WAIT_S)

    gate = threading.Event()
    put_by(monkeypatch, put)
    upload = opened(server)
    upload.write_part(0, 0, [memoryview(PARTS[0])], last=False)
    upload.write_part(1, PART_BYTES, [memoryview(PARTS[1])], last=False)
    upload.write_part(2, 2 * PART_BYTES, [memoryview(b"tail")], last=True)
    gate.set()
    with pytest.raises(StorageError, match="did not say why"):
        upload.complete(2 * PART_BYTES + 4)
    upload.abort()
    assert server.dump() == {}


def test_an_import_that_fails_in_the_thread_is_told(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the thread before obstore was called ends the upload with an error."""
    upload = plain(server).start_upload("saves/a/x", part_bytes=PART_BYTES)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StorageError):
        send(upload, PARTS)


def test_an_abort_that_overtakes_a_completion_wins(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completion that was given up tells of no success, then or later."""
    gate = threading.Event()

    def put(*arguments: Any, **_: object) -> None:
        for _part in range(len(PARTS)):
            next(arguments[2])
        assert gate.wait(WAIT_S)
        next(arguments[2])

    put_by(monkeypatch, put)
    upload = opened(server)
    total_bytes = send(cast("Upload", upload), PARTS)
    feed: Any = upload._put.feed  # type: ignore[union-attr]  # noqa: SLF001  # its state
    completion = Outcome(lambda: upload.complete(total_bytes))
    wait_until(lambda: bool(feed._is_ended))  # noqa: SLF001  # its state
    abortion = Outcome(upload.abort)
    wait_until(lambda: bool(feed.is_stopped))
    gate.set()
    assert abortion.end() is None
    assert isinstance(completion.end(), StorageError)
    with pytest.raises(StorageError, match="aborted before"):
        upload.complete(total_bytes)
    assert server.dump() == {}


@pytest.mark.parametrize("parts", [[b"small"], PARTS], ids=["one", "several"])
def test_an_object_that_appears_after_the_abort_is_deleted(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, parts: list[bytes]
) -> None:
    """A late answer makes no object visible that its save has given up."""
    gate, began = threading.Event(), threading.Event()
    real = obstore.put

    def put(*arguments: Any, **settings: Any) -> object:
        answer = real(*arguments, **settings) if len(parts) > 1 else None
        began.set()
        assert gate.wait(WAIT_S)
        return answer or real(*arguments, **settings)

    put_by(monkeypatch, put)
    upload = opened(server)
    total_bytes = send(cast("Upload", upload), parts)
    completion = Outcome(lambda: upload.complete(total_bytes))
    assert began.wait(WAIT_S)
    upload.stop()
    if len(parts) == 1:
        upload.abort()
    gate.set()
    error = completion.end()
    assert isinstance(error, StorageError)
    assert "aborted before" in str(error)
    assert server.dump() == {}
    upload.abort()
    assert server.stats().open_uploads == 0


def test_a_completion_that_is_done_is_not_aborted(server: S3Server) -> None:
    """Once the object is complete, neither stopping nor aborting changes anything."""
    upload = opened(server)
    upload.complete(send(cast("Upload", upload), PARTS))
    upload.stop()
    upload.abort()
    upload.complete(2 * PART_BYTES + 4)
    assert server.dump() == {"run/saves/a/x": b"".join(PARTS)}


def test_an_abort_looks_for_parts_that_arrive_meanwhile(server: S3Server) -> None:
    """S3 may keep a part that arrives during an abort, also one that obstore saw succeed."""
    upload = opened(server)
    upload.write_part(0, 0, [memoryview(PARTS[0])], last=False)
    looked: list[str] = []
    real = upload._remains.abort_all  # noqa: SLF001  # listens in

    def abort_all(path: str) -> None:
        looked.append(path)
        real(path)

    upload._remains.abort_all = abort_all  # type: ignore[method-assign]  # noqa: SLF001  # ditto
    upload.abort()
    assert looked == ["saves/a/x"]
    assert server.stats().open_uploads == 0


def test_a_part_that_waits_for_its_turn_is_let_go(server: S3Server) -> None:
    """`stop` reaches the upload below the wrappers; who waited gets an error, no success."""
    upload = retrying(server).start_upload("saves/a/x", part_bytes=PART_BYTES)
    upload.write_part(1, PART_BYTES, [memoryview(PARTS[1])], last=False)
    upload.write_part(2, 2 * PART_BYTES, [memoryview(PARTS[1])], last=False)
    waiting = Outcome(
        lambda: upload.write_part(3, 3 * PART_BYTES, [memoryview(b"tail")], last=True)
    )
    assert isinstance(upload, Stoppable)
    upload.stop()
    assert isinstance(waiting.end(), StorageError)
    upload.abort()
    assert server.stats().open_uploads == 0
    assert server.dump() == {}


def test_a_panic_outside_an_upload_is_an_error_of_the_storage(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads raise nothing but errors of this package; what is not obstore's passes."""

    def failing(kind: type[BaseException]) -> Callable[..., None]:
        def get(*_: object, **__: object) -> None:
            raise kind("gone")

        return get

    monkeypatch.setattr(obstore, "get", failing(PanicException))
    with pytest.raises(StorageError, match="gone"):
        plain(server).read("x")
    monkeypatch.setattr(obstore, "get", failing(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        plain(server).read("x")
