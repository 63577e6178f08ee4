"""Reads that ranks of one host share where all of it lies in the kernel's memory already.

Knows mapped files, requests and claims of who checks what; knows no tensor, no process group and
no storage beyond the one call that maps. Called by `reader` and `loadreads`.

Nothing is sent and nothing is read into buffers: each rank copies what it wants straight out of the
kernel's cache, and checks the units that no other rank has claimed before it came there, each piece
right before it copies from it. So every block is checked by one rank, a rank that is held up checks
less, and what a rank copied counts once all have told that theirs was as saved.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

from .deadline import Deadline
from .errors import CheckpointError, StorageError
from .readplan import Put, Request, deliver
from .sharing import Key
from .source import Place
from .store.base import MappedFile, MappingStore, Store
from .unitclaims import UnitClaims, units_of
from .workers import in_one_thread

__all__ = ["MappedReads"]

_PIECE_BYTES = 2 << 20
"""Checked and then copied from while it is in a processor's cache, the last one's share of a core
at least; in smaller pieces the calls themselves take longer."""

_MOST_BYTES = 16 << 20
"""Looked at in one go: a few milliseconds. The deadline is looked at in between."""

_MOST_FILES = 128
"""Mapped at a time: each takes a descriptor. More of them are read."""

_KEPT_BYTES = 256 << 20
"""So much of a file stays mapped to pages: of a whole model their tables would be long."""


class _Unit(NamedTuple):
    """Bytes `[start, stop)` of the payload of a chunk, in its file from `begin` on."""

    path: str
    begin: int
    start: int
    stop: int
    key: Key


class MappedReads:
    """One rank's part of the shared reads of one load, out of `files` that are mapped.

    `requests` has what this rank wants, by chunk; they are served here and by nobody else.
    `claims` are its own until it joins a mate's; its maker closes them.
    """

    def __init__(
        self,
        units: Sequence[_Unit],
        requests: Mapping[Key, Sequence[Request]],
        files: Mapping[str, MappedFile],
        *,
        unit_bytes: int,
        rank: int,
    ) -> None:
        self._rank = rank
        self._requests = requests
        self._files = files
        self._units = sorted(units)
        self._numbers = {
            key: units_of(path, key, files[path].identity, unit_bytes)
            for key, path in {unit.key: unit.path for unit in units}.items()
        }
        self._own: set[_Unit] = set()
        self._given_up = threading.Event()
        self.claims = UnitClaims(len(units))

    @classmethod
    def of(
        cls,
        store: Store,
        spans: Mapping[Key, tuple[int, int]],
        requests: Mapping[Key, Sequence[Request]],
        *,
        unit_bytes: int,
        rank: int,
    ) -> MappedReads | None:
        """Return this rank's part, None unless every file can be mapped and is cached.

        `spans` has where in the payload of each chunk lies all that `requests` want of it; units
        begin at multiples of `unit_bytes` there, and no block lies in two of them.
        """
        if not spans or not isinstance(store, MappingStore):
            return None
        files: dict[str, MappedFile] = {}
        units: list[_Unit] = []
        for key, (low, high) in spans.items():
            place = requests[key][0].place
            # Without checksums nothing is to be divided, and such files may be written again. What
            # lies beyond the end of a file is for a read to tell.
            size_bytes = place.file_bytes
            if (
                place.crcs is None
                or size_bytes is None
                or place.start + place.size_bytes > size_bytes
            ):
                return None
            units += _units(place, key, low, high, unit_bytes)
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
        return cls(units, requests, files, unit_bytes=unit_bytes, rank=rank)

    @property
    def keys(self) -> AbstractSet[Key]:
        """The chunks that are served here."""
        return self._requests.keys()

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank looks at."""
        return sum(each.stop - each.start for each in self._units)

    def run(self, store: Store, deadline: Deadline, on_bytes: Callable[[int], None]) -> None:
        """Check the units that are this rank's and copy what it wants of all.

        `store` is that of the files.

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
        for some in _together(self._units):
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
        some: Sequence[_Unit],
        whole: memoryview,
        puts: Mapping[Key, Sequence[tuple[Request, Put | None]]],
    ) -> None:
        for each in some:
            self._take(each, whole, puts[each.key])

    def _take(
        self, each: _Unit, whole: memoryview, takers: Sequence[tuple[Request, Put | None]]
    ) -> None:
        place = takers[0][0].place
        length = step = each.stop - each.start
        # What this rank has claimed it checks, also where a look is repeated.
        is_own = each in self._own or self.claims.claim(self._numbers[each.key], each.start)
        if is_own:
            self._own.add(each)
            step = max(_PIECE_BYTES - _PIECE_BYTES % place.block_bytes, place.block_bytes)
        for at in range(0, length, step):
            count = min(step, length - at)
            start, begin = each.start + at, each.begin + at
            part = whole[begin : begin + count]
            if is_own:
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


def _together(units: Sequence[_Unit]) -> Iterator[list[_Unit]]:
    """Yield units of one file that are looked at in one go."""
    some: list[_Unit] = []
    room = 0
    for each in units:
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


def _units(place: Place, key: Key, low: int, high: int, unit_bytes: int) -> Iterator[_Unit]:
    """Yield the units of a chunk that bytes [low, high) of its payload lie in."""
    for start in range(low - low % unit_bytes, high, unit_bytes):
        stop = min(start + unit_bytes, place.size_bytes)
        yield _Unit(place.path, place.start + start, start, stop, key)
