"""The ranks' own gloo group: made on demand, made anew, bounded, whoever is outside of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.peers import Peers
from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import Timeouts
from ckpt_storage.testing.ranks import RankPool, run_ranks

TIMEOUTS = Timeouts(plan=20, load=20, silence=3)
SIZE = 3 << 20


def exchanged(peers: Peers, coordinator: RankGroup) -> bytes:
    """Send this rank's bytes to the next rank and return what the one before sent."""
    rank, count = coordinator.rank, coordinator.world_size
    into = bytearray(SIZE)
    with coordinator.operation("the test", timeouts=TIMEOUTS) as operation:
        operation.meet({})
        deadline = operation.phase("load")
        peers.join(operation, deadline)
        outgoing = memoryview(bytearray([rank]) * SIZE)
        before, after = (rank - 1) % count, (rank + 1) % count
        if rank % 2:
            peers.receive(before, memoryview(into), 7, deadline)
            peers.send(after, outgoing, 7, deadline)
        else:
            peers.send(after, outgoing, 7, deadline)
            peers.receive(before, memoryview(into), 7, deadline)
        operation.all_gather(b"")
    return bytes(into)


def fail(peers: Peers, coordinator: RankGroup) -> None:
    """Leave ranks waiting for a message of rank 1, which raises instead."""
    with coordinator.operation("the test", timeouts=TIMEOUTS) as operation:
        operation.meet({})
        deadline = operation.phase("load")
        peers.join(operation, deadline)
        if coordinator.rank == 1:
            raise CheckpointError("rank 1 gives up")
        peers.receive(1, memoryview(bytearray(10)), 3, deadline)


def fail_then_ring(rank: int) -> None:
    """Exchange twice over one group, fail, and exchange as if nothing had been."""
    coordinator = RankGroup.of(None)
    peers = Peers(coordinator)
    expected = bytes([(rank - 1) % coordinator.world_size]) * SIZE
    assert exchanged(peers, coordinator) == expected
    key = peers.key
    assert exchanged(peers, coordinator) == expected
    assert peers.key == key
    begin_s = time.monotonic()
    with pytest.raises(CheckpointError, match="rank 1 gives up"):
        fail(peers, coordinator)
    assert time.monotonic() - begin_s < TIMEOUTS.load
    assert exchanged(peers, coordinator) == expected


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_reach_the_rank_they_are_for_also_after_a_failure(
    ranks: RankPool, world_size: int
) -> None:
    """The group is kept; a rank that waits for a message hears of a failure, and the next works."""
    ranks.run(fail_then_ring, world_size=world_size)


def lose_a_peer(rank: int, how: signal.Signals) -> str:
    """Lose rank 1 while each other rank waits for a message; return what this one raised."""
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    coordinator = RankGroup.of(None)
    peers = Peers(coordinator)
    exchanged(peers, coordinator)
    try:
        with coordinator.operation("the test", timeouts=TIMEOUTS) as operation:
            operation.meet({})
            deadline = operation.phase("load")
            peers.join(operation, deadline)
            if rank == 1:
                os.kill(os.getpid(), how)
            # Of two ranks the other waits for the lost one, of three they wait for each other.
            peers.receive(len(pids) - 1 - rank, memoryview(bytearray(10)), 3, deadline)
    except CheckpointError as error:
        # Else a stopped rank would be waited for until the time for all is up.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[1], signal.SIGKILL)
        return f"{error.rank} {error}"
    return "nothing"


@pytest.mark.parametrize(("world_size", "how"), [(2, signal.SIGSTOP), (3, signal.SIGKILL)])
def test_a_lost_peer_is_named_however_it_was_noticed(world_size: int, how: signal.Signals) -> None:
    """Silence takes its time to be noticed; until then nobody raises that the group broke."""
    outcomes: list[Any] = run_ranks(world_size, lose_a_peer, how, timeout_s=60)
    for rank in {0, world_size - 1} - {1}:
        assert outcomes[rank].value is not None, outcomes[rank].failure
        assert outcomes[rank].value.startswith("1 ")
