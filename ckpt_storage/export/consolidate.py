"""`consolidate`: one bounded, collective consolidation to Hugging Face safetensors.

Imports torch only where a process group is involved.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ckpt_storage.coordination.failures import place_of
from ckpt_storage.coordination.ranks import Ranks as Group
from ckpt_storage.errors import CheckpointError, InvalidInputError, StorageError
from ckpt_storage.format.exports import DEFAULT_FOLDER, INDEX_NAME
from ckpt_storage.format.names import COMMITS, SAVES
from ckpt_storage.options import PageCache, Phase, Progress, RetryPolicy, Timeouts
from ckpt_storage.progress import reporting
from ckpt_storage.source.model import CommittedSource, Source, SourceFormat
from ckpt_storage.store import Location

from .folder import ExportFolder
from .layout import Layout
from .opening import Found, Opening, source_files
from .options import DEFAULT_MAX_FILE_BYTES, ConsolidateOptions, Selection, digest
from .output import Made, Output, Setting, Site, Track, terms_of, untracked
from .places import location_beside
from .plan import Plan
from .removal import stale_exports
from .run import Task, meeting, run
from .select import Skipped, check_ties
from .weights import lay_out_model
from .work import Ranks
from .write import Copies

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger("ckpt_storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidatedFile:
    """One weight file. `ranks` wrote it; none did if an earlier run had completed it."""

    name: str
    size_bytes: int
    crc32c: int
    ranks: tuple[int, ...]

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier run had completed it."""
        return not self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationReport:
    """An export that is complete and published; the same on all ranks.

    source_url, output_url: without credentials; `index_path` is below `output_url`.
    source_format, save_id: what was consolidated; None where the format has no save ids.
    files: in order of their number. `total_bytes` is of all of them, headers included.
    read_bytes: came to the ranks, of the source. sent_bytes: went from them to the output.
        copied_bytes: the storage copied by itself. All three of this run, all ranks together.
    rank_bytes: bytes of weight files that each rank was responsible for, this run.
    skipped: what is in no weight file, and why. ties: alias to target, FQNs, of dropped aliases.
    removed: files of earlier exports and of runs that died that were deleted.
    stale_exports: folders directly below the checkpoint whose export is of another save.
    seconds: from the meeting of the ranks to the end.
    """

    source_url: str
    output_url: str
    source_format: SourceFormat
    save_id: str | None
    index_path: str
    fingerprint: str
    files: Sequence[ConsolidatedFile]
    tensor_count: int
    total_bytes: int
    read_bytes: int
    sent_bytes: int
    copied_bytes: int
    rank_bytes: Sequence[int]
    skipped: Sequence[Skipped]
    ties: Mapping[str, str]
    removed: Sequence[str]
    stale_exports: Sequence[str]
    seconds: float

    @property
    def resumed(self) -> tuple[str, ...]:
        """Names of the weight files that an earlier run had completed."""
        return tuple(file.name for file in self.files if file.is_resumed)


def consolidate(  # the public surface, all keyword-only
    url: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    max_file_bytes: int | str = DEFAULT_MAX_FILE_BYTES,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    dtype: object | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    include: Selection | None = None,
    exclude: Selection | None = None,
    tied: Literal["drop", "keep"] | Mapping[str, str] = "drop",
    memory_limit_bytes: int | None = None,
    page_cache: PageCache = "keep",
    progress: Progress = None,
    storage_options: Mapping[str, Any] | None = None,
    output_storage_options: Mapping[str, Any] | None = None,
    retry: RetryPolicy | None = None,
) -> ConsolidationReport:
    """Write the checkpoint at `url` as Hugging Face safetensors; all ranks of the group call.

    The ranks divide the bytes evenly, several of them in one file where the storage can. No
    collective runs on any process group and no GPU takes part, so it is safe beside training.
    Every byte is checked against the checkpoint's checksums. The export becomes visible only
    complete; a call after a failure goes on with the files that are missing, also with other
    ranks. An earlier export of other content stays readable until the new index is published,
    and is deleted then.

    Args:
        url: what to consolidate: a checkpoint of ours, of stock DCP, or torch's sharded
            safetensors, on any storage; the same on every rank.
        output: folder or URL of the export; default: `hf` below `url`.
        process_group: the ranks that take part; default: the default group; without one, this
            process. All must reach both storages.
        timeout: seconds, `timedelta` or `Timeouts` (`plan` and `consolidate` count); default
            ten minutes and an hour.
        max_file_bytes: as for `ConsolidateOptions`, like all up to `memory_limit_bytes`.
        fqn_to_index_mapping: which file each tensor goes into.
        dtype: what to cast floating-point tensors to.
        rename: names in the weight files.
        include: which tensors go out, instead of the model's.
        exclude: which of them do not.
        tied: what happens to tied tensors.
        memory_limit_bytes: ceiling of buffers per rank.
        page_cache: whether the kernel keeps a copy of local weight files that are on the disk.
        progress: True: a bar on rank 0; or a callable that takes each `ProgressEvent`.
        storage_options: passed to the fsspec file system of `url`.
        output_storage_options: passed to that of `output`; default: `storage_options` where
            both are of one kind.
        retry: how failed storage requests are repeated.

    Raises:
        CheckpointError: on every live rank, naming rank, file and tensor where they are known.
            Before anything was written: `InvalidInputError`, `RankMismatchError`,
            `CheckpointNotFoundError`, `CheckpointExistsError` (the folder holds weight files of
            another program). Later: `IntegrityError`, `StorageError`, `PhaseTimeoutError`,
            `RankFailedError`, `ConsolidationError`. Then the earlier export counts, unless the
            new index was being put at that moment: whichever the index names is whole, and
            calling again brings the new one to its end.

    """
    # A lane of its own: a background thread may consolidate while another one saves.
    group = Group.of(process_group, lane="consolidate")
    timeouts = Timeouts()
    if timeout is not None:
        with contextlib.suppress(CheckpointError):
            timeouts = Timeouts.of(timeout)

    def job() -> ConsolidateJob:
        source = Location.of(url, storage_options)
        return ConsolidateJob(
            source=source,
            output=output_location(source, output, output_storage_options),
            options=ConsolidateOptions(
                max_file_bytes=max_file_bytes,
                fqn_to_index_mapping=fqn_to_index_mapping,
                dtype=dtype,
                rename=rename,
                include=include,
                exclude=exclude,
                tied=tied,
                memory_limit_bytes=memory_limit_bytes,
                page_cache=page_cache,
            ),
            timeouts=Timeouts.of(timeout),
            retry=retry or RetryPolicy(),
            track=partial(track, progress, group.rank),
        )

    what = f"the consolidation of {place_of(url)}"
    with meeting(group, "consolidate", what, timeouts, job) as (operation, chosen):
        operation.what = f"the consolidation of {chosen.source.url}"
        operation.meet(chosen.terms())
        return run_consolidate(operation, chosen)


def output_location(
    source: Location,
    output: str | os.PathLike[str] | None,
    storage_options: Mapping[str, Any] | None = None,
) -> Location:
    """Return where the export of `source` goes. Raises `InvalidInputError`."""
    if output is None:
        return source.child(DEFAULT_FOLDER)
    return location_beside(source, output, storage_options)


def track(
    progress: Progress, rank: int, total_bytes: int, save_id: str | None
) -> AbstractContextManager[Callable[[int], None]]:
    """Show how far a consolidation is on this rank, as `progress` says."""
    return reporting(
        progress,
        phase="consolidate",
        rank=rank,
        total_bytes=total_bytes,
        save_id=save_id,
        with_bar=rank == 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateJob:
    """What is consolidated, to where and how; the same on all ranks.

    `ties` are recorded ones, alias to target in FQNs; None: those that the save wrote down.
    For a save that goes on with it: `slot` is that of its commit (None: the head), and `commits` is
    where its commit records lie, if not in `source`.
    Pickles if `track` does.
    """

    source: Location
    output: Location
    options: ConsolidateOptions = field(default_factory=ConsolidateOptions)
    ties: Mapping[str, str] | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    copies: Copies = "auto"
    thread_count: int | None = None
    slot: int | None = None
    commits: Location | None = None
    track: Track = untracked

    def __post_init__(self) -> None:
        source, output = self.source.url, self.output.url
        inner = (source, f"{source}/{COMMITS}", f"{source}/{SAVES}")
        if output in inner or output.startswith(tuple(f"{one}/" for one in inner[1:])):
            raise InvalidInputError(
                f"The output {self.output.url} is where the checkpoint's own files lie.",
                next_step=f"Give a folder of its own, such as {self.source.url}/hf.",
            )

    def terms(self) -> dict[str, str]:
        """Return what all ranks must have in common, as `Operation.meet` wants it."""
        options = self.options
        return {
            **terms_of(self.source, self.output),
            "the commit": str(self.slot),
            "max_file_bytes": str(options.file_limit_bytes),
            "fqn_to_index_mapping": digest(options.fqn_to_index_mapping),
            "dtype": str(options.cast_to),
            "rename": digest(options.rename),
            "include": digest(options.include),
            "exclude": digest(options.exclude),
            "tied": digest(options.tied),
        }


def run_consolidate(ranks: Ranks, job: ConsolidateJob) -> ConsolidationReport:
    """Consolidate; all ranks call it within one operation, after they have met.

    The export that counted before counts after an error, unless that happened while the index was
    put. Another call goes on where this one ended. Raises as `run.run`, `CheckpointExistsError`,
    and `ConsolidationError` if another consolidation took the folder over.
    """
    setting = Setting(
        source=job.source,
        target=job.output,
        timeouts=job.timeouts,
        retry=job.retry,
        page_cache=job.options.page_cache or "keep",
        memory_limit_bytes=job.options.memory_limit_bytes,
        copies=job.copies,
        thread_count=job.thread_count,
        commits=job.commits,
        track=job.track,
    )
    return run(ranks, setting, partial(_Consolidation, job=job))


class _Consolidation(Task[ConsolidationReport]):
    """One consolidation on one rank."""

    phase: Phase = "consolidate"
    source: Source

    def __init__(self, site: Site, *, job: ConsolidateJob) -> None:
        super().__init__(site)
        self._job = job
        self._opening = Opening(site)
        self._state: object = None
        self.check_unchanged = self._opening.check_unchanged  # type: ignore[method-assign]

    def find(self) -> Found:
        """Open the source; see that no other writer has begun to replace it."""
        self.source, found = self._opening.find(self._job.slot)
        self.save_id, self._state = self.source.save_id, found.state
        self.check_unchanged()
        return found

    def open(self, found: object) -> None:
        """Open the same."""
        assert isinstance(found, Found)  # noqa: S101  # as `find` returns
        self.source = self._opening.open(found)
        self.save_id, self._state = self.source.save_id, found.state

    def source_files(self) -> list[str]:
        """Return the files of the values."""
        return source_files(self.source)

    def content(self) -> object:
        """Return what stands for the source."""
        return [self.source.format, self.source.save_id, self._state]

    def lay_out(self) -> Layout:
        """Return the weight files, named for an empty folder."""
        ties = self._job.ties
        if ties is None:
            ties = self.source.ties if isinstance(self.source, CommittedSource) else {}
        return lay_out_model(self.source, self._job.options, ties)

    def check_layout(self, layout: Layout) -> None:
        """Raise for tied tensors that differ."""
        check_ties(self.source, layout.ties)

    def output(self, plan: Plan) -> ExportFolder:
        """Return the folder of the export."""
        source = self.source
        return ExportFolder(self.site, plan, save_id=source.save_id, source_format=source.format)

    def report(self, output: Output, made: Made, seconds: float) -> ConsolidationReport:
        """Say what was exported, and which exports beside it are of other saves."""
        assert isinstance(output, ExportFolder)  # noqa: S101  # as `output` returns
        whole = output.plan
        stale: list[str] = []
        try:
            if self.save_id is not None:
                stale = stale_exports(self.site.source, self.save_id)
        except StorageError as error:
            log.warning("Other exports of %s are not known: %s", self._job.source.url, error)
        files = [made.files[at] for at in range(len(whole.files))]
        writers: dict[int, set[int]] = {}
        rank_bytes = [0] * whole.world_size
        for region in whole.regions:
            writers.setdefault(region.file, set()).add(region.owner)
            rank_bytes[region.owner] += region.size_bytes
        for at, rank in whole.checks.items():
            if at not in made.kept:
                writers[at] = {rank}
                rank_bytes[rank] += files[at].size_bytes
        return ConsolidationReport(
            source_url=self._job.source.url,
            output_url=self._job.output.url,
            source_format=self.source.format,
            save_id=self.save_id,
            index_path=INDEX_NAME,
            fingerprint=whole.identity,
            files=tuple(
                ConsolidatedFile(
                    name=file.path,
                    size_bytes=file.size_bytes,
                    crc32c=file.crc32c,
                    ranks=tuple(sorted(writers.get(at, ()))),
                )
                for at, file in enumerate(files)
            ),
            tensor_count=sum(len(file.elements) for file in whole.files),
            total_bytes=whole.layout.total_bytes,
            read_bytes=made.bytes_of("read_bytes"),
            sent_bytes=made.bytes_of("sent_bytes"),
            copied_bytes=made.bytes_of("copied_bytes"),
            rank_bytes=tuple(rank_bytes),
            skipped=whole.layout.skipped,
            ties=dict(whole.layout.ties),
            removed=tuple(output.removed),
            stale_exports=tuple(stale),
            seconds=seconds,
        )
