"""The facts of torch's own DCP tests hold with our plug-ins, as they do with torch's classes.

With `CKPT_STORAGE_STOCK=1` every case runs twice, also with torch's own `FileSystemWriter` and
`FileSystemReader`: for a new release of torch, to see which facts are still its own.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import same
from rank_pool import RankPool
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

import ckpt_storage

Kind = Literal["stock", "ours"]
KINDS: tuple[Kind, ...] = ("stock", "ours") if os.environ.get("CKPT_STORAGE_STOCK") else ("ours",)
each_kind = pytest.mark.parametrize("kind", KINDS)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def writer(kind: Kind, path: Path) -> Any:
    """Return a storage writer of a kind; both may be called for a folder that holds a save."""
    if kind == "stock":
        return dcp.FileSystemWriter(path, sync_files=False)
    return ckpt_storage.CheckpointStorageWriter(path, sync_files=False, overwrite=True)


def reader(kind: Kind, path: Path) -> Any:
    return (
        dcp.FileSystemReader(path)
        if kind == "stock"
        else ckpt_storage.CheckpointStorageReader(path)
    )


def save(kind: Kind, state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=writer(kind, path), **options)


def load(kind: Kind, state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=reader(kind, path), **options)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def assert_same(left: Any, right: Any) -> None:
    """Fail unless two states hold equal values, whatever their sharding."""
    assert same(tree_map(whole, left), tree_map(whole, right))


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


class Net(nn.Module):
    """Three layers, the middle one narrower than four ranks like it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 6)
        self.last = nn.Linear(6, 4)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.relu(self.middle(torch.relu(self.first(data)))))
        return found


def trained(
    shard: Callable[[nn.Module], object], *, seed: int = 0, steps: int = 1
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


TP_PLAN = {"first": ColwiseParallel(), "middle": RowwiseParallel()}


def mesh(*shape: int) -> DeviceMesh:
    names = ("rows", "columns")[: len(shape)]
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names or None)


def by_fsdp_and_tp(model: nn.Module) -> None:
    """Cut a model's layers over two ranks and shard what that leaves over two."""
    both = mesh(2, 2)
    parallelize_module(model, both["columns"], TP_PLAN)
    fully_shard(model, mesh=both["rows"])


SHARDINGS: dict[str, Callable[[nn.Module], object]] = {
    "fsdp": lambda model: fully_shard(model, mesh=mesh()),
    "hsdp": lambda model: fully_shard(model, mesh=mesh(2, 2)),
    "tp": lambda model: parallelize_module(model, mesh(), TP_PLAN),
    "2d": by_fsdp_and_tp,
    "replicated": lambda _: None,
}

ONE_D: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((4,), (Replicate(),)),
]
TWO_D: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((2, 2), places) for places in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2)
]
Cut = tuple[tuple[int, ...], tuple[Placement, ...]]


def distributed(data: torch.Tensor, cut: Cut) -> DTensor:
    return distribute_tensor(data, init_device_mesh("cpu", cut[0]), cut[1])


def reshard(
    _rank: int, kind: Kind, path: Path, sources: Sequence[Cut], targets: Sequence[Cut]
) -> None:
    """A tensor saved in any cut of a mesh loads into any other cut of a mesh."""
    for shape in ((8, 12), (5, 3)):  # the second leaves ranks with less, or with nothing
        data = numbers(*shape)
        for number, source in enumerate(sources):
            at = path / f"{shape[0]}-{number}"
            save(kind, {"data": distributed(data, source)}, at)
            for target in targets:
                found = {"data": distributed(torch.zeros(shape), target)}
                load(kind, found, at)
                assert_same(found["data"], data)


def reshard_to_fewer(_rank: int, kind: Kind, path: Path, cut: Cut) -> None:
    """Load the first tensor of `reshard`, cut otherwise."""
    found = {"data": distributed(torch.zeros(8, 12), cut)}
    load(kind, found, path / "8-0")
    assert_same(found["data"], numbers(8, 12))


def sharded_tensors(_rank: int, kind: Kind, path: Path) -> None:
    """ShardedTensors load into other dimensions, orders and numbers of shards."""

    def spec(dim: int, order: Sequence[int]) -> ChunkShardingSpec:
        return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in order])

    source = sharded_tensor.rand(spec(0, (0, 1, 2, 3)), 10, 20)
    save(kind, {"data": source}, path)
    for dim, order in ((0, (3, 2, 1, 0)), (1, (0, 1, 2, 3)), (0, (1, 0)), (1, (2,))):
        target = sharded_tensor.zeros(spec(dim, order), 10, 20)
        load(kind, {"data": target}, path)
        found = torch.zeros(10, 20) if dist.get_rank() == 0 else None
        saved = torch.zeros(10, 20) if dist.get_rank() == 0 else None
        target.gather(0, found)
        source.gather(0, saved)
        if found is not None:
            assert_same(found, saved)


def model_and_optimizer(_rank: int, kind: Kind, path: Path, of: str, to: str) -> None:
    """A trained model and AdamW's state come back whole, by torch too, sharded otherwise."""
    model, optimizer = trained(SHARDINGS[of])
    states = get_state_dict(model, optimizer)
    save(kind, {"model": states[0], "optimizer": states[1]}, path)
    full = StateDictOptions(full_state_dict=True)
    readers: set[Kind] = {kind, "stock"}
    for by in sorted(readers):
        other, other_optimizer = trained(SHARDINGS[to], seed=1, steps=2)
        found = get_state_dict(other, other_optimizer)
        load(by, {"model": found[0], "optimizer": found[1]}, path)
        set_state_dict(other, other_optimizer, model_state_dict=found[0], optim_state_dict=found[1])
        for mine, theirs in zip(
            get_state_dict(other, other_optimizer, options=full),
            get_state_dict(model, optimizer, options=full),
            strict=True,
        ):
            assert_same(mine, theirs)


def fine_tuned(_rank: int, kind: Kind, path: Path) -> None:
    """A backbone loads without its head, and a head is saved without its frozen backbone."""
    pretrained, _ = trained(SHARDINGS["fsdp"])
    save(kind, {"model": get_model_state_dict(pretrained)}, path / "pretrained")
    model, _ = trained(SHARDINGS["fsdp"], seed=1)
    part = {
        name: value
        for name, value in get_model_state_dict(model).items()
        if not name.startswith("last")
    }
    load(kind, {"model": part}, path / "pretrained")
    set_model_state_dict(model, part, options=StateDictOptions(strict=False))
    found = get_model_state_dict(model)
    expected = get_model_state_dict(pretrained)
    assert_same(found["first.weight"], expected["first.weight"])
    assert not torch.equal(whole(found["last.weight"]), whole(expected["last.weight"]))
    for parameter in [*model.first.parameters(), *model.middle.parameters()]:  # type: ignore[union-attr]  # layers
        parameter.requires_grad_(requires_grad=False)
    trainable = StateDictOptions(ignore_frozen_params=True)
    head: dict[str, Any] = get_model_state_dict(model, options=trainable)
    assert {name.split(".")[0] for name in head} == {"last"}
    save(kind, {"model": head}, path / "head")
    again = {name: torch.zeros_like(value) for name, value in head.items()}
    load(kind, {"model": again}, path / "head")
    assert_same(again, head)


class Counter:
    """A stateful object: a loader or a schedule that counts."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rng = torch.full((3,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "rng": self.rng}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.rng = state["count"], state["rng"]


def stateful(rank: int, kind: Kind, path: Path) -> None:
    """Objects with `state_dict` are asked for it, and given it again, in any order of names."""
    names = ["counter", "schedule", "words"]
    values: dict[str, Any] = {
        "counter": Counter(7),
        "schedule": Counter(8),
        "words": ["a", {"b": None}],
    }
    save(kind, {name: values[name] for name in names[rank:] + names[:rank]}, path)
    counter, schedule = Counter(0), Counter(0)
    found = {"schedule": schedule, "words": ["", {"b": 1}], "counter": counter}
    load(kind, found, path)
    assert (counter.count, schedule.count, found["words"]) == (7, 8, ["a", {"b": None}])
    assert_same(counter.rng, torch.full((3,), 7.0))


def in_the_background(_rank: int, kind: Kind, path: Path, how: str) -> None:
    """`dcp.async_save` in a thread or a process saves what the state was at the call."""
    rows, columns = (((2,), (Shard(dimension),)) for dimension in range(2))
    state = {"data": distributed(numbers(8, 4), rows), "step": 1}
    for turn in range(2):
        saved = whole(state["data"]).clone()
        future = dcp.async_save(
            state,
            storage_writer=writer(kind, path / str(turn)),
            async_checkpointer_type=AsyncCheckpointerType(how),
        )
        future.result()  # type: ignore[union-attr]  # no stager, so a future
        found = {"data": distributed(torch.zeros(8, 4), columns), "step": 0}
        load(kind, found, path / str(turn))
        assert_same(found["data"], saved)
        state["data"].to_local().add_(1)  # type: ignore[attr-defined]  # a DTensor


def hf_round_trip(_rank: int, kind: Kind, path: Path) -> None:
    """What torch's Hugging Face writer leaves of a sharded state loads into any sharding."""
    state = {"a": distributed(numbers(8, 4), ONE_D[0]), "b": distributed(numbers(6, 2), ONE_D[2])}
    files = {"a": 1, "b": 2}
    hf = HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=files, save_distributed=True)
    dcp.save(dict(state), storage_writer=hf)
    found = {
        "a": distributed(torch.zeros(8, 4), ONE_D[1]),
        "b": distributed(torch.zeros(6, 2), ONE_D[0]),
    }
    plug_in = dcp.HuggingFaceStorageReader(str(path)) if kind == "stock" else reader(kind, path)
    dcp.load(dict(found), storage_reader=plug_in)
    assert_same(found, state)


CUTS = {"1d": ONE_D, "2d": TWO_D}
PAIRS = (
    "fsdp-fsdp fsdp-tp tp-fsdp tp-tp hsdp-hsdp hsdp-fsdp 2d-2d 2d-fsdp fsdp-2d replicated-fsdp "
    "fsdp-replicated"
)
FACTS: dict[str, tuple[Callable[..., None], int, tuple[Any, ...]]] = {
    **{f"dtensors {a} {b}": (reshard, 4, (CUTS[a], CUTS[b])) for a in CUTS for b in CUTS},
    "sharded tensors": (sharded_tensors, 4, ()),
    **{f"model {pair}": (model_and_optimizer, 4, tuple(pair.split("-"))) for pair in PAIRS.split()},
    "parts of models": (fine_tuned, 4, ()),
    "stateful objects": (stateful, 2, ()),
    "background thread": (in_the_background, 2, ("thread",)),
    "background process": (in_the_background, 2, ("process",)),
    "safetensors": (hf_round_trip, 4, ()),
}


@each_kind
@pytest.mark.parametrize("fact", FACTS)
def test_what_holds_with_torchs_classes(
    ranks: RankPool, tmp_path: Path, fact: str, kind: Kind
) -> None:
    """Each job says what; values come back whole, in any cut of a mesh or of a model."""
    job, world_size, given = FACTS[fact]
    ranks.run(job, kind, tmp_path, *given, world_size=world_size)


@each_kind
def test_a_save_of_four_ranks_loads_on_two_and_on_one(
    ranks: RankPool, tmp_path: Path, kind: Kind
) -> None:
    """The world that loads may be smaller than the one that saved."""
    ranks.run(reshard, kind, tmp_path, ONE_D[:1], [])
    for count in (2, 1):
        ranks.run(reshard_to_fewer, kind, tmp_path, ((count,), (Shard(1),)), world_size=count)


@each_kind
def test_plug_ins_tell_who_they_are(tmp_path: Path, kind: Kind) -> None:
    """The checkpoint id is the path as given; a save and a load each have an id of their own."""
    path = tmp_path / "run"
    made = writer(kind, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(1)}, storage_writer=made, no_dist=True)
    told = made.storage_meta()
    assert told.checkpoint_id == path
    published = dcp.FileSystemReader(path).read_metadata().storage_meta
    assert published is not None
    assert published.save_id == told.save_id
    assert published.save_id
    opened = reader(kind, path)
    assert opened.read_metadata().storage_meta.load_id == opened.load_id
    first = opened.load_id
    assert first
    opened.reset(path)
    assert opened.load_id != first
