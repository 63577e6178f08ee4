"""Is a checkpoint sound: every byte of it read and checked, every document held against the others.

Loads no tensor into anything and imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ckpt_storage.commit import slotlog
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointInProgressError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    UnsafeContentError,
)
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.file_checks import ShardSpans, Spans
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.names import INDEX_NAME
from ckpt_storage.format.rank_manifest import RankManifest
from ckpt_storage.options import LOCAL_READ_BYTES, Progress, RetryPolicy, Timeouts, TransferOptions
from ckpt_storage.progress import reporting
from ckpt_storage.source.filemarks import open_source
from ckpt_storage.source.model import CommittedSource, gone, read_manifest, read_rank_manifest
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.stalling import stalling_deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.ranges import RangeRead, RangeReader
from ckpt_storage.transfer.workers import Workers

from .checks import (
    RESTORE,
    ExportCheck,
    ExportStatus,
    Findings,
    Problem,
    check_coverage,
    check_foreign,
    check_markers,
    check_places,
    check_rank,
    check_stock,
    note_unsafe,
)

_T = TypeVar("_T")
_K = TypeVar("_K")

Begins = Callable[[int, str | None], None]
"""Takes the bytes to read, once they are known, and the save id."""

_LOCAL_THREADS = 1
"""A second thread waits for Python's lock longer than it reads: checks hold that."""
_BATCH_RANKS = 32
"""Ranks whose files are read at a time: all checksums of their blocks are in memory then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found. `ok` is whether nothing is wrong.

    `exports` are those directly below `url`, and one at `url` itself; a stale one is no problem.
    `notes` names values that are sound and that `load` refuses all the same.
    """

    url: str
    format: str | None
    save_id: str | None
    problems: Sequence[Problem]
    file_count: int
    checked_bytes: int
    exports: Sequence[ExportStatus] = ()
    notes: Sequence[Problem] = ()

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def verify(  # the public surface, all keyword-only
    url: str | os.PathLike[str],
    *,
    deep: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    thread_count: int | None = None,
    memory_limit_bytes: int | None = None,
    timeout: float | Timeouts | Any = None,  # noqa: ANN401  # timedelta too; Timeouts.of checks
    retry: RetryPolicy | None = None,
    progress: Progress = None,
) -> VerifyReport:
    """Check a checkpoint and report everything that is wrong with it.

    `deep` reads every byte of every file and holds it against its checksum; otherwise only
    documents and file lengths are checked. Checkpoints of other writers carry no checksums:
    there only that the files can be read. Any rank; not collective; changes nothing.

    `timeout` (`Timeouts.load`) is how long nothing may arrive, however
    long the whole takes. `progress`: True: a bar; or a callable that takes each `ProgressEvent`.

    Raises what opening raises if there is no checkpoint to check; damage is reported, not raised.
    """
    location, timeouts = Location.of(url, storage_options), Timeouts.of(timeout)
    what = f"Verifying {location.url}"
    deadline, watch = stalling_deadline("load", timeouts.load, what)
    store = open_store(location, timeouts=timeouts, retry=retry or RetryPolicy()).bounded(deadline)
    ranges = _reader(store, deadline, thread_count, memory_limit_bytes)

    def checked() -> _Verification:
        one = _Verification(ranges, deep=deep)
        with ExitStack() as stack:

            def begins(total_bytes: int, save_id: str | None) -> None:
                watch.on_bytes = stack.enter_context(
                    reporting(
                        progress,
                        phase="load",
                        rank=0,
                        total_bytes=total_bytes,
                        save_id=save_id,
                        with_bar=True,
                    )
                )
                stack.callback(setattr, watch, "on_bytes", lambda _: None)

            one.run(begins)
        return one

    with deadline.governs(what):
        found = checked()
        # What was superseded and freed while it was being checked is not damaged.
        while (
            found.save_id and found.findings.problems and gone(store, found.save_id, location.url)
        ):
            deadline.check(what)
            found = checked()
    return VerifyReport(
        url=location.url,
        format=found.format,
        save_id=found.save_id,
        problems=found.findings.problems,
        file_count=found.findings.file_count,
        checked_bytes=found.findings.checked_bytes,
        exports=found.exports,
        notes=tuple(found.findings.notes),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of `count` equal parts of the bytes of all shard files, one after another.

    Parts begin and end within files, so that several processes share one large file.
    """

    number: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether what cannot be divided belongs to this part."""
        return self.number == 0

    def stretches(self, files: Iterable[tuple[str, int]]) -> dict[str, range]:
        """Return what of each file, by path, lies in this part; only those of which something does.

        `files` are paths with lengths in bytes, in an order that is the same for all parts.
        """
        given = list(files)
        total = sum(size_bytes for _, size_bytes in given)
        low, high = (total * number // self.count for number in (self.number, self.number + 1))
        found: dict[str, range] = {}
        begin = 0
        for path, size_bytes in given:
            stretch = range(max(low - begin, 0), min(high - begin, size_bytes))
            if stretch or (self.leads and not size_bytes):
                found[path] = stretch
            begin += size_bytes
        return found


def check_part(store: Store, part: Part, *, deep: bool, deadline: Deadline) -> str | None:
    """Check whether one part of a checkpoint can be loaded; return the save id, None without one.

    Unlike `verify` it passes over what no load needs: `.metadata`, markers and exports. `deep`
    reads every byte of the part, otherwise only documents and file lengths count. The first part
    also checks that files of another writer can be read. `store` is bounded by `deadline`. Not
    collective; changes nothing.

    Raises `IntegrityError` that names the first problem, `CheckpointGoneError` if the save was
    replaced or deleted meanwhile, what opening raises if there is nothing, `StorageError`,
    `PhaseTimeoutError`.
    """
    check = _Verification(_reader(store, deadline), deep=deep, part=part)
    with deadline.governs(f"Checking {store.url}"):
        check.run(lambda _, __: None)
        if not check.findings.problems:
            return check.save_id
        replaced = gone(store, check.save_id, store.url) if check.save_id else None
    if replaced is not None:
        raise replaced
    first = check.findings.problems[0]
    raise IntegrityError(
        first.message,
        path=first.file,
        fqn=first.fqn,
        offset=first.offset,
        next_step=first.next_step,
    )


def part_bytes(store: Store, part: Part, deadline: Deadline) -> int:
    """Return how many bytes a deep check of this part reads; 0 for what another tool wrote.

    Costs three small reads. Raises `IntegrityError`, `StorageError`, `PhaseTimeoutError`.
    """
    with deadline.governs(f"Checking {store.url}"):
        head = slotlog.read_log(store).head
        if head is None:
            return 0
        files = [(ref.path, ref.size_bytes) for ref, _ in read_manifest(store, head).files]
        return sum(map(len, part.stretches(files).values()))


def _reader(
    store: Store,
    deadline: Deadline,
    thread_count: int | None = None,
    memory_limit_bytes: int | None = None,
) -> RangeReader:
    options = TransferOptions.for_storage(
        is_remote=store.capabilities.is_remote,
        local_threads=_LOCAL_THREADS,
        local_part_bytes=LOCAL_READ_BYTES,
        thread_count=thread_count,
        part_bytes=None,
        memory_limit_bytes=memory_limit_bytes,
    )
    return RangeReader(store, options, deadline)


class _Verification:
    """One check: documents first, then shard files, then exports; `findings` has what came of it.

    With a `part` it checks only what loads need, and ends soon after its first problem.
    """

    def __init__(self, ranges: RangeReader, *, deep: bool, part: Part | None = None) -> None:
        self._ranges = ranges
        self._store = ranges.store
        self._options = ranges.options
        self._deadline = ranges.deadline
        self._deep = deep
        self._part = part
        self._leads = part is None or part.leads
        self.format: str | None = None
        self.save_id: str | None = None
        self.findings = Findings(is_part=part is not None)
        self.exports: Sequence[ExportStatus] = ()

    def run(self, begins: Begins) -> None:
        """Check whatever is there. Raises what opening raises if there is nothing to check."""
        is_whole = self._part is None
        try:
            self._run(begins)
        except CheckpointGoneError as error:
            if self.save_id is None:
                raise
            self.findings.add(error)
        except (IntegrityError, InvalidInputError, FormatError, UnsafeContentError) as error:
            with self.findings.noting():
                raise error from None
        except CheckpointInProgressError as error:
            # The check of exports notes the folder of one that is not complete.
            if not is_whole or not (error.path or "").endswith(INDEX_NAME):
                raise
        if is_whole:
            exports = ExportCheck(self._ranges, self.findings, deep=self._deep)
            self.exports = exports.run(self.save_id)

    def _run(self, begins: Begins) -> None:
        head = slotlog.read_log(self._store).head
        if head is not None:
            self.format, self.save_id = "ckpt_storage", head.save_id
            self._check_ours(head, begins)
        elif self._leads:
            source = open_source(self._store, deadline=self._deadline, options=self._options)
            self.format, self.save_id = source.format, source.save_id
            check_foreign(self._store, source, self.findings)

    def _check_ours(self, head: SlotRecord, begins: Begins) -> None:
        findings, manifest = self.findings, read_manifest(self._store, head)
        files = [(ref.path, ref.size_bytes) for ref, _ in manifest.files]
        stretches = (self._part or Part()).stretches(files)
        if self._deep:
            begins(sum(map(len, stretches.values())), self.save_id)
        findings.file_count += 1
        if self._part is None:
            check_markers(self._store, manifest.save_id, findings)
        if self._leads:
            check_coverage(head, manifest, findings)
        sound = self._check_ranks(manifest, stretches)
        if sound and self._leads and not findings.is_settled:
            source = CommittedSource(self._store, head, manifest, self._deadline, self._options)
            check_places(source, findings)
        if self._part is None:
            # Last, because a saver that committed a moment ago is about to publish.
            check_stock(self._store, head, manifest, findings)

    def _check_ranks(self, manifest: Manifest, stretches: Mapping[str, range]) -> bool:
        """Check rank manifests and the files they describe; return whether all were as promised."""
        listed: dict[int, dict[str, FileRef]] = {}
        for ref, owner in manifest.files:
            listed.setdefault(owner, {})[ref.path] = ref
        sound = True
        wanted = [
            rank
            for rank in range(len(manifest.ranks))
            if any(path in stretches for path in listed.get(rank, ()))
            or (self._leads and (self._part is None or rank not in listed))
        ]
        for at in range(0, len(wanted), _BATCH_RANKS):
            shards: list[ShardSpans] = []
            ranks = wanted[at : at + _BATCH_RANKS]
            read = partial(self._rank_manifest, manifest)
            for rank, got in zip(ranks, self._side_by_side(read, ranks), strict=True):
                self.findings.file_count += 1
                path, held = manifest.ranks[rank].path, list[RankManifest]()
                with self.findings.noting(path, rank):
                    document = _value(got)
                    check_rank(manifest, document, rank=rank, listed=listed.get(rank, {}))
                    note_unsafe(document, path=path, findings=self.findings)
                    held.append(document)
                if not held:
                    sound = False
                shards += [
                    ShardSpans(document, file)
                    for document in held
                    for file in document.files
                    if self._part is None or file.path in stretches
                ]
            self._check_files(shards, stretches)
            if self.findings.is_settled:
                return False
        return sound

    def _rank_manifest(self, manifest: Manifest, rank: int) -> RankManifest:
        return read_rank_manifest(self._store, manifest.ranks[rank], save_id=manifest.save_id)

    def _side_by_side(
        self, ask: Callable[[_K], _T], keys: Sequence[_K]
    ) -> list[_T | CheckpointError]:
        """Return the answers for `keys`, or what was raised, in order; asked for in parallel."""
        found: dict[int, _T | CheckpointError] = {}

        def keep(at: int) -> None:
            try:
                found[at] = ask(keys[at])
            except CheckpointError as error:
                found[at] = error

        count = min(self._options.thread_count, len(keys))
        if self._store.capabilities.is_remote and count > 1:
            name = f"look at {self._store.url}"
            with Workers(count, name=name, deadline=self._deadline) as workers:
                for at in range(len(keys)):
                    workers.submit(partial(keep, at))
                workers.drain()
        else:
            for at in range(len(keys)):
                keep(at)
        return [found[at] for at in range(len(keys))]

    def _check_files(self, shards: Sequence[ShardSpans], stretches: Mapping[str, range]) -> None:
        """Check the length of shard files and, if deep, every block that begins in a stretch."""
        findings, problems = self.findings, self.findings.problems
        findings.file_count += len(shards)
        begin, paths = len(problems), [shard.path for shard in shards]
        reads: list[tuple[ShardSpans, list[RangeRead]]] = []
        for shard, got in zip(shards, self._side_by_side(self._store.stat, paths), strict=True):
            with findings.noting(shard.path, shard.rank):
                size_bytes = _value(got).size_bytes
                stretch = stretches.get(shard.path, range(0))
                if self._deep:
                    reads.append((shard, self._reads(shard, size_bytes, stretch)))
                if size_bytes != shard.size_bytes:
                    raise _wrong_length(shard, size_bytes)
        measured_count = len(problems)
        try:
            self._read([read for _, those in reads for read in those])
        except CheckpointError:
            # One of the files went away, or cannot be read: each for itself, to say which.
            del problems[measured_count:]
            for shard, those in reads:
                with findings.noting(shard.path, shard.rank):
                    self._read(those)
        order = {path: at for at, path in enumerate(paths)}
        problems[begin:] = sorted(
            problems[begin:],
            key=lambda one: (order.get(one.file or "", len(order)), one.offset or 0),
        )

    def _read(self, reads: Sequence[RangeRead]) -> None:
        self._ranges.run(reads)
        self.findings.checked_bytes += sum(read.stop - read.start for read in reads)

    def _reads(self, spans: ShardSpans, size_bytes: int, stretch: range) -> list[RangeRead]:
        """Return reads of what begins in a stretch of a file and is there, in whole blocks."""
        at, end = (_edge_from(spans, offset) for offset in (stretch.start, stretch.stop))
        end = min(end, spans.edge_before(size_bytes))
        reads = []
        while at < end:
            stop = min(spans.edge_before(at + self._options.part_bytes), end)
            if stop <= at:
                stop = _edge_from(spans, at + 1)
            blocks = ArrivedBlocks(spans, at, self.findings)
            reads.append(
                RangeRead(
                    path=spans.path,
                    start=at,
                    stop=stop,
                    check=blocks.check,
                    edge_before=blocks.edge_before,
                    done=blocks.done,
                )
            )
            at = stop
        return reads


class ArrivedBlocks:
    """Holds the blocks and frames of one read to their checksums while its bytes arrive.

    Damage counts only once the read is done: an attempt that breaks off is made again.
    """

    def __init__(self, spans: Spans, start: int, findings: Findings) -> None:
        self._spans = spans
        self._start = start
        self._findings = findings
        self._damaged: list[IntegrityError] = []

    def edge_before(self, count: int) -> int:
        """Return how many of the first `count` bytes can be judged without the rest."""
        return self._spans.edge_before(self._start + count) - self._start

    def check(self, view: memoryview, first: int) -> None:
        """Judge the bytes from `first` on, which begin and end between blocks."""
        if not first:
            self._damaged.clear()
        start = self._start + first
        for span in self._spans.within(start, start + len(view)):
            if crc32c_of(view[span.start - start : span.stop - start]) != span.crc32c:
                self._damaged.append(self._spans.damage(span))

    def done(self, _: memoryview) -> None:
        """Note the damage that was found."""
        for error in self._damaged:
            self._findings.add(error)


def _value(got: _T | CheckpointError) -> _T:
    """Return an answer, or raise what was raised in its place."""
    if isinstance(got, CheckpointError):
        raise got
    return got


def _edge_from(spans: Spans, offset: int) -> int:
    """Return the nearest edge between two blocks at or behind `offset`."""
    span = next(spans.within(offset, offset + 1), None)
    if span is None or span.start == offset:
        return offset
    return span.stop


def _wrong_length(shard: ShardSpans, size_bytes: int) -> IntegrityError:
    end = min(size_bytes, shard.size_bytes)
    last = max(0, min(end, shard.size_bytes - 1))
    cut = next(shard.within(last, last + 1), None)
    return IntegrityError(
        f"{shard.path} has {size_bytes} bytes; {shard.size_bytes} were written.",
        path=shard.path,
        rank=shard.rank,
        offset=end,
        fqn=None if cut is None else cut.fqn,
        next_step=RESTORE,
    )
