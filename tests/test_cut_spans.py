"""Which chunks ranks read out of the kernel's cache together: those that are wanted in pieces."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ckpt_storage.loads import LoadJob
from ckpt_storage.readplan import Request
from ckpt_storage.regions import Box
from ckpt_storage.source import Place

KIB = 1 << 10
ROWS, WIDTH = 1024, 4 * KIB
KEY = ("w", (0, 0))


def job_of(*regions: Box | None, block_bytes: int = 64 * KIB) -> LoadJob:
    """Return a job that wants some regions of one chunk of bytes, and a blob."""
    job = LoadJob(cast("Any", None), cast("Any", None), verify=True)
    place = Place(
        path="f", fqn="w", start=64, size_bytes=ROWS * WIDTH, block_bytes=block_bytes, crcs=[]
    )

    def sink(*_: object) -> None:
        raise AssertionError

    def request(region: Box | None) -> Request:
        return Request(
            place=place, item_bytes=1, chunk_sizes=(ROWS, WIDTH), region=region, sink=sink
        )

    job.requests = [request(None), *map(request, regions)]
    job._keys = [None, *(KEY for _ in regions)]  # noqa: SLF001  # what `plan` leaves
    return job


def columns(first_row: int, last_row: int, width: int = 2 * KIB) -> Box:
    """Return the first columns of some rows."""
    return Box((first_row, 0), (last_row - first_row, width))


@pytest.mark.parametrize(
    ("regions", "span"),
    [
        ([columns(0, ROWS)], (0, (ROWS - 1) * WIDTH + 2 * KIB)),
        ([columns(10, 20)], (10 * WIDTH, 19 * WIDTH + 2 * KIB)),
        # Two that lie near each other, of which one is whole rows.
        ([columns(10, 20), columns(21, 30, WIDTH)], (10 * WIDTH, 30 * WIDTH)),
        # Nothing in pieces.
        ([None], None),
        ([columns(0, 10, WIDTH)], None),
        # Nothing at all, or one that has nothing.
        ([Box((0, 0), (0, 8))], None),
        ([columns(0, 10), Box((0, 0), (0, 8))], None),
        # Most of what lies between is wanted by nobody here.
        ([columns(0, 10), columns(1000, 1010)], None),
    ],
)
def test_what_is_wanted_in_pieces(regions: list[Box | None], span: tuple[int, int] | None) -> None:
    """From the first byte that is wanted to the last one, if that is mostly wanted."""
    found = job_of(*regions).cut_spans(max_gap_bytes=128 * KIB, unit_bytes=4096 * KIB)
    assert found == ({} if span is None else {KEY: span})


def test_pieces_that_are_far_apart_are_read_alone() -> None:
    """Nor is a chunk mapped whose blocks lie in two units."""
    job = job_of(columns(0, ROWS, 8))
    assert job.cut_spans(max_gap_bytes=WIDTH - 8, unit_bytes=4096 * KIB)
    assert not job.cut_spans(max_gap_bytes=WIDTH - 9, unit_bytes=4096 * KIB)
    assert not job_of(columns(0, ROWS), block_bytes=96 * KIB).cut_spans(
        max_gap_bytes=128 * KIB, unit_bytes=4096 * KIB
    )


def test_requests_are_those_of_the_chunks_that_are_asked_for() -> None:
    """In their order, without the blob."""
    job = job_of(columns(0, 10), columns(10, 20))
    assert job.requests_for({KEY}) == {KEY: job.requests[1:]}
    assert job.requests_for(set()) == {}
