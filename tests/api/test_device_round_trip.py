"""Whole saves, background saves and loads of tensors on a device: CUDA, where there is one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_cases import same
from s3_server import S3Server

import ckpt_storage

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]
BUSY_COUNT = 50


def state_on(device: str) -> dict[str, Any]:
    """Return tensors of every form: of many windows, strided, tiny, empty, and one on the host."""
    grid = torch.arange(3_000_000, dtype=torch.float32).reshape(1000, 3000)
    state = {
        "large": grid,
        "transposed": grid[:500].t(),
        "strided": torch.arange(900_000).to(torch.bfloat16)[::3],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 5),
        "flags": torch.arange(5000) % 3 == 0,
        **{f"small.{at}": torch.full((at % 7 + 1,), float(at)) for at in range(300)},
    }
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in state.items()}
    # `to` keeps strides, but only of what is dense.
    moved["strided"] = torch.arange(900_000).to(device, torch.bfloat16)[::3]
    moved["lazy"] = torch.view_as_complex(torch.ones(700_000, 2).cumsum(0)).to(device).conj()
    return {**moved, "host": torch.arange(10), "step": 7}


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def loaded(target: dict[str, Any], url: str, **options: Any) -> dict[str, Any]:
    """Load into zeros like `target`, on its devices; return copies on the host."""
    zeros = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in target.items()
    }
    ckpt_storage.load(zeros, url, **options)
    for name, value in tensors_of(target).items():
        assert tensors_of(zeros)[name].device == value.device
    return on_host(zeros)


@pytest.fixture(params=["disk", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, server: S3Server
) -> tuple[str, dict[str, Any]]:
    if request.param == "disk":
        return str(tmp_path / "run"), {}
    return "s3://bucket/run", {"storage_options": server.storage_options}


@pytest.mark.parametrize("device", DEVICES)
def test_a_save_and_loads_on_either_side(place: tuple[str, dict[str, Any]], device: str) -> None:
    """What a device saved comes back, there and on the host; and what the host saved, there."""
    url, options = place
    state = state_on(device)
    expected = on_host(state)
    ckpt_storage.save(state, url, **options)
    assert same(on_host(state), expected)
    assert same(loaded(state, url, **options), expected)
    assert same(loaded(expected, url, **options), expected)
    ckpt_storage.save(expected, url, overwrite=True, **options)
    assert same(loaded(state, url, **options), expected)


def saved(state: dict[str, Any], url: str, way: Any) -> None:
    """Save by a thread, a process, or a thread whose copies a guard awaits; zero the state."""
    blocks = way != "guarded"
    with ckpt_storage.AsyncSaver(mode=way if blocks else "thread") as saver:
        handle = saver.save(state, url, block_until_staged=blocks)
        with saver.step_guard() if not blocks else nullcontext():
            for value in tensors_of(state).values():
                value.zero_()
        handle.result()


WAYS = [("cpu", "thread"), ("cpu", "guarded")]
if torch.cuda.is_available():
    WAYS += [("cuda", "thread"), ("cuda", "guarded"), ("cuda", "process")]


@pytest.mark.parametrize(("device", "way"), WAYS)
def test_a_background_save_has_the_state_as_it_was(tmp_path: Path, device: str, way: str) -> None:
    """Kernels enqueued before the call are in it, later ones are not; twice, for the buffers."""
    state = state_on(device)
    for number in range(2):
        for _ in range(BUSY_COUNT):
            state["large"] += 1
        expected = on_host(state)
        url = str(tmp_path / f"run-{number}")
        saved(state, url, way)
        assert same(loaded(state, url), expected)
        for name, value in tensors_of(state_on(device)).items():
            state[name].copy_(value)
        state["large"] += 1000
