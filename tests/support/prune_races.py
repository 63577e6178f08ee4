"""Pruners, savers, readers and deleters of one root, their operations interleaved."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from commit_schedules import Actor, Chooser, Job, Preempting, Wandering, play
from commit_tools import IN_TURN, DictStore, Disk, take_in_turn
from prune_cases import OTHERS, at, heads, prune, race_scene, save

from ckpt_storage.commit import slotlog
from ckpt_storage.commit.cleaning import delete
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    CommitConflictError,
    IntegrityError,
)
from ckpt_storage.manager import prune as pruning_module
from ckpt_storage.manager.retention import KeepEvery, KeepLatest
from ckpt_storage.source import model as source
from ckpt_storage.store import probe
from ckpt_storage.store.backend import Capabilities


def unreadable(*_args: object, **_options: object) -> None:
    """Say of a checkpoint that cannot be read what a check says: its manifest is none here."""
    raise IntegrityError("No manifest.", path="manifest.json", offset=0, next_step="Save again.")


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each prune find out anew what its storage can do, and say nothing of failures.

    Schedules have one request of an actor at a time. What is not known to be sound is damaged.
    """
    take_in_turn(monkeypatch, IN_TURN[0])
    monkeypatch.setattr(pruning_module, "check_part", unreadable)
    monkeypatch.setattr(probe, "_RESULTS", {})
    monkeypatch.setattr(logging.getLogger("ckpt_storage"), "disabled", True)


Coming = tuple[str, Job]
"""Who comes, and what it does as a process of its own would."""


def reading(step: int) -> Coming:
    """Return who loads a step as the reader does: whole and right, or told why not."""

    def job(store: DictStore) -> str:
        here = at(store, step)
        head = slotlog.read_log(here).head
        if head is None or head.save_id is None or head.manifest is None:
            return "nothing is there"
        try:
            manifest = source.read_document(here, head.manifest, save_id=head.save_id)
            shard = here.get(f"saves/{head.save_id}/__0_0.distcp").data
        except CheckpointGoneError:
            return "gone"
        except CheckpointError as error:
            if source.gone(here, head.save_id, "the shard") is None:
                pytest.fail(f"a checkpoint that was not deleted is broken: {error}")
            return "gone"
        assert manifest == f"manifest of {head.save_id}".encode()
        assert shard == f"shard of {head.save_id}".encode()
        return "read"

    return "read", job


def pruning(keep: Any) -> Coming:
    """Return who prunes."""
    return "prune", lambda store: prune(store, keep, store.disk)


def saving(step: int) -> Coming:
    """Return who saves a step."""
    return "save", lambda store: save(store, step)


def deleting(step: int) -> Coming:
    """Return who deletes a step by hand."""
    return "delete", lambda store: delete(at(store, step))


class Watch:
    """After each operation: all that is committed is whole, and some sound step is the newest."""

    def __init__(self, disk: Disk, kept: set[int], *, by_hand: bool) -> None:
        self._kept = kept
        self._by_hand = by_hand
        self._others = {path: data for path, data in disk.files.items() if path in OTHERS}
        self._newest = max(heads(disk.files), default=0)
        self._after: set[int] | None = None
        self._changes = disk.changes
        self.steps = 0

    def __call__(self, disk: Disk) -> None:
        """Compare."""
        self.steps += 1
        if disk.changes == self._changes:
            return
        self._changes = disk.changes
        files = disk.files
        found = heads(files)
        if not self._by_hand:
            assert max(found, default=0) >= self._newest, "the newest was lost"
            assert set(found) >= self._kept
            self._newest = max(found)
        elif self._newest not in found:
            # What was decided a moment before may still be done, and nothing after it.
            self._after = set(found) if self._after is None else self._after
            newest, vanished = max(self._after, default=0), self._after - set(found)
            assert newest in found or vanished <= {newest}
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
    "a pruner and one who deletes the newest by hand": ([pruning(ONE), deleting(6)], set(), 1),
}
"""Who comes at the same time, which steps stay in any case, and the bound of `Preempting`."""


def check_actors(actors: list[Actor], disk: Disk) -> list[str]:
    """Check what the actors were told; return it in a word each."""
    said = []
    for actor in actors:
        if not actor.done:
            continue
        if actor.name == "read":
            assert actor.error is None, actor.error
            said.append(str(actor.result))
        elif actor.name == "save":
            assert actor.error is None or isinstance(actor.error, CommitConflictError), actor.error
            said.append("saved" if actor.error is None else "conflict")
            if actor.error is None:
                everything = b"".join(
                    data for path, data in disk.files.items() if "/commits/" in path
                )
                assert str(actor.result).encode() in everything
        else:
            assert actor.error is None, actor.error
    return said


def check_race(capabilities: Capabilities, name: str, seeds: range, *, systematic: bool) -> str:
    """Play the systematic schedules, if asked for, and those of these seeds; tell how many."""
    jobs, kept, bound = RACES[name]
    origin = race_scene(capabilities)
    in_order = Preempting(bound).schedules() if systematic else ()
    at_random: Iterable[Chooser] = (Wandering(seed) for seed in seeds)
    count = steps = 0
    outcomes: Counter[str] = Counter()
    for choose in itertools.chain(in_order, at_random):
        probe._RESULTS.clear()  # noqa: SLF001  # as in new processes
        disk = origin.copy()
        by_hand = any(kind == "delete" for kind, _ in jobs)
        watch = Watch(disk, kept, by_hand=by_hand)
        actors = play(disk, capabilities, jobs, choose, watch)
        outcomes.update(check_actors(actors, disk))
        count += 1
        steps += watch.steps
    assert count >= len(seeds)
    return f"{name}: {count} schedules, {steps} operations checked, {dict(outcomes)}"
