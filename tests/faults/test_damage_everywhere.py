"""Bytes everywhere in every file of a checkpoint are watched."""

from __future__ import annotations

from pathlib import Path

import dcp_cases
import pytest
import torch
from damage_cases import (
    KINDS,
    Checkpoint,
    Saver,
    Span,
    assert_close,
    check_other_values,
)
from local_stores import local_store

from ckpt_storage import verify
from ckpt_storage.testing.ranks import RankPool

_STEP = 3
"""The edges of all spans are watched byte by byte in `test_damage_files`."""


def flip_all(checkpoint: Checkpoint, paths: list[Path], spans: list[Span]) -> int:
    """Flip a bit of every third byte of some files, one of each at a time; return how many."""
    contents = {path: path.read_bytes() for path in paths}
    for at in range(0, max(map(len, contents.values())), _STEP):
        changed = {path: data for path, data in contents.items() if at < len(data)}
        for path, data in changed.items():
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        report = verify(checkpoint.root)
        found = sorted(problem.file or "" for problem in report.problems)
        assert found == sorted(map(checkpoint.name, changed)), at
        for problem in report.problems:
            assert_close(checkpoint, spans, problem, at)
        for path, data in changed.items():
            path.write_bytes(data)
    return sum(-(-len(data) // _STEP) for data in contents.values())


def test_bytes_everywhere_in_every_file_are_verified(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit is found wherever it is; the n-th bytes of several files at once, too."""
    checkpoint = Saver(ranks, tmp_path / "saved").copy(tmp_path / "run", large=False)
    # Without retries and deadlines, which take most of the time of so small reads.
    store = local_store(str(checkpoint.root))
    monkeypatch.setattr("ckpt_storage.inspect.verify.open_store", lambda *_, **__: store)
    spans = checkpoint.spans()
    alone = [checkpoint.slot, checkpoint.manifest, checkpoint.stock]
    # Without a rank's manifest nobody can check its files.
    manifests = [path for path in checkpoint.files if path.parent.name == "ranks"]
    together = [path for path in checkpoint.files if path not in [*alone, *manifests]]
    assert ".metadata" in {checkpoint.name(path) for path in together}
    count = 0
    for group in ([path] for path in alone), [manifests], [together]:
        for paths in group:
            count += flip_all(checkpoint, paths, spans)
    assert count == sum(-(-path.stat().st_size // _STEP) for path in checkpoint.files)
    assert verify(checkpoint.root).ok


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_of_another_type_breaks_more_than_the_load(tmp_path: Path, kind: str) -> None:
    """Every kind of value in place of every value of a document: no more than the load fails."""
    state = {"w": torch.arange(6.0).reshape(2, 3), "empty": torch.empty(0, 2), "step": 5}
    dcp_cases.save(state, tmp_path / "run")
    check_other_values(tmp_path / "run", state, kind, range(1, 9))
