"""`watch`: each checkpoint below a root, once it is committed."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import click

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.inspect.views import human_bytes, shown
from ckpt_storage.manager.following import follow

from . import output
from .options import duration, reads, url_argument
from .output import SOUND, UNSOUND


@click.command(short_help="Each checkpoint below a root, once it is committed.")
@url_argument("root")
@click.option("--after", type=click.IntRange(min=0), help="Skip this step and all before.")
@click.option(
    "--poll",
    "poll_s",
    metavar="SECONDS",
    default="30",
    show_default=True,
    callback=duration,
    help="Time between two polls; 10, 5m.",
)
@click.option(
    "--idle",
    "idle_s",
    metavar="SECONDS",
    callback=duration,
    help="End after this time without a commit; 2h. Default: never.",
)
@click.option(
    "--exec",
    "command",
    metavar="COMMAND",
    help="Run this in a shell for each checkpoint, one at a time. It has CKPT_URL, CKPT_NAME, "
    "CKPT_STEP and CKPT_SAVE_ID in its environment.",
)
@reads("ROOT")
def watch(root: str, *, command: str | None, as_json: bool, **options: Any) -> int:
    """Print each checkpoint directly below ROOT once it is committed, oldest step first.

    Begins with those that are there. A poll lists ROOT once and reads the folders that are new.
    With --json each line is one JSON object. Exits with 1 if a COMMAND failed.
    """
    code = SOUND
    for info in follow(root, **options):
        click.echo(_json_line(info) if as_json else shown(_line(info)))
        if command is not None and (exit_code := _run(command, info)) != 0:
            output.note(f"The command for {shown(info.name)} ended with exit code {exit_code}.")
            code = UNSOUND
    return code


def _line(info: CheckpointInfo) -> str:
    size = "" if info.stats is None else human_bytes(info.stats.total_bytes)
    step = "" if info.step is None else f"step {info.step}"
    columns = (info.name, step, info.created_at, info.save_id, size)
    return "  ".join(column for column in columns if column)


def _json_line(info: CheckpointInfo) -> str:
    # One line each, for programs that read while it runs.
    return json.dumps(json.loads(output.document("watch", info)), ensure_ascii=False)


def _run(command: str, info: CheckpointInfo) -> int:
    """Run a command of the user's for a checkpoint; return its exit code."""
    values = {
        "CKPT_URL": info.url,
        "CKPT_NAME": info.name,
        "CKPT_STEP": "" if info.step is None else str(info.step),
        "CKPT_SAVE_ID": info.save_id or "",
    }
    # Names of folders are passed in the environment, so that no shell reads them as code.
    completed = subprocess.run(command, shell=True, env=os.environ | values, check=False)  # noqa: S602  # the user's command
    return completed.returncode
