"""The system calls that the C library is asked for, on a real file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from ckpt_storage.store.backends import posix
from ckpt_storage.store.backends.posix import Posix


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A new file, open for writing."""
    opened = Posix().open_new(str(tmp_path / "x"))
    yield opened
    os.close(opened)


def test_no_function_of_the_c_library_is_called_by_linux_structs_elsewhere(
    tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`statfs` of macOS writes 2,168 bytes where Linux's writes 120; others differ in numbers."""
    posix._function.cache_clear()  # noqa: SLF001  # what an earlier test looked up

    def look(*_: object, **__: object) -> None:
        raise AssertionError("the C library was asked")

    monkeypatch.setattr(ctypes, "CDLL", look)
    # The test can fail: on Linux the same calls ask the library.
    with pytest.raises(AssertionError):
        Posix().start_write_back(fd, 0, 4096)
    monkeypatch.setattr(sys, "platform", "darwin")
    calls: list[Callable[[], None]] = [
        lambda: Posix().start_write_back(fd, 0, 4096),
        lambda: Posix().rename_new(str(tmp_path / "x"), str(tmp_path / "y")),
    ]
    for call in calls:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
            call()


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
