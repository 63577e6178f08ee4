"""One target of each format, from the first look at the folder to what makes it a checkpoint.

The modules that import torch are imported for the formats that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit import cleaning
from ckpt_storage.commit.reporttable import RankReport
from ckpt_storage.commit.slotlog import is_there, read_if_there
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotPublishedError,
    StorageError,
)
from ckpt_storage.export.foreignfolder import RECORDS, ForeignFolder
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import FileRef, ref_from_json, seal, unseal
from ckpt_storage.format.names import (
    STOCK_METADATA,
    rank_manifest_path,
    shard_name,
    shard_path,
)
from ckpt_storage.format.rank_manifest import RankManifest
from ckpt_storage.options import RetryPolicy, TransferOptions
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import probe_exclusive_create
from ckpt_storage.store.store import Store

from .values import Values


@dataclass(slots=True, kw_only=True)
class Finished:
    """Which of the files of one conversion are complete; used by one thread.

    `names` are those of all files but the one that makes them a checkpoint.
    """

    folder: ForeignFolder
    store: Store
    names: Sequence[str]
    options: TransferOptions
    deadline: Deadline
    kept_count: int = field(default=0, init=False)
    _identity: str = field(default="", init=False)
    _done: dict[str, Mapping[str, Any]] = field(default_factory=dict, init=False)

    def begin(self, identity: str, *, source: str, overwrite: bool) -> None:
        """Begin to fill the folder, as `ForeignFolder.begin`; what cannot be kept is deleted."""
        self._identity = identity
        is_resumed = self.folder.begin(identity, source=source, overwrite=overwrite)
        self.store.make_folders([RECORDS])
        if not is_resumed:
            return
        for name in self.names:
            record = self._record(name)
            if record is not None and self._is_whole(record):
                self._done[name] = record
        unknown = [name for name in self.names if name not in self._done]
        if unknown:
            self.store.delete(unknown)

    def end(self) -> None:
        """Take back what vouched for single files, and then the note."""
        self.store.delete_folder(RECORDS)
        self.folder.end()

    def write(
        self, name: str, write: Callable[[], tuple[FileRef, Mapping[str, Any]]]
    ) -> Mapping[str, Any]:
        """Have a file written, unless it is there; return what its record has besides the file.

        `write` returns the file as it was written, and that.
        """
        known = self._done.get(name)
        if known is not None:
            self.kept_count += 1
        else:
            reference, more = write()
            known = {"identity": self._identity, "file": reference.as_json(), **more}
            head = {"format": "ckpt_storage.copy_record/1"}
            self.store.replace(_record_path(name), seal({**head, **known}))
        return known

    def is_kept(self, name: str) -> bool:
        """Return whether a file is there already."""
        return name in self._done

    def _record(self, name: str) -> Mapping[str, Any] | None:
        """Return what is known of a file, None unless it can be read and is of this conversion."""
        path = _record_path(name)
        found = read_if_there(self.store, path)
        if found is None:
            return None
        try:
            record = unseal(found.data, path=path)
        except (FormatError, IntegrityError):
            return None
        return record if record.get("identity") == self._identity else None

    def _is_whole(self, record: Mapping[str, Any]) -> bool:
        reference = ref_from_json(record["file"], where=RECORDS)
        window = memoryview(bytearray(min(self.options.part_bytes, reference.size_bytes)))
        crc = 0
        try:
            if self.store.stat(reference.path).size_bytes != reference.size_bytes:
                return False
            for start in range(0, reference.size_bytes, max(1, len(window))):
                part = window[: reference.size_bytes - start]
                self.store.read(reference.path, [(start, part)], size_bytes=reference.size_bytes)
                crc = crc32c_of(part, crc)
                self.deadline.check(f"Checking {reference.path}")
        except IntegrityError:
            return False
        except StorageError as error:
            if error.kind != "not-found":
                raise
            return False
        return crc == reference.crc32c


def _record_path(name: str) -> str:
    return f"{RECORDS}/{name}.json"


TargetFormat = Literal["ckpt_storage", "dcp", "dcp_safetensors", "safetensors", "torch_save"]
"""ours; stock DCP; torch's sharded safetensors; one Hugging Face export; a file of torch.save."""

FORMATS: tuple[TargetFormat, ...] = get_args(TargetFormat)

_NO_SAVE = "00000000T000000Z-0000000000000000"
"""Stands where a document of ours has the id of a save: stock DCP knows none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the values go, in which format and by what means.

    `identity` stands for the content, to the last byte of each file. `open` opens a location with
    the deadline of the work; `options_for` says what may be used of memory and threads on a store.
    """

    format: TargetFormat
    location: Location
    source_url: str
    identity: str
    overwrite: bool
    max_file_bytes: int
    unsafe_pickle: bool
    deadline: Deadline
    commit_timeout_s: float
    retry: RetryPolicy
    on_bytes: Callable[[int], None]
    open: Callable[[Location], Store]
    options_for: Callable[[Store], TransferOptions]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written: the id of a save of ours; how many files were there from a call before."""

    save_id: str | None = None
    kept_count: int = 0


def write_target(values: Values, target: Target) -> Written:
    """Write all values.

    Whole on return. After an error the target looks like no checkpoint, or like the one of ours or
    the file that it was to replace; where a storage cannot replace a file in one step, that file is
    gone once writing has begun, and only `overwrite` gives leave for it. Raises
    `CheckpointExistsError`, `InvalidInputError`, `StorageError`, `IntegrityError`,
    `PhaseTimeoutError`.
    """
    if target.format == "ckpt_storage":
        return Written(save_id=_write_ours(values, target))
    if target.format == "torch_save":
        _write_torch(values, target)
        return Written()
    if target.format == "dcp":
        return Written(kept_count=_write_dcp(values, target))
    return Written(kept_count=_write_safetensors(values, target))


def _write_ours(values: Values, target: Target) -> str:
    """Write one save of one rank and commit it as any save is committed."""
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415  # this target is torch's
        StorageMeta,
    )

    from ckpt_storage.commit.committing import commit_save  # noqa: PLC0415  # as above

    from .shards import ShardTarget, metadata_of  # noqa: PLC0415  # as above

    store = target.open(target.location)
    grant = commit.begin(
        store,
        overwrite=target.overwrite,
        probe=lambda found: probe_exclusive_create(found, scope=target.location.scope).exclusive,
    )
    try:
        manifest = ShardTarget(
            store=store,
            path_of=partial(shard_path, grant.save_id, 0),
            save_id=grant.save_id,
            options=target.options_for(store),
            deadline=target.deadline,
            on_bytes=target.on_bytes,
            max_file_bytes=target.max_file_bytes,
        ).write(values)
        values.check_unchanged()
        document = seal(manifest.to_body())
        reference = FileRef(
            path=rank_manifest_path(grant.save_id, 0),
            size_bytes=len(document),
            crc32c=crc32c_of(document),
        )
        store.put(reference.path, document)
    except BaseException as error:
        # Nobody else knows of this attempt, and nothing was asked to commit it.
        _remove(store, grant.save_id, error)
        raise
    report = RankReport.of(manifest, reference, with_places=True, ties=values.ties)
    deadline = Deadline("commit", target.commit_timeout_s)
    try:
        commit_save(
            store.bounded(deadline),
            grant,
            world_size=1,
            metadata=metadata_of(values),
            reports=[report],
            storage_meta=StorageMeta(checkpoint_id=target.location.url),
            user={},
            deadline=deadline,
            retry=target.retry,
        )
    except CheckpointError as error:
        # Any other says that the save is not committed, and never will be: nobody tries again.
        if not isinstance(error, CommitUnknownError | NotPublishedError):
            _remove(store, grant.save_id, error)
        raise
    return grant.save_id


def _remove(store: Store, save_id: str, error: BaseException) -> None:
    """Delete an attempt that failed; what fails about it is noted on the error it failed with."""
    try:
        cleaning.delete_attempt(store, save_id)
    except CheckpointError as failure:
        error.add_note(f"Removing what was written failed too: {failure}")


def _write_dcp(values: Values, target: Target) -> int:
    """Write stock torch's layout; `.metadata` makes it a checkpoint."""
    from .shards import ShardTarget, bytes_of, planned_files, stock_pickle  # noqa: PLC0415  # imports torch

    store = target.open(target.location)
    path_of = partial(shard_name, 0)
    groups = planned_files(values, target.max_file_bytes)
    names = [path_of(number) for number in range(len(groups))]
    folder = ForeignFolder(store, [*names, STOCK_METADATA], content="metadata")
    finished = _begun(folder, store, names, target)
    shards = ShardTarget(
        store=store,
        path_of=path_of,
        save_id="",
        options=target.options_for(store),
        deadline=target.deadline,
        on_bytes=target.on_bytes,
        max_file_bytes=target.max_file_bytes,
    )

    def write(number: int) -> tuple[FileRef, dict[str, Any]]:
        written = shards.write_file(values, number, groups[number])
        reference = written.files[0].ref()
        return reference, {"rank": _at(written, shard_path(_NO_SAVE, 0, 0)).to_body()}

    written: list[RankManifest] = []
    for number, name in enumerate(names):
        if finished.is_kept(name):
            target.on_bytes(bytes_of(values, groups[number]))
        record = finished.write(name, partial(write, number))
        written.append(_at(RankManifest.from_body(record["rank"], where=RECORDS), name))
    values.check_unchanged()
    store.replace(STOCK_METADATA, stock_pickle(values, written, target.location.url))
    finished.end()
    return finished.kept_count


def _at(manifest: RankManifest, path: str) -> RankManifest:
    """Return what tells of one file, which lies at `path`."""
    return replace(manifest, save_id=_NO_SAVE, files=[replace(manifest.files[0], path=path)])


def _write_safetensors(values: Values, target: Target) -> int:
    from .weights import (  # noqa: PLC0415  # loads numpy, as streaming does
        Layout,
        WeightFile,
        index_of,
        lay_out,
        plan_sharded,
        plan_whole,
        write_weights,
    )

    store = target.open(target.location)
    is_export = target.format == "safetensors"
    plan = plan_whole if is_export else plan_sharded
    files = plan(values, target.max_file_bytes)
    # All of them before anything at the target is touched: they may refuse a name.
    layouts = [lay_out(values, file) for file in files]
    names = [file.name for file in files]
    folder = ForeignFolder(store, names, content="indexed" if is_export else "unindexed")
    finished = _begun(folder, store, names, target)

    def write(file: WeightFile, laid_out: Layout) -> tuple[FileRef, dict[str, Any]]:
        written = write_weights(
            values,
            file,
            laid_out,
            store,
            options=target.options_for(store),
            deadline=target.deadline,
            on_bytes=target.on_bytes,
        )
        return written, {}

    for file, laid_out in zip(files, layouts, strict=True):
        if finished.is_kept(file.name):
            target.on_bytes(sum(length for *_, length in laid_out[1]))
        finished.write(file.name, partial(write, file, laid_out))
    values.check_unchanged()
    folder.show(index_of(values, files) if is_export else None)
    finished.end()
    return finished.kept_count


def _begun(folder: ForeignFolder, store: Store, names: list[str], target: Target) -> Finished:
    finished = Finished(
        folder=folder,
        store=store,
        names=names,
        options=target.options_for(store),
        deadline=target.deadline,
    )
    finished.begin(target.identity, source=target.source_url, overwrite=target.overwrite)
    return finished


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

    store.make_folders([])
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
