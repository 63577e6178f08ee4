"""Columns and names: what is packed comes back, and what was tampered with does not."""

from __future__ import annotations

import base64
import tracemalloc
import zlib

import pytest

from ckpt_storage.errors import FormatError
from ckpt_storage.format.documents import (
    MOST_INFLATED_BYTES,
    Allowance,
    Fields,
    pack_column,
    pack_names,
)

PACKED = pack_column([n * n for n in range(100)])
NAMES = pack_names([f"model.layers.{n}.weight" for n in range(200)])


def deflated(data: bytes) -> str:
    """Return base64 of a zlib stream."""
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    "change",
    [
        {"count": 99},
        {"count": 101},
        {"count": -1},
        {"count": True},
        {"count": 1 << 62},
        {"zlib": ""},
        {"zlib": "?"},
        {"zlib": None},
        {"zlib": deflated(b"")},
        {"zlib": deflated(bytes(99))},
        {"zlib": deflated(bytes(1 << 20))},
        {"zlib": base64.b64encode(b"no stream").decode()},
    ],
    ids=str,
)
def test_a_column_that_is_not_what_it_says_is_refused(change: dict[str, object]) -> None:
    """Too much, too little, and what is no stream at all."""
    assert isinstance(PACKED, dict)
    with pytest.raises(FormatError, match="here"):
        Fields({"key": PACKED | change}, "here").column("key")


@pytest.mark.parametrize(
    "change",
    [
        {"count": 199},
        {"bytes": 10},
        {"bytes": 1 << 40},
        {"zlib": deflated(b"x" * 10), "bytes": 10},
        {"zlib": deflated(b"[1,2]"), "bytes": 5, "count": 2},
        {"zlib": deflated(b'["\\ud800"]'), "bytes": 10, "count": 1},
        {"zlib": deflated(b"[" * 100_000), "bytes": 100_000, "count": 1},
    ],
    ids=str,
)
def test_names_that_are_not_what_they_say_are_refused(change: dict[str, object]) -> None:
    """Another number or length, and texts that are no list of strings."""
    assert isinstance(NAMES, dict)
    with pytest.raises(FormatError, match="here"):
        Fields({"key": NAMES | change}, "here").names("key")


def test_nothing_is_inflated_beyond_what_was_declared() -> None:
    """A stream of 64 MiB that says it has ten bytes is given up after ten."""
    bomb = zlib.compressobj(9)
    data = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(64)) + bomb.flush()
    body = {"key": {"count": 10, "zlib": base64.b64encode(data).decode()}}
    fields = Fields(body, "here")
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            fields.column("key")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert fields.allowance.left_bytes == MOST_INFLATED_BYTES - 80


def test_all_columns_of_a_document_share_one_limit() -> None:
    """What one takes, the next cannot."""
    fields = Fields({"key": PACKED}, "here", Allowance(1000))
    fields.column("key")
    with pytest.raises(FormatError, match="declares more than"):
        fields.column("key")
