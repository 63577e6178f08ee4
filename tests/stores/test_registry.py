"""Which backend serves a URL, and that nothing is asked of a storage before its first call."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from limits import HANG_S, SLACK_S
from test_store_retry import REPEATED

import ckpt_storage
from ckpt_storage.errors import InvalidInputError, StorageError
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import (
    Backend,
    Location,
    ObjectInfo,
    Settings,
    location,
    open_store,
    register_backend,
    registry,
)
from ckpt_storage.store.backends.memory import MemoryBackend
from ckpt_storage.store.calls import CLEAN_UP_S
from ckpt_storage.store.store import Store


@pytest.fixture
def scheme(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(location, "REGISTERED", known := dict(location.REGISTERED))
    monkeypatch.setattr(registry, "REGISTERED", known)
    return f"x{uuid.uuid4().hex}"


def in_memory(location: Location, settings: Settings) -> Backend:
    return MemoryBackend(
        dataclasses.replace(location, protocol="memory", target=f"memory://{location.path}"),
        settings,
    )


def test_a_registered_backend_is_made_by_the_first_call(scheme: str) -> None:
    """Opening a store calls nothing; the opener is told location, options and settings."""
    told: list[tuple[Location, Settings]] = []

    def opener(location: Location, settings: Settings) -> Backend:
        told.append((location, settings))
        return in_memory(location, settings)

    register_backend(scheme.upper(), opener)
    store = open_store(f"{scheme}://a/b", storage_options={"x": 1}, timeouts=Timeouts(request=7.0))
    assert told == []
    store.put("x", b"data")
    assert store.get("x").data == b"data"
    ((location, settings),) = told
    assert location.url == store.url == f"{scheme}://a/b"
    assert location.storage_options == {"x": 1}
    assert settings.request_timeout_s == 7.0


@pytest.mark.parametrize("hangs", [True, False])
def test_closing_ends_and_is_logged_whatever_the_backend_does(
    *, hangs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A close that hangs or raises is left behind in the clean-up time, and the threads end."""
    released = threading.Event()

    class BadClose(MemoryBackend):
        """A backend whose end hangs or fails."""

        def close(self) -> None:
            if hangs:
                released.wait()
            raise RuntimeError("cannot close")

    store = Store(BadClose(Location.of("memory://bad-close")), url="memory://bad-close")
    before = set(threading.enumerate())
    store.delete(["x"])
    (worker,) = set(threading.enumerate()) - before
    closing = threading.Thread(target=store.close, daemon=True)
    with caplog.at_level(logging.WARNING, logger="ckpt_storage"):
        closing.start()
        closing.join(CLEAN_UP_S + SLACK_S)
        assert not closing.is_alive()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "memory://bad-close" in caplog.text
    released.set()
    worker.join(SLACK_S)
    assert not worker.is_alive()


def test_a_scheme_has_one_backend_unless_it_is_replaced(scheme: str) -> None:
    """What would be taken for another storage by accident is refused, as is what is no scheme."""
    register_backend(scheme, in_memory)
    for taken in (scheme, "s3", "s3a", "file", "GS", "memory"):
        with pytest.raises(InvalidInputError, match="replace=True"):
            register_backend(taken, in_memory)
    for wrong in ("", "a b", "s3://", "1"):
        with pytest.raises(InvalidInputError, match="no scheme"):
            register_backend(wrong, in_memory)
    register_backend("s3a", in_memory, replace=True)
    open_store("s3://bucket/x").put("x", b"data")
    with pytest.raises(InvalidInputError, match=f"Did you mean {scheme}"):
        Location.of(f"{scheme}s://a")


_PLUGGED_IN = """
import ckpt_storage, sys
from ckpt_storage.store import open_store
store = open_store("plugged://a/b")
assert "plug" not in sys.modules
store.put("x", b"data")
assert store.get("x").data == b"data" and "plug" in sys.modules
try:
    open_store("torn://a").get("x")
except ckpt_storage.InvalidInputError as error:
    assert "plug:nothing, cannot be loaded" in str(error), error
else:
    raise AssertionError
"""


def test_a_package_brings_a_backend_by_its_metadata(tmp_path: Path) -> None:
    """Every process of an environment finds it; it is loaded when it is used."""
    folder = tmp_path / "plug-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "[ckpt_storage.backends]\nplugged = plug:opened\ntorn = plug:nothing\n"
    )
    (tmp_path / "plug.py").write_text(
        "import dataclasses\n"
        "from ckpt_storage.store.backends.memory import MemoryBackend\n"
        "def opened(location, settings):\n"
        "    target = 'memory://' + location.path\n"
        "    return MemoryBackend(dataclasses.replace(location, target=target), settings)\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}){_PLUGGED_IN}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)


class Hanging(MemoryBackend):
    """Every method that asks the storage hangs; listings do at their second name."""

    def __init__(self, hang: threading.Event) -> None:
        super().__init__(Location.of("memory://hanging"))
        self._hang = hang

    def __getattribute__(self, name: str) -> Any:
        """Return a method that hangs in place of each that asks."""
        if name.startswith("_") or name in {"capabilities", "endpoint", "explain", "close", "list"}:
            return super().__getattribute__(name)
        return lambda *_, **__: self._hang.wait()

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        """Hang between pages."""
        del prefix, recursive
        yield ObjectInfo(path="x", size_bytes=1)
        self._hang.wait()


CALLS: dict[str, Callable[[Store], object]] = {
    **{name: call for name, (_, call) in REPEATED.items()},
    "create": lambda store: store.create("x", b"x"),
    "copy_source": lambda store: store.copy_source("x"),
    "can_copy_from": lambda store: store.can_copy_from(store),
    "delete_version": lambda store: store.delete_version("x", "1"),
}


@pytest.mark.deadline
@pytest.mark.parametrize("name", CALLS)
def test_every_call_of_every_backend_ends_by_its_deadline(name: str) -> None:
    """Listings and deletions are no exception, nor is an opener that looks up credentials, say."""
    hang = threading.Event()
    backend = Hanging(hang)
    ready: Callable[[], Backend] = lambda: hang.wait() and backend  # type: ignore[assignment,return-value]  # noqa: E731
    for opener in (backend, ready):
        store = Store(
            opener, url="x://y", policy=RetryPolicy(attempt_count=1), request_timeout_s=0.2
        )
        begin_s = time.monotonic()
        if opener is backend:
            # Told without asking.
            assert store.capabilities.kind == "memory"
        with pytest.raises(StorageError) as caught:
            CALLS[name](store)
        # Nobody can read back whether it was created.
        told = "unknown" if (name, opener) == ("create", backend) else "timeout"
        assert caught.value.kind == told
        assert "Timeouts(request=" in str(caught.value)
        assert time.monotonic() - begin_s < 0.2 + SLACK_S
    hang.set()


@pytest.mark.deadline
def test_a_disk_that_hangs_is_looked_at_within_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On which disk a folder lies is asked for in a call, too, and its save ends."""
    hang = threading.Event()
    monkeypatch.setattr(Location, "scope", lambda _: hang.wait())
    begin_s = time.monotonic()
    once = RetryPolicy(attempt_count=1)
    with pytest.raises(StorageError) as caught:
        ckpt_storage.save({"step": 1}, tmp_path / "run", timeout=Timeouts(request=0.3), retry=once)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - begin_s < 0.3 + SLACK_S
    hang.set()


def test_a_folder_is_deleted_while_it_is_listed() -> None:
    """Names are deleted by the thousand, before the next ones are asked for."""
    asked: list[int] = []

    class Listed(MemoryBackend):
        """A listing of names that notes how many there are when one is deleted."""

        def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
            del recursive
            for number in range(2500):
                asked.append(number)
                yield ObjectInfo(path=f"{prefix}/{number}", size_bytes=0)

        def delete(self, paths: Iterable[str]) -> None:
            deleted.append((len(list(paths)), len(asked)))

    deleted: list[tuple[int, int]] = []
    store = Store(Listed(Location.of("memory://listed")), url="x://y")
    store.delete_folder("saves")
    assert deleted == [(1000, 1000), (1000, 2000), (500, 2500)]


class UnknownFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system of which nothing is known."""

    protocol = "unknownfs"


def test_an_unknown_file_system_is_for_a_single_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning in a process tells, and the checkpoint is whole all the same."""
    # To older fsspec the URL is a relative path.
    monkeypatch.chdir(tmp_path)
    fsspec.register_implementation("unknownfs", UnknownFileSystem, clobber=True)
    with caplog.at_level(logging.WARNING):
        ckpt_storage.save({"step": 1}, f"unknownfs://{tmp_path}/run")
    assert "is single-writer: This storage has no exclusive creation" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        ckpt_storage.save({"step": 1}, f"unknownfs://{tmp_path}/run", overwrite=True)
    assert "single-writer" not in caplog.text
    state = {"step": 0}
    ckpt_storage.load(state, f"unknownfs://{tmp_path}/run")
    assert state == {"step": 1}
    assert not [path for path in tmp_path.rglob("*") if "probe" in path.name]


class PackageLackingFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that looks for its package when it is made."""

    protocol = "lackingfs"

    def __init__(self, **options: Any) -> None:
        del options
        raise ModuleNotFoundError("No module named 'lacking_sdk'", name="lacking_sdk")


def test_a_package_that_is_missed_late_is_named() -> None:
    """Some classes import theirs when they are made, not when they are looked up."""
    fsspec.register_implementation("lackingfs", PackageLackingFileSystem, clobber=True)
    with pytest.raises(InvalidInputError, match="lacking_sdk") as caught:
        open_store("lackingfs://h/run").stat("a")
    assert "pip install" in (caught.value.next_step or "")


class _ExplainingBackend(MemoryBackend):
    """A backend whose client raises errors of its own, which `explain` translates."""

    meaning: StorageError | Exception = StorageError("the table is locked")

    def stat(self, path: str) -> ObjectInfo:
        raise RuntimeError(f"error 1205 at {path}")

    def explain(self, error: BaseException) -> StorageError | None:
        del error
        if isinstance(self.meaning, StorageError):
            return self.meaning
        raise self.meaning


def _failure_of(backend: Backend) -> StorageError:
    once = RetryPolicy(attempt_count=1)
    with pytest.raises(StorageError) as caught:
        Store(backend, url="mine://a/b", policy=once).stat("x/y")
    return caught.value


def test_what_a_backend_explains_says_what_failed_on_which_object() -> None:
    """Call, object and next step are in the message; kind and retries are the backend's."""
    backend = _ExplainingBackend(Location.of(f"memory://{uuid.uuid4().hex}"), Settings())
    backend.meaning = StorageError(
        "the table is locked.", kind="throttled", retryable=True, next_step="Wait."
    )
    error = _failure_of(backend)
    assert str(error) == "The stat of mine://a/b/x/y failed: the table is locked. Wait."
    assert (error.kind, error.retryable, error.path) == ("throttled", True, "mine://a/b/x/y")


def test_an_explanation_that_fails_hides_no_error() -> None:
    """The client's error is reported as without `explain`, with a note of the second one."""
    backend = _ExplainingBackend(Location.of(f"memory://{uuid.uuid4().hex}"), Settings())
    backend.meaning = ZeroDivisionError("no such code")
    error = _failure_of(backend)
    assert "The stat of mine://a/b/x/y failed: RuntimeError" in str(error)
    assert "error 1205 at x/y" in str(error)
    assert "ZeroDivisionError" in str(error)
