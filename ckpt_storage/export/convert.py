"""`convert`: the values of a checkpoint of one format, written in another.

Memory holds windows of tensors, and objects. Until the last write readers find no checkpoint at the
target, or the checkpoint that is being replaced, if that is ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from ckpt_storage import errors
from ckpt_storage.commit import attempt
from ckpt_storage.commit.attempt import SaveTicket
from ckpt_storage.commit.attempt_files import delete_attempt
from ckpt_storage.commit.report import RankReport
from ckpt_storage.format import names
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.options import DEFAULT_BLOCK_BYTES, PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store, redacted_url
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.objects import is_there

from . import layout
from .conversion import FORMATS, Conversion, ConvertReport, ConvertSpec, TargetFormat, onto_itself
from .folder import PlainFolder
from .layout import Files
from .options import (
    DEFAULT_MAX_FILE_BYTES,
    Selection,
    check_memory_limit,
    is_within,
    location_beside,
    parse_bytes,
    split_file,
)
from .output import ExportContext, ResumeState, SourceVersion, WriteSummary
from .run import group_of, run_together

if TYPE_CHECKING:
    import torch.distributed as dist

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def convert(  # the public surface, all keyword-only
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: TargetFormat,
    include: Selection | None = None,
    exclude: Selection | None = None,
    unsupported: Literal["error", "drop"] = "error",
    overwrite: bool = False,
    max_file_bytes: int | str = DEFAULT_MAX_FILE_BYTES,
    memory_limit_bytes: int | None = None,
    page_cache: PageCache = "keep",
    process_group: dist.ProcessGroup | None = None,
    unsafe_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    destination_storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
    progress: Progress = None,
) -> ConvertReport:
    """Write the values of the checkpoint at `src` to `dst` in the format `to`.

    Reads checkpoints of ours, of stock DCP, torch's sharded safetensors, Hugging Face folders,
    folders of torch_checkpointing and files of `torch.save`. Checksums of ours, in the record of an
    export too, and of `torch.save`, also in folders of torch_checkpointing, are checked; files of
    the other formats are checked for their lengths. Values keep their names: tensors go over bit by
    bit, objects and nesting where the format has them. `dst` shows the result all at once, at the
    end. After a failure or a kill, call it again with the same arguments. Files of "dcp",
    "dcp_safetensors" and "safetensors" that were complete, and are sound, are kept; the other
    formats begin anew.

    To make a model's weights of a training checkpoint, with its names and ties as `transformers`
    expects them, use `consolidate`.

    Args:
        src: what to convert: a folder or URL, or a file of `torch.save`.
        dst: the folder or URL to fill; for "torch_save" the file.
        to: "ckpt_storage", "dcp" (stock `FileSystemReader` loads it), "dcp_safetensors" (torch's
            sharded safetensors), "safetensors" (Hugging Face: files with an index), "torch_save".
        include: which values go over: FQNs and glob patterns, or a function of the FQN.
        exclude: which of them do not.
        unsupported: what happens to values that the format cannot hold: "error" names them,
            "drop" leaves them out and reports them. safetensors holds no objects, and not every
            dtype.
        overwrite: replace what is at `dst`. A file of `torch.save` on a storage that cannot replace
            a file in a single step is deleted before the new file is written.
        max_file_bytes: about how large a file gets; a tensor is never cut for it.
        memory_limit_bytes: ceiling of buffers.
        page_cache: whether the kernel keeps a copy of local files of `dst` that are on the disk.
        process_group: the ranks that share the work, all of which call; default: this process
            alone. A file of "torch_save" its first rank writes.
        unsafe_pickle: unpickle whatever the source holds: this runs code of the author of the file.
            Needed only to read or write "torch_save" with values of other than torch's types.
        storage_options: passed to the fsspec file system of `src`.
        destination_storage_options: passed to that of `dst`; default: `storage_options` where
            both are of one kind.
        timeout: seconds, `timedelta` or `Timeouts` (`write` and `commit` count); default an hour.
            `write` is the time without progress, not that of the whole.
        retry: how failed storage requests are repeated.
        progress: True: a bar; or a callable that takes each `ProgressEvent`.

    Raises:
        CheckpointError: `InvalidInputError` (naming what the format cannot hold, or saying that
            `dst` is `src` under another name),
            `CheckpointExistsError`, `IntegrityError`, `UnsafeContentError`, `FormatError`,
            `CheckpointGoneError` (also if another writer saved over `src` meanwhile),
            `StorageError`, `PhaseTimeoutError`, and what opening `src` raises.

    """
    what, group = f"the conversion of {redacted_url(src)}", group_of(process_group, "convert")

    def job() -> ConvertSpec:
        timeouts = Timeouts.of(timeout)
        if to not in FORMATS:
            raise errors.InvalidInputError(
                f"The format {to!r} is not known.", next_step=f"Give one of {', '.join(FORMATS)}."
            )
        if memory_limit_bytes is not None:
            check_memory_limit(memory_limit_bytes)
        source = Location.to_read(src, storage_options)
        target = location_beside(source, dst, destination_storage_options)
        if is_within(source, target) and is_within(target, source):
            raise onto_itself(source.url)
        target_folder, target_file = split_file(target) if to == "torch_save" else (target, "")
        source_folder, source_file = split_file(source)
        is_file = source_file.endswith(_TORCH_SUFFIXES)
        if is_file:
            with closing(open_store(source_folder, timeouts=timeouts, retry=retry)) as store:
                is_file = is_there(store.bounded(Deadline("plan", timeouts.plan)), source_file)
        return ConvertSpec(
            source=source_folder if is_file else source,
            source_file=source_file if is_file else "",
            source_url=source.url,
            target=target_folder,
            target_file=target_file,
            target_url=target.url,
            to=to,
            include=include,
            exclude=exclude,
            drops=unsupported == "drop",
            overwrite=overwrite,
            max_file_bytes=parse_bytes(max_file_bytes, option="max_file_bytes"),
            unsafe_pickle=unsafe_pickle,
            timeouts=timeouts,
            retry=retry,
            page_cache=page_cache,
            memory_limit_bytes=memory_limit_bytes,
            progress=progress,
        )

    return run_together(group, "convert", what, timeout, job, _conversion)


def _conversion(context: ExportContext, version: SourceVersion | None) -> Conversion:
    assert isinstance(context.spec, ConvertSpec)  # noqa: S101  # as `convert` made it
    if context.spec.to == "torch_save":
        from .torchsave import TorchFile  # noqa: PLC0415  # imports torch

        return TorchFile(context, version)
    return (_ToOurs if context.spec.to == "ckpt_storage" else _ToFolder)(context, version)


class _ToFolder(Conversion, PlainFolder[ConvertReport]):
    """Files of another format, with the index or `.metadata` that belongs to it."""

    @property
    def last(self) -> str:
        return {"safetensors": names.INDEX_NAME, "dcp": names.STOCK_METADATA}.get(self.spec.to, "")

    def lay_out(self) -> Files:
        if self.spec.to == "dcp":
            return self.shards_of()
        ways = {"safetensors": layout.lay_out_whole, "dcp_safetensors": layout.lay_out_sharded}
        return ways[self.spec.to](self.chosen.tensors, self.spec.max_file_bytes)

    def document(self) -> bytes:
        if self.spec.to == "safetensors":
            return layout.index_document(self.plan.files)
        metadata = layout.metadata_of(self.source, self.chosen)
        return layout.stock_pickle(metadata, self.plan.files, self.shards, self.spec.target_url)


class _ToOurs(Conversion):
    """One save of one rank, committed as any save is committed."""

    _ticket: SaveTicket | None = None
    _may_be_committed = False

    def lay_out(self) -> Files:
        return self.shards_of(DEFAULT_BLOCK_BYTES)

    def claim(self) -> ResumeState:
        """Begin a save; the name is its id."""
        self._ticket = attempt.begin(self.context.target, overwrite=self.spec.overwrite)
        return ResumeState(name=self._ticket.save_id)

    def rename(self, name: str) -> None:
        """Put the files below the save of that id."""
        self.new_id = name
        files = (
            replace(f, name=names.shard_path(name, 0, at)) for at, f in enumerate(self.plan.files)
        )
        self.plan = replace(self.plan, files=tuple(files))

    def publish(self, made: WriteSummary) -> None:
        """Write the documents that describe the files, and commit."""
        from ckpt_storage.commit.assembly import commit_save  # noqa: PLC0415  # imports torch

        ticket, store, ties = self._ticket, self.context.target, self.chosen.ties
        assert ticket is not None  # noqa: S101  # `claim` was called
        manifest = layout.rank_manifest(self.plan.files, self.shards, made, ticket.save_id, ties)
        path, data = names.rank_manifest_path(ticket.save_id, 0), seal(manifest.to_body())
        store.put(path, data)
        reference, metadata = FileRef.of(path, data), layout.metadata_of(self.source, self.chosen)
        self._may_be_committed = True
        try:
            commit_save(
                store.bounded(Deadline("commit", self.spec.timeouts.commit)),
                ticket,
                metadata=metadata,
                reports=[RankReport.of(manifest, reference, with_places=True, ties=ties)],
                user={},
            )
        except errors.CheckpointError as error:
            self._may_be_committed = isinstance(
                error, errors.CommitUnknownError | errors.NotPublishedError
            )
            raise

    def clean_up(self, error: BaseException) -> None:
        """Delete the attempt, which no later run resumes, unless it may be committed."""
        if self._ticket is None or self._may_be_committed:
            return
        try:
            delete_attempt(self.context.target, self._ticket.save_id)
        except errors.CheckpointError as failure:
            error.add_note(f"Removing what was written failed too: {failure}")
