"""Any nested state comes back equal from a save and a load, or is refused by name."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dcp_cases import same, seeded
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ckpt_storage
from ckpt_storage import InvalidInputError

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def _tensor(dtype: torch.dtype, shape: list[int], how: str, seed: int) -> torch.Tensor:
    """Return a tensor whose elements follow from a seed, in one of several layouts."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 2, [*shape, 3], generator=generator).to(dtype)
    if how == "view":
        return whole[..., 1]
    if how == "transposed" and len(shape) > 1:
        return whole[..., 0].clone().transpose(0, 1)
    if how == "conjugate" and dtype.is_complex:
        return whole[..., 2].clone().conj()
    return whole[..., 0].clone()


tensors = st.builds(
    _tensor,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["whole", "view", "transposed", "conjugate"]),
    st.integers(0, 99),
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=6),
    st.binary(max_size=6),
)
keys = st.one_of(st.text(st.sampled_from("ab. /01"), max_size=3), st.integers(-1, 3))


def _containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(keys, values, max_size=3),
        st.lists(values, max_size=3),
        st.lists(values, max_size=3).map(tuple),
    )


states = st.dictionaries(
    st.text(st.sampled_from("ab.0"), min_size=1, max_size=3),
    st.recursive(st.one_of(plain, tensors), _containers, max_leaves=8),
    max_size=4,
)


def _emptied(value: Any) -> Any:
    """Return an equal target: containers and tensors of the same form, other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: _emptied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_emptied(item) for item in value]
    # A tuple is a value to torch, and replaced as a whole.
    return None


def _names(value: Any, prefix: str = "") -> list[str]:
    """Return the names that flattening gives, containers included."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [
        name for key, item in items for name in (f"{prefix}{key}", *_names(item, f"{prefix}{key}."))
    ]


def _check(state: dict[str, Any], folder: Path) -> None:
    """Save and load; only a state of which two values have one name may be refused, by it."""
    before, names = copy.deepcopy(state), sorted(_names(state))
    doubles = [name for name, group in itertools.groupby(names) if len([*group]) > 1]
    refused: InvalidInputError | None = None
    try:
        ckpt_storage.save(state, folder / "run", sync_files=False)
    except InvalidInputError as error:
        refused = error
    if refused is not None:
        assert any(str(refused).startswith(f"{name} cannot be saved") for name in doubles)
        assert refused.next_step
        return
    target = _emptied(state)
    ckpt_storage.load(target, folder / "run")
    assert same(target, state), (target, state)
    assert same(state, before)


@settings(max_examples=40, derandomize=True)
@example({"a": (b"", torch.ones(1, dtype=torch.complex64).conj())})
@given(states)
def test_any_state_comes_back_equal(state: dict[str, Any]) -> None:
    """Plain values, tensors, tuples, int keys, empty containers and views: equal, or refused."""
    with tempfile.TemporaryDirectory() as folder:
        _check(state, Path(folder))


VIEWS: dict[str, Callable[[torch.Tensor, int, int], torch.Tensor]] = {
    "whole": lambda whole, _first, _last: whole,
    "rows": lambda whole, first, last: whole[first:last],
    "columns": lambda whole, first, last: whole[:, first:last],
    "flat": lambda whole, first, last: whole.view(-1)[first:last],
    "row": lambda whole, first, _last: whole[first],
    "transposed": lambda whole, _first, _last: whole.t(),
    "bits": lambda whole, first, last: whole.view(torch.int32)[first:last],
}
views = st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 3), st.integers(0, 4))


@settings(max_examples=60, derandomize=True)
@example([("rows", 0, 1), ("whole", 0, 0)])
@given(st.lists(views, min_size=1, max_size=4))
def test_views_of_one_tensor_come_back_equal(names: list[tuple[str, int, int]]) -> None:
    """A state of views loads into equal views of another tensor, as it does with stock torch."""
    whole, target = seeded(1, 4, 4), torch.zeros(4, 4)
    state, targets = (
        {f"v{at}": VIEWS[name](of, *ends) for at, (name, *ends) in enumerate(names)}
        for of in (whole, target)
    )
    with tempfile.TemporaryDirectory() as folder:
        ckpt_storage.save(state, Path(folder, "run"), sync_files=False)
        ckpt_storage.load(targets, Path(folder, "run"))
    assert same(targets, state)
