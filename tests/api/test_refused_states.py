"""What cannot be saved is refused with its key, on every front door."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
from dcp_cases import freed
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckpt_storage
from ckpt_storage import AsyncSaver, InvalidInputError


class Opaque(torch.Tensor):
    """A tensor that wraps another, and says nothing of it."""

    @staticmethod
    def __new__(cls: Any, size: int) -> Any:
        """Make one."""
        return torch.Tensor._make_wrapper_subclass(cls, (size,))  # noqa: SLF001  # torch documents it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as no class method
        cls, function: Any, *_: Any, **__: Any
    ) -> Any:
        """Refuse all."""
        raise NotImplementedError(f"{function} is not for Opaque")


def two(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a wrapper around two tensors."""
    wrapper: torch.Tensor = TwoTensor(left, right)  # type: ignore[no-untyped-call]
    return wrapper


def circle() -> dict[str, Any]:
    """Return a container that holds itself."""
    found: dict[str, Any] = {}
    found["self"] = found
    return found


def in_background(state: dict[str, Any], path: Path) -> object:
    """Save in the background; a worker gets only what was staged."""
    with AsyncSaver(mode="thread", timeout=60, on_error="warn") as saver:
        return saver.save(state, path).result(60)


UINT4: torch.dtype = vars(torch)["uint4"]

DOORS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "save": ckpt_storage.save,
    "dcp.save": dcp_cases.save_alone,
    "AsyncSaver": in_background,
}

# Of these torch's own planner fails under dcp.save, before a storage writer is asked.
BY_TORCH: dict[str, type[Exception]] = {"nested": RuntimeError, "opaque": NotImplementedError}
BY_TORCH |= {"circle": RecursionError, "lazy": ValueError}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("kind", "make", "reason"),
    [
        ("nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (
            "jagged",
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "nested",
        ),
        ("sparse", lambda: torch.eye(3).to_sparse(), "layout is torch.sparse_coo"),
        ("csr", lambda: torch.eye(3).to_sparse_csr(), "layout is torch.sparse_csr"),
        ("meta", lambda: torch.empty(3, device="meta"), "meta device"),
        ("freed", lambda: freed(3), "memory was given back"),
        ("freed, large", lambda: freed(1 << 20), "memory was given back"),
        ("freed parameter", lambda: nn.Parameter(freed(3)), "memory was given back"),
        (
            "quantised",
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "quantised",
        ),
        ("wrapper", lambda: two(torch.ones(3), torch.ones(3)), "TwoTensor"),
        ("opaque", lambda: Opaque(3), "Opaque"),
        ("uint4", lambda: torch.empty(4, dtype=UINT4), "uint4"),
        ("lazy", nn.UninitializedParameter, "uninitialised"),
        ("circle", circle, "holds itself"),
        ("lock", threading.Lock, "lock"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_key_of_what_cannot_be_saved_is_named(
    tmp_path: Path, door: str, kind: str, make: Callable[[], object], reason: str
) -> None:
    """The error says the key, what is wrong with it and what to do; nothing is committed."""
    state = {"model": {"ok": torch.ones(2), "layer": {"w": make()}}}
    if door == "dcp.save" and kind in BY_TORCH:
        with pytest.raises(BY_TORCH[kind]):
            DOORS[door](state, tmp_path / "run")
    else:
        with pytest.raises(
            InvalidInputError, match=rf"model\.layer\.w\b.* cannot.*{reason}"
        ) as caught:
            DOORS[door](state, tmp_path / "run")
        assert caught.value.next_step
    assert ckpt_storage.list_checkpoints(tmp_path) == []
