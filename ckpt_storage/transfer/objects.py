"""Small objects: whether they exist, and reads of them that are checked.

After a mismatch they are read again: one wrong response is not damage at rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ckpt_storage.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    StorageError,
    UnsafeContentError,
)
from ckpt_storage.format.documents import DAMAGED, MAX_DOCUMENT_BYTES, RESTORE, FileRef
from ckpt_storage.store.backend import Content, ObjectInfo
from ckpt_storage.store.store import Store

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

MISMATCHES = (FormatError, IntegrityError, UnsafeContentError)
"""Errors that a wrong byte in a response raises, depending on the byte."""


def read_twice(
    store: Store, path: str, read: Callable[[], T], again: Callable[[], T] | None = None
) -> T:
    """Return the result of `read`, which reads and checks an object; after a mismatch, read again.

    The second read comes from the storage itself: see `Store.drop_caches`. `again` does it if
    `read` only checks what was read before. Raises what the second read raises: damage, or a file
    of another kind.
    """
    try:
        return read()
    except MISMATCHES as error:
        mismatch = error
    return read_again(store, path, again or read, mismatch)


def read_again(store: Store, path: str, read: Callable[[], T], mismatch: CheckpointError) -> T:
    """Return the result of a second read, after a first read with a mismatch; as `read_twice`."""
    store.drop_caches(path)
    result = read()
    log.warning(
        "%s was read twice: the first response was wrong, the second right. Check the memory and "
        "the network of this host if this repeats. The first: %s",
        store.shown(path),
        str(mismatch).removesuffix(mismatch.next_step or "").rstrip(),
    )
    return result


def or_none_if_absent(call: Callable[[], T]) -> T | None:
    """Return the result of `call`, None if it raises `StorageError` of kind "not-found"."""
    try:
        return call()
    except StorageError as error:
        if error.kind == "not-found":
            return None
        raise


def read_or_none(store: Store, path: str, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> Content | None:
    """Return a document of at most `max_bytes` and its version token, None if it is absent."""
    return or_none_if_absent(partial(store.get, path, max_bytes=max_bytes))


def read_decoded(
    store: Store,
    path: str,
    decode: Callable[[bytes], T],
    *,
    max_bytes: int = MAX_DOCUMENT_BYTES,
) -> T | None:
    """Return a decoded document, None if it is absent.

    If `decode` finds damage, the document is read twice (see `read_twice`). Raises the error of the
    second `decode`.
    """

    def read() -> T | None:
        content = read_or_none(store, path, max_bytes=max_bytes)
        return None if content is None else decode(content.data)

    return read_twice(store, path, read)


def is_there(store: Store, path: str) -> bool:
    """Return whether a file exists."""
    return stat_or_none(store, path) is not None


def stat_or_none(store: Store, path: str) -> ObjectInfo | None:
    """Return length and time of a file, None if it is absent."""
    return or_none_if_absent(partial(store.stat, path))


def read_referenced(
    store: Store, reference: FileRef, *, max_bytes: int = MAX_DOCUMENT_BYTES
) -> bytes:
    """Return a referenced document after checking its length and checksum.

    Raises `StorageError`, and `IntegrityError` for a damaged or missing document and for a
    reference to more than `max_bytes`.
    """
    if reference.size_bytes > max_bytes:
        what = (
            f"{store.url}: the length of {reference.path} is recorded as {reference.size_bytes} "
            f"bytes; such a document has at most {max_bytes}."
        )
        raise IntegrityError(what, path=reference.path, offset=0, next_step=RESTORE)

    def checked(data: bytes) -> bytes:
        check_document(data, reference)
        return data

    data = read_decoded(store, reference.path, checked, max_bytes=reference.size_bytes)
    if data is None:
        what = f"{store.url}: {reference.path} is missing."
        raise IntegrityError(what, path=reference.path, offset=0, next_step=RESTORE)
    return data


def check_document(data: bytes, reference: FileRef) -> None:
    """Raise `IntegrityError` unless `data` has the length and checksum of `reference`."""
    actual = FileRef.of(reference.path, data)
    if actual != reference:
        what = (
            f"{reference.path} has {actual.size_bytes} bytes and checksum {actual.crc32c:08x}; "
            f"{reference.size_bytes} bytes and {reference.crc32c:08x} were written."
        )
        raise IntegrityError(what, path=reference.path, offset=0, next_step=DAMAGED)
