"""Reads that ranks of one host share where all of it lies in the kernel's memory already.

Knows mapped files, requests and the order of who checks what; knows no tensor, no process group and
no storage beyond the one call that maps. Called by `loadreads`.

Nothing is sent and nothing is read into buffers: each rank copies what it wants straight out of the
kernel's cache, and checks the units that the order gives it, each piece right before it copies from
it. So every block is checked by one rank, and what a rank copied counts once all have told that
theirs was as saved (`Sharers.joined`).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from .deadline import Deadline
from .errors import CheckpointError, StorageError
from .readplan import Put, Request, deliver
from .sharedreads import Wish
from .sharing import Key, ShareOrder
from .store.base import MappedFile, MappingStore, Store
from .workers import in_one_thread

__all__ = ["MappedReads"]

_PIECE_BYTES = 1 << 20
"""Checked and then copied from while it is in a processor's own cache."""

_MOST_BYTES = 8 << 20
"""Copied in one go; the deadline is looked at in between."""

_MOST_FILES = 128
"""Mapped at a time: each takes a descriptor. More of them are read."""

_KEPT_BYTES = 256 << 20
"""So much of a file stays mapped to pages: of a whole model their tables would be long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Bytes `[start, stop)` of the payload of a chunk, in its file from `begin` on."""

    path: str
    begin: int
    key: Key
    start: int
    stop: int
    is_own: bool


class MappedReads:
    """One rank's part of the shared reads of one load, out of `files` that are mapped.

    `requests` has what this rank wants, by chunk; those of the order's chunks are served here
    and by nobody else.
    """

    def __init__(
        self,
        order: ShareOrder,
        requests: Mapping[Key, Sequence[Request]],
        files: Mapping[str, MappedFile],
    ) -> None:
        self._order = order
        self._rank = order.rank
        self._requests = requests
        self._files = files
        self._stretches = sorted(_stretches(order, requests), key=attrgetter("path", "begin"))
        self._given_up = threading.Event()

    @classmethod
    def of(
        cls,
        store: Store,
        order: ShareOrder,
        requests: Mapping[Key, Sequence[Request]],
    ) -> MappedReads | None:
        """Return this rank's part, None unless every file can be mapped and is cached.

        None, too, if there is nothing to be shared.
        """
        if order.among != "host" or not order.runs or not isinstance(store, MappingStore):
            return None
        files: dict[str, MappedFile] = {}
        for place in (requests[run.key][0].place for run in order.runs):
            # Without checksums nothing is to be divided, and such files may be written again. What
            # lies beyond the end of a file is for a read to tell.
            size_bytes = place.file_bytes
            if (
                place.crcs is None
                or size_bytes is None
                or place.start + place.size_bytes > size_bytes
            ):
                return None
            if place.path in files:
                continue
            mapped = None
            if len(files) < _MOST_FILES:
                # Whatever is wrong: a read finds it as well, and says so to all ranks.
                with contextlib.suppress(StorageError):
                    mapped = store.map_cached(place.path, size_bytes=size_bytes)
            if mapped is None:
                return None
            files[place.path] = mapped
        return cls(order, requests, files)

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank looks at."""
        return sum(each.stop - each.start for each in self._stretches)

    def wish(self, *, verifies: bool) -> Wish:
        """Return what this rank needs: that its partners do the same, with the same files."""
        return Wish(
            buffer_bytes=0,
            buffer_count=0,
            partners=self._order.partners,
            among=self._order.among,
            verifies=verifies,
            maps=True,
            files={
                hashlib.blake2b(path.encode(), digest_size=8).hexdigest(): file.identity
                for path, file in self._files.items()
            },
        )

    def run(self, store: Store, deadline: Deadline, on_bytes: Callable[[int], None]) -> None:
        """Check this rank's units and copy what it wants of all; `store` is that of the files.

        Raises `IntegrityError` and what the deadline raises; targets are then undefined, and a
        thread that was left behind ends with the copy under way.
        """
        try:
            in_one_thread(store, partial(self._run, deadline, on_bytes))
        finally:
            self._given_up.set()

    def _run(self, deadline: Deadline, on_bytes: Callable[[int], None], store: Store) -> None:
        assert isinstance(store, MappingStore)  # noqa: S101  # `of` has asked it
        path, low = "", 0
        whole = memoryview(b"")
        puts: dict[Key, list[tuple[Request, Put | None]]] = {}
        for each in self._stretches:
            if each.path != path:
                self._forget(path, low, None)
                path, low = each.path, 0
                whole = memoryview(self._files[path].memory)
                puts.clear()
            elif each.begin - low >= _KEPT_BYTES:
                self._forget(path, low, each.begin)
                low = each.begin
            takers = puts.get(each.key)
            if takers is None:
                takers = puts[each.key] = [
                    (request, None if request.puts is None else request.puts(whole))
                    for request in self._requests[each.key]
                ]
            deadline.check(f"Reading {path}")
            store.look(path, partial(self._take, each, whole, takers))
            deadline.advanced(each.stop - each.start)
            on_bytes(each.stop - each.start)
        self._forget(path, low, None)

    def _take(
        self, each: _Stretch, whole: memoryview, takers: Sequence[tuple[Request, Put | None]]
    ) -> None:
        place = takers[0][0].place
        length = each.stop - each.start
        step = max(_PIECE_BYTES - _PIECE_BYTES % place.block_bytes, place.block_bytes)
        for at in range(0, length, step if each.is_own else length):
            count = min(step, length - at) if each.is_own else length
            start, begin = each.start + at, each.begin + at
            part = whole[begin : begin + count]
            if each.is_own:
                place.check(part, start)
            for request, put in takers:
                if self._given_up.is_set():
                    # The caller may use the targets again, though this thread came back late.
                    raise CheckpointError(f"The load of rank {self._rank} was given up.")
                if put is None or not put(begin, start, count):
                    deliver(request, start, part)

    def _forget(self, path: str, start: int, stop: int | None) -> None:
        """Let pages in [start, stop) no more count as memory of this process."""
        if path:
            mapped = self._files[path].memory
            start -= start % mmap.PAGESIZE
            stop = len(mapped) if stop is None else stop - stop % mmap.PAGESIZE
            # Not where memory is locked: then it stays until the end.
            with contextlib.suppress(OSError):
                if start < stop:
                    mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _stretches(order: ShareOrder, requests: Mapping[Key, Sequence[Request]]) -> list[_Stretch]:
    """Return the order's units, those that others check joined to longer ones."""
    found = []
    for run in order.runs:
        place = requests[run.key][0].place
        # Where it begins, where it ends, whether this rank checks it.
        open_ = (run.start, run.start, False)
        joined = []
        for unit in run.units(order.unit_bytes):
            is_own = unit.owner == order.rank
            is_longer = unit.stop - open_[0] <= _MOST_BYTES and is_own == open_[2]
            if not is_longer:
                joined.append(open_)
                open_ = (unit.start, unit.start, is_own)
            open_ = (open_[0], unit.stop, is_own)
        joined.append(open_)
        found += [
            _Stretch(
                path=place.path,
                begin=place.start + start,
                key=run.key,
                start=start,
                stop=stop,
                is_own=is_own,
            )
            for start, stop, is_own in joined
            if start < stop
        ]
    return found
