"""Torch's own readers read ours; ours reads what torch and the Hugging Face world write."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, same, seeded, zeros_like
from on_ranks import on_ranks
from rank_pool import RankPool
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import ckpt_storage
from ckpt_storage import CheckpointStorageReader, FormatError, IntegrityError, InvalidInputError
from ckpt_storage.format.dtypes import DTYPES

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning"),
]

NAMES = [name for name in DTYPES if not name.startswith("bits")]
PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[Placement, Placement]]] = {
    "rows": ((10, 3), (Shard(0), Replicate())),
    "grid": ((7, 9), (Shard(0), Shard(1))),
    "twice": ((9, 4), (Shard(0), Shard(0))),
    "copies": ((5,), (Replicate(), Replicate())),
}


def whole_state() -> dict[str, Any]:
    kinds = {name: seeded(i, 5, 3, dtype=getattr(torch, name)) for i, name in enumerate(NAMES)}
    sharded = {name: seeded(i, *shape) for i, (name, (shape, _)) in enumerate(PLACEMENTS.items())}
    scalars = {"zero": seeded(91), "empty": seeded(92, 0, 2), "large": seeded(93, 300, 400)}
    return {"kinds": kinds, "sharded": sharded, **scalars, "step": 5, "words": ["a", {"b": None}]}


def local_state(shape: tuple[int, int]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape)
    state = whole_state()
    for name, (_, placements) in PLACEMENTS.items():
        state["sharded"][name] = distribute_tensor(state["sharded"][name], mesh, placements)
    return state


def save_ours(_rank: int, path: Path) -> None:
    warnings.simplefilter("ignore")
    dcp_cases.save(local_state((2, 2)), path)


@pytest.fixture(scope="module")
def ours(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ours") / "run"
    ranks.run(save_ours, path)
    return path


@pytest.mark.parametrize("make", [dcp.FileSystemReader, FsspecReader])
def test_stock_readers_load_ours(ours: Path, make: Callable[[Path], Any]) -> None:
    """Both readers of torch find every dtype, every sharding and every blob bit by bit."""
    by = [lambda state, path: dcp.load(state, storage_reader=make(path))]
    dcp_cases.assert_holds(ours, whole_state(), by)


@on_ranks(3)
def test_stock_readers_reshard_ours(ours: Path) -> None:
    """Torch's reader loads a checkpoint of four ranks on three."""
    by = [lambda state, at: dcp.load(state, storage_reader=dcp.FileSystemReader(at))]
    dcp_cases.assert_holds(ours, {"sharded": local_state((1, 3))["sharded"]}, by)


def test_dcp_to_torch_save_converts_ours(ours: Path, tmp_path: Path) -> None:
    """Torch's converter makes one file of ours, with the nesting of the state."""
    dcp_to_torch_save(ours, tmp_path / "one.pt")
    assert same(torch.load(tmp_path / "one.pt", weights_only=True), whole_state())


def test_torch_loads_ours_without_a_template(ours: Path) -> None:
    """`_load_state_dict_from_keys` rebuilds the state through torch's reader and through ours."""
    for reader in (dcp.FileSystemReader(ours), CheckpointStorageReader(ours)):
        assert same(_load_state_dict_from_keys(storage_reader=reader), whole_state())
        part = _load_state_dict_from_keys({"sharded.grid", "step"}, storage_reader=reader)
        assert same(part, {"sharded": {"grid": whole_state()["sharded"]["grid"]}, "step": 5})


def save_stock(_rank: int, path: Path, kind: str) -> None:
    warnings.simplefilter("ignore")
    state = local_state((1, 2))
    if kind == "fsspec":
        dcp.save(state, storage_writer=FsspecWriter(str(path), thread_count=3))
    else:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


def assert_ours_loads(path: Path, expected: dict[str, Any], kind: str) -> None:
    """Assert that our reader finds all of it, and names the format."""
    target = zeros_like(expected)
    reader = dcp_cases.load(target, path)
    assert same(target, expected)
    assert reader.format == kind


def test_ours_loads_what_stock_writers_save_on_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Checkpoints of torch's writers, with one and several files per rank, come back whole."""
    for kind in ("filesystem", "fsspec"):
        ranks.run(save_stock, tmp_path / kind, kind, world_size=2)
        assert_ours_loads(tmp_path / kind, whole_state(), "dcp")


def test_ours_loads_what_one_process_saved(tmp_path: Path) -> None:
    """Torch's checkpoint in one file or one for each value, and what its converter makes."""
    for name, one_file in (("one", True), ("each", False)):
        writer = dcp.FileSystemWriter(tmp_path / name, single_file_per_rank=one_file)
        dcp.save(whole_state(), storage_writer=writer)
    torch.save(whole_state(), tmp_path / "one.pt")
    torch_save_to_dcp(tmp_path / "one.pt", tmp_path / "converted")
    for name in ("one", "each", "converted"):
        assert_ours_loads(tmp_path / name, whole_state(), "dcp")


def test_ours_loads_tensors_that_torch_saved_in_another_order(tmp_path: Path) -> None:
    """Transposed tensors, parameters and tensors with history of a stock checkpoint load."""
    parameter = torch.nn.Parameter(seeded(1, 4, 6))
    state = {
        "turned": seeded(2, 70, 30).t(),
        "parameter": parameter,
        "turned parameter": torch.nn.Parameter(seeded(3, 5, 2).t()),
        "conjugate": seeded(4, 3, 3, dtype=torch.complex64).conj(),
        "part": seeded(5, 100)[10:20],
    }
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(tmp_path))
    expected = {
        name: value.detach().resolve_conj().contiguous().clone() for name, value in state.items()
    }
    assert_ours_loads(tmp_path, expected, "dcp")


def handmade(folder: Path, items: dict[str, torch.Tensor], **sizes: tuple[int, ...]) -> None:
    """Write a stock checkpoint of whole tensors by hand, each item as torch.save has it.

    `sizes` is what the metadata claims where that is not the tensor's own shape.
    """
    folder.mkdir()
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for name, tensor in items.items():
            start = file.tell()
            torch.save(tensor, file)
            shape = torch.Size(sizes.get(name, tuple(tensor.shape)))
            zeros = torch.Size([0] * len(shape))
            chunk = ChunkStorageMetadata(zeros, shape)
            entries[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), shape, [chunk])
            length = file.tell() - start
            places[MetadataIndex(name, zeros)] = _StorageInfo("__0_0.distcp", start, length)
    metadata = Metadata(entries, planner_data={n: (n,) for n in entries}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_items_with_more_in_their_storage_than_the_tensor_load(tmp_path: Path) -> None:
    """Views saved together with a larger storage are read by torch itself, region by region."""
    base = seeded(1, 50, 40)
    items = {"columns": base[:, 3:9], "rows": base[5:7], "one": base[3, 4], "turned": base.t()}
    handmade(tmp_path / "views", items)
    expected = {name: value.contiguous().clone() for name, value in items.items()}
    assert_ours_loads(tmp_path / "views", expected, "dcp")


def write_stock(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def write_handmade(state: dict[str, Any], path: Path) -> None:
    larger = {name: torch.cat([value, value])[: len(value)] for name, value in state.items()}
    handmade(path, larger)


def write_stock_safetensors(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(path)), no_dist=True)


def write_safetensors(state: dict[str, Any], path: Path) -> None:
    path.mkdir()
    safetensors.torch.save_file(state, path / "model.safetensors")


@pytest.mark.parametrize(
    "write", [write_stock, write_handmade, write_stock_safetensors, write_safetensors]
)
@pytest.mark.parametrize(
    "view",
    [lambda whole: whole, lambda whole: whole[1:3], torch.t],
    ids=["tied", "rows", "transposed"],
)
def test_targets_that_share_memory_take_no_different_values(
    tmp_path: Path,
    write: Callable[[dict[str, Any], Path], None],
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Also of a checkpoint without checksums: stock torch loads either value, and says nothing."""
    whole = seeded(1, 4, 4)
    same_values = view(whole).contiguous().clone()
    changed = same_values.clone()
    changed[1, 1] += 1
    write({"a": whole, "b": same_values, "c": changed}, tmp_path / "c")
    for load in (ckpt_storage.load, dcp_cases.load):
        target = torch.zeros(4, 4)
        load({"a": target, "b": view(target)}, tmp_path / "c")
        assert same(target, whole)
        with pytest.raises((InvalidInputError, CheckpointException), match=r"a and c share memory"):
            load({"a": target, "c": view(target)}, tmp_path / "c")
        load({"a": target, "c": view(target)}, tmp_path / "c", casts="any")


def test_of_many_targets_that_share_memory_two_that_differ_are_named(tmp_path: Path) -> None:
    """A flat parameter, its views, and the one view for which there is another value."""
    flat = seeded(1, 24)
    state = {"flat": flat} | {f"view-{n}": flat[4 * n : 4 * n + 4].clone() for n in range(6)}
    state["view-4"] += 1
    ckpt_storage.save(state, tmp_path / "c")
    target = torch.zeros(24)
    views = {f"view-{n}": target[4 * n : 4 * n + 4] for n in range(6)}
    with pytest.raises(InvalidInputError, match=r"flat and view-4 share memory"):
        ckpt_storage.load({"flat": target} | views, tmp_path / "c")


def refusal(path: Path, shape: tuple[int, ...] = (4,)) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.load({"x": torch.zeros(shape)}, path)
    (error,) = failures_of(caught.value).values()
    return error


@pytest.mark.parametrize("claim", [(8, 8), (16,)])
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "turned"])
def test_metadata_that_contradicts_its_items_is_refused(
    tmp_path: Path, claim: tuple[int, ...], *, is_plain: bool
) -> None:
    """A chunk that is not of the size that the metadata says is an error, not other bytes."""
    tensor = seeded(2, 4, 4) if is_plain else seeded(2, 4, 4).t()
    handmade(tmp_path / "lie", {"before": seeded(1, 9), "x": tensor}, x=claim)
    error = refusal(tmp_path / "lie", claim)
    assert isinstance(error, FormatError)
    assert "x in __0_0.distcp" in str(error)


def test_items_that_an_extension_transformed_are_named(tmp_path: Path) -> None:
    """A compressed item is refused with the name of what compressed it."""
    handmade(tmp_path / "zipped", {"x": seeded(1, 4)})
    path = tmp_path / "zipped" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    (info,) = metadata.storage_data.values()
    info.transform_descriptors = ["stream.zstd"]
    path.write_bytes(pickle.dumps(metadata))
    error = refusal(tmp_path / "zipped")
    assert isinstance(error, FormatError)
    assert "stream.zstd" in str(error)
    assert "FileSystemReader" in str(error)


def test_a_lost_file_of_a_stock_checkpoint_is_named(tmp_path: Path) -> None:
    """A missing `.distcp` is an error that names file and tensor."""
    handmade(tmp_path / "lost", {"x": seeded(1, 4)})
    (tmp_path / "lost" / "__0_0.distcp").unlink()
    error = refusal(tmp_path / "lost")
    assert isinstance(error, IntegrityError)
    assert "__0_0.distcp, which x needs, is missing" in str(error)


WEIGHTS = {
    "model.embed.weight": seeded(1, 30, 8),
    "model.norm.weight": seeded(2, 8, dtype=torch.bfloat16),
    "model.steps": torch.arange(4),
    "model.scale": torch.tensor(1.5),
    "model.none": torch.zeros(0, 4),
    "lm_head.weight": seeded(3, 30, 8, dtype=torch.float16),
}


def test_ours_loads_a_hugging_face_folder_of_one_file(tmp_path: Path) -> None:
    """`model.safetensors` beside files of other kinds loads, also without a template."""
    safetensors.torch.save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}", encoding="ascii")
    assert_ours_loads(tmp_path, WEIGHTS, "safetensors")
    reader = CheckpointStorageReader(tmp_path)
    assert same(_load_state_dict_from_keys(storage_reader=reader), WEIGHTS)


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A Hugging Face folder of two weight files, an index, and a file that it does not name."""
    names = sorted(WEIGHTS)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        safetensors.torch.save_file({name: WEIGHTS[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    stale = {name: value + 1 for name, value in WEIGHTS.items() if value.is_floating_point()}
    safetensors.torch.save_file(stale, tmp_path / "model.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return tmp_path


def test_one_name_with_other_dimensions_in_two_files_is_refused(tmp_path: Path) -> None:
    """Weight files of two checkpoints in one folder are told apart by name, with both files."""
    for number in (1, 2):
        file = tmp_path / f"model-{number}.safetensors"
        safetensors.torch.save_file({"w": torch.ones((2,) * number)}, file)
    with pytest.raises(ckpt_storage.FormatError, match=r"w is in model-1.*dimensions, in model-2"):
        ckpt_storage.open_checkpoint(tmp_path)


@on_ranks(3)
def test_a_hugging_face_folder_is_sharded_while_loading(indexed: Path) -> None:
    """Three ranks load their parts of whole weights, by the index: stale files do not count."""
    expected = {name: dcp_cases.cut(value) for name, value in WEIGHTS.items() if value.ndim}
    dcp_cases.assert_holds(indexed, expected, [dcp_cases.load])


def test_a_weight_file_that_the_index_names_must_be_there(indexed: Path) -> None:
    """A folder with a file missing is an error that names it."""
    (indexed / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"model-00002-of-00002\.safetensors, which is miss"):
        CheckpointStorageReader(indexed).read_metadata()


def test_checkpoints_of_dcp_save_are_pruned_and_exported(tmp_path: Path) -> None:
    """What stock `dcp.save` wrote by our writer is pruned by step, and consolidated."""
    writer = ckpt_storage.CheckpointStorageWriter(tmp_path)
    state = {"model": {"weight": seeded(1, 8, 4)}}
    for step in (1, 2, 3):
        dcp.save(state, checkpoint_id=f"step-{step:08d}", storage_writer=writer, no_dist=True)
    ckpt_storage.prune(tmp_path, keep=ckpt_storage.KeepLatest(2), dry_run=False)
    assert [info.name for info in ckpt_storage.list_checkpoints(tmp_path)] == [
        "step-00000002",
        "step-00000003",
    ]
    ckpt_storage.consolidate(tmp_path / "step-00000003", tmp_path / "hf")
    weights = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert same(weights, state["model"])
