"""Tensors that torch's planners describe wrongly or not at all are stored right, or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Self

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded
from on_ranks import on_ranks
from saver_cases import quick_saver
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt_storage
from ckpt_storage import InvalidInputError

ROWS = {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}
"""The rows of 8 that each of two ranks holds: packed weights, each half cut in two."""


def packed(whole: torch.Tensor, rank: int, dim: int = 0) -> DTensor:
    """Return a tensor as transformers cuts packed weights (gate and up projections in one)."""
    mesh = init_device_mesh("cpu", (2,))
    local = whole.index_select(dim, torch.tensor(ROWS[rank])).contiguous()
    made: DTensor = DTensor.from_local(
        local,
        mesh,
        [_StridedShard(dim, split_factor=2)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return made


@on_ranks()
def test_stock_dcp_loads_packed_shards_as_if_they_were_in_order(rank: int, tmp_path: Path) -> None:
    """Stock torch takes the local rows for neighbours: rank 0 gets 0 to 3, rank 1 others."""
    whole = torch.arange(8.0)
    dcp.save({"w": whole}, checkpoint_id=tmp_path / "good")
    dcp.load(target := {"w": packed(torch.zeros(8), rank)}, checkpoint_id=tmp_path / "good")
    assert target["w"].to_local().tolist() == [[0, 1, 2, 3], [2, 3, 4, 5]][rank]
    with pytest.raises(CheckpointException, match="overlapping chunks"):
        dcp.save({"w": packed(whole, rank)}, checkpoint_id=tmp_path / "bad")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("way", ["save", "thread", "process"])
@on_ranks()
def test_packed_shards_are_stored_where_they_belong(
    rank: int, tmp_path: Path, way: Any, dim: int
) -> None:
    """The checkpoint holds the whole tensor, and gives each rank its rows in any placement."""
    whole = seeded(1, 8, 8)
    state = {"w": packed(whole, rank, dim), "flat": packed(seeded(2, 8), rank)}
    for number in range(2):
        if way == "save":
            ckpt_storage.save(state, path := tmp_path / str(number), sync_files=False)
        else:
            with quick_saver(way) as saver:
                saver.save(state, path := tmp_path / str(number), sync_files=False).result()
    ckpt_storage.load(plain := {"w": torch.zeros(8, 8), "flat": torch.zeros(8)}, path)
    assert same(plain, {"w": whole, "flat": seeded(2, 8)})
    target = {"w": packed(torch.zeros(8, 8), rank, dim), "flat": packed(torch.zeros(8), rank)}
    ckpt_storage.load(target, path)
    assert same(target["w"].to_local(), state["w"].to_local())
    assert same(target["flat"].to_local(), state["flat"].to_local())
    other = {"w": dcp_cases.cut(torch.zeros(8, 8), Shard(1 - dim))}
    ckpt_storage.load(other, path)
    assert same(other["w"].to_local(), dcp_cases.cut(whole, Shard(1 - dim)).to_local())


@on_ranks()
def test_a_plain_tensor_is_loaded_into_packed_shards(rank: int, tmp_path: Path) -> None:
    """Whatever was saved, each rank gets the rows that its placement says."""
    whole = seeded(1, 8, 3)
    ckpt_storage.save({"w": whole}, tmp_path, sync_files=False)
    ckpt_storage.load(target := {"w": packed(torch.zeros(8, 3), rank)}, tmp_path)
    assert same(target["w"].to_local(), whole[ROWS[rank]])


@on_ranks()
def test_dcp_load_refuses_packed_shards_by_name(rank: int, tmp_path: Path) -> None:
    """Under `dcp.load` torch plans: key, placement and the way out are said."""
    ckpt_storage.save({"layer": {"w": seeded(1, 8, 3)}}, tmp_path, sync_files=False)
    target = {"layer": {"w": packed(torch.zeros(8, 3), rank)}}
    with pytest.raises(CheckpointException) as raised:
        dcp_cases.load(target, tmp_path)
    (failure, *_) = [error for error, _ in raised.value.failures.values()]
    assert isinstance(failure, InvalidInputError)
    assert "layer.w" in str(failure)
    assert "_StridedShard" in str(failure)
    assert "ckpt_storage.load" in (failure.next_step or "")


@on_ranks(4)
def test_strided_shards_of_two_dimensions_are_stored_as_ever(rank: int, tmp_path: Path) -> None:
    """FSDP over tensor parallelism, where each rank holds one box, as torch says itself."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = seeded(1, 8, 3)
    order = {0: [0, 1], 1: [4, 5], 2: [2, 3], 3: [6, 7]}
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    options: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    make: Any = partial(DTensor.from_local, device_mesh=mesh, placements=placements, **options)
    for save, load in (
        (ckpt_storage.save, ckpt_storage.load),
        (dcp_cases.save, dcp_cases.load),
    ):
        path = tmp_path / save.__module__
        save({"w": make(whole[order[rank]].clone())}, path)
        load(plain := {"w": torch.zeros(8, 3)}, path)
        assert same(plain["w"], whole)
        load(target := {"w": make(torch.zeros(2, 3))}, path)
        assert same(target["w"].to_local(), whole[order[rank]])


@on_ranks(4)
def test_empty_shards_may_be_spelt_differently(rank: int, tmp_path: Path) -> None:
    """Where tensor parallelism is wider than a dimension, stock torch saves it, and so do we."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, row = seeded(1, 2, 1), rank // 2
    local = torch.empty(0, 0) if rank % 2 else whole[row : row + 1].clone()
    options: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    tensor = DTensor.from_local(local, mesh, [Shard(0), Shard(1)], **options)
    dcp.save({"w": tensor}, checkpoint_id=tmp_path / "stock")
    for save in (ckpt_storage.save, dcp_cases.save):
        save({"w": tensor}, path := tmp_path / save.__module__, sync_files=False)
        ckpt_storage.load(target := {"w": torch.zeros(2, 1)}, path)
        assert same(target["w"], whole)


@on_ranks(4)
def test_packed_shards_may_be_empty(rank: int, tmp_path: Path) -> None:
    """A part without elements does not take the place of another rank's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = seeded(1, 5, 1)
    rows = [[0, 1, 3], [2, 4]][rank // 2]
    local = torch.empty(len(rows), 0) if rank % 2 else whole[rows].clone()
    options: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    placements = [_StridedShard(0, split_factor=2), Shard(1)]
    tensor = DTensor.from_local(local, mesh, placements, **options)
    ckpt_storage.save({"w": tensor}, tmp_path, sync_files=False)
    ckpt_storage.load(target := {"w": torch.zeros(5, 1)}, tmp_path)
    assert same(target["w"], whole)


class Scaled(torch.Tensor):
    """Numbers with a scale, as quantised states have them: two tensors inside, none of its own."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Self:
        del scale
        made: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  # as torchao
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale"], {}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], _context: Any, _size: Any, _stride: Any
    ) -> Scaled:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        same_elements = {aten.alias, aten.detach, aten.view, aten.clone}
        if function in {packet.default for packet in same_elements}:
            return Scaled(args[0].codes, args[0].scale)
        if function is aten.is_pinned.default:
            return False
        if function is aten.copy_.default:
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(str(function))


@pytest.mark.parametrize("way", ["save", "thread", "process"])
def test_the_tensors_inside_a_subclass_are_stored(tmp_path: Path, way: Any) -> None:
    """What `__tensor_flatten__` names is saved, and restored into the target's own tensors."""
    state = {"opt": {"m": Scaled(seeded(1, 300, dtype=torch.uint8), seeded(2, 3))}}
    if way == "save":
        ckpt_storage.save(state, tmp_path, sync_files=False)
    else:
        with quick_saver(way) as saver:
            saver.save(state, tmp_path, sync_files=False).result()
    codes, scale = torch.zeros(300, dtype=torch.uint8), torch.zeros(3)
    target = {"opt": {"m": (wrapped := Scaled(codes, scale))}}
    ckpt_storage.load(target, tmp_path)
    assert target["opt"]["m"] is wrapped
    assert same(codes, state["opt"]["m"].codes)
    assert same(scale, state["opt"]["m"].scale)
    with ckpt_storage.open_checkpoint(tmp_path) as opened:
        assert set(opened) == {"opt.m.codes", "opt.m.scale"}


def sharded(codes: torch.Tensor, scale: torch.Tensor, *, rows: int = 4) -> DTensor:
    """Return a `DTensor` of `rows` rows over all ranks, whose local part has two tensors inside."""
    shape, stride = torch.Size((rows, codes.shape[1])), (codes.shape[1], 1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"run_check": False, "shape": shape, "stride": stride}
    made: DTensor = DTensor.from_local(Scaled(codes, scale), mesh, [Shard(0)], **options)
    return made


def test_a_subclass_that_stock_dcp_pickled_is_loaded(tmp_path: Path) -> None:
    """Stock `dcp.save` stores it under its own name, as a whole."""
    torch.serialization.add_safe_globals([Scaled])
    state = {"w": Scaled(seeded(1, 300, dtype=torch.uint8), seeded(2, 3))}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    target = {"w": Scaled(torch.zeros(300, dtype=torch.uint8), torch.zeros(3))}
    ckpt_storage.load(target, tmp_path)
    assert same(target["w"].codes, state["w"].codes)
    assert same(target["w"].scale, state["w"].scale)


@on_ranks()
def test_stock_dcp_restores_subclasses_inside_a_dtensor(rank: int, tmp_path: Path) -> None:
    """Stock torch pickles the local part whole; both load it with the same sharding."""
    torch.serialization.add_safe_globals([Scaled])
    state = {"w": sharded(seeded(rank, 2, 3, dtype=torch.uint8), seeded(rank + 5, 3))}
    dcp.save(state, checkpoint_id=tmp_path)
    for load in (dcp_cases.load_stock, ckpt_storage.load):
        target = {"w": sharded(torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(3))}
        load(target, tmp_path)
        assert same(local_of(target["w"]).codes, local_of(state["w"]).codes)
        assert same(local_of(target["w"]).scale, local_of(state["w"]).scale)


def local_of(tensor: DTensor) -> Scaled:
    found = tensor._local_tensor  # noqa: SLF001  # as it is, not as autograd sees it
    assert isinstance(found, Scaled)
    return found


@pytest.mark.parametrize("way", ["save", "thread", "process"])
@on_ranks()
def test_subclasses_inside_a_dtensor_are_stored(rank: int, tmp_path: Path, way: Any) -> None:
    """The tensors inside each local part are saved, and restored with the same sharding."""
    state = {"w": sharded(seeded(rank, 2, 3, dtype=torch.uint8), seeded(rank + 5, 3))}
    if way == "save":
        ckpt_storage.save(state, tmp_path, sync_files=False)
    else:
        with quick_saver(way) as saver:
            saver.save(state, tmp_path, sync_files=False).result()
    target = {"w": sharded(torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(3))}
    wrapped = local_of(target["w"])
    ckpt_storage.load(target, tmp_path)
    assert local_of(target["w"]) is wrapped
    assert same(wrapped.codes, local_of(state["w"]).codes)
    assert same(wrapped.scale, local_of(state["w"]).scale)


@on_ranks()
def test_subclasses_inside_a_dtensor_are_not_resharded(rank: int, tmp_path: Path) -> None:
    """A load with another sharding names the tensor and the saved shards; nothing is read."""
    state = {"w": sharded(seeded(rank, 2, 3, dtype=torch.uint8), seeded(rank + 5, 3))}
    ckpt_storage.save(state, tmp_path, sync_files=False)
    sizes = 3 if rank == 0 else 2
    codes = torch.zeros(sizes, 3, dtype=torch.uint8)
    target = {"w": sharded(codes, torch.zeros(3), rows=5)}
    with pytest.raises(ckpt_storage.CheckpointError, match="inside a subclass cannot be resharded"):
        ckpt_storage.load(target, tmp_path)
    assert not codes.any()


@on_ranks()
def test_results_of_pending_collectives_are_waited_for(rank: int, tmp_path: Path) -> None:
    """They are stored as the plain tensors that they become; stock pickles torch's wrapper."""
    mesh = init_device_mesh("cpu", (2,))
    plain = all_reduce(torch.full((3,), rank + 1.0), "sum", mesh)
    local = all_reduce(torch.full((2,), rank + 1.0), "sum", mesh)
    spec = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)])._spec  # noqa: SLF001  # torch makes it so
    make: Any = DTensor  # its constructor has no types
    sharded = make(local, spec, requires_grad=False)
    assert type(plain) is type(local) is AsyncCollectiveTensor
    ckpt_storage.save({"w": plain, "d": sharded}, tmp_path, sync_files=False)
    ckpt_storage.load(target := {"w": torch.zeros(3), "d": torch.zeros(4)}, tmp_path)
    assert same(target, {"w": torch.full((3,), 3.0), "d": torch.full((4,), 3.0)})


@on_ranks()
def test_exports_keep_the_int_keys_of_all_ranks(rank: int, tmp_path: Path) -> None:
    """A dict with a key for each rank is one dict with int keys in a `torch_save` file."""
    ckpt_storage.save({"of": {rank: rank + 0.5}}, tmp_path / "1", sync_files=False)
    if rank == 0:
        ckpt_storage.convert(tmp_path / "1", tmp_path / "1.pt", to="torch_save")
        assert torch.load(tmp_path / "1.pt") == {"of": {0: 0.5, 1: 1.5}}


def test_meta_targets_need_no_process_group(tmp_path: Path) -> None:
    """A model made on the meta device is loaded by one process alone."""
    assert not dist.is_initialized()
    ckpt_storage.save({"model": {"w": seeded(1, 4, 3)}}, tmp_path, sync_files=False)
    target = {"model": {"w": torch.empty(4, 3, device="meta")}}
    ckpt_storage.load(target, tmp_path)
    assert same(target["model"]["w"], seeded(1, 4, 3))


def test_a_list_of_none_and_an_empty_dict_comes_back(tmp_path: Path) -> None:
    """`LambdaLR` keeps `lr_lambdas == [None, {}]`: what is saved loads into an equal target."""
    state = {"scheduler": {"lr_lambdas": [None, {}], "base_lrs": [0.1, 0.2]}, "w": torch.ones(2)}
    ckpt_storage.save(state, tmp_path, sync_files=False)
    target = {"scheduler": {"lr_lambdas": [None, {}], "base_lrs": [0.0, 0.0]}, "w": torch.zeros(2)}
    ckpt_storage.load(target, tmp_path)
    assert target["scheduler"] == state["scheduler"]
