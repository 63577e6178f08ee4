"""Loads into other dtypes: no value changes without an error or a line of the log.

Stock `dcp.load` casts as `Tensor.copy_` does, and says nothing.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_storage
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.loads.casts import Changes, can_cast, find_changes, is_lossless

INF, NAN = float("inf"), float("nan")
FLOAT8_OF_INF = float(torch.tensor(INF).to(torch.float8_e4m3fn).float())
"""The largest value, or NaN with older releases of torch."""
REFUSED = (ckpt_storage.InvalidInputError, CheckpointException)
Load = Callable[..., object]

each_load = pytest.mark.parametrize(
    "load", [dcp_cases.load, ckpt_storage.load], ids=["dcp", "ours"]
)

DO_NOT_FIT: list[tuple[str, str, Any, Any]] = [
    ("int64", "int8", 300, 44),
    ("int64", "uint8", -1, 255),
    ("uint8", "int8", 200, -56),
    ("int64", "int32", 1 << 32, 0),
    ("uint64", "int64", (1 << 64) - 1, -1),
    ("uint64", "int8", (1 << 64) - 1, -1),
    ("int64", "float16", 70_000, INF),
    ("float32", "float16", 1e30, INF),
    ("float32", "float8_e4m3fn", 1e30, FLOAT8_OF_INF),
    ("float32", "float8_e4m3fn", INF, FLOAT8_OF_INF),
    ("float32", "float8_e4m3fnuz", 1e30, NAN),
    ("float32", "float8_e8m0fnu", -2.0, 2.0),
    ("float64", "float32", 1e300, INF),
    ("float32", "int64", 0.5, 0),
    ("float32", "int32", 2.0**31, -(1 << 31)),
    ("float32", "int8", 300.0, 44),
    ("complex64", "float32", 1 + 2j, 1.0),
    ("complex64", "int32", 2j, 0),
    ("complex128", "complex64", 1e300j, complex(0, INF)),
    ("int64", "bool", 2, True),
    ("bfloat16", "bool", 0.5, True),
]
"""Stored dtype, target dtype, stored value, what torch's cast makes of it."""

ROUNDED: list[tuple[str, str, Any]] = [
    ("float32", "bfloat16", 0.1),
    ("float32", "float16", 1e-30),
    ("float64", "float32", 1e-300),
    ("int64", "float32", (1 << 24) + 1),
    ("int64", "float64", (1 << 53) + 1),
    ("int64", "float64", (1 << 63) - 1),
    ("uint64", "float32", (1 << 64) - 1),
    ("float32", "float8_e4m3fn", 449.0),
    ("complex64", "complex32", 0.1 + 0.1j),
]

EQUAL: list[tuple[str, str, Any]] = [
    ("float32", "bfloat16", -INF),
    ("float32", "float16", NAN),
    ("float32", "int64", 3.0),
    ("float32", "int8", -128.0),
    ("int64", "int8", -128),
    ("int64", "bool", 1),
    ("uint64", "float32", 1 << 63),
    ("complex64", "float32", 2 + 0j),
    ("int32", "float32", 1 << 24),
    ("bool", "float32", True),
    ("bfloat16", "complex64", 0.5),
]


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def scalar(name: str, value: Any) -> torch.Tensor:
    """Return [0, value] of a dtype; 0 loads into every dtype but float8_e8m0fnu."""
    return torch.tensor([0, value], dtype=dtype_of(name))


@pytest.fixture(autouse=True)
def _quiet_complex() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        warnings.filterwarnings("ignore", "Casting complex values to real")
        yield


@each_load
@pytest.mark.parametrize(("stored", "wanted", "value", "cast"), DO_NOT_FIT)
def test_a_value_that_does_not_fit_is_refused(
    tmp_path: Path, load: Load, stored: str, wanted: str, value: Any, cast: Any
) -> None:
    """Stock loads another value; this library names key, dtypes and both values."""
    dcp_cases.save({"value": scalar(stored, value)}, tmp_path / "c")
    by_stock = {"value": torch.ones(2, dtype=dtype_of(wanted))}
    dcp_cases.load_stock(by_stock, tmp_path / "c")
    assert str(by_stock["value"][1].to(torch.complex128)) == str(
        torch.tensor(cast).to(torch.complex128)
    )
    for casts in ("checked", "exact"):
        target = {"value": torch.ones(2, dtype=dtype_of(wanted))}
        with pytest.raises(REFUSED, match=f"value is stored as {stored}.*{wanted}") as caught:
            load(target, tmp_path / "c", casts=casts)
        assert str(scalar(stored, value)[1].to(_shown(stored)).item()) in str(caught.value)
    any_target = {"value": torch.ones(2, dtype=dtype_of(wanted))}
    load(any_target, tmp_path / "c", casts="any")
    assert dcp_cases.same(any_target, by_stock)


def _shown(name: str) -> torch.dtype:
    dtype = dtype_of(name)
    return torch.float64 if dtype.is_floating_point else dtype


@pytest.mark.parametrize(("stored", "wanted", "value"), ROUNDED)
def test_rounding_is_logged_once_and_exact_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: str, wanted: str, value: Any
) -> None:
    """The log has one line with count and example; casts="exact" raises."""
    dcp_cases.save({"a": scalar(stored, value), "b": scalar(stored, value)}, tmp_path / "c")
    names = ("a", "b")
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        target = {name: torch.ones(2, dtype=dtype_of(wanted)) for name in names}
        ckpt_storage.load(target, tmp_path / "c")
    assert dcp_cases.same(target["a"], scalar(stored, value).to(dtype_of(wanted)))
    (message,) = [r.getMessage() for r in caplog.records if r.name == "ckpt_storage"]
    assert "dtypes of their targets: 2." in message
    assert f" is stored as {stored} and loaded as {wanted}" in message
    target = {name: torch.ones(2, dtype=dtype_of(wanted)) for name in names}
    with pytest.raises(ckpt_storage.InvalidInputError, match="which is rounded"):
        ckpt_storage.load(target, tmp_path / "c", casts="exact")


@pytest.mark.parametrize(("stored", "wanted", "value"), EQUAL)
def test_a_cast_to_an_equal_value_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: str, wanted: str, value: Any
) -> None:
    """Where every value is equal in the other dtype, even "exact" loads it without a word."""
    dcp_cases.save({"value": scalar(stored, value)}, tmp_path / "c")
    target = {"value": torch.ones(2, dtype=dtype_of(wanted))}
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        ckpt_storage.load(target, tmp_path / "c", casts="exact")
    assert [r for r in caplog.records if r.name == "ckpt_storage"] == []
    assert dcp_cases.same(target["value"], scalar(stored, value).to(dtype_of(wanted)))


def test_every_chunk_is_compared(tmp_path: Path) -> None:
    """A value that does not fit is noticed anywhere in a large tensor, and in a column of it."""
    whole = torch.zeros(3000, 1000, dtype=torch.int64)
    whole[2999, 998] = 1 << 40
    dcp_cases.save({"value": whole}, tmp_path / "c")
    for target in (torch.ones(3000, 1000, dtype=torch.int32), torch.ones(1000, 3000).t()):
        with pytest.raises(ckpt_storage.InvalidInputError, match=str(1 << 40)):
            ckpt_storage.load({"value": target.to(torch.int16)}, tmp_path / "c")


def test_gaps_between_wanted_elements_are_not_compared(tmp_path: Path) -> None:
    """What a rank does not want may hold any value."""
    whole = torch.full((64, 64), 300)
    whole[:, 10:12] = 7
    dcp_cases.save({"value": whole}, tmp_path / "c")
    boxes = [Box((0, 10), (64, 2))]
    target = dcp_cases.tiled(torch.zeros(64, 64, dtype=torch.int8), boxes)
    ckpt_storage.load({"value": target}, tmp_path / "c")
    assert int(target.as_subclass(torch.Tensor).sum()) == 64 * 2 * 7


@each_load
def test_an_unknown_choice_is_refused(tmp_path: Path, load: Load) -> None:
    """casts= is one of three words."""
    dcp_cases.save({"value": torch.zeros(2)}, tmp_path / "c")
    with pytest.raises(ckpt_storage.InvalidInputError, match="casts is 'lossy'"):
        load({"value": torch.zeros(2)}, tmp_path / "c", casts="lossy")


def test_a_manager_restores_by_the_same_rule(tmp_path: Path) -> None:
    """`restore` refuses what does not fit, and takes it with casts="any"."""
    with ckpt_storage.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"value": torch.tensor([300])})
        target = {"value": torch.zeros(1, dtype=torch.int8)}
        with pytest.raises(ckpt_storage.InvalidInputError, match="300"):
            manager.restore(target)
        manager.restore(target, casts="any")
    assert target["value"].tolist() == [44]


def test_equal_dtypes_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second pass over the memory: nothing is compared where a dtype has every value."""
    state = {"a": torch.arange(9.0), "b": torch.arange(9, dtype=torch.int16)}
    dcp_cases.save(dict(state), tmp_path / "c")

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("ckpt_storage.loads.casts.find_changes", never)
    target = {"a": torch.zeros(9), "b": torch.zeros(9)}
    ckpt_storage.load(target, tmp_path / "c")
    assert target["b"].tolist() == list(range(9))


ARRAYS_THAT_DO_NOT_FIT: list[tuple[str, str, Any]] = [
    ("int64", "int8", 300),
    ("int64", "uint8", -1),
    ("int64", "float16", 70_000),
    ("float32", "float16", 1e30),
    ("float64", "float32", 1e300),
    ("float32", "int64", 0.5),
    ("float32", "int32", NAN),
    ("complex64", "float32", 1 + 2j),
    ("int64", "bool", 2),
    ("bfloat16", "float16", 1e30),
    ("float8_e4m3fn", "bfloat16", 1.0),
]


@pytest.mark.parametrize(("stored", "wanted", "value"), ARRAYS_THAT_DO_NOT_FIT)
def test_arrays_take_only_casts_that_numpy_calls_safe(
    tmp_path: Path, stored: str, wanted: str, value: Any
) -> None:
    """`numpy.asarray(tensor, dtype)` refuses casts that numpy calls unsafe, of any values."""
    ckpt_storage.save({"value": scalar(stored, value)}, tmp_path / "c")
    checkpoint = ckpt_storage.open_checkpoint(tmp_path / "c")
    message = f"value is stored as {stored}; numpy calls a cast to {wanted} unsafe"
    with pytest.raises(ckpt_storage.InvalidInputError, match=message):
        np.asarray(checkpoint["value"], dtype=wanted)


NUMBERS = [name for name in DTYPES if can_cast(dtype_of(name), torch.float32)]


def exact_value(tensor: torch.Tensor) -> Any:
    """Return an element as Python's own number: of ints all digits, of floats the very value."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128).item()
    return tensor.double().item() if tensor.dtype.is_floating_point else int(tensor.item())


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), st.binary(min_size=16, max_size=16))
@example("uint64", "float64", b"\xff" * 16)
@example("float32", "uint64", b"\x00\x00\x80\x5f" * 4)
def test_changes_are_those_of_exact_arithmetic(stored: str, wanted: str, data: bytes) -> None:
    """For any bits of any two dtypes: an element is marked if Python's numbers differ."""
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: dtype_of(stored).itemsize]
    if stored == "bool":
        source = source & 1
    source = source.view(dtype_of(stored))
    plain = source.real if source.is_complex() and not dtype_of(wanted).is_complex else source
    result = plain.to(dtype_of(wanted))
    changes = find_changes(source, result)
    before, after = exact_value(source[0]), exact_value(result[0])
    parts = zip((before.real, before.imag), (after.real, after.imag), strict=True)
    is_equal = all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in parts)
    assert (changes == Changes()) == is_equal
    assert is_equal or not is_lossless(dtype_of(stored), dtype_of(wanted))
