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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

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

_MOST_BYTES = 16 << 20
"""Looked at in one go: a few milliseconds. The deadline is looked at in between."""

_MOST_FILES = 128
"""Mapped at a time: each takes a descriptor. More of them are read."""

_KEPT_BYTES = 256 << 20
"""So much of a file stays mapped to pages: of a whole model their tables would be long."""


class _Stretch(NamedTuple):
    """Bytes `[start, stop)` of the payload of a chunk, in its file from `begin` on."""

    path: str
    begin: int
    start: int
    stop: int
    is_own: bool
    key: Key


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
        self._stretches = sorted(_stretches(order, requests))
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

    def wish(self, *, verifies: bool, is_last: bool) -> Wish:
        """Return what this rank needs: that its partners do the same, with the same files.

        `is_last`: nothing of its load can fail after these reads.
        """
        return Wish(
            buffer_bytes=0,
            buffer_count=0,
            partners=self._order.partners,
            among=self._order.among,
            verifies=verifies,
            maps=True,
            is_last=is_last,
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
        for some in _together(self._stretches):
            if some[0].path != path:
                self._forget(path, low, None)
                path, low = some[0].path, 0
                whole = memoryview(self._files[path].memory)
                puts.clear()
            elif some[0].begin - low >= _KEPT_BYTES:
                self._forget(path, low, some[0].begin)
                low = some[0].begin
            for key in {each.key for each in some} - puts.keys():
                puts[key] = [
                    (request, None if request.puts is None else request.puts(whole))
                    for request in self._requests[key]
                ]
            deadline.check(f"Reading {path}")
            store.look(path, partial(self._take_all, some, whole, puts))
            byte_count = sum(each.stop - each.start for each in some)
            deadline.advanced(byte_count)
            on_bytes(byte_count)
        self._forget(path, low, None)

    def _take_all(
        self,
        some: Sequence[_Stretch],
        whole: memoryview,
        puts: Mapping[Key, Sequence[tuple[Request, Put | None]]],
    ) -> None:
        for each in some:
            self._take(each, whole, puts[each.key])

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


def _together(stretches: Sequence[_Stretch]) -> Iterator[list[_Stretch]]:
    """Yield stretches of one file that are looked at in one go."""
    some: list[_Stretch] = []
    room = 0
    for each in stretches:
        length = each.stop - each.start
        if some and (each.path != some[0].path or length > room):
            yield some
            some = []
        if not some:
            room = _MOST_BYTES
        some.append(each)
        room -= length
    if some:
        yield some


def _stretches(order: ShareOrder, requests: Mapping[Key, Sequence[Request]]) -> list[_Stretch]:
    """Return the order's units, those that others check joined to longer ones."""
    rank, unit_bytes = order.rank, order.unit_bytes
    found: list[_Stretch] = []
    for run in order.runs:
        place = requests[run.key][0].place
        path, origin, key = place.path, place.start, run.key
        start = begin = run.start
        is_own = False
        for owner in run.owners:
            stop = min(begin + unit_bytes, run.stop)
            if start < begin and ((owner == rank) != is_own or stop - start > _MOST_BYTES):
                found.append(_Stretch(path, origin + start, start, begin, is_own, key))
                start = begin
            is_own = owner == rank
            begin = stop
        if start < begin:
            found.append(_Stretch(path, origin + start, start, begin, is_own, key))
    return found
