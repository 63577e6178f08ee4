"""`cat` and `stats`: elements of tensors; no more is held than a piece."""

from __future__ import annotations

import io
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from pprint import pformat
from typing import Any, Literal

import click
import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.inspect.checkpoint import open_checkpoint
from ckpt_storage.inspect.lazy_tensor import Indexed, LazyTensor, select
from ckpt_storage.inspect.reading import Words, elements_of, slabs
from ckpt_storage.inspect.views import shown

from . import output
from .options import memory_option, parse_slice, reads, url_argument
from .output import SOUND, tensor_of, value_of

_MOST_JSON_ELEMENTS = 1_000_000
_MOST_SHOWN = 1000
"""More elements than these are abbreviated; as numpy and torch have it by default."""
_EDGE = 3
"""How many are shown at either end of a dimension; as above."""


@click.command(short_help="Elements of a tensor, or an object.")
@url_argument()
@click.argument("fqn")
@click.option(
    "--slice",
    "index",
    metavar="INDEX",
    help="Which elements, as numpy spells it, with steps above 0: '0:8,128:256'. Only those are "
    "read.",
)
@click.option(
    "--form",
    type=click.Choice(["text", "npy", "raw"]),
    default="text",
    show_default=True,
    help="text for people; npy, a file of numpy; raw, the elements in C order, little-endian.",
)
@reads()
def cat(
    url: str,
    fqn: str,
    *,
    index: str | None,
    form: Literal["text", "npy", "raw"],
    as_json: bool,
    **options: Any,
) -> int:
    """Print the tensor FQN of the checkpoint at URL, or a part of it; or an object.

    Reads only the blocks that hold what is asked for, and checks them; as text, what is left out by
    "..." is not asked for. Objects are loaded with torch's weights_only rules.
    """
    if as_json and form != "text":
        raise click.UsageError(f"--json and --form {form} are two forms: drop either.")
    wanted = parse_slice(index) if index is not None else (...,)
    with open_checkpoint(url, **options) as checkpoint:
        tensor = tensor_of(checkpoint, fqn)
        if tensor is None:
            if index is not None or form != "text":
                raise _no_tensor(fqn, "Print it without --slice.")
            value = value_of(checkpoint, fqn)
            document = output.document("cat", fqn=fqn, dtype=None, shape=None, values=value)
            text = document if as_json else f"{pformat(value, width=100, compact=True)}\n"
            _put([text.encode(errors="backslashreplace")])
            return SOUND
        try:
            selection = select(wanted, tensor.shape)
        except IndexError as error:
            what = f"--slice {index!r} does not fit the shape {list(tensor.shape)}: {error}."
            step = "Give as many indices as there are dimensions, or fewer."
            raise InvalidInputError(what, next_step=step) from error
        if form == "text":
            _print(tensor, selection, as_json=as_json)
        else:
            pieces = _pieces(tensor, selection, checkpoint._handle.piece_bytes)  # noqa: SLF001  # of this package
            head = [] if form == "raw" else [_npy_head(tensor, selection)]
            _put(itertools.chain(head, pieces))
    return SOUND


def _no_tensor(fqn: str, next_step: str) -> InvalidInputError:
    return InvalidInputError(f"{fqn} is an object, no tensor.", next_step=next_step)


def _put(parts: Iterable[bytes]) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.writelines(parts)
    sys.stdout.buffer.flush()


def _print(tensor: LazyTensor, selection: Indexed, *, as_json: bool) -> None:
    count, shape = math.prod(map(len, selection.ranges)), _dummy(selection).shape
    if not as_json:
        elements = _made(tensor, _edges(tensor, selection), selection)
        with np.printoptions(threshold=0 if count > _MOST_SHOWN else _MOST_SHOWN):
            _put([(str(elements) + "\n").encode()])
        output.note(f"{shown(tensor.fqn)}  {tensor.dtype}  {list(shape)}")
        return
    if count > _MOST_JSON_ELEMENTS:
        what = f"{count} elements are too many for JSON."
        raise InvalidInputError(what, next_step="Narrow it with --slice, or use --form npy.")
    values = _pairs(_made(tensor, tensor.words(selection.ranges), selection).tolist())
    text = output.document("cat", fqn=tensor.fqn, dtype=tensor.dtype, shape=shape, values=values)
    _put([text.encode(errors="backslashreplace")])


def _pairs(values: Any) -> Any:
    """Return nested lists of numbers, with each complex number as a pair."""
    if isinstance(values, list):
        return [_pairs(value) for value in values]
    return [values.real, values.imag] if isinstance(values, complex) else values


def _dummy(selection: Indexed, kind: str = "u1") -> NDArray[Any]:
    """Return an array of the shape that numpy gives for an index; reads nothing."""
    sizes = tuple(map(len, selection.ranges))
    return np.broadcast_to(np.empty((), kind), sizes)[selection.view]


def _made(tensor: LazyTensor, words: Words, selection: Indexed) -> NDArray[Any]:
    return np.asarray(elements_of(words, tensor.dtype)[selection.final])


def _edges(tensor: LazyTensor, selection: Indexed) -> Words:
    """Return what is shown of elements: of many, the ends of each long dimension.

    Between the ends is an element that is never shown, and makes numpy abbreviate there.
    """
    if math.prod(map(len, selection.ranges)) <= _MOST_SHOWN:
        return tensor.words(selection.ranges)
    cuts = [
        [whole] if len(whole) <= 2 * _EDGE + 1 else [whole[: _EDGE + 1], whole[-_EDGE:]]
        for whole in selection.ranges
    ]
    parts = [tensor.words(ranges) for ranges in itertools.product(*cuts)]
    for axis in reversed(range(len(cuts))):
        step = len(cuts[axis])
        parts = [
            np.concatenate(parts[at : at + step], axis=axis) for at in range(0, len(parts), step)
        ]
    return parts[0]


def _pieces(tensor: LazyTensor, selection: Indexed, most_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of elements in C order, a piece of at most `most_bytes` at a time."""
    sizes = tuple(map(len, selection.ranges))
    for part in slabs(sizes, max(1, most_bytes // tensor.itemsize)):
        ranges = tuple(
            whole[some.start : some.stop]
            for whole, some in zip(selection.ranges, part, strict=True)
        )
        yield tensor.words(ranges).tobytes()


def _npy_head(tensor: LazyTensor, selection: Indexed) -> bytes:
    """Return what a file of numpy begins with. Raises for a type that numpy lacks."""
    kind = DTYPES[tensor.dtype].numpy
    if kind is None:
        raise InvalidInputError(
            f"A file of numpy has no {tensor.dtype}.", next_step="Use --form raw."
        )
    buffer = io.BytesIO()
    head = np.lib.format.header_data_from_array_1_0(_dummy(selection, kind))
    np.lib.format.write_array_header_1_0(buffer, head)
    return buffer.getvalue()


@click.command(short_help="Mean, spread, extremes, NaN counts.")
@url_argument()
@click.argument("fqns", metavar="FQN...", nargs=-1, required=True)
@click.option("--bins", type=click.IntRange(1, 4096), default=64, show_default=True)
@memory_option
@reads()
def stats(url: str, fqns: tuple[str, ...], *, bins: int, as_json: bool, **options: Any) -> int:
    """Show mean, spread, extremes, NaN and Inf counts of tensors; with --json a histogram too.

    Reads each tensor in pieces, verified.
    """
    with open_checkpoint(url, **options) as checkpoint:
        for fqn in fqns:
            if tensor_of(checkpoint, fqn) is None:
                raise _no_tensor(fqn, "ckpt-storage cat prints it.")
        progress = output.shows_progress()
        statistics = [checkpoint.stats(fqn, bin_count=bins, progress=progress) for fqn in fqns]
    output.emit("stats", as_json=as_json, text=map(str, statistics), tensors=statistics)
    return SOUND
