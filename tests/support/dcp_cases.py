"""States to save, their makers and comparisons, for tests of the writer and the reader.

Every value follows from a seed, so a rank makes what another rank saved. Nothing here uses the
package under test but its two classes, in `save` and `load`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from ckpt_storage import CheckpointStorageReader, CheckpointStorageWriter
from ckpt_storage.format.boxes import Box

# What torch.testing has not: kinds without arithmetic are compared as bytes.
_BYTES = torch.uint8


def seeded(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of random bytes of a kind, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in {torch.float32, torch.float64, torch.bfloat16, torch.float16}:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=_BYTES)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def freed(count: int) -> torch.Tensor:
    """Return a tensor whose storage was resized to 0, as FSDP does with gathered parameters."""
    tensor = torch.arange(float(count))
    tensor.untyped_storage().resize_(0)
    return tensor


class Call:
    """Pickles as a call, with an optional state: code that would run on unpickling."""

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...], *state: Any) -> None:
        self.parts = (function, args, *state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor, here of a DTensor's, in C order as bytes, by numpy."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Where a dimension has at most one element, it may have any stride there.
    flat = plain.as_strided((plain.numel(),), (1,))
    return flat.view(_BYTES).numpy().tobytes() if plain.numel() else b""


def same(left: object, right: object) -> bool:
    """Return whether two values are equal bit by bit, tensors inside included."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (
            left.shape == right.shape
            and left.dtype == right.dtype
            and raw_bytes(left) == raw_bytes(right)
        )
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


class Tiled(torch.Tensor):
    """A tensor of which one rank holds chunks, by torch's protocol for such."""

    boxes: Sequence[Box] = ()

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        kind = TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor))
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, kind, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # torch's
        return [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        (box,) = [box for box in self.boxes if box.offsets == tuple(index.offset or ())]
        return self.as_subclass(torch.Tensor)[tuple(map(slice, box.offsets, box.stops))]


def tiled(whole: torch.Tensor, boxes: Sequence[Box]) -> Tiled:
    """Return a tensor in chunks."""
    made = whole.as_subclass(Tiled)
    made.boxes = boxes
    return made


HIDES_REASONS = torch.__version__ < "2.10"
"""Whether a failed `dcp.load` does not say why: torch 2.9 drops the errors of readers."""


def zeros_like(value: Any) -> Any:
    """Return a target for loading `value` into: tensors of zeros, everything else None."""
    if isinstance(value, DTensor):
        return torch.zeros_like(value)
    if isinstance(value, torch.Tensor):
        # Some kinds know no zero_; all are zero where their bytes are.
        count = value.numel() * value.element_size()
        raw = torch.zeros(count, dtype=_BYTES)
        return raw.view(value.dtype).reshape(value.shape) if count else torch.empty_like(value)
    if isinstance(value, dict):
        return {key: zeros_like(item) for key, item in value.items()}
    if isinstance(value, list):
        return [zeros_like(item) for item in value]
    return None


def save(state: dict[str, Any], path: str | Path, **options: Any) -> None:
    """Save with our writer, without fsync unless asked."""
    arguments = {name: options.pop(name, None) for name in ("planner", "process_group")}
    writer = CheckpointStorageWriter(path, **{"sync_files": False, **options})
    dcp.save(state, storage_writer=writer, **arguments)


def save_alone(state: dict[str, Any], path: str | Path, **options: Any) -> None:
    """Save with our writer in this process alone; raise what it raised."""
    try:
        dcp.save(state, storage_writer=CheckpointStorageWriter(path, **options), no_dist=True)
    except CheckpointException as error:
        raise error.failures[0][0] from error


def load(state: dict[str, Any], path: str | Path, **options: Any) -> CheckpointStorageReader:
    """Load with our reader, in place, and return it."""
    arguments = {name: options.pop(name, None) for name in ("planner", "process_group")}
    reader = CheckpointStorageReader(path, **options)
    dcp.load(state, storage_reader=reader, **arguments)
    return reader


def load_stock(state: dict[str, Any], path: str | Path) -> None:
    """Load with torch's own reader, in this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def assert_holds(
    path: str | Path,
    expected: dict[str, Any],
    by: Sequence[Callable[..., object]] = (load, load_stock),
    **options: Any,
) -> None:
    """Assert that torch's reader and ours, or others, bring back `expected`."""
    for loading in by:
        target = zeros_like(expected)
        loading(target, path, **options)
        assert same(target, expected), (path, loading)


def failures_of(error: BaseException | None) -> dict[int, BaseException]:
    """Return what DCP's exception says each failed rank raised."""
    assert isinstance(error, CheckpointException), repr(error)
    return {rank: failure[0] for rank, failure in error.failures.items()}


def planner(kind: Any = dcp.DefaultSavePlanner, **steps: Callable[..., Any]) -> Any:
    """Return a planner of torch's with other steps, which get torch's step first."""
    made = kind()
    for name, step in steps.items():
        setattr(made, name, partial(step, getattr(made, name)))
    return made


def resolving(change: Callable[[WriteItem, Any], Any]) -> Any:
    return planner(resolve_data=lambda resolve, item: change(item, resolve(item)))


def errors_by_rank(
    call: Callable[..., object], *args: Any, **options: Any
) -> dict[int, BaseException]:
    """Return the errors of the failed ranks from the exception of DCP that a call must raise."""
    with pytest.raises(CheckpointException) as caught:
        call(*args, **options)
    return failures_of(caught.value)


def refused(
    kind: type[Exception], text: str, call: Callable[..., object], *args: Any, **options: Any
) -> list[Any]:
    """Return what failed ranks raised in a call of DCP: all errors of a kind, with a text."""
    errors = list(errors_by_rank(call, *args, **options).values())
    assert [
        error for error in errors if not isinstance(error, kind) or text not in str(error)
    ] == [], errors
    return errors


def cut(tensor: torch.Tensor, *placements: Placement, mesh: tuple[int, ...] = ()) -> DTensor:
    """Return a tensor over all ranks, in a line or a mesh of a shape; by rows by default."""
    made = init_device_mesh("cpu", mesh or (dist.get_world_size(),))
    return distribute_tensor(tensor, made, placements or [Shard(0)], src_data_rank=None)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
