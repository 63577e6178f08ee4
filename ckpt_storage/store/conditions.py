"""Puts under a condition: what a lost answer means is read back, and tried again in doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_storage.errors import IntegrityError, StorageError

from .calls import nothing_was_done

if TYPE_CHECKING:
    from .store import Store

_DEFINITE = frozenset({"credentials", "no-space", "not-found", "permission", "unsupported"})
"""Answers that prove that nothing was put, and that change nothing about an earlier request."""


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
