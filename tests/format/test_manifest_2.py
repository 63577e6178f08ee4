"""Manifests: what is written is read, and what cannot be is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
from dcp_cases import failures_of
from hypothesis import given, settings
from hypothesis import strategies as st
from report_tools import SAVE_ID, Written, manifest_of, reports_of
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_storage import (
    FormatError,
    IntegrityError,
    InvalidInputError,
    list_checkpoints,
)
from ckpt_storage.commit.assembly import assemble
from ckpt_storage.commit.report import Planned
from ckpt_storage.format.documents import pack_names, seal, unseal
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.rank_manifest import RankManifest

NAMES = st.text('abc.ü\n"', min_size=1, max_size=30)
CHUNKS = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 9)), max_size=3)


def written(name: str, chunk: list[tuple[int, int]] | None) -> Written:
    """Return a chunk, or a blob."""
    if chunk is None:
        return Written(name)
    return Written(name, tuple(a for a, _ in chunk), tuple(b for _, b in chunk))


@settings(deadline=None)
@given(st.lists(st.builds(written, NAMES, st.none() | CHUNKS), max_size=100))
def test_a_rank_manifest_comes_back(items: list[Written]) -> None:
    """Through the sealed document, with every column, whatever was written."""
    manifest = manifest_of(1, 3, items)
    document = seal(manifest.to_body())
    found = RankManifest.from_body(unseal(document, path="here"), where="here")
    assert found.fqns == list(manifest.fqns)
    assert found.dtypes == list(manifest.dtypes)
    assert (found.rank, found.world_size, found.host) == (1, 3, "here")
    for a, b in zip(found.files, manifest.files, strict=True):
        assert a.ref() == b.ref()
        for column in b.items.__slots__:
            assert list(getattr(a.items, column)) == list(getattr(b.items, column)), column


@settings(deadline=None)
@given(
    st.dictionaries(NAMES, st.tuples(st.integers(1, 70), st.booleans()), max_size=90),
    st.integers(1, 80),
)
def test_a_manifest_comes_back(tensors: dict[str, tuple[int, bool]], world_size: int) -> None:
    """Grids, regular and not, single owners, files, ranks and paths in the state."""
    ranks: list[list[Written]] = [[] for _ in range(world_size)]
    shapes: dict[str, tuple[int, ...]] = {}
    for at, (name, (rows, is_cut)) in enumerate(tensors.items()):
        if is_cut:
            shapes[name] = (rows * world_size + at % 2,)
            for rank in range(world_size):
                last = at % 2 if rank == world_size - 1 else 0
                ranks[rank].append(Written(name, (rank * rows,), (rows + last,)))
        else:
            shapes[name] = (rows, 2)
            ranks[at % world_size].append(Written(name, (0, 0), (rows, 2)))
    planner_data: dict[str, tuple[str | int, ...]] = {name: (name, 3, "x") for name in tensors}
    plan = Planned(tensors=shapes, blobs=frozenset(), planner_data=planner_data)
    manifest = assemble(reports_of(ranks), plan)
    document = seal(manifest.to_body())
    found = Manifest.from_body(unseal(document, path="here"), where="here")
    assert found.planner_data == planner_data
    assert (found.save_id, found.world_size) == (SAVE_ID, world_size)
    assert list(found.files) == list(manifest.files)
    assert list(found.tensors) == list(shapes)
    for name, shape in shapes.items():
        record = found.tensors[name]
        assert (record.dtype, record.shape) == ("float32", shape)
        held = {
            (item.offsets, item.sizes, rank)
            for rank, items in enumerate(ranks)
            for item in items
            if item.fqn == name
        }
        assert {(box.offsets, box.sizes, rank) for box, rank in record.boxes()} == held
    paths = [f"saves/{SAVE_ID}/ranks/rank-{rank:05d}.json" for rank in range(world_size)]
    assert [ref.path for ref in found.ranks] == paths


def packed(*entries: str) -> dict[str, Any]:
    """Return names that are long enough to be packed, the given ones first."""
    value = pack_names([*entries, *(f'["{"x" * 100}{n}",[]]' for n in range(30))])
    assert isinstance(value, dict)
    return value


def simple_body() -> dict[str, Any]:
    """Return the body of a manifest of one tensor."""
    plan = Planned(tensors={"w": (4,)}, blobs=frozenset(), planner_data=None)
    return assemble(reports_of([[Written("w", (0,), (4,))]]), plan).to_body()


@pytest.mark.parametrize("count", [1, 100])
def test_planner_data_comes_back_whatever_its_keys_are(count: int) -> None:
    """Quotes, line breaks, other scripts, numbers, and no key at all."""
    keys: list[str | int] = ['"', "\\", "\n\t\x00\x7f", "ü\u2028😀", "", 0, -3, 1 << 70, "]],[["]
    data = {f"{n} {key}": (key, *keys[: n % 9]) for n in range(count) for key in keys} | {"": ()}
    manifest = Manifest.from_body(simple_body(), where="here")
    body = dataclasses.replace(manifest, planner_data=data).to_body()
    document = unseal(seal(body), path="here")
    assert Manifest.from_body(document, where="here").planner_data == data


def test_a_payload_whose_length_wraps_around_is_refused() -> None:
    """Elements times bytes an element are more than 64 bits hold."""
    for sizes in ([1 << 62], [1 << 63 - 1, 2], [(1 << 62) + 1]):
        body = manifest_of(0, 1, [Written("w", (0,), (1,))]).to_body()
        body["boxes"] = {"ndim": [len(sizes)], "offsets": [0] * len(sizes), "sizes": sizes}
        for payload_bytes in (4, 0):
            body["files"][0]["items"]["payload_bytes"] = [payload_bytes]
            with pytest.raises(FormatError):
                RankManifest.from_body(body, where="here")


def test_a_name_that_is_no_text_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Before anything is committed, in few names and in many."""
    for count in (1, 300):
        state = {f"tensor number {n}": torch.ones(1) for n in range(count)}
        with pytest.raises(CheckpointException) as raised:
            dcp_cases.save(state | {"half \ud800": torch.ones(2)}, tmp_path / str(count))
        (failure,) = failures_of(raised.value).values()
        assert isinstance(failure, InvalidInputError)
        assert "half \\ud800" in str(failure)
        assert failure.next_step
        assert not list_checkpoints(tmp_path)


def test_what_no_reader_takes_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator reads the manifest before it takes the slot."""
    to_body = Manifest.to_body
    monkeypatch.setattr(Manifest, "to_body", lambda self: to_body(self) | {"dtypes": ["float33"]})
    with pytest.raises(CheckpointException) as raised:
        dcp_cases.save({"w": torch.ones(2)}, tmp_path / "run")
    (failure,) = failures_of(raised.value).values()
    assert isinstance(failure, IntegrityError)
    assert "No reader would take" in str(failure)
    assert not list_checkpoints(tmp_path)
