"""A read that is tried again is checked again: what one attempt brought vouches for no other."""

from __future__ import annotations

import crc32c
import pytest
from commit_tools import CAS, DictStore, Disk

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy, TransferOptions
from ckpt_storage.store.base import Arrived
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.retry import RetryStore
from ckpt_storage.transfer.fetching import Fetch, run_fetches


class TwoFacedStore(DictStore):
    """The first read breaks off after a good piece; the second brings a damaged one."""

    attempt_count = 0

    def read_into(
        self,
        path: str,
        start: int,
        target: memoryview,
        *,
        size_bytes: int | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        """Fill, and report two pieces of equal length, as a disk does."""
        super().read_into(path, start, target, size_bytes=size_bytes)
        self.attempt_count += 1
        if self.attempt_count == 2:
            target[3] ^= 1
        if arrived is not None:
            arrived(len(target) // 2)
        if self.attempt_count == 1:
            raise StorageError("Broken off.", kind="connection", retryable=True)
        if arrived is not None:
            arrived(len(target))


class GrowingStore(TwoFacedStore):
    """Its second read reports more at first than the one that broke off had reported."""

    def read_into(
        self,
        path: str,
        start: int,
        target: memoryview,
        *,
        size_bytes: int | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        """Fill, and report a larger piece at each attempt, as a network does."""

        def in_steps(count: int) -> None:
            if arrived is not None:
                arrived(count if self.attempt_count == 2 else count // 2)

        super().read_into(path, start, target, size_bytes=size_bytes, arrived=in_steps)


@pytest.mark.parametrize("kind", [TwoFacedStore, GrowingStore])
def test_a_piece_that_is_read_again_is_checked_again(kind: type[TwoFacedStore]) -> None:
    """The bytes that stay in the target are those of the last attempt, and all of them count."""
    store = kind(Disk(), CAS)
    block = bytes(range(256))
    store.write("x", block * 8)
    wrong: list[int] = []

    def check(view: memoryview, at: int) -> None:
        starts = range(0, len(view), len(block))
        crcs = [crc32c.crc32c(view[start : start + len(block)]) for start in starts]
        expected = crc32c.crc32c(block)
        wrong.extend(at + i for i, crc in zip(starts, crcs, strict=True) if crc != expected)

    fetch = Fetch(
        path="x",
        start=0,
        stop=8 * len(block),
        target=memoryview(bytearray(8 * len(block))),
        check=check,
        check_bytes=len(block),
    )
    retrying = RetryStore(store, policy=RetryPolicy(first_delay_s=0.0))
    options = TransferOptions(thread_count=1)
    run_fetches(retrying, [fetch], options=options, deadline=Deadline("load", 60))
    retrying.close()
    assert store.attempt_count == 2
    assert wrong == [0]
