"""What commands print: tables and lines for people, one JSON object for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import click

from ckpt_storage.errors import CheckpointNotFoundError, InvalidInputError, StorageError
from ckpt_storage.format.names import COMMITS, STOCK_METADATA
from ckpt_storage.inspect.checkpoint import Checkpoint
from ckpt_storage.inspect.lazy_tensor import LazyTensor
from ckpt_storage.inspect.views import human_bytes, shown
from ckpt_storage.options import Timeouts
from ckpt_storage.store import Location, open_store


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
    # Indexing would read an object.
    is_object = fqn in checkpoint._handle.source.blobs  # noqa: SLF001  # of this package
    return None if is_object else value_of(checkpoint, fqn)


def check_root(
    root: str, *, storage_options: dict[str, Any] | None, timeout: float | None
) -> list[str]:
    """Return the folders at `root`; refuse one that is not there, or is a checkpoint itself.

    Raises `CheckpointNotFoundError`, `InvalidInputError`, `StorageError`.
    """
    location = Location.of(root, storage_options)
    try:
        store = open_store(location, timeouts=Timeouts.of(timeout))
        found = {entry.path for entry in store.list("", recursive=False)}
    except StorageError as error:
        if error.kind != "not-found":
            raise
        found = set()
    # An object storage has no empty folders.
    if not (Path(location.target).is_dir() if location.is_local else found):
        raise CheckpointNotFoundError(
            f"{location.url} does not exist.",
            path=location.url,
            phase="load",
            next_step="Check the path, the bucket and the storage options.",
        )
    if found & {f"{COMMITS}/", STOCK_METADATA}:
        raise InvalidInputError(
            f"{location.url} is a checkpoint itself.", next_step="Give the folder above it."
        )
    return sorted(path.rstrip("/") for path in found if path.endswith("/"))


SOUND = 0
"""Done; and what was looked at is sound, or equal."""

FOUND = 1
"""Damage or a difference was found, or something could not be deleted."""

COULD_NOT_RUN = 2
"""It did not come to an answer: wrong usage, nothing there, the storage failed."""

INTERRUPTED = 130
BROKEN_PIPE = 141


def shows_progress() -> bool:
    """Return whether a bar may be drawn: on a terminal only."""
    return sys.stderr.isatty()


def emit(kind: str, report: object = None, /, **values: object) -> None:
    """Print one JSON object: the fields of a dataclass and `values`; `schema` names its kind."""
    click.echo(document(kind, report, **values), nl=False)


def document(kind: str, report: object = None, /, **values: object) -> str:
    """Return what `emit` prints."""
    body = {"schema": f"ckpt_storage.cli.{kind}/1", **(_plain(report) or {}), **_plain(values)}
    return f"{json.dumps(body, ensure_ascii=False, allow_nan=False, indent=2)}\n"


def _plain(value: object) -> Any:
    """Return a value as JSON has it; what is no finite number is named, other objects shown."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str | int) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: _plain(one) for name, one in fields.items() if name[0] != "_"}
    if isinstance(value, Sequence | AbstractSet) and not isinstance(value, bytes):
        return [_plain(one) for one in value]
    return repr(value)


def size(count: int | None) -> str:
    """Return a number of bytes for people."""
    return "" if count is None else human_bytes(count)


def line(text: str = "") -> None:
    """Print one line; names in it may come from a checkpoint."""
    click.echo(shown(text))


def names(title: str, found: Iterable[str]) -> None:
    """Print names in one line, if there are any."""
    if told := ", ".join(found):
        line(f"{title}: {told}.")


def facts(pairs: Mapping[str, object]) -> None:
    """Print names and values in two columns; those without a value are left out."""
    known = {name: str(value) for name, value in pairs.items() if value not in (None, "")}
    width = max(map(len, known), default=0)
    for name, text in known.items():
        click.echo(f"{name:<{width}}  {shown(text)}")


def table(head: Sequence[str], rows: Iterable[Iterable[object]], *, right: str = "") -> None:
    """Print a table; columns named in `right`, a list with spaces, are aligned to the right."""
    lines = [head, *([shown("" if cell is None else str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = right.split(" ")
    for cells in lines:
        padded = (
            cell.rjust(width) if name in numeric else cell.ljust(width)
            for name, cell, width in zip(head, cells, widths, strict=True)
        )
        click.echo("  ".join(padded).rstrip())
