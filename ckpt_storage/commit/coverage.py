"""Do chunks cover a tensor exactly, asked of arrays: by numpy where chunks are regular.

A grid, and chunks that are intervals of the tensor in C order, are recognised in a few sorts of one
array, whatever their number; anything else, and anything wrong, is left to `tiling.covers_exactly`,
which says exactly what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckpt_storage.format.columns import Counts
from ckpt_storage.format.tensorlayout import compact
from ckpt_storage.format.tiling import Grid

__all__ = ["Tiling", "find_tiling"]

_MOST = (1 << 62) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Chunks that hold every element of a tensor once.

    `kept` are their positions in what was given: in C order of the cells of the grid that `cuts`
    make or, where that is None, in C order of their first elements.
    """

    kept: Counts
    cuts: tuple[Sequence[int], ...] | None

    def grid(self, owners: Counts) -> Grid | None:
        """Return the grid, given the owners of what was given."""
        return None if self.cuts is None else Grid(self.cuts, compact(owners[self.kept]))


def find_tiling(shape: Sequence[int], offsets: Counts, sizes: Counts) -> Tiling | None:
    """Return how chunks tile a tensor of `shape`, which has elements; None if that is not plain.

    Chunks are rows of `offsets` and `sizes`, all with elements. Of equal chunks the first counts.
    """
    ndim = len(shape)
    if not len(offsets) or math.prod(shape) > _MOST:
        return None
    if ndim == 0:
        return Tiling(kept=np.zeros(1, dtype=np.int64), cuts=())
    return _grid(shape, offsets, sizes) or _intervals(shape, offsets, sizes)


def _grid(shape: Sequence[int], offsets: Counts, sizes: Counts) -> Tiling | None:
    places = np.zeros(len(offsets), dtype=np.int64)
    cell_count = 1
    cuts: list[Sequence[int]] = []
    for dim, size in enumerate(shape):
        starts, at = np.unique(offsets[:, dim], return_inverse=True)
        cell_count *= len(starts)
        if starts[0] != 0 or starts[-1] >= size or cell_count > len(offsets):
            return None
        expected = np.diff(starts, append=size)
        if not np.array_equal(expected[at], sizes[:, dim]):
            return None
        places = places * len(starts) + at
        cuts.append(compact(starts))
    # Sorted, and of equal ones the first: so ascending positions and as many as cells means all.
    found, kept = np.unique(places, return_index=True)
    return Tiling(kept=kept, cuts=tuple(cuts)) if len(found) == cell_count else None


def _intervals(shape: Sequence[int], offsets: Counts, sizes: Counts) -> Tiling | None:
    """Recognise chunks that are intervals in C order, as flattened shards are."""
    limits = np.asarray(shape, dtype=np.int64)
    if (offsets < 0).any() or (sizes < 1).any():
        return None
    if (sizes > limits).any() or (offsets > limits - sizes).any():
        return None
    # One box is contiguous if, before the first dimension that is longer than 1, all are 1 (that
    # is what first means) and behind it all are whole.
    first = np.argmax(sizes > 1, axis=1)
    behind = np.arange(len(shape)) > first[:, None]
    ones = (sizes == 1).all(axis=1)
    if not (ones | ((sizes == limits) | ~behind).all(axis=1)).all():
        return None
    strides = np.ones(len(shape), dtype=np.int64)
    strides[:-1] = np.cumprod(limits[:0:-1])[::-1]
    starts, kept = np.unique(offsets @ strides, return_index=True)
    volumes = sizes.prod(axis=1)
    # What else begins there must be the same chunk.
    at = np.searchsorted(starts, offsets @ strides)
    if not np.array_equal(volumes[kept][at], volumes):
        return None
    ends = starts + volumes[kept]
    whole = starts[0] == 0 and ends[-1] == math.prod(shape)
    return Tiling(kept=kept, cuts=None) if whole and (ends[:-1] == starts[1:]).all() else None
