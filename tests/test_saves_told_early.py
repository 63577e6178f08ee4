"""Saves whose ranks tell what they write before it is durable: what waits for what, what fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from remote_tools import options_of

import ckpt_storage
from ckpt_storage.board import LocalBoard
from ckpt_storage.coordination import Coordinator
from ckpt_storage.errors import CheckpointError
from ckpt_storage.info import CheckpointInfo
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.saving import SaveOptions, run_save
from ckpt_storage.testing.s3server import FaultRule, S3Server

MIB = 1 << 20
END_S = 60.0
URL = "s3://bkt/run"


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server with a bucket."""
    with S3Server() as running:
        running.create_bucket("bkt")
        yield running


def state_of(rank: int, value: int) -> dict[str, Any]:
    """Return a rank's state: some parts of an upload."""
    return {f"of-{rank}": torch.full((11 * MIB,), value, dtype=torch.uint8)}


def save(server: S3Server, value: int, *, overwrite: bool = True) -> list[Any]:
    """Save by two ranks, a thread each; return what each returned or raised."""
    board = LocalBoard()
    groups = [Coordinator(board, rank=rank, world_size=2, look_s=0.005) for rank in range(2)]
    ended: list[Any] = [None, None]

    def run(rank: int) -> None:
        def options() -> SaveOptions:
            return SaveOptions(
                storage_options=options_of(server),
                overwrite=overwrite,
                part_bytes=5 * MIB,
                timeouts=Timeouts(plan=30, write=30, commit=30, silence=20),
                retry=RetryPolicy(attempt_count=2, first_delay_s=0.01),
            )

        try:
            ended[rank] = run_save(groups[rank], lambda: state_of(rank, value), URL, options)
        except CheckpointError as error:
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END_S)
        assert not thread.is_alive()
    return ended


def loaded(server: S3Server) -> list[int]:
    """Return a value of each rank's tensor as it is on the storage."""
    found = {f"of-{rank}": torch.zeros(11 * MIB, dtype=torch.uint8) for rank in range(2)}
    ckpt_storage.load(found, URL, storage_options=options_of(server))
    for tensor in found.values():
        assert bool((tensor == tensor[0]).all())
    return [int(tensor[0]) for tensor in found.values()]


def asked(server: S3Server) -> list[tuple[str, str]]:
    """Return what was asked of the server, in order: operation and file."""
    return [(request.op, request.key.rpartition("/")[2]) for request in server.requests]


@pytest.mark.parametrize("late", ["__0_0", "__1_0"])
def test_documents_do_not_wait_for_the_last_part_and_the_slot_does(
    server: S3Server, late: str
) -> None:
    """While one rank's upload ends late, the other's and the save's documents are written."""
    save(server, 1)
    server.reset_counters()
    late_s = 4.0  # more than all else takes on a busy machine
    server.faults(
        [FaultRule(op="part", key=late, action="delay", delay_s=late_s, after=2, times=0)]
    )
    assert all(isinstance(one, CheckpointInfo) for one in save(server, 2))
    files = [name for op, name in asked(server) if op in {"put", "complete"}]
    assert files.index("manifest.json") < files.index(f"{late}.distcp")
    assert files.index(f"{late}.distcp") < files.index("00000002.json")
    assert loaded(server) == [2, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_after_it_was_told_is_not_committed(server: S3Server, rank: int) -> None:
    """Both ranks raise and name the rank, no slot is taken, and the save before stays."""
    save(server, 1)
    server.reset_counters()
    rule = FaultRule(op="complete", key=f"__{rank}_0", action="status", status=403, times=0)
    server.faults([rule])
    ended = save(server, 2)
    assert all(isinstance(error, CheckpointError) for error in ended), ended
    assert {error.rank for error in ended} == {rank}
    assert ("put", "00000002.json") not in asked(server)
    server.faults([])
    assert loaded(server) == [1, 1]
    assert all(isinstance(one, CheckpointInfo) for one in save(server, 3))
    assert loaded(server) == [3, 3]
    assert server.stats().open_uploads == 0


def test_a_rank_that_tells_and_then_stays_away_is_waited_for(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all ranks told is not enough: the slot waits for the word that it is durable."""
    held = threading.Event()
    original = ckpt_storage.saving._Save._send  # noqa: SLF001  # a rank's last word

    def late(self: Any, written: bytes) -> None:
        before = asked(server)
        held.wait(2)
        assert ("put", "00000001.json") not in asked(server), before
        original(self, written)

    monkeypatch.setattr(ckpt_storage.saving._Save, "_send", late)  # noqa: SLF001  # as above
    assert all(isinstance(one, CheckpointInfo) for one in save(server, 1))
    assert loaded(server) == [1, 1]
