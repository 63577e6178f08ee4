"""`ckpt-storage cat URL FQN`: the elements of a tensor, or an object.

Called by `app`.
"""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Any, Literal

import click

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.tensorfile import DTYPES

from . import output
from .exits import SOUND
from .options import common, fqn_argument, json_option, parse_slice, storage_options, url_argument
from .values import is_tensor, tensor_of, value_of

if TYPE_CHECKING:
    from ckpt_storage.lazytensor import LazyTensor

__all__ = ["cat"]

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

    Reads only the blocks that hold what is asked for, and checks them. Objects are loaded with
    torch's weights_only rules.
    """
    from ckpt_storage.checkpoint import open_checkpoint  # noqa: PLC0415  # called, not imported

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
                _put(file, _raw(tensor, wanted))
            elif form == "npy":
                _put(file, _npy(tensor, wanted))
            else:
                _print(tensor, wanted, file, as_json=as_json)
        except IndexError as error:
            raise InvalidInputError(
                f"--slice {index!r} does not fit the shape {list(tensor.shape)}: {error}.",
                next_step="Give as many indices as there are dimensions, or fewer.",
            ) from error
    return SOUND


def _array(tensor: LazyTensor, wanted: tuple[Any, ...]) -> Any:  # noqa: ANN401  # numpy's or torch's
    """Return elements as an array; as a tensor of torch for types that numpy lacks."""
    try:
        return tensor.numpy(wanted)
    except CheckpointError as error:
        if type(error) is not CheckpointError:
            raise
        return tensor.torch(wanted)


def _print(tensor: LazyTensor, wanted: tuple[Any, ...], file: str | None, *, as_json: bool) -> None:
    found = _array(tensor, wanted)
    shape = tuple(found.shape)
    if not as_json:
        _put(file, f"{found}\n".encode())
        click.echo(f"{tensor.fqn}  {tensor.dtype}  {list(shape)}", err=True)
        return
    if math.prod(shape) > _MOST_JSON_ELEMENTS:
        raise InvalidInputError(
            f"{math.prod(shape)} elements are too many for JSON.",
            next_step="Narrow it with --slice, or use --form npy.",
        )
    output.emit("cat", fqn=tensor.fqn, dtype=tensor.dtype, shape=shape, values=_numbers(found))


def _numbers(found: Any) -> Any:  # noqa: ANN401  # numpy's or torch's
    """Return elements as nested lists of numbers; complex ones as pairs."""
    plain = found if hasattr(found, "astype") else found.double()
    return _pairs(plain.tolist())


def _pairs(values: Any) -> Any:  # noqa: ANN401  # nested lists
    if isinstance(values, list):
        return [_pairs(one) for one in values]
    return [values.real, values.imag] if isinstance(values, complex) else values


def _raw(tensor: LazyTensor, wanted: tuple[Any, ...]) -> bytes:
    data: bytes
    if DTYPES[tensor.dtype].numpy is not None:
        data = tensor.numpy(wanted).tobytes()
        return data
    import torch  # noqa: PLC0415  # numpy has no such type

    flat = tensor.torch(wanted).contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes()
    return data


def _npy(tensor: LazyTensor, wanted: tuple[Any, ...]) -> bytes:
    import numpy as np  # noqa: PLC0415  # only what is read needs it

    if DTYPES[tensor.dtype].numpy is None:
        raise InvalidInputError(
            f"A file of numpy has no {tensor.dtype}.", next_step="Use --form raw."
        )
    buffer = io.BytesIO()
    np.save(buffer, tensor.numpy(wanted), allow_pickle=False)
    return buffer.getvalue()


def _put(file: str | None, data: bytes) -> None:
    if file is not None:
        Path(file).write_bytes(data)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _print_object(file: str | None, value: object, *, as_json: bool, fqn: str) -> None:
    if as_json:
        output.emit("cat", fqn=fqn, dtype=None, shape=None, values=_as_data(value))
        return
    text = f"{pformat(value, width=100, compact=True)}\n"
    if file is None:
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")


def _as_data(value: object) -> object:
    """Return an object as JSON has it; what it has not, as text."""
    if isinstance(value, dict):
        return {str(key): _as_data(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_as_data(one) for one in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return repr(value)
