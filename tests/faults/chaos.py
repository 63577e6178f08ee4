"""A chaos run: jobs under real torchrun, faults at random, and a judge of what they leave.

    python tests/faults/chaos.py --seed 1 --minutes 10

Each round is one folder, in which jobs train and save until its time is over, while faults are
injected. A job that a fault ends is started again. When no fault is active any more, every rank
saves once more; this must succeed. Then the history of the round is judged (`launch_history`).
A line is printed for each fault and each round. The exit code is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent / "support"), str(_HERE.parents[1])]

from launch_history import (  # noqa: E402  # found where this script lies
    ANY_PROCESS,
    Bounds,
    Event,
    Findings,
    History,
    Stall,
    contents,
    pending_calls,
    stalled_s,
    stalls_of,
    tally,
)
from launch_jobs import (  # noqa: E402  # found where this script lies
    Job,
    Logs,
    Settings,
    is_alive,
    parent_of,
)
from limits import SLACK_S  # noqa: E402  # found where this script lies

import ckpt_storage  # noqa: E402  # found where this script lies

_START_LIMIT_S = 180.0
_END_LIMIT_S = 240.0
_READ_EVERY_S = 0.08
_PRINT_COUNT = 12
_QUEUED_S = 20.0
_DEATH_S = 10.0
_TICK_S, _LAG_S = 0.04, 1.0

_IN_RANK = ("delay", "skip", "raise", "gil", "break")

_WEIGHTS = {
    "delay": 12,
    "skip": 10,
    "raise": 8,
    "gil": 8,
    "break": 12,
    "stop": 10,
    "stop-worker": 8,
    "kill-worker": 4,
    "signal": 10,
    "signal-group": 10,
    "kill": 1,
    "kill-job": 0.5,
    "end-job": 0.5,
}
_SECONDS = {"delay": (0.2, 7.0), "gil": (0.3, 6.0), "stop": (0.5, 10.0), "stop-worker": (0.5, 10.0)}
_SPARED = 0.9
"""So many signals that end a rank are not sent: a restart costs the time of many faults."""

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")


@dataclass(slots=True, kw_only=True)
class Totals:
    """What all rounds came to."""

    faults: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)
    late_finals: int = 0
    failing_rounds: list[str] = field(default_factory=list)


def settings_of(rng: random.Random, folder: Path, mode: str | None) -> Settings:
    """Choose what the jobs of a round do."""
    apis = ["save", "saver", "saver", "saver", "save_async", "manager", "manager"]
    if mode == "process":
        apis = ["saver", "saver", "manager"]
    api: Any = rng.choice(apis)
    chosen: Any = mode or rng.choice(["thread", "process"])
    is_manager = api == "manager"
    handled = ["SIGUSR1", "SIGHUP"]
    handled += [name for name in ("SIGTERM", "SIGINT") if not is_manager and rng.random() < 0.5]
    return Settings(
        folder=folder,
        api=api,
        mode=chosen if api in {"saver", "manager"} else "thread",
        background=mode == "process" or rng.random() < 0.6,
        rolling=not is_manager and rng.random() < 0.7,
        every=rng.choice([2, 5, 10]),
        lockstep_every=rng.choice([1, 1, 20]),
        step_s=rng.choice([0.01, 0.03]),
        on_error=rng.choice(["raise", "warn"]),
        handled=handled,
        signals=["SIGTERM"] if is_manager else [],
        has_finals=True,
    )


class Reader(threading.Thread):
    """Reads a rolling URL all the time, as another program would."""

    def __init__(self, url: str) -> None:
        super().__init__(name="chaos reader", daemon=True)
        self.seen: dict[str, Event] = {}
        self.unreadable: list[str] = []
        self._url = url
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(_READ_EVERY_S):
            try:
                record = contents(self._url)
            except (
                ckpt_storage.CheckpointNotFoundError,
                ckpt_storage.CheckpointGoneError,
                ckpt_storage.CheckpointInProgressError,
            ):
                continue
            except ckpt_storage.CheckpointError as error:
                self.unreadable.append(f"a reader got {type(error).__name__}: {error}")
                continue
            self.seen[record["save_id"]] = {**record, "url": self._url}

    def end(self) -> None:
        self._is_over.set()
        self.join()


class Round:
    """One folder, its jobs and its faults."""

    def __init__(
        self, number: int, rng: random.Random, settings: Settings, rank_count: int, seconds: float
    ) -> None:
        self.number, self.rng, self.settings = number, rng, settings
        self.rank_count, self.seconds = rank_count, seconds
        self.faults: Counter[str] = Counter()
        self.findings = Findings()
        self.stalls: list[Stall] = []
        self.spans: list[tuple[float, float]] = []
        self.logs = Logs(settings.folder)
        self.bounds = Bounds(
            timeouts=settings.timeouts,
            mode=settings.mode if settings.is_background else "thread",
            max_pending=2 if settings.api == "save_async" else 1,
        )
        self._begin_s = time.monotonic()
        # Of the faults; their time begins once the first job trains.
        self._end_s: float | None = None
        self._limit_s, self._next_s, self._started_s = math.inf, 0.0, self._begin_s
        self._queued: dict[str, float] = {}
        self._fault_count = 0
        self._continues: list[tuple[float, float, int]] = []
        self._expects_end = False
        self._reader: Reader | None = None
        self._strandeds: set[tuple[int, int]] = set()

    def say(self, text: str) -> None:
        print(f"round {self.number} +{time.monotonic() - self._begin_s:5.1f} s  {text}", flush=True)

    def run(self) -> None:
        if self.settings.rolling:
            self._reader = Reader(self.settings.url)
            self._reader.start()
        has_ended = False
        for run in range(100):
            has_ended = self._run_job(replace(self.settings, run=run))
            if has_ended:
                break
        if not has_ended:
            self.findings.unfinished.append("the job was never let to its end")
        if self._reader is not None:
            self._reader.end()
            self.findings.unfinished += self._reader.unreadable
        self._judge()

    def _run_job(self, settings: Settings) -> bool:
        """Run one torchrun; return whether it came to its final save, or never will."""
        launcher: Any = self.rng.choice(["c10d", "static"])
        self._expects_end = False
        self._limit_s, self._next_s = math.inf, 0.0
        self._started_s = time.monotonic()
        with Job(settings, rank_count=self.rank_count, max_restarts=8, launcher=launcher) as job:
            problem = self._supervise(job)
            if problem is not None:
                job.dump_stacks()
                self.findings.unfinished.append(f"job {settings.run} {problem}")
            self._continue(math.inf)
            code = job.process.poll()
        self._look()
        self._leave_none_behind(settings.run)
        if code != 0 and not self._expects_end and problem is None:
            tail = job.output.read_text()[-1500:]
            self.findings.unfinished.append(f"job {settings.run} ended with {code}: {tail}")
        lives = {
            event["life"] for event in self.logs.events if event["life"] // 100 == settings.run
        }
        if len(lives) > 1 and not self._expects_end:
            self.findings.unfinished.append(f"ranks of job {settings.run} died without a fault")
        self.say(f"job {settings.run} ended with {code}")
        finals = [
            event for event in self.logs.events if event["event"] in {"final", "final-failed"}
        ]
        return problem is not None or any(event["life"] // 100 == settings.run for event in finals)

    def _supervise(self, job: Job) -> str | None:
        """Inject faults until the time is over; return why the job is abandoned, if it is."""
        look_s, last_s = 0.0, time.monotonic()
        while job.process.poll() is None:
            time.sleep(_TICK_S)
            now = time.monotonic()
            if now > last_s + _LAG_S:  # the machine has no time for anybody
                self.stalls.append(Stall(pid=ANY_PROCESS, begin_s=last_s, end_s=now))
            last_s = now
            self._continue(now)
            if now < look_s:
                continue
            look_s = now + 0.2
            self._look()
            ready = self._ready(job.settings.run)
            is_whole = len(ready) == self.rank_count
            if now > self._limit_s:
                return "does not end"
            is_late = now > max(self._started_s, self._last_start()) + _START_LIMIT_S
            # Ranks that were asked to end are not whole, either, once they have.
            if is_late and not is_whole and self._limit_s == math.inf:
                return "does not begin"
            if self._is_over(now):
                if self._limit_s == math.inf:
                    self._withdraw()
                    (self.settings.folder / "stop").touch()
                    self._limit_s = now + _END_LIMIT_S
            elif is_whole:
                self._go_on(job, ready, now)
        return None

    def _is_over(self, now: float) -> bool:
        """Return whether no more faults come, and none is active."""
        if self._end_s is None or now < self._end_s or self._continues:
            return False
        return not self._queued or now > self._end_s + _QUEUED_S

    def _go_on(self, job: Job, ready: Sequence[Event], now: float) -> None:
        """Inject a fault if it is time."""
        self._end_s = self._end_s or now + self.seconds
        if self._next_s < now < self._end_s and len(self._queued) < 2 * self.rank_count:
            self._inject(job, ready)
            self._next_s = now + self.rng.expovariate(1.6)

    # What happens.

    def _look(self) -> None:
        for event in self.logs.read():
            if event["event"] in {"fault", "dropped"}:
                fault = event["fault"]
                # A rank may also take a fault late, after a restart.
                self._queued.pop(str(fault["id"]), None)
                if event["event"] == "fault":
                    seconds = fault.get("seconds", 0.0)
                    # As the rank reports it: this process may read the report much later.
                    span = event["begin"], event["t"]
                    self._count(fault["kind"], f"rank {event['rank']}", seconds, span=span)
        now = time.monotonic()
        # A rank that died may have taken some along.
        for name in [name for name, at in self._queued.items() if now > at + _QUEUED_S]:
            del self._queued[name]
        stalls = self.stalls + stalls_of(self.logs.events)
        stalls += [Stall(pid=pid, begin_s=at, end_s=now) for _, at, pid in self._continues]
        for key, call in pending_calls(self.logs.events).items():
            allowed = self.bounds.of_call(
                call["name"], is_manager=self.settings.api == "manager"
            ) + stalled_s(stalls, call["pid"], call["t"], now)
            # A hold of the interpreter's lock is known only afterwards.
            is_over = now - call["t"] > allowed + 2 * SLACK_S + 6
            if is_over and key not in self._strandeds and is_alive(call["pid"], call["t"]):
                self._strandeds.add(key)
                self.findings.waits.append(
                    f"{call['name']} of step {call['step']}, rank {call['rank']}, life "
                    f"{call['life']} has not returned after {now - call['t']:.1f} s "
                    f"(allowed {allowed:.1f} s)"
                )
                self.say(self.findings.waits[-1])

    def _ready(self, run: int) -> list[Event]:
        """Return the `ready` events of the live ranks of the newest incarnation."""
        lives = [event["life"] for event in self.logs.events if event["event"] == "start"]
        lives = [life for life in lives if life // 100 == run]
        if not lives:
            return []
        gone = {
            event["pid"]
            for event in self.logs.events
            if event["event"] in {"broken", "end", "preempted"} and event["life"] == max(lives)
        }
        return [
            event
            for event in self.logs.events
            if event["event"] == "ready"
            and event["life"] == max(lives)
            and event["pid"] not in gone
            and is_alive(event["pid"], event["t"])
        ]

    def _last_start(self) -> float:
        starts = [float(event["t"]) for event in self.logs.events if event["event"] == "start"]
        return max(starts, default=0.0)

    def _worker_of(self, rank: Event) -> int | None:
        pids = [
            event["worker"]
            for event in self.logs.events
            if event["event"] == "worker" and event["pid"] == rank["pid"]
        ]
        pid = pids[-1] if pids else None
        return pid if pid is not None and parent_of(pid) == rank["pid"] else None

    # Faults.

    def _inject(self, job: Job, ready: Sequence[Event]) -> None:
        rank = self.rng.choice(list(ready))
        worker = self._worker_of(rank)
        weights = dict(_WEIGHTS)
        if worker is None:
            del weights["stop-worker"], weights["kill-worker"]
        kind = self.rng.choices(list(weights), list(weights.values()))[0]
        least_s, most_s = _SECONDS.get(kind, (0.0, 0.0))
        seconds = least_s and round(least_s * (most_s / least_s) ** self.rng.random(), 2)
        pid = worker if "worker" in kind and worker is not None else int(rank["pid"])
        if kind in _IN_RANK:
            self._command(rank["rank"], kind, seconds)
        elif kind in {"stop", "stop-worker"}:
            self._stop(kind, rank["rank"], pid, seconds)
        elif kind in {"signal", "signal-group"}:
            self._send(kind, rank["rank"], pid)
        elif kind in {"kill-job", "end-job"}:
            self._expects_end = True
            self._count_death(kind, "")
            if kind == "end-job":
                assert isinstance(job.process, subprocess.Popen)
                self._signal(job.process.pid, signal.SIGTERM)
            else:
                job.kill()
        else:
            self._expects_end |= kind == "kill"
            count = self._count_death if kind == "kill" else self._count
            count(kind, f"rank {rank['rank']}")
            self._signal(pid, signal.SIGKILL)

    def _stop(self, kind: str, rank: int, pid: int, seconds: float) -> None:
        if any(pid == entry[2] for entry in self._continues):
            return
        self._signal(pid, signal.SIGSTOP)
        now = time.monotonic()
        self._continues.append((now + seconds, now, pid))
        self._count(kind, f"rank {rank}", seconds)

    def _send(self, kind: str, rank: int, pid: int) -> None:
        """Send a signal to a rank, or to its process group; it pends while a process is stopped."""
        name = self.rng.choice(_SIGNALS)
        if name not in self.settings.handled:
            if self.rng.random() < _SPARED:
                return
            self._expects_end = True
        self._count(f"{kind} {name}", f"rank {rank}")
        self._signal(pid, signal.Signals[name], to_group=kind == "signal-group")

    def _command(self, rank: int, kind: str, seconds: float) -> None:
        """Leave a fault to a rank, which has it at its next save."""
        self._fault_count += 1
        fault: dict[str, Any] = {"id": f"{self.number}-{self._fault_count}", "kind": kind}
        if seconds:
            fault["seconds"] = seconds
        if kind == "raise":
            fault["by"] = self.rng.choice(["planner", "state"])
        if kind in {"gil", "break"} and self.rng.random() < 0.7:
            fault["after_s"] = round(self.rng.uniform(0.0, 0.15), 3)
        folder = self.settings.folder / "commands" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._fault_count:05d}"
        path.write_text(json.dumps(fault))
        path.rename(path.with_suffix(".json"))
        self._queued[fault["id"]] = time.monotonic()

    def _withdraw(self) -> None:
        """Take back faults that no rank has taken up."""
        for path in (self.settings.folder / "commands").rglob("*.json"):
            path.unlink(missing_ok=True)
        self._queued.clear()

    def _signal(self, pid: int, number: int, *, to_group: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if to_group else os.kill)(pid, number)

    def _continue(self, now: float) -> None:
        for entry in [due for due in self._continues if due[0] <= now]:
            self._continues.remove(entry)
            self._signal(entry[2], signal.SIGCONT)
            # It may take a moment until it runs again.
            end_s = time.monotonic() + 0.2
            self.stalls.append(Stall(pid=entry[2], begin_s=entry[1], end_s=end_s))

    def _count_death(self, kind: str, who: str) -> None:
        """Count a fault that lasts until torchrun has ended the ranks that are left."""
        now = time.monotonic()
        self._count(kind, who, span=(now, now + _DEATH_S))

    def _count(
        self, kind: str, who: str, seconds: float = 0.0, *, span: tuple[float, float] | None = None
    ) -> None:
        self.faults[kind] += 1
        now = time.monotonic()
        self.spans.append(span or (now, now + seconds))
        self.say(f"{kind} {who}" + (f" {seconds} s" if seconds else ""))

    # The end.

    def _leave_none_behind(self, run: int) -> None:
        """Note processes of a job that outlive it."""
        end_s = time.monotonic() + 15
        seen_s = {
            event[key]: event["t"]
            for key in ("pid", "worker")
            for event in self.logs.events
            if event["life"] // 100 == run and event.get(key)
        }
        while alive := {pid for pid, at_s in seen_s.items() if is_alive(pid, at_s)}:
            if time.monotonic() > end_s:
                self.findings.unfinished.append(f"processes {alive} outlive job {run}")
                for pid in alive:
                    self._signal(pid, signal.SIGKILL)
                return
            time.sleep(0.1)

    def _final_contents(self) -> list[Event]:
        root, records = self.settings.folder / "saved", []
        for folder in sorted(root.iterdir()):
            try:
                records.append({**contents(str(folder)), "url": str(folder)})
            except (ckpt_storage.CheckpointNotFoundError, ckpt_storage.CheckpointInProgressError):
                continue
            except ckpt_storage.CheckpointError as error:
                self.findings.unfinished.append(f"{folder.name} is unreadable at the end: {error}")
        return records

    def _judge(self) -> None:
        stalls = self.stalls + stalls_of(self.logs.events)
        for event in self.logs.events:
            if "url" in event:
                event["url"] = event["url"].removeprefix("file://")
        seen = [] if self._reader is None else list(self._reader.seen.values())
        self.findings.add(
            History(
                events=self.logs.events,
                seen=seen,
                final=self._final_contents(),
                bounds=self.bounds,
                stalls=stalls,
                faults=self.spans,
                world_size=self.rank_count,
                is_manager=self.settings.api == "manager",
            ).check()
        )


def run_chaos(
    *,
    seed: int,
    minutes: float,
    mode: str | None,
    rank_counts: Sequence[int],
    round_count: int | None,
    round_s: float,
    keep: Path | None = None,
) -> Totals:
    """Run rounds until the time or their number is over."""
    totals, begin_s = Totals(), time.monotonic()
    number = 0
    while time.monotonic() < begin_s + 60 * minutes and number != round_count:
        number += 1
        rng = random.Random(f"{seed}/{number}")
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-{number}-", dir=keep))
        settings = settings_of(rng, folder, mode)
        # A restart of many ranks costs the time of many faults.
        rank_count = rng.choice([rank_counts[0], *rank_counts])
        played = Round(number, rng, settings, rank_count, round_s)
        played.say(
            f"begins: {settings.api}, {settings.mode}, "
            f"{'background' if settings.is_background else 'foreground'}, "
            f"{'one URL' if settings.rolling else 'a URL a step'}, {rank_count} ranks, "
            f"on_error={settings.on_error}, handled={settings.handled}, in {folder}"
        )
        played.run()
        totals.faults += played.faults
        totals.calls += Counter(tally(played.logs.events))
        finals = [event for event in played.logs.events if event["event"] == "final"]
        totals.late_finals += any(event["attempt"] > 1 for event in finals)
        totals.findings.add(played.findings)
        lines = played.findings.lines()
        attempts = sorted({event["attempt"] for event in finals})
        played.say(
            f"ends: {sum(played.faults.values())} faults, final save after {attempts} tries, "
            f"{len(lines)} findings; {json.dumps(tally(played.logs.events))}"
        )
        for line in lines[:_PRINT_COUNT]:
            print(f"  {line[:600]}", flush=True)
        if lines:
            print(f"  all {len(lines)} in {folder / 'findings.txt'}", flush=True)
            (folder / "findings.txt").write_text("\n".join(lines))
            totals.failing_rounds.append(str(folder))
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, help="end after so many rounds")
    parser.add_argument("--round-seconds", type=float, default=180.0)
    parser.add_argument("--mode", choices=["thread", "process"])
    parser.add_argument("--ranks", default="2..3", help="a number, or a range such as 2..4")
    parser.add_argument("--keep", type=Path, help="folder for the logs of rounds that fail")
    options = parser.parse_args()
    # Its jobs end with it, also where it runs in the background.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    least, _, most = options.ranks.partition("..")
    begin_s = time.monotonic()
    totals = run_chaos(
        seed=options.seed,
        minutes=options.minutes,
        mode=options.mode,
        rank_counts=range(int(least), int(most or least) + 1),
        round_count=options.rounds,
        round_s=options.round_seconds,
        keep=options.keep,
    )
    findings = totals.findings
    print(f"faults: {sum(totals.faults.values())} {json.dumps(dict(totals.faults))}")
    print(f"calls: {json.dumps(dict(totals.calls))}")
    print(f"minutes: {(time.monotonic() - begin_s) / 60:.1f}")
    print(f"final saves that needed another try: {totals.late_finals}")
    print(f"mixtures: {len(findings.mixtures)}")
    print(f"lost OKs: {len(findings.lost)}")
    print(f"waits beyond deadline: {len(findings.waits)}")
    print(f"false failures: {len(findings.false_failures)}")
    print(f"unfinished jobs: {len(findings.unfinished)}")
    print(f"saves that keep failing after a fault: {len(findings.stuck)}")
    for folder in totals.failing_rounds:
        print(f"logs: {folder}")
    return 1 if findings.lines() else 0


if __name__ == "__main__":
    sys.exit(main())
