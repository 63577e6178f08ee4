"""A root with many checkpoints on one dict, pruned through it; an oracle of what may be lost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commit_tools import (
    DAY_S,
    QUICK,
    DictStore,
    Disk,
    attempted,
    begun,
    body_of,
    committed,
    fenced,
    files_of,
    published,
    sealed,
    seen,
    written,
)

from ckpt_storage.commit import attempt as commit
from ckpt_storage.format.exports import Holder, Names
from ckpt_storage.manager.prune import Pruner
from ckpt_storage.manager.retention import Keep, PruneReport, StepNames
from ckpt_storage.manager.root import Root
from ckpt_storage.store import Location
from ckpt_storage.store.backend import Capabilities, ObjectInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

OTHERS = {
    "tokenizer/vocab.json": b"{}",
    "step-12/.metadata": b"stock",
    "step-00000002-old/model.safetensors": b"weights of others",
    "step-00000001/notes.txt": b"keep me",
}
"""What other tools put there; the last beside a checkpoint of ours."""

EXPORT = {
    "hf/.ckpt-storage/names.json": Names(fingerprint="a" * 64).encode(),
    "hf/.ckpt-storage/job.json": Holder(run_id="b" * 32, fingerprint="a" * 64).encode(),
    "hf/.ckpt-storage/aaaaaaaaaaaaaaaa/00001.json": b"{}",
    "hf/.ckpt-storage/aaaaaaaaaaaaaaaa/output.json": b"{}",
    "hf/model.safetensors": b"weights",
    "hf/model-00001-of-00002-aaaaaaaa.safetensors": b"weights",
    "hf/model.safetensors.index.json": b"{}",
}


class Below:
    """A folder of a store, as a store; every operation is one of the whole."""

    def __init__(self, inner: Store, folder: str) -> None:
        self._inner = inner
        self._prefix = f"{folder}/"
        self.capabilities: Capabilities = inner.capabilities
        self.deadline, self.policy, self.scope = inner.deadline, inner.policy, inner.scope

    @property
    def url(self) -> str:
        """The root, for messages."""
        return f"{self._inner.url}/{self._prefix}"

    def bounded(self, deadline: Deadline) -> Below:
        """Return this store, ending by a deadline."""
        found = Below(self._inner.bounded(deadline), self._prefix.rstrip("/"))
        found.deadline = deadline
        return found

    def __getattr__(self, name: str) -> Any:
        """Return an operation on one object, whose path comes first."""
        whole = getattr(self._inner, name)
        return lambda path, *given, **more: whole(self._prefix + path, *given, **more)

    def make_folders(self, folders: Sequence[str]) -> None:
        """Make folders."""
        self._inner.make_folders([self._prefix + folder for folder in folders])

    def list(self, prefix: str, *, recursive: bool = True) -> list[ObjectInfo]:
        """Return the objects below a folder."""
        whole = (self._prefix + prefix).rstrip("/")
        cut = len(self._prefix)
        return [
            ObjectInfo(
                path=entry.path[cut:], size_bytes=entry.size_bytes, modified_s=entry.modified_s
            )
            for entry in self._inner.list(whole, recursive=recursive)
        ]

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects."""
        self._inner.delete([self._prefix + path for path in paths])

    def abort_uploads(self, prefix: str, *, only: Callable[[str], bool] | None = None) -> int:
        """Abort open uploads."""
        cut = len(self._prefix)
        is_meant = None if only is None else lambda path: only(path[cut:])
        return self._inner.abort_uploads(self._prefix + prefix, only=is_meant)

    def server_time(self, probe_path: str) -> float:
        """Return the clock of the whole."""
        return self._inner.server_time(probe_path)

    def close(self) -> None:
        """Do nothing."""


class DiskRoot(Root):
    """A root on a store that is there already, in one thread."""

    def __init__(self, store: Store, names: str = "step-{step:08d}") -> None:
        place = Location.of("memory://r")
        super().__init__(place, StepNames(names), retry=QUICK, thread_count=1)
        self._store = store

    def open(self, deadline: Deadline, name: str | None = None) -> Any:
        """Return the store at the root, or at one checkpoint."""
        del deadline
        return Below(self._store, name) if name else self._store


def name_of(step: int) -> str:
    """Return the folder of a step, spelt without the package."""
    return f"step-{step:08d}"


def at(store: Store, step: int) -> Any:
    """Return the store at a step."""
    return Below(store, name_of(step))


def save(store: Store, step: int, *, loss: float | None = None) -> str:
    """Save a step completely; return the save id."""
    here = at(store, step)
    attempt = attempted(here)
    user = {"step": step} if loss is None else {"step": step, "metrics": {"loss": loss}}
    record = commit.commit(
        here,
        attempt.grant,
        manifest=attempt.manifest,
        stock=attempt.stock,
        user=user,
    )
    published(here, attempt, record)
    return attempt.save_id


def scene(capabilities: Capabilities) -> Disk:
    """Return a root on which everything is that a prune may meet.

    Steps 1 to 6 are committed, 2 twice and 3 with an export; 7 is being saved, 8 died long ago.
    9 is a deletion that was cut after its record. And what others put there.
    """
    disk = Disk()
    store = DictStore(disk, capabilities)
    for step in range(1, 7):
        save(store, step, loss=abs(step - 4.0))
    again = at(store, 2)
    committed(again, attempted(again))
    for path, data in EXPORT.items():
        disk.put(f"{name_of(3)}/{path}", data)
    save(store, 9)
    fenced(at(store, 9), heads(disk.files)[9])
    record = disk.files[f"{name_of(9)}/commits/00000002.json"]
    disk.put(f"{name_of(9)}/commits/00000002.json", _as_deleted(record))
    attempted(at(store, 8))
    disk.clock_s += 2 * DAY_S
    written(at(store, 7), begun(at(store, 7)))
    for path, data in OTHERS.items():
        disk.put(path, data)
    return disk


def _as_deleted(fence: bytes) -> bytes:
    """Return the fence record as the record of a deletion."""
    return sealed({**body_of(fence), "type": "deleted", "head": None})


def race_scene(capabilities: Capabilities) -> Disk:
    """Return a smaller root: 2 is committed twice, 3 with an export, 5 and 6; 8 died long ago."""
    disk = Disk()
    store = DictStore(disk, capabilities)
    for step in (2, 3, 5, 6):
        save(store, step)
    again = at(store, 2)
    committed(again, attempted(again))
    for path, data in EXPORT.items():
        disk.put(f"{name_of(3)}/{path}", data)
    attempted(at(store, 8))
    disk.clock_s += 2 * DAY_S
    for path, data in OTHERS.items():
        disk.put(path, data)
    return disk


@functools.lru_cache(maxsize=10_000)
def _head_of(slots: tuple[tuple[str, bytes], ...]) -> str | None:
    return seen(dict(slots)).head


def heads(files: Mapping[str, bytes]) -> dict[int, str]:
    """Return the save id of each committed step; fails where one is not whole."""
    slots: dict[str, list[tuple[str, bytes]]] = {}
    for path, data in files.items():
        name, _, rest = path.partition("/")
        if rest.startswith("commits/"):
            slots.setdefault(name, []).append((rest, data))
    found = {}
    for name, records in slots.items():
        head = _head_of(tuple(sorted(records)))
        if head is not None:
            missing = [path for path in files_of(head) if f"{name}/{path}" not in files]
            assert not missing, f"{name} is committed, and {missing} are gone"
            found[int(name.removeprefix("step-"))] = head
    return found


def pruner(store: Store, keep: Keep, disk: Disk, **options: Any) -> Pruner:
    """Return a pruner that trusts what is there."""
    root = DiskRoot(store)
    for step, save_id in heads(disk.files).items():
        root.found_sound(name_of(step), save_id)
    return Pruner(root, keep, **options)


def prune(store: Store, keep: Keep, disk: Disk, **options: Any) -> PruneReport:
    """Prune once, as a new process."""
    return pruner(store, keep, disk, **options).prune(Deadline("commit", 600))
