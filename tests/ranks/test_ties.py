"""Ties: tensors that are the same memory are recorded as such, others never."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from damage_cases import Checkpoint, body_of
from dcp_cases import seeded
from saver_cases import END_S, quick_saver
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import ckpt_storage
from ckpt_storage import FormatError
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.testing.ranks import RankPool

TIE = {"model.head": "model.embed"}


def by_ours(state: dict[str, Any], path: Path, **options: Any) -> None:
    """Save with our front door."""
    ckpt_storage.save(state, path, sync_files=False, **options)


def in_background(state: dict[str, Any], path: Path, **options: Any) -> None:
    """Save with a saver's thread."""
    with quick_saver("thread") as saver:
        saver.save(state, path, sync_files=False, **options).result(END_S)


Door = Callable[..., None]
by_dcp: Door = dcp_cases.save
each_door = pytest.mark.parametrize("door", [by_ours, by_dcp])


def recorded(path: Path) -> dict[str, str]:
    """Return the ties that the manifest below `path` records."""
    ties: dict[str, str] = body_of(Checkpoint(path).manifest).get("ties", {})
    return ties


def writers_of(path: Path, fqn: str) -> set[int]:
    """Return the ranks whose manifests list chunks of a tensor."""
    return {
        rank["rank"]
        for rank in map(body_of, Checkpoint(path).ranks)
        if any(fqn in map(rank["fqns"].__getitem__, f["items"]["fqn"]) for f in rank["files"])
    }


def tied_model() -> dict[str, Any]:
    """Return a state whose output layer is its embedding."""
    embed = torch.nn.Parameter(seeded(1, 24, 4))
    return {"model": {"embed": embed, "body": seeded(2, 12, 4), "head": embed}, "step": 3}


def test_tensors_of_one_memory_are_tied_to_the_first(tmp_path: Path) -> None:
    """A Parameter, views of all of it, and shared storage: all aliases have the first as target."""
    weight = torch.nn.Parameter(seeded(1, 6, 5))
    whole = weight.detach()
    state = {
        "model": {
            "embed": weight,
            "head": weight,
            "more": [{"detached": whole}, [seeded(3, 2), whole.view(6, 5)]],
            "body": seeded(2, 6, 5),
        },
        "set": weight.detach()[:],
        "scalar": (scalar := torch.tensor(1.5)),
        "scalar too": scalar,
    }
    by_ours(state, tmp_path)
    aliases = ["model.head", "model.more.0.detached", "model.more.1.1", "set"]
    assert recorded(tmp_path) == dict.fromkeys(aliases, "model.embed") | {"scalar too": "scalar"}


def test_what_only_looks_alike_is_not_tied(tmp_path: Path) -> None:
    """Equal values, and other views of one memory, are no tie; the documents have no such key."""
    base = seeded(1, 8, 8)
    state = {
        "base": base,
        "equal": base.clone(),
        "part": base[:4],
        "shifted": base[4:],
        "turned": base.t(),
        "bits": base.view(torch.int32),
        "flat": base.view(-1),
        "empty": torch.empty(0, 8),
        "empty too": torch.empty(0, 8),
        "complex": torch.view_as_complex(base.view(8, 4, 2)),
        "conjugate": torch.view_as_complex(base.view(8, 4, 2)).conj(),
        "expanded": base[0].expand(8, 8),
    }
    by_dcp(state, tmp_path)
    assert not any(b'"ties"' in path.read_bytes() for path in tmp_path.rglob("*.json"))


def save_replicated(rank: int, folder: Path, door: Door) -> None:
    """Save tied models that both ranks hold; on rank `apart` the head is a copy."""
    for owners in ("all", "lowest"):
        for apart in (None, 0, 1):
            state = tied_model()
            if rank == apart:
                state["model"]["head"] = state["model"]["embed"].detach().clone()
            planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=owners == "lowest")
            door(state, folder / f"{owners}-{apart}", planner=planner)


@pytest.mark.parametrize("door", [by_ours, by_dcp, in_background])
def test_a_tie_needs_the_word_of_all_who_wrote(ranks: RankPool, tmp_path: Path, door: Door) -> None:
    """Where two ranks divided the tensors, either can object; one that wrote neither cannot."""
    ranks.run(save_replicated, tmp_path, door, world_size=2)
    divided = tmp_path / "all-None"
    assert writers_of(divided, "model.embed") != writers_of(divided, "model.head")
    found = {path.name: recorded(path) for path in tmp_path.iterdir()}
    assert {name for name, ties in found.items() if not ties} == {"all-0", "all-1", "lowest-0"}
    assert [ties for ties in found.values() if ties] == [TIE] * 3


def sharded_model(placements: list[Placement], rows: int, apart: int | None) -> dict[str, Any]:
    """Return a tied model in shards as FSDP keeps it; on rank `apart` the head is a copy."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    embed = distribute_tensor(seeded(1, rows, 6), mesh, placements)
    head: Any = torch.nn.Parameter(embed)
    if dist.get_rank() == apart:
        copy = embed.to_local().clone()
        head = DTensor.from_local(
            copy, mesh, placements, run_check=False, shape=embed.shape, stride=embed.stride()
        )
    return {"model": {"embed": embed, "head": head}}


def save_sharded(_rank: int, folder: Path, door: Door) -> None:
    """Save by rows and by columns; in both, rank 3 holds no element."""
    for name, placement, rows in (("rows", Shard(0), 3), ("columns", Shard(1), 5)):
        for apart in (None, 3, 0):
            door(sharded_model([placement], rows, apart), folder / f"{name}-{apart}")
    # One local tensor as part of tensors that are cut otherwise, or to other ranks.
    mesh = init_device_mesh("cpu", (4,))
    local = torch.ones(4, 4)
    state = {
        "rows": DTensor.from_local(local, mesh, [Shard(0)]),
        "columns": DTensor.from_local(local, mesh, [Shard(1)]),
        "reversed": DTensor.from_local(local, DeviceMesh("cpu", [3, 2, 1, 0]), [Shard(0)]),
    }
    door(state, folder / "otherwise")


@each_door
def test_shards_are_tied_where_all_that_hold_any_agree(
    ranks: RankPool, tmp_path: Path, door: Door
) -> None:
    """A rank that holds no element has no say; the same memory in other rows is no tie."""
    ranks.run(save_sharded, tmp_path, door, world_size=4)
    found = {path.name: recorded(path) for path in tmp_path.iterdir()}
    assert {name for name, ties in found.items() if not ties} == {
        "rows-0",
        "columns-0",
        "otherwise",
    }
    assert [ties for ties in found.values() if ties] == [TIE] * 4


def changing(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """Return a planner that passes tensors through a function."""

    def changed(item: WriteItem, value: Any) -> Any:
        is_blob = item.type is WriteItemType.BYTE_IO
        return value if is_blob else change(item.index.fqn, value)

    return dcp_cases.resolving(changed)


class Unpacking(torch.Tensor):
    """A kind of tensor that gives its elements anew each time that it is asked for them."""

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        """Return the elements."""
        return self.as_subclass(torch.Tensor).clone()


class Renaming(dcp.DefaultSavePlanner):
    """A planner that gives what it saves other names."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **more: Any) -> None:
        """Rename every key."""
        super().set_up_planner({f"new_{key}": state_dict[key] for key in state_dict}, *args, **more)


def test_ties_are_those_of_the_state_and_of_what_is_stored(tmp_path: Path) -> None:
    """Copies that a planner or a kind of tensor makes are no ties, though memory is used again."""
    ones = {f"w{i}": torch.ones(64, 64) for i in range(6)}
    buffer = torch.empty(64, 64)
    again = changing(lambda _, value: buffer.copy_(value))
    cast = changing(lambda _, value: value.to(torch.bfloat16))
    change = changing(lambda fqn, value: value + 1 if fqn.endswith("head") else value)
    by_dcp(dict(ones), tmp_path / "copies", planner=cast)
    by_dcp(dict(ones), tmp_path / "buffer", planner=again)
    kinds = {f"w{i}": torch.ones(64).as_subclass(Unpacking) for i in range(20)}
    by_dcp(kinds, tmp_path / "kinds")
    by_ours(tied_model(), tmp_path / "changed", planner=change)
    assert [recorded(path) for path in tmp_path.iterdir()] == [{}] * 4
    by_ours(tied_model(), tmp_path / "cast", planner=cast)
    assert recorded(tmp_path / "cast") == TIE
    by_ours(tied_model(), tmp_path / "renamed", planner=Renaming())
    assert recorded(tmp_path / "renamed") == {"new_model.head": "new_model.embed"}


def test_a_manifest_with_ties_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """Unknown names, blobs, chains, circles and unequal tensors are damage, and so it is said."""
    state = tied_model() | {"other": torch.zeros(24, 4).double(), "turned": torch.zeros(4, 24)}
    by_ours(state, tmp_path)
    body = body_of(Checkpoint(tmp_path).manifest)
    assert Manifest.from_body(body, where="here").ties == TIE
    cases: list[tuple[Any, str]] = [
        ({"model.head": "model.absent"}, "cannot be"),
        ({"model.absent": "model.embed"}, "cannot be"),
        ({"step": "model.embed"}, "cannot be"),
        ({"model.embed": "model.embed"}, "cannot be"),
        ({"model.head": "model.embed", "model.embed": "model.body"}, "cannot be"),
        ({"model.head": 3}, "cannot be"),
        ({"model.head": "other"}, "another dtype or shape"),
        ({"model.head": "turned"}, "another dtype or shape"),
        (["model.head"], "'ties' should be"),
    ]
    for ties, text in cases:
        with pytest.raises(FormatError, match=text):
            Manifest.from_body(body | {"ties": ties}, where="here")
