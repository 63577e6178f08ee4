"""A staged state equals what the trainer had at the call, whatever the trainer does afterwards."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dcp_cases import raw_bytes, same, seeded
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.testing._internal.two_tensor import TwoTensor

from ckpt_storage.background.hostbuffers import HostBuffers, Kind, Lease
from ckpt_storage.background.staging import stage
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.testing.ranks import RankPool

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  # the untyped kind is what users have

STEP = torch.float32.itemsize


def two(left: torch.Tensor, right: torch.Tensor) -> TwoTensor:
    """Return a wrapper around two tensors."""
    return TwoTensor(left, right)  # type: ignore[no-untyped-call]


class Named(torch.Tensor):
    """A subclass that owns its storage."""


class Counter:
    """An object that DCP asks for its state."""

    def __init__(self) -> None:
        self.weight = seeded(90, 4)

    def state_dict(self) -> dict[str, Any]:
        """Return a tensor that is the object's own."""
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; DCP asks that it exists."""


@pytest.fixture(params=["private", "shared"])
def lease(request: pytest.FixtureRequest) -> Iterator[Lease]:
    """A lease of either kind."""
    kind: Kind = request.param
    with HostBuffers(kind) as buffers, buffers.lease() as held:
        yield held


def shapes_of(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of a kind in every way that they can lie in memory."""
    image = seeded(seed + 8, 2, 3, 4, 5, dtype=dtype)
    return {
        "plain": seeded(seed, 7, 5, dtype=dtype),
        "scalar": seeded(seed + 1, dtype=dtype),
        "one": seeded(seed + 2, 1, dtype=dtype),
        "empty": seeded(seed + 3, 0, 4, dtype=dtype),
        "transposed": seeded(seed + 4, 6, 3, dtype=dtype).t(),
        "column": seeded(seed + 5, 50, 40, dtype=dtype)[:, 3],
        "stepped": seeded(seed + 6, 50, dtype=dtype)[1::7],
        "expanded": seeded(seed + 7, 3, 1, dtype=dtype).expand(3, 40),
        "expanded column": seeded(seed + 10, 50, 40, dtype=dtype)[:2, 3:4].expand(2, 3),
        "windows": seeded(seed + 9, 12, dtype=dtype).as_strided((4, 6), (2, 1)),
        "permuted": image.permute(0, 2, 3, 1),
        "inner": image[1:, :, 1:3],
    }


def spoil(value: object) -> None:
    """Overwrite every tensor of a state, and empty its containers."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
            raw.copy_(255 - raw)
    elif isinstance(value, dict | list):
        for item in list(value.values() if isinstance(value, dict) else value):
            spoil(item)
        value.clear()
    elif isinstance(value, tuple):
        for item in value:
            spoil(item)
    elif isinstance(value, set):
        value.clear()
    elif isinstance(value, np.ndarray):
        value.fill(7)


def tied(state: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Return the distances of tensors at the top level that share memory as stored."""
    ends = {
        key: (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for key, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and not tensor.is_conj() and 0 not in tensor.stride()
    }
    return {
        (left, right): ends[right][0] - ends[left][0]
        for left in ends
        for right in ends
        if left != right and ends[left][0] <= ends[right][0] < ends[left][1]
    }


def opened(value: Any) -> Any:
    """Return a state with pickled objects unpickled, as a worker sees them."""
    return pickle.loads(pickle.dumps(value))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_is_independent_of_the_original(lease: Lease, name: str) -> None:
    """Tensors of every kind and memory layout keep their values when the originals change."""
    state = shapes_of(1, getattr(torch, name))
    expected = {key: raw_bytes(tensor) for key, tensor in state.items()}
    staged = stage(state, lease).state
    for tensor in state.values():
        spoil(tensor)
    assert {key: raw_bytes(tensor) for key, tensor in staged.items()} == expected
    assert all(staged[key].shape == state[key].shape for key in state)
    assert all(staged[key].dtype == state[key].dtype for key in state)


def test_the_second_stage_reuses_memory_and_tells_new_values(lease: Lease) -> None:
    """Stage after stage gives the values of its moment, at the same addresses."""
    state: dict[str, Any] = {"a": shapes_of(1, torch.float32), "b": [seeded(50, 9), 1]}
    addresses = set()
    for step in range(3):
        spoil_in = [*state["a"].values(), state["b"][0]]
        for tensor in spoil_in:
            spoil(tensor)
        state["b"][1] = step
        expected = copy.deepcopy(state)
        staged = stage(state, lease)
        for tensor in spoil_in:
            spoil(tensor)
        assert same(staged.state, expected)
        for tensor in spoil_in:
            spoil(tensor)
        addresses.add(staged.state["a"]["plain"].data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda state: state.update(b=seeded(5, 3, 4).bfloat16()), id="dtype"),
        pytest.param(lambda state: state.update(b=seeded(5, 4, 3).t()), id="strides"),
        pytest.param(lambda state: state.update(b=seeded(5, 4, 4)), id="shape"),
        pytest.param(lambda state: state.update(a=seeded(5, 2_000_000)), id="growth"),
        pytest.param(lambda state: state.update(b=state["a"]), id="new tie"),
        pytest.param(lambda state: state.update(b=state["a"][1:]), id="new partial tie"),
        pytest.param(lambda state: state.update(b=nn.Parameter(state["b"])), id="parameter"),
        pytest.param(lambda state: state.update(c=state["c"].conj()), id="conjugated"),
        pytest.param(lambda state: state.update(view=state["base"][2:4].clone()), id="untied"),
        pytest.param(lambda state: state.update(view=state["base"][3:5]), id="tied elsewhere"),
        pytest.param(lambda state: state.update(wide=seeded(5, 3, 8)), id="no longer expanded"),
        pytest.param(
            lambda state: state.update(lazy=state["lazy"].conj()), id="expanded and conjugated"
        ),
        pytest.param(lambda state: state.pop("a"), id="removed"),
        pytest.param(lambda state: state.update(d=seeded(6, 8)), id="added"),
        pytest.param(lambda state: state.update(b={"a": state.pop("a")}), id="moved"),
    ],
)
def test_a_changed_structure_is_noticed(
    lease: Lease, change: Callable[[dict[str, Any]], object]
) -> None:
    """A tensor of another kind, size or place, or another tie, is staged as it is now."""
    state = {
        "a": seeded(1, 3, 4),
        "b": seeded(2, 3, 4),
        "c": seeded(3, 4, dtype=torch.complex64),
        "base": seeded(4, 6),
        "wide": seeded(6, 3, 1).expand(3, 8),
        "lazy": seeded(7, 3, 1, dtype=torch.complex64).expand(3, 8),
    }
    state["view"] = state["base"][2:4]
    stage(state, lease)
    change(state)
    expected = copy.deepcopy(state)
    staged = stage(state, lease).state
    assert same(staged, expected)
    assert tied(staged) == tied(state)
    assert {key: type(value) for key, value in staged.items()} == {
        key: type(value) for key, value in state.items()
    }


def test_containers_and_objects_are_copied(lease: Lease) -> None:
    """Containers keep their types, tensors inside too; later changes do not show."""
    state: dict[str, Any] = {
        "step": 3,
        "none": None,
        "list": [1, [seeded(1, 3)], ("x", seeded(2, 3))],
        "ordered": OrderedDict(b=seeded(3, 2), a=1),
        "default": defaultdict(list, x=[1]),
        "pair": Pair(left=seeded(4, 2), right={1, 2}),
        "numpy": np.arange(5),
        "size": torch.Size([1, 2]),
        "7": {"deep": {"er": [{"x": b"bytes"}]}},
    }
    expected = copy.deepcopy(state)
    staged = opened(stage(state, lease).state)
    spoil(state)
    assert np.array_equal(staged.pop("numpy"), expected.pop("numpy"))
    assert same(staged, expected)
    assert [type(staged[key]) for key in expected] == [type(expected[key]) for key in expected]
    assert staged["default"].default_factory is list


def test_stateful_objects_are_asked_for_their_state(lease: Lease) -> None:
    """An object with state_dict at the top level is staged as what that returns."""
    counter = Counter()
    expected = counter.weight.clone()
    staged = stage({"counter": counter}, lease).state
    counter.weight.zero_()
    assert same(staged, {"counter": {"weight": expected}})


def test_gradients_and_parameters_are_kept(lease: Lease) -> None:
    """Parameters stay Parameters, and what requires gradients still does, without a graph."""
    leaf = seeded(1, 3).requires_grad_()
    state = {
        "parameter": nn.Parameter(seeded(2, 3)),
        "frozen": nn.Parameter(seeded(3, 3), requires_grad=False),
        "leaf": leaf,
        "grown": leaf * 2,
        "plain": seeded(4, 3),
        "subclass": seeded(5, 3).as_subclass(Named),
    }
    for _ in range(2):
        staged = stage(state, lease).state
        for key, tensor in state.items():
            assert staged[key].requires_grad is tensor.requires_grad, key
            assert isinstance(staged[key], nn.Parameter) is isinstance(tensor, nn.Parameter), key
            assert staged[key].grad_fn is None, key
            assert raw_bytes(staged[key]) == raw_bytes(tensor.as_subclass(torch.Tensor)), key


def test_tied_tensors_are_copied_once_and_stay_tied(lease: Lease) -> None:
    """Tensors over one storage lie over one storage again, at the same distances and strides."""
    base = seeded(1, 64, 8)
    parameter = nn.Parameter(base)
    state = {
        "whole": base,
        "again": base,
        "parameter": parameter,
        "rows": base[3:9],
        "turned": base.t(),
        "column": base[:, 2],
        "bytes": base.view(torch.uint8)[:2],
        "other": seeded(2, 4),
    }
    for _ in range(2):
        staged = stage(state, lease)
        assert staged.tensor_bytes == base.nbytes + 4 * STEP
        storages = {
            key: tensor.untyped_storage().data_ptr() for key, tensor in staged.state.items()
        }
        assert len({storages[key] for key in state if key != "other"}) == 1
        for key, tensor in state.items():
            found = staged.state[key]
            assert found.storage_offset() == tensor.storage_offset(), key
            assert found.stride() == tensor.stride(), key
        staged.state["whole"].zero_()
        assert not staged.state["parameter"].detach().any()
        assert base.any()


def test_memory_seen_through_two_storages_is_staged_by_value(lease: Lease) -> None:
    """Tensors over parts of one array are right though no storage holds all of their memory."""
    array = np.arange(100, dtype=np.float32)
    whole = torch.from_numpy(array)
    one_storage = {"low": whole[:60], "high": whole[40:]}
    two_storages = {"low": torch.from_numpy(array[:60]), "high": torch.from_numpy(array[40:])}
    for state in (one_storage, two_storages, two_storages, one_storage):
        array += 1
        staged = stage(state, lease).state
        assert same(staged, state)
        expected = copy.deepcopy(one_storage)
        array += 1
        assert same(staged, expected)


def test_a_small_view_of_a_large_storage_costs_its_own_bytes(lease: Lease) -> None:
    """Rows, single columns, and pairs of columns of a large matrix cost what they hold."""
    matrix = seeded(1, 1000, 500)
    for _ in range(2):
        assert stage({"rows": matrix[10:12]}, lease).tensor_bytes == 1000 * STEP
        assert stage({"column": matrix[:, 3]}, lease).tensor_bytes == 1000 * STEP
        two = {"a": matrix[:, 3], "b": matrix[:, 9], "a again": matrix[:, 3]}
        staged = stage(two, lease)
        assert staged.tensor_bytes == 2000 * STEP
        assert same(staged.state, two)
        far = stage({"first": matrix[0], "last": matrix[-1]}, lease)
        assert far.tensor_bytes == 1000 * STEP
        # A consumer that pickles a tensor pickles its storage.
        assert far.state["first"].untyped_storage().nbytes() == 500 * STEP


def test_wrappers_are_taken_apart_and_put_together(lease: Lease) -> None:
    """Traceable subclasses, one inside the other too, and shard wrappers keep type and values."""
    inner = two(seeded(1, 4), seeded(2, 4))
    state: dict[str, Any] = {
        "two": inner,
        "nested": two(two(seeded(3, 4), seeded(4, 4)), inner),
        "parameter": nn.Parameter(two(seeded(5, 4), seeded(6, 4))),
        "shards": LocalShardsWrapper([seeded(7, 2, 3), seeded(8, 2, 3)], [(0, 0), (2, 0)]),
    }
    parts: dict[str, torch.Tensor] = {
        "two.b": inner.b,
        "nested.a.b": state["nested"].a.b,
        "parameter.a": state["parameter"].a,
        "shards.1": state["shards"].local_shards()[1],
    }
    expected = {key: part.clone() for key, part in parts.items()}
    for _ in range(2):
        staged = stage(state, lease).state
        for part in parts.values():
            spoil(part)
        assert {key: type(value) for key, value in staged.items()} == {
            key: type(value) for key, value in state.items()
        }
        assert same(staged["two"].b, expected["two.b"])
        assert same(staged["nested"].a.b, expected["nested.a.b"])
        assert same(staged["parameter"].a, expected["parameter.a"])
        assert same(staged["shards"].local_shards()[1], expected["shards.1"])
        assert staged["parameter"].requires_grad
        assert not staged["two"].requires_grad
        for part in parts.values():
            spoil(part)


def sharded_rank(rank: int) -> None:
    """Stage DTensors and a ShardedTensor, spoil them, and compare with what was there."""
    mesh = init_device_mesh("cpu", (2,))
    full = seeded(1, 5, 4)
    tensor = distribute_tensor(full, mesh, [Shard(0)])
    metadata_shard = LocalShard.from_tensor_and_offsets(
        seeded(10 + rank, 2, 3), [2 * rank, 0], rank
    )
    state = {
        "sharded": nn.Parameter(tensor),
        "replica": distribute_tensor(full.clone(), mesh, [Replicate()]),
        "legacy": ShardedTensor._init_from_local_shards(  # noqa: SLF001  # torch has no other
            [metadata_shard], (4, 3)
        ),
    }
    with HostBuffers() as buffers, buffers.lease() as held:
        for _ in range(2):
            expected = state["sharded"].to_local().detach().clone()
            staged = stage(state, held).state
            state["sharded"].to_local().detach().add_(1)
            metadata_shard.tensor.zero_()
            assert isinstance(staged["sharded"], DTensor)
            assert staged["sharded"].requires_grad
            assert staged["sharded"].shape == (5, 4)
            assert staged["sharded"].placements == (Shard(0),)
            assert staged["sharded"].device_mesh is mesh
            assert same(staged["sharded"].to_local(), expected)
            assert same(staged["replica"].full_tensor(), full)
            (shard,) = staged["legacy"].local_shards()
            assert same(shard.tensor, seeded(10 + rank, 2, 3))
            assert staged["legacy"].metadata() == state["legacy"].metadata()
            metadata_shard.tensor.copy_(seeded(10 + rank, 2, 3))


def test_distributed_tensors_keep_mesh_and_placements(ranks: RankPool) -> None:
    """DTensors and ShardedTensors of a real mesh are staged shard by shard."""
    ranks.run(sharded_rank, world_size=2)
