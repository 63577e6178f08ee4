"""The fault matrix: each operation, held in each phase, loses a rank in each way.

A rank gets into its phase for certain: a planner asks, or a storage request is never answered, and
only then comes the fault. The cells are in `fault_cells`, what a rank does is in `fault_ranks`.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import time
from collections.abc import Sequence

from fault_cells import SLACK_S, SLOT, TIMEOUTS, WORLD_SIZE, Cell
from fault_driver import (
    BUCKET,
    SETTLE_S,
    Event,
    Ranks,
    export_leftovers,
    export_version,
    stock_version,
)

from ckpt_storage.testing.s3_server import FaultRule, S3Server

__all__ = ["Matrix"]

FIRST, SECOND, THIRD = 1, 2, 3
"""Versions of the state: what lies there, what the operation saves, what is saved afterwards."""

_LATE_S = 4.0
"""How long a commit is delayed that its saver is stopped in; it may go on when the saver does."""

_LATE_PHASES = frozenset({"commit", "publish", "index"})
"""Phases in which what an operation makes may count already."""


class Matrix:
    """Runs cells one after another."""

    def __init__(self) -> None:
        self._seeds: dict[str, dict[str, bytes]] = {}

    def run(self, cell: Cell) -> list[str]:
        """Run one cell; return what did not hold, and then what the ranks told."""
        with S3Server() as server:
            server.create_bucket(BUCKET)
            for key, data in self._seed(cell.operation).items():
                server.put(BUCKET, key, data)
            server.reset_counters()
            with Ranks() as ranks:
                run = _Run(cell, server, ranks)
                problems = run.problems
                try:
                    run.run()
                except TimeoutError as error:
                    problems.append(str(error))
                    run.story += [f"{one.op} {one.key} {one.fault}" for one in server.requests]
                server.faults([])
                if cell.fault == "oversleep":
                    # The victim wakes up when others have done its work.
                    self._check_after(cell, server, run)
                    ranks.signal(cell.rank, signal.SIGCONT)
                    if ranks.wait_dead([cell.rank])[cell.rank] is None:
                        problems.append("who overslept did not end")
                    problems += _export_problems(server, "after who overslept")
                if problems:
                    run.story += ranks.logs()
            if cell.fault != "oversleep":
                self._check_after(cell, server, run)
        return [*problems, *run.story] if problems else []

    def _check_after(self, cell: Cell, server: S3Server, run: _Run) -> None:
        """Check what is there, and that the next operation succeeds."""
        problems = run.problems
        try:
            if cell.operation == "consolidate":
                found = export_version(server)
                if found not in {FIRST, SECOND}:
                    problems.append(f"what the index names is version {found}")
                run.judge_outcome(is_committed=found == SECOND)
                # Fewer ranks: what is complete already is not theirs to write.
                self._together("consolidate", server, SECOND, cell.files, world_size=2)
                problems += _export_problems(server, "after the next consolidation")
                return
            is_committed = any(re.search(SLOT, key) for key in server.dump())
            run.judge_outcome(is_committed=is_committed)
            expected = SECOND if is_committed else FIRST
            # `.metadata` follows the commit: who opens the checkpoint next brings it up to date.
            if (stock := stock_version(server)) != expected and not (
                is_committed and stock == FIRST
            ):
                problems.append(f"stock torch loads version {stock}, not {expected}")
            for event in self._together("check and save", server, THIRD):
                if event.details["text"] != f"version {expected}":
                    problems.append(event.details["text"])
            if (stock := stock_version(server)) != THIRD:
                problems.append(f"after the next save stock torch loads version {stock}")
        except (TimeoutError, AssertionError) as error:
            problems.append(f"afterwards: {error}")

    def _seed(self, operation: str) -> dict[str, bytes]:
        """Return the objects of a checkpoint of the first version.

        For a consolidation the first version was exported, and the second was saved since.
        """
        steps = [("save", FIRST)]
        if operation == "consolidate":
            steps = [("save weights", FIRST), ("consolidate", FIRST), ("save weights", SECOND)]
        name = steps[0][0]
        if name not in self._seeds:
            with S3Server() as server:
                server.create_bucket(BUCKET)
                for step, version in steps:
                    self._together(step, server, version)
                self._seeds[name] = server.dump()
        return self._seeds[name]

    def _together(
        self,
        operation: str,
        server: S3Server,
        version: int,
        files: dict[str, int] | None = None,
        world_size: int = WORLD_SIZE,
    ) -> list[Event]:
        """Run an operation on fresh ranks without any fault; return how each ended."""
        with Ranks() as ranks:
            ranks.start(
                operation,
                server,
                world_size=world_size,
                launcher_hosts=True,
                version=version,
                files=files,
            )
            ended = ranks.wait_for(*((rank, "ended") for rank in range(world_size)))
        for event in ended:
            assert event.details["kind"] == "returned", event.details["trace"]
        return ended


def _export_problems(server: S3Server, when: str) -> list[str]:
    """Return what is wrong with an export that should be of the second version, and clean."""
    problems = [f"{when} the export has {left}" for left in export_leftovers(server)]
    if (found := export_version(server)) != SECOND:
        problems.append(f"{when} the export is version {found}")
    if open_count := server.open_upload_count:
        problems.append(f"{when} {open_count} uploads are open")
    return problems


class _Run:
    """One cell, step by step."""

    def __init__(self, cell: Cell, server: S3Server, ranks: Ranks) -> None:
        self._cell = cell
        self._server = server
        self._ranks = ranks
        self._raised: list[str] = []
        self.problems: list[str] = []
        self.story: list[str] = []

    def run(self) -> None:
        cell, ranks = self._cell, self._ranks
        if cell.key:
            action = FaultRule(action="hang", times=0)
            if cell.fault == "stop and go on":
                action = FaultRule(action="delay", delay_s=_LATE_S)
            self._server.faults([dataclasses.replace(action, op=cell.hold.op, key=cell.key)])
        ranks.start(
            cell.operation,
            self._server,
            world_size=WORLD_SIZE,
            launcher_hosts=cell.host == "launcher",
            version=SECOND,
            holds=None if cell.key else cell.rank,
            files=cell.files,
        )
        self._reach()
        begin_s = time.monotonic()
        if cell.fault == "error":
            ranks.answer(cell.rank, "raise")
        else:
            is_killed = cell.fault == "kill"
            ranks.signal(cell.rank, signal.SIGKILL if is_killed else signal.SIGSTOP)
        live = [rank for rank in range(WORLD_SIZE) if rank != cell.rank or cell.fault == "error"]
        ended = ranks.wait_for(*((rank, "ended") for rank in live))
        took_s = max(event.at_s for event in ended) - begin_s
        if took_s > cell.limit_s:
            self.problems.append(f"the last raised after {took_s:.2f} s, not {cell.limit_s} s")
        if cell.fault == "stop and go on":
            ended += self._go_on()
        for event in ended:
            self._judge(event)
        self._judge_exits([event.rank for event in ended])

    def _reach(self) -> None:
        """Wait until the victim is in the phase for certain."""
        cell, hold = self._cell, self._cell.hold
        if not cell.key:
            self._ranks.wait_for((cell.rank, "local plan"))
            return
        self._server.wait_for(lambda log: any(one.fault for one in log), timeout_s=SETTLE_S)
        waiting: list[int] = []
        if hold.holds == "own":
            # All others have done their part: what they say must not depend on who was faster.
            waiting = [rank for rank in range(WORLD_SIZE) if rank != cell.rank]
        elif hold.holds == "other" or cell.victim == "member":
            waiting = [cell.rank]
        self._ranks.wait_for(*((rank, hold.waits if rank else "gather 2") for rank in waiting))

    def _go_on(self) -> list[Event]:
        """Wake the victim, after all others raised; it must find out, too."""
        cell = self._cell
        if cell.victim == "coordinator" and cell.host == "rank 0":
            # A store that answers after all finds threads of torch's client in an interpreter
            # that ends, and torch aborts such a process.
            self._ranks.wait_dead([rank for rank in range(WORLD_SIZE) if rank != cell.rank])
        awake_s = time.monotonic()
        self._ranks.signal(cell.rank, signal.SIGCONT)
        ended = self._ranks.wait_for((cell.rank, "ended"))
        took_s = ended[0].at_s - awake_s
        if took_s > TIMEOUTS.plan + SLACK_S:
            self.problems.append(f"the victim went on for {took_s:.2f} s")
        return ended

    def _judge(self, event: Event) -> None:
        cell, told = self._cell, event.details
        kind = told["kind"]
        self._raised.append(kind + (" (committed)" if told.get("committed") else ""))
        text = f"rank {event.rank}: {kind}: {told.get('text')}"
        self.story.append(f"{text}\n{told.get('trace', '')}")
        if kind == "returned":
            ends = ("committed", "published")
            if cell.phase not in _LATE_PHASES or not told["text"].startswith(ends):
                self.problems.append(f"rank {event.rank} returned {told['text']}")
            return
        if not told["ours"]:
            self.problems.append(f"{text}, which is no CheckpointError")
        if told["phase"] not in cell.hold.names:
            self.problems.append(f"{text} has phase {told['phase']!r}")
        is_named = told["rank"] == cell.rank or cell.rank in told["failures"]
        is_named = is_named and re.search(rf"[Rr]ank {cell.rank}\b", told["text"]) is not None
        if event.rank != cell.rank and not is_named:
            self.problems.append(f"{text} does not name rank {cell.rank}")

    def _judge_exits(self, live: Sequence[int]) -> None:
        cell, ranks = self._cell, self._ranks
        bad = {rank: code for rank, code in ranks.wait_dead(live).items() if code != 0}
        if bad:
            self.problems.append(f"exit codes are {bad}, None for what did not end in time")
        if cell.fault == "oversleep":
            return
        if cell.fault == "stop":
            ranks.signal(cell.rank, signal.SIGKILL)
        ranks.wait_dead(range(WORLD_SIZE))
        if alive := ranks.left():
            self.problems.append(f"processes {alive} are left")

    def judge_outcome(self, *, is_committed: bool) -> None:
        """Check that what the ranks said of their work is what is on the storage."""
        cell, said = self._cell, set(self._raised)
        says_yes = any(kind == "returned" or kind.endswith("(committed)") for kind in said)
        if says_yes and not is_committed:
            self.problems.append("a rank says that it is committed, and it is not")
        if is_committed and cell.phase not in _LATE_PHASES:
            self.problems.append("it is committed, and nobody could have done that")
        if is_committed and any("published nothing" in text for text in self.story):
            self.problems.append("the new index is there, and a rank says that it is not")
        is_sure = says_yes or "CommitUnknownError" in said or cell.operation == "consolidate"
        if is_committed and not is_sure:
            self.problems.append("it is committed, and all ranks say that it failed")
