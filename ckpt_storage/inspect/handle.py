"""A checkpoint held open: which values it has, where they lie, and reads with a deadline each."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ckpt_storage.errors import FormatError, IntegrityError, InvalidInputError, StorageError
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.options import (
    LOCAL_READ_BYTES,
    Progress,
    RetryPolicy,
    Timeouts,
    TransferOptions,
)
from ckpt_storage.progress import reporting
from ckpt_storage.source.filemarks import open_newest
from ckpt_storage.source.model import CommittedSource, Key, TensorInfo, explained
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline, stalling_deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkReader
from ckpt_storage.transfer.costs import costs_for
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.ranges import RangeReader

from .facts import Sharding

Names = str | Iterable[str] | Callable[[str], bool] | None
"""Names, or a function that says of each whether it is wanted; None: all of them."""

_MOST_SUGGESTED_FROM = 20_000
_PIECES_HELD = 8
"""A piece, what reading it holds meanwhile, and that of a second tensor it is compared with."""


class Handle:
    """One open checkpoint; every read has a deadline of its own. Any thread.

    All reads share one `Pacer`, which remembers how much the storage bears. Files of another
    writer bear no checksums, and its next save may use their names again. So their length and
    time (`marks`) are noted at the opening and compared after every read.
    """

    def __init__(self, location: Location, *, unsafe_pickle: bool, arguments: Any) -> None:  # noqa: ANN401  # those of `verify`
        self.location = location
        self.url = location.url
        self.unsafe_pickle = unsafe_pickle
        self.arguments: Mapping[str, Any] = arguments
        timeouts: Timeouts = arguments["timeout"]
        retry: RetryPolicy = arguments["retry"]
        self._timeout_s = timeouts.load
        self._store = open_store(location, timeouts=timeouts, retry=retry)
        is_remote = self._store.capabilities.is_remote
        self.options = TransferOptions.for_storage(
            is_remote=is_remote,
            local_threads=2,
            local_part_bytes=LOCAL_READ_BYTES,
            thread_count=arguments["thread_count"],
            part_bytes=None,
            memory_limit_bytes=arguments["memory_limit_bytes"],
        )
        self._costs = costs_for(is_remote=is_remote)
        self._pacer = Pacer(self.options.thread_count)
        self._lock = threading.RLock()
        self._is_closed = False
        with self.session("Opening") as (store, deadline):
            found = open_newest(store, deadline=deadline, options=self.options)
        self.source, self.marks = found
        self.tensors: Mapping[str, TensorInfo] = self.source.tensors
        self.objects: Sequence[str] = tuple(sorted(self.source.blobs))

    @property
    def piece_bytes(self) -> int:
        """How much to hold at a time of what may be too large to hold."""
        return max(1, self.options.memory_limit_bytes // _PIECES_HELD)

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of one of ours; None for other formats."""
        return self.source.manifest if isinstance(self.source, CommittedSource) else None

    def close(self) -> None:
        """Refuse reads from now on and release what the store owns; idempotent."""
        self._is_closed = True
        self._store.close()

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.objects

    def __len__(self) -> int:
        return len(self.tensors) + len(self.objects)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self.tensors or fqn in self.source.blobs

    def unknown(self, fqn: object) -> KeyError:
        """Return the error that says that there is no such name, and which are like it."""
        near: list[str] = []
        if isinstance(fqn, str) and len(self) <= _MOST_SUGGESTED_FROM:
            near = difflib.get_close_matches(fqn, list(self), n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        return KeyError(f"{fqn!r:.200} is not in {self.url}{hint}")

    def chosen(self, names: Names, prefix: str | None) -> list[str]:
        """Return the names that are wanted. Raises `KeyError` for one that is not there."""
        if names is None or callable(names):
            found = [fqn for fqn in self if names is None or names(fqn)]
        else:
            found = list(dict.fromkeys([names] if isinstance(names, str) else names))
            for fqn in found:
                if fqn not in self:
                    raise self.unknown(fqn)
        return [fqn for fqn in found if prefix is None or fqn.startswith(prefix)]

    def sharding(self, fqn: str) -> Sharding:
        """Return how a tensor is cut into chunks. Raises `KeyError`."""
        info = self.tensors[fqn]
        owners: Sequence[int] | None = None
        if self.manifest is not None:
            record = self.manifest.tensors[fqn]
            listed = [rank for _, rank in record.chunks or ()]
            owners = listed if record.grid is None else record.grid.owners
        return Sharding(shape=tuple(info.shape), boxes=info.boxes, owners=owners)

    def reporting(
        self, progress: Progress, total_bytes: int
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Give a function that takes the bytes just read of so many, and tells of them."""
        return reporting(
            progress,
            phase="load",
            rank=0,
            total_bytes=total_bytes,
            save_id=self.source.save_id,
            with_bar=True,
        )

    @contextmanager
    def session(self, what: str) -> Iterator[tuple[Store, Deadline]]:
        """Give the store and the deadline of one operation, over once nothing has moved."""
        if self._is_closed:
            raise InvalidInputError(
                f"{self.url} was closed.", next_step="Open it again with open_checkpoint."
            )
        what = f"{what} {self.url}"
        deadline = stalling_deadline("load", self._timeout_s, what)
        with deadline.governs(what):
            yield self._store.bounded(deadline), deadline

    def places(self, keys: Sequence[Key], store: Store, deadline: Deadline) -> list[ChunkPlace]:
        """Return where chunks and blobs lie, looked up in a session."""
        with self._lock:
            self.source.renew(store, deadline)
            return list(self.source.places(keys))

    @contextmanager
    def reading(self, keys: Sequence[Key]) -> Iterator[tuple[ChunkReader, list[ChunkPlace]]]:
        """Give a reader with a deadline of its own, and the places of chunks and blobs.

        Errors of the block become what they mean to a reader of this checkpoint; files that
        another writer changed meanwhile raise `CheckpointGoneError` at its end.
        """
        places: list[ChunkPlace] = []
        with self.session("Reading from") as (store, deadline):
            try:
                places += self.places(keys, store, deadline)
                ranges = RangeReader(store, self.options, deadline, pacer=self._pacer)
                yield ChunkReader(ranges, self._costs), places
            except (StorageError, IntegrityError, FormatError) as error:
                # Gone or damaged, unless another writer has replaced files since.
                if not isinstance(error, StorageError) or error.kind == "not-found":
                    self._check_unchanged(store, places)
                if isinstance(error, FormatError):
                    raise
                raise explained(error, places, self.source, phase=error.phase) from error
            self._check_unchanged(store, places)

    def _check_unchanged(self, store: Store, places: Iterable[ChunkPlace]) -> None:
        if self.marks is not None:
            self.marks.check(store, {place.path for place in places})
