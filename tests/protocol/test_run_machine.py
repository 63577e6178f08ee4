"""Saves, crashes, prunes, deletions, exports and copies of a run in any order, against a dict."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fault_tools import Faulty
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from limits import HANG_S
from manager_cases import blank, seen_in, state_of, step_in
from prune_cases import name_of
from safetensors.torch import load_file

import ckpt_storage
from ckpt_storage import CheckpointError, CheckpointManager
from ckpt_storage.manager.listing import find_newest
from ckpt_storage.manager.mirror import Mirror
from ckpt_storage.manager.names import StepNames
from ckpt_storage.manager.policies import KeepLatest
from ckpt_storage.manager.prune import Pruner
from ckpt_storage.manager.root import Root
from ckpt_storage.store import Location, abilities
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.testing.faults import Rule, SimulatedCrash

pytestmark = pytest.mark.usefixtures("one_core")

STEPS = st.integers(0, 5)
CUTS = st.one_of(st.none(), st.integers(0, 90))
"""After how many storage operations the process dies; None: it lives."""

OPENERS = ("export.output", "manager.root", "saves.session")


class Run(RuleBasedStateMachine):
    """A root and its mirror; `fast` and `slow` map each step to what was saved there."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.fast: dict[int, int] = {}
        self.slow: dict[int, int] = {}
        self.count = 0
        logging.getLogger("ckpt_storage").disabled = True
        self.begin_process()

    def teardown(self) -> None:
        self.manager.close()
        logging.getLogger("ckpt_storage").disabled = False
        shutil.rmtree(self.folder)

    def begin_process(self) -> None:
        abilities.RECORDS.clear()  # as in a new process
        self.manager = CheckpointManager(self.folder / "fast", timeout=HANG_S, mode="thread")
        self.fast_root, self.slow_root = (
            Root(Location.of(self.folder / name), StepNames()) for name in ("fast", "slow")
        )

    @contextlib.contextmanager
    def dying(self, cut: int | None) -> Iterator[None]:
        """Let the process die inside after some storage operations, and another begin."""
        rules = [] if cut is None else [Rule(action="crash_before", skip_count=cut)]
        opener = Faulty("", *rules)
        self.is_dead = False
        with contextlib.ExitStack() as patches:
            for module in OPENERS:
                patches.enter_context(mock.patch(f"ckpt_storage.{module}.open_store", opener))
            try:
                yield
            except (CheckpointError, SimulatedCrash):
                assert opener.script.crashed
        opener.close()
        if opener.script.crashed:
            self.is_dead = True
            self.begin_process()

    def changed(self, before: dict[int, int], after: dict[int, int], now: dict[int, int]) -> None:
        """Check that each step is as before or as it was to be; if nothing died, the latter."""
        if not self.is_dead:
            assert now == after
        for step in before.keys() | after.keys():
            assert now.get(step) in {before.get(step), after.get(step)}
        assert now.keys() <= before.keys() | after.keys()

    @rule(step=STEPS, cut=CUTS)
    def save(self, step: int, cut: int | None) -> None:
        self.count += 1
        with self.dying(cut):
            self.manager.save(step, state_of(self.count), overwrite=True, sync_files=False)
        now = seen_in(self.folder / "fast")
        self.changed(self.fast, {**self.fast, step: self.count}, now)
        self.fast = now

    @rule(step=STEPS, cut=CUTS)
    def delete(self, step: int, cut: int | None) -> None:
        after = {one: mark for one, mark in self.fast.items() if one != step}
        with self.dying(cut):
            assert self.manager.delete(step) or step not in self.fast
        now = seen_in(self.folder / "fast")
        self.changed(self.fast, after, now)
        self.fast = now

    @rule(count=st.integers(1, 3), is_mirrored=st.booleans(), cut=CUTS)
    def prune(self, count: int, is_mirrored: bool, cut: int | None) -> None:  # noqa: FBT001
        mirror = Mirror(self.fast_root, self.slow_root, None)
        with self.dying(cut):
            more: dict[str, Any] = {"protect": mirror.pending} if is_mirrored else {}
            Pruner(self.fast_root, KeepLatest(count), **more).prune(Deadline("commit", 60))
        now, newest = seen_in(self.folder / "fast"), set(sorted(self.fast)[-count:])
        waiting = {one for one, mark in self.fast.items() if self.slow.get(one) != mark}
        assert now.items() <= self.fast.items()
        assert newest <= now.keys()
        if is_mirrored:
            assert waiting <= now.keys()
        elif not self.is_dead:
            # The one that was committed last is kept besides.
            assert len(now) <= count + 1
        self.fast = now

    @rule(cut=CUTS)
    def copy(self, cut: int | None) -> None:
        with self.dying(cut):
            Mirror(self.fast_root, self.slow_root, None).fill(Deadline("commit", 60))
        now = seen_in(self.folder / "slow")
        self.changed(self.slow, {**self.slow, **self.fast}, now)
        self.slow = now

    @precondition(lambda self: self.fast)
    @rule(data=st.data())
    def consolidate(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.fast)))
        folder = self.folder / "fast" / name_of(step)
        ckpt_storage.consolidate(folder)
        # Beside an older export's names there are others, which an index tells.
        (file,) = (folder / "hf").glob("model*.safetensors")
        weights = load_file(file)
        assert torch.equal(weights["w"], state_of(self.fast[step])["w"])

    @rule()
    def restart(self) -> None:
        self.manager.close()
        self.begin_process()

    @rule()
    def lose_disk(self) -> None:
        shutil.rmtree(self.folder / "fast", ignore_errors=True)
        self.fast = {}
        self.restart()

    @invariant()
    def the_newest_of_both_is_found(self) -> None:
        """What would be resumed from is the highest step of both roots, the later save of it."""
        found = find_newest([self.fast_root, self.slow_root], Deadline("load", 60))
        both = {**self.slow, **self.fast}
        assert (None if found is None else found.step) == max(both, default=None)
        if found is not None and found.step is not None:
            state = blank()
            ckpt_storage.load(state, found.url)
            assert step_in(state) == both[found.step]


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=25, stateful_step_count=15, phases=[Phase.generate])
