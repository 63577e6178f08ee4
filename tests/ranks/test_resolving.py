"""What torch's planners answer is answered without them, and is the same."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ckpt_storage.loads.resolving import data_resolver, target_resolver
from ckpt_storage.testing.ranks import RankPool


def spelt(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what makes two tensors the same memory, read the same way."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), type(tensor))


def plain_state() -> dict[str, Any]:
    """Return values of all kinds that need no process group."""
    return {
        "plain": torch.arange(12.0).reshape(3, 4),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "buffer": torch.nn.Buffer(torch.ones(2)),
    }


def planner_of(state: dict[str, Any]) -> dcp.DefaultSavePlanner:
    """Return torch's planner for a state."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state)
    return planner


@pytest.mark.parametrize("name", plain_state())
def test_plain_tensors_are_given_as_torch_gives_them(name: str) -> None:
    """Memory, shape, strides."""
    state = plain_state()
    planner = planner_of(state)
    (item,) = _create_write_items(name, state[name])
    given = data_resolver(planner)(item)
    expected = planner.resolve_data(item)
    assert isinstance(expected, torch.Tensor)
    assert spelt(given) == spelt(expected)


def test_values_are_pickled_by_the_planner() -> None:
    """What is no tensor is a blob."""
    planner = planner_of({"step": 5})
    (item,) = _create_write_items("step", 5)
    given, expected = data_resolver(planner)(item), planner.resolve_data(item)
    assert isinstance(expected, io.BytesIO)
    assert given.getvalue() == expected.getvalue()


def of_ranks(rank: int, kinds: list[Placement]) -> list[object]:
    """Return, for a sharded tensor, whether ours is what torch's is, for a save and a load."""
    mesh = init_device_mesh("cpu", (2,))
    found: list[object] = []
    for placement in kinds:
        local = torch.arange(6.0).reshape(2, 3) + rank
        for value in (
            DTensor.from_local(local, mesh, [placement], run_check=False),
            torch.nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False)),
        ):
            state = {"w": value}
            planner = planner_of(state)
            if isinstance(placement, Partial):
                (item,) = _create_write_items("w", torch.zeros(2, 3))
                with pytest.raises(ValueError, match="partial placements"):
                    data_resolver(planner)(item)
                found.append(True)
                continue
            (item,) = _create_write_items("w", value)
            expected = planner.resolve_data(item)
            assert isinstance(expected, torch.Tensor)
            found.append(spelt(data_resolver(planner)(item)) == spelt(expected))
            loading = dcp.DefaultLoadPlanner()
            loading.state_dict = state
            for at, lengths in (((0, 0), (2, 3)), ((1, 1), (1, 2))):
                wanted = read("w", item.index.offset, at, lengths)
                ours, theirs = target_resolver(loading)(wanted), loading.resolve_tensor(wanted)
                found.append(spelt(ours) == spelt(theirs))
    return found


def read(
    fqn: str, chunk: torch.Size | None, at: tuple[int, ...], lengths: tuple[int, ...]
) -> ReadItem:
    """Return a read into a part of a target."""
    index = MetadataIndex(fqn, chunk)
    start, size = torch.Size(at), torch.Size(lengths)
    return ReadItem(LoadItemType.TENSOR, index, start, index, start, size)


def test_sharded_tensors_are_given_as_torch_gives_them(ranks: RankPool) -> None:
    """Shards and replicas, parameters and plain, whole and in part; partial ones are refused."""
    kinds = [Shard(0), Shard(1), Replicate(), Partial()]
    for found in ranks.run(of_ranks, kinds, world_size=2):
        assert len(found) == 20
        assert all(found)


@pytest.mark.parametrize("name", plain_state())
def test_plain_targets_are_given_as_torch_gives_them(name: str) -> None:
    """Whole, and a part of each that has more than one element."""
    state = plain_state()
    loading = dcp.DefaultLoadPlanner()
    loading.state_dict = state
    whole = tuple(state[name].shape)
    zeros = torch.Size((0,) * len(whole))
    for chunk in (zeros, None):
        parts = [(tuple(zeros), whole)]
        if state[name].numel() > 1:
            parts.append((tuple(zeros), (1,) * len(whole)))
        for at, lengths in parts:
            wanted = read(name, chunk, at, lengths)
            ours, theirs = target_resolver(loading)(wanted), loading.resolve_tensor(wanted)
            assert spelt(ours) == spelt(theirs)


@pytest.mark.parametrize("offset", [(1, 0), (0,), (0, 0, 0)])
def test_a_place_that_a_tensor_has_not_is_refused_as_torch_does(offset: tuple[int, ...]) -> None:
    """With the same error."""
    state = plain_state()
    planner = planner_of(state)
    (item,) = _create_write_items("plain", state["plain"])
    wrong = WriteItem(MetadataIndex("plain", torch.Size(offset)), item.type, None, item.tensor_data)
    with pytest.raises(ValueError, match="can't find by offset"):
        data_resolver(planner)(wrong)


class Halving(dcp.DefaultSavePlanner):
    """Gives other data than the state's."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's
        """Return half of it."""
        return super().transform_object(write_item, object) / 2


class Elsewhere(dcp.DefaultLoadPlanner):
    """Loads into other memory than the state's."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return a tensor of its own."""
        return super().lookup_tensor(index).clone()


class Kind(torch.Tensor):
    """A kind of tensor that may answer for itself."""


def test_planners_that_change_one_step_are_asked() -> None:
    """Whether a class overrides it or an object does."""
    state = {"w": torch.full((2,), 4.0)}
    (item,) = _create_write_items("w", state["w"])
    halving = Halving()
    halving.set_up_planner(state)
    assert torch.equal(data_resolver(halving)(item), torch.full((2,), 2.0))
    patched = planner_of(state)
    patched.lookup_object = lambda _: torch.zeros(2)  # type: ignore[method-assign,assignment]
    assert torch.equal(data_resolver(patched)(item), torch.zeros(2))
    loading = Elsewhere()
    loading.state_dict = state
    target = target_resolver(loading)(read("w", torch.Size([0]), (0,), (2,)))
    assert target.data_ptr() != state["w"].data_ptr()
