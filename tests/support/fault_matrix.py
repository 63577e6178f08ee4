"""The fault matrix: each operation, held in each phase, loses a rank in each way.

Run as a script it prints the matrix: `python tests/support/fault_matrix.py --ranks 3`. A rank gets
into its phase for certain: a planner asks, or a storage request is never answered, and only then
comes the fault. The cells are in `fault_cells`, what a rank does is in `fault_ranks`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import fault_driver as driver
import fault_ranks
from fault_cells import SLACK_S, SLOT, TIMEOUTS, WAITS, Cell, chosen

from ckpt_storage.testing.s3_server import FaultRule, RequestRecord, S3Server

FIRST, SECOND, THIRD = 1, 2, 3
"""Versions of the state: what lies there, what the operation saves, what is saved afterwards."""

_LATE_S = 4.0
"""How long a commit is delayed that its saver is stopped in; it may go on when the saver does."""

_LATE_PHASES = frozenset({"commit", "publish", "index", "clean"})
"""Phases in which what an operation makes may count already."""

_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "stop and go on": signal.SIGSTOP,
    "oversleep": signal.SIGSTOP,
    "interrupt": signal.SIGINT,
}


class Matrix:
    """Runs cells one after another; a context manager that owns the nursery."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._seeds: dict[str, dict[str, bytes]] = {}

    def __enter__(self) -> Self:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
        self._folder = Path(folder)
        self.hub = self._stack.enter_context(driver.Hub(self._folder))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, __file__, "--nursery", self.hub.address], env=environment
        )
        self._stack.callback(process.wait, driver.EXIT_S)
        self._stack.callback(process.kill)
        [born] = self.hub.wait_for((-1, "nursery"))
        self._nursery = born.connection
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._nursery.close()
        self._stack.close()

    def ranks(self) -> driver.Ranks:
        return driver.Ranks(self.hub, self._nursery, self._folder)

    def run(self, cell: Cell) -> Row:
        with S3Server() as server:
            server.create_bucket(driver.BUCKET)
            for key, data in self._seed(cell).items():
                server.put(driver.BUCKET, key, data)
            server.reset_counters()
            row = Row(self, cell, server)
            with self.ranks() as ranks:
                try:
                    row.run(ranks)
                except TimeoutError as error:
                    row.problems.append(str(error))
                    row.story += [f"{one.op} {one.key} {one.fault}" for one in server.requests]
                server.faults([])
                if cell.fault == "oversleep":
                    # The victim wakes up when others have done its work.
                    row.settle()
                    row.wake(ranks.pids[cell.rank])
                if row.problems:
                    row.story += ranks.logs()
            if cell.fault != "oversleep":
                row.settle()
        return row

    def _seed(self, cell: Cell) -> dict[str, bytes]:
        """Return the objects of a checkpoint of the first version.

        For a consolidation the first version was exported, and the second was saved since.
        """
        steps = [("save", FIRST)]
        if cell.operation == "consolidate":
            steps = [("save weights", FIRST), ("consolidate", FIRST), ("save weights", SECOND)]
        name = f"{steps[0][0]}, {cell.world_size} ranks"
        if name not in self._seeds:
            cell = replace(cell, host="launcher")
            with S3Server() as server:
                server.create_bucket(driver.BUCKET)
                for step, version in steps:
                    for event in self.together(cell, server, step, version):
                        assert event.details["kind"] == "returned", event.details["trace"]
                self._seeds[name] = server.dump()
        return self._seeds[name]

    def together(
        self,
        cell: Cell,
        server: S3Server,
        operation: str,
        version: int,
        files: Mapping[str, int] | None = None,
    ) -> list[driver.Event]:
        """Run an operation on fresh ranks without any fault; return how each ended."""
        with self.ranks() as ranks:
            ranks.start(cell, server, operation, version, files=files)
            return self.hub.wait_for(*((rank, "ended") for rank in range(cell.world_size)))


@dataclass(slots=True)
class Row:
    """One cell, step by step, and what became of it; `problems` is empty if all held."""

    matrix: Matrix
    cell: Cell
    server: S3Server
    raised: dict[int, str] = field(default_factory=dict)
    last_s: float = 0.0
    committed: bool = False
    problems: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)

    HEAD = (
        "| operation | phase | fault | victim | store host | ranks | live ranks ended with | "
        "last after | committed | verdict |\n" + "| --- " * 10 + "|"
    )

    def __str__(self) -> str:
        raised = ", ".join(f"{rank}: {kind}" for rank, kind in sorted(self.raised.items()))
        verdict = "**FAILED**" if self.problems else "ok"
        return f"| {self.cell} | {raised} | {self.last_s:.2f} s | {self.committed} | {verdict} |"

    def expect(self, holds: object, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    def run(self, ranks: driver.Ranks) -> None:
        """Let the operation begin, hold it, inflict the fault, and judge what the ranks tell."""
        cell, hold = self.cell, self.cell.hold
        self.server.faults(self._rules())
        holds = {cell.rank: hold.where}
        ranks.start(cell, self.server, cell.operation, SECOND, holds=holds, files=cell.files)
        asked = self._reach()
        fault_s = time.monotonic()
        if cell.fault in _SIGNALS:
            os.kill(ranks.pids[cell.rank], _SIGNALS[cell.fault])
        if asked is not None and cell.fault in {"error", "stop and go on"}:
            asked.connection.send("raise" if cell.fault == "error" else "go")
        silenced = cell.fault in _SIGNALS and cell.fault != "interrupt"
        live = [rank for rank in range(cell.world_size) if rank != cell.rank or not silenced]
        ended = self.matrix.hub.wait_for(*((rank, "ended") for rank in live))
        self.last_s = max(event.at_s for event in ended) - fault_s
        late = f"the last raised after {self.last_s:.2f} s, not {cell.limit_s} s"
        self.expect(self.last_s <= cell.limit_s, late)
        if cell.fault == "stop and go on":
            ended += self._go_on(ranks)
        for event in ended:
            self._judge(event)
        self._judge_exits(ranks, [ranks.pids[event.rank] for event in ended])

    def _rules(self) -> list[FaultRule]:
        cell, hold = self.cell, self.cell.hold
        if not hold.key:
            return []
        rule = FaultRule(action="hang", times=0)
        if cell.fault == "error":
            rule = FaultRule(action="status", status=403, code="AccessDenied", times=0)
        elif cell.fault == "stop and go on" and cell.phase in {"commit", "index"}:
            rule = FaultRule(action="delay", delay_s=_LATE_S)
        return [replace(rule, op=hold.op, key=cell.key)]

    def _reach(self) -> driver.Event | None:
        """Wait until the victim is in the phase for certain; return its question, if it asks."""
        cell, hold = self.cell, self.cell.hold
        if hold.where:
            return self.matrix.hub.wait_for((cell.rank, hold.where))[0]

        def were_hit(log: list[RequestRecord]) -> bool:
            return sum(record.fault != "" for record in log) >= hold.hit_count

        self.server.wait_for(were_hit, timeout_s=driver.SETTLE_S)
        waiting = []
        if hold.holds == "victim" and cell.fault != "error":
            # All others have done their part: what they say must not depend on who was faster.
            waiting = [rank for rank in range(cell.world_size) if rank != cell.rank]
        elif hold.holds == "other" or (hold.holds == "" and cell.victim == "member"):
            waiting = [cell.rank]
        member_step = hold.member_step or WAITS[cell.operation]
        self.matrix.hub.wait_for(
            *((rank, member_step if rank else hold.coordinator_step) for rank in waiting)
        )
        return None

    def _go_on(self, ranks: driver.Ranks) -> list[driver.Event]:
        """Wake the victim, after all others raised; it must find out, too."""
        cell = self.cell
        if cell.victim == "coordinator" and cell.host == "rank 0":
            # A store that answers after all finds threads of torch's client in an interpreter
            # that ends, and torch aborts such a process.
            others = [pid for rank, pid in ranks.pids.items() if rank != cell.rank]
            self.matrix.hub.wait_dead(others, driver.EXIT_S)
        awake_s = time.monotonic()
        os.kill(ranks.pids[cell.rank], signal.SIGCONT)
        ended = self.matrix.hub.wait_for((cell.rank, "ended"))
        took_s = ended[0].at_s - awake_s
        self.expect(took_s <= TIMEOUTS.plan + SLACK_S, f"the victim went on for {took_s:.2f} s")
        return ended

    def _judge(self, event: driver.Event) -> None:
        cell, told = self.cell, event.details
        kind = told["kind"]
        self.raised[event.rank] = kind + (" (committed)" if told.get("committed") else "")
        text = f"rank {event.rank}: {kind}: {told.get('text')}"
        self.story.append(f"{text}\n{told.get('trace', '')}")
        if kind == "returned":
            may_end = told["text"].startswith(("committed", "published"))
            self.expect(may_end and cell.phase in _LATE_PHASES, text)
            return
        is_victim = event.rank == cell.rank
        if cell.fault == "interrupt" and is_victim:
            self.expect(kind == "KeyboardInterrupt", f"the interrupted rank raised {kind}")
            return
        self.expect(told["ours"], f"{text}, which is no CheckpointError")
        self.expect(told["phase"] in cell.phases, f"{text} has phase {told['phase']!r}")
        names = told["rank"] == cell.rank or cell.rank in told["failures"]
        says = re.search(rf"[Rr]ank {cell.rank}\b", told["text"])
        self.expect(is_victim or (names and says), f"{text} does not name rank {cell.rank}")

    def _judge_exits(self, ranks: driver.Ranks, pids: Sequence[int]) -> None:
        cell = self.cell
        dead = self.matrix.hub.wait_dead(pids, driver.EXIT_S)
        late = set(pids) - set(dead)
        self.expect(not late, f"processes {late} did not end in {driver.EXIT_S:g} s")
        bad = {pid: code for pid, code in dead.items() if code != 0}
        self.expect(not bad, f"processes ended with exit codes {bad}")
        if cell.fault == "oversleep":
            return
        if cell.fault == "stop":
            os.kill(ranks.pids[cell.rank], signal.SIGKILL)
        self.matrix.hub.wait_dead(ranks.pids.values(), driver.EXIT_S)
        left = ranks.left()
        self.expect(not left, f"processes {left} are left")

    # What lies on the storage afterwards.

    def settle(self) -> None:
        try:
            if self.cell.operation == "consolidate":
                self._check_export()
            else:
                self._check_checkpoint()
        except TimeoutError as error:
            self.problems.append(f"afterwards: {error}")

    def wake(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)
        dead = self.matrix.hub.wait_dead([pid], driver.EXIT_S + SLACK_S)
        self.expect(dead, "who overslept did not end")
        self._check_whole_export("who overslept left")

    def _check_checkpoint(self) -> None:
        cell, server = self.cell, self.server
        self.committed = any(re.search(SLOT, key) for key in server.dump())
        self._judge_outcome()
        expected = SECOND if self.committed else FIRST
        stock = driver.stock_version(server, cell.world_size)
        # `.metadata` follows the commit: whoever opens the checkpoint next brings it up to date.
        is_behind = self.committed and stock == FIRST
        self.expect(stock == expected or is_behind, f"stock torch loads {stock}, not {expected}")
        ended = self.matrix.together(cell, server, "check and save", THIRD)
        if {event.details["text"] for event in ended} != {f"version {expected}"}:
            self.problems += [event.details.get("trace", event.details["text"]) for event in ended]
        stock = driver.stock_version(server, cell.world_size)
        self.expect(stock == THIRD, f"after the next save stock torch loads version {stock}")

    def _check_export(self) -> None:
        """Check that one export counts and is whole, then have other ranks consolidate again."""
        cell, server = self.cell, self.server
        found = driver.export_version(server)
        self.committed = found == SECOND
        self.expect(found in {FIRST, SECOND}, f"what the index names is version {found}")
        self._judge_outcome()
        # As many ranks as before, or fewer: what is complete already is not theirs to write.
        again = replace(cell, world_size=2 if cell.victim == "coordinator" else 3)
        server.reset_counters()
        ended = self.matrix.together(again, server, "consolidate", SECOND, files=cell.files)
        bad = [event for event in ended if event.details["kind"] != "returned"]
        self.problems += [f"again: {event.details.get('trace')}" for event in bad]
        self._check_whole_export("the next consolidation left")

    def _check_whole_export(self, who: str) -> None:
        server = self.server
        left, version = driver.export_leftovers(server), driver.export_version(server)
        self.expect(not left, f"{who} {left}")
        self.expect(version == SECOND, f"{who} the export at version {version}")
        count = server.open_upload_count
        self.expect(count == 0, f"{who} {count} uploads open")

    def _judge_outcome(self) -> None:
        """Check that what the ranks said of the save is what is on the storage."""
        cell = self.cell
        said = set(self.raised.values())
        says_yes = any(kind == "returned" or kind.endswith("(committed)") for kind in said)
        if cell.operation == "load":
            self.expect(not self.committed, "a load committed something")
            return
        self.expect(self.committed or not says_yes, "a rank says that it is committed; it is not")
        if not self.committed:
            return
        if cell.operation == "consolidate":
            self.expect(cell.phase in _LATE_PHASES, "nobody could have put the new index there")
            denied = any("published nothing" in text for text in self.story)
            self.expect(not denied, "the new index is there, and a rank says that it is not")
        else:
            known = says_yes or "CommitUnknownError" in said
            self.expect(known, "it is committed, and all ranks say that it failed")


def main() -> int:
    """Run the matrix, or what matches `--only`, and print it; 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--only", default="", help="regular expression for the first columns")
    parser.add_argument("--list", action="store_true", help="name the cells and run none")
    parser.add_argument("--stories", action="store_true", help="print what the ranks raised")
    parser.add_argument("--nursery", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.nursery:
        job = fault_ranks.nursery(options.nursery)
        if job is not None:
            fault_ranks.rank_main(job)
        return 0
    cells = chosen(options.only, options.ranks)
    if options.list:
        _say("\n".join(map(str, cells)))
        return 0
    bad_count = 0
    _say(Row.HEAD)
    with Matrix() as matrix:
        for cell in cells:
            row = matrix.run(cell)
            _say(str(row))
            bad_count += bool(row.problems)
            if row.problems or options.stories:
                sys.stderr.write("\n".join([*row.problems, *row.story, "", ""]))
                sys.stderr.flush()
    _say(f"\n{len(cells) - bad_count} of {len(cells)} cells hold.")
    return 1 if bad_count else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
