"""The base of a save: what one rank wrote of an earlier save, to be compared and reused.

No byte of a reused file passes through the process: the file is linked, or the storage copies it.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ckpt_storage.errors import FormatError, IntegrityError, StorageError
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.crc import combine_many, crc32c_of
from ckpt_storage.format.documents import unseal
from ckpt_storage.format.names import rank_manifest_path
from ckpt_storage.format.rank_manifest import NO_HASH, RankManifest, ShardFile
from ckpt_storage.options import KIB, MIB
from ckpt_storage.store.backend import CopySource, PartCopy
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import COPY_REFUSALS, copies_parts
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.objects import read_decoded
from ckpt_storage.transfer.workers import some_at_once

from .hashes import new_hash
from .shardfile import Item

_WINDOW_BYTES = 4 * MIB
_PIECE_BYTES = 64 * KIB
"""How many bytes are hashed by one call: so few that `xxhash` keeps the interpreter's lock.

A thread that releases the lock waits to get it back while another thread runs Python.
"""

_COPY_PART_BYTES = 64 << 20
_MAX_COPY_PARTS = 9_000

_COPY_FAILURES = frozenset({*COPY_REFUSALS, "not-found", "other", "precondition", "refused"})
"""Kinds of errors of a copy after which the file is written: none says that a write fails, too."""

log = logging.getLogger("ckpt_storage")

Key = tuple[str, Box | None]
"""The name and the chunk of an item; None for a blob."""


def key_of_item(item: Item) -> Key:
    """Return the key of an item."""
    return item.fqn, None if item.dtype is None else Box(item.offsets, item.sizes)


OWN_SAVES: deque[str] = deque(maxlen=64)
"""The last saves that this process wrote; in a container that starts again, the process id and the
host name are those of the process before.
"""


class _StoredItem(NamedTuple):
    """An item of the base: its file, its position there, and the CRC-32C of its first block."""

    file: ShardFile
    at: int
    first_crc: int


class Base:
    """What this rank wrote of the save that is the base, and where it lies."""

    def __init__(self, store: Store, manifest: RankManifest) -> None:
        self.store = store
        self.manifest = manifest
        self.items: dict[Key, _StoredItem] = {}
        self.moving: set[Key] = set()
        for file in manifest.files:
            keys = self.keys_of(file)
            self.moving.update(keys[at] for at in file.moving)
            starts = file.block_starts() if file.hashes else ()
            for at, (key, (start, stop)) in enumerate(zip(keys, pairwise(starts), strict=False)):
                first_crc = file.block_crcs[start] if start < stop else 0
                self.items[key] = _StoredItem(file, at, first_crc)

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process wrote it."""
        return self.manifest.save_id in OWN_SAVES

    def keys_of(self, file: ShardFile) -> list[Key]:
        """Return the keys of the items of a file, in its order."""
        fqns = self.manifest.fqns
        return [(fqns[fqn], self.manifest.box_of(file, at)) for at, fqn in enumerate(file.fqn)]

    def has_same(self, key: Key, item: Item) -> bool:
        """Return whether an item has the same bytes in the base.

        The first block is compared by its checksum, so that most changed values are read no
        further; the rest by the hash of the payload.
        """
        stored = self.items.get(key)
        if stored is None:
            return False
        file, at, first_crc = stored
        dtype = None if file.dtype[at] < 0 else self.manifest.dtypes[file.dtype[at]]
        is_alike = (dtype, file.payload_bytes[at]) == (item.dtype, item.payload_bytes)
        if file.hash_of(at) == NO_HASH or not is_alike:
            return False
        first_bytes, digest = min(file.block_bytes, item.payload_bytes), new_hash()
        views = item.views(_WINDOW_BYTES)
        starts = ((view, at) for view in views for at in range(0, len(view), _PIECE_BYTES))
        for number, (view, start) in enumerate(starts):
            piece = view[start : start + _PIECE_BYTES]
            # Most values that change differ in their first block.
            is_block = number == 0 and len(piece) >= first_bytes
            if is_block and crc32c_of(piece[:first_bytes]) != first_crc:
                return False
            digest.update(piece)
        return digest.digest() == file.hash_of(at)


def read_base(store: Store, save_id: str, *, rank: int) -> Base | None:
    """Return what a rank wrote of a base; None if it wrote nothing, or, with a warning, for damage.

    The base may have another world size, since items are compared by name and chunk.
    """
    path = rank_manifest_path(save_id, rank)

    def decode(data: bytes) -> RankManifest:
        return RankManifest.from_body(unseal(data, path=path), where=path)

    try:
        manifest = read_decoded(store, path, decode)
    except (FormatError, IntegrityError, StorageError) as error:
        warn_useless(store.url, error)
        return None
    if manifest is None:
        return None
    if (manifest.save_id, manifest.rank) != (save_id, rank):
        warn_useless(store.url, f"{path} is of save {manifest.save_id}, rank {manifest.rank}")
        return None
    return Base(store, manifest)


def warn_useless(url: str, reason: object) -> None:
    """Log that nothing of a base is reused."""
    log.warning("No file of the base %s is reused; all is written: %s", url, reason)


def copy_file(
    base: Base, stored: ShardFile, store: Store, path: str, *, thread_count: int, deadline: Deadline
) -> bool:
    """Link a file of the base to `path`, or have the storage copy it; return whether it could.

    The file must have its length, and its checksum if the storage reports one.
    """
    try:
        source = base.store.copy_source(stored.path)
        if source is not None and store.can_copy_objects_of(base.store):
            crc32c = store.copy_object(path, source, size_bytes=stored.size_bytes)
        elif source is not None and store.can_copy_from(base.store):
            crc32c = _copy_parts(source, stored, store, path, thread_count, deadline)
        else:
            return False
    except StorageError as error:
        if error.kind not in _COPY_FAILURES:
            raise
        level = logging.WARNING if error.kind == "other" else logging.DEBUG
        log.log(level, "%s is written and not reused: %s", path, error)
        return False
    except IntegrityError as error:
        log.warning("%s is written and not reused: %s", path, error)
        return False
    if crc32c not in {None, stored.crc32c}:
        log.warning(
            "%s is written and not reused: %s has another checksum than it was written with. "
            "Verify %s.",
            *(path, base.store.shown(stored.path), base.store.url),
        )
        return False
    return True


def _copy_parts(
    source: CopySource,
    stored: ShardFile,
    store: Store,
    path: str,
    thread_count: int,
    deadline: Deadline,
) -> int | None:
    """Copy a file in parts; return its checksum if the storage reports those of the parts.

    Raises `StorageError` of a kind in `COPY_REFUSALS` if the storage does not copy.
    """
    size_bytes = stored.size_bytes
    part_bytes = max(_COPY_PART_BYTES, -(-size_bytes // _MAX_COPY_PARTS))
    edges = [*range(0, size_bytes, part_bytes), size_bytes]
    copies = [
        PartCopy(
            number=number,
            offset=start,
            source=source,
            start=start,
            length=stop - start,
            source_bytes=size_bytes,
        )
        for number, (start, stop) in enumerate(pairwise(edges))
    ]
    if not copies_parts(store, path, copies[0]):
        raise StorageError(f"The storage does not copy to {path}.", kind="unsupported")
    upload = store.upload(path)
    try:
        crcs = some_at_once(
            [partial(upload.copy_part, copy) for copy in copies],
            thread_count,
            name=f"copy {path}",
            deadline=deadline,
        )
        upload.complete(size_bytes)
    except BaseException as error:
        try:
            upload.abort()
        except StorageError as failure:
            error.add_note(f"Discarding the upload failed too: {failure}")
        raise
    known = [crc for crc in crcs if crc is not None]
    if len(known) < len(crcs):
        return None
    return combine_many(known, [copy.length for copy in copies])
