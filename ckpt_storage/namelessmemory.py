"""Memory that has no name in any file system, and how another process of the host opens it.

Knows Linux's `memfd` and `/proc`; knows no rank and no storage. Called by `hostmemory` and
`unitclaims`.

Nothing is left of it when processes are killed, the size of `/dev/shm` does not matter, and only
processes that may look into one another's memory anyway get there. Nobody can change its length (it
is sealed), so no access to it can fault.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

__all__ = ["host_identity", "make_memory", "open_memory"]


def host_identity() -> str:
    """Return text that is equal where processes can reach one another through `/proc`.

    Empty where that cannot be: without Linux's `/proc`, memory without a name, or pidfds.
    """
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return ""
    return f"{boot} {namespace} {os.getuid()}"


def make_memory(name: str, size_bytes: int) -> int:
    """Return a descriptor of new memory, all of zeros; the caller closes it.

    `name` is for `open_memory` to know it by. Raises `OSError`, also if there is too little.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Now, as an error; not later, as a fault when it is written to.
        os.posix_fallocate(fd, 0, size_bytes)
        _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_memory(*, pid: int, fd: int, name: str, size_bytes: int) -> memoryview:
    """Return the memory that process `pid` made, has open as `fd` and called `name`.

    Raises `OSError` if it cannot be reached, `ValueError` if it is another.
    """
    path = f"/proc/{pid}/fd/{fd}"
    # By name before it is opened: to open what the number means elsewhere may have effects.
    link = str(Path(path).readlink())
    if not link.startswith(f"/memfd:{name} "):
        raise ValueError(f"its memory is {link}")
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(own, size_bytes))
    finally:
        os.close(own)


def _seal(memory: int) -> None:
    """Refuse everybody to change the length."""
    import fcntl  # noqa: PLC0415  # Windows has none

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
