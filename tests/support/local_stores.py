"""Stores on local folders for tests: by default they make a single attempt."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from limits import HANG_S

from ckpt_storage import RetryPolicy, StorageError
from ckpt_storage.store.backend import Settings
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.backends.memory import MemoryBackend
from ckpt_storage.store.backends.posix import Posix
from ckpt_storage.store.store import Store

ONCE = RetryPolicy(attempt_count=1)


class Remote(MemoryBackend):
    """Memory that behaves as a storage behind a network."""

    capabilities = dataclasses.replace(
        MemoryBackend.capabilities, is_remote=True, lists_uploads=True
    )


def until(true: Callable[[], object]) -> None:
    end_s = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def local_store(
    root: str | os.PathLike[str],
    *,
    posix: Posix | None = None,
    policy: RetryPolicy = ONCE,
    **settings: Any,
) -> Store:
    asked = Settings(**settings)
    backend = LocalBackend(os.fspath(root), settings=asked, posix=posix)
    return Store(
        backend,
        url=f"file://{backend.folder}",
        policy=policy,
        request_timeout_s=asked.request_timeout_s,
    )


def error_of(call: Callable[[], object]) -> StorageError:
    with pytest.raises(StorageError) as caught:
        call()
    return caught.value
