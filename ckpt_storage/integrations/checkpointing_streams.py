"""Files of torch_checkpointing as streams: written into a save, read out of a checkpoint."""

from __future__ import annotations

import gc
import io
import traceback
from typing import Any

import numpy as np

from ckpt_storage.coordination.failures import picklable_copy
from ckpt_storage.errors import CheckpointError, RankFailedError, StorageError
from ckpt_storage.format.names import FILES_PREFIX
from ckpt_storage.inspect.checkpoint import Checkpoint
from ckpt_storage.inspect.reading import read_into
from ckpt_storage.saves.file_streams import FileStream

__all__ = ["ReadStream", "WriteStream"]


class WriteStream(io.IOBase):
    """A file of a save as a stream; an error in its `with` block fails the save."""

    def __init__(self, stream: FileStream) -> None:
        self._stream = stream

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self._stream.abort(error)
        self.close()

    def write(self, data: Any) -> int:
        """Append bytes, which are copied."""
        view = memoryview(data).cast("B")
        try:
            self._stream.write(view)
        except BaseException as error:
            self._fail(error)
            raise
        return len(view)

    def close(self) -> None:
        """Make the file durable; it can be read once the save is committed."""
        if not self.closed:
            super().close()
            try:
                self._stream.close()
            except BaseException as error:
                self._fail(error)
                raise

    def _fail(self, error: BaseException) -> None:
        """Fail the save. Raises its error if this error only follows from that of another rank."""
        first = self._stream.abort(error)
        if isinstance(error, StorageError) and isinstance(first, RankFailedError):
            raise first from error


class ReadStream(io.RawIOBase):
    """Reads a file of a checkpoint; every byte is held to its checksum."""

    def __init__(self, checkpoint: Checkpoint, file: str, size_bytes: int) -> None:
        self._checkpoint = checkpoint
        self._file = file
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readall(self) -> bytes:
        """Return all that follows."""
        data = bytearray(max(0, self._size_bytes - self._position))
        self.readinto(data)
        return bytes(data)

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, as far as the file goes. Raises `IntegrityError` naming what is damaged.

        An error refers to no memory of the caller, who may want to close it.
        """
        failure: CheckpointError | None = None
        count = 0
        with memoryview(buffer) as whole, whole.cast("B") as view:
            count = max(0, min(len(view), self._size_bytes - self._position))
            try:
                self._fill(view[:count])
            except CheckpointError as error:
                failure = picklable_copy(error)
                _clear_frames(error)
        if failure is not None:
            gc.collect()
            raise failure
        self._position += count
        return count

    def _fill(self, view: memoryview) -> None:
        if len(view):
            positions = range(self._position, self._position + len(view))
            array = np.frombuffer(view, dtype="u1")
            handle = self._checkpoint._handle  # noqa: SLF001  # of this package
            read_into(handle, f"{FILES_PREFIX}{self._file}", (positions,), array)


def _clear_frames(error: BaseException | None) -> None:
    """Drop the variables of the frames that an error and its causes lead to."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
