"""Mounts whose fsync is not durable: object stores behind a write-back cache."""

from __future__ import annotations

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")

_WRITE_BACK = {
    # rclone.org, "rclone mount", VFS File Caching, --vfs-write-back: "Time to write back files
    # after last use when using cache (default 5s)". Its fsync sends nothing.
    "fuse.rclone": "rclone uploads a file some seconds after it was closed, in any order",
    # README, "Current Status": "fsync is ignored, files are only flushed on close".
    "fuse.goofys": "goofys ignores fsync",
}


def file_system_type(folder: str, *, mounts: Path = _MOUNTS) -> str:
    """Return the type of the file system of a folder or its nearest parent; "" if unknown."""
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    # proc(5): the third field is the device; the type follows the field "-".
    rows = (line.split(" ") for line in lines)
    types = [row[row.index("-") + 1] for row in rows if len(row) > 2 and row[2] == wanted]  # noqa: PLR2004  # as above
    return types[-1] if types else ""


def durability_problem(folder: str, *, mounts: Path = _MOUNTS) -> str:
    """Return why files that were synced in a folder may still be lost; "" if they may not."""
    kind = file_system_type(folder, mounts=mounts)
    why = _WRITE_BACK.get(kind)
    if why is None:
        return ""
    return f"It is not durable and not ordered: it lies on a mount of type {kind}, and {why}."
