"""Whole files from one store to another: many at a time, in bounded memory, checked on their way.

A file becomes visible at the target only complete, so one that is there after a crash is whole.
Where the target's storage can copy from the source by itself, no byte travels through this
process, except to be checked where the storage tells no checksum of what it copied.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError
from ckpt_storage.export.relay import Buffers, Paces, PartWorkers, timed
from ckpt_storage.format.file_checks import SpanCheck
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.writing import part_bytes_for

from .partcopies import (
    CopyRefusedError,
    FilePart,
    FileToCopy,
    OpenFile,
    PartCopier,
    Tally,
    copied_parts,
    streamed_parts,
)

Copies = Literal["auto", "always", "never"]
"""Which files the storage copies by itself: where that pays, wherever it can, none."""


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
        self._source = source.bounded(deadline, throttled=self.paces.source.slowed_down)
        self._target = target.bounded(deadline, throttled=self.paces.target.slowed_down)
        self._options = options
        self._deadline = deadline
        self._on_bytes = on_bytes
        self._wanted: Copies = copies
        self._copies = False
        self._buffers = Buffers()
        self._part_copier = PartCopier(
            self._source,
            options=options,
            deadline=deadline,
            paces=self.paces,
            buffers=self._buffers,
            tally=self.tally,
            on_bytes=on_bytes,
            explain_missing=explain_missing,
        )
        self._open: dict[str, OpenFile] = {}
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
            and capabilities.tokens_travel
            and capabilities.copy_min_bytes is not None
            and self._target.can_copy_from(self._source, at_any_price=self._wanted == "always")
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
                    self._source.read(file.path, [(start, new)], size_bytes=file.size_bytes)
                self.tally.add(read_bytes=2 * count)
                self._deadline.advanced(2 * count)
                if old != new:
                    return False
        return True

    def _read_target(self, file: FileToCopy, start: int, view: memoryview) -> None:
        with timed(self.paces.target, len(view)):
            self._target.read(file.target, [(start, view)], size_bytes=file.size_bytes)

    def _submit(self, workers: PartWorkers, file: FileToCopy) -> None:
        """Hand a file to the workers: whole if it is one part, else part by part."""
        parts = self._copied_parts(file)
        is_copied = bool(parts)
        parts = parts or self._streamed_parts(file)
        if len(parts) <= 1 or not self._target.capabilities.parallel_parts:
            workers.submit(partial(self._whole, file))
            return
        one = None
        if is_copied:
            # The first copy tells whether the storage will, before the others are asked for.
            one = self._begun(file, parts, is_copied=True)
            try:
                with workers.claimed():
                    self._part_copier.copy(one, parts[0])
            except CopyRefusedError:
                self._wanted, self._copies = "never", False
                self._give_up(one)
                one = None
            else:
                one.ended_part()
                parts = parts[1:]
        if one is None:
            parts = self._streamed_parts(file)
            one, is_copied = self._begun(file, parts, is_copied=False), False
        step = self._part_copier.copy if is_copied else self._part_copier.stream
        for part in parts:
            workers.submit(partial(self._part, one, part, step))

    def _part(
        self, one: OpenFile, part: FilePart, step: Callable[[OpenFile, FilePart], None]
    ) -> None:
        self._deadline.check(f"Copying {one.file.path}")
        try:
            step(one, part)
        except CopyRefusedError as refusal:
            # It did copy another part of this file, so this is no matter of what it can do.
            raise refusal.__cause__ or refusal from None
        if one.ended_part():
            self._finish(one)

    def _whole(self, file: FileToCopy) -> None:
        """Copy a file in this thread, its parts in order."""
        self._deadline.check(f"Copying {file.path}")
        if not file.size_bytes:
            self._target.put(file.target, b"")
            self.tally.add(file_count=1)
            return
        parts = self._copied_parts(file)
        if parts:
            one = self._begun(file, parts, is_copied=True)
            try:
                for part in parts:
                    self._part_copier.copy(one, part)
            except CopyRefusedError:
                self._wanted, self._copies = "never", False
                self._give_up(one)
            else:
                self._finish(one)
                return
        parts = self._streamed_parts(file)
        one = self._begun(file, parts, is_copied=False)
        for part in parts:
            self._part_copier.stream(one, part)
        self._finish(one)

    def _begun(self, file: FileToCopy, parts: Sequence[FilePart], *, is_copied: bool) -> OpenFile:
        one = OpenFile(file, parts, self._target.upload(file.target, copies=is_copied))
        with self._open_lock:
            self._open[file.target] = one
        return one

    def _finish(self, one: OpenFile) -> None:
        one.finish()
        with self._open_lock:
            del self._open[one.file.target]
        self._deadline.ended_file()
        self.tally.add(file_count=1)

    def _give_up(self, one: OpenFile) -> None:
        # Open until then: what fails here is aborted again when the copy is given up.
        one.upload.abort()
        with self._open_lock:
            del self._open[one.file.target]

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

    def _streamed_parts(self, file: FileToCopy) -> list[FilePart]:
        return streamed_parts(file, self._target.capabilities, self._options)

    def _copied_parts(self, file: FileToCopy) -> list[FilePart]:
        """Return the parts that the storage is to copy, none where it does not copy the file."""
        return copied_parts(file, self._target.capabilities) if self._copies else []
