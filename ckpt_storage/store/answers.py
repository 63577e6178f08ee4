"""What answers mean: why a read ended early, and what became of a put under a condition."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckpt_storage.errors import IntegrityError, StorageError

from .backend import Backend, Range, ShortReadError
from .calls import moved, nothing_was_done
from .problems import damaged

if TYPE_CHECKING:
    from .store import Store

_DEFINITE = frozenset({"credentials", "no-space", "not-found", "permission", "unsupported"})
"""Answers that prove that nothing was put, and that change nothing about an earlier request."""


def fill(
    store: Store, backend: Backend, path: str, ranges: Iterable[Range], size_bytes: int | None
) -> list[Exception]:
    """Fill ranges of an object of `size_bytes`, once; return what their iterator raised, if it did.

    Raises `IntegrityError` if the object has another length or ends early, a retryable
    `StorageError` if only the answer does.
    """
    lent, shown = _Lent(ranges), store.shown(path)
    try:
        _check_length(path, shown, size_bytes, backend.read(path, iter(lent)))
    except ShortReadError as error:
        position = error.position
    except Exception as error:
        if lent.failures:
            if isinstance(lent.failures[0], IntegrityError) and size_bytes is not None:
                # A file of another length is told as such, not by the first wrong block.
                _check_length(path, shown, size_bytes, backend.stat(path).size_bytes)
            return lent.failures
        if getattr(store.explain(error, "read", path), "kind", "") != "range":
            raise
        position = lent.start
    else:
        return []
    total_bytes = backend.stat(path).size_bytes
    _check_length(path, shown, size_bytes, total_bytes)
    start, stop = lent.start, lent.stop
    if total_bytes >= stop:
        raise StorageError(
            f"The read of {shown} ended after {position - start} of {stop - start} bytes.",
            kind="connection",
            retryable=True,
            path=shown,
            next_step="Try again; if it comes back, look for a proxy that cuts answers.",
        )
    raise damaged(
        path,
        f"{shown} ends at byte {total_bytes}, within the range [{start}, {stop}) that was asked "
        "for.",
        total_bytes,
    )


class _Lent:
    """Ranges as a backend gets them; each is taken back with the next, so nothing fills it late."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = ranges
        self.start = self.stop = 0
        self.failures: list[Exception] = []

    def __iter__(self) -> Iterator[Range]:
        for start, view in self._noted():
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

    def _noted(self) -> Iterator[Range]:
        try:
            yield from self._ranges
        except Exception as error:
            self.failures.append(error)
            raise


def _check_length(path: str, shown: str, size_bytes: int | None, found_bytes: int | None) -> None:
    if found_bytes is not None and size_bytes not in {None, found_bytes}:
        text = f"{shown} has {found_bytes} bytes instead of {size_bytes}."
        raise damaged(path, text, min(found_bytes, size_bytes or 0))


def put_settled(
    store: Store,
    operation: str,
    path: str,
    data: bytes,
    *,
    if_absent: bool = False,
    if_match: str | None = None,
) -> None:
    """Put an object under a condition; see `Store.create` and `Store.replace`."""
    shown = store.shown(path)
    is_posix = store.capabilities.kind == "posix"
    in_doubt, unsynced = False, False
    for attempt in range(1, store.policy.attempt_count + 1):
        try:
            store.put_once(path, data, what=operation, if_absent=if_absent, if_match=if_match)
        except StorageError as error:
            failure = error
        else:
            return
        if is_posix and failure.kind not in {"exists", "timeout"}:
            # The name is linked first and its folder synced then. A failed fsync proves
            # nothing, and must not be tried again.
            unsynced = True
            in_doubt |= failure.retryable
        else:
            # What was not answered may still arrive.
            in_doubt |= not (failure.kind in _DEFINITE or nothing_was_done(failure))
        found = whose(store, path, data, if_match)
        if found == "other":
            kind = "exists" if if_match is None else "precondition"
            raise taken(shown, operation, kind) from failure
        if found == "ours" and not unsynced:
            return
        if not in_doubt and (found == "nothing" or not unsynced):
            raise failure
        is_last = found == "ours" or attempt == store.policy.attempt_count
        if is_last or not store.pause(attempt):
            break
    there = "; it is there, but" if found == "ours" else ""
    raise StorageError(
        f"The outcome of the {operation} of {shown} is not known{there}: {failure}",
        kind="unknown",
        path=shown,
        next_step="Look at the object when the storage answers again.",
    ) from failure


def whose(store: Store, path: str, data: bytes, version: str | None) -> str:
    """Return whose an object is: "ours", "other", "nothing" new, or "untold"."""
    try:
        found = store.get(path, max_bytes=len(data) if version is None else None)
    except IntegrityError:
        return "other"
    except StorageError as error:
        if error.kind != "not-found":
            return "untold"
        return "nothing" if version is None else "other"
    if found.data == data:
        return "ours"
    return "nothing" if version is not None and found.version == version else "other"


def taken(shown: str, operation: str, kind: str) -> StorageError:
    """Return the error that something else is where an object was to be put."""
    return StorageError(
        f"The {operation} of {shown} was refused: something else is there.",
        kind=kind,
        path=shown,
        next_step="Read it again; somebody else wrote it.",
    )
