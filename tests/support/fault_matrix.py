"""The fault matrix: each operation, held in each phase, loses a rank in each way.

Run as a script it prints the matrix: `python tests/support/fault_matrix.py --ranks 3`. A rank gets
into its phase for certain: a planner asks, or a storage request is never answered, and only then
comes the fault. The cells are in `fault_cells`, what a rank does is in `fault_ranks`.
"""
# ruff: noqa: T201  # a script talks to its user

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fault_cells import SLOT, TIMEOUTS, WAITS, Cell, Where, chosen
from fault_ranks import Job, Line, rank_main, state_of, version_of
from fork_server import ForkServer, exit_codes, shared_server
from limits import HANG_S, SLACK_S
from s3_server import FaultRule, RequestRecord, S3Server
from saver_cases import until
from servers import free_port

from ckpt_storage.format.exports import GUARD_NAME

BUCKET = "bucket"
EXPORT = "run/step-1/hf"
INDEX = "model.safetensors.index.json"

EXIT_S = 30.0

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


class Ranks:
    """The processes of one operation; a context manager that leaves none behind."""

    def __init__(self, fork_server: ForkServer, folder: Path, cell: Cell) -> None:
        self._fork_server = fork_server
        self._cell = cell
        self._store: dist.TCPStore | None = None
        self.lines = [
            Line(Path(tempfile.mkdtemp(dir=folder)), rank) for rank in range(cell.world_size)
        ]
        self.pids: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.codes(range(len(self.pids)), EXIT_S)
        self._store = None

    def start(self, server: S3Server, operation: str, version: int, hold: Where = "") -> None:
        """Let the ranks call the operation; the victim asks in the call `hold`."""
        port = free_port()
        if self._cell.host == "launcher":
            timeout = timedelta(seconds=HANG_S)
            self._store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout
            )
            port = self._store.port
        for line in self.lines:
            job = Job(
                line=line,
                cell=self._cell,
                operation=operation,
                version=version,
                hold=hold if line.rank == self._cell.rank else "",
                port=port,
                storage_options=server.storage_options,
            )
            self._fork_server.start(line.folder / "log", rank_main, job)
        # No promise covers how long a loaded machine takes to start processes.
        until(lambda: self._are_ready() or self._ended(), "all ranks ready")
        assert self._are_ready(), "\n".join(["A rank ended before it was ready.", *self.logs()])
        self.pids = [report["pid"] for report in self.wait_for_reports("ready")]
        for line in self.lines:
            line.answer("ready")

    def _are_ready(self) -> bool:
        return all(line.read_report("ready") for line in self.lines)

    def _ended(self) -> bool:
        return any((line.folder / "log.code").exists() for line in self.lines)

    def wait_for_reports(
        self, what: str, ranks: Iterable[int] | None = None, *, limit_s: float = HANG_S
    ) -> list[dict[str, Any]]:
        """Return the reports of these ranks, once all have come."""
        chosen = [self.lines[rank] for rank in (range(len(self.lines)) if ranks is None else ranks)]
        until(
            lambda: all(line.read_report(what) for line in chosen),
            f"{what} of {ranks or 'all'}",
            limit_s,
        )
        return [report for line in chosen if (report := line.read_report(what))]

    def codes(self, ranks: Iterable[int], limit_s: float) -> dict[int, int | None]:
        """Return the exit codes of these ranks; None for a rank that did not end in time."""
        logs = {rank: self.lines[rank].folder / "log" for rank in ranks}
        return dict(zip(logs, exit_codes(logs.values(), limit_s), strict=True))

    def left(self) -> list[int]:
        """Return what is alive of these processes and those that they started."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                state, session = stat[0], int(stat[3])
                if state != "Z" and session in self.pids:
                    pids.append(int(folder.name))
        return pids

    def logs(self) -> list[str]:
        files = [line.folder / f"log.{name}" for line in self.lines for name in ("out", "err")]
        return [f"--- {file}\n{file.read_text(errors='replace')}" for file in files]


def stock_version(server: S3Server, world_size: int) -> int:
    """Return which version stock torch loads completely from what lies on the server."""
    state = state_of(0, range(world_size))
    target = {"model": {name: torch.zeros_like(value) for name, value in state.items()}}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        for key, data in server.dump().items():
            path = Path(folder) / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        reader = dcp.FileSystemReader(Path(folder) / "run" / "step-1")
        dcp.load(target, storage_reader=reader, no_dist=True)
    return version_of(target["model"], partial(state_of, ranks=range(world_size)))


LOUD = -1
"""Readers of the index raise: a file that it names is gone, and the guard is there."""


def export_version(server: S3Server) -> int:
    """Return which version safetensors loads completely through the index of the export."""
    objects = server.dump()
    places = json.loads(objects[f"{EXPORT}/{INDEX}"])["weight_map"]
    is_whole = all(f"{EXPORT}/{file}" in objects for file in places.values())
    if not is_whole and f"{EXPORT}/{GUARD_NAME}" in objects:
        return LOUD
    tensors: dict[str, Any] = {}
    for file in set(places.values()):
        loaded = safetensors.torch.load(objects[f"{EXPORT}/{file}"])
        tensors |= {name: value for name, value in loaded.items() if places[name] == file}
    model = {name.removeprefix("model."): value for name, value in tensors.items()}
    return version_of(model, partial(state_of, ranks=range(3), is_model=True))


def export_leftovers(server: S3Server) -> list[str]:
    """Return what lies below the export that is neither of it nor of its documents."""
    objects = server.dump()
    index = json.loads(objects[f"{EXPORT}/{INDEX}"])
    tag = index["metadata"]["fingerprint"][:16]
    documents = ["names.json", "job.json", f"{tag}/output.json"]
    named = {INDEX, *index["weight_map"].values(), *(f".ckpt-storage/{name}" for name in documents)}
    left = {key.removeprefix(f"{EXPORT}/") for key in objects if key.startswith(f"{EXPORT}/")}
    return sorted(left ^ named)


class Matrix:
    """Runs cells one after another, on ranks of a fork server."""

    def __init__(self, fork_server: ForkServer, folder: Path) -> None:
        self._fork_server = fork_server
        self._folder = folder
        self._seeds: dict[str, dict[str, bytes]] = {}

    def ranks(self, cell: Cell) -> Ranks:
        return Ranks(self._fork_server, self._folder, cell)

    def run(self, cell: Cell) -> Row:
        with S3Server() as server:
            server.create_bucket(BUCKET)
            for key, data in self._seed(cell).items():
                server.put(BUCKET, key, data)
            server.reset_counters()
            row = Row(self, cell, server)
            with self.ranks(cell) as ranks:
                try:
                    row.run(ranks)
                except (AssertionError, TimeoutError) as error:
                    row.problems.append(str(error))
                    row.story += [
                        f"{request.op} {request.key} {request.fault}" for request in server.requests
                    ]
                server.faults([])
                if cell.fault == "oversleep":
                    # The victim wakes up when others have done its work.
                    row.settle()
                    row.wake(ranks)
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
            with S3Server() as server:
                server.create_bucket(BUCKET)
                for step, version in steps:
                    for report in self.together(
                        replace(cell, host="launcher"), server, step, version
                    ):
                        assert report["kind"] == "returned", report["trace"]
                self._seeds[name] = server.dump()
        return self._seeds[name]

    def together(
        self, cell: Cell, server: S3Server, operation: str, version: int
    ) -> list[dict[str, Any]]:
        """Run an operation on fresh ranks without any fault; return how each ended."""
        with self.ranks(cell) as ranks:
            ranks.start(server, operation, version)
            return ranks.wait_for_reports("ended")


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

    def run(self, ranks: Ranks) -> None:
        """Start the operation, hold it, inflict the fault, and judge the reports of ranks."""
        cell, hold = self.cell, self.cell.hold
        self.server.faults(self._rules())
        ranks.start(self.server, cell.operation, SECOND, hold.where)
        self._reach(ranks)
        fault_s = time.monotonic()
        if cell.fault in _SIGNALS:
            os.kill(ranks.pids[cell.rank], _SIGNALS[cell.fault])
        if hold.where and cell.fault in {"error", "stop and go on"}:
            ranks.lines[cell.rank].answer(hold.where, "raise" if cell.fault == "error" else "go")
        silenced = cell.fault in _SIGNALS and cell.fault != "interrupt"
        live = [rank for rank in range(cell.world_size) if rank != cell.rank or not silenced]
        ended = ranks.wait_for_reports("ended", live)
        self.last_s = max(report["at_s"] for report in ended) - fault_s
        late = f"the last raised after {self.last_s:.2f} s, not {cell.limit_s} s"
        self.expect(self.last_s <= cell.limit_s, late)
        if cell.fault == "stop and go on":
            ended += self._go_on(ranks)
        for report in ended:
            self._judge(report)
        self._judge_exits(ranks, [report["rank"] for report in ended])

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

    def _reach(self, ranks: Ranks) -> None:
        """Wait until the victim is in the phase for certain."""
        cell, hold = self.cell, self.cell.hold
        if hold.where:
            ranks.wait_for_reports(hold.where, [cell.rank])
            return

        def were_hit(log: list[RequestRecord]) -> bool:
            return sum(record.fault != "" for record in log) >= hold.hit_count

        self.server.wait_for(were_hit, timeout_s=HANG_S)
        waiting = []
        if hold.holds == "victim" and cell.fault != "error":
            # All others have done their part: their errors must not depend on the order of ranks.
            waiting = [rank for rank in range(cell.world_size) if rank != cell.rank]
        elif hold.holds == "other" or (hold.holds == "" and cell.victim == "member"):
            waiting = [cell.rank]
        coordinator_step, member_step = WAITS[cell.operation]
        coordinator_step = hold.coordinator_step or coordinator_step
        member_step = hold.member_step or member_step
        for rank in waiting:
            ranks.wait_for_reports(member_step if rank else coordinator_step, [rank])

    def _go_on(self, ranks: Ranks) -> list[dict[str, Any]]:
        """Wake the victim, after all others raised; it must find out, too."""
        cell = self.cell
        if cell.victim == "coordinator" and cell.host == "rank 0":
            # Threads that connect anew to a store that is stopped cannot be called back: if it
            # answers while their interpreter is finalized, the process ends with SIGABRT.
            ranks.codes(range(1, cell.world_size), EXIT_S)
        awake_s = time.monotonic()
        os.kill(ranks.pids[cell.rank], signal.SIGCONT)
        ended = ranks.wait_for_reports("ended", [cell.rank])
        took_s = ended[0]["at_s"] - awake_s
        self.expect(took_s <= TIMEOUTS.plan + SLACK_S, f"the victim went on for {took_s:.2f} s")
        return ended

    def _judge(self, report: dict[str, Any]) -> None:
        cell, rank, kind = self.cell, report["rank"], report["kind"]
        self.raised[rank] = kind + (" (committed)" if report.get("committed") else "")
        text = f"rank {rank}: {kind}: {report['text']}"
        self.story.append(f"{text}\n{report.get('trace', '')}")
        if kind == "returned":
            may_end = report["text"].startswith(("committed", "published"))
            self.expect(may_end and cell.phase in _LATE_PHASES, text)
        elif cell.fault == "interrupt" and rank == cell.rank:
            self.expect(kind == "KeyboardInterrupt", f"the interrupted rank raised {kind}")
        else:
            self.expect(report["ours"], f"{text}, which is no CheckpointError")
            self.expect(report["phase"] in cell.phases, f"{text} has phase {report['phase']!r}")
            says = re.search(rf"[Rr]ank {cell.rank}\b", report["text"])
            is_named = cell.rank in report["names"] and says
            # A commit that has begun needs no member any more.
            is_done_with = cell.phase == "publish" and cell.victim == "member"
            is_right = rank == cell.rank or is_named or is_done_with
            self.expect(is_right, f"{text} does not name rank {cell.rank}")

    def _judge_exits(self, ranks: Ranks, ended: Iterable[int]) -> None:
        codes = ranks.codes(ended, EXIT_S)
        late = [rank for rank, code in codes.items() if code is None]
        self.expect(not late, f"ranks {late} did not end in {EXIT_S:g} s")
        bad = {rank: code for rank, code in codes.items() if code}
        self.expect(not bad, f"ranks ended with exit codes {bad}")
        if self.cell.fault == "oversleep":
            return
        if self.cell.fault == "stop":
            os.kill(ranks.pids[self.cell.rank], signal.SIGKILL)
        ranks.codes(range(self.cell.world_size), EXIT_S)
        left = ranks.left()
        self.expect(not left, f"processes {left} are left")

    # What lies on the storage afterwards.

    def settle(self) -> None:
        try:
            if self.cell.operation == "consolidate":
                self._check_export()
            else:
                self._check_checkpoint()
        except (AssertionError, TimeoutError) as error:
            self.problems.append(f"afterwards: {error}")

    def wake(self, ranks: Ranks) -> None:
        os.kill(ranks.pids[self.cell.rank], signal.SIGCONT)
        (code,) = ranks.codes([self.cell.rank], EXIT_S + SLACK_S).values()
        self.expect(code is not None, "the rank that overslept did not end")
        self._check_whole_export("the rank that overslept left")

    def _check_checkpoint(self) -> None:
        cell, server = self.cell, self.server
        self.committed = any(re.search(SLOT, key) for key in server.dump())
        self._judge_outcome()
        expected = SECOND if self.committed else FIRST
        stock = stock_version(server, cell.world_size)
        # `.metadata` follows the commit: the next reader brings it up to date.
        is_behind = self.committed and stock == FIRST
        self.expect(stock == expected or is_behind, f"stock torch loads {stock}, not {expected}")
        ended = self.matrix.together(cell, server, "check and save", THIRD)
        if {report["text"] for report in ended} != {f"version {expected}"}:
            self.problems += [report.get("trace", report["text"]) for report in ended]
        stock = stock_version(server, cell.world_size)
        self.expect(stock == THIRD, f"after the next save stock torch loads version {stock}")

    def _check_export(self) -> None:
        """Check that one export counts and is whole, then have other ranks consolidate again."""
        cell, server = self.cell, self.server
        version = export_version(server)
        self.committed = version == SECOND
        self.expect(version in {FIRST, SECOND, LOUD}, f"what the index names is version {version}")
        self._judge_outcome()
        # As many ranks as before, or fewer: what is complete already is not theirs to write.
        again = replace(cell, world_size=2 if cell.victim == "coordinator" else 3)
        server.reset_counters()
        ended = self.matrix.together(again, server, "consolidate", SECOND)
        self.problems += [
            f"again: {report['trace']}" for report in ended if report["kind"] != "returned"
        ]
        self._check_whole_export("the next consolidation left")

    def _check_whole_export(self, who: str) -> None:
        server = self.server
        left, version = export_leftovers(server), export_version(server)
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
            self.expect(cell.phase in _LATE_PHASES, "no rank could have written the new index")
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
    options = parser.parse_args()
    cells = chosen(options.only, options.ranks)
    if options.list:
        print("\n".join(map(str, cells)))
        return 0
    bad_count = 0
    print(Row.HEAD)
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(shared_server(), Path(folder))
        for cell in cells:
            row = matrix.run(cell)
            print(row, flush=True)
            bad_count += bool(row.problems)
            if row.problems or options.stories:
                print(*row.problems, *row.story, "", sep="\n", file=sys.stderr, flush=True)
    print(f"\n{len(cells) - bad_count} of {len(cells)} cells hold.")
    return 1 if bad_count else 0


if __name__ == "__main__":
    sys.exit(main())
