"""Actors that run real code over one disk, stopped before every operation on it.

A controller lets one actor do one operation at a time, so a schedule is a list of choices, and the
same choices give the same run.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence

from commit_tools import DictStore, Disk

from ckpt_storage.errors import CheckpointError
from ckpt_storage.store.backend import Capabilities

Job = Callable[[DictStore], object]


class EndedError(BaseException):
    """The actor is dead: it died where it stood."""


MARKERS = ("begun", "publish")


def is_private(disk: Disk, operation: str, path: str) -> bool:
    """Return whether no other actor can tell, or change by acting first, what this comes to.

    Files of an attempt that nothing names yet: their order among themselves is the writer's. And
    slots that are there: they never change.
    """
    if operation == "put" and path.startswith("saves/"):
        return not path.rpartition("/")[2].startswith(MARKERS)
    return operation == "get" and path.startswith("commits/") and f"/{path}" in disk.store


class Actor:
    """One thread of code under test, at rest between two operations."""

    def __init__(self, name: str, job: Job, disk: Disk, capabilities: Capabilities) -> None:
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
        store = DictStore(disk, capabilities, self._gate)
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

    def _run(self, job: Job, store: DictStore) -> None:
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
        """Let the actor die before its next operation."""
        if not self.done:
            self._dead = True
            self._go.release()
            self._rests.acquire()
        self._thread.join()


Check = Callable[[Disk], None]
Chooser = Callable[[Sequence[Actor], int | None], int]


def play(
    disk: Disk,
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
