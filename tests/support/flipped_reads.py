"""A wrong byte in the kernel's page cache, while the disk has the right byte.

    python tests/support/flipped_reads.py 100

Each seed chooses a kind of file and a byte of it. The file is restored from by way of the wrong
answer, which must give the newest step; then the byte is changed on the disk, which `verify` must
find. Prints the kinds and the failures; the exit code is 1 if there are any.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ckpt_storage import CheckpointError, CheckpointManager, save, verify
from ckpt_storage.store import Location, registry
from ckpt_storage.store.backend import Settings
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.backends.posix import Posix

STEPS = (1, 2, 3)
KINDS = {
    "slot": "commits/*.json",
    "manifest": "saves/*/manifest.json",
    "rank manifest": "saves/*/ranks/*.json",
    "shard": "saves/*/*.distcp",
    "stock copy": "saves/*/stock.metadata",
    ".metadata": ".metadata",
    "marker": "saves/*/begun.json",
}


class CachedFlip(Posix):
    """Reads of one file have a wrong byte until its pages are dropped from the page cache."""

    def __init__(self, path: Path, position: int) -> None:
        self._path, self._position = str(path), position
        self._fds: dict[int, str] = {}
        self.was_read = self.is_dropped = False

    def open_read(self, path: str) -> int:
        fd = super().open_read(path)
        self._fds[fd] = path
        return fd

    def close(self, fd: int) -> None:
        self._fds.pop(fd, None)
        super().close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = super().preadv(fd, buffers, offset)
        at = self._position - offset
        if self._fds.get(fd) == self._path and not self.is_dropped and 0 <= at < count:
            self.was_read = True
            for view in buffers:
                if at < view.nbytes:
                    view.cast("B")[at] ^= 1 << self._position % 8
                    break
                at -= view.nbytes
        return count

    def forget(self, fd: int) -> None:
        self.is_dropped |= self._fds.get(fd) == self._path
        super().forget(fd)


@contextmanager
def reading_through(posix: Posix) -> Iterator[None]:
    """Have all local stores that are opened meanwhile make their system calls through `posix`."""

    def backend_of(location: Location, settings: Settings) -> LocalBackend:
        return LocalBackend(location, settings, posix=posix)

    with mock.patch.object(registry, "backend_of", backend_of):
        yield


def state_of(step: int) -> dict[str, Any]:
    values = torch.arange(40_000, dtype=torch.float32) + step
    return {
        "weights": values.reshape(200, 200),
        "bias": torch.full((7,), step),
        "note": f"at {step}",
    }


def save_steps(root: Path) -> None:
    """Save a few steps, the newest step twice, as an overwrite leaves two slots."""
    with CheckpointManager(root) as manager:
        for step in STEPS:
            manager.save(step, state_of(step))
    save(state_of(STEPS[-1]), newest_of(root), overwrite=True, step=STEPS[-1])


def newest_of(root: Path) -> Path:
    return max(path for path in root.iterdir() if path.is_dir())


def newest_file(checkpoint: Path, kind: str) -> Path:
    """Return the file of a kind that was written last: ids of one second are in no order."""
    return max(checkpoint.glob(KINDS[kind]), key=lambda path: path.stat().st_mtime_ns)


def chosen(root: Path, seed: int) -> tuple[str, Path, int]:
    """Return the kind of file that a seed chooses, a file of it that readers use, and a byte."""
    draw, newest = random.Random(seed), newest_of(root)
    kind = draw.choice(list(KINDS))
    path = max(newest.glob(KINDS[kind]))
    return kind, path, draw.randrange(path.stat().st_size)


def restored_step(root: Path, posix: Posix) -> int:
    """Return the step that a restore gives, checking its values."""
    state: dict[str, Any] = {
        key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else ""
        for key, v in state_of(0).items()
    }
    with reading_through(posix), CheckpointManager(root) as manager:
        restored = manager.restore(state)
    assert restored is not None
    assert torch.equal(state["weights"], state_of(restored.step)["weights"])
    assert state["note"] == f"at {restored.step}"
    return restored.step


def damage_is_found(path: Path, position: int, checkpoint: Path) -> bool:
    """Change a byte on the disk, and return whether `verify` finds a problem; change it back."""
    before = path.read_bytes()
    content = bytearray(before)
    content[position] ^= 1 << position % 8
    path.write_bytes(content)
    try:
        return not verify(checkpoint).ok
    finally:
        path.write_bytes(before)


def main(count: int) -> int:
    failures, kinds = [], Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "run")
        save_steps(root)
        for seed in range(count):
            kind, path, position = chosen(root, seed)
            kinds[kind] += 1
            try:
                step = restored_step(root, CachedFlip(path, position))
            except CheckpointError as error:
                failures.append(f"seed {seed}, {kind} at {position}: {error}")
            else:
                if step != STEPS[-1]:
                    failures.append(f"seed {seed}, {kind} at {position}: step {step}")
            if not damage_is_found(path, position, newest_of(root)):
                failures.append(
                    f"seed {seed}, {kind} at {position}: damage at rest was not detected"
                )
    lines = [*failures, str(dict(kinds)), f"{count} seeds, {len(failures)} failures"]
    sys.stdout.write("\n".join(lines) + "\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
