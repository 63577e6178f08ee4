"""Which ranks of this host have died: processes are watched, so that nobody waits for silence.

A process is known by host, boot, pid namespace, pid and start, so that neither a pid that is used
again nor one of another container is taken for a rank's.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RankProcess", "Siblings", "start_ticks"]

_START_FIELD = 19
"""Of `/proc/<pid>/stat` behind the name: clock ticks from boot to the start of the process."""


def start_ticks(pid: int | str) -> int | None:
    """Return when a process began, in clock ticks since boot; None where that is not told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return int(fields[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The process that speaks for a rank; `kernel` tells hosts and pid namespaces apart."""

    kernel: tuple[str, str, int]
    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> RankProcess | None:
        """Return a process of this host; None where such processes cannot be told apart."""
        start = start_ticks(pid)
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            kernel = (socket.gethostname(), boot, Path("/proc/self/ns/pid").stat().st_ino)
        except OSError:
            return None
        return None if start is None else cls(kernel=kernel, pid=pid, start=start)


class Siblings:
    """The other ranks whose processes run on this host, watched until `close`."""

    def __init__(self, own: RankProcess | None, ranks: Mapping[int, RankProcess]) -> None:
        self._ranks: dict[int, int] = {}
        for rank, process in ranks.items():
            if own is None or process.kernel != own.kernel or process.pid == own.pid:
                continue
            with contextlib.suppress(OSError, AttributeError):  # Linux 5.3 and up
                descriptor = os.pidfd_open(process.pid)
                # Compared once it is open: from then on it means one process only.
                if start_ticks(process.pid) == process.start:
                    self._ranks[descriptor] = rank
                else:
                    os.close(descriptor)

    def ended(self) -> list[int]:
        """Return the ranks whose process has ended, each once."""
        if not self._ranks:
            return []
        poll = select.poll()
        for descriptor in self._ranks:
            poll.register(descriptor, select.POLLIN)
        return [self._forget(descriptor) for descriptor, _ in poll.poll(0)]

    def close(self) -> None:
        """Watch no more."""
        for descriptor in list(self._ranks):
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> int:
        os.close(descriptor)
        return self._ranks.pop(descriptor)
