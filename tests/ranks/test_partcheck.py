"""A checkpoint checked in parts: every byte is in one of them, and only what loads need counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import manager_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from manager_cases import restore, saved, state_of

import ckpt_storage
from ckpt_storage.errors import IntegrityError, PhaseTimeoutError
from ckpt_storage.format.documents import FileRef
from ckpt_storage.inspect.verify import check_part, divided, part_bytes
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.prune import prune
from ckpt_storage.manager.retention import KeepLatest
from ckpt_storage.options import Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.testing.ranks import RankPool
from ckpt_storage.transfer.ranges import RangeRead, RangeReader


@given(sizes=st.lists(st.integers(0, 50), max_size=8), count=st.integers(1, 9))
def test_parts_share_all_files_and_differ_by_one_at_most(sizes: list[int], count: int) -> None:
    """Each file is in exactly one part, and no two parts differ by more than the longest file."""
    files = [FileRef(path=f"f{at}", size_bytes=size, crc32c=0) for at, size in enumerate(sizes)]
    parts = divided([(file, 0) for file in files], count)
    pairs = sorted(pair for part in parts for pair in part.items())
    assert pairs == [(file.path, file.size_bytes) for file in files]
    lengths = [sum(part.values()) for part in parts]
    assert max(lengths) - min(lengths) <= max(sizes, default=0)


def check_all(folder: Path, count: int, *, deep: bool = True) -> list[str]:
    """Check all parts, each for itself; return what they found wrong."""
    found = []
    for number in range(count):
        deadline = Deadline("load", 60)
        store = open_store(Location.of(folder))
        try:
            check_part(store, number, count, deep=deep, deadline=deadline)
        except IntegrityError as error:
            found.append(str(error))
    return found


def test_damage_anywhere_is_found_by_one_part(tmp_path: Path) -> None:
    """One bit of any place of a file flips: of three parts one reads it and says so."""
    state: dict[str, Any] = {f"t{number}": torch.rand(50) for number in range(12)}
    state |= {"big": torch.rand(600_000), "text": ["x"] * 5}
    ckpt_storage.save(state, tmp_path, sync_files=False)
    assert check_all(tmp_path, 3) == []
    (file,) = (tmp_path / "saves").rglob("*.distcp")
    data = file.read_bytes()
    for at in [*range(0, 3000, 97), *range(3000, len(data), 150_001), len(data) - 1]:
        file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        found = check_all(tmp_path, 3)
        assert len(found) == 1, at
        assert file.name in found[0]
    file.write_bytes(data[:-1])
    assert check_all(tmp_path, 3)
    assert check_all(tmp_path, 1, deep=False)
    file.write_bytes(data)
    for document in [*tmp_path.rglob("ranks/*.json"), *tmp_path.rglob("manifest.json")]:
        before = document.read_bytes()
        document.write_bytes(before[:50] + bytes([before[50] ^ 1]) + before[51:])
        assert check_all(tmp_path, 3), document
        document.unlink()
        assert check_all(tmp_path, 3), document
        document.write_bytes(before)
    assert check_all(tmp_path, 3) == []


@pytest.mark.parametrize("what", ["no .metadata", "no marker", "an export"])
def test_what_no_load_needs_is_no_reason_to_go_back(tmp_path: Path, what: str) -> None:
    """A saver died before it published, or an export is damaged: the newest still counts."""
    saved(tmp_path, 1)
    newest = tmp_path / "step-00000002"
    with CheckpointManager(tmp_path, timeout=60) as manager:
        manager.save(2, state_of(2), sync_files=False, consolidate=what == "an export" or None)
    if what == "no .metadata":
        (newest / ".metadata").unlink()
    elif what == "no marker":
        for path in newest.rglob("begun.json"):
            path.write_bytes(b"{")
    else:
        (weights,) = newest.glob("hf/*.safetensors")
        weights.write_bytes(weights.read_bytes()[:-9])
    report = prune(tmp_path, KeepLatest(1))
    assert report.newest is not None
    assert report.newest.step == 2
    with CheckpointManager(tmp_path, timeout=60) as manager:
        found = restore(manager, check="deep")
    assert (found.step, found.skipped) == (2, ())


def moves_for_ever(reader: RangeReader, reads: Sequence[RangeRead], **more: object) -> None:
    """Stand for reads of a very large checkpoint: something arrives, and there is no end."""
    del reads, more
    while True:
        reader.deadline.watch.advanced(1)
        reader.deadline.check("The read")
        reader.deadline.sleep(0.01)


def test_a_check_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However steadily bytes arrive, a rank that checks has an end that the others know."""
    saved(tmp_path, 1)
    monkeypatch.setattr(RangeReader, "run", moves_for_ever)
    with (
        CheckpointManager(tmp_path, timeout=Timeouts(load=1.0)) as manager,
        pytest.raises(PhaseTimeoutError, match="load phase"),
    ):
        manager.restore(cases.blank(), check="deep")


def test_ranks_divide_a_deep_check(ranks: RankPool, tmp_path: Path) -> None:
    """Of what two processes saved two ranks read a file each, and together all of it."""
    ranks.run(cases.save_large, str(tmp_path), 1, world_size=2)
    sizes = [file.stat().st_size for file in tmp_path.rglob("*.distcp")]
    found = ranks.run(cases.resume_watched, str(tmp_path), -1, world_size=2)
    assert sorted(count for *_, count in found) == sorted(sizes)


def test_what_one_rank_finds_ends_the_check_of_all(ranks: RankPool, tmp_path: Path) -> None:
    """Damage in the last rank's part is heard of by one whose reads would never end."""
    saved(tmp_path, 1)
    ranks.run(cases.save_large, str(tmp_path), 2, world_size=2)
    (file,) = (tmp_path / "step-00000002").rglob("__1_*.distcp")
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1
    file.write_bytes(data)
    found = ranks.run(cases.resume_watched, str(tmp_path), 0, world_size=2)
    assert [(step, skipped) for step, skipped, _ in found] == [(1, ["step-00000002"])] * 2


def test_all_ranks_know_the_largest_part(tmp_path: Path) -> None:
    """Who has nothing to read waits as long as who has all of it."""
    ckpt_storage.save({"w": torch.rand(5000)}, tmp_path)
    (file,) = (tmp_path / "saves").rglob("*.distcp")
    deadline, store = Deadline("load", 60), open_store(Location.of(tmp_path))
    assert part_bytes(store, 3, deadline) == [file.stat().st_size, 0, 0]
