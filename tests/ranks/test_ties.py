"""Ties: tensors that are the same memory are recorded as such, others never."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from damage_cases import Checkpoint, body_of
from dcp_cases import same, seeded, zeros_like
from saver_cases import END_S, quick_saver
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import ckpt_storage
from ckpt_storage import FormatError
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.testing.ranks import RankPool

Door = Literal["save", "dcp.save"]
DOORS: tuple[Door, ...] = ("save", "dcp.save")

Owners = Literal["rank 0", "all"]
"""Who writes what all ranks hold."""

TIE = {"model.head": "model.embed"}


def save_by(door: Door, state: dict[str, Any], path: str | Path, **options: Any) -> None:
    """Save with our front door or with torch's."""
    if door == "save":
        ckpt_storage.save(state, path, sync_files=False, **options)
    else:
        dcp_cases.save(state, path, **options)


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


def look_alikes() -> dict[str, Any]:
    """Return tensors of which no two are the same tensor, though some share memory."""
    base = seeded(1, 8, 8)
    return {
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


@pytest.mark.parametrize("door", DOORS)
def test_tensors_of_one_memory_are_tied_to_the_first(tmp_path: Path, door: Door) -> None:
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
    save_by(door, state, tmp_path)
    aliases = ["model.head", "model.more.0.detached", "model.more.1.1", "set"]
    assert recorded(tmp_path) == dict.fromkeys(aliases, "model.embed") | {"scalar too": "scalar"}


@pytest.mark.parametrize("door", DOORS)
def test_what_only_looks_alike_is_not_tied(tmp_path: Path, door: Door) -> None:
    """Equal values, and other views of one memory, are no tie; the documents have no such key."""
    save_by(door, look_alikes(), tmp_path)
    texts = [path.read_bytes() for path in tmp_path.rglob("*.json")]
    assert not any(b'"ties"' in text for text in texts)


@pytest.mark.parametrize("door", DOORS)
def test_ties_change_nothing_for_readers(tmp_path: Path, door: Door) -> None:
    """Both tensors are stored: torch's reader and ours load both, and verify finds all sound."""
    save_by(door, tied_model(), tmp_path)
    assert recorded(tmp_path) == TIE
    for load in (dcp_cases.load, dcp_cases.load_stock):
        target = zeros_like(tied_model())
        load(target, tmp_path)
        assert same(target, tied_model())
        only = {"model": {"head": torch.zeros(24, 4)}}
        load(only, tmp_path)
        assert same(only["model"]["head"], seeded(1, 24, 4))
    report = ckpt_storage.verify(tmp_path)
    assert report.ok, report


def save_replicated(rank: int, path: Path, door: Door, owners: Owners, apart: int | None) -> None:
    """Save a tied model that all ranks hold; on rank `apart` the head is a copy."""
    state = tied_model()
    if rank == apart:
        state["model"]["head"] = state["model"]["embed"].detach().clone()
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=owners == "rank 0")
    save_by(door, state, path, planner=planner)


@pytest.mark.parametrize("door", DOORS)
def test_a_tie_whose_tensors_are_written_by_two_ranks_is_known(
    ranks: RankPool, tmp_path: Path, door: Door
) -> None:
    """Replicas that planning divided among ranks are tied by the state that each rank has."""
    ranks.run(save_replicated, tmp_path, door, "all", None, world_size=2)
    assert writers_of(tmp_path, "model.embed") != writers_of(tmp_path, "model.head")
    assert recorded(tmp_path) == TIE


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("apart", [0, 1])
def test_a_tie_needs_the_word_of_all_who_wrote(
    ranks: RankPool, tmp_path: Path, apart: int, door: Door
) -> None:
    """Where two ranks divided the tensors, either can object; one that wrote neither cannot."""
    ranks.run(save_replicated, tmp_path / "all", door, "all", apart, world_size=2)
    assert writers_of(tmp_path / "all", "model.head") != writers_of(tmp_path / "all", "model.embed")
    assert recorded(tmp_path / "all") == {}
    ranks.run(save_replicated, tmp_path / "one", door, "rank 0", apart, world_size=2)
    assert recorded(tmp_path / "one") == ({} if apart == 0 else TIE)


def sharded_model(placements: list[Placement], rows: int, apart: int | None) -> dict[str, Any]:
    """Return a tied model in shards as FSDP keeps it; on rank `apart` the head is a copy."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    embed = distribute_tensor(seeded(1, rows, 6), mesh, placements)
    body = distribute_tensor(seeded(2, rows, 6), mesh, placements)
    head: Any = torch.nn.Parameter(embed)
    if dist.get_rank() == apart:
        copy = embed.to_local().clone()
        head = DTensor.from_local(
            copy, mesh, placements, run_check=False, shape=embed.shape, stride=embed.stride()
        )
    return {"model": {"embed": embed, "body": body, "head": head}}


def save_sharded(
    rank: int, path: Path, door: Door, placements: list[Placement], rows: int, apart: int | None
) -> None:
    """Save `sharded_model`."""
    del rank
    save_by(door, sharded_model(placements, rows, apart), path)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("placements", "rows", "world_size"),
    [([Shard(0)], 8, 2), ([Shard(0)], 3, 4), ([Shard(1)], 5, 3), ([Shard(0)], 1, 2)],
    ids=["even", "one rank without elements", "columns", "all in one shard"],
)
def test_shards_are_tied_where_all_that_hold_any_agree(
    ranks: RankPool,
    tmp_path: Path,
    door: Door,
    placements: list[Placement],
    rows: int,
    world_size: int,
) -> None:
    """A rank that holds no element of either has no say; one that holds some has."""
    jobs = (placements, rows)
    ranks.run(save_sharded, tmp_path / "tied", door, *jobs, None, world_size=world_size)
    assert recorded(tmp_path / "tied") == TIE
    ranks.run(save_sharded, tmp_path / "idle", door, *jobs, 3, world_size=world_size)
    assert recorded(tmp_path / "idle") == TIE
    ranks.run(save_sharded, tmp_path / "apart", door, *jobs, 0, world_size=world_size)
    assert recorded(tmp_path / "apart") == {}


def save_otherwise_sharded(rank: int, path: Path, door: Door) -> None:
    """Save one local tensor as part of tensors that are cut otherwise, or to other ranks."""
    del rank
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(4, 4)
    state = {
        "rows": DTensor.from_local(local, mesh, [Shard(0)]),
        "columns": DTensor.from_local(local, mesh, [Shard(1)]),
        "reversed": DTensor.from_local(local, DeviceMesh("cpu", [1, 0]), [Shard(0)]),
    }
    save_by(door, state, path)


@pytest.mark.parametrize("door", DOORS)
def test_one_local_tensor_in_two_places_is_no_tie(
    ranks: RankPool, tmp_path: Path, door: Door
) -> None:
    """The same memory and values, but in other rows of the whole, are not the same tensor."""
    ranks.run(save_otherwise_sharded, tmp_path, door, world_size=2)
    assert recorded(tmp_path) == {}


class Resolving(dcp.DefaultSavePlanner):
    """A planner that passes tensors through a function."""

    def __init__(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Resolve, and change."""
        value = super().resolve_data(write_item)
        if write_item.type is WriteItemType.BYTE_IO:
            return value
        assert isinstance(value, torch.Tensor)
        return self.change(write_item.index.fqn, value)


def cast(_fqn: str, value: torch.Tensor) -> torch.Tensor:
    """Return a copy that is gone when it was written."""
    return value.to(torch.bfloat16)


def change_the_head(fqn: str, value: torch.Tensor) -> torch.Tensor:
    """Return other values for one of them."""
    return value + 1 if fqn.endswith("head") else value


def test_copies_made_by_a_planner_are_not_tied_by_the_writer(tmp_path: Path) -> None:
    """Copies of equal values are no tie; nor is a buffer that is filled again and again."""
    state = {f"w{i}": torch.ones(64, 64) for i in range(6)}
    dcp_cases.save(dict(state), tmp_path / "copies", planner=Resolving(cast))
    buffer = torch.empty(64, 64)
    again = Resolving(lambda _, value: buffer.copy_(value))
    dcp_cases.save(dict(state), tmp_path / "buffer", planner=again)
    for path in (tmp_path / "copies", tmp_path / "buffer"):
        assert recorded(path) == {}
        assert "ties" not in body_of(Checkpoint(path).ranks[0])


class Unpacking(torch.Tensor):
    """A kind of tensor that gives its elements anew each time that it is asked for them."""

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        """Return the elements."""
        return self.as_subclass(torch.Tensor).clone()


def test_copies_made_by_a_kind_of_tensor_are_not_tied_by_the_writer(tmp_path: Path) -> None:
    """Torch's own planner asks it; what it gave is gone, and the next may lie in its place."""
    state = {f"w{i}": torch.ones(64).as_subclass(Unpacking) for i in range(20)}
    dcp_cases.save(dict(state), tmp_path)
    assert recorded(tmp_path) == {}
    assert "ties" not in body_of(Checkpoint(tmp_path).ranks[0])


def test_a_planner_that_changes_both_alike_keeps_the_tie_of_the_state(tmp_path: Path) -> None:
    """A front door ties what was one tensor in the state, as long as what is stored is equal."""
    ckpt_storage.save(tied_model(), tmp_path / "cast", planner=Resolving(cast), sync_files=False)
    assert recorded(tmp_path / "cast") == TIE
    planner = Resolving(change_the_head)
    ckpt_storage.save(tied_model(), tmp_path / "changed", planner=planner, sync_files=False)
    assert recorded(tmp_path / "changed") == {}


class Renaming(dcp.DefaultSavePlanner):
    """A planner that gives what it saves other names."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **more: Any) -> None:
        """Rename every key."""
        super().set_up_planner({f"new_{key}": state_dict[key] for key in state_dict}, *args, **more)


def test_a_tie_is_recorded_by_the_names_that_are_stored(tmp_path: Path) -> None:
    """Where a planner renames, the writer knows what the front door cannot."""
    ckpt_storage.save(tied_model(), tmp_path, planner=Renaming(), sync_files=False)
    assert recorded(tmp_path) == {"new_model.head": "new_model.embed"}


def save_in_background(rank: int, path: Path, apart: int | None) -> None:
    """Save a replicated model with an `AsyncSaver`; on rank `apart` the head is a copy."""
    state = tied_model()
    if rank == apart:
        state["model"]["head"] = state["model"]["embed"].detach().clone()
    with quick_saver("thread") as saver:
        saver.save(state, path, sync_files=False).result(END_S)


def test_ranks_agree_on_ties_in_the_background(ranks: RankPool, tmp_path: Path) -> None:
    """Several ranks that save in threads record what all have, and nothing else."""
    ranks.run(save_in_background, tmp_path / "tied", None, world_size=2)
    assert recorded(tmp_path / "tied") == TIE
    ranks.run(save_in_background, tmp_path / "apart", 1, world_size=2)
    assert recorded(tmp_path / "apart") == {}


@pytest.mark.parametrize(
    ("ties", "text"),
    [
        ({"model.head": "model.absent"}, "cannot be"),
        ({"model.absent": "model.embed"}, "cannot be"),
        ({"step": "model.embed"}, "cannot be"),
        ({"model.embed": "model.embed"}, "cannot be"),
        ({"model.head": "model.embed", "model.embed": "model.body"}, "cannot be"),
        ({"model.head": 3}, "cannot be"),
        ({"model.head": "other"}, "another dtype or shape"),
        ({"model.head": "turned"}, "another dtype or shape"),
        (["model.head"], "'ties' should be"),
    ],
)
def test_a_manifest_with_ties_that_cannot_be_is_refused(
    tmp_path: Path, ties: Any, text: str
) -> None:
    """Unknown names, blobs, chains, circles and unequal tensors are damage, and so it is said."""
    state = tied_model() | {"other": torch.zeros(24, 4).double(), "turned": torch.zeros(4, 24)}
    ckpt_storage.save(state, tmp_path, sync_files=False)
    body = body_of(Checkpoint(tmp_path).manifest)
    assert Manifest.from_body(body, where="here").ties == TIE
    with pytest.raises(FormatError, match=text):
        Manifest.from_body(body | {"ties": ties}, where="here")
