"""The steps of all ranks from two places to a published output: the same for every front door."""

from __future__ import annotations

import abc
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ckpt_storage.commit.slotlog import is_there
from ckpt_storage.coordination.failures import as_checkpoint_errors, spell_ranks
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, IntegrityError, RankMismatchError, StorageError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import Sealed
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA, new_write_id
from ckpt_storage.inspect.checks import has_checksum
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.progress import reporting
from ckpt_storage.source.filemarks import open_newest, open_source, told_from_damage
from ckpt_storage.source.foreign import ForeignSource, StockSource
from ckpt_storage.source.model import CommittedSource, Source, read_manifest
from ckpt_storage.store.backend import Part
from ckpt_storage.store.deadline import NEVER_S, Deadline, stalling_deadline
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.ranges import RangeReader

from .layout import Layout
from .output import Made, Output, Setting, Site, Taken
from .places import check_seen, put_probe
from .plan import Plan, Region, plan
from .write import UNKNOWN_CRC, RegionWriter, Result, joined, spans_of

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger("ckpt_storage")

R = TypeVar("R")
J = TypeVar("J")

_WORD_S = 3.0
"""How long the reason may take to arrive for which a shared upload was discarded."""

Begin = Callable[[Phase, int], Deadline]
"""Begins a phase of so many bytes on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the coordinator opened: by its record if it is of ours.

    `state` (JSON) stands for the content of what has no save id; another one each time where the
    storage does not tell when files were written.
    """

    record: SlotRecord | None = None
    state: object = None


@dataclass
class Task(abc.ABC, Generic[R]):
    """What one front door makes, on one rank; of itself, of the checkpoint at the source.

    `phase` is that of the work. Once the task is open, `source` is what is read from, `found` how
    it was found, and `save_id` the save that it is of.
    """

    site: Site
    phase: Phase = field(init=False, default="write")
    source: Source = field(init=False)
    found: Found = field(init=False)
    save_id: str | None = field(init=False, default=None)
    watch: Callable[[], None] | None = field(init=False, default=None)

    def find(self) -> Found:
        """Open the newest checkpoint; return what the others open it by; coordinator only."""
        site = self.site
        source, marks = open_newest(site.source, deadline=site.deadline, options=site.options)
        if isinstance(source, CommittedSource):
            self.found = Found(record=source.record)
        elif marks is not None:
            # An output may lie below the source, and be another one by now.
            own = {*_files_of(source), STOCK_METADATA, INDEX_NAME}
            own_marks = replace(marks, of={p: mark for p, mark in marks.of.items() if p in own})
            is_told = all(time_s is not None for _, time_s in own_marks.of.values())
            self.found = Found(state=sorted(own_marks.of.items()) if is_told else new_write_id())
            self.watch = lambda: own_marks.check(site.source)
        self.source, self.save_id = source, source.save_id
        self.check_unchanged()
        return self.found

    def open(self, found: Found) -> None:
        """Open what the coordinator found, even if it is not the newest any more."""
        site = self.site
        source: Source
        if (record := found.record) is not None:
            manifest = read_manifest(site.source, record)
            source = CommittedSource(site.source, record, manifest, site.deadline, site.options)
        else:
            source = open_source(site.source, deadline=site.deadline, options=site.options)
        self.source, self.found, self.save_id = source, found, source.save_id

    def check_unchanged(self) -> None:
        """Raise if another writer touched the source since it was opened; coordinator only."""
        if self.watch is not None:
            self.watch()

    @abc.abstractmethod
    def lay_out(self) -> Layout:
        """Return the files to make; pure, alike on all ranks."""

    def check_layout(self, layout: Layout) -> None:
        """Raise for a layout that does not fit the source's content; coordinator only."""

    @abc.abstractmethod
    def content(self) -> object:
        """Return what stands for the content of the files (JSON)."""

    @abc.abstractmethod
    def output(self, plan: Plan) -> Output:
        """Return the place that the files go to; asks no storage."""

    @abc.abstractmethod
    def report(self, output: Output, made: Made, seconds: float) -> R:
        """Say what was made, once it is published; coordinator only."""


def _files_of(source: Source) -> set[str]:
    """Return the paths of the files that hold the values of another writer's checkpoint."""
    if isinstance(source, StockSource):
        return {item.relative_path for item in source.metadata.items.values()}
    held = source.held if isinstance(source, ForeignSource) else {}
    return {place.path for place in held.values()}


def run(
    operation: Operation, begin: Begin, setting: Setting, task_of: Callable[[Site], Task[R]]
) -> R:
    """Make one output; all ranks call it within one operation, after they have met.

    Before a byte is written all ranks agree on plan and storages. On return the output is complete,
    checked and published. After an error what was there before counts, or, if it happened at the
    last write, this output.
    """
    start_s = time.monotonic()
    site = Site(setting)
    try:
        task = task_of(site)
        site.begin(begin("plan", 0))
        with site.deadline.governs(operation.what):
            output, taken = _agree(operation, task)
        output.follow(taken)
        own_bytes = sum(region.size_bytes for region in output.plan.regions_of(operation.rank))
        site.begin(begin(task.phase, own_bytes))
        task.source.renew(site.source, site.deadline)
        with site.deadline.governs(operation.what):
            made = _made(operation, task, output, taken, own_bytes)
            report = None
            if operation.is_coordinator:
                report = task.report(output, made, time.monotonic() - start_s)
            # On others it is None until the coordinator's has come.
            return cast("R", operation.broadcast(report))
    finally:
        site.close()


def _made(
    operation: Operation, task: Task[R], output: Output, taken: Taken, own_bytes: int
) -> Made:
    """Make an output, and publish it on the coordinator."""
    try:
        with (
            reporting(
                # What is one stream is written at the end, and shown there.
                task.site.setting.progress if own_bytes else None,
                phase=task.phase,
                rank=operation.rank,
                total_bytes=own_bytes,
                save_id=task.save_id,
                with_bar=operation.is_coordinator,
            ) as on_bytes,
            told_from_damage(task.check_unchanged),
        ):
            made = _Work(operation, task, output, taken, on_bytes).make()
            if operation.is_coordinator:
                output.publish(made)
            return made
    except BaseException as error:
        if operation.is_coordinator:
            output.give_up(error)
        raise


def _agree(operation: Operation, task: Task[R]) -> tuple[Output, Taken]:
    """Return the output, with a plan that is the same on all ranks, and what was taken of it."""
    site, probe, found = task.site, "", Found()
    is_first = operation.is_coordinator
    output: Output | None = None
    try:
        if is_first:
            found = task.find()
            if operation.world_size > 1:
                probe = put_probe(site.target)
        found, probe = operation.broadcast((found, probe))
        sees = not probe or is_there(site.target, probe)
        if sees:
            if not is_first:
                task.open(found)
            first = plan(
                task.lay_out(),
                world_size=operation.world_size,
                able=site.target.capabilities,
                part_bytes=site.options.part_bytes,
                source=task.content(),
            )
            output = task.output(first)
        came = operation.gather(
            ((socket.gethostname(), sees), output.plan.digest if output else "")
        )
    finally:
        if is_first and probe:
            with suppress(CheckpointError):
                site.target.delete([probe])
    taken = Taken()
    if is_first:
        check_seen([one for one, _ in came], site.setting.target.url)
        assert output is not None  # noqa: S101  # else it has not seen something
        digests: dict[str, list[int]] = {}
        for rank, (_, digest) in enumerate(came):
            digests.setdefault(digest, []).append(rank)
        if len(digests) > 1:
            spelt = "; ".join(f"ranks {spell_ranks(ranks)}" for ranks in digests.values())
            raise RankMismatchError(
                f"The ranks planned different exports of {site.setting.source.url}: {spelt}.",
                values=digests,
                phase="plan",
                next_step="Give all ranks the same options; functions must answer alike on all.",
            )
        task.check_layout(output.plan.layout)
        taken = output.take()
    taken = operation.broadcast(taken)
    assert output is not None  # noqa: S101  # else the coordinator has raised for all
    return output, taken


@dataclass
class _Work:
    """One rank at work on all files of `output.plan`, of which `taken` are done or sealed.

    Whoever writes a file alone seals it; what several ranks wrote, and what gets its name with all
    others, the coordinator completes when all have reported, and the task is unchanged.
    """

    operation: Operation
    task: Task[Any]
    output: Output
    taken: Taken
    on_bytes: Callable[[int], None]

    def __post_init__(self) -> None:
        self._site, self._plan = self.output.site, self.output.plan
        able = self._site.target.capabilities
        self._is_together = self.output.is_together and able.tokens_travel and able.lists_uploads
        # Those under way, by file; and the tokens of those that several ranks share.
        self._uploads: dict[int, Upload] = {}
        self._tokens: Mapping[int, str] = {}
        self._result = Result()

    def make(self) -> Made:
        """Make all files; the coordinator gets what was made.

        After an error no upload of this run stays open but those of sealed files.
        """
        files: Mapping[int, FileRef] = {}
        try:
            self._write()
            results = self.operation.gather(self._result)
            if self.operation.is_coordinator:
                files = self._finish(results)
        except BaseException as error:
            self._abort(error)
            raise
        written = {at for one in results for at in one.spans}
        kept = frozenset({*self.taken.done, *self.taken.sealed} - written)
        return Made(files=files, results=results, kept=kept)

    def _abort(self, error: BaseException) -> None:
        if isinstance(error, CheckpointError):
            # Others must hear why their parts are refused.
            self._site.deadline.watch.failed(error)
        for upload in list(self._uploads.values()):
            try:
                upload.abort()
            except Exception as failure:  # noqa: BLE001  # the first failure is the one to raise
                error.add_note(f"Discarding an upload failed too: {failure}")

    def _write(self) -> None:
        """Check and write what is this rank's."""
        plan, site, rank, taken = self._plan, self._site, self.operation.rank, self.taken
        if shared := plan.shared():
            names = {at: plan.files[at].name for at in shared}
            tokens: list[str] = []
            if self.operation.is_coordinator:
                self._uploads = {at: site.target.upload(n, copies=True) for at, n in names.items()}
                begin = [upload.token for upload in self._uploads.values()]
                tokens = site.at_once("begin uploads", begin)
            self._tokens = self.operation.broadcast(dict(zip(names, tokens, strict=False)))
        own = plan.regions_of(rank)
        regions = [r for r in own if not r.is_done]
        checks = [partial(self._check, r, taken.done[r.file], regions) for r in own if r.is_done]
        site.at_once("check files", checks)
        if self.operation.is_coordinator:
            for at, file in enumerate(plan.files):
                if not file.size_bytes and at not in taken.done:
                    site.target.put(file.name, b"")
                    self._seal(at, Sealed(file=self._reference(at, 0)))
            for at, sealed in taken.sealed.items():
                self.on_bytes(sealed.file.size_bytes)
                log.info("%s was sealed by an earlier run", plan.files[at].name)
        if not regions:
            return
        writer = RegionWriter(
            site,
            plan,
            self.task.source,
            self._result,
            begin=self._begin,
            end=self._end,
            on_bytes=self.on_bytes,
        )
        try:
            writer.write(regions)
        except StorageError as error:
            if error.kind == "not-found" and self._tokens:
                # The coordinator discarded the upload: it is about to say why.
                site.deadline.sleep(_WORD_S)
            raise

    def _check(self, whole: Region, file: FileRef, damaged: list[Region]) -> None:
        """Read a complete file back; add it to the damaged ones unless it is sound."""
        if not self._is_sound(file):
            log.warning("%s is damaged, and made again.", file.path)
            damaged.append(whole)
            return
        self._result.sealed[whole.file] = Sealed(file=file)
        self.on_bytes(file.size_bytes)

    def _is_sound(self, file: FileRef) -> bool:
        site = self._site
        ranges = RangeReader(site.target, site.options, site.deadline, pacer=site.target_pace)
        return has_checksum(ranges, file)

    def _begin(self, region: Region) -> Upload:
        at, target = region.file, self._site.target
        if at not in self._uploads:
            path, token = self._plan.files[at].name, self._tokens.get(at)
            upload = target.join(path, token) if token else target.upload(path, copies=True)
            self._uploads[at] = upload
            if self._is_together and not token:
                # Begun at once: a small file is not held in memory until the end.
                upload.token()
        return self._uploads[at]

    def _end(self, region: Region, upload: Upload, crc32c: int) -> None:
        """Take over a region that was written; seal its file if nobody else writes it."""
        at = region.file
        if at not in self._tokens:
            file = self._reference(at, crc32c)
            if self._is_together and crc32c != UNKNOWN_CRC:
                parts = [part.to_json() for part in upload.receipts()]
                token, write_id = upload.token(), upload.write_id
                self._seal(at, Sealed(file=file, token=token, write_id=write_id, parts=parts))
            else:
                upload.complete(region.file_bytes)
                self._seal(at, Sealed(file=file))
        elif self.operation.is_coordinator:
            return
        else:
            self._result.receipts[at] = upload.receipts()
        del self._uploads[at]

    def _finish(self, results: Sequence[Result]) -> dict[int, FileRef]:
        """Give names to all files that have none, side by side; return all; coordinator only."""
        sealed = dict(self.taken.sealed)
        for one in results:
            sealed |= one.sealed
        for at in self._tokens:
            parts = [part.to_json() for one in results for part in one.receipts.get(at, ())]
            crc32c = joined(spans_of(results, at))[2]
            sealed[at] = Sealed(file=self._reference(at, crc32c), parts=parts)
        self.task.check_unchanged()
        self.output.check_held()

        def name(at: int, one: Sealed) -> None:
            file, own = one.file, self._uploads.get(at)
            upload = own or self._site.target.join(file.path, one.token, write_id=one.write_id)
            upload.complete(file.size_bytes, receipts=[*map(Part.from_json, one.parts)])
            if own:
                self._seal(at, Sealed(file=file))
            elif at in self.taken.sealed and not self._is_sound(file):
                raise IntegrityError(
                    f"{file.path}, which an earlier run had written, is damaged.",
                    path=file.path,
                    offset=0,
                    next_step="Call it again: the file is made anew then.",
                )

        nameless = {at: one for at, one in sealed.items() if one.token or at in self._tokens}
        jobs = [partial(name, *one) for one in nameless.items()]
        self._site.at_once("complete files", jobs)
        return {at: one.file for at, one in sealed.items()}

    def _reference(self, at: int, crc32c: int) -> FileRef:
        """Return what a file is; raise if it has to have another checksum."""
        file = self._plan.files[at]
        if file.crc32c not in {None, crc32c}:
            raise IntegrityError(
                f"{file.name} has other bytes than the checkpoint says: the source is damaged, or "
                "was copied wrongly.",
                path=file.name,
                offset=0,
                next_step="Run ckpt_storage.verify on the source; if it is sound, copy again with "
                "copies='never'. Else restore the file from another copy.",
            )
        return FileRef(path=file.name, size_bytes=file.size_bytes, crc32c=crc32c)

    def _seal(self, at: int, sealed: Sealed) -> None:
        if sealed.file.crc32c != UNKNOWN_CRC:
            self.output.seal(self._plan.files[at].number, sealed)
        self._result.sealed[at] = sealed
        self._site.deadline.watch.ended_file()


@contextmanager
def meeting(
    group: RankGroup, name: str, what: str, timeouts: Timeouts, job: Callable[[], J]
) -> Iterator[tuple[Operation, J]]:
    """Begin an operation of all ranks, and give it with the job.

    A rank whose arguments make no job joins all the same: the others hear why.
    """
    with (
        group.operation(what, timeouts=timeouts) as operation,
        as_checkpoint_errors(what, operation.rank),
    ):
        with as_checkpoint_errors(f"The call of {name}", operation.rank):
            chosen = job()
        yield operation, chosen


def run_together(
    process_group: dist.ProcessGroup | None,
    name: str,
    what: str,
    timeouts: Timeouts,
    job: Callable[[], tuple[Setting, Mapping[str, str], Callable[[Site], Task[R]]]],
) -> R:
    """Run a job on all ranks of a group, or, without one, on this process alone.

    It is a setting, what all ranks must have in common, and a task. It may take as long as bytes
    move.
    """
    is_alone = process_group is None
    group = RankGroup.alone() if is_alone else RankGroup.of(process_group, lane=name)
    with meeting(group, name, what, timeouts, job) as (operation, (setting, terms, task_of)):
        operation.meet(terms)

        def begin(phase: Phase, total_bytes: int) -> Deadline:
            if phase == "plan" and not is_alone:
                return operation.phase(phase)
            # Who is alone has one deadline, that of the work.
            operation.phase("write", NEVER_S, total_bytes=total_bytes)
            return stalling_deadline("write", timeouts.write, operation.what, beside=operation)

        return run(operation, begin, setting, task_of)
