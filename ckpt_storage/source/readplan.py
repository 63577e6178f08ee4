"""Which byte ranges to read for some regions of some chunks, and what to do with each.

Pure planning over `source.Place` and `regions`, and the check and delivery of what arrives; knows
no tensor library and no storage; what a request costs it learns from `costs`.

A region that is one long byte run goes straight into its target, block by block verified there.
Anything else is read in windows of at most one part and copied out: a payload that is wanted
whole by one assignment, any other by a handful of strided copies per window. So memory is bounded
whatever the sizes, nothing loops over rows, and thousands of small tensors share one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from ckpt_storage.format.boxes import (
    Box,
    WindowCopy,
    byte_runs,
    coalesce,
    round_out,
    run_count,
    run_extent,
    window_copies,
)
from ckpt_storage.source.costs import LOCAL_COSTS, ReadCosts
from ckpt_storage.transfer.ranges import Fetch

from .model import Place

Sink = Callable[[memoryview, Sequence[WindowCopy]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One region of one chunk, wanted.

    `region` counts from the chunk's first element; None is the whole chunk. `target` is the
    writable memory of the whole region if its bytes may be put there as they are, else None; of a
    region of several runs it may always be None.
    `sink` takes windows of verified bytes and what to copy out of each, of a request that has no
    `target` or whose region is no single run; it is called from several threads, each element
    once.
    """

    place: Place
    item_bytes: int
    chunk_sizes: tuple[int, ...]
    region: Box | None
    sink: Sink
    target: memoryview | None = None


def no_sink(window: memoryview, copies: Sequence[WindowCopy]) -> None:
    """Stand for the sink of a request that is one run and has a target: nothing comes here."""
    raise AssertionError((len(window), copies))


def bytes_request(place: Place, buffer: bytearray) -> Request:
    """Return the request for the first `len(buffer)` bytes of `place`, into `buffer`."""
    return Request(
        place=place,
        item_bytes=1,
        chunk_sizes=(place.size_bytes,),
        region=None if len(buffer) == place.size_bytes else Box((0,), (len(buffer),)),
        sink=no_sink,
        target=memoryview(buffer),
    )


_PIECE_BYTES = 256 << 10
"""Checked and copied while they are in a processor's own cache."""

# Where a window begins and ends in its file, whose it is, and where it begins in the payload.
_Window = tuple[int, int, Request, int]
_INTERVAL = itemgetter(0, 1)


def plan_reads(
    requests: Sequence[Request],
    *,
    part_bytes: int,
    costs: ReadCosts = LOCAL_COSTS,
    stream_count: int = 1,
    turn: int | None = None,
) -> list[Fetch]:
    """Return the reads that serve all `requests`.

    `part_bytes` bounds one read, except that a block or an element larger than it is read whole;
    parts are smaller where `stream_count` streams would not all have some. The order is by file
    and offset; with a `turn` the files take turns, beginning with another one for each `turn`, so
    that many readers do not ask for one file at a time.
    """
    total = sum(request.place.size_bytes for request in requests)
    if stream_count > 1:
        part_bytes = costs.part_bytes(total, stream_count, part_bytes)
    window_bytes = min(part_bytes, costs.window_bytes)
    direct: dict[str, list[Fetch]] = {}
    windows: dict[str, list[_Window]] = {}
    planner = _Planner(costs, part_bytes, window_bytes)
    for request in requests:
        path = request.place.path
        planner.plan(request, direct.setdefault(path, []), windows.setdefault(path, []))
    files = []
    for path in sorted(direct):
        fetches, wanted = direct[path], windows[path]
        wanted.sort(key=_INTERVAL)
        intervals = [(window[0], window[1]) for window in wanted]
        for extent in coalesce(intervals, costs.gap_bytes, window_bytes):
            members = wanted[extent.members[0] : extent.members[-1] + 1]
            fetches.append(
                Fetch(
                    path=path,
                    start=extent.start,
                    stop=extent.stop,
                    done=partial(_deliver, members, extent.start),
                    size_bytes=members[0][2].place.file_bytes,
                )
            )
        fetches.sort(key=lambda fetch: fetch.start)
        files.append(fetches)
    if turn is None or len(files) < 2:  # noqa: PLR2004  # nobody to take turns with
        return [fetch for fetches in files for fetch in fetches]
    return _in_turns(files, turn)


def _in_turns(files: Sequence[list[Fetch]], turn: int) -> list[Fetch]:
    first = turn % len(files)
    files = [*files[first:], *files[:first]]
    most = max(map(len, files))
    return [fetches[at] for at in range(most) for fetches in files if at < len(fetches)]


class _Planner:
    """Cuts requests into reads of their own and windows to be shared."""

    def __init__(self, costs: ReadCosts, part_bytes: int, window_bytes: int) -> None:
        self._gap_bytes = costs.gap_bytes
        self._direct_min_bytes = min(costs.direct_min_bytes, part_bytes)
        self._part_bytes = part_bytes
        self._window_bytes = window_bytes
        self._copies_beat_requests = costs.request_s * costs.copy_bytes_s > window_bytes

    def plan(self, request: Request, fetches: list[Fetch], windows: list[_Window]) -> None:
        """Add to `fetches` and `windows`, both of the request's file, what serves it."""
        place, region = request.place, request.region
        total = place.size_bytes
        if region is None:
            if 0 < total < self._direct_min_bytes and total <= self._window_bytes:
                # Thousands of these: nothing to work out.
                windows.append((place.start, place.start + total, request, 0))
            elif total:
                into = None if request.target is None else 0
                self._plan_run(request, (0, total), into, fetches, windows)
            return
        if region.is_empty:
            return
        sizes, item_bytes = request.chunk_sizes, request.item_bytes
        count = run_count(sizes, region)
        extent = run_extent(sizes, region, item_bytes)
        whole = (extent.start, extent.stop)
        if count == 1:
            into = None if request.target is None else extent.start
            self._plan_run(request, whole, into, fetches, windows)
            return
        wanted = region.volume * item_bytes
        runs: Iterable[tuple[int, int]] = (whole,)
        if (extent.stop - extent.start - wanted) / (count - 1) > self._gap_bytes:
            runs = ((run.start, run.stop) for run in byte_runs(sizes, region, item_bytes))
        for run in runs:
            self._plan_run(request, run, None, fetches, windows)

    def _plan_run(
        self,
        request: Request,
        run: tuple[int, int],
        into: int | None,
        fetches: list[Fetch],
        windows: list[_Window],
    ) -> None:
        place = request.place
        block, total = place.block_bytes, place.size_bytes
        start, stop = round_out(*run, block, total)
        inner_start = run[0] + -run[0] % block
        inner_stop = run[1] if run[1] == total else run[1] - run[1] % block
        if into is None or inner_stop - inner_start < self._direct_min_bytes:
            self._add_windows(request, start, stop, windows)
        elif self._copies_beat_requests:
            # A part that holds an edge is copied: no request for the edge alone.
            step = self._even_step(stop - start, request)
            for at in range(start, stop, step):
                end = min(at + step, stop)
                if run[0] <= at and end <= run[1]:
                    fetches.append(_direct(request, into, at, end))
                else:
                    self._add_windows(request, at, end, windows)
        else:
            step = self._step(self._part_bytes, request)
            fetches.extend(
                _direct(request, into, at, min(at + step, inner_stop))
                for at in range(inner_start, inner_stop, step)
            )
            self._add_windows(request, start, inner_start, windows)
            self._add_windows(request, inner_stop, stop, windows)

    def _even_step(self, length: int, request: Request) -> int:
        """Return a step that cuts `length` into parts of nearly one size, none beyond a part's."""
        most = self._step(self._part_bytes, request)
        part_count = -(-length // most)
        fair = -(-length // part_count)
        return min(most, fair + -fair % request.place.block_bytes)

    def _step(self, most: int, request: Request) -> int:
        block = request.place.block_bytes
        step = max(block, most - most % block)
        return step - step % request.item_bytes

    def _add_windows(self, request: Request, start: int, stop: int, windows: list[_Window]) -> None:
        origin, step = request.place.start, self._step(self._window_bytes, request)
        windows.extend(
            (origin + at, origin + min(at + step, stop), request, at)
            for at in range(start, stop, step)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes `[start, stop)` of a payload, both ends between blocks; `token` is the caller's."""

    place: Place
    start: int
    stop: int
    token: int


def plan_spans(
    spans: Sequence[Span],
    taken: Callable[[Sequence[tuple[int, Span]], memoryview], None],
    *,
    part_bytes: int,
    costs: ReadCosts,
) -> list[Fetch]:
    """Return reads of whole spans, neighbours together, in order of file and offset.

    `taken` gets the bytes of one read, in a buffer that is used again after it returns, and
    which spans lie where in them, all verified; it runs in several threads.
    """
    by_path: dict[str, list[Span]] = {}
    for span in spans:
        by_path.setdefault(span.place.path, []).append(span)
    fetches = []
    for path in sorted(by_path):
        held = sorted(by_path[path], key=lambda span: span.place.start + span.start)
        intervals = [(s.place.start + s.start, s.place.start + s.stop) for s in held]
        for extent in coalesce(intervals, costs.gap_bytes, part_bytes):
            members = [(intervals[at][0] - extent.start, held[at]) for at in extent.members]
            fetches.append(
                Fetch(
                    path=path,
                    start=extent.start,
                    stop=extent.stop,
                    done=partial(_verify_spans, members, taken)
                    if len(members) > 1
                    else partial(taken, members),
                    size_bytes=held[extent.members[0]].place.file_bytes,
                    # Of one span the bytes are verified as they arrive, while they are in cache.
                    check=partial(_check, members[0][1].place, members[0][1].start)
                    if len(members) == 1
                    else None,
                    check_bytes=members[0][1].place.block_bytes,
                )
            )
    return fetches


def _verify_spans(
    members: Sequence[tuple[int, Span]],
    taken: Callable[[Sequence[tuple[int, Span]], memoryview], None],
    view: memoryview,
) -> None:
    for at, span in members:
        span.place.check(view[at : at + span.stop - span.start], span.start)
    taken(members, view)


def _direct(request: Request, run_start: int, start: int, stop: int) -> Fetch:
    place, target = request.place, request.target
    assert target is not None  # noqa: S101  # the caller looked; this is for the type checker
    return Fetch(
        path=place.path,
        start=place.start + start,
        stop=place.start + stop,
        target=target[start - run_start : stop - run_start],
        check=partial(_check, place, start),
        check_bytes=place.block_bytes,
        size_bytes=place.file_bytes,
    )


def _check(place: Place, first_byte: int, view: memoryview, offset: int) -> None:
    place.check(view, first_byte + offset)


def _deliver(members: Sequence[_Window], extent_start: int, view: memoryview) -> None:
    for file_start, file_stop, request, start in members:
        part = view[file_start - extent_start : file_stop - extent_start]
        step = len(part)
        if _has_plain_target(request):
            block = request.place.block_bytes
            step = max(block, _PIECE_BYTES - _PIECE_BYTES % block)
        for at in range(0, len(part), step):
            piece = part[at : at + step]
            request.place.check(piece, start + at)
            deliver(request, start + at, piece)


def _has_plain_target(request: Request) -> bool:
    """Return whether bytes of a request are only copied into its target, as they come."""
    if request.target is None:
        return False
    return request.region is None or run_count(request.chunk_sizes, request.region) == 1


def deliver(request: Request, start: int, part: memoryview) -> None:
    """Put where they belong the elements that `request` wants of verified bytes of its chunk.

    `part` begins at byte `start` of the chunk's payload; both its ends lie between elements.
    """
    target, region, sizes = request.target, request.region, request.chunk_sizes
    if region is None:
        if target is not None:
            target[start : start + len(part)] = part
            return
        region = Box((0,) * len(sizes), sizes)
    elif target is not None and run_count(sizes, region) == 1:
        run = run_extent(sizes, region, request.item_bytes)
        low, high = max(start, run.start), min(start + len(part), run.stop)
        if low < high:
            target[low - run.start : high - run.start] = part[low - start : high - start]
        return
    size = request.item_bytes
    copies = window_copies(sizes, region, start // size, (start + len(part)) // size)
    if copies:
        request.sink(part, copies)
