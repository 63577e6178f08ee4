"""The identity of the process that began an attempt, and whether that process has ended."""

from __future__ import annotations

import os
from pathlib import Path

_START_FIELD = 19
"""Position after the name in /proc/<pid>/stat of the start time, in ticks since boot."""


def process_identity(pid: int | None = None) -> str:
    """Return a unique identity of a process, "" if it is unknown or has ended.

    `pid`: by default that of this process. The identity has the boot id of the machine, the
    namespace of process ids (containers with one host name have different namespaces), the process
    id, and the start time of the process.
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
    """Return whether a process is known to have ended, or is this process.

    False for a process of another machine or container, whose state is unknown here.
    """
    own = process_identity()
    if not own or not isinstance(identity, str) or identity.count("/") != own.count("/"):
        return False
    *place, pid, _ = identity.split("/")
    if place != own.split("/")[:-2] or not pid.isdigit():
        return False
    return identity == own or process_identity(int(pid)) != identity
