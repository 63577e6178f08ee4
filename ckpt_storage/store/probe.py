"""Probes what a storage does: absence, exclusive creation (I4), ranges, versions.

Some servers ignore conditions, or compare them in their own way, so no class decides for a server.
The coordinator of a save probes once per process and `Store.scope`, before ranks write. Without a
response or the right to write it raises `StorageError` and stores no record.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

from ckpt_storage.errors import CheckpointError, StorageError, UnsupportedByStoreError
from ckpt_storage.format.names import probe_path

from .abilities import RECORDS, Abilities
from .backend import Content, PartCopy
from .store import Store

_ATTEMPTS = 3
_RANGE_START = 7
_REFUSALS = frozenset({"permission", "precondition", "refused", "unsupported"})

COPY_REFUSALS = frozenset({"permission", "unsupported"})
"""Kinds of errors of a copy after which its bytes are read and sent."""


def find_abilities(store: Store) -> Abilities:
    """Return the storage's record; probe absence, creation and ranges if that was not done."""
    scope = store.find_scope()
    record = RECORDS.get(scope, Abilities())
    if record.create_problem is None:
        path = probe_path()
        hides_absence = not try_absence(store, path)
        problem = try_creation(store, path)
        record = replace(record, create_problem=problem, hides_absence=hides_absence)
        RECORDS[scope] = record
    return record


def find_all_abilities(store: Store) -> Abilities:
    """Return the storage's record with the probes of versions, too."""
    record = find_abilities(store)
    if record.replace_problem is None:
        replace_problem, delete_problem = try_versions(store, probe_path())
        record = replace(record, replace_problem=replace_problem, delete_problem=delete_problem)
        RECORDS[store.find_scope()] = record
    return record


def create_new(store: Store, path: str, data: bytes) -> None:
    """Create an object in the way that the storage supports; see `Store.create`."""
    if find_abilities(store).create_problem:
        store.create_unguarded(path, data)
        return
    try:
        store.create(path, data)
    except UnsupportedByStoreError:
        RECORDS.pop(store.find_scope(), None)
        raise


def replaces_by_version(store: Store) -> bool:
    """Return whether the storage replaces an object only if it has a given version."""
    return store.capabilities.if_match and not find_all_abilities(store).replace_problem


def compare_and_swap(store: Store, path: str, data: bytes, seen: Content | None) -> None:
    """Put a whole object in place of the content that was read there, None for nothing.

    Raises `StorageError` of kind "exists", "precondition" or "not-found" if it has changed. A
    storage without conditions replaces whatever is there.
    """
    decides = replaces_by_version(store)
    try:
        if not decides or (seen is None and find_abilities(store).create_problem):
            store.replace(path, data)
        elif seen is None:
            store.create(path, data)
        else:
            store.replace(path, data, if_match=seen.version)
    except UnsupportedByStoreError:
        RECORDS.pop(store.find_scope(), None)
        raise


def copies_parts(store: Store, path: str, copy: PartCopy) -> bool:
    """Return whether the storage copies parts of uploads; probed once, beside `path`."""
    if not store.capabilities.is_remote:
        return True
    scope = store.find_scope()
    record = RECORDS.get(scope, Abilities())
    if record.copies_parts is None:
        record = replace(record, copies_parts=try_copy(store, path, copy))
        RECORDS[scope] = record
    return record.copies_parts is True


def try_copy(store: Store, path: str, copy: PartCopy) -> bool:
    """Copy the smallest part in an upload that is aborted; return whether that worked.

    Some servers ignore the source, and keep an empty part that cannot be replaced.
    """
    length = min(copy.length, store.capabilities.copy_min_bytes or copy.length)
    upload = store.upload(path + probe_path())
    try:
        upload.copy_part(replace(copy, number=0, offset=0, length=length))
    except StorageError as error:
        if error.kind not in COPY_REFUSALS:
            raise
        return False
    finally:
        # Otherwise it is aborted with the uploads of `path` that a dead run left behind.
        with contextlib.suppress(CheckpointError):
            upload.abort()
    return True


def try_absence(store: Store, path: str) -> bool:
    """Return whether an absent name is "not-found", and not "forbidden".

    S3 forbids it only to credentials that may not list.
    """
    try:
        store.stat(path)
    except StorageError as error:
        if error.kind == "not-found":
            return True
        if error.kind != "permission":
            raise
        failure = error
    try:
        store.list(path, recursive=False)
    except StorageError as error:
        if error.kind != "permission":
            raise
        return False
    raise failure


def try_creation(store: Store, path: str) -> str:
    """Create a new name, read it back, create it again; return why creation is not exclusive.

    Raises `StorageError` if the content cannot be read back: nothing may be saved there.
    """
    first, second = (f"{name} {os.urandom(16).hex()}\n".encode() for name in ("first", "second"))
    with _removed(store, path):
        if not store.capabilities.exclusive_create:
            store.put(path, first)
            try_range(store, path, first)
            return "This storage has no exclusive creation."
        try:
            store.create(path, first)
        except UnsupportedByStoreError as error:
            store.put(path, first)
            try_range(store, path, first)
            return f"The storage refuses exclusive creation: {_reason(error)}"
        try_range(store, path, first)
        return _try_second_creation(store, path, first, second)


def _try_second_creation(store: Store, path: str, first: bytes, second: bytes) -> str:
    for _ in range(_ATTEMPTS):
        try:
            store.put_once(path, second, if_absent=True)
        except StorageError as error:
            failure = error
        else:
            return "The storage created a name a second time; it ignores the condition."
        if store.get(path).data != first:
            return "The storage refused to create a name a second time, but replaced it."
        if failure.kind in {"exists", "precondition"}:
            return ""
        if failure.kind == "unsupported":
            return f"The storage refuses exclusive creation: {_reason(failure)}"
    # Without a response the request may not have reached the storage.
    raise failure


def try_range(store: Store, path: str, data: bytes) -> None:
    """Read the end of an object that holds `data`; raise `StorageError` for other bytes."""
    for is_last in (False, True):
        target = bytearray(len(data) - _RANGE_START)
        store.read(path, [(_RANGE_START, memoryview(target))], size_bytes=len(data))
        if target == data[_RANGE_START:]:
            return
        if is_last:
            what = f"{store.shown(path)} was written, and other bytes were read back, twice."
            step = "Look for a proxy or gateway that changes responses; nothing is saved here."
            raise StorageError(what, path=store.shown(path), next_step=step)


def try_versions(store: Store, path: str) -> tuple[str, str]:
    """Replace and delete an object by an old version; return the problem of each, "" for none."""
    if store.capabilities.kind == "posix":
        return "A file system has no replacement by version.", ""
    with _removed(store, path):
        try:
            store.replace(path, b"first\n")
            old = store.stat(path).version
            replace_problem = _try_replacement(store, path, old)
            if replace_problem:
                store.replace(path, b"another\n")
        except StorageError as error:
            # For example under a retention policy.
            if error.kind not in _REFUSALS:
                raise
            what = f"The storage does not replace objects: {_reason(error)}"
            return what, what
        return replace_problem, _try_deletion(store, path, old)


def _try_replacement(store: Store, path: str, old: str | None) -> str:
    if not store.capabilities.if_match:
        return "This storage has no replacement by version."
    try:
        store.replace(path, b"second\n", if_match=old)
    except StorageError as error:
        if error.kind not in _REFUSALS:
            raise
        return f"The storage does not replace an object by its version: {_reason(error)}"
    try:
        store.replace(path, b"third\n", if_match=old)
    except StorageError as error:
        if error.kind != "precondition":
            raise
        return ""
    return "The storage replaced an object that had changed; it ignores the condition."


def _try_deletion(store: Store, path: str, old: str | None) -> str:
    if old is None:
        return "The storage reports no versions."
    data = store.get(path).data
    try:
        store.delete_version(path, old)
    except StorageError as error:
        if error.kind == "precondition" and store.get(path).data == data:
            return ""
        if error.kind not in _REFUSALS:
            raise
        return f"The storage does not delete an object by its version: {_reason(error)}"
    return "The storage deleted an object that had changed; it ignores the condition."


def _reason(error: StorageError) -> str:
    """Return the message of an error without its next step: saves go on without the feature."""
    return str(error).removesuffix(error.next_step or "").rstrip()


@contextlib.contextmanager
def _removed(store: Store, path: str) -> Iterator[None]:
    """Remove a name at the end; without the right to delete, it is a known leftover."""
    try:
        yield
    finally:
        with contextlib.suppress(CheckpointError):
            store.delete([path])
