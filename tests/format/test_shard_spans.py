"""Checksums of byte ranges that begin and end anywhere in a shard file."""

from __future__ import annotations

import crc32c
import pytest
import torch
from copy_cases import save

from ckpt_storage.format.documents import unseal
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
