"""`convert`: the values of a checkpoint of one format, written in another.

Nothing is held in memory but windows of tensors and the values that are none. Until its last write
the target looks like no checkpoint, or like the one that is being replaced where that is of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from ckpt_storage import errors
from ckpt_storage.commit import attempt
from ckpt_storage.commit.attempt import SaveTicket
from ckpt_storage.commit.cleaning import delete_attempt
from ckpt_storage.commit.report import RankReport
from ckpt_storage.commit.slotlog import is_there, stat_if_there
from ckpt_storage.coordination.failures import redacted_url
from ckpt_storage.format import names
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.options import DEFAULT_BLOCK_BYTES, PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.source.filemarks import changed, told_from_damage
from ckpt_storage.source.model import value_keys
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.deadline import Deadline

from . import layout
from .folder import PlainFolder
from .layout import Files, Shards
from .options import (
    DEFAULT_MAX_FILE_BYTES,
    Selection,
    check_memory_limit,
    digest,
    is_within,
    location_beside,
    parse_bytes,
    split_file,
)
from .output import Found, Setting, Site, Taken, Task, place_within, run_together
from .plan import Fixed, Segment, Stored, elements_of
from .select import Selected, select
from .write import Made

if TYPE_CHECKING:
    import torch.distributed as dist

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
    what, timeouts = f"the conversion of {redacted_url(src)}", Timeouts.of(timeout)

    def job() -> _Job:
        if to not in FORMATS:
            raise errors.InvalidInputError(
                f"The format {to!r} is not known.", next_step=f"Give one of {', '.join(FORMATS)}."
            )
        if memory_limit_bytes is not None:
            check_memory_limit(memory_limit_bytes)
        source = Location.of(src, storage_options)
        target = location_beside(source, dst, destination_storage_options)
        if is_within(source, target) and is_within(target, source):
            raise _onto_itself(source.url)
        target_folder, target_file = split_file(target) if to == "torch_save" else (target, "")
        source_folder, source_file = split_file(source)
        is_file = source_file.endswith(_TORCH_SUFFIXES)
        if is_file:
            with closing(open_store(source_folder, timeouts=timeouts, retry=retry)) as store:
                is_file = is_there(store.bounded(Deadline("plan", timeouts.plan)), source_file)
        return _Job(
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

    return run_together(process_group, "convert", what, timeouts, job, _conversion)


def _onto_itself(url: str) -> errors.InvalidInputError:
    what = f"{url} would be converted onto itself, or into its own files."
    return errors.InvalidInputError(what, next_step="Give another place for the result.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job(Setting):
    """What is converted; both URLs are those that were given, which may be of files."""

    source_file: str
    source_url: str
    target_file: str
    target_url: str
    to: TargetFormat
    include: Selection | None
    exclude: Selection | None
    drops: bool
    max_file_bytes: int
    unsafe_pickle: bool

    def terms(self) -> dict[str, str]:
        """Return what all ranks must have in common, as `Operation.meet` wants it."""
        own = ("to", "max_file_bytes", "include", "exclude")
        options = {name: digest(getattr(self, name)) for name in own}
        return {**Setting.terms(self), "the file": self.target_url, **options}


def _conversion(site: Site, found: Found | None) -> _Conversion:
    """Return the task that writes the wanted format."""
    assert isinstance(site.setting, _Job)  # noqa: S101  # as `convert` made it
    if site.setting.to == "torch_save":
        from .torchfile import TorchFile  # noqa: PLC0415  # imports torch

        return TorchFile(site, found)
    return (_ToOurs if site.setting.to == "ckpt_storage" else _ToFolder)(site, found)


class _Conversion(Task[ConvertReport]):
    """One conversion on one rank; each target adds where the files go."""

    setting: _Job
    shards: Shards
    new_id: str | None = None

    def find(self) -> Found:
        """Open a checkpoint, or a file; nothing may be missing of it."""
        site, setting, file = self.site, self.setting, self.setting.source_file
        if file:
            at = site.source.stat(file)
            self.watch = partial(self._check_file, at)
            state = None if at.modified_s is None else (at.size_bytes, at.modified_s)
            found = Found(state=state or names.new_write_id())
            self.open(found)
        else:
            found = super().find()
        if self.source.format == setting.to:
            what = f"{setting.source_url} is of the format {setting.to} already."
            raise errors.InvalidInputError(what, next_step="Use ckpt_storage.copy to copy it.")
        chosen = self.chosen
        self._check_elsewhere()
        with told_from_damage(self.check_unchanged):
            # A source of which something is missing leaves the target as it was.
            keys = iter(value_keys(chosen.tensors, chosen.blobs))
            while part := list(islice(keys, _KEYS_AT_ONCE)):
                self.source.places(part)
        return found

    def _check_file(self, before: ObjectInfo) -> None:
        now = stat_if_there(self.site.source, self.setting.source_file)
        if now != before:
            what = "was written again" if now else "is gone"
            raise changed(self.site.source.url, self.setting.source_file, what)

    def open(self, found: Found) -> None:
        setting = self.setting
        if not setting.source_file:
            super().open(found)
            return
        from .torchfile import open_torch_file  # noqa: PLC0415  # imports torch

        self.source = open_torch_file(
            self.site.source, setting.source_file, unsafe_pickle=setting.unsafe_pickle
        )

    def _check_elsewhere(self) -> None:
        """Refuse a target that would replace files of the source; the storages are asked."""
        site, name = self.site, self.setting.target_file
        # A file of torch is none that a folder of another format gets.
        if self.setting.source_file or (name and not is_there(site.target, name)):
            return
        within = place_within(site.source, site.target)
        if within is None:
            return
        places = self.source.places(value_keys(self.source.tensors, self.source.blobs))
        own = {names.STOCK_METADATA, names.INDEX_NAME, *(place.path for place in places)}
        path = f"{within}/{name}".strip("/")
        if not path or any(f"{one}/".startswith(f"{path}/") for one in own):
            raise _onto_itself(self.setting.source_url)

    @cached_property
    def chosen(self) -> Selected:
        """The values that go over."""
        one = self.setting
        return select(self.source, one.include, one.exclude, to=one.to, drops=one.drops)

    def content(self) -> object:
        one, state = self.setting, self.found.state if self.save_id is None else self.save_id
        return [_LAYOUT, one.source_url, state, one.to, one.max_file_bytes]

    def stored_blobs(self) -> list[Stored]:
        """Return the objects as they are stored."""
        places = self.source.places([(fqn, None) for fqn in self.chosen.blobs])
        return [Stored(fqn=one.fqn, size_bytes=one.size_bytes) for one in places]

    @property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors that go over."""
        return sum(elements_of(*one).size_bytes for one in self.chosen.tensors.items())

    def shards_of(self, block_bytes: int | None = None) -> Files:
        """Return DCP's files with all values; objects are in them as `torch.save` has them."""
        blobs: Mapping[str, Segment]
        if self.setting.source_file:
            source: Any = self.source
            blobs = {fqn: Fixed(source.pickled(fqn)) for fqn in self.chosen.blobs}
        else:
            blobs = {one.fqn: one for one in self.stored_blobs()}
        tensors, most_bytes = self.chosen.tensors, self.setting.max_file_bytes
        files, self.shards = layout.lay_out_shards(tensors, blobs, most_bytes, block_bytes)
        return files

    def report(self, made: Made, seconds: float) -> ConvertReport:
        setting, chosen = self.setting, self.chosen
        return ConvertReport(
            source_url=setting.source_url,
            source_format=self.source.format,
            url=setting.target_url,
            format=setting.to,
            save_id=self.new_id,
            kept_count=len(made.kept),
            tensor_count=len(chosen.tensors),
            blob_count=len(chosen.blobs),
            total_bytes=self.tensor_bytes,
            dropped=tuple(sorted(chosen.dropped)),
            excluded=tuple(sorted(chosen.excluded)),
            seconds=seconds,
        )


class _ToFolder(_Conversion, PlainFolder[ConvertReport]):
    """Files of another format, with an index or `.metadata` if it has one."""

    @property
    def last(self) -> str:
        return {"safetensors": names.INDEX_NAME, "dcp": names.STOCK_METADATA}.get(
            self.setting.to, ""
        )

    def lay_out(self) -> Files:
        if self.setting.to == "dcp":
            return self.shards_of()
        ways = {"safetensors": layout.lay_out_whole, "dcp_safetensors": layout.lay_out_sharded}
        return ways[self.setting.to](self.chosen.tensors, self.setting.max_file_bytes)

    def document(self) -> bytes:
        if self.setting.to == "safetensors":
            return layout.index_document(self.plan.files)
        metadata = layout.metadata_of(self.source, self.chosen)
        return layout.stock_pickle(metadata, self.plan.files, self.shards, self.setting.target_url)


class _ToOurs(_Conversion):
    """One save of one rank, committed as any save is committed."""

    _ticket: SaveTicket | None = None
    _may_be_committed = False

    def lay_out(self) -> Files:
        return self.shards_of(DEFAULT_BLOCK_BYTES)

    def take(self) -> Taken:
        """Begin a save; the name is its id."""
        self._ticket = attempt.begin(self.site.target, overwrite=self.setting.overwrite)
        return Taken(name=self._ticket.save_id)

    def rename(self, name: str) -> None:
        """Put the files below the save of that id."""
        self.new_id = name
        files = (
            replace(f, name=names.shard_path(name, 0, at)) for at, f in enumerate(self.plan.files)
        )
        self.plan = replace(self.plan, files=tuple(files))

    def publish(self, made: Made) -> None:
        """Put down what describes the files, and commit."""
        from ckpt_storage.commit.assembly import commit_save  # noqa: PLC0415  # imports torch

        ticket, store, ties = self._ticket, self.site.target, self.chosen.ties
        assert ticket is not None  # noqa: S101  # `take` was called
        manifest = layout.rank_manifest(self.plan.files, self.shards, made, ticket.save_id, ties)
        path, data = names.rank_manifest_path(ticket.save_id, 0), seal(manifest.to_body())
        store.put(path, data)
        reference, metadata = FileRef.of(path, data), layout.metadata_of(self.source, self.chosen)
        self._may_be_committed = True
        try:
            commit_save(
                store.bounded(Deadline("commit", self.setting.timeouts.commit)),
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

    def give_up(self, error: BaseException) -> None:
        """Delete the attempt, unless it may be committed: nobody could go on with it."""
        if self._ticket is None or self._may_be_committed:
            return
        try:
            delete_attempt(self.site.target, self._ticket.save_id)
        except errors.CheckpointError as failure:
            error.add_note(f"Removing what was written failed too: {failure}")
