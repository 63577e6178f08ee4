"""Checksums of byte ranges that begin and end anywhere in a shard file."""

from __future__ import annotations

import itertools
import random

import crc32c
import pytest
import torch
from copy_cases import save

from ckpt_storage.errors import IntegrityError
from ckpt_storage.format.documents import FileRef, unseal
from ckpt_storage.format.file_checks import ShardSpans, SpanCheck, WholeFile
from ckpt_storage.format.rank_manifest import RankManifest


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardSpans, bytes]:
    """A shard file of several items, some longer than a block, and its spans."""
    root = tmp_path_factory.mktemp("spans")
    state = {"a": torch.randn(50_000), "b": torch.ones(3), "c": torch.randn(70_000), "step": 3}
    save(state, root)
    (path,) = root.rglob("rank-00000.json")
    body = unseal(path.read_bytes(), path="rank")
    document = RankManifest.from_body(body, where="rank")
    (file,) = document.files
    return ShardSpans(document, file), (root / file.path).read_bytes()


def _cuts(size: int, step: int, seed: int) -> list[tuple[int, int]]:
    """Return ranges of at most `step` bytes that make up a file, in any order."""
    edges = [*range(0, size, step), size]
    ranges = list(itertools.pairwise(edges))
    random.Random(seed).shuffle(ranges)
    return ranges


@pytest.mark.parametrize("step", [977, 4096, 65_536, 100_001, 10**9])
def test_every_flipped_bit_is_found_wherever_the_parts_are_cut(
    shard: tuple[ShardSpans, bytes], step: int
) -> None:
    """Sound bytes pass, in any order of parts; one flipped bit never does."""
    spans, data = shard
    for seed in range(8):
        at = random.Random(seed).randrange(len(data)) if seed else None
        seen = bytearray(data)
        if at is not None:
            seen[at] ^= 1 << seed % 8
        check = SpanCheck(spans)
        found: IntegrityError | None = None
        for start, stop in _cuts(len(data), step, seed):
            try:
                check.take(start, memoryview(seen)[start:stop])
            except IntegrityError as error:
                found = error
        if at is None:
            assert found is None
            check.check_complete()
        else:
            assert found is not None, (step, at)
            assert found.offset is not None
            assert found.offset <= at < found.offset + 65_536


def test_spans_cover_the_file_and_have_the_checksums_of_their_bytes(
    shard: tuple[ShardSpans, bytes],
) -> None:
    """One after the other, without a gap; their edges cut the file anywhere."""
    spans, data = shard
    end = 0
    for span in spans.within(0, len(data)):
        assert span.start == end
        assert span.crc32c == crc32c.crc32c(data[span.start : span.stop])
        end = span.stop
    assert end == len(data)
    for at in range(0, len(data), 9_973):
        edge = spans.edge_before(at)
        assert edge <= at
        assert spans.crc32c_of(edge, len(data)) == crc32c.crc32c(data[edge:])


def test_a_piece_that_never_came_is_noticed(shard: tuple[ShardSpans, bytes]) -> None:
    """A file of which part of a block was not looked at does not pass."""
    spans, data = shard
    check = SpanCheck(spans)
    check.take(0, memoryview(data)[:100_000])
    with pytest.raises(IntegrityError):
        check.check_complete()


def test_a_file_with_one_checksum_is_checked_in_parts() -> None:
    """As the weight files of an export."""
    data = bytes(range(256)) * 40
    file = FileRef(path="w", size_bytes=len(data), crc32c=crc32c.crc32c(data))
    for damage in (False, True):
        check = SpanCheck(WholeFile(file, path="w"))
        seen = bytearray(data)
        seen[5000] ^= damage
        check.take(0, memoryview(seen)[:3000])
        if damage:
            with pytest.raises(IntegrityError, match="w is damaged"):
                check.take(3000, memoryview(seen)[3000:])
        else:
            check.take(3000, memoryview(seen)[3000:])
            check.check_complete()
