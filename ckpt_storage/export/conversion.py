"""One call of `convert`: from a source of any format to files of another."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Literal

from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit.attempt import Grant
from ckpt_storage.commit.delete import delete_attempt
from ckpt_storage.commit.reporttable import RankReport
from ckpt_storage.commit.slotlog import is_there
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    InvalidInputError,
    NotPublishedError,
    StorageError,
)
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.format.names import (
    INDEX_NAME,
    STOCK_METADATA,
    new_write_id,
    rank_manifest_path,
    shard_name,
    shard_path,
)
from ckpt_storage.format.rank_manifest import RankManifest
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts, TransferOptions
from ckpt_storage.progress import reporting
from ckpt_storage.source.filemarks import open_newest, told_from_damage, watch_file
from ckpt_storage.source.model import Source
from ckpt_storage.source.sourcekeys import value_keys
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline, stalling_deadline
from ckpt_storage.store.store import Store

from .layout import Layout
from .options import ConvertReport, Selection, TargetFormat, check_memory_limit
from .output import Shown, write_record
from .places import FOLDER_FILES, TORCH_SUFFIXES, is_within, place_within, split_file
from .plain_folder import PlainFolder
from .plan import Plan, WriteRules, plan
from .reads import SegmentStream, Values, ties_of
from .run import Alone, Means, Seal, make, no_seal
from .select import payload_bytes, select
from .shards import lay_out_shards, metadata_of, rank_manifest, stock_pickle
from .weights import index_document, lay_out_sharded, lay_out_whole
from .write import Paces, transfer_options

if TYPE_CHECKING:
    from .torchfile import TorchFileSource


OnBytes = Callable[[int], None]


_LAYOUT = 2
"""Changes with how values are laid out in files: those of another release are not gone on with."""


_KEYS_AT_ONCE = 4096
"""Of stock DCP's items the heads are read to find their values: some kilobytes each."""


_SAFETENSORS = frozenset({"dcp_safetensors", "safetensors"})


class Conversion:
    """One call of `convert`."""

    def __init__(  # one call site, all named
        self,
        *,
        source: Location,
        target: Location,
        to: TargetFormat,
        overwrite: bool,
        max_file_bytes: int,
        memory_limit_bytes: int | None,
        page_cache: PageCache,
        unsafe_pickle: bool,
        timeouts: Timeouts,
        retry: RetryPolicy,
        progress: Progress,
    ) -> None:
        if memory_limit_bytes is not None:
            check_memory_limit(memory_limit_bytes)
        if is_within(source, target) and is_within(target, source):
            raise _onto_itself(source.url)
        self.source = source
        self.target = target
        what = f"Converting {source.url} to {target.url}"
        self.deadline, _ = stalling_deadline("write", timeouts.write, what)
        self._to = to
        self._overwrite = overwrite
        self._max_file_bytes = max_file_bytes
        self._memory_limit_bytes = memory_limit_bytes
        self._unsafe_pickle = unsafe_pickle
        self._timeouts = timeouts
        self._retry = retry
        self.stores = ExitStack()
        self._opened = partial(open_store, page_cache=page_cache, timeouts=timeouts, retry=retry)
        self._progress = progress
        self._start_s = time.monotonic()
        self._check_unchanged: Callable[[], None] = lambda: None
        self._source_state: object = None

    def _open(self, location: Location) -> Store:
        store = self._opened(location)
        self.stores.callback(store.close)
        return store.bounded(self.deadline)

    def run(
        self,
        *,
        include: Selection | None,
        exclude: Selection | None,
        unsupported: Literal["error", "drop"],
    ) -> ConvertReport:
        """Convert; the arguments as of `convert`."""
        source, store, source_format = self._source()
        if source_format == self._to:
            raise InvalidInputError(
                f"{self.source.url} is of the format {self._to} already.",
                next_step="Use ckpt_storage.copy to copy it.",
            )
        chosen = select(
            source,
            include=include,
            exclude=exclude,
            safetensors=self._to in _SAFETENSORS,
            on_unsupported=unsupported,
            format_name=self._to,
        )
        self._check_elsewhere(source, store, is_file=source_format == "torch_save")
        kept = chosen.names
        values = Values(
            source=source,
            store=store,
            tensors={fqn: info for fqn, info in source.tensors.items() if fqn in kept},
            blobs=frozenset(source.blobs & kept),
            held=getattr(source, "values", {}),
            paths=source.planner_data or {},
            ties={a: t for a, t in ties_of(source).items() if a in kept and t in kept},
        )
        with told_from_damage(self._check_unchanged):
            # A source of which something is missing leaves the target as it was.
            keys = iter(value_keys(values))
            while part := list(islice(keys, _KEYS_AT_ONCE)):
                source.require(part)
        total_bytes = sum(map(payload_bytes, values.tensors.values()))
        with (
            told_from_damage(self._check_unchanged),
            reporting(
                self._progress,
                phase="write",
                rank=0,
                total_bytes=total_bytes,
                save_id=source.save_id,
                with_bar=True,
            ) as on_bytes,
        ):
            save_id, kept_count = self._write(values, on_bytes)
        return ConvertReport(
            source_url=self.source.url,
            source_format=source_format,
            url=self.target.url,
            format=self._to,
            save_id=save_id,
            kept_count=kept_count,
            tensor_count=len(values.tensors),
            blob_count=len(values.blobs),
            total_bytes=total_bytes,
            dropped=tuple(sorted(chosen.dropped)),
            excluded=tuple(sorted(chosen.excluded)),
            seconds=time.monotonic() - self._start_s,
        )

    def _write(self, values: Values, on_bytes: OnBytes) -> tuple[str | None, int]:
        """Write all values; return the save id of a checkpoint of ours, and what was kept."""
        if self._to == "torch_save":
            self._write_torch(values, on_bytes)
            return None, 0
        target = self._open(self.target)
        if self._to == "ckpt_storage":
            return self._write_ours(values, target, on_bytes), 0
        tensors = values.tensors.values()
        if self._to == "dcp":
            shards = lay_out_shards(
                tensors,
                values.segments(),
                max_file_bytes=self._max_file_bytes,
                path_of=partial(shard_name, 0),
            )

            def document() -> tuple[str, bytes]:
                metadata = metadata_of(tensors, values.blobs, values.paths)
                return STOCK_METADATA, stock_pickle(metadata, shards, self.target.url)

            return None, self._write_plain(
                values, target, shards.layout, "metadata", STOCK_METADATA, document, on_bytes
            )
        if self._to == "dcp_safetensors":
            made = lay_out_sharded(tensors, self._max_file_bytes)
            return None, self._write_plain(
                values, target, made, "nothing", "", lambda: None, on_bytes
            )
        made = lay_out_whole(tensors, self._max_file_bytes)
        return None, self._write_plain(
            values, target, made, "index", "", lambda: (INDEX_NAME, index_document(made)), on_bytes
        )

    def _write_plain(
        self,
        values: Values,
        target: Store,
        files: Layout,
        shown: Shown,
        last: str,
        document: Callable[[], tuple[str, bytes] | None],
        on_bytes: OnBytes,
    ) -> int:
        """Write files of another writer's format, and at the end what shows them."""
        whole = self._plan(values, target, files)
        folder = PlainFolder(target, whole, self.deadline, shown=shown, others=last)
        folder.take(overwrite=self._overwrite)
        done = folder.complete_files(whole)
        whole = whole.leaving(done)
        seal = partial(write_record, target, whole.identity)
        made = make(Alone(self.deadline), whole, self._means(values, target, on_bytes, seal), done)
        self._check_unchanged()
        folder.publish(document())
        return len(made.kept)

    def _plan(self, values: Values, target: Store, files: Layout) -> Plan:
        options = self._options(values, target)
        source: object = new_write_id()
        if self._source_state is not None:
            # Else the source may change unseen.
            source = [_LAYOUT, self.source.url, self._source_state, self._to, self._max_file_bytes]
        rules = WriteRules.of(target.capabilities, part_bytes=options.part_bytes)
        return plan(files, world_size=1, rules=rules, source=source)

    def _options(self, values: Values, target: Store) -> TransferOptions:
        return transfer_options(values.store, target, memory_limit_bytes=self._memory_limit_bytes)

    def _means(
        self, values: Values, target: Store, on_bytes: OnBytes, seal: Seal = no_seal
    ) -> Means:
        options = self._options(values, target)
        return Means(
            source=values.source,
            source_store=values.store,
            target=target,
            options=options,
            deadline=self.deadline,
            paces=Paces(options),
            on_bytes=on_bytes,
            seal=seal,
        )

    def _write_ours(self, values: Values, target: Store, on_bytes: OnBytes) -> str:
        """Write one save of one rank and commit it as any save is committed."""
        grant = commit.begin(target, overwrite=self._overwrite)
        block_bytes = TransferOptions().block_bytes
        shards = lay_out_shards(
            values.tensors.values(),
            values.segments(),
            max_file_bytes=self._max_file_bytes,
            path_of=partial(shard_path, grant.save_id, 0),
            block_bytes=block_bytes,
        )
        try:
            made = make(
                Alone(self.deadline),
                self._plan(values, target, shards.layout),
                self._means(values, target, on_bytes),
                {},
            )
            self._check_unchanged()
            spans = {portion.file: portion.spans for portion in made.portions}
            manifest = rank_manifest(
                shards,
                [spans.get(at, ()) for at in range(len(shards.items))],
                save_id=grant.save_id,
                block_bytes=block_bytes,
                ties=values.ties,
            )
            document = seal(manifest.to_body())
            reference = FileRef(
                path=rank_manifest_path(grant.save_id, 0),
                size_bytes=len(document),
                crc32c=crc32c_of(document),
            )
            target.put(reference.path, document)
        except BaseException as error:
            # Nobody else knows of this attempt, and nothing was asked to commit it.
            _remove(target, grant.save_id, error)
            raise
        try:
            self._commit(values, target, grant, manifest, reference)
        except CheckpointError as error:
            # Any other says that the save is not committed, and never will be: nobody tries again.
            if not isinstance(error, CommitUnknownError | NotPublishedError):
                _remove(target, grant.save_id, error)
            raise
        return grant.save_id

    def _commit(
        self,
        values: Values,
        target: Store,
        grant: Grant,
        manifest: RankManifest,
        reference: FileRef,
    ) -> None:
        from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415  # this target is torch's
            StorageMeta,
        )

        from ckpt_storage.commit.committing import commit_save  # noqa: PLC0415  # as above

        report = RankReport.of(manifest, reference, with_places=True, ties=values.ties)
        commit_save(
            target.bounded(Deadline("commit", self._timeouts.commit)),
            grant,
            world_size=1,
            metadata=metadata_of(values.tensors.values(), values.blobs, values.paths),
            reports=[report],
            storage_meta=StorageMeta(checkpoint_id=self.target.url),
            user={},
        )

    def _write_torch(self, values: Values, on_bytes: OnBytes) -> None:
        from .torchzip import TorchValues, write_torch_file  # noqa: PLC0415  # imports torch

        parent, name = split_file(self.target)
        if not name:
            raise InvalidInputError(
                f"{self.target.url} names no file.", next_step="Give a file, such as model.pt."
            )
        target = self._open(parent)
        is_taken = is_there(target, name)
        if is_taken and not self._overwrite:
            raise CheckpointExistsError(
                f"{self.target.url} is there.",
                path=self.target.url,
                phase="plan",
                next_step="Give another name, or pass overwrite=True to replace it.",
            )

        def begin() -> None:
            if is_taken and not target.capabilities.atomic_replace:
                target.delete([name])

        target.make_folders([])
        options = self._options(values, target)
        write_torch_file(
            TorchValues(
                tensors=values.tensors,
                blobs=sorted(values.blobs),
                held=values.held,
                paths=values.paths,
                ties=values.ties,
            ),
            target,
            name,
            stream=partial(
                SegmentStream,
                source=values.source,
                store=values.store,
                options=options,
                deadline=self.deadline,
            ),
            size_of=values.blob_bytes,
            options=options,
            deadline=self.deadline,
            on_bytes=on_bytes,
            unsafe_pickle=self._unsafe_pickle,
            begin=begin,
            check_unchanged=self._check_unchanged,
        )

    def _check_elsewhere(
        self, source: Source | TorchFileSource, store: Store, *, is_file: bool
    ) -> None:
        """Refuse a target that would replace files of the source; the storages are asked."""
        parent, name = split_file(self.target)
        to_file = self._to == "torch_save"
        if to_file and not (name and is_there(self._open(parent), name)):
            return
        target = self._open(parent if to_file else self.target)
        within = place_within(store, target, is_deep=not is_file)
        if within is None:
            return
        if to_file:
            if f"{within}/{name}".lstrip("/") in _paths_of(source):
                raise InvalidInputError(
                    f"{self.target.url} is part of {self.source.url}, which is to be converted.",
                    next_step="Give another name for the result.",
                )
            return
        if is_file:
            is_hit = split_file(self.source)[1].endswith(FOLDER_FILES)
        else:
            is_hit = not within or any(path.startswith(f"{within}/") for path in _paths_of(source))
        if is_hit:
            raise _onto_itself(self.source.url)

    def _source(self) -> tuple[Source | TorchFileSource, Store, str]:
        """Open what is to be converted: a checkpoint, or a file, which its name may tell."""
        parent, name = split_file(self.source)
        if name.endswith(TORCH_SUFFIXES) and is_there(self._open(parent), name):
            return self._torch_file(parent, name)
        store = self._open(self.source)
        try:
            opened, marks = open_newest(store, deadline=self.deadline, options=TransferOptions())
        except (CheckpointNotFoundError, StorageError):
            if name and is_there(self._open(parent), name):
                return self._torch_file(parent, name)
            raise
        if marks is None:
            self._source_state = opened.save_id
        else:
            self._check_unchanged = partial(marks.check, store)
            if all(time_s is not None for _, time_s in marks.of.values()):
                self._source_state = sorted(marks.of.items())
        return opened, store, opened.format

    def _torch_file(self, parent: Location, name: str) -> tuple[TorchFileSource, Store, str]:
        from .torchfile import open_torch_file  # noqa: PLC0415  # imports torch

        store = self._open(parent)
        self._check_unchanged = watch_file(store, name)
        found = store.stat(name)
        if found.modified_s is not None:
            self._source_state = (found.size_bytes, found.modified_s)
        source = open_torch_file(store, name, unsafe_pickle=self._unsafe_pickle)
        return source, store, "torch_save"


def _remove(store: Store, save_id: str, error: BaseException) -> None:
    """Delete an attempt that failed; what fails about it is noted on the error it failed with."""
    try:
        delete_attempt(store, save_id)
    except CheckpointError as failure:
        error.add_note(f"Removing what was written failed too: {failure}")


def _onto_itself(url: str) -> InvalidInputError:
    return InvalidInputError(
        f"{url} would be converted onto itself, or into its own files.",
        next_step="Give another folder for the result.",
    )


def _paths_of(source: Source | TorchFileSource) -> set[str]:
    """Return the files that hold the values of a source, and those that make it a checkpoint."""
    keys = value_keys(source)
    source.require(keys)
    return {STOCK_METADATA, INDEX_NAME, *(source.place(*key).path for key in keys)}
