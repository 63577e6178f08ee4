"""The steps of all ranks from two places to a published output: the same for every front door."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

from ckpt_storage.commit.slotlog import is_there
from ckpt_storage.coordination.failures import as_checkpoint_errors, spell_ranks
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import RankMismatchError
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.progress import reporting
from ckpt_storage.source.filemarks import told_from_damage
from ckpt_storage.store.deadline import NEVER_S, Deadline, stalling_deadline

from .output import Found, Made, Setting, Site, Taken, Task
from .places import probed
from .plan import plan
from .write import Work

if TYPE_CHECKING:
    import torch.distributed as dist

R = TypeVar("R")
S = TypeVar("S", bound=Setting)

Begin = Callable[[Phase, int], Deadline]
"""Begins a phase of so many bytes on this rank."""

Tasks = Callable[[Site, Found | None], Task[R]]
"""Makes the task of a rank, as its constructor does."""


def run(operation: Operation, begin: Begin, setting: Setting, task_of: Tasks[R]) -> R:
    """Make one output; all ranks call it within one operation, after they have met.

    On return it is published. After an error what was there before counts, or, if it happened at
    the last write, this output.
    """
    start_s = time.monotonic()
    site = Site(setting)
    try:
        site.begin(begin("plan", 0))
        with site.deadline.governs(operation.what):
            task, taken = _agree(operation, site, task_of)
        own_bytes = sum(region.size_bytes for region in task.plan.regions_of(operation.rank))
        site.begin(begin(task.phase, own_bytes))
        task.source.store = site.source
        with site.deadline.governs(operation.what):
            made = _made(operation, task, taken, own_bytes)
            report = None
            if operation.is_coordinator:
                report = task.report(made, time.monotonic() - start_s)
            # On others it is None until the coordinator's has come.
            return cast("R", operation.broadcast(report))
    finally:
        site.close()


def _made(operation: Operation, task: Task[R], taken: Taken, own_bytes: int) -> Made:
    """Make the files, and publish them on the coordinator."""
    own_bytes += task.stream_bytes if operation.is_coordinator else 0
    try:
        with (
            reporting(
                task.setting.progress if own_bytes else None,
                phase=task.phase,
                rank=operation.rank,
                total_bytes=own_bytes,
                save_id=task.save_id,
                with_bar=operation.is_coordinator,
            ) as task.on_bytes,
            told_from_damage(task.check_unchanged),
        ):
            made = Work(operation, task, taken).make()
            if operation.is_coordinator:
                task.publish(made)
            return made
    except BaseException as error:
        if operation.is_coordinator:
            task.give_up(error)
        raise


def _agree(operation: Operation, site: Site, task_of: Tasks[R]) -> tuple[Task[R], Taken]:
    """Return the task, with a plan that is the same on all ranks, and what was taken of it."""
    is_first, found, probe, taken = operation.is_coordinator, Found(), "", Taken()
    task: Task[R] | None = None
    with ExitStack() as stack:
        if is_first:
            task = task_of(site, None)
            found = task.found
            # Storages that every process reaches by the same requests need no look.
            able = site.target.capabilities
            if operation.world_size > 1 and not (able.is_remote and able.shared):
                probe = stack.enter_context(probed(site.target))
        found, probe = operation.broadcast((found, probe))
        sees = not probe or is_there(site.target, probe)
        if sees:
            task = task or task_of(site, found)
            task.plan = plan(
                task.lay_out(),
                world_size=operation.world_size,
                able=site.target.capabilities,
                part_bytes=site.options.part_bytes,
                source=task.content(),
            )
        digest = task.plan.digest if task and sees else ""
        came = operation.gather((socket.gethostname(), sees, digest))
    if is_first:
        _check_alike(came, site.setting)
        assert task is not None  # noqa: S101  # it made one
        taken = task.take()
    taken = operation.broadcast(taken)
    assert task is not None  # noqa: S101  # else the coordinator has raised for all
    task.rename(taken.name)
    task.plan = task.plan.leaving(taken.done, taken.sealed)
    return task, taken


def _check_alike(came: Sequence[tuple[str, bool, str]], setting: Setting) -> None:
    """Raise unless all ranks (host, whether it saw the probe, digest) see and plan the same."""
    url, digests = setting.target.url, dict[str, list[int]]()
    if blind := [rank for rank, (_, sees, _) in enumerate(came) if not sees]:
        hosts = ", ".join(sorted({came[rank][0] for rank in blind}))
        apart = f"{hosts} (rank{'s' if len(blind) > 1 else ''} {spell_ranks(blind)})"
        raise RankMismatchError(
            f"{url} is not the same on all nodes: what rank 0 writes there is not seen on {apart}.",
            values={apart: blind},
            path=url,
            phase="plan",
            next_step="Give an output on a file system that all nodes share or on an object store, "
            "or work with the ranks of one node, or with one process.",
        )
    for rank, (_, _, digest) in enumerate(came):
        digests.setdefault(digest, []).append(rank)
    if len(digests) > 1:
        spelt = "; ".join(f"ranks {spell_ranks(ranks)}" for ranks in digests.values())
        raise RankMismatchError(
            f"The ranks planned different exports of {setting.source.url}: {spelt}.",
            values=digests,
            phase="plan",
            next_step="Give all ranks the same options; functions must answer alike on all.",
        )


@contextmanager
def meeting(
    group: RankGroup, name: str, what: str, timeouts: Timeouts, job: Callable[[], S]
) -> Iterator[tuple[Operation, S]]:
    """Begin an operation of all ranks, which have met, and give it with the setting.

    A rank whose arguments make no `job` joins all the same: the others hear why.
    """
    with group.operation(what, timeouts=timeouts) as operation:
        with as_checkpoint_errors(f"The call of {name}", operation.rank):
            setting = job()
        operation.meet(setting.terms())
        yield operation, setting


def run_together(
    process_group: dist.ProcessGroup | None,
    name: str,
    what: str,
    timeouts: Timeouts,
    job: Callable[[], Setting],
    task_of: Tasks[R],
) -> R:
    """Run a job on all ranks, or, without a group, on this one alone, as long as bytes move."""
    is_alone = process_group is None
    group = RankGroup.alone() if is_alone else RankGroup.of(process_group, lane=name)
    with meeting(group, name, what, timeouts, job) as (operation, setting):

        def begin(phase: Phase, total_bytes: int) -> Deadline:
            if phase == "plan" and not is_alone:
                return operation.phase(phase)
            # Who is alone has one deadline, that of the work.
            operation.phase("write", NEVER_S, total_bytes=total_bytes)
            return stalling_deadline("write", timeouts.write, operation.what, beside=operation)

        return run(operation, begin, setting, task_of)
