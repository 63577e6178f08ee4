"""States to save, their makers and comparisons, for tests of the writer and the reader.

Every value follows from a seed, so a rank makes what another one saved. Nothing here uses the
package under test but its two classes, in `save` and `load`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from ckpt_storage import CheckpointStorageReader, CheckpointStorageWriter
from ckpt_storage.testing.ranks import RankPool

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
    """Return a tensor whose memory was given back, as FSDP does with gathered parameters."""
    tensor = torch.arange(float(count))
    tensor.untyped_storage().resize_(0)
    return tensor


class Call:
    """Pickles as a call, with a state if one is given: what would run on unpickling."""

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...], *state: Any) -> None:
        self.parts = (function, args, *state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor, here of a DTensor's, in C order as bytes, by numpy."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(_BYTES).numpy().tobytes()


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


HIDES_REASONS = torch.__version__ < "2.10"
"""Whether a failed `dcp.load` says why: torch 2.9 raises an empty error in place of a reader's."""


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
    group = options.pop("process_group", None)
    planner = options.pop("planner", None)
    options = {"sync_files": False} | options
    writer = CheckpointStorageWriter(path, **options)
    dcp.save(state, storage_writer=writer, process_group=group, planner=planner)


def save_alone(state: dict[str, Any], path: str | Path, **options: Any) -> None:
    """Save with our writer in this process alone; raise what it raised."""
    try:
        dcp.save(state, storage_writer=CheckpointStorageWriter(path, **options), no_dist=True)
    except CheckpointException as error:
        raise error.failures[0][0] from error


def load(state: dict[str, Any], path: str | Path, **options: Any) -> CheckpointStorageReader:
    """Load with our reader, in place, and return it."""
    group = options.pop("process_group", None)
    planner = options.pop("planner", None)
    reader = CheckpointStorageReader(path, **options)
    dcp.load(state, storage_reader=reader, process_group=group, planner=planner)
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
    """Return a planner of torch's with steps of one's own, which get torch's step first."""
    made = kind()
    for name, step in steps.items():
        setattr(made, name, partial(step, getattr(made, name)))
    return made


def resolving(change: Callable[[WriteItem, Any], Any]) -> Any:
    """Return a planner that passes what it resolved through a function."""
    return planner(resolve_data=lambda resolve, item: change(item, resolve(item)))


def do(_rank: int, function: Callable[..., object], *args: object) -> None:
    """Call a function on each rank."""
    function(*args)


def raised(
    ranks: RankPool, job: Callable[..., object], *args: object, world_size: int
) -> list[BaseException]:
    """Run a job that fails; return what each rank was told that a rank raised."""
    outcomes = ranks.outcomes(job, *args, world_size=world_size, timeout_s=30)
    return [error for outcome in outcomes for error in failures_of(outcome.error).values()]


def files_below(folder: Path) -> set[str]:
    """Return the relative paths of all files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
