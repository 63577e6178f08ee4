"""Columns of integers, checksums and names, as JSON values that are packed if they are long."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import InvalidInputError

MAX_INFLATED_BYTES = 256 << 20
"""The limit for all columns and names of one document together, inflated."""

Counts = NDArray[np.int64]

_T = TypeVar("_T")

_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_COUNT = 64
_PLAIN_CHARS = 2048
INTEGER_BYTES = 8
# Differences of ascending columns are small numbers with long runs: higher levels gain nothing.
_LEVEL = 1


def pack_crcs(crcs: Sequence[int]) -> str:
    """Return checksums as packed CRCs: base64 of little-endian 32-bit words."""
    return pack_bytes(np.asarray(crcs, dtype="<u4").tobytes())


def pack_column(values: Sequence[int] | Counts) -> list[int] | dict[str, Any]:
    """Return the JSON value of a column of integers that fit 64 bits."""
    column: Counts = np.asarray(values, dtype=np.int64)
    if len(column) <= _PLAIN_COUNT:
        plain: list[int] = column.tolist()
        return plain
    # Differences may wrap around at 64 bits; the sums of a reader wrap back.
    differences = np.diff(column, prepend=np.int64(0)).astype("<i8")
    packed = zlib.compress(differences.tobytes(), _LEVEL)
    return {"count": len(column), "zlib": pack_bytes(packed)}


def pack_names(names: Sequence[str]) -> list[str] | dict[str, Any]:
    """Return the JSON value of a list of strings.

    Raises `InvalidInputError` for half of a surrogate pair, which UTF-8 cannot encode.
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
    return {"count": len(names), "bytes": len(text), "zlib": pack_bytes(zlib.compress(text, 6))}


def pack_bytes(data: bytes) -> str:
    """Return bytes as base64."""
    return base64.b64encode(data).decode("ascii")


@dataclass(slots=True)
class InflateBudget:
    """The bytes of one document that may still be inflated."""

    remaining_bytes: int = MAX_INFLATED_BYTES


class LazyList(Sequence[_T]):
    """`count` values that `make` makes on access; equal to any sequence of equal values."""

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __init__(self, count: int, make: Callable[[int], _T]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401  # a value, or a list for a slice
        at = range(self._count)[index]
        return self._make(at) if isinstance(at, int) else list(map(self._make, at))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented
