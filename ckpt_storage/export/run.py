"""The steps of all ranks from two places to a published output: the same for every front door."""

from __future__ import annotations

import abc
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ckpt_storage.coordination.failures import as_checkpoint_errors, spell_ranks
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.ranks import Ranks as Group
from ckpt_storage.errors import CheckpointError, RankMismatchError
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.source.filemarks import told_from_damage
from ckpt_storage.store.deadline import Deadline, Stalling, stalling_deadline

from .layout import Layout
from .output import Made, Output, Setting, Site, Taken, untracked
from .places import Marks, Seen, check_seen, look, place_marks, remove_marks
from .plan import Plan, WriteRules, plan
from .reads import Readable
from .work import Alone, Ranks, make

if TYPE_CHECKING:
    import torch.distributed as dist

R = TypeVar("R")
J = TypeVar("J")

_NEVER_S = 10 * 365 * 86_400.0


class Task(abc.ABC, Generic[R]):
    """What one front door makes, on one rank.

    `phase` is that of the work. `source` is what is read from, once the task is open, and `save_id`
    the save that it is of.
    """

    phase: Phase = "write"
    source: Readable
    save_id: str | None = None

    def __init__(self, site: Site) -> None:
        self.site = site

    @abc.abstractmethod
    def find(self) -> object:
        """Open what there is, and return what the other ranks open it by; coordinator only."""

    def reach(self, found: object) -> None:
        """Go to where the coordinator found it."""

    @abc.abstractmethod
    def open(self, found: object) -> None:
        """Open what the coordinator found, even if it is not the newest any more."""

    @abc.abstractmethod
    def lay_out(self) -> Layout:
        """Return the files to make; pure, alike on all ranks."""

    @abc.abstractmethod
    def content(self) -> object:
        """Return what stands for the content of the files (JSON)."""

    @abc.abstractmethod
    def output(self, plan: Plan) -> Output:
        """Return the place that the files go to; asks no storage."""

    @abc.abstractmethod
    def report(self, output: Output, made: Made, seconds: float) -> R:
        """Say what was made, once it is published; coordinator only."""

    def source_files(self) -> list[str]:
        """Return files of the source that every rank must see."""
        return []

    def check_layout(self, layout: Layout) -> None:
        """Raise for a layout that does not fit the source's content; coordinator only."""

    def check_unchanged(self) -> None:
        """Raise if the source changed while it was read."""


def run(ranks: Ranks, setting: Setting, task_of: Callable[[Site], Task[R]]) -> R:
    """Make one output; all ranks call it within one operation, after they have met.

    Before a byte is written all ranks agree on plan and storages. On return the output is complete,
    checked and published. After an error what was there before counts, or, if it happened at the
    last write, this output. Raises on the rank that failed what happened, on others what their
    operation says.
    """
    site = Site(setting)
    try:
        return _run(ranks, site, task_of(site))
    finally:
        site.close()


def _run(ranks: Ranks, site: Site, task: Task[R]) -> R:
    start_s = time.monotonic()
    site.begin(ranks.phase("plan"))
    output, taken = _agree(ranks, site, task)
    first = output.first
    whole = first.renamed(output.named(first.layout, taken.name))
    output.plan = whole = whole.leaving(taken.done, taken.sealed)
    own_bytes = sum(region.size_bytes for region in whole.regions_of(ranks.rank))
    own_bytes += sum(whole.files[at].size_bytes for at in whole.checks_of(ranks.rank))
    site.begin(ranks.phase(task.phase, total_bytes=own_bytes))
    task.source.renew(site.source, site.deadline)

    def before_names() -> None:
        task.check_unchanged()
        output.check_held()

    # What is one stream is written at the end, and shown there.
    track = site.setting.track if own_bytes else untracked
    try:
        with (
            track(own_bytes, task.save_id) as on_bytes,
            told_from_damage(task.check_unchanged),
        ):
            made = make(
                ranks,
                site,
                task.source,
                output,
                taken,
                on_bytes=on_bytes,
                before_names=before_names,
            )
            report = b""
            if ranks.is_coordinator:
                output.publish(made)
                report = pickle.dumps(task.report(output, made, time.monotonic() - start_s))
    except BaseException as error:
        if ranks.is_coordinator:
            output.give_up(error)
        raise
    answer: R = pickle.loads(ranks.broadcast(report))  # noqa: S301  # our own ranks
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Came:
    """How a rank comes out of planning; `digest` is "" where it did not see the source."""

    seen: Seen
    digest: str


def _agree(ranks: Ranks, site: Site, task: Task[R]) -> tuple[Output, Taken]:
    """Return the output, with a plan that is the same on all ranks, and what was taken of it."""
    found: object = None
    marks: Marks | None = None
    output: Output | None = None
    try:
        if ranks.is_coordinator:
            found = task.find()
            marks = place_marks(
                task.source_files(), site.source, site.target, world_size=ranks.world_size
            )
        packed = pickle.dumps((found, marks))
        found, marks = pickle.loads(ranks.broadcast(packed))  # noqa: S301  # our own ranks
        assert marks is not None  # noqa: S101  # the coordinator's
        if not ranks.is_coordinator:
            task.reach(found)
        seen = look(marks, site.source, site.target)
        if ranks.is_coordinator or seen.agrees_with(marks):
            if not ranks.is_coordinator:
                task.open(found)
            output = task.output(_plan(ranks, site, task))
        came = _Came(seen=seen, digest=output.plan.digest if output else "")
        arrived: list[_Came] = [
            pickle.loads(one)  # noqa: S301  # our own ranks
            for one in ranks.gather(pickle.dumps(came))
        ]
    finally:
        if ranks.is_coordinator and marks is not None:
            remove_marks(marks, site.target)
    answer = b""
    if ranks.is_coordinator:
        assert output is not None  # noqa: S101  # the coordinator has planned
        setting = site.setting
        check_seen([one.seen for one in arrived], setting.source.url, setting.target.url)
        _check_alike([one.digest for one in arrived], setting)
        task.check_layout(output.plan.layout)
        answer = pickle.dumps(output.take())
    taken: Taken = pickle.loads(ranks.broadcast(answer))  # noqa: S301  # our own ranks
    assert output is not None  # noqa: S101  # else the coordinator has raised for all
    return output, taken


def _plan(ranks: Ranks, site: Site, task: Task[R]) -> Plan:
    rules = WriteRules.of(site.target.capabilities, part_bytes=site.options.part_bytes)
    return plan(task.lay_out(), world_size=ranks.world_size, rules=rules, source=task.content())


def _check_alike(digests: Sequence[str], setting: Setting) -> None:
    values: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        values.setdefault(digest, []).append(rank)
    if len(values) > 1:
        spelt = "; ".join(f"ranks {spell_ranks(held)}" for held in values.values())
        raise RankMismatchError(
            f"The ranks planned different exports of {setting.source.url}: {spelt}.",
            values=values,
            phase="plan",
            next_step="Give all ranks the same options; functions must answer alike on all.",
        )


class _Moving(Stalling):
    """A `Watch` of work in an operation that has failed, too, once nothing moves on this rank."""

    def __init__(self, operation: Operation, phase: Phase, timeouts: Timeouts, what: str) -> None:
        super().__init__(phase, getattr(timeouts, phase), what)
        self._operation = operation

    def failure(self) -> CheckpointError | None:
        """Return why the operation cannot go on, or that nothing moves here."""
        return self._operation.failure() or super().failure()

    def advanced(self, byte_count: int) -> None:
        """Note bytes, and tell the other ranks."""
        super().advanced(byte_count)
        self._operation.advanced(byte_count)

    def ended_file(self) -> None:
        """Note a file, and tell the other ranks."""
        super().ended_file()
        self._operation.ended_file()

    def failed(self, error: CheckpointError) -> None:
        """Tell the other ranks."""
        self._operation.failed(error)


class _Patient:
    """An operation whose work may take as long as bytes move."""

    def __init__(self, operation: Operation, timeouts: Timeouts) -> None:
        self._operation = operation
        self._timeouts = timeouts
        self.rank = operation.rank
        self.world_size = operation.world_size
        self.is_coordinator = operation.is_coordinator

    def phase(
        self, phase: Phase, timeout_s: float | None = None, *, total_bytes: int = 0
    ) -> Deadline:
        if phase == "plan":
            return self._operation.phase(phase, timeout_s, total_bytes=total_bytes)
        self._operation.phase(phase, _NEVER_S, total_bytes=total_bytes)
        watch = _Moving(self._operation, phase, self._timeouts, self._operation.what)
        return Deadline(phase, _NEVER_S, watch=watch)

    def gather(self, payload: bytes) -> list[bytes]:
        return self._operation.gather(payload)

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        return self._operation.scatter(payloads)

    def broadcast(self, payload: bytes) -> bytes:
        return self._operation.broadcast(payload)


@contextmanager
def meeting(
    group: Group, name: str, what: str, timeouts: Timeouts, job: Callable[[], J]
) -> Iterator[tuple[Operation, J]]:
    """Begin an operation of all ranks, and give it with the job, of which all have equal terms.

    A rank whose arguments make no job joins all the same: the others hear why.
    """
    try:
        with as_checkpoint_errors(f"The call of {name}", group.rank):
            chosen, refusal = job(), None
    except CheckpointError as error:
        chosen, refusal = None, error
    with (
        group.operation(what, timeouts=timeouts) as operation,
        as_checkpoint_errors(what, operation.rank),
    ):
        if chosen is None:
            assert refusal is not None  # noqa: S101  # one of the two is there
            raise refusal
        yield operation, chosen


def run_together(
    process_group: dist.ProcessGroup | None,
    name: str,
    what: str,
    timeouts: Timeouts,
    job: Callable[[], tuple[Setting, Mapping[str, str], Callable[[Site], Task[R]]]],
) -> R:
    """Run the task of a job on all ranks of a group, or, without one, on this process alone.

    The job is its setting, what all ranks must have in common, and its task. The work may take as
    long as bytes move.
    """
    if process_group is None:
        setting, _, task_of = job()
        deadline, _ = stalling_deadline("write", timeouts.write, what)
        with deadline.governs(what):
            return run(Alone(deadline), setting, task_of)
    group = Group.of(process_group, lane=name)
    with meeting(group, name, what, timeouts, job) as (operation, (setting, terms, task_of)):
        operation.meet(terms)
        return run(_Patient(operation, timeouts), setting, task_of)
