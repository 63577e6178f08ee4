"""Shard files as they are written, and the memory and requests that all transfers share."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import threading
import uuid
from array import array
from functools import partial
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import HANG_S
from local_stores import Remote, until

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError, StorageError
from ckpt_storage.options import TransferOptions
from ckpt_storage.saves.shardfile import Item, ShardFileWriter
from ckpt_storage.store import Location
from ckpt_storage.store.backend import Backend, Buffers, Part
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import FaultBackend, Rule
from ckpt_storage.transfer.budget import BUDGET, Budget
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.writing import ObjectWriter

BLOCK_BYTES = 1024
PART_BYTES = 4096
OPTIONS = TransferOptions(part_bytes=PART_BYTES, block_bytes=BLOCK_BYTES, thread_count=1)


def remote() -> Remote:
    return Remote(Location.of(f"memory://{uuid.uuid4().hex}"))


def writer(backend: Backend, options: TransferOptions = OPTIONS) -> ShardFileWriter:
    sent = ObjectWriter(
        Store(backend, url="far://"),
        "x",
        options=options,
        planned_bytes=12_345,
        deadline=Deadline("write", 30),
        on_bytes=lambda _: None,
    )
    return ShardFileWriter(sent, options.block_bytes)


def test_items_leave_nothing_for_the_garbage_collector() -> None:
    """What is kept of an item is numbers, which are not followed."""
    file, count = writer(remote()), 1_000
    for number in range(count):
        data = number.to_bytes(8, "little")
        file.append(
            Item(
                fqn=f"weight.{number}",
                dtype="int64",
                offsets=(0,),
                sizes=(1,),
                payload_bytes=len(data),
                views=lambda _, data=data: (data,),  # type: ignore[misc]
            )
        )
        if number == 0:
            gc.collect()
            before = len(gc.get_objects())
    gc.collect()
    assert len(gc.get_objects()) - before < count / 2
    file.abort()


def test_a_storage_that_takes_parts_in_order_gets_one_at_a_time() -> None:
    """Whatever the number of threads, no part is sent while another part is in flight."""
    both, numbers, in_flight = threading.Event(), list[int](), list[int]()

    class InOrder(Remote):
        capabilities = dataclasses.replace(Remote.capabilities, parallel_parts=False)

        def put_part(self, path: str, token: str, part: Part, *rest: Any, **options: Any) -> str:
            in_flight.append(part.number)
            if len(in_flight) > 1:
                both.set()
            # Long enough for a second thread to come, if there is one.
            both.wait(0.1)
            numbers.append(part.number)
            receipt = super().put_part(path, token, part, *rest, **options)
            in_flight.remove(part.number)
            return receipt

    options = dataclasses.replace(OPTIONS, thread_count=4)
    backend = InOrder(Location.of(f"memory://{uuid.uuid4().hex}"))
    sent = ObjectWriter(
        Store(backend, url="far://"),
        "x",
        options=options,
        planned_bytes=3 * PART_BYTES,
        deadline=Deadline("write", 30),
        on_bytes=lambda _: None,
    )
    for number in range(3):
        sent.write(memoryview(bytes([number]) * PART_BYTES))
    sent.complete()
    assert numbers == [0, 1, 2]
    assert not both.is_set()


_PATTERN = bytes(i * 7 % 251 for i in range(251)) * 200


def pattern(seed: int, length: int) -> bytes:
    """Return bytes that tell where they belong."""
    start = seed * 31 % 251
    return _PATTERN[start : start + length]


class Checking(Remote):
    """Asserts that each part comes with the checksum of its bytes."""

    def put_part(self, path: str, token: str, part: Part, data: Buffers, *, last: bool) -> str:
        assert part.crc32c == crc32c(b"".join(data))
        return super().put_part(path, token, part, data, last=last)


LENGTHS = st.sampled_from([0, 1, 63, 64, 100, 1023, 1024, 1025, 4095, 4096, 4097, 9000, 20_000])
ITEMS = st.tuples(LENGTHS, LENGTHS, LENGTHS, st.booleans())


@settings(max_examples=60, deadline=None)
@given(items=st.lists(ITEMS, max_size=12), tail=LENGTHS)
def test_a_file_is_its_frames_and_payloads_with_the_checksums_of_each(
    items: list[tuple[int, int, int, bool]], tail: int
) -> None:
    """Whatever the lengths, and whether a small payload is given as such or as views."""
    store = Checking(Location.of(f"memory://{uuid.uuid4().hex}"))
    file = writer(store)
    content, frames, payloads = b"", [], []
    for n, (before, head, length, as_small) in enumerate(items):
        frame, payload = pattern(n, before + head), pattern(n + 100, length)
        file.frame(frame[:before])
        file.frame(frame[before:])
        if as_small and length <= file.small_bytes:
            file.small_payload(payload)
        else:
            cut = length // 3
            file.payload([memoryview(payload)[:cut], memoryview(payload)[cut:]])
        content += frame + payload
        assert file.position == len(content)
        frames.append(frame)
        payloads.append(payload)
    frames.append(pattern(99, tail))
    file.frame(frames[-1])
    content += frames[-1]

    whole = file.complete("x")
    assert (whole.size_bytes, whole.crc32c) == (len(content), crc32c(content))
    assert file.frame_crcs == array("I", map(crc32c, frames))
    blocks = [p[at : at + BLOCK_BYTES] for p in payloads for at in range(0, len(p), BLOCK_BYTES)]
    assert file.block_crcs == array("I", map(crc32c, blocks))

    assert store.get("x", max_bytes=None).data == content
    assert BUDGET.held_bytes == 0


@pytest.mark.parametrize("actual_bytes", [99, 101, 20_000])
@pytest.mark.parametrize("payload_bytes", [100, 10_000])
def test_an_item_of_another_length_is_an_error(payload_bytes: int, actual_bytes: int) -> None:
    """A payload with fewer or more bytes than its item declares ends the file."""
    data = pattern(1, actual_bytes)
    item = Item(
        fqn="w",
        dtype=None,
        offsets=(),
        sizes=(),
        payload_bytes=payload_bytes,
        views=lambda _: [data],
    )
    file = writer(remote())
    with pytest.raises(CheckpointError, match=f"{actual_bytes} bytes, not {payload_bytes}"):
        file.append(item)
    file.abort()


def test_parts_in_flight_keep_within_the_memory_limit() -> None:
    """A part on its way to a server counts twice; the one being filled counts too."""
    store = FaultBackend(remote(), [Rule(action="hang", operation="put_part", hit_count=None)])
    limit = 6 * PART_BYTES
    options = TransferOptions(
        part_bytes=PART_BYTES, thread_count=8, memory_limit_bytes=limit, block_bytes=BLOCK_BYTES
    )

    def write() -> None:
        file = writer(store, options)
        file.payload([memoryview(bytes(20 * PART_BYTES))])
        file.complete("x")

    BUDGET.reset()
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    for _ in range(3):
        assert store.script.wait_hung(HANG_S)
    assert not store.script.wait_hung(0.1)
    store.script.release()
    thread.join(20)
    assert not thread.is_alive()
    assert BUDGET.peak_bytes == limit
    assert BUDGET.held_bytes == 0


@pytest.mark.parametrize("thread_count", [1, 4])
def test_a_part_that_fails_ends_the_file_and_frees_the_memory(thread_count: int) -> None:
    """The storage's own error reaches the caller; what was queued is not sent any more."""
    refusal = Rule(action="error", operation="put_part", skip_count=2, kind="permission")
    store = FaultBackend(remote(), [dataclasses.replace(refusal, retryable=False)])
    options = TransferOptions(
        part_bytes=PART_BYTES, thread_count=thread_count, block_bytes=BLOCK_BYTES
    )
    file = writer(store, options)
    with pytest.raises(StorageError, match="Fault injected by a rule"):
        file.payload([memoryview(bytes(PART_BYTES))] * 200)
    file.abort()
    assert list(store.inner.list("", recursive=True)) == []
    assert len(store.script.calls) < 50
    assert BUDGET.held_bytes == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("write x")]


FAR = Deadline("write", 86_400)


def test_claims_are_served_in_their_order() -> None:
    """What came later and would fit waits behind a large one; beyond the limit one goes alone.

    It waits until nothing else is held, or until its deadline, and then claims nothing.
    """
    budget = Budget()
    budget.acquire(60, limit_bytes=100, deadline=FAR)
    with pytest.raises(PhaseTimeoutError, match="memory"):
        budget.acquire(150, limit_bytes=100, deadline=Deadline("write", 0.05))
    for count, size in enumerate((90, 10, 150), 1):
        claim = partial(budget.acquire, size, limit_bytes=100, deadline=FAR)
        threading.Thread(target=claim, daemon=True).start()
        until(lambda: len(budget._queue) == count)  # noqa: B023, SLF001  # what no caller needs to know
    for released, held in ((0, 60), (60, 100), (10, 90), (90, 150)):
        budget.release(released)
        until(lambda: budget.held_bytes == held)  # noqa: B023  # called at once


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads
def test_a_forked_child_holds_nothing() -> None:
    """The process's budget starts anew in a child, even if a thread of the parent had its lock."""

    def child(found: Any) -> None:
        BUDGET.acquire(1, limit_bytes=1, deadline=Deadline("write", 5))
        found.send(BUDGET.held_bytes)

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    BUDGET.acquire(7, limit_bytes=1 << 40, deadline=FAR)
    try:
        with BUDGET._changed:  # noqa: SLF001  # as a thread in the middle of a claim has it
            process = context.Process(target=child, args=(theirs,))
            process.start()
        assert ours.poll(20)
        assert ours.recv() == 1
        process.join(20)
    finally:
        BUDGET.release(7)
    assert process.exitcode == 0


def test_a_slow_down_halves_the_number_once_for_all_that_were_under_way() -> None:
    """Sixteen requests that are refused together are one word; one a round more follows."""
    pacer = Pacer(16)
    # Ranks begin together, so these may be the first answers; some of them may be good.
    for _ in range(8):
        pacer.slowed_down()
        pacer.succeeded()
    assert pacer.limit() == 8
    for rounds in range(8, 16):
        for _ in range(rounds):
            pacer.succeeded()
    for count, limit in ((16, 8), (8, 4), (4, 2), (2, 1), (1, 1)):
        for _ in range(count):
            pacer.slowed_down()
            assert pacer.limit() == limit
    for limit in range(1, 18):
        assert pacer.limit() == min(limit, 16)
        for _ in range(limit):
            pacer.succeeded()
