"""The cells of the fault matrix, as data: operations, the phases that are held, faults, victims.

A new operation is one function in `fault_ranks.OPERATIONS` and one entry of `PHASES` here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ckpt_storage import Timeouts

__all__ = ["PHASES", "TIMEOUTS", "Cell", "Hold", "all_cells"]

Fault = Literal["kill", "stop", "stop and go on", "oversleep", "error"]
Victim = Literal["member", "coordinator"]
Host = Literal["rank 0", "launcher"]

TIMEOUTS = Timeouts(
    plan=6, stage=6, write=6, commit=6, load=6, consolidate=6, request=60, silence=3
)
REPORTED_S = 2.0
SLACK_S = 5.0
WORLD_SIZE = 3

SLOT = r"commits/00000002\.json$"
"""The commit record of the save under test: the checkpoint that it replaces has the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """How a victim is kept in a phase, and what errors may call the phase.

    Without `op` its planner asks. Else a request `op` for the storage object `key` gets no answer:
    of the victim ("own"), of another rank ("other"), or of whoever makes it. `waits` is the step in
    which members wait whose part is done. `files` says which weight file each tensor goes into.
    """

    names: frozenset[str]
    op: str = ""
    key: str = ""
    holds: Literal["own", "other", "any"] = "own"
    waits: str = "outcome 1"
    files: tuple[int, int, int] = (1, 2, 3)
    faults: tuple[Fault, ...]
    victims: tuple[Victim, ...] = ("member", "coordinator")


_PUT = "put|part|create_upload"
_SHARD = r"/__{held}_0\.distcp$"
# Who has written is committing, as far as it knows.
_WRITING = frozenset({"write", "commit"})
_COMMIT, _LOAD, _EXPORT = (frozenset({name}) for name in ("commit", "load", "consolidate"))

PHASES: dict[str, dict[str, Hold]] = {
    "save": {
        "plan": Hold(names=frozenset({"plan"}), faults=("error", "kill", "stop")),
        "write": Hold(names=_WRITING, op=_PUT, key=_SHARD, faults=("kill", "stop")),
        "waiting": Hold(
            names=_WRITING, op=_PUT, key=_SHARD, holds="other", faults=("kill", "stop")
        ),
        "commit": Hold(
            names=_COMMIT, op="put", key=SLOT, holds="any", faults=("kill", "stop and go on")
        ),
        "publish": Hold(
            names=_COMMIT, op="put", key=r"/\.metadata$", holds="any", faults=("kill", "stop")
        ),
    },
    "load": {
        "read": Hold(
            names=_LOAD, op="get", key=_SHARD, waits="broadcast 1", faults=("kill", "stop")
        ),
    },
    "consolidate": {
        "complete shared": Hold(
            names=_EXPORT,
            op="complete",
            key=r"/model-0000{file}-of-0000[23](-[0-9a-f]{8})?\.safetensors$",
            waits="broadcast 3",
            files=(1, 1, 2),
            faults=("kill", "oversleep"),
            victims=("coordinator",),
        ),
        "index": Hold(
            names=_EXPORT,
            op="put",
            key=r"/model\.safetensors\.index\.json$",
            holds="any",
            waits="broadcast 3",
            faults=("kill", "stop", "oversleep"),
        ),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination."""

    operation: str
    phase: str
    fault: Fault
    victim: Victim
    host: Host

    def __str__(self) -> str:
        return f"{self.operation} | {self.phase} | {self.fault} | {self.victim} | {self.host}"

    @property
    def hold(self) -> Hold:
        """How the phase is held."""
        return PHASES[self.operation][self.phase]

    @property
    def rank(self) -> int:
        """The victim's rank."""
        return 0 if self.victim == "coordinator" else 1

    @property
    def held(self) -> int:
        """The rank whose storage request gets no answer."""
        if self.hold.holds == "other":
            return WORLD_SIZE - 1
        return self.rank if self.hold.holds == "own" else 0

    @property
    def key(self) -> str:
        """Which objects' requests get no answer, a regular expression; "" for none."""
        file = self.hold.files[self.held]
        return self.hold.key.replace("{held}", str(self.held)).replace("{file}", str(file))

    @property
    def files(self) -> dict[str, int]:
        """Which weight file each tensor goes into."""
        return {f"model.w{number}": file for number, file in enumerate(self.hold.files)}

    @property
    def limit_s(self) -> float:
        """How long after the fault the last live rank may raise."""
        return REPORTED_S if self.fault == "error" else TIMEOUTS.silence + SLACK_S


def all_cells() -> Iterator[Cell]:
    """Return the whole matrix."""
    hosts: tuple[Host, ...] = ("rank 0", "launcher")
    for operation, phases in PHASES.items():
        for phase, hold in phases.items():
            for fault in hold.faults:
                for victim in hold.victims:
                    # Only who asks the storage gets an answer late.
                    is_late = hold.holds == "any" and fault in {"stop and go on", "oversleep"}
                    if is_late and victim == "member":
                        continue
                    for host in hosts:
                        yield Cell(
                            operation=operation, phase=phase, fault=fault, victim=victim, host=host
                        )
