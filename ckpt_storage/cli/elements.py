"""Elements of a tensor for `cat`: what is printed is read, and no more is held than a piece."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpt_storage.errors import CheckpointError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.inspect.arrays import elements_of
from ckpt_storage.inspect.indexing import Selection, select, slabs

if TYPE_CHECKING:
    from ckpt_storage.inspect.arrays import Words
    from ckpt_storage.inspect.lazytensor import LazyTensor


_MOST_SHOWN = 1000
"""More elements than these are abbreviated; as numpy and torch have it by default."""

_EDGE = 3
"""How many are shown at either end of a dimension; as above."""

Index = tuple[Any, ...]


def count_of(tensor: LazyTensor, wanted: Index) -> int:
    """Return how many elements an index means; reads none. Raises `IndexError` as numpy does."""
    return math.prod(select(wanted, tensor.shape).shape)


def shape_of(tensor: LazyTensor, wanted: Index) -> tuple[int, ...]:
    """Return the shape that numpy gives for an index; reads nothing."""
    import numpy as np  # noqa: PLC0415  # only what is read needs it

    selection = select(wanted, tensor.shape)
    return np.broadcast_to(np.empty(()), selection.shape)[selection.final].shape


def elements(tensor: LazyTensor, wanted: Index) -> Any:  # noqa: ANN401  # numpy's or torch's
    """Return elements as an array; as a tensor of torch for types that numpy lacks."""
    selection = select(wanted, tensor.shape)
    return _made(tensor, tensor._read(selection.ranges), selection)  # noqa: SLF001  # of this package


def abbreviated(tensor: LazyTensor, wanted: Index) -> str:
    """Return elements as numpy prints them; of many, only those that are shown are read."""
    selection = select(wanted, tensor.shape)
    if math.prod(selection.shape) <= _MOST_SHOWN:
        return str(elements(tensor, wanted))
    found = _made(tensor, _edges(tensor, selection), selection)
    if hasattr(found, "astype"):
        import numpy as np  # noqa: PLC0415  # as above

        with np.printoptions(threshold=0):
            return str(found)
    import torch  # noqa: PLC0415  # numpy has no such type

    torch.set_printoptions(threshold=0)  # type: ignore[no-untyped-call]  # torch's
    try:
        return str(found)
    finally:
        torch.set_printoptions(profile="default")  # type: ignore[no-untyped-call]  # as above


def pieces(tensor: LazyTensor, wanted: Index, most_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of elements in C order, a piece of at most `most_bytes` at a time."""
    selection = select(wanted, tensor.shape)
    turned = _turned(selection)
    flip = tuple(slice(None, None, -1 if is_turned else 1) for is_turned in turned)
    for part in slabs(selection.shape, max(1, most_bytes // tensor.itemsize)):
        ranges = tuple(
            whole[len(whole) - some.stop : len(whole) - some.start]
            if is_turned
            else whole[some.start : some.stop]
            for whole, some, is_turned in zip(selection.ranges, part, turned, strict=True)
        )
        yield tensor._read(ranges)[flip].tobytes()  # noqa: SLF001  # of this package


def npy_head(tensor: LazyTensor, wanted: Index) -> bytes:
    """Return what a file of numpy begins with, for a type that numpy has."""
    import numpy as np  # noqa: PLC0415  # as above

    buffer = io.BytesIO()
    head = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(DTYPES[tensor.dtype].numpy)),
        "fortran_order": False,
        "shape": shape_of(tensor, wanted),
    }
    np.lib.format.write_array_header_1_0(buffer, head)
    return buffer.getvalue()


def _made(tensor: LazyTensor, words: Words, selection: Selection) -> Any:  # noqa: ANN401  # see above
    try:
        found = elements_of(words, tensor.dtype)[selection.final]
    except CheckpointError as error:
        if type(error) is not CheckpointError:
            raise
    else:
        import numpy as np  # noqa: PLC0415  # as above

        return np.asarray(found)
    from ckpt_storage.inspect.torchload import tensor_of  # noqa: PLC0415  # numpy has no such type

    return tensor_of(words[(*selection.final, *_rest(selection))], tensor.dtype, None)


def _rest(selection: Selection) -> tuple[Any, ...]:
    # With the ellipsis an element stays an array of no dimensions.
    return () if Ellipsis in selection.final else (...,)


def _edges(tensor: LazyTensor, selection: Selection) -> Words:
    """Return the first and last positions of each long dimension, with one between them.

    That one is never shown, and makes numpy abbreviate there.
    """
    import numpy as np  # noqa: PLC0415  # as above

    most = 2 * _EDGE + 1
    cuts = [
        [whole] if len(whole) <= most else [whole[: _EDGE + 1], whole[-_EDGE:]]
        for whole in selection.ranges
    ]
    found: Words | None = None
    sizes = [sum(map(len, cut)) for cut in cuts]
    for ranges in itertools.product(*cuts):
        words = tensor._read(ranges)  # noqa: SLF001  # of this package
        if found is None:
            found = np.empty(sizes, words.dtype)
        where = tuple(
            slice(0, len(some)) if some is cut[0] else slice(size - len(some), size)
            for some, cut, size in zip(ranges, cuts, sizes, strict=True)
        )
        found[where] = words
    assert found is not None  # noqa: S101  # a product of cuts has one entry at least
    return found


def _turned(selection: Selection) -> list[bool]:
    """Return of each dimension whether the index takes it backwards."""
    turned = [False] * len(selection.ranges)
    used = sum(entry is not None and entry is not Ellipsis for entry in selection.final)
    at = 0
    for entry in selection.final:
        if entry is None:
            continue
        if entry is Ellipsis:
            at += len(turned) - used
            continue
        turned[at] = isinstance(entry, slice) and entry.step == -1
        at += 1
    return turned
