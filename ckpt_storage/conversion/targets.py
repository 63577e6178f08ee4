"""One target of each format, from the first look at the folder to what makes it a checkpoint.

Knows in which order a target comes into being; how a format is spelt is its module's. Called by
`converting`. The modules that import torch are imported for the formats that need them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from ckpt_storage import cleaning, commit, integrity, layout
from ckpt_storage.deadline import Deadline
from ckpt_storage.documents import FileRef
from ckpt_storage.errors import CheckpointError, CheckpointExistsError, InvalidInputError
from ckpt_storage.foreignfolder import ForeignFolder
from ckpt_storage.options import RetryPolicy, TransferOptions
from ckpt_storage.rankreport import RankReport
from ckpt_storage.slotlog import is_there
from ckpt_storage.store import Location
from ckpt_storage.store.base import Store
from ckpt_storage.store.probe import probe_exclusive_create
from ckpt_storage.workers import bounded

from .values import Values

__all__ = ["FORMATS", "Target", "TargetFormat", "split_file", "write_target"]

TargetFormat = Literal["ckpt_storage", "dcp", "dcp_safetensors", "safetensors", "torch_save"]
"""ours; stock DCP; torch's sharded safetensors; one Hugging Face export; a file of torch.save."""

FORMATS: tuple[TargetFormat, ...] = get_args(TargetFormat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the values go, in which format and by what means.

    `open` opens a location with the deadline of the work; `options_for` says what may be used of
    memory and threads on a store.
    """

    format: TargetFormat
    location: Location
    source_url: str
    overwrite: bool
    max_file_bytes: int
    unsafe_pickle: bool
    deadline: Deadline
    commit_timeout_s: float
    retry: RetryPolicy
    on_bytes: Callable[[int], None]
    open: Callable[[Location], Store]
    options_for: Callable[[Store], TransferOptions]


def write_target(values: Values, target: Target) -> str | None:
    """Write all values; return the save id if the target is a checkpoint of ours.

    Whole on return. After an error the target looks like no checkpoint, or like the one of ours or
    the file that it was to replace; where a storage cannot replace a file in one step, that file is
    gone once writing has begun, and only `overwrite` gives leave for it. Raises
    `CheckpointExistsError`, `InvalidInputError`, `StorageError`, `IntegrityError`,
    `PhaseTimeoutError`.
    """
    if target.format == "ckpt_storage":
        return _write_ours(values, target)
    if target.format == "torch_save":
        _write_torch(values, target)
    elif target.format == "dcp":
        _write_dcp(values, target)
    else:
        _write_safetensors(values, target)
    return None


def _write_ours(values: Values, target: Target) -> str:
    """Write one save of one rank and commit it as any save is committed."""
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415  # this target is torch's
        MetadataIndex,
        StorageMeta,
    )
    from torch.distributed.checkpoint.storage import WriteResult  # noqa: PLC0415  # as above

    from ckpt_storage.committing import commit_save  # noqa: PLC0415  # as above

    from .shards import ShardTarget, metadata_of  # noqa: PLC0415  # as above

    store = target.open(target.location)
    grant = commit.begin(
        store,
        overwrite=target.overwrite,
        probe=lambda found: probe_exclusive_create(found, key=target.location.scope()).exclusive,
    )
    try:
        manifest = ShardTarget(
            store=store,
            path_of=partial(layout.shard_path, grant.save_id, 0),
            save_id=grant.save_id,
            options=target.options_for(store),
            deadline=target.deadline,
            on_bytes=target.on_bytes,
            max_file_bytes=target.max_file_bytes,
        ).write(values)
        document = integrity.seal(manifest.to_body())
        reference = FileRef(
            path=layout.rank_manifest_path(grant.save_id, 0),
            size_bytes=len(document),
            crc32c=integrity.crc32c_of(document),
        )
        store.write(reference.path, document)
    except BaseException as error:
        # Nobody else knows of this attempt, and nothing was asked to commit it.
        try:
            cleaning.delete_attempt(store, grant.save_id)
        except CheckpointError as failure:
            error.add_note(f"Removing what was written failed too: {failure}")
        raise
    result = WriteResult(
        index=MetadataIndex("ckpt_storage.rank.0"),
        size_in_bytes=sum(file.size_bytes for file in manifest.files),
        storage_data=RankReport.of(manifest, reference, document, with_places=True),
    )
    deadline = Deadline("commit", target.commit_timeout_s)
    commit_save(
        bounded(store, deadline),
        grant,
        world_size=1,
        metadata=metadata_of(values),
        results=[[result]],
        storage_meta=StorageMeta(checkpoint_id=target.location.url),
        settled_ties={**{target: target for target in values.ties.values()}, **values.ties},
        user={},
        deadline=deadline,
        retry=target.retry,
    )
    return grant.save_id


def _write_dcp(values: Values, target: Target) -> None:
    """Write stock torch's layout; `.metadata` makes it a checkpoint."""
    from .shards import (  # noqa: PLC0415  # imports torch
        ShardTarget,
        planned_files,
        stock_pickle,
    )

    store = target.open(target.location)
    path_of = partial(layout.shard_name, 0)
    count = len(planned_files(values, target.max_file_bytes))
    folder = ForeignFolder(
        store, [*map(path_of, range(count)), layout.STOCK_METADATA], content="metadata"
    )
    _begin(folder, target)
    written = ShardTarget(
        store=store,
        path_of=path_of,
        save_id="",
        options=target.options_for(store),
        deadline=target.deadline,
        on_bytes=target.on_bytes,
        max_file_bytes=target.max_file_bytes,
    ).write(values)
    store.replace(layout.STOCK_METADATA, stock_pickle(values, written, target.location.url))
    folder.end()


def _write_safetensors(values: Values, target: Target) -> None:
    from .weights import (  # noqa: PLC0415  # loads numpy, as streaming does
        index_of,
        plan_sharded,
        plan_whole,
        write_weights,
    )

    store = target.open(target.location)
    is_export = target.format == "safetensors"
    plan = plan_whole if is_export else plan_sharded
    files = plan(values, target.max_file_bytes)
    folder = ForeignFolder(
        store, [file.name for file in files], content="indexed" if is_export else "unindexed"
    )
    _begin(folder, target)
    for file in files:
        write_weights(
            values,
            file,
            store,
            options=target.options_for(store),
            deadline=target.deadline,
            on_bytes=target.on_bytes,
        )
    folder.show(index_of(values, files) if is_export else None)
    folder.end()


def _begin(folder: ForeignFolder, target: Target) -> None:
    # Of an id of its own, so that no file of an earlier conversion is believed.
    identity = layout.new_write_id()
    folder.begin(identity, source=target.source_url, overwrite=target.overwrite)


def _write_torch(values: Values, target: Target) -> None:
    from .torchzip import write_torch_file  # noqa: PLC0415  # imports torch

    parent, name = split_file(target.location)
    if not name:
        raise InvalidInputError(
            f"{target.location.url} names no file.", next_step="Give a file, such as model.pt."
        )
    store = target.open(parent)
    is_taken = is_there(store, name)
    if is_taken and not target.overwrite:
        raise CheckpointExistsError(
            f"{target.location.url} is there.",
            path=target.location.url,
            phase="plan",
            next_step="Give another name, or pass overwrite=True to replace it.",
        )

    def make_room() -> None:
        if is_taken and not store.capabilities.atomic_replace:
            store.delete([name])

    store.prepare([])
    write_torch_file(
        values,
        store,
        name,
        options=target.options_for(store),
        deadline=target.deadline,
        on_bytes=target.on_bytes,
        unsafe_pickle=target.unsafe_pickle,
        make_room=make_room,
    )


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
