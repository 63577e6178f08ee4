"""`ckpt-storage consolidate URL [OUT]`: a Hugging Face export, alone or under torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import click

from ckpt_storage.errors import PhaseTimeoutError

from . import output
from .options import (
    byte_count,
    common,
    json_option,
    memory_option,
    page_cache_option,
    storage_options,
    url_argument,
)
from .output import SOUND

if TYPE_CHECKING:
    from ckpt_storage.export.consolidation.job import ConsolidationReport
    from ckpt_storage.options import PageCache


_MEETING_S = 300.0
"""How long ranks wait for one another to start, unless `--timeout` says."""


@click.command(short_help="Export to Hugging Face safetensors.")
@url_argument()
@url_argument("out", required=False)
@click.option("--max-file-bytes", default="5GB", show_default=True, help="Size of a weight file.")
@click.option("--dtype", help="Cast floating-point tensors to this, such as bfloat16.")
@click.option("--include", multiple=True, metavar="FQN", help="Names or patterns that go out.")
@click.option("--exclude", multiple=True, metavar="FQN", help="Names or patterns that do not.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Name in the weight files.")
@click.option(
    "--tied",
    type=click.Choice(["drop", "keep"]),
    default="drop",
    show_default=True,
    help="What happens to aliases of tied tensors.",
)
@memory_option
@page_cache_option
@json_option
@storage_options(of="URL, and of OUT where that is of the same kind")
@storage_options("output_storage", of="OUT")
@common
def consolidate(  # one parameter for each option
    url: str,
    out: str | None,
    *,
    max_file_bytes: str,
    dtype: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    rename: tuple[str, ...],
    tied: Literal["drop", "keep"],
    memory_limit_bytes: int | None,
    page_cache: PageCache,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    output_storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    r"""Write the model in the checkpoint at URL as Hugging Face safetensors to OUT.

    OUT is URL/hf unless it is given. Under torchrun all ranks share the work:

    \b
    torchrun --nproc-per-node 8 -m ckpt_storage consolidate URL
    """
    from ckpt_storage.export.consolidating import consolidate as run  # noqa: PLC0415  # called

    with _ranks(_MEETING_S if timeout is None else timeout) as rank:
        report = run(
            url,
            out,
            max_file_bytes=byte_count(max_file_bytes, "--max-file-bytes"),
            dtype=dtype,
            include=include or None,
            exclude=exclude or None,
            rename=_renames(rename),
            tied=tied,
            storage_options=storage_options,
            output_storage_options=output_storage_options,
            timeout=timeout,
            progress=output.shows_progress(),
            memory_limit_bytes=memory_limit_bytes,
            page_cache=page_cache,
        )
    if rank:
        return SOUND
    if as_json:
        output.emit("consolidate", **_as_data(report))
    else:
        _print(report)
    return SOUND


@contextmanager
def _ranks(timeout_s: float) -> Iterator[int]:
    """Join the ranks that torchrun started, if it did; give this one's number."""
    count = _world_size()
    if count <= 1:
        yield 0
        return
    import torch.distributed as dist  # noqa: PLC0415  # alone, no torch is needed

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        # Perhaps a shell inside a job, whose variables were meant for others.
        click.echo(f"Waiting for {count} ranks, as WORLD_SIZE and RANK are set.", err=True)
    try:
        # Only its store is used; no collective runs.
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PhaseTimeoutError(
            f"The {count} ranks that WORLD_SIZE tells of did not meet within {timeout_s:g} s: "
            f"{' '.join(str(error).split())[:200]}.",
            phase="plan",
            next_step="Start all of them, by torchrun; or unset WORLD_SIZE, and this process does "
            "the work alone.",
        ) from error
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _world_size() -> int:
    """Return how many ranks a launcher told this process to be one of; 1 if none did."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return 1
    text = os.environ["WORLD_SIZE"]
    if not text.isascii() or not text.isdigit():
        raise click.UsageError(f"WORLD_SIZE is {text!r:.80}, which is no number: unset it.")
    return int(text)


def _renames(pairs: tuple[str, ...]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise click.BadParameter(f"{pair!r}: write OLD=NEW.", param_hint="--rename")
        found[old] = new
    return found or None


def _as_data(report: ConsolidationReport) -> dict[str, object]:
    return {
        "source": report.source_url,
        "url": report.output_url,
        "source_format": report.source_format,
        "save_id": report.save_id,
        "index": report.index_path,
        "fingerprint": report.fingerprint,
        "files": [
            {"name": file.name, "bytes": file.size_bytes, "crc32c": f"{file.crc32c:08x}"}
            for file in report.files
        ],
        "tensor_count": report.tensor_count,
        "tensor_bytes": report.total_bytes,
        "read_bytes": report.read_bytes,
        "sent_bytes": report.sent_bytes,
        "copied_bytes": report.copied_bytes,
        "resumed": report.resumed,
        "skipped": [
            {"fqn": one.fqn, "reason": one.reason, "because": one.because} for one in report.skipped
        ],
        "ties": report.ties,
        "removed": report.removed,
        "stale_exports": report.stale_exports,
        "seconds": report.seconds,
    }


def _print(report: ConsolidationReport) -> None:
    output.line(
        f"{report.output_url}: {len(report.files)} weight files, {report.tensor_count} tensors, "
        f"{output.size(report.total_bytes)} in {report.seconds:.1f} s."
    )
    if report.resumed:
        output.line(f"{len(report.resumed)} files were complete from an earlier run.")
    if report.skipped:
        output.line(f"{len(report.skipped)} values are in no weight file; --json names them.")
    if report.stale_exports:
        output.line(f"Exports of other saves: {', '.join(report.stale_exports)}.")
