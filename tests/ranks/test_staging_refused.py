"""What cannot be staged is refused by name, and staging in a thread fails and waits as told."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dcp_cases import same, seeded
from test_dcp_tensor_kinds import freed
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ckpt_storage.background import staging
from ckpt_storage.background.hostbuffers import HostBuffers, Kind, Lease
from ckpt_storage.background.staging import begin_stage, stage
from ckpt_storage.errors import CheckpointError, InvalidInputError, PhaseTimeoutError


def two(left: torch.Tensor, right: torch.Tensor) -> TwoTensor:
    """Return a wrapper around two tensors."""
    return TwoTensor(left, right)  # type: ignore[no-untyped-call]


@pytest.fixture(params=["private", "shared"])
def lease(request: pytest.FixtureRequest) -> Iterator[Lease]:
    """A lease of either kind."""
    kind: Kind = request.param
    with HostBuffers(kind) as buffers, buffers.lease() as held:
        yield held


def quantised() -> torch.Tensor:
    """Return a quantised tensor; torch says that such are to go."""
    return torch.quantize_per_tensor(seeded(1, 4), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*:UserWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: freed(3), "memory was given back"),
        (lambda: seeded(1, 4).to_sparse(), "sparse_coo"),
        (lambda: seeded(1, 4, 4).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.nested.nested_tensor([seeded(1, 2), seeded(2, 3)]), "nested"),
        (quantised, "quantised"),
        (nn.UninitializedParameter, "uninitialised"),
        (lambda: two(seeded(1, 4).to_sparse(), seeded(1, 4).to_sparse()), "sparse_coo"),
    ],
    ids=["meta", "freed", "sparse", "csr", "nested", "quantised", "lazy", "inside a wrapper"],
)
def test_tensors_without_plain_data_are_refused_by_name(
    lease: Lease, make: Callable[[], torch.Tensor], reason: str
) -> None:
    """The error names the tensor by its FQN and tells the phase; the lease stays usable."""
    with pytest.raises(InvalidInputError, match=rf"model\.layers\.1 .*{reason}") as caught:
        stage({"a": seeded(1, 3), "model": {"layers": [seeded(2, 3), make()]}}, lease)
    assert caught.value.phase == "stage"
    assert caught.value.next_step
    assert same(stage({"a": seeded(1, 3)}, lease).state, {"a": seeded(1, 3)})


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_objects_that_cannot_be_copied_are_refused_by_name(kind: Kind) -> None:
    """What can be neither copied nor pickled is named while the trainer is still there."""
    state = {"extra": [1, 2, {"lock": threading.Lock()}]}
    with (
        HostBuffers(kind) as buffers,
        buffers.lease() as held,
        pytest.raises(InvalidInputError, match=r"extra\.2\.lock cannot be staged: its lock"),
    ):
        stage(state, held)


def test_a_lambda_needs_no_pickle_in_private_memory() -> None:
    """Only a state that goes to another process must pickle."""
    with HostBuffers() as buffers, buffers.lease() as held:
        assert stage({"f": lambda: 5}, held).state["f"]() == 5
    with (
        HostBuffers("shared") as buffers,
        buffers.lease() as held,
        pytest.raises(InvalidInputError, match=r"f cannot be staged: its function .*pickled"),
    ):
        stage({"f": lambda: 5}, held)


def test_a_circle_is_refused(lease: Lease) -> None:
    """A container that holds itself is an error, not a crash."""
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(InvalidInputError, match="holds itself"):
        stage({"x": circle}, lease)


def test_a_state_that_is_no_mapping_is_refused(lease: Lease) -> None:
    """A list of tensors is not a state dict."""
    with pytest.raises(InvalidInputError, match="is a list, not a dict"):
        stage([seeded(1, 3)], lease)  # type: ignore[arg-type]


def test_a_job_takes_objects_at_once_and_bytes_later(
    lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job sees objects as they are at the call; wait gives up in time and may be repeated."""
    may_copy = threading.Event()
    copy_now = staging._copy  # noqa: SLF001  # the step that takes long on large states

    def held_up(*args: Any) -> None:
        may_copy.wait(30)
        copy_now(*args)

    monkeypatch.setattr(staging, "_copy", held_up)
    state: dict[str, Any] = {"step": [1], "x": seeded(1, 5)}
    job = begin_stage(state, lease)
    state["step"][0] = 2
    assert not job.done()
    assert "ckpt_storage-stage" in {thread.name for thread in threading.enumerate()}
    with pytest.raises(PhaseTimeoutError) as caught:
        job.wait(0.01)
    assert caught.value.phase == "stage"
    may_copy.set()
    assert same(job.wait(30).state, {"step": [1], "x": seeded(1, 5)})
    assert job.done()
    assert same(job.wait(0).state, {"step": [1], "x": seeded(1, 5)})


def test_a_job_that_fails_raises_in_wait(lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device becomes ours, each time that somebody waits; refusals come at once."""

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(InvalidInputError, match="x cannot be staged"):
        begin_stage({"x": torch.empty(3, device="meta")}, lease)
    monkeypatch.setattr(torch, "_foreach_copy_", broken)
    tensor = seeded(1, 5)
    source = weakref.ref(tensor)
    job = begin_stage({"x": tensor}, lease)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="illegal memory access") as caught:
            job.wait(30)
    del tensor
    gc.collect()
    assert source() is None
    assert caught.value.phase == "stage"
