"""Which checkpoints are committed below a root, and publishing one. Imports no torch."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from ckpt_storage.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import Workers

from . import publishing
from .info import CheckpointInfo
from .slotlog import read_log

_THREADS = 8
log = logging.getLogger("ckpt_storage")

_NUMBER = re.compile(r"([0-9]+)")


def list_checkpoints(
    root_url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | Timeouts | Any = None,  # noqa: ANN401  # timedelta too; Timeouts.of checks
    retry: RetryPolicy | None = None,
) -> list[CheckpointInfo]:
    """Return the committed checkpoints directly below a root, ordered by name.

    Whether one is committed is read from its commit slots, never from a listing; the listing
    only tells which folders to ask. The order is that of the names, numbers in them counted as
    numbers (`step-900` before `step-1000`); `CheckpointManager.latest` returns the highest step.
    A root that is not there holds none. Any rank; not collective.

    A folder that may not be read is listed with the format "unreadable" and its `problem`: it may
    be the newest checkpoint. One whose commit records are damaged or of a newer format is left out
    with a warning in the log; `verify` says what is wrong with it.

    Raises `StorageError`, `PhaseTimeoutError`, `InvalidInputError`.
    """
    location = Location.of(root_url, storage_options)
    timeouts = Timeouts.of(timeout)
    deadline = Deadline("load", timeouts.load)
    retry = retry or RetryPolicy()
    root = open_store(location, timeouts=timeouts, retry=retry).bounded(deadline)
    try:
        entries = root.list("", recursive=False)
    except StorageError as error:
        if error.kind == "not-found":
            return []
        raise
    names = sorted(
        {entry.path.rstrip("/") for entry in entries if entry.path.endswith("/")}, key=_natural
    )
    found: dict[str, CheckpointInfo | None] = {}

    def look(name: str) -> None:
        child = location.child(name)
        store = open_store(child, timeouts=timeouts, retry=retry).bounded(deadline)
        try:
            found[name] = _info(store, child, name)
        except CheckpointError as error:
            if isinstance(error, StorageError):
                if error.kind != "permission":
                    raise
                found[name] = CheckpointInfo(
                    url=child.url, name=name, format="unreadable", problem=str(error)
                )
                return
            # One odd folder must not hide all others from a job that wants to resume.
            log.warning("%s is left out of the list: %s", child.url, error)

    if names:
        count = min(_THREADS, len(names))
        with Workers(count, name=f"list {root.url}", deadline=deadline) as workers:
            for name in names:
                workers.submit(partial(look, name))
            workers.drain()
    return [info for name in names if (info := found.get(name)) is not None]


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


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part[0] in "0123456789" else (-1, part)
        for part in _NUMBER.split(name)
        if part
    ]


def _info(store: Store, location: Location, name: str) -> CheckpointInfo | None:
    found = read_log(store)
    if found.head is not None:
        return CheckpointInfo.of(location.url, found.head, name=name)
    if publishing.is_foreign(store, found):
        return CheckpointInfo(url=location.url, name=name, format="dcp")
    return None
