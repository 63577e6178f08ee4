"""The fault matrix: each operation, held in each phase, loses a rank in each way.

Run as a script it prints the matrix: `python tests/support/fault_matrix.py --ranks 3`. A rank gets
into its phase for certain: a planner asks, or a storage request is never answered, and only then
comes the fault. The cells are in `fault_cells`, what a rank does is in `fault_ranks`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import fault_ranks
from fault_cells import SLACK_S, SLOT, TIMEOUTS, WAITS, Cell, all_cells
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

__all__ = ["Cell", "Matrix", "Row"]

FIRST, SECOND, THIRD = 1, 2, 3
"""Versions of the state: what lies there, what the operation saves, what is saved afterwards."""

_LATE_S = 4.0
"""How long a commit is delayed that its saver is stopped in; it may go on when the saver does."""


_LATE_PHASES = frozenset({"commit", "publish", "index", "clean"})
"""Phases in which what an operation makes may count already."""


@dataclass(slots=True, kw_only=True)
class Row:
    """What became of a cell; `problems` is empty if all held."""

    cell: Cell
    raised: dict[int, str] = dataclasses.field(default_factory=dict)
    last_s: float = 0.0
    exit_s: float = 0.0
    named: str = ""
    committed: bool | None = None
    previous: str = ""
    next_save: str = ""
    problems: list[str] = dataclasses.field(default_factory=list)
    story: list[str] = dataclasses.field(default_factory=list)

    HEAD = (
        "| operation | phase | fault | victim | store host | ranks | live ranks ended with | "
        "last after | processes gone after | named (rank, phase) | committed | loads then | "
        "next save | verdict |\n" + "| --- " * 14 + "|"
    )

    def __str__(self) -> str:
        raised = ", ".join(f"{rank}: {kind}" for rank, kind in sorted(self.raised.items()))
        verdict = "ok" if not self.problems else "**FAILED**"
        return (
            f"| {self.cell} | {raised} | {self.last_s:.2f} s | {self.exit_s:.2f} s | {self.named} |"
            f" {self.committed} | {self.previous} | {self.next_save} | {verdict} |"
        )


class Matrix:
    """Runs cells one after another; a context manager that owns the nursery."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._seeds: dict[str, dict[str, bytes]] = {}

    def __enter__(self) -> Self:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
        self._folder = Path(folder)
        self._hub = self._stack.enter_context(Hub(self._folder))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, __file__, "--nursery", self._hub.address], env=environment
        )
        self._stack.callback(process.wait, EXIT_S)
        self._stack.callback(process.kill)
        [born] = self._hub.wait_for((-1, "nursery"))
        self._nursery = born.connection
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._nursery.close()
        self._stack.close()

    def run(self, cell: Cell) -> Row:
        """Run one cell."""
        row = Row(cell=cell)
        with S3Server() as server:
            server.create_bucket(BUCKET)
            for key, data in self._seed(cell).items():
                server.put(BUCKET, key, data)
            server.reset_counters()
            with Ranks(self._hub, self._nursery, self._folder) as ranks:
                try:
                    _Run(cell, server, self._hub, ranks, row).run()
                except TimeoutError as error:
                    row.problems.append(str(error))
                    row.story += [f"{one.op} {one.key} {one.fault}" for one in server.requests]
                server.faults([])
                if cell.fault == "oversleep":
                    # The victim wakes up when others have done its work.
                    self._settle(cell, server, row)
                    self._wake(server, ranks.pids[cell.rank], row)
                if row.problems:
                    row.story += ranks.logs()
            if cell.fault != "oversleep":
                self._settle(cell, server, row)
        return row

    def _settle(self, cell: Cell, server: S3Server, row: Row) -> None:
        try:
            self._check_after(cell, server, row)
        except TimeoutError as error:
            row.problems.append(f"afterwards: {error}")

    def _wake(self, server: S3Server, pid: int, row: Row) -> None:
        os.kill(pid, signal.SIGCONT)
        if not self._hub.wait_dead([pid], EXIT_S + SLACK_S):
            row.problems.append("who overslept did not end")
        row.problems += [f"who overslept left {left}" for left in export_leftovers(server)]
        if (found := export_version(server)) != SECOND:
            row.problems.append(f"who overslept made the export version {found}")
        if open_count := server.open_upload_count:
            row.problems.append(f"who overslept left {open_count} uploads open")

    def _check_after(self, cell: Cell, server: S3Server, row: Row) -> None:
        if cell.operation == "consolidate":
            self._check_export(cell, server, row)
            return
        row.committed = any(re.search(SLOT, key) for key in server.dump())
        _judge_outcome(cell, row)
        expected = SECOND if row.committed else FIRST
        stock = stock_version(server, cell.world_size)
        # `.metadata` follows the commit: whoever opens the checkpoint next brings it up to date.
        if stock != expected and not (row.committed and stock == FIRST):
            row.problems.append(f"stock torch loads version {stock}, not {expected}")
        ended = self._together(cell, server, "check and save", THIRD)
        texts = {event.details["text"] for event in ended}
        good = texts == {f"version {expected}"}
        row.previous = f"ours: {', '.join(sorted(texts))[:60]}; torch: {stock}"
        row.next_save = "ok" if good else "failed"
        if not good:
            row.problems += [event.details.get("trace", event.details["text"]) for event in ended]
        if (stock := stock_version(server, cell.world_size)) != THIRD:
            row.problems.append(f"after the next save stock torch loads version {stock}")

    def _check_export(self, cell: Cell, server: S3Server, row: Row) -> None:
        """Check that one export counts and is whole, then have other ranks consolidate again."""
        found = export_version(server)
        row.committed = found == SECOND
        if found not in {FIRST, SECOND}:
            row.problems.append(f"what the index names is version {found}")
        _judge_outcome(cell, row)
        row.previous = f"safetensors: {found}"
        # As many ranks as before, or fewer: what is complete already is not theirs to write.
        again = dataclasses.replace(cell, world_size=2 if cell.victim == "coordinator" else 3)
        server.reset_counters()
        ended = self._together(again, server, "consolidate", SECOND, files=cell.files)
        bad = [event for event in ended if event.details["kind"] != "returned"]
        row.problems += [f"again: {event.details.get('trace')}" for event in bad]
        row.problems += [f"the export has {left}" for left in export_leftovers(server)]
        if (found := export_version(server)) != SECOND:
            row.problems.append(f"after the next consolidation the export is version {found}")
        if open_count := server.open_upload_count:
            row.problems.append(f"{open_count} uploads are left open")
        row.next_save = "failed" if bad else f"ok, {again.world_size} ranks"

    def _seed(self, cell: Cell) -> dict[str, bytes]:
        """Return the objects of a checkpoint of the first version.

        For a consolidation the first version was exported, and the second was saved since.
        """
        steps = [("save", FIRST)]
        if cell.operation == "consolidate":
            steps = [("save weights", FIRST), ("consolidate", FIRST), ("save weights", SECOND)]
        name = f"{steps[0][0]}, {cell.world_size} ranks"
        if name not in self._seeds:
            cell = dataclasses.replace(cell, host="launcher")
            with S3Server() as server:
                server.create_bucket(BUCKET)
                for step, version in steps:
                    for event in self._together(cell, server, step, version):
                        assert event.details["kind"] == "returned", event.details["trace"]
                self._seeds[name] = server.dump()
        return self._seeds[name]

    def _together(
        self,
        cell: Cell,
        server: S3Server,
        operation: str,
        version: int,
        files: Mapping[str, int] | None = None,
    ) -> list[Event]:
        """Run an operation on fresh ranks without any fault; return how each ended."""
        with Ranks(self._hub, self._nursery, self._folder) as ranks:
            ranks.start(
                operation,
                server,
                world_size=cell.world_size,
                launcher_hosts=cell.host == "launcher",
                version=version,
                files=files,
            )
            ranks.go()
            return self._hub.wait_for(*((rank, "ended") for rank in range(cell.world_size)))


class _Run:
    """One cell, step by step."""

    def __init__(self, cell: Cell, server: S3Server, hub: Hub, ranks: Ranks, row: Row) -> None:
        self._cell = cell
        self._server = server
        self._hub = hub
        self._ranks = ranks
        self._row = row
        self._fault_s = 0.0

    def run(self) -> None:
        cell, hub, row = self._cell, self._hub, self._row
        self._server.faults(self._rules())
        self._ranks.start(
            cell.operation,
            self._server,
            world_size=cell.world_size,
            launcher_hosts=cell.host == "launcher",
            version=SECOND,
            holds={cell.rank: cell.hold.where},
            files=cell.files,
        )
        self._ranks.go()
        self._inflict(self._reach())
        silenced = cell.fault in {"kill", "stop", "stop and go on", "oversleep"}
        live = [rank for rank in range(cell.world_size) if rank != cell.rank or not silenced]
        ended = hub.wait_for(*((rank, "ended") for rank in live))
        row.last_s = max(event.at_s for event in ended) - self._fault_s
        if row.last_s > cell.limit_s:
            row.problems.append(f"the last raised after {row.last_s:.2f} s, not {cell.limit_s} s")
        if cell.fault == "stop and go on":
            ended += self._go_on()
        for event in ended:
            self._judge(event)
        row.named = "; ".join(sorted({_named(event) for event in ended}))
        alive = [pid for rank, pid in self._ranks.pids.items() if rank in {e.rank for e in ended}]
        self._judge_exits(alive, max(event.at_s for event in ended))

    def _rules(self) -> list[FaultRule]:
        cell, hold = self._cell, self._cell.hold
        if not hold.key:
            return []
        if cell.fault == "error":
            rule = FaultRule(action="status", status=403, code="AccessDenied", times=0)
        elif cell.fault == "stop and go on" and cell.phase in {"commit", "index"}:
            rule = FaultRule(action="delay", delay_s=_LATE_S)
        else:
            rule = FaultRule(action="hang", times=0)
        return [replace(rule, op=hold.op, key=cell.key)]

    def _reach(self) -> Event | None:
        """Wait until the victim is in the phase for certain; return its question, if it asks."""
        cell, hold = self._cell, self._cell.hold
        if hold.where:
            [asked] = self._hub.wait_for((cell.rank, hold.where))
            return asked
        self._server.wait_for(self._were_hit, timeout_s=SETTLE_S)
        waiting = []
        if hold.holds == "victim" and cell.fault != "error":
            # All others have done their part: what they say must not depend on who was faster.
            waiting = [rank for rank in range(cell.world_size) if rank != cell.rank]
        elif hold.holds == "other" or (hold.holds == "" and cell.victim == "member"):
            waiting = [cell.rank]
        member_step = hold.member_step or WAITS[cell.operation]
        steps = {rank: member_step if rank else hold.coordinator_step for rank in waiting}
        self._hub.wait_for(*steps.items())
        return None

    def _were_hit(self, log: list[RequestRecord]) -> bool:
        return sum(record.fault != "" for record in log) >= self._cell.hold.hit_count

    def _inflict(self, asked: Event | None) -> None:
        pid = self._ranks.pids[self._cell.rank]
        sent = {
            "kill": signal.SIGKILL,
            "stop": signal.SIGSTOP,
            "stop and go on": signal.SIGSTOP,
            "oversleep": signal.SIGSTOP,
            "interrupt": signal.SIGINT,
        }
        self._fault_s = time.monotonic()
        if self._cell.fault in sent:
            os.kill(pid, sent[self._cell.fault])
        elif asked is not None:
            asked.connection.send("raise")
        if self._cell.fault == "stop and go on" and asked is not None:
            asked.connection.send("go")

    def _go_on(self) -> list[Event]:
        """Wake the victim, after all others raised; it must find out, too."""
        cell = self._cell
        if cell.victim == "coordinator" and cell.host == "rank 0":
            # A store that answers after all finds threads of torch's client in an interpreter
            # that ends, and torch aborts such a process.
            others = [pid for rank, pid in self._ranks.pids.items() if rank != cell.rank]
            self._hub.wait_dead(others, EXIT_S)
        awake_s = time.monotonic()
        os.kill(self._ranks.pids[cell.rank], signal.SIGCONT)
        ended = self._hub.wait_for((cell.rank, "ended"))
        took_s = ended[0].at_s - awake_s
        if took_s > TIMEOUTS.plan + SLACK_S:
            self._row.problems.append(f"the victim went on for {took_s:.2f} s")
        return ended

    def _judge(self, event: Event) -> None:
        cell, row, told = self._cell, self._row, event.details
        kind = told["kind"]
        row.raised[event.rank] = kind + (" (committed)" if told.get("committed") else "")
        text = f"rank {event.rank}: {kind}: {told.get('text')}"
        row.story.append(f"{text}\n{told.get('trace', '')}")
        if kind == "returned":
            ends = ("committed", "published")
            if cell.phase not in _LATE_PHASES or not told["text"].startswith(ends):
                row.problems.append(f"rank {event.rank} returned {told['text']}")
            return
        if cell.fault == "interrupt" and event.rank == cell.rank:
            if kind != "KeyboardInterrupt":
                row.problems.append(f"the interrupted rank raised {kind}")
            return
        if not told["ours"]:
            row.problems.append(f"{text}, which is no CheckpointError")
        if told["phase"] not in cell.phases:
            row.problems.append(f"{text} has phase {told['phase']!r}")
        names = told["rank"] == cell.rank or cell.rank in told["failures"]
        if event.rank != cell.rank and not re.search(rf"[Rr]ank {cell.rank}\b", told["text"]):
            names = False
        if not names and event.rank != cell.rank:
            row.problems.append(f"{text} does not name rank {cell.rank}")

    def _judge_exits(self, pids: Sequence[int], last_s: float) -> None:
        row, cell = self._row, self._cell
        dead = self._hub.wait_dead(pids, EXIT_S)
        for pid in set(pids) - set(dead):
            row.problems.append(f"process {pid} did not end in {EXIT_S:g} s")
        bad = {pid: code for pid, (code, _) in dead.items() if code != 0}
        if bad:
            row.problems.append(f"processes ended with exit codes {bad}")
        row.exit_s = max((at_s - last_s for _, at_s in dead.values()), default=0.0)
        if cell.fault == "oversleep":
            return
        if cell.fault == "stop":
            os.kill(self._ranks.pids[cell.rank], signal.SIGKILL)
        self._hub.wait_dead(self._ranks.pids.values(), EXIT_S)
        if left := self._ranks.left():
            row.problems.append(f"processes {left} are left")


def _judge_outcome(cell: Cell, row: Row) -> None:
    """Check that what the ranks said of the save is what is on the storage."""
    if cell.operation == "load":
        if row.committed:
            row.problems.append("a load committed something")
        return
    said = set(row.raised.values())
    says_yes = any(kind == "returned" or kind.endswith("(committed)") for kind in said)
    says_unknown = "CommitUnknownError" in said
    if says_yes and not row.committed:
        row.problems.append("a rank says that it is committed, and it is not")
    if cell.operation == "consolidate":
        if row.committed and cell.phase not in _LATE_PHASES:
            row.problems.append("the new index is there, and nobody could have put it there")
        if row.committed and any("published nothing" in text for text in row.story):
            row.problems.append("the new index is there, and a rank says that it is not")
        return
    if row.committed and not says_yes and not says_unknown:
        row.problems.append("it is committed, and all ranks say that it failed")


def _named(event: Event) -> str:
    if event.details["kind"] == "returned":
        return "returned"
    return f"{event.details.get('rank')}, {event.details.get('phase')}"


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
    cells = [cell for cell in all_cells(options.ranks) if re.search(options.only, str(cell))]
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
