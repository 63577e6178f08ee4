"""What `verify` reads is judged while it arrives, wherever the pieces end."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import crc32c
import pytest
from commit_tools import CAS, DictBackend, Disk

from ckpt_storage.inspect.shardspots import ArrivedSpans, Span
from ckpt_storage.options import RetryPolicy, TransferOptions
from ckpt_storage.store.backend import Range
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace
from ckpt_storage.transfer.ranges import RangeRead, RangeReader

BLOCK = 64
BASE = 1000


def laid_out(seed: int) -> tuple[list[Span], bytes]:
    """Return spans of frames and payloads as a file has them from `BASE` on, and its bytes."""
    chosen = random.Random(seed)
    spans: list[Span] = []
    data = b""
    for number in range(5):
        for block_bytes, size in ((0, chosen.randrange(90)), (BLOCK, chosen.randrange(700))):
            begin, piece = len(data), chosen.randbytes(size)
            step = block_bytes or max(1, size)
            crcs = [crc32c.crc32c(piece[at : at + step]) for at in range(0, max(1, size), step)]
            place = ChunkPlace(
                path="f",
                fqn=f"t{number}",
                start=BASE + begin,
                size_bytes=size,
                block_bytes=step,
                crcs=crcs,
            )
            spans.append(Span(place=place, start=BASE + begin, stop=BASE + begin + size, what="it"))
            data += piece
    return spans, data


def blocks_of(spans: list[Span]) -> list[tuple[int, int]]:
    """Return begin and end of every block and frame, counted from `BASE`."""
    found = []
    for span in spans:
        step = span.place.block_bytes
        found += [
            (at - BASE, min(at + step, span.stop) - BASE)
            for at in range(span.start, span.stop, step)
        ]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_each_damaged_block_is_found_once_wherever_the_pieces_end(seed: int) -> None:
    """Blocks with a flipped bit are those that are named, each once, whatever arrives when."""
    chosen = random.Random(seed)
    spans, data = laid_out(seed)
    seen = bytearray(data)
    hit = sorted({chosen.randrange(len(data)) for _ in range(seed % 5)})
    if seed % 5 == 4:
        hit = list(range(len(data) // 3, len(data)))
    for at in hit:
        seen[at] ^= 1
    arrived = ArrivedSpans(spans)
    view, checked, count = memoryview(seen), 0, 0
    while count < len(data):
        count = min(len(data), count + chosen.randrange(1, 300))
        edge = len(data) if count == len(data) else arrived.edge_before(count)
        assert checked <= edge <= count
        assert edge in {0, len(data)} | {begin for begin, _ in blocks_of(spans)}
        if edge > checked:
            arrived.check(view[checked:edge], checked)
            checked = edge
    expected = [begin for begin, end in blocks_of(spans) if any(begin <= at < end for at in hit)]
    assert [(error.offset or 0) - BASE for _, error in arrived.damaged] == expected
    assert all(span.start <= (error.offset or 0) < span.stop for span, error in arrived.damaged)


class Breaking(DictBackend):
    """Its first read brings damage and breaks off; the second is sound."""

    attempt_count = 0

    def read(self, path: str, ranges: Iterable[Range]) -> int:
        """Fill all, and break off when that was looked at."""
        self.attempt_count += 1
        for start, view in ranges:
            view[:] = self.disk.files[path][start : start + len(view)]
            view[0] ^= self.attempt_count == 1
        if self.attempt_count == 1:
            raise ConnectionResetError
        return len(self.disk.files[path])


def test_what_an_attempt_that_broke_off_brought_is_no_damage() -> None:
    """Damage counts only if the attempt that brought it was the last one."""
    spans, data = laid_out(1)
    disk = Disk()
    disk.put("f", bytes(BASE) + data)
    backend = Breaking(disk, replace(CAS, is_remote=False))
    store = Store(backend, url="dict://root", policy=RetryPolicy(first_delay_s=0.0))
    arrived = ArrivedSpans(spans)
    left: list[object] = [None]
    read = RangeRead(
        path="f",
        start=BASE,
        stop=BASE + len(data),
        done=lambda _: left.__setitem__(slice(None), arrived.damaged),
        check=arrived.check,
        edge_before=arrived.edge_before,
    )
    options = TransferOptions(thread_count=1)
    RangeReader(store, options, Deadline("load", 60)).run([read])
    store.close()
    assert backend.attempt_count == 2
    assert left == []
