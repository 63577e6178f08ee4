"""CUDA tensors on their way to the host: order, with stand-ins for CUDA, and bytes, with one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ckpt_storage.loads.targets import CudaMover
from ckpt_storage.saves import hostcopy
from ckpt_storage.saves.hostcopy import HostCopies, host_bytes

HERE = torch.device("cpu")

has_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class FakeCuda:
    """Streams and events that note what happens; copies on the CPU take place at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._numbers = itertools.count(1)

    def stream(self, _device: object) -> Any:
        """Return a side stream."""
        return SimpleNamespace(
            wait_stream=lambda other: self.log.append(f"wait for {other}"),
            synchronize=lambda: self.log.append("synchronize"),
        )

    def event(self) -> Any:
        """Return an event, which notes what copy was begun and waited for."""
        number = next(self._numbers)
        return SimpleNamespace(
            record=lambda _stream: self.log.append(f"begin {number}"),
            synchronize=lambda: self.log.append(f"end {number}"),
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Stand-ins for what is called of torch.cuda."""
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the producer")
    monkeypatch.setattr(hostcopy, "_pinned", torch.empty_like)
    return fake


def windows(count: int, length: int = 4) -> Iterator[torch.Tensor]:
    """Yield tensors that tell their number."""
    for number in range(count):
        yield torch.full((length,), number, dtype=torch.int32)


def test_the_next_copy_is_under_way_while_a_window_is_used(cuda: FakeCuda) -> None:
    """A window is given out only once its own copy has ended, and the next has begun by then."""
    copies = HostCopies()
    for number, view in enumerate(copies.from_device(HERE, windows(3))):
        assert view.cast("i").tolist() == [number] * 4
        cuda.log.append(f"use {number + 1}")
    assert cuda.log == [
        "wait for the producer",
        *["begin 1", "begin 2", "end 1", "use 1"],
        *["begin 3", "end 2", "use 2", "end 3", "use 3"],
        "synchronize",
    ]
    # A writer that fails in between waits for what was begun.
    views = copies.from_device(HERE, windows(5))
    next(views)
    views.close()  # type: ignore[attr-defined]  # a generator's
    assert cuda.log[-1] == "synchronize"


def test_a_part_on_its_way_keeps_its_bytes(cuda: FakeCuda) -> None:
    """However long it takes, and whatever is copied meanwhile."""
    copies = HostCopies()
    held = [view for _ in range(10) for view in copies.from_device(HERE, windows(3, 16))]
    assert [view.cast("i")[0] for view in held] == [0, 1, 2] * 10
    assert cuda.log.count("synchronize") == 10


def test_what_is_pinned_is_host_memory_whatever_torchs_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scripts that make their tensors on a GPU by default save and load through host memory."""
    empty = torch.empty
    with torch.device("meta"):
        assert empty(1).is_meta
        plain = {"pin_memory": False}
        monkeypatch.setattr(torch, "empty", lambda *of, **how: empty(*of, **(how | plain)))
        assert hostcopy._pinned(torch.ones(2, device="cpu")).is_cpu  # noqa: SLF001  # needs CUDA
        assert CudaMover.buffer(cast("Any", None), 8).is_cpu


KINDS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.arange(3_000_000, dtype=torch.float32).reshape(1000, 3000),
    lambda: torch.arange(3_000_000, dtype=torch.float32).reshape(1000, 3000).t(),
    lambda: torch.arange(5_000_000).to(torch.bfloat16)[::3],
    lambda: torch.ones(400_000, 2).cumsum(0).view(torch.complex64)[:, 0].conj(),  # noqa: PLW0108  # a new one each time
    lambda: torch.tensor(3),
    lambda: torch.empty(0, 5),
]


@has_cuda
def test_a_cuda_tensor_gives_what_its_copy_on_the_host_gives() -> None:
    """Window by window and whole, of any form."""
    for make in KINDS:
        tensor, expected = make().cuda(), host_bytes(make().contiguous())
        for window_bytes in (1 << 14, 1 << 24):
            views = HostCopies().views(tensor, window_bytes)
            assert b"".join(map(bytes, views)) == expected
        assert host_bytes(tensor) == expected


@has_cuda
def test_what_the_producer_enqueued_is_in_the_copy() -> None:
    """Kernels still under way on the producer's stream come first; later ones come after."""
    tensor = torch.zeros(8 << 20, device="cuda")
    for _ in range(50):
        tensor += 1
    views = [bytes(view) for view in HostCopies().views(tensor, 1 << 22)]
    tensor.zero_()
    expected = torch.full((8 << 20,), 50.0)
    assert b"".join(views) == host_bytes(expected)
