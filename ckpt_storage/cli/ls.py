"""`ckpt-storage ls ROOT`: the committed checkpoints below a root."""

from __future__ import annotations

from typing import Any

import click

from . import output
from .options import common, json_option, storage_options, url_argument
from .output import COULD_NOT_RUN, SOUND, check_root


@click.command(short_help="Committed checkpoints below a root.")
@url_argument("root")
@json_option
@storage_options(of="ROOT")
@common
def ls(
    root: str, *, as_json: bool, storage_options: dict[str, Any] | None, timeout: float | None
) -> int:
    """List the committed checkpoints directly below ROOT, oldest first.

    What is still being saved, or died half-way, is not listed: it is no checkpoint. A root that
    does not exist is an error; on object storage that is one below which nothing lies. A folder
    that may not be read is listed as unreadable; the exit code is 2 then.
    """
    from ckpt_storage.commit.catalog import list_checkpoints  # noqa: PLC0415  # called, not imported

    infos = list_checkpoints(root, storage_options=storage_options, timeout=timeout)
    if not infos:
        check_root(root, storage_options, timeout)
    problems = [info.problem for info in infos if info.problem is not None]
    code = COULD_NOT_RUN if problems else SOUND
    for problem in problems:
        click.echo(problem, err=True)
    if as_json:
        output.emit(
            "ls",
            checkpoints=[
                {
                    "name": info.name,
                    "url": info.url,
                    "format": info.format,
                    "step": info.step,
                    "metrics": info.metrics,
                    "save_id": info.save_id,
                    "slot": info.slot,
                    "created_at": info.created_at,
                    "problem": info.problem,
                }
                for info in infos
            ],
        )
        return code
    if not infos:
        click.echo("No committed checkpoint.", err=True)
        return SOUND
    with_metrics = any(info.metrics for info in infos)
    head = ["name", "step", "created", "format", "save id"]
    rows = [
        [info.name, info.step, info.created_at or "", info.format, info.save_id or ""]
        for info in infos
    ]
    if with_metrics:
        head.append("metrics")
        for row, info in zip(rows, infos, strict=True):
            row.append(", ".join(f"{name} {value:g}" for name, value in info.metrics.items()))
    output.table(head, rows, right="step")
    return code
