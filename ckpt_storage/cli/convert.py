"""`ckpt-storage convert SRC DST --to FORMAT`: a checkpoint in another format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt_storage.options import DEFAULT_MEMORY_LIMIT_BYTES

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
    from ckpt_storage.export.converting import TargetFormat
    from ckpt_storage.options import PageCache


_FORMATS = ("ckpt_storage", "dcp", "dcp_safetensors", "safetensors", "torch_save")


@click.command(short_help="Write it in another format.")
@url_argument("src")
@url_argument("dst")
@click.option(
    "--to",
    type=click.Choice(_FORMATS),
    required=True,
    help="ckpt_storage; dcp: torch's own; dcp_safetensors: torch's sharded files; safetensors: "
    "with an index, as Hugging Face has it; torch_save: one file.",
)
@click.option("--include", multiple=True, metavar="FQN", help="Names or patterns that go over.")
@click.option("--exclude", multiple=True, metavar="FQN", help="Names or patterns that do not.")
@click.option(
    "--drop-unsupported", is_flag=True, help="Leave out, and name, what FORMAT cannot hold."
)
@click.option("--overwrite", is_flag=True, help="Replace what is at DST.")
@click.option("--max-file-bytes", default="5GB", show_default=True, help="Size of a file.")
@click.option(
    "--unsafe-pickle", is_flag=True, help="Unpickle anything: runs code of whoever wrote SRC."
)
@memory_option
@page_cache_option
@json_option
@storage_options(of="SRC, and of DST where that is of the same kind")
@storage_options("destination_storage", of="DST")
@common
def convert(  # one parameter for each option
    src: str,
    dst: str,
    *,
    to: TargetFormat,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    drop_unsupported: bool,
    overwrite: bool,
    max_file_bytes: str,
    unsafe_pickle: bool,
    memory_limit_bytes: int | None,
    page_cache: PageCache,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    destination_storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    """Write the checkpoint at SRC to DST in another format, in bounded memory.

    SRC is a folder of any format that is read, or a file of torch.save (.pt, .pth, .bin, .ckpt).
    For a model as transformers wants it, use consolidate.
    """
    from ckpt_storage.export.converting import convert as run  # noqa: PLC0415  # called, not imported

    report = run(
        src,
        dst,
        to=to,
        include=include or None,
        exclude=exclude or None,
        unsupported="drop" if drop_unsupported else "error",
        overwrite=overwrite,
        max_file_bytes=byte_count(max_file_bytes, "--max-file-bytes"),
        unsafe_pickle=unsafe_pickle,
        storage_options=storage_options,
        destination_storage_options=destination_storage_options,
        timeout=timeout,
        progress=output.shows_progress(),
        memory_limit_bytes=memory_limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES,
        page_cache=page_cache,
    )
    if as_json:
        output.emit(
            "convert",
            source=report.source_url,
            source_format=report.source_format,
            url=report.url,
            format=report.format,
            save_id=report.save_id,
            kept_count=report.kept_count,
            tensor_count=report.tensor_count,
            object_count=report.blob_count,
            tensor_bytes=report.total_bytes,
            dropped=report.dropped,
            excluded=report.excluded,
            seconds=report.seconds,
        )
        return SOUND
    output.line(
        f"{report.url}: {report.format} of {report.source_format}, {report.tensor_count} tensors "
        f"and {report.blob_count} objects, {output.size(report.total_bytes)} in "
        f"{report.seconds:.1f} s."
    )
    if report.kept_count:
        output.line(f"{report.kept_count} files of an earlier call were sound, and kept.")
    if report.dropped:
        output.line(f"Left out, because {report.format} cannot hold them:")
        for fqn in report.dropped:
            output.line(f"  {fqn}")
    return SOUND
