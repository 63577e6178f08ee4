"""`consolidate`: one bounded, collective consolidation to Hugging Face safetensors.

Imports torch only where a process group is involved.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ckpt_storage.commit.slotlog import read_slot
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointNotFoundError, InvalidInputError
from ckpt_storage.format.exports import DEFAULT_FOLDER
from ckpt_storage.format.names import COMMITS, SAVES
from ckpt_storage.observe.stats import OperationStats
from ckpt_storage.options import PageCache, Phase, Progress, RetryPolicy, Timeouts
from ckpt_storage.source.model import SourceFormat
from ckpt_storage.store import Location, redacted_url

from .extras import named_files, read_extra_files
from .folder import ExportFolder
from .layout import Files, lay_out_model
from .options import (
    DEFAULT_MAX_FILE_BYTES,
    WANTED,
    ConsolidateOptions,
    ExtraFiles,
    Selection,
    digest,
    location_beside,
)
from .output import ExportSpec, ResumeState, SourceVersion, WriteSummary
from .run import run, run_together
from .select import SkippedValue, check_ties, dropped_prefixes

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger("ckpt_storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidatedFile:
    """One weight file. `ranks` wrote it; there are none if an earlier run had completed it."""

    name: str
    size_bytes: int
    crc32c: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationReport:
    """An export that is complete and published; the same on all ranks.

    source_url, output_url: without credentials.
    source_format, save_id: of the checkpoint; `save_id` is None if the format has no save ids.
    files: in order of their numbers. `total_bytes` is of all files, headers included.
    read_bytes, sent_bytes: received and sent by all ranks in this run. rank_bytes: what each rank
        sent.
    dropped_prefixes: removed from names by default: keys of containers, prefixes of wrappers.
    skipped: values that are in no weight file. ties: alias to target, FQNs, of dropped aliases.
    extra_files: names of files that were written beside the weights.
    removed: deleted files of earlier exports and of runs that died.
    seconds: from the rendezvous of the ranks to the end. stats: until all ranks had written.
    """

    source_url: str
    output_url: str
    source_format: SourceFormat
    save_id: str | None
    fingerprint: str
    files: Sequence[ConsolidatedFile]
    tensor_count: int
    total_bytes: int
    read_bytes: int
    sent_bytes: int
    rank_bytes: Sequence[int]
    dropped_prefixes: Sequence[str]
    skipped: Sequence[SkippedValue]
    ties: Mapping[str, str]
    extra_files: Sequence[str]
    removed: Sequence[str]
    seconds: float
    stats: OperationStats | None = None

    @property
    def resumed(self) -> tuple[str, ...]:
        """Names of the weight files that an earlier run had completed."""
        return tuple(file.name for file in self.files if not file.ranks)


def consolidate(  # the public surface, all keyword-only
    url: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    max_file_bytes: int | str = DEFAULT_MAX_FILE_BYTES,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    filename_pattern: str | None = None,
    dtype: object | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    include: Selection | None = None,
    exclude: Selection | None = None,
    tied: Literal["drop", "keep"] | Mapping[str, str] = "drop",
    extra_files: ExtraFiles | None = None,
    memory_limit_bytes: int | None = None,
    page_cache: PageCache = "keep",
    progress: Progress = None,
    storage_options: Mapping[str, Any] | None = None,
    output_storage_options: Mapping[str, Any] | None = None,
    retry: RetryPolicy | None = None,
) -> ConsolidationReport:
    """Write the checkpoint at `url` as Hugging Face safetensors; all ranks of the group call.

    The ranks divide the bytes evenly. No collective runs on any process group and no GPU is used,
    so it is safe beside training. Every byte is checked against the checkpoint's checksums. The
    export becomes visible only complete; a call after a failure writes the files that are missing,
    also with other ranks. An earlier export of other content stays readable until the new index is
    published, and is deleted then.

    Args:
        url: a checkpoint of ours, of stock DCP, or torch's sharded safetensors, on any storage; the
            same on every rank.
        output: folder or URL of the export; default: `hf` below `url`.
        process_group: the ranks that share the work; default: the default group; without one,
            this process. All must reach both storages.
        timeout: seconds, `timedelta` or `Timeouts` (`plan` and `consolidate` count); default
            four minutes and an hour. `consolidate` is the time without progress, not that of the
            whole.
        max_file_bytes: as for `ConsolidateOptions`, like all up to `memory_limit_bytes`.
        fqn_to_index_mapping: which file each tensor goes into.
        filename_pattern: names of the weight files, for PEFT and diffusers.
        dtype: what to cast floating-point tensors to.
        rename: names in the weight files.
        include: which tensors to export, instead of the model's.
        exclude: which of them to skip.
        tied: whether aliases of tied tensors are exported.
        extra_files: files to write beside the weights.
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
            `RankFailedError`, `ConsolidationError`. Then the earlier export is valid, unless the
            new index was being put at that moment: the export that the index names is whole, and
            calling again completes the new one.

    """
    # In its own lane: a background thread may consolidate while another thread saves.
    group = RankGroup.of(process_group, lane="consolidate")

    def job() -> ConsolidateSpec:
        options = ConsolidateOptions(
            max_file_bytes=max_file_bytes,
            fqn_to_index_mapping=fqn_to_index_mapping,
            filename_pattern=filename_pattern,
            dtype=dtype,
            rename=rename,
            include=include,
            exclude=exclude,
            tied=tied,
            extra_files=extra_files,
            memory_limit_bytes=memory_limit_bytes,
            page_cache=page_cache,
            output=output,
            output_storage_options=output_storage_options,
        )
        parse = Location.of if output is None else Location.to_read
        spec = ConsolidateSpec.of(parse(url, storage_options), options)
        return replace(spec, timeouts=Timeouts.of(timeout), retry=retry, progress=progress)

    what = f"the consolidation of {redacted_url(url)}"
    return run_together(group, "consolidate", what, timeout, job, _Consolidation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateSpec(ExportSpec):
    """The options of a consolidation of the commit in `slot`, which a save made, or of the head."""

    options: ConsolidateOptions = field(default_factory=ConsolidateOptions)
    slot: int | None = None

    phase: ClassVar[Phase] = "consolidate"

    @classmethod
    def of(cls, source: Location, options: ConsolidateOptions) -> ConsolidateSpec:
        """Return the spec for these options. Raises `InvalidInputError`."""
        target = source.child(DEFAULT_FOLDER)
        if options.output is not None:
            target = location_beside(source, options.output, options.output_storage_options)
        named_files(options.extra_files)
        own = (f"{source.url}/{COMMITS}/", f"{source.url}/{SAVES}/")
        if target.url == source.url or f"{target.url}/".startswith(own):
            what = f"The output {target.url} is where the checkpoint's own files lie."
            step = f"Give a folder of its own, such as {source.url}/hf."
            raise InvalidInputError(what, next_step=step)
        return cls(
            options=options,
            source=source,
            target=target,
            page_cache=options.page_cache or "keep",
            memory_limit_bytes=options.memory_limit_bytes,
        )

    def first_phase(self, *, is_alone: bool) -> Phase:
        """Return the phase of planning; after a save, whose plan phase is over, its only phase."""
        del is_alone
        return "plan" if self.slot is None else self.phase

    def terms(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, for `Operation.meet`."""
        options = {name: digest(getattr(self.options, name)) for name in WANTED}
        return {**ExportSpec.terms(self), "the commit": str(self.slot), **options}


def run_consolidate(operation: Operation, job: ConsolidateSpec) -> ConsolidationReport:
    """Consolidate; all ranks call it within one operation, after they have met."""
    return run(operation, job, _Consolidation)


class _Consolidation(ExportFolder[ConsolidationReport]):
    """One consolidation on one rank."""

    spec: ConsolidateSpec

    def find(self) -> SourceVersion:
        slot, url = self.spec.slot, self.spec.source.url
        if slot is None:
            return super().find()
        # Another save may have replaced it as the head.
        record = read_slot(self.context.source, slot)
        if record is None or record.type != "commit":
            what, step = f"{url} has no commit in slot {slot}.", "Consolidate what is there now."
            raise CheckpointNotFoundError(what, path=url, phase="plan", next_step=step)
        version = SourceVersion(record=record)
        self.open(version)
        return version

    def content(self) -> object:
        return [self.source.format, self.save_id, self.version.state]

    def lay_out(self) -> Files:
        files, self.skipped = lay_out_model(self.source, self.spec.options)
        self.ties = {value.fqn: value.target for value in self.skipped if value.target is not None}
        return files

    def claim(self) -> ResumeState:
        check_ties(self.source, self.ties)
        entries = [value.fqn for value in self.skipped if value.reason == "file"]
        extra_files = self.spec.options.extra_files
        self.extra_files = read_extra_files(self.context, self.source, entries, extra_files)
        return super().claim()

    def report(self, made: WriteSummary, seconds: float) -> ConsolidationReport:
        spec, plan = self.spec, self.plan
        writers: dict[int, list[int]] = {}
        for rank, result in enumerate(made.results):
            for at in result.spans:
                writers.setdefault(at, []).append(rank)
        files = [
            ConsolidatedFile(
                name=file.path,
                size_bytes=file.size_bytes,
                crc32c=file.crc32c,
                ranks=tuple(writers.get(at, ())),
            )
            for at, file in sorted(made.files.items())
        ]
        return ConsolidationReport(
            source_url=spec.source.url,
            output_url=spec.target.url,
            source_format=self.source.format,
            save_id=self.save_id,
            fingerprint=plan.identity,
            files=tuple(files),
            tensor_count=sum(len(file.elements) for file in plan.files),
            total_bytes=sum(file.size_bytes for file in files),
            read_bytes=made.moved["read_bytes"],
            sent_bytes=made.moved["sent_bytes"],
            rank_bytes=tuple(result.moved["sent_bytes"] for result in made.results),
            dropped_prefixes=dropped_prefixes(
                (tensor.fqn, tensor.name) for file in plan.files for tensor in file.elements
            ),
            skipped=self.skipped,
            ties=self.ties,
            extra_files=tuple(sorted(self.extra_files)),
            removed=tuple(self.removed),
            seconds=seconds,
            stats=made.stats,
        )
