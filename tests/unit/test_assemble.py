"""Covers of tensors by chunks, held against counting: each element is there once (I8)."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from commit_tools import CAS, DictStore, Disk, begun
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from report_tools import Written, reports_of

from ckpt_storage.commit.assembly import assemble, check_reports
from ckpt_storage.commit.report import Planned
from ckpt_storage.errors import IntegrityError, RankFailedError
from ckpt_storage.format.boxes import Box, find_flaw, find_grid, interval_boxes
from ckpt_storage.format.manifest import Manifest

Chunk = tuple[tuple[int, ...], tuple[int, ...]]


def planned(**shapes: tuple[int, ...]) -> Planned:
    return Planned(tensors=shapes, blobs=frozenset(), planner_data=None)


def assembled(ranks: Sequence[Sequence[Written]], plan: Planned) -> Manifest:
    """Return the manifest of reports that travelled as DCP sends them."""
    reports = [pickle.loads(pickle.dumps(report)) for report in reports_of(ranks)]
    return assemble(reports, plan)


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    inner = draw(st.sets(st.integers(1, max(1, size - 1)), max_size=4)) if size > 1 else set()
    ends = [0, *sorted(inner), size]
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


@st.composite
def tilings(draw: st.DrawFn, *kinds: str) -> tuple[tuple[int, ...], list[Chunk]]:
    """Draw a shape and chunks that cover it exactly: grids, flat intervals, nested halves."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    kind = draw(st.sampled_from(kinds or ("grid", "flat", "nested")))
    if kind == "grid":
        grids = [draw(cuts(size)) for size in shape]
        return shape, [
            (tuple(start for start, _ in cell), tuple(size for _, size in cell))
            for cell in itertools.product(*grids)
        ]
    if kind == "flat":
        pieces = draw(cuts(math.prod(shape)))
        boxes = [
            box for start, size in pieces for box in interval_boxes(shape, start, start + size)
        ]
        return shape, [(box.offsets, box.sizes) for box in boxes]
    chunks: list[Chunk] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offsets, sizes = draw(st.sampled_from(chunks))
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if dims:
            dim = draw(st.sampled_from(dims))
            at = draw(st.integers(1, sizes[dim] - 1))
            chunks.remove((offsets, sizes))
            for start, size in ((0, at), (at, sizes[dim] - at)):
                there = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
                chunks.append((there, (*sizes[:dim], size, *sizes[dim + 1 :])))
    return shape, chunks


FAULTS = ("none", "none", "drop", "twice", "empty", "shift", "grow")


@settings(deadline=None)
@given(tilings(), st.integers(1, 4), st.sampled_from(FAULTS), st.data())
def test_a_cover_is_taken_if_and_only_if_it_is_exact(
    tiling: tuple[tuple[int, ...], list[Chunk]], world_size: int, fault: str, data: st.DataObject
) -> None:
    """Each element once, by the lowest rank that wrote its chunk; or an error that names it."""
    shape, chunks = tiling
    chunks = data.draw(st.permutations(chunks))
    at = data.draw(st.integers(0, len(chunks) - 1))
    offsets, sizes = chunks[at]
    if fault == "drop":
        chunks.pop(at)
    elif fault == "twice":
        chunks.append(chunks[at])
    elif fault == "empty" and shape:
        chunks.append((offsets, (0, *sizes[1:])))
    elif fault == "shift" and shape:
        chunks[at] = ((offsets[0] + 1, *offsets[1:]), sizes)
    elif fault == "grow" and shape:
        chunks[at] = (offsets, (*sizes[:-1], sizes[-1] + 1))
    ranks: list[list[Written]] = [[] for _ in range(world_size)]
    owner_of: dict[Chunk, int] = {}
    for chunk in chunks:
        rank = data.draw(st.integers(0, world_size - 1))
        ranks[rank].append(Written("w", *chunk))
        owner_of[chunk] = min(rank, owner_of.get(chunk, rank))
    # One more tensor on each rank, so that tables have more than one.
    for rank, items in enumerate(ranks):
        items.insert(0, Written(f"other{rank}", (0,), (3,)))
    plan = planned(w=shape, **{f"other{rank}": (3,) for rank in range(world_size)})

    counts = np.zeros([size + 8 for size in shape], dtype=int)
    for offsets, sizes in owner_of:
        counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    inside = counts[tuple(slice(0, size) for size in shape)]
    exact = bool((inside == 1).all()) and counts.sum() == math.prod(shape)
    if not exact:
        with pytest.raises(IntegrityError) as raised:
            assembled(ranks, plan)
        assert raised.value.fqn == "w"
        return
    record = assembled(ranks, plan).tensors["w"]
    expected = {chunk: rank for chunk, rank in owner_of.items() if 0 not in chunk[1]}
    found = zip(record.boxes, record.owners, strict=True)
    assert {(box.offsets, box.sizes): rank for box, rank in found} == expected
    assert len(record.boxes) == len(expected)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([[Written("w", (0,), (4,))], [Written("x", (0,), (4,))]], "Rank 1 wrote x, which is not"),
        ([[Written("w", (0,), (4,))], [Written("w")]], "Rank 1 wrote w, which is not"),
        (
            [[Written("w", (0,), (2,))], [Written("w", (2,), (2,), "int32")]],
            "w as int32; others as",
        ),
        ([[], []], "No rank wrote any chunk of w"),
        ([[Written("w", (0,), (2,))], []], "leave a gap"),
        ([[Written("w", (0,), (3,))], [Written("w", (2,), (2,))]], "of rank 0 and .* of rank 1"),
        ([[Written("w", (0,), (5,))], []], "whose shape is"),
    ],
)
def test_what_is_wrong_is_said(ranks: list[list[Written]], says: str) -> None:
    """The error names the tensor and the ranks."""
    with pytest.raises(IntegrityError, match=says):
        assembled(ranks, planned(w=(4,)))


@pytest.mark.parametrize("count", [0, 2])
def test_reports_of_another_number_of_ranks_are_refused(count: int) -> None:
    """A save of one rank needs exactly one report."""
    ticket = begun(DictStore(Disk(), CAS))
    reports = reports_of([[Written("w", (0,), (4,))]] * count)
    with pytest.raises(RankFailedError, match="of 1 "):
        check_reports(reports, replace(ticket, world_size=1))


def test_blobs_belong_to_the_lowest_rank() -> None:
    """One that several ranks wrote counts once; one that none wrote is missed."""
    ranks = [[Written("a")], [Written("b"), Written("a")]]
    plan = Planned(tensors={}, blobs=frozenset({"a", "b"}), planner_data=None)
    assert assembled(ranks, plan).blobs == {"a": 0, "b": 1}
    with pytest.raises(IntegrityError, match="No rank wrote c"):
        assembled(ranks, Planned(tensors={}, blobs=frozenset("abc"), planner_data=None))


@pytest.mark.parametrize(
    ("shape", "chunks", "says"),
    [
        # Two negative sizes have a product as of a chunk that is there.
        ((2, 2, 4), [((i, j, 0), (-1, -1, 4)) for i in (0, 1) for j in (0, 1)], "whose shape is"),
        # As many elements as lie before the next one begins; the first row has a gap.
        ((3, 2), [((0, 0), (2, 1)), ((1, 0), (1, 2)), ((2, 0), (1, 2))], "overlap"),
        ((0, 5), [((0, 0), (0, 5)), ((0, 0), (3, 5))], "whose shape is"),
        ((0, 5), [((0, 0), (0, 5)), ((0, 1), (0, 5))], "whose shape is"),
        ((0, 5), [((0, 0), (0, 5)), ((0,), (0,))], "whose shape is"),
        ((0, 5), [((0, 0), (0, 5)), ((0, 0), (0, -5))], "whose shape is"),
    ],
)
def test_chunks_that_only_count_right_are_refused(
    shape: tuple[int, ...], chunks: list[Chunk], says: str
) -> None:
    """Negative sizes, boxes that are no intervals, and places outside of an empty tensor."""
    with pytest.raises(IntegrityError, match=rf"Rank . wrote .* of w, .*{says}|{says}"):
        assembled([[Written("w", *chunk)] for chunk in chunks], planned(w=shape))


def test_empty_tensors_cut_at_their_ends_are_taken() -> None:
    """Ranks behind the last row have what begins at the end."""
    chunks: list[Chunk] = [((0, 0), (2, 0)), ((2, 0), (2, 0)), ((4, 0), (0, 0))]
    manifest = assembled([[Written("e", *chunk)] for chunk in chunks], planned(e=(4, 0)))
    found = Manifest.from_body(manifest.to_body(), where="here").tensors["e"]
    assert list(map(tuple, found.boxes)) == chunks


@st.composite
def boxes_in(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """Draw a box, possibly empty, within `shape`; along half of the dimensions it is whole."""
    spans = [
        (0, size)
        if draw(st.booleans())
        else sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        for size in shape
    ]
    return Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))


def mask(shape: Sequence[int], box: Box) -> NDArray[np.bool_]:
    held = np.zeros(shape, dtype=bool)
    held[
        tuple(
            slice(max(start, 0), max(start + size, 0))
            for start, size in zip(box.offsets, box.sizes, strict=True)
        )
    ] = True
    return held


def cut_up(shape: tuple[int, ...], cut_count: int, seed: int) -> tuple[tuple[int, ...], list[Box]]:
    """Return the boxes that a shape falls into if a piece is cut in two again and again."""
    draw = random.Random(seed)  # for tests
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(cut_count):
        at = draw.randrange(len(boxes))
        offsets, sizes = boxes[at]
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if dims:
            dim = draw.choice(dims)
            cut = draw.randrange(1, sizes[dim])
            there = (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :])
            boxes[at] = Box(offsets, (*sizes[:dim], cut, *sizes[dim + 1 :]))
            boxes.append(Box(there, (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :])))
    return shape, boxes


MANY_CUTS = st.builds(
    cut_up,
    st.lists(st.integers(2, 6), min_size=2, max_size=4).map(tuple),
    st.integers(9, 300),
    st.integers(0),
)


@settings(max_examples=200, deadline=None)
@given(
    tiling=tilings() | MANY_CUTS,
    change=st.sampled_from(["none", "drop", "double", "replace", "add"]),
    data=st.data(),
)
def test_a_flaw_is_found_if_and_only_if_counting_finds_one(
    tiling: tuple[tuple[int, ...], list[Chunk]], change: str, data: st.DataObject
) -> None:
    """Whatever form the chunks have, however many there are, and whatever became of one."""
    shape, boxes = tiling[0], [Box(*chunk) for chunk in tiling[1]]
    data.draw(st.randoms(use_true_random=True)).shuffle(boxes)
    if change == "drop":
        boxes.pop()
    elif change == "double":
        boxes.append(boxes[0])
    elif change == "replace":
        boxes[0] = boxes[-1]
    elif change == "add":
        boxes.append(data.draw(boxes_in(shape)))
    empty = Box((0,) * len(shape), (0,) * len(shape))
    found = find_flaw(shape, [*boxes, empty] if shape else boxes)
    held = np.sum([mask(shape, box) for box in boxes], axis=0) + np.zeros(shape, dtype=np.int64)
    assert (found is None) == bool((held == 1).all())
    if found is not None:
        assert found.at is not None
        assert held[found.at] == len(found.holders) != 1
    if find_grid(shape, boxes) is not None:
        # Of equal ones one counts.
        assert (np.sum([mask(shape, box) for box in {*boxes}], axis=0) == 1).all()


def test_chunks_that_all_lie_side_by_side_are_refused_at_once() -> None:
    """Too many that begin at one place and overlap nowhere are not held each against each."""
    cut = [Box((n, at), (1, 1)) for n in range(2) for at in range(20_000)]
    assert find_flaw((2, 20_000), cut) is None
    nested = [Box((0, 0), (n + 1, 1)) for n in range(20_000)]
    found = find_flaw((20_000, 2), nested)
    assert found is not None


def test_more_steps_than_may_be_taken_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be checked in time is not taken for sound."""
    monkeypatch.setattr("ckpt_storage.format.boxes._MAX_STEPS", 10)
    assert find_flaw((4,), [Box((at,), (1,)) for at in range(4)]) is None
    found = find_flaw((20,), [Box((at,), (1,)) for at in range(20)])
    assert str(found) == "they are cut in more ways than can be checked"
