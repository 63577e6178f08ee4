"""Damage to every kind of file is found by verify, and by a load in all that it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import damage_cases as cases
import dcp_cases
import pytest
import torch
from dcp_cases import files_below, same, seeded, zeros_like

from ckpt_storage import FormatError, IntegrityError, VerifyReport, save, verify
from ckpt_storage.inspect.checks import Problem
from ckpt_storage.testing.ranks import RankPool


@pytest.fixture(scope="module")
def saver(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> cases.Saver:
    """What two ranks saved."""
    return cases.Saver(ranks, tmp_path_factory.mktemp("damage"))


@pytest.fixture
def checkpoint(saver: cases.Saver, tmp_path: Path) -> cases.Checkpoint:
    """The larger checkpoint."""
    return saver.copy(tmp_path / "run")


@contextmanager
def flipped(path: Path, position: int) -> Iterator[None]:
    """Flip one bit of a byte inside the block."""
    before = path.read_bytes()
    content = bytearray(before)
    content[position] ^= 1 << position % 8
    path.write_bytes(content)
    yield
    path.write_bytes(before)


def problem_at(report: VerifyReport, name: str) -> Problem:
    """Return the only thing that a report finds wrong, which is in this file."""
    (problem,) = report.problems
    assert not report.ok
    assert problem.file == name
    assert name in problem.message
    assert problem.next_step
    return problem


def damage(root: Path, state: dict[str, Any]) -> IntegrityError:
    """Return the damage that stops a load of such a state."""
    error = cases.load_failure(root, zeros_like(state))
    assert isinstance(error, IntegrityError)
    return error


def is_intact(checkpoint: cases.Checkpoint, state: dict[str, Any]) -> bool:
    """Return whether neither verify nor a load finds anything wrong."""
    target = zeros_like(state)
    return (
        verify(checkpoint.root).ok
        and verify(checkpoint.root, deep=False).ok
        and cases.load_failure(checkpoint.root, target) is None
        and same(target, state)
    )


def test_what_two_ranks_saved_is_intact(checkpoint: cases.Checkpoint) -> None:
    """Nothing is reported of a checkpoint of two ranks, and every byte of its shards is read."""
    assert is_intact(checkpoint, cases.large_state())
    report = verify(checkpoint.root)
    assert report.checked_bytes == sum(path.stat().st_size for path in checkpoint.shards)
    # All but the commit record, which is what led to them.
    assert report.file_count == len(checkpoint.files) - 1


@pytest.mark.parametrize(
    "state",
    [
        {"empty": torch.empty(0)},
        {"blob": ""},
        {"more": seeded(1, cases.BLOCK_BYTES + 1, dtype=torch.uint8), "last": torch.empty(3, 0)},
    ],
    ids="-".join,
)
def test_small_and_empty_values_raise_no_alarm(tmp_path: Path, state: dict[str, Any]) -> None:
    """Nothing is reported where payloads are empty, or one byte longer than a block."""
    dcp_cases.save(state, tmp_path)
    assert is_intact(cases.Checkpoint(tmp_path), state)


def test_every_span_of_large_files_is_verified(checkpoint: cases.Checkpoint) -> None:
    """The first and the last byte of every block and every frame is watched by its own checksum."""
    spans = checkpoint.spans()
    assert max(sum(s.fqn == "rows" for s in spans if s.path == p) for p in checkpoint.shards) == 8
    for span in spans:
        for at in (span.start, span.stop - 1):
            with flipped(span.path, at):
                problem = problem_at(verify(checkpoint.root), checkpoint.name(span.path))
                cases.assert_close(checkpoint, spans, problem, at)
    with flipped(spans[0].path, spans[0].start):
        assert verify(checkpoint.root, deep=False).ok


@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=["as-saved", "converted"])
def test_a_load_checks_every_block_it_reads(
    checkpoint: cases.Checkpoint, kind: torch.dtype
) -> None:
    """Damage in any payload stops a load, straight into targets or not, before it hands out."""
    for span in checkpoint.spans():
        if span.fqn is None:
            continue
        for at in (span.start, span.stop - 1):
            state = cases.large_state()
            state["rows"] = state["rows"].to(kind)
            with flipped(span.path, at):
                error = damage(checkpoint.root, state)
            assert (error.path, error.rank) == (checkpoint.name(span.path), span.rank)
            assert (error.fqn, error.offset) == (span.fqn, span.start)
            assert span.fqn in str(error)
            assert "undefined values" in str(error)


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


def test_every_byte_of_documents_is_checked(saver: cases.Saver, tmp_path: Path) -> None:
    """A flipped bit in any is found by verify; where a load reads it, that stops, with its name."""
    checkpoint = saver.copy(tmp_path / "run", large=False)
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
    """Yield a content cut at many lengths, with more behind it, and with a byte more or less."""
    size = len(content)
    for length in sorted({0, 1, 11, 20, 28, 40, size // 2, *range(size - 8, size)}):
        yield content[:length]
    for more in (b"\0", b"}\n", content[-1:], bytes(cases.BLOCK_BYTES), content):
        yield content + more
    for at in (0, 11, size // 3, size - 1):
        yield content[:at] + b"\0" + content[at:]
        yield content[:at] + content[at + 1 :]


def test_files_of_another_length_are_found(saver: cases.Saver, tmp_path: Path) -> None:
    """Whatever is cut off or added to any file is found by verify, at the place or before it."""
    checkpoint = saver.copy(tmp_path / "run", large=False)
    for path in checkpoint.files:
        before = path.read_bytes()
        for content in cut_and_extended(before):
            path.write_bytes(content)
            pairs = zip(before, content, strict=False)
            shorter = min(len(before), len(content))
            first = next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)
            for deep in (True, False):
                report = verify(checkpoint.root, deep=deep)
                assert report.problems
                assert {problem.file for problem in report.problems} == {checkpoint.name(path)}
                offsets = [problem.offset for problem in report.problems]
                # Without looking inside, a shard file is only known to end too early or too late.
                is_length = path in checkpoint.shards and not deep
                latest = shorter if is_length else first
                assert min(offset for offset in offsets if offset is not None) <= latest
        path.write_bytes(before)


@pytest.mark.parametrize("change", [-1, 1], ids=["cut", "extended"])
@pytest.mark.parametrize("name", ["rows", "twins"])
def test_a_load_finds_files_of_another_length(
    checkpoint: cases.Checkpoint, name: str, change: int
) -> None:
    """A shard file that is longer or shorter stops a load even where it reads nothing changed."""
    for path in [*checkpoint.shards, checkpoint.slot, checkpoint.manifest, *checkpoint.ranks]:
        before = path.read_bytes()
        path.write_bytes(before[:-1] if change < 0 else before + b"\0")
        error = damage(checkpoint.root, {name: cases.large_state()[name]})
        assert error.path == checkpoint.name(path)
        if path in checkpoint.shards:
            assert error.rank == checkpoint.shards.index(path)
            assert str(error.fqn).startswith(name)
            assert error.offset == len(before) + min(change, 0)
        path.write_bytes(before)


def exchange(first: Path, second: Path) -> None:
    """Give each of two files the content of the other."""
    one, other = first.read_bytes(), second.read_bytes()
    assert one != other
    first.write_bytes(other)
    second.write_bytes(one)


def exchange_spans(first: cases.Span, second: cases.Span) -> None:
    """Exchange equally many bytes of two places, which may be in one file."""
    one, other = (span.path.read_bytes()[span.start : span.stop] for span in (first, second))
    assert len(one) == len(other)
    assert one != other
    for span, content in ((first, other), (second, one)):
        with span.path.open("r+b") as file:
            file.seek(span.start)
            file.write(content)


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
    exchange_spans(*pair)
    problems = verify(checkpoint.root).problems
    found = [(problem.file, problem.rank, problem.fqn, problem.offset) for problem in problems]
    expected = [(checkpoint.name(s.path), s.rank, s.fqn, s.start) for s in pair]
    assert sorted(found) == sorted(expected)
    error = damage(checkpoint.root, cases.large_state())
    assert (error.path, error.rank, error.fqn, error.offset) in expected


def test_exchanged_rank_manifests_are_found(checkpoint: cases.Checkpoint) -> None:
    """Verify finds them, and so does a load."""
    exchange(*checkpoint.ranks)
    for deep in (True, False):
        problems = verify(checkpoint.root, deep=deep).problems
        assert [(p.file, p.rank) for p in problems] == [
            (checkpoint.name(path), rank) for rank, path in enumerate(checkpoint.ranks)
        ]
    assert damage(checkpoint.root, cases.large_state()).path in set(
        map(checkpoint.name, checkpoint.ranks)
    )


def test_exchanged_commit_records_are_found(tmp_path: Path) -> None:
    """A record that lies in another slot than it took is found, sound as it is."""
    for step in range(2):
        dcp_cases.save({"step": step}, tmp_path, overwrite=True)
    slots = sorted((tmp_path / "commits").iterdir())
    exchange(*slots)
    problem = problem_at(verify(tmp_path), "commits/00000001.json")
    assert "copied or renamed" in problem.message
    assert isinstance(cases.load_failure(tmp_path, {"step": None}), FormatError)


@pytest.mark.parametrize("name", ["manifest.json", "stock.metadata", "__0_0.distcp"])
def test_a_file_of_another_save_is_found(tmp_path: Path, name: str) -> None:
    """What an earlier save of the same values wrote does not pass for the head's."""
    state = {"rows": seeded(5, 3, 3), "step": 7}
    dcp_cases.save(state, tmp_path)
    (old,) = tmp_path.rglob(name)
    dcp_cases.save(state | {"rows": seeded(6, 3, 3)}, tmp_path, overwrite=True)
    (new,) = set(tmp_path.rglob(name)) - {old}
    new.write_bytes(old.read_bytes())
    problem_at(verify(tmp_path), new.relative_to(tmp_path).as_posix())
    if name == "stock.metadata":
        assert cases.load_failure(tmp_path, zeros_like(state)) is None
    else:
        damage(tmp_path, state)


def test_old_published_metadata_is_found(tmp_path: Path) -> None:
    """`.metadata` of a superseded save is reported, and a load brings it up to date."""
    dcp_cases.save({"step": 1}, tmp_path)
    old = (tmp_path / ".metadata").read_bytes()
    dcp_cases.save({"step": 2}, tmp_path, overwrite=True)
    new = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(old)
    problem_at(verify(tmp_path), ".metadata")
    assert cases.load_failure(tmp_path, {"step": None}) is None
    assert (tmp_path / ".metadata").read_bytes() == new
    assert verify(tmp_path).ok


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
    """Save what one rank alone writes for all."""
    save({"w": torch.ones(3)}, folder)


def test_the_manifest_of_a_rank_without_files_is_checked(ranks: RankPool, tmp_path: Path) -> None:
    """There is nothing else of that rank that could be looked at."""
    ranks.run(save_the_same, tmp_path, world_size=2)
    assert len(list(tmp_path.glob("saves/*/*.distcp"))) == 1
    for path in tmp_path.glob("saves/*/ranks/*.json"):
        with flipped(path, 40):
            problem_at(verify(tmp_path), path.relative_to(tmp_path).as_posix())
