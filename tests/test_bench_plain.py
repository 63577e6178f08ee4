"""The bench's floor on a disk moves every byte, however few a call of the system takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ckpt_storage.benchmark.plain import PlainDisk

MOST_BYTES = 1000


def short(call: Callable[..., int]) -> Callable[..., int]:
    """Return `call` as Linux has it for more than 2 GiB: it takes a part of what it is given."""

    def take(descriptor: int, views: Sequence[memoryview], *rest: int) -> int:
        taken, left = [], MOST_BYTES
        for view in views:
            taken.append(view[:left])
            left -= len(taken[-1])
        return call(descriptor, taken, *rest)

    return take


@pytest.mark.parametrize(("count", "piece_bytes"), [(3, 2500), (1500, 10)])
def test_a_floor_writes_and_reads_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, piece_bytes: int
) -> None:
    """What one call leaves over, the next ones do, for few large views and for many small ones."""
    for name in ("writev", "preadv"):
        monkeypatch.setattr(os, name, short(getattr(os, name)))
    sent = [memoryview(os.urandom(piece_bytes)) for _ in range(count)]
    disk = PlainDisk(str(tmp_path))
    disk.put("a/b", sent)
    assert (tmp_path / "a" / "b").read_bytes() == b"".join(sent)
    found = [memoryview(bytearray(len(view))) for view in sent]
    disk.get("a/b", found)
    assert found == sent
    seen: list[bytes] = []
    disk.get("a/b", found[1:], len(sent[0]), seen=lambda piece: seen.append(bytes(piece)))
    assert b"".join(seen) == b"".join(sent[1:])


def test_a_file_that_is_too_short_is_no_floor(tmp_path: Path) -> None:
    """A part of the bytes in a part of the time is an error, not a figure."""
    disk = PlainDisk(str(tmp_path))
    disk.put("a", [memoryview(b"0123")])
    with pytest.raises(EOFError):
        disk.get("a", [memoryview(bytearray(5))])
