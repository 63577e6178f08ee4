"""Plans of shared reads: every wanted byte comes to whoever wants it, once, and in equal shares."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_storage.format.regions import Box
from ckpt_storage.loads.sharing import Key, ShareOrder, SharePolicy, plan_shares, share_policy

MIB = 1 << 20
UNIT_BYTES = 8 * MIB
Wants = dict[Key, list[tuple[int, Box]]]


EAGER = SharePolicy(min_saved_bytes=1)
"""Sharing anything at all is enough."""


def whole(*sizes: int) -> Box:
    """Return the region of a whole chunk."""
    return Box((0,) * len(sizes), sizes)


def plan(wants: Wants, shapes: Mapping[Key, tuple[int, ...]], world_size: int) -> list[ShareOrder]:
    """Return the orders for chunks of 2-byte elements; sharing anything at all is enough."""
    orders = plan_shares(wants, lambda key: (shapes[key], 2), world_size=world_size, policy=EAGER)
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
def test_members_of_a_unit_all_know_it(
    needs: tuple[int, dict[Key, tuple[int, ...]], Wants],
) -> None:
    """The owner and all others of a unit hold it in their orders; units lie in their chunk."""
    world_size, shapes, wants = needs
    orders = plan_shares(wants, lambda key: (shapes[key], 2), world_size=world_size, policy=EAGER)
    for rank, order in enumerate(orders or ()):
        assert order.rank == rank
        for unit in order.units:
            assert {rank, unit.owner} <= set(unit.ranks)
            assert 0 <= unit.start < unit.stop <= np.prod(shapes[unit.key]) * 2
            assert unit.start % UNIT_BYTES == 0
            assert all(unit in (orders or ())[other].units for other in unit.ranks)


@settings(max_examples=60, deadline=None)
@given(needs=needs())
def test_what_a_rank_wants_of_a_shared_chunk_is_in_its_units(
    needs: tuple[int, dict[Key, tuple[int, ...]], Wants],
) -> None:
    """Each byte that a rank wants of a chunk that is shared lies in a unit of that rank."""
    world_size, shapes, wants = needs
    orders = plan_shares(wants, lambda key: (shapes[key], 2), world_size=world_size, policy=EAGER)
    shared = {unit.key for order in orders or () for unit in order.units}
    for key in shared:
        for rank, region in wants[key]:
            mask = np.zeros(shapes[key], bool)
            mask[tuple(slice(a, b) for a, b in zip(region.offsets, region.stops, strict=True))] = 1
            missing = np.repeat(mask.reshape(-1), 2)
            for unit in (orders or ())[rank].units:
                if unit.key == key:
                    missing[unit.start : unit.stop] = False
            assert not missing.any()


def test_equal_needs_are_shared_out_evenly() -> None:
    """Of a replicated model each rank reads its part, none more than a unit beyond the others."""
    shapes: dict[Key, tuple[int, ...]] = {(f"w{i}", (0, 0)): (1024, 8192) for i in range(9)}
    shapes.update({(f"b{i}", (0,)): (512,) for i in range(1000)})
    wants = {key: [(rank, whole(*shape)) for rank in range(4)] for key, shape in shapes.items()}
    orders = plan(wants, shapes, 4)
    read = [sum(u.stop - u.start for u in o.units if u.owner == o.rank) for o in orders]
    assert sum(read) == sum(2 * int(np.prod(shape)) for shape in shapes.values())
    assert max(read) - min(read) <= UNIT_BYTES


def test_small_neighbours_have_one_reader() -> None:
    """Small chunks that follow one another go to one rank, so that they can share a request."""
    shapes: dict[Key, tuple[int, ...]] = {(f"b{i}", (0,)): (512,) for i in range(1000)}
    wants = {key: [(rank, whole(512)) for rank in range(3)] for key in shapes}
    assert len({unit.owner for unit in plan(wants, shapes, 3)[0].units}) == 1


def test_disjoint_needs_are_not_shared() -> None:
    """Ranks that want different rows of a chunk read their own."""
    key: Key = ("w", (0, 0))
    wants = {key: [(rank, Box((rank * 1000, 0), (1000, 4000))) for rank in range(4)]}
    assert plan_shares(wants, lambda _: ((4000, 4000), 2), world_size=4, policy=EAGER) is None


def test_columns_of_short_rows_are_shared() -> None:
    """Columns of rows of 8 KB lie in all blocks: all ranks share the whole chunk."""
    key: Key = ("w", (0, 0))
    wants = {key: [(rank, Box((0, rank * 1000), (4000, 1000))) for rank in range(4)]}
    orders = plan(wants, {key: (4000, 4000)}, 4)
    assert [unit.ranks for unit in orders[0].units] == [(0, 1, 2, 3)] * 4


def test_columns_of_long_rows_are_not_shared() -> None:
    """Columns that are runs of a megabyte are read by who wants them, without what lies between."""
    key: Key = ("w", (0, 0))
    wants = {key: [(rank, Box((0, rank * MIB), (4, MIB))) for rank in range(4)]}
    shape = (4, 4 * MIB)
    assert plan_shares(wants, lambda _: (shape, 2), world_size=4, policy=EAGER) is None


def test_little_is_not_shared() -> None:
    """Below 64 MiB spared by default nobody shares."""
    key: Key = ("w", (0,))
    for count, is_shared in ((32 * MIB - 1, False), (32 * MIB, True)):
        wants = {key: [(0, whole(count)), (1, whole(count))]}
        found = plan_shares(wants, lambda _: ((count,), 2), world_size=2, policy=SharePolicy())  # noqa: B023  # called at once
        assert (found is not None) == is_shared


@pytest.mark.parametrize("count", [0, 1])
def test_one_rank_shares_with_nobody(count: int) -> None:
    """A chunk that one rank wants twice, or only empty regions of, is its own business."""
    key: Key = ("w", (0,))
    wants = {key: [(0, whole(100)), (0, whole(100)), (1, Box((0,), (0,)))][: 2 + count]}
    assert plan_shares(wants, lambda _: ((100,), 2), world_size=2, policy=EAGER) is None


def test_ranks_of_equal_needs_are_one_object() -> None:
    """The ranks of units are the same tuple in all orders, whichever chunk the units are of."""
    shapes: dict[Key, tuple[int, ...]] = {(f"w{i}", (0,)): (20 * MIB,) for i in range(8)}
    wants = {key: [(rank, whole(*shape)) for rank in range(64)] for key, shape in shapes.items()}
    orders = plan(wants, shapes, 64)
    assert len({id(run.ranks) for order in orders for run in order.runs}) == 1
    assert len({id(run) for order in orders for run in order.runs}) == 8


def test_an_order_grows_with_runs_of_units() -> None:
    """A chunk of a thousand units takes one run and little room for who reads each of them."""
    key: Key = ("w", (0,))
    wants = {key: [(rank, whole(500 * UNIT_BYTES)) for rank in range(2)]}
    order = plan(wants, {key: (500 * UNIT_BYTES,)}, 2)[1]
    assert len(order.units) == 1000
    assert len(pickle.dumps(order)) < 5000


@pytest.mark.parametrize("rank_count", [100, 101])
def test_more_than_a_million_memberships_are_refused_with_a_word(
    rank_count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Units times ranks are bounded, whatever the model; beyond, each rank reads for itself."""
    key: Key = ("w", (0,))
    shape = (5000 * UNIT_BYTES,)
    wants = {key: [(rank, whole(*shape)) for rank in range(rank_count)]}
    with caplog.at_level("INFO", logger="ckpt_storage"):
        found = plan_shares(
            wants, lambda _: (shape, 2), world_size=rank_count, policy=SharePolicy()
        )
    assert (found is None) == (rank_count > 100)
    assert ("Each rank reads for itself" in caplog.text) == (rank_count > 100)


def test_many_chunks_are_refused_before_they_are_looked_at() -> None:
    """Where the wants alone are beyond the bound nothing is computed from them."""
    users = [(rank, whole(4)) for rank in range(2048)]
    wants: Wants = {(f"w{i}", (0,)): users for i in range(500)}

    def shape_of(_key: Key) -> tuple[tuple[int, ...], int]:
        raise AssertionError

    assert plan_shares(wants, shape_of, world_size=2048, policy=EAGER) is None


def test_the_bound_counts_what_is_shared_only() -> None:
    """Chunks of single ranks count for nothing."""
    wants: Wants = {(f"w{i}", (0,)): [(i % 3, whole(4))] for i in range(1000)}
    key: Key = ("both", (0,))
    wants[key] = [(0, whole(4)), (1, whole(4))]
    found = plan_shares(wants, lambda _: ((4,), 2), world_size=3, policy=EAGER, max_members=2)
    assert found is not None
    assert [len(order.units) for order in found] == [1, 1, 0]


def test_a_unit_is_of_those_only_whose_need_touches_it() -> None:
    """Where one rank needs only the end of a chunk, it has no part in the units before."""
    key: Key = ("w", (0,))
    items = 2 * UNIT_BYTES
    wants = {key: [(0, whole(items)), (1, Box((items // 2,), (items // 2,)))]}
    units = plan(wants, {key: (items,)}, 2)[0].units
    assert [unit.ranks for unit in units] == [(0,), (0,), (0, 1), (0, 1)]


def test_ranks_with_gaps_survive_pickling() -> None:
    """An order names the same ranks after its journey, whether they follow one another or not."""
    keys: list[Key] = [("near", (0,)), ("far", (0,))]
    wants = {
        key: [(rank, whole(64)) for rank in ranks]
        for key, ranks in zip(keys, [(0, 1, 2), (0, 2, 5)], strict=True)
    }
    order = plan(wants, dict.fromkeys(keys, (64,)), 6)[2]
    assert [unit.ranks for unit in order.units] == [(0, 1, 2), (0, 2, 5)]
    found = pickle.loads(pickle.dumps(order))
    assert [unit.ranks for unit in found.units] == [(0, 1, 2), (0, 2, 5)]


def test_units_fit_the_parts_that_memory_allows() -> None:
    """A rank that may read parts of 2 MiB gets units of as many; below 1 MiB nobody shares."""
    for part_bytes, expected in ((2 * MIB, 2 * MIB), (3 * MIB, 2 * MIB), (64 * MIB, 8 * MIB)):
        found = share_policy(part_bytes=part_bytes)
        assert found is not None
        assert found.unit_bytes == expected
    assert share_policy(part_bytes=MIB - 1) is None
