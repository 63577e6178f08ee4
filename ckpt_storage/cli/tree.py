"""`ckpt-storage tree URL`: the names in a checkpoint, as a tree."""

from __future__ import annotations

from typing import Any

import click

from . import output
from .options import common, json_option, storage_options, url_argument
from .output import SOUND, entries_of


@click.command(short_help="Names, types, shapes and sizes as a tree.")
@url_argument()
@click.option("--depth", type=click.IntRange(min=1), help="Show so many levels.")
@json_option
@storage_options()
@common
def tree(
    url: str,
    *,
    depth: int | None,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    """Show the names in the checkpoint at URL with their types, shapes and sizes.

    Layers that are alike are shown once. Reads documents only. --json lists every value.
    """
    from ckpt_storage.inspect.checkpoint import open_checkpoint  # noqa: PLC0415  # called, not imported

    with open_checkpoint(url, storage_options=storage_options, timeout=timeout) as checkpoint:
        if not as_json:
            click.echo(str(checkpoint.tree(depth)))
            return SOUND
        output.emit(
            "tree",
            url=checkpoint.url,
            values=[
                {
                    "fqn": entry.fqn,
                    "kind": "object" if entry.dtype is None else "tensor",
                    "dtype": entry.dtype,
                    "shape": entry.shape if entry.dtype is not None else None,
                    "bytes": entry.size_bytes if entry.dtype is not None else None,
                }
                for entry in entries_of(checkpoint)
            ],
        )
    return SOUND
