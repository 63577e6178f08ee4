"""Where an output is made and how, what of it is there, and the `Task`: what a front door makes."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Generic, Literal, TypeVar

from ckpt_storage._version import __version__
from ckpt_storage.commit.slotlog import stat_if_there
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.crc import combine_many
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import Sealed
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA, new_write_id
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
from ckpt_storage.source.model import CommittedSource, Source, read_manifest
from ckpt_storage.source.opening import open_newest, open_source
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.backend import Part
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.workers import some_at_once

from .plan import OutFile, Plan

R = TypeVar("R")
T = TypeVar("T")

Copies = Literal["auto", "never"]
"""Which parts the storage copies: those that it can, none."""

Span = tuple[int, int, int]
"""Where bytes of a file begin, how many there are, and their CRC-32C."""

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
        self.options = self._transfer_options()
        # They learn how many requests the storages bear.
        self.source_pace = Pacer(self.options.thread_count)
        self.target_pace = Pacer(self.options.thread_count)

    def _transfer_options(self) -> TransferOptions:
        """Return threads and sizes that suit both storages within the memory limit."""
        limit_bytes = self.setting.memory_limit_bytes
        stores = (self._plain_source, self._plain_target)
        is_remote = any(store.capabilities.is_remote for store in stores)
        threads = self.setting.thread_count or (REMOTE_THREADS if is_remote else _LEAST_THREADS)
        threads = _LEAST_THREADS if threads == 1 else threads
        # A part in flight takes up to three times its bytes: read, put together, joined by a
        # client. All ranks plan alike, on nodes with more of them and with fewer.
        share_bytes = (limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES) // (3 * threads)
        share_bytes -= share_bytes % MIB if share_bytes > MIB else 0
        return TransferOptions(
            thread_count=threads,
            part_bytes=max(min(DEFAULT_PART_BYTES, share_bytes), MIB // 16),
            memory_limit_bytes=limit_bytes or default_memory_limit_bytes(),
        )

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


@dataclass(slots=True)
class Result:
    """What one rank did. All mappings are by position of the file.

    Spans are those of whole regions, or, of a file with edges, of what lies between them.
    `read_bytes` came to this process, `sent_bytes` left it, `copied_bytes` the storage copied.
    `receipts` are of shared files, `sealed` the files that it sealed, or found sound.
    """

    spans: dict[int, list[Span]] = field(default_factory=dict)
    read_bytes: int = 0
    sent_bytes: int = 0
    copied_bytes: int = 0
    receipts: dict[int, list[Part]] = field(default_factory=dict)
    sealed: dict[int, Sealed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What came of a plan, by position and by rank; only the coordinator has all of it.

    `kept` are the files that an earlier run had completed, and that were sound.
    """

    files: Mapping[int, FileRef]
    results: Sequence[Result]
    kept: frozenset[int]

    @property
    def moved(self) -> dict[str, int]:
        """The bytes that were read, sent, and copied by the storage, as reports name them."""
        names = "read_bytes", "sent_bytes", "copied_bytes"
        return {name: sum(getattr(one, name) for one in self.results) for name in names}


def joined(spans: Iterable[Span]) -> Span:
    """Return spans that lie side by side, in any order, as one."""
    starts, lengths, crcs = zip(*sorted(spans), strict=True)
    if len(starts) == 1:
        return starts[0], lengths[0], crcs[0]
    return starts[0], sum(lengths), combine_many(crcs, lengths)


class Task(abc.ABC, Generic[R]):
    """What one front door makes on one rank: what is read, which files come of it, and where to.

    Made without `found`, on the coordinator, it looks for the checkpoint; others open what that
    found. Only the coordinator calls `check_unchanged` and what comes after `content`, but for
    `rename` and `seal`. The work is of this `phase` and tells `on_bytes`; `publish` writes
    `stream_bytes`. With `is_together` files get their names at the end, where that works.
    """

    phase: ClassVar[Phase] = "write"
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
    def save_id(self) -> str | None:
        """The save that is read."""
        return self.source.save_id

    def find(self) -> Found:
        """Open the newest checkpoint; return what the others open it by."""
        site, found = self.site, Found()
        self.source = source = open_newest(site.source, site.options)
        if isinstance(source, CommittedSource):
            found = Found(record=source.record)
        else:
            # An output may lie below the source, and be another one by now.
            own = {*source.paths, STOCK_METADATA, INDEX_NAME}
            marks = {path: mark for path, mark in source.marks.of.items() if path in own}
            is_told = all(time_s is not None for _, time_s in marks.values())
            found = Found(state=sorted(marks.items()) if is_told else new_write_id())
            source.marks = replace(source.marks, of=marks)
            self.watch = lambda: source.check_unchanged(site.source)
        self.check_unchanged()
        return found

    def open(self, found: Found) -> None:
        """Open what the coordinator found, even if it is not the newest any more."""
        site, record = self.site, found.record
        if record is None:
            self.source = open_source(site.source, site.options)
            return
        manifest = read_manifest(site.source, record)
        self.source = CommittedSource(site.source, record, manifest, site.options)

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

    def publish(self, made: Made) -> None:
        """Make the files count, by one last write; all of them bear their names."""

    def give_up(self, error: BaseException) -> None:
        """Clear away what nobody could go on with."""

    @abc.abstractmethod
    def report(self, made: Made, seconds: float) -> R:
        """Say what was made, once it is published."""
