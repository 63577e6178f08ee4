"""What the files of one output are written to: where, by which protocol, shown by which write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

from ckpt_storage._version import __version__
from ckpt_storage.errors import CheckpointError, IntegrityError
from ckpt_storage.format.documents import FileRef
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.progress import reporting
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.backend import Part
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .layout import Layout, OutFile
from .plan import Plan
from .write import Copies, Paces, Portion, transfer_options

Track = Callable[[int, str | None], AbstractContextManager[Callable[[int], None]]]
"""Takes the bytes that this rank will write, and the save id; gives what takes bytes written."""


def untracked(
    _total_bytes: int, _save_id: str | None
) -> AbstractContextManager[Callable[[int], None]]:
    """Tell nobody how far it is."""
    return nullcontext(lambda _count: None)


def shown_to(
    progress: Progress, total_bytes: int, save_id: str | None
) -> AbstractContextManager[Callable[[int], None]]:
    """Show how far the writing of a copy or conversion is."""
    return reporting(
        progress, phase="write", rank=0, total_bytes=total_bytes, save_id=save_id, with_bar=True
    )


def terms_of(source: Location, target: Location) -> dict[str, str]:
    """Return what all ranks must have in common of two places, as `Operation.meet` wants it."""
    return {
        "the checkpoint's URL": source.url,
        "the storage's endpoint": endpoint_of(source),
        "the output's URL": target.url,
        "the output storage's endpoint": endpoint_of(target),
        "the version of ckpt_storage": __version__,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """From where to where an output is made, and how; the same on all ranks.

    `commits` is where the source's commit records lie, if not in it.
    """

    source: Location
    target: Location
    timeouts: Timeouts
    retry: RetryPolicy
    page_cache: PageCache = "keep"
    memory_limit_bytes: int | None = None
    copies: Copies = "auto"
    thread_count: int | None = None
    commits: Location | None = None
    track: Track = untracked


class Site:
    """Both storages of an output on one rank, bounded by the phase that is under way."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._stores = ExitStack()
        self._plain_source = self.opened(setting.source, commit_location=setting.commits)
        self._plain_target = self.opened(setting.target, page_cache=setting.page_cache)
        self._suit()

    def _suit(self) -> None:
        setting, source, target = self.setting, self._plain_source, self._plain_target
        self.options = transfer_options(
            source,
            target,
            memory_limit_bytes=setting.memory_limit_bytes,
            thread_count=setting.thread_count,
        )
        self.paces = Paces(self.options)

    def opened(
        self,
        location: Location,
        *,
        commit_location: Location | None = None,
        page_cache: PageCache = "keep",
    ) -> Store:
        """Return a store that is closed with the others."""
        store = open_store(
            location,
            commit_location=commit_location,
            page_cache=page_cache,
            timeouts=self.setting.timeouts,
            retry=self.setting.retry,
        )
        self._stores.callback(store.close)
        return store

    def read_from(self, location: Location) -> None:
        """Take another place for the source, such as the folder of a file."""
        self._plain_source = self.opened(location)
        self._suit()
        self.begin(self.deadline)

    def begin(self, deadline: Deadline) -> None:
        """Bound both storages by a phase."""
        self.deadline = deadline
        paces = self.paces
        self.source = self._plain_source.bounded(deadline, throttled=paces.source.slowed_down)
        self.target = self._plain_target.bounded(deadline, throttled=paces.target.slowed_down)

    def close(self) -> None:
        """Close all stores."""
        self._stores.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A file of which every byte is durable; without its name yet if there is a token."""

    file: FileRef
    token: str = ""
    write_id: str = ""
    parts: Sequence[Part] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the coordinator found in a place that it took.

    `name` is what the files are named by, see `Output.named`. By position: `done` are files that
    bear their names, `sealed` those that only lack them.
    """

    name: str = ""
    done: Mapping[int, FileRef] = field(default_factory=dict)
    sealed: Mapping[int, Sealed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What came of a plan; only the coordinator has all of it.

    `kept` are the positions of files that an earlier run had completed, and that were sound.
    """

    files: Mapping[int, FileRef]
    portions: Sequence[Portion]
    kept: frozenset[int]

    def bytes_of(self, what: str) -> int:
        """Return the sum over all portions of `read_bytes`, `sent_bytes` or `copied_bytes`."""
        return sum(getattr(portion, what) for portion in self.portions)


class Output:
    """A place in which files become an output; of itself, one that needs no protocol.

    Only the coordinator calls `take`, `check_held`, `publish` and `give_up`; any rank `seal`.
    `first` is the plan that all ranks agreed on, `plan` its last form.
    """

    is_together = False
    """Whether files get their names together, at the end, where the storage can do that."""

    def __init__(self, site: Site, plan: Plan) -> None:
        self.site = site
        self.first = self.plan = plan

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

    def seal(self, number: int, sealed: Sealed) -> None:
        """Write down that file `number` (from 1) is sealed."""

    def check_held(self) -> None:
        """Raise if another run took the place over."""

    def publish(self, made: Made) -> None:
        """Make the files count, by one last write; all of them bear their names."""

    def give_up(self, error: BaseException) -> None:
        """Clear away what nobody could go on with."""

    def damage(self, file: OutFile) -> CheckpointError:
        """Return the error for a file that was written otherwise than its checksum says."""
        return IntegrityError(
            f"{file.name} does not have the checksum that it was written with.",
            path=file.name,
            offset=0,
            next_step="Restore the file from a copy.",
        )
