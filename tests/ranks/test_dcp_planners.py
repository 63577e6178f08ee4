"""Planners of a user's own: what they may do, and what happens when they do it wrong; and ties.

Tensors that are the same memory are recorded as tied, others never.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from damage_cases import Checkpoint, body_of
from dcp_cases import (
    assert_holds,
    cut,
    errors_by_rank,
    planner,
    raw_bytes,
    refused,
    resolving,
    same,
    seeded,
)
from limits import HANG_S
from on_ranks import gathered, on_ranks
from saver_cases import quick_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

import ckpt_storage
from ckpt_storage import FormatError, errors, list_checkpoints, verify
from ckpt_storage.format.manifest import Manifest

STATE = {"w": seeded(1, 40, 30), "v": seeded(2, 7), "step": 3}

Planned = tuple[list[SavePlan], Metadata]


def losing(fqn: str, first_rank: int = 0) -> Any:
    """Return a planner that plans everything and then leaves a value out, from a rank on."""

    def lose(plan: Callable[..., Planned], all_plans: list[SavePlan]) -> Planned:
        plans, metadata = plan(all_plans)
        for rank in range(first_rank, len(plans)):
            kept = [item for item in plans[rank].items if item.index.fqn != fqn]
            plans[rank] = replace(plans[rank], items=kept)
        return plans, metadata

    return planner(create_global_plan=lose)


def to_bfloat16(item: WriteItem, value: Any) -> Any:
    return value if item.type is WriteItemType.BYTE_IO else value.to(torch.bfloat16)


def turned(item: WriteItem, value: Any) -> Any:
    """Turn tensors and give them history; leave streams somewhere in the middle."""
    if item.type is WriteItemType.BYTE_IO:
        value.seek(5)
        return value
    return value.t().contiguous().t().requires_grad_() if value.ndim == 2 else value


def test_a_planner_may_convert_and_give_views_and_streams_at_any_position(tmp_path: Path) -> None:
    """What is stored, and what the metadata tells every reader, is what the planner gave."""
    cast, views = tmp_path / "cast", tmp_path / "views"
    dcp_cases.save(dict(STATE), cast, planner=resolving(to_bfloat16))
    assert_holds(cast, {"w": seeded(1, 40, 30).bfloat16(), "v": seeded(2, 7).bfloat16(), "step": 3})
    entry: Any = dcp.FileSystemReader(cast).read_metadata().state_dict_metadata["w"]
    assert entry.properties.dtype is torch.bfloat16
    dcp_cases.save(dict(STATE), views, planner=resolving(turned))
    assert_holds(views, STATE)


def test_what_a_planner_gets_wrong_is_told_and_nothing_commits(tmp_path: Path) -> None:
    """The error names the value and what it should be; what nobody wrote is found, too."""
    wrong: list[tuple[str, Callable[[Any], Any], str]] = [
        ("w", lambda value: value[1:], "w has shape [39, 30]; the plan says [40, 30]."),
        ("w", lambda value: value.tolist(), "The planner gave list for the tensor w."),
        ("step", lambda value: value.getvalue(), "The planner gave bytes for the blob step."),
    ]
    for fqn, change, text in wrong:

        def resolve(item: WriteItem, value: Any, fqn: str = fqn, change: Any = change) -> Any:
            return change(value) if item.index.fqn == fqn else value

        given = dcp_cases.save, dict(STATE), tmp_path / "run"
        (error,) = refused(errors.InvalidInputError, text, *given, planner=resolving(resolve))
        assert error.rank == 0
        assert not list(tmp_path.rglob("*.distcp"))
    for fqn in ("w", "step"):
        kind, text = errors.IntegrityError, "Nothing was committed."
        given = dcp_cases.save, dict(STATE), tmp_path / "run"
        (error,) = refused(kind, text, *given, planner=losing(fqn))
        assert error.fqn == fqn
    assert list_checkpoints(tmp_path) == []


def replicate(plan: Callable[..., Planned], plans: list[SavePlan]) -> Planned:
    """Make a global plan by which each rank writes all its values twice."""
    return [replace(each, items=each.items * 2) for each in plans], plan(plans)[1]


@on_ranks(3)
def test_a_part_of_a_checkpoint_with_replicas_is_copied(rank: int, tmp_path: Path) -> None:
    """The copy of some values is sound and loads, though several ranks wrote each of them."""
    dcp_cases.save(dict(STATE), tmp_path / "run", planner=planner(create_global_plan=replicate))
    if rank == 0:
        ckpt_storage.copy(tmp_path / "run", tmp_path / "part", exclude="v")
        assert verify(tmp_path / "part").problems == []
        with ckpt_storage.open_checkpoint(tmp_path / "part") as checkpoint:
            assert checkpoint["step"] == 3
            assert same(checkpoint["w"].torch(), STATE["w"])


@on_ranks(3)
def test_replicas_count_once(tmp_path: Path) -> None:
    """A value that lies twice in the files of each of three ranks loads from one of them."""
    dcp_cases.save(dict(STATE), tmp_path, planner=planner(create_global_plan=replicate))
    files = list(tmp_path.rglob("*.distcp"))
    assert sum(file.read_bytes().count(raw_bytes(seeded(1, 40, 30))) for file in files) == 6
    assert_holds(tmp_path, STATE)
    assert verify(tmp_path).problems == []


@on_ranks(3)
def test_shards_that_make_no_whole_tensor_are_found_before_the_commit(
    rank: int, tmp_path: Path
) -> None:
    """A missing shard, or one of another dtype, is an error on all ranks; nothing commits."""
    for own, text in (
        (losing("rows", 2), "leave a gap at"),
        (
            resolving(to_bfloat16) if rank == 1 else None,
            "Rank 1 wrote rows as bfloat16; others as float32.",
        ),
    ):
        given = dcp_cases.save, {"rows": cut(seeded(1, 9, 4))}, tmp_path / "run"
        for error in refused(errors.IntegrityError, text, *given, planner=own):
            assert error.fqn == "rows"
    assert list_checkpoints(tmp_path) == []


def test_a_state_that_is_not_flattened_survives(tmp_path: Path) -> None:
    """With `flatten_state_dict=False` nested values are blobs, tensors inside included."""
    state: dict[str, Any] = {"w": seeded(1, 4), "nested": {"v": seeded(2, 3), "n": 1}}
    flat = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp_cases.save(dict(state), tmp_path, planner=flat)
    target: dict[str, Any] = {"w": torch.zeros(4), "nested": None}
    dcp_cases.load(target, tmp_path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
    assert dcp_cases.same(target["w"], state["w"])


def test_a_load_planner_gets_its_own_tensor_back_filled(tmp_path: Path) -> None:
    """What `resolve_tensor` gave is what `commit_tensor` gets, with the values in it."""
    taken: dict[str, torch.Tensor] = {}

    def scratch(_own: Any, item: ReadItem, _tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(item.lengths, dtype=torch.float64)

    def take(_own: Any, item: ReadItem, tensor: torch.Tensor) -> None:
        taken[item.dest_index.fqn] = tensor.clone()

    dcp_cases.save(dict(STATE), tmp_path)
    own = planner(dcp.DefaultLoadPlanner, transform_tensor=scratch, commit_tensor=take)
    dcp_cases.load(dcp_cases.zeros_like(STATE), tmp_path, planner=own)
    assert dcp_cases.same(taken, {"w": seeded(1, 40, 30).double(), "v": seeded(2, 7).double()})


class UnpicklableError(Exception):
    """An exception that another process cannot make again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def failing(*_: Any) -> NoReturn:
    raise UnpicklableError("503 ", "Slow Down")


@on_ranks()
def test_an_exception_that_does_not_pickle_reaches_all_ranks(rank: int, tmp_path: Path) -> None:
    """It is replaced by one of ours with its type and text; no rank hangs, nothing commits."""
    own = resolving(failing) if rank else None
    raised = errors_by_rank(
        dcp_cases.save, STATE | {f"own-{rank}": rank}, tmp_path / "run", planner=own
    )
    assert list(raised) == [1]
    assert isinstance(raised[1], errors.CheckpointError)
    assert "UnpicklableError: 503 Slow Down" in str(raised[1])
    gathered()
    assert list_checkpoints(tmp_path) == []
    assert not list(tmp_path.rglob("__1_0.distcp"))


def test_a_load_planner_that_errs_is_told_what(tmp_path: Path) -> None:
    """Errors of load planners reach all ranks as what they are, or as text where they cannot."""
    dcp_cases.save({"v": STATE["v"]}, tmp_path)

    def longer(_own: Any, item: ReadItem, _tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(item.lengths[0] + 1)

    wrong: list[tuple[dict[str, Any], type, str]] = [
        (
            {"transform_tensor": longer},
            errors.InvalidInputError,
            "The planner gave a target of shape [8] for [7]",
        ),
        ({"commit_tensor": failing}, errors.CheckpointError, "UnpicklableError: 503 Slow Down"),
    ]
    for steps, kind, text in wrong:
        own = planner(dcp.DefaultLoadPlanner, **steps)
        given = dcp_cases.load, {"v": torch.zeros(7)}, tmp_path
        (error,) = refused(kind, text, *given, planner=own)
        assert type(error) is kind


class OwnBlob(dcp.DefaultLoadPlanner):
    """A load planner that reads blobs in a format of its own."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


def test_blobs_in_a_format_of_ones_own_need_trust(tmp_path: Path) -> None:
    """Streams that are no torch.save file reach their planner with `unsafe_pickle=True`."""

    def blob(_own: Any, item: WriteItem, value: Any) -> Any:
        return io.BytesIO(b"own format") if item.type is WriteItemType.BYTE_IO else value

    dcp_cases.save(dict(STATE), tmp_path, planner=planner(transform_object=blob))
    target = dcp_cases.zeros_like(STATE)
    with pytest.raises(CheckpointException, match="unsafe_pickle=True"):
        dcp_cases.load(dict(target), tmp_path, planner=OwnBlob())
    dcp_cases.load(target, tmp_path, planner=OwnBlob(), unsafe_pickle=True)
    assert target["step"] == b"own format"


class Halving(dcp.DefaultSavePlanner):
    """Gives other data than the state's by the one step that it overrides."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
        return super().transform_object(write_item, object) / 2


class Elsewhere(dcp.DefaultLoadPlanner):
    """Loads into other memory than the state's."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return super().lookup_tensor(index).clone()


def test_planners_that_change_one_step_are_asked(tmp_path: Path) -> None:
    """Whether a class overrides it or an object does, for a save and for a load."""
    elsewhere = planner(dcp.DefaultLoadPlanner, lookup_tensor=lambda own, index: own(index).clone())
    patched = planner(lookup_object=lambda _, __: torch.full((2,), 7.0))
    dcp_cases.save({"w": torch.full((2,), 4.0)}, tmp_path / "half", planner=Halving())
    dcp_cases.save({"w": torch.ones(2)}, tmp_path / "patched", planner=patched)
    for name, own, value in (
        ("half", elsewhere, 0),
        ("half", Elsewhere(), 0),
        ("half", None, 2),
        ("patched", None, 7),
    ):
        dcp_cases.load(target := {"w": torch.zeros(2)}, tmp_path / name, planner=own)
        assert target["w"].tolist() == [value] * 2


TIE = {"model.head": "model.embed"}


def by_ours(state: dict[str, Any], path: Path, **options: Any) -> None:
    ckpt_storage.save(state, path, sync_files=False, **options)


def in_background(state: dict[str, Any], path: Path, **options: Any) -> None:
    with quick_saver("thread") as saver:
        saver.save(state, path, sync_files=False, **options).result(HANG_S)


Door = Callable[..., None]
by_dcp: Door = dcp_cases.save
each_door = pytest.mark.parametrize("door", [by_ours, by_dcp])


def recorded(path: Path) -> dict[str, str]:
    ties: dict[str, str] = body_of(Checkpoint(path).manifest).get("ties", {})
    return ties


def writers_of(path: Path, fqn: str) -> set[int]:
    return {
        rank["rank"]
        for rank in map(body_of, Checkpoint(path).ranks)
        if any(fqn in map(rank["fqns"].__getitem__, f["items"]["fqn"]) for f in rank["files"])
    }


def tied_model() -> dict[str, Any]:
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


@pytest.mark.parametrize("door", [by_ours, by_dcp, in_background])
@on_ranks()
def test_a_tie_needs_the_word_of_all_who_wrote(rank: int, tmp_path: Path, door: Door) -> None:
    """Where two ranks divided the tensors, either can object; one that wrote neither cannot.

    On one rank the head is a copy, or on none.
    """
    found: dict[tuple[bool, int | None], dict[str, str]] = {}
    for lowest, apart in itertools.product((False, True), (None, 0, 1)):
        state = tied_model()
        if rank == apart:
            state["model"]["head"] = state["model"]["embed"].detach().clone()
        path = tmp_path / f"{lowest}-{apart}"
        door(state, path, planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=lowest))
        found[lowest, apart] = recorded(path)
    divided = tmp_path / "False-None"
    assert writers_of(divided, "model.embed") != writers_of(divided, "model.head")
    assert {key for key, ties in found.items() if not ties} == {(False, 0), (False, 1), (True, 0)}
    assert [ties for ties in found.values() if ties] == [TIE] * 3


def sharded_model(placement: Placement, rows: int, apart: int | None) -> dict[str, Any]:
    """Return a tied model in shards as FSDP keeps it; on rank `apart` the head is a copy."""
    embed = cut(seeded(1, rows, 6), placement)
    head: Any = torch.nn.Parameter(embed)
    if dist.get_rank() == apart:
        head = cut(seeded(1, rows, 6), placement)
    return {"model": {"embed": embed, "head": head}}


@each_door
@on_ranks(4)
def test_shards_are_tied_where_all_that_hold_any_agree(tmp_path: Path, door: Door) -> None:
    """A rank that holds no element has no say; the same memory in other rows is no tie.

    In both shardings rank 3 holds no element.
    """
    for placement, rows in ((Shard(0), 3), (Shard(1), 5)):
        for apart, ties in ((None, TIE), (3, TIE), (0, {})):
            path = tmp_path / f"{rows}-{apart}"
            door(sharded_model(placement, rows, apart), path)
            assert recorded(path) == ties
    # One local tensor as part of tensors that are cut otherwise, or to other ranks.
    mesh = init_device_mesh("cpu", (4,))
    local = torch.ones(4, 4)
    state = {
        "rows": DTensor.from_local(local, mesh, [Shard(0)]),
        "columns": DTensor.from_local(local, mesh, [Shard(1)]),
        "reversed": DTensor.from_local(local, DeviceMesh("cpu", [3, 2, 1, 0]), [Shard(0)]),
    }
    door(state, tmp_path / "otherwise")
    assert recorded(tmp_path / "otherwise") == {}


def changing(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """Return a planner that passes tensors through a function."""

    def changed(item: WriteItem, value: Any) -> Any:
        is_blob = item.type is WriteItemType.BYTE_IO
        return value if is_blob else change(item.index.fqn, value)

    return resolving(changed)


class Unpacking(torch.Tensor):
    """A kind of tensor that gives its elements anew each time that it is asked for them."""

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_ties_are_those_of_the_state_and_of_what_is_stored(tmp_path: Path) -> None:
    """Copies that a planner or a kind of tensor makes are no ties, though memory is used again."""
    ones = {f"w{i}": torch.ones(64, 64) for i in range(6)}
    buffer = torch.empty(64, 64)
    again = changing(lambda _, value: buffer.copy_(value))
    cast = resolving(to_bfloat16)
    change = changing(lambda fqn, value: value + 1 if fqn.endswith("head") else value)
    by_dcp(dict(ones), tmp_path / "copies", planner=cast)
    by_dcp(dict(ones), tmp_path / "buffer", planner=again)
    kinds = {f"w{i}": torch.ones(64).as_subclass(Unpacking) for i in range(20)}
    by_dcp(kinds, tmp_path / "kinds")
    by_ours(tied_model(), tmp_path / "changed", planner=change)
    assert [recorded(path) for path in tmp_path.iterdir()] == [{}] * 4
    by_ours(tied_model(), tmp_path / "cast", planner=cast)
    assert recorded(tmp_path / "cast") == TIE
    rename = planner(
        set_up_planner=lambda set_up, state, *args, **more: set_up(
            {f"new_{key}": state[key] for key in state}, *args, **more
        )
    )
    by_ours(tied_model(), tmp_path / "renamed", planner=rename)
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
