"""Statistics of a tensor are those numpy computes of the whole, in float64, however it is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_cases
import numpy as np
import pytest
import torch
from checkpoint_cases import numpy_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ckpt_storage import InvalidInputError
from ckpt_storage.inspect.checkpoint import open_checkpoint
from ckpt_storage.inspect.stats import TensorStats, summarise

KINDS = ("float64", "float32", "float16", "int64", "uint64", "int8", "uint8", "bool")


def summary_of(array: Any, cuts: list[int], bin_count: int = 8) -> TensorStats:
    """Return the statistics of an array that arrives in pieces."""

    def pieces() -> Iterator[Any]:
        bounds = sorted({0, len(array), *cuts})
        for start, stop in itertools.pairwise(bounds):
            yield array[start:stop]

    return summarise(pieces, fqn="a", dtype="x", shape=array.shape, bin_count=bin_count)


@given(
    st.sampled_from(KINDS).flatmap(
        lambda kind: npst.arrays(
            kind,
            st.integers(0, 40),
            elements=(
                st.floats(-1e3, 1e3, width=16) | st.sampled_from([np.nan, np.inf, -np.inf, 0.0])
                if kind.startswith("float")
                else None
            ),
        )
    ),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_statistics_are_numpys(array: Any, cuts: list[int]) -> None:
    """Counts are exact, extremes too, mean and std to rounding, whatever the pieces."""
    found = summary_of(array, [cut for cut in cuts if cut <= len(array)])
    wide = array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert (found.count, found.finite_count) == (len(array), len(finite))
    assert (found.nan_count, found.zero_count) == (np.isnan(wide).sum(), (finite == 0).sum())
    assert found.positive_inf_count == np.isposinf(wide).sum()
    assert found.negative_inf_count == np.isneginf(wide).sum()
    if not len(finite):
        assert (found.mean, found.std, found.min, found.max) == (None,) * 4
        assert found.histogram.counts == ()
        return
    kept = array[np.isfinite(wide)]
    assert (found.min, found.max) == (kept.min(), kept.max())
    assert found.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-12)
    assert found.std == pytest.approx(finite.std(), rel=1e-9, abs=1e-9)
    assert sum(found.histogram.counts) == len(finite)
    assert len(found.histogram.edges) == len(found.histogram.counts) + 1 == 9
    counts, _ = np.histogram(finite, np.array(found.histogram.edges))
    assert found.histogram.counts == tuple(counts)


def test_a_small_spread_far_from_zero_keeps_its_digits() -> None:
    """Where sums of squares would cancel, std is right to many digits."""
    values = 1e9 + np.random.default_rng(0).standard_normal(100_000)
    found = summary_of(values, list(range(0, 100_000, 777)))
    assert found.std == pytest.approx(np.std(values), rel=1e-9)
    assert found.mean == pytest.approx(np.mean(values), rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("limit_bytes", [None, 1 << 20], ids=["at-once", "streamed"])
def test_a_stored_tensor_is_summarised(
    tmp_path: Path, dtype: torch.dtype, limit_bytes: int | None
) -> None:
    """Held or read in pieces twice, the numbers are those of the tensor."""
    tensor = (dcp_cases.seeded(3, 700, 1000) * 100).to(dtype)
    if dtype.is_floating_point:
        tensor[5, 5], tensor[6, 6], tensor[7, 7] = float("nan"), float("inf"), -float("inf")
    dcp_cases.save({"a": tensor}, tmp_path / "run")
    opened = open_checkpoint(tmp_path / "run", memory_limit_bytes=limit_bytes)
    found = opened.stats("a", bin_count=10)
    wide = numpy_of(tensor).astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert (found.shape, found.dtype) == ((700, 1000), str(dtype).removeprefix("torch."))
    assert (found.nan_count, found.inf_count) == ((1, 2) if dtype.is_floating_point else (0, 0))
    assert found.mean == pytest.approx(finite.mean())
    assert found.std == pytest.approx(finite.std())
    assert (found.min, found.max) == (finite.min(), finite.max())
    assert sum(found.histogram.counts) == finite.size
    assert "mean" in str(found)


def test_what_has_no_order_is_refused(tmp_path: Path) -> None:
    """Complex numbers have no extremes; a name that is none is a KeyError."""
    dcp_cases.save({"a": torch.ones(2, dtype=torch.complex64), "step": 1}, tmp_path / "run")
    opened = open_checkpoint(tmp_path / "run")
    with pytest.raises(InvalidInputError, match="complex"):
        opened.stats("a")
    for name in ("step", "none"):
        with pytest.raises(KeyError):
            opened.stats(name)
