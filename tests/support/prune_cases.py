"""A root with many checkpoints on one dict, pruned and raced; an oracle of what may be lost."""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import commit_tools as tools
import pytest
from commit_model import Actor, Chooser, Job, Preempting, Wandering, play

from ckpt_storage import errors
from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit import slotlog
from ckpt_storage.commit.deletion import delete
from ckpt_storage.format.exports import Holder, Names
from ckpt_storage.manager import root as root_module
from ckpt_storage.manager.names import StepNames
from ckpt_storage.manager.policies import Keep, KeepEvery, KeepLatest
from ckpt_storage.manager.prune import Pruner
from ckpt_storage.manager.retention import PruneReport
from ckpt_storage.manager.root import Root
from ckpt_storage.source import model as source
from ckpt_storage.store import Location, abilities
from ckpt_storage.store.backend import Capabilities, ObjectInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

FAR = Deadline("commit", 86_400)

OTHERS = {
    "tokenizer/vocab.json": b"{}",
    "step-12/.metadata": b"stock",
    "step-00000002-old/model.safetensors": b"weights of others",
    "step-00000001/notes.txt": b"keep me",
    "step-00000003/hf/config.json": b"mine",
}
"""What others put there; the last two beside a checkpoint of ours and in an export of it."""

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
        return Below(self._inner.bounded(deadline), self._prefix.rstrip("/"))

    def __getattr__(self, name: str) -> Any:
        """Return a fact of the whole, or an operation whose path or paths come first."""
        whole = getattr(self._inner, name)
        unprefixed = {"durability_problem", "find_scope", "policy", "server_time"}
        if not callable(whole) or name in unprefixed:
            return whole

        def call(path: str | Sequence[str], *args: Any, **more: Any) -> Any:
            if isinstance(path, str):
                return whole(self._prefix + path, *args, **more)
            return whole([self._prefix + each for each in path], *args, **more)

        return call

    def list(self, prefix: str, *, recursive: bool = True) -> list[ObjectInfo]:
        entries = self._inner.list((self._prefix + prefix).rstrip("/"), recursive=recursive)
        return [replace(entry, path=entry.path.removeprefix(self._prefix)) for entry in entries]

    def abort_uploads(self, prefix: str, *, only: Callable[[str], bool] | None = None) -> int:
        is_meant = only and (lambda path: only(path.removeprefix(self._prefix)))
        return self._inner.abort_uploads(self._prefix + prefix, only=is_meant)


class DiskRoot(Root):
    """A root on a store that is there already, in one thread."""

    def __init__(self, store: Store, names: str = "step-{step:08d}") -> None:
        place = Location.of("memory://r")
        super().__init__(place, StepNames(names), retry=tools.QUICK)
        self._store = store

    def open(self, deadline: Deadline, name: str | None = None) -> Any:
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
    attempt = tools.attempted(here)
    user = {"step": step} if loss is None else {"step": step, "metrics": {"loss": loss}}
    documents: dict[str, Any] = {"manifest": attempt.manifest, "stock": attempt.stock}
    record = commit.commit(here, attempt.ticket, **documents, user=user)
    tools.published(here, attempt, record)
    return attempt.save_id


def scene(capabilities: Capabilities = tools.CAS) -> tools.DictStore:
    """Return a root on which everything is that a prune may meet.

    Steps 1 to 6 are committed, 2 twice and 3 with an export; 7 is being saved, 8 died long ago.
    9 is a deletion that was cut after its record. And what others put there.
    """
    store = race_scene(capabilities, (1, 2, 3, 4, 5, 6, 9))
    disk = store.disk
    tools.fenced(at(store, 9), heads(disk.files)[9])
    record = f"{name_of(9)}/commits/00000002.json"
    body = {**tools.body_of(disk.files[record]), "type": "deleted", "head": None}
    disk.put(record, tools.sealed(body))
    tools.attempted(at(store, 7))
    return store


def race_scene(capabilities: Capabilities, steps: Sequence[int] = (2, 3, 5, 6)) -> tools.DictStore:
    """Return a smaller root: 2 is committed twice, 3 with an export, 5 and 6; 8 died long ago."""
    store = tools.DictStore(tools.Disk(), capabilities)
    for step in steps:
        save(store, step, loss=abs(step - 4.0))
    again = at(store, 2)
    tools.committed(again, tools.attempted(again))
    for path, data in EXPORT.items():
        store.disk.put(f"{name_of(3)}/{path}", data)
    tools.attempted(at(store, 8))
    store.disk.clock_s += 2 * tools.DAY_S
    for path, data in OTHERS.items():
        store.disk.put(path, data)
    return store


@functools.lru_cache(maxsize=10_000)
def _head_of(slots: tuple[tuple[str, bytes], ...]) -> str | None:
    return tools.seen(dict(slots)).head


def heads(files: Mapping[str, bytes]) -> dict[int, str]:
    """Return the save id of each committed step; fails unless all are whole."""
    slots: dict[str, list[tuple[str, bytes]]] = {}
    for path, data in files.items():
        name, _, rest = path.partition("/")
        if rest.startswith("commits/"):
            slots.setdefault(name, []).append((rest, data))
    save_ids = {}
    for name, records in slots.items():
        head = _head_of(tuple(sorted(records)))
        if head is not None:
            missing = [path for path in tools.files_of(head) if f"{name}/{path}" not in files]
            assert not missing, f"{name} is committed, and {missing} are gone"
            save_ids[int(name.removeprefix("step-"))] = head
    return save_ids


def pruner(store: tools.DictStore, keep: Keep, **options: Any) -> Pruner:
    """Return a pruner that trusts what is there."""
    root = DiskRoot(store)
    for step, save_id in heads(store.disk.files).items():
        root.record_sound(name_of(step), save_id)
    return Pruner(root, keep, **options)


def prune(store: tools.DictStore, keep: Keep, **options: Any) -> PruneReport:
    """Prune once, as a new process."""
    return pruner(store, keep, **options).prune(FAR)


def unreadable(*_args: object, **_options: object) -> None:
    """Say of a checkpoint that cannot be read what a check says: its manifest is none here."""
    raise errors.IntegrityError(
        "No manifest.", path="manifest.json", offset=0, next_step="Save again."
    )


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each prune find out anew what its storage can do, and say nothing of failures.

    Schedules have one request of an actor at a time. What is not known to be sound is damaged.
    """
    tools.take_in_turn(monkeypatch, tools.IN_TURN[0])
    monkeypatch.setattr(root_module, "check_part", unreadable)
    abilities.RECORDS.clear()
    monkeypatch.setattr(logging.getLogger("ckpt_storage"), "disabled", True)


Coming = tuple[str, Job]
"""An actor and its job, which it runs as a process of its own would."""


def reading(step: int) -> Coming:
    """Return an actor that loads a step as the reader does: the right content, or an error."""

    def job(store: tools.DictStore) -> str:
        here = at(store, step)
        head = slotlog.read_log(here).head
        if head is None or head.save_id is None or head.manifest is None:
            return "nothing is there"
        try:
            manifest = source.read_document(here, head.manifest, save_id=head.save_id)
            shard = here.get(f"saves/{head.save_id}/__0_0.distcp").data
        except errors.CheckpointGoneError:
            return "gone"
        except errors.CheckpointError as error:
            if source.gone(here, head.save_id, "the shard") is None:
                pytest.fail(f"a checkpoint that was not deleted is broken: {error}")
            return "gone"
        assert manifest == f"manifest of {head.save_id}".encode()
        assert shard == f"shard of {head.save_id}".encode()
        return "read"

    return "read", job


def pruning(keep: Any) -> Coming:
    """Return who prunes."""
    return "prune", lambda store: prune(store, keep)


def saving(step: int) -> Coming:
    """Return who saves a step."""
    return "save", lambda store: save(store, step)


def deleting(step: int) -> Coming:
    """Return who deletes a step by hand."""
    return "delete", lambda store: delete(at(store, step))


class RaceWatch:
    """After each operation: all that is committed is whole, and some sound step is the newest."""

    def __init__(self, disk: tools.Disk, kept: set[int], *, by_hand: bool) -> None:
        self._kept = kept
        self._by_hand = by_hand
        self._others = {path: data for path, data in disk.files.items() if path in OTHERS}
        self._newest = max(heads(disk.files), default=0)
        self._after: set[int] | None = None
        self._changes = disk.changes
        self.steps = 0

    def __call__(self, disk: tools.Disk) -> None:
        self.steps += 1
        if disk.changes == self._changes:
            return
        self._changes = disk.changes
        files = disk.files
        committed = heads(files)
        if not self._by_hand:
            assert max(committed, default=0) >= self._newest, "the newest was lost"
            assert set(committed) >= self._kept
            self._newest = max(committed)
        elif self._newest not in committed:
            # What was decided a moment before may still be done, and nothing after it.
            self._after = set(committed) if self._after is None else self._after
            newest, vanished = max(self._after, default=0), self._after - set(committed)
            assert newest in committed or vanished <= {newest}
        assert {path: data for path, data in files.items() if path in OTHERS} == self._others


ONE, TWO = KeepLatest(1), KeepLatest(2)

RACES: Mapping[str, tuple[list[Coming], set[int], int]] = {
    "two pruners": ([pruning(TWO)] * 2, {5, 6}, 1),
    "two pruners of other minds": ([pruning(ONE), pruning(KeepEvery(3))], {6}, 1),
    "a pruner and a saver of the next step": ([pruning(ONE), saving(10)], {6}, 1),
    "a pruner and a saver of what is pruned": ([pruning(TWO), saving(2)], {5, 6}, 1),
    "a pruner and a reader": ([pruning(TWO), reading(2)], {5, 6}, 1),
    "two pruners, a saver and two readers": (
        [pruning(ONE), pruning(TWO), saving(10), reading(3), reading(6)],
        set(),
        0,
    ),
    "a pruner and a user who deletes the newest by hand": ([pruning(ONE), deleting(6)], set(), 1),
}
"""Simultaneous actors, the steps that stay in any case, and the bound of `Preempting`."""


def check_actors(actors: Iterable[Actor], disk: tools.Disk) -> list[str]:
    """Check the results of the actors; return each in short."""
    results = []
    for actor in actors:
        error = actor.error
        if not actor.done:
            continue
        assert error is None or (
            actor.name == "save" and isinstance(error, errors.CommitConflictError)
        )
        if actor.name == "read":
            results.append(str(actor.result))
        elif actor.name == "save":
            results.append("saved" if error is None else "conflict")
            records = [data for path, data in disk.files.items() if "/commits/" in path]
            assert error or str(actor.result).encode() in b"".join(records)
    return results


def check_race(capabilities: Capabilities, name: str, seeds: range, *, systematic: bool) -> str:
    """Play the systematic schedules, if asked for, and those of these seeds; report how many."""
    jobs, kept, bound = RACES[name]
    origin = race_scene(capabilities).disk
    in_order = Preempting(bound).schedules() if systematic else ()
    at_random: Iterable[Chooser] = (Wandering(seed) for seed in seeds)
    count = steps = 0
    outcomes: Counter[str] = Counter()
    for choose in itertools.chain(in_order, at_random):
        abilities.RECORDS.clear()  # as in a new process
        disk = origin.copy()
        by_hand = any(kind == "delete" for kind, _ in jobs)
        watch = RaceWatch(disk, kept, by_hand=by_hand)
        actors = play(disk, capabilities, jobs, choose, watch)
        outcomes.update(check_actors(actors, disk))
        count += 1
        steps += watch.steps
    assert count >= len(seeds)
    return f"{name}: {count} schedules, {steps} operations checked, {dict(outcomes)}"
