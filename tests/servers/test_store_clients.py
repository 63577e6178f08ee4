"""The file systems under remote stores: which class, when they are built, how long they stay."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from fsspec.asyn import AsyncFileSystem, get_loop, sync
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from limits import HANG_S
from local_stores import until
from remote_tools import ONCE, options_of, send
from s3_server import S3Server
from s3fs import S3FileSystem

import ckpt_storage
from ckpt_storage.errors import StorageError
from ckpt_storage.options import Timeouts
from ckpt_storage.store import Location, Settings, open_store
from ckpt_storage.store.backends.azure import AzureBackend


def test_a_class_that_was_registered_for_a_scheme_is_used(registered: dict[str, type]) -> None:
    """A file system of the user's own, derived from s3fs's, serves s3:// with its requests."""
    built: list[str] = []

    class Own(S3FileSystem):  # type: ignore[misc]  # s3fs has no types
        """What a user's site registers."""

        def __init__(self, *args: Any, **options: Any) -> None:
            built.append("own")
            super().__init__(*args, **options)

    registered["s3"] = Own
    with S3Server() as server:
        server.create_bucket("bkt")
        ckpt_storage.save({"a": 1}, "s3://bkt/run", storage_options=options_of(server))
        assert "run/commits/00000001.json" in server.dump("bkt")
    assert built


def test_file_systems_that_no_store_uses_are_dropped(registered: dict[str, type]) -> None:
    """Of fifty stores with fifty tokens that were closed, few connections stay."""
    alive: list[weakref.ref[Any]] = []
    ended: list[int] = []

    class Counted(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
        """Tells how many of it there are."""

        cachable = False

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            alive.append(weakref.ref(self))
            self.client = SimpleNamespace(close=lambda: ended.append(1))

    registered["counted"] = Counted
    used = open_store("counted://run", storage_options={"token": "used"})
    for number in range(50):
        store = open_store("counted://run", storage_options={"token": number})
        store.put("x", b"data")
        assert used.get("x").data == b"data"
        store.close()
    assert len(alive) == 51
    until(lambda: len(ended) == 51 - 9)
    until(lambda: sum(one() is not None for one in alive) == 9)
    used.close()


class _Watched(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A synchronous file system that notes which threads use an instance at the same time."""

    cachable = False
    async_impl = False
    made: ClassVar[list[_Watched]] = []
    at_once = threading.Barrier(4)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inside: set[int] = set()
        self.most = 0
        self.ended = threading.Event()
        self.client = SimpleNamespace(close=self.ended.set)
        self.made.append(self)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).partition("://")[2] or str(path)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Note this thread for as long as it is inside."""
        self.inside.add(threading.get_ident())
        self.most = max(self.most, len(self.inside))
        try:
            yield
        finally:
            self.inside.discard(threading.get_ident())

    def cat_file(self, path: str, *_: Any, **__: Any) -> bytes:
        with self.used():
            self.at_once.wait(20)
            return Path(path).read_bytes()

    def open(self, *args: Any, **options: Any) -> Any:
        with self.used():
            return _WatchedFile(self, super().open(*args, **options))


class _WatchedFile:
    """A file whose writing takes long enough for others to come in between."""

    def __init__(self, fs: _Watched, inner: Any) -> None:
        self._fs, self._inner = fs, inner

    closed = property(lambda self: self._inner.closed)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            with self._fs.used():
                time.sleep(0.01)
                return getattr(self._inner, name)(*args)

        return slow


@pytest.fixture
def watched(
    registered: dict[str, type], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of a root on a file system that watches its threads; none idle are kept."""
    registered["watched"] = _Watched
    monkeypatch.setattr("ckpt_storage.store.backends.clients._IDLE_COUNT", 0)
    _Watched.made.clear()
    yield f"watched://{tmp_path}"
    _Watched.made.clear()


def test_no_two_threads_use_one_synchronous_file_system(watched: str) -> None:
    """Writers have one each, readers four in all, as servers refuse many; all end with it."""
    store = open_store(watched)
    store.put("x", b"data")
    _Watched.at_once = threading.Barrier(4)

    def write(name: str) -> None:
        upload = store.upload(name)
        upload.complete(send(upload, [b"%04d" % number for number in range(6)]))

    with ThreadPoolExecutor(16) as pool:
        wrote = [pool.submit(write, f"y{number}") for number in range(4)]
        reads = [pool.submit(store.get, "x") for _ in range(12)]
        assert [one.result().data for one in reads] == [b"data"] * 12
        assert [one.result() for one in wrote] == [None] * 4
    assert {fs.most for fs in _Watched.made} == {1}
    assert len(_Watched.made) <= 8
    store.close()
    assert all(fs.ended.wait(10) for fs in _Watched.made)


def test_calls_that_hang_keep_no_later_ones_out(watched: str) -> None:
    """Four reads that were given up hold four instances; the next call gets another."""
    store = open_store(watched, timeouts=Timeouts(request=1.0), retry=ONCE)
    store.put("x", b"data")
    _Watched.at_once = threading.Barrier(5)
    with ThreadPoolExecutor(4) as pool:
        for read in [pool.submit(store.get, "x") for _ in range(4)]:
            with pytest.raises(StorageError, match="did not end within 1 s"):
                read.result()
    store.put("z", b"more")
    assert store.stat("z").size_bytes == 4
    _Watched.at_once.abort()
    store.close()
    assert all(fs.ended.wait(10) for fs in _Watched.made)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads
def test_a_fork_harms_no_file_system_and_no_upload(
    watched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child reads the same storage, and ends no instance and no upload of the parent."""
    monkeypatch.setattr("ckpt_storage.store.backends.clients._IDLE_COUNT", 8)
    _Watched.at_once = threading.Barrier(1)
    used, idle = open_store(watched), open_store(watched, storage_options={"token": "idle"})
    for store in (used, idle):
        store.put("x", b"data")
    idle.close()
    upload = used.upload("y")
    upload.write_part(0, 0, [memoryview(b"data")], last=False)
    child = os.fork()
    if not child:
        try:
            texts = [store.get("x").data for store in (used, open_store(watched), idle)]
            used.close()
            ended = [fs.ended.is_set() for fs in _Watched.made[:2]]
            os._exit(0 if texts == [b"data"] * 3 and ended == [False] * 2 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    upload.complete(4)
    assert [used.get("y").data, idle.get("x").data] == [b"data"] * 2
    assert len(_Watched.made) == 2
    assert not any(fs.ended.is_set() for fs in _Watched.made)
    used.close()
    idle.close()


class _Asynchronous(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """One that holds up its loop where a name asks for it, and closes as adlfs does: at exit."""

    cachable = False
    protocol = ("asynchronous",)
    made: ClassVar[list[_Asynchronous]] = []
    closed: ClassVar[list[int]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.made.append(self)
        weakref.finalize(self, sync, self.loop, self._close, id(self))

    async def _close(self, which: int) -> None:
        self.closed.append(which)

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        if path.endswith("hold"):
            time.sleep(60)  # noqa: ASYNC251  # that is what it is about
        return {"name": path, "type": "file", "size": 1}


def test_the_loop_of_others_holds_up_nothing(registered: dict[str, type]) -> None:
    """A store goes on while fsspec's own loop is held up by another user of it."""
    registered["asynchronous"] = _Asynchronous
    held_up = threading.Event()
    get_loop().call_soon_threadsafe(held_up.wait, 30)
    try:
        store = open_store("asynchronous://run", timeouts=Timeouts(request=5.0), retry=ONCE)
        assert store.stat("x").size_bytes == 1
        store.close()
    finally:
        held_up.set()


def test_stores_of_equal_options_share_an_instance(
    registered: dict[str, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed after the last of them, and built anew after that."""
    registered["asynchronous"] = _Asynchronous
    monkeypatch.setattr("ckpt_storage.store.backends.clients._IDLE_COUNT", 0)
    _Asynchronous.made.clear()
    _Asynchronous.closed.clear()
    stores = [open_store(f"asynchronous://shared/{number}") for number in range(3)]
    assert [store.stat("x").size_bytes for store in stores] == [1, 1, 1]
    (made,) = _Asynchronous.made
    for store in stores[1:]:
        store.close()
    assert stores[0].stat("x").size_bytes == 1
    assert id(made) not in _Asynchronous.closed
    stores[0].close()
    until(lambda: id(made) in _Asynchronous.closed)
    assert stores[0].stat("x").size_bytes == 1
    assert len(_Asynchronous.made) == 2
    stores[0].close()


_BEGIN = """
import os, sys
sys.path.insert(0, sys.argv[1])
import fsspec
from test_store_clients import _Asynchronous
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import open_store
fsspec.register_implementation("asynchronous", _Asynchronous)
store = open_store(
    "asynchronous://run", timeouts=Timeouts(request=1.0), retry=RetryPolicy(attempt_count=1)
)
print(store.stat("x").size_bytes, flush=True)
"""

_HOLD = """
try:
    store.stat("hold")
except Exception as error:
    print(error.kind)
"""

_FORK = """
child = os.fork()
if child:
    print(os.waitpid(child, 0)[1], store.stat("x").size_bytes, flush=True)
else:
    print(store.stat("x").size_bytes, flush=True)
"""

_LOOKUP = """
import time
import fsspec, gcsfs
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import open_store
class Slow(gcsfs.GCSFileSystem):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.credentials.apply = lambda heads: time.sleep(60)
fsspec.register_implementation("gs", Slow, clobber=True)
store = open_store(
    "gs://bucket/run",
    storage_options={"token": "anon", "endpoint_url": "http://127.0.0.1:9"},
    timeouts=Timeouts(request=1.0),
    retry=RetryPolicy(attempt_count=1),
)
try:
    store.get("x")
except Exception as error:
    print(error.kind)
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [(_BEGIN + _HOLD, "1 timeout"), (_BEGIN + _FORK, "1 1 0 1"), (_LOOKUP, "timeout")],
    ids=["held", "fork", "lookup"],
)
def test_nothing_delays_the_end_of_a_process(tmp_path: Path, code: str, told: str) -> None:
    """Libraries wait at exit for a loop that is held up, the parent's, or a look-up that hangs."""
    script = tmp_path / "end.py"
    script.write_text(code)
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(script), str(here)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
        env={**os.environ, "PYTHONPATH": str(here.parent / "support")},
    )
    assert " ".join(done.stdout.split()) == told
    assert done.stderr == ""


def test_a_folder_on_azure_is_deleted_page_by_page() -> None:
    """Names are deleted before the next page is asked for; folders go last, deepest first.

    Other tools end the names of what stands for a folder with a slash.
    """
    log: list[str] = []
    pages = {
        None: [("a", False), ("d", True), ("other/", False)],
        "2": [("b", False), ("d/e", True), ("rclone/", True)],
    }

    class Answer:
        """One page of a listing, and which is the next."""

        def __init__(self, at: str | None) -> None:
            log.append("page")
            self._at, self.continuation_token = at, None if at else "2"

        async def __aiter__(self) -> AsyncIterator[Any]:
            yield self._each()

        async def _each(self) -> AsyncIterator[Any]:
            for name, is_folder in pages[self._at]:
                told = {"metadata": {"hdi_isfolder": "true"} if is_folder else {}}
                known = {"size": 0, "last_modified": datetime.now(UTC)}
                yield SimpleNamespace(name=f"run/f/{name}", get=told.get, **known)

    container = SimpleNamespace(list_blobs=lambda **_: SimpleNamespace(by_page=Answer))
    client = SimpleNamespace(get_container_client=lambda _: container)

    class Paged(AzureBackend):
        """Has two pages, each with a blob and one that stands for a folder."""

        def _run(self, operation: Any, *args: Any, **more: Any) -> Any:
            fs = SimpleNamespace(service_client=client)
            return asyncio.run(operation(fs, *args, **more))

        async def _request(self, fs: Any, method: str, path: str, *_: Any, **_named: Any) -> None:
            assert method == "delete_blob"
            log.append(path)
            del fs

    paged = Paged(Location.of("az://box@acct/run"), Settings())
    paged.delete_folder("f")
    assert log[:4] == ["page", "f/a", "page", "f/b"]
    assert log[4:] == ["f/rclone/", "f/other/", "f/d/e", "f/d", "f"]
    log.clear()
    assert [info.path for info in paged.list("f", recursive=True)] == ["f/a", "f/b"]
