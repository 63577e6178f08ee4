"""States for tests of the manager, and how its checkpoints are damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ckpt_storage
from ckpt_storage import CheckpointManager, PruneReport
from ckpt_storage.manager.resume import Restored

MARK = bytes(range(64))
"""Bytes of the saved tensor, as they are in the shard file."""


def state_of(step: int) -> dict[str, Any]:
    return {
        "w": torch.full((16,), float(step)),
        "mark": torch.frombuffer(bytearray(MARK), dtype=torch.uint8),
        "step": step,
    }


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(16), "mark": torch.zeros(64, dtype=torch.uint8), "step": -1}


def step_in(state: dict[str, Any]) -> int:
    """Return which step a state is of; fails for a mixture."""
    step = int(state["step"])
    assert torch.equal(state["w"], torch.full((16,), float(step)))
    assert bytes(state["mark"].numpy()) == MARK
    return step


def seen_in(root: Path) -> dict[int, int]:
    """Return what each committed step holds; fails for a mixture."""
    steps = {}
    for info in ckpt_storage.list_checkpoints(root):
        state = blank()
        ckpt_storage.load(state, info.url)
        steps[int(info.name.removeprefix("step-"))] = step_in(state)
    return steps


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
    state = blank()
    restored = manager.restore(state, **options)
    assert restored is not None
    assert step_in(state) == restored.step
    return restored


def manager_of(root: Path, **options: Any) -> CheckpointManager:
    chosen: dict[str, Any] = {"mode": "thread", "timeout": 60, **options}
    return CheckpointManager(root, **chosen)


def save(manager: CheckpointManager, *steps: int, **options: Any) -> None:
    for step in steps:
        manager.save(step, state_of(step), sync_files=False, **options)


def saved(root: Path, *steps: int, **options: Any) -> None:
    with manager_of(root, **options) as manager:
        save(manager, *steps)


def pruned(manager: CheckpointManager, **options: Any) -> PruneReport:
    report = manager.prune(**options)
    assert report is not None
    return report


def latest_step(manager: CheckpointManager) -> int | None:
    latest = manager.latest()
    assert latest is not None
    return latest.step
