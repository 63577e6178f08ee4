"""Staging memory is grown, reused, given back and pinned as the saver needs it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dcp_cases import raw_bytes, seeded
from descriptors import open_files

from ckpt_storage.background import arena as arenas_module
from ckpt_storage.background import staging
from ckpt_storage.background.arena import Arenas, Kind
from ckpt_storage.background.staging import StagingJob
from ckpt_storage.errors import CheckpointError

MIB = 1024 * 1024

linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
KINDS = pytest.mark.parametrize("kind", ["private", "shared"])


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM, shared memory included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class FakeRuntime:
    """What is called of the CUDA runtime; memory that is unlocked after it is unmapped faults."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802, ARG002
        """Note the call, and answer as told."""
        self.calls.append(("register", address))
        assert size_bytes > 0
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Read the memory, and note the call."""
        assert len(ctypes.string_at(address, 1)) == 1
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    """A machine that seems to have CUDA."""
    runtime = FakeRuntime()
    monkeypatch.setattr(arenas_module, "cuda_runtime", lambda: runtime)
    return runtime  # type: ignore[return-value]  # no teardown


@KINDS
def test_what_was_staged_outlives_memory_that_is_not_given_back(kind: Kind) -> None:
    """Nobody writes into memory that somebody may still read; it goes with its last reader."""
    with contextlib.closing(Arenas(kind)) as arenas:
        stuck = StagingJob({"x": seeded(1, 1000)}, arenas).run()
        arena = weakref.ref(stuck.arena)
        stuck.arena.close()
        StagingJob({"x": seeded(2, 1000)}, arenas).run()
        assert bytes(stuck.arena.memory[:4000]) == raw_bytes(seeded(1, 1000))
        del stuck
        gc.collect()
        assert arena() is None


def test_memory_that_cannot_be_had_is_an_error() -> None:
    """A state larger than the address space is refused with the phase; others can be staged."""
    with contextlib.closing(Arenas()) as arenas:
        with pytest.raises(CheckpointError, match="host memory") as caught:
            arenas.take(1 << 60)
        assert caught.value.phase == "stage"
        assert arenas.take(1).size_bytes > 0


@linux
@KINDS
def test_twenty_stages_take_no_more_memory_than_two(kind: Kind) -> None:
    """Resident memory and open files stand still from the second stage on."""
    state = {str(index): torch.ones(MIB) for index in range(8)}
    with contextlib.closing(Arenas(kind)) as arenas:
        for step in range(22):
            if step == 2:
                before, files = resident_bytes(), open_files()
            arenas.give_back(StagingJob(state, arenas).run().arena)
        assert resident_bytes() - before < 8 * MIB
        assert open_files() <= files
    gc.collect()
    assert before - resident_bytes() > 16 * MIB


@KINDS
def test_pages_are_locked_once_and_unlocked_before_they_go(kind: Kind, cuda: FakeRuntime) -> None:
    """An arena is registered at the first need, and unregistered when its last view dies."""
    with contextlib.closing(Arenas(kind)) as arenas:
        arena = arenas.take(MIB)
        assert cuda.calls == []
        assert arena.pin()
        assert arena.pin()
        address = arena.memory.ctypes.data
        assert cuda.calls == [("register", address)]
        view = torch.from_numpy(arena.memory[64:128])
        arenas.give_back(arena)
        del arena
        assert arenas.take(5 * MIB).size_bytes > 5 * MIB
        assert cuda.calls == [("register", address)]
        del view
        gc.collect()
        assert cuda.calls == [("register", address), ("unregister", address)]


def test_copies_from_a_gpu_are_enqueued_and_awaited_once(
    cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stream the memory is locked, no copy blocks, and the stream is awaited at the end."""
    events: list[object] = []
    copy_many = torch._foreach_copy_  # a documented name of torch's

    class Stream:
        def synchronize(self) -> None:
            events.append("synchronize")

    def noted(targets: object, sources: object, non_blocking: object) -> None:
        events.append(non_blocking)
        copy_many(targets, sources, non_blocking)  # type: ignore[arg-type]

    monkeypatch.setattr(staging, "_fork_streams", lambda _: {torch.device("cpu"): Stream()})
    monkeypatch.setattr(staging, "BATCH_BYTES", 3000)
    monkeypatch.setattr(staging, "_SMALL_BYTES", 0)
    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    state = {str(seed): seeded(seed, 500) for seed in range(5)}
    with contextlib.closing(Arenas("shared")) as arenas:
        for _ in range(2):
            staged = StagingJob(state, arenas).run()
            for start, tensor in zip(staged.places.starts, state.values(), strict=True):
                found = bytes(staged.arena.memory[start : start + tensor.nbytes])
                assert found == raw_bytes(tensor)
            arenas.give_back(staged.arena)
            assert events == [True, True, True, "synchronize"]
            events.clear()
        assert [name for name, _ in cuda.calls] == ["register"]
