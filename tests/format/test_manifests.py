"""Documents of a save: what is written is read, and what cannot be is refused."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from report_tools import SAVE_ID, Written, manifest_of, reports_of

from ckpt_storage import FormatError, IntegrityError, InvalidInputError, list_checkpoints
from ckpt_storage.commit.assembly import assemble
from ckpt_storage.commit.report import Planned
from ckpt_storage.errors import UnsafeContentError
from ckpt_storage.format.commit_record import HeadRef, SlotRecord
from ckpt_storage.format.documents import FileRef, seal, unseal
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.rank_manifest import COLUMNS, RankManifest
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.model import CommittedSource
from ckpt_storage.store import Location, open_store

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

NAMES = st.text('abc.ü\n"', min_size=1, max_size=30)
CHUNKS = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 9)), max_size=3)
CUTS = st.tuples(st.integers(1, 70), st.booleans())
NUMBERS = st.one_of(
    st.integers(-2, 7),
    st.sampled_from([64, 65, 127, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, -(1 << 63), 1 << 63]),
)


def columns_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, list) and all(type(item) is int for item in value):
        yield path
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from columns_of(item, (*path, key))


def at(body: Any, path: tuple[Any, ...]) -> Any:
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
    pairs = zip(column, [0, *column], strict=False)
    differences = [(after - before) % (1 << 64) for after, before in pairs]
    words = zlib.compress(struct.pack(f"<{len(column)}Q", *differences))
    return {"count": len(column), "zlib": base64.b64encode(words).decode()}


def assert_sound(manifest: RankManifest) -> None:
    for file in manifest.files:
        before = 0
        for item in range(len(file.fqn)):
            assert 0 <= file.fqn[item] < len(manifest.fqns)
            box = manifest.box_of(file, item)
            assert (box is None) == (file.box[item] == -1) == (file.dtype[item] == -1)
            if box is not None:
                assert len(box.offsets) == len(box.sizes)
                dtype = DTYPES[manifest.dtypes[file.dtype[item]]]
                assert file.payload_bytes[item] == math.prod(box.sizes) * dtype.item_bytes
            start, payload = file.item_start[item], file.payload_start[item]
            assert before <= start <= payload
            before = start + file.item_bytes[item]
            assert payload + file.payload_bytes[item] <= before <= file.size_bytes
        assert file.block_starts()[-1] == len(file.block_crcs)


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


def test_payloads_begin_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    """So that a mapped file gives arrays that are aligned for every type."""
    dcp_cases.save_alone({"a": torch.ones(3), "b": torch.ones(5), "c": "text"}, tmp_path)
    (path,) = tmp_path.rglob("rank-00000.json")
    items = json.loads(path.read_bytes())["body"]["files"][0]["items"]
    assert len(items["item_start"]) == 3
    assert [start % 64 for start in items["item_start"] + items["payload_start"]] == [0] * 6


def test_items_that_overlap_are_refused() -> None:
    """An item that reaches into the next one, in itself as sound as that."""
    body = copy.deepcopy(RANK_BODY)
    body["files"][0]["items"]["item_bytes"][0] += 64
    with pytest.raises(FormatError, match="item 1 of"):
        RankManifest.from_body(body, where="here")


def test_an_item_that_ends_behind_its_file_is_refused() -> None:
    """A file has at least the bytes of its items."""
    body = copy.deepcopy(RANK_BODY)
    items = body["files"][0]["items"]
    body["files"][0]["bytes"] = items["item_start"][-1] + items["item_bytes"][-1] - 1
    with pytest.raises(FormatError, match="invalid item"):
        RankManifest.from_body(body, where="here")


@settings(deadline=None, max_examples=400)
@given(changed(BODY))
def test_a_manifest_with_other_columns_is_refused_or_sound(body: dict[str, Any]) -> None:
    """Each element of each tensor is in one chunk of a rank of this world, or it is refused."""
    try:
        found = Manifest.from_body(body, where="here")
    except (FormatError, UnsafeContentError):
        return
    for tensor in found.tensors.values():
        boxes = list(tensor.boxes)
        assert len(tensor.owners) == len(boxes)
        assert all(0 <= rank < 2 for rank in tensor.owners)
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
    assert isinstance(manifest.tensors["list"].boxes, list)


@settings(deadline=None)
@given(st.lists(st.tuples(NAMES, st.none() | CHUNKS), max_size=100))
def test_a_rank_manifest_comes_back(drawn: list[tuple[str, list[tuple[int, int]] | None]]) -> None:
    """Through the sealed document, with every column, whatever was written."""
    items = [
        Written(name, *([()] * 2 if chunk == [] else zip(*chunk or (), strict=True)))
        for name, chunk in drawn
    ]
    manifest = manifest_of(1, 3, items)
    found = RankManifest.from_body(unseal(seal(manifest.to_body()), path="here"), where="here")
    assert (found.fqns, found.dtypes) == (manifest.fqns, manifest.dtypes)
    assert found.boxes == manifest.boxes
    assert (found.rank, found.world_size, found.host) == (1, 3, "here")
    for a, b in zip(found.files, manifest.files, strict=True):
        assert a.ref() == b.ref()
        for column in (*COLUMNS, "block_crcs", "frame_crcs"):
            assert list(getattr(a, column)) == list(getattr(b, column)), column


@settings(deadline=None)
@given(st.dictionaries(NAMES, CUTS, max_size=90), st.integers(1, 80))
def test_a_manifest_comes_back(drawn: dict[str, tuple[int, bool]], world_size: int) -> None:
    """Grids, regular and not, single owners, files, ranks and paths in the state."""
    ranks: list[list[Written]] = [[] for _ in range(world_size)]
    shapes: dict[str, tuple[int, ...]] = {}
    held: dict[str, set[tuple[tuple[int, ...], tuple[int, ...], int]]] = {}
    for at, (name, (rows, is_cut)) in enumerate(drawn.items()):
        more, last = at % 2, world_size - 1
        shapes[name] = (rows * world_size + more,) if is_cut else (rows, 2)
        held[name] = {((0, 0), (rows, 2), at % world_size)}
        if is_cut:
            held[name] = {((n * rows,), (rows + more * (n == last),), n) for n in range(world_size)}
        for offsets, sizes, rank in held[name]:
            ranks[rank].append(Written(name, offsets, sizes))
    planner_data: dict[str, tuple[str | int, ...]] = {name: (name, 3, "x") for name in drawn}
    plan = Planned(tensors=shapes, blobs=frozenset(), planner_data=planner_data)
    manifest = assemble(reports_of(ranks), plan)
    found = Manifest.from_body(unseal(seal(manifest.to_body()), path="here"), where="here")
    assert (found.planner_data, list(found.tensors)) == (planner_data, list(shapes))
    assert (found.save_id, found.world_size) == (SAVE_ID, world_size)
    assert (found.files, found.ranks) == (manifest.files, manifest.ranks)
    paths = [f"saves/{SAVE_ID}/ranks/rank-{rank:05d}.json" for rank in range(world_size)]
    assert [ref.path for ref in found.ranks] == paths
    for name, tensor in found.tensors.items():
        assert (tensor.dtype, tensor.shape) == ("float32", shapes[name])
        pairs = zip(tensor.boxes, tensor.owners, strict=True)
        assert {(*box, rank) for box, rank in pairs} == held[name]


@pytest.mark.parametrize("count", [1, 100])
def test_planner_data_comes_back_whatever_its_keys_are(count: int) -> None:
    """Quotes, line breaks, other scripts, numbers, and no key at all."""
    keys: list[str | int] = ['"', "\\", "\n\t\x00\x7f", "ü\u2028😀", "", 0, -3, 1 << 70, "]],[["]
    data = {f"{n} {key}": (key, *keys[: n % 9]) for n in range(count) for key in keys} | {"": ()}
    manifest = Manifest.from_body(BODY, where="here")
    body = dataclasses.replace(manifest, planner_data=data).to_body()
    document = unseal(seal(body), path="here")
    assert Manifest.from_body(document, where="here").planner_data == data


@pytest.mark.parametrize("entry", ["", "5", '{"a": 1}', "[null]", "[[]]", '["a"', "[true]"])
def test_int_keys_that_are_no_paths_are_refused(entry: str) -> None:
    """An entry of `int_keys` is the JSON text of a list of texts and integers."""
    with pytest.raises(FormatError, match="int_keys that is no path"):
        Manifest.from_body({**BODY, "int_keys": [entry]}, where="here")


def test_a_payload_whose_length_wraps_around_is_refused() -> None:
    """Elements times bytes an element are more than 64 bits hold."""
    for sizes in ([1 << 62], [1 << 63 - 1, 2], [(1 << 62) + 1]):
        body = manifest_of(0, 1, [Written("w", (0,), (1,))]).to_body()
        body["boxes"] = {"ndim": [len(sizes)], "offsets": [0] * len(sizes), "sizes": sizes}
        for payload_bytes in (4, 0):
            body["files"][0]["items"]["payload_bytes"] = [payload_bytes]
            with pytest.raises(FormatError):
                RankManifest.from_body(body, where="here")


@pytest.mark.parametrize("count", [1, 300])
def test_a_name_that_is_no_text_is_refused_with_what_to_do(tmp_path: Path, count: int) -> None:
    """Before anything is committed, in few names and in many."""
    state = {f"tensor number {n}": torch.ones(1) for n in range(count)}
    with pytest.raises(InvalidInputError, match=r"half \\ud800") as caught:
        dcp_cases.save_alone(state | {"half \ud800": torch.ones(2)}, tmp_path / "run")
    assert caught.value.next_step
    assert not list_checkpoints(tmp_path)


def test_what_no_reader_takes_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator reads the manifest before it takes the slot."""
    to_body = Manifest.to_body
    monkeypatch.setattr(Manifest, "to_body", lambda self: to_body(self) | {"dtypes": ["float33"]})
    with pytest.raises(IntegrityError, match="Every reader would refuse"):
        dcp_cases.save_alone({"w": torch.ones(2)}, tmp_path / "run")
    assert not list_checkpoints(tmp_path)


RECORD = SlotRecord(
    type="commit",
    slot=1,
    write_id="0" * 32,
    head=HeadRef(slot=1, save_id=SAVE_ID),
    save_id=SAVE_ID,
    manifest=FileRef(path=f"saves/{SAVE_ID}/manifest.json", size_bytes=1, crc32c=0),
    user={"step": 3},
)


@pytest.mark.parametrize("user", [None, [], "step", 3, True, [["step", 3]], 1.5])
def test_a_user_record_that_is_no_object_is_left_out(user: Any) -> None:
    """The checkpoint can be read whatever is there."""
    body = unseal(RECORD.encode(), path="here") | {"user": user}
    assert SlotRecord.decode(seal(body), slot=1).user == {}
    assert SlotRecord.decode(RECORD.encode(), slot=1) == RECORD


EMPTY = Written("w", (0, 0), (0, 4))
SOLID = Written("w", (0, 0), (4, 4))


@pytest.mark.parametrize(
    ("items", "start"),
    [
        ([SOLID, EMPTY], 64),
        ([EMPTY, SOLID], 64 + 64),
        ([EMPTY, EMPTY, SOLID, EMPTY], 3 * 64),
        ([EMPTY, SOLID, SOLID], 64 + 64),
    ],
)
def test_the_first_with_elements_counts(items: list[Written], start: int) -> None:
    """Whatever of it that is empty was written before."""
    plan = Planned(tensors={"w": (4, 4)}, blobs=frozenset(), planner_data=None)
    source = CommittedSource(
        store=open_store(Location.of("memory://rank-index")),
        record=RECORD,
        manifest=assemble(reports_of([[SOLID]]), plan),
        options=TransferOptions(thread_count=1, part_bytes=1 << 20),
    )
    source._ranks[0] = manifest_of(0, 1, items)  # noqa: SLF001  # as if it had been fetched
    (place,) = source.places([("w", (0, 0))])
    assert (place.start, place.size_bytes) == (start, 64)
