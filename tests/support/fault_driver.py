"""What the fault matrix is driven with: processes, what they tell, and what lies on the server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fault_cells import Cell, Where
from fault_ranks import Job, state_of, weights_of
from servers import free_port

from ckpt_storage.testing.s3_server import S3Server

SETTLE_S = 60.0
"""How long the driver waits for what must come; longer than any limit under test."""
EXIT_S = 30.0

BUCKET = "bucket"
EXPORT = "run/step-1/hf"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank or the nursery told; `connection` waits for an answer if it asked."""

    rank: int
    what: str
    at_s: float
    details: dict[str, Any]
    connection: Connection


class Hub:
    """Where all processes tell the driver what happens; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "hub")
        self.events: list[Event] = []
        self._number = 0
        self._changed = threading.Condition()
        self._listener = Listener(self.address, "AF_UNIX", backlog=64)
        threading.Thread(target=self._accept, name="hub", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._listener.close()

    def clear(self) -> int:
        """Forget all events, also those that earlier ranks send yet; return the next number."""
        with self._changed:
            self._number += 1
            for event in self.events:
                if event.rank >= 0:
                    event.connection.close()
            self.events = []
            return self._number

    def wait_for(self, *wanted: tuple[int, str]) -> list[Event]:
        """Return the first event of each (rank, what) once all are there; raise `TimeoutError`."""
        found: dict[tuple[int, str], Event] = {}

        def are_there() -> bool:
            for event in self.events:
                found.setdefault((event.rank, event.what), event)
            return found.keys() >= {*wanted}

        with self._changed:
            if not self._changed.wait_for(are_there, SETTLE_S):
                missing = sorted({*wanted} - found.keys())
                raise TimeoutError(f"Not heard in {SETTLE_S:g} s: {missing}")
        return [found[one] for one in wanted]

    def wait_dead(self, pids: Iterable[int], timeout_s: float) -> dict[int, int]:
        """Return the exit codes of those `pids` that ended in time."""
        wanted = set(pids)
        found: dict[int, int] = {}

        def are_dead() -> bool:
            for event in self.events:
                if event.what == "died" and event.details["pid"] in wanted:
                    found[event.details["pid"]] = event.details["code"]
            return wanted == set(found)

        with self._changed:
            self._changed.wait_for(are_dead, timeout_s)
        return found

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                args = (self._listener.accept(),)
                threading.Thread(target=self._read, args=args, daemon=True).start()

    def _read(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                rank, what, at_s, details = connection.recv()
                event = Event(rank, what, at_s, details, connection)
                with self._changed:
                    if event.details.get("number", self._number) != self._number:
                        return
                    self.events.append(event)
                    self._changed.notify_all()


class Ranks:
    """The processes of one operation; a context manager that leaves none behind."""

    def __init__(self, hub: Hub, nursery: Connection, folder: Path) -> None:
        self._hub = hub
        self._nursery = nursery
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._store: dist.TCPStore | None = None
        self.pids: dict[int, int] = {}
        self._number = hub.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._hub.wait_dead(self.pids.values(), EXIT_S)
        self._store = None

    def start(
        self,
        cell: Cell,
        server: S3Server,
        operation: str,
        version: int,
        *,
        holds: Mapping[int, Where] | None = None,
        files: Mapping[str, int] | None = None,
    ) -> None:
        """Let as many processes as the cell has call the operation; one that `holds` asks first."""
        port = free_port()
        if cell.host == "launcher":
            timeout = timedelta(seconds=SETTLE_S)
            self._store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout
            )
            port = self._store.port
        for rank in range(cell.world_size):
            self._nursery.send(
                Job(
                    address=self._hub.address,
                    number=self._number,
                    operation=operation,
                    rank=rank,
                    world_size=cell.world_size,
                    storage_options=server.storage_options,
                    port=port,
                    launcher_hosts=cell.host == "launcher",
                    hold=(holds or {}).get(rank, ""),
                    version=version,
                    files=files,
                    log_path=str(self._folder / f"rank-{rank}.log"),
                )
            )
        ready = self._hub.wait_for(*((rank, "ready") for rank in range(cell.world_size)))
        self.pids = {event.rank: event.details["pid"] for event in ready}
        for event in ready:
            event.connection.send("go")

    def left(self) -> list[int]:
        sessions = set(self.pids.values())
        return [pid for pid, session in _sessions() if session in sessions]

    def logs(self) -> list[str]:
        return [
            f"--- {path.name}\n{path.read_text(errors='replace')}"
            for path in sorted(self._folder.iterdir())
        ]


def _sessions() -> Iterator[tuple[int, int]]:
    """Return process id and session of every live process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    yield int(folder.name), int(fields[3])


def _version(found: Mapping[str, Any], made: Callable[[int, range], dict[str, Any]]) -> int:
    """Return which version of a state this is, -1 for none."""
    for version in range(1, 9):
        expected = made(version, range(len(found)))
        if found.keys() == expected.keys() and all(
            torch.equal(found[name], value) for name, value in expected.items()
        ):
            return version
    return -1


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
    return _version(target["model"], state_of)


def export_version(server: S3Server) -> int:
    """Return which version safetensors loads completely through the index of the export."""
    objects = server.dump()
    places = json.loads(objects[f"{EXPORT}/{INDEX}"])["weight_map"]
    found: dict[str, Any] = {}
    for file in set(places.values()):
        loaded = safetensors.torch.load(objects[f"{EXPORT}/{file}"])
        found |= {name: value for name, value in loaded.items() if places[name] == file}
    if found.keys() != {f"model.w{rank}" for rank in range(3)}:
        return -1
    return _version({name.removeprefix("model."): found[name] for name in found}, weights_of)


def export_leftovers(server: S3Server) -> list[str]:
    """Return what lies below the export that is neither of it nor of its documents."""
    objects = server.dump()
    index = json.loads(objects[f"{EXPORT}/{INDEX}"])
    tag = index["metadata"]["fingerprint"][:16]
    documents = ["names.json", "job.json", f"{tag}/output.json"]
    named = {INDEX, *index["weight_map"].values(), *(f".ckpt-storage/{name}" for name in documents)}
    left = {key.removeprefix(f"{EXPORT}/") for key in objects if key.startswith(f"{EXPORT}/")}
    return sorted(left ^ named)
