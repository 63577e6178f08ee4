"""Which process began an attempt, and whether it has ended."""

from __future__ import annotations

import os
from pathlib import Path

_START_FIELD = 19
"""Of what follows the name in /proc/<pid>/stat: the start of the process, in ticks since boot."""


def process_identity(pid: int | None = None) -> str:
    """Return what no other process bears, "" where the system does not tell it or `pid` has ended.

    That is the boot of the machine, the namespace of process ids, which containers of one host name
    do not share, the process id, and the start of the process. Without a `pid`, of this process.
    """
    pid = os.getpid() if pid is None else pid
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return f"{boot}/{namespace}/{pid}/{status.rpartition(')')[2].split()[_START_FIELD]}"


def has_ended(identity: object) -> bool:
    """Return whether a process is known to have ended, or is this one.

    False for one of another machine or container: only its own can tell.
    """
    own = process_identity()
    if not own or not isinstance(identity, str) or identity.count("/") != own.count("/"):
        return False
    *place, pid, _ = identity.split("/")
    if place != own.split("/")[:-2] or not pid.isdigit():
        return False
    return identity == own or process_identity(int(pid)) != identity
