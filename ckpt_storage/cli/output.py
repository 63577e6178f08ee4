"""What commands print: tables and lines for people, one JSON object for programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import click

from ckpt_storage.errors import CheckpointNotFoundError, InvalidInputError
from ckpt_storage.format.names import COMMITS, STOCK_METADATA
from ckpt_storage.inspect.checkpoint import Checkpoint
from ckpt_storage.inspect.lazy_tensor import LazyTensor
from ckpt_storage.inspect.views import human_bytes, shown
from ckpt_storage.options import Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.transfer.objects import or_none_if_absent


def value_of(checkpoint: Checkpoint, fqn: str) -> Any:
    """Return a lazy tensor, or the object. Raises `InvalidInputError` for an unknown name."""
    try:
        return checkpoint[fqn]
    except KeyError as error:
        raise InvalidInputError(
            f"{error.args[0]}.", next_step="ckpt-storage tree shows the names."
        ) from None


def tensor_of(checkpoint: Checkpoint, fqn: str) -> LazyTensor | None:
    """Return a lazy tensor, None for an object. Raises `InvalidInputError` for an unknown name."""
    # Indexing would read the bytes of an object.
    is_object = fqn in checkpoint._handle.source.blobs  # noqa: SLF001  # of this package
    return None if is_object else value_of(checkpoint, fqn)


def check_root(
    root: str, *, storage_options: dict[str, Any] | None, timeout: float | None
) -> list[str]:
    """Return the folders at `root`; refuse a root that is not there, or is a checkpoint itself."""
    location = Location.to_read(root, storage_options)
    store = open_store(location, timeouts=Timeouts.of(timeout))
    entries = or_none_if_absent(lambda: store.list("", recursive=False)) or ()
    paths = {entry.path for entry in entries}
    # An object storage has no empty folders.
    if not (Path(location.target).is_dir() if location.is_local else paths):
        what = f"{location.url} does not exist."
        step = "Check the path, the bucket and the storage options."
        raise CheckpointNotFoundError(what, path=location.url, phase="load", next_step=step)
    if paths & {f"{COMMITS}/", STOCK_METADATA}:
        raise InvalidInputError(
            f"{location.url} is a checkpoint itself.", next_step="Give the folder above it."
        )
    return sorted(path.rstrip("/") for path in paths if path.endswith("/"))


SOUND, UNSOUND, COULD_NOT_RUN, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
"""Exit codes; `UNSOUND`: damage or a difference, or something could not be copied or deleted."""


def shows_progress() -> bool:
    """Return whether a bar may be drawn: on a terminal only."""
    return sys.stderr.isatty()


def note(line: str) -> None:
    """Print a line on standard error; a closed stream changes no exit code."""
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def emit(
    kind: str,
    report: object = None,
    /,
    *,
    as_json: bool,
    text: Iterable[str] | None = None,
    **values: object,
) -> None:
    """Print the fields of a dataclass and `values`: as JSON, as `text`, or in two columns."""
    if as_json:
        click.echo(document(kind, report, **values), nl=False)
        return
    for line in facts({**(_plain(report) or {}), **_plain(values)}) if text is None else text:
        # Names in it may come from a checkpoint.
        click.echo(shown(line))


def document(kind: str, report: object = None, /, **values: object) -> str:
    """Return one JSON object; `schema` names its kind."""
    body = {"schema": f"ckpt_storage.cli.{kind}/1", **(_plain(report) or {}), **_plain(values)}
    return f"{json.dumps(body, ensure_ascii=False, allow_nan=False, indent=2)}\n"


def _plain(value: object) -> Any:
    """Return a value as JSON; numbers that are not finite by name, other objects by `repr`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str | int) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: _plain(item) for name, item in fields.items() if name[0] != "_"}
    if isinstance(value, Sequence | AbstractSet) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    return repr(value)


def facts(pairs: Mapping[str, object]) -> Iterator[str]:
    """Yield names and values in two columns; those without a value are left out."""
    texts = {name.replace("_", " "): fact(value, name) for name, value in pairs.items()}
    width = max((len(name) for name, text in texts.items() if text), default=0)
    return (f"{name:<{width}}  {text}" for name, text in texts.items() if text)


def fact(value: object, name: str = "") -> str:
    """Return a value as text; a `name` that ends in "_bytes" makes it a size."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {fact(item)}" for key, item in value.items())
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{human_bytes(value)} ({value:,})"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def table(
    head: Sequence[str], rows: Iterable[Iterable[object]], *, right: str = ""
) -> Iterator[str]:
    """Yield a table; columns named in `right`, a list with spaces, end at the right."""
    cells = [[fact(cell) for cell in row] for row in rows]
    padded = []
    for column in zip(head, *cells, strict=True):
        width = max(map(len, column))
        is_right = column[0] in right.split(" ")
        padded.append([cell.rjust(width) if is_right else cell.ljust(width) for cell in column])
    if cells:
        yield from ("  ".join(line).rstrip() for line in zip(*padded, strict=True))
