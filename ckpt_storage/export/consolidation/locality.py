"""Whether all ranks see one checkpoint and one output folder, or each node a disk of its own.

Storages that every process reaches by the same requests need no look.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_storage.commit.slotlog import is_there
from ckpt_storage.coordination.failures import spell_ranks
from ckpt_storage.errors import CheckpointError, RankMismatchError, StorageError
from ckpt_storage.format.exports import probe_path
from ckpt_storage.source.foreign import SafetensorsSource, StockSource
from ckpt_storage.source.model import CommittedSource, Source
from ckpt_storage.store.store import Store

_SAMPLE_COUNT = 64


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


def source_files(source: Source) -> list[str]:
    """Return the paths of the files that hold the tensors, sorted."""
    if isinstance(source, CommittedSource):
        return sorted(reference.path for reference, _ in source.manifest.files)
    if isinstance(source, StockSource):
        return sorted({item.relative_path for item in source.metadata.items.values()})
    if isinstance(source, SafetensorsSource):
        return sorted({place.path for place in source.held.values()})
    return []


def place_marks(source: Source, source_store: Store, target: Store, *, world_size: int) -> Marks:
    """Choose a sample of the source's files and write a probe to `target`, whose folders exist.

    Coordinator only; `remove_marks` takes the probe away.
    """
    files: list[str] = []
    probe, nonce = None, os.urandom(16).hex().encode()
    if world_size > 1 and _may_be_apart(source_store):
        found = source_files(source)
        files = found[:: -(-len(found) // _SAMPLE_COUNT) or 1]
    if world_size > 1 and _may_be_apart(target):
        probe = probe_path()
        target.put(probe, nonce)
    missing = tuple(path for path in files if not is_there(source_store, path))
    return Marks(files=tuple(files), missing=missing, probe=probe, nonce=nonce)


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
            "the files of all nodes to one place; then consolidate that.",
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
            "store, or consolidate with the ranks of one node, or with one process.",
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
