"""A second read after a mismatch: one wrong response is not damage at rest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ckpt_storage.errors import CheckpointError, FormatError, IntegrityError, UnsafeContentError
from ckpt_storage.store.store import Store

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

MISMATCHES = (FormatError, IntegrityError, UnsafeContentError)
"""Errors that a wrong byte in a response raises, depending on the byte."""


def read_twice(store: Store, path: str, read: Callable[[], T]) -> T:
    """Return the result of `read`, which reads and checks an object; after a mismatch, read again.

    The second read comes from the storage itself: see `Store.drop_caches`. Raises what the second
    read raises: damage, or a file of another kind.
    """
    try:
        return read()
    except MISMATCHES as error:
        mismatch = error
    return read_again(store, path, read, mismatch)


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
