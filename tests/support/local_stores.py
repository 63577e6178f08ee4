"""Stores on local folders for tests: they make one attempt, unless told otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_storage import RetryPolicy, StorageError
from ckpt_storage.store.backend import Settings
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.backends.posix import Posix
from ckpt_storage.store.store import Store

ONCE = RetryPolicy(attempt_count=1)


def local_store(
    root: str | os.PathLike[str],
    *,
    posix: Posix | None = None,
    policy: RetryPolicy = ONCE,
    **settings: Any,
) -> Store:
    """Return a store on a folder; `settings` are those of its backend."""
    asked = Settings(**settings)
    backend = LocalBackend(os.fspath(root), settings=asked, posix=posix)
    return Store(
        backend,
        url=f"file://{backend.folder}",
        policy=policy,
        request_timeout_s=asked.request_timeout_s,
    )


def error_of(call: Callable[[], object]) -> StorageError:
    """Return the storage error that a call raises."""
    with pytest.raises(StorageError) as caught:
        call()
    return caught.value
