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

import fault_ranks
from fault_cells import SLACK_S, SLOT, TIMEOUTS, WAITS, Cell, chosen
from fault_driver import (
    BUCKET,
    EXIT_S,
    SETTLE_S,
    Event,
    Hub,
    Ranks,
    export_leftovers,
    export_version,
    stock_version,
)

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


@dataclass(slots=True)
class Row:
    """What became of a cell; `problems` is empty if all held."""

    cell: Cell
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
        """Note a problem unless something holds."""
        if not holds:
            self.problems.append(problem)


class Matrix:
    """Runs cells one after another; a context manager that owns the nursery."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._seeds: dict[str, dict[str, bytes]] = {}

    def __enter__(self) -> Self:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
        self._folder = Path(folder)
        self.hub = self._stack.enter_context(Hub(self._folder))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, __file__, "--nursery", self.hub.address], env=environment
        )
        self._stack.callback(process.wait, EXIT_S)
        self._stack.callback(process.kill)
        [born] = self.hub.wait_for((-1, "nursery"))
        self._nursery = born.connection
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._nursery.close()
        self._stack.close()

    def ranks(self) -> Ranks:
        return Ranks(self.hub, self._nursery, self._folder)

    def run(self, cell: Cell) -> Row:
        with S3Server() as server:
            server.create_bucket(BUCKET)
            for key, data in self._seed(cell).items():
                server.put(BUCKET, key, data)
            server.reset_counters()
            run = _Run(self, cell, server)
            row = run.row
            with self.ranks() as ranks:
                try:
                    run.run(ranks)
                except TimeoutError as error:
                    row.problems.append(str(error))
                    row.story += [f"{one.op} {one.key} {one.fault}" for one in server.requests]
                server.faults([])
                if cell.fault == "oversleep":
                    # The victim wakes up when others have done its work.
                    run.settle()
                    run.wake(ranks.pids[cell.rank])
                if row.problems:
                    row.story += ranks.logs()
            if cell.fault != "oversleep":
                run.settle()
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
                server.create_bucket(BUCKET)
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
    ) -> list[Event]:
        """Run an operation on fresh ranks without any fault; return how each ended."""
        with self.ranks() as ranks:
            ranks.start(cell, server, operation, version, files=files)
            return self.hub.wait_for(*((rank, "ended") for rank in range(cell.world_size)))


class _Run:
    """One cell, step by step."""

    def __init__(self, matrix: Matrix, cell: Cell, server: S3Server) -> None:
        self.row = Row(cell)
        self._matrix = matrix
        self._cell = cell
        self._server = server
        self._hub = matrix.hub

    def run(self, ranks: Ranks) -> None:
        """Let the operation begin, hold it, inflict the fault, and judge what the ranks tell."""
        cell, row, hold = self._cell, self.row, self._cell.hold
        self._server.faults(self._rules())
        holds = {cell.rank: hold.where}
        ranks.start(cell, self._server, cell.operation, SECOND, holds=holds, files=cell.files)
        asked = self._reach()
        fault_s = time.monotonic()
        if cell.fault in _SIGNALS:
            os.kill(ranks.pids[cell.rank], _SIGNALS[cell.fault])
        if asked is not None and cell.fault in {"error", "stop and go on"}:
            asked.connection.send("raise" if cell.fault == "error" else "go")
        silenced = cell.fault in _SIGNALS and cell.fault != "interrupt"
        live = [rank for rank in range(cell.world_size) if rank != cell.rank or not silenced]
        ended = self._hub.wait_for(*((rank, "ended") for rank in live))
        row.last_s = max(event.at_s for event in ended) - fault_s
        late = f"the last raised after {row.last_s:.2f} s, not {cell.limit_s} s"
        row.expect(row.last_s <= cell.limit_s, late)
        if cell.fault == "stop and go on":
            ended += self._go_on(ranks)
        for event in ended:
            self._judge(event)
        self._judge_exits(ranks, [ranks.pids[event.rank] for event in ended])

    def _rules(self) -> list[FaultRule]:
        cell, hold = self._cell, self._cell.hold
        if not hold.key:
            return []
        rule = FaultRule(action="hang", times=0)
        if cell.fault == "error":
            rule = FaultRule(action="status", status=403, code="AccessDenied", times=0)
        elif cell.fault == "stop and go on" and cell.phase in {"commit", "index"}:
            rule = FaultRule(action="delay", delay_s=_LATE_S)
        return [replace(rule, op=hold.op, key=cell.key)]

    def _reach(self) -> Event | None:
        """Wait until the victim is in the phase for certain; return its question, if it asks."""
        cell, hold = self._cell, self._cell.hold
        if hold.where:
            return self._hub.wait_for((cell.rank, hold.where))[0]

        def were_hit(log: list[RequestRecord]) -> bool:
            return sum(record.fault != "" for record in log) >= hold.hit_count

        self._server.wait_for(were_hit, timeout_s=SETTLE_S)
        waiting = []
        if hold.holds == "victim" and cell.fault != "error":
            # All others have done their part: what they say must not depend on who was faster.
            waiting = [rank for rank in range(cell.world_size) if rank != cell.rank]
        elif hold.holds == "other" or (hold.holds == "" and cell.victim == "member"):
            waiting = [cell.rank]
        member_step = hold.member_step or WAITS[cell.operation]
        self._hub.wait_for(
            *((rank, member_step if rank else hold.coordinator_step) for rank in waiting)
        )
        return None

    def _go_on(self, ranks: Ranks) -> list[Event]:
        """Wake the victim, after all others raised; it must find out, too."""
        cell = self._cell
        if cell.victim == "coordinator" and cell.host == "rank 0":
            # A store that answers after all finds threads of torch's client in an interpreter
            # that ends, and torch aborts such a process.
            others = [pid for rank, pid in ranks.pids.items() if rank != cell.rank]
            self._hub.wait_dead(others, EXIT_S)
        awake_s = time.monotonic()
        os.kill(ranks.pids[cell.rank], signal.SIGCONT)
        ended = self._hub.wait_for((cell.rank, "ended"))
        took_s = ended[0].at_s - awake_s
        self.row.expect(took_s <= TIMEOUTS.plan + SLACK_S, f"the victim went on for {took_s:.2f} s")
        return ended

    def _judge(self, event: Event) -> None:
        cell, row, told = self._cell, self.row, event.details
        kind = told["kind"]
        row.raised[event.rank] = kind + (" (committed)" if told.get("committed") else "")
        text = f"rank {event.rank}: {kind}: {told.get('text')}"
        row.story.append(f"{text}\n{told.get('trace', '')}")
        if kind == "returned":
            may_end = told["text"].startswith(("committed", "published"))
            row.expect(may_end and cell.phase in _LATE_PHASES, text)
            return
        is_victim = event.rank == cell.rank
        if cell.fault == "interrupt" and is_victim:
            row.expect(kind == "KeyboardInterrupt", f"the interrupted rank raised {kind}")
            return
        row.expect(told["ours"], f"{text}, which is no CheckpointError")
        row.expect(told["phase"] in cell.phases, f"{text} has phase {told['phase']!r}")
        names = told["rank"] == cell.rank or cell.rank in told["failures"]
        says = re.search(rf"[Rr]ank {cell.rank}\b", told["text"])
        row.expect(is_victim or (names and says), f"{text} does not name rank {cell.rank}")

    def _judge_exits(self, ranks: Ranks, pids: Sequence[int]) -> None:
        row, cell = self.row, self._cell
        dead = self._hub.wait_dead(pids, EXIT_S)
        late = set(pids) - set(dead)
        row.expect(not late, f"processes {late} did not end in {EXIT_S:g} s")
        bad = {pid: code for pid, code in dead.items() if code != 0}
        row.expect(not bad, f"processes ended with exit codes {bad}")
        if cell.fault == "oversleep":
            return
        if cell.fault == "stop":
            os.kill(ranks.pids[cell.rank], signal.SIGKILL)
        self._hub.wait_dead(ranks.pids.values(), EXIT_S)
        left = ranks.left()
        row.expect(not left, f"processes {left} are left")

    # What lies on the storage afterwards.

    def settle(self) -> None:
        try:
            if self._cell.operation == "consolidate":
                self._check_export()
            else:
                self._check_checkpoint()
        except TimeoutError as error:
            self.row.problems.append(f"afterwards: {error}")

    def wake(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)
        dead = self._hub.wait_dead([pid], EXIT_S + SLACK_S)
        self.row.expect(dead, "who overslept did not end")
        self._check_whole_export("who overslept left")

    def _check_checkpoint(self) -> None:
        cell, server, row = self._cell, self._server, self.row
        row.committed = any(re.search(SLOT, key) for key in server.dump())
        self._judge_outcome()
        expected = SECOND if row.committed else FIRST
        stock = stock_version(server, cell.world_size)
        # `.metadata` follows the commit: whoever opens the checkpoint next brings it up to date.
        is_behind = row.committed and stock == FIRST
        row.expect(stock == expected or is_behind, f"stock torch loads {stock}, not {expected}")
        ended = self._matrix.together(cell, server, "check and save", THIRD)
        if {event.details["text"] for event in ended} != {f"version {expected}"}:
            row.problems += [event.details.get("trace", event.details["text"]) for event in ended]
        stock = stock_version(server, cell.world_size)
        row.expect(stock == THIRD, f"after the next save stock torch loads version {stock}")

    def _check_export(self) -> None:
        """Check that one export counts and is whole, then have other ranks consolidate again."""
        cell, server, row = self._cell, self._server, self.row
        found = export_version(server)
        row.committed = found == SECOND
        row.expect(found in {FIRST, SECOND}, f"what the index names is version {found}")
        self._judge_outcome()
        # As many ranks as before, or fewer: what is complete already is not theirs to write.
        again = replace(cell, world_size=2 if cell.victim == "coordinator" else 3)
        server.reset_counters()
        ended = self._matrix.together(again, server, "consolidate", SECOND, files=cell.files)
        bad = [event for event in ended if event.details["kind"] != "returned"]
        row.problems += [f"again: {event.details.get('trace')}" for event in bad]
        self._check_whole_export("the next consolidation left")

    def _check_whole_export(self, who: str) -> None:
        server = self._server
        left, version = export_leftovers(server), export_version(server)
        self.row.expect(not left, f"{who} {left}")
        self.row.expect(version == SECOND, f"{who} the export at version {version}")
        count = server.open_upload_count
        self.row.expect(count == 0, f"{who} {count} uploads open")

    def _judge_outcome(self) -> None:
        """Check that what the ranks said of the save is what is on the storage."""
        cell, row = self._cell, self.row
        said = set(row.raised.values())
        says_yes = any(kind == "returned" or kind.endswith("(committed)") for kind in said)
        if cell.operation == "load":
            row.expect(not row.committed, "a load committed something")
            return
        row.expect(row.committed or not says_yes, "a rank says that it is committed; it is not")
        if not row.committed:
            return
        if cell.operation == "consolidate":
            row.expect(cell.phase in _LATE_PHASES, "nobody could have put the new index there")
            denied = any("published nothing" in text for text in row.story)
            row.expect(not denied, "the new index is there, and a rank says that it is not")
        else:
            known = says_yes or "CommitUnknownError" in said
            row.expect(known, "it is committed, and all ranks say that it failed")


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
