"""A second read of whatever did not match: one wrong answer is not damage at rest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ckpt_storage.errors import FormatError, IntegrityError, UnsafeContentError
from ckpt_storage.store.store import Store

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

MISMATCHES = (FormatError, IntegrityError, UnsafeContentError)
"""What a wrong byte in an answer raises; which one depends on the byte."""


def read_twice(store: Store, path: str, read: Callable[[], T]) -> T:
    """Return what `read` returns, which reads and checks an object; at a mismatch read it again.

    The second read comes from the storage itself: see `Store.drop_caches`. Raises what the second
    `read` raises: that is damage, or a file of another kind.
    """
    try:
        return read()
    except MISMATCHES as error:
        mismatch = str(error).removesuffix(error.next_step or "").rstrip()
    store.drop_caches(path)
    result = read()
    log.warning(
        "%s was read twice: the first answer was wrong, the second is right. Check the memory and "
        "the network of this host if this repeats. The first: %s",
        store.shown(path),
        mismatch,
    )
    return result
