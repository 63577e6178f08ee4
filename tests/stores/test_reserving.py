"""Space set aside before a file is written: it tells of a full disk, and hinders nothing."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_stores import local_store

from ckpt_storage.errors import StorageError
from ckpt_storage.store.backends.posix import Posix
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


def blocks_of(root: Path, posix: Posix, *, hint: int | None) -> tuple[int, int]:
    """Upload the content; return length and blocks of the file."""
    upload = local_store(root, posix=posix).upload(f"x-{hint}", size_hint=hint)
    for number, start in enumerate(range(0, len(DATA), MIB)):
        part = memoryview(DATA)[start : start + MIB]
        upload.write_part(number, start, [part], last=start + MIB >= len(DATA))
    upload.complete(len(DATA))
    found = (root / f"x-{hint}").stat()
    return found.st_size, found.st_blocks


def test_one_that_was_too_large_takes_no_space_and_no_length(root: Path) -> None:
    """The finished file has the blocks of its content, as one that was not reserved has."""
    posix = FaultPosix()
    plain = blocks_of(root, Posix(), hint=None)
    assert blocks_of(root, posix, hint=MORE_BYTES) == plain
    assert "allocate" in [call.operation for call in posix.script.calls]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_before_a_byte_is_sent(root: Path, number: int) -> None:
    """Beginning fails with kind "no-space", says how much was wanted, and leaves nothing."""
    posix = FaultPosix([Rule(action="error", operation="allocate", errno=number, hit_count=None)])
    with pytest.raises(StorageError, match=f"{MORE_BYTES} bytes are to be written") as caught:
        blocks_of(root, posix, hint=MORE_BYTES)
    assert (caught.value.kind, caught.value.retryable) == ("no-space", False)
    assert "pwritev" not in [call.operation for call in posix.script.calls]
    assert posix.open_count == 0
    assert list(root.iterdir()) == []
