"""What the coordinator makes of reports, held against counting every element (I8)."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_tools import Written, reports_of

from ckpt_storage.commit.assembly import assemble
from ckpt_storage.commit.report import Planned
from ckpt_storage.errors import IntegrityError
from ckpt_storage.format.boxes import interval_boxes
from ckpt_storage.format.manifest import Manifest

Chunk = tuple[tuple[int, ...], tuple[int, ...]]


def planned(**shapes: tuple[int, ...]) -> Planned:
    """Return a plan of tensors."""
    return Planned(tensors=shapes, blobs=frozenset(), planner_data=None)


def assembled(ranks: Sequence[Sequence[Written]], plan: Planned) -> Manifest:
    """Return the manifest of reports that travelled as DCP sends them."""
    reports = [pickle.loads(pickle.dumps(report)) for report in reports_of(ranks)]
    return assemble(reports, plan)


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Draw consecutive intervals that make up `size`."""
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


def test_tensors_that_are_cut_alike_share_one_grid() -> None:
    """However many tensors and ranks there are, a layout is kept once."""
    ranks = [[Written(f"t{n}", (8 * rank, 0), (8, 4)) for n in range(50)] for rank in range(64)]
    manifest = assembled(ranks, planned(**{f"t{n}": (512, 4) for n in range(50)}))
    assert len({id(tensor.boxes) for tensor in manifest.tensors.values()}) == 1
    assert len(manifest.to_body()["layouts"]) == 1


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
