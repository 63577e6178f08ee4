"""One consolidation on all ranks: from two locations to a published export. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from ckpt_storage._version import __version__
from ckpt_storage.commit.slotlog import read_slot
from ckpt_storage.coordination.failures import spell_ranks
from ckpt_storage.errors import (
    CheckpointNotFoundError,
    InvalidInputError,
    RankMismatchError,
    StorageError,
)
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import DOCUMENTS, INDEX_NAME
from ckpt_storage.format.names import COMMITS, SAVES, STOCK_METADATA
from ckpt_storage.options import Phase, RetryPolicy, Timeouts
from ckpt_storage.source.filemarks import FileMarks, open_newest, open_source
from ckpt_storage.source.model import CommittedSource, Source, SourceFormat, read_manifest
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.store import Store

from .options import ConsolidateOptions
from .output import ExportFolder, write_record
from .places import Marks, Seen, check_seen, look, place_marks, remove_marks, source_files
from .plan import Plan, WriteRules, plan
from .removal import stale_exports
from .run import Made, Means, Ranks, make, side_by_side
from .select import Skipped, check_ties
from .weights import lay_out_model, with_suffix
from .write import Copies, Paces, transfer_options

log = logging.getLogger("ckpt_storage")

Track = Callable[[int, str | None], AbstractContextManager[Callable[[int], None]]]
"""Takes the bytes that this rank will write, and the save id; gives what takes bytes written."""


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


def _untracked(
    _total_bytes: int, _save_id: str | None
) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda _count: None)


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
    track: Track = _untracked

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
            "the checkpoint's URL": self.source.url,
            "the commit": str(self.slot),
            "the storage's endpoint": endpoint_of(self.source),
            "the output's URL": self.output.url,
            "the output storage's endpoint": endpoint_of(self.output),
            "max_file_bytes": str(options.file_limit_bytes),
            "fqn_to_index_mapping": _digest(options.fqn_to_index_mapping),
            "dtype": str(options.cast_to),
            "rename": _digest(options.rename),
            "include": _digest(options.include),
            "exclude": _digest(options.exclude),
            "tied": _digest(options.tied),
            "the version of ckpt_storage": __version__,
        }


def _digest(value: object) -> str:
    """Return a text that is the same for equal options on all ranks; functions are not compared.

    What functions answer is compared as part of the plan.
    """
    if callable(value):
        return "a function"
    if isinstance(value, Mapping):
        value = sorted((str(key), str(one)) for key, one in value.items())
    elif isinstance(value, set | frozenset | list | tuple):
        value = sorted(map(str, value))
    text = repr(value)
    return text if len(text) < 80 else hashlib.sha256(text.encode()).hexdigest()  # noqa: PLR2004


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """What the coordinator found: the commit record of ours, and what ranks look for."""

    record: bytes | None
    slot: int
    source_id: str | None
    marks: Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Came:
    """How a rank comes out of planning; `digest` is "" where it did not see the source."""

    seen: Seen
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Orders:
    """What the coordinator decided before the work."""

    suffix: str
    done: Mapping[int, FileRef]


def run_consolidate(ranks: Ranks, job: ConsolidateJob) -> ConsolidationReport:
    """Consolidate; all ranks call it within one operation, after they have met.

    Before a byte is written all ranks agree on plan and storages. On return the export is
    complete, checked, recorded and published. After an error one whole export counts: the
    earlier one, or, if it happened while the index was put or later, this one. Another call goes
    on where this one ended.

    Raises on the rank that failed what happened, on others what their operation says:
    `RankMismatchError`, `CheckpointExistsError`, `InvalidInputError` and the errors of opening
    before anything was written; `IntegrityError`, `StorageError`, `PhaseTimeoutError`,
    `ConsolidationError` if another consolidation took the folder over.
    """
    opened = partial(open_store, timeouts=job.timeouts, retry=job.retry)
    source_store = opened(job.source, commit_location=job.commits)
    target = opened(job.output, page_cache=job.options.page_cache or "keep")
    try:
        return _Run(ranks, job, source_store, target).run()
    finally:
        source_store.close()
        target.close()


class _Run:
    """One consolidation on one rank."""

    def __init__(
        self, ranks: Ranks, job: ConsolidateJob, source_store: Store, target: Store
    ) -> None:
        self._ranks = ranks
        self._job = job
        self._plain_source, self._plain_target = source_store, target
        self._options = transfer_options(
            source_store,
            target,
            memory_limit_bytes=job.options.memory_limit_bytes,
            thread_count=job.thread_count,
        )
        self._start_s = time.monotonic()
        self._marks: FileMarks | None = None
        self._folder: ExportFolder | None = None
        self._begin("plan")

    def _begin(self, phase: Phase, total_bytes: int = 0) -> None:
        self._deadline = self._ranks.phase(phase, total_bytes=total_bytes)
        self._source_store = self._plain_source.bounded(self._deadline)
        self._target = self._plain_target.bounded(self._deadline)

    def run(self) -> ConsolidationReport:
        ranks = self._ranks
        source, first, orders = self._agree()
        whole = first.renamed(with_suffix(first.layout, orders.suffix)).leaving(orders.done)
        own_bytes = sum(region.size_bytes for region in whole.regions_of(ranks.rank))
        self._begin("consolidate", own_bytes)
        source.renew(self._source_store, self._deadline)
        if self._folder is not None:
            self._folder.renew(self._target, whole, self._deadline)
        with self._job.track(own_bytes, source.save_id) as on_bytes:
            means = Means(
                source=source,
                source_store=self._source_store,
                target=self._target,
                options=self._options,
                deadline=self._deadline,
                paces=Paces(self._options),
                copies=self._job.copies,
                on_bytes=on_bytes,
                seal=partial(write_record, self._target, whole.identity),
            )
            made = make(ranks, whole, means, orders.done)
        report = b""
        if self._folder is not None:
            report = pickle.dumps(self._publish(self._folder, source, whole, made))
        answer: ConsolidationReport = pickle.loads(ranks.broadcast(report))  # noqa: S301  # our ranks
        return answer

    # Before the work.

    def _agree(self) -> tuple[Source, Plan, _Orders]:
        """Return source and plan, the same on all ranks, and what the coordinator decided."""
        ranks = self._ranks
        opening, source = self._open_first() if ranks.is_coordinator else (None, None)
        try:
            opening = pickle.loads(ranks.broadcast(pickle.dumps(opening)))  # noqa: S301  # our ranks
            seen = look(opening.marks, self._source_store, self._target)
            mine: Plan | None = None
            if seen.agrees_with(opening.marks) or source is not None:
                source = source or self._open_too(opening)
                mine = self._plan(source, opening.source_id)
            came = _Came(seen=seen, digest=mine.digest if mine else "")
            arrived = [
                pickle.loads(one)  # noqa: S301  # our own ranks
                for one in ranks.gather(pickle.dumps(came))
            ]
        finally:
            if ranks.is_coordinator and opening is not None:
                remove_marks(opening.marks, self._plain_target)
        orders: _Orders | None = None
        if ranks.is_coordinator:
            assert source is not None  # noqa: S101  # the coordinator opened it
            assert mine is not None  # noqa: S101  # and made its plan
            orders = self._decide(source, mine, arrived)
        orders = pickle.loads(ranks.broadcast(pickle.dumps(orders)))  # noqa: S301  # our own ranks
        assert source is not None  # noqa: S101  # else the coordinator has raised for all
        assert mine is not None  # noqa: S101  # as above
        assert orders is not None  # noqa: S101  # the coordinator's
        return source, mine, orders

    def _open_first(self) -> tuple[_Opening, Source]:
        """Open the source for all; see what there is to look for."""
        slot = self._job.slot
        source = self._open_any() if slot is None else self._open_commit(slot)
        record, slot, source_id = None, 0, None
        if isinstance(source, CommittedSource):
            record, slot = source.record.encode(), source.record.slot
        else:
            source_id = self._source_id(source)
            self._check_unchanged()
        if self._ranks.world_size > 1:
            self._target.make_folders([DOCUMENTS])
        marks = place_marks(
            source, self._source_store, self._target, world_size=self._ranks.world_size
        )
        return _Opening(record=record, slot=slot, source_id=source_id, marks=marks), source

    def _open_any(self) -> Source:
        """Open what lies there; remember how another writer's files look before they are read."""
        source, marks = open_newest(
            self._source_store, deadline=self._deadline, options=self._options
        )
        if marks is not None:
            # The export may lie below the source, and be another one by now.
            own = {*source_files(source), STOCK_METADATA, INDEX_NAME}
            of = {path: mark for path, mark in marks.of.items() if path in own}
            self._marks = replace(marks, of=of)
        return source

    def _check_unchanged(self) -> None:
        """Raise if another writer touched its files since they were opened; coordinator only."""
        if self._marks is not None:
            self._marks.check(self._source_store)

    def _open_commit(self, slot: int) -> Source:
        """Open the commit in a slot, be it the head or not any more."""
        record = read_slot(self._source_store, slot)
        if record is None or record.type != "commit":
            raise CheckpointNotFoundError(
                f"{self._job.source.url} has no commit in slot {slot}.",
                path=self._job.source.url,
                phase="plan",
                next_step="Consolidate what is there now.",
            )
        return self._of_record(record)

    def _of_record(self, record: SlotRecord) -> Source:
        manifest = read_manifest(self._source_store, record)
        return CommittedSource(self._source_store, record, manifest, self._deadline, self._options)

    def _source_id(self, source: Source) -> str:
        """Return what stands for the content of a source that has no save id."""
        found: dict[str, tuple[int, float | None]] = {}

        def look_at(path: str) -> None:
            try:
                one = self._source_store.stat(path)
            except StorageError as error:
                if error.kind != "not-found":
                    raise
                # Reading says which tensor needs it.
                found[path] = (-1, None)
            else:
                found[path] = (one.size_bytes, one.modified_s)

        jobs = [partial(look_at, path) for path in source_files(source)]
        side_by_side(jobs, "look at the source", self._deadline)
        text = repr(sorted(found.items()))
        if any(modified_s is None for _, modified_s in found.values()):
            # Without times, other content of the same lengths would pass for this one.
            text = f"{text} {time.time_ns()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _open_too(self, opening: _Opening) -> Source:
        """Open what the coordinator opened, even if the head has moved on since."""
        if opening.record is None:
            return open_source(self._source_store, deadline=self._deadline, options=self._options)
        return self._of_record(SlotRecord.decode(opening.record, slot=opening.slot))

    def _plan(self, source: Source, source_id: str | None) -> Plan:
        ties = self._job.ties
        if ties is None:
            ties = source.ties if isinstance(source, CommittedSource) else {}
        rules = WriteRules.of(self._target.capabilities, part_bytes=self._options.part_bytes)
        return plan(
            lay_out_model(source, self._job.options, ties),
            world_size=self._ranks.world_size,
            rules=rules,
            source=[source.format, source.save_id, source_id],
        )

    def _decide(self, source: Source, mine: Plan, arrived: Sequence[_Came]) -> _Orders:
        """Judge how the ranks came and take the folder; coordinator only."""
        check_seen([one.seen for one in arrived], self._job.source.url, self._job.output.url)
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(arrived):
            values.setdefault(one.digest, []).append(rank)
        if len(values) > 1:
            spelt = "; ".join(f"ranks {spell_ranks(held)}" for held in values.values())
            raise RankMismatchError(
                f"The ranks planned different exports of {self._job.source.url}: {spelt}.",
                values=values,
                phase="plan",
                next_step="Give all ranks the same options; functions must answer alike on all.",
            )
        check_ties(source, mine.layout.ties)
        self._folder = ExportFolder(self._target, mine, self._deadline)
        suffix = self._folder.take()
        named = mine.renamed(with_suffix(mine.layout, suffix))
        return _Orders(suffix=suffix, done=self._folder.complete_files(named))

    # After the work; coordinator only.

    def _publish(
        self, folder: ExportFolder, source: Source, whole: Plan, made: Made
    ) -> ConsolidationReport:
        # Older than what any rank has read; and the index comes last.
        self._check_unchanged()
        files = [made.files[at] for at in range(len(whole.files))]
        folder.publish(
            files,
            save_id=source.save_id,
            source_format=source.format,
            source=self._job.source.url,
        )
        removed: list[str] = []
        stale: list[str] = []
        try:
            removed = folder.collect()
            if source.save_id is not None:
                stale = stale_exports(self._source_store, source.save_id)
        except StorageError as error:
            # The export counts; what is left over, the next consolidation finds.
            log.warning("Clearing up after the export to %s failed: %s", self._target.url, error)
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
            source_format=source.format,
            save_id=source.save_id,
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
            removed=tuple(removed),
            stale_exports=tuple(stale),
            seconds=time.monotonic() - self._start_s,
        )
