"""Manifests with any column changed: refused as `FormatError`, or read as something that can be."""

from __future__ import annotations

import base64
import copy
import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from report_tools import SAVE_ID, Written, manifest_of, reports_of

from ckpt_storage.commit.assembly import assemble
from ckpt_storage.commit.report import Planned
from ckpt_storage.errors import FormatError, UnsafeContentError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.rank_manifest import RankManifest

RANKS = [
    [
        Written("grid", (0, 2 * rank), (3, 2)),
        Written("list", (2 * rank, 0), (2, 1)),
        Written("list", (2 * rank, 1), (1, 2)),
        Written("list", (2 * rank + 1, 1), (1, 2)),
        Written("scalar", (), (), "int32") if rank == 0 else Written("blob"),
        Written("empty", (0, 0), (0, 3)),
    ]
    for rank in range(2)
]
PLAN = Planned(
    tensors={"grid": (3, 4), "list": (4, 3), "scalar": (), "empty": (0, 3)},
    blobs=frozenset({"blob"}),
    planner_data={"grid": ("a", 0), "blob": ("b",)},
)
RANK_BODY = manifest_of(0, 2, [*RANKS[0], *RANKS[1][4:]]).to_body()
BODY = assemble(reports_of(RANKS), PLAN).to_body()

NUMBERS = st.one_of(
    st.integers(-2, 7),
    st.sampled_from([64, 65, 127, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, -(1 << 63), 1 << 63]),
)


def columns_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every list of numbers."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        yield path
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from columns_of(item, (*path, key))


def at(body: Any, path: tuple[Any, ...]) -> Any:
    """Return what lies at a path."""
    for key in path:
        body = body[key]
    return body


@st.composite
def changed(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """Draw a document of which some columns have other numbers, or more, or fewer."""
    body = copy.deepcopy(body)
    paths = list(columns_of(body))
    for path in draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3)):
        column = at(body, path)
        for _ in range(draw(st.integers(1, 3))):
            place = draw(st.integers(0, len(column)))
            match draw(st.sampled_from(["set", "set", "set", "insert", "delete"])):
                case "set" if place < len(column):
                    column[place] = draw(NUMBERS)
                case "delete" if place < len(column):
                    del column[place]
                case _:
                    column.insert(place, draw(NUMBERS))
    for path in draw(st.lists(st.sampled_from(paths), max_size=2, unique=True)):
        column = at(body, path)
        if all(-(1 << 63) <= number < 1 << 63 for number in column):
            at(body, path[:-1])[path[-1]] = packed(column)
    return body


def packed(column: list[int]) -> dict[str, object]:
    """Return the same numbers as a long column is spelt."""
    pairs = zip(column, [0, *column], strict=False)
    differences = [(after - before) % (1 << 64) for after, before in pairs]
    words = zlib.compress(struct.pack(f"<{len(column)}Q", *differences))
    return {"count": len(column), "zlib": base64.b64encode(words).decode()}


def assert_sound(manifest: RankManifest) -> None:
    """Assert what readers of a rank manifest rely on."""
    for file in manifest.files:
        table = file.items
        for item in range(len(table)):
            assert 0 <= table.fqn[item] < len(manifest.fqns)
            offsets, sizes = table.offsets[item], table.sizes[item]
            assert (offsets is None) == (sizes is None) == (table.dtype[item] == -1)
            if sizes is not None and offsets is not None:
                assert len(offsets) == len(sizes)
                dtype = DTYPES[manifest.dtypes[table.dtype[item]]]
                assert table.payload_bytes[item] == math.prod(sizes) * dtype.item_bytes
            start, end = table.item_start[item], table.item_start[item] + table.item_bytes[item]
            payload = table.payload_start[item]
            assert 0 <= start <= payload <= payload + table.payload_bytes[item] <= end
            assert end <= file.size_bytes
        assert file.block_starts()[-1] == len(table.block_crcs)


@settings(deadline=None, max_examples=400)
@given(changed(RANK_BODY))
def test_a_rank_manifest_with_other_columns_is_refused_or_sound(body: dict[str, Any]) -> None:
    """No other error, and nothing that leaves its file or its vocabularies."""
    try:
        found = RankManifest.from_body(body, where="here")
    except (FormatError, UnsafeContentError):
        return
    assert_sound(found)
    again = RankManifest.from_body(found.to_body(), where="here")
    assert again.to_body() == found.to_body()


@settings(deadline=None, max_examples=400)
@given(changed(BODY))
def test_a_manifest_with_other_columns_is_refused_or_sound(body: dict[str, Any]) -> None:
    """Each element of each tensor is in one chunk of a rank of this world, or it is refused."""
    try:
        found = Manifest.from_body(body, where="here")
    except (FormatError, UnsafeContentError):
        return
    for tensor in found.tensors.values():
        boxes = [box for box, _ in tensor.boxes()]
        assert all(0 <= rank < 2 for _, rank in tensor.boxes())
        for box in boxes:
            assert all(
                0 <= start <= start + size <= limit
                for start, size, limit in zip(box.offsets, box.sizes, tensor.shape, strict=True)
            )
        assert sum(box.volume for box in boxes) == math.prod(tensor.shape)
        assert not any(a.intersect(b) for i, a in enumerate(boxes) for b in boxes[:i])
    again = Manifest.from_body(found.to_body(), where="here")
    assert again.to_body() == found.to_body()


def test_the_documents_are_read_as_they_are() -> None:
    """What is changed above is sound before."""
    assert_sound(RankManifest.from_body(RANK_BODY, where="here"))
    manifest = Manifest.from_body(BODY, where="here")
    assert manifest.save_id == SAVE_ID
    assert manifest.tensors["list"].chunks is not None
