"""The footer behind `.metadata`: whose it is, and of which save.

Knows `docs/format.md`, section "`.metadata`"; unpickles nothing. Called by `commit`, `publishing`,
`cleaning`, `opening`, `catalog`, `copying` and `documentcheck`.
"""

from __future__ import annotations

import json

from . import layout
from .errors import IntegrityError, StorageError
from .slotlog import CommitLog, is_there
from .slots import HeadRef
from .store.base import Store

_FOOTER_MAGIC = b"CKPTSTO1"
_FOOTER_TAIL_BYTES = 16
_FOOTER_MOST_BYTES = 512


def with_footer(pickled: bytes, *, slot: int, save_id: str) -> bytes:
    """Return what is stored as `.metadata`: the pickle, then our footer."""
    footer = json.dumps(
        {"format": "ckpt_storage.stock/1", "slot": slot, "save_id": save_id},
        separators=(",", ":"),
    ).encode()
    return pickled + footer + b"%08d" % len(footer) + _FOOTER_MAGIC


def split_footer(data: bytes) -> tuple[bytes, HeadRef | None]:
    """Return the pickle in a `.metadata` file, and what its footer names; None without a footer."""
    if data[-8:] != _FOOTER_MAGIC or not data[-16:-8].isdigit():
        return data, None
    start = len(data) - _FOOTER_TAIL_BYTES - int(data[-16:-8])
    if start < 0:
        return data, None
    try:
        footer = json.loads(data[start:-_FOOTER_TAIL_BYTES])
        reference = HeadRef(slot=int(footer["slot"]), save_id=str(footer["save_id"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return data, None
    return data[:start], reference


def read_footer(store: Store) -> HeadRef | None:
    """Return what the footer of `.metadata` names, None if it has none or is not there.

    Two small requests, however large the pickle is.
    """
    try:
        size_bytes = store.stat(layout.STOCK_METADATA).size_bytes
        tail = bytearray(min(size_bytes, _FOOTER_MOST_BYTES))
        store.read_into(layout.STOCK_METADATA, size_bytes - len(tail), memoryview(tail))
    except IntegrityError:
        return None  # replaced by a shorter one between the two requests
    except StorageError as error:
        if error.kind == "not-found":
            return None
        raise
    return split_footer(bytes(tail))[1]


def is_foreign(store: Store, found: CommitLog) -> bool:
    """Return whether another tool committed what lies at the root of `store`.

    `found` are its slots. Of a deleted checkpoint they stay, and another tool may save under its
    name later: it does if there is a `.metadata` without our footer. Raises `StorageError`.
    """
    if found.head is not None or not is_there(store, layout.STOCK_METADATA):
        return False
    return found.last is None or read_footer(store) is None
