"""`ckpt-storage verify URL`: is a checkpoint sound."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from . import output
from .options import common, json_option, memory_option, storage_options, url_argument
from .output import FOUND, SOUND

if TYPE_CHECKING:
    from ckpt_storage.inspect.verification import VerifyReport


@click.command(short_help="Is every byte what was written?")
@url_argument()
@click.option(
    "--shallow", is_flag=True, help="Check documents and lengths of files; read no tensor."
)
@click.option("--threads", "thread_count", type=click.IntRange(min=1), help="Reads in flight.")
@memory_option
@json_option
@storage_options()
@common
def verify(
    url: str,
    *,
    shallow: bool,
    thread_count: int | None,
    memory_limit_bytes: int | None,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    """Check the checkpoint at URL: every byte of every file against its checksum.

    Exits with 0 if it is sound and with 1 if it is not; names each file, rank, tensor and offset
    that is damaged, and what to do. Of checkpoints of other writers, which carry no checksums,
    only that all files are there and long enough.
    """
    from ckpt_storage.inspect.verification import verify as run  # noqa: PLC0415  # called, not imported

    report = run(
        url,
        deep=not shallow,
        storage_options=storage_options,
        thread_count=thread_count,
        memory_limit_bytes=memory_limit_bytes,
        timeout=timeout,
        progress=output.shows_progress(),
    )
    if as_json:
        output.emit("verify", **_as_data(report))
    else:
        _print(report, is_deep=not shallow)
    return SOUND if report.ok else FOUND


def _as_data(report: VerifyReport) -> dict[str, object]:
    return {
        "url": report.url,
        "ok": report.ok,
        "format": report.format,
        "save_id": report.save_id,
        "file_count": report.file_count,
        "checked_bytes": report.checked_bytes,
        "problems": [dataclasses.asdict(problem) for problem in report.problems],
        "notes": [dataclasses.asdict(note) for note in report.notes],
        "exports": [
            {
                "path": export.path,
                "save_id": export.save_id,
                "is_stale": export.is_stale,
                "file_count": export.file_count,
                "bytes": export.size_bytes,
            }
            for export in report.exports
        ],
    }


def _print(report: VerifyReport, *, is_deep: bool) -> None:
    for problem in [*report.problems, *report.notes]:
        output.line(f"- {problem.message}")
        output.line(f"  {problem.next_step}")
    for export in report.exports:
        if export.is_stale:
            output.line(f"The export {export.path or '.'} is of another save ({export.save_id}).")
    checked = (
        f"{report.file_count} files, {output.size(report.checked_bytes)} checked"
        if is_deep and report.format == "ckpt_storage"
        else f"{report.file_count} files, documents and lengths checked"
    )
    count = len(report.problems)
    verdict = "sound" if report.ok else f"{count} problem{'s' if count != 1 else ''}"
    output.line(f"{report.url}: {verdict}; {checked}.")
