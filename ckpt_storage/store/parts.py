"""Bookkeeping that the uploads of all dialects share: which parts were sent, and joining views."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt_storage.errors import IntegrityError, InvalidInputError, StorageError
from ckpt_storage.options import MIB

from .base import PartReceipt


def encode_ticket(kind: str, path: str, fields: Mapping[str, str]) -> str:
    """Return the ticket for the upload of `path` on a storage of `kind`."""
    return json.dumps({"kind": kind, "path": path, **fields}, separators=(",", ":"))


def decode_ticket(ticket: str, kind: str, path: str, names: Collection[str]) -> Mapping[str, str]:
    """Return the fields `names` of a ticket; raises `InvalidInputError` if it is another's."""
    try:
        found = json.loads(ticket)
    except ValueError:
        found = None
    if (
        not isinstance(found, dict)
        or (found.get("kind"), found.get("path")) != (kind, path)
        or set(found) != {"kind", "path", *names}
        or not all(isinstance(value, str) for value in found.values())
    ):
        raise InvalidInputError(
            f"The ticket is not one for an upload of {path} on this storage.",
            path=path,
            next_step="Pass on what `ticket()` of that very upload returned.",
        )
    return found


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
