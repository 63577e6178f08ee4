"""From where to where an output is made, the `Task` of a front door, and the steps of all ranks."""

from __future__ import annotations

import abc
import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar, cast

from ckpt_storage._version import __version__
from ckpt_storage.commit.slotlog import is_there, stat_if_there
from ckpt_storage.coordination.failures import as_checkpoint_errors, spell_ranks
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, RankMismatchError, StorageError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import Sealed
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA, new_write_id, probe_path
from ckpt_storage.options import (
    DEFAULT_MEMORY_LIMIT_BYTES,
    DEFAULT_PART_BYTES,
    MIB,
    REMOTE_THREADS,
    PageCache,
    Phase,
    Progress,
    RetryPolicy,
    Timeouts,
    TransferOptions,
    default_memory_limit_bytes,
)
from ckpt_storage.progress import reporting
from ckpt_storage.source.filemarks import listed, told_from_damage
from ckpt_storage.source.model import CommittedSource, Source, read_manifest
from ckpt_storage.source.opening import open_newest, open_source
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.deadline import NEVER_S, Deadline, stalling_deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.workers import some_at_once

from .plan import OutFile, Plan, plan
from .write import Made, Work

if TYPE_CHECKING:
    import torch.distributed as dist

R = TypeVar("R")
T = TypeVar("T")

Copies = Literal["auto", "never"]
"""Which parts the storage copies: those that it can, none."""

_LEAST_THREADS = 2
"""One part is written while another is being read."""

_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """From where to where an output is made, and how; the same on all ranks."""

    source: Location
    target: Location
    timeouts: Timeouts = field(default_factory=Timeouts)
    retry: RetryPolicy | None = None
    page_cache: PageCache = "keep"
    memory_limit_bytes: int | None = None
    copies: Copies = "auto"
    thread_count: int | None = None
    overwrite: bool = False
    progress: Progress = None

    phase: ClassVar[Phase] = "write"
    """What the work is a phase of."""

    def first_phase(self, *, is_alone: bool) -> Phase:
        """Return what planning is a phase of; who is alone has one deadline, that of the work."""
        return self.phase if is_alone else "plan"

    def terms(self) -> dict[str, str]:
        """Return what all ranks must have in common, as `Operation.meet` wants it."""
        return {
            "the checkpoint's URL": self.source.url,
            "the storage's endpoint": endpoint_of(self.source),
            "the output's URL": self.target.url,
            "the output storage's endpoint": endpoint_of(self.target),
            "the version of ckpt_storage": __version__,
        }


class Site:
    """Both storages of an output on one rank, bounded by the phase that is under way."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        opened = partial(open_store, timeouts=setting.timeouts, retry=setting.retry)
        self._plain_source = opened(setting.source)
        self._plain_target = opened(setting.target, page_cache=setting.page_cache)
        stores, limit_bytes = (self._plain_source, self._plain_target), setting.memory_limit_bytes
        is_remote = any(store.capabilities.is_remote for store in stores)
        threads = setting.thread_count or (REMOTE_THREADS if is_remote else _LEAST_THREADS)
        threads = _LEAST_THREADS if threads == 1 else threads
        # A part in flight takes up to three times its bytes: read, put together, joined by a
        # client. All ranks plan alike, on nodes with more of them and with fewer.
        share_bytes = (limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES) // (3 * threads)
        share_bytes -= share_bytes % MIB if share_bytes > MIB else 0
        self.can_copy = setting.copies == "auto" and self._plain_target.can_copy_from(
            self._plain_source
        )
        self.options = TransferOptions(
            thread_count=threads,
            part_bytes=max(min(DEFAULT_PART_BYTES, share_bytes), MIB // 16),
            memory_limit_bytes=limit_bytes or default_memory_limit_bytes(),
        )
        # They learn how many requests the storages bear.
        self.source_pace, self.target_pace = Pacer(threads), Pacer(threads)

    def begin(self, deadline: Deadline) -> None:
        """Bound both storages by a phase."""
        self.deadline = deadline
        self.source = self._plain_source.bounded(deadline, throttled=self.source_pace.slowed_down)
        self.target = self._plain_target.bounded(deadline, throttled=self.target_pace.slowed_down)

    def at_once(self, name: str, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Return what some small jobs return, done several at a time; raise the first failure."""
        return some_at_once(jobs, _THREADS, name=name, deadline=self.deadline)

    def there(self, files: Mapping[int, FileRef]) -> dict[int, FileRef]:
        """Return those files that are at the target in their length."""
        looks = [partial(stat_if_there, self.target, one.path) for one in files.values()]
        found = zip(files.items(), self.at_once("look for files", looks), strict=True)
        return {at: one for (at, one), seen in found if seen and seen.size_bytes == one.size_bytes}

    def close(self) -> None:
        """Close all stores."""
        self._plain_source.close()
        self._plain_target.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the coordinator opened: by its record if it is of ours.

    Else `state` (JSON) stands for the content; of files without a time it is another one each time.
    """

    record: SlotRecord | None = None
    state: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the coordinator found in a place that it took; `name` is what the files are named by.

    By position: `done` are files that bear their names, `sealed` those that only lack them.
    """

    name: str = ""
    done: Mapping[int, FileRef] = field(default_factory=dict)
    sealed: Mapping[int, Sealed] = field(default_factory=dict)


class Task(abc.ABC, Generic[R]):
    """What one front door makes on one rank: what is read, which files come of it, and where to.

    Made without `found`, on the coordinator, it looks for the checkpoint; others open that. Only
    the coordinator calls `check_unchanged` and what comes after `content`, but for `rename` and
    `seal`. The work tells `on_bytes`; `publish` writes `stream_bytes`. With `is_together` files get
    their names at the end, where that works.
    """

    is_together: bool = False
    source: Source
    plan: Plan
    on_bytes: Callable[[int], None]
    stream_bytes = 0

    def __init__(self, site: Site, found: Found | None = None) -> None:
        self.site, self.setting = site, site.setting
        self.watch: Callable[[], None] | None = None
        if found is None:
            self.found = self.find()
        else:
            self.found = found
            self.open(found)

    @property
    def part_bytes(self) -> int:
        """About how long the parts of files are; the same on all ranks."""
        return self.site.options.part_bytes

    @property
    def save_id(self) -> str | None:
        """The save that is read."""
        return self.source.save_id

    def find(self) -> Found:
        """Open the newest checkpoint; return what the others open it by."""
        site = self.site
        self.source = source = open_newest(site.source, site.options)
        if isinstance(source, CommittedSource):
            return Found(record=source.record)
        # An output may lie below the source, and be another one by now.
        own = {*source.paths, STOCK_METADATA, INDEX_NAME}
        marks = {path: mark for path, mark in source.marks.of.items() if path in own}
        source.marks = replace(source.marks, of=marks)
        self.watch = lambda: source.check_unchanged(site.source)
        self.check_unchanged()
        is_told = all(time_s is not None for _, time_s in marks.values())
        return Found(state=sorted(marks.items()) if is_told else new_write_id())

    def open(self, found: Found) -> None:
        """Open what the coordinator found, even if it is not the newest any more."""
        store, options, record = self.site.source, self.site.options, found.record
        if record is None:
            self.source = open_source(store, options)
        else:
            self.source = CommittedSource(store, record, read_manifest(store, record), options)

    def check_unchanged(self) -> None:
        """Raise if another writer touched the source since it was opened."""
        if self.watch is not None:
            self.watch()

    @abc.abstractmethod
    def lay_out(self) -> Iterable[OutFile]:
        """Return the files to make; pure, alike on all ranks."""

    @abc.abstractmethod
    def content(self) -> object:
        """Return what stands for the content of the files (JSON)."""

    def take(self) -> Taken:
        """Make the place this run's, and say what of the work is done; nothing is shown yet."""
        return Taken()

    def rename(self, name: str) -> None:
        """Give the files the names that `take` chose."""

    def seal(self, number: int, sealed: Sealed) -> None:
        """Write down that file `number` (from 1) is sealed."""

    def check_held(self) -> None:
        """Raise if another run took the place over."""

    def prepare_names(self) -> None:
        """Make the place ready for files that get their names now."""

    def publish(self, made: Made) -> None:
        """Make the files count, by one last write; all of them bear their names."""

    def give_up(self, error: BaseException) -> None:
        """Clear away what nobody could go on with."""

    @abc.abstractmethod
    def report(self, made: Made, seconds: float) -> R:
        """Say what was made, once it is published."""


@contextlib.contextmanager
def probed(target: Store) -> Iterator[str]:
    """Put a file of a random name at the target, give its path, and remove it."""
    path = probe_path()
    target.make_folders([])
    target.put(path, b"Who else sees this?")
    try:
        yield path
    finally:
        with contextlib.suppress(CheckpointError):
            target.delete([path])


def place_within(source: Store, target: Store) -> str | None:
    """Return where below the source's root that of the target lies, "" for the very same.

    None: elsewhere, or nothing lies there or may be written there: then nothing can be harmed.
    """
    refused = {"not-found", "permission"}
    try:
        if not listed(target):
            return None
    except StorageError as error:
        if error.kind not in refused:
            raise
    try:
        with probed(target) as name:
            try:
                if is_there(source, name):
                    return ""
            except StorageError as error:
                # Some storages refuse those who may not list what is not there.
                if error.kind not in refused:
                    raise
            paths = (one.path for one in source.list(""))
            return next((p[: -len(name) - 1] for p in paths if p.endswith(f"/{name}")), None)
    except StorageError as error:
        if error.kind not in refused:
            raise
        return None


Tasks = Callable[[Site, Found | None], Task[R]]
"""Makes the task of a rank, as its constructor does."""


def run(operation: Operation, setting: Setting, task_of: Tasks[R]) -> R:
    """Make one output; all ranks call it within one operation, after they have met.

    On return it is published. After an error what was there before counts, or, if it happened at
    the last write, this output.
    """

    def begin(phase: Phase, total_bytes: int = 0) -> None:
        if phase == "plan":
            site.begin(operation.phase(phase, total_bytes=total_bytes))
            return
        # As long as bytes move.
        operation.phase(phase, NEVER_S, total_bytes=total_bytes)
        limit_s: float = getattr(setting.timeouts, phase)
        site.begin(stalling_deadline(phase, limit_s, operation.what, beside=operation))

    start_s = time.monotonic()
    site = Site(setting)
    try:
        begin(setting.first_phase(is_alone=operation.world_size == 1))
        with site.deadline.governs(operation.what):
            task, taken = _agree(operation, site, task_of)
        own_bytes = sum(region.size_bytes for region in task.plan.regions_of(operation.rank))
        begin(setting.phase, own_bytes)
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
                phase=task.setting.phase,
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
    is_first, probe, digest, taken = operation.is_coordinator, "", "", Taken()
    task: Task[R] | None = None
    with contextlib.ExitStack() as stack:
        if is_first:
            task = task_of(site, None)
            # Storages that every process reaches by the same requests need no look.
            able = site.target.capabilities
            if operation.world_size > 1 and not (able.is_remote and able.shared):
                probe = stack.enter_context(probed(site.target))
        found, probe = operation.broadcast((task.found if task else None, probe))
        if sees := not probe or is_there(site.target, probe):
            task = task or task_of(site, found)
            task.plan = plan(
                task.lay_out(),
                world_size=operation.world_size,
                able=site.target.capabilities,
                part_bytes=task.part_bytes,
                source=task.content(),
            )
            digest = task.plan.digest
        came = operation.gather((socket.gethostname(), sees, digest))
    if is_first and task:
        _check_alike(came, site.setting)
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
        what = f"The ranks planned different exports of {setting.source.url}: {spelt}."
        step = "Give all ranks the same options; functions must answer alike on all."
        raise RankMismatchError(what, values=digests, phase="plan", next_step=step)


def run_together(
    process_group: dist.ProcessGroup | None,
    name: str,
    what: str,
    timeouts: Timeouts,
    job: Callable[[], Setting],
    task_of: Tasks[R],
) -> R:
    """Run a job on all ranks, or, without a group, on this one alone."""
    is_alone = process_group is None
    group = RankGroup.alone() if is_alone else RankGroup.of(process_group, lane=name)
    return run_in(group, name, what, timeouts, job, task_of)


def run_in(
    group: RankGroup,
    name: str,
    what: str,
    timeouts: Timeouts,
    job: Callable[[], Setting],
    task_of: Tasks[R],
) -> R:
    """Run a job on all ranks. One whose arguments make none joins, too: the others hear why."""
    with group.operation(what, timeouts=timeouts) as operation:
        with as_checkpoint_errors(f"The call of {name}", operation.rank):
            setting = job()
        operation.meet(setting.terms())
        return run(operation, setting, task_of)
