"""Reads in parallel keep to their memory, use buffers again and stop where one fails."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import crc32c
import pytest
from commit_tools import CAS, DictBackend, Disk

from ckpt_storage.errors import IntegrityError, StorageError
from ckpt_storage.options import RetryPolicy, TransferOptions
from ckpt_storage.store.backend import Backend, Range
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.calls import AbandonedError
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import FaultBackend, Rule
from ckpt_storage.transfer.ranges import RangeRead, RangeReader

KIB = 1024
PART_BYTES = 64 * KIB


class CountingBackend(LocalBackend):
    """A folder that says it is remote, and counts how many reads are under way at a time.

    Each read waits until as many as `together` have been under way.
    """

    capabilities = dataclasses.replace(LocalBackend.capabilities, is_remote=True)

    def __init__(self, root: str, together: int) -> None:
        super().__init__(root)
        self.together = together
        self.most = 0
        self.buffers: set[int] = set()
        self._now = 0
        self._changed = threading.Condition()

    def read(self, path: str, ranges: Iterable[Range]) -> int:
        """Read, once enough others do."""
        with self._changed:
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self.together, timeout=5)
        try:
            return super().read(path, self._noted(ranges))
        finally:
            with self._changed:
                self._now -= 1

    def _noted(self, ranges: Iterable[Range]) -> Iterator[Range]:
        for start, view in ranges:
            self.buffers.add(id(view.obj))
            yield start, view


def content(count: int) -> bytes:
    """Return as many parts of bytes that tell them apart."""
    return b"".join(bytes([number]) * PART_BYTES for number in range(count))


def reads_of(count: int, got: dict[int, bytes]) -> list[RangeRead]:
    """Return the reads of all parts through buffers, each noted in `got` by its first byte."""

    def note(view: memoryview) -> None:
        got[view[0]] = bytes(view)

    starts = range(0, count * PART_BYTES, PART_BYTES)
    return [RangeRead(path="f", start=at, stop=at + PART_BYTES, done=note) for at in starts]


def options_for(parts: int, threads: int = 16) -> TransferOptions:
    """Return options with memory for that many parts, with the client's copy of each."""
    return TransferOptions(
        thread_count=threads,
        part_bytes=PART_BYTES,
        block_bytes=KIB,
        memory_limit_bytes=2 * parts * PART_BYTES,
    )


def read(store: Backend, options: TransferOptions, reads: list[RangeRead]) -> None:
    """Do the reads."""
    RangeReader(Store(store, url="test://"), options, Deadline("load", 60)).run(reads)


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_reads_of_one_process_keep_to_the_memory_limit(tmp_path: Path, parts: int) -> None:
    """Of two transfers together as many are under way as the memory allows one, and no more."""
    (tmp_path / "f").write_bytes(content(24))
    store = CountingBackend(str(tmp_path), parts)
    results: list[dict[int, bytes]] = [{}, {}]
    threads = [
        threading.Thread(target=read, args=(store, options_for(parts), reads_of(24, got)))
        for got in results
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert store.most == parts
    assert len(store.buffers) <= 2 * parts
    for got in results:
        assert b"".join(got[number] for number in range(24)) == content(24)


def test_memory_is_given_back_after_a_failure(tmp_path: Path) -> None:
    """A transfer that failed leaves the whole limit to the next one."""
    (tmp_path / "f").write_bytes(content(8))
    for _ in range(3):
        failing = CountingBackend(str(tmp_path), 1)
        reads = [*reads_of(8, {}), RangeRead(path="absent", start=0, stop=PART_BYTES)]
        with pytest.raises(StorageError):
            read(failing, options_for(2), reads)
    got: dict[int, bytes] = {}
    store = CountingBackend(str(tmp_path), 2)
    read(store, options_for(2), reads_of(8, got))
    assert store.most == 2
    assert len(got) == 8


def test_a_buffer_whose_read_failed_is_not_used_again(tmp_path: Path) -> None:
    """Nothing is delivered after a failed check, and the failure is what is raised."""
    (tmp_path / "f").write_bytes(content(4))
    delivered: list[int] = []

    def refuse(view: memoryview) -> None:
        delivered.append(view[0])
        if view[0] == 1:
            raise IntegrityError("no", path="f", offset=1)

    reads = [dataclasses.replace(each, done=refuse) for each in reads_of(4, {})]
    store = LocalBackend(str(tmp_path))
    with pytest.raises(IntegrityError, match="no"):
        read(store, options_for(4, threads=1), reads)
    assert delivered == [0, 1]


def test_a_read_that_hangs_keeps_no_memory_from_others(tmp_path: Path) -> None:
    """A read that was given up delivers nothing, and the next transfer has the whole limit."""
    (tmp_path / "f").write_bytes(content(4))
    faults = FaultBackend(LocalBackend(str(tmp_path)), [Rule(action="hang", operation="read")])
    store = Store(faults, url="hung://", request_timeout_s=1.0)
    got: dict[int, bytes] = {}
    options = dataclasses.replace(options_for(1, threads=1), memory_limit_bytes=PART_BYTES)
    with pytest.raises(AbandonedError):
        RangeReader(store, options, Deadline("load", 60)).run(reads_of(4, got))
    again: dict[int, bytes] = {}
    RangeReader(store, options, Deadline("load", 5)).run(reads_of(4, again))
    assert b"".join(again[number] for number in range(4)) == content(4)
    faults.script.release()
    store.close()
    assert got == {}


class TwoFaced(DictBackend):
    """The first read breaks off after a good piece; the second brings a damaged one."""

    attempt_count = 0

    def read(self, path: str, ranges: Iterable[Range]) -> int:
        """Fill piece by piece."""
        self.attempt_count += 1
        for number, (start, view) in enumerate(ranges):
            if number and self.attempt_count == 1:
                raise ConnectionResetError
            view[:] = self.disk.files[path][start : start + len(view)]
            if not number and self.attempt_count == 2:
                view[3] ^= 1
        return len(self.disk.files[path])


def test_a_piece_that_is_read_again_is_checked_again() -> None:
    """The bytes that stay in the target are those of the last attempt, and all of them count."""
    disk, block = Disk(), bytes(range(256)) * 1024
    disk.put("x", block * 8)
    backend = TwoFaced(disk, dataclasses.replace(CAS, is_remote=False))
    store = Store(backend, url="dict://root", policy=RetryPolicy(first_delay_s=0.0))
    wrong: list[int] = []

    def check(view: memoryview, at: int) -> None:
        starts = range(0, len(view), len(block))
        crcs = [crc32c.crc32c(view[start : start + len(block)]) for start in starts]
        expected = crc32c.crc32c(block)
        wrong.extend(at + i for i, crc in zip(starts, crcs, strict=True) if crc != expected)

    size = 8 * len(block)
    into = memoryview(bytearray(size))
    whole = RangeRead(path="x", start=0, stop=size, into=into, check=check, block_bytes=len(block))
    RangeReader(store, TransferOptions(thread_count=1), Deadline("load", 60)).run([whole])
    store.close()
    assert backend.attempt_count == 2
    assert wrong == [0]
