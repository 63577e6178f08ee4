"""Bytes that changed on their way from another rank are read from the storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.loads.sharing import Key, SharedReads, ShareOrder, Unit
from ckpt_storage.options import TransferOptions
from ckpt_storage.store import open_store
from ckpt_storage.transfer.chunks import ChunkPlace, bytes_read
from ckpt_storage.transfer.ranges import RangeReader

DATA = bytes(range(256)) * 4


class _WrongPeers:
    """Ranks of which each sends one wrong byte."""

    def receive(self, owner: int, buffer: memoryview, *_: object) -> None:
        """Fill the buffer, with a wrong byte in the middle."""
        assert owner == 1
        buffer[:] = DATA
        buffer[len(DATA) // 2] ^= 1


def test_a_wrong_byte_of_a_peer_is_not_damage(tmp_path: Path) -> None:
    """The receiver reads the piece for itself, and the value is right."""
    store = open_store(tmp_path)
    store.put("shard", DATA)
    place = ChunkPlace(
        path="shard",
        fqn="w",
        start=0,
        size_bytes=len(DATA),
        file_bytes=len(DATA),
        block_bytes=1024,
        crcs=(crc32c_of(DATA),),
    )
    target = bytearray(len(DATA))
    key: Key = ("w", (0,))
    unit = Unit(0, 1, (0, 1), ((key, 0, len(DATA)),))
    order = ShareOrder(rank=0, units=(unit,), unit_bytes=len(DATA))
    peers: Any = _WrongPeers()
    ranges = RangeReader(store, TransferOptions())
    reads = {key: [bytes_read(place, memoryview(target))]}
    SharedReads(order, reads, peers, ranges, window=1).run(lambda: None, on_bytes=lambda _: None)
    assert bytes(target) == DATA
