"""Checkpoints of all four formats to open, made on two ranks by the format's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dcp_cases
import ml_dtypes
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import seeded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

FORMATS = ("ckpt_storage", "dcp", "dcp_safetensors", "safetensors")

WEIGHTS: dict[str, torch.Tensor] = {
    "model.rows": seeded(1, 301, 37),
    "model.columns": seeded(2, 64, 129, dtype=torch.bfloat16),
    "model.cube": seeded(3, 6, 10, 14, dtype=torch.int32),
    "model.bytes": seeded(4, 1000, dtype=torch.uint8),
}
"""In all formats; cut by rows, by columns, in the middle, by bytes."""

CUTS = {"model.rows": 0, "model.columns": 1, "model.cube": 1, "model.bytes": 0}

EXTRAS: dict[str, torch.Tensor] = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "mask": torch.arange(7) % 3 == 0,
    "complex": seeded(5, 5, 4, dtype=torch.complex64),
    "wide": seeded(6, 3, 4, dtype=torch.complex128),
    "eighth": torch.linspace(-3, 3, 50).to(torch.float8_e4m3fn),
    "turned": seeded(7, 9, 8).t(),
}
"""Only where DCP stores items: whole, on one rank."""

OBJECTS: dict[str, Any] = {
    "step": 1000,
    "note": "hello",
    "tags": {"a", "b"},
    "groups": [{"lr": 0.5}, {"lr": 0.25}],
}


def sharded() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(CUTS[name])], src_data_rank=None)
        for name, tensor in WEIGHTS.items()
    }


def save_all(_rank: int, folder: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: PLC0415  # prints

    state = sharded() | EXTRAS | OBJECTS
    dcp_cases.save(state, folder / "ckpt_storage" / "step-1000")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp" / "step-1000"))
    writer = HuggingFaceStorageWriter(
        str(folder / "dcp_safetensors" / "step-1000"), save_distributed=True
    )
    dcp.save(sharded(), storage_writer=writer)


def numpy_of(tensor: torch.Tensor) -> Any:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in {"bfloat16", "float8_e4m3fn"}:
        return tensor.contiguous().numpy()
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(getattr(ml_dtypes, name)).reshape(tuple(tensor.shape))
