"""Plans of shared reads: every wanted byte comes to whoever wants it, once, and in equal shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_storage.format.boxes import Box
from ckpt_storage.loads import sharing
from ckpt_storage.loads.sharing import Key, ShareOrder, plan_shares

MIB = 1 << 20
UNIT_BYTES = 8 * MIB
Wants = dict[Key, list[tuple[int, Box]]]


@pytest.fixture(autouse=True, scope="module")
def eager() -> Iterator[None]:
    """Sharing anything at all is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "_LEAST_SAVED_BYTES", 1)
        yield


def whole(*sizes: int) -> Box:
    """Return the region of a whole chunk."""
    return Box((0,) * len(sizes), sizes)


def plan(wants: Wants, shapes: Mapping[Key, tuple[int, ...]], world_size: int) -> list[ShareOrder]:
    """Return the orders for chunks of 2-byte elements; sharing anything at all is enough."""
    orders = plan_shares(
        wants, lambda key: (shapes[key], 2), world_size=world_size, unit_bytes=UNIT_BYTES
    )
    assert orders is not None
    return orders


@st.composite
def needs(draw: st.DrawFn) -> tuple[int, dict[Key, tuple[int, ...]], Wants]:
    """Draw a world, chunks, and the regions that some ranks want of them."""
    world_size = draw(st.integers(2, 5))
    kinds = st.sampled_from([(8, 3), (3000, 2000), (5000, 3001), (100,), (64, 64, 64)])
    shapes: dict[Key, tuple[int, ...]] = {
        (f"t{i}", (0,) * len(shape)): shape
        for i, shape in enumerate(draw(st.lists(kinds, min_size=1, max_size=5)))
    }
    wants: Wants = {}
    for key, shape in shapes.items():
        for rank in draw(st.sets(st.integers(0, world_size - 1))):
            starts = [draw(st.integers(0, n - 1)) for n in shape]
            sizes = [draw(st.integers(1, n - a)) for n, a in zip(shape, starts, strict=True)]
            part = Box(tuple(starts), tuple(sizes))
            wants.setdefault(key, []).append((rank, draw(st.sampled_from([whole(*shape), part]))))
    return world_size, shapes, wants


@settings(max_examples=60, deadline=None)
@given(needs=needs())
def test_what_a_rank_wants_of_a_shared_chunk_is_in_its_units(
    needs: tuple[int, dict[Key, tuple[int, ...]], Wants],
) -> None:
    """Each byte that a rank wants of a chunk that is shared lies in a unit of that rank."""
    world_size, shapes, wants = needs
    orders = plan_shares(
        wants, lambda key: (shapes[key], 2), world_size=world_size, unit_bytes=UNIT_BYTES
    )
    shared = {key for order in orders or () for key in order.keys}
    for key in shared:
        for rank, region in wants[key]:
            mask = np.zeros(shapes[key], bool)
            mask[tuple(slice(a, b) for a, b in zip(region.offsets, region.stops, strict=True))] = 1
            missing = np.repeat(mask.reshape(-1), 2)
            for unit in (orders or ())[rank].units:
                for piece, start, stop in unit.pieces:
                    if piece == key:
                        missing[start:stop] = False
            assert not missing.any()


def test_equal_needs_are_shared_out_evenly() -> None:
    """Of a replicated model each rank reads its part, none more than a unit beyond the others."""
    shapes: dict[Key, tuple[int, ...]] = {(f"w{i}", (0, 0)): (1024, 8192) for i in range(9)}
    shapes.update({(f"b{i}", (0,)): (512,) for i in range(1000)})
    wants = {key: [(rank, whole(*shape)) for rank in range(4)] for key, shape in shapes.items()}
    orders = plan(wants, shapes, 4)
    read = [sum(u.size_bytes for u in o.units if u.owner == o.rank) for o in orders]
    assert sum(read) == sum(2 * int(np.prod(shape)) for shape in shapes.values())
    assert max(read) - min(read) <= UNIT_BYTES


def test_rows_are_not_shared_and_short_columns_are() -> None:
    """Ranks that want different rows read their own; columns of 8 KB lie in blocks of all."""
    key: Key = ("w", (0, 0))
    wants = {key: [(rank, Box((rank * 1000, 0), (1000, 4000))) for rank in range(4)]}
    assert (
        plan_shares(wants, lambda _: ((4000, 4000), 2), world_size=4, unit_bytes=UNIT_BYTES) is None
    )
    wants = {key: [(rank, Box((0, rank * 1000), (4000, 1000))) for rank in range(4)]}
    orders = plan(wants, {key: (4000, 4000)}, 4)
    assert [unit.ranks for unit in orders[0].units] == [(0, 1, 2, 3)] * 4


def test_what_takes_too_long_to_plan_is_refused_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Units times ranks are bounded, before anything is computed; each rank reads for itself."""
    users = [(rank, whole(4)) for rank in range(2048)]
    wants: Wants = {(f"w{i}", (0,)): users for i in range(500)}

    def shape_of(_key: Key) -> tuple[tuple[int, ...], int]:
        raise AssertionError

    with caplog.at_level("INFO", logger="ckpt_storage"):
        assert plan_shares(wants, shape_of, world_size=2048, unit_bytes=UNIT_BYTES) is None
    assert "Each rank reads for itself" in caplog.text
    shape = (5000 * UNIT_BYTES,)
    for rank_count in (100, 101):
        wants = {("w", (0,)): [(rank, whole(*shape)) for rank in range(rank_count)]}
        found = plan_shares(
            wants, lambda _: (shape, 2), world_size=rank_count, unit_bytes=UNIT_BYTES
        )
        assert (found is None) == (rank_count > 100)
