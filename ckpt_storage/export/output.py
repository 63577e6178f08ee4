"""The spec, the stores, the resumed state and the results of an export, and its base class."""

from __future__ import annotations

import abc
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, Literal, TypeVar

from ckpt_storage._version import __version__
from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import (
    DOCUMENTS,
    ExportRecord,
    IndexTag,
    Sealed,
    export_path,
)
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA, new_write_id, probe_path
from ckpt_storage.inspect.checks import has_checksum
from ckpt_storage.observe.stats import OperationStats, RankTiming
from ckpt_storage.options import (
    DEFAULT_MEMORY_LIMIT_BYTES,
    DEFAULT_PART_BYTES,
    MIB,
    REMOTE_THREADS,
    PageCache,
    Phase,
    Progress,
    RetryPolicy,
    Timeouts,
    TransferOptions,
    default_memory_limit_bytes,
)
from ckpt_storage.source.file_versions import listed
from ckpt_storage.source.model import CommittedSource, Source, read_manifest, value_keys
from ckpt_storage.source.opening import open_newest
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.backend import Part as UploadPart
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.objects import is_there, read_decoded, read_or_none, stat_or_none
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.workers import some_at_once

from .plan import OutFile, Plan

R = TypeVar("R")
T = TypeVar("T")

Copies = Literal["auto", "never"]
"""Which parts the storage copies: those that it can, none."""

_LEAST_THREADS = 2
"""One part is written while another is being read."""

_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSpec:
    """The source, the target and the options of an output; the same on all ranks."""

    source: Location
    target: Location
    timeouts: Timeouts = field(default_factory=Timeouts)
    retry: RetryPolicy | None = None
    page_cache: PageCache = "keep"
    memory_limit_bytes: int | None = None
    copies: Copies = "never"
    thread_count: int | None = None
    overwrite: bool = False
    progress: Progress = None

    phase: ClassVar[Phase] = "write"
    """The phase in which the files are written."""

    def first_phase(self, *, is_alone: bool) -> Phase:
        """Return the phase of planning; a rank alone has one phase, that of writing."""
        return self.phase if is_alone else "plan"

    def terms(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, for `Operation.meet`."""
        return {
            "the checkpoint's URL": self.source.url,
            "the storage's endpoint": endpoint_of(self.source),
            "the output's URL": self.target.url,
            "the output storage's endpoint": endpoint_of(self.target),
            "the version of ckpt_storage": __version__,
        }


class ExportContext:
    """Both stores of an output on one rank, with the deadline of the current phase."""

    def __init__(self, spec: ExportSpec) -> None:
        self.spec = spec
        opened = partial(open_store, timeouts=spec.timeouts, retry=spec.retry)
        self._plain_source = opened(spec.source)
        self._plain_target = opened(spec.target, page_cache=spec.page_cache)
        stores, limit_bytes = (self._plain_source, self._plain_target), spec.memory_limit_bytes
        is_remote = any(store.capabilities.is_remote for store in stores)
        threads = spec.thread_count or (REMOTE_THREADS if is_remote else _LEAST_THREADS)
        threads = _LEAST_THREADS if threads == 1 else threads
        # A part in flight takes up to three times its bytes: read, put together, joined by a
        # client. All ranks plan alike, on nodes with more of them and with fewer.
        share_bytes = (limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES) // (3 * threads)
        share_bytes -= share_bytes % MIB if share_bytes > MIB else 0
        self.options = TransferOptions(
            thread_count=threads,
            part_bytes=max(min(DEFAULT_PART_BYTES, share_bytes), MIB // 16),
            memory_limit_bytes=limit_bytes or default_memory_limit_bytes(),
        )
        # They adapt to the number of requests that the storages accept.
        self.source_pace, self.target_pace = Pacer(threads), Pacer(threads)

    def begin(self, deadline: Deadline) -> None:
        """Bound both storages by a phase."""
        self.deadline = deadline
        self.source = self._plain_source.bounded(deadline, throttled=self.source_pace.slowed_down)
        self.target = self._plain_target.bounded(deadline, throttled=self.target_pace.slowed_down)

    def run_parallel(self, name: str, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of small jobs, several at a time; raise the first failure."""
        return some_at_once(jobs, _THREADS, name=name, deadline=self.deadline)

    def find_complete(self, files: Mapping[int, FileRef]) -> dict[int, FileRef]:
        """Return those files that are at the target in their length."""
        looks = [partial(stat_or_none, self.target, file.path) for file in files.values()]
        stats = zip(files.items(), self.run_parallel("look for files", looks), strict=True)
        return {at: file for (at, file), s in stats if s and s.size_bytes == file.size_bytes}

    @cached_property
    def can_copy(self) -> bool:
        """Whether the target's storage copies parts of the source's files by itself."""
        is_able = self.spec.copies == "auto" and self.target.capabilities.tokens_travel
        return is_able and self.target.can_copy_from(self.source)

    def read_from(self, store: Store) -> None:
        """Read from another store, from now on; `close` closes it."""
        self._plain_source.close()
        self._plain_source = store
        self.source = store.bounded(self.deadline, throttled=self.source_pace.slowed_down)

    def close(self) -> None:
        """Close all stores."""
        self._plain_source.close()
        self._plain_target.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceVersion:
    """The version of the source that the coordinator opened: its record, if it is of ours.

    Else `state` (JSON) identifies the content; it is always new for files without a time. Of an
    export of ours, `weight_files` are those that its record names.
    """

    record: SlotRecord | None = None
    state: object = None
    weight_files: Sequence[FileRef] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """What an earlier run had done at the target; `name` is what the files are named by.

    `run_ids` are this run, which has claimed the target, and the earlier one: mounts may go on
    showing the latter's claim to other ranks for a while.
    By position: `done` are complete files, `sealed` complete uploads whose files lack their names,
    and `whole` the paths of stored files that they equal, which the storage may copy by itself.
    """

    name: str = ""
    run_ids: tuple[str, ...] = ()
    done: Mapping[int, FileRef] = field(default_factory=dict)
    sealed: Mapping[int, Sealed] = field(default_factory=dict)
    whole: Mapping[int, str] = field(default_factory=dict)


Span = tuple[int, int, int]
"""The first of some bytes of a file, their number, and their CRC-32C."""


@dataclass(slots=True)
class Result:
    """The results of one rank. All mappings but `moved` are by position of the file.

    Spans are those of whole regions, or, of a file with edges, of what lies between them. `moved`
    are the `read_bytes`, `sent_bytes` and `copied_bytes` (by the storage), as reports name them.
    `receipts` are of shared files; `sealed` are complete files, and complete uploads.
    """

    spans: dict[int, list[Span]] = field(default_factory=dict)
    moved: Counter[str] = field(default_factory=Counter)
    receipts: dict[int, list[UploadPart]] = field(default_factory=dict)
    sealed: dict[int, Sealed] = field(default_factory=dict)
    timing: RankTiming | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSummary:
    """The files of a plan by position, and the results by rank; complete on the coordinator alone.

    `kept` are the files that an earlier run had completed, and that are sound.
    """

    files: Mapping[int, FileRef]
    results: Sequence[Result]
    kept: frozenset[int]
    stats: OperationStats | None = None

    @property
    def moved(self) -> dict[str, Any]:
        """What all ranks moved, as reports name it."""
        names = "read_bytes", "sent_bytes", "copied_bytes"
        return {name: sum(result.moved[name] for result in self.results) for name in names}


class Export(abc.ABC, Generic[R]):
    """One export on one rank: its source, its files, and how they are published.

    The coordinator makes it without a `version`, and finds the checkpoint; the other ranks open
    that version. Only the coordinator calls the methods after `content`, except `rename`, `seal`
    and `check_held`. The writer reports to `on_bytes`; `publish` writes `stream_bytes`.
    With `is_together` files get their names at the end, on storages that can list open uploads.
    """

    source: Source
    plan: Plan
    on_bytes: Callable[[int], None]
    stream_bytes = 0
    run_ids: tuple[str, ...] = ()

    def __init__(self, context: ExportContext, version: SourceVersion | None = None) -> None:
        self.context, self.spec = context, context.spec
        if version is None:
            self.version = self.find()
        else:
            self.version = version
            self.open(version)

    @property
    def is_together(self) -> bool:
        """Whether no file may get its name before all files are complete."""
        return False

    @property
    def part_bytes(self) -> int:
        """About how long the parts of files are; the same on all ranks."""
        return self.context.options.part_bytes

    @property
    def save_id(self) -> str | None:
        """The save that is read."""
        return self.source.save_id

    def find(self) -> SourceVersion:
        """Open the newest checkpoint; return what the others open it by."""
        self.source = source = self._open_source()
        if isinstance(source, CommittedSource):
            return SourceVersion(record=source.record)
        self.check_unchanged()
        marks = source.versions.of
        has_times = all(time_s is not None for _, time_s in marks.values())
        return SourceVersion(
            state=sorted(marks.items()) if has_times else new_write_id(),
            weight_files=recorded_files(source),
        )

    def read_source(self) -> Source:
        """Open the newest checkpoint."""
        return open_newest(self.context.source, self.context.options)

    def _open_source(self) -> Source:
        source = self.read_source()
        # Files below the source may belong to an output, which changes.
        own = {*source.paths, STOCK_METADATA, INDEX_NAME}
        marks = {path: mark for path, mark in source.versions.of.items() if path in own}
        source.versions = replace(source.versions, of=marks)
        return source

    def open(self, version: SourceVersion) -> None:
        """Open the version of the coordinator, even if it is not the newest any more."""
        store, options, record = self.context.source, self.context.options, version.record
        if record is None:
            self.source = self._open_source()
        else:
            self.source = CommittedSource(store, record, read_manifest(store, record), options)

    def check_unchanged(self) -> None:
        """Raise if another writer touched the source since it was opened."""
        self.source.check_unchanged(self.context.source)

    def check_weight_files(self, rank: int, world_size: int) -> None:
        """Compare the rank's share of the `weight_files` that are read with the export's record.

        Readers of safetensors compare lengths only. Raises `IntegrityError`.
        """
        context, tensors = self.context, self.source.tensors
        fqns = {part.fqn for file in self.plan.files for part in file.elements} or tensors.keys()
        places = self.source.places(value_keys({fqn: tensors[fqn] for fqn in fqns}, ()))
        paths = {place.path for place in places}
        files = [file for file in self.version.weight_files if file.path in paths]
        ranges = RangeReader(context.source, context.options, pacer=context.source_pace)
        advanced = context.deadline.monitor.advanced
        for file in files[rank::world_size]:
            size_bytes, _ = self.source.versions.of[file.path]
            is_written = size_bytes == file.size_bytes
            if not is_written or not has_checksum(ranges, file, lambda _: advanced()):
                what = "checksum" if is_written else "length"
                raise IntegrityError(
                    f"{file.path} does not have the {what} in the record of this export.",
                    path=file.path,
                    offset=0,
                    next_step="Export again; if another program wrote the weights, delete "
                    f"{DOCUMENTS} there.",
                )

    @abc.abstractmethod
    def lay_out(self) -> Iterable[OutFile]:
        """Return the files to make; pure, alike on all ranks."""

    @abc.abstractmethod
    def content(self) -> object:
        """Return values that identify the content of the files (JSON)."""

    def claim(self) -> ResumeState:
        """Claim the target for this run, unseen by readers; return what an earlier run had done."""
        return ResumeState()

    def rename(self, name: str) -> None:
        """Give the files the names that `claim` chose."""

    def seal(self, number: int, sealed: Sealed) -> None:
        """Record that file `number` (from 1) is complete."""

    def check_held(self) -> None:
        """Raise if another run took the target over."""

    def prepare_names(self) -> None:
        """Prepare the target for the files, which get their names next."""

    def publish(self, made: WriteSummary) -> None:
        """Publish the files, which all have their names, by one last write."""

    def clean_up(self, error: BaseException) -> None:
        """Delete what no later run can use."""

    @abc.abstractmethod
    def report(self, made: WriteSummary, seconds: float) -> R:
        """Return the report, once the files are published."""


def recorded_files(source: Source) -> Sequence[FileRef]:
    """Return the weight files of an export of ours that is whole; none of any other checkpoint."""
    store = source.store
    index = read_or_none(store, INDEX_NAME) if source.format == "safetensors" else None
    tag = None if index is None else IndexTag.of(index.data)
    path = "" if tag is None else export_path(tag.fingerprint)
    record = read_decoded(store, path, partial(ExportRecord.decode, path=path)) if path else None
    return [] if record is None else [file for file in record.files if file.path in source.paths]


@contextlib.contextmanager
def probed(target: Store) -> Iterator[str]:
    """Write a file with a random name to the target, yield its path, and delete it."""
    path = probe_path()
    target.make_folders([])
    target.put(path, b"Who else sees this?")
    try:
        yield path
    finally:
        with contextlib.suppress(CheckpointError):
            target.delete([path])


def place_within(source: Store, target: Store) -> str | None:
    """Return the path of the target's root below that of the source, "" if they are the same.

    None if it lies elsewhere, or if the target is empty or not writable: nothing can be lost then.
    """
    refused = {"not-found", "permission"}
    try:
        if not listed(target):
            return None
    except StorageError as error:
        if error.kind not in refused:
            raise
    try:
        with probed(target) as name:
            try:
                if is_there(source, name):
                    return ""
            except StorageError as error:
                # Without the right to list, some storages answer so for absent objects.
                if error.kind not in refused:
                    raise
            paths = (entry.path for entry in source.list(""))
            return next((p[: -len(name) - 1] for p in paths if p.endswith(f"/{name}")), None)
    except StorageError as error:
        if error.kind not in refused:
            raise
        return None
