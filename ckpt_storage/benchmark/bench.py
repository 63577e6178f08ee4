"""What every scenario is given: settings, storage, floor and meter of one rank.

Knows no scenario. Called by the scenarios on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from ckpt_storage.store import Location

from .compare import Comparison, Contender, take_turns, watch_all
from .meter import Meter
from .peers import Peer, peers_for
from .plain import Plain, Seen, plain_storage
from .settings import BenchSettings
from .workload import State, llama_state, own_views

PLANNER = "torch's planner alone"
"""The contender that only plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every scenario is given: the settings, the storage and the meter of this rank."""

    settings: BenchSettings
    root: Location
    plain: Plain
    meter: Meter

    @classmethod
    def of(cls, settings: BenchSettings, server_url: str | None) -> Bench:
        """Return the bench of this rank; `server_url` is the bench's own server, if any."""
        root = Location.of(settings.url, settings.storage_options)
        return cls(settings=settings, root=root, plain=plain_storage(root), meter=Meter(server_url))

    @property
    def rank(self) -> int:
        """The number of the calling rank."""
        return dist.get_rank()

    @property
    def peers(self) -> list[Peer]:
        """The peers to measure, [] unless asked for."""
        return peers_for(self.root) if self.settings.peers else []

    def state(self, *, filled: bool, sharding: Literal["rows", "columns"] | None = None) -> State:
        """Return this rank's part of the model."""
        return llama_state(self.settings.gib, sharding or self.settings.sharding, filled=filled)

    def floor(self, what: str) -> str:
        """Return how the floor is called that does `what` by the plainest client of the storage."""
        return f"floor: {what}{self.plain.by}"

    def options(self) -> dict[str, Any]:
        """Return what our saves and loads are called with."""
        chosen: dict[str, Any] = {
            "storage_options": self.root.storage_options,
            "memory_limit_bytes": self.settings.memory_limit_bytes,
        }
        return chosen

    def clear(self, folder: str) -> None:
        """Remove a folder; all ranks call it, one does it."""
        dist.barrier()
        if self.rank == 0:
            self.plain.clear(folder)
        dist.barrier()

    def compare(
        self,
        what: str,
        moved_bytes: int,
        contenders: Sequence[Contender],
        *,
        floor: str | None = None,
        deducted: str | None = None,
        whole: frozenset[str] = frozenset(),
        idle: frozenset[str] = frozenset(),
        checked: str | None = None,
    ) -> Comparison:
        """Let the contenders take turns; the first is the floor unless one is named."""
        # First runs, where memory is looked at: later ones find what allocators have kept.
        curves = watch_all(self.meter, contenders) if self.settings.memory_curves else {}
        return Comparison(
            what=what,
            moved_bytes=moved_bytes,
            floor=floor or contenders[0].name,
            summaries=take_turns(
                self.meter, contenders, self.settings.run_count, self.settings.pause_s
            ),
            deducted=deducted,
            whole=whole,
            idle=idle,
            checked=checked,
            curves=curves,
        )


def our_name(what: str = "") -> str:
    """Return how our contender is called that does `what`."""
    return f"ckpt_storage, {what}" if what else "ckpt_storage"


def put_own(bench: Bench, state: State, folder: str) -> None:
    """Write this rank's own bytes as one plain file."""
    bench.plain.put(f"{folder}/{bench.rank}", own_views(state))


def get_own(bench: Bench, state: State, folder: str, *, seen: Seen | None = None) -> None:
    """Read them again."""
    bench.plain.get(f"{folder}/{bench.rank}", own_views(state), seen=seen)
