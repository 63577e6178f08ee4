"""`cp`, `convert` and `consolidate`: the same values somewhere else, or in another format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import click

from ckpt_storage.errors import PhaseTimeoutError
from ckpt_storage.export.consolidate import consolidate as consolidation
from ckpt_storage.export.convert import FORMATS
from ckpt_storage.export.convert import convert as conversion
from ckpt_storage.export.copy import copy

from . import output
from .options import (
    bytes_option,
    duration,
    memory_option,
    page_cache_option,
    patterns_options,
    reads,
    storage_options,
    threads_option,
    url_argument,
)
from .output import FOUND, SOUND


@click.command(short_help="Copy between any two storages, verified.")
@url_argument("src")
@url_argument("dst")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DST.")
@click.option(
    "--copies",
    type=click.Choice(["auto", "never"]),
    default="auto",
    show_default=True,
    help="Whether the storage copies by itself what it can.",
)
@threads_option
@memory_option
@page_cache_option
@reads("SRC, and of DST where that is of the same kind")
@storage_options("destination_storage", of="DST")
def cp(src: str, dst: str, *, as_json: bool, **options: Any) -> int:
    """Copy the checkpoint at SRC to the folder DST, every block checked on its way.

    DST shows the copy all at once, at the end. If it is interrupted, call it again: what is
    complete is not sent again. Exits with 1 if it is copied but an export beside it could not be.
    """
    report = copy(src, dst, progress=output.shows_progress(), **options)
    output.tell("cp", report, as_json=as_json)
    return FOUND if report.failed_exports else SOUND


@click.command(short_help="Write it in another format.")
@url_argument("src")
@url_argument("dst")
@click.option(
    "--to",
    type=click.Choice(FORMATS),
    default="ckpt_storage",
    show_default=True,
    help="ckpt_storage; dcp: torch's own; dcp_safetensors: torch's sharded files; safetensors: "
    "with an index, as Hugging Face has it; torch_save: one file.",
)
@patterns_options
@click.option("--drop-unsupported", is_flag=True, help="Leave out what the format cannot hold.")
@click.option("--overwrite", is_flag=True, help="Replace what is at DST.")
@bytes_option("--max-file-bytes", help_text="Size of a file.", default="5GB")
@click.option(
    "--unsafe-pickle", is_flag=True, help="Unpickle anything: runs code of whoever wrote SRC."
)
@memory_option
@page_cache_option
@reads("SRC, and of DST where that is of the same kind")
@storage_options("destination_storage", of="DST")
def convert(
    src: str,
    dst: str,
    *,
    as_json: bool,
    drop_unsupported: bool,
    memory_limit_bytes: int | None,
    **options: Any,
) -> int:
    """Write the checkpoint at SRC to DST in another format, in bounded memory.

    SRC is a folder of any format that is read, or a file of torch.save (.pt, .pth, .bin, .ckpt).
    For a model as transformers wants it, use consolidate.
    """
    if drop_unsupported:
        options["unsupported"] = "drop"
    if memory_limit_bytes is not None:
        options["memory_limit_bytes"] = memory_limit_bytes
    report = conversion(src, dst, progress=output.shows_progress(), **options)
    output.tell("convert", report, as_json=as_json)
    return SOUND


def _renames(
    ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise click.BadParameter(f"{pair!r}: write OLD=NEW.", ctx=ctx, param=param)
        found[old] = new
    return found or None


@click.command(short_help="Export to Hugging Face safetensors.")
@url_argument()
@url_argument("out", required=False)
@bytes_option("--max-file-bytes", help_text="Size of a weight file.", default="5GB")
@click.option("--dtype", help="Cast floating-point tensors to this, such as bfloat16.")
@patterns_options
@click.option(
    "--rename",
    multiple=True,
    metavar="OLD=NEW",
    callback=_renames,
    help="Name in the weight files.",
)
@click.option(
    "--tied",
    type=click.Choice(["drop", "keep"]),
    default="drop",
    show_default=True,
    help="What happens to aliases of tied tensors.",
)
@click.option(
    "--meet-timeout",
    metavar="SECONDS",
    default="5m",
    show_default=True,
    callback=duration,
    help="How long ranks under torchrun wait for one another to start.",
)
@memory_option
@page_cache_option
@reads("URL, and of OUT where that is of the same kind")
@storage_options("output_storage", of="OUT")
def consolidate(
    url: str, out: str | None, *, meet_timeout: float, as_json: bool, **options: Any
) -> int:
    r"""Write the model in the checkpoint at URL as Hugging Face safetensors to OUT.

    OUT is URL/hf unless it is given. Under torchrun all ranks share the work:

    \b
    torchrun --nproc-per-node 8 -m ckpt_storage consolidate URL
    """
    with _ranks(meet_timeout) as rank:
        report = consolidation(url, out, progress=output.shows_progress(), **options)
    if not rank:
        counts = {key: len(getattr(report, key)) for key in ("files", "resumed", "skipped")}
        names = ("output_url", "tensor_count", "total_bytes", "seconds")
        text = output.facts({**{key: getattr(report, key) for key in names}, **counts})
        output.tell("consolidate", report, as_json=as_json, text=text, resumed=report.resumed)
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
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return 1
    text = os.environ["WORLD_SIZE"]
    if not text.isascii() or not text.isdigit():
        raise click.UsageError(f"WORLD_SIZE is {text!r:.80}, which is no number: unset it.")
    return int(text)
