"""What the fault matrix is driven with: processes, what they tell, and what lies on the server."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import fault_ranks
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fault_cells import TIMEOUTS, WORLD_SIZE
from fault_ranks import Job
from servers import free_port

from ckpt_storage.testing.s3_server import S3Server

__all__ = [
    "BUCKET",
    "EXIT_S",
    "SETTLE_S",
    "Event",
    "Ranks",
    "export_leftovers",
    "export_version",
    "stock_version",
]

SETTLE_S = 60.0
"""How long the driver waits for what must come; longer than any limit under test."""
EXIT_S = 30.0

_PRELOADED = [
    "torch.distributed.checkpoint",
    "s3fs",
    "safetensors.torch",
    "ckpt_storage.loads.load",
    "ckpt_storage.saves.save",
    "ckpt_storage.export.consolidate",
    "ckpt_storage.testing.s3_server",
]

BUCKET = "bucket"
URL = f"s3://{BUCKET}/run/step-1"
EXPORT = "run/step-1/hf"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a rank told."""

    rank: int
    what: str
    at_s: float
    details: dict[str, Any]


class Ranks:
    """The processes of one operation; a context manager that leaves none behind."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="faults-")
        self._store: dist.TCPStore | None = None
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._events: list[Event] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_dead(range(len(self._processes)))
        for pipe in self._pipes:
            pipe.close()
        self._store = None
        self._folder.cleanup()

    def start(
        self,
        operation: str,
        server: S3Server,
        *,
        world_size: int,
        launcher_hosts: bool,
        version: int,
        holds: int | None = None,
        files: Mapping[str, int] | None = None,
    ) -> None:
        """Start the processes, and let them call. `holds` is the rank whose planner asks."""
        port = free_port()
        if launcher_hosts:
            self._store = dist.TCPStore(
                "127.0.0.1",
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=SETTLE_S),
            )
            port = self._store.port
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        for rank in range(world_size):
            job = Job(
                operation=operation,
                rank=rank,
                world_size=world_size,
                url=URL,
                storage_options=server.storage_options,
                timeouts=TIMEOUTS,
                port=port,
                launcher_hosts=launcher_hosts,
                is_held=rank == holds,
                version=version,
                files=files,
                log_path=f"{self._folder.name}/rank-{rank}.log",
            )
            ours, theirs = context.Pipe()
            process = context.Process(target=fault_ranks.rank_main, args=(job, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self.wait_for(*((rank, "ready") for rank in range(world_size)))
        for rank in range(world_size):
            self.answer(rank, "go")

    def wait_for(self, *wanted: tuple[int, str]) -> list[Event]:
        """Return the first event of each (rank, what) once all are there; raise `TimeoutError`."""
        end_s = time.monotonic() + SETTLE_S
        while True:
            found = {(event.rank, event.what): event for event in reversed(self._events)}
            if found.keys() >= set(wanted):
                return [found[one] for one in wanted]
            open_pipes = [pipe for pipe in self._pipes if not pipe.closed]
            ready = wait(open_pipes, max(0.0, end_s - time.monotonic()))
            if not ready:
                missing = sorted(set(wanted) - found.keys())
                raise TimeoutError(f"Not heard in {SETTLE_S:g} s: {missing}")
            for rank, pipe in enumerate(self._pipes):
                if pipe in ready:
                    try:
                        what, at_s, details = pipe.recv()
                    except (EOFError, OSError):
                        pipe.close()
                        continue
                    event = Event(rank=rank, what=what, at_s=at_s, details=details)
                    self._events.append(event)

    def answer(self, rank: int, how: str) -> None:
        """Tell a rank that asks how to go on."""
        self._pipes[rank].send(how)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        os.kill(self._processes[rank].pid or 0, number)

    def wait_dead(self, ranks: Iterable[int]) -> dict[int, int | None]:
        """Return the exit codes of ranks; None for one that did not end in time."""
        end_s = time.monotonic() + EXIT_S
        for rank in ranks:
            self._processes[rank].join(max(0.0, end_s - time.monotonic()))
        return {rank: self._processes[rank].exitcode for rank in ranks}

    def left(self) -> list[int]:
        """Return what lives of the ranks and all that they started."""
        sessions = {process.pid for process in self._processes}
        return [pid for pid, session in _sessions() if session in sessions]

    def logs(self) -> list[str]:
        """Return what the ranks logged."""
        return [
            f"--- {path.name}\n{path.read_text(errors='replace')}"
            for path in sorted(Path(self._folder.name).iterdir())
        ]


def stock_version(server: S3Server) -> int:
    """Return which version stock torch loads completely from what lies on the server."""
    with tempfile.TemporaryDirectory() as folder:
        for key, data in server.dump().items():
            path = Path(folder) / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        target = {
            "model": {
                name: torch.zeros_like(value)
                for name, value in fault_ranks.state_of(0, range(WORLD_SIZE)).items()
            }
        }
        with contextlib.redirect_stderr(io.StringIO()):
            dcp.load(
                target,
                storage_reader=dcp.FileSystemReader(Path(folder) / "run" / "step-1"),
                no_dist=True,
            )
    for version in range(1, 9):
        expected = fault_ranks.state_of(version, range(WORLD_SIZE))
        if all(torch.equal(target["model"][name], expected[name]) for name in expected):
            return version
    return -1


def export_version(server: S3Server) -> int:
    """Return which version safetensors loads completely through the index of the export."""
    objects = server.dump()
    found: dict[str, Any] = {}
    index = json.loads(objects[f"{EXPORT}/{INDEX}"])
    for name in set(index["weight_map"].values()):
        loaded = safetensors.torch.load(objects[f"{EXPORT}/{name}"])
        found |= {key: value for key, value in loaded.items() if index["weight_map"][key] == name}
    for version in range(1, 9):
        expected = fault_ranks.weights_of(version, range(WORLD_SIZE))
        if found.keys() == {f"model.{name}" for name in expected} and all(
            torch.equal(found[f"model.{name}"], value) for name, value in expected.items()
        ):
            return version
    return -1


def export_leftovers(server: S3Server) -> list[str]:
    """Return what lies below the export that is neither of it nor of its documents."""
    objects = server.dump()
    index = json.loads(objects[f"{EXPORT}/{INDEX}"])
    tag = index["metadata"]["fingerprint"][:16]
    documents = ["names.json", "job.json", f"{tag}/output.json"]
    named = {INDEX, *index["weight_map"].values(), *(f".ckpt-storage/{name}" for name in documents)}
    left = {key.removeprefix(f"{EXPORT}/") for key in objects if key.startswith(f"{EXPORT}/")}
    return sorted(left ^ named)


def _sessions() -> Iterator[tuple[int, int]]:
    """Return process id and session of every live process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    yield int(folder.name), int(fields[3])
