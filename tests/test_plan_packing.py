"""Plans travel in columns, and what arrives is what torch would have sent."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ckpt_storage import CheckpointStorageReader, CheckpointStorageWriter, load, save
from ckpt_storage.planpack import packable
from ckpt_storage.testing.ranks import RankPool

sizes = st.lists(st.integers(0, 1 << 40), max_size=3).map(torch.Size)
hints = st.none() | st.integers(0, 5)
names = st.text(max_size=4)
indices = st.builds(MetadataIndex, names, st.none() | sizes, hints)
properties = st.builds(
    TensorProperties,
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.strided, torch.sparse_coo]),
    st.booleans(),
    st.sampled_from([torch.contiguous_format, torch.channels_last, torch.preserve_format]),
    st.booleans(),
)
writes = st.builds(
    WriteItem,
    indices,
    st.sampled_from(list(WriteItemType)),
    st.none() | st.builds(BytesIOWriteData, st.integers(0, 9)),
    st.none()
    | st.builds(TensorWriteData, st.builds(ChunkStorageMetadata, sizes, sizes), properties, sizes),
)
reads = st.builds(
    ReadItem, st.sampled_from(list(LoadItemType)), indices, sizes, indices, sizes, sizes
)


def elsewhere(plan: Any) -> Any:
    """Return the plan as another process unpickles it."""
    data = pickle.dumps(packable(plan))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ckpt_storage.planpack._NONCE", "that of another process")
        return pickle.loads(data)


def parts(item: Any) -> list[object]:
    """Return everything an item is made of, with its type; `==` leaves hints and types out."""
    if dataclasses.is_dataclass(item):
        held = [getattr(item, field.name) for field in dataclasses.fields(item)]
        return [type(item), *(part for value in held for part in parts(value))]
    return [type(item), item]


def write(fqn: str, offset: int = 0) -> WriteItem:
    """Return an item as torch's planner makes it."""
    at, size = torch.Size([offset]), torch.Size([4])
    data = TensorWriteData(
        ChunkStorageMetadata(at, size), TensorProperties(torch.float32), torch.Size([8])
    )
    return WriteItem(MetadataIndex(fqn, at, 1), WriteItemType.SHARD, None, data)


def read(fqn: str) -> ReadItem:
    """Return an item as torch's planner makes it."""
    index, zero = MetadataIndex(fqn, torch.Size([0]), 0), torch.Size([0])
    return ReadItem(LoadItemType.TENSOR, index, zero, index, zero, torch.Size([4]))


@given(st.lists(writes, max_size=5), st.lists(reads, max_size=5))
def test_equal_items_arrive(held: list[WriteItem], wanted: list[ReadItem]) -> None:
    """With hints, and of the same types down to the sizes, in a plain list."""
    for plan in (SavePlan(held, "ours", {"a": ("a",)}), LoadPlan(wanted, "ours", 3)):
        found = elsewhere(plan)
        assert found == plan
        assert type(found.items) is list
        assert list(map(parts, found.items)) == list(map(parts, plan.items))


def test_items_share_nothing_that_can_be_changed() -> None:
    """A planner that writes into one leaves the others as they are."""
    first, second = elsewhere(SavePlan([write("a"), write("b")])).items
    first.tensor_data.properties.dtype = torch.int8
    first.tensor_data.chunk.sizes = torch.Size([1])
    assert second == write("b")


def test_thousands_of_items_are_few_bytes() -> None:
    """What differs is a name and a number."""
    items = [write(f"{n:04}", n % 3) for n in range(5000)]
    assert len(pickle.dumps(packable(SavePlan(items)))) < 16 * 5000
    targets = [read(f"{n:04}") for n in range(5000)]
    assert len(pickle.dumps(packable(LoadPlan(targets)))) < 16 * 5000


class Tagged(WriteItem):
    """An item of a planner's own."""


class Place(tuple[int, ...]):
    """Offsets of a planner's own."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Labelled(ReadItem):
    """A read with one thing more."""

    label: str = ""


def labelled(fqn: str) -> Labelled:
    """Return one that torch's class has no room for."""
    fields = {field.name: getattr(read(fqn), field.name) for field in dataclasses.fields(ReadItem)}
    return Labelled(**fields, label=fqn)


OTHERS: dict[str, Sequence[Any]] = {
    "a subclass": [write("a"), Tagged(*(getattr(write("b"), n) for n in vars(write("b"))))],
    "a subclass first": [Tagged(MetadataIndex("b"), WriteItemType.BYTE_IO), write("a")],
    "sizes that are none": [
        dataclasses.replace(
            write("a"),
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(Place([0]), Place([4])),  # type: ignore[arg-type]
                TensorProperties(torch.float32),
                torch.Size([4]),
            ),
        )
    ],
    "a read with more": [read("a"), labelled("b")],
    "a mixture": [write("a"), read("b")],
    "no items at all": ["whatever", 3],
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_torch_s_own_travels_as_ever(name: str) -> None:
    """Nothing is lost of what a planner puts there."""
    found = elsewhere(SavePlan(list(OTHERS[name]))).items
    assert list(map(parts, found)) == list(map(parts, OTHERS[name]))


def test_items_in_no_list_are_left_alone() -> None:
    """A plan may hold them otherwise."""
    plan = SavePlan((write("a"),))  # type: ignore[arg-type]
    assert packable(plan) is plan


def test_the_sender_finds_its_own_items_again() -> None:
    """As without collectives, where torch hands on the plan itself; a copy has others."""
    plan = packable(SavePlan([write("a"), write("b")]))
    found = pickle.loads(pickle.dumps(plan)).items
    assert type(found) is list
    assert all(a is b for a, b in zip(found, plan.items, strict=True))
    copied = copy.deepcopy(plan).items
    assert copied == found
    assert copied[0].tensor_data is not None
    assert copied[0].tensor_data.properties is not found[0].tensor_data.properties
    data = pickle.dumps(plan)
    del plan, found
    assert pickle.loads(data).items == [write("a"), write("b")]


class Meddling(dcp.DefaultSavePlanner):
    """Changes items in place where all plans meet, and notes what they were."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Ask one tensor of each rank to need a gradient; no other may show it."""
        assert all(type(plan.items) is list for plan in all_plans)
        for plan in all_plans:
            for item in plan.items:
                if item.index.fqn.startswith("odd"):
                    assert item.tensor_data is not None
                    item.tensor_data.properties.requires_grad = True
        return super().create_global_plan(all_plans)


def save_meddling(rank: int, path: str) -> bool:
    """Save and load on two ranks by torch's functions and by ours; return whether all is equal."""
    state = {f"{kind}{rank}.{n}": torch.full((3,), n) for kind in ("odd", "even") for n in range(3)}
    dcp.save(state, storage_writer=CheckpointStorageWriter(f"{path}/dcp"), planner=Meddling())
    save(state, f"{path}/ours", planner=Meddling())
    equal = True
    for name in ("dcp", "ours"):
        reader = CheckpointStorageReader(f"{path}/{name}")
        for call in (
            lambda target, r=reader: dcp.load(target, storage_reader=r),
            lambda target, n=name: load(target, f"{path}/{n}", planner=dcp.DefaultLoadPlanner()),
            lambda target, n=name: load(target, f"{path}/{n}"),
            lambda target, n=name: dcp.load(
                target, storage_reader=dcp.FileSystemReader(f"{path}/{n}")
            ),
        ):
            target = {fqn: torch.zeros_like(value) for fqn, value in state.items()}
            call(target)
            equal &= all(torch.equal(target[fqn], value) for fqn, value in state.items())
    return equal


def test_planners_see_plans_as_torch_gives_them(ranks: RankPool, tmp_path: Path) -> None:
    """One that changes an item in place changes no other, whoever reads what was saved."""
    assert ranks.run(save_meddling, str(tmp_path), world_size=2) == [True, True]
    for name in ("dcp", "ours"):
        metadata = dcp.FileSystemReader(tmp_path / name).read_metadata()
        needs = {
            fqn: entry.properties.requires_grad  # type: ignore[union-attr]
            for fqn, entry in metadata.state_dict_metadata.items()
        }
        assert len(needs) == 12
        assert needs == {fqn: fqn.startswith("odd") for fqn in needs}


def load_seen(rank: int, path: str) -> list[int]:
    """Load on two ranks and return how many items the coordinator was told of, by plan."""
    seen: list[int] = []
    decide = CheckpointStorageReader.prepare_global_plan

    def noted(reader: CheckpointStorageReader, plans: list[LoadPlan]) -> list[LoadPlan]:
        seen.extend(len(plan.items) for plan in plans)
        return decide(reader, plans)

    state = {f"w{rank}": torch.arange(5)}
    save(state, path)
    target = {f"w{rank}": torch.zeros(5, dtype=torch.int64)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CheckpointStorageReader, "prepare_global_plan", noted)
        load(target, path)
    assert torch.equal(target[f"w{rank}"], state[f"w{rank}"])
    return seen


def test_plans_stay_at_home_where_nobody_needs_them(ranks: RankPool, tmp_path: Path) -> None:
    """A load from a local disk by our planner sends no item to the coordinator."""
    assert ranks.run(load_seen, str(tmp_path / "run"), world_size=2) == [[0, 0], []]
