"""Errors that several backends raise, in the same words."""

from __future__ import annotations

from ckpt_storage.errors import IntegrityError, StorageError
from ckpt_storage.store.backend import PartCopy


def check_source(copy: PartCopy, found_bytes: int) -> None:
    """Raise `IntegrityError` unless a source of `found_bytes` is the one that a copy is made of."""
    end, wanted = copy.start + copy.length, copy.source_bytes
    if end > found_bytes or wanted not in {None, found_bytes}:
        of = "" if wanted is None else f" of {wanted}"
        raise IntegrityError(
            f"{copy.source.path} has {found_bytes} bytes; [{copy.start}, {end}){of} was to be "
            "copied.",
            path=copy.source.path,
            offset=min(found_bytes, end),
            next_step="The object is damaged or not the one that was saved.",
        )


def changed(path: str) -> StorageError:
    """Return the error that another version is there."""
    return StorageError(f"{path} is no longer of the version that was read.", kind="precondition")


def stuck(path: str, what: str, *, retryable: bool = False) -> StorageError:
    """Return the error that an upload cannot go on."""
    return StorageError(
        f"The upload of {path} {what}.",
        retryable=retryable,
        path=path,
        next_step="Try again later; the fault is the storage's." if retryable else "Save again.",
    )
