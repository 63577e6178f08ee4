"""Whether two roots are one place, and whether all ranks see the same places.

Names prove that two roots are one place, never that they are not: links, mounts, profiles and
spellings of an endpoint lead to the same files. So a file of a random name is put at the target and
looked for: through the source's own store, and by all ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_storage.commit.slotlog import is_there
from ckpt_storage.coordination.failures import spell_ranks
from ckpt_storage.errors import RankMismatchError, StorageError
from ckpt_storage.format.names import probe_path
from ckpt_storage.store import Location, endpoint_of
from ckpt_storage.store.store import Store


def location_beside(
    source: Location,
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
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


def place_within(source: Store, target: Store) -> str | None:
    """Return where below the source's root that of the target lies, "" for the very same.

    None: elsewhere. Puts a file of a random name at the target and removes it, unless nothing lies
    there or may be written there: then nothing there can be harmed. Raises `StorageError`.
    """
    name = probe_path()
    try:
        if not target.list("", recursive=False):
            return None
    except StorageError as error:
        if error.kind == "not-found":
            return None
        if error.kind != "permission":
            raise
    try:
        target.put(name, b"Is this folder the one that is read from?")
    except StorageError as error:
        if error.kind == "permission":
            return None
        raise
    # Some storages refuse those who may not list what is not there.
    try:
        with _unless_refused():
            if is_there(source, name):
                return ""
        with _unless_refused():
            paths = (one.path for one in source.list(""))
            return next((p[: -len(name) - 1] for p in paths if p.endswith(f"/{name}")), None)
        return None
    finally:
        with contextlib.suppress(StorageError):
            target.delete([name])


@contextlib.contextmanager
def _unless_refused() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        if error.kind not in {"not-found", "permission"}:
            raise


def put_probe(target: Store) -> str:
    """Put a file that all ranks must see at the target; return its path, "" if none is needed.

    Storages that every process reaches by the same requests need no look.
    """
    if target.capabilities.is_remote and target.capabilities.shared:
        return ""
    path = probe_path()
    target.make_folders([])
    target.put(path, b"Do all ranks see this?")
    return path


def check_seen(seen: Sequence[tuple[str, bool]], url: str) -> None:
    """Raise `RankMismatchError` if not all ranks (host, whether it saw) see the probe at `url`."""
    blind = [rank for rank, (_, sees) in enumerate(seen) if not sees]
    if not blind:
        return
    hosts = ", ".join(sorted({seen[rank][0] for rank in blind}))
    apart = f"{hosts} (rank{'s' if len(blind) > 1 else ''} {spell_ranks(blind)})"
    raise RankMismatchError(
        f"{url} is not the same on all nodes: what rank 0 writes there is not seen on {apart}.",
        values={apart: blind},
        path=url,
        phase="plan",
        next_step="Give an output on a file system that all nodes share or on an object store, or "
        "work with the ranks of one node, or with one process.",
    )
