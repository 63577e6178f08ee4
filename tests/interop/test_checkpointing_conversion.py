"""From the native layout of torch_checkpointing to ours and back."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_tools import answer
from fork_server import run_script
from hostile_names import UNSAFE, tree
from integration_tools import ROOT, need
from s3_server import S3Server
from safetensors.torch import load_file

import ckpt_storage
from ckpt_storage import (
    CheckpointNotFoundError,
    FormatError,
    IntegrityError,
    UnsafeContentError,
)
from ckpt_storage.export.conversion import TargetFormat

need("torch_checkpointing")

# ruff: noqa: E402  # these need it
from checkpointing_job import ROWS, run, weight
from torch_checkpointing.distributed_metadata import (
    DistributedItemMetadata,
    DistributedMetadata,
    GlobalObjectMetadata,
    ShardingMetadata,
)
from torch_checkpointing.dtensor_metadata import (
    DeviceMeshSpec,
    DTensorShardingMetadata,
    ReplicateSpec,
    ShardSpec,
    StridedShardSpec,
)

from ckpt_storage.integrations.torch_checkpointing import convert_to_native

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests/support"])),
}


def job(folder: Path, *, ranks: int | None = 2, **options: Any) -> list[dict[str, Any]]:
    """Run a job of torch_checkpointing; return what each rank printed."""
    script = ROOT / "tests/support/checkpointing_job.py"
    code, output = run_script(
        script, json.dumps(options), folder=folder, environment=ENVIRONMENT, ranks=ranks
    )
    assert code == 0, output
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"rank"')]


def loaded(url: str | Path) -> dict[str, Any]:
    """Load what a job saved, by our loader."""
    model = {"weight": torch.zeros(ROWS, 16), "bias": torch.zeros(3)}
    state: dict[str, Any] = {"model": model, "step": 0}
    ckpt_storage.load(state, url)
    return state


@pytest.mark.parametrize("ranks", [None, 2])
def test_the_native_layout_becomes_a_checkpoint_of_ours(tmp_path: Path, ranks: int | None) -> None:
    """DTensors of two ranks and plain tensors of one arrive whole, and so does an int."""
    job(tmp_path, ranks=ranks, url=str(tmp_path / "native"), native=True, steps=[4])
    ckpt_storage.convert(tmp_path / "native/step-4", tmp_path / "ours", to="ckpt_storage")
    assert ckpt_storage.verify(tmp_path / "ours").ok
    state = loaded(tmp_path / "ours")
    assert torch.equal(state["model"]["weight"], weight(4))
    assert state["model"]["bias"].tolist() == [4.0] * 3
    assert state["step"] == 4


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_checkpoint_of_ours_becomes_the_native_layout(tmp_path: Path, ranks: int | None) -> None:
    """Their manager loads it on one rank, and into DTensors on two."""
    state = {"model": {"weight": weight(5), "bias": torch.full((3,), 5.0)}, "step": 5}
    ckpt_storage.save(state, tmp_path / "ours")
    (tmp_path / "native").mkdir()
    convert_to_native(tmp_path / "ours", tmp_path / "native/step-5")
    for of_rank in job(tmp_path, ranks=ranks, url=str(tmp_path / "native"), native=True, load=5):
        assert (of_rank["is_equal"], of_rank["bias"]) == (True, [5.0] * 3)
    ckpt_storage.convert(tmp_path / "native/step-5", tmp_path / "again", to="ckpt_storage")
    assert torch.equal(loaded(tmp_path / "again")["model"]["weight"], weight(5))


def test_the_command_line_converts_it(tmp_path: Path) -> None:
    """It recognizes the layout, and reports it."""
    job(tmp_path, url=str(tmp_path / "native"), native=True, steps=[4])
    report = answer("convert", tmp_path / "native/step-4", tmp_path / "ours")
    assert report["source_format"] == "torch_checkpointing"
    assert torch.equal(loaded(tmp_path / "ours")["model"]["weight"], weight(4))


@pytest.mark.parametrize("target", ["torch_save", "dcp"])
def test_the_native_layout_becomes_other_formats(tmp_path: Path, target: TargetFormat) -> None:
    """Stock readers get whole tensors and the other values."""
    job(tmp_path, url=str(tmp_path / "native"), native=True, steps=[4])
    path = tmp_path / "other.pt"
    ckpt_storage.convert(tmp_path / "native/step-4", path, to=target)
    state: dict[str, Any] = {"model": {"weight": torch.zeros(ROWS, 16)}, "step": 0}
    if target == "dcp":
        dcp.load(state, checkpoint_id=path, no_dist=True)
    else:
        state = torch.load(path, weights_only=True)
    assert torch.equal(state["model"]["weight"], weight(4))
    assert state["step"] == 4


def test_their_files_in_a_checkpoint_of_ours_are_converted(
    tmp_path: Path, server: S3Server
) -> None:
    """What their manager saved through our storage, on a bucket too; every byte is verified."""
    options = server.storage_options
    run({"url": "s3://bucket/run", "steps": [6], "storage_options": options})
    source = "s3://bucket/run/step-6"
    ckpt_storage.convert(source, tmp_path / "ours", to="ckpt_storage", storage_options=options)
    with ckpt_storage.open_checkpoint(tmp_path / "ours") as checkpoint:
        assert torch.equal(checkpoint["model.weight"].torch(), weight(6))


def native(
    folder: Path, parts: Sequence[torch.Tensor], placements: Sequence[Any], **fields: Any
) -> None:
    """Write the layout of ranks on a mesh of two by two, each with one part of a tensor."""
    folder.mkdir()
    mesh = DeviceMeshSpec(device_type="cpu", mesh_shape=(2, 2), mesh_data=(0, 1, 2, 3))
    sharding: Any = DTensorShardingMetadata(
        global_shape=fields.get("shape", (8, 4)),
        dtype="torch.float32",
        stride=(4, 1),
        mesh_spec=mesh,
        placements=tuple(placements),
    )
    ranks = range(len(parts))
    group = GlobalObjectMetadata(fields.get("sharding", sharding), tuple(ranks))
    item = DistributedItemMetadata({("w",): [group]}, dict.fromkeys(ranks))
    described = DistributedMetadata({"model": item}, world_size=len(parts)).to_dict()
    (folder / "metadata.pkl").write_bytes(pickle.dumps(described))
    for rank, part in enumerate(parts):
        torch.save({"w": part}, folder / f"model_{rank}.pt")


def test_a_strided_shard_gets_its_rows_in_order(tmp_path: Path) -> None:
    """FSDP over tensor parallelism of one dimension: a part has rows of two places."""
    whole = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    # Tensor parallelism halves the rows, FSDP halves these: places are [fsdp, tp].
    quarters = whole.chunk(4)
    parts = [quarters[0], quarters[2], quarters[1], quarters[3]]
    native(tmp_path / "a", parts, [StridedShardSpec(0, split_factor=2), ShardSpec(0)])
    ckpt_storage.convert(tmp_path / "a", tmp_path / "a.pt", to="torch_save")
    assert torch.equal(torch.load(tmp_path / "a.pt")["model"]["w"], whole)
    # A replica of FSDP's half, which is not contiguous in the whole.
    halves = [torch.cat([quarters[0], quarters[2]]), torch.cat([quarters[1], quarters[3]])]
    parts = [halves[0], halves[0], halves[1], halves[1]]
    native(tmp_path / "b", parts, [StridedShardSpec(0, split_factor=2), ReplicateSpec()])
    ckpt_storage.convert(tmp_path / "b", tmp_path / "ours", to="ckpt_storage")
    with ckpt_storage.open_checkpoint(tmp_path / "ours") as checkpoint:
        assert torch.equal(checkpoint["model.w"].torch(), whole)


def of_items(folder: Path, items: Mapping[str, Sequence[Mapping[str, torch.Tensor]]]) -> None:
    """Write items of plain tensors, which each rank that has a file of them has whole."""
    described: dict[str, DistributedItemMetadata] = {}
    for name, states in items.items():
        groups: dict[Any, list[GlobalObjectMetadata]] = {}
        for rank, state in enumerate(states):
            torch.save(state, folder / f"{name}_{rank}.pt")
            mesh = DeviceMeshSpec(device_type="cpu", mesh_shape=(1,), mesh_data=(rank,))
            for key, value in state.items():
                whole: Any = DTensorShardingMetadata(
                    global_shape=tuple(value.shape),
                    dtype=str(value.dtype),
                    stride=tuple(value.stride()),
                    mesh_spec=mesh,
                    placements=(ReplicateSpec(),),
                )
                groups.setdefault((key,), []).append(GlobalObjectMetadata(whole, (rank,)))
        described[name] = DistributedItemMetadata(groups, dict.fromkeys(range(len(states))))
    content = DistributedMetadata(described, world_size=2).to_dict()
    (folder / "metadata.pkl").write_bytes(pickle.dumps(content))


def test_the_stages_of_a_pipeline_are_nested_alike(tmp_path: Path) -> None:
    """Tensors that the first rank lacks stand in the item, as their loader has them."""
    of_items(tmp_path, {"model": [{"a": torch.ones(4)}, {"b": torch.full((4,), 2.0)}]})
    ckpt_storage.convert(tmp_path, tmp_path / "all.pt", to="torch_save")
    state = torch.load(tmp_path / "all.pt")
    assert {key: value.tolist() for key, value in state["model"].items()} == {
        "a": [1.0] * 4,
        "b": [2.0] * 4,
    }


def test_two_values_of_one_name_are_refused(tmp_path: Path) -> None:
    """Neither replaces the other."""
    of_items(tmp_path, {"a": [{"b.w": torch.ones(4)}, {}], "a.b": [{"w": torch.zeros(4)}, {}]})
    with pytest.raises(FormatError, match=r"two items have values of the name a\.b\.w"):
        ckpt_storage.convert(tmp_path, tmp_path.with_name("ours"), to="ckpt_storage")


@pytest.mark.parametrize("shape", [(2,), (4.0,)])
def test_metadata_that_fits_no_file_is_refused(tmp_path: Path, shape: Any) -> None:
    """The error names the metadata."""
    native(tmp_path / "a", [torch.tensor(1.0)] * 4, [ShardSpec(0), ReplicateSpec()], shape=shape)
    with pytest.raises(FormatError, match=r"metadata\.pkl cannot be read"):
        ckpt_storage.convert(tmp_path / "a", tmp_path / "ours", to="ckpt_storage")


def test_a_sharding_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """The part of one rank is not taken for the whole tensor."""

    @dataclass(frozen=True)
    class Ragged(ShardingMetadata):
        """A sharding of a user's own."""

        def to_dict(self) -> dict[str, Any]:
            return {}

        @classmethod
        def from_dict(cls, d: dict[str, Any]) -> Ragged:
            del d
            return cls()

        @property
        def equivalent_ranks(self) -> None:
            return None

    native(tmp_path / "a", [torch.zeros(4, 4)] * 2, [], sharding=Ragged())
    with pytest.raises(FormatError, match=r"Ragged for model\.w on rank 0"):
        ckpt_storage.convert(tmp_path / "a", tmp_path / "ours", to="ckpt_storage")


def test_a_file_of_one_rank_is_no_source(tmp_path: Path) -> None:
    """`convert` names the DTensor in it, and the function that reads the files of all ranks."""
    job(tmp_path, url=str(tmp_path / "native"), native=True, steps=[1])
    file = tmp_path / "native/step-1/model_0.pt"
    with pytest.raises(FormatError, match="holds weight as a DTensor") as caught:
        ckpt_storage.convert(file, tmp_path / "ours", to="ckpt_storage")
    assert "convert the folder" in str(caught.value)


def test_values_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    """An item without metadata is that of all ranks only if their files are equal."""
    job(tmp_path, url=str(tmp_path / "native"), native=True, steps=[1], same=False)
    with pytest.raises(FormatError, match="different values of step"):
        ckpt_storage.convert(tmp_path / "native/step-1", tmp_path / "ours", to="ckpt_storage")
    assert not (tmp_path / "ours").exists()


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    """Metadata of two ranks, and a file that holds less than its rank's part."""
    job(tmp_path, url=str(tmp_path / "native"), native=True, steps=[1])
    file = tmp_path / "native/step-1/model_1.pt"
    state = torch.load(file, weights_only=True)
    del state["weight"]
    torch.save(state, file)
    with pytest.raises(FormatError, match=r"model\.weight do not make up its shape \[4096, 16\]"):
        ckpt_storage.convert(tmp_path / "native/step-1", tmp_path / "ours", to="ckpt_storage")


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    """Their own loader unpickles everything."""
    job(tmp_path, ranks=None, url=str(tmp_path / "native"), native=True, steps=[1])
    metadata = tmp_path / "native/step-1/metadata.pkl"
    metadata.write_bytes(pickle.dumps({"version": print}))
    with pytest.raises(UnsafeContentError, match=r"builtins\.print"):
        ckpt_storage.convert(tmp_path / "native/step-1", tmp_path / "ours", to="ckpt_storage")


@pytest.mark.parametrize("name", [*UNSAFE, "s3:b"])
def test_metadata_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    """Nothing outside the folder is read, and nothing is written."""
    source, target = tmp_path / "deep" / "a", tmp_path / "deep" / "ours"
    source.mkdir(parents=True)
    of_items(source, {"model": [{"w": torch.ones(4)}] * 2})
    for path in ("x", "deep/x"):
        torch.save({"w": torch.zeros(4)}, tmp_path / path)
    content = pickle.loads((source / "metadata.pkl").read_bytes())
    info = {"serialization_format": {"type": "TorchSerialization"}, "file_path": name}
    content["metadata"]["model"]["rank_to_layout_info"][0] = info
    (source / "metadata.pkl").write_bytes(pickle.dumps(content))
    before = tree(tmp_path)
    with pytest.raises(UnsafeContentError, match=r"metadata\.pkl"):
        ckpt_storage.convert(source, target, to="ckpt_storage")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["../x", "../../x", "a/b", "a\\b", "..", ""])
def test_no_name_of_an_item_becomes_a_path_elsewhere(tmp_path: Path, name: str) -> None:
    """Their manager names a file of each item after the key of the state, which it checks."""
    ckpt_storage.save({name: torch.ones(2), "step": 1}, tmp_path / "ours")
    (tmp_path / "deep").mkdir()
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="Invalid checkpoint keys"):
        convert_to_native(tmp_path / "ours", tmp_path / "deep/native")
    assert tree(tmp_path) == before


def test_a_file_of_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    """The metadata names the files of all ranks."""
    job(tmp_path, url=str(tmp_path / "native"), native=True, steps=[1])
    (tmp_path / "native/step-1/model_1.pt").unlink()
    with pytest.raises(IntegrityError, match=r"model_1\.pt, which metadata\.pkl names, is missing"):
        ckpt_storage.convert(tmp_path / "native/step-1", tmp_path / "ours", to="ckpt_storage")


def test_a_flipped_byte_is_named(tmp_path: Path) -> None:
    """Each record is held against the checksum that torch wrote; their loader notices nothing."""
    job(tmp_path, ranks=None, url=str(tmp_path / "native"), native=True, steps=[1])
    file = tmp_path / "native/step-1/model_0.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"model_0\.pt is damaged"):
        ckpt_storage.convert(tmp_path / "native/step-1", tmp_path / "ours", to="ckpt_storage")


@pytest.mark.parametrize("names", [["epoch_1.pt", "epoch_2.pt"], ["a_0.pt", "notes.txt"]])
def test_a_folder_of_other_files_is_no_checkpoint(tmp_path: Path, names: list[str]) -> None:
    """Files of items have the numbers of all ranks, and nothing is beside them."""
    for name in names:
        torch.save({"w": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        ckpt_storage.convert(tmp_path, tmp_path.with_name("ours"), to="ckpt_storage")


def test_their_checkpoints_are_pruned_followed_and_exported(tmp_path: Path) -> None:
    """`prune` and `follow` read the same commits; `consolidate` exports a converted checkpoint."""
    url = tmp_path / "run"
    run({"url": str(url), "steps": [1, 2, 3]})
    ckpt_storage.prune(url, keep=ckpt_storage.KeepLatest(2), names="step-{step}", dry_run=False)
    assert [info.name for info in ckpt_storage.follow(url, poll_s=0.1, idle_s=0.1)] == [
        "step-2",
        "step-3",
    ]
    ckpt_storage.convert(url / "step-3", tmp_path / "ours", to="ckpt_storage")
    ckpt_storage.consolidate(tmp_path / "ours", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(weights["weight"], weight(3))
