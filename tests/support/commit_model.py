"""Savers, pruners, openers and deleters of one checkpoint, their operations interleaved.

After every operation on the storage both views of the checkpoint, ours by the slots and stock
torch's by `.metadata`, lead to a whole attempt, judged by an oracle that knows only the documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from commit_schedules import Actor, Chooser, Job, Preempting, Wandering, play
from commit_tools import (
    DAY_S,
    DictStore,
    Disk,
    attempted,
    cleaned,
    committed,
    deleted,
    is_whole,
    published,
    saved,
    seen,
)

from ckpt_storage.commit import cleaning, publishing, slotlog
from ckpt_storage.commit.cleaning import remove_tombstone
from ckpt_storage.errors import CommitConflictError
from ckpt_storage.store.backend import Capabilities

WEEK_S = 7 * DAY_S

Ends = Literal["", "deletes", "removes"]


def save(store: DictStore) -> str:
    """Do all that a writer's coordinator does; return the save id."""
    attempt = attempted(store)
    record = committed(store, attempt)
    published(store, attempt, record)
    if attempt.grant.previous is not None:
        cleaning.free_superseded(store)
        cleaned(store)
    return attempt.save_id


def prune(store: DictStore) -> None:
    """Free all that may be freed, even what was superseded a moment ago."""
    cleaning.free_superseded(store, keep_previous=0)
    cleaned(store)


def open_it(store: DictStore) -> None:
    """Open the checkpoint with the right to write."""
    head = slotlog.read_log(store).head
    if head is not None and head.save_id is not None:
        publishing.roll_forward(store, head.save_id)


class Watch:
    """The invariants, checked against what was there one operation before."""

    def __init__(self, disk: Disk, capabilities: Capabilities, ends: Ends = "") -> None:
        self._conditional = capabilities.if_match
        self._ends = ends
        self._before = seen(disk.files)
        self._changes = disk.changes
        self.steps = 0

    def __call__(self, disk: Disk) -> None:
        self.steps += 1
        if disk.changes == self._changes:
            return
        self._changes = disk.changes
        files = disk.files
        now, before = seen(files), self._before
        if self._ends != "removes":
            assert list(now.slots[: len(before.slots)]) == list(before.slots), "a slot changed"
        if now.head is not None:
            assert is_whole(files, now.head), "the head dangles"
        if now.stock is not None:
            assert now.stock in now.committed, ".metadata shows what never committed"
            # A saver whose checkpoint is deleted while it publishes takes that back at once.
            # Without conditions one that was paused may show what was freed, until it looks again.
            is_mended = not self._conditional or now.stock in now.deleted
            assert is_mended or is_whole(files, now.stock), ".metadata dangles"
        if not self._ends:
            assert before.head is None or now.head is not None, "the checkpoint vanished"
            assert before.stock is None or now.stock is not None, ".metadata vanished"
            if self._conditional and before.footer and now.footer:
                assert now.footer >= before.footer, ".metadata went back"
        self._before = now


def check_end(disk: Disk, capabilities: Capabilities, actors: Sequence[Actor]) -> None:
    """Check results, and that whoever comes next finds everything in order."""
    files = disk.files
    now = seen(files)
    for actor in actors:
        if actor.name == "remove":
            assert actor.error is None or isinstance(actor.error, CommitConflictError), actor.error
        if actor.name != "save" or not actor.done:
            continue
        if actor.error is None:
            assert actor.result in now.committed
        else:
            assert isinstance(actor.error, CommitConflictError), actor.error
            last = now.slots[-1]["slot"]
            assert isinstance(last, int)
            assert actor.error.winner["slot"] <= last
    winners = [actor for actor in actors if actor.name == "save" and actor.error is None]
    if all(actor.done for actor in actors):
        assert set(now.committed) >= {actor.result for actor in winners}
        assert now.stock == now.head, "all have ended, and .metadata is behind"
    store = DictStore(disk, capabilities)
    open_it(store)
    now = seen(disk.files)
    if now.head is not None:
        assert now.stock == now.head, "an opener did not bring .metadata up to date"
    latest = save(store)
    now = seen(disk.files)
    assert now.head == now.stock == latest
    assert is_whole(disk.files, latest)


def gone(store: DictStore, age_s: float = WEEK_S) -> None:
    """Save twice, delete, and let time pass."""
    saved(store)
    saved(store)
    deleted(store)
    store.disk.clock_s += age_s


def nothing(_store: DictStore) -> None:
    """Leave the storage empty."""


def unpublished(store: DictStore) -> None:
    """Save twice; the second saver died before it published."""
    saved(store)
    committed(store, attempted(store))


class Scenario(NamedTuple):
    """What was there before, who comes at the same time, and how the schedules are chosen.

    `bound` is that of `Preempting`, `seeds` how many `Wandering` schedules there are besides.
    `ends`: whether checkpoints are deleted meanwhile, or slots of deleted ones removed.
    """

    name: str
    before: Callable[[DictStore], object]
    jobs: Sequence[tuple[str, Job]]
    bound: int
    seeds: int
    ends: Ends = ""


SAVE, PRUNE, OPEN = ("save", save), ("prune", prune), ("open", open_it)
DELETE: tuple[str, Job] = ("delete", deleted)
REMOVE: tuple[str, Job] = ("remove", remove_tombstone)
EARLY = partial(gone, age_s=WEEK_S / 2)
CROWD = [OPEN, SAVE, SAVE, SAVE, PRUNE]
DELETERS = [DELETE, DELETE, SAVE, SAVE, PRUNE]
REMOVERS = [REMOVE, REMOVE, SAVE, SAVE]

SCENARIOS = (
    Scenario("two fresh savers", nothing, [SAVE, SAVE], 2, 100),
    Scenario("two savers overwrite", saved, [SAVE, SAVE], 2, 100),
    Scenario("two savers and a pruner", saved, [SAVE, SAVE, PRUNE], 1, 300),
    Scenario("a saver and an opener", unpublished, [SAVE, OPEN], 2, 100),
    Scenario("a saver, an opener and two pruners", saved, [SAVE, OPEN, PRUNE, PRUNE], 0, 300),
    Scenario("three savers, an opener and a pruner", unpublished, CROWD, 0, 200),
    Scenario("savers and a deleter", saved, [SAVE, DELETE, SAVE], 1, 200, "deletes"),
    Scenario("savers, deleters and a pruner", saved, DELETERS, 0, 200, "deletes"),
    Scenario("savers and removers", gone, REMOVERS, 1, 100, "removes"),
    Scenario("savers and removers who come too early", EARLY, REMOVERS, 0, 100, "removes"),
)


def check_schedules(
    capabilities: Capabilities, scenario: Scenario, seeds: range, *, systematic: bool
) -> str:
    """Play the systematic schedules, if asked for, and those of these seeds; tell how many."""
    ends, count, steps = scenario.ends, 0, 0
    # Removers have the most schedules, and are told of changes by conditions alone.
    bound = scenario.bound if capabilities.if_match or ends != "removes" else 0
    in_order: Iterable[Chooser] = Preempting(bound).schedules() if systematic else ()
    origin = Disk()
    scenario.before(DictStore(origin, capabilities))
    at_random: Iterable[Chooser] = map(Wandering, seeds)
    for choose in itertools.chain(in_order, at_random):
        disk = origin.copy()
        watch = Watch(disk, capabilities, ends)
        actors = play(disk, capabilities, scenario.jobs, choose, watch)
        check_end(disk, capabilities, actors)
        count += 1
        steps += watch.steps
    assert count >= len(seeds)
    return f"{scenario.name}: {count} schedules, {steps} operations checked"
