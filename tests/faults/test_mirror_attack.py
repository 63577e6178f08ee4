"""A mirror that is cut at every storage operation of either root: nothing is lost, all goes on."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commit_tools import QUICK
from fault_tools import Scripted
from manager_cases import seen_in, state_of
from prune_cases import name_of

import ckpt_storage
from ckpt_storage.errors import CheckpointError
from ckpt_storage.manager.mirror import Mirror
from ckpt_storage.manager.prune import Pruner
from ckpt_storage.manager.retention import KeepLatest, StepNames
from ckpt_storage.manager.root import Root
from ckpt_storage.store import Location, probe
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.testing.faults import Action, Rule, Script, SimulatedCrash


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    """Stores of both roots, as a mirror and a pruner open them."""
    found = Scripted()
    for module in ("export.output", "manager.root"):
        monkeypatch.setattr(f"ckpt_storage.{module}.open_store", found)
    monkeypatch.setattr(logging.getLogger("ckpt_storage"), "disabled", True)
    yield found
    found.close()


def one_turn(run: Path) -> None:
    """Do what a manager does after a save, as a new process: copy, prune there, prune here."""
    probe._RESULTS.clear()  # noqa: SLF001  # as in a new process
    fast, slow = (
        Root(Location.of(run / name), StepNames(), retry=QUICK) for name in ("fast", "slow")
    )
    mirror = Mirror(fast, slow, KeepLatest(2))
    mirror.fill(Deadline("commit", 60))
    Pruner(fast, KeepLatest(1), others=mirror.waiting).prune(Deadline("commit", 60))


def steps_in(root: Path) -> set[int]:
    """Return the committed steps; fails where one is not whole."""
    found = seen_in(root)
    assert all(step == held for step, held in found.items())
    return set(found)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 3 wait for their copies; the mirror has 1, and has pruned 0."""
    run = tmp_path_factory.mktemp("run")
    for step in (1, 2, 3):
        folder = run / "fast" / name_of(step)
        ckpt_storage.save(state_of(step), folder, sync_files=False)
    (run / "slow").mkdir()
    ckpt_storage.copy(run / "fast" / name_of(1), run / "slow" / name_of(1))
    return run


ACTIONS: tuple[Action, ...] = ("crash_before", "error", "lost_answer")
"""Dead after a change is dead before the next one: the storage is the same."""


@pytest.mark.parametrize("action", ACTIONS)
def test_a_mirror_cut_anywhere_loses_nothing_and_goes_on(
    origin: Path,
    tmp_path: Path,
    opened: Scripted,
    action: Action,
    record_property: Callable[[str, object], None],
) -> None:
    """After each cut every step is whole in one of the roots, and the next turn ends the work."""
    run = tmp_path / "dry"
    shutil.copytree(origin, run)
    one_turn(run)
    calls = list(opened.script.calls)
    record_property("operations", len(calls))
    assert len(calls) > 60
    changes = {"put", "delete", "upload", "folder", "part"}
    for number, call in enumerate(calls):
        if not any(word in call.operation for word in changes):
            continue
        at = f"{action} at {number} ({call.operation} {call.path})"
        run = tmp_path / str(number)
        shutil.copytree(origin, run)
        opened.script = Script([Rule(action=action, skip_count=number, retryable=False)])
        with contextlib.suppress(CheckpointError, SimulatedCrash):
            one_turn(run)
        opened.close()
        opened.script = Script()
        fast, slow = steps_in(run / "fast"), steps_in(run / "slow")
        assert 3 in fast, at
        assert {2, 3} <= fast | slow, at
        assert slow, at
        one_turn(run)
        one_turn(run)
        assert (steps_in(run / "fast"), steps_in(run / "slow")) == ({3}, {2, 3}), at
        opened.close()
        shutil.rmtree(run)
