"""Whether two roots are one place, and whether all ranks see the same places.

Names prove that two roots are one place, never that they are not: a link, a mount, two profiles or
two spellings of an endpoint lead to the same files. So a file of a random name is put at the target
and looked for: through the source's own store, and by all ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpt_storage.commit.slotlog import is_there, read_if_there
from ckpt_storage.coordination.failures import spell_ranks
from ckpt_storage.errors import CheckpointError, InvalidInputError, RankMismatchError, StorageError
from ckpt_storage.format.names import PROBE_PREFIX, probe_path
from ckpt_storage.store import Location, endpoint_of
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.store import Store

T = TypeVar("T")

_SAMPLE_COUNT = 64


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
    """Return the folder of a file, and the file's name."""
    head, _, name = location.target.rpartition("/")
    is_root = not head or head.endswith(":/")
    folder = Location(
        protocol=location.protocol,
        target=location.target if is_root and head else head or "/",
        storage_options=location.storage_options,
    )
    return folder, "" if is_root and head else name


def is_within(outer: Location, inner: Location) -> bool:
    """Return whether names alone tell that `inner` is `outer`, or lies below it."""
    if (outer.protocol, _who(outer)) != (inner.protocol, _who(inner)):
        return False
    above, below = (
        os.path.realpath(one.target) if one.is_local else one.url for one in (outer, inner)
    )
    return below == above or below.startswith(f"{above.rstrip('/')}/")


def _who(location: Location) -> tuple[str, str]:
    """Return what of the options may lead to another storage; all else changes who asks."""
    return endpoint_of(location), str(location.storage_options.get("profile") or "")


def place_within(source: Store, target: Store, *, is_deep: bool = True) -> str | None:
    """Return where below the source's root that of the target lies, "" for the very same.

    None: elsewhere. Puts a file of a random name at the target and removes it, unless nothing lies
    there, or nothing may be written there: then nothing there can be harmed. Without `is_deep`
    only the source's root itself is looked at. Raises `StorageError`.
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
    try:
        # Some storages refuse those who may not list what is not there.
        if _allowed(lambda: is_there(source, name), instead=False):
            return ""
        nothing: list[ObjectInfo] = []
        below = _allowed(lambda: source.list(""), instead=nothing) if is_deep else nothing
        found = (one.path for one in below if one.path.endswith(f"/{name}"))
        return next((path[: -len(name) - 1] for path in found), None)
    finally:
        with contextlib.suppress(StorageError):
            target.delete([name])


def _allowed(ask: Callable[[], T], *, instead: T) -> T:
    """Return what a storage answers, or `instead` where it refuses to, or nothing is there."""
    try:
        return ask()
    except StorageError as error:
        if error.kind not in {"not-found", "permission"}:
            raise
        return instead


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What every rank must find: files of the source, and a probe in the output folder.

    `files` are a sample of those that the coordinator finds. `probe` is a path, "" if none is
    needed; `nonce` is what it holds.
    """

    files: tuple[str, ...] = ()
    probe: str = ""
    nonce: bytes = b""

    @classmethod
    def placed(cls, files: Sequence[str], source: Store, target: Store) -> Marks:
        """Choose a sample of the source's files, and write a probe; coordinator only.

        Storages that every process reaches by the same requests need no look.
        """
        sample = files[:: -(-len(files) // _SAMPLE_COUNT) or 1] if _may_be_apart(source) else ()
        # One that nobody finds is missed by who reads it, with the tensor that it holds.
        there = tuple(path for path in sample if is_there(source, path))
        if not _may_be_apart(target):
            return cls(files=there)
        marks = cls(files=there, probe=probe_path(), nonce=os.urandom(16).hex().encode())
        target.make_folders([])
        target.put(marks.probe, marks.nonce)
        return marks

    def remove(self, target: Store) -> None:
        """Remove the probe, best effort."""
        if self.probe:
            with contextlib.suppress(CheckpointError):
                target.delete([self.probe])

    def missing(self, source: Store, target: Store) -> tuple[str, ...]:
        """Return what this rank does not find."""
        missing = [path for path in self.files if not is_there(source, path)]
        if self.probe:
            found = read_if_there(target, self.probe)
            if found is None or found.data != self.nonce:
                missing.append(self.probe)
        return tuple(missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank did not find; empty if all is well."""

    host: str
    missing: tuple[str, ...] = ()


def check_seen(seen: Sequence[Seen], source_url: str, target_url: str) -> None:
    """Raise `RankMismatchError` naming nodes if ranks do not see the same; coordinator only."""
    path = next((path for one in seen for path in one.missing), None)
    if path is None:
        return
    blind = [rank for rank, one in enumerate(seen) if path in one.missing]
    finders = [rank for rank in range(len(seen)) if rank not in blind]
    near, apart = _nodes(seen, finders), _nodes(seen, blind)
    is_probe = path.startswith(PROBE_PREFIX)
    how = f"{path} is there on {near}, but not on {apart}"
    steps = "Save to a file system that all nodes share or to an object store, or copy the files "
    steps += "of all nodes to one place; then read that."
    if is_probe:
        how = f"what rank 0 writes there is not seen on {apart}"
        steps = "Give an output on a file system that all nodes share or on an object store, or "
        steps += "work with the ranks of one node, or with one process."
    url = target_url if is_probe else source_url
    raise RankMismatchError(
        f"{url} is not the same on all nodes: {how}.",
        values={near: finders, apart: blind},
        path=url if is_probe else path,
        phase="plan",
        next_step=steps,
    )


def _may_be_apart(store: Store) -> bool:
    capabilities = store.capabilities
    return not capabilities.is_remote or not capabilities.shared


def _nodes(seen: Sequence[Seen], ranks: Sequence[int]) -> str:
    """Return the hosts of some ranks, with the ranks."""
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(seen[rank].host, []).append(rank)
    return ", ".join(
        f"{host} (rank{'s' if len(held) > 1 else ''} {spell_ranks(held)})"
        for host, held in sorted(hosts.items())
    )


def onto_itself(url: str) -> InvalidInputError:
    """Return the error for a result that would replace its source."""
    return InvalidInputError(
        f"{url} would be converted onto itself, or into its own files.",
        next_step="Give another folder for the result.",
    )
