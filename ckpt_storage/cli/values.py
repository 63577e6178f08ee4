"""`cat` and `stats`: elements of tensors; no more is held than a piece."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Any, Literal

import click

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.inspect.checkpoint import Checkpoint, open_checkpoint
from ckpt_storage.inspect.facts import shown
from ckpt_storage.inspect.lazy_tensor import Indexed, LazyTensor, select
from ckpt_storage.inspect.reading import elements_of, numpy_name, slabs
from ckpt_storage.inspect.stats import TensorStats

from . import output
from .options import (
    common,
    complete_fqn,
    fqn_argument,
    json_option,
    memory_option,
    parse_slice,
    storage_options,
    url_argument,
)
from .output import SOUND, is_tensor, tensor_of, value_of

if TYPE_CHECKING:
    from ckpt_storage.inspect.reading import Words

_MOST_JSON_ELEMENTS = 1_000_000
_MOST_SHOWN = 1000
"""More elements than these are abbreviated; as numpy and torch have it by default."""
_EDGE = 3
"""How many are shown at either end of a dimension; as above."""
_BARS = " ▁▂▃▄▅▆▇█"

Form = Literal["text", "npy", "raw"]
Index = tuple[Any, ...]


@click.command(short_help="Elements of a tensor, or an object.")
@url_argument()
@fqn_argument()
@click.option(
    "--slice",
    "index",
    metavar="INDEX",
    help="Which elements, as numpy spells it: '0:8,128:256'. Only those are read.",
)
@click.option(
    "--form",
    type=click.Choice(["text", "npy", "raw"]),
    default="text",
    show_default=True,
    help="text for people; npy, a file of numpy; raw, the elements in C order, little-endian.",
)
@click.option(
    "-o", "--output", "file", type=click.Path(dir_okay=False), help="Write to a file instead."
)
@json_option
@storage_options()
@common
def cat(
    url: str,
    fqn: str,
    *,
    index: str | None,
    form: Form,
    file: str | None,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    """Print the tensor FQN of the checkpoint at URL, or a part of it; or an object.

    Reads only the blocks that hold what is asked for, and checks them; as text, what is left out by
    "..." is not asked for. Objects are loaded with torch's weights_only rules.
    """
    if as_json and form != "text":
        raise click.UsageError(f"--json and --form {form} are two forms: give one of them.")
    wanted = parse_slice(index) if index is not None else (...,)
    with open_checkpoint(url, storage_options=storage_options, timeout=timeout) as checkpoint:
        if not is_tensor(checkpoint, fqn):
            if index is not None or form != "text":
                raise InvalidInputError(
                    f"{fqn} is an object, no tensor.", next_step="Print it without --slice."
                )
            value = value_of(checkpoint, fqn)
            _print_object(file, value, as_json=as_json, fqn=fqn)
            return SOUND
        tensor = tensor_of(checkpoint, fqn)
        try:
            if form == "raw":
                _put(file, _pieces(tensor, wanted, _piece_bytes(checkpoint)))
            elif form == "npy":
                _put(file, _npy(tensor, wanted, _piece_bytes(checkpoint)))
            else:
                _print(tensor, wanted, file, as_json=as_json)
        except IndexError as error:
            raise InvalidInputError(
                f"--slice {index!r} does not fit the shape {list(tensor.shape)}: {error}.",
                next_step="Give as many indices as there are dimensions, or fewer.",
            ) from error
    return SOUND


def _piece_bytes(checkpoint: Checkpoint) -> int:
    return checkpoint._handle.piece_bytes  # noqa: SLF001  # of this package


def _print(tensor: LazyTensor, wanted: tuple[Any, ...], file: str | None, *, as_json: bool) -> None:
    shape = _shape_of(tensor, wanted)
    if not as_json:
        _put(file, [f"{_abbreviated(tensor, wanted)}\n".encode()])
        click.echo(f"{shown(tensor.fqn)}  {tensor.dtype}  {list(shape)}", err=True)
        return
    count = math.prod(shape)
    if count > _MOST_JSON_ELEMENTS:
        raise InvalidInputError(
            f"{count} elements are too many for JSON.",
            next_step="Narrow it with --slice, or use --form npy.",
        )
    values = _numbers(_elements(tensor, wanted))
    answer = output.document("cat", fqn=tensor.fqn, dtype=tensor.dtype, shape=shape, values=values)
    _put(file, [answer.encode(errors="backslashreplace")])


def _numbers(found: Any) -> Any:  # noqa: ANN401  # numpy's or torch's
    """Return elements as nested lists of numbers; complex ones as pairs."""
    plain = found if hasattr(found, "astype") else found.double()
    return _pairs(plain.tolist())


def _pairs(values: Any) -> Any:  # noqa: ANN401  # nested lists
    if isinstance(values, list):
        return [_pairs(one) for one in values]
    return [values.real, values.imag] if isinstance(values, complex) else values


def _npy(tensor: LazyTensor, wanted: tuple[Any, ...], most_bytes: int) -> Iterable[bytes]:
    if DTYPES[tensor.dtype].numpy is None:
        raise InvalidInputError(
            f"A file of numpy has no {tensor.dtype}.", next_step="Use --form raw."
        )
    head = _npy_head(tensor, wanted)
    return itertools.chain([head], _pieces(tensor, wanted, most_bytes))


def _put(file: str | None, parts: Iterable[bytes]) -> None:
    """Write bytes to a file, or to standard output."""
    if file is None:
        sys.stdout.flush()
        for part in parts:
            sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
        return
    path = Path(file)
    with _writing(path):
        if path.exists() and not path.is_file():
            with path.open("wb") as stream:  # a pipe or a device
                stream.writelines(parts)
            return
        whole = Path(os.path.realpath(path))
        fresh = whole.with_name(f".{whole.name}.tmp-{os.getpid()}")
        try:
            with fresh.open("wb") as stream:
                stream.writelines(parts)
            fresh.replace(whole)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say in one line why a file cannot be written."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise InvalidInputError(
            f"{path} cannot be written: {error.strerror or error}.",
            next_step="Give a file in a folder that is there, on a disk with room for it.",
        ) from error


def _print_object(file: str | None, value: object, *, as_json: bool, fqn: str) -> None:
    if as_json:
        text = output.document("cat", fqn=fqn, dtype=None, shape=None, values=value)
    else:
        text = f"{pformat(value, width=100, compact=True)}\n"
    _put(file, [text.encode(errors="backslashreplace")])


def _shape_of(tensor: LazyTensor, wanted: Index) -> tuple[int, ...]:
    """Return the shape that numpy gives for an index; reads nothing."""
    import numpy as np  # noqa: PLC0415  # only what is read needs it

    selection = select(wanted, tensor.shape)
    return np.broadcast_to(np.empty(()), selection.shape)[selection.final].shape


def _elements(tensor: LazyTensor, wanted: Index) -> Any:  # noqa: ANN401  # numpy's or torch's
    """Return elements as an array; as a tensor of torch for types that numpy lacks."""
    selection = select(wanted, tensor.shape)
    return _made(tensor, tensor.words(selection.ranges), selection)


def _abbreviated(tensor: LazyTensor, wanted: Index) -> str:
    """Return elements as numpy prints them; of many, only those that are shown are read."""
    selection = select(wanted, tensor.shape)
    if math.prod(selection.shape) <= _MOST_SHOWN:
        return str(_elements(tensor, wanted))
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


def _pieces(tensor: LazyTensor, wanted: Index, most_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of elements in C order, a piece of at most `most_bytes` at a time."""
    selection = select(wanted, tensor.shape)
    flip = tuple(slice(None, None, -1 if is_turned else 1) for is_turned in selection.turned)
    for part in slabs(selection.shape, max(1, most_bytes // tensor.itemsize)):
        ranges = tuple(
            whole[::-1][some.start : some.stop][::-1]
            if is_turned
            else whole[some.start : some.stop]
            for whole, some, is_turned in zip(selection.ranges, part, selection.turned, strict=True)
        )
        yield tensor.words(ranges)[flip].tobytes()


def _npy_head(tensor: LazyTensor, wanted: Index) -> bytes:
    """Return what a file of numpy begins with, for a type that numpy has."""
    import numpy as np  # noqa: PLC0415  # as above

    buffer = io.BytesIO()
    head = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(DTYPES[tensor.dtype].numpy)),
        "fortran_order": False,
        "shape": _shape_of(tensor, wanted),
    }
    np.lib.format.write_array_header_1_0(buffer, head)
    return buffer.getvalue()


def _made(tensor: LazyTensor, words: Words, selection: Indexed) -> Any:  # noqa: ANN401  # see above
    if numpy_name(tensor.dtype) is None:
        from ckpt_storage.inspect.torchload import tensor_of  # noqa: PLC0415  # imports torch

        return tensor_of(words[selection.view], tensor.dtype, None)
    import numpy as np  # noqa: PLC0415  # as above

    return np.asarray(elements_of(words, tensor.dtype)[selection.final])


def _edges(tensor: LazyTensor, selection: Indexed) -> Words:
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
        words = tensor.words(ranges)
        if found is None:
            found = np.empty(sizes, words.dtype)
        where = tuple(
            slice(0, len(some)) if some is cut[0] else slice(size - len(some), size)
            for some, cut, size in zip(ranges, cuts, sizes, strict=True)
        )
        found[where] = words
    assert found is not None  # noqa: S101  # a product of cuts has one entry at least
    return found


@click.command(short_help="Mean, spread, NaN counts and histogram.")
@url_argument()
@click.argument("fqns", metavar="FQN...", nargs=-1, required=True, shell_complete=complete_fqn)
@click.option("--bins", type=click.IntRange(1, 4096), default=64, show_default=True)
@memory_option
@json_option
@storage_options()
@common
def stats(
    url: str,
    fqns: tuple[str, ...],
    *,
    bins: int,
    as_json: bool,
    **options: Any,  # noqa: ANN401  # as the library takes them
) -> int:
    """Show mean, spread, extremes, NaN and Inf counts and a histogram of tensors.

    Reads each tensor in pieces, verified.
    """
    with open_checkpoint(url, **options) as checkpoint:
        tensors = [tensor_of(checkpoint, fqn) for fqn in fqns]
        found = [
            checkpoint.stats(tensor.fqn, bin_count=bins, progress=output.shows_progress())
            for tensor in tensors
        ]
    if as_json:
        output.emit("stats", tensors=found)
        return SOUND
    for number, one in enumerate(found):
        if number:
            output.line()
        _print_stats(one)
    return SOUND


def _print_stats(one: TensorStats) -> None:
    numbers = {"mean": one.mean, "std": one.std, "min": one.min, "max": one.max}
    output.facts(
        {
            "name": one.fqn,
            "dtype": one.dtype,
            "shape": list(one.shape),
            **{name: None if value is None else f"{value:.9g}" for name, value in numbers.items()},
            "NaN": f"{one.nan_count:,}",
            "Inf": f"{one.inf_count:,}",
            "zero": f"{one.zero_count:,} of {one.count:,}",
            "histogram": _bars(one.histogram.counts),
        }
    )


def _bars(counts: Sequence[int]) -> str:
    most, steps = max(counts, default=0), len(_BARS) - 1
    return "".join(_BARS[-(-count * steps // most)] for count in counts) if most else ""
