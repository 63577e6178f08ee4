"""What a run of `launched_rank.py` may have left behind, judged without the library's protocol.

Only `open_checkpoint` of the library is used, to read what is committed.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from limits import SLACK_S

import ckpt_storage

Event = dict[str, Any]

ANY_PROCESS = 0
"""As the process of a stall: the whole machine stood still."""

_EXPECTED_ENDS = {"KeyboardInterrupt", "SystemExit", "RuntimeError"}
"""Messages of gloo about a rank that got a signal, and about a peer that died."""

_RECOVERY_COUNT = 2
"""So many saves that begin after a fault may fail: those in flight, and while a worker starts."""

_WORKER_START_S = 60.0
"""What a worker may take to import torch on a busy machine."""


def contents(url: str) -> dict[str, Any]:
    """Return what is committed at a URL: for each rank the step and the process that saved it."""
    with ckpt_storage.open_checkpoint(url) as checkpoint:
        marks, buffers = {}, {}
        for fqn in checkpoint:
            if match := re.fullmatch(r"mark(\d+)", fqn):
                marks[match[1]] = [int(number) for number in checkpoint[fqn].numpy()]
            elif match := re.fullmatch(r"buffer(\d+)", fqn):
                buffer = checkpoint[fqn].numpy()
                buffers[match[1]] = sorted({float(buffer.min()), float(buffer.max())})
        return {
            "save_id": checkpoint.save_id,
            "slot": checkpoint.info.slot,
            "marks": marks,
            "buffers": buffers,
            "scalar": int(checkpoint["step"]),
        }


def describe_mixture(seen: Event, world_size: int) -> str | None:
    """Return how a committed checkpoint mixes steps or processes; None if it is sound."""
    marks = {int(rank): tuple(mark[:2]) for rank, mark in seen["marks"].items()}
    steps = {mark[0] for mark in marks.values()} | {seen["scalar"]}
    steps |= {int(step) for values in seen["buffers"].values() for step in values}
    lives = {mark[1] for mark in marks.values()}
    if len(steps) == 1 and len(lives) == 1 and len(marks) == world_size:
        return None
    torn = {rank: values for rank, values in seen["buffers"].items() if len(values) > 1}
    return (
        f"save {seen['save_id']} (slot {seen['slot']}): (step, process) of each rank {marks}, "
        f"`step` {seen['scalar']}" + (f", torn buffers {torn}" if torn else "")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A time in which a process could not run, whatever the library did."""

    pid: int
    begin_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class Bounds:
    """How long each call may take, from its `Timeouts`."""

    timeouts: dict[str, float]
    mode: str
    max_pending: int = 1

    def of_call(self, name: str, phase: str | None = None, *, is_manager: bool = False) -> float:
        """Return the deadlines that a call may meet in turn, and `SLACK_S`.

        An error that names a phase ended the call there.
        """
        t = self.timeouts
        plan = t["plan"] * (3 if is_manager else 2)
        foreground = {
            "stage": plan,
            "plan": plan,
            "write": plan + t["write"],
        }.get(phase or "", plan + t["write"] + t["commit"])
        whole = plan + t["stage"] + t["write"] + t["commit"]
        if self.mode == "process":
            whole += _WORKER_START_S
        return (
            SLACK_S
            + {
                "save": foreground,
                "begin": self.max_pending * whole + t["stage"],
                "background": (self.max_pending + 1) * whole,
                "close": (self.max_pending + 1) * whole,
                "should_save": 4 * t["plan"],
                "load": 4 * t["plan"] + t["load"],
            }[name]
        )


@dataclass(slots=True, kw_only=True)
class Findings:
    """The violations by kind; each a line."""

    mixtures: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    false_failures: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        for name in Findings.__slots__:
            getattr(self, name).extend(getattr(other, name))

    def lines(self) -> list[str]:
        return [f"{name}: {line}" for name in Findings.__slots__ for line in getattr(self, name)]


def stalled_s(stalls: Iterable[Stall], pid: int, begin_s: float, end_s: float) -> float:
    """Return how many seconds of an interval a process could not run."""
    spans = sorted((s.begin_s, s.end_s) for s in stalls if s.pid in {pid, ANY_PROCESS})
    total, at = 0.0, begin_s
    for span_begin_s, span_end_s in spans:
        begin, end = max(span_begin_s, at), min(span_end_s, end_s)
        if end > begin:
            total, at = total + end - begin, end
    return total


def stalls_of(events: Iterable[Event]) -> list[Stall]:
    """Return the holds of the interpreter's lock that ranks logged."""
    return [
        Stall(pid=event["pid"], begin_s=event["begin"], end_s=event["t"])
        for event in events
        if event["event"] == "fault" and event["fault"]["kind"] == "gil"
    ]


def pending_calls(events: Iterable[Event]) -> dict[tuple[int, int], Event]:
    """Return the calls of each process (by process and number) that have not returned yet."""
    pending: dict[tuple[int, int], Event] = {}
    for event in events:
        if event["event"] == "call":
            pending[event["pid"], event["id"]] = event
        elif event["event"] in {"returned", "raised"}:
            pending.pop((event["pid"], event["id"]), None)
            if event["event"] == "returned" and event["name"] == "begin":
                begun = {**event, "name": "background"}
                pending[event["pid"], event["id"]] = begun
        elif event["event"] == "ended":
            pending.pop((event["pid"], event["id"]), None)
    return pending


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One run: what ranks logged, what readers saw at any time, and what is there at the end.

    What was seen are `contents` with their `url`. `stalls` are times in which a process could not
    run, `faults` those in which any fault was active.
    """

    events: Sequence[Event]
    seen: Sequence[Event]
    final: Sequence[Event]
    bounds: Bounds
    stalls: Sequence[Stall]
    faults: Sequence[tuple[float, float]]
    world_size: int
    is_manager: bool

    def check(self) -> Findings:
        """Judge it."""
        findings = Findings()
        by_id = self._by_id()
        for content in by_id.values():
            if (mixture := describe_mixture(content, self.world_size)) is not None:
                findings.mixtures.append(mixture)
        for call, end in self._calls():
            self._check_time(findings, call, end)
            if end.get("kind") == "strange":
                findings.unfinished.append(f"{_who(call)} raised {_why(end)}")
            if call["name"] in {"save", "begin"}:
                self._check_save(findings, call, end, by_id)
        self._check_life(findings)
        self._check_recovery(findings)
        return findings

    def _by_id(self) -> dict[str, Event]:
        """Return what was committed, by save id."""
        logged = (event for event in self.events if event["event"] == "seen")
        return {content["save_id"]: content for content in [*logged, *self.seen, *self.final]}

    def _calls(self) -> Iterator[tuple[Event, Event]]:
        """Yield each call with its outcomes; a call in the background has two."""
        calls: dict[tuple[int, int], Event] = {}
        for event in sorted(self.events, key=lambda event: float(event["t"])):
            if event["event"] == "call":
                calls[event["pid"], event["id"]] = event
            elif event["event"] in {"returned", "raised", "ended"}:
                yield calls[event["pid"], event["id"]], event

    def _check_time(self, findings: Findings, call: Event, end: Event) -> None:
        name = "background" if end["event"] == "ended" else call["name"]
        phase = end.get("phase") if end["event"] == "raised" else None
        allowed = self.bounds.of_call(name, phase, is_manager=self.is_manager)
        allowed += stalled_s(self.stalls, call["pid"], call["t"], end["t"])
        took = end["t"] - call["t"]
        if took > allowed:
            findings.waits.append(
                f"{_who(call)} ({name}) took {took:.1f} s of {allowed:.1f} s and {end['event']} "
                f"{_why(end)}"
            )

    def _check_save(
        self, findings: Findings, call: Event, end: Event, by_id: dict[str, Event]
    ) -> None:
        rank = str(call["rank"])
        payload = [call["step"], call["life"]]
        if "save_id" in end:  # to this rank it is committed
            save = by_id.get(end["save_id"])
            if save is not None and save["marks"].get(rank, [])[:2] != payload:
                findings.lost.append(f"{_who(call)} is OK as {end['save_id']}, which holds {save}")
            last = {content["url"]: content for content in self.final}.get(call["url"])
            if last is None or last["slot"] < end["slot"]:
                findings.lost.append(f"{_who(call)} is OK as slot {end['slot']}; then: {last}")
        elif end.get("kind") in {"failed", "timed-out", "cancelled"}:
            findings.false_failures += [
                f"{_who(call)} failed ({_why(end)}) and is committed as {content['save_id']}"
                for content in by_id.values()
                if content["marks"].get(rank, [])[:2] == payload
            ]

    def _check_recovery(self, findings: Findings) -> None:
        """Note saves that fail long after the last fault."""
        begins: dict[tuple[int, int], float] = {}
        ends: dict[tuple[int, int], float] = {}
        good: set[tuple[int, int]] = set()
        for call, end in self._calls():
            if call["name"] not in {"save", "begin"}:
                continue
            key = call["life"], call["step"]
            begins[key] = min(begins.get(key, math.inf), call["t"])
            ends[key] = max(ends.get(key, 0.0), end["t"])
            if "save_id" in end:
                good.add(key)
        rows: list[list[tuple[int, int]]] = [[]]
        for key in sorted(begins, key=begins.__getitem__):
            if key in good or self._is_hurt(rows[-1], key, begins, ends):
                rows.append([])
            else:
                rows[-1].append(key)
        for row in rows:
            if len(row) > _RECOVERY_COUNT:
                took_s = ends[row[-1]] - begins[row[0]]
                findings.stuck.append(
                    f"{len(row)} saves in a row, steps {row[0][1]} to {row[-1][1]} of life "
                    f"{row[0][0]}, failed in {took_s:.1f} s without a new fault"
                )

    def _is_hurt(
        self,
        row: Sequence[tuple[int, int]],
        key: tuple[int, int],
        begins: dict[tuple[int, int], float],
        ends: dict[tuple[int, int], float],
    ) -> bool:
        """Return whether a fault was active between the row's begin and the end of a save."""
        begin_s = begins[row[0] if row and row[0][0] == key[0] else key]
        return any(begin <= ends[key] and end >= begin_s for begin, end in self.faults)

    def _check_life(self, findings: Findings) -> None:
        for event in self.events:
            where = f"rank {event['rank']}, life {event['life']}"
            if event["event"] == "ready" and event["mixed"]:
                findings.mixtures.append(f"{where} loaded a mixture: {event['seen']}")
            elif event["event"] == "final-failed":
                findings.unfinished.append(f"{where}: no final save succeeded")
            elif event["event"] == "raised" and event["name"] == "load":
                findings.unfinished.append(f"{where}: load raised {_why(event)}")
            elif event["event"] == "broken" and event["error"] not in _EXPECTED_ENDS:
                findings.unfinished.append(f"{where}: the training raised {_why(event)}")
            elif event["event"] == "unreadable":
                findings.unfinished.append(f"{where}: {event['url']} is unreadable: {_why(event)}")


def _who(call: Event) -> str:
    return f"{call['name']} of step {call['step']}, rank {call['rank']}, life {call['life']}"


def _why(end: Event) -> str:
    return f"{end.get('error', end.get('kind', ''))} {end.get('message', '')}".strip()


def tally(events: Iterable[Event]) -> dict[str, int]:
    """Count how the calls ended."""
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        if event["event"] in {"returned", "raised", "ended"}:
            name = event.get("name", "background")
            counts[f"{name} {event.get('kind', 'ok')}"] += 1
    return dict(sorted(counts.items()))
