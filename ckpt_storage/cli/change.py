"""`cp`, `convert`, `consolidate`, `rm`, `prune`: what makes checkpoints and what deletes them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

import click

from ckpt_storage.errors import InvalidInputError, PhaseTimeoutError
from ckpt_storage.export.consolidate import consolidate as consolidation
from ckpt_storage.export.conversion import FORMATS
from ckpt_storage.export.convert import convert as conversion
from ckpt_storage.export.copy import copy
from ckpt_storage.export.removal import find_exports
from ckpt_storage.export.thin import thin as thinning
from ckpt_storage.inspect.checkpoint import open_checkpoint
from ckpt_storage.manager.delete import delete
from ckpt_storage.manager.names import DEFAULT_TEMPLATE, StepNames
from ckpt_storage.manager.policies import (
    KeepBest,
    KeepClosest,
    KeepEvery,
    KeepLatest,
    KeepNewerThan,
    KeepPart,
    RetentionPolicy,
)
from ckpt_storage.manager.prune import prune as run
from ckpt_storage.manager.retention import PruneDecision, PruneReport
from ckpt_storage.options import Timeouts
from ckpt_storage.store import Location, open_store

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
from .output import SOUND, UNSOUND, check_root

_THINNED = ("url", "save_id", "was_thin", "dropped", "freed_bytes", "kept_bytes")
_BEST = re.compile(r"([^:]+):(min|max)(?::([1-9][0-9]{0,8}))?")


@click.command(short_help="Copy between any two storages, verified.")
@url_argument("src")
@url_argument("dst")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DST.")
@patterns_options
@threads_option
@memory_option
@page_cache_option
@reads("SRC, and of DST where that is of the same kind")
@storage_options("destination_storage", of="DST")
def cp(src: str, dst: str, *, as_json: bool, **options: Any) -> int:
    """Copy the checkpoint at SRC to the folder DST, every block checked on its way.

    With --include or --exclude, such as --exclude 'optim*', DST gets chosen values only. Shard
    files that are wanted whole are linked, or copied by the storage, where that is possible.

    DST shows the copy all at once, at the end. If it is interrupted, call it again: what is
    complete is not sent again. Copy an export by its own URL, such as SRC/hf.
    """
    report = copy(src, dst, progress=output.shows_progress(), **options)
    output.emit("cp", report, as_json=as_json)
    return SOUND


@click.command(short_help="Drop values of a checkpoint in place.")
@url_argument()
@click.option(
    "--drop",
    multiple=True,
    metavar="FQN",
    default=["optim*"],
    show_default=True,
    help="Names or patterns of what is dropped.",
)
@click.option("--yes", is_flag=True, help="Drop them. Without it, only show what would be dropped.")
@threads_option
@memory_option
@reads()
def thin(url: str, *, drop: tuple[str, ...], yes: bool, as_json: bool, **options: Any) -> int:
    """Show, or with --yes drop, values of the checkpoint at URL, such as the optimizer's state.

    The other values are linked, or copied by the storage, and the checkpoint is whole or thin at
    every instant. Dropped values cannot be restored.
    """
    summary: dict[str, Any]
    if yes:
        report = thinning(url, drop=drop, progress=output.shows_progress(), **options)
        summary = {key: getattr(report, key) for key in _THINNED}
        verdict = "They were dropped."
    else:
        with open_checkpoint(url, **options) as checkpoint:
            sizes = {entry.fqn: entry.size_bytes or 0 for entry in checkpoint.entries()}
            names = sorted(
                fqn for fqn in sizes if any(fnmatchcase(fqn, pattern) for pattern in drop)
            )
            freed = sum(sizes[fqn] for fqn in names)
            kept = sum(sizes.values()) - freed
            values = (checkpoint.url, checkpoint.save_id, not names, names, freed, kept)
            summary = dict(zip(_THINNED, values, strict=True))
        verdict = "They would be dropped; --yes does it."
    shown = {**summary, "dropped": f"{len(summary['dropped'])} values"}
    text = [*output.facts(shown), verdict if summary["dropped"] else "There is nothing to drop."]
    output.emit("thin", as_json=as_json, text=text, **summary, is_dry_run=not yes)
    return SOUND


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
@click.option(
    "--drop-unsupported",
    "unsupported",
    is_flag=True,
    callback=lambda _ctx, _param, is_set: "drop" if is_set else "error",
    help="Leave out what the format cannot hold.",
)
@click.option("--overwrite", is_flag=True, help="Replace what is at DST.")
@bytes_option("--max-file-bytes", help_text="Size of a file.", default="5GB")
@click.option(
    "--unsafe-pickle", is_flag=True, help="Unpickle anything: runs code of the author of SRC."
)
@memory_option
@page_cache_option
@reads("SRC, and of DST where that is of the same kind")
@storage_options("destination_storage", of="DST")
def convert(src: str, dst: str, *, as_json: bool, **options: Any) -> int:
    """Write the checkpoint at SRC to DST in another format, in bounded memory.

    SRC is a folder of any format that is read, or a file of torch.save (.pt, .pth, .bin, .ckpt).
    For weights that transformers reads, use consolidate.
    """
    report = conversion(src, dst, progress=output.shows_progress(), **options)
    output.emit("convert", report, as_json=as_json)
    return SOUND


def _renames(
    ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, str] | None:
    renames: dict[str, str] = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise click.BadParameter(f"{pair!r}: write OLD=NEW.", ctx=ctx, param=param)
        renames[old] = new
    return renames or None


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
    "--extra-file",
    "extra_files",
    multiple=True,
    metavar="FILE",
    help="Write this file, a path or URL, beside the weights.",
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

    The default of OUT is URL/hf. Under torchrun all ranks share the work:

    \b
    torchrun --nproc-per-node 8 -m ckpt_storage consolidate URL
    """
    with _ranks(meet_timeout) as rank:
        report = consolidation(url, out, progress=output.shows_progress(), **options)
    if not rank:
        names = ("output_url", "tensor_count", "total_bytes", "seconds")
        counts = {key: len(getattr(report, key)) for key in ("files", "resumed", "skipped")}
        text = output.facts({key: getattr(report, key) for key in names} | counts)
        output.emit("consolidate", report, as_json=as_json, text=text, resumed=report.resumed)
    return SOUND


@contextmanager
def _ranks(timeout_s: float) -> Iterator[int]:
    """Join the ranks that torchrun started, if any; yield the rank of this process."""
    is_one_of_many = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    text = os.environ["WORLD_SIZE"] if is_one_of_many else "1"
    if not text.isascii() or not text.isdigit():
        raise click.UsageError(f"WORLD_SIZE is {text!r:.80}, which is no number: unset it.")
    count = int(text)
    if count <= 1:
        yield 0
        return
    import torch.distributed as dist  # noqa: PLC0415  # alone, no torch is needed

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        # A shell inside a job may have inherited the variables of the job.
        output.note(f"Waiting for {count} ranks, as WORLD_SIZE and RANK are set.")
    try:
        # Only its store is used; no collective runs.
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PhaseTimeoutError(
            f"The {count} ranks of WORLD_SIZE did not meet within {timeout_s:g} s: "
            f"{' '.join(str(error).split())[:200]}.",
            phase="plan",
            next_step="Start all of them, by torchrun; or unset WORLD_SIZE, and this process does "
            "the work alone.",
        ) from error
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


@click.command(short_help="Delete one checkpoint.")
@url_argument()
@click.option("--yes", is_flag=True, help="Delete it. Without it, only show what would be deleted.")
@reads()
def rm(url: str, *, yes: bool, as_json: bool, **options: Any) -> int:
    """Show, or with --yes delete, the checkpoint at URL and its exports.

    Its commit is deleted first, so that no reader sees half a checkpoint. A record of a few hundred
    bytes stays, so that a save in flight fails; files of other tools stay, too.
    """
    with open_checkpoint(url, **options) as checkpoint:
        summary: dict[str, object] = {
            "url": checkpoint.url,
            "save_id": checkpoint.save_id,
            "step": checkpoint.step,
            "file_count": len(checkpoint.files),
            "total_bytes": sum(file.size_bytes for file in checkpoint.files),
        }
        if checkpoint.save_id is None:
            what = f"{checkpoint.url} was written by another tool ({checkpoint.format})."
            step = "Delete it with the tool that wrote it, or as a folder."
            raise InvalidInputError(what, next_step=step)
    location = Location.of(url, options["storage_options"])
    with closing(open_store(location, timeouts=Timeouts.of(options["timeout"]))) as store:
        summary["exports"] = find_exports(store)
    # A checkpoint that replaced what was shown is not deleted.
    is_deleted = yes and delete(url, expected_save_id=checkpoint.save_id, **options)
    verdict = "was deleted" if is_deleted else "would be deleted; --yes does it"
    text = [*output.facts(summary), f"This checkpoint {verdict}."]
    summary |= {"is_dry_run": not yes, "is_deleted": is_deleted}
    output.emit("rm", as_json=as_json, text=text, **summary)
    return SOUND


@click.command(short_help="Delete what no policy keeps.")
@url_argument("root")
@click.option("--keep-latest", type=click.IntRange(min=1), metavar="N", help="The N newest.")
@click.option(
    "--keep-every", type=click.IntRange(min=1), metavar="N", help="Steps that N divides, for good."
)
@click.option(
    "--keep-closest-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="The step closest to each multiple of N.",
)
@click.option(
    "--keep-closest-time",
    metavar="TIME",
    callback=duration,
    help="The checkpoint saved closest to each multiple of TIME: 1h, 1d.",
)
@click.option(
    "--keep-best",
    multiple=True,
    metavar="METRIC:min|max[:N]",
    help="The N best by a recorded metric, smallest or largest; by default 1.",
)
@click.option("--keep-newer-than", metavar="AGE", callback=duration, help="Younger steps: 12h, 7d.")
@click.option(
    "--keep-part",
    multiple=True,
    metavar="FQN",
    help="Thin all others, in place of deleting them: drop these names or patterns.",
)
@click.option("--names", metavar="TEMPLATE", default=DEFAULT_TEMPLATE, help="Folder names.")
@click.option("--yes", is_flag=True, help="Delete. Without it, only the plan is shown.")
@reads("ROOT")
def prune(  # one parameter for each option
    root: str,
    *,
    keep_latest: int | None,
    keep_every: int | None,
    keep_closest_steps: int | None,
    keep_closest_time: float | None,
    keep_best: tuple[str, ...],
    keep_newer_than: float | None,
    keep_part: tuple[str, ...],
    names: str,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Show, or with --yes delete, the checkpoints below ROOT that no --keep option keeps.

    The newest sound checkpoint is always kept, by step and by time; folders of other tools, and
    links, are never touched. Without --yes nothing is written, and ages go by this machine's clock;
    with it they go by the storage's, for which a probe is written and removed.
    """
    policies: list[RetentionPolicy] = [_best(text) for text in keep_best]
    policies += [KeepLatest(keep_latest)] if keep_latest is not None else []
    policies += [KeepEvery(keep_every)] if keep_every is not None else []
    if keep_closest_steps is not None:
        policies.append(KeepClosest(every_steps=keep_closest_steps))
    if keep_closest_time is not None:
        policies.append(KeepClosest(every_s=keep_closest_time))
    policies += [KeepNewerThan(keep_newer_than)] if keep_newer_than is not None else []
    policies += [KeepPart(drop=keep_part)] if keep_part else []
    if not policies:
        raise click.UsageError("Say what to keep, such as --keep-latest 3.")
    report = run(root, policies, names=names, dry_run=not yes, **options)
    if not (report.planned or report.leftovers or any(o.step is not None for o in report.kept)):
        _check_names(names, check_root(root, **options))
    keys = ("is_dry_run", "leftovers", "deleted", "thinned", "freed", "skipped", "failed")
    summary = {name: _decisions(getattr(report, name)) for name in ("kept", "planned", "parts")}
    summary |= {key: getattr(report, key) for key in keys}
    output.emit("prune", as_json=as_json, text=_lines(report), **summary)
    return UNSOUND if report.failed else SOUND


def _check_names(template: str, folders: list[str]) -> None:
    """Raise `InvalidInputError` if there are folders, and none is named by `template`."""
    if folders and all(StepNames(template).step_of(name) is None for name in folders):
        what = (
            f"No folder below ROOT is named {template!r}; one of {len(folders)} is {folders[0]!r}."
        )
        step = "Say by --names how the run spells its steps, such as 'checkpoint-{step}'."
        raise InvalidInputError(what, next_step=step)


def _best(text: str) -> KeepBest:
    match = _BEST.fullmatch(text)
    if match is None:
        raise click.BadParameter(
            f"{text!r}: write METRIC:min, METRIC:max or METRIC:min:3.", param_hint="--keep-best"
        )
    return KeepBest(match[1], "max" if match[2] == "max" else "min", int(match[3] or 1))


def _decisions(decisions: tuple[PruneDecision, ...]) -> list[dict[str, object]]:
    return [{"name": each.name, "step": each.step, "reasons": each.reasons} for each in decisions]


def _lines(report: PruneReport) -> Iterator[str]:
    rows = [
        *((each.name, each.step, "keep", "; ".join(each.reasons)) for each in report.kept),
        *((each.name, each.step, "thin", "; ".join(each.reasons)) for each in report.parts),
        *((each.name, each.step, "delete", "; ".join(each.reasons)) for each in report.planned),
        *((name, None, "free", "nothing is committed here") for name in report.leftovers),
    ]
    yield from output.table(("name", "step", "", "why"), rows, right="step")
    for what, reasons in (("Skipped", report.skipped), ("Failed", report.failed)):
        for name, why in reasons.items():
            yield f"{what} {name}: {why}"
    if report.is_dry_run:
        thinned = f"{len(report.parts)} would be thinned, " if report.parts else ""
        yield f"{thinned}{len(report.planned)} would be deleted; --yes does it."
        yield "Ages are by this machine's clock; with --yes they are by the storage's."
    else:
        thinned = f"{len(report.thinned)} thinned, " if report.parts else ""
        yield f"{thinned}{len(report.deleted)} deleted, {len(report.freed)} dead attempts freed."
