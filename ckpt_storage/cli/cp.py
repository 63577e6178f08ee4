"""`ckpt-storage cp SRC DST`: a checkpoint from one storage to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import output
from .options import (
    common,
    json_option,
    memory_option,
    page_cache_option,
    storage_options,
    url_argument,
)
from .output import FOUND, SOUND

if TYPE_CHECKING:
    from ckpt_storage.export.copying import CopyReport
    from ckpt_storage.export.filecopies import Copies
    from ckpt_storage.options import PageCache


@click.command(short_help="Copy between any two storages, verified.")
@url_argument("src")
@url_argument("dst")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DST.")
@click.option(
    "--copies",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Whether the storage copies by itself what it can.",
)
@click.option("--threads", "thread_count", type=click.IntRange(min=1), help="Requests in flight.")
@memory_option
@page_cache_option
@json_option
@storage_options(of="SRC, and of DST where that is of the same kind")
@storage_options("destination_storage", of="DST")
@common
def cp(  # one parameter for each option
    src: str,
    dst: str,
    *,
    overwrite: bool,
    copies: Copies,
    thread_count: int | None,
    memory_limit_bytes: int | None,
    page_cache: PageCache,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    destination_storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    """Copy the checkpoint at SRC to the folder DST, every block checked on its way.

    DST shows the copy all at once, at the end. If it is interrupted, call it again: what is
    complete is not sent again. Exits with 1 if it is copied but an export beside it could not be.
    """
    from ckpt_storage.export.copying import copy  # noqa: PLC0415  # called, not imported

    report = copy(
        src,
        dst,
        storage_options=storage_options,
        destination_storage_options=destination_storage_options,
        overwrite=overwrite,
        copies=copies,
        thread_count=thread_count,
        memory_limit_bytes=memory_limit_bytes,
        page_cache=page_cache,
        timeout=timeout,
        progress=output.shows_progress(),
    )
    if as_json:
        output.emit("cp", **_as_data(report))
    else:
        _print(report)
    return FOUND if report.failed_exports else SOUND


def _as_data(report: CopyReport) -> dict[str, object]:
    return {
        "source": report.source_url,
        "url": report.url,
        "format": report.format,
        "save_id": report.save_id,
        "slot": report.slot,
        "was_there": report.was_there,
        "file_count": report.file_count,
        "total_bytes": report.total_bytes,
        "read_bytes": report.read_bytes,
        "sent_bytes": report.sent_bytes,
        "copied_bytes": report.copied_bytes,
        "kept_count": report.kept_count,
        "kept_bytes": report.kept_bytes,
        "exports": report.exports,
        "left_out": report.left_out,
        "failed_exports": [
            {"path": path, "reason": reason} for path, reason in report.failed_exports.items()
        ],
        "seconds": report.seconds,
    }


def _print(report: CopyReport) -> None:
    if report.was_there:
        output.line(
            f"{report.url}: this save ({report.save_id}) is there already; "
            "ckpt-storage verify says whether it is sound."
        )
    else:
        parts = {
            "sent": report.sent_bytes,
            "copied by the storage": report.copied_bytes,
            "there from before": report.kept_bytes,
        }
        how = ", ".join(f"{output.size(count)} {what}" for what, count in parts.items() if count)
        output.line(
            f"{report.url}: {report.file_count} files, {output.size(report.total_bytes)}"
            f"{f' ({how})' if how else ''} in {report.seconds:.1f} s."
        )
    if report.exports:
        output.line(f"Exports: {', '.join(report.exports)}.")
    if report.left_out:
        output.line(f"Not copied: {', '.join(report.left_out)}.")
    for path, reason in report.failed_exports.items():
        output.line(f"The checkpoint is copied; its export {path} is not: {reason}")
