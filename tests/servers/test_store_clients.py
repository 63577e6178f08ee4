"""The file systems under remote stores: which class, when they are built, how long they stay."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from remote_tools import options_of
from s3fs import S3FileSystem

import ckpt_storage
from ckpt_storage.errors import StorageError
from ckpt_storage.store import open_store
from ckpt_storage.testing.s3server import S3Server


@pytest.fixture
def registered() -> Iterator[list[str]]:
    """Names of schemes that are taken from fsspec's registry after the test."""
    names: list[str] = []
    before = dict(fsspec.registry)
    yield names
    for name in names:
        _registry.pop(name, None)
        if name in before:
            fsspec.register_implementation(name, before[name], clobber=True)


def test_a_class_that_was_registered_for_a_scheme_is_used(registered: list[str]) -> None:
    """A file system of the user's own, derived from s3fs's, serves s3:// with its requests."""
    built: list[str] = []

    class Own(S3FileSystem):  # type: ignore[misc]  # s3fs has no types
        """What a user's site registers."""

        def __init__(self, *args: Any, **options: Any) -> None:
            built.append("own")
            super().__init__(*args, **options)

    registered.append("s3")
    fsspec.register_implementation("s3", Own, clobber=True)
    with S3Server() as server:
        server.create_bucket("bkt")
        ckpt_storage.save({"a": 1}, "s3://bkt/run", storage_options=options_of(server))
        assert "run/commits/00000001.json" in server.dump("bkt")
    assert built


def test_file_systems_that_no_store_uses_are_dropped(registered: list[str]) -> None:
    """Of fifty stores with fifty tokens that were closed, few connections stay."""
    alive: list[weakref.ref[Any]] = []
    ended: list[int] = []

    class Counted(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
        """Tells how many of it there are."""

        protocol = ("counted",)
        cachable = False

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            alive.append(weakref.ref(self))
            self.client = SimpleNamespace(close=lambda: ended.append(1))

    registered.append("counted")
    fsspec.register_implementation("counted", Counted)
    used = open_store("counted://run", storage_options={"token": "used"})
    for number in range(50):
        store = open_store("counted://run", storage_options={"token": number})
        store.write("x", b"data")
        assert used.read("x") == b"data"
        store.close()
    gc.collect()
    assert len(alive) == 51
    kept = sum(one() is not None for one in alive)
    assert 1 < kept <= 9
    assert len(ended) == len(alive) - kept
    used.close()


_LOOKUP = """
import sys, time
import gcsfs
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import open_store
class Slow(gcsfs.GCSFileSystem):
    def __init__(self, *args, **options):
        if sys.argv[1] == "open":
            time.sleep(60)
        super().__init__(*args, **options)
        self.credentials.apply = lambda heads: time.sleep(60)
import fsspec
fsspec.register_implementation("gs", Slow, clobber=True)
store = open_store(
    "gs://bucket/run",
    storage_options={"token": "anon", "endpoint_url": "http://127.0.0.1:9"},
    timeouts=Timeouts(request=1.0),
    retry=RetryPolicy(attempt_count=1),
)
try:
    store.read("x")
except Exception as error:
    print(type(error).__name__, error.kind)
"""


@pytest.mark.parametrize("when", ["open", "request"])
def test_a_lookup_of_credentials_that_hangs_holds_up_nothing(when: str, tmp_path: Path) -> None:
    """A request ends by its deadline, and the interpreter does not wait for the lookup."""
    script = tmp_path / "lookup.py"
    script.write_text(_LOOKUP)
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script), when], capture_output=True, text=True, timeout=55, check=True
    )
    assert done.stdout.split() == [StorageError.__name__, "timeout"] or "timeout" in done.stdout
    assert time.monotonic() - start_s < 50
