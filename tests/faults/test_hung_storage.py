"""Storage that hangs: ranks give up at their deadline, all know who and where, and can exit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_storage
from ckpt_storage.testing.s3_server import FaultRule, S3Server

PHASE_S = 4.0
SLACK_S = 5.0
"""What is promised beyond a deadline."""

EXIT_S = 30.0
"""An interpreter with torch needs less to exit; to join a hung thread would be for ever."""

RANK = """
import json, sys, threading, time
import torch.distributed as dist
import ckpt_storage
from dcp_cases import seeded
from ckpt_storage.store.timed import abandoned_thread_count

rank, world_size, folder, url, call, options = json.loads(sys.argv[1])
import s3fs
if world_size > 1:
    store = dist.FileStore(folder + "/rendezvous", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
state = {"w": seeded(1, 5000), f"of-{rank}": seeded(rank, 50)}
timeouts = ckpt_storage.Timeouts(
    plan=PHASE, write=PHASE, commit=PHASE, load=PHASE, request=30.0, silence=20.0
)
# Imports and clients are made here, before the clock runs.
ckpt_storage.save(state, url if call == "load" else url + "-before", storage_options=options)
with open(folder + f"/ready-{rank}", "w") as file:
    file.write("ready")
assert sys.stdin.readline() == "go\\n"
begin = time.monotonic()
try:
    getattr(ckpt_storage, call)(state, url, storage_options=options, timeout=timeouts)
except Exception as error:
    said = [type(error).__name__, str(error), error.phase, error.rank]
else:
    said = ["nothing", "", "", -1]
print(json.dumps({
    "said": said,
    "wall_s": time.monotonic() - begin,
    "abandoned": abandoned_thread_count(),
}), flush=True)
""".replace("PHASE", str(PHASE_S))


@contextmanager
def rank_processes(
    world_size: int, folder: Path, url: str, call: str, options: dict[str, Any]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Give processes that wait for "go" on standard input; none is left."""
    folder.mkdir(exist_ok=True)
    path = f"{Path(__file__).parents[1] / 'support'}{os.pathsep}{Path(__file__).parents[2]}"
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                RANK,
                json.dumps([rank, world_size, str(folder), url, call, options]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(world_size)
    ]
    try:
        end = time.monotonic() + 150.0
        while not all((folder / f"ready-{rank}").exists() for rank in range(world_size)):
            assert time.monotonic() < end, "ranks do not start"
            assert all(process.poll() is None for process in processes)
            time.sleep(0.02)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def told_by(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Start the ranks' calls; return what each says, having ended soon after."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = []
    for process in processes:
        assert process.stdout is not None
        told.append(json.loads(process.stdout.readline()))
    end = time.monotonic() + EXIT_S
    for process in processes:
        assert process.wait(max(0.1, end - time.monotonic())) == 0
    return told


def assert_gave_up(told: list[dict[str, Any]], *, phase: str) -> None:
    """Assert that all ranks gave up in time, over one rank's timeout in a phase."""
    for one in told:
        name, text, in_phase, rank = one["said"]
        assert one["wall_s"] < PHASE_S + SLACK_S, one
        assert name in {"PhaseTimeoutError", "RankFailedError"}, one
        assert "did not end within" in text, one
        assert in_phase == phase, one
        assert rank in range(len(told)), one
    assert any(one["said"][0] == "PhaseTimeoutError" for one in told)
    assert any(one["abandoned"] > 0 for one in told)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("call", "op", "key", "phase"),
    [
        ("save", ".*", "", "plan"),
        ("save", "put|part|complete", "__0_", "write"),
        ("save", "put", "commits/", "commit"),
        ("load", "get", ".distcp", "load"),
    ],
)
def test_a_server_that_never_answers_ends_at_the_deadline(
    tmp_path: Path, world_size: int, call: str, op: str, key: str, phase: str
) -> None:
    """All ranks name rank and phase within deadline and slack, and their processes exit."""
    with S3Server() as server:
        server.create_bucket("bucket")
        with rank_processes(
            world_size, tmp_path / "run", "s3://bucket/run", call, server.storage_options
        ) as processes:
            server.faults([FaultRule(op=op, key=key, action="hang", times=0)])
            told = told_by(processes)
    if phase == "commit":
        # What hangs is the create of the commit record itself: nobody can tell.
        for one in told:
            assert one["said"][0] in {"CommitUnknownError", "PhaseTimeoutError"}, one
            assert one["wall_s"] < PHASE_S + SLACK_S, one
    else:
        assert_gave_up(told, phase=phase)


def test_a_stopped_server_process_ends_at_the_deadline(tmp_path: Path) -> None:
    """A server stopped by SIGSTOP is given up on both ranks, and their processes exit."""
    server = subprocess.Popen(
        [sys.executable, "-m", "ckpt_storage.testing.s3_server", "--bucket", "bucket"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        options = json.loads(server.stdout.readline())["storage_options"]
        with rank_processes(2, tmp_path / "run", "s3://bucket/run", "save", options) as processes:
            os.kill(server.pid, signal.SIGSTOP)
            told = told_by(processes)
    finally:
        server.kill()
        server.communicate()
    assert_gave_up(told, phase="plan")


def test_a_look_at_metadata_that_hangs_is_told_and_fails_no_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A load waits a bounded time for what only stock readers need, and the log says so."""
    url, target = "s3://bucket/run", {"w": torch.zeros(3)}
    with S3Server() as server:
        server.create_bucket("bucket")
        options = server.storage_options
        ckpt_storage.save({"w": torch.ones(3)}, url, storage_options=options)
        server.faults([FaultRule(key=r"run/\.metadata", times=0, action="hang")])
        timeout = ckpt_storage.Timeouts(load=4)
        ckpt_storage.load(target, url, storage_options=options, timeout=timeout)
    assert target["w"].tolist() == [1.0] * 3
    assert ".metadata" in caplog.text
