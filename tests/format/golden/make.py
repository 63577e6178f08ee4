"""Made `v1` and `v1/expected.json`, in an empty working folder. Run it for a new version only."""

from __future__ import annotations

import base64
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt_storage
from ckpt_storage.commit.cleaning import delete
from ckpt_storage.store import open_store
from ckpt_storage.testing.ranks import RankPool

ROOT = Path("golden").absolute()


def model() -> dict[str, tuple[str, Any]]:
    """Return torch's name of a dtype, and an array of the same bytes, by name."""
    float32 = (np.arange(66 * 3, dtype=np.float32) / 2).reshape(66, 3)
    return {
        "rows": ("float32", float32),
        "uneven": (
            "bfloat16",
            (((np.arange(15) - 7).astype("<f4").view("<u4")) >> 16).astype("<u2").reshape(5, 3),
        ),
        "columns": ("int16", 100 * np.arange(12, dtype="<i2").reshape(3, 4)),
        "float8": ("float8_e4m3fn", np.arange(16, dtype="u1")),
        "replicated": ("float64", np.arange(4, dtype="<f8") / 8),
        "mask": ("bool", np.arange(7) % 3 == 0),
        "complex": ("complex64", (np.arange(4) - 1j * np.arange(4)).astype("<c8").reshape(2, 2)),
        "scalar": ("int64", np.array(42)),
        "empty": ("float16", np.empty((0, 3), "<f2")),
        "large": ("uint8", (np.arange(150_000) * 7 % 251).astype("u1").reshape(300, 500)),
        **{f"many.layer {n}": ("int32", np.array([n, -n], "<i4")) for n in range(66)},
    }


SHARDED = {"rows": 0, "uneven": 0, "columns": 1, "float8": 0, "large": 1}
BLOBS = {"step": 7, "data.epoch": 1.5, "data.name": "ü"}


def tensor(name: str, dtype: str, array: Any, mesh: Any) -> torch.Tensor:
    """Return an array as the state has it."""
    kind = getattr(torch, dtype)
    if not array.size:
        return torch.empty(array.shape, dtype=kind)
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view("u1").copy())
    whole = flat.view(kind).reshape(array.shape)
    if name in SHARDED:
        return distribute_tensor(whole, mesh, [Shard(SHARDED[name])], src_data_rank=None)
    if name == "replicated":
        found: DTensor = distribute_tensor(whole, mesh, [Replicate()])
        return found
    return whole


def save(_rank: int) -> None:
    """Save as one of two ranks: an id twice, and a step that is deleted."""
    socket.gethostname = lambda: "golden"
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {
        name: tensor(name, dtype, array, mesh) for name, (dtype, array) in model().items()
    }
    state["tied"] = state["rows"]
    url = ROOT / "v1" / "step-00000007"
    ckpt_storage.save({"model": {"scalar": torch.tensor(41)}, "step": 6}, url)
    ckpt_storage.save(
        {"model": state, "step": 7, "data": {"epoch": 1.5, "name": "ü"}}, url, overwrite=True
    )


def main() -> None:
    """Make everything."""
    with RankPool(2) as pool:
        pool.run(save)
    url = ROOT / "v1" / "step-00000007"
    exported = [name for name, (dtype, _) in model().items() if dtype != "complex64"]
    ckpt_storage.consolidate(url, include=[f"model.{name}" for name in exported])
    ckpt_storage.save({"step": 6}, ROOT / "v1" / "step-00000006")
    delete(open_store(ROOT / "v1" / "step-00000006"))
    tensors = {
        f"model.{name}": {
            "dtype": dtype,
            "shape": list(array.shape),
            "bytes": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
        }
        for name, (dtype, array) in model().items()
    }
    tensors["model.tied"] = tensors["model.rows"]
    (ROOT / "v1" / "expected.json").write_text(
        json.dumps({"tensors": tensors, "blobs": BLOBS}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    shutil.rmtree(ROOT, ignore_errors=True)
    main()
