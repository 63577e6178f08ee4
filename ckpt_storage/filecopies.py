"""Whole files from one store to another: many at a time, in bounded memory, checked on their way.

Knows stores, parts and checks; knows no checkpoint and no order that matters to one. Called by
`copying` and `foreigncopy`.

A file becomes visible at the target only complete, so one that is there after a crash is whole.
Where the target's storage can copy from the source by itself, no byte travels through this
process, except to be checked where the storage tells no checksum of what it copied.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal

from .deadline import Deadline
from .errors import CheckpointError, IntegrityError, StorageError
from .filewriter import part_bytes_for
from .options import MIB, TransferOptions
from .relay import Buffers, Paces, PartWorkers, timed
from .shardspans import SpanCheck, Spans
from .store.base import SharedUpload, Stoppable, Store, Upload
from .workers import bounded

__all__ = ["Copies", "FileCopier", "FileToCopy", "Tally"]

Copies = Literal["auto", "always", "never"]
"""Which files the storage copies by itself: where that pays, wherever it can, none."""

_LEAST_COPY_BYTES = MIB
"""Below this a copy by the storage takes more requests than reading and writing."""

_COPY_BYTES = 256 * MIB
"""Most of one copy: a storage takes seconds for it, and several go on at a time."""

_MOST_PARTS = 9_000
_REFUSALS = frozenset({"permission", "unsupported"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToCopy:
    """One file: where it is, what it is called at the target, and how long it must be.

    `spans` holds its checksums; None: only the length is known. `is_compared`: one that is at the
    target already, of this length, is held against the source byte by byte, not believed.
    """

    path: str
    target: str
    size_bytes: int
    spans: Spans | None = None
    is_compared: bool = False


@dataclass(slots=True)
class Tally:
    """What was moved so far; told by several threads.

    read_bytes: came to this process from the source, re-reads included. sent_bytes: went from it
    to the target. copied_bytes: copied by the storage itself. kept_count, kept_bytes: files that
    were found complete at the target.
    """

    read_bytes: int = 0
    sent_bytes: int = 0
    copied_bytes: int = 0
    file_count: int = 0
    kept_count: int = 0
    kept_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        """Add to the counts of these names."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    number: int
    start: int
    stop: int
    is_last: bool


class _CopyRefusedError(Exception):
    """The storage will not copy; the bytes have to be streamed."""


class _OpenFile:
    """One file on its way: its upload, its check, and how many parts are still to come."""

    def __init__(self, file: FileToCopy, parts: Sequence[_Part], upload: Upload) -> None:
        self.file = file
        self.parts = parts
        self.upload = upload
        self.check = SpanCheck(file.spans) if file.spans else None
        self._lock = threading.Lock()
        self._left_count = len(parts)

    def ended_part(self) -> bool:
        """Note the end of a part; return whether it was the last one to end."""
        with self._lock:
            self._left_count -= 1
            return self._left_count == 0

    def finish(self) -> None:
        """Make the file visible, every byte of it checked."""
        if self.check is not None:
            self.check.check_complete()
        if isinstance(self.upload, SharedUpload):
            # The name stands for these very bytes, whoever put them there.
            self.upload.complete(self.file.size_bytes, existing="replace")
        else:
            self.upload.complete(self.file.size_bytes)


class FileCopier:
    """Copies files between two stores; one thread calls it.

    Buffers take at most `options.memory_limit_bytes` of the process's budget. `paces` decides how
    many parts are under way. After a failure nothing half-written is visible and no upload is
    open; what was complete before stays. `explain_missing` is asked for the error to raise where
    the source's file of a path is not there.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        options: TransferOptions,
        deadline: Deadline,
        copies: Copies = "auto",
        on_bytes: Callable[[int], None] = lambda _: None,
        explain_missing: Callable[[str], CheckpointError | None] = lambda _: None,
    ) -> None:
        self.tally = Tally()
        self.paces = Paces(options.thread_count)
        self._explain_missing = explain_missing
        self._source = bounded(source, deadline, throttled=self.paces.source.slowed_down)
        self._target = bounded(target, deadline, throttled=self.paces.target.slowed_down)
        self._options = options
        self._deadline = deadline
        self._on_bytes = on_bytes
        self._wanted: Copies = copies
        self._copies = False
        self._buffers = Buffers()
        self._open: dict[str, _OpenFile] = {}
        self._open_lock = threading.Lock()

    def copy(self, files: Iterable[FileToCopy]) -> None:
        """Copy files, begun in their order. Raises the first failure.

        `IntegrityError` names the block of a source that is damaged, or the file whose length
        is not what it must be.
        """
        files, options = list(files), self._options
        if not files:
            return
        # Only now: a folder that was not there yet lay on no file system.
        self._copies = self._storage_copies()
        largest = max(file.size_bytes for file in files)
        part_bytes = part_bytes_for(self._target.capabilities, options, largest)
        with (
            self._aborting(),
            self._workers(f"copy to {self._target.url}", part_bytes) as workers,
            # Before the workers are waited for: they may wait for a part that will not come.
            self._stopping(),
        ):
            for file in files:
                self._submit(workers, file)
            workers.drain()

    def _workers(self, name: str, part_bytes: int) -> PartWorkers:
        """Return threads that each hold a part of that size at a time."""
        options = self._options
        is_remote = any(s.capabilities.is_remote for s in (self._source, self._target))
        # A client may join the views of a part, so a part counts twice.
        each_bytes = (2 if is_remote else 1) * part_bytes
        return PartWorkers(
            max(1, min(options.thread_count, options.memory_limit_bytes // each_bytes)),
            name=name,
            paces=self.paces,
            each_bytes=each_bytes,
            limit_bytes=options.memory_limit_bytes,
            buffers=self._buffers,
            deadline=self._deadline,
        )

    def _storage_copies(self) -> bool:
        capabilities = self._target.capabilities
        return (
            self._wanted != "never"
            and capabilities.shared_uploads
            and capabilities.copy_part_min_bytes is not None
            and (self._wanted == "always" or capabilities.copies_pay)
            and self._target.can_copy_from(self._source)
        )

    def check(self, files: Iterable[FileToCopy]) -> list[FileToCopy]:
        """Return those of the files that the target does not hold as they must be.

        Reads all of each that has the right length and checksums, or is to be compared. A file that
        is damaged, or of another length or content, is deleted.
        """
        lacking: list[FileToCopy] = []
        lock = threading.Lock()

        def look(file: FileToCopy) -> None:
            state = self._state_at_target(file)
            if state == "whole":
                self.tally.add(kept_count=1, kept_bytes=file.size_bytes, file_count=1)
                self._on_bytes(file.size_bytes)
                return
            if state == "damaged":
                self._target.delete([file.target])
            with lock:
                lacking.append(file)

        with self._workers(f"check {self._target.url}", self._options.part_bytes) as workers:
            for file in files:
                workers.submit(partial(look, file))
            workers.drain()
        return sorted(lacking, key=lambda file: file.target)

    def _state_at_target(self, file: FileToCopy) -> Literal["whole", "damaged", "absent"]:
        try:
            size_bytes = self._target.stat(file.target).size_bytes
        except StorageError as error:
            if error.kind != "not-found":
                raise
            return "absent"
        if size_bytes != file.size_bytes:
            return "damaged"
        if file.spans is None:
            return "whole" if not file.is_compared or self._is_same(file) else "damaged"
        check = SpanCheck(file.spans)
        step = self._options.part_bytes
        try:
            with self._buffers.taken(min(step, size_bytes)) as buffer:
                for start in range(0, size_bytes, step):
                    view = buffer[: min(step, size_bytes - start)]
                    self._read_target(file, start, view)
                    self.tally.add(read_bytes=len(view))
                    self._deadline.advanced(len(view))
                    check.take(start, view)
            check.check_complete()
        except IntegrityError:
            return "damaged"
        return "whole"

    def _is_same(self, file: FileToCopy) -> bool:
        """Return whether the target's file is the source's; both are read."""
        step = max(1, min(self._options.part_bytes, file.size_bytes) // 2)
        with self._buffers.taken(2 * step) as views:
            for start in range(0, file.size_bytes, step):
                count = min(step, file.size_bytes - start)
                old, new = views[:count], views[step : step + count]
                self._read_target(file, start, old)
                with timed(self.paces.source, count):
                    self._source.read_into(file.path, start, new, size_bytes=file.size_bytes)
                self.tally.add(read_bytes=2 * count)
                self._deadline.advanced(2 * count)
                if old != new:
                    return False
        return True

    def _read_target(self, file: FileToCopy, start: int, view: memoryview) -> None:
        with timed(self.paces.target, len(view)):
            self._target.read_into(file.target, start, view, size_bytes=file.size_bytes)

    def _submit(self, workers: PartWorkers, file: FileToCopy) -> None:
        """Hand a file to the workers: whole if it is one part, else part by part."""
        parts = self._copy_parts(file)
        is_copied = bool(parts)
        parts = parts or self._stream_parts(file)
        if len(parts) <= 1 or not self._target.capabilities.parallel_parts:
            workers.submit(partial(self._whole, file))
            return
        one = None
        if is_copied:
            # The first copy tells whether the storage will, before the others are asked for.
            one = self._begun(file, parts, is_copied=True)
            try:
                with workers.claimed():
                    self._copy_part(one, parts[0])
            except _CopyRefusedError:
                self._wanted, self._copies = "never", False
                self._give_up(one)
                one = None
            else:
                one.ended_part()
                parts = parts[1:]
        if one is None:
            parts = self._stream_parts(file)
            one, is_copied = self._begun(file, parts, is_copied=False), False
        step = self._copy_part if is_copied else self._stream_part
        for part in parts:
            workers.submit(partial(self._part, one, part, step))

    def _part(self, one: _OpenFile, part: _Part, step: Callable[[_OpenFile, _Part], None]) -> None:
        self._deadline.check(f"Copying {one.file.path}")
        try:
            step(one, part)
        except _CopyRefusedError as refusal:
            # It did copy another part of this file, so this is no matter of what it can do.
            raise refusal.__cause__ or refusal from None
        if one.ended_part():
            self._finish(one)

    def _whole(self, file: FileToCopy) -> None:
        """Copy a file in this thread, its parts in order."""
        self._deadline.check(f"Copying {file.path}")
        if not file.size_bytes:
            self._target.write(file.target, b"")
            self.tally.add(file_count=1)
            return
        parts = self._copy_parts(file)
        if parts:
            one = self._begun(file, parts, is_copied=True)
            try:
                for part in parts:
                    self._copy_part(one, part)
            except _CopyRefusedError:
                self._wanted, self._copies = "never", False
                self._give_up(one)
            else:
                self._finish(one)
                return
        parts = self._stream_parts(file)
        one = self._begun(file, parts, is_copied=False)
        for part in parts:
            self._stream_part(one, part)
        self._finish(one)

    def _begun(self, file: FileToCopy, parts: Sequence[_Part], *, is_copied: bool) -> _OpenFile:
        size = parts[0].stop - parts[0].start
        start = self._target.start_shared_upload if is_copied else self._target.start_upload
        one = _OpenFile(file, parts, start(file.target, part_bytes=size))
        with self._open_lock:
            self._open[file.target] = one
        return one

    def _finish(self, one: _OpenFile) -> None:
        one.finish()
        with self._open_lock:
            del self._open[one.file.target]
        self._deadline.ended_file()
        self.tally.add(file_count=1)

    def _give_up(self, one: _OpenFile) -> None:
        # Open until then: what fails here is aborted again when the copy is given up.
        one.upload.abort()
        with self._open_lock:
            del self._open[one.file.target]

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """Let go whoever waits in an upload when the block is left by an error."""
        try:
            yield
        except BaseException:
            with self._open_lock:
                left = list(self._open.values())
            for one in left:
                if isinstance(one.upload, Stoppable):
                    one.upload.stop()
            raise

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        """Abort what is open when the block is left by an error."""
        try:
            yield
        except BaseException as error:
            with self._open_lock:
                left = list(self._open.values())
                self._open.clear()
            for one in left:
                try:
                    one.upload.abort()
                except Exception as failure:  # noqa: BLE001  # the others have to be aborted, too
                    error.add_note(f"Discarding an upload failed too: {failure}")
            raise

    def _stream_parts(self, file: FileToCopy) -> list[_Part]:
        size = part_bytes_for(self._target.capabilities, self._options, file.size_bytes)
        starts = range(0, file.size_bytes, size)
        return [
            _Part(
                number=number,
                start=start,
                stop=min(start + size, file.size_bytes),
                is_last=start == starts[-1],
            )
            for number, start in enumerate(starts)
        ]

    def _copy_parts(self, file: FileToCopy) -> list[_Part]:
        """Return parts of about equal length that begin at the edges of blocks.

        None where the storage will not or cannot copy the file so.
        """
        total, capabilities = file.size_bytes, self._target.capabilities
        if not self._copies or total < _LEAST_COPY_BYTES:
            return []
        most = capabilities.max_part_count or _MOST_PARTS
        size = max(_COPY_BYTES, -(-total // min(most, _MOST_PARTS)))
        least, limit = capabilities.copy_part_min_bytes or 1, capabilities.copy_part_max_bytes
        # A part that is moved to the edge of a block must not get too short.
        count = max(1, min(-(-total // size), total // (least + MIB)))
        cuts = [total * i // count for i in range(count + 1)]
        if file.spans is not None:
            cuts = sorted({file.spans.edge_before(cut) for cut in cuts})
        parts = [
            _Part(number=number, start=start, stop=stop, is_last=stop == total)
            for number, (start, stop) in enumerate(pairwise(cuts))
        ]
        fits = all(
            (limit is None or part.stop - part.start <= limit)
            and (part.is_last or part.stop - part.start >= least)
            for part in parts
        )
        return parts if fits else []

    def _stream_part(self, one: _OpenFile, part: _Part) -> None:
        file, length = one.file, part.stop - part.start
        with self._buffers.taken(length) as buffer:
            view = buffer[:length]
            self._read(file, part.start, view)
            if one.check is not None:
                one.check.take(part.start, view)
            with timed(self.paces.target, length):
                one.upload.write_part(part.number, part.start, [view], last=part.is_last)
        self.tally.add(read_bytes=length, sent_bytes=length)
        self._deadline.advanced(length)
        self._on_bytes(length)

    def _copy_part(self, one: _OpenFile, part: _Part) -> None:
        """Have the storage copy a part; check it by the checksum that it tells, or by reading."""
        file, length = one.file, part.stop - part.start
        source = self._source.copy_source(file.path)
        if source is None or not isinstance(one.upload, SharedUpload):
            raise _CopyRefusedError
        try:
            with timed(self.paces.target, length):
                told = one.upload.copy_part(
                    part.number,
                    part.start,
                    source,
                    part.start,
                    length,
                    source_bytes=file.size_bytes,
                    last=part.is_last,
                )
        except StorageError as error:
            if error.kind in _REFUSALS:
                raise _CopyRefusedError from error
            if error.kind == "not-found":
                raise self._missing(file, error) from error
            raise
        if file.spans is not None:
            self._check_copied(one, part, told, file.spans.crc32c_of(part.start, part.stop))
        self.tally.add(copied_bytes=length)
        self._deadline.advanced(length)
        self._on_bytes(length)

    def _check_copied(self, one: _OpenFile, part: _Part, told: int | None, known: int) -> None:
        """Hold what the storage says it copied to what was written; where it says nothing, read."""
        if told == known:
            return
        self._read_through(one, part)
        if told is not None:
            raise _miscopied(one.file, part, told, known)

    def _read_through(self, one: _OpenFile, part: _Part) -> None:
        step = self._options.part_bytes
        with self._buffers.taken(min(step, part.stop - part.start)) as buffer:
            for start in range(part.start, part.stop, step):
                view = buffer[: min(step, part.stop - start)]
                self._read(one.file, start, view)
                self.tally.add(read_bytes=len(view))
                if one.check is not None:
                    one.check.take(start, view)

    def _read(self, file: FileToCopy, start: int, view: memoryview) -> None:
        try:
            with timed(self.paces.source, len(view)):
                self._source.read_into(file.path, start, view, size_bytes=file.size_bytes)
        except IntegrityError as error:
            # Stores name a file in their own way; callers compare paths.
            error.path = file.path
            raise
        except StorageError as error:
            if error.kind != "not-found":
                raise
            raise (self._explain_missing(file.path) or error) from error

    def _missing(self, file: FileToCopy, error: StorageError) -> CheckpointError:
        """Return what to raise for a copy that something was missing for: source or upload."""
        try:
            self._source.stat(file.path)
        except StorageError as failure:
            if failure.kind == "not-found":
                return self._explain_missing(file.path) or failure
        return error


def _miscopied(file: FileToCopy, part: _Part, told: int, known: int) -> IntegrityError:
    return IntegrityError(
        f"The storage copied bytes [{part.start}, {part.stop}) of {file.path} to other bytes: "
        f"checksum {told:08x} instead of {known:08x}, while the source reads as it was written.",
        path=file.target,
        offset=part.start,
        next_step="Copy again, with copies='never' so that every byte is read and sent.",
    )
