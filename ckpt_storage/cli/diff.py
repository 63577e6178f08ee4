"""`ckpt-storage diff A B`: how two checkpoints differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import output
from .options import common, json_option, memory_option, storage_options, url_argument
from .output import FOUND, SOUND

if TYPE_CHECKING:
    from ckpt_storage.inspect.comparing import CheckpointDiff


@click.command(short_help="How two checkpoints differ.")
@url_argument("left")
@url_argument("right")
@click.option("--no-values", is_flag=True, help="Compare names, shapes and types; read no tensor.")
@click.option("--prefix", help="Compare only names that begin so.")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="Relative tolerance.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, help="Absolute tolerance.")
@memory_option
@json_option
@storage_options(of="LEFT, and of RIGHT unless it has its own")
@storage_options("other_storage", of="RIGHT")
@common
def diff(  # one parameter for each option
    left: str,
    right: str,
    *,
    no_values: bool,
    prefix: str | None,
    rtol: float,
    atol: float,
    memory_limit_bytes: int | None,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    other_storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    """Compare the checkpoints LEFT and RIGHT: names, shapes, types and values.

    Exits with 0 if they are equal and with 1 if they differ. Shardings and formats may differ.
    """
    from ckpt_storage.inspect.checkpoint import open_checkpoint  # noqa: PLC0415  # called, not imported

    options: dict[str, Any] = {"memory_limit_bytes": memory_limit_bytes, "timeout": timeout}
    with (
        open_checkpoint(left, storage_options=storage_options, **options) as first,
        open_checkpoint(
            right, storage_options=other_storage_options or storage_options, **options
        ) as second,
    ):
        found = first.diff(
            second,
            prefix=prefix,
            values=not no_values,
            rtol=rtol,
            atol=atol,
            progress=output.shows_progress(),
        )
    if as_json:
        output.emit("diff", **_as_data(found))
    else:
        click.echo(str(found))
    return SOUND if found.is_equal else FOUND


def _as_data(found: CheckpointDiff) -> dict[str, object]:
    return {
        "left": found.left_url,
        "right": found.right_url,
        "is_equal": found.is_equal,
        "values_compared": found.values_compared,
        "same_count": found.same_count,
        "only_left": found.only_left,
        "only_right": found.only_right,
        "changed": [
            {
                "fqn": item.fqn,
                "kind": item.kind,
                "left": item.left,
                "right": item.right,
                "count": item.count,
                "different_count": item.different_count,
                "max_absolute": item.max_absolute,
                "max_relative": item.max_relative,
                "at": item.at,
                "left_nan_count": item.left_nan_count,
                "right_nan_count": item.right_nan_count,
            }
            for item in found.changed
        ],
    }
