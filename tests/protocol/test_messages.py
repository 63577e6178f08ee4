"""How many requests a save costs each rank, counted against a real TCPStore server."""

from __future__ import annotations

import queue
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from limits import HANG_S

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from messages import Plan, SaveCost, Simulation, Threads, serve, simulated

from ckpt_storage.coordination.keyvalue import COORDINATOR, KeyListener, KeyValues, StoreClient

RANK_COUNT = 8

OF_TWO_ROUNDS = Counter(compare_set=4, add=1, wait=2, delete_key=2)
"""Payloads are sent; the end is counted; releases are waited for and read."""

OF_OWN_ANSWER = Counter(compare_set=1)
OF_LAST_ANSWER = Counter(delete_key=1)


def costs_of(*plans: Plan, threads: Threads) -> list[SaveCost]:
    """Return what each of several saves cost, the first of which begins the session."""
    server = serve()
    with simulated(threads):
        simulation = Simulation(range(RANK_COUNT), RANK_COUNT, server.port, 1_000)
        costs = []
        for step, plan in enumerate(plans):
            simulation.begin(step, plan)
            costs.append(simulation.end())
        simulation.close()
    assert [cost.errors for cost in costs] == [[]] * len(plans)
    return costs


def requests_of_members(cost: SaveCost) -> list[Counter[str]]:
    """Return the requests of each member, without heartbeats."""
    members = [counts for rank, counts in cost.requests.items() if rank != COORDINATOR]
    return [Counter({**counts, "heartbeat": 0}) for counts in members]


@pytest.mark.parametrize("threads", ["all", "one"])
def test_a_member_sends_nine_requests_a_save_and_two_more_for_new_plans(
    threads: Threads,
) -> None:
    """That holds with all threads of a rank, and with the one that large simulations have."""
    _, new, first, cached = costs_of("new", "new", "cached", "cached", threads=threads)
    for requests in requests_of_members(new):
        assert requests == OF_TWO_ROUNDS + OF_OWN_ANSWER + OF_LAST_ANSWER
    for requests in requests_of_members(first):
        assert requests == OF_TWO_ROUNDS + OF_LAST_ANSWER
    for requests in requests_of_members(cached):
        assert requests == OF_TWO_ROUNDS


@pytest.mark.parametrize("has_libuv", [True, False])
def test_a_rank_that_asks_for_a_key_wakes_no_rank_that_waits_for_it(*, has_libuv: bool) -> None:
    """A server with libuv wakes waiting clients at a compare-and-set of an absent key."""
    limit = timedelta(seconds=HANG_S)
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=limit, use_libuv=has_libuv)
    client = StoreClient(
        lambda: dist.TCPStore("127.0.0.1", server.port, None, timeout=limit, use_libuv=has_libuv)
    )
    keys, values = KeyValues(client, "x"), queue.SimpleQueue[bytes | None]()
    listener = KeyListener(lambda key: values.put(keys.get(key, HANG_S)), keys, "listen")
    listener.listen("release")
    for _ in range(50):
        assert keys.get_awaited("release", HANG_S) is None
        time.sleep(0.01)
    keys.set_surely("release", b"value", HANG_S)
    assert values.get(timeout=HANG_S) == b"value"
    assert values.empty()
    listener.close()
