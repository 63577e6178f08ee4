"""A checkpoint held open for reading: what it holds, where its chunks lie, and the next deadline.

The one place where notebooks' modules meet `source`: what they ask of a source is asked here.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ckpt_storage.commit import slotlog
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import InvalidInputError, StorageError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.options import LOCAL_READ_BYTES, RetryPolicy, Timeouts, TransferOptions
from ckpt_storage.source.filemarks import open_newest
from ckpt_storage.source.foreign import StockSource
from ckpt_storage.source.model import CommittedSource, Source, SourceFormat
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, concerns
from ckpt_storage.transfer.costs import costs_for
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.workers import Workers

from .facts import Sharding, StoredFile

_LOCAL_THREADS = 2
_STOCK_FILE = re.compile(r"(?:.*/)?__([0-9]{1,9})_[0-9]+\.distcp")

Key = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A tensor as far as it is known without reading it: FQN, torch's name of its dtype, shape."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """The size of one element."""
        return DTYPES[self.dtype].item_bytes

    @property
    def size_bytes(self) -> int:
        """The size of all elements."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an open checkpoint reads."""

    timeouts: Timeouts
    retry: RetryPolicy
    thread_count: int | None = None
    memory_limit_bytes: int | None = None


class Session:
    """One open checkpoint; every read has a deadline of its own.

    All reads have one `pacer`: a storage that asked for less is not asked for more by the next.

    Files of another writer bear no checksums and names that its next save uses again. Their
    length and time are noted when the checkpoint is opened and looked at after every read, so that
    bytes of two saves do not get mixed unnoticed.
    """

    def __init__(self, location: Location, settings: Settings) -> None:
        self.location = location
        self.settings = settings
        self._whole = open_store(location, timeouts=settings.timeouts, retry=settings.retry)
        self.options = TransferOptions.for_storage(
            is_remote=self._whole.capabilities.is_remote,
            local_threads=_LOCAL_THREADS,
            local_part_bytes=LOCAL_READ_BYTES,
            thread_count=settings.thread_count,
            part_bytes=None,
            memory_limit_bytes=settings.memory_limit_bytes,
        )
        self.pacer = Pacer(self.options.thread_count)
        self.costs = costs_for(is_remote=self._whole.capabilities.is_remote)
        self._lock = threading.RLock()
        self._is_closed = False
        self._shardings: dict[str, Sharding] = {}
        store, deadline = self.begin()
        with deadline.governs(f"Opening {location.url}"):
            opened = open_newest(store, deadline=deadline, options=self.options)
            self.source: Source = opened[0]
            self._marks = opened[1]

    @property
    def url(self) -> str:
        """Where the checkpoint lies."""
        return self.location.url

    @property
    def format(self) -> SourceFormat:
        """What was found."""
        return self.source.format

    @property
    def save_id(self) -> str | None:
        """The save that is read; None where the format has no such thing."""
        return self.source.save_id

    def close(self) -> None:
        """Refuse reads from now on and release what the store owns; idempotent."""
        self._is_closed = True
        self._whole.close()

    def begin(self) -> tuple[Store, Deadline]:
        """Return the store, bounded by a deadline for one operation, and that deadline."""
        if self._is_closed:
            raise InvalidInputError(
                f"{self.url} was closed.", next_step="Open it again with open_checkpoint."
            )
        deadline = Deadline("load", self.settings.timeouts.load)
        return self._whole.bounded(deadline), deadline

    def info(self) -> CheckpointInfo:
        """Return what is told of the checkpoint as a whole."""
        if isinstance(self.source, CommittedSource):
            return CheckpointInfo.of(self.url, self.source.record)
        name = self.url.rstrip("/").rpartition("/")[2]
        return CheckpointInfo(url=self.url, name=name, format=self.format)

    def world_size(self) -> int | None:
        """Return how many ranks saved it; None where the format does not tell."""
        source = self.source
        return source.manifest.world_size if isinstance(source, CommittedSource) else None

    def names(self) -> Sequence[str]:
        """Return the FQNs of all tensors, in the order they are stored."""
        if isinstance(self.source, CommittedSource):
            return list(self.source.manifest.tensors)
        return list(self.source.tensors)

    def blobs(self) -> frozenset[str]:
        """Return the FQNs of the values that are no tensors."""
        return self.source.blobs

    def outline(self, fqn: str) -> Outline:
        """Return what is known of a tensor. Raises `KeyError` if there is none of that name."""
        found = (
            self.source.manifest.tensors[fqn]
            if isinstance(self.source, CommittedSource)
            else self.source.tensors[fqn]
        )
        return Outline(fqn=fqn, dtype=found.dtype, shape=tuple(found.shape))

    def sharding(self, fqn: str) -> Sharding:
        """Return how a tensor is cut into chunks. Raises `KeyError`."""
        found = self._shardings.get(fqn)
        if found is None:
            found = self._shardings[fqn] = self._made_sharding(fqn)
        return found

    def _made_sharding(self, fqn: str) -> Sharding:
        if isinstance(self.source, CommittedSource):
            record = self.source.manifest.tensors[fqn]
            chunks = () if record.grid is not None else tuple(record.chunks or ())
            return Sharding(shape=tuple(record.shape), grid=record.grid, chunks=chunks)
        info = self.source.tensors[fqn]
        return Sharding(
            shape=tuple(info.shape), grid=None, chunks=tuple((box, None) for box in info.boxes)
        )

    def places(self, keys: Sequence[Key], store: Store, deadline: Deadline) -> list[ChunkPlace]:
        """Return where chunks (FQN, offsets; None for a blob) lie, fetching what tells it."""
        with self._lock:
            self.source.renew(store, deadline)
            return list(self.source.places(keys))

    def explain(self, error: StorageError, places: Iterable[ChunkPlace]) -> Exception:
        """Return what it means that the file of one of `places` could not be read."""
        if error.kind != "not-found":
            return error
        missing = next((place for place in places if concerns(error, place.path)), None)
        if missing is None:
            return error
        if self._marks is not None and missing.path in self._marks.of:
            return self._marks.gone(missing.path, "is gone")
        return self.source.explain_missing(missing)

    def check_unchanged(self, store: Store, places: Iterable[ChunkPlace]) -> None:
        """Raise `CheckpointGoneError` if another writer has touched their files since the opening.

        Ours are write-once, and their bytes have checksums: nothing is asked of the storage then.
        """
        if self._marks is not None:
            self._marks.check(store, {place.path for place in places})

    def files(self) -> list[StoredFile]:
        """Return the files that hold values, in order of their names."""
        source = self.source
        if isinstance(source, CommittedSource):
            return [_ours(ref, rank) for ref, rank in source.manifest.files]
        store, deadline = self.begin()
        if isinstance(source, StockSource):
            paths = {item.relative_path for item in source.metadata.items.values()}
        else:
            keys = [
                (fqn, box.offsets) for fqn, info in source.tensors.items() for box in info.boxes
            ]
            paths = {place.path for place in self.places(keys, store, deadline)}
        seen = {} if self._marks is None else self._marks.of
        found: dict[str, int] = {path: seen[path][0] for path in paths if path in seen}
        with deadline.governs(f"Listing {self.url}"):
            found.update((path, store.stat(path).size_bytes) for path in paths - found.keys())
        return [
            StoredFile(path=path, size_bytes=found[path], rank=_rank_of(path))
            for path in sorted(found)
        ]

    def rank_hosts(self) -> Mapping[int, str]:
        """Return the host of every rank; {} for other formats."""
        source = self.source
        return dict(enumerate(source.manifest.hosts)) if isinstance(source, CommittedSource) else {}

    def slots(self) -> list[SlotRecord]:
        """Return all commit slots as they are now, oldest first; [] for other formats."""
        if not isinstance(self.source, CommittedSource):
            return []
        store, deadline = self.begin()
        found: dict[int, SlotRecord | None] = {}

        def look(slot: int) -> None:
            found[slot] = slotlog.read_slot(store, slot)

        with deadline.governs(f"Reading the history of {self.url}"):
            log = slotlog.read_log(store, known=self.source.record)
            wanted = range(1, log.last_slot + 1)
            count = min(self.options.thread_count, len(wanted))
            with Workers(count, name=f"history of {self.url}", deadline=deadline) as workers:
                for slot in wanted:
                    workers.submit(partial(look, slot))
                workers.drain()
        return [record for slot in wanted if (record := found.get(slot)) is not None]


def _ours(ref: FileRef, rank: int) -> StoredFile:
    return StoredFile(path=ref.path, size_bytes=ref.size_bytes, rank=rank, crc32c=ref.crc32c)


def _rank_of(path: str) -> int | None:
    match = _STOCK_FILE.fullmatch(path)
    return int(match[1]) if match else None
