"""The processes of ranks, and those of one host that are watched until they end."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The process of a rank; `host` is the name of a host and pid namespace."""

    host: str
    pid: int

    @classmethod
    def own(cls) -> RankProcess | None:
        """Return this process; None if its host cannot be identified."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespace = Path("/proc/self/ns/pid").stat().st_ino
        except OSError:
            return None
        return cls(host=f"{socket.gethostname()} {boot} {namespace}", pid=os.getpid())


class LocalProcesses:
    """Processes of other ranks on this host; a descriptor of each becomes ready when it ends."""

    def __init__(self) -> None:
        self._rank_of: dict[int, int] = {}  # by descriptor
        self._ended: list[int] = []

    def add(self, processes: Mapping[int, RankProcess]) -> None:
        """Watch the processes of this host among `processes`, by rank; each once."""
        own = RankProcess.own()
        for rank, process in processes.items():
            if own is None or process.host != own.host or process.pid == own.pid:
                continue
            if rank in self._rank_of.values():
                continue
            try:
                self._rank_of[os.pidfd_open(process.pid)] = rank
            except ProcessLookupError:
                self._ended.append(rank)
            except (OSError, AttributeError):  # before Linux 5.3, or out of descriptors
                continue

    @property
    def descriptors(self) -> list[int]:
        """What to wait for until a process ends."""
        return list(self._rank_of)

    def take_ended(self) -> list[int]:
        """Return the ranks whose process has ended, each once."""
        ended, self._ended = self._ended, []
        for descriptor in wait(self.descriptors, 0):
            assert isinstance(descriptor, int)  # noqa: S101  # as passed
            os.close(descriptor)
            ended.append(self._rank_of.pop(descriptor))
        return ended

    def close(self) -> None:
        """Close the descriptors."""
        while self._rank_of:
            os.close(self._rank_of.popitem()[0])
