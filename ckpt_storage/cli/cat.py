"""`ckpt-storage cat URL FQN`: the elements of a tensor, or an object."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Any, Literal

import click

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.format.dtypes import DTYPES

from . import elements, output
from .options import common, fqn_argument, json_option, parse_slice, storage_options, url_argument
from .output import SOUND, is_tensor, tensor_of, value_of

if TYPE_CHECKING:
    from ckpt_storage.inspect.checkpoint import Checkpoint
    from ckpt_storage.inspect.lazytensor import LazyTensor


_MOST_JSON_ELEMENTS = 1_000_000

Form = Literal["text", "npy", "raw"]


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
    from ckpt_storage.inspect.checkpoint import open_checkpoint  # noqa: PLC0415  # called, not imported

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
                _put(file, elements.pieces(tensor, wanted, _piece_bytes(checkpoint)))
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
    return checkpoint._holdings.piece_bytes  # noqa: SLF001  # of this package


def _print(tensor: LazyTensor, wanted: tuple[Any, ...], file: str | None, *, as_json: bool) -> None:
    shape = elements.shape_of(tensor, wanted)
    if not as_json:
        _put(file, [f"{elements.abbreviated(tensor, wanted)}\n".encode()])
        click.echo(f"{output.safe(tensor.fqn)}  {tensor.dtype}  {list(shape)}", err=True)
        return
    count = elements.count_of(tensor, wanted)
    if count > _MOST_JSON_ELEMENTS:
        raise InvalidInputError(
            f"{count} elements are too many for JSON.",
            next_step="Narrow it with --slice, or use --form npy.",
        )
    values = _numbers(elements.elements(tensor, wanted))
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
    head = elements.npy_head(tensor, wanted)
    return itertools.chain([head], elements.pieces(tensor, wanted, most_bytes))


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
        text = output.document("cat", fqn=fqn, dtype=None, shape=None, values=_as_data(value))
    else:
        text = f"{pformat(value, width=100, compact=True)}\n"
    _put(file, [text.encode(errors="backslashreplace")])


def _as_data(value: object) -> object:
    """Return an object as JSON has it; what it has not, as text."""
    if isinstance(value, dict):
        return {str(key): _as_data(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_as_data(one) for one in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return repr(value)
