"""Checksums of byte ranges that begin and end anywhere in a shard file."""

from __future__ import annotations

import random
from collections.abc import Iterator

import crc32c
import pytest
import torch
from copy_cases import save

from ckpt_storage.format.documents import FileRef, unseal
from ckpt_storage.format.file_checks import FileChecks
from ckpt_storage.format.rank_manifest import RankManifest


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[FileChecks, bytes]:
    """A shard file of several items, some longer than a block, and its spans."""
    root = tmp_path_factory.mktemp("spans")
    state = {"a": torch.randn(50_000), "b": torch.ones(3), "c": torch.randn(70_000), "step": 3}
    save(state, root)
    (path,) = root.rglob("rank-00000.json")
    body = unseal(path.read_bytes(), path="rank")
    document = RankManifest.from_body(body, where="rank")
    (file,) = document.files
    return FileChecks.of_shard(document, file), (root / file.path).read_bytes()


def cut(data: bytes | bytearray, step: int) -> Iterator[memoryview]:
    """Yield data in pieces of at most `step` bytes."""
    view = memoryview(data)
    return (view[at : at + step] for at in range(0, len(view), step))


@pytest.mark.parametrize("step", [977, 65_536, 100_001, 10**9])
def test_every_flipped_bit_is_found_wherever_the_pieces_are_cut(
    shard: tuple[FileChecks, bytes], step: int
) -> None:
    """Sound bytes pass; one flipped bit never does, nor does a file that ends early."""
    checks, data = shard
    assert checks.first_damage(cut(data, step)) is None
    assert checks.first_damage(cut(data[:-1], step)) is not None
    for seed in range(1, 8):
        at = random.Random(seed).randrange(len(data))
        seen = bytearray(data)
        seen[at] ^= 1 << seed % 8
        found = checks.first_damage(cut(seen, step))
        assert found is not None, (step, at)
        assert found.offset is not None
        assert found.offset <= at < found.offset + 65_536


def test_spans_cover_the_file_and_have_the_checksums_of_their_bytes(
    shard: tuple[FileChecks, bytes],
) -> None:
    """One after the other, without a gap; their edges cut the file anywhere."""
    spans, data = shard
    end = 0
    for span in spans.within(0, len(data)):
        assert span.start == end
        assert span.crc32c == crc32c.crc32c(data[span.start : span.stop])
        end = span.stop
    assert end == len(data)
    edges = {0, len(data), *(span.start for span in spans.within(0, len(data)))}
    for at in range(0, len(data), 9_973):
        assert spans.edge_before(at) == max(edge for edge in edges if edge <= at)
        assert spans.edge_from(at) == min(edge for edge in edges if edge >= at)


def test_a_file_with_one_checksum_is_checked_in_pieces() -> None:
    """As the weight files of an export."""
    data = bytes(range(256)) * 40
    file = FileRef(path="w", size_bytes=len(data), crc32c=crc32c.crc32c(data))
    checks = FileChecks.of_file(file, path="w")
    assert checks.first_damage(cut(data, 3000)) is None
    found = checks.first_damage(cut(data[:-1] + b"?", 3000))
    assert "w is damaged" in str(found)
