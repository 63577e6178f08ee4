"""Columns of documents: many whole numbers or names, packed."""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import InvalidInputError

from .documents import MOST_NAMES, Getter

_T = TypeVar("_T")


Counts = NDArray[np.int64]


MOST_INFLATED_BYTES = 256 << 20
"""What all columns and names of one document may take together, inflated."""


_SURROGATE = re.compile("[\ud800-\udfff]")


_PLAIN_COUNT = 64


_PLAIN_CHARS = 2048


_INTEGER_BYTES = 8


# Differences of ascending columns are small numbers with long runs; level 1 finds them all.
_LEVEL = 1


def pack_column(values: Sequence[int] | Counts) -> list[int] | dict[str, Any]:
    """Return the JSON value of a column of integers that fit 64 bits."""
    column: Counts = np.asarray(values, dtype=np.int64)
    if len(column) <= _PLAIN_COUNT:
        plain: list[int] = column.tolist()
        return plain
    # Differences of far numbers wrap around, and sums of them wrap back.
    differences = np.diff(column, prepend=np.int64(0)).astype("<i8")
    packed = zlib.compress(differences.tobytes(), _LEVEL)
    return {"count": len(column), "zlib": _text(packed)}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def pack_names(names: Sequence[str]) -> list[str] | dict[str, Any]:
    """Return the JSON value of a list of strings.

    Raises `InvalidInputError` for half of a surrogate pair, which no document can hold.
    """
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        name = next((name for name in names if _SURROGATE.search(name)), "")
        raise InvalidInputError(
            f"The name {name!r:.200} holds half of a surrogate pair, which is no text.",
            next_step="Give this value a name that UTF-8 can spell.",
        ) from None
    if sum(map(len, names)) <= _PLAIN_CHARS:
        return list(names)
    text = json.dumps(list(names), ensure_ascii=False, separators=(",", ":")).encode()
    packed = _text(zlib.compress(text, 6))
    return {"count": len(names), "bytes": len(text), "zlib": packed}


@dataclass(slots=True)
class Columns:
    """Reads the columns and names of one document, which `where` names in errors.

    `left_bytes` is what may still be inflated. One of them serves a whole document.
    """

    where: str
    left_bytes: int = MOST_INFLATED_BYTES

    def column(
        self,
        body: object,
        key: str,
        *,
        count: int | None = None,
        least: int = 0,
        below: int = 1 << 63,
    ) -> Counts:
        """Return `count` integers from `least` on, less than `below`. Raises `FormatError`."""
        get = Getter(body, self.where)
        value = body.get(key) if isinstance(body, Mapping) else None
        if isinstance(value, list):
            self._take(get, key, len(value) * _INTEGER_BYTES)
            column = np.array(get.counts(key, least=least), dtype=np.int64)
        else:
            packed = Getter(get.mapping(key), self.where)
            size_bytes = packed.count("count") * _INTEGER_BYTES
            self._take(get, key, size_bytes)
            words = np.frombuffer(self._inflate(packed, key, size_bytes), dtype="<i8")
            column = np.cumsum(words, dtype=np.int64)
        if count is not None and len(column) != count:
            get.fail(f"has {len(column)} entries in {key!r}, where {count} belong")
        if len(column) and (int(column.min()) < least or int(column.max()) >= below):
            get.fail(f"has a number in {key!r} that cannot be")
        return column

    def names(self, body: object, key: str, *, count: int | None = None) -> list[str]:
        """Return `count` strings. Raises `FormatError`."""
        get = Getter(body, self.where)
        value = body.get(key) if isinstance(body, Mapping) else None
        if isinstance(value, list):
            names = get.strings(key)
        else:
            packed = Getter(get.mapping(key), self.where)
            size_bytes = packed.count("bytes")
            if packed.count("count") > MOST_NAMES:
                get.fail(f"declares more than {MOST_NAMES} names in {key!r}")
            self._take(packed, key, size_bytes)
            names = self._parsed(packed, key, self._inflate(packed, key, size_bytes))
            if len(names) != packed.count("count"):
                get.fail(f"has another number of names in {key!r} than it says")
        if count is not None and len(names) != count:
            get.fail(f"has {len(names)} entries in {key!r}, where {count} belong")
        return names

    def _parsed(self, get: Getter, key: str, text: bytes) -> list[str]:
        names: Any = None
        try:
            names = json.loads(text.decode())
            # Half of a surrogate pair, which only an escape can spell, is no text.
            json.dumps(names, ensure_ascii=False).encode()
        except (RecursionError, ValueError):
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            get.fail(f"has {key!r} that are no names")
        return names

    def _take(self, get: Getter, key: str, size_bytes: int) -> None:
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            get.fail(f"declares more than may be inflated of a document up to {key!r}")

    def _inflate(self, get: Getter, key: str, size_bytes: int) -> bytes:
        """Return exactly `size_bytes`, which were taken from what may be inflated."""
        inflater = zlib.decompressobj()
        try:
            data = binascii.a2b_base64(get.string("zlib"), strict_mode=True)
            # One byte more than there may be, so that the end of a sound stream is seen.
            found = inflater.decompress(data, size_bytes + 1)
        except (ValueError, zlib.error):
            found = b""
        if len(found) != size_bytes or not inflater.eof or inflater.unused_data:
            get.fail(f"has packed {key!r} that are not the {size_bytes} bytes that they should be")
        return found


class LazyList(Sequence[_T]):
    """So many values, each made when it is asked for; equal to any sequence of equal values."""

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __init__(self, count: int, make: Callable[[int], _T]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> _T: ...

    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...

    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        found = range(self._count)[index]
        return self._make(found) if isinstance(found, int) else list(map(self._make, found))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented
