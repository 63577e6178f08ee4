"""What is told of a checkpoint: differences and statistics, as numpy has them, and views."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dcp_cases
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import numpy_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import ckpt_storage
from ckpt_storage import Checkpoint, IntegrityError, InvalidInputError
from ckpt_storage.format.boxes import Grid
from ckpt_storage.inspect.checkpoint import diff, open_checkpoint
from ckpt_storage.inspect.numbers import (
    CheckpointDiff,
    TensorStats,
    ValueDiff,
    differences,
    summarise,
)
from ckpt_storage.inspect.views import Entry, Sharding, sharding_svg

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


def compared(tmp_path: Path, left: Any, right: Any, **options: Any) -> CheckpointDiff:
    dcp_cases.save(left, tmp_path / "left", overwrite=True)
    dcp_cases.save(right, tmp_path / "right", overwrite=True)
    return diff(tmp_path / "left", tmp_path / "right", **options)


def only(found: CheckpointDiff) -> ValueDiff:
    (change,) = found.changed
    return change


def test_names_shapes_types_and_objects_are_compared(tmp_path: Path) -> None:
    """Each kind of difference is told apart, other types too; a name in neither is a mistake."""
    same = {"note": {"a", "b"}, "rate": float("nan"), "same": torch.ones(5)}
    left = {"gone": torch.ones(1), "shape": torch.ones(2, 3), "kind": torch.ones(1), "step": 10}
    right = {"new": torch.ones(1), "shape": torch.ones(3, 2), "kind": "text", "step": 20}
    left["dtype"] = torch.tensor([1.0, 2.0, 3.0])
    right["dtype"] = torch.tensor([1.0, 2.5, 3.0], dtype=torch.bfloat16)
    found = compared(tmp_path, left | same, right | same)
    assert (found.only_left, found.only_right) == (("gone",), ("new",))
    assert found.same_count == 3
    changes = {change.fqn: change for change in found.changed}
    kinds = {name: change.kind for name, change in changes.items()}
    assert kinds == {"shape": "shape", "dtype": "dtype", "kind": "kind", "step": "values"}
    assert (changes["step"].left, changes["step"].right) == ("10", "20")
    assert (changes["shape"].left, changes["shape"].right) == ("float32[2, 3]", "float32[3, 2]")
    assert (changes["dtype"].max_absolute, changes["dtype"].different_count) == (0.5, 1)
    assert changes["dtype"].max_relative == pytest.approx(0.2)
    assert "step: 10 -> 20" in str(found)
    with pytest.raises(KeyError, match="c"):
        diff(tmp_path / "left", tmp_path / "right", names=["c"])


def test_values_can_be_left_unread(tmp_path: Path) -> None:
    """values=False finds names, shapes and types, and reads no shard file."""
    dcp_cases.save({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "left")
    dcp_cases.save({"a": torch.zeros(3), "b": torch.ones(3)}, tmp_path / "right")
    for file in tmp_path.rglob("*.distcp"):
        file.unlink()
    found = diff(tmp_path / "left", tmp_path / "right", values=False)
    assert [change.fqn for change in found.changed] == ["b"]
    assert not found.values_compared
    with pytest.raises(IntegrityError):
        diff(tmp_path / "left", tmp_path / "right")


def differing(pieces: Any, dtype: str, count: int, absolute: float = 0.0) -> dict[str, Any]:
    entry = Entry(fqn="a", dtype=dtype, shape=(count,))
    return differences(pieces, (entry, entry), 0.0, absolute)


def test_infinities_and_nan_of_odd_types_are_compared_in_silence() -> None:
    """inf+1j is not inf+2j; numpy would warn of narrow NaN, and here warnings are errors."""
    x = np.array([complex(np.inf, 1), complex(np.inf, 3), 1], "complex64")
    y = np.array([complex(np.inf, 2), complex(np.inf, 3), 1], "complex64")
    fields = differing([(x.view("u8"), y.view("u8"))], "complex64", 3)
    assert (fields["different_count"], fields["at"]) == (1, (0,))
    assert (fields["max_absolute"], fields["max_relative"]) == (np.inf, np.inf)
    for kind, word in (("bfloat16", "u2"), ("float8_e4m3fn", "u1")):
        every = np.arange(1 << (8 * np.dtype(word).itemsize), dtype=word)
        fields = differing([(every, np.roll(every, 1))], kind, len(every))
        assert fields["different_count"] > len(every) // 2


def test_elements_within_a_tolerance_are_alike(tmp_path: Path) -> None:
    """Within rtol or atol elements are alike; max differences are told all the same."""
    left, right = torch.tensor([1.0, 100.0]), torch.tensor([1.001, 101.0])
    assert compared(tmp_path, {"a": left}, {"a": right}, rtol=0.02).is_equal
    change = only(diff(tmp_path / "left", tmp_path / "right", atol=0.5))
    assert (change.different_count, change.max_absolute, change.at) == (1, 1.0, (1,))
    # What is just as far apart as is allowed is alike, whichever side is larger.
    assert compared(tmp_path, {"a": left}, {"a": left + 0.5}, atol=0.5).is_equal
    for one, other in ((left, 2 * left), (2 * left, left)):
        assert compared(tmp_path, {"a": one}, {"a": other}, rtol=0.5).is_equal
    # The extremes of a type are as far apart as they are; neighbours of 64 bits are told apart.
    for low, high in ((-(2**63), 2**63 - 1), (2**62, 2**62 + 1)):
        change = only(compared(tmp_path, {"a": torch.tensor([low])}, {"a": torch.tensor([high])}))
        assert (change.max_absolute, change.different_count) == (float(high - low), 1)


@given(
    st.sampled_from(
        ["float64", "float32", "float16", "int32", "uint8", "bool", "complex64"]
    ).flatmap(
        lambda kind: st.tuples(
            *[npst.arrays(kind, 9, elements={"allow_nan": True} if kind[0] in "fc" else None)] * 2
        )
    ),
    st.lists(st.integers(1, 8), max_size=3),
    st.sampled_from([0.0, 1e-3, 2.0]),
)
def test_findings_are_numpys(pair: tuple[Any, Any], cuts: list[int], absolute: float) -> None:
    """Counts, maxima and their place are what numpy finds in the whole arrays."""
    x, y = pair
    name = str(x.dtype)
    word = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}[x.dtype.itemsize]
    bounds = itertools.pairwise(sorted({0, 9, *cuts}))
    pieces = [(x[start:stop].view(word), y[start:stop].view(word)) for start, stop in bounds]
    fields = differing(pieces, name, 9, absolute)
    kind = np.complex128 if name.startswith("complex") else np.float64
    a, b = x.astype(kind), y.astype(kind)
    with np.errstate(all="ignore"):
        distance = np.abs(a - b)
    # Infinities less one another: of two complex numbers the other part may differ.
    distance[np.isnan(distance)] = np.inf
    distance[(a == b) | np.isnan(a) | np.isnan(b)] = 0
    one_nan = np.isnan(a) ^ np.isnan(b)
    assert fields["different_count"] == ((distance > absolute) | one_nan).sum()
    assert fields["max_absolute"] == distance.max()
    assert fields["at"] == ((int(distance.argmax()),) if distance.max() else None)


def test_a_single_element_of_many_pieces_is_placed(tmp_path: Path) -> None:
    """Tensors larger than memory may be are compared in pieces, and places are of the whole."""
    left = torch.arange(3_000_000, dtype=torch.float32).reshape(1000, 3000)
    right = left.clone()
    right[777, 2999] += 8
    dcp_cases.save({"a": left}, tmp_path / "left")
    dcp_cases.save({"a": right}, tmp_path / "right")
    with (
        open_checkpoint(tmp_path / "left", memory_limit_bytes=1 << 20) as one,
        open_checkpoint(tmp_path / "right", memory_limit_bytes=1 << 20) as other,
    ):
        change = only(one.diff(other))
    assert (change.at, change.max_absolute) == ((777, 2999), 8.0)


def test_objects_that_may_not_be_loaded_are_compared_as_stored(tmp_path: Path) -> None:
    """Equal bytes are equal; others are told by their length, and nothing runs."""
    for name, value in (("left", "a"), ("same", "a"), ("right", "abc")):
        dcp.save({"o": SimpleNamespace(value=value)}, checkpoint_id=tmp_path / name)
    assert diff(tmp_path / "left", tmp_path / "same").is_equal
    assert only(diff(tmp_path / "left", tmp_path / "right")).left.endswith("bytes")


KINDS = ("float64", "float32", "float16", "int64", "uint64", "int8", "uint8", "bool")


def summary_of(array: Any, cuts: list[int], bin_count: int = 8) -> TensorStats:
    def pieces() -> Iterator[Any]:
        bounds = sorted({0, len(array), *cuts})
        for start, stop in itertools.pairwise(bounds):
            yield array[start:stop]

    facts = {"fqn": "a", "dtype": "x", "shape": array.shape, "count": array.size}
    return summarise(pieces, bin_count=bin_count, **facts)


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
    # Where the spread is small beside the values, their own rounding shows.
    rounding = 1e-9 + 4e-15 * np.abs(finite).max()
    assert found.std == pytest.approx(finite.std(), rel=1e-9, abs=rounding)
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


def test_objects_are_compared_by_value(tmp_path: Path) -> None:
    """However they are pickled; NaN equals itself inside objects, too, and types must be equal."""
    nan = float("nan")
    shared = torch.tensor([nan, 1.0])
    narrow = torch.tensor([nan, 2.0]).to(torch.float8_e5m2)
    values: dict[str, tuple[Any, Any, bool]] = {
        "tensors": ((shared, shared), (shared, shared.clone()), True),
        "narrow": ((narrow, narrow), (narrow, narrow.clone()), True),
        "scalars": ((nan, shared, shared), (nan, shared, shared.clone()), True),
        "sets": (({0, 8},), ({8, 0},), True),  # in another order
        "other": ((shared, shared), (shared, shared + 1), False),
        "pairs": (((1, 2),), ([1, 2],), False),
        "types": ((1, 0.9), (1.0, 0.9), False),
        "bools": (({"a": True},), ({"a": 1},), False),
    }
    for side in (0, 1):
        state = {name: value[side] for name, value in values.items()}
        dcp_cases.save_alone(state, tmp_path / str(side))
    found = diff(tmp_path / "0", tmp_path / "1").changed
    assert {one.fqn for one in found} == {name for name, value in values.items() if not value[2]}


EVIL = "<script>alert(1)</script>\"'&amp;.\x1b[31mred\u202eback\n"

HARMLESS = {"div", "style", "span", "code", "br", "i", "b", "svg", "title", "g", "rect"}


def parsed(html: str) -> tuple[set[str], set[str], str]:
    """Return tags, attributes and text of HTML, which is balanced."""
    root = ET.fromstring(html)  # noqa: S314  # our own
    items = list(root.iter())
    return (
        {one.tag for one in items},
        {k for one in items for k in one.attrib},
        "".join(root.itertext()),
    )


def opened(path: Path, state: dict[str, Any]) -> Checkpoint:
    ckpt_storage.save(state, path)
    return open_checkpoint(path)


def test_the_tree_shows_alike_layers_once(tmp_path: Path) -> None:
    """Numbered siblings of one structure are folded, chains are joined, sizes add up."""
    state: dict[str, Any] = {"embed.weight": torch.ones(50, 8), "step": 3}
    state |= {f"layers.{i}.attention.wq": torch.ones(8, 8) for i in range(4)}
    state |= {f"layers.{i}.norm": torch.ones(8, dtype=torch.bfloat16) for i in range(4)}
    state |= {f"h.{i}.w": torch.ones(5 if i == 5 else 4) for i in range(12)}
    checkpoint = opened(tmp_path / "step-3", state)
    times, dash = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
    assert str(checkpoint.tree()).splitlines() == [
        f"embed.weight  50 {times} 8  float32  1.6 kB",
        "h  12 values  float32  196 B",
        f"├─ [0{dash}4, 6{dash}11].w  11 {times} 1  float32  176 B",
        "└─ 5.w  5  float32  20 B",
        f"layers.[0{dash}3]  4 {times} 2  bfloat16, float32  1.09 kB",
        f"├─ attention.wq  8 {times} 8  float32  4 {times} 256 B",
        f"└─ norm  8  bfloat16  4 {times} 16 B",
        "step  object",
    ]
    assert str(checkpoint.tree(depth=1)).count("\n") == 3
    *_, shown = parsed(checkpoint._repr_html_())
    for text in ("step-3", checkpoint.url, "ckpt_storage", "embed.weight", "attention.wq"):
        assert text in shown
    assert shown.count("whole, rank 0") == 5


def test_hostile_names_are_shown(tmp_path: Path) -> None:
    """Nested without end, with thousands of digits, thousands of them: views stay small."""
    many = {f"m.{'x' * (i % 7)}{i}.w": torch.ones(1) for i in range(1000)}
    deep = {"a" + ".a" * i: torch.ones(1) for i in range(0, 600, 2)}
    digits = {"9" * 500: torch.ones(1), "#a": torch.ones(1), "1a": torch.ones(1)}
    for name, state in (("many", many), ("deep", deep), ("digits", digits)):
        checkpoint = opened(tmp_path / name, state)
        assert str(checkpoint.tree()).count("\n") <= 400
        html = checkpoint._repr_html_()
        assert len(html) < 400_000
        assert parsed(html)[0] <= HARMLESS
        assert ("more names" in html) is (name == "many")
    assert "more names" in str(open_checkpoint(tmp_path / "many").tree())


def test_html_runs_nothing_and_escapes_names(tmp_path: Path) -> None:
    """A hostile name, path or object is text in every view, without control characters."""
    checkpoint = opened(
        tmp_path / "<img src=x onerror=alert(1)>", {EVIL: torch.ones(3), "note" + EVIL: EVIL}
    )
    other = opened(tmp_path / "other", {EVIL: torch.zeros(4), "note" + EVIL: EVIL * 2})
    name = next(name for name in checkpoint if not name.startswith("note"))
    for html in (checkpoint._repr_html_(), checkpoint.tree()._repr_html_()):
        tags, attributes, text = parsed(html)
        assert tags <= HARMLESS
        assert not [key for key in attributes if key.startswith(("on", "href", "src"))]
        assert "alert(1)" in text
        assert all(char.isprintable() or char == "\n" for char in html)
        assert "\u202e" not in html
        assert re.search(r"url\(|@import|javascript:|https?:", html) is None
    found = diff(checkpoint, other)
    shown = (checkpoint, checkpoint.tree(), checkpoint[name], found, checkpoint.stats(name))
    for text in map(repr, shown):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_pictures_are_tiled_by_chunks() -> None:
    """The rectangles of the chunks of a tensor fill its picture."""
    for shape, cuts, count in (
        ((10,), ((0, 4, 7),), 3),
        ((100, 10), ((0, 25, 50, 75), (0,)), 4),
        ((4, 6, 8), ((0, 2), (0,), (0, 2, 4)), 6),
    ):
        boxes = Grid(cuts, shape)
        svg = sharding_svg(Sharding(shape=shape, boxes=boxes, owners=range(count)))
        found = [
            [float(item.get(name, 0)) for name in ("width", "height")]
            for item in ET.fromstring(svg).iter("rect")  # noqa: S314  # our own
        ]
        assert len(found) == count
        width, height = map(int, ET.fromstring(svg).attrib["viewBox"].split()[2:])  # noqa: S314
        assert sum(one * other for one, other in found) == width * height
