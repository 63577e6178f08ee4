"""Which byte ranges to read for some regions of some chunks, and what to do with each.

Pure planning over `source.Place` and `regions`, and the check and delivery of what arrives;
knows no tensor library and no storage. Called by `reader`; the result is run by
`fetching.run_fetches`.

A region that is one byte run goes straight into its target, block by block verified there.
Anything else is read in windows of at most one part and copied out by a handful of strided
copies per window, so memory is bounded whatever the sizes, and nothing loops over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .fetching import Fetch
from .regions import (
    Box,
    WindowCopy,
    byte_runs,
    coalesce,
    round_out,
    run_count,
    run_extent,
    window_copies,
)
from .source import Place

Sink = Callable[[memoryview, Sequence[WindowCopy]], None]

GAP_BYTES = 64 * 1024
"""Bytes one reads over rather than ask anew. One block: runs of 1 MiB then cost 6 % at the most."""

DIRECT_MIN_BYTES = 128 * 1024
"""Below this, one more request costs more than a copy out of a shared one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One region of one chunk, wanted.

    `region` counts from the chunk's first element. `target` is the writable memory of the whole
    region if its bytes may be put there as they are, else None. `sink` takes windows of
    verified bytes and what to copy out of each; it is called from several threads, each element
    once.
    """

    place: Place
    item_bytes: int
    chunk_sizes: tuple[int, ...]
    region: Box
    sink: Sink
    target: memoryview | None = None


def bytes_request(place: Place, buffer: bytearray) -> Request:
    """Return the request for the first `len(buffer)` bytes of `place`, into `buffer`."""
    view = memoryview(buffer)

    def sink(window: memoryview, copies: Sequence[WindowCopy]) -> None:
        for copy in copies:
            at, size = copy.dest_offsets[0], copy.sizes[0]
            start = copy.source_offset_elements
            view[at : at + size] = window[start : start + size]

    return Request(
        place=place,
        item_bytes=1,
        chunk_sizes=(place.size_bytes,),
        region=Box((0,), (len(buffer),)),
        sink=sink,
        target=view,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    request: Request
    start: int  # bytes in the payload, as is stop
    stop: int

    @property
    def interval(self) -> tuple[int, int]:
        origin = self.request.place.start
        return origin + self.start, origin + self.stop


def plan_reads(requests: Sequence[Request], *, part_bytes: int) -> list[Fetch]:
    """Return the reads that serve all `requests`, in order of file and offset.

    `part_bytes` bounds one read, except that a block or an element larger than it is read whole.
    """
    fetches: list[Fetch] = []
    windows: dict[str, list[_Window]] = {}
    for request in requests:
        _plan_request(request, part_bytes, fetches, windows.setdefault(request.place.path, []))
    for path, wanted in windows.items():
        wanted.sort(key=lambda window: window.interval)
        extents = coalesce([window.interval for window in wanted], GAP_BYTES, part_bytes)
        for extent in extents:
            members = [wanted[i] for i in extent.members]
            fetches.append(
                Fetch(
                    path=path,
                    start=extent.start,
                    stop=extent.stop,
                    done=partial(_deliver, members, extent.start),
                    size_bytes=members[0].request.place.file_bytes,
                )
            )
    fetches.sort(key=lambda fetch: (fetch.path, fetch.start))
    return fetches


def _plan_request(
    request: Request, part_bytes: int, fetches: list[Fetch], windows: list[_Window]
) -> None:
    place, total = request.place, request.place.size_bytes
    if request.region.is_empty:
        return
    block = place.block_bytes
    step = max(block, part_bytes - part_bytes % block)
    step -= step % request.item_bytes
    count = run_count(request.chunk_sizes, request.region)
    extent = run_extent(request.chunk_sizes, request.region, request.item_bytes)
    runs = [(extent.start, extent.stop)]
    if count > 1 and _mean_gap(request, count, extent.stop - extent.start) > GAP_BYTES:
        runs = [
            (run.start, run.stop)
            for run in byte_runs(request.chunk_sizes, request.region, request.item_bytes)
        ]
    for run_start, run_stop in runs:
        start, stop = round_out(run_start, run_stop, block, total)
        if count == 1 and request.target is not None:
            inner_start = run_start + -run_start % block
            inner_stop = run_stop if run_stop == total else run_stop - run_stop % block
            if inner_stop - inner_start >= DIRECT_MIN_BYTES:
                for at in range(inner_start, inner_stop, step):
                    end = min(at + step, inner_stop)
                    fetches.append(_direct(request, run_start, at, end))
                if start < inner_start:
                    windows.append(_Window(request=request, start=start, stop=inner_start))
                if inner_stop < stop:
                    windows.append(_Window(request=request, start=inner_stop, stop=stop))
                continue
        windows.extend(
            _Window(request=request, start=at, stop=min(at + step, stop))
            for at in range(start, stop, step)
        )


def _mean_gap(request: Request, count: int, extent_bytes: int) -> float:
    wanted = request.region.volume * request.item_bytes
    return (extent_bytes - wanted) / (count - 1)


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
    for window in members:
        request = window.request
        start, stop = window.interval
        part = view[start - extent_start : stop - extent_start]
        request.place.check(part, window.start)
        size = request.item_bytes
        copies = window_copies(
            request.chunk_sizes, request.region, window.start // size, window.stop // size
        )
        request.sink(part, copies)
