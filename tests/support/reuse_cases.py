"""What tests of reused files share: a state with a frozen part, and what lies on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dcp_cases
from dcp_cases import seeded

import ckpt_storage
from ckpt_storage import open_checkpoint
from ckpt_storage.format.documents import unseal
from ckpt_storage.format.rank_manifest import RankManifest

COUNT = 1 << 16
"""Elements of a value that may stay: 256 KiB."""


def state_of(moving: int = 0, *, base: int = 1, adapter_count: int = 4096) -> dict[str, Any]:
    """Return a state whose base stays while `moving` changes."""
    return {
        "model": {
            "base": {f"w{n}": seeded(base + n, COUNT) for n in range(3)},
            "lora": seeded(1000 + moving, adapter_count),
        },
        "step": moving,
    }


def files_of(path: Path) -> dict[tuple[str, ...], Path]:
    """Return the shard files of the newest save, by the names in them."""
    with open_checkpoint(path) as checkpoint:
        save_id = checkpoint.save_id
    files = {}
    for document in manifests_of(path):
        assert document.save_id == save_id or save_id is None
        for file in document.files:
            fqns = tuple(sorted({document.fqns[number] for number in file.fqn}))
            files[fqns] = path / file.path
    return files


def manifests_of(path: Path) -> list[RankManifest]:
    """Return the rank manifests of the newest save."""
    with open_checkpoint(path) as checkpoint:
        folder = path / "saves" / str(checkpoint.save_id) / "ranks"
    return [
        RankManifest.from_body(unseal(path.read_bytes(), path=str(path)), where=str(path))
        for path in sorted(folder.glob("*.json"))
    ]


def linked(path: Path) -> set[str]:
    """Return the names of values in shard files that have another name."""
    files = files_of(path).items()
    return {fqn for fqns, file in files if file.stat().st_nlink > 1 for fqn in fqns}


def is_loaded(path: Path, state: Mapping[str, Any]) -> bool:
    """Return whether our reader and torch's own load a state, and every checksum is right."""
    for load in (dcp_cases.load, dcp_cases.load_stock):
        load(loaded := dcp_cases.zeros_like(state), path)
        if not dcp_cases.same(loaded, state):
            return False
    return ckpt_storage.verify(path).ok


BASE = {"model.base.w0", "model.base.w1", "model.base.w2"}


def flip_a_byte(file: Path) -> None:
    """Change a byte of a file in place, as a failing disk does: all its names show it."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    mode = file.stat().st_mode
    file.chmod(0o600)
    file.write_bytes(data)
    file.chmod(mode)
