"""States for tests of `save` and `load`, what they raise, and groups and disks that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from dcp_cases import cut, same, seeded
from on_ranks import gathered
from posix_faults import FaultPosix

import ckpt_storage
from ckpt_storage.testing.faults import Rule


class Counter(torch.nn.Module):
    """A `Stateful` that counts the calls of `state_dict` and `load_state_dict`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.asked = self.loaded = 0

    def state_dict(self, *_args: Any, **_more: Any) -> dict[str, Any]:  # type: ignore[override]  # the protocol asks no more
        self.asked += 1
        return {"count": torch.tensor(self.count)}

    def load_state_dict(self, state_dict: Any, *_args: Any, **_more: Any) -> Any:
        self.loaded += 1
        self.count = int(state_dict["count"])


def state_of(step: int, *, zeros: bool = False) -> dict[str, Any]:
    """Return a state of every kind of value, or a target of the same form."""
    tensor = torch.zeros(37, 11) if zeros else seeded(5, 37, 11)
    return {
        "model": {
            "sharded": cut(tensor) if dist.is_initialized() else tensor,
            "same": torch.zeros(9) if zeros else seeded(step, 9),
        },
        "counter": Counter(0 if zeros else step),
        "step": 0 if zeros else step,
        "blob": {"name": None, "set": None} if zeros else {"name": f"step {step}", "set": {1, 2.5}},
    }


def save(path: str | Path, step: int, **options: Any) -> str | None:
    options = {"sync_files": False} | options
    return ckpt_storage.save(state_of(step), path, **options).save_id


def assert_loads(
    path: Path | str, step: int, load: Callable[..., object] = ckpt_storage.load, **options: Any
) -> None:
    target, expected = state_of(step, zeros=True), state_of(step)
    load(target, path, **options)
    counter = target.pop("counter")
    assert counter.count == expected.pop("counter").count
    assert same(target, expected)
    if load is ckpt_storage.load:
        assert (counter.asked, counter.loaded) == (1, 1)


def caught(call: Callable[..., Any], *args: Any, **options: Any) -> ckpt_storage.CheckpointError:
    with pytest.raises(ckpt_storage.CheckpointError) as seen:
        call(*args, **options)
    return seen.value


@contextmanager
def faulty_disk(rules: Sequence[Rule]) -> Iterator[list[FaultPosix]]:
    """Let all local stores that are made inside play `rules`; give their system calls."""
    made: list[FaultPosix] = []

    def make() -> FaultPosix:
        made.append(FaultPosix(rules))
        return made[-1]

    with patch("ckpt_storage.store.backends.local.Posix", make):
        yield made


@contextmanager
def default_group(
    folder: Path, kind: str = "file", timeout_s: float = 30.0, backend: str = "gloo"
) -> Iterator[None]:
    """Replace the pool's default group by one of our own inside, with a store of a kind."""
    rank, world_size, wait = dist.get_rank(), dist.get_world_size(), timedelta(seconds=30)
    settings: dict[str, Any] = {
        "world_size": world_size,
        "timeout": wait,
        "wait_for_workers": False,
    }
    store: dist.Store = dist.FileStore(str(folder / "rendezvous"), world_size)
    if kind == "tcp":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, **settings) if rank == 0 else None
        port = gathered(server and server.port)[0]
        store = server or dist.TCPStore("127.0.0.1", port, is_master=False, **settings)
    dist.destroy_process_group()
    try:
        # A short timeout is for what is tested, not for ranks that begin a moment apart.
        store.set(f"here {rank}", "")
        store.wait([f"here {other}" for other in range(world_size)], wait)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        yield
    finally:
        dist.destroy_process_group()
        # What runs a job destroys the default group at the end.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
