"""`verify`: every byte of a checkpoint is checked, and every document against the others."""

from __future__ import annotations

import heapq
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from ckpt_storage.commit import slotlog
from ckpt_storage.errors import (
    CheckpointGoneError,
    CheckpointInProgressError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    UnsafeContentError,
)
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import DAMAGED, MAX_SLOT_BYTES, RESTORE, FileRef, unseal
from ckpt_storage.format.exports import GUARD_NAME
from ckpt_storage.format.fields import Fields
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.names import begun_path, slot_path
from ckpt_storage.format.rank_manifest import RankManifest, ShardFile, checksums_of, wrong_block
from ckpt_storage.options import Progress, RetryPolicy, Timeouts, TransferOptions
from ckpt_storage.progress import reporting
from ckpt_storage.source.model import CommittedSource, Key, gone, read_manifest
from ckpt_storage.source.opening import open_source
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import stalling_deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer import objects
from ckpt_storage.transfer.ranges import RangeRead, RangeReader
from ckpt_storage.transfer.workers import side_by_side, some_at_once

from .checks import ExportStatus, Findings, Problem, check_exports, check_foreign, check_stock

_LOCAL_WINDOW_BYTES = 1 << 20
"""Small enough to be checked while it is in the second-level cache of a processor."""
_BATCH_RANKS = 32
"""Ranks whose files are read at a time; the checksums of all their blocks are in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of `verify`.

    `exports` are those directly below `url`, and one at `url` itself; a stale export is no problem.
    `notes` names sound values that `load` refuses. `link_counts` has the number of names of each
    file that shares its storage with files of other saves, by hard links: damage to one of them is
    damage to all.
    """

    url: str
    format: str | None
    save_id: str | None
    problems: Sequence[Problem]
    file_count: int
    checked_bytes: int
    exports: Sequence[ExportStatus] = ()
    notes: Sequence[Problem] = ()
    link_counts: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
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
    """Check a checkpoint and report all its problems.

    With `deep`, every byte of every file is read and checked; otherwise documents and file lengths
    are. Checkpoints of other writers have no checksums: their files are checked for existence and
    length. Any rank; not collective; changes nothing.

    It fails when no bytes arrive for `timeout` (`Timeouts.load`). `progress`: True shows a bar; or
    a callable that gets each `ProgressEvent`.

    Damage is reported, not raised. Raises as `open_checkpoint` if there is no checkpoint.
    """
    location, timeouts = Location.to_read(url, storage_options), Timeouts.of(timeout)
    what = f"Verifying {location.url}"
    deadline = stalling_deadline("load", timeouts.load, what)
    store = open_store(location, timeouts=timeouts, retry=retry or RetryPolicy()).bounded(deadline)
    ranges = _reader(store, thread_count, memory_limit_bytes)
    with deadline.annotate_errors(what):
        while True:
            check = _Check(ranges, is_deep=deep, progress=progress if deep else None)
            check.run()
            # A save that was freed during the check is not damaged: check the new head.
            save_id = check.save_id
            if not (save_id and check.problems and gone(store, save_id, location.url)):
                break
            deadline.check(what)
    return VerifyReport(
        url=location.url,
        format=check.format,
        save_id=check.save_id,
        problems=check.problems,
        file_count=check.file_count,
        checked_bytes=check.checked_bytes,
        exports=check.exports or (),
        notes=tuple(check.notes),
        link_counts=check.link_counts,
    )


def divided(files: Iterable[tuple[FileRef, int]], count: int) -> list[dict[str, int]]:
    """Divide the files of a manifest into `count` parts of similar size: lengths by path."""
    loads = [(0, number) for number in range(count)]
    parts: list[dict[str, int]] = [{} for _ in loads]
    for ref, _ in files:
        load_bytes, number = loads[0]
        heapq.heapreplace(loads, (load_bytes + ref.size_bytes, number))
        parts[number][ref.path] = ref.size_bytes
    return parts


def check_part(store: Store, number: int = 0, count: int = 1, *, deep: bool) -> str | None:
    """Check whether part `number` of `count` can be loaded; return the save id, None without one.

    Files that no load needs (`.metadata`, markers, exports) are not checked. The first part checks
    files of another writer, too. Raises `IntegrityError` for the first problem,
    `CheckpointGoneError` if the save was replaced or deleted meanwhile, `StorageError`,
    `PhaseTimeoutError`, and as `open_checkpoint` without a checkpoint.
    """
    check = _Check(_reader(store), is_deep=deep, is_strict=True, part=number, part_count=count)
    with store.deadline.annotate_errors(f"Checking {store.url}"):
        try:
            check.run()
        except IntegrityError as error:
            replaced = gone(store, check.save_id, store.url) if check.save_id else None
            if replaced is not None:
                raise replaced from error
            raise
    return check.save_id


def part_bytes(store: Store, count: int) -> list[int]:
    """Return the bytes that a deep check of each part reads; 0 for files of another tool."""
    with store.deadline.annotate_errors(f"Checking {store.url}"):
        head = slotlog.read_log(store).head
        files = () if head is None else read_manifest(store, head).files
    return [sum(part.values()) for part in divided(files, count)]


def _reader(
    store: Store, thread_count: int | None = None, memory_limit_bytes: int | None = None
) -> RangeReader:
    options = TransferOptions.for_storage(
        is_remote=store.capabilities.is_remote,
        # Checks hold Python's lock, so a second thread would mostly wait.
        local_threads=1,
        local_part_bytes=_LOCAL_WINDOW_BYTES,
        thread_count=thread_count,
        memory_limit_bytes=memory_limit_bytes,
    )
    return RangeReader(store, options)


_Rank = tuple[int, dict[str, FileRef], list[Key]]
"""A rank in the manifest: its number, its files by path, and the keys of its values."""


@dataclass(slots=True)
class _Check(Findings):
    """One check; a strict check covers only files that loads need."""

    part: int = 0
    part_count: int = 1
    progress: Progress = None
    format: str | None = None
    save_id: str | None = None
    exports: Sequence[ExportStatus] | None = None

    def run(self) -> None:
        """Check the checkpoint. Raises as `open_checkpoint` if there is none."""
        try:
            head = slotlog.read_log(self.store).head
            if head is not None:
                self.format, self.save_id = "ckpt_storage", head.save_id
                self._check_ours(head)
            elif not self.part:
                ranges = self.ranges
                source = open_source(self.store, ranges.options)
                self.format, self.save_id = source.format, source.save_id
                check_foreign(self, source)
        except CheckpointGoneError as error:
            if self.save_id is None or self.is_strict:
                raise
            self.add(error)
        except (IntegrityError, InvalidInputError, FormatError, UnsafeContentError) as error:
            with self.noting():
                raise error from None
        except CheckpointInProgressError as error:
            # `check_exports` reports an unfinished export.
            if self.is_strict or not (error.path or "").endswith(GUARD_NAME):
                raise
        if not self.is_strict and self.exports is None:
            self.exports = check_exports(self, self.save_id)

    def _check_ours(self, head: SlotRecord) -> None:
        """Check documents and files; the decoder of the manifest finds gaps between chunks."""
        ranges, manifest = self.ranges, read_manifest(self.store, head)
        self.file_count += 1
        if not self.is_strict:
            path = begun_path(manifest.save_id)
            with self.noting(path):

                def check(data: bytes) -> bool:
                    marker = Fields.of(unseal(data, path=path), "begun", path)
                    marker.value("save_id", str, ok=lambda text: text == manifest.save_id)
                    return True

                has_marker = objects.read_decoded(self.store, path, check, max_bytes=MAX_SLOT_BYTES)
                self.file_count += has_marker is not None
        files = divided(manifest.files, self.part_count)[self.part]
        total_bytes = sum(files.values())
        with reporting(self.progress, "load", 0, total_bytes, self.save_id) as self.on_bytes:
            ranks = self._ranks(manifest, files)
            for at in range(0, len(ranks), _BATCH_RANKS):
                batch = ranks[at : at + _BATCH_RANKS]
                # A new source for each batch, because it keeps the rank manifests that it reads.
                source = CommittedSource(self.store, head, manifest, ranges.options)
                checks = [partial(self._check_rank, source, rank, files) for rank in batch]
                reads = list(chain.from_iterable(side_by_side(self.store, checks)))
                with self.noting():
                    ranges.run(reads, on_bytes=self.on_bytes)
                self.file_count += sum(1 + len(rank[1]) for rank in batch)
                self.checked_bytes += sum(read.stop - read.start for read in reads)
            self.problems.sort(key=lambda p: (p.rank or 0, p.file or "", p.offset or 0))
            if not self.is_strict:
                self._check_slots(head)
                # Last, because a saver publishes after its commit.
                check_stock(self, head, manifest)
                self.exports = check_exports(self, self.save_id)

    def _check_slots(self, head: SlotRecord) -> None:
        """Check that the slots below the head exist and are sound."""

        def check(slot: int) -> None:
            with self.noting(slot_path(slot)):
                if slotlog.read_slot(self.store, slot) is None:
                    what = f"{slot_path(slot)} is missing: commits/ lost files."
                    raise IntegrityError(what, offset=0, next_step=RESTORE)

        checks = [partial(check, slot) for slot in range(1, head.slot)]
        if checks:
            some_at_once(checks, self.ranges.options.thread_count, deadline=self.store.deadline)

    def _ranks(self, manifest: Manifest, files: Mapping[str, int]) -> list[_Rank]:
        """Return the ranks with files in this part; ranks without files are in the first part."""
        ranks: list[_Rank] = [(number, {}, []) for number in range(len(manifest.ranks))]
        for ref, owner in manifest.files:
            ranks[owner][1][ref.path] = ref
        for fqn, tensor in manifest.tensors.items():
            for box, owner in zip(tensor.boxes, tensor.owners, strict=True):
                if not box.is_empty:
                    ranks[owner][2].append((fqn, box.offsets))
        for fqn, owner in manifest.blobs.items():
            ranks[owner][2].append((fqn, None))
        return [rank for rank in ranks if files.keys() & rank[1] or not (self.part or rank[1])]

    def _check_rank(
        self, source: CommittedSource, rank: _Rank, files: Mapping[str, int]
    ) -> list[RangeRead]:
        """Check the documents and file lengths of a rank; return the reads of its files."""
        reads = list[RangeRead]()
        number, refs, keys = rank
        path = source.manifest.ranks[number].path
        with self.noting(path, number):
            document = source.rank_manifest(number)
            if {file.path: file.ref() for file in document.files} != refs:
                what = f"{path} and the manifest describe different files."
                raise IntegrityError(what, offset=0, next_step=DAMAGED)
            for key in keys:
                with self.noting():
                    source.places([key])
            for fqn, named in document.unsafe.items():
                note = Problem(
                    message=f"{fqn} is a value ({named:.200}) that only pickle can hold; load "
                    "refuses it.",
                    next_step="Allow its types by torch.serialization.add_safe_globals, or, if "
                    "you trust its writer, load with unsafe_pickle=True.",
                    file=path,
                    rank=number,
                    fqn=fqn,
                )
                self.notes.append(note)
            for file in document.files:
                if file.path not in files:
                    continue
                with self.noting(path, number):
                    if file.combined_crc() != file.crc32c:
                        what = f"{path} contradicts itself: the checksum of {file.path} is not "
                        what += "that of its frames and blocks."
                        raise IntegrityError(what, offset=0, next_step=RESTORE)
                with self.noting(file.path, number):
                    size_bytes = self.size_of(file.ref())
                    reads += self._reads(document, file, size_bytes)
        return reads

    def _reads(
        self, document: RankManifest, file: ShardFile, size_bytes: int
    ) -> Iterator[RangeRead]:
        """Yield reads of what is there of a file, up to a part at a time; judge its length."""
        edges, crcs, fqns = checksums_of(document, file)
        first, end = 0, bisect_right(edges, size_bytes) - 1 if self.is_deep else 0

        def judge(spans: range, read_before: set[int], view: memoryview) -> None:
            origin, rank = edges[spans.start], document.rank
            for span in spans:
                part = view[edges[span] - origin : edges[span + 1] - origin]
                if crc32c_of(part) == crcs[span]:
                    continue
                error = wrong_block(file.path, edges[span], fqn=fqns[span], rank=rank)
                if not read_before:
                    # The reader reads all of it once more.
                    read_before.update(spans)
                    raise error
                self.add(error)

        while first < end:
            fitting = bisect_right(edges, edges[first] + self.ranges.options.part_bytes) - 1
            stop = min(max(fitting, first + 1), end)
            done = partial(judge, range(first, stop), set())
            yield RangeRead(path=file.path, start=edges[first], stop=edges[stop], done=done)
            first = stop
        if size_bytes != file.size_bytes:
            offset = min(size_bytes, file.size_bytes)
            cut = min(bisect_right(edges, min(offset, file.size_bytes - 1)), len(crcs)) - 1
            error = IntegrityError(
                f"{file.path} has {size_bytes} bytes; {file.size_bytes} were written.",
                offset=offset,
                fqn=fqns[cut] if fqns else None,
                next_step=DAMAGED,
            )
            self.add(error, path=file.path, rank=document.rank)
