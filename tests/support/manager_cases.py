"""States for tests of the manager, and how a checkpoint of one is damaged; jobs of ranks.

Functions here run in the processes of a `RankPool`, so they are importable and take plain values.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import Any, cast

import torch

from ckpt_storage.background.handle import SaveHandle
from ckpt_storage.errors import CheckpointError
from ckpt_storage.inspect import verify
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.resume import Check, Restored
from ckpt_storage.manager.retention import KeepLatest
from ckpt_storage.options import Timeouts
from ckpt_storage.transfer.ranges import RangeReader

READS: Any = verify
"""The module whose reads a job stands in for."""

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


def saved(root: Path, *steps: int) -> None:
    """Save some steps."""
    with CheckpointManager(root, mode="thread", timeout=60) as manager:
        for step in steps:
            manager.save(step, state_of(step), sync_files=False)


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


class Keeper(logging.Handler):
    """Keeps the texts of what is logged."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.texts.append(record.getMessage())


def resume_each(rank: int, roots: list[str], check: Check) -> list[tuple[int, list[str], bool]]:
    """Restore from one root after the other; return for each what `resume` returns."""
    del rank
    found = []
    for root in roots:
        keeper = Keeper(logging.WARNING)
        logging.getLogger("ckpt_storage").addHandler(keeper)
        try:
            with CheckpointManager(root, timeout=60) as manager:
                one = restore(manager, check=check)
        finally:
            logging.getLogger("ckpt_storage").removeHandler(keeper)
        said = any("Resumed from" in text for text in keeper.texts)
        found.append((one.step, [skipped.name for skipped in one.skipped], said))
    return found


def resume_alone(rank: int, root: str, others: str) -> str:
    """Restore from roots that differ on one rank; return the error."""
    with CheckpointManager(others if rank == 1 else root, timeout=20) as manager:
        try:
            manager.restore(blank())
        except CheckpointError as error:
            return type(error).__name__
    return "nothing was raised"


def decide(rank: int, root: str, noticed: int, steps: int) -> tuple[list[int], str | None, bool]:
    """Ask at each step, with a signal on one rank only; return when to save, and why."""
    taken: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: taken.append(number))
    try:
        with CheckpointManager(
            root, every_steps=10, signals=(signal.SIGUSR1,), timeout=60
        ) as manager:
            saves = []
            for step in range(1, steps):
                if step == 5 and rank == noticed:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if manager.should_save(step):
                    saves.append(step)
                if manager.preempted:
                    break
            preempted = manager.preempted
        handler = signal.getsignal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert callable(handler)
    return saves, preempted, bool(taken)


def decide_apart(rank: int, root: str) -> str:
    """Ask at different steps on each rank; return the error."""
    with CheckpointManager(root, every_s=0.0, timeout=20) as manager:
        try:
            manager.should_save(5 + rank)
        except CheckpointError as error:
            return type(error).__name__
    return "nothing was raised"


def make_again(rank: int, root: str) -> str:
    """Make a manager that is refused on rank 1 alone, then a right one; return what is restored."""
    if rank == 1:
        for wrong in ({"every_steps": 0}, {"signals": (signal.SIGKILL,)}, {"every_s": -1.0}):
            with contextlib.suppress(CheckpointError):
                CheckpointManager(root, timeout=20, **cast("dict[str, Any]", wrong))
    with CheckpointManager(root, timeout=20) as manager:
        return restore(manager).info.name


def resume_deep(rank: int, root: str) -> tuple[int, int | None, list[str | None]]:
    """Restore after checking all; return the step, that of `latest`, and the ids skipped."""
    del rank
    with CheckpointManager(root, timeout=60) as manager:
        found = restore(manager, check="deep")
        latest = manager.latest()
    ids = [one.save_id for one in found.skipped]
    return found.step, None if latest is None else latest.step, ids


def decide_unlike(rank: int, root: str, what: str) -> str:
    """Ask when to save with an argument that rank 1 alone has; return the error."""
    options: dict[str, Any] = {"every_steps": 3}
    if rank == 1:
        given = {"preemption": lambda: False, "every_steps": 4, "every_s": 9.0, "names": "s{step}"}
        options[what] = given[what]
    with CheckpointManager(root, timeout=20, **options) as manager:
        try:
            manager.should_save(1)
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


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
    text = "nothing was raised"
    with (
        CheckpointManager(root, timeout=waits, mode="thread") as manager,
        contextlib.ExitStack() as held,
    ):
        begin = manager.save_async if in_background else manager.save
        step, metrics = 7, {"loss": 1.0}
        if rank == bad_rank and what == "metrics":
            metrics = {"loss": cast("float", None)}
        if rank == bad_rank and what == "step":
            step = -1
        if rank == bad_rank and what == "claim":
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


def large_state() -> dict[str, Any]:
    """Return a state that is large beside one block, and holds what `state_of` does."""
    more = {f"t{number}": torch.rand(300_000) for number in range(20)}
    return {**state_of(1), **more}


def resume_counting(rank: int, root: str) -> int:
    """Restore after checking all; return how many bytes this rank read to check."""
    del rank
    counts: list[int] = []

    class Counted(RangeReader):
        def run(self, reads: Any, **options: Any) -> None:
            counts.extend(read.stop - read.start for read in reads)
            super().run(reads, **options)

    READS.RangeReader = Counted
    try:
        with CheckpointManager(root, timeout=60) as manager:
            restore(manager, check="deep")
    finally:
        READS.RangeReader = RangeReader
    return sum(counts)


def resume_hanging(rank: int, root: str) -> tuple[int, list[str]]:
    """Restore where the checking reads of rank 0 never end by themselves, of a large state."""

    class Hanging(RangeReader):
        def run(self, reads: Any, **options: Any) -> None:
            while rank == 0 and sum(read.stop - read.start for read in reads) > 1_000_000:
                self.deadline.check("The read")
                self.deadline.sleep(0.01)
            super().run(reads, **options)

    READS.RangeReader = Hanging
    try:
        with CheckpointManager(root, timeout=60) as manager:
            found = restore(manager, check="deep")
    finally:
        READS.RangeReader = RangeReader
    return found.step, [one.name for one in found.skipped]
