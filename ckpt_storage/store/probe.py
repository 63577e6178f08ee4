"""Finds out whether a storage keeps its promises: exclusive creation (I4), conditional deletion.

Some servers take the condition and ignore it, so a declared capability is not enough.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable
from dataclasses import dataclass

from ckpt_storage.errors import CheckpointError, StorageError, UnsupportedByStoreError
from ckpt_storage.format.names import probe_path

from .store import Store

_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Whether `create` is exclusive, and one sentence on how that was found out."""

    exclusive: bool
    reason: str


# Keyed by process too: a child of fork asks anew, with clients of its own.
_RESULTS: dict[tuple[int, Hashable], ProbeResult] = {}
_DELETIONS: dict[tuple[int, Hashable], bool] = {}


def probe_exclusive_create(store: Store) -> ProbeResult:
    """Return whether `store` refuses to create a name twice, asking the storage once.

    The result is kept per process and `Store.scope`, or per URL where there is none.
    Leaves nothing behind where deleting is allowed. Raises `StorageError` where the
    storage gives no answer or does not let us write, and keeps nothing then.
    """
    if not store.capabilities.exclusive_create:
        reason = "This storage has no exclusive creation to offer."
        return ProbeResult(exclusive=False, reason=reason)
    place = _place(store)
    known = _RESULTS.get(place)
    if known is None:
        known = _RESULTS[place] = try_exclusive_create(store, probe_path())
    return known


def probe_conditional_delete(store: Store) -> bool:
    """Return whether `delete_version` spares another version, asking the storage once.

    On a disk it is our own code and not asked. Kept, cleaned up and raises as
    `probe_exclusive_create`.
    """
    if store.capabilities.kind == "posix":
        return True
    place = _place(store)
    known = _DELETIONS.get(place)
    if known is None:
        known = _DELETIONS[place] = _try_conditional_delete(store, probe_path())
    return known


def _place(store: Store) -> tuple[int, Hashable]:
    key: Hashable = store.url
    scope = store.scope
    if scope is not None:
        key = store.run("look at the storage", "", lambda _: scope())
    return os.getpid(), key


def _try_conditional_delete(store: Store, path: str) -> bool:
    """Ask for the deletion of a version that was replaced; return whether it is refused."""
    try:
        store.replace(path, b"first\n")
        version = store.get(path).version
        store.replace(path, b"second\n")
        if version is None:
            return False
        try:
            store.delete_version(path, version)
        except StorageError as error:
            if error.kind not in {"precondition", "unsupported"}:
                raise
            return error.kind == "precondition" and store.get(path).data == b"second\n"
        return False
    finally:
        with contextlib.suppress(CheckpointError):
            store.delete([path])


def try_exclusive_create(store: Store, path: str) -> ProbeResult:
    """Create a new name twice, and remove it where deleting is allowed; raises as the probe."""
    try:
        refusal = _refusal(store, path)
    finally:
        # No right to delete is no reason to fail, and the name is a known leftover.
        with contextlib.suppress(CheckpointError):
            store.delete([path])
    kept = "The storage refused to create a name a second time."
    return ProbeResult(exclusive=not refusal, reason=refusal or kept)


def _refusal(store: Store, path: str) -> str:
    """Return why creation is not exclusive, "" if it is: the storage itself says that of a name."""
    first, second = (f"{name} {os.urandom(16).hex()}\n".encode() for name in ("first", "second"))
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
