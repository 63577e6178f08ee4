"""Jobs of `launched_rank.py`, under real torchrun or as forks, and the log of their ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

import torch.distributed as dist
from fork_server import exit_codes, start_script
from limits import HANG_S, JOB_S

import ckpt_storage

Event = dict[str, Any]

STACKS_SIGNAL = signal.SIGRTMIN + 4
"""Makes a rank write the stacks of its threads."""

_REPOSITORY = Path(__file__).resolve().parents[2]

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), str(Path(__file__).parent)]),
}

QUICK_TIMEOUTS = {
    "plan": 4.0,
    "stage": 8.0,
    "write": 8.0,
    "commit": 8.0,
    "load": 20.0,
    "request": 8.0,
    "silence": 2.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the ranks of a job do.

    `steps` None: until the file `stop` is there. Every `lockstep_every` steps the ranks run a
    collective. `faults` are dicts with `id`, `rank`, `at_save`, `kind`, and what the kind needs.
    `handled` are signals that the training script ignores; `signals` those of the manager.
    """

    folder: Path
    api: Literal["save", "saver", "save_async", "manager"] = "save"
    mode: Literal["thread", "process"] = "thread"
    background: bool = False
    rolling: bool = True
    every: int = 5
    lockstep_every: int = 1
    step_s: float = 0.02
    steps: int | None = None
    run: int = 0
    on_error: Literal["raise", "warn"] = "warn"
    handled: list[str] = field(default_factory=list)
    signals: list[str] = field(default_factory=list)
    timeouts: dict[str, float] = field(default_factory=lambda: dict(QUICK_TIMEOUTS))
    faults: list[dict[str, Any]] = field(default_factory=list)
    has_finals: bool = False
    has_strict_close: bool = False

    @property
    def url(self) -> str:
        """The rolling URL, or the folder of the checkpoints."""
        is_root = not self.rolling or self.api == "manager"
        return str(self.folder / "saved" / ("" if is_root else "last"))

    @property
    def is_background(self) -> bool:
        """Whether saves go on in the background."""
        return self.api in {"saver", "save_async"} or (self.api == "manager" and self.background)

    def write(self) -> Path:
        for name in ("log", "taken", "commands", "saved"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        path = self.folder / f"settings-{self.run}.json"
        path.write_text(json.dumps({**asdict(self), "folder": str(self.folder)}))
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        values = json.loads(path.read_text())
        return cls(**{**values, "folder": Path(values["folder"])})


def kind_of(error: BaseException) -> str:
    """Return what an error says of the save: failed, unknown, committed; or what else it is.

    "earlier": an earlier save failed, and this save has begun.
    """
    if any("has begun all the same" in note for note in getattr(error, "__notes__", ())):
        return "earlier"
    if isinstance(error, ckpt_storage.CommitUnknownError):
        return "unknown"
    if getattr(error, "info", None) is not None:
        return "committed"
    if isinstance(error, ckpt_storage.CheckpointError):
        return "failed"
    return "strange" if isinstance(error, Exception) else "interrupted"


class Logs:
    """The logs of all ranks of a folder, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "log"
        self._offsets: dict[Path, int] = {}
        self.events: list[Event] = []

    def read(self) -> list[Event]:
        """Return what is new."""
        fresh: list[Event] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            # The last line may be half written.
            data = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(data)
            fresh += [json.loads(line) for line in data.splitlines()]
        self.events += fresh
        return fresh

    def all(self, event: str, **values: Any) -> list[Event]:
        """Return the events of a kind whose values are these."""
        self.read()
        return [
            entry
            for entry in self.events
            if entry["event"] == event and all(entry.get(name) == v for name, v in values.items())
        ]

    def wait_for(
        self, count: int, event: str, *, limit_s: float = HANG_S, **values: Any
    ) -> list[Event]:
        """Wait until so many such events are there."""
        end_s = time.monotonic() + limit_s
        while len(events := self.all(event, **values)) < count:
            if time.monotonic() > end_s:
                raise AssertionError(f"{len(events)} of {count} {event} {values} in {limit_s} s")
            time.sleep(0.02)
        return events


class Forks:
    """Ranks that are forks of a process that has imported torch, in place of torchrun.

    As with torchrun, the launcher hosts the ranks' store. A rank that fails ends no other rank.
    """

    def __init__(self, command: Sequence[str], folder: Path, rank_count: int, output: Path) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=HANG_S),
        )
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(rank_count),
            "LOCAL_WORLD_SIZE": str(rank_count),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self._logs = [folder / f"fork-{rank}" for rank in range(rank_count)]
        self._output = output
        for rank, log in enumerate(self._logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            start_script(log, *command, folder=folder, environment={**environment, **place})

    def poll(self) -> int | None:
        """Return the first exit code that is not 0, or 0; None while a rank is alive."""
        codes = exit_codes(self._logs, 0.0)
        return None if None in codes else next((code for code in codes if code), 0)

    def wait(self, timeout: float) -> int:
        exit_codes(self._logs, timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("ranks", timeout)
        self._output.write_text("".join(Path(f"{log}.out").read_text() for log in self._logs))
        return code

    def kill(self) -> None:
        """Do nothing: `Job` kills the ranks."""


class Job:
    """The ranks of a job and their launcher: torchrun, or `Forks` for what needs no torchrun."""

    def __init__(
        self,
        settings: Settings,
        *,
        rank_count: int = 2,
        max_restarts: int = 0,
        launcher: Literal["static", "c10d", "forks"] = "c10d",
    ) -> None:
        self.settings = settings
        self.logs = Logs(settings.folder)
        self.rank_count = rank_count
        self.output = settings.folder / f"output-{settings.run}.txt"
        self.process: subprocess.Popen[bytes] | Forks
        command = str(Path(__file__).with_name("launched_rank.py")), str(settings.write())
        if launcher == "forks":
            self.process = Forks(command, settings.folder, rank_count, self.output)
            return
        place = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        if launcher == "static":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                place = ["--master-addr=127.0.0.1", f"--master-port={free.getsockname()[1]}"]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *place,
                    "--local-addr=127.0.0.1",
                    f"--nproc-per-node={rank_count}",
                    f"--max-restarts={max_restarts}",
                    "--monitor-interval=0.1",
                    *command,
                ],
                env={**os.environ, **_ENVIRONMENT},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End the launcher, all ranks and all workers at once."""
        if self.process.poll() is None:
            self.process.kill()
        self.logs.read()
        for event in self.logs.events:
            is_own = event["event"] == "start" and event["life"] // 100 == self.settings.run
            if is_own and not is_reused(event["pid"], event["t"]):
                # A rank leads a group of its own, with its worker in it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(event["pid"], signal.SIGKILL)
        self.process.wait(HANG_S)

    def wait(self, limit_s: float) -> int:
        """Return the exit code of the launcher."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.dump_stacks()
            raise AssertionError(f"the job has not ended in {limit_s} s") from None

    def dump_stacks(self) -> None:
        """Let live ranks write the stacks of their threads."""
        for event in self.logs.all("start"):
            if is_alive(event["pid"], event["t"]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(event["pid"], STACKS_SIGNAL)
        time.sleep(0.5)

    def run(self, limit_s: float = JOB_S) -> int:
        """Run to the end; return the exit code."""
        with self:
            return self.wait(limit_s)


def parent_of(pid: int) -> int | None:
    """Return the parent of a live process; None if it has ended."""
    stat = _stat_of(pid)
    return None if stat is None or stat[0] == "Z" else int(stat[1])


def is_alive(pid: int, seen_s: float) -> bool:
    """Return whether the process that had this id at `seen_s` (monotonic) exists, and no zombie.

    The system reuses the ids of ended processes.
    """
    return parent_of(pid) is not None and not is_reused(pid, seen_s)


def is_reused(pid: int, seen_s: float) -> bool:
    """Return whether an id belongs to another process than at `seen_s`."""
    stat = _stat_of(pid)
    # Field 22 of proc(5): when the process started, in ticks since the machine did.
    return stat is not None and int(stat[19]) / os.sysconf("SC_CLK_TCK") > seen_s + 0.1


def _stat_of(pid: int) -> list[str] | None:
    """Return what proc(5) has of a process, from the state on; None if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
