"""The checksums of buffers and of their blocks, and the interpreter's lock meanwhile."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from array import array
from pathlib import Path
from random import Random

import numpy as np
import pytest
from crc32c import crc32c as reference_crc
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_storage.format import checksums, integrity

BLOCK = 64 << 10
DATA = Random(5).randbytes(5 * BLOCK + 17)
LENGTHS = st.integers(0, len(DATA)) | st.sampled_from(
    [near + by for near in (BLOCK, 2 * BLOCK) for by in (-1, 0, 1)]
)
QUICK = settings(max_examples=100, deadline=None)


def test_a_known_text_has_its_known_checksum() -> None:
    """The check value that RFC 3720's polynomial has for the nine digits."""
    assert checksums.crc32c_of(b"123456789") == 0xE3069283
    assert checksums.crc32c_of(b"456789", checksums.crc32c_of(b"123")) == 0xE3069283


@QUICK
@given(
    length=LENGTHS,
    offset=st.integers(0, 100),
    block_bytes=st.sampled_from([BLOCK, 20_000]) | st.integers(9000, 1 << 18),
)
def test_every_block_has_its_checksum(length: int, offset: int, block_bytes: int) -> None:
    """Blocks of any length, the last one shorter, have the checksums of their bytes."""
    part = memoryview(DATA)[offset : offset + length]
    assert checksums.crcs_of_blocks(part, block_bytes) == [
        reference_crc(part[at : at + block_bytes]) for at in range(0, len(part), block_bytes)
    ]


def test_a_payload_in_pieces_has_the_blocks_of_the_whole() -> None:
    """Pieces that end within blocks, and between them change nothing."""
    pieces = [DATA[:100], DATA[100:70_000], b"", DATA[70_000 : 3 * BLOCK], DATA[3 * BLOCK :]]
    assert list(integrity.block_crcs(pieces, BLOCK)) == [
        reference_crc(DATA[at : at + BLOCK]) for at in range(0, len(DATA), BLOCK)
    ]


@pytest.mark.parametrize("wrong", [0, BLOCK - 1, BLOCK, 3 * BLOCK + 20_000, len(DATA) - 1])
def test_the_first_wrong_block_is_found(wrong: int) -> None:
    """Of two damaged blocks the first is told; sound ones, from any block on, are accepted."""
    crcs = array("I", [1, 2]) + integrity.block_crcs([DATA], BLOCK)
    assert integrity.first_wrong_block(memoryview(DATA), BLOCK, crcs, 2) is None
    damaged = bytearray(DATA)
    damaged[wrong] ^= 1
    damaged[-1] ^= 2
    found = integrity.first_wrong_block(memoryview(damaged), BLOCK, crcs, 2)
    assert found == wrong // BLOCK * BLOCK


def test_any_contiguous_buffer_is_taken(tmp_path: Path) -> None:
    """Read-only, mapped, of other elements and dimensions, empty: what counts are the bytes."""
    values = np.frombuffer(DATA[:120_000], dtype=np.float32).reshape(3, 100, 100)
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert checksums.crc32c_of(mapped) == reference_crc(DATA)
    buffers = (values.data, memoryview(array("d", values.ravel())), memoryview(DATA).cast("c"))
    for buffer in buffers:
        assert checksums.crc32c_of(buffer) == reference_crc(buffer.tobytes())
    for nothing in (b"", np.empty((0, 7)).data, memoryview(b"")):
        assert checksums.crc32c_of(nothing, 5) == 5


def test_a_strided_buffer_is_refused() -> None:
    """A long view whose bytes are not consecutive is an error, not a wrong checksum."""
    strided = memoryview(DATA)[::2]
    with pytest.raises((BufferError, TypeError)):
        checksums.crc32c_of(strided)
    with pytest.raises((BufferError, TypeError)):
        checksums.crcs_of_blocks(strided, BLOCK)


def test_no_other_thread_runs_while_blocks_are_hashed() -> None:
    """The interpreter's lock is not given away, which may take 5 ms to come back.

    The other thread cannot ask for the lock here, and takes it whenever it is given away.
    """
    steps, is_done = 0, threading.Event()

    def step() -> None:
        nonlocal steps
        while not is_done.is_set():
            steps += 1
            time.sleep(0)

    other = threading.Thread(target=step, daemon=True)
    view = memoryview(bytes(64 << 20))
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        other.start()
        end_s = time.monotonic() + 60
        while steps < 3 and time.monotonic() < end_s:
            time.sleep(0.001)
        before = steps
        checksums.crcs_of_blocks(view, BLOCK)
        checksums.crc32c_of(view[: 16 << 20])
        after = steps
    finally:
        sys.setswitchinterval(interval_s)
        is_done.set()
    other.join(60)
    assert before >= 3
    assert after == before
