"""Where outputs go, and whether that is the place that they are read from.

Names prove that two roots are one place, never that they are not: links, mounts, profiles and
spellings of an endpoint lead to the same files. So a probe is put at the target and looked for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpt_storage.commit.slotlog import is_there
from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.format.names import probe_path
from ckpt_storage.store import Location, endpoint_of
from ckpt_storage.store.store import Store


def location_beside(
    source: Location, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> Location:
    """Return where `url` is; without options of its own, with those of a source of its kind."""
    location = Location.of(url, storage_options)
    if storage_options is None and location.protocol == source.protocol:
        return Location.of(url, source.storage_options)
    return location


def split_file(location: Location) -> tuple[Location, str]:
    """Return the folder of a file, and the file's name; "" if it is a root."""
    head, _, name = location.target.rpartition("/")
    is_root = not head or head.endswith(":/")
    target = location.target if is_root and head else head or "/"
    return replace(location, target=target), "" if is_root and head else name


def is_within(outer: Location, inner: Location) -> bool:
    """Return whether names alone tell that `inner` is `outer`, or lies below it."""

    def spelt(one: Location) -> str:
        # Of the options only these lead to another storage.
        who = (one.protocol, endpoint_of(one), str(one.storage_options.get("profile") or ""))
        return f"{who} {os.path.realpath(one.target) if one.is_local else one.url}"

    return f"{spelt(inner)}/".startswith(f"{spelt(outer).rstrip('/')}/")


@contextlib.contextmanager
def probed(target: Store) -> Iterator[str]:
    """Put a file of a random name at the target, give its path, and remove it."""
    path = probe_path()
    target.make_folders([])
    target.put(path, b"Who else sees this?")
    try:
        yield path
    finally:
        with contextlib.suppress(CheckpointError):
            target.delete([path])


def place_within(source: Store, target: Store) -> str | None:
    """Return where below the source's root that of the target lies, "" for the very same.

    None: elsewhere, or nothing lies there or may be written there: then nothing can be harmed.
    """
    refused = {"not-found", "permission"}
    try:
        if not target.list("", recursive=False):
            return None
    except StorageError as error:
        if error.kind not in refused:
            raise
        if error.kind == "not-found":
            return None
    try:
        with probed(target) as name:
            try:
                if is_there(source, name):
                    return ""
            except StorageError as error:
                # Some storages refuse those who may not list what is not there.
                if error.kind not in refused:
                    raise
            paths = (one.path for one in source.list(""))
            return next((p[: -len(name) - 1] for p in paths if p.endswith(f"/{name}")), None)
    except StorageError as error:
        if error.kind not in refused:
            raise
        return None
