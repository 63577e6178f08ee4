"""What `verify` reads is judged while it arrives, wherever the pieces end."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import crc32c
import pytest
from commit_tools import CAS, DictBackend, Disk

from ckpt_storage.errors import IntegrityError
from ckpt_storage.format.file_checks import Span
from ckpt_storage.inspect.checks import Findings
from ckpt_storage.inspect.verify import ArrivedBlocks
from ckpt_storage.options import RetryPolicy, TransferOptions
from ckpt_storage.store.backend import Range
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.ranges import RangeRead, RangeReader

BLOCK = 64
BASE = 1000


class Blocks:
    """The spans of a file, as `format` tells them: 64 bytes each, some shorter."""

    def __init__(self, seed: int) -> None:
        chosen = random.Random(seed)
        self.data, self.spans = b"", list[Span]()
        for number in range(40):
            piece = chosen.randbytes(chosen.randrange(1, 1 + BLOCK))
            start = BASE + len(self.data)
            self.spans.append(
                Span(
                    start=start,
                    stop=start + len(piece),
                    crc32c=crc32c.crc32c(piece),
                    fqn=f"{number}",
                )
            )
            self.data += piece

    def within(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the spans that share a byte with a range."""
        return (span for span in self.spans if span.start < stop and start < span.stop)

    def edge_before(self, offset: int) -> int:
        """Return the last edge at or before an offset."""
        return max(
            edge for span in self.spans for edge in (span.start, span.stop) if edge <= offset
        )

    def crc32c_of(self, start: int, stop: int) -> int:
        """Nothing asks for it."""
        raise NotImplementedError((start, stop))

    def damage(self, span: Span) -> IntegrityError:
        """Return the error that names where the span begins."""
        return IntegrityError("damaged", path="f", fqn=span.fqn, offset=span.start)


@pytest.mark.parametrize("seed", range(20))
def test_each_damaged_block_is_found_once_wherever_the_pieces_end(seed: int) -> None:
    """Blocks with a flipped bit are those that are named, each once, whatever arrives when."""
    chosen = random.Random(seed)
    blocks, findings = Blocks(seed), Findings()
    data = blocks.data
    seen = bytearray(data)
    hit = sorted({chosen.randrange(len(data)) for _ in range(seed % 5)})
    if seed % 5 == 4:
        hit = list(range(len(data) // 3, len(data)))
    for at in hit:
        seen[at] ^= 1
    arrived = ArrivedBlocks(blocks, BASE, findings)
    view, checked, count = memoryview(seen), 0, 0
    while count < len(data):
        count = min(len(data), count + chosen.randrange(1, 300))
        edge = arrived.edge_before(count)
        assert checked <= edge <= count
        if edge > checked:
            arrived.check(view[checked:edge], checked)
            checked = edge
    assert findings.problems == []
    arrived.done(view)
    expected = [
        span.start
        for span in blocks.spans
        if any(span.start <= at + BASE < span.stop for at in hit)
    ]
    assert [problem.offset for problem in findings.problems] == expected


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
    blocks, findings = Blocks(1), Findings()
    disk = Disk()
    disk.put("f", bytes(BASE) + blocks.data)
    backend = Breaking(disk, replace(CAS, is_remote=False))
    store = Store(backend, url="dict://root", policy=RetryPolicy(first_delay_s=0.0))
    arrived = ArrivedBlocks(blocks, BASE, findings)
    read = RangeRead(
        path="f",
        start=BASE,
        stop=BASE + len(blocks.data),
        done=arrived.done,
        check=arrived.check,
        edge_before=arrived.edge_before,
    )
    options = TransferOptions(thread_count=1)
    RangeReader(store, options, Deadline("load", 60)).run([read])
    store.close()
    assert backend.attempt_count == 2
    assert findings.problems == []
