"""Reads: which range is being filled, and why an answer ended early or was refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError

from .backend import Backend, Range, ShortReadError
from .timed import moved

_DAMAGED = "The file is damaged or not the one that was saved."


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


class Reading:
    """One attempt to fill ranges of an object of `size_bytes`; `shown` is its URL for messages.

    What is lent to the backend is taken back with the next range, or at the end: nothing writes
    into it then, whatever a client that was left behind may still do.
    """

    def __init__(
        self, path: str, shown: str, ranges: Iterable[Range], size_bytes: int | None
    ) -> None:
        self._path = path
        self._shown = shown
        self._ranges = ranges
        self._size_bytes = size_bytes
        # Of the range that is being filled.
        self._start = self._stop = 0
        self._failure: Exception | None = None

    def run(self, backend: Backend, kind_of: Callable[[Exception], str]) -> Exception | None:
        """Have the ranges filled; return what their iterator raised, none of the storage's errors.

        Raises `IntegrityError` if the object has another length or ends early, a retryable
        `StorageError` if only the answer does, and what the backend raises, of which `kind_of`
        tells the kind.
        """
        try:
            self._check_length(backend.read(self._path, self._lent()))
        except ShortReadError as error:
            position = error.position
        except Exception as error:
            failure = self._failure
            if failure is not None:
                if isinstance(failure, IntegrityError) and self._size_bytes is not None:
                    # A file of another length is told as such, not by the first wrong block.
                    self._check_length(backend.stat(self._path).size_bytes)
                return failure
            if kind_of(error) != "range":
                raise
            position = self._start
        else:
            return None
        total_bytes = backend.stat(self._path).size_bytes
        self._check_length(total_bytes)
        raise self._short(position, total_bytes)

    def _lent(self) -> Iterator[Range]:
        ranges = iter(self._ranges)
        while True:
            try:
                start, view = next(ranges)
            except StopIteration:
                return
            except Exception as error:
                self._failure = error
                raise
            if not view.nbytes:
                continue
            self._start, self._stop = start, start + view.nbytes
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

    def _check_length(self, found_bytes: int | None) -> None:
        if found_bytes is not None and self._size_bytes not in {None, found_bytes}:
            raise IntegrityError(
                f"{self._shown} has {found_bytes} bytes instead of {self._size_bytes}.",
                path=self._path,
                offset=min(found_bytes, self._size_bytes or 0),
                next_step=_DAMAGED,
            )

    def _short(self, position: int, total_bytes: int) -> CheckpointError:
        if total_bytes >= self._stop:
            return StorageError(
                f"The read of {self._shown} ended after {position - self._start} of "
                f"{self._stop - self._start} bytes.",
                kind="connection",
                retryable=True,
                path=self._shown,
                next_step="Try again; if it comes back, look for a proxy that cuts answers.",
            )
        return IntegrityError(
            f"{self._shown} ends at byte {total_bytes}, within the range [{self._start}, "
            f"{self._stop}) that was asked for.",
            path=self._path,
            offset=total_bytes,
            next_step=_DAMAGED,
        )
