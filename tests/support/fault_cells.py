"""The cells of the fault matrix, as data: operations, their phases, faults and victims.

A new operation is one function in `fault_ranks.OPERATIONS` and one entry of `PHASES` and `WAITS`
here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fault_ranks import Where

from ckpt_storage import RetryPolicy, Timeouts

__all__ = ["PHASES", "TIMEOUTS", "WAITS", "Cell", "Hold", "Host", "all_cells"]

Fault = Literal["kill", "stop", "stop and go on", "oversleep", "interrupt", "error", "hang"]
Victim = Literal["member", "coordinator"]
Host = Literal["rank 0", "launcher"]

TIMEOUTS = Timeouts(
    plan=6, stage=6, write=6, commit=6, load=6, consolidate=6, request=60, silence=3
)
RETRY = RetryPolicy()
REPORTED_S = 2.0
SLACK_S = 5.0

SLOT = r"commits/00000002\.json$"
"""The commit record of the save under test: the checkpoint that it replaces has the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """How a victim is kept in a phase, and what errors may call the phase.

    `where` names the call in which it asks. `key` is the storage object, `op` the request, of
    which the answer is withheld from `held`: the victim, another rank, or "both".

    `hit_count` requests are withheld before the fault comes. `coordinator_step` and `member_step`
    are where ranks wait whose part is done; "" is the operation's usual one. `files` says which
    weight file each tensor goes into.
    """

    names: frozenset[str]
    where: Where = ""
    op: str = ""
    key: str = ""
    holds: Literal["victim", "other", "both", ""] = ""
    hit_count: int = 1
    coordinator_step: str = "gather 2"
    member_step: str = ""
    files: tuple[int, int, int] = (1, 2, 3)
    faults: frozenset[Fault]
    victims: tuple[Victim, ...] = ("member", "coordinator")


_SIGNALS: frozenset[Fault] = frozenset({"kill", "stop"})
_PUT = "put|part|create_upload"


def _asked(where: Where, *names: str, only: Victim | None = None) -> Hold:
    return Hold(
        names=frozenset(names),
        where=where,
        faults=_SIGNALS | {"error", "stop and go on"},
        victims=("member", "coordinator") if only is None else (only,),
    )


_SAVE = {
    "before meeting": _asked("call", "plan"),
    "plan": _asked("local plan", "plan"),
    "global plan": _asked("global plan", "plan", only="coordinator"),
    "write": Hold(
        # Who has written is committing, as far as it knows.
        names=frozenset({"write", "commit"}),
        op=_PUT,
        key=r"/__{held}_0\.distcp$",
        holds="victim",
        faults=_SIGNALS | {"error", "hang", "stop and go on"},
    ),
    "waiting": Hold(
        names=frozenset({"write", "commit"}),
        op=_PUT,
        key=r"/__{held}_0\.distcp$",
        holds="other",
        faults=_SIGNALS | {"interrupt"},
    ),
    "commit": Hold(
        names=frozenset({"commit"}),
        op="put",
        key=SLOT,
        faults=_SIGNALS | {"error", "hang", "interrupt", "stop and go on"},
    ),
    "publish": Hold(
        names=frozenset({"commit"}),
        op="put",
        key=r"/\.metadata$",
        faults=_SIGNALS | {"error", "hang"},
    ),
}
_LOAD = {
    "before meeting": _asked("call", "plan"),
    "plan": _asked("local plan", "plan", "load"),
    "global plan": _asked("global plan", "plan", "load", only="coordinator"),
    "read": Hold(
        names=frozenset({"load"}),
        op="get",
        key=r"/__{held}_0\.distcp$",
        holds="victim",
        faults=_SIGNALS | {"error", "hang", "stop and go on"},
    ),
    "waiting": Hold(
        names=frozenset({"load"}),
        op="get",
        key=r"/__{held}_0\.distcp$",
        holds="other",
        faults=_SIGNALS | {"interrupt"},
    ),
}

_NAME = r"/model-0000{file}-of-0000[23](-[0-9a-f]{8})?\.safetensors$"
_GO_ON: frozenset[Fault] = _SIGNALS | {"stop and go on", "oversleep"}


def _writing(op: str, **more: Any) -> Hold:
    """Hold a request for the weight file that a rank writes alone; it is small."""
    return Hold(names=frozenset({"consolidate"}), op=op, key=_NAME, **{"holds": "victim", **more})


def _sharing(op: str, victim: Victim, files: tuple[int, int, int], **more: Any) -> Hold:
    """Hold a request for a weight file that two ranks write, and that the coordinator completes."""
    return Hold(
        names=frozenset({"consolidate"}),
        op=op,
        key=_NAME,
        faults=_GO_ON,
        victims=(victim,),
        files=files,
        **more,
    )


_CONSOLIDATE = {
    "before meeting": replace(_asked("call", "plan"), faults=_SIGNALS | {"stop and go on"}),
    "plan": _asked("local plan", "plan"),
    "opening": Hold(
        names=frozenset({"plan"}),
        op="get",
        key=r"saves/.*/manifest\.json$",
        faults=_SIGNALS | {"error", "hang", "stop and go on"},
        member_step="broadcast 1",
    ),
    "read": Hold(
        names=frozenset({"consolidate"}),
        op="get",
        key=r"/__{held}_0\.distcp$",
        holds="victim",
        faults=_GO_ON | {"error", "hang"},
        member_step="broadcast 3",
    ),
    "write": _writing("put", faults=_GO_ON | {"error", "hang"}, member_step="broadcast 3"),
    "waiting": _writing(
        "put", holds="other", faults=_SIGNALS | {"interrupt"}, member_step="broadcast 3"
    ),
    # All parts of the file are withheld, those of the victim and those of the other rank.
    "write shared": replace(
        _sharing("part(_copy)?", "member", (1, 1, 2), holds="both", hit_count=2),
        victims=("member", "coordinator"),
    ),
    "complete shared": _sharing(
        "complete", "coordinator", (1, 1, 2), holds="victim", member_step="broadcast 3"
    ),
    "index": Hold(
        names=frozenset({"consolidate"}),
        op="put",
        key=r"/model\.safetensors\.index\.json$",
        faults=_SIGNALS | {"error", "hang", "interrupt", "stop and go on", "oversleep"},
        member_step="broadcast 3",
    ),
    # The index counts by now; what it supersedes is deleted.
    "clean": Hold(
        names=frozenset({"consolidate"}),
        op="bulk_delete",
        key="^$",
        faults=_SIGNALS | {"error", "hang", "stop and go on", "oversleep"},
        member_step="broadcast 3",
    ),
}

# An interrupt of the trainer does not end what its threads do.
_ASYNC = {
    name: replace(
        hold,
        faults=hold.faults - {"interrupt"},
        # What a state dict raises, it raises while the state is staged.
        names=hold.names | ({"stage"} if name == "before meeting" else set()),
    )
    for name, hold in _SAVE.items()
}

PHASES: dict[str, dict[str, Hold]] = {
    "save": _SAVE,
    "async save": _ASYNC,
    "load": _LOAD,
    "consolidate": _CONSOLIDATE,
}
WAITS = {
    "save": "outcome 1",
    "async save": "outcome 1",
    "load": "broadcast 1",
    "consolidate": "broadcast 3",
}
"""The step in which a member waits for the end of an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """How the phase is held."""
        return PHASES[self.operation][self.phase]

    @property
    def phases(self) -> frozenset[str]:
        """The phases that errors may name."""
        # Who goes on after a stop may be writing before it hears that the others gave up.
        goes_on = self.fault == "stop and go on" and "plan" in self.hold.names
        return self.hold.names | ({"write"} if goes_on else frozenset())

    @property
    def rank(self) -> int:
        """The victim's rank."""
        return 0 if self.victim == "coordinator" else 1

    @property
    def held(self) -> int:
        """The rank whose storage request gets no answer."""
        if self.hold.holds == "other":
            return self.world_size - 1 if self.world_size - 1 != self.rank else 0
        return self.rank if self.hold.holds == "victim" else 0

    @property
    def key(self) -> str:
        """Which objects' requests get no answer, a regular expression; "" for none."""
        hold, kept = self.hold, re.search(r"kept by (\d)", self.phase)
        file = hold.files[int(kept[1]) if kept else self.held]
        return hold.key.replace("{held}", str(self.held)).replace("{file}", str(file))

    @property
    def files(self) -> dict[str, int]:
        """Which weight file each tensor goes into."""
        return {f"model.w{number}": file for number, file in enumerate(self.hold.files)}

    @property
    def limit_s(self) -> float:
        """How long after the fault the last live rank may raise."""
        if self.fault in {"error", "interrupt"}:
            return REPORTED_S
        phase_s = TIMEOUTS.write  # all are alike
        if self.fault == "hang" or self.phase == "before meeting":
            return phase_s + SLACK_S
        return TIMEOUTS.silence + SLACK_S


def all_cells(world_size: int, hosts: Sequence[Host] = ("rank 0", "launcher")) -> Iterator[Cell]:
    """Return the whole matrix."""
    for operation, phases in PHASES.items():
        for phase, hold in phases.items():
            for fault in (
                "kill",
                "stop",
                "stop and go on",
                "oversleep",
                "interrupt",
                "error",
                "hang",
            ):
                for victim, host in itertools.product(hold.victims, hosts):
                    is_of_storage = fault in {"error", "hang"} and hold.key
                    if fault not in hold.faults or (
                        # Only who asks the storage sees it fail, or gets an answer late.
                        hold.holds == ""
                        and hold.key
                        and victim == "member"
                        and (is_of_storage or fault in {"stop and go on", "oversleep"})
                    ):
                        continue
                    yield Cell(
                        operation=operation,
                        phase=phase,
                        fault=fault,
                        victim=victim,
                        host=host,
                        world_size=world_size,
                    )
