"""Casts of floating-point elements are torch's, bit by bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from export_tools import bits_of, torch_dtype

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.export.consolidation.options import CASTABLE
from ckpt_storage.export.consolidation.stream import cast_into, check_cast


def special_values(dtype: str) -> torch.Tensor:
    """Return zeros, infinities, NaNs, subnormals, halfway cases and many random bits."""
    item_bytes = torch.empty(0, dtype=torch_dtype(dtype)).itemsize
    random = np.frombuffer(np.random.default_rng(0).bytes(200_000 * item_bytes), f"i{item_bytes}")
    raw = torch.from_numpy(random.copy()).view(torch_dtype(dtype))
    near = torch.linspace(-70000, 70000, 100_001, dtype=torch.float64)
    tiny = torch.linspace(-1e-4, 1e-4, 10_001, dtype=torch.float64)
    halves = torch.arange(-5000, 5000, dtype=torch.float64) * 2.0**-12 + 1
    named = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 65519.99, 65520.0])
    made = torch.cat([near, tiny, halves, named.double()]).to(torch_dtype(dtype))
    return torch.cat([raw, made])


@pytest.mark.parametrize(
    ("source_dtype", "dtype"), sorted(itertools.permutations(sorted(CASTABLE), 2))
)
def test_casts_are_torchs(source_dtype: str, dtype: str) -> None:
    """Every bit is what `Tensor.to` gives; a NaN stays a NaN."""
    values = special_values(source_dtype)
    wanted = values.to(torch_dtype(dtype))
    found = np.zeros(len(values), bits_of(wanted).dtype)
    cast_into(bits_of(values), source_dtype, found, dtype)
    is_nan = torch.isnan(wanted).numpy()
    np.testing.assert_array_equal(found[~is_nan], bits_of(wanted)[~is_nan])
    back = torch.from_numpy(found.view(f"i{found.itemsize}")).view(torch_dtype(dtype))
    np.testing.assert_array_equal(torch.isnan(back).numpy(), is_nan)


def test_casts_take_arrays_of_any_strides() -> None:
    """Strided sources and targets of several dimensions give what contiguous ones give."""
    values = torch.randn(37, 5, 90_001, dtype=torch.float32)[:, 1:4, ::3]
    target = np.zeros((37, 3, 2 * values.shape[2]), "u2")
    cast_into(np.asarray(values.numpy()).view("u4"), "float32", target[:, :, ::2], "bfloat16")
    np.testing.assert_array_equal(target[:, :, ::2], bits_of(values.contiguous().bfloat16()))
    assert not target[:, :, 1::2].any()


@pytest.mark.parametrize("pair", [("int64", "float32"), ("float32", "float8_e4m3fn")])
def test_other_casts_are_refused(pair: tuple[str, str]) -> None:
    """What is no cast between two of the four dtypes is an error that lists them."""
    with pytest.raises(InvalidInputError, match="bfloat16, float16, float32, float64"):
        check_cast(*pair)
