"""Whether two roots are one place, and whether all ranks see the same places.

Names prove that two roots are one place, never that they are not: a link, a mount, two profiles or
two spellings of an endpoint lead to the same files. So a file of a random name is put at the target
and looked for: through the source's own store, and by all ranks.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_storage.commit.slotlog import is_there
from ckpt_storage.coordination.failures import spell_ranks
from ckpt_storage.errors import CheckpointError, InvalidInputError, RankMismatchError, StorageError
from ckpt_storage.format.names import STOCK_METADATA, probe_path
from ckpt_storage.store.location import Location
from ckpt_storage.store.store import Store

_SAMPLE_COUNT = 64

_WHERE = (
    "endpoint_url",
    "endpoint",
    "account_host",
    "account_name",
    "base_url",
    "connection_string",
    "host",
    "port",
    "profile",
)
"""Options that may lead to another storage; all others change who asks, not whom."""


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


def is_within(outer: Location, inner: Location) -> bool:
    """Return whether names alone tell that `inner` is `outer`, or lies below it."""
    if outer.protocol != inner.protocol:
        return False
    if not outer.is_local and _endpoint(outer) != _endpoint(inner):
        return False
    above, below = _resolved(outer), _resolved(inner)
    return below == above or below.startswith(f"{above.rstrip('/')}/")


def _resolved(location: Location) -> str:
    return os.path.realpath(location.target) if location.is_local else location.url


def _endpoint(location: Location) -> list[str]:
    inner = location.storage_options.get("client_kwargs")
    sides: list[Mapping[str, Any]] = [location.storage_options]
    if isinstance(inner, Mapping):
        sides.append(inner)
    return [str(side[name]).rstrip("/") for name in _WHERE for side in sides if side.get(name)]


def place_within(source: Store, target: Store, *, is_deep: bool = True) -> str | None:
    """Return where below the source's root that of the target lies, "" for the very same.

    None: elsewhere. Puts a file of a random name at the target and removes it, unless nothing lies
    there, or nothing may be written there: then nothing there can be harmed. Without `is_deep`
    only the source's root itself is looked at. Raises `StorageError`.
    """
    if not _holds_anything(target):
        return None
    name = probe_path()
    try:
        target.put(name, b"Is this folder the one that is read from?")
    except StorageError as error:
        if error.kind == "permission":
            return None
        raise
    try:
        if _is_seen(source, name):
            return ""
        return _below(source, name) if is_deep else None
    finally:
        with contextlib.suppress(StorageError):
            target.delete([name])


def _holds_anything(store: Store) -> bool:
    try:
        return bool(store.list("", recursive=False))
    except StorageError as error:
        if error.kind not in {"not-found", "permission"}:
            raise
        return error.kind == "permission"


def _is_seen(store: Store, name: str) -> bool:
    try:
        return is_there(store, name)
    except StorageError as error:
        # Some storages answer so for what is not there to those who may not list.
        if error.kind == "permission":
            return False
        raise


def _below(store: Store, name: str) -> str | None:
    try:
        paths = [entry.path for entry in store.list("")]
    except StorageError as error:
        if error.kind in {"not-found", "permission"}:
            return None
        raise
    return next((path[: -len(name) - 1] for path in paths if path.endswith(f"/{name}")), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What every rank must find: files of the source, and a probe in the output folder.

    `missing` are those of `files` that the coordinator does not find either. `probe` is a path,
    None if none is needed; `nonce` is what it holds.
    """

    files: tuple[str, ...]
    missing: tuple[str, ...]
    probe: str | None
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank did not find; empty if all is well."""

    host: str
    files: tuple[str, ...] = ()
    is_probe_missing: bool = False

    def agrees_with(self, marks: Marks) -> bool:
        """Return whether the rank found all that the coordinator finds, and no more."""
        return self.files == marks.missing and not self.is_probe_missing


def place_marks(files: Sequence[str], source: Store, target: Store, *, world_size: int) -> Marks:
    """Choose a sample of the source's files, and write a probe to `target`.

    Coordinator only; `remove_marks` takes the probe away. Storages that every process reaches by
    the same requests need no look.
    """
    sample: Sequence[str] = ()
    probe, nonce = None, os.urandom(16).hex().encode()
    if world_size > 1 and _may_be_apart(source):
        sample = files[:: -(-len(files) // _SAMPLE_COUNT) or 1]
    if world_size > 1 and _may_be_apart(target):
        probe = probe_path()
        target.make_folders([])
        target.put(probe, nonce)
    missing = tuple(path for path in sample if not is_there(source, path))
    return Marks(files=tuple(sample), missing=missing, probe=probe, nonce=nonce)


def remove_marks(marks: Marks, target: Store) -> None:
    """Remove the probe, best effort."""
    if marks.probe is not None:
        with contextlib.suppress(CheckpointError):
            target.delete([marks.probe])


def look(marks: Marks, source_store: Store, target: Store) -> Seen:
    """Look for all marks; any rank."""
    # A file that was cut is found by reading it, with the tensor that it cuts.
    missing = [path for path in marks.files if not is_there(source_store, path)]
    is_probe_missing = False
    if marks.probe is not None:
        try:
            is_probe_missing = target.get(marks.probe).data != marks.nonce
        except StorageError as error:
            if error.kind != "not-found":
                raise
            is_probe_missing = True
    return Seen(host=socket.gethostname(), files=tuple(missing), is_probe_missing=is_probe_missing)


def check_seen(seen: Sequence[Seen], source_url: str, target_url: str) -> None:
    """Raise `RankMismatchError` naming nodes if ranks do not see the same; coordinator only.

    A file that nobody finds is not lost on the way to some node: reading says what it held.
    """
    nobody = set(seen[0].files).intersection(*(one.files for one in seen))
    blind = {rank: one for rank, one in enumerate(seen) if set(one.files) - nobody}
    if blind:
        first = next(iter(blind.values()))
        path = next(path for path in first.files if path not in nobody)
        finders = [rank for rank, one in enumerate(seen) if path not in one.files]
        raise RankMismatchError(
            f"{source_url} is not the same on all nodes: {path} is there on "
            f"{_nodes(seen, finders)}, but not on {_nodes(seen, list(blind))}.",
            values={_nodes(seen, finders): finders, _nodes(seen, list(blind)): list(blind)},
            path=path,
            phase="plan",
            next_step="Save to a file system that all nodes share or to an object store, or copy "
            "the files of all nodes to one place; then read that.",
        )
    apart = [rank for rank, one in enumerate(seen) if one.is_probe_missing]
    if apart:
        near = [rank for rank in range(len(seen)) if rank not in apart]
        raise RankMismatchError(
            f"{target_url} is not the same on all nodes: what rank 0 writes there is not seen on "
            f"{_nodes(seen, apart)}.",
            values={_nodes(seen, near): near, _nodes(seen, apart): apart},
            path=target_url,
            phase="plan",
            next_step="Give an output on a file system that all nodes share or on an object "
            "store, or work with the ranks of one node, or with one process.",
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


TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


FOLDER_FILES = (".distcp", ".safetensors", ".json", STOCK_METADATA)
"""How the names end that a folder of some format may get."""


def split_file(location: Location) -> tuple[Location, str]:
    """Return the folder of a file, and the file's name."""
    head, _, name = location.target.rpartition("/")
    is_root = not head or head.endswith(":/")
    target = head or "/"
    return Location(
        protocol=location.protocol,
        target=location.target if is_root and head else target,
        storage_options=location.storage_options,
    ), "" if is_root and head else name


def check_elsewhere(
    source: tuple[Store, Location],
    target: tuple[Store, Location],
    paths: Callable[[], set[str]],
    *,
    from_file: bool,
    to_file: bool,
) -> None:
    """Refuse a target that would replace files of the source; the storages are asked.

    `paths` gives the files of the source. Of a file the store is that of its folder.
    """
    name = split_file(target[1])[1]
    if to_file and not (name and is_there(target[0], name)):
        return
    within = place_within(source[0], target[0], is_deep=not from_file)
    if within is None:
        return
    if to_file:
        if f"{within}/{name}".lstrip("/") in paths():
            raise InvalidInputError(
                f"{target[1].url} is part of {source[1].url}, which is to be converted.",
                next_step="Give another name for the result.",
            )
    elif from_file:
        if split_file(source[1])[1].endswith(FOLDER_FILES):
            raise onto_itself(source[1].url)
    elif not within or any(path.startswith(f"{within}/") for path in paths()):
        raise onto_itself(source[1].url)


def onto_itself(url: str) -> InvalidInputError:
    """Return the error for a result that would replace its source."""
    return InvalidInputError(
        f"{url} would be converted onto itself, or into its own files.",
        next_step="Give another folder for the result.",
    )
