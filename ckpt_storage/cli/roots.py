"""Whether a root that holds no checkpoint is one at all: what is mistyped must not look empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["check_root"]


def check_root(root: str, options: dict[str, Any] | None, timeout: float | None) -> list[str]:
    """Return the folders at `root`; refuse one that is not there, or is a checkpoint itself.

    Raises `CheckpointNotFoundError`, `InvalidInputError`, `StorageError`.
    """
    from ckpt_storage.errors import CheckpointNotFoundError, InvalidInputError, StorageError  # noqa: PLC0415  # as above
    from ckpt_storage.format import layout  # noqa: PLC0415  # called, not imported
    from ckpt_storage.options import Timeouts  # noqa: PLC0415  # as above
    from ckpt_storage.store import Location, open_store  # noqa: PLC0415  # as above

    location = Location.of(root, options)
    try:
        store = open_store(location, timeouts=Timeouts.of(timeout))
        found = {entry.path for entry in store.list("", recursive=False)}
    except StorageError as error:
        if error.kind != "not-found":
            raise
        found = set()
    # An object storage has no empty folders.
    if not (Path(location.target).is_dir() if location.is_local else found):
        raise CheckpointNotFoundError(
            f"{location.url} does not exist.",
            path=location.url,
            phase="load",
            next_step="Check the path, the bucket and the storage options.",
        )
    if found & {f"{layout.COMMITS}/", layout.STOCK_METADATA}:
        raise InvalidInputError(
            f"{location.url} is a checkpoint itself, no folder of checkpoints.",
            path=location.url,
            next_step="Give the folder above it; ckpt-storage show tells what it holds.",
        )
    return sorted(path.rstrip("/") for path in found if path.endswith("/"))
