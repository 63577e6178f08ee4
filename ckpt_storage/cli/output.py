"""What commands print: tables and lines for people, one JSON object for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from ckpt_storage.inspect.markup import human_bytes, shown

__all__ = [
    "document",
    "emit",
    "facts",
    "line",
    "notice",
    "safe",
    "shows_progress",
    "size",
    "table",
]

_WIDEST = 10_000
"""Columns where the output goes to a file or a pipe: nothing is cut there."""


def shows_progress() -> bool:
    """Return whether a bar may be drawn: on a terminal only."""
    return sys.stderr.isatty()


def notice(text: str) -> None:
    """Print one line that tells how far a command is: on a terminal only, on standard error."""
    if shows_progress():
        click.echo(shown(text), err=True)


def emit(kind: str, /, **values: object) -> None:
    """Print one JSON object; `schema` names its keys and their version."""
    click.echo(document(kind, **values), nl=False)


def document(kind: str, /, **values: object) -> str:
    """Return what `emit` prints."""
    body = {"schema": f"ckpt_storage.cli.{kind}/1", **values}
    return f"{json.dumps(_plain(body), ensure_ascii=False, allow_nan=False, indent=2)}\n"


def safe(text: str) -> str:
    """Return text that may come from a checkpoint as it may stand on a terminal."""
    return shown(text)


def _plain(value: object) -> Any:  # noqa: ANN401  # what JSON has
    """Return a value as JSON has it; what is no finite number becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Iterable):
        return [_plain(one) for one in value]
    return str(value)


def size(count: int | None) -> str:
    """Return a number of bytes for people."""
    return "" if count is None else human_bytes(count)


def line(text: str = "") -> None:
    """Print one line; names in it may come from a checkpoint."""
    click.echo(shown(text))


def facts(pairs: Mapping[str, object]) -> None:
    """Print names and values in two columns; those without a value are left out."""
    known = {name: text for name, value in pairs.items() if (text := _text(value))}
    width = max(map(len, known), default=0)
    for name, value in known.items():
        click.echo(f"{name:<{width}}  {shown(value)}")


def _text(value: object) -> str:
    return "" if value is None else str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, right: str = "") -> None:
    """Print a table; columns named in `right`, a list with spaces, are aligned to the right.

    On a terminal it is fitted to its width; elsewhere nothing is cut.
    """
    from rich.console import Console  # noqa: PLC0415  # costs an import only when it is used
    from rich.table import Table  # noqa: PLC0415  # as above
    from rich.text import Text  # noqa: PLC0415  # as above

    is_terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if is_terminal else _WIDEST, highlight=False)
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    # Not at other blanks: no-break spaces hold names of several words together.
    numeric = [name for name in right.split(" ") if name]
    for name in head:
        drawn.add_column(name, justify="right" if name in numeric else "left", overflow="fold")
    for row in rows:
        # As text: brackets in a name are no markup.
        drawn.add_row(*(Text(shown("" if cell is None else str(cell))) for cell in row))
    with console.capture() as capture:
        console.print(drawn)
    # Padding up to the last column is of no use to anyone.
    for text in capture.get().splitlines():
        click.echo(text.rstrip())
