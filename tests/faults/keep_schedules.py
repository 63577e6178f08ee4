"""Seeded schedules of savers, thinners, pruners, readers and kills at one root, and their judge.

Part of the state is frozen, and saves reuse its file of another checkpoint of the root.

    python tests/faults/keep_schedules.py --seeds 1000

Each actor is a thread that runs public functions at a URL of its own for the same root, as a
process of its own would. At each storage operation a seeded choice decides which actor continues;
some actors are killed at an operation. Then two days pass, a last run prunes, and nothing may be
left over. The exit code is 1 if a schedule broke a rule.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent / "support"), str(_HERE.parents[1])]

import torch  # noqa: E402  # as the imports below
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402  # as below

import ckpt_storage  # noqa: E402  # found where this script lies
from ckpt_storage import (  # noqa: E402  # as above
    CheckpointManager,
    KeepEvery,
    KeepLatest,
    KeepPart,
    RetryPolicy,
    errors,
    list_checkpoints,
    open_checkpoint,
)
from ckpt_storage.commit import slotlog  # noqa: E402  # as above
from ckpt_storage.manager.names import StepNames  # noqa: E402  # as above
from ckpt_storage.manager.policies import Keep  # noqa: E402  # as above
from ckpt_storage.manager.prune import Pruner  # noqa: E402  # as above
from ckpt_storage.manager.root import Root  # noqa: E402  # as above
from ckpt_storage.saves import groups  # noqa: E402  # as above
from ckpt_storage.store import Location, abilities, open_store, registry  # noqa: E402  # as above
from ckpt_storage.store.backend import Backend, Settings  # noqa: E402  # as above
from ckpt_storage.store.deadline import Deadline  # noqa: E402  # as above
from ckpt_storage.testing.faults import FaultBackend, Script, SimulatedCrash  # noqa: E402

T = TypeVar("T")
Storage = Literal["local", "memory"]
State = dict[str, Any]

STEPS = (1, 2, 3)
SIZES = {"model": 300, "extra": 40, "optim": 900}
PARTS = ({*SIZES}, {"model", "extra"}, {"model"})
"""What a save holds beside what is frozen, and what thinnings leave of it."""
FROZEN_COUNT, FROZEN = 20_000, 7.0
"""How many values are frozen, enough for a file of their own, and what each of them is."""

QUICK = RetryPolicy(attempt_count=3, first_delay_s=0.0, max_delay_s=0.0)
REUSE: dict[str, Any] = {"stable": "frozen", "sync_files": False, "retry": QUICK}
KEEPS: tuple[Keep, ...] = (
    KeepLatest(1) | KeepPart(drop="optim*"),
    KeepLatest(2) | KeepEvery(2) | KeepPart(drop=("optim*", "extra")),
    KeepLatest(2),
)
LAST_KEEP = KeepLatest(2) | KeepPart(drop="optim*")

_STALL_S = 0.5
_LIMIT_S = 60.0
_TWO_DAYS_S = 2 * 24 * 3600.0


def state_of(number: int) -> State:
    """Return the state of one save: all values that are not frozen are its number."""
    state = {name: torch.full((size,), float(number)) for name, size in SIZES.items()}
    return {**state, "frozen": torch.full((FROZEN_COUNT,), FROZEN)}


def number_of(values: Mapping[str, Any]) -> int:
    """Return the number of the save that all values are of. Raises `RuleBrokenError`."""
    numbers = {float(number) for tensor in values.values() for number in tensor.unique()}
    if len(numbers) != 1 or {*values} not in PARTS:
        raise RuleBrokenError(f"a mixture: {sorted(values)} of {sorted(numbers)}")
    return int(numbers.pop())


class RuleBrokenError(Exception):
    """What a schedule must never lead to."""


class Turns:
    """Lets one actor at a time operate on the storage, and chooses the actor of each operation."""

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self._changed = threading.Condition()
        self._switch_rate = choose.choice((0.05, 0.2, 0.5, 1.0))
        self._live: list[str] = []
        self._current = ""
        self.operation_count = self.stall_count = 0

    def begin(self, actors: list[str]) -> None:
        with self._changed:
            self._live = list(actors)
            self._current = self._choose.choice(self._live)

    def operate(self, actor: str, call: Callable[[], T]) -> T:
        """Do one operation when it is the turn of this actor."""
        limit_s = time.monotonic() + _LIMIT_S
        with self._changed:
            while actor in self._live and self._current != actor:
                seen = self.operation_count
                is_woken = self._changed.wait(_STALL_S)
                if not is_woken and seen == self.operation_count:
                    # The current actor waits for a lock of this process that another actor holds.
                    self.stall_count += 1
                    self._current = actor
                if time.monotonic() > limit_s:
                    raise RuleBrokenError(f"{actor} got no turn")
            self.operation_count += 1
            try:
                return call()
            finally:
                if self._choose.random() < self._switch_rate:
                    self._switch()

    def end(self, actor: str) -> None:
        with self._changed:
            self._live.remove(actor)
            if self._current == actor:
                self._switch()

    def _switch(self) -> None:
        if self._live:
            self._current = self._choose.choice(self._live)
        self._changed.notify_all()


class ActorScript(Script):
    """The operations of one actor, each in its turn; at `killed_at` it dies."""

    def __init__(self, name: str, turns: Turns, killed_at: int | None) -> None:
        super().__init__()
        self._name, self._turns, self._killed_at = name, turns, killed_at
        self.count = 0

    def play(
        self, operation: str, path: str, call: Callable[[], T], half: Callable[[], T] | None = None
    ) -> T:
        def operate() -> T:
            self.count += 1
            if self.crashed or self.count == self._killed_at:
                self.crashed = True
                raise SimulatedCrash
            return super(ActorScript, self).play(operation, path, call, half)

        if self.crashed:
            raise SimulatedCrash
        return self._turns.operate(self._name, operate)


class Place:
    """One root with a URL for each actor, all of which lead to the same files."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self._storage = storage
        self._folder = folder
        self._name = uuid.uuid4().hex
        self.scripts: dict[str, ActorScript] = {}
        if storage == "local":
            (folder / "shared").mkdir()

    def url(self, actor: str = "shared") -> str:
        if self._storage == "memory":
            return f"memory://{self._name}/{actor}/run"
        if actor != "shared" and not (link := self._folder / actor).exists():
            link.symlink_to(self._folder / "shared")
        return str(self._folder / actor / "run")

    def backend_of(self, location: Location, settings: Settings) -> Backend:
        """Stand in for `registry.backend_of`: an actor's operations wait for its turn."""
        parts = location.url.split("/")
        actor = next((part for part in parts if part in self.scripts), None)
        if actor is None:
            return _BACKEND_OF(location, settings)
        if self._storage == "memory":
            location = Location.of(location.target.replace(f"/{actor}/", "/shared/", 1))
        backend = FaultBackend(_BACKEND_OF(location, settings))
        backend.script = self.scripts[actor]
        return backend

    def files(self) -> list[str]:
        """Return the paths of all files below the root."""
        if self._storage == "memory":
            prefix = f"/{self._name}/shared/run/"
            stored = MemoryFileSystem.store
            return [path.removeprefix(prefix) for path in stored if path.startswith(prefix)]
        root = self._folder / "shared" / "run"
        return [str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()]

    def pass_time(self, seconds: float) -> None:
        """Make all files older."""
        if self._storage == "memory":
            for path, file in MemoryFileSystem.store.items():
                if path.startswith(f"/{self._name}/"):
                    file.modified -= timedelta(seconds=seconds)
            return
        for path in (self._folder / "shared").rglob("*"):
            stat = path.lstat()
            os.utime(path, (stat.st_atime - seconds, stat.st_mtime - seconds))

    def clear(self) -> None:
        for path in [*MemoryFileSystem.store]:
            if path.startswith(f"/{self._name}/"):
                del MemoryFileSystem.store[path]


_BACKEND_OF = registry.backend_of


@dataclass(kw_only=True)
class Actor:
    """What one actor does, and how that ended."""

    name: str
    kind: str
    job: Callable[[], object]
    result: object = None
    error: BaseException | None = None

    def run(self, turns: Turns) -> None:
        try:
            self.result = self.job()
        except BaseException as error:  # noqa: BLE001  # judged when all have ended
            self.error = error
        finally:
            turns.end(self.name)


def read(url: str) -> int:
    """Read all values of a checkpoint; return the number of its save."""
    with open_checkpoint(url, retry=QUICK) as checkpoint:
        values = {name: checkpoint[name].torch() for name in checkpoint}
    frozen = values.pop("frozen", None)
    if frozen is None or not bool((frozen == FROZEN).all()):
        raise RuleBrokenError("the frozen values are lost or changed")
    return number_of(values)


def restore(manager: CheckpointManager) -> int:
    """Restore the newest checkpoint, whole or thin; return the number of its save."""
    state: State = {"model": torch.zeros(SIZES["model"]), "frozen": torch.zeros(FROZEN_COUNT)}
    if manager.restore(state, part=True) is None:
        raise RuleBrokenError("no checkpoint is left")
    if not bool((state.pop("frozen") == FROZEN).all()):
        raise RuleBrokenError("the frozen values are lost or changed")
    return number_of(state)


def restore_newest(url: str) -> int:
    with CheckpointManager(url, retry=QUICK) as manager:
        return restore(manager)


def save_next(url: str, step: int, number: int, keep: Keep) -> int:
    """Save a step by a manager, which then prunes."""
    with CheckpointManager(url, keep=keep, pruning="manual", retry=QUICK) as manager:
        manager.save(step, state_of(number), sync_files=False)
        manager.prune()
    return step


def resume(url: str, step: int, number: int, keep: Keep) -> int:
    """Restore, then save two steps that reuse files of the step before, and prune after each."""
    options: dict[str, Any] = {"keep": keep, "pruning": "manual", "retry": QUICK}
    with CheckpointManager(url, reuse=True, stable="frozen", **options) as manager:
        restore(manager)
        for later in (step, step + 1):
            manager.save(later, state_of(number), sync_files=False)
            manager.prune()
    return step + 1


@dataclass(kw_only=True)
class Schedule:
    """One schedule: some actors at one root, chosen by a seed."""

    seed: int
    place: Place
    ends: Counter[str] = field(default_factory=Counter)

    def run(self) -> tuple[int, int]:
        """Play and judge; return the counts of operations and stalls. Raises `RuleBrokenError`."""
        choose = random.Random(f"keep {self.seed}")
        turns = Turns(choose)
        names = StepNames()
        base = None
        for step in STEPS:
            url = f"{self.place.url()}/{names.name_of(step)}"
            info = ckpt_storage.save(state_of(step), url, step=step, base=base, **REUSE)
            if base and (info.stats is None or info.stats.reused_bytes < 4 * FROZEN_COUNT):
                raise RuleBrokenError(f"{url} reuses no file of {base}")
            base = url
        if choose.random() < 0.5:
            ckpt_storage.thin(f"{self.place.url()}/{names.name_of(1)}", drop="optim*")
        actors = [self._actor(index, choose, names) for index in range(choose.randint(3, 5))]
        for actor in actors:
            killed_at = choose.randrange(1, 90) if choose.random() < 0.4 else None
            self.place.scripts[actor.name] = ActorScript(actor.name, turns, killed_at)
        turns.begin([actor.name for actor in actors])
        threads = [
            threading.Thread(target=actor.run, args=(turns,), name=actor.name, daemon=True)
            for actor in actors
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _LIMIT_S)
            if thread.is_alive():
                raise RuleBrokenError(f"{thread.name} hangs")
        self._judge_actors(actors)
        abilities.RECORDS.clear()
        self._judge_root(actors)
        self._judge_last_prune()
        return turns.operation_count, turns.stall_count

    def _actor(self, index: int, choose: random.Random, names: StepNames) -> Actor:
        name, number = f"actor-{index}", 100 + index
        root = self.place.url(name)
        url = f"{root}/{names.name_of(choose.choice(STEPS))}"
        keep = choose.choice(KEEPS)
        drop = choose.choice(("optim*", ["optim*", "extra"]))
        next_step = len(STEPS) + 1 + choose.randrange(2)
        base = f"{root}/{names.name_of(choose.choice(STEPS))}"
        state = state_of(number)
        jobs: dict[str, Callable[[], object]] = {
            "saver of the next step": lambda: save_next(root, next_step, number, keep),
            "saver over a step": lambda: ckpt_storage.save(
                state, url, overwrite=True, base=base, **REUSE
            ),
            "saver with a base": lambda: ckpt_storage.save(
                state, f"{root}/{names.name_of(next_step)}", base=base, **REUSE
            ),
            "thinner": lambda: ckpt_storage.thin(url, drop=drop, retry=QUICK),
            "pruner": lambda: ckpt_storage.prune(root, keep, dry_run=False, retry=QUICK),
            "reader": lambda: read(url),
            "restorer": lambda: restore_newest(root),
            "resumed saver": lambda: resume(root, next_step, number, keep),
        }
        kind = choose.choice(list(jobs))
        return Actor(name=name, kind=kind, job=jobs[kind])

    def _judge_actors(self, actors: list[Actor]) -> None:
        expected = (
            errors.CheckpointGoneError,
            errors.CheckpointNotFoundError,
            errors.CheckpointInProgressError,
            errors.CheckpointExistsError,
            errors.CommitConflictError,
        )
        for actor in actors:
            error, is_killed = actor.error, self.place.scripts[actor.name].crashed
            end = "killed" if is_killed else type(error).__name__ if error else "done"
            self.ends[f"{actor.kind}: {end}"] += 1
            if not (is_killed or error is None or isinstance(error, expected)):
                raise RuleBrokenError(f"the {actor.kind} got {error!r}") from error

    def _judge_root(self, actors: list[Actor]) -> None:
        infos = list_checkpoints(self.place.url())
        highest = max((StepNames().step_of(info.name) or 0 for info in infos), default=0)
        kinds = {"saver of the next step", "resumed saver"}
        saved = [actor.result for actor in actors if actor.kind in kinds]
        newest = max([STEPS[-1], *(step for step in saved if isinstance(step, int))])
        if highest < newest:
            raise RuleBrokenError(f"step {newest} was lost; the newest is {highest}")
        for info in infos:
            self._judge_checkpoint(info.url)

    def _judge_checkpoint(self, url: str) -> None:
        try:
            # An actor may have been killed after its commit, before it published `.metadata`.
            ckpt_storage.publish(url)
            read(url)
        except errors.CheckpointError as error:
            raise RuleBrokenError(f"{url} is unreadable: {error!r}") from error
        report = ckpt_storage.verify(url)
        if not report.ok:
            raise RuleBrokenError(f"{url} is damaged: {report.problems}")

    def _judge_last_prune(self) -> None:
        """Prune as the next job does, two days later, and judge what is left."""
        self.place.pass_time(_TWO_DAYS_S)
        pruner = Pruner(Root(Location.of(self.place.url()), StepNames()), LAST_KEEP, sweeps=True)
        # One kept step is swept by each prune.
        for _ in range(len(STEPS) + 4):
            report = pruner.prune(Deadline("commit", _LIMIT_S))
            if report.failed:
                raise RuleBrokenError(f"the last prune failed: {report.failed}")
        allowed: set[tuple[str, str]] = set()
        for info in list_checkpoints(self.place.url()):
            self._judge_checkpoint(info.url)
            head = slotlog.read_log(open_store(Location.of(info.url))).head
            assert head is not None
            references = [head.head] if head.is_thinned else [head.head, head.previous]
            allowed |= {(info.name, ref.save_id) for ref in references if ref}
        leaks = [path for path in self.place.files() if _is_leak(path, allowed)]
        if leaks:
            raise RuleBrokenError(f"left over: {sorted(leaks)}")


def _is_leak(path: str, allowed: set[tuple[str, str]]) -> bool:
    """Return whether a file below the root belongs to no checkpoint that is there."""
    name, _, rest = path.partition("/")
    if rest.startswith("saves/"):
        return (name, rest.split("/")[1]) not in allowed
    is_committed = name in {committed for committed, _ in allowed}
    is_slot = rest.startswith("commits/") and rest.endswith(".json")
    return not (is_slot or (rest == ".metadata" and is_committed))


@contextlib.contextmanager
def _patched(place: Place) -> Iterator[None]:
    """Use this place's backends, and files for small groups, inside the block."""
    before = registry.backend_of, groups._GROUP_MIN_BYTES  # noqa: SLF001  # a test's own size
    registry.backend_of, groups._GROUP_MIN_BYTES = place.backend_of, 1000  # noqa: SLF001  # as above
    try:
        yield
    finally:
        registry.backend_of, groups._GROUP_MIN_BYTES = before  # noqa: SLF001  # as above


@dataclass(kw_only=True)
class Totals:
    """What many schedules came to."""

    count: int = 0
    operations: int = 0
    stalls: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)


def run_schedules(storage: Storage, seeds: range, folder: Path | None = None) -> Totals:
    """Play one schedule for each seed; return their totals."""
    totals = Totals()
    memory = Path("/dev/shm")  # noqa: S108  # TemporaryDirectory chooses a name of its own there
    where = folder or (memory if memory.is_dir() else None)
    for seed in seeds:
        with tempfile.TemporaryDirectory(dir=where) as path:
            place = Place(storage, Path(path))
            abilities.RECORDS.clear()
            schedule = Schedule(seed=seed, place=place, ends=totals.ends)
            with _patched(place):
                try:
                    operations, stalls = schedule.run()
                    totals.operations += operations
                    totals.stalls += stalls
                except RuleBrokenError as error:
                    totals.violations[seed] = str(error)
            place.clear()
        totals.count += 1
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--storage", choices=["local", "memory"], default="local")
    options = parser.parse_args()
    logging.disable()
    begin_s = time.monotonic()
    ends = Counter[str]()
    violations: dict[int, str] = {}
    operations = stalls = 0
    for seed in range(options.first, options.first + options.seeds):
        totals = run_schedules(options.storage, range(seed, seed + 1))
        ends += totals.ends
        operations, stalls = operations + totals.operations, stalls + totals.stalls
        for text in totals.violations.values():
            print(f"seed {seed}: {text[:1500]}", flush=True)
        violations |= totals.violations
    seconds = time.monotonic() - begin_s
    print(f"{options.seeds} schedules, {operations} operations, {stalls} stalls, {seconds:.0f} s")
    for end, count in sorted(ends.items()):
        print(f"{count:6} {end}")
    print(f"violations: {len(violations)} {sorted(violations)}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
