"""Which memory a process holds by a name: what stays when everyone who knows the name is killed.

By process, not by what lies in `/dev/shm`: other tests and programs come and go there meanwhile.
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = "/dev/shm/"  # noqa: S108  # what is looked for
_GONE = " (deleted)"


def named_memory(pid: int) -> set[str]:
    """Return the files in `/dev/shm` that a process has mapped or open, but for unlinked ones."""
    process = Path(f"/proc/{pid}")
    held = {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
    for link in (process / "fd").iterdir():
        try:
            held.add(str(link.readlink()))
        except FileNotFoundError:  # closed meanwhile; also the one that lists this folder
            continue
    return {path for path in held if path.startswith(_FOLDER) and not path.endswith(_GONE)}


def left_of(paths: set[str]) -> set[str]:
    """Return those of some files that are still there."""
    return {path for path in paths if os.path.lexists(path)}
