"""One part of a file from one store to another: sent, or copied by the storage, and checked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError
from ckpt_storage.export.relay import Buffers, Paces, timed
from ckpt_storage.format.file_checks import SpanCheck, Spans
from ckpt_storage.options import MIB, TransferOptions
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.writing import part_bytes_for

_LEAST_COPY_BYTES = MIB
"""Below this a copy by the storage takes more requests than reading and writing."""

_COPY_BYTES = 256 * MIB
"""Most of one copy: a storage takes seconds for it, and several go on at a time."""

_MOST_PARTS = 9_000


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Bytes `[start, stop)` of a file; the parts of a file are numbered from 0."""

    number: int
    start: int
    stop: int
    is_last: bool


def streamed_parts(
    file: FileToCopy, capabilities: Capabilities, options: TransferOptions
) -> list[FilePart]:
    """Return the parts that a file is read and sent in.

    Raises `InvalidInputError` if the storage or the memory limit does not allow it.
    """
    size = part_bytes_for(capabilities, options, file.size_bytes)
    starts = range(0, file.size_bytes, size)
    return [
        FilePart(
            number=number,
            start=start,
            stop=min(start + size, file.size_bytes),
            is_last=start == starts[-1],
        )
        for number, start in enumerate(starts)
    ]


def copied_parts(file: FileToCopy, capabilities: Capabilities) -> list[FilePart]:
    """Return the parts that a storage copies a file in, of about equal length, cut between blocks.

    None where the file is too short for it or the storage cannot copy it so.
    """
    total = file.size_bytes
    if total < _LEAST_COPY_BYTES:
        return []
    most = capabilities.max_part_count or _MOST_PARTS
    size = max(_COPY_BYTES, -(-total // min(most, _MOST_PARTS)))
    least, limit = capabilities.copy_min_bytes or 1, capabilities.copy_max_bytes
    # A part that is moved to the edge of a block must not get too short.
    count = max(1, min(-(-total // size), total // (least + MIB)))
    cuts = [total * i // count for i in range(count + 1)]
    if file.spans is not None:
        cuts = sorted({file.spans.edge_before(cut) for cut in cuts})
    parts = [
        FilePart(number=number, start=start, stop=stop, is_last=stop == total)
        for number, (start, stop) in enumerate(pairwise(cuts))
    ]
    fits = all(
        (limit is None or part.stop - part.start <= limit)
        and (part.is_last or part.stop - part.start >= least)
        for part in parts
    )
    return parts if fits else []


_REFUSALS = frozenset({"permission", "unsupported"})


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


class CopyRefusedError(Exception):
    """The storage will not copy; the bytes have to be streamed."""


class OpenFile:
    """One file on its way: its upload, its check, and how many parts are still to come."""

    def __init__(self, file: FileToCopy, parts: Sequence[FilePart], upload: Upload) -> None:
        self.file = file
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
        # The name stands for these very bytes, whoever put them there.
        self.upload.complete(self.file.size_bytes)


class PartCopier:
    """Moves parts of open files, and tells `tally`, `deadline` and `on_bytes` of what moved."""

    def __init__(  # all named
        self,
        source: Store,
        *,
        options: TransferOptions,
        deadline: Deadline,
        paces: Paces,
        buffers: Buffers,
        tally: Tally,
        on_bytes: Callable[[int], None],
        explain_missing: Callable[[str], CheckpointError | None],
    ) -> None:
        self._source = source
        self._options = options
        self._deadline = deadline
        self._paces = paces
        self._buffers = buffers
        self._tally = tally
        self._on_bytes = on_bytes
        self._explain_missing = explain_missing

    def stream(self, one: OpenFile, part: FilePart) -> None:
        """Read a part, check it, and send it."""
        file, length = one.file, part.stop - part.start
        with self._buffers.taken(length) as buffer:
            view = buffer[:length]
            self._read(file, part.start, view)
            if one.check is not None:
                one.check.take(part.start, view)
            with timed(self._paces.target, length):
                one.upload.write_part(part.number, part.start, [view], last=part.is_last)
        self._tally.add(read_bytes=length, sent_bytes=length)
        self._deadline.advanced(length)
        self._on_bytes(length)

    def copy(self, one: OpenFile, part: FilePart) -> None:
        """Have the storage copy a part; check it by the checksum that it tells, or by reading.

        Raises `CopyRefusedError` if the storage will not.
        """
        file, length = one.file, part.stop - part.start
        source = self._source.copy_source(file.path)
        if source is None:
            raise CopyRefusedError
        try:
            with timed(self._paces.target, length):
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
                raise CopyRefusedError from error
            if error.kind == "not-found":
                raise self._missing(file, error) from error
            raise
        if file.spans is not None:
            self._check_copied(one, part, told, file.spans.crc32c_of(part.start, part.stop))
        self._tally.add(copied_bytes=length)
        self._deadline.advanced(length)
        self._on_bytes(length)

    def _check_copied(self, one: OpenFile, part: FilePart, told: int | None, known: int) -> None:
        """Hold what the storage says it copied to what was written; where it says nothing, read."""
        if told == known:
            return
        self._read_through(one, part)
        if told is not None:
            raise _miscopied(one.file, part, told, known)

    def _read_through(self, one: OpenFile, part: FilePart) -> None:
        step = self._options.part_bytes
        with self._buffers.taken(min(step, part.stop - part.start)) as buffer:
            for start in range(part.start, part.stop, step):
                view = buffer[: min(step, part.stop - start)]
                self._read(one.file, start, view)
                self._tally.add(read_bytes=len(view))
                if one.check is not None:
                    one.check.take(start, view)

    def _read(self, file: FileToCopy, start: int, view: memoryview) -> None:
        try:
            with timed(self._paces.source, len(view)):
                self._source.read(file.path, [(start, view)], size_bytes=file.size_bytes)
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


def _miscopied(file: FileToCopy, part: FilePart, told: int, known: int) -> IntegrityError:
    return IntegrityError(
        f"The storage copied bytes [{part.start}, {part.stop}) of {file.path} to other bytes: "
        f"checksum {told:08x} instead of {known:08x}, while the source reads as it was written.",
        path=file.target,
        offset=part.start,
        next_step="Copy again, with copies='never' so that every byte is read and sent.",
    )
