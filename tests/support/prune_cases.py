"""A root with many checkpoints on one dict, pruned through it; an oracle of what may be lost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
        self._inner, self._prefix = inner, f"{folder}/"
        self.url = f"{inner.url}/{folder}/"

    def bounded(self, deadline: Deadline) -> Below:
        """Return this store, ending by a deadline."""
        return Below(self._inner.bounded(deadline), self._prefix.rstrip("/"))

    def __getattr__(self, name: str) -> Any:
        """Return a fact of the whole, or an operation whose path or paths come first."""
        whole = getattr(self._inner, name)
        if not callable(whole) or name in {"server_time", "policy"}:
            return whole

        def call(path: str | Sequence[str], *given: Any, **more: Any) -> Any:
            if isinstance(path, str):
                return whole(self._prefix + path, *given, **more)
            return whole([self._prefix + one for one in path], *given, **more)

        return call

    def list(self, prefix: str, *, recursive: bool = True) -> list[ObjectInfo]:
        """Return the objects below a folder."""
        found = self._inner.list((self._prefix + prefix).rstrip("/"), recursive=recursive)
        return [replace(entry, path=entry.path.removeprefix(self._prefix)) for entry in found]

    def abort_uploads(self, prefix: str, *, only: Callable[[str], bool] | None = None) -> int:
        """Abort open uploads."""
        is_meant = only and (lambda path: only(path.removeprefix(self._prefix)))
        return self._inner.abort_uploads(self._prefix + prefix, only=is_meant)


class DiskRoot(Root):
    """A root on a store that is there already, in one thread."""

    def __init__(self, store: Store, names: str = "step-{step:08d}") -> None:
        place = Location.of("memory://r")
        super().__init__(place, StepNames(names), retry=QUICK)
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
    documents: dict[str, Any] = {"manifest": attempt.manifest, "stock": attempt.stock}
    record = commit.commit(here, attempt.grant, **documents, user=user)
    published(here, attempt, record)
    return attempt.save_id


def scene(capabilities: Capabilities) -> Disk:
    """Return a root on which everything is that a prune may meet.

    Steps 1 to 6 are committed, 2 twice and 3 with an export; 7 is being saved, 8 died long ago.
    9 is a deletion that was cut after its record. And what others put there.
    """
    disk = race_scene(capabilities, range(1, 7), 9)
    store = DictStore(disk, capabilities)
    fenced(at(store, 9), heads(disk.files)[9])
    record = disk.files[f"{name_of(9)}/commits/00000002.json"]
    as_deleted = sealed({**body_of(record), "type": "deleted", "head": None})
    disk.put(f"{name_of(9)}/commits/00000002.json", as_deleted)
    written(at(store, 7), begun(at(store, 7)))
    return disk


def race_scene(capabilities: Capabilities, steps: Iterable[int] = (2, 3, 5, 6), *more: int) -> Disk:
    """Return a smaller root: 2 is committed twice, 3 with an export, 5 and 6; 8 died long ago."""
    disk = Disk()
    store = DictStore(disk, capabilities)
    for step in (*steps, *more):
        save(store, step, loss=abs(step - 4.0))
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
