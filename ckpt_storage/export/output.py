"""Where an output is made and how, and what a place does with its files: the `Output` protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_storage._version import __version__
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import Sealed
from ckpt_storage.options import REMOTE_THREADS, PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.workers import some_at_once

from .layout import Layout
from .plan import Plan
from .write import Copies, Result, transfer_options

if TYPE_CHECKING:
    from .run import Task

T = TypeVar("T")

_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """From where to where an output is made, and how; the same on all ranks.

    Pickles if `progress` does.
    """

    source: Location
    target: Location
    timeouts: Timeouts = field(default_factory=Timeouts)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    page_cache: PageCache = "keep"
    memory_limit_bytes: int | None = None
    copies: Copies = "auto"
    thread_count: int | None = None
    progress: Progress = None

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
        self._stores = stores = ExitStack()
        opened = partial(open_store, timeouts=setting.timeouts, retry=setting.retry)
        self._plain_source = stores.enter_context(closing(opened(setting.source)))
        target = opened(setting.target, page_cache=setting.page_cache)
        self._plain_target = stores.enter_context(closing(target))
        self.options = transfer_options(
            self._plain_source,
            self._plain_target,
            memory_limit_bytes=setting.memory_limit_bytes,
            thread_count=setting.thread_count,
        )
        # They learn how many requests the storages bear.
        self.source_pace = Pacer(self.options.thread_count)
        self.target_pace = Pacer(self.options.thread_count, start=REMOTE_THREADS)

    def begin(self, deadline: Deadline) -> None:
        """Bound both storages by a phase."""
        self.deadline = deadline
        self.source = self._plain_source.bounded(deadline, throttled=self.source_pace.slowed_down)
        self.target = self._plain_target.bounded(deadline, throttled=self.target_pace.slowed_down)

    def at_once(self, name: str, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Return what some small jobs return, done several at a time; raise the first failure."""
        return some_at_once(jobs, _THREADS, name=name, deadline=self.deadline)

    def close(self) -> None:
        """Close all stores."""
        self._stores.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the coordinator found in a place that it took.

    `name` is what the files are named by. By position: `done` are files that bear their names,
    `sealed` those that only lack them.
    """

    name: str = ""
    done: Mapping[int, FileRef] = field(default_factory=dict)
    sealed: Mapping[int, Sealed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What came of a plan; only the coordinator has all of it.

    `results` are of the ranks in their order. `kept` are the positions of files that an earlier run
    had completed, and that were sound.
    """

    files: Mapping[int, FileRef]
    results: Sequence[Result]
    kept: frozenset[int]

    @property
    def moved(self) -> dict[str, int]:
        """The bytes that were read, sent, and copied by the storage, as reports name them."""
        names = "read_bytes", "sent_bytes", "copied_bytes"
        return {name: sum(getattr(one, name) for one in self.results) for name in names}


@dataclass
class Output:
    """A place in which files become an output; of itself, one that needs no protocol.

    Only the coordinator calls `take`, `check_held`, `publish` and `give_up`; any rank `seal`.
    `plan` is what the ranks agreed on for the `task`, and after `follow` what is left of it.
    `is_together`: files get their names together, at the end, where the storage can do that.
    """

    task: Task[Any]
    plan: Plan
    is_together: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._first = self.plan.layout

    @property
    def site(self) -> Site:
        """Both storages."""
        return self.task.site

    @property
    def store(self) -> Store:
        """The target, bounded by the phase."""
        return self.site.target

    def take(self) -> Taken:
        """Make the place this run's, and say what of the work is done; nothing is shown yet."""
        return Taken()

    def named(self, layout: Layout, name: str) -> Layout:
        """Return the files with the names that `take` chose; pure."""
        del name
        return layout

    def rename(self, name: str) -> None:
        """Give the files the names that `take` chose."""
        self.plan = replace(self.plan, layout=self.named(self._first, name))

    def follow(self, taken: Taken) -> None:
        """Plan what is left after what the coordinator took; all ranks."""
        self.rename(taken.name)
        self.plan = self.plan.leaving(taken.done, taken.sealed)

    def seal(self, number: int, sealed: Sealed) -> None:
        """Write down that file `number` (from 1) is sealed."""

    def check_held(self) -> None:
        """Raise if another run took the place over."""

    def publish(self, made: Made) -> None:
        """Make the files count, by one last write; all of them bear their names."""

    def give_up(self, error: BaseException) -> None:
        """Clear away what nobody could go on with."""
