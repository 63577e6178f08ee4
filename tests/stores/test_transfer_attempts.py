"""A read that is tried again is checked again: what one attempt brought vouches for no other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import crc32c
from commit_tools import CAS, DictBackend, Disk

from ckpt_storage.options import RetryPolicy, TransferOptions
from ckpt_storage.store.backend import Range
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.ranges import RangeRead, RangeReader


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
    backend = TwoFaced(disk, replace(CAS, is_remote=False))
    store = Store(backend, url="dict://root", policy=RetryPolicy(first_delay_s=0.0))
    wrong: list[int] = []

    def check(view: memoryview, at: int) -> None:
        starts = range(0, len(view), len(block))
        crcs = [crc32c.crc32c(view[start : start + len(block)]) for start in starts]
        expected = crc32c.crc32c(block)
        wrong.extend(at + i for i, crc in zip(starts, crcs, strict=True) if crc != expected)

    read = RangeRead(
        path="x",
        start=0,
        stop=8 * len(block),
        into=memoryview(bytearray(8 * len(block))),
        check=check,
        edge_before=lambda count: count - count % len(block),
    )
    options = TransferOptions(thread_count=1)
    RangeReader(store, options, Deadline("load", 60)).run([read])
    store.close()
    assert backend.attempt_count == 2
    assert wrong == [0]
