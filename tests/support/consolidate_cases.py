"""Sharded states to consolidate, functions that ranks run, and an oracle that reads the outcome.

The oracle is the safetensors library over plain files; nothing of it is the package under test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from crc32c import crc32c
from dcp_cases import cut, raw_bytes, seeded
from safetensors import deserialize
from torch.distributed.tensor import Placement, Replicate, Shard

import ckpt_storage
from ckpt_storage import ConsolidationReport, RetryPolicy, consolidate
from ckpt_storage.format.dtypes import DTYPES

INDEX = "model.safetensors.index.json"
QUICK = RetryPolicy(attempt_count=2, first_delay_s=0.01, max_delay_s=0.02)

DTYPE_NAMES = [name for name, kind in DTYPES.items() if kind.safetensors is not None]

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def whole_state(dtypes: list[str] | None = None) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(dtypes or DTYPE_NAMES):
        dtype: torch.dtype = getattr(torch, name)
        if name != "float4_e2m1fn_x2":
            state[f"{name}.scalar"] = seeded(seed, dtype=dtype)
        state[f"{name}.empty"] = seeded(seed, 0, 3, dtype=dtype)
        state[f"{name}.rows"] = seeded(seed, 13, 7, dtype=dtype)
        state[f"{name}.columns"] = seeded(seed, 5, 17, dtype=dtype)
        state[f"{name}.grid"] = seeded(seed, 11, 9, dtype=dtype)
        state[f"{name}.turned"] = seeded(seed, 6, 10, dtype=dtype).t()
    state["large.rows"] = seeded(91, 301, 257)
    state["large.columns"] = seeded(92, 259, 303, dtype=torch.bfloat16)
    state["large.grid"] = seeded(93, 203, 405)
    return state


def sharded_state(dtypes: list[str] | None = None) -> dict[str, Any]:
    """Return what this rank saves of `whole_state`; names say how a tensor is sharded."""
    world_size = dist.get_world_size()
    grid = (2, world_size // 2) if world_size > 2 else (world_size, 1)
    placements: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
        "rows": ((), [Shard(0)]),
        "columns": ((), [Shard(1)]),
        "grid": (grid, [Shard(0), Shard(1)]),
        "empty": ((), [Replicate()]),
    }
    state: dict[str, Any] = whole_state(dtypes)
    for name, tensor in state.items():
        mesh, how = placements.get(name.rpartition(".")[2], ((), []))
        state[name] = cut(tensor, *how, mesh=mesh) if how else tensor
    return state


def small_model(version: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((100, 50), version + i / 8) for i in range(4)}


def expected_of(state: Mapping[str, torch.Tensor]) -> Tensors:
    """Return dtype (as safetensors spells it), shape and bytes by name."""
    tensors: Tensors = {}
    for name, tensor in state.items():
        kind = DTYPES[str(tensor.dtype).removeprefix("torch.")].safetensors
        shape = list(tensor.shape)
        if kind == "F4":
            shape[-1] *= 2  # two numbers in an element of torch's
        tensors[name] = (str(kind), tuple(shape), raw_bytes(tensor))
    return tensors


def tensors_of(files: Mapping[str, bytes]) -> Tensors:
    """Return what the files of an export hold, by the safetensors library, following the index."""
    index = json.loads(files[INDEX])
    tensors: Tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        data = files[file]
        start = int.from_bytes(data[:8], "little") + 8
        assert start % 64 == 0
        header = json.loads(data[8:start])
        assert header["__metadata__"] == {"format": "pt"}
        for name, tensor in deserialize(data):  # type: ignore[no-untyped-call]  # from Rust
            assert index["weight_map"][name] == file
            assert name not in tensors
            item = len(tensor["data"]) // max(math.prod(tensor["shape"]), 1)
            assert header[name]["data_offsets"][0] % max(item, 1) == 0
            tensors[name] = (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())
    return tensors


def check(files: Mapping[str, bytes], state: Mapping[str, torch.Tensor]) -> None:
    expected, exported = expected_of(state), tensors_of(files)
    assert exported.keys() == expected.keys()
    wrong = [name for name in expected if exported[name] != expected[name]]
    assert not wrong, wrong


def check_report(report: ConsolidationReport, files: Mapping[str, bytes]) -> None:
    """Assert that a report's names, lengths and checksums are those of the files."""
    assert {file.name: (file.size_bytes, file.crc32c) for file in report.files} == {
        file.name: (len(files[file.name]), crc32c(files[file.name])) for file in report.files
    }
    named = set(json.loads(files[INDEX])["weight_map"].values())
    assert named == {file.name for file in report.files}
    present = {name for name in files if name.endswith(".safetensors")}
    assert present == named


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def export(
    _rank: int,
    url: str | Path,
    output: Any = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> ConsolidationReport:
    return consolidate(url, output, retry=QUICK, **options)


def save_and_export(
    rank: int, url: str | Path, options: dict[str, Any], dtypes: list[str] | None = None
) -> ConsolidationReport:
    options_of_storage = options.get("storage_options")
    ckpt_storage.save(
        sharded_state(dtypes), url, sync_files=False, storage_options=options_of_storage
    )
    return export(rank, url, options=options)
