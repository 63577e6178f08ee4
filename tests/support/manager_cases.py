"""States for tests of the manager, and how a checkpoint of one is damaged; jobs of ranks.

Functions here run in the processes of a `RankPool`, so they are importable and take plain values.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import ckpt_storage
from ckpt_storage import CheckpointError, CheckpointManager, KeepLatest, PruneReport, SaveHandle
from ckpt_storage.inspect import verify
from ckpt_storage.manager.resume import Check, Restored
from ckpt_storage.options import Timeouts
from ckpt_storage.transfer.ranges import RangeReader

MARK = bytes(range(64))
"""Bytes of the saved tensor that one finds in the shard file."""


def state_of(step: int) -> dict[str, Any]:
    """Return the state of a step."""
    return {
        "w": torch.full((16,), float(step)),
        "mark": torch.frombuffer(bytearray(MARK), dtype=torch.uint8),
        "step": step,
    }


def blank() -> dict[str, Any]:
    """Return what a state is loaded into."""
    return {"w": torch.zeros(16), "mark": torch.zeros(64, dtype=torch.uint8), "step": -1}


def step_in(state: dict[str, Any]) -> int:
    """Return which step a state is of; fails for a mixture."""
    step = int(state["step"])
    assert torch.equal(state["w"], torch.full((16,), float(step)))
    assert bytes(state["mark"].numpy()) == MARK
    return step


def seen_in(root: Path) -> dict[int, int]:
    """Return what each committed step holds; fails for a mixture."""
    found = {}
    for info in ckpt_storage.list_checkpoints(root):
        state = blank()
        ckpt_storage.load(state, info.url)
        found[int(info.name.removeprefix("step-"))] = step_in(state)
    return found


def damage(folder: Path) -> None:
    """Flip one bit of the tensor in every shard file below a folder."""
    count = 0
    for path in folder.glob("saves/*/*.distcp"):
        data = bytearray(path.read_bytes())
        at = data.find(MARK)
        if at >= 0:
            data[at + 7] ^= 4
            path.write_bytes(data)
            count += 1
    assert count


def names_in(root: Path) -> list[str]:
    """Return the folders of the root in which something besides slots is."""
    return sorted(
        path.name
        for path in root.iterdir()
        if any(file.is_file() and file.parent.name != "commits" for file in path.rglob("*"))
    )


def restore(manager: CheckpointManager, **options: Any) -> Restored:
    """Restore into a new state and check that it is of the step that is told."""
    state = blank()
    found = manager.restore(state, **options)
    assert found is not None
    assert step_in(state) == found.step
    return found


def manager_of(root: Path, **options: Any) -> CheckpointManager:
    """Return a manager that saves asynchronously in threads."""
    chosen: dict[str, Any] = {"mode": "thread", "timeout": 60, **options}
    return CheckpointManager(root, **chosen)


def save(manager: CheckpointManager, *steps: int, **options: Any) -> None:
    """Save some steps."""
    for step in steps:
        manager.save(step, state_of(step), sync_files=False, **options)


def saved(root: Path, *steps: int, **options: Any) -> None:
    """Save some steps with a manager of its own."""
    with manager_of(root, **options) as manager:
        save(manager, *steps)


def pruned(manager: CheckpointManager, **options: Any) -> PruneReport:
    """Prune by hand, where there is something to go by."""
    report = manager.prune(**options)
    assert report is not None
    return report


def latest_step(manager: CheckpointManager) -> int | None:
    """Return the step of the newest, which is there."""
    latest = manager.latest()
    assert latest is not None
    return latest.step


def train(rank: int, root: str, steps: int) -> list[str]:
    """Save on all ranks, prune, restore; return what is left and which was restored."""
    with CheckpointManager(root, keep=KeepLatest(2), timeout=60, mode="thread") as manager:
        for step in range(1, steps):
            manager.save(step, state_of(step), metrics={"loss": rank}, sync_files=False)
        handle = manager.save_async(steps, state_of(steps), sync_files=False)
        handle.result(60)
        assert manager.wait_pruned(60)
        assert (manager.prune() is None) == (rank != 0)
        found = restore(manager)
        infos = manager.all()
        assert infos[0].metrics in ({"loss": 0.0}, {})
        return [*(info.name for info in infos), found.info.save_id or ""]


def resume_each(
    rank: int, roots: list[str], check: Check
) -> list[tuple[int, int | None, list[tuple[str, str | None]], bool]]:
    """Restore from one root after the other.

    Return for each the step, that of `latest`, names and ids that were skipped, and whether this
    rank said so.
    """
    del rank
    found = []
    for root in roots:
        with (
            mock.patch.object(logging.getLogger("ckpt_storage"), "warning") as warning,
            CheckpointManager(root, timeout=60) as manager,
        ):
            one, latest = restore(manager, check=check), manager.latest()
        said = any("Resumed from" in call.args[0] for call in warning.call_args_list)
        skipped = [(each.name, each.save_id) for each in one.skipped]
        found.append((one.step, None if latest is None else latest.step, skipped, said))
    return found


def outcome(rank: int, method: str, given: Sequence[Any], options: Sequence[Any]) -> str:
    """Call a method with the argument of this rank, and its own options; return the error."""
    with CheckpointManager(timeout=20, **options[rank]) as manager:
        try:
            getattr(manager, method)(given[rank])
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def decide(rank: int, root: str, noticed: int, steps: int) -> tuple[list[int], str | None, bool]:
    """Ask at each step, with a signal on one rank only; return when to save, and why."""
    taken: list[int] = []
    saves: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: taken.append(number))
    try:
        with CheckpointManager(
            root, every_steps=10, signals=(signal.SIGUSR1,), timeout=60
        ) as manager:
            for step in range(1, steps):
                if step == 5 and rank == noticed:
                    os.kill(os.getpid(), signal.SIGUSR1)
                saves += [step] if manager.should_save(step) else []
                if manager.preempted:
                    break
            preempted = manager.preempted
    finally:
        handler = signal.signal(signal.SIGUSR1, before)
    assert callable(handler)
    return saves, preempted, bool(taken)


def make_again(rank: int, root: str) -> str:
    """Make a manager that is refused on rank 1 alone, then a right one; return what is restored."""
    if rank == 1:
        wrong: Any
        for wrong in ({"every_steps": 0}, {"signals": (signal.SIGKILL,)}, {"every_s": -1.0}):
            with contextlib.suppress(CheckpointError):
                CheckpointManager(root, timeout=20, **wrong)
    with CheckpointManager(root, timeout=20) as manager:
        return restore(manager).info.name


def resume_and_save(rank: int, root: str) -> tuple[int, str]:
    """Restore, save the step that was passed over again; return what was restored, and is then."""
    del rank
    with CheckpointManager(root, timeout=60, mode="thread") as manager:
        found = restore(manager)
        step = found.step + 1
        manager.save_async(step, state_of(step), sync_files=False).result(60)
    with CheckpointManager(root, timeout=60) as manager:
        return found.step, restore(manager).info.name


def save_unlike(
    rank: int,
    root: str,
    what: str,
    bad_rank: int,
    in_background: bool,  # noqa: FBT001  # called by position, in another process
) -> tuple[str, str]:
    """Save with something wrong on one rank, then well; return the error, and what was saved."""
    waits = Timeouts(plan=2.0 if what == "claim" else 60.0)
    text, is_bad = "nothing was raised", rank == bad_rank
    with (
        CheckpointManager(root, timeout=waits, mode="thread") as manager,
        contextlib.ExitStack() as held,
    ):
        begin = manager.save_async if in_background else manager.save
        metrics: Any = {"loss": None if is_bad and what == "metrics" else 1.0}
        step = -1 if is_bad and what == "step" else 7
        if is_bad and what == "claim":
            uses = manager._root.uses  # noqa: SLF001  # nothing public stops in the middle
            held.enter_context(uses.deleting("step-00000007"))
        try:
            begun = begin(step, state_of(7), metrics=metrics, sync_files=False)
            if isinstance(begun, SaveHandle):
                begun.result(60)
        except CheckpointError as error:
            text = f"rank {error.rank}: {error}"
        held.close()
        info = manager.save(8, state_of(8), sync_files=False)
    return text, info.name


def save_large(rank: int, root: str, step: int) -> None:
    """Save a state of which each rank has a part that is large beside one block."""
    more = {f"t{rank}.{number}": torch.rand(300_000) for number in range(10)}
    with CheckpointManager(root, timeout=60) as manager:
        manager.save(step, {**state_of(step), **more}, sync_files=False)


def resume_watched(rank: int, root: str, hanging_rank: int) -> tuple[int, list[str], int]:
    """Restore after checking all; return the step, what was skipped, and the bytes checked here.

    Long reads of the hanging rank, if there is one, never end by themselves.
    """
    counts: list[int] = []

    class Watched(RangeReader):
        def run(self, reads: Any, **options: Any) -> None:
            counts.append(sum(read.stop - read.start for read in reads))
            while rank == hanging_rank and counts[-1] > 1_000_000:
                self.store.deadline.check("The read")
                self.store.deadline.sleep(0.01)
            super().run(reads, **options)

    with (
        mock.patch.object(verify, "RangeReader", Watched),
        CheckpointManager(root, timeout=60) as manager,
    ):
        found = restore(manager, check="deep")
    return found.step, [one.name for one in found.skipped], sum(counts)
