"""The cells of the fault matrix, as data: operations, their phases, faults and victims.

A new operation is one function in `fault_ranks.OPERATIONS` and one entry of `PHASES` and `WAITS`
here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ckpt_storage import Timeouts

Fault = Literal["kill", "stop", "stop and go on", "oversleep", "interrupt", "error", "hang"]
Victim = Literal["member", "coordinator"]
Host = Literal["rank 0", "launcher"]
Where = Literal["call", "local plan", "global plan", ""]

TIMEOUTS = Timeouts(
    plan=6, stage=6, write=6, commit=6, load=6, consolidate=6, request=60, silence=3
)
REPORTED_S = 2.0
SLACK_S = 5.0

SLOT = r"commits/00000002\.json$"
"""The commit record of the save under test: the checkpoint that it replaces has the first."""


@dataclass(frozen=True, slots=True)
class Hold:
    """How a victim is kept in a phase, what may befall it, and what errors may call the phase.

    `key` is the storage object, `op` the request, of which the answer is withheld from `held`: the
    victim, another rank, or "both". `where` names the call in which it asks instead.

    `hit_count` requests are withheld before the fault comes. `coordinator_step` and `member_step`
    are where ranks wait whose part is done; "" is the operation's usual one. `files` says which
    weight file each tensor goes into.
    """

    names: AbstractSet[str]
    faults: AbstractSet[Fault]
    op: str = ""
    key: str = ""
    holds: Literal["victim", "other", "both", ""] = ""
    where: Where = ""
    hit_count: int = 1
    coordinator_step: str = "gather 2"
    member_step: str = ""
    files: tuple[int, int, int] = (1, 2, 3)
    victims: tuple[Victim, ...] = get_args(Victim)


_DIES: AbstractSet[Fault] = {"kill", "stop"}
_FAILS: AbstractSet[Fault] = _DIES | {"error", "hang"}
_ALL_BUT_CTRL_C: AbstractSet[Fault] = _FAILS | {"stop and go on"}
_ASKED: AbstractSet[Fault] = _DIES | {"error", "stop and go on"}
_GO_ON: AbstractSet[Fault] = _DIES | {"stop and go on", "oversleep"}
_PUT, _SHARD = "put|part|create_upload", r"/__{held}_0\.distcp$"
# Who has written is committing, as far as it knows.
_WRITING = {"write", "commit"}

_SAVE = {
    "before meeting": Hold({"plan"}, _ASKED, where="call"),
    "plan": Hold({"plan"}, _ASKED, where="local plan"),
    "global plan": Hold({"plan"}, _ASKED, where="global plan", victims=("coordinator",)),
    "write": Hold(_WRITING, _ALL_BUT_CTRL_C, _PUT, _SHARD, "victim"),
    "waiting": Hold(_WRITING, _DIES | {"interrupt"}, _PUT, _SHARD, "other"),
    "commit": Hold({"commit"}, _ALL_BUT_CTRL_C | {"interrupt"}, "put", SLOT),
    "publish": Hold({"commit"}, _FAILS, "put", r"/\.metadata$"),
}
_LOAD = {
    "before meeting": Hold({"plan"}, _ASKED, where="call"),
    "plan": Hold({"plan", "load"}, _ASKED, where="local plan"),
    "global plan": Hold({"plan", "load"}, _ASKED, where="global plan", victims=("coordinator",)),
    "read": Hold({"load"}, _ALL_BUT_CTRL_C, "get", _SHARD, "victim"),
    "waiting": Hold({"load"}, _DIES | {"interrupt"}, "get", _SHARD, "other"),
}

_RECORD = r"/\.ckpt-storage/[0-9a-f]+/[0-9]{5,}\.json$"
_NAME = r"/model-0000{file}-of-0000[23](-[0-9a-f]{8})?\.safetensors$"
_OUT, _LATE = {"consolidate"}, "broadcast 3"

_CONSOLIDATE = {
    "before meeting": Hold({"plan"}, _DIES | {"stop and go on"}, where="call"),
    "plan": Hold({"plan"}, _ASKED, where="local plan"),
    "opening": Hold(
        {"plan"}, _ALL_BUT_CTRL_C, "get", r"saves/.*/manifest\.json$", member_step="broadcast 1"
    ),
    "read": Hold(_OUT, _GO_ON | _FAILS, "get", _SHARD, "victim", member_step=_LATE),
    # The weight file that a rank writes alone is small.
    "write": Hold(_OUT, _GO_ON | _FAILS, "put", _NAME, "victim", member_step=_LATE),
    "waiting": Hold(_OUT, _DIES | {"interrupt"}, "put", _NAME, "other", member_step=_LATE),
    # Two ranks write a file, and the coordinator completes it. All its parts are withheld, those of
    # the victim and those of the other rank.
    "write shared": Hold(_OUT, _GO_ON, "part(_copy)?", _NAME, "both", hit_count=2, files=(1, 1, 2)),
    "complete shared": Hold(
        _OUT,
        _GO_ON,
        "complete",
        _NAME,
        "victim",
        member_step=_LATE,
        files=(1, 1, 2),
        victims=("coordinator",),
    ),
    "index": Hold(
        _OUT,
        {*get_args(Fault)},
        "put",
        r"/model\.safetensors\.index\.json$",
        member_step=_LATE,
    ),
    # The index counts by now; what it supersedes is deleted.
    "clean": Hold(_OUT, _ALL_BUT_CTRL_C | {"oversleep"}, "delete", _RECORD, member_step=_LATE),
}

# What is saved in the background is planned while it is staged, before ranks meet.
_STAGED = {"before meeting", "plan"}

# An interrupt of the trainer does not end what its threads do.
_ASYNC = {
    name: replace(
        hold,
        faults=hold.faults - {"interrupt"},
        names=hold.names | ({"stage"} if name in _STAGED else set()),
    )
    for name, hold in _SAVE.items()
}

PHASES = {"save": _SAVE, "async save": _ASYNC, "load": _LOAD, "consolidate": _CONSOLIDATE}
WAITS = {
    "save": "outcome 1",
    "async save": "outcome 1",
    "load": "broadcast 1",
    "consolidate": "broadcast 3",
}
"""The step in which a member waits for the end of an operation."""


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
        """Only who asks the storage sees it fail, or gets an answer late."""
        hold = self.hold
        asks = bool(hold.holds) or not hold.key or self.victim == "coordinator"
        by_itself = self.fault in {"kill", "stop", "interrupt"}
        return self.fault in hold.faults and (asks or by_itself)


def all_cells(world_size: int) -> Iterator[Cell]:
    """Return the whole matrix."""
    for operation, phases in PHASES.items():
        for phase, hold in phases.items():
            every = itertools.product(get_args(Fault), hold.victims, get_args(Host))
            cells = (Cell(operation, phase, *one, world_size) for one in every)
            yield from (cell for cell in cells if cell.is_possible)


def chosen(pattern: str, world_size: int = 3) -> list[Cell]:
    """Return the cells whose description matches."""
    return [cell for cell in all_cells(world_size) if re.search(pattern, str(cell))]
