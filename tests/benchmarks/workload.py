"""States to save and load: Llama shapes in bfloat16, sharded over ranks, and many small tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

State = dict[str, DTensor]
Sharding = Literal["rows", "columns", "replicated", "hsdp"]

_WIDTH, _HIDDEN, _WORDS = 2048, 5632, 32_000
_LAYER_SHAPES = {
    "wq": (_WIDTH, _WIDTH),
    "wk": (_WIDTH, _WIDTH),
    "wv": (_WIDTH, _WIDTH),
    "wo": (_WIDTH, _WIDTH),
    "w1": (_HIDDEN, _WIDTH),
    "w2": (_WIDTH, _HIDDEN),
    "w3": (_HIDDEN, _WIDTH),
}
_ITEM_BYTES = 2
_SMALL_ELEMENTS = 1024
_LEAST_WIDTH = 64


def _shapes(gib: float) -> dict[str, tuple[int, int]]:
    """Return the shapes of a model of about `gib` GiB: small ones are narrower, too."""
    wanted = gib * 2**30 / _ITEM_BYTES
    narrower = 1
    while 2 * _WORDS * _WIDTH / narrower**2 > wanted and narrower < _WIDTH // _LEAST_WIDTH:
        narrower *= 2
    layer = {name: (a // narrower, b // narrower) for name, (a, b) in _LAYER_SHAPES.items()}
    first = (_WORDS // narrower, _WIDTH // narrower)
    layer_elements = sum(rows * columns for rows, columns in layer.values())
    layer_count = max(1, round((wanted - first[0] * first[1]) / layer_elements))
    shapes = {
        f"layers.{i}.{name}": shape for i in range(layer_count) for name, shape in layer.items()
    }
    return {**shapes, "embedding": first}


def llama_state(
    gib: float, sharding: Sharding, *, filled: bool, group: dist.ProcessGroup | None = None
) -> State:
    """Return this rank's part of one model over the ranks of a group; zeros unless `filled`."""
    rank, rank_count = dist.get_rank(group), dist.get_world_size(group)
    placements: list[Placement]
    if sharding == "hsdp":
        shard_count = max(1, rank_count // 2)
        mesh = init_device_mesh("cpu", (rank_count // shard_count, shard_count))
        dimension, placements = 0, [Replicate(), Shard(0)]
        rank, rank_count = rank % shard_count, shard_count
    else:
        mesh = (
            init_device_mesh("cpu", (rank_count,))
            if group is None
            else DeviceMesh.from_group(group, "cpu")
        )
        dimension = int(sharding == "columns")
        placements = [Replicate() if sharding == "replicated" else Shard(dimension)]
        if sharding == "replicated":
            rank, rank_count = 0, 1
    state = {}
    for number, (name, shape) in enumerate(_shapes(gib).items()):
        sizes = list(shape)
        sizes[dimension] //= rank_count
        local = torch.zeros(sizes, dtype=torch.bfloat16)
        if filled:
            starts = [rank * sizes[at] * (at == dimension) for at in range(2)]
            rows = torch.arange(starts[0], starts[0] + sizes[0], dtype=torch.int32)[:, None]
            columns = torch.arange(starts[1], starts[1] + sizes[1], dtype=torch.int32)[None]
            # Any odd factors do; the values need only differ among neighbours and tensors.
            local.copy_((rows * 7919 + columns * 104_729 + number * 31).remainder_(251))
        state[name] = DTensor.from_local(local, mesh, placements, run_check=False)
    return state


def small_state(count: int, *, filled: bool) -> State:
    """Return `count` float32 tensors of which each rank holds 4 KiB."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for number in range(count):
        local = torch.zeros(_SMALL_ELEMENTS)
        if filled:
            local += torch.arange(number, number + _SMALL_ELEMENTS)
        name = f"optimizer.state.{number}.exp_avg"
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state


def zero(state: Mapping[str, DTensor]) -> None:
    for tensor in state.values():
        tensor.to_local().zero_()


def check_same(state: Mapping[str, DTensor], expected: Mapping[str, DTensor], who: str) -> None:
    """Raise `RuntimeError` unless this rank holds equal values in both."""
    for name, tensor in expected.items():
        if not torch.equal(state[name].to_local(), tensor.to_local()):
            raise RuntimeError(f"{who} loaded other values of {name} than were saved")


def own_views(state: Mapping[str, DTensor]) -> list[memoryview]:
    flats = (tensor.to_local().reshape(-1).view(torch.uint8) for tensor in state.values())
    return [memoryview(flat.numpy()) for flat in flats]  # type: ignore[arg-type]  # numpy 2 on 3.11


def state_bytes(state: Mapping[str, DTensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
