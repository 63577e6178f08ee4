"""`restore` with each file of the newest checkpoint damaged in each way, on one rank and on two."""

from __future__ import annotations

import shutil
from pathlib import Path

import manager_cases as cases
import pytest

from ckpt_storage.manager.resume import Check
from ckpt_storage.testing.ranks import RankPool

NEWEST, OLDER = "step-00000003", "step-00000002"
WAYS = ("first", "middle", "cut", "longer", "removed")
MARKERS = ("begun.json",)
"""What no reader needs: they tell who clears up how far a save came."""


def damage(path: Path, way: str) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    at = {"first": 0, "middle": len(data) // 2}
    if way == "removed":
        path.unlink()
        return
    if way in at:
        data[at[way]] ^= 1
    elif way == "longer":
        data += b"\0"
    else:
        del data[-1:]
    path.write_bytes(data)


def damaged_roots(run: Path, folder: Path) -> dict[str, Path]:
    """Return copies of a run, in each of which one file of the newest is damaged in one way."""
    roots: dict[str, Path] = {}
    newest = run / NEWEST
    for file in sorted(path for path in newest.rglob("*") if path.is_file()):
        for way in WAYS:
            root = folder / str(len(roots))
            shutil.copytree(run, root)
            damage(root / NEWEST / file.relative_to(newest), way)
            roots[f"{way} {file.name}"] = root
    return roots


def must_fall_back(what: str) -> bool:
    """Return whether a deep check must find this damage."""
    return not what.endswith((*MARKERS, ".metadata"))


@pytest.mark.parametrize(("world_size", "check"), [(2, "read"), (2, "deep")])
def test_every_damage_is_passed_over_alike_on_all_ranks(
    ranks: RankPool, tmp_path: Path, world_size: int, check: Check
) -> None:
    """All ranks load the newest whole, or the one before; the coordinator says what it passed."""
    ranks.run(cases.train, str(tmp_path / "run"), 3, world_size=world_size)
    roots = damaged_roots(tmp_path / "run", tmp_path)
    assert len(roots) >= len(WAYS) * (4 + 2 * world_size)
    told = ranks.run(
        cases.resume_each, [str(root) for root in roots.values()], check, world_size=world_size
    )
    for number, what in enumerate(roots):
        step, skipped, said = told[0][number]
        assert [(one[number][0], one[number][1]) for one in told] == [(step, skipped)] * world_size
        assert [one[number][2] for one in told] == [bool(skipped)] + [False] * (world_size - 1)
        assert said == bool(skipped), what
        if step == 3:
            assert skipped == [], what
            assert check == "read" or not must_fall_back(what), what
        else:
            assert (step, skipped) == (2, [NEWEST]), what
            assert not what.endswith(MARKERS), what
        if what.endswith(".distcp") and what.startswith("removed"):
            assert step == 2, what
