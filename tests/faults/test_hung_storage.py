"""Storage that hangs: ranks give up at their deadline, all know who and where, and can exit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_cases import seeded
from fault_ranks import Line
from fork_server import ForkServer, exit_codes
from limits import SLACK_S
from s3_server import FaultRule, S3Server
from saver_cases import until

import ckpt_storage
from ckpt_storage.store.threads import abandoned_thread_count

pytestmark = pytest.mark.deadline

PHASE_S = 4.0
EXIT_S = 30.0
"""An interpreter with torch needs less to exit; to join a hung thread would be for ever."""

TIMEOUTS = ckpt_storage.Timeouts(
    plan=PHASE_S, write=PHASE_S, commit=PHASE_S, load=PHASE_S, request=30.0, silence=20.0
)

Told = dict[str, Any]


def _serve(line: Line) -> None:
    with S3Server() as server:
        server.create_bucket("bucket")
        line.report("serving", options=dict(server.storage_options))
        threading.Event().wait()


def _call(line: Line, world_size: int, call: str, options: dict[str, Any]) -> None:
    """Call once it is asked for; tell what was raised, and after how long."""
    if world_size > 1:
        store = dist.FileStore(str(line.folder / "rendezvous"), world_size)
        dist.init_process_group("gloo", store=store, rank=line.rank, world_size=world_size)
    url = f"s3://bucket/run-{world_size}"
    state = {"w": seeded(1, 5000), f"of-{line.rank}": seeded(line.rank, 50)}
    # Clients are made here, before the clock runs.
    ckpt_storage.save(state, url if call == "load" else f"{url}-before", storage_options=options)
    line.ask("ready")
    said: tuple[object, ...] = ("nothing", "", "", -1)
    begin_s = time.monotonic()
    try:
        getattr(ckpt_storage, call)(state, url, storage_options=options, timeout=TIMEOUTS)
    except ckpt_storage.CheckpointError as error:
        said = (type(error).__name__, str(error), error.phase, error.rank)
    wall_s = time.monotonic() - begin_s
    line.report("ended", said=said, wall_s=wall_s, abandoned=abandoned_thread_count())


def told_by(
    fork_server: ForkServer,
    world_sizes: Sequence[int],
    folder: Path,
    call: str,
    options: dict[str, Any],
    hang: Callable[[], object],
) -> list[list[Told]]:
    """Let ranks of each world call once `hang` was called; return what each says, having ended."""
    worlds = []
    for world_size in world_sizes:
        world = folder / str(world_size)
        world.mkdir()
        worlds.append([Line(world, rank) for rank in range(world_size)])
    lines = [line for world in worlds for line in world]
    logs = {line: line.folder / f"log-{line.rank}" for line in lines}
    for line, log in logs.items():
        fork_server.start(log, _call, line, int(line.folder.name), call, options)
    until(lambda: all(line.read_report("ready") for line in lines), "all ranks are ready")
    hang()
    for line in lines:
        line.answer("ready")
    codes = exit_codes(logs.values(), PHASE_S + SLACK_S + EXIT_S)
    assert codes == [0] * len(lines), codes
    return [[line.read_report("ended") or {} for line in world] for world in worlds]


def assert_gave_up(told: list[Told], *, phase: str) -> None:
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
    fork_server: ForkServer,
    server: S3Server,
    tmp_path: Path,
    call: str,
    op: str,
    key: str,
    phase: str,
) -> None:
    """Two ranks and one alone name rank and phase in time, and their processes exit."""
    hang = partial(server.faults, [FaultRule(op=op, key=key, action="hang", times=0)])
    for told in told_by(fork_server, (2, 1), tmp_path, call, server.storage_options, hang):
        if phase != "commit":
            assert_gave_up(told, phase=phase)
            continue
        # What hangs is the create of the commit record itself: nobody can tell.
        for one in told:
            assert one["said"][0] in {"CommitUnknownError", "PhaseTimeoutError"}, one
            assert one["wall_s"] < PHASE_S + SLACK_S, one


def test_a_stopped_server_process_ends_at_the_deadline(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """A server stopped by SIGSTOP is given up on both ranks, and their processes exit."""
    line = Line(tmp_path, 0)
    fork_server.start(tmp_path / "server", _serve, line)
    until(lambda: line.read_report("serving"), "the server")
    serving = line.read_report("serving") or {}
    stop = partial(os.kill, serving["pid"], signal.SIGSTOP)
    try:
        (told,) = told_by(fork_server, [2], tmp_path, "save", serving["options"], stop)
    finally:
        os.kill(serving["pid"], signal.SIGKILL)
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


def _restore(root: str, **options: Any) -> None:
    with ckpt_storage.CheckpointManager(root, **options) as manager:
        manager.restore({"w": torch.ones(4)})


def _latest(root: str, **options: Any) -> None:
    with ckpt_storage.CheckpointManager(root, **options) as manager:
        manager.latest()


def _load(root: str, **options: Any) -> None:
    ckpt_storage.load({"w": torch.ones(4)}, f"{root}/step-00000001", **options)


def _delete(root: str, **options: Any) -> None:
    ckpt_storage.delete(f"{root}/step-00000001", **options)


def _prune(root: str, **options: Any) -> None:
    ckpt_storage.prune(root, ckpt_storage.KeepLatest(1), dry_run=False, **options)


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        (_load, "load"),
        (_restore, "load"),
        (_latest, "load"),
        (ckpt_storage.list_checkpoints, "load"),
        (_prune, "commit"),
        (_delete, "commit"),
    ],
)
def test_a_call_that_cannot_read_what_is_there_in_time_names_its_phase(
    call: Callable[..., object], phase: str
) -> None:
    """The deadline of a phase may pass before the first byte of a tensor is read."""
    with S3Server() as server:
        server.create_bucket("bucket")
        options: dict[str, Any] = {"storage_options": server.storage_options}
        for step in (1, 2):
            ckpt_storage.save({"w": torch.ones(4)}, f"s3://bucket/run/step-{step:08d}", **options)
        server.faults([FaultRule(action="hang", op="get", times=0)])
        timeout = ckpt_storage.Timeouts(load=1.0, commit=1.0)
        with pytest.raises(ckpt_storage.PhaseTimeoutError) as caught:
            call("s3://bucket/run", timeout=timeout, **options)
        server.faults([])
    assert (caught.value.phase, caught.value.timeout_s) == (phase, 1.0)
