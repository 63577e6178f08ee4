"""`convert`: the values of a checkpoint of one format, written in another.

Nothing is held in memory but windows of tensors and the values that are none. Until its last write
the target looks like no checkpoint, or like the one that is being replaced where that is of ours.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from ckpt_storage.commit.slotlog import is_there
from ckpt_storage.coordination.failures import place_of
from ckpt_storage.errors import (
    CheckpointNotFoundError,
    InvalidInputError,
    StorageError,
)
from ckpt_storage.format.names import (
    INDEX_NAME,
    STOCK_METADATA,
    new_write_id,
    shard_name,
)
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts, TransferOptions
from ckpt_storage.progress import reporting
from ckpt_storage.source.filemarks import told_from_damage, watch_file
from ckpt_storage.source.model import CommittedSource, Source
from ckpt_storage.source.sourcekeys import value_keys
from ckpt_storage.store import Location
from ckpt_storage.store.store import Store

from .attempt import NewCheckpoint
from .layout import Fixed, Layout, Segment, Stored
from .options import (
    DEFAULT_MAX_FILE_BYTES,
    Selection,
    check_memory_limit,
    digest,
    parse_bytes,
)
from .output import Made, Output, Setting, Site
from .places import is_within, location_beside, onto_itself, place_within, split_file
from .plain_folder import OneFile, PlainFolder
from .plan import Plan
from .reads import SegmentStream
from .run import Found, Task, run_together
from .select import Selected, payload_bytes, select
from .shards import Shards, lay_out_shards, metadata_of, stock_pickle
from .weights import index_document, lay_out_sharded, lay_out_whole

if TYPE_CHECKING:
    import torch.distributed as dist

    from .torchfile import TorchFileSource

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

_SAFETENSORS = frozenset({"dcp_safetensors", "safetensors"})

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

_FOLDER_FILES = (".distcp", ".safetensors", ".json", STOCK_METADATA)
"""How the names end that a folder of some format may get."""


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
    files of `torch.save`. Every block that has a checksum is checked; of a torch file that is each
    record, by the CRC-32 that torch wrote. All values go over under
    their names: tensors bit by bit, and what is no tensor where the target can hold it. Names
    nested in dicts and lists keep their nesting in formats that have it. `dst` shows the result
    all at once, at the end. After a failure or a kill, call it again with the same arguments: it
    needs no `overwrite` for what the one before left. Files of "dcp", "dcp_safetensors" and
    "safetensors" that were complete, and are sound, are kept; so a smaller `max_file_bytes` makes
    less to be written again. A file of "torch_save" is one stream with its table at the end, and
    an attempt at a checkpoint of ours bears an id that no other may use: those begin anew.

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
    what = f"the conversion of {place_of(src)}"

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
            raise onto_itself(source.url)
        wanted = _Wanted(
            source=source,
            target=target,
            to=to,
            include=include,
            exclude=exclude,
            drops=unsupported == "drop",
            overwrite=overwrite,
            max_file_bytes=parse_bytes(max_file_bytes, option="max_file_bytes"),
            unsafe_pickle=unsafe_pickle,
        )
        setting = Setting(
            source=source,
            target=wanted.folder,
            timeouts=Timeouts.of(timeout),
            retry=retry or RetryPolicy(),
            page_cache=page_cache,
            memory_limit_bytes=memory_limit_bytes,
            progress=progress,
        )
        return setting, wanted.terms(setting), partial(_Conversion, wanted=wanted)

    return run_together(process_group, "convert", what, Timeouts.of(timeout), job)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """The arguments of one call."""

    source: Location
    target: Location
    to: TargetFormat
    include: Selection | None
    exclude: Selection | None
    drops: bool
    overwrite: bool
    max_file_bytes: int
    unsafe_pickle: bool

    @property
    def folder(self) -> Location:
        """Where files are put."""
        return split_file(self.target)[0] if self.to == "torch_save" else self.target

    def terms(self, setting: Setting) -> dict[str, str]:
        """Return what all ranks must have in common."""
        return {
            **setting.terms(),
            "the file": self.target.url,
            "to": self.to,
            "max_file_bytes": str(self.max_file_bytes),
            "include": digest(self.include),
            "exclude": digest(self.exclude),
        }


class _Conversion(Task[ConvertReport]):
    """One conversion on one rank."""

    source: Source | TorchFileSource

    def __init__(self, site: Site, *, wanted: _Wanted) -> None:
        super().__init__(site)
        self._wanted = wanted
        self._watch: Callable[[], None] | None = None
        self._shards: Shards | None = None

    def find(self) -> Found:
        """Open a checkpoint, or a file, which its name may tell; nothing may be missing of it."""
        site, wanted = self.site, self._wanted
        folder, name = split_file(wanted.source)
        is_file = name.endswith(_TORCH_SUFFIXES) and self._is_file(folder, name)
        if not is_file:
            try:
                super().find()
            except (CheckpointNotFoundError, StorageError):
                is_file = bool(name) and self._is_file(folder, name)
                if not is_file:
                    raise
        if is_file:
            site.read_from(folder)
            self._watch = watch_file(site.source, name)
            at = site.source.stat(name)
            state = None if at.modified_s is None else (at.size_bytes, at.modified_s)
            self.open(Found(file=(folder, name), state=state or new_write_id()))
        if self.source.format == wanted.to:
            raise InvalidInputError(
                f"{wanted.source.url} is of the format {wanted.to} already.",
                next_step="Use ckpt_storage.copy to copy it.",
            )
        kept = self._select().names
        self._check_elsewhere()
        with told_from_damage(self.check_unchanged):
            # A source of which something is missing leaves the target as it was.
            keys = (key for key in value_keys(self.source) if key[0] in kept)
            while part := list(islice(keys, _KEYS_AT_ONCE)):
                self.source.require(part)
        return self.found

    def open(self, found: Found) -> None:
        """Open the same."""
        if found.file is None:
            super().open(found)
            return
        from .torchfile import open_torch_file  # noqa: PLC0415  # imports torch

        self.found = found
        self.source = open_torch_file(
            self.site.source, found.file[1], unsafe_pickle=self._wanted.unsafe_pickle
        )

    def _is_file(self, folder: Location, name: str) -> bool:
        return is_there(self.site.opened(folder).bounded(self.site.deadline), name)

    def check_unchanged(self) -> None:
        """Raise if the source changed since it was opened."""
        if self._watch is not None:
            self._watch()
        super().check_unchanged()

    def source_files(self) -> list[str]:
        """Return the files of the values."""
        return [self.found.file[1]] if self.found.file else super().source_files()

    def _check_elsewhere(self) -> None:
        """Refuse a target that would replace files of the source; the storages are asked."""
        site, wanted = self.site, self._wanted
        name = split_file(wanted.target)[1]
        is_file, to_file = self.found.file is not None, wanted.to == "torch_save"
        if to_file and not (name and is_there(site.target, name)):
            return
        within = place_within(site.source, site.target, is_deep=not is_file)
        if within is None:
            return
        if to_file:
            if f"{within}/{name}".lstrip("/") in self._paths():
                raise InvalidInputError(
                    f"{wanted.target.url} is part of {wanted.source.url}, which is to be "
                    "converted.",
                    next_step="Give another name for the result.",
                )
        elif self.found.file is not None:
            if self.found.file[1].endswith(_FOLDER_FILES):
                raise onto_itself(wanted.source.url)
        elif not within or any(path.startswith(f"{within}/") for path in self._paths()):
            raise onto_itself(wanted.source.url)

    def _select(self) -> Selected:
        wanted = self._wanted
        return select(
            self.source,
            include=wanted.include,
            exclude=wanted.exclude,
            safetensors=wanted.to in _SAFETENSORS,
            on_unsupported="drop" if wanted.drops else "error",
            format_name=wanted.to,
        )

    def _paths(self) -> set[str]:
        """Return the files that hold the values, and those that make them a checkpoint."""
        keys = value_keys(self.source)
        self.source.require(keys)
        places = (self.source.place(*key).path for key in keys)
        return {STOCK_METADATA, INDEX_NAME, *places}

    def content(self) -> object:
        """Return what stands for the values."""
        wanted = self._wanted
        state = self.found.state if self.save_id is None else self.save_id
        return [_LAYOUT, wanted.source.url, state, wanted.to, wanted.max_file_bytes]

    def lay_out(self) -> Layout:
        """Return the files; none for a file of torch, which is one stream."""
        self._chosen = self._select()
        source, kept = self.source, self._chosen.names
        self._tensors = {fqn: info for fqn, info in source.tensors.items() if fqn in kept}
        self._blobs = sorted(source.blobs & kept)
        found = source.ties if isinstance(source, CommittedSource) else getattr(source, "ties", {})
        self._ties = {a: t for a, t in found.items() if a in kept and t in kept}
        tensors, wanted = self._tensors.values(), self._wanted
        if wanted.to == "torch_save":
            return Layout(files=())
        if wanted.to == "safetensors":
            return lay_out_whole(tensors, wanted.max_file_bytes)
        if wanted.to == "dcp_safetensors":
            return lay_out_sharded(tensors, wanted.max_file_bytes)
        self._shards = lay_out_shards(
            tensors,
            self._blob_segments(),
            max_file_bytes=wanted.max_file_bytes,
            path_of=partial(shard_name, 0),
            block_bytes=TransferOptions().block_bytes if wanted.to == "ckpt_storage" else None,
        )
        return self._shards.layout

    def _blob_segments(self) -> dict[str, Segment]:
        """Return each value that is no tensor as DCP stores it: by `torch.save`."""
        held: Mapping[str, object] = getattr(self.source, "values", {})
        found: dict[str, Segment] = {}
        self.source.require([(fqn, None) for fqn in self._blobs if fqn not in held])
        for fqn in self._blobs:
            if fqn in held:
                import torch  # noqa: PLC0415  # only what torch read is held

                buffer = io.BytesIO()
                torch.save(held[fqn], buffer)
                found[fqn] = Fixed(buffer.getvalue())
            else:
                found[fqn] = Stored(fqn=fqn, size_bytes=self._blob_bytes(fqn))
        return found

    def _blob_bytes(self, fqn: str) -> int:
        return self.source.place(fqn, None).size_bytes

    def output(self, plan: Plan) -> Output:
        """Return where the files go."""
        wanted, site, shards = self._wanted, self.site, self._shards
        paths = self.source.planner_data or {}
        metadata = partial(metadata_of, self._tensors.values(), self._blobs, paths)
        if wanted.to == "torch_save":
            return OneFile(
                site,
                plan,
                url=wanted.target.url,
                name=split_file(wanted.target)[1],
                overwrite=wanted.overwrite,
                write=self._write_torch_file,
            )
        folder = partial(PlainFolder, site, plan, overwrite=wanted.overwrite)
        if shards is None:
            if wanted.to == "dcp_safetensors":
                return folder(shown="nothing")
            index = partial(index_document, plan.layout)
            return folder(shown="index", last=INDEX_NAME, document=index)
        if wanted.to == "dcp":

            def stock() -> bytes:
                return stock_pickle(metadata(), shards, wanted.target.url)

            return folder(shown="metadata", last=STOCK_METADATA, document=stock)
        return NewCheckpoint(
            site,
            plan,
            shards=shards,
            block_bytes=TransferOptions().block_bytes,
            metadata=metadata,
            ties=self._ties,
            overwrite=wanted.overwrite,
        )

    def report(self, output: Output, made: Made, seconds: float) -> ConvertReport:
        """Say what went over."""
        grant = output.grant if isinstance(output, NewCheckpoint) else None
        return ConvertReport(
            source_url=self._wanted.source.url,
            source_format=self.source.format,
            url=self._wanted.target.url,
            format=self._wanted.to,
            save_id=grant.save_id if grant else None,
            kept_count=len(made.kept),
            tensor_count=len(self._tensors),
            blob_count=len(self._blobs),
            total_bytes=sum(map(payload_bytes, self._tensors.values())),
            dropped=tuple(sorted(self._chosen.dropped)),
            excluded=tuple(sorted(self._chosen.excluded)),
            seconds=seconds,
        )

    def _write_torch_file(self, store: Store, name: str, begin: Callable[[], None]) -> None:
        """Write all values as one stream; `begin` is called before the first byte."""
        from .torchzip import TorchValues, write_torch_file  # noqa: PLC0415  # imports torch

        site = self.site
        total_bytes = sum(map(payload_bytes, self._tensors.values()))
        with reporting(
            site.setting.progress,
            phase="write",
            rank=0,
            total_bytes=total_bytes,
            save_id=self.save_id,
            with_bar=True,
        ) as on_bytes:
            write_torch_file(
                TorchValues(
                    tensors=self._tensors,
                    blobs=self._blobs,
                    held=getattr(self.source, "values", {}),
                    paths=self.source.planner_data or {},
                    ties=self._ties,
                ),
                store,
                name,
                stream=partial(
                    SegmentStream,
                    source=self.source,
                    store=site.source,
                    options=site.options,
                    deadline=site.deadline,
                ),
                size_of=self._blob_bytes,
                options=site.options,
                deadline=site.deadline,
                on_bytes=on_bytes,
                unsafe_pickle=self._wanted.unsafe_pickle,
                begin=begin,
                check_unchanged=self.check_unchanged,
            )
