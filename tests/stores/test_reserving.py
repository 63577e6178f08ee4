"""Space set aside before a file is written: it tells of a full disk, and hinders nothing."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from local_stores import local_store

from ckpt_storage.errors import StorageError
from ckpt_storage.store.backends.posix import Posix
from ckpt_storage.store.upload import Upload
from ckpt_storage.testing.faults import Rule
from ckpt_storage.testing.posix_faults import FaultPosix

MIB = 1 << 20
DATA = bytes(range(256)) * (10 << 10)
MORE_BYTES = len(DATA) + MIB


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one, which knows reservations."""
    memory = Path("/dev/shm")  # noqa: S108  # TemporaryDirectory chooses a name of its own there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


class Told(FaultPosix):
    """Calls that fail to order, on a file system that is said to be full, and not to compress."""

    def __init__(self, rules: Sequence[Rule] = (), *, free: int | None = None) -> None:
        super().__init__(rules)
        self._free = free

    def free_bytes(self, path: str) -> int:
        """Return what is said to be free."""
        return super().free_bytes(path) if self._free is None else self._free

    def may_compress(self, path: str) -> bool:
        """Return what is said of the file system."""
        del path
        return False

    def count(self, operation: str) -> int:
        """Return how often an operation was asked for."""
        return [call.operation for call in self.script.calls].count(operation)


def failing(number: int, **kw: Any) -> Told:
    """Return calls whose reservations fail."""
    return Told([Rule(action="error", operation="allocate", errno=number, hit_count=None)], **kw)


def begun(root: Path, posix: Posix, name: str = "x", *, hint: int | None = None) -> Upload:
    """Begin an upload to the local store."""
    return local_store(root, posix=posix).upload(name, size_hint=hint)


def written(upload: Upload) -> Upload:
    """Send the content, without completing it."""
    for number, start in enumerate(range(0, len(DATA), MIB)):
        part = memoryview(DATA)[start : start + MIB]
        upload.write_part(number, start, [part], last=start + MIB >= len(DATA))
    return upload


def blocks_of(root: Path) -> tuple[int, int]:
    """Return length and blocks that the content has on this disk without a reservation."""
    written(begun(root, Posix(), "plain")).complete(len(DATA))
    found = (root / "plain").stat()
    return found.st_size, found.st_blocks


def test_one_that_was_too_large_takes_no_space_and_no_length(root: Path) -> None:
    """The finished file has the blocks of its content, as one that was not reserved has."""
    posix = Told()
    written(begun(root, posix, hint=MORE_BYTES)).complete(len(DATA))
    assert posix.count("allocate") == 1
    found = (root / "x").stat()
    assert (found.st_size, found.st_blocks) == blocks_of(root)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_before_a_byte_is_sent(root: Path, number: int) -> None:
    """Beginning fails with kind "no-space", says how much was wanted, and leaves nothing."""
    posix = failing(number, free=100 if number == errno.ENOSPC else None)
    upload = begun(root, posix, hint=MORE_BYTES)
    with pytest.raises(StorageError, match=f"{MORE_BYTES} bytes are to be written") as caught:
        written(upload)
    assert (caught.value.kind, caught.value.retryable) == ("no-space", False)
    assert posix.count("pwritev") == 0
    assert posix.open_count == 0
    assert list(root.iterdir()) == []
