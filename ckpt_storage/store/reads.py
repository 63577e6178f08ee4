"""Reads: which range is being filled, and why an answer ended early or was refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError

from .backend import Backend, Range, ShortReadError
from .timed import moved

_DAMAGED = "The file is damaged or not the one that was saved."


def fill(
    backend: Backend,
    path: str,
    ranges: Iterable[Range],
    *,
    size_bytes: int | None,
    shown: str,
    kind_of: Callable[[Exception], str],
) -> Exception | None:
    """Have ranges of an object of `size_bytes` filled; `shown` is its URL for messages.

    Return what `ranges` raised, which is none of the storage's errors. Raises `IntegrityError` if
    the object has another length or ends early, a retryable `StorageError` if only the answer
    does, and what the backend raises, of which `kind_of` tells the kind.
    """
    watch = _Watch(ranges)
    try:
        found_bytes = backend.read(path, watch)
    except ShortReadError as error:
        position = error.position
    except Exception as error:
        failure = watch.failure
        if failure is not None:
            if isinstance(failure, IntegrityError) and size_bytes is not None:
                # A file of another length is told as such, not by the first wrong block.
                _check_length(path, shown, size_bytes, backend.stat(path).size_bytes)
            return failure
        if kind_of(error) != "range":
            raise
        position = watch.start
    else:
        _check_length(path, shown, size_bytes, found_bytes)
        return None
    total_bytes = backend.stat(path).size_bytes
    _check_length(path, shown, size_bytes, total_bytes)
    raise _short(path, shown, watch, position, total_bytes)


def too_long(path: str, shown: str, size_bytes: int, most_bytes: int | None) -> IntegrityError:
    """Return the error that an object is longer than whoever reads it allows."""
    return IntegrityError(
        f"{shown} has {size_bytes} bytes or more, and {most_bytes} at most were to be expected; "
        "it was not read.",
        path=path,
        # Nothing was looked at.
        offset=0,
        next_step=_DAMAGED,
    )


def _check_length(path: str, shown: str, size_bytes: int | None, found_bytes: int | None) -> None:
    if size_bytes is None or found_bytes is None or found_bytes == size_bytes:
        return
    raise IntegrityError(
        f"{shown} has {found_bytes} bytes instead of {size_bytes}.",
        path=path,
        offset=min(found_bytes, size_bytes),
        next_step=_DAMAGED,
    )


def _short(
    path: str, shown: str, watch: _Watch, position: int, total_bytes: int
) -> CheckpointError:
    if total_bytes >= watch.stop:
        return StorageError(
            f"The read of {shown} ended after {position - watch.start} of "
            f"{watch.stop - watch.start} bytes.",
            kind="connection",
            retryable=True,
            path=shown,
            next_step="Try again; if it comes back, look for a proxy that cuts answers.",
        )
    return IntegrityError(
        f"{shown} ends at byte {total_bytes}, within the range [{watch.start}, {watch.stop}) that "
        "was asked for.",
        path=path,
        offset=total_bytes,
        next_step=_DAMAGED,
    )


class _Watch:
    """Ranges, and which of them is being filled: bytes [start, stop).

    What was lent is taken back with the next one, or at the end: nothing writes into it then,
    whatever a client that was left behind may still do.
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = ranges
        self.start = self.stop = 0
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[Range]:
        ranges = iter(self._ranges)
        while True:
            try:
                start, view = next(ranges)
            except StopIteration:
                return
            except Exception as error:
                self.failure = error
                raise
            if not view.nbytes:
                continue
            self.start, self.stop = start, start + view.nbytes
            lent = memoryview(view).cast("B")
            # Each range has the time of a request.
            moved()
            try:
                yield start, lent
            finally:
                # A system call that has it now keeps it.
                with contextlib.suppress(BufferError):
                    lent.release()
            moved()
