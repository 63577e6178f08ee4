"""Publishing a checkpoint by its URL. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt_storage.errors import CheckpointNotFoundError
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline

from . import publishing
from .slotlog import read_log


def publish(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | Timeouts | Any = None,  # noqa: ANN401  # timedelta too; Timeouts.of checks
    retry: RetryPolicy | None = None,
) -> None:
    """Bring `.metadata`, by which torch's own readers load, up to the newest commit at `url`.

    For a save that raised `NotPublishedError`, once the cause is gone. Does nothing where
    `.metadata` is up to date. Any rank; not collective.

    Raises `StorageError` if it still cannot be replaced, `CheckpointNotFoundError` if there is no
    checkpoint of ours, `FormatError` if another tool saved a newer one there, `IntegrityError` if
    the copy that is to be published is damaged, `PhaseTimeoutError`, `InvalidInputError`.
    """
    location = Location.of(url, storage_options)
    timeouts = Timeouts.of(timeout)
    deadline = Deadline("commit", timeouts.commit)
    store = open_store(location, timeouts=timeouts, retry=retry or RetryPolicy()).bounded(deadline)
    with deadline.governs(f"Publishing {location.url}"):
        if read_log(store).head is None:
            raise CheckpointNotFoundError(
                f"{location.url} holds no checkpoint of this package.",
                path=location.url,
                phase="commit",
                next_step="Check the path; list_checkpoints(root) shows what is there.",
            )
        publishing.publish(store)
