"""Thinnings, and prunes that thin, that fail or die at each storage operation."""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import part_cases
import pytest
from commit_tools import DAY_S
from dcp_cases import same, seeded
from fault_tools import ScriptedBackends, each_fault
from prune_cases import name_of
from servers import Running

from ckpt_storage import (
    KeepEvery,
    KeepLatest,
    KeepPart,
    RetryPolicy,
    errors,
    list_checkpoints,
    open_checkpoint,
    prune,
    thin,
    verify,
)
from ckpt_storage.store import Location, open_store
from ckpt_storage.testing.faults import Action, Rule, Script, SimulatedCrash

pytestmark = pytest.mark.usefixtures("one_core")

KEPT: dict[str, Any] = {"model": seeded(1, 900)}
WHOLE: dict[str, Any] = {**KEPT, "optim": seeded(2, 900)}
QUICK = RetryPolicy(attempt_count=3, first_delay_s=0.0, max_delay_s=0.0)

WRITES = "put.*|delete.*|.*_upload|copy_.*|make_folders|flush_parts"
HALVES = "put_part|delete|delete_folder|copy_part"

ALL: dict[Action, str] = {
    "crash_before": "",
    "crash_after": "",
    "torn": HALVES,
    "error": "",
    "lost_answer": "",
}
OF_A_SERVER: dict[Action, str] = {"crash_after": WRITES, "error": WRITES, "lost_answer": WRITES}
"""A crash before an operation leaves what the write before it left."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where each run thins a checkpoint of its own."""

    root: Running
    actions: dict[Action, str]

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.root.storage_options)

    def fresh(self) -> str:
        url = f"{self.root.url}/{uuid.uuid4().hex[:12]}"
        part_cases.save(url, WHOLE, sync_files=False, storage_options=self.options)
        return url

    def thin(self, url: str) -> str:
        return thin(url, drop="optim*", storage_options=self.options, retry=QUICK).save_id


@pytest.fixture(params=["local", "memory", "s3_root", "gcs_root", "azure_root"])
def place(
    request: pytest.FixtureRequest, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Place:
    monkeypatch.setattr(logging.getLogger("ckpt_storage"), "disabled", True)
    if request.param == "local":
        return Place(root=Running(url=str(memory_path)), actions=ALL)
    if request.param == "memory":
        return Place(root=Running(url=f"memory://{uuid.uuid4().hex}"), actions=ALL)
    return Place(root=request.getfixturevalue(request.param), actions=OF_A_SERVER)


def values_at(place: Place, url: str) -> dict[str, Any]:
    with open_checkpoint(url, storage_options=place.options) as checkpoint:
        return {name: checkpoint[name].torch() for name in checkpoint}


@pytest.mark.timeout(600)
def test_a_thinning_that_fails_anywhere_leaves_the_whole_or_the_part(
    place: Place, scripted: ScriptedBackends, record_property: Callable[[str, object], None]
) -> None:
    """The next thinning completes it: the part is sound, and nothing else is left."""
    dry, url = Script(), place.fresh()
    with scripted.playing(dry):
        place.thin(url)
    ends: Counter[str] = Counter()
    for at, rule in each_fault(dry.calls, place.actions):
        url = place.fresh()
        error: BaseException | None = None
        with scripted.playing(Script([rule])):
            try:
                place.thin(url)
            except (SimulatedCrash, errors.CheckpointError) as caught:
                error = caught
        ends[f"{rule.action}: {type(error).__name__ if error else 'done'}"] += 1
        values = values_at(place, url)
        is_part = same(values, KEPT)
        assert is_part or (error is not None and same(values, WHOLE)), at
        save_id = place.thin(url)
        assert same(values_at(place, url), KEPT), at
        report = verify(url, storage_options=place.options)
        assert report.ok, f"{at}: {report.problems}"
        store = open_store(Location.of(url, place.options))
        assert {entry.path.split("/")[1] for entry in store.list("saves")} == {save_id}, at
    record_property("ends", f"{len(dry.calls)} operations: {dict(ends)}")
    print(f"{len(dry.calls)} operations: {dict(ends)}")  # noqa: T201  # for -rP
    assert ends.total() > 30


PRUNE_ACTIONS: dict[Action, str] = {
    "crash_before": "",
    "crash_after": "",
    "torn": "delete|delete_folder",
    "error": "",
    "lost_answer": "",
}
WHOLE_STEPS, OTHER_STEPS = (2, 4), (1, 3)
KEEP = KeepLatest(1) | KeepEvery(2)


def state_of(step: int) -> dict[str, Any]:
    return {"model": seeded(step, 300), "frozen": seeded(0, 600), "optim": seeded(step + 50, 900)}


def part_of(step: int) -> dict[str, Any]:
    return {name: value for name, value in state_of(step).items() if name != "optim"}


@pytest.fixture
def full_root(
    memory_path: Path, scripted: ScriptedBackends, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A root with the whole steps 1 to 4, and a save of step 3 that died two days ago.

    All have one frozen file in common, by hard links.
    """
    pytest.importorskip("xxhash", reason="the extra `reuse`")
    monkeypatch.setattr("ckpt_storage.saves.reuse._MIN_BYTES", 1000)
    root = memory_path / "origin"
    options: dict[str, Any] = {"sync_files": False, "stable": "frozen"}
    for step in (1, 2, 3, 4):
        part_cases.save(root / name_of(step), state_of(step), **options)
        options["base"] = root / name_of(step)
    dies = Script([Rule(action="crash_before", operation="put_absent", path="commits/")])
    with scripted.playing(dies), pytest.raises(errors.CheckpointError, match="SimulatedCrash"):
        part_cases.save(root / name_of(3), state_of(3), overwrite=True, **options)
    assert max(path.stat().st_nlink for path in root.rglob("*.distcp")) == 5
    for path in root.rglob("*"):
        os.utime(path, (path.stat().st_atime - 2 * DAY_S, path.stat().st_mtime - 2 * DAY_S))
    return root


def copy_with_links(origin: Path, root: Path) -> None:
    """Copy a folder; files that are one file there are one file in the copy."""
    copies: dict[int, str] = {}

    def copy_file(source: str, target: str) -> None:
        first = copies.setdefault(Path(source).stat().st_ino, target)
        if first == target:
            shutil.copy2(source, target)
        else:
            Path(target).hardlink_to(first)

    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(origin, root, copy_function=copy_file)


def values_below(root: Path) -> dict[int, dict[str, Any]]:
    """Return all values of each committed step; damage raises."""
    values = {}
    for info in list_checkpoints(root):
        with open_checkpoint(info.url) as checkpoint:
            loaded = {name: checkpoint[name].torch() for name in checkpoint}
        values[int(info.name.rpartition("-")[2])] = loaded
    return values


@pytest.mark.parametrize(
    ("action", "thins"),
    [*((action, True) for action in PRUNE_ACTIONS), ("crash_after", False), ("torn", False)],
)
def test_a_prune_cut_at_any_step_keeps_every_file_that_is_wanted(
    full_root: Path,
    memory_path: Path,
    scripted: ScriptedBackends,
    action: Action,
    record_property: Callable[[str, object], None],
    *,
    thins: bool,
) -> None:
    """After a failure anywhere each step is whole, or thin or gone; the next prune completes it."""
    root = memory_path / "run"
    keep = KEEP | KeepPart(drop="optim*") if thins else KEEP
    quick = RetryPolicy(attempt_count=1)
    copy_with_links(full_root, root)
    dry = Script()
    with scripted.playing(dry):
        report = prune(root, keep, dry_run=False)
    assert (report.thinned or report.deleted) == tuple(map(name_of, OTHER_STEPS))
    ends: Counter[str] = Counter()
    for at, rule in each_fault(dry.calls, {action: PRUNE_ACTIONS[action]}):
        copy_with_links(full_root, root)
        with scripted.playing(Script([rule])):
            try:
                failed = prune(root, keep, dry_run=False, retry=quick).failed
                ends["ended with failures" if failed else "ended"] += 1
            except (SimulatedCrash, errors.CheckpointError) as error:
                ends[type(error).__name__] += 1
        check_steps(root, at, thins=thins, is_complete=False)
        assert prune(root, keep, dry_run=False).failed == {}, at
        check_steps(root, at, thins=thins, is_complete=True)
        # An empty folder may stay where the prune was killed before it removed the folder.
        files = [path.relative_to(root).parts for path in root.rglob("saves/*/manifest.json")]
        expected = WHOLE_STEPS + (OTHER_STEPS if thins else ())
        assert Counter(name for name, *_ in files) == dict.fromkeys(map(name_of, expected), 1), at
    record_property("operations", f"{len(dry.calls)}: {dict(ends)}")
    assert ends.total() > 10


def check_steps(root: Path, at: str, *, thins: bool, is_complete: bool) -> None:
    """Check the values of all steps, of which some were to be thinned or deleted."""
    values = values_below(root)
    for step in WHOLE_STEPS:
        assert same(values.pop(step), state_of(step)), at
    assert not thins or {*values} == {*OTHER_STEPS}, at
    for step, loaded in values.items():
        is_done = thins and same(loaded, part_of(step))
        assert is_done or not is_complete, at
        assert is_done or same(loaded, state_of(step)), at
