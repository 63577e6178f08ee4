"""A stand-in for the few CUDA calls of copies to host memory, for machines without a GPU.

It holds callers to two rules. Each call is made while the tensors' device is current, because a
call on device 0 would make a context there. And what a failed call of the runtime leaves behind is
taken before the next kernel starts, which would raise it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda:1")


class OnDevice(torch.Tensor):
    """A tensor in host memory that says it is on `DEVICE`."""

    device = property(lambda _: DEVICE)
    is_cpu = property(lambda _: False)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


class FakeCuda:
    """The calls in order, each noted by name; `failing` names those that fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.failing: set[str] = set()
        self.last_error = 0
        self.current = torch.device("cuda:0")
        self.is_idle = True
        self._copy_many = torch._foreach_copy_  # a documented name of torch's
        self._empty = torch.empty
        for name, value in {
            "is_available": lambda: True,
            "cudart": lambda: self,
            "device": self._device,
            "stream": self._stream,
            "current_stream": self._current_stream,
            "Stream": lambda _: _Stream(self),
            "Event": lambda: _Event(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "_foreach_copy_", self._foreach_copy)
        monkeypatch.setattr(torch, "empty", self._empty_of)

    def _noted(self, name: str) -> None:
        assert self.current == DEVICE, f"{name} on {self.current}"
        self.calls.append(name)
        if name in self.failing:
            raise RuntimeError(f"{name} fails, says the test")

    def _current_stream(self, _: object) -> str:
        self._noted("current_stream")
        return "the caller's"

    @contextlib.contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def _stream(self, _: object) -> Iterator[None]:
        # At its end torch makes the device current that was so at its begin.
        self._noted("stream")
        yield

    def _foreach_copy(self, targets: Any, sources: Any, non_blocking: Any) -> None:
        if sources[0].numel() and non_blocking:
            self._noted("copy")
            self.launch()
        self._copy_many(targets, sources, non_blocking)

    def _empty_of(self, *size: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            self._noted("cudaHostAlloc")
            return self._empty(*size, **{**options, "pin_memory": False})
        if options.get("device") == DEVICE:
            cuda = self

            class Probe:
                def fill_(self, _: int) -> None:
                    cuda.launch()

            return Probe()  # type: ignore[return-value]
        return self._empty(*size, **options)

    def launch(self) -> None:
        """Start a kernel: torch takes the runtime's last error, and raises it."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}, of an earlier call")

    def cudaHostRegister(self, address: int, size_bytes: int, _flags: int) -> int:  # noqa: N802  # CUDA's
        assert len(ctypes.string_at(address + size_bytes - 1, 1)) == 1
        with contextlib.suppress(RuntimeError):
            self._noted("cudaHostRegister")
            return 0
        self.last_error = 2
        return 2

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's
        # Memory that is unlocked after it is unmapped faults.
        assert len(ctypes.string_at(address, 1)) == 1
        with contextlib.suppress(RuntimeError):
            self._noted("cudaHostUnregister")
            return 0
        self.last_error = 2
        return 2


class _Stream:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        cuda._noted("Stream")  # noqa: SLF001  # of this module

    def wait_stream(self, other: object) -> None:
        assert other == "the caller's"
        self._cuda._noted("wait_stream")  # noqa: SLF001  # of this module

    def synchronize(self) -> None:
        self._cuda._noted("synchronize")  # noqa: SLF001  # of this module

    def query(self) -> bool:
        self._cuda._noted("query")  # noqa: SLF001  # of this module
        return self._cuda.is_idle


class _Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        cuda._noted("Event")  # noqa: SLF001  # of this module

    def record(self, _: object) -> None:
        self._cuda._noted("record")  # noqa: SLF001  # of this module

    def synchronize(self) -> None:
        self._cuda._noted("Event.synchronize")  # noqa: SLF001  # of this module
