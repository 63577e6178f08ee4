"""The cells of the fault matrix, as data: operations, their phases, faults and victims.

A new operation is one function in `fault_ranks.OPERATIONS` and one entry of `PHASES` and `WAITS`
here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from limits import SLACK_S

from ckpt_storage import Timeouts

Fault = Literal["kill", "stop", "stop and go on", "oversleep", "interrupt", "error", "hang"]
Victim = Literal["member", "coordinator"]
Host = Literal["rank 0", "launcher"]
Where = Literal["call", "local plan", "global plan", ""]

TIMEOUTS = Timeouts(
    plan=6, stage=6, write=6, commit=6, load=6, consolidate=6, request=60, silence=3
)
REPORTED_S = 2.0

SLOT = r"commits/00000002\.json$"
"""The commit record of the save under test: the checkpoint that it replaces has the first."""


@dataclass(frozen=True, slots=True)
class Hold:
    """How a victim is kept in a phase, what may befall it, and what errors may call the phase.

    `key` is the storage object, `op` the request, of which the answer is withheld from `held`: the
    victim, another rank, or "both". `where` names the call in which it asks instead.

    `hit_count` requests are withheld before the fault comes. `coordinator_step` and `member_step`
    are the calls in which ranks wait that have done their share; "" is the operation's usual call.
    `files` says which weight file each tensor goes into.
    """

    names: AbstractSet[str]
    faults: AbstractSet[Fault]
    op: str = ""
    key: str = ""
    holds: Literal["victim", "other", "both", ""] = ""
    where: Where = ""
    hit_count: int = 1
    coordinator_step: str = ""
    member_step: str = ""
    files: tuple[int, int, int] = (1, 2, 3)
    victims: tuple[Victim, ...] = get_args(Victim)


_DIES: AbstractSet[Fault] = {"kill", "stop"}
_ASKED: AbstractSet[Fault] = _DIES | {"error", "stop and go on"}
_FAILS: AbstractSet[Fault] = _DIES | {"error", "hang"}
_LASTS: AbstractSet[Fault] = _FAILS | {"stop and go on"}
_GO_ON: AbstractSet[Fault] = _DIES | {"stop and go on", "oversleep"}
_WAITS: AbstractSet[Fault] = _DIES | {"interrupt"}
_PUT, _SHARD = "put|part|create_upload", r"/__{held}_0\.distcp$"
# Who has written is committing, as far as it knows.
_WRITING = {"write", "commit"}


def _planning(*names: str) -> dict[str, Hold]:
    """Return the phases in which ranks ask: in the call, and in two steps of the planner."""
    return {
        "before meeting": Hold({"plan"}, _ASKED, where="call"),
        "plan": Hold({*names}, _ASKED, where="local plan"),
        "global plan": Hold({*names}, _ASKED, where="global plan", victims=("coordinator",)),
    }


_SAVE = _planning("plan") | {
    "write": Hold(_WRITING, _LASTS, _PUT, _SHARD, "victim"),
    "waiting": Hold(_WRITING, _WAITS, _PUT, _SHARD, "other"),
    "commit": Hold({"commit"}, _LASTS | {"interrupt"}, "put", SLOT),
    "publish": Hold({"commit"}, _FAILS, "put", r"/\.metadata$"),
}
_LOAD = _planning("plan", "load") | {
    "read": Hold({"load"}, _LASTS, "get", _SHARD, "victim"),
    "waiting": Hold({"load"}, _WAITS, "get", _SHARD, "other"),
}
# What is saved in the background is planned while it is staged, before ranks meet; and an interrupt
# of the trainer does not end what its threads do.
_STAGED = {"before meeting", "plan"}
_ASYNC = {
    name: replace(
        hold,
        faults=hold.faults - {"interrupt"},
        names=hold.names | ({"stage"} if name in _STAGED else set()),
    )
    for name, hold in _SAVE.items()
}

_RECORD = r"/\.ckpt-storage/[0-9a-f]+/[0-9]{5,}\.json$"
_NAME = r"/model-0000{file}-of-0000[23](-[0-9a-f]{8})?\.safetensors$"
_INDEX = r"/model\.safetensors\.index\.json$"

_out = partial(Hold, {"consolidate"}, member_step="release 4")
_CONSOLIDATE = {
    "before meeting": Hold({"plan"}, _DIES | {"stop and go on"}, where="call"),
    "plan": Hold({"plan"}, _ASKED, where="local plan"),
    "opening": Hold({"plan"}, _LASTS, "get", r"saves/.*/manifest\.json$", member_step="release 2"),
    "read": _out(_GO_ON | _FAILS, "get", _SHARD, "victim"),
    # A weight file that a rank writes alone is one request, or one part.
    "write": _out(_GO_ON | _FAILS, "put|part", _NAME, "victim"),
    "waiting": _out(_WAITS, "put|part", _NAME, "other"),
    # Two ranks write a file, and the coordinator completes it. All its parts are withheld, those of
    # the victim and those of the other rank.
    "write shared": Hold(
        {"consolidate"}, _GO_ON, "part(_copy)?", _NAME, "both", hit_count=2, files=(1, 1, 2)
    ),
    "complete shared": _out(
        _GO_ON, "complete", _NAME, "victim", files=(1, 1, 2), victims=("coordinator",)
    ),
    "index": _out({*get_args(Fault)}, "put", _INDEX),
    # The index counts by now; what it supersedes is deleted.
    "clean": _out(_LASTS | {"oversleep"}, "delete", _RECORD),
}

PHASES = {"save": _SAVE, "async save": _ASYNC, "load": _LOAD, "consolidate": _CONSOLIDATE}
WAITS = {
    "save": ("collect 2", "release 2"),
    "async save": ("collect 2", "release 2"),
    "load": ("collect 3", "release 3"),
    "consolidate": ("collect 3", "release 4"),
}
"""The steps in which the coordinator and a member wait for the end of an operation."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination; `world_size` ranks."""

    operation: str
    phase: str
    fault: Fault
    victim: Victim
    host: Host
    world_size: int = 3

    def __str__(self) -> str:
        return (
            f"{self.operation} | {self.phase} | {self.fault} | {self.victim} | {self.host} | "
            f"{self.world_size}"
        )

    @property
    def hold(self) -> Hold:
        return PHASES[self.operation][self.phase]

    @property
    def phases(self) -> AbstractSet[str]:
        # Who goes on after a stop may be writing before it hears that the others gave up.
        goes_on = self.fault == "stop and go on" and "plan" in self.hold.names
        return self.hold.names | ({"write"} if goes_on else set())

    @property
    def rank(self) -> int:
        return 0 if self.victim == "coordinator" else 1

    @property
    def held(self) -> int:
        if self.hold.holds == "other":
            return self.world_size - 1 if self.world_size - 1 != self.rank else 0
        return self.rank if self.hold.holds == "victim" else 0

    @property
    def key(self) -> str:
        """Which objects' requests get no answer, a regular expression; "" for none."""
        file = str(self.hold.files[self.held])
        return self.hold.key.replace("{held}", str(self.held)).replace("{file}", file)

    @property
    def files(self) -> dict[str, int]:
        return {f"model.w{number}": file for number, file in enumerate(self.hold.files)}

    @property
    def limit_s(self) -> float:
        if self.fault in {"error", "interrupt"}:
            return REPORTED_S
        phase_s = TIMEOUTS.write  # all are alike
        early = _STAGED if self.operation == "async save" else {"before meeting"}
        if self.fault == "hang" or self.phase in early:
            return phase_s + SLACK_S
        return TIMEOUTS.silence + SLACK_S

    @property
    def is_possible(self) -> bool:
        """Only a rank that sends requests sees the storage fail, or gets a late response."""
        hold = self.hold
        asks = bool(hold.holds) or not hold.key or self.victim == "coordinator"
        by_itself = self.fault in {"kill", "stop", "interrupt"}
        return self.fault in hold.faults and (asks or by_itself)


def chosen(pattern: str, world_size: int = 3) -> list[Cell]:
    """Return the cells of the whole matrix whose description matches."""
    cells = (
        Cell(operation, phase, *choice, world_size)
        for operation, phases in PHASES.items()
        for phase, hold in phases.items()
        for choice in itertools.product(get_args(Fault), hold.victims, get_args(Host))
    )
    return [cell for cell in cells if cell.is_possible and re.search(pattern, str(cell))]
