"""`convert`: the values of a checkpoint of one format, written in another.

Nothing is held in memory but windows of tensors and the values that are none. Until its last write
the target looks like no checkpoint, or like the one that is being replaced where that is of ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from ckpt_storage.commit.slotlog import is_there
from ckpt_storage.coordination.failures import place_of
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA, new_write_id, shard_name
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts, TransferOptions
from ckpt_storage.source.filemarks import told_from_damage, watch_file
from ckpt_storage.source.model import Source, value_keys
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline

from .attempt import NewCheckpoint
from .folder import PlainFolder
from .layout import Fixed, Layout, Segment, Stored
from .options import (
    DEFAULT_MAX_FILE_BYTES,
    Selection,
    check_memory_limit,
    digest,
    parse_bytes,
)
from .output import Made, Output, Setting, Site
from .places import is_within, location_beside, place_within, split_file
from .plan import Plan
from .run import Found, Task, run_together
from .select import Selected, payload_bytes, select
from .shards import Shards, lay_out_shards, metadata_of, stock_pickle
from .weights import index_document, lay_out_sharded, lay_out_whole

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.checkpoint.metadata import Metadata

TargetFormat = Literal["ckpt_storage", "dcp", "dcp_safetensors", "safetensors", "torch_save"]
"""ours; stock DCP; torch's sharded safetensors; one Hugging Face export; a file of torch.save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What `convert` did; both URLs are without credentials.

    source_format, format: of what was read and of what was written. save_id: of the checkpoint
    that was made, if it is one of ours. kept_count: files that a call which died had completed, and
    that were found sound. total_bytes counts tensors only. dropped: FQNs that the
    target cannot hold and that were left out as asked; excluded: those that a selection left out.
    """

    source_url: str
    source_format: str
    url: str
    format: TargetFormat
    save_id: str | None
    kept_count: int
    tensor_count: int
    blob_count: int
    total_bytes: int
    dropped: Sequence[str]
    excluded: Sequence[str]
    seconds: float


FORMATS: tuple[TargetFormat, ...] = get_args(TargetFormat)

_LAYOUT = 2
"""Changes with how values are laid out in files: those of another release are not gone on with."""

_KEYS_AT_ONCE = 4096
"""Of stock DCP's items the heads are read to find their values: some kilobytes each."""

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

    Reads checkpoints of ours, of stock DCP, torch's sharded safetensors, Hugging Face folders and
    files of `torch.save`. Every checksum there is is checked. Values keep their names: tensors go
    over bit by bit, objects and nesting where the format has them. `dst` shows the result all at
    once, at the end. After a failure or a kill, call it again with the same arguments. Files of
    "dcp", "dcp_safetensors" and "safetensors" that were complete, and are sound, are kept; the
    other formats begin anew.

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
            one in a single step is deleted before the new one is written.
        max_file_bytes: about how large a file gets; a tensor is never cut for it.
        memory_limit_bytes: ceiling of buffers.
        page_cache: whether the kernel keeps a copy of local files of `dst` that are on the disk.
        process_group: the ranks that share the work, all of which call; default: this process
            alone. A file of "torch_save" its first rank writes.
        unsafe_pickle: unpickle whatever the source holds: this runs code of whoever wrote it.
            Needed only to read or write "torch_save" with values of other than torch's types.
        storage_options: passed to the fsspec file system of `src`.
        destination_storage_options: passed to that of `dst`; default: `storage_options` where
            both are of one kind.
        timeout: seconds, `timedelta` or `Timeouts` (`write` and `commit` count); default an hour.
            `write` is how long nothing may move, however long the whole takes.
        retry: how failed storage requests are repeated.
        progress: True: a bar; or a callable that takes each `ProgressEvent`.

    Raises:
        CheckpointError: `InvalidInputError` (naming what the format cannot hold, or saying that
            `dst` is `src` under another name),
            `CheckpointExistsError`, `IntegrityError`, `UnsafeContentError`, `FormatError`,
            `CheckpointGoneError` (also if another writer saved over `src` meanwhile),
            `StorageError`, `PhaseTimeoutError`, and what opening `src` raises.

    """
    what, timeouts = f"the conversion of {place_of(src)}", Timeouts.of(timeout)

    def job() -> tuple[Setting, Mapping[str, str], Callable[[Site], _Conversion]]:
        if to not in FORMATS:
            raise InvalidInputError(
                f"The format {to!r} is not known.", next_step=f"Give one of {', '.join(FORMATS)}."
            )
        if memory_limit_bytes is not None:
            check_memory_limit(memory_limit_bytes)
        source = Location.of(src, storage_options)
        target = location_beside(source, dst, destination_storage_options)
        if is_within(source, target) and is_within(target, source):
            raise _onto_itself(source)
        setting = Setting(
            source=source,
            target=split_file(target)[0] if to == "torch_save" else target,
            timeouts=timeouts,
            retry=retry or RetryPolicy(),
            page_cache=page_cache,
            memory_limit_bytes=memory_limit_bytes,
            progress=progress,
        )
        folder, name = split_file(source)
        is_file = name.endswith(_TORCH_SUFFIXES) and _is_there(folder, name, setting)
        if is_file:
            setting = replace(setting, source=folder)
        most_bytes = parse_bytes(max_file_bytes, option="max_file_bytes")
        task = partial(
            _Conversion,
            origin=source,
            file=name if is_file else "",
            target=target,
            to=to,
            choose=partial(
                select, include=include, exclude=exclude, to=to, drops=unsupported == "drop"
            ),
            overwrite=overwrite,
            max_file_bytes=most_bytes,
            unsafe_pickle=unsafe_pickle,
        )
        terms = {
            "the file": target.url,
            "to": to,
            "max_file_bytes": str(most_bytes),
            "include": digest(include),
            "exclude": digest(exclude),
        }
        return setting, setting.terms() | terms, task

    return run_together(process_group, "convert", what, timeouts, job)


def _is_there(folder: Location, name: str, setting: Setting) -> bool:
    with closing(open_store(folder, timeouts=setting.timeouts, retry=setting.retry)) as store:
        return is_there(store.bounded(Deadline("plan", setting.timeouts.plan)), name)


def _onto_itself(source: Location) -> InvalidInputError:
    return InvalidInputError(
        f"{source.url} would be converted onto itself, or into its own files.",
        next_step="Give another place for the result.",
    )


@dataclass(kw_only=True)
class _Conversion(Task[ConvertReport]):
    """One conversion on one rank; `file` is the name of a source that is a file of `torch.save`."""

    origin: Location
    file: str
    target: Location
    to: TargetFormat
    choose: Callable[[Source], Selected]
    overwrite: bool
    max_file_bytes: int
    unsafe_pickle: bool
    shards: Shards = field(init=False)

    def find(self) -> Found:
        """Open a checkpoint, or a file; nothing may be missing of it."""
        site = self.site
        if self.file:
            self.watch = watch_file(lambda: self.site.source, self.file)
            at = site.source.stat(self.file)
            state = None if at.modified_s is None else (at.size_bytes, at.modified_s)
            self.open(Found(state=state or new_write_id()))
        else:
            super().find()
        if self.source.format == self.to:
            raise InvalidInputError(
                f"{self.origin.url} is of the format {self.to} already.",
                next_step="Use ckpt_storage.copy to copy it.",
            )
        chosen = self.chosen
        self._check_elsewhere()
        with told_from_damage(self.check_unchanged):
            # A source of which something is missing leaves the target as it was.
            keys = iter(value_keys(chosen.tensors, chosen.blobs))
            while part := list(islice(keys, _KEYS_AT_ONCE)):
                self.source.places(part)
        return self.found

    def open(self, found: Found) -> None:
        if not self.file:
            super().open(found)
            return
        from .torchfile import open_torch_file  # noqa: PLC0415  # imports torch

        self.found = found
        self.source = open_torch_file(self.site.source, self.file, unsafe_pickle=self.unsafe_pickle)

    def _check_elsewhere(self) -> None:
        """Refuse a target that would replace files of the source; the storages are asked."""
        site = self.site
        name = split_file(self.target)[1] if self.to == "torch_save" else ""
        # A file of torch is none that a folder of another format gets.
        if self.file or (name and not is_there(site.target, name)):
            return
        within = place_within(site.source, site.target)
        if within is None:
            return
        places = self.source.places(value_keys(self.source.tensors, self.source.blobs))
        own = {STOCK_METADATA, INDEX_NAME, *(place.path for place in places)}
        path = f"{within}/{name}".strip("/")
        if not path or any(f"{one}/".startswith(f"{path}/") for one in own):
            raise _onto_itself(self.origin)

    @cached_property
    def chosen(self) -> Selected:
        """The values that go over."""
        return self.choose(self.source)

    def content(self) -> object:
        state = self.found.state if self.save_id is None else self.save_id
        return [_LAYOUT, self.origin.url, state, self.to, self.max_file_bytes]

    def lay_out(self) -> Layout:
        tensors = self.chosen.tensors.values()
        if self.to == "torch_save":
            return Layout(files=())
        if self.to == "safetensors":
            return lay_out_whole(tensors, self.max_file_bytes)
        if self.to == "dcp_safetensors":
            return lay_out_sharded(tensors, self.max_file_bytes)
        self.shards = lay_out_shards(
            tensors,
            self._blob_segments(),
            max_file_bytes=self.max_file_bytes,
            path_of=partial(shard_name, 0),
            block_bytes=TransferOptions().block_bytes if self.to == "ckpt_storage" else None,
        )
        return self.shards.layout

    def _blob_segments(self) -> dict[str, Segment]:
        """Return each value that is no tensor as DCP stores it: by `torch.save`."""
        blobs = self.chosen.blobs
        if self.file:
            source: Any = self.source
            return {fqn: Fixed(source.pickled(fqn)) for fqn in blobs}
        places = self.source.places([(fqn, None) for fqn in blobs])
        return {one.fqn: Stored(fqn=one.fqn, size_bytes=one.size_bytes) for one in places}

    def metadata(self) -> Metadata:
        """Return what DCP's global plan would have said of the values."""
        chosen, paths = self.chosen, self.source.planner_data or {}
        return metadata_of(chosen.tensors.values(), chosen.blobs, paths)

    def output(self, plan: Plan) -> Output:
        if self.to == "ckpt_storage":
            return NewCheckpoint(self, plan)
        if self.to == "torch_save":
            from .torchzip import TorchFile  # noqa: PLC0415  # imports torch

            return TorchFile(self, plan, name=split_file(self.target)[1])
        folder = partial(PlainFolder, self, plan, overwrite=self.overwrite)
        if self.to == "safetensors":
            return folder(last=INDEX_NAME, document=partial(index_document, plan.layout))
        if self.to == "dcp_safetensors":
            return folder()
        return folder(last=STOCK_METADATA, document=self._stock)

    def _stock(self) -> bytes:
        return stock_pickle(self.metadata(), self.shards, self.target.url)

    def report(self, output: Output, made: Made, seconds: float) -> ConvertReport:
        grant = output.grant if isinstance(output, NewCheckpoint) else None
        return ConvertReport(
            source_url=self.origin.url,
            source_format=self.source.format,
            url=self.target.url,
            format=self.to,
            save_id=grant.save_id if grant else None,
            kept_count=len(made.kept),
            tensor_count=len(self.chosen.tensors),
            blob_count=len(self.chosen.blobs),
            total_bytes=sum(map(payload_bytes, self.chosen.tensors.values())),
            dropped=tuple(sorted(self.chosen.dropped)),
            excluded=tuple(sorted(self.chosen.excluded)),
            seconds=seconds,
        )
