"""Parts that take no memory are made, and hashed, while the storage has yet to answer."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from crc32c import crc32c
from remote_tools import options_of
from test_filewriter import BLOCK_BYTES, IN_PLACE, PART_BYTES, writer
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from ckpt_storage.deadline import Deadline
from ckpt_storage.errors import StorageError
from ckpt_storage.filewriter import ShardFileWriter
from ckpt_storage.options import TransferOptions
from ckpt_storage.pacing import BUDGET
from ckpt_storage.shards import Claim, ShardJob, write_shards
from ckpt_storage.store import open_store
from ckpt_storage.testing.s3server import FaultRule, S3Server

MOST = 4
"""Parts under way at a time."""

OPTIONS = TransferOptions(
    part_bytes=PART_BYTES,
    thread_count=MOST,
    block_bytes=BLOCK_BYTES,
    memory_limit_bytes=100 * PART_BYTES,
)


@dataclass
class Queue:
    """A storage that takes parts at once and answers for them when `answer` is called."""

    parts: list[bytes] = field(default_factory=list)
    waiting: list[Callable[[], None]] = field(default_factory=list)
    most_waiting: int = 0
    answers_at_once: bool = False
    is_broken: bool = False
    ended: list[str] = field(default_factory=list)
    capabilities: Any = IN_PLACE
    url: str = "far://"
    pause_s: float = 60.0

    def start_upload(self, path: str, *, part_bytes: int) -> Queue:
        """Begin."""
        assert (path, part_bytes) == ("x", PART_BYTES)
        return self

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Never be called."""
        raise AssertionError((number, offset, buffers, last))

    def queue_part(
        self,
        number: int,
        offset: int,
        buffers: Sequence[memoryview],
        *,
        last: bool,
        freed: Callable[[], None],
    ) -> bool:
        """Take a part, which must be the next one."""
        assert number == len(self.parts)
        assert offset == sum(map(len, self.parts))
        assert not self.ended
        self.parts.append(b"".join(buffers))
        if last:
            self.ended.append("last")
        self.waiting.append(freed)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        if self.answers_at_once:
            self.answer()
        return True

    def answer(self) -> None:
        """Say that all parts so far are there."""
        while self.waiting:
            self.waiting.pop(0)()

    def check(self) -> None:
        """Fail if told to."""
        if self.is_broken:
            raise StorageError("It broke.", kind="other")

    def complete(self, total_bytes: int) -> None:
        """Finish."""
        assert total_bytes == sum(map(len, self.parts))

    def abort(self) -> None:
        """Discard."""
        self.ended.append("abort")


def content_of(part_count: int) -> memoryview:
    """Return so many parts, no two of them alike."""
    return memoryview(b"".join(bytes([number]) * PART_BYTES for number in range(part_count)))


def test_parts_are_made_while_no_answer_has_come() -> None:
    """All of a payload is hashed although four parts at a time may be sent; then they are sent."""
    store, content = Queue(), content_of(20)
    file = writer(store, OPTIONS)
    BUDGET.reset()
    # Who waited for an answer here would wait until the deadline.
    file.payload([content], lent=True)
    assert len(store.parts) == MOST
    assert file.block_crcs.tolist() == [
        crc32c(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), BLOCK_BYTES)
    ]
    store.answers_at_once = True
    store.answer()
    length, crc = file.finish()
    assert (length, crc) == (len(content), crc32c(content))
    assert b"".join(store.parts) == content
    assert store.most_waiting == MOST
    assert (BUDGET.peak_bytes, BUDGET.held_bytes) == (0, 0)


def test_a_part_that_takes_memory_goes_behind_those_that_wait() -> None:
    """It is not made ahead, and the order of parts stays."""
    store, lent, copied = Queue(), content_of(10), content_of(3)
    file = writer(store, OPTIONS)
    BUDGET.reset()
    file.payload([lent], lent=True)
    assert len(store.parts) == MOST
    made = threading.Event()

    def go_on() -> None:
        file.payload([copied])
        made.set()

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    assert not made.wait(0.3)
    store.answers_at_once = True
    store.answer()
    assert made.wait(20)
    file.finish()
    assert b"".join(store.parts) == bytes(lent) + bytes(copied)
    assert store.most_waiting <= MOST
    assert BUDGET.held_bytes == 0


def test_what_waits_is_dropped_with_an_upload_that_broke() -> None:
    """Who waits for its turn hears why there is none, and nothing keeps the bytes."""
    store, content = Queue(), content_of(20)
    file = writer(store, OPTIONS)
    BUDGET.reset()
    file.payload([content], lent=True)
    store.is_broken = True
    store.answer()
    with pytest.raises(StorageError, match="It broke"):
        file.hand_over()
    file.abort()
    assert store.ended == ["abort"]
    assert len(store.parts) == MOST
    assert BUDGET.held_bytes == 0
    assert not file._sender._ahead  # noqa: SLF001  # tells nobody else


def of_parts(part_bytes: int, *, thread_count: int, limit_parts: int) -> TransferOptions:
    """Return options for parts of one size."""
    return dataclasses.replace(
        OPTIONS,
        part_bytes=part_bytes,
        thread_count=thread_count,
        memory_limit_bytes=limit_parts * part_bytes,
    )


class Done:
    """A claim that has ended."""

    def check(self) -> None:
        """Raise nothing."""

    def wait(self) -> None:
        """Return."""


def write(
    server: S3Server,
    planner: DefaultSavePlanner,
    state: dict[str, Any],
    options: TransferOptions,
    claim: Claim,
) -> None:
    """Write a state by obstore, as its only rank does."""
    planner.set_up_planner(state, is_coordinator=True)
    plan, _ = planner.create_global_plan([planner.create_local_plan()])
    store = open_store("s3://bkt/run", storage_options=options_of(server), engine="obstore")
    write_shards(
        store,
        planner.finish_plan(plan[0]),
        planner,
        ShardJob(
            save_id="20260101T000000Z-0123456789abcdef",
            rank=0,
            world_size=1,
            options=options,
            deadline=Deadline("write", 60),
            progress=None,
            with_bar=False,
            claim=claim,
        ),
        record=lambda _: [],
    )
    store.close()


def test_no_whole_part_waits_for_the_claim() -> None:
    """Those that were made ahead are with the storage when its coordinator is waited for."""
    part_bytes = 5 << 20
    tensor = torch.arange(10 * part_bytes, dtype=torch.uint8)
    seen: list[int] = []
    with S3Server() as server:
        server.create_bucket("bkt")
        server.faults([FaultRule(op="part", action="delay", delay_s=0.2, times=0)])

        class Late:
            """A claim that is waited for."""

            def check(self) -> None:
                """Raise nothing."""

            def wait(self) -> None:
                """Note how many parts have come, once they may have."""
                server.wait_for(lambda found: sum(one.op == "part" for one in found) >= 10)
                seen.append(server.stats().count["part"])

        options = of_parts(part_bytes, thread_count=2, limit_parts=8)
        write(server, DefaultSavePlanner(), {"t": tensor}, options, Late())
    assert seen == [10]


def test_what_a_planner_makes_is_not_made_ahead() -> None:
    """Copies of a planner's own take memory beyond the state, so they keep to the limit."""
    part_bytes, limit_parts = 5 << 20, 6
    state = {f"t{n}": torch.full((part_bytes,), n, dtype=torch.uint8) for n in range(14)}
    alive: list[int] = []
    most = 0

    class Copying(DefaultSavePlanner):
        """Gives copies."""

        def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's
            """Count those that are there."""
            nonlocal most
            array = super().transform_object(write_item, object).numpy().copy()
            alive.append(1)
            most = max(most, len(alive))
            weakref.finalize(array, alive.pop)
            return torch.from_numpy(array)

    with S3Server() as server:
        server.create_bucket("bkt")
        server.faults([FaultRule(op="part", action="delay", delay_s=0.2, times=0)])
        options = of_parts(part_bytes, thread_count=32, limit_parts=limit_parts)
        write(server, Copying(), state, options, Done())
    # One more is being made while those before it are on their way, and one is cut by a part.
    assert most <= limit_parts + 2


def test_local_writes_have_nothing_to_hand_over(tmp_path: Any) -> None:
    """There the call does nothing."""
    store = open_store(tmp_path)
    store.prepare(["saves"])
    file = ShardFileWriter(
        store, "saves/x", options=OPTIONS, planned_bytes=3, deadline=Deadline("write", 20)
    )
    file.payload([memoryview(b"abc")])
    file.hand_over()
    file.finish()
    assert (tmp_path / "saves/x").read_bytes() == b"abc"
