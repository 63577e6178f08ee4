"""Savers, pruners, openers and deleters of one checkpoint, their operations interleaved.

Actors run real code over one disk, stopped before every operation on it; a schedule is a list of
choices, and the same choices give the same run. After every operation both views of the checkpoint,
ours by the slots and stock torch's by `.metadata`, lead to a whole attempt, judged by an oracle
that knows only the documents.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import commit_tools as tools

from ckpt_storage.commit import cleaning, publishing, slotlog
from ckpt_storage.commit.deletion import remove_tombstone
from ckpt_storage.errors import CheckpointError, CommitConflictError
from ckpt_storage.store.backend import Capabilities

Job = Callable[[tools.DictStore], object]


class EndedError(BaseException):
    """The actor is dead: it died where it stood."""


MARKERS = ("begun", "publish")


def is_private(disk: tools.Disk, operation: str, path: str) -> bool:
    """Return whether no other actor can tell, or change by acting first, what this comes to.

    Files of an attempt that nothing names yet: their order among themselves is the writer's. And
    slots that are there: they never change.
    """
    if operation == "put" and path.startswith("saves/"):
        return not path.rpartition("/")[2].startswith(MARKERS)
    return operation == "get" and path.startswith("commits/") and f"/{path}" in disk.store


class Actor:
    """One thread of code under test, at rest between two operations."""

    def __init__(self, name: str, job: Job, disk: tools.Disk, capabilities: Capabilities) -> None:
        self.name = name
        self.done = False
        self.result: object = None
        self.error: CheckpointError | None = None
        self.next: tuple[str, str] = ("begin", "")
        self._disk = disk
        self._dead = False
        self._go = threading.Lock()
        self._rests = threading.Lock()
        self._go.acquire()
        self._rests.acquire()
        store = tools.DictStore(disk, capabilities, self._gate)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(job, store), name=name, daemon=True)
        self._thread.start()

    def _gate(self, operation: str, path: str) -> None:
        if self._dead:
            raise EndedError
        if is_private(self._disk, operation, path):
            return
        self.next = (operation, path)
        self._rests.release()
        self._go.acquire()
        if self._dead:
            raise EndedError

    def _run(self, job: Job, store: tools.DictStore) -> None:
        self._go.acquire()
        try:
            if not self._dead:
                self.result = job(store)
        except CheckpointError as error:
            self.error = error
        except EndedError:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again where the test runs
            self._failure = error
        self.done = True
        self._rests.release()

    def step(self) -> None:
        self._go.release()
        self._rests.acquire()
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        if not self.done:
            self._dead = True
            self._go.release()
            self._rests.acquire()
        self._thread.join()


Check = Callable[[tools.Disk], None]
Chooser = Callable[[Sequence[Actor], int | None], int]


def play(
    disk: tools.Disk,
    capabilities: Capabilities,
    jobs: Sequence[tuple[str, Job]],
    choose: Chooser,
    check: Check,
) -> list[Actor]:
    """Run jobs as `choose` has it (index of the next actor; -1: all die here); check every step."""
    actors = [Actor(name, job, disk, capabilities) for name, job in jobs]
    last = None
    try:
        for actor in actors:
            # Up to its first operation nothing happens that others could see.
            actor.step()
        while not all(actor.done for actor in actors):
            last = choose(actors, last)
            if last < 0:
                break
            actors[last].step()
            check(disk)
    finally:
        finished = [actor.done for actor in actors]
        for actor in actors:
            actor.end()
        for actor, done in zip(actors, finished, strict=True):
            actor.done = done
    return actors


class Preempting:
    """All schedules in which at most `bound` switches leave an actor that could go on.

    After Musuvathi and Qadeer, "Iterative context bounding" (PLDI 2007): few switches suffice to
    show most races. Who goes on after an actor has ended is tried in every order, too.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._prefixes: list[list[int]] = [[]]
        self._trace: list[int] = []
        self._position = 0
        self._spent = 0

    def schedules(self) -> Iterator[Chooser]:
        """Yield a chooser for each schedule; each must be played before the next is asked for."""
        while self._prefixes:
            self._prefix = self._prefixes.pop()
            self._trace = []
            self._position = self._spent = 0
            yield self._choose

    def _choose(self, actors: Sequence[Actor], last: int | None) -> int:
        able = [i for i, actor in enumerate(actors) if not actor.done]
        stays = last in able
        default = last if last is not None and stays else able[0]
        if self._position < len(self._prefix):
            chosen = self._prefix[self._position]
        else:
            chosen = default
            if not stays or self._spent < self._bound:
                self._prefixes.extend([*self._trace, i] for i in able if i != default)
        if stays and chosen != last:
            self._spent += 1
        self._position += 1
        self._trace.append(chosen)
        return chosen


class Wandering:
    """Random schedules: priorities that change now and then, and perhaps an end for all.

    After Burckhardt and others, "A randomized scheduler with probabilistic guarantees of finding
    bugs" (ASPLOS 2010).
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._order: list[int] = []
        self._changes = self._random.choice((0.05, 0.2, 0.5, 1.0))
        self._end = self._random.choice((0.0, 0.0, 0.02))

    def __call__(self, actors: Sequence[Actor], last: int | None) -> int:
        del last
        if not self._order:
            self._order = self._random.sample(range(len(actors)), len(actors))
        if self._random.random() < self._end:
            return -1
        if self._random.random() < self._changes:
            self._random.shuffle(self._order)
        return next(i for i in self._order if not actors[i].done)


WEEK_S = 7 * tools.DAY_S

Ends = Literal["", "deletes", "removes"]


def save(store: tools.DictStore) -> str:
    """Do all that a writer's coordinator does; return the save id."""
    attempt = tools.attempted(store)
    record = tools.committed(store, attempt)
    tools.published(store, attempt, record)
    if attempt.ticket.previous is not None:
        cleaning.free_leftovers(store)
        tools.cleaned(store)
    return attempt.save_id


def prune(store: tools.DictStore) -> None:
    """Free all that may be freed, even what was superseded a moment ago."""
    cleaning.free_leftovers(store, keep_previous=0)
    tools.cleaned(store)


def open_it(store: tools.DictStore) -> None:
    """Open the checkpoint with the right to write."""
    head = slotlog.read_log(store).head
    if head is not None and head.save_id is not None:
        publishing.roll_forward(store, head.save_id)


class Watch:
    """The invariants, checked against what was there one operation before."""

    def __init__(self, disk: tools.Disk, capabilities: Capabilities, ends: Ends = "") -> None:
        self._conditional = capabilities.if_match
        self._ends = ends
        self._before = tools.seen(disk.files)
        self._changes = disk.changes
        self.steps = 0

    def __call__(self, disk: tools.Disk) -> None:
        self.steps += 1
        if disk.changes == self._changes:
            return
        self._changes = disk.changes
        files = disk.files
        now, before = tools.seen(files), self._before
        if self._ends != "removes":
            assert list(now.slots[: len(before.slots)]) == list(before.slots), "a slot changed"
        if now.head is not None:
            assert tools.is_whole(files, now.head), "the head dangles"
        if now.stock is not None:
            assert now.stock in now.committed, ".metadata shows what never committed"
            # A saver whose checkpoint is deleted while it publishes takes that back at once.
            # Without conditions a paused actor may show freed files until it looks again.
            is_mended = not self._conditional or now.stock in now.deleted
            assert is_mended or tools.is_whole(files, now.stock), ".metadata dangles"
        if not self._ends:
            assert before.head is None or now.head is not None, "the checkpoint vanished"
            assert before.stock is None or now.stock is not None, ".metadata vanished"
            if self._conditional and before.footer and now.footer:
                assert now.footer >= before.footer, ".metadata went back"
        self._before = now


def check_end(disk: tools.Disk, capabilities: Capabilities, actors: Sequence[Actor]) -> None:
    """Check results, and that later operations succeed."""
    files = disk.files
    now = tools.seen(files)
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
    store = tools.DictStore(disk, capabilities)
    open_it(store)
    now = tools.seen(disk.files)
    if now.head is not None:
        assert now.stock == now.head, "an opener did not bring .metadata up to date"
    latest = save(store)
    now = tools.seen(disk.files)
    assert now.head == now.stock == latest
    assert tools.is_whole(disk.files, latest)


def gone(store: tools.DictStore, age_s: float = WEEK_S) -> None:
    """Save twice, delete, and let time pass."""
    tools.saved(store)
    tools.saved(store)
    tools.deleted(store)
    store.disk.clock_s += age_s


def nothing(_store: tools.DictStore) -> None:
    """Leave the storage empty."""


def unpublished(store: tools.DictStore) -> None:
    """Save twice; the second saver died before it published."""
    tools.saved(store)
    tools.committed(store, tools.attempted(store))


class Scenario(NamedTuple):
    """What was there before, who comes at the same time, and how the schedules are chosen.

    `bound` is that of `Preempting`, `seeds` how many `Wandering` schedules there are besides.
    `ends`: whether checkpoints are deleted meanwhile, or slots of deleted checkpoints removed.
    """

    name: str
    before: Callable[[tools.DictStore], object]
    jobs: Sequence[tuple[str, Job]]
    bound: int
    seeds: int
    ends: Ends = ""


SAVE, PRUNE, OPEN = ("save", save), ("prune", prune), ("open", open_it)
DELETE: tuple[str, Job] = ("delete", tools.deleted)
REMOVE: tuple[str, Job] = ("remove", remove_tombstone)
EARLY = partial(gone, age_s=WEEK_S / 2)
CROWD = [OPEN, SAVE, SAVE, SAVE, PRUNE]
DELETERS = [DELETE, DELETE, SAVE, SAVE, PRUNE]
REMOVERS = [REMOVE, REMOVE, SAVE, SAVE]

SCENARIOS = (
    Scenario("two fresh savers", nothing, [SAVE, SAVE], 2, 100),
    Scenario("two savers overwrite", tools.saved, [SAVE, SAVE], 2, 100),
    Scenario("two savers and a pruner", tools.saved, [SAVE, SAVE, PRUNE], 1, 300),
    Scenario("a saver and an opener", unpublished, [SAVE, OPEN], 2, 100),
    Scenario("a saver, an opener and two pruners", tools.saved, [SAVE, OPEN, PRUNE, PRUNE], 0, 300),
    Scenario("three savers, an opener and a pruner", unpublished, CROWD, 0, 200),
    Scenario("savers and a deleter", tools.saved, [SAVE, DELETE, SAVE], 1, 200, "deletes"),
    Scenario("savers, deleters and a pruner", tools.saved, DELETERS, 0, 200, "deletes"),
    Scenario("savers and removers", gone, REMOVERS, 1, 100, "removes"),
    Scenario("savers and removers who come too early", EARLY, REMOVERS, 0, 100, "removes"),
)


def check_schedules(
    capabilities: Capabilities, scenario: Scenario, seeds: range, *, systematic: bool
) -> str:
    """Play systematic schedules, if `systematic`, and those of seeds; return their counts."""
    ends, count, steps = scenario.ends, 0, 0
    # Removers have the most schedules, and notice changes only by conditions.
    bound = scenario.bound if capabilities.if_match or ends != "removes" else 0
    in_order: Iterable[Chooser] = Preempting(bound).schedules() if systematic else ()
    origin = tools.Disk()
    scenario.before(tools.DictStore(origin, capabilities))
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
