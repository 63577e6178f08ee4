"""Reads of ranges: each is filled and checked before the next, and the length of the object too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ckpt_storage.errors import IntegrityError, StorageError

from .backend import Backend, Range, ShortReadError
from .calls import Calls
from .problems import damaged
from .threads import report_progress


def fill_ranges(
    calls: Calls, backend: Backend, path: str, ranges: Iterable[Range], size_bytes: int | None
) -> list[Exception]:
    """Fill ranges of an object, once; return what iterating over the ranges raised, if any."""
    revocable = _RevocableRanges(ranges)
    try:
        _check_length(calls, path, size_bytes, backend.read(path, iter(revocable)))
    except ShortReadError as error:
        position = error.position
    except Exception as error:
        if revocable.failures:
            if isinstance(revocable.failures[0], IntegrityError) and size_bytes is not None:
                # A wrong length is reported as such, not as the first wrong block.
                _check_length(calls, path, size_bytes, backend.stat(path).size_bytes)
            return revocable.failures
        if getattr(calls.explain(error, "read", path), "kind", "") != "range":
            raise
        position = revocable.start
    else:
        return []
    total_bytes = backend.stat(path).size_bytes
    _check_length(calls, path, size_bytes, total_bytes)
    shown, start, stop = calls.shown(path), revocable.start, revocable.stop
    if total_bytes >= stop:
        what = f"The read of {shown} ended after {position - start} of {stop - start} bytes."
        step = "Try again; if this repeats, look for a proxy that truncates responses."
        raise StorageError(what, kind="connection", retryable=True, path=shown, next_step=step)
    what = f"{shown} ends at byte {total_bytes}, within the requested range [{start}, {stop})."
    raise damaged(path, what, total_bytes)


def _check_length(
    calls: Calls, path: str, size_bytes: int | None, actual_bytes: int | None
) -> None:
    if actual_bytes is not None and size_bytes not in {None, actual_bytes}:
        text = f"{calls.shown(path)} has {actual_bytes} bytes instead of {size_bytes}."
        raise damaged(path, text, min(actual_bytes, size_bytes or 0))


class _RevocableRanges:
    """Ranges for a backend; each view is released at the next, so that nothing fills it late."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = ranges
        self.start = self.stop = 0
        self.failures: list[Exception] = []

    def __iter__(self) -> Iterator[Range]:
        try:
            for start, view in self._ranges:
                if not view.nbytes:
                    continue
                self.start, self.stop = start, start + view.nbytes
                buffer = memoryview(view).cast("B")
                # Each range has the timeout of a request.
                report_progress()
                try:
                    yield start, buffer
                finally:
                    # A running system call keeps its view.
                    with contextlib.suppress(BufferError):
                        buffer.release()
                report_progress()
        except Exception as error:
            self.failures.append(error)
            raise
