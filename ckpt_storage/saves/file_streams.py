"""A save whose content is files that are written piece by piece: `FilesSave`, on one rank.

Each file is a tensor of bytes named `files.<name>`, cut into chunks of at most `PIECE_BYTES`, so
that its length need not be known before its last byte, and every reader of checkpoints reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_storage.commit.attempt import SaveTicket
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.report import RankReport
from ckpt_storage.coordination.failures import as_checkpoint_errors
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.format.names import FILES_PREFIX
from ckpt_storage.observe.stats import OperationStats
from ckpt_storage.store import redacted_url
from ckpt_storage.store.deadline import LOOK_S, Deadline

from .options import SaveOptions
from .save import run_save
from .session import SaveSession
from .shardfile import Item, ShardFileWriter, WrittenShard

PIECE_BYTES = 32 << 20
"""The longest chunk; a stream has one chunk in memory."""

_UNKNOWN_BYTES = 64 << 30
"""The length for which uploads are laid out where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenFiles:
    """What one rank wrote: its report, and the length of each file."""

    report: RankReport
    sizes: Mapping[str, int]


class FilesSave:
    """One save of files on one rank; every rank makes one, writes its files, and commits.

    The ranks meet in a thread of its own, which waits until all files of this rank are written.
    Methods are safe in any thread.
    """

    def __init__(self, ranks: RankGroup, url: str, options: SaveOptions) -> None:
        self._ranks = ranks
        self._url = url
        self._options = options
        self._lock = threading.Lock()
        self._files: dict[int, WrittenShard] = {}
        self._sizes: dict[str, int] = {}
        self._number = 0
        self._error: BaseException | None = None
        self._session: SaveSession | None = None
        self._ticket: SaveTicket | None = None
        self._deadline: Deadline | None = None
        # Set once files may be written, or the save has ended.
        self._ready = threading.Event()
        self._is_written = threading.Event()
        self._result: Future[CheckpointInfo] = Future()
        thread = threading.Thread(target=self._run, name=f"ckpt-storage files {url}", daemon=True)
        thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the save has ended, with success or an error."""
        return self._result.done()

    def open(self, name: str, *, planned_bytes: int | None = None) -> FileStream:
        """Return a stream for a new file. Raises why the save cannot go on."""
        self._ready.wait()  # its thread ends by deadlines of its own
        session, ticket, deadline = self._session, self._ticket, self._deadline
        if self._result.done():
            self._result.result()
        if session is None or ticket is None or deadline is None or self._result.done():
            raise InvalidInputError(
                f"{name} comes too late: the save to {redacted_url(self._url)} has ended.",
                next_step="Save under another name.",
            )
        with self._lock:
            if name in self._sizes:
                raise InvalidInputError(
                    f"{name} is written twice in one save to {redacted_url(self._url)}.",
                    next_step="Give each item of each rank a file of its own (layout).",
                )
            self._sizes[name] = 0
            number, self._number = self._number, self._number + 1
        return FileStream(
            self,
            name,
            number,
            open_shard=lambda: session.open_shard(
                ticket, number, deadline, planned_bytes=planned_bytes or _UNKNOWN_BYTES
            ),
        )

    def has(self, name: str) -> bool:
        """Return whether this rank has begun a file."""
        with self._lock:
            return name in self._sizes

    def finish(self) -> CheckpointInfo:
        """Commit once all ranks have called this; idempotent. Raises as `save`, on all ranks."""
        self._is_written.set()
        return self._result.result()

    def fail(self, error: BaseException) -> BaseException:
        """Fail the save on all ranks; return the error of the save, which may be a peer's."""
        with self._lock:
            self._error = self._error or error
        self._is_written.set()
        return self._result.exception() or error

    def add(self, stream: FileStream, size_bytes: int, file: WrittenShard) -> None:
        """Take a file whose stream has ended."""
        with self._lock:
            self._sizes[stream.name] = size_bytes
            self._files[stream.number] = file

    # The thread.

    def _run(self) -> None:
        what = f"the save to {redacted_url(self._url)}"
        try:
            with as_checkpoint_errors(what, self._ranks.global_rank, in_background=True):
                info = run_save(
                    self._ranks, self._url, self._options, self._begin, in_background=True
                )
        except CheckpointError as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(info)
        finally:
            self._ready.set()

    def _begin(self, _operation: Operation, session: SaveSession) -> FilesSave:
        self._session = session
        return self

    # The steps of `run_save`.

    def propose(self) -> object:
        """Return nothing: ranks need no plan."""
        return None

    def decide(self, proposals: Sequence[Any]) -> object:
        """Return the ticket of the save, for all ranks."""
        assert self._session is not None  # noqa: S101  # it has begun
        return self._session.begin(len(proposals), 0, ())

    def accept(self, answer: object) -> str | None:
        """Take the ticket."""
        assert isinstance(answer, SaveTicket)  # noqa: S101  # as decided
        self._ticket = answer
        return answer.save_id

    def write(self) -> object:
        """Wait until the files of this rank are written; return its report."""
        session, ticket = self._session, self._ticket
        assert session is not None and ticket is not None  # noqa: S101, PT018  # it has accepted
        deadline = self._deadline = session.begin_writing(ticket)
        self._ready.set()
        while not self._is_written.wait(LOOK_S):
            deadline.check(f"Writing the files of {session.url}")
        with self._lock:
            if self._error is not None:
                raise self._error
            files = [self._files[number] for number in sorted(self._files)]
            sizes = dict(self._sizes)
        if len(files) < self._number:
            raise CheckpointError(
                f"{self._number - len(files)} files of the save to {session.url} were not closed.",
                phase="write",
                next_step="Save again; see the log for the error that came first.",
            )
        report = session.end_writing(ticket, files, deadline)
        return _WrittenFiles(report=report, sizes=sizes)

    def commit(self, reports: Sequence[Any], stats: OperationStats) -> CheckpointInfo:
        """Commit the files of all ranks; coordinator only."""
        assert self._session is not None  # noqa: S101  # it has begun
        sizes: dict[str, int] = {}
        for rank, files in enumerate(reports):
            for name, size_bytes in files.sizes.items():
                if name in sizes:
                    raise InvalidInputError(
                        f"Rank {rank} and a lower rank both wrote {name} of {self._session.url}.",
                        rank=rank,
                        phase="commit",
                        next_step="Give each rank files of its own: a layout with '{rank}'.",
                    )
                sizes[name] = size_bytes
        return self._session.finish(_metadata_of(sizes), [each.report for each in reports], stats)

    def close(self) -> None:
        """Do nothing: the streams hold what there is to release."""


class FileStream:
    """Writes one file of a `FilesSave`; one thread at a time. `close` or `abort` ends it."""

    def __init__(
        self,
        save: FilesSave,
        name: str,
        number: int,
        *,
        open_shard: Callable[[], tuple[str, ShardFileWriter]],
    ) -> None:
        self.name = name
        self.number = number
        self._save = save
        self._path, self._shard = open_shard()
        self._size_bytes = 0
        self._piece = np.empty(0, dtype=np.uint8)
        self._filled = 0
        self._is_over = False

    def write(self, data: memoryview) -> None:
        """Append bytes, which are copied."""
        source = np.frombuffer(data, dtype=np.uint8)
        while len(source):
            if self._filled == len(self._piece):
                self._flush()
                # The storage may still read the piece before.
                self._piece = np.empty(PIECE_BYTES, dtype=np.uint8)
            count = min(len(source), len(self._piece) - self._filled)
            self._piece[self._filled : self._filled + count] = source[:count]
            self._filled += count
            source = source[count:]

    def _flush(self) -> None:
        data = self._piece[: self._filled].data
        item = Item(
            fqn=f"{FILES_PREFIX}{self.name}",
            dtype="uint8",
            offsets=(self._size_bytes,),
            sizes=(len(data),),
            payload_bytes=len(data),
            views=lambda _: [data],
        )
        if data or not self._size_bytes:
            self._shard.append(item)
        self._size_bytes += len(data)
        self._filled = 0

    def close(self) -> None:
        """Make the file durable; it is seen once the save is committed. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        if self._filled or not self._size_bytes:
            self._flush()
        self._save.add(self, self._size_bytes, self._shard.complete(self._path))

    def abort(self, error: BaseException) -> BaseException:
        """Discard the file and fail the save because of `error`; return as `FilesSave.fail`.

        Idempotent.
        """
        if not self._is_over:
            self._is_over = True
            self._shard.abort_after(error)
        return self._save.fail(error)


def _metadata_of(sizes: Mapping[str, int]) -> Metadata:
    """Return DCP's metadata of files of these lengths."""
    return Metadata(
        state_dict_metadata={
            f"{FILES_PREFIX}{name}": TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.uint8),
                size=torch.Size([size_bytes]),
                chunks=[
                    ChunkStorageMetadata(
                        offsets=torch.Size([start]),
                        sizes=torch.Size([min(PIECE_BYTES, size_bytes - start)]),
                    )
                    for start in range(0, max(size_bytes, 1), PIECE_BYTES)
                ],
            )
            for name, size_bytes in sizes.items()
        }
    )
