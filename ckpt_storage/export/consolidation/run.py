"""One consolidation on one rank, step by step: from two locations to a published export.

Runs inside an operation of all ranks that is under way already: by the front door, or after a save.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckpt_storage.commit.slotlog import read_slot
from ckpt_storage.coordination.failures import spell_ranks
from ckpt_storage.errors import CheckpointNotFoundError, RankMismatchError, StorageError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import DOCUMENTS, INDEX_NAME
from ckpt_storage.format.names import STOCK_METADATA
from ckpt_storage.inspect.checks import has_checksum
from ckpt_storage.options import Phase
from ckpt_storage.source.filemarks import FileMarks, open_newest, open_source
from ckpt_storage.source.model import CommittedSource, Source, read_manifest
from ckpt_storage.store import open_store
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.workers import Workers

from .choice import check_ties
from .division import WriteRules, divide
from .executors import RegionWriter, paces_for
from .folder import ExportFolder, stale_exports
from .job import ConsolidatedFile, ConsolidateJob, ConsolidationReport, Ranks, transfer_options
from .locality import Marks, Seen, check_seen, look, place_marks, remove_marks, source_files
from .plan import ExportPlan, plan_export, with_suffix
from .work import Completion, RankResult, RankWork, completions, keepers

log = logging.getLogger("ckpt_storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """What the coordinator found: the commit record of ours, and what ranks look for."""

    record: bytes | None
    slot: int
    source_id: str | None
    marks: Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Came:
    """How a rank comes out of planning; `agreement` is "" where it did not see the source."""

    seen: Seen
    agreement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Orders:
    """What the coordinator decided before the work."""

    suffix: str
    complete: Mapping[int, FileRef]


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
        self._options = transfer_options(job, source_store, target)
        self._paces = paces_for(self._options)
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
        source, whole, orders = self._agree()
        self._begin("consolidate")
        sound = self._sound(orders.complete)
        plan = _left_over(with_suffix(whole, orders.suffix), sound, self._rules())
        own_bytes = sum(region.size_bytes for region in plan.regions_of(ranks.rank))
        self._begin("consolidate", own_bytes)
        source.renew(self._source_store, self._deadline)
        if self._folder is not None:
            self._folder.renew(self._target, plan, self._deadline)
        results: list[RankResult] = []
        complete = dict(sound)
        if plan.regions:
            results, more = self._work(source, plan, own_bytes)
            complete |= more
        report: bytes = b""
        if self._folder is not None:
            report = pickle.dumps(self._publish(self._folder, source, plan, results, complete))
        answer: ConsolidationReport = pickle.loads(ranks.broadcast(report))  # noqa: S301  # our ranks
        return answer

    def _sound(self, complete: Mapping[int, FileRef]) -> Mapping[int, FileRef]:
        """Return those files of an earlier run that still have the bytes they were recorded with.

        The ranks share the reading of them.
        """
        if not complete:
            return complete
        ranks = self._ranks
        target = RangeReader(self._target, self._options, self._deadline, pacer=self._paces.target)
        damaged = [
            number
            for number in sorted(complete)[ranks.rank :: ranks.world_size]
            if not has_checksum(target, complete[number])
        ]
        told = ranks.gather(pickle.dumps(damaged))
        found = {number for one in told for number in pickle.loads(one)}  # noqa: S301  # our ranks
        found = pickle.loads(ranks.broadcast(pickle.dumps(found)))  # noqa: S301  # as above
        for number in sorted(found):
            log.warning("%s is damaged, and made again.", complete[number].path)
        return {number: one for number, one in complete.items() if number not in found}

    # Before the work.

    def _agree(self) -> tuple[Source, ExportPlan, _Orders]:
        """Return source and plan, the same on all ranks, and what the coordinator decided."""
        ranks = self._ranks
        opening, source = self._open_first() if ranks.is_coordinator else (None, None)
        try:
            opening = pickle.loads(ranks.broadcast(pickle.dumps(opening)))  # noqa: S301  # our ranks
            seen = look(opening.marks, self._source_store, self._target)
            plan: ExportPlan | None = None
            if seen.agrees_with(opening.marks) or source is not None:
                source = source or self._open_too(opening)
                plan = self._plan(source, opening.source_id)
            came = _Came(seen=seen, agreement=plan.agreement if plan else "")
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
            assert plan is not None  # noqa: S101  # and made its plan
            orders = self._decide(source, plan, arrived)
        orders = pickle.loads(ranks.broadcast(pickle.dumps(orders)))  # noqa: S301  # our own ranks
        assert source is not None  # noqa: S101  # else the coordinator has raised for all
        assert plan is not None  # noqa: S101  # as above
        assert orders is not None  # noqa: S101  # the coordinator's
        return source, plan, orders

    def _open_first(self) -> tuple[_Opening, Source]:
        """Open the source for all; see what there is to look for."""
        slot = self._job.slot
        source = self._open_any() if slot is None else self._open_commit(slot)
        record, slot, source_id = None, 0, None
        if isinstance(source, CommittedSource):
            record, slot = source.record.encode(), source.record.slot
        else:
            source_id = self._source_id(source)
            if self._marks is not None:
                # Else the id would be of another save than the metadata, and later calls would
                # take what is made by these for made of that.
                self._marks.check(self._source_store)
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

        paths = source_files(source)
        if paths:
            count = min(self._options.thread_count, len(paths))
            with Workers(count, name="look at the source", deadline=self._deadline) as workers:
                for path in paths:
                    workers.submit(partial(look_at, path))
                workers.drain()
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

    def _rules(self) -> WriteRules:
        return WriteRules.of(self._target.capabilities, part_bytes=self._options.part_bytes)

    def _plan(self, source: Source, source_id: str | None) -> ExportPlan:
        return plan_export(
            source,
            options=self._job.options,
            world_size=self._ranks.world_size,
            rules=self._rules(),
            ties=self._ties(source),
            source_id=source_id,
        )

    def _ties(self, source: Source) -> Mapping[str, str]:
        """Return the recorded ties: the job's, else those that the save wrote down."""
        if self._job.ties is not None:
            return self._job.ties
        return source.ties if isinstance(source, CommittedSource) else {}

    def _decide(self, source: Source, plan: ExportPlan, arrived: Sequence[_Came]) -> _Orders:
        """Judge how the ranks came and take the folder; coordinator only."""
        check_seen([one.seen for one in arrived], self._job.source.url, self._job.output.url)
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(arrived):
            values.setdefault(one.agreement, []).append(rank)
        if len(values) > 1:
            spelt = "; ".join(f"ranks {spell_ranks(held)}" for held in values.values())
            raise RankMismatchError(
                f"The ranks planned different exports of {self._job.source.url}: {spelt}.",
                values=values,
                phase="plan",
                next_step="Give all ranks the same options; functions must answer alike on all.",
            )
        check_ties(source, plan.ties)
        self._folder = ExportFolder(self._target, plan, self._deadline)
        suffix = self._folder.take()
        complete = self._folder.complete_files(with_suffix(plan, suffix))
        return _Orders(suffix=suffix, complete=complete)

    # The work.

    def _work(
        self, source: Source, plan: ExportPlan, own_bytes: int
    ) -> tuple[list[RankResult], dict[int, FileRef]]:
        """Write and complete all files; return what all ranks did, on the coordinator."""
        ranks = self._ranks
        complete: dict[int, FileRef] = {}
        paces = self._paces
        target = self._target.bounded(self._deadline, throttled=paces.target.slowed_down)
        with RankWork(plan, ranks.rank, target, self._deadline) as work:
            tickets = self._share_tickets(work, plan) if keepers(plan) else {}
            with self._job.track(own_bytes, plan.save_id) as on_bytes:
                writer = RegionWriter(
                    plan,
                    source=source,
                    source_store=self._source_store,
                    target_store=target,
                    options=self._options,
                    deadline=self._deadline,
                    copies=self._job.copies,
                    on_bytes=on_bytes,
                    paces=paces,
                )
                result = work.write(writer, tickets)
            results: list[RankResult] = [
                pickle.loads(packed)  # noqa: S301  # our own ranks
                for packed in ranks.gather(pickle.dumps(result))
            ]
            for one in results:
                complete |= one.completed
            if self._marks is not None:
                # The coordinator's are older than what any rank has read, and the index comes last.
                self._marks.check(self._source_store)
            if keepers(plan):
                complete |= self._complete(work, plan, results)
        return results, complete

    def _share_tickets(self, work: RankWork, plan: ExportPlan) -> dict[int, str]:
        """Begin the uploads that several ranks share; return the tickets that this rank needs."""
        ranks = self._ranks
        packed = ranks.gather(pickle.dumps(work.tickets()))
        answers: list[bytes] = []
        if ranks.is_coordinator:
            tickets: dict[int, str] = {}
            for one in packed:
                tickets |= pickle.loads(one)  # noqa: S301  # our own ranks
            needed: list[dict[int, str]] = [{} for _ in range(ranks.world_size)]
            for region in plan.regions:
                if region.file in tickets:
                    needed[region.owner][region.file] = tickets[region.file]
            answers = [pickle.dumps(one) for one in needed]
        mine: dict[int, str] = pickle.loads(ranks.scatter(answers))  # noqa: S301  # our own ranks
        return mine

    def _complete(
        self, work: RankWork, plan: ExportPlan, results: Sequence[RankResult]
    ) -> dict[int, FileRef]:
        """Have all keepers complete their files, now that all ranks have reported."""
        ranks = self._ranks
        orders: list[bytes] = []
        if ranks.is_coordinator:
            found = completions(plan, results)
            orders = [pickle.dumps(found.get(rank, [])) for rank in range(ranks.world_size)]
        own: list[Completion] = pickle.loads(ranks.scatter(orders))  # noqa: S301  # our own ranks
        complete: dict[int, FileRef] = {}
        for packed in ranks.gather(pickle.dumps(work.complete(own))):
            complete |= pickle.loads(packed)  # noqa: S301  # our own ranks
        return complete

    # After the work; coordinator only.

    def _publish(
        self,
        folder: ExportFolder,
        source: Source,
        plan: ExportPlan,
        results: Sequence[RankResult],
        complete: Mapping[int, FileRef],
    ) -> ConsolidationReport:
        missing = [file.name for at, file in enumerate(plan.files) if at not in complete]
        assert not missing, missing  # noqa: S101  # every region had an owner that reported
        files = [complete[at] for at in range(len(plan.files))]
        folder.publish(files, source=self._job.source.url)
        removed: list[str] = []
        stale: list[str] = []
        try:
            removed = folder.collect()
            if plan.save_id is not None:
                stale = stale_exports(self._source_store, plan.save_id)
        except StorageError as error:
            # The export counts; what is left over, the next consolidation finds.
            log.warning("Clearing up after the export to %s failed: %s", self._target.url, error)
        writers: dict[int, set[int]] = {}
        rank_bytes = [0] * plan.world_size
        for region in plan.regions:
            writers.setdefault(region.file, set()).add(region.owner)
            rank_bytes[region.owner] += region.size_bytes
        portions = [portion for result in results for portion in result.portions]
        return ConsolidationReport(
            source_url=self._job.source.url,
            output_url=self._job.output.url,
            source_format=source.format,
            save_id=plan.save_id,
            index_path=INDEX_NAME,
            fingerprint=plan.fingerprint,
            files=tuple(
                ConsolidatedFile(
                    name=file.path,
                    size_bytes=file.size_bytes,
                    crc32c=file.crc32c,
                    ranks=tuple(sorted(writers.get(at, ()))),
                )
                for at, file in enumerate(files)
            ),
            tensor_count=sum(len(file.tensors) for file in plan.files),
            total_bytes=plan.total_bytes,
            read_bytes=sum(portion.read_bytes for portion in portions),
            sent_bytes=sum(portion.sent_bytes for portion in portions),
            copied_bytes=sum(portion.copied_bytes for portion in portions),
            rank_bytes=tuple(rank_bytes),
            skipped=plan.skipped,
            ties=plan.ties,
            removed=tuple(removed),
            stale_exports=tuple(stale),
            seconds=time.monotonic() - self._start_s,
        )


def _left_over(plan: ExportPlan, complete: Mapping[int, FileRef], rules: WriteRules) -> ExportPlan:
    """Return the plan with what is not complete yet divided among the ranks; pure."""
    if not complete:
        return plan
    left = [at for at in range(len(plan.files)) if at not in complete]
    sizes = [plan.files[at].size_bytes for at in left]
    regions = divide(sizes, plan.world_size, rules) if left else ()
    return replace(
        plan, regions=tuple(replace(region, file=left[region.file]) for region in regions)
    )
