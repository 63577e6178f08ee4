"""What must be known of a root to plan a prune, and no more: asks the storage, then plans."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
from collections.abc import Iterable, Mapping, Sequence

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.slotlog import read_if_there
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    IntegrityError,
    StorageError,
)
from ckpt_storage.format.documents import Fields, format_of, pack_column, seal, unseal
from ckpt_storage.format.names import probe_path
from ckpt_storage.inspect.verify import Part, check_part
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .census import Census, Sight
from .claims import Claims
from .retention import (
    Decision,
    Keep,
    PrunePlan,
    Save,
    last_committed,
    newest_count,
    plan_prune,
    policies_of,
    save_of,
)

log = logging.getLogger("ckpt_storage")


SETTLED_PATH = ".ckpt-storage-pruned.json"
"""At the root of the checkpoints; sealed, replaced as a whole, may be deleted at any time."""

_KIND = "pruned"

_WORTH_COUNT = 64
"""How many steps must have changed before the note is written anew."""

_DOUBTED_COUNT = 64
"""How many noted steps each process looks at all the same, chosen at random.

Others may have saved there since, without noting it. So it is found out in time.
"""


class SettledSteps:
    """The steps below one root of which only slots are left; `forget` is for any thread."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._lock = threading.Lock()
        self._is_loaded = False
        self._stored: frozenset[int] = frozenset()
        self._trusted: set[int] = set()
        self._empty: set[int] = set()
        self._saved: set[int] = set()

    def load(self, store: Store) -> None:
        """Read the note at the root, once: one request. One that cannot be read counts for none."""
        if self._is_loaded:
            return
        self._is_loaded = True
        try:
            found = read_if_there(store, SETTLED_PATH)
            steps = [] if found is None else self._decode(found.data)
        except CheckpointError as error:
            # Every step is then looked at, as if there were no note.
            log.info("%s: %s is not used: %s", store.url, SETTLED_PATH, error)
            return
        doubted = random.sample(steps, min(_DOUBTED_COUNT, len(steps)))
        with self._lock:
            self._stored = frozenset(steps)
            self._trusted = set(steps).difference(doubted, self._saved)
            self._empty = set(steps) - self._saved

    def _decode(self, data: bytes) -> list[int]:
        get = Fields.of(unseal(data, path=SETTLED_PATH), _KIND, SETTLED_PATH)
        if get.string("names") != self._template:
            return []
        steps: list[int] = get.column("steps").tolist()
        return sorted(set(steps))

    def is_known(self, step: int) -> bool:
        """Return whether a step need not be looked at."""
        return step in self._trusted

    def note(self, found: Mapping[int, bool], listed: Iterable[int]) -> None:
        """Note of steps that were looked at whether only slots are left; `listed` are all."""
        with self._lock:
            for step, is_empty in found.items():
                if is_empty:
                    self._empty.add(step)
                else:
                    self._empty.discard(step)
            self._empty.intersection_update(listed)

    def doubt(self) -> None:
        """Trust no note: look at every step again."""
        with self._lock:
            self._is_loaded = True
            self._trusted.clear()

    def forget(self, step: int) -> None:
        """Note that a step is being saved anew."""
        with self._lock:
            self._saved.add(step)
            self._trusted.discard(step)
            self._empty.discard(step)

    def keep(self, store: Store) -> None:
        """Write the note if that is worth a request. A failure is no harm."""
        with self._lock:
            empty = frozenset(self._empty)
        if len(self._stored ^ empty) < _WORTH_COUNT:
            return
        body = {
            "format": format_of(_KIND),
            "names": self._template,
            "steps": pack_column(sorted(empty)),
        }
        try:
            store.replace(SETTLED_PATH, seal(body))
        except StorageError as error:
            log.info("%s: %s was not written: %s", store.url, SETTLED_PATH, error)
        else:
            self._stored = empty


class Soundness:
    """Checkpoints whose soundness this process knows, by name and save id.

    A copy keeps the save id: it can be damaged where the original is sound.
    """

    def __init__(self) -> None:
        self._verified: set[Save] = set()
        self.damaged: set[Save] = set()

    def is_known(self, info: CheckpointInfo) -> bool:
        """Return whether it was saved, loaded or checked here, and found sound."""
        return save_of(info) in self._verified

    def damaged_ids(self, name: str) -> frozenset[str]:
        """Return the saves under a name that are known to be damaged; from any thread."""
        return frozenset(save_id for one, save_id in list(self.damaged) if one == name)

    def found_sound(self, name: str, save_id: str | None) -> None:
        """Note that a checkpoint is sound."""
        if save_id is not None:
            self._verified.add((name, save_id))

    def found_damaged(self, info: CheckpointInfo, why: str) -> None:
        """Note that a checkpoint is damaged: no policy counts it any more."""
        log.warning("%s is not counted as a checkpoint: %s", info.url, why)
        if info.save_id is not None:
            self.damaged.add(save_of(info))
            self._verified.discard(save_of(info))


class Planner:
    """Plans prunes of one root, again and again; used by one thread at a time.

    `protected` maps names that no plan deletes to the reason.
    """

    def __init__(
        self,
        census: Census,
        keep: Keep,
        *,
        min_age_s: float,
        claims: Claims,
        soundness: Soundness,
    ) -> None:
        self._census = census
        self._policies = policies_of(keep)
        self._min_age_s = min_age_s
        self._claims = claims
        self._soundness = soundness
        self._linked: Mapping[str, str] = {}
        self.protected: Mapping[str, str] = {}
        self._settled_steps = SettledSteps(census.names.template)

    def plan(self, deadline: Deadline, *, now_s: float | None = None) -> PrunePlan:
        """Find out what a plan needs to know, and make it.

        Ages count up to `now_s`, Unix seconds; by default up to the storage's time, for which a
        probe is written. Costs a listing of the root; two reads for each of the newest; one listing
        and two reads for every other that its name does not keep, or a listing where only slots are
        left and no earlier process noted so; one look at the time of each that no policy keeps; two
        reads for all if a policy needs metrics, and a look at the time of all if one needs ages.
        All but the first two once in this process.
        """
        census = self._census
        folders = census.folders(deadline)
        links = census.links()
        self._linked = pinned(links)
        # What lies behind a link may be another checkpoint of this root, or of somebody else.
        steps = [(step, name) for step, name in census.steps(folders) if name not in links]
        by_name = {name: step for step, name in steps}
        sights = self._newest(steps, deadline)
        newest = set(sights)
        unsettled = census.unsettled()
        asks_all = any("metrics" in policy.needs for policy in self._policies)
        held = {
            name: why
            for step, name in steps
            if name not in sights
            and name not in unsettled
            and (why := self._kept_by_step(step)) is not None
        }
        others = [name for _, name in steps if name not in sights and name not in held]
        self._settled_steps.load(census.root(deadline))
        open_names = [name for name in others if not self._settled_steps.is_known(by_name[name])]
        sights |= census.look(open_names, deadline, freshness="ever", lists=True)
        self._settled_steps.note(
            {by_name[name]: sights[name].status == "empty" for name in open_names},
            by_name.values(),
        )
        if asks_all:
            sights |= census.look(list(held), deadline, freshness="ever")
        plan = self._settled(sights, newest, deadline, now_s)
        decided = {decision.name for decision in (*plan.kept, *plan.deleted)}
        extra = [
            Decision(name=name, step=by_name[name], reasons=(why,))
            for name, why in held.items()
            if name not in decided
        ]
        extra += [
            Decision(
                name=sight.name, step=by_name[sight.name], reasons=(f"unreadable: {sight.problem}",)
            )
            for sight in sights.values()
            if sight.status == "unreadable"
        ]
        extra += [
            Decision(
                name=name,
                step=None,
                reasons=("it is a link" if name in links else "it does not belong to this run",),
            )
            for name in folders
            if name not in by_name
        ]
        kept = sorted(
            (*plan.kept, *extra), key=lambda d: (-1 if d.step is None else d.step, d.name)
        )
        leftovers = tuple(name for _, name in steps if _is_leftover(sights.get(name)))
        return dataclasses.replace(plan, kept=tuple(kept), leftovers=leftovers)

    def saved(self, name: str, why: str) -> None:
        """Note that `name` was saved: no plan deletes it until another one is; from any thread."""
        self.protected = {name: why}
        self._census.forget(name)
        step = self._census.names.step_of(name)
        if step is not None:
            self._settled_steps.forget(step)

    def doubt(self) -> None:
        """Look at every step with the next plan, whatever earlier processes noted."""
        self._settled_steps.doubt()

    def keep(self, deadline: Deadline) -> None:
        """Note for later processes which steps they need not look at."""
        self._settled_steps.keep(self._census.root(deadline))

    def _kept_by_step(self, step: int) -> str | None:
        found = (policy.kept_by_step(step) for policy in self._policies)
        return next((why for why in found if why is not None), None)

    def _newest(self, steps: Sequence[tuple[int, str]], deadline: Deadline) -> dict[str, Sight]:
        """Look at the newest, until as many sound ones are known as the policies count."""
        wanted = newest_count(self._policies)
        sights: dict[str, Sight] = {}
        names = [name for _, name in reversed(steps)]
        while names and wanted > 0:
            batch, names = names[:wanted], names[wanted:]
            looked = self._census.look(batch, deadline)
            sights |= looked
            for sight in looked.values():
                if sight.status == "committed" and sight.info is not None:
                    wanted -= save_of(sight.info) not in self._soundness.damaged
        return sights

    def _settled(
        self,
        sights: dict[str, Sight],
        looked: set[str],
        deadline: Deadline,
        now_s: float | None,
    ) -> PrunePlan:
        """Plan; look again at what the plan counts on and was not `looked` at, until that is so."""
        while True:
            plan = self._dated(sights, deadline, now_s)
            if plan.deleted:
                stale = [name for name in plan.counted if name not in looked]
                looked.update(stale)
                fresh = self._census.look(stale, deadline)
                changed = {
                    name for name, sight in fresh.items() if _seen(sight) != _seen(sights[name])
                }
                sights.update(fresh)
                if changed or not self._is_sound(plan.anchor, deadline):
                    continue
            return plan

    def _dated(
        self, sights: Mapping[str, Sight], deadline: Deadline, now_s: float | None
    ) -> PrunePlan:
        """Plan, with the times of those that no policy but an age may save, and what comes last."""
        infos = [sight.info for sight in sights.values() if sight.info is not None]
        damaged = self._soundness.damaged
        in_use = {**self._linked, **self._claims.in_use(), **self.protected}
        goes_by_age = any("age" in policy.needs for policy in self._policies)
        if goes_by_age:
            dated = [info for info in infos if info.format == "ckpt_storage"]
        else:
            first = plan_prune(infos, self._policies, damaged=damaged, in_use=in_use)
            doubtful = [decision.info for decision in first.deleted if decision.info is not None]
            if not doubtful:
                return first
            # What counts, and what was saved here, may have been committed later than these.
            others = {*first.counted, *in_use}
            dated = [*doubtful, *(info for info in infos if info.name in others)]
        times_s = self._census.committed_s(dated, deadline)
        sound = [one for one in dated if save_of(one) not in damaged]
        last = last_committed(sound, times_s)
        if last is not None and any((one.step or 0) > (last.step or 0) for one in sound):
            # After training went back to an earlier step, this is the newest work.
            in_use.setdefault(last.name, "it was committed last")
        if not goes_by_age and self._min_age_s == 0:
            return plan_prune(infos, self._policies, damaged=damaged, in_use=in_use)
        if now_s is None:
            now_s = self._census.root(deadline).server_time(probe_path())
        # The others are kept, whatever their age is: one that makes no difference will do.
        old = {info.name: 0.0 for info in infos if info.name not in times_s}
        return plan_prune(
            infos,
            self._policies,
            now_s=now_s,
            committed_s={**old, **times_s},
            min_age_s=self._min_age_s,
            damaged=damaged,
            in_use=in_use,
        )

    def _is_sound(self, anchor: CheckpointInfo | None, deadline: Deadline) -> bool:
        """Return whether the newest is known to be sound; it is checked once, by its documents."""
        if anchor is None or anchor.save_id is None or self._soundness.is_known(anchor):
            return True
        try:
            checked_id = check_part(
                self._census.store(anchor.name, deadline), Part(), deep=False, deadline=deadline
            )
        except (
            CheckpointGoneError,
            CheckpointInProgressError,
            CheckpointNotFoundError,
            IntegrityError,
        ) as error:
            why = str(error)
        else:
            if checked_id == anchor.save_id:
                self._soundness.found_sound(anchor.name, anchor.save_id)
                return True
            why = "it was saved anew"
        self._soundness.found_damaged(anchor, why)
        return False


def pinned(links: Mapping[str, str | None]) -> dict[str, str]:
    """Return the folders that links lead into, each with the reason why it stays."""
    return {
        target: f"{name} is a link to it"
        for name, target in sorted(links.items())
        if target is not None
    }


def _seen(sight: Sight) -> tuple[str, str | None]:
    return (sight.status, sight.info.save_id if sight.info is not None else None)


def _is_leftover(sight: Sight | None) -> bool:
    return sight is not None and sight.status == "uncommitted"
