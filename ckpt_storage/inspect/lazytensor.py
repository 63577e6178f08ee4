"""`LazyTensor`: one tensor of an open checkpoint, read where it is indexed and nowhere else.

Made by `checkpoint`; users index it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .arrays import Region, elements_of, read_regions
from .facts import Sharding, human_bytes, shape_text, shown
from .html import card, page, sharding_svg
from .indexing import select
from .session import Session

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from .arrays import Words
    from .torchload import Device, Tensor


_ITER_BYTES = 16 << 20


class LazyTensor:
    """A tensor in a checkpoint: known by name, dtype, shape and sharding; read when indexed.

    `tensor[index]` takes numpy's basic indices (integers, slices with any step, `...`, None) and
    returns what numpy would: an array, or a scalar where every dimension is given an integer. Only
    the blocks that hold what is asked for are read, in one batch, each held against its checksum.
    Of a checkpoint that another writer made only lengths can be checked.

    Reads may come from several threads. They raise `IntegrityError` (file, FQN, offset),
    `CheckpointGoneError` once the checkpoint has been deleted or superseded, `StorageError`,
    `PhaseTimeoutError`, and `IndexError` where numpy does.
    """

    __slots__ = ("_dtype", "_fqn", "_session", "_shape")

    def __init__(self, session: Session, fqn: str) -> None:
        outline = session.outline(fqn)
        self._session = session
        self._fqn = fqn
        self._dtype = outline.dtype
        self._shape = outline.shape

    @property
    def fqn(self) -> str:
        """The name in the checkpoint."""
        return self._fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, whatever its sharding was."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The type of an element, as torch spells it: "bfloat16"."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self._shape)

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self._session.outline(self._fqn).item_bytes

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self._session.outline(self._fqn).size_bytes

    @property
    def bytes(self) -> int:
        """The same as `nbytes`, which is numpy's word for it."""
        return self.nbytes

    @property
    def sharding(self) -> Sharding:
        """How it is cut into chunks, and which ranks wrote them."""
        return self._session.sharding(self._fqn)

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of unsized object")
        return self._shape[0]

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self._fqn} is a tensor that has not been read: index it, or compare its `size`"
        )

    def __getitem__(self, index: object) -> Any:  # noqa: ANN401  # an array or a scalar, as in numpy
        selection = select(index, self._shape)
        elements = elements_of(self._read(selection.ranges), self._dtype)
        return elements[selection.final]

    def __iter__(self) -> Iterator[Any]:
        if not self._shape:
            raise TypeError("iteration over a 0-d tensor")
        row_bytes = max(1, self.nbytes // max(1, self._shape[0]))
        count = max(1, _ITER_BYTES // row_bytes)
        for start in range(0, self._shape[0], count):
            yield from self[start : start + count]

    def numpy(self, index: object = ...) -> NDArray[Any]:
        """Return the tensor, or the part at `index`, as an array of its own.

        bfloat16 and float8 are types of `ml_dtypes`. Raises as indexing
        does, and `CheckpointError` for types that numpy cannot have.
        """
        import numpy as np  # noqa: PLC0415  # listing a checkpoint needs none

        array: NDArray[Any] = np.asarray(self[index])
        return array

    def torch(self, index: object = ..., *, device: Device | None = None) -> Tensor:
        """Return the tensor, or the part at `index`, as a torch tensor on `device` (default CPU).

        Raises as indexing does.
        """
        from .torchload import tensor_of  # noqa: PLC0415  # torch is imported here, not before

        selection = select(index, self._shape)
        words = self._read(selection.ranges)
        # With the ellipsis an element stays an array of no dimensions.
        final = selection.final if Ellipsis in selection.final else (*selection.final, ...)
        return tensor_of(words[final], self._dtype, device)

    def item(self) -> Any:  # noqa: ANN401  # a number of the tensor's kind
        """Return the only element as a Python number. Raises `ValueError` if there are others."""
        if self.size != 1:
            raise ValueError(f"{self._fqn} has {self.size} elements; item() wants exactly one")
        return self.numpy().item()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: FBT001  # numpy's protocol
        if copy is False:
            raise ValueError(
                f"{self._fqn} lies in storage: it cannot become an array without a copy"
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def _read(self, ranges: tuple[range, ...]) -> Words:
        (words,) = read_regions(self._session, [Region(fqn=self._fqn, ranges=ranges)])
        return words

    def __repr__(self) -> str:
        shape = shape_text(self._shape)
        return f"<LazyTensor {shown(self._fqn)}: {shape} {self._dtype}, {self.sharding}>"

    def _repr_html_(self) -> str:
        facts = {
            "shape": shape_text(self._shape),
            "dtype": self._dtype,
            "size": human_bytes(self.nbytes),
            "sharding": str(self.sharding),
        }
        return page(card(self._fqn, facts, sharding_svg(self.sharding, scale=3)))
