"""Making the files of a plan on one rank: many parts at a time, streamed or copied, then names.

A thread makes one part at a time: it reads, checks, places and sends. A part that is contiguous in
a stored file is copied by the storage, if it can; the checksum that it reports is compared with
those of the checkpoint. If it reports none, the source is read.
"""

from __future__ import annotations

import itertools
import logging
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    IntegrityError,
    InvalidInputError,
    StorageError,
    UnsupportedByStoreError,
)
from ckpt_storage.format.crc import combine_many, crc32c_of
from ckpt_storage.format.documents import DAMAGED, FileRef
from ckpt_storage.format.exports import Sealed
from ckpt_storage.inspect.checks import has_checksum
from ckpt_storage.source.model import explained
from ckpt_storage.store.backend import Part as UploadPart
from ckpt_storage.store.backend import PartCopy
from ckpt_storage.store.probe import COPY_REFUSALS, copies_parts
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.budget import BUDGET
from ckpt_storage.transfer.chunks import ChunkPlace
from ckpt_storage.transfer.objects import read_again
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.workers import Workers

from .output import Export, Result, ResumeState, Span, WriteSummary
from .plan import OutFile, Region, Stored, whole_files
from .reads import SegmentReader, place_of_file

log = logging.getLogger("ckpt_storage")

_REASON_S = 3.0
"""How long a rank whose shared upload was discarded waits for the coordinator's error."""


def joined(spans: Iterable[Span]) -> Span:
    """Return adjacent spans, in any order, as one."""
    starts, lengths, crcs = zip(*sorted(spans), strict=True)
    if len(starts) == 1:
        return starts[0], lengths[0], crcs[0]
    return starts[0], sum(lengths), combine_many(crcs, lengths)


@dataclass
class _RegionState:
    """One region that is being written; `spans` are the bytes that were."""

    region: Region
    file: OutFile
    upload: Upload
    remaining_bytes: int
    spans: list[Span] = field(default_factory=list)


class FileWriter:
    """Makes the files of `export.plan` on one rank; `resume` are those that need not be written.

    A rank that writes a file alone seals it. The coordinator completes files of several ranks, and
    files that get their names together, once all ranks have reported and the source is unchanged.
    After a failure a thread that hangs may still fill a buffer.
    """

    def __init__(self, operation: Operation, export: Export[Any], resume: ResumeState) -> None:
        context, able = export.context, export.context.target.capabilities
        self._operation, self._export, self._resume = operation, export, resume
        self._context, self._plan, self._able = context, export.plan, able
        self._is_together = export.is_together and able.tokens_travel and able.lists_uploads
        self._copies = False
        # Open uploads by file, and the tokens of those that several ranks share.
        self._uploads: dict[int, Upload] = {}
        self._tokens: dict[int, str] = {}
        self._result = Result()
        self._has_failed = False
        self._lock, self._copy_lock = threading.Lock(), threading.Lock()
        self._free: list[memoryview] = []
        # Files whose bytes had another checksum than their source has.
        self._mismatches: list[tuple[Region, IntegrityError]] = []
        # Parallelism is ours: each thread reads for its own part.
        alone = replace(context.options, thread_count=1)
        ranges = RangeReader(context.source, alone, pacer=context.source_pace)
        self._reader = SegmentReader(export.plan.files, export.source, ranges)

    def make(self) -> WriteSummary:
        """Make all files; after an error no upload stays open but those of sealed files."""
        files: Mapping[int, FileRef] = {}
        try:
            self._fill()
            moved = self._result.moved
            self._result.timing = replace(
                self._operation.timing(), done_bytes=moved["sent_bytes"] + moved["copied_bytes"]
            )
            results = self._operation.gather(self._result)
            if self._operation.is_coordinator:
                files = self._finish(results)
        except BaseException as error:
            self._abort(error)
            raise
        written = {at for result in results for at in result.spans}
        kept = frozenset({*self._resume.done, *self._resume.sealed} - written)
        timings = [result.timing for result in results if result.timing is not None]
        stats = self._operation.stats_of(timings) if timings else None
        return WriteSummary(files=files, results=results, kept=kept, stats=stats)

    def _abort(self, error: BaseException) -> None:
        if isinstance(error, CheckpointError):
            # Other ranks report this error, not that their parts are refused.
            self._context.deadline.monitor.failed(error)
        for upload in list(self._uploads.values()):
            try:
                upload.abort()
            except Exception as failure:  # noqa: BLE001  # the first failure is raised
                error.add_note(f"Discarding an upload failed too: {failure}")

    def _fill(self) -> None:
        """Check and write the regions of this rank."""
        plan, context, resume = self._plan, self._context, self._resume
        is_first = self._operation.is_coordinator
        counts = Counter(region.file for region in plan.regions)
        if names := {at: plan.files[at].name for at, count in counts.items() if count > 1}:
            tokens: list[str] = []
            if is_first:
                self._uploads = {at: context.target.upload(n) for at, n in names.items()}
                begin = [upload.token for upload in self._uploads.values()]
                tokens = context.run_parallel("begin uploads", begin)
            self._tokens = self._operation.broadcast(dict(zip(names, tokens, strict=False)))
        own = plan.regions_of(self._operation.rank)
        regions = [r for r in own if not r.is_done]
        looks = [
            partial(self._check, r, resume.done[r.file], regions)
            if r.file in resume.done
            else partial(self._copy_whole, r, resume.whole[r.file], regions)
            for r in own
            if r.is_done
        ]
        context.run_parallel("check and copy files", looks)
        if is_first:
            for at, file in enumerate(plan.files):
                if not file.size_bytes and at not in resume.done:
                    context.target.put(file.name, b"")
                    self._seal(at, Sealed(file=self._reference(at, 0)))
            for sealed in resume.sealed.values():
                self._export.on_bytes(sealed.file.size_bytes)
        try:
            if regions:
                self._write(regions)
            self._make_again()
        except StorageError as error:
            if error.kind == "not-found" and self._tokens:
                # The coordinator discarded the upload, and is about to report why.
                context.deadline.sleep(_REASON_S)
            raise

    def _make_again(self) -> None:
        """Make files that got a wrong checksum once more, out of second reads of the source.

        Raises `IntegrityError` if a checksum is wrong again: the source is damaged.
        """
        mismatches, self._mismatches = self._mismatches, []
        for region, mismatch in mismatches:
            self._uploads.pop(region.file).abort()
            self._result.spans.pop(region.file, None)
            write = partial(self._write_anew, region)
            read_again(self._context.source, mismatch.path or "", write, mismatch)

    def _write_anew(self, region: Region) -> None:
        """Write a whole file; the storage, which may have copied wrongly, copies none of it."""
        self._write([region], copies=False)
        if self._mismatches:
            raise self._mismatches.pop()[1]

    def _check(self, whole: Region, file: FileRef, damaged: list[Region]) -> None:
        """Read a complete file back; add it to the damaged ones unless it is sound."""
        if not self._is_sound(file):
            log.warning("%s is damaged, and made again.", file.path)
            damaged.append(whole)
            return
        self._result.sealed[whole.file] = Sealed(file=file)
        self._export.on_bytes(file.size_bytes)

    def _copy_whole(self, whole: Region, path: str, refused: list[Region]) -> None:
        """Have the storage make a file that equals a stored one.

        Add it to the refused ones if the storage refuses, or reports another checksum.
        """
        context, file = self._context, self._plan.files[whole.file]
        source, crc32c = context.source.copy_source(path), None
        try:
            if source is None:
                raise UnsupportedByStoreError(f"{path} cannot be copied.")
            crc32c = context.target.copy_object(file.name, source, size_bytes=file.size_bytes)
        except StorageError as error:
            if error.kind in COPY_REFUSALS:
                refused.append(whole)
                return
            raise self._copy_error(error, place_of_file(path, file.size_bytes)) from error
        if crc32c is None and not self._able.copies_with_checksum:
            # Only the length was checked.
            crc32c = file.crc32c
        if crc32c != file.crc32c:
            # Another checksum, or none by an emulator: the bytes are read, checked and sent.
            refused.append(whole)
            return
        sealed = Sealed(file=self._reference(whole.file, crc32c or 0))
        with self._lock:
            self._result.moved.update(copied_bytes=file.size_bytes)
        self._seal(whole.file, sealed)
        self._export.on_bytes(file.size_bytes)

    def _copy_error(self, error: StorageError | IntegrityError, place: ChunkPlace) -> Exception:
        """Return the error to raise for a copy by the storage that failed."""
        if isinstance(error, StorageError) and error.kind == "not-found":
            # The error is about the target; the stored file may be what is missing.
            missing = self._export.source.explain_missing(place)
            if isinstance(missing, CheckpointGoneError):
                return missing
        return explained(error, [place], self._export.source)

    def _is_sound(self, file: FileRef) -> bool:
        context = self._context
        ranges = RangeReader(context.target, context.options, pacer=context.target_pace)
        return has_checksum(ranges, file)

    def _write(self, regions: Iterable[Region], *, copies: bool = True) -> None:
        """Write all parts side by side; in order where the storage wants that of a file.

        With `copies` the storage copies the parts that it can.
        """
        context = self._context
        self._copies = copies and context.can_copy
        with Workers(
            context.options.thread_count,
            name=f"export to {self._plan.files[0].name}",
            deadline=context.deadline,
            # Neither is ever more than there are threads.
            limit=lambda: min(context.source_pace.limit(), context.target_pace.limit()),
        ) as workers:
            try:
                for region in regions:
                    self._submit(workers, region)
                workers.drain()
            except BaseException:
                # Threads with parts in order look at this between two of them.
                self._has_failed = True
                raise

    def _submit(self, workers: Workers, region: Region) -> None:
        """Submit the parts of a region, as threads and memory become free."""
        context, limit_bytes = self._context, self._context.options.memory_limit_bytes
        read_bytes = self._reader.prepare(region.file, region.start, region.stop)
        file = self._plan.files[region.file]
        part_bytes = min(region.part_bytes, region.size_bytes)
        # A store may join the views of a part, so a part counts twice.
        each = (2 if self._able.is_remote else 1) * part_bytes + read_bytes
        if each > limit_bytes:
            raise InvalidInputError(
                f"Parts of {part_bytes} bytes need {each} bytes of memory; "
                f"memory_limit_bytes is {limit_bytes}.",
                next_step=f"Raise memory_limit_bytes to {each} or more.",
            )
        job = _RegionState(region, file, self._begin(region.file), region.size_bytes)
        parts = region.parts
        for some in [[part] for part in parts] if self._able.parallel_parts else [parts]:
            # A free place before memory: this wait raises failures, and parts that end meanwhile
            # release their memory.
            workers.wait_for_slot()
            BUDGET.acquire(each, limit_bytes=limit_bytes, deadline=context.deadline)
            workers.submit(partial(self._do, job, some), ended=partial(BUDGET.release, each))

    def _do(self, job: _RegionState, parts: Iterable[tuple[int, int]]) -> None:
        for start, stop in parts:
            if self._has_failed:
                return
            try:
                self._do_part(job, start, stop)
            except BaseException:
                # Before the memory of others is waited for.
                self._has_failed = True
                raise

    def _do_part(self, job: _RegionState, start: int, stop: int) -> None:
        """Do bytes [start, stop) of a file, and what follows the last part of its region."""
        region, deadline = job.region, self._context.deadline
        deadline.check(f"Writing {job.file.name}")
        if not (self._copies and self._copied(job, start, stop)):
            self._streamed(job, start, stop)
        deadline.monitor.advanced(stop - start)
        self._export.on_bytes(stop - start)
        with self._lock:
            job.remaining_bytes -= stop - start
            if job.remaining_bytes:
                return
            whole = joined(job.spans)
            spans = job.spans if job.file.edges else [whole]
            self._result.spans.setdefault(region.file, []).extend(spans)
        self._end(job, whole[2])

    def _streamed(self, job: _RegionState, start: int, stop: int) -> None:
        region, edges, size_bytes = job.region, job.file.edges, stop - start
        inner = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
        # Fresh memory costs the kernel more than the copies through it. No thread keeps its own:
        # there are more of them than parts in flight.
        with self._lock:
            whole = self._free.pop() if self._free else memoryview(b"")
        if len(whole) < size_bytes:
            whole = memoryview(bytearray(size_bytes))
        window = whole[:size_bytes]
        read_bytes = self._reader.fill(region.file, start, stop, window)
        spans = [
            (first, last - first, crc32c_of(window[first - start : last - start]))
            for first, last in itertools.pairwise((start, *inner, stop))
        ]
        number, is_last = start // region.part_bytes, stop == region.file_bytes
        crc32c = joined(spans)[2]
        job.upload.write_part(number, start, [window], last=is_last, crc32c=crc32c)
        self._context.target_pace.succeeded()
        with self._lock:
            self._free.append(whole)
            job.spans += spans
            self._result.moved.update(read_bytes=read_bytes, sent_bytes=size_bytes)

    def _copied(self, job: _RegionState, start: int, stop: int) -> bool:
        """Have the storage copy a part that is contiguous in a stored file; return if it did."""
        context, reader, able, length = self._context, self._reader, self._able, stop - start
        is_short = length < (able.copy_min_bytes or 0) and stop != job.region.file_bytes
        if job.file.edges or is_short or length > (able.copy_max_bytes or length):
            return False
        stored = reader.stored_range(job.region.file, start, stop)
        source = context.source.copy_source(stored[0].path) if stored else None
        if stored is None or source is None:
            return False
        place, first = stored
        # S3 copies no range of an object that is not longer than the shortest part.
        if length < (place.file_bytes or length) <= (able.copy_min_bytes or 0):
            return False
        copy = PartCopy(
            number=start // job.region.part_bytes,
            offset=start,
            source=source,
            start=place.start + first,
            length=length,
            source_bytes=place.file_bytes,
        )
        try:
            with self._copy_lock:
                self._copies = self._copies and copies_parts(context.target, job.file.name, copy)
            if not self._copies:
                return False
            crc32c = job.upload.copy_part(copy)
        except (StorageError, IntegrityError) as error:
            if isinstance(error, StorageError) and error.kind in COPY_REFUSALS:
                self._copies = False
                return False
            raise self._copy_error(error, place) from error
        context.target_pace.succeeded()
        if crc32c is None:
            crc32c, read_bytes = reader.checksum(place, first, first + length)
        else:
            known, read_bytes = reader.known_checksum(place, first, first + length) or (crc32c, 0)
            if known != crc32c:
                # Raises if it is the source that is damaged.
                reader.checksum(place, first, first + length)
                raise _wrong_copy(f"{context.source.url}/{place.path}", copy, place)
        with self._lock:
            job.spans.append((start, length, crc32c))
            self._result.moved.update(read_bytes=read_bytes, copied_bytes=length)
        return True

    def _begin(self, at: int) -> Upload:
        if at not in self._uploads:
            target, path = self._context.target, self._plan.files[at].name
            token = self._tokens.get(at)
            upload = target.join(path, token) if token else target.upload(path)
            self._uploads[at] = upload
            if self._is_together and not token:
                # Begun at once: a small file is not held in memory until the end.
                upload.token()
        return self._uploads[at]

    def _end(self, job: _RegionState, crc32c: int) -> None:
        """Record a region that was written; complete its file if no other rank writes it."""
        at, upload = job.region.file, job.upload
        if at not in self._tokens:
            try:
                file = self._reference(at, crc32c)
            except IntegrityError as mismatch:
                self._mismatches.append((job.region, mismatch))
                return
            if self._is_together:
                parts = [part.to_json() for part in upload.receipts()]
                token, write_id = upload.token(), upload.write_id
                self._seal(at, Sealed(file=file, token=token, write_id=write_id, parts=parts))
            else:
                self._export.check_held()
                upload.complete(file.size_bytes)
                self._seal(at, Sealed(file=file))
        elif self._operation.is_coordinator:
            return
        else:
            self._result.receipts[at] = upload.receipts()
        del self._uploads[at]

    def _finish(self, results: Sequence[Result]) -> dict[int, FileRef]:
        """Give names to all files that have none, side by side; return all; coordinator only."""
        sealed = dict(self._resume.sealed)
        for result in results:
            sealed |= result.sealed
        for at in list(self._tokens):
            parts = [part.to_json() for result in results for part in result.receipts.get(at, ())]
            crc32c = joined(span for result in results for span in result.spans.get(at, ()))[2]
            try:
                sealed[at] = Sealed(file=self._reference(at, crc32c), parts=parts)
            except IntegrityError as mismatch:
                # This rank makes the file alone.
                del self._tokens[at]
                sizes = {at: self._plan.files[at].size_bytes}
                (region,) = whole_files(sizes, 1, self._able, self._plan.part_bytes)
                self._mismatches.append((region, mismatch))
        self._make_again()
        sealed |= self._result.sealed
        self._export.check_unchanged()
        self._export.check_held()
        self._export.prepare_names()

        def name(at: int, seal: Sealed) -> None:
            file, own = seal.file, self._uploads.get(at)
            upload = own or self._context.target.join(file.path, seal.token, write_id=seal.write_id)
            upload.complete(file.size_bytes, receipts=[*map(UploadPart.from_json, seal.parts)])
            if own:
                self._seal(at, Sealed(file=file))
            elif at in self._resume.sealed and not self._is_sound(file):
                what = f"{file.path}, which an earlier run had written, is damaged."
                step = "Call it again: the file is made anew then."
                raise IntegrityError(what, path=file.path, offset=0, next_step=step)

        nameless = {at: seal for at, seal in sealed.items() if seal.token or at in self._tokens}
        jobs = [partial(name, *item) for item in nameless.items()]
        self._context.run_parallel("complete files", jobs)
        return {at: seal.file for at, seal in sealed.items()}

    def _reference(self, at: int, crc32c: int) -> FileRef:
        """Return what a file is; raise if it has to have another checksum."""
        file = self._plan.files[at]
        if file.crc32c not in {None, crc32c}:
            path = next(part.path for part in file.segments if isinstance(part, Stored))
            what = f"{path} is damaged: it does not have the checksum of its writer."
            raise IntegrityError(what, path=path, offset=0, next_step=DAMAGED)
        return FileRef(path=file.name, size_bytes=file.size_bytes, crc32c=crc32c)

    def _seal(self, at: int, sealed: Sealed) -> None:
        self._export.seal(at + 1, sealed)
        self._result.sealed[at] = sealed
        self._context.deadline.monitor.advanced(file_count=1)


def _wrong_copy(shown: str, copy: PartCopy, place: ChunkPlace) -> StorageError:
    return StorageError(
        f"The storage copied bytes [{copy.start}, {copy.start + copy.length}) of {shown}, which "
        f"belong to {place.fqn}, wrongly: the source is sound, and the copy has another checksum.",
        path=place.path,
        rank=place.rank,
        retryable=True,
        next_step="Try again; if it happens again, report it to the operator of the storage.",
    )
