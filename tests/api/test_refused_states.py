"""Values that cannot be saved, or not be loaded as they are: named by key at every front door."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_tools import call
from dcp_cases import freed, same, seeded, zeros_like
from limits import HANG_S
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.two_tensor import TwoTensor

import ckpt_storage


class Opaque(torch.Tensor):
    """A tensor that wraps another, and says nothing of it."""

    @staticmethod
    def __new__(cls: Any, size: int) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (size,))  # noqa: SLF001  # torch documents it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as no class method
        cls, function: Any, *_: Any, **__: Any
    ) -> Any:
        raise NotImplementedError(f"{function} is not for Opaque")


def circle() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = found
    return found


def in_background(state: dict[str, Any], path: Path) -> object:
    with ckpt_storage.AsyncSaver(mode="thread", timeout=HANG_S, on_error="warn") as saver:
        return saver.save(state, path).result(60)


WRAPPER: Callable[..., torch.Tensor] = TwoTensor
UINT4: torch.dtype = vars(torch)["uint4"]

DOORS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "save": ckpt_storage.save,
    "dcp.save": dcp_cases.save_alone,
    "AsyncSaver": in_background,
}

# Of these torch's own planner fails under dcp.save, before a storage writer is asked.
BY_TORCH: dict[str, type[Exception]] = {"nested": RuntimeError, "opaque": NotImplementedError}
BY_TORCH |= {"circle": RecursionError, "lazy": ValueError}


NESTED = [torch.ones(2), torch.ones(3)]
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "nested": (lambda: torch.nested.nested_tensor(NESTED), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor(NESTED, layout=torch.jagged), "nested"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "layout is torch.sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "layout is torch.sparse_csr"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta device"),
    "freed": (lambda: freed(3), "memory was released"),
    "freed, large": (lambda: freed(1 << 20), "memory was released"),
    "freed parameter": (lambda: nn.Parameter(freed(3)), "memory was released"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "quantised",
    ),
    "opaque": (lambda: Opaque(3), "Opaque"),
    "uint4": (lambda: torch.empty(4, dtype=UINT4), "uint4"),
    "lazy": (nn.UninitializedParameter, "uninitialised"),
    "circle": (circle, "holds itself"),
    "lock": (threading.Lock, "lock"),
}


@pytest.mark.parametrize("lazy", [torch.Tensor.neg, torch.Tensor.conj])
def test_what_torch_has_yet_to_compute_is_saved_computed(
    tmp_path: Path, lazy: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A negated or conjugated view has the memory of its base, which holds other values."""
    base = torch.tensor([1.0 + 2.0j, 3.0 - 4.0j])
    view = torch._neg_view(base) if lazy is torch.Tensor.neg else lazy(base)  # noqa: SLF001  # as autograd makes them
    assert view.data_ptr() == base.data_ptr()
    ckpt_storage.save({"w": view}, tmp_path)
    with ckpt_storage.open_checkpoint(tmp_path) as opened:
        assert opened["w"][:].tolist() == view.tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", REFUSED)
def test_the_key_of_what_cannot_be_saved_is_named(tmp_path: Path, door: str, kind: str) -> None:
    """The error says the key, what is wrong with it and what to do; nothing is committed."""
    make, reason = REFUSED[kind]
    state = {"model": {"ok": torch.ones(2), "layer": {"w": make()}}}
    if door == "dcp.save" and kind in BY_TORCH:
        with pytest.raises(BY_TORCH[kind]):
            DOORS[door](state, tmp_path / "run")
    else:
        told = rf"model\.layer\.w\b.* cannot.*{reason}"
        with pytest.raises(ckpt_storage.InvalidInputError, match=told) as caught:
            DOORS[door](state, tmp_path / "run")
        assert caught.value.next_step
    assert ckpt_storage.list_checkpoints(tmp_path) == []


def test_a_tensor_that_wraps_others_is_refused_under_dcp(tmp_path: Path) -> None:
    """Torch plans it as a tensor with bytes of its own; `ckpt_storage.save` stores those inside."""
    state = {"layer": {"w": WRAPPER(torch.ones(3), torch.ones(3))}}
    told = r"layer\.w\b.* cannot.*TwoTensor"
    with pytest.raises(ckpt_storage.InvalidInputError, match=told):
        dcp_cases.save_alone(state, tmp_path / "run")
    ckpt_storage.save(state, tmp_path / "run", sync_files=False)


class Schedule:
    """A value of a class of the trainer's own."""


def by_dcp(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=ckpt_storage.CheckpointStorageWriter(path, **options))


each_door = pytest.mark.parametrize("door", [ckpt_storage.save, by_dcp])
Door = Callable[..., object]


@each_door
def test_a_value_that_only_pickle_holds_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: Door
) -> None:
    """The save warns with key and type or is told to refuse; `verify` notes, `load` refuses it."""
    path = tmp_path / "run-1"
    state = {"a": torch.ones(2), "trainer": {"schedule": Schedule(), "step": 3}}
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        door(state, path)
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"trainer.schedule ({__name__}.Schedule)" in message
    report = ckpt_storage.verify(path)
    assert report.ok
    (note,) = report.notes
    assert note.fqn == "trainer.schedule"
    assert f"{__name__}.Schedule" in note.message
    assert "unsafe_pickle=True" in note.next_step
    told = call("verify", str(path))
    assert told.exit_code == 0
    assert "trainer.schedule" in told.stdout
    target = {"a": torch.zeros(2), "trainer": {"schedule": None, "step": 0}}
    with pytest.raises(ckpt_storage.UnsafeContentError, match=r"trainer\.schedule"):
        ckpt_storage.load(target, path)
    refusal = rf"trainer\.schedule is a value \({__name__}\.Schedule\)"
    with pytest.raises((ckpt_storage.InvalidInputError, CheckpointException), match=refusal):
        door(state, tmp_path / "other", unsafe_values="refuse")
    assert [info.name for info in ckpt_storage.list_checkpoints(tmp_path)] == ["run-1"]


def test_a_value_that_a_planner_replaces_is_scanned(tmp_path: Path) -> None:
    """A plain value for which a method set on the planner gives an object is named as that."""

    def transform(inner: Callable[..., Any], item: Any, value: object) -> Any:
        return inner(item, Schedule() if value == 5 else value)

    planner = dcp_cases.planner(transform_object=transform)
    with pytest.raises(CheckpointException, match=r"step is a value .*Schedule"):
        dcp_cases.save({"step": 5}, tmp_path / "c", planner=planner, unsafe_values="refuse")


def test_plain_values_and_buffers_are_inert(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers, texts, arrays and `io.BytesIO` are saved without a word and load everywhere."""
    buffer = io.BytesIO(bytes(range(256)))
    buffer.seek(7)
    state = {
        "buffer": buffer,
        "empty": io.BytesIO(),
        "plain": (1, 2.5, "text", None, b"bytes", {"a": [True]}),
        "array": np.arange(3),
        "count": 1 << 70,
    }
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        ckpt_storage.save(state, tmp_path / "run", unsafe_values="refuse")
    assert caplog.records == []
    assert ckpt_storage.verify(tmp_path / "run").notes == ()
    loaded: dict[str, Any] = dict.fromkeys(state)
    ckpt_storage.load(loaded, tmp_path / "run")
    by_torch: dict[str, Any] = dict.fromkeys(state)
    dcp.load(by_torch, storage_reader=ckpt_storage.CheckpointStorageReader(tmp_path / "run"))
    for found in (loaded, by_torch, ckpt_storage.open_checkpoint(tmp_path / "run").load()):
        assert found["buffer"].getvalue() == bytes(range(256))
        assert found["buffer"].tell() == 7
        assert found["empty"].getvalue() == b""
        assert found["plain"] == state["plain"]
        assert found["count"] == 1 << 70


def test_a_buffer_that_is_more_than_bytes_is_refused(tmp_path: Path) -> None:
    """A crafted buffer whose state would set attributes is no inert one."""

    class Odd(io.BytesIO):
        def __reduce__(self) -> tuple[Any, ...]:
            return io.BytesIO, (), (b"x", 0, {"close": 1})

    ckpt_storage.save({"odd": Odd()}, tmp_path / "run")
    with pytest.raises(ckpt_storage.UnsafeContentError, match=r"_io\.BytesIO"):
        ckpt_storage.load({"odd": None}, tmp_path / "run")


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_one_element_of_any_stride_is_filled(tmp_path: Path, dtype: torch.dtype) -> None:
    """A target of one element is contiguous whatever its stride says, and is loaded in place."""
    value = seeded(1, 1, dtype=dtype)
    square = seeded(2, 1, 1, dtype=dtype)
    dcp_cases.save({"one": value, "square": square}, tmp_path / "c")
    line = zeros_like(seeded(3, 9, dtype=dtype))
    plane = zeros_like(seeded(4, 7, 5, dtype=dtype))
    targets = {"one": line[::3][1:2], "square": plane[::2, ::3][1:2, 1:2]}
    assert targets["one"].stride() == (3,)
    dcp_cases.load(targets, tmp_path / "c")
    assert same(line[3:4].clone(), value)
    assert same(plane[2:3, 3:4].clone(), square)
    assert int(torch.count_nonzero(line)) <= 1
    assert int(torch.count_nonzero(plane)) <= 1


def test_a_target_that_torch_negates_is_filled(tmp_path: Path) -> None:
    """A contiguous target with the negative bit, as `conj().imag` has, gets the stored value."""
    dcp_cases.save({"value": torch.tensor([3.0])}, tmp_path / "c")
    target = torch.zeros(1, dtype=torch.complex64).conj().imag
    assert target.is_neg()
    assert target.is_contiguous()
    dcp_cases.load({"value": target}, tmp_path / "c")
    assert target.item() == 3.0


def test_targets_of_inference_mode_are_filled(tmp_path: Path) -> None:
    """What only code in inference mode may write to is filled, whichever thread reads."""
    value = seeded(5, 64, 48)
    dcp_cases.save({"value": value}, tmp_path / "c")
    with torch.inference_mode():
        whole = torch.zeros(64, 96)
        dcp_cases.load({"value": whole[:, ::2]}, tmp_path / "c")
        assert same(whole[:, ::2].contiguous(), value)
        assert int(torch.count_nonzero(whole[:, 1::2])) == 0


each_load = pytest.mark.parametrize(
    "door", [dcp_cases.load, ckpt_storage.load], ids=["dcp", "ours"]
)


@each_load
def test_one_target_for_two_values_needs_consent(
    tmp_path: Path, door: Callable[..., object]
) -> None:
    """Tied targets take equal values; where the values differ, the error names both."""
    tied, target = seeded(1, 40, 7), torch.zeros(40, 7)
    dcp_cases.save({"a": tied, "b": tied.clone(), "c": tied + 1}, tmp_path / "c")
    door({"a": target, "b": target}, tmp_path / "c")
    assert same(target, tied)
    with pytest.raises((ckpt_storage.InvalidInputError, CheckpointException), match=r"a and c"):
        door({"a": target, "c": target}, tmp_path / "c")
    door({"a": target, "c": target}, tmp_path / "c", casts="any")


@each_load
@pytest.mark.parametrize(
    "view",
    [lambda whole: whole[1:3], lambda whole: whole.T, lambda whole: whole[:, ::2]],
    ids=["rows", "transposed", "columns"],
)
def test_a_view_of_a_target_takes_what_the_target_takes(
    tmp_path: Path, door: Callable[..., object], view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Wherever the view begins, and if its values are stored as the same bytes in another order."""
    whole, target = seeded(1, 4, 4), torch.zeros(4, 4)
    dcp_cases.save({"a": whole, "b": view(whole).clone(), "c": view(whole) + 1}, tmp_path / "c")
    door({"a": target, "b": view(target)}, tmp_path / "c")
    assert same(target, whole)
    with pytest.raises((ckpt_storage.InvalidInputError, CheckpointException), match=r"a and c"):
        door({"a": target, "c": view(target)}, tmp_path / "c")
    dcp_cases.save({"a": whole, "c": whole.clone()}, tmp_path / "same")
    with pytest.raises((ckpt_storage.InvalidInputError, CheckpointException), match=r"a and c"):
        door({"a": target, "c": target.T}, tmp_path / "same")


@each_load
def test_views_between_one_another_share_nothing(
    tmp_path: Path, door: Callable[..., object]
) -> None:
    """The columns of one tensor are targets of their own."""
    columns, target = [seeded(n, 4) for n in range(2)], torch.zeros(4, 2)
    dcp_cases.save({"a": columns[0], "b": columns[1]}, tmp_path / "c")
    door({"a": target[:, 0], "b": target[:, 1]}, tmp_path / "c")
    assert same(target, torch.stack(columns, 1))


@each_load
def test_tied_targets_take_equal_values_of_different_dtypes(
    tmp_path: Path, door: Callable[..., object]
) -> None:
    """Values that are equal once they are cast to the target are not refused; NaN equals NaN."""
    stored = torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16)
    dcp_cases.save({"a": stored, "b": stored.float(), "c": stored + 1}, tmp_path / "c")
    target = torch.zeros(3)
    door({"a": target, "b": target}, tmp_path / "c")
    assert same(target, stored.float())
    with pytest.raises((ckpt_storage.InvalidInputError, CheckpointException), match=r"b and c"):
        door({"b": target, "c": target}, tmp_path / "c")
