"""The ranks of the fault matrix: real processes that report where they are, and wait."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fault_cells import TIMEOUTS, Cell, Where
from saver_cases import until
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import ckpt_storage
from ckpt_storage.coordination.coordinator import Coordinator
from ckpt_storage.coordination.member import Member

URL = "s3://bucket/run/step-1"
ELEMENT_COUNT = 50_000
WEIGHT_COUNT = 800_000
"""Elements of a tensor to consolidate: more than the 5 MiB that S3 wants of a part."""


@dataclass(frozen=True, slots=True)
class Line:
    """Messages between a process and its parent: files of a folder, written atomically."""

    folder: Path
    rank: int

    def report(self, what: str, **details: Any) -> None:
        """Report that this process has reached `what`; only the first report counts."""
        report = {"at_s": time.monotonic(), "pid": os.getpid(), "rank": self.rank, **details}
        draft = self.folder / f"{self.rank} {what} {time.monotonic_ns()}"
        draft.write_text(json.dumps(report))
        with contextlib.suppress(FileExistsError):
            self._file(what).hardlink_to(draft)

    def read_report(self, what: str) -> dict[str, Any] | None:
        """Return the report of `what`; None if there is none yet."""
        with contextlib.suppress(FileNotFoundError):
            report: dict[str, Any] = json.loads(self._file(what).read_text())
            return report
        return None

    def ask(self, what: str) -> None:
        """Report where this process is, and wait for the answer, which may be to fail."""
        self.report(what)
        answer = self._file(f"{what}, answered")
        until(lambda: answer.exists() and answer.read_text(), f"the answer to {what}")
        if answer.read_text() == "raise":
            raise OSError(errno.ENOSPC, "No space left on device, says the test")

    def answer(self, what: str, reply: str = "go") -> None:
        self._file(f"{what}, answered").write_text(reply)

    def _file(self, what: str) -> Path:
        return self.folder / f"{self.rank} {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank is to do; `version` is the content that it saves, or exports.

    `hold` names the call in which this rank stops and asks how to go on.
    """

    line: Line
    cell: Cell
    operation: str
    version: int
    hold: Where
    port: int
    storage_options: dict[str, Any]

    @property
    def common(self) -> dict[str, Any]:
        return {"storage_options": self.storage_options, "timeout": TIMEOUTS}

    def own(self, version: int) -> dict[str, Any]:
        """Return the part of this rank; weights are always those of three ranks."""
        is_model, world_size = "weights" in self.operation, self.cell.world_size
        parts = range(self.line.rank, 3 if is_model else world_size, world_size)
        return state_of(version, parts, is_model=is_model)

    def held(self, where: Where, value: Any = None) -> Any:
        """Stop here, if this is where the job is held; return the value."""
        if self.hold == where:
            self.line.ask(where)
        return value


def state_of(version: int, ranks: Iterable[int], *, is_model: bool = False) -> dict[str, Any]:
    """Return the part of a state that `ranks` hold, each in its file; no two are alike.

    The first is a little smaller: the bytes of all, divided by three, end in the others' files.
    """
    count = WEIGHT_COUNT if is_model else ELEMENT_COUNT
    return {
        f"w{rank}": torch.arange(count - count // 800 * (rank == 0), dtype=torch.int64)
        + (version * 100 + rank) * 10**7
        for rank in ranks
    }


def version_of(state: Mapping[str, Any], make: Callable[[int], dict[str, Any]]) -> int:
    """Return the version for which `make` returns an equal state, -1 for none."""
    for version in range(9):
        expected = make(version)
        if state.keys() == expected.keys() and all(
            torch.equal(state[name], value) for name, value in expected.items()
        ):
            return version
    return -1


class HeldSavePlanner(DefaultSavePlanner):
    """A planner of saves; torch's own is not patched, as errors refer to it."""


class HeldLoadPlanner(DefaultLoadPlanner):
    """A planner of loads."""


def _before(kind: type, name: str, call: Callable[[], None]) -> None:
    """Let a method of a class begin with a call, in this process."""
    inner = getattr(kind, name)

    def method(*args: Any, **options: Any) -> Any:
        call()
        return inner(*args, **options)

    setattr(kind, name, method)


def _watch(job: Job) -> None:
    """Report each step in which ranks wait; stop where the job is held."""

    def entered(name: str, numbers: Iterator[int]) -> None:
        job.line.report(f"{name} {next(numbers)}")

    for kind, method, name in (
        (Coordinator, "_collect", "collect"),
        (Member, "answer", "release"),
    ):
        _before(kind, method, partial(entered, name, itertools.count(1)))
    for planner in (HeldSavePlanner, HeldLoadPlanner):
        _before(planner, "create_local_plan", partial(job.held, "local plan"))
        _before(planner, "create_global_plan", partial(job.held, "global plan"))


def _stateful(job: Job, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state to ask for in the call, before the ranks meet."""
    asked = partial(job.held, "call", state)
    return {"model": SimpleNamespace(state_dict=asked, load_state_dict=state.update)}


def save(job: Job, *, is_async: bool = False) -> str:
    """Save, or do it in a background thread; return what was committed."""
    call: Callable[..., Any] = ckpt_storage.save_async if is_async else ckpt_storage.save
    state, planner = _stateful(job, job.own(job.version)), HeldSavePlanner()
    ended = call(state, URL, overwrite=True, planner=planner, **job.common)
    return f"committed in slot {(ended.result() if is_async else ended).slot}"


def load(job: Job) -> str:
    """Load this rank's part; return which version it is."""
    target = {name: torch.zeros_like(value) for name, value in job.own(0).items()}
    ckpt_storage.load(_stateful(job, target), URL, planner=HeldLoadPlanner(), **job.common)
    return f"version {version_of(target, job.own)}"


def check_and_save(job: Job) -> str:
    """Load what is there, save the next version over it, load that; return the first's version."""
    before = load(job)
    save(job)
    again = load(job)
    assert again == f"version {job.version}", f"Saved version {job.version}, loaded {again}."
    return before


def consolidate(job: Job) -> str:
    """Consolidate; return the names of the files."""
    job.held("call")

    # The export that is there already has other files.
    files = job.cell.files if job.version > 1 else None
    rename = partial(job.held, "local plan")
    report = ckpt_storage.consolidate(URL, fqn_to_index_mapping=files, rename=rename, **job.common)
    return f"published {', '.join(file.name for file in report.files)}"


OPERATIONS: dict[str, Callable[[Job], str]] = {
    "save": save,
    "async save": partial(save, is_async=True),
    "load": load,
    "check and save": check_and_save,
    "save weights": save,
    "consolidate": consolidate,
}


def rank_main(job: Job) -> None:
    """Be one rank: join, wait for the start, run the operation, report how it ended."""
    line = job.line
    ranks = {"RANK": str(line.rank), "WORLD_SIZE": str(job.cell.world_size)}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port), **ranks)
    if job.cell.host == "launcher":  # what torchrun's agent sets
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    _watch(job)
    line.ask("ready")
    try:
        value = OPERATIONS[job.operation](job)
    except BaseException as error:  # noqa: BLE001  # DCP's own and interrupts are among the subjects
        line.report(
            "ended",
            kind=type(error).__name__,
            ours=isinstance(error, ckpt_storage.CheckpointError),
            text="\n".join([str(error), *getattr(error, "__notes__", ())]),
            names=[getattr(error, "rank", None), *getattr(error, "failures", ())],
            phase=getattr(error, "phase", None),
            committed=getattr(error, "info", None) is not None,
            trace=traceback.format_exc(),
        )
    else:
        line.report("ended", kind="returned", text=value)
