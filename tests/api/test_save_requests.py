"""What a save asks of an object storage: how many requests, how many at a time, how much memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commit_tools import IN_TURN, take_in_turn
from remote_tools import ops, options_of
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_storage import CheckpointStorageWriter, RetryPolicy, verify
from ckpt_storage.testing.s3_server import FaultRule, S3Server
from ckpt_storage.transfer import writing
from ckpt_storage.transfer.pacing import Pacer

MIB = 1 << 20
PART_BYTES = 5 * MIB


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server with a bucket."""
    with S3Server() as running:
        running.create_bucket("bkt")
        yield running


def save(
    server: S3Server, state: dict[str, Any], name: str = "run", **options: Any
) -> Counter[str]:
    """Save in this process alone; return how often each operation was asked for."""
    server.reset_counters()
    saving = CheckpointStorageWriter(
        f"s3://bkt/{name}",
        storage_options=options_of(server),
        part_bytes=PART_BYTES,
        **{"retry": RetryPolicy(first_delay_s=0.0, max_delay_s=0.01), **options},
    )
    dcp.save(state, storage_writer=saving, no_dist=True)
    return Counter(request.op for request in server.requests)


def is_sound(server: S3Server, name: str = "run") -> bool:
    """Return whether every byte of a checkpoint is as it was saved."""
    return verify(f"s3://bkt/{name}", storage_options=options_of(server)).ok


def test_a_save_costs_its_parts_and_a_fixed_number_of_requests(server: S3Server) -> None:
    """Neither more tensors nor more bytes cost anything but parts."""
    save(server, {"t": torch.ones(3)}, "before")  # finds out what the storage can do
    few = save(server, {f"t{i}": torch.ones(3) for i in range(10)}, "few")
    many = save(server, {f"t{i}": torch.ones(3) for i in range(2000)}, "many")
    large = save(server, {"w": torch.ones(4 * PART_BYTES, dtype=torch.uint8)}, "large")
    of_files = [request.op for request in server.requests if "distcp" in request.key]
    assert Counter(of_files) == {"create_upload": 1, "part": 5, "complete": 1}
    assert few == many
    assert large - Counter(of_files) == many - Counter(["put"])
    assert few.keys() <= {"put", "get", "head", "list"}
    assert few["list"] == 1
    assert few.total() <= 16
    assert all(is_sound(server, name) for name in ("few", "many", "large"))


def test_a_storage_that_asks_for_less_gets_fewer_requests_at_a_time(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SlowDown lowers the number of parts under way, and the save succeeds."""
    cuts: list[tuple[int, int]] = []

    class Noting(Pacer):
        """Notes the limits before and after it heard of one."""

        def slowed_down(self) -> None:
            """Note them."""
            before = super().limit()
            super().slowed_down()
            cuts.append((before, super().limit()))

    monkeypatch.setattr(writing, "Pacer", Noting)
    server.faults([FaultRule(op="part", action="status", times=3)])
    state = {"w": torch.ones(10 * PART_BYTES, dtype=torch.uint8)}
    save(server, state, thread_count=8, memory_limit_bytes=256 * MIB)
    assert len(cuts) == 3
    assert any(after <= before // 2 for before, after in cuts)
    assert ops(server)["part"] == 11 + 3
    assert is_sound(server)


def test_an_attempt_that_cannot_be_claimed_leaves_nothing(server: S3Server) -> None:
    """The save fails with the storage's own error, and neither a file nor an upload is left."""
    save(server, {"t": torch.ones(3)}, "before")
    before = server.dump()
    server.faults([FaultRule(op="put", key="begun", action="status", status=403, times=0)])
    with pytest.raises(CheckpointException, match=r"begun\.json"):
        save(server, {"w": torch.ones(4 * PART_BYTES, dtype=torch.uint8)})
    assert server.dump() == before
    assert server.open_upload_count == 0


def test_documents_of_the_commit_and_what_follows_go_side_by_side(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group can be made in either order, and so no request of it waits for another."""
    groups = {}
    for order in IN_TURN:
        with monkeypatch.context() as patch:
            take_in_turn(patch, order)
            save(server, {"t": torch.ones(3)}, order.replace(" ", "-"))
        groups[order] = [
            request.key.rpartition("/")[2]
            for request in server.requests
            if "probe" not in request.key
        ]
    slots, shown = ["00000001.json", ""], [".metadata"]
    look = [*slots, *shown]
    files = ["__0_0.distcp", "rank-00000.json"]
    documents = ["stock.metadata", "manifest.json"]
    slot, shown = ["00000001.json"], [".metadata", ".metadata"]
    after = ["00000002.json"]
    begun = ["begun.json"]
    assert groups[IN_TURN[0]] == [*look, *begun, *files, *documents, *slot, *shown, *after]
    turned = [shown[:1], slots, begun, files, documents[::-1], slot, shown, after]
    assert groups[IN_TURN[1]] == [name for group in turned for name in group]
