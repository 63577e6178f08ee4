"""Finds out whether a storage keeps its promises: exclusive creation (I4), conditional deletion.

Some servers take a condition and ignore it. Each question is answered by what the storage fails to
do, "" if it keeps the promise; once per process and `Store.scope`, or URL where there is none.
Raises `StorageError`, and keeps nothing, where there is no answer or no right to write.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator

from ckpt_storage.errors import CheckpointError, StorageError, UnsupportedByStoreError
from ckpt_storage.format.names import probe_path

from .store import Store

_TRIES = 3

# Keyed by process too: a child of fork asks anew, with clients of its own.
_RESULTS: dict[tuple[int, Hashable, str], str] = {}


def why_no_exclusive_create(store: Store) -> str:
    """Return why creation is not exclusive, "" if `store` refuses to create a name twice."""
    if not store.capabilities.exclusive_create:
        return "This storage has no exclusive creation to offer."
    return _asked(store, try_exclusive_create)


def why_no_conditional_delete(store: Store) -> str:
    """Return why `delete_version` is no help, "" if it spares another version."""
    return "" if store.capabilities.kind == "posix" else _asked(store, _try_conditional_delete)


def _asked(store: Store, ask: Callable[[Store, str], str]) -> str:
    scope = store.scope
    place = store.run("look at the storage", "", lambda _: scope()) if scope else store.url
    key = os.getpid(), place, ask.__name__
    if key not in _RESULTS:
        _RESULTS[key] = answer = ask(store, probe_path())
        return answer
    return _RESULTS[key]


def _try_conditional_delete(store: Store, path: str) -> str:
    """Ask for the deletion of a version that was replaced."""
    with _removed(store, path):
        store.replace(path, b"first\n")
        version = store.get(path).version
        store.replace(path, b"second\n")
        try:
            if version is not None:
                store.delete_version(path, version)
        except StorageError as error:
            if error.kind == "precondition" and store.get(path).data == b"second\n":
                return ""
            if error.kind not in {"precondition", "unsupported"}:
                raise
    return "The storage does not delete an object only if it is of a given version."


def try_exclusive_create(store: Store, path: str) -> str:
    """Create a new name twice; answers as the probe, of a storage that has the capability."""
    first, second = (f"{name} {os.urandom(16).hex()}\n".encode() for name in ("first", "second"))
    with _removed(store, path):
        try:
            store.create(path, first)
            if store.get(path).data != first:
                return "The storage kept other content than was created."
            for _ in range(_TRIES):
                try:
                    store.put_once(path, second, if_absent=True)
                except StorageError as error:
                    failure = error
                else:
                    return "The storage created a name a second time; it ignores the condition."
                if store.get(path).data != first:
                    return "The storage refused to create a name a second time, but did it."
                if failure.kind in {"exists", "precondition"}:
                    return ""
                if failure.kind == "unsupported":
                    break
        except UnsupportedByStoreError as error:
            failure = error
    if failure.kind == "unsupported":
        return f"The storage refuses exclusive creation: {failure}"
    # No answer: the request may never have reached the storage.
    raise failure


@contextlib.contextmanager
def _removed(store: Store, path: str) -> Iterator[None]:
    """Remove a name at the end; no right to delete is no reason to fail: it is a known leftover."""
    try:
        yield
    finally:
        with contextlib.suppress(CheckpointError):
            store.delete([path])
