"""The system calls of other systems, on a real file system."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from ckpt_storage.store.backends.posix import Posix


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A new file, open for writing."""
    opened = Posix().open_new(str(tmp_path / "x"))
    yield opened
    os.close(opened)


@pytest.mark.parametrize("number", [None, errno.ENOTTY, errno.EIO])
def test_where_fsync_leaves_the_drives_cache_the_stronger_call_is_made(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    """MacOS has F_FULLFSYNC; fsync follows where it is not known, never where it failed."""
    calls: list[str] = []

    def full(fd: int, command: int) -> int:
        os.fstat(fd)
        assert command == 51
        calls.append("full")
        if number is not None:
            raise OSError(number, os.strerror(number))
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    syncs: list[Callable[[], None]] = [
        lambda: Posix().fsync(fd),
        lambda: Posix().fsync_folder(str(tmp_path)),
    ]
    for sync in syncs:
        calls.clear()
        with pytest.raises(OSError, match="error") if number == errno.EIO else nullcontext():
            sync()
        assert calls == (["full"] if number in {None, errno.EIO} else ["full", "fsync"])
