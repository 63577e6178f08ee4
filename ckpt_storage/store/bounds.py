"""Whole reads that end before they take more than was to be expected.

What lies on a storage may be anybody's: a small document may be a sparse file of a terabyte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ckpt_storage.errors import IntegrityError
from ckpt_storage.options import MIB

__all__ = ["TooLongError", "check_bound", "taken_whole", "too_long"]

_PIECE_BYTES = MIB


class TooLongError(Exception):
    """An object is longer than whoever reads it allows; `found_bytes` are at least there."""

    def __init__(self, found_bytes: int, most_bytes: int) -> None:
        super().__init__(found_bytes, most_bytes)
        self.found_bytes = found_bytes
        self.most_bytes = most_bytes


def check_bound(found_bytes: int, most_bytes: int | None) -> None:
    """Raise `TooLongError` if an object of `found_bytes` must not be read whole."""
    if most_bytes is not None and found_bytes > most_bytes:
        raise TooLongError(found_bytes, most_bytes)


async def taken_whole(
    read: Callable[[int], Awaitable[bytes]], told_bytes: int | None, most_bytes: int | None
) -> bytes:
    """Return the body of an answer of `told_bytes`, None if it does not tell.

    `read` returns at most as many bytes as it is asked for, b"" at the end. Raises `TooLongError`,
    before anything is read where the length is told. What comes is counted all the same: the length
    that is told may be that of a packed body.
    """
    check_bound(told_bytes or 0, most_bytes)
    pieces, count = [], 0
    while piece := await read(_PIECE_BYTES):
        pieces.append(piece)
        count += len(piece)
        check_bound(count, most_bytes)
    return b"".join(pieces)


def too_long(error: TooLongError, *, path: str, shown: str) -> IntegrityError:
    """Return what a store raises for `error`; `shown` is the object's URL."""
    return IntegrityError(
        f"{shown} has {error.found_bytes} bytes or more, and {error.most_bytes} at most were to "
        "be expected; it was not read.",
        path=path,
        # Nothing was looked at.
        offset=0,
        next_step="The file is damaged or not the one that was saved.",
    )
