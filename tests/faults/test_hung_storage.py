"""Storage that hangs: ranks give up at their deadline, all know who and where, and can exit."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from saver_cases import until

import ckpt_storage
from ckpt_storage.testing.s3_server import FaultRule, S3Server

PHASE_S = 4.0
SLACK_S = 5.0
"""What is promised beyond a deadline."""

EXIT_S = 30.0
"""An interpreter with torch needs less to exit; to join a hung thread would be for ever."""

S3_SERVER = """
import json, sys
from ckpt_storage.testing.s3_server import S3Server
with S3Server() as server:
    server.create_bucket("bucket")
    print(json.dumps(server.storage_options), flush=True)
    sys.stdin.read()
"""

NURSERY = """
import json, os, sys, time
sys.path.insert(0, SUPPORT)
import torch.distributed as dist
import s3fs
import ckpt_storage
from dcp_cases import seeded
from ckpt_storage.store.threads import abandoned_thread_count

def born():
    for line in sys.stdin:
        world_sizes, folder, url, *job = json.loads(line)
        pids = []
        for world_size in world_sizes:
            for rank in range(world_size):
                pids.append(os.fork())
                if pids[-1] == 0:
                    return rank, world_size, f"{folder}/{world_size}", f"{url}-{world_size}", *job
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)
    os._exit(0)

rank, world_size, folder, url, call, options = born()
if world_size > 1:
    store = dist.FileStore(folder + "/rendezvous", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
state = {"w": seeded(1, 5000), f"of-{rank}": seeded(rank, 50)}
timeouts = ckpt_storage.Timeouts(
    plan=PHASE, write=PHASE, commit=PHASE, load=PHASE, request=30.0, silence=20.0
)
# Clients are made here, before the clock runs.
ckpt_storage.save(state, url if call == "load" else url + "-before", storage_options=options)
open(folder + f"/ready-{rank}", "w").close()
while not os.path.exists(folder + "/go"):
    time.sleep(0.01)
begin = time.monotonic()
try:
    getattr(ckpt_storage, call)(state, url, storage_options=options, timeout=timeouts)
except Exception as error:
    said = [type(error).__name__, str(error), error.phase, error.rank]
else:
    said = ["nothing", "", "", -1]
with open(folder + f"/said-{rank}", "w") as file:
    told = {"said": said, "wall_s": time.monotonic() - begin, "abandoned": abandoned_thread_count()}
    json.dump(told, file)
""".replace("PHASE", str(PHASE_S)).replace(
    "SUPPORT", repr(str(Path(__file__).parents[1] / "support"))
)

Nursery = subprocess.Popen[str]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """A process that has imported torch; ranks are forks of it, and end as scripts do."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", NURSERY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def told_by(
    nursery: Nursery,
    world_sizes: Sequence[int],
    folder: Path,
    call: str,
    options: dict[str, Any],
    hang: Callable[[], object],
) -> list[list[dict[str, Any]]]:
    """Let ranks of each world call once `hang` was called; return what each says, having ended."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    worlds = {world_size: folder / str(world_size) for world_size in world_sizes}
    for world in worlds.values():
        world.mkdir()
    job = [world_sizes, str(folder), "s3://bucket/run", call, options]
    print(json.dumps(job), file=nursery.stdin, flush=True)
    count = sum(world_sizes)
    until(lambda: len(list(folder.glob("*/ready-*"))) == count, "all ranks are ready", 150.0)
    hang()
    for world in worlds.values():
        (world / "go").touch()
    limit_s = PHASE_S + SLACK_S + EXIT_S
    assert select.select([nursery.stdout], [], [], limit_s)[0], "a rank does not end"
    assert json.loads(nursery.stdout.readline()) == [0] * count
    return [
        [json.loads((world / f"said-{rank}").read_text()) for rank in range(world_size)]
        for world_size, world in worlds.items()
    ]


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
    nursery: Nursery, server: S3Server, tmp_path: Path, call: str, op: str, key: str, phase: str
) -> None:
    """Two ranks and one alone name rank and phase in time, and their processes exit."""
    rule = FaultRule(op=op, key=key, action="hang", times=0)
    options = server.storage_options
    worlds = told_by(nursery, (2, 1), tmp_path, call, options, lambda: server.faults([rule]))
    for told in worlds:
        if phase != "commit":
            assert_gave_up(told, phase=phase)
            continue
        # What hangs is the create of the commit record itself: nobody can tell.
        for one in told:
            assert one["said"][0] in {"CommitUnknownError", "PhaseTimeoutError"}, one
            assert one["wall_s"] < PHASE_S + SLACK_S, one


def test_a_stopped_server_process_ends_at_the_deadline(nursery: Nursery, tmp_path: Path) -> None:
    """A server stopped by SIGSTOP is given up on both ranks, and their processes exit."""
    server = subprocess.Popen(
        [sys.executable, "-c", S3_SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        options = json.loads(server.stdout.readline())
        stop = partial(os.kill, server.pid, signal.SIGSTOP)
        (told,) = told_by(nursery, [2], tmp_path, "save", options, stop)
    finally:
        server.kill()
        server.communicate()
    assert_gave_up(told, phase="plan")


def test_a_look_at_metadata_that_hangs_is_told_and_fails_no_load(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A load waits a bounded time for what only stock readers need, and the log says so."""
    url, target = "s3://bucket/run", {"w": torch.zeros(3)}
    options = server.storage_options
    ckpt_storage.save({"w": torch.ones(3)}, url, storage_options=options)
    server.faults([FaultRule(key=r"run/\.metadata", times=0, action="hang")])
    timeout = ckpt_storage.Timeouts(load=4)
    ckpt_storage.load(target, url, storage_options=options, timeout=timeout)
    assert target["w"].tolist() == [1.0] * 3
    assert ".metadata" in caplog.text
