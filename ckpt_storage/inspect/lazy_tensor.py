"""`LazyTensor`: one tensor of an open checkpoint, which reads the elements that are indexed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.boxes import Selection
from ckpt_storage.format.dtypes import DTYPES

from .reading import Handle, Words, elements_of, read_tensors
from .views import Sharding, shape_text, shown

if TYPE_CHECKING:
    from .torchload import Device, Tensor


_ITER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """Ascending positions in each dimension, and the index of their array that gives the result."""

    ranges: Selection
    final: tuple[int | slice | EllipsisType | None, ...]

    @property
    def view(self) -> tuple[int | slice | EllipsisType | None, ...]:
        """`final`, but a single element stays an array without dimensions."""
        return self.final if Ellipsis in self.final else (*self.final, ...)


def select(index: object, shape: Sequence[int]) -> Indexed:
    """Return the positions that numpy's basic `index` selects. Raises `IndexError` for others."""
    entries = index if isinstance(index, tuple) else (index,)
    if not all(map(_is_basic, entries)):
        raise IndexError(
            "only integers, slices (`:`), ellipsis (`...`) and None are valid indices of a "
            "LazyTensor; read a region first, and index the array"
        )
    # Raises numpy's errors for indices out of bounds.
    np.broadcast_to(np.empty(()), shape)[entries]
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    ranges: list[range] = []
    final: list[int | slice | EllipsisType | None] = []
    for entry in entries:
        dim = len(ranges)
        if entry is None:
            final.append(None)
        elif entry is Ellipsis:
            ranges += map(range, shape[dim : dim + len(shape) - used])
            final.append(Ellipsis)
        elif isinstance(entry, slice):
            positions = range(*entry.indices(shape[dim]))
            is_reversed = positions.step < 0
            ascending = positions[::-1] if is_reversed else positions
            ranges.append(ascending or range(0))
            final.append(slice(None, None, -1 if is_reversed else 1))
        else:
            at = operator.index(entry) % shape[dim]
            ranges.append(range(at, at + 1))
            final.append(0)
    ranges += map(range, shape[len(ranges) :])
    return Indexed(ranges=tuple(ranges), final=tuple(final))


def _is_basic(entry: Any) -> bool:  # noqa: ANN401  # any index
    """Return whether numpy makes a view for an index; a boolean is a mask, which makes a copy."""
    if entry is None or entry is Ellipsis or isinstance(entry, slice):
        return True
    is_mask = isinstance(entry, bool) or "bool" in str(getattr(entry, "dtype", ""))
    return hasattr(entry, "__index__") and not (is_mask or getattr(entry, "ndim", None))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyTensor:
    """A tensor in a checkpoint, with name, dtype, shape and sharding; read when it is indexed.

    `tensor[index]` takes numpy's basic indices (integers, slices with any step, `...`, None) and
    returns an array, or a scalar if every dimension has an integer. Only the blocks with these
    elements are read, in one batch, and each is verified. A checkpoint of another writer has no
    checksums; only lengths are checked.

    `dtype` is the type as torch spells it ("bfloat16"); `shape` is that of the whole tensor.

    Thread-safe. Reads raise `IntegrityError` (file, FQN, offset), `CheckpointGoneError` once the
    checkpoint has been deleted or superseded, `StorageError`, `PhaseTimeoutError`, and `IndexError`
    as numpy does.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    _handle: Handle

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return DTYPES[self.dtype].item_bytes

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.itemsize

    @property
    def sharding(self) -> Sharding:
        """Its chunks, and the ranks that wrote them."""
        return self._handle.sharding(self.fqn)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self.fqn} is a tensor that has not been read: index it, or use its `size`"
        )

    def __getitem__(self, index: object) -> Any:  # noqa: ANN401  # an array or a scalar, as in numpy
        wanted = select(index, self.shape)
        return elements_of(self.words(wanted.ranges), self.dtype)[wanted.final]

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        row_bytes = max(1, self.nbytes // max(1, self.shape[0]))
        count = max(1, _ITER_BYTES // row_bytes)
        for start in range(0, self.shape[0], count):
            yield from self[start : start + count]

    def numpy(self, index: object = ...) -> NDArray[Any]:
        """Return the tensor, or its elements at `index`, as a new array.

        bfloat16 and float8 are types of `ml_dtypes`. Raises as indexing does, and `CheckpointError`
        for types that numpy lacks.
        """
        array: NDArray[Any] = np.asarray(self[index])
        return array

    def torch(self, index: object = ..., *, device: Device | None = None) -> Tensor:
        """Return the tensor, or its elements at `index`, as a torch tensor on `device` (CPU).

        Raises as indexing does.
        """
        from .torchload import tensor_of  # noqa: PLC0415  # imports torch

        wanted = select(index, self.shape)
        return tensor_of(self.words(wanted.ranges)[wanted.view], self.dtype, device)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: FBT001  # numpy's protocol
        if copy is False:
            raise ValueError(
                f"{self.fqn} is in a storage: it cannot become an array without a copy"
            )
        array = self.numpy()
        target = array.dtype if dtype is None else np.dtype(dtype)
        if not np.can_cast(array.dtype, target, "safe"):
            raise InvalidInputError(
                f"{self.fqn} is stored as {array.dtype}; numpy calls a cast to {target} unsafe.",
                phase="load",
                next_step=f"Cast it once it is read: tensor.numpy().astype({str(target)!r}).",
            )
        return array.astype(target, copy=False)

    def words(self, ranges: Selection) -> Words:
        """Return the elements at ascending positions, as unsigned words of their size."""
        (words,) = read_tensors(self._handle, [(self.fqn, ranges)])
        return words

    def __repr__(self) -> str:
        shape = shape_text(self.shape)
        return f"<LazyTensor {shown(self.fqn)}: {shape} {self.dtype}, {self.sharding}>"
