"""Damage to every kind of file is found by verify, and by a load in all that it reads."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import damage_cases as cases
import dcp_cases
import pytest
import torch
from dcp_cases import files_below, same, seeded, zeros_like
from rank_pool import RankPool

from ckpt_storage import FormatError, IntegrityError, VerifyReport, save, verify
from ckpt_storage.inspect.checks import Problem


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    for name in ("large", "small"):
        job = partial(cases.save_on_two, large=name == "large")
        ranks.run(job, folder / name, world_size=2)
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> cases.Checkpoint:
    return cases.Checkpoint(Path(shutil.copytree(saved / "large", tmp_path / "run")))


@pytest.fixture
def small(saved: Path, tmp_path: Path) -> cases.Checkpoint:
    return cases.Checkpoint(Path(shutil.copytree(saved / "small", tmp_path / "run")))


@contextmanager
def flipped(path: Path, position: int) -> Iterator[None]:
    before = path.read_bytes()
    content = bytearray(before)
    content[position] ^= 1 << position % 8
    path.write_bytes(content)
    yield
    path.write_bytes(before)


def problem_at(report: VerifyReport, name: str) -> Problem:
    (problem,) = report.problems
    assert not report.ok
    assert problem.file == name
    assert name in problem.message
    assert problem.next_step
    return problem


def damage(root: Path, state: dict[str, Any]) -> IntegrityError:
    error = cases.load_failure(root, zeros_like(state))
    assert isinstance(error, IntegrityError)
    return error


def is_intact(checkpoint: cases.Checkpoint, state: dict[str, Any]) -> bool:
    target = zeros_like(state)
    return (
        verify(checkpoint.root).ok
        and verify(checkpoint.root, deep=False).ok
        and cases.load_failure(checkpoint.root, target) is None
        and same(target, state)
    )


def test_what_was_saved_is_intact(checkpoint: cases.Checkpoint, tmp_path: Path) -> None:
    """Every byte of shards is read; empty payloads and one byte beyond a block raise no alarm."""
    assert is_intact(checkpoint, cases.large_state())
    report = verify(checkpoint.root)
    assert report.checked_bytes == sum(path.stat().st_size for path in checkpoint.shards)
    # All but the commit record, which is what led to them.
    assert report.file_count == len(checkpoint.files) - 1
    more = seeded(1, cases.BLOCK_BYTES + 1, dtype=torch.uint8)
    odd: list[dict[str, Any]] = [
        {"empty": torch.empty(0)},
        {"blob": ""},
        {"more": more, "z": torch.empty(3, 0)},
    ]
    for number, state in enumerate(odd):
        dcp_cases.save(state, tmp_path / str(number))
        assert is_intact(cases.Checkpoint(tmp_path / str(number)), state)


def test_every_block_and_frame_of_large_files_is_watched(checkpoint: cases.Checkpoint) -> None:
    """Each has its own checksum, to both ends; damaged payloads stop a load before it hands out."""
    spans, state = checkpoint.spans(), cases.large_state()
    assert max(sum(s.fqn == "rows" for s in spans if s.path == p) for p in checkpoint.shards) == 8
    for span in spans:
        name = checkpoint.name(span.path)
        for at in (span.start, span.stop - 1):
            with flipped(span.path, at):
                problem = problem_at(verify(checkpoint.root), name)
                cases.assert_close(checkpoint, spans, problem, at)
                for kind in (torch.float32, torch.float64) if span.fqn else ():
                    error = damage(checkpoint.root, state | {"rows": state["rows"].to(kind)})
                    assert (error.path, error.rank) == (name, span.rank)
                    assert (error.fqn, error.offset) == (span.fqn, span.start)
                    assert f"{span.fqn}" in str(error)
                    assert "undefined values" in str(error)
    with flipped(spans[0].path, spans[0].start):
        assert verify(checkpoint.root, deep=False).ok


def test_a_load_leaves_alone_what_it_does_not_read(checkpoint: cases.Checkpoint) -> None:
    """A tensor loads from a file in which another one, and all frames, are damaged."""
    spans = checkpoint.spans()
    for span in spans:
        if span.fqn != "rows":
            content = bytearray(span.path.read_bytes())
            content[span.start] ^= 1
            span.path.write_bytes(content)
    target = zeros_like({"rows": cases.large_state()["rows"]})
    assert cases.load_failure(checkpoint.root, target) is None
    assert same(target, {"rows": cases.large_state()["rows"]})
    assert len(verify(checkpoint.root).problems) == sum(span.fqn != "rows" for span in spans)


def test_every_byte_of_documents_is_checked(small: cases.Checkpoint) -> None:
    """A flipped bit in any is found by verify; where a load reads it, that stops, with its name."""
    checkpoint = small
    loaded = {checkpoint.slot, checkpoint.manifest, *checkpoint.ranks}
    for path in set(checkpoint.files) - set(checkpoint.shards):
        size = path.stat().st_size
        # Every byte of the envelope, and enough of the body.
        for at in sorted({*range(32), *range(32, size - 8, 31), *range(size - 8, size)}):
            with flipped(path, at):
                problem = problem_at(verify(checkpoint.root, deep=False), checkpoint.name(path))
                cases.assert_close(checkpoint, [], problem, at)
                if path in loaded:
                    error = damage(checkpoint.root, cases.small_state())
                    assert (error.path, error.offset) == (problem.file, problem.offset)


def cut_and_extended(content: bytes) -> Iterable[bytes]:
    size = len(content)
    for length in sorted({0, 1, 11, 20, 28, 40, size // 2, *range(size - 8, size)}):
        yield content[:length]
    for more in (b"\0", b"}\n", content[-1:], bytes(cases.BLOCK_BYTES), content):
        yield content + more
    for at in (0, 11, size // 3, size - 1):
        yield content[:at] + b"\0" + content[at:]
        yield content[:at] + content[at + 1 :]


def test_files_of_another_length_are_found(small: cases.Checkpoint) -> None:
    """`verify` finds the place or one before it; a load stops though it reads nothing changed."""
    checkpoint, shards, rows = small, small.shards, {"rows": cases.small_state()["rows"]}
    read = {*shards, checkpoint.slot, checkpoint.manifest, *checkpoint.ranks}
    for path in checkpoint.files:
        before, name = path.read_bytes(), checkpoint.name(path)
        for content in cut_and_extended(before):
            path.write_bytes(content)
            pairs = zip(before, content, strict=False)
            shorter = min(len(before), len(content))
            first = next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)
            for deep in (True, False):
                problems = verify(checkpoint.root, deep=deep).problems
                assert {problem.file for problem in problems} == {name}
                offsets = [problem.offset for problem in problems]
                # Without looking inside, a shard file is only known to end too early or too late.
                latest = shorter if path in shards and not deep else first
                assert min(offset for offset in offsets if offset is not None) <= latest
            if path in read and content in {before[:-1], before + b"\0"}:
                error = damage(checkpoint.root, rows)
                assert error.path == name
                if path in shards:
                    found = (error.rank, error.fqn, error.offset)
                    assert found == (shards.index(path), "rows", shorter)
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("twins.a", 0, 0), ("twins.b", 0, 0)),
        (("twins.a", 0, 0), ("twins.a", 1, 0)),
        (("rows", 0, 0), ("rows", 0, 1)),
        (("rows", 1, 3), ("columns", 1, 0)),
    ],
    ids=["tensors", "ranks", "blocks", "kinds"],
)
def test_exchanged_payloads_are_found(
    checkpoint: cases.Checkpoint, first: tuple[str, int, int], second: tuple[str, int, int]
) -> None:
    """Equally long bytes in each other's place are found in both, whatever they belong to."""
    pair = [
        [span for span in checkpoint.spans() if (span.fqn, span.rank) == (fqn, rank)][block]
        for fqn, rank, block in (first, second)
    ]
    one, other = (span.path.read_bytes()[span.start : span.stop] for span in pair)
    assert len(one) == len(other)
    assert one != other
    for span, content in zip(pair, (other, one), strict=True):
        with span.path.open("r+b") as file:
            file.seek(span.start)
            file.write(content)
    problems = verify(checkpoint.root).problems
    found = [(problem.file, problem.rank, problem.fqn, problem.offset) for problem in problems]
    expected = [(checkpoint.name(s.path), s.rank, s.fqn, s.start) for s in pair]
    assert sorted(found) == sorted(expected)
    error = damage(checkpoint.root, cases.large_state())
    assert (error.path, error.rank, error.fqn, error.offset) in expected


def test_exchanged_rank_manifests_are_found(checkpoint: cases.Checkpoint) -> None:
    """Both are told, with their ranks, and a load stops at one."""
    data, names = [path.read_bytes() for path in checkpoint.ranks], [*checkpoint.ranks]
    for path, other in zip(names, reversed(data), strict=True):
        path.write_bytes(other)
    told = [(checkpoint.name(path), rank) for rank, path in enumerate(names)]
    for deep in (True, False):
        problems = verify(checkpoint.root, deep=deep).problems
        assert [(problem.file, problem.rank) for problem in problems] == told
    assert damage(checkpoint.root, cases.large_state()).path in dict(told)


def test_exchanged_commit_records_are_found(tmp_path: Path) -> None:
    """A record that lies in another slot than it took is found, sound as it is."""
    for step in range(2):
        dcp_cases.save({"step": step}, tmp_path, overwrite=True)
    slots = sorted((tmp_path / "commits").iterdir())
    data = [slot.read_bytes() for slot in slots]
    for slot, other in zip(slots, reversed(data), strict=True):
        slot.write_bytes(other)
    problem = problem_at(verify(tmp_path), "commits/00000002.json")
    assert "copied or renamed" in problem.message
    assert isinstance(cases.load_failure(tmp_path, {"step": None}), FormatError)


@pytest.mark.parametrize(
    "name", ["manifest.json", "rank-00000.json", "stock.metadata", "__0_0.distcp", ".metadata"]
)
def test_a_file_of_another_save_is_found(tmp_path: Path, name: str) -> None:
    """What an earlier save of the same values wrote does not pass for the head's."""
    state = {"rows": seeded(5, 3, 3), "step": 7}
    dcp_cases.save(state, tmp_path)
    (old,) = tmp_path.rglob(name)
    content = old.read_bytes()
    dcp_cases.save(state | {"rows": seeded(6, 3, 3)}, tmp_path, overwrite=True)
    (new,) = set(tmp_path.rglob(name)) - {old} or {old}
    right = new.read_bytes()
    new.write_bytes(content)
    problem_at(verify(tmp_path), new.relative_to(tmp_path).as_posix())
    if "metadata" not in name:
        damage(tmp_path, state)
        return
    assert cases.load_failure(tmp_path, zeros_like(state)) is None
    assert (new.read_bytes() == right) == verify(tmp_path).ok == (name == ".metadata")


def test_missing_files_are_found(checkpoint: cases.Checkpoint) -> None:
    """Each file that is gone is reported by name; markers may be."""
    for path in checkpoint.files:
        content = path.read_bytes()
        path.unlink()
        if path.name == "begun.json":
            assert verify(checkpoint.root).ok
        elif path != checkpoint.slot:
            for deep in (True, False):
                problem_at(verify(checkpoint.root, deep=deep), checkpoint.name(path))
        path.write_bytes(content)
    assert files_below(checkpoint.root) == set(map(checkpoint.name, checkpoint.files))
    assert verify(checkpoint.root).ok


def save_the_same(_rank: int, folder: Path) -> None:
    save({"w": torch.ones(3)}, folder)


def test_the_manifest_of_a_rank_without_files_is_checked(ranks: RankPool, tmp_path: Path) -> None:
    """There is nothing else of that rank that could be looked at."""
    ranks.run(save_the_same, tmp_path, world_size=2)
    assert len(list(tmp_path.glob("saves/*/*.distcp"))) == 1
    for path in tmp_path.glob("saves/*/ranks/*.json"):
        with flipped(path, 40):
            problem_at(verify(tmp_path), path.relative_to(tmp_path).as_posix())
