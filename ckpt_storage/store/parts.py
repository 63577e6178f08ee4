"""Bookkeeping that the uploads of all dialects share: which parts were sent, and joining views."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_storage.errors import InvalidInputError, StorageError

from .base import PartReceipt

__all__ = [
    "PartList",
    "SentPart",
    "SharedParts",
    "ended",
    "gone",
    "joined",
    "not_the_owner",
    "whole_object",
    "wrong_length",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPart:
    """One part that the storage has taken; `receipt` is what it gave for it."""

    offset: int
    size_bytes: int
    receipt: str


class PartList:
    """The parts of one upload, told by several threads in any order, again and again."""

    def __init__(self) -> None:
        self._parts: dict[int, SentPart] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, number: int, part: SentPart) -> None:
        """Note a part; a later receipt for the same number counts."""
        with self._lock:
            self._parts[number] = part

    def whole(self, total_bytes: int, *, shown: str) -> list[tuple[int, SentPart]]:
        """Return number and part in order if together they are the object of `total_bytes`.

        Raises `StorageError` naming `shown` if a part is missing or the length is another.
        """
        with self._lock:
            parts = sorted(self._parts.items())
        end_bytes = 0
        for position, (number, part) in enumerate(parts):
            if number != position or part.offset != end_bytes:
                break
            end_bytes += part.size_bytes
        if end_bytes != total_bytes:
            raise wrong_length(shown, end_bytes, total_bytes)
        return parts


class SharedParts:
    """The parts that one member of a shared upload has sent; told by several threads.

    Once they are handed over, or dropped, no more is taken.
    """

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._parts: dict[int, PartReceipt] = {}
        self._lock = threading.Lock()
        self._ended = False

    def check_open(self) -> None:
        """Raise `StorageError` once the parts were handed over or dropped."""
        if self._ended:
            raise ended(self._shown)

    def add(self, receipt: PartReceipt) -> None:
        """Note a part; a later receipt for the same number counts.

        Raises `StorageError` if the parts were handed over while it was being sent.
        """
        with self._lock:
            self.check_open()
            self._parts[receipt.number] = receipt

    def end(self) -> list[PartReceipt]:
        """Take no more parts; return those there are, in order of their numbers."""
        with self._lock:
            self._ended = True
            return [self._parts[number] for number in sorted(self._parts)]


def whole_object(
    receipts: Sequence[PartReceipt], total_bytes: int, *, shown: str
) -> list[PartReceipt]:
    """Return the receipts of all members in order if together they are the object.

    Raises `StorageError` naming `shown` if parts overlap, leave a gap or end elsewhere than at
    `total_bytes`, and `InvalidInputError` if two members used one number.
    """
    parts = sorted(receipts, key=lambda part: part.number)
    end_bytes = 0
    for before, part in zip([None, *parts], parts, strict=False):
        if before is not None and before.number == part.number:
            raise InvalidInputError(
                f"Two members sent part {part.number} of {shown}.",
                next_step="Give each member numbers of its own; this is a mistake in a program.",
            )
        if part.offset != end_bytes:
            break
        end_bytes += part.size_bytes
    if end_bytes != total_bytes or sum(part.size_bytes for part in parts) != total_bytes:
        raise wrong_length(shown, end_bytes, total_bytes)
    return parts


def not_the_owner(shown: str) -> InvalidInputError:
    """Return the error that a member tried to complete an upload."""
    return InvalidInputError(
        f"Only the process that started the upload of {shown} completes it.",
        next_step="Send this member's receipts to the owner.",
    )


def wrong_length(shown: str, found_bytes: int, total_bytes: int) -> StorageError:
    """Return the error that an upload holds another length than its object should have."""
    return StorageError(
        f"{shown} was sent without a gap up to byte {found_bytes} instead of {total_bytes}; "
        "it was not made visible.",
        path=shown,
        next_step="Save again.",
    )


def gone(shown: str, found_bytes: int | None, total_bytes: int) -> StorageError:
    """Return the error that an upload vanished, and `found_bytes` of ours bear the name."""
    found = "nothing" if found_bytes is None else f"{found_bytes} bytes"
    return StorageError(
        f"The upload of {shown} is gone, and {found} of ours lies under its name "
        f"instead of {total_bytes} bytes.",
        path=shown,
        next_step="Save again; look for a lifecycle rule that aborts uploads early.",
    )


def ended(shown: str) -> StorageError:
    """Return the error that an upload was aborted before."""
    return StorageError(
        f"The upload of {shown} was aborted before.", path=shown, next_step="Start a new one."
    )


def joined(buffers: Sequence[memoryview]) -> bytes:
    """Return the bytes of consecutive views in one object; the clients take nothing else."""
    if len(buffers) == 1:
        whole = buffers[0].obj
        if isinstance(whole, bytes) and len(whole) == buffers[0].nbytes:
            return whole
    return b"".join(buffers)
