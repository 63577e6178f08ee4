"""`ls`, `show`, `tree`, `verify`, `diff` and `doctor`: what there is, and whether it is sound."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import click

from ckpt_storage.inspect import verify as verification
from ckpt_storage.inspect.checkpoint import Checkpoint, open_checkpoint
from ckpt_storage.inspect.doctor import DEFAULT_TIMEOUT_S, Diagnosis, Probe, diagnose
from ckpt_storage.inspect.lazy_tensor import LazyTensor
from ckpt_storage.inspect.verify import VerifyReport
from ckpt_storage.manager.root import list_checkpoints

from . import output
from .options import (
    bytes_option,
    memory_option,
    reads,
    storage_options,
    threads_option,
    url_argument,
)
from .output import COULD_NOT_RUN, FOUND, SOUND, check_root, tensor_of

_MOST_CHUNKS = 40
_SLOT = ("slot", "type", "created_at", "host", "pid", "save_id", "fenced")


@click.command(short_help="Committed checkpoints below a root.")
@url_argument("root")
@reads("ROOT")
def ls(root: str, *, as_json: bool, **options: Any) -> int:
    """List the committed checkpoints directly below ROOT, oldest first.

    What is still being saved, or died half-way, is not listed: it is no checkpoint. A root that
    does not exist is an error; on object storage that is one below which nothing lies. A folder
    that may not be read is listed as unreadable; the exit code is 2 then.
    """
    infos = list_checkpoints(root, **options)
    if not infos:
        check_root(root, **options)
    problems = [info.problem for info in infos if info.problem is not None]
    for problem in problems:
        click.echo(problem, err=True)
    if as_json:
        output.emit("ls", checkpoints=infos)
    elif not infos:
        click.echo("No committed checkpoint.", err=True)
    else:
        head = ["name", "step", "created", "format", "save id"]
        head += ["metrics"] if any(info.metrics for info in infos) else []
        rows = [
            [i.name, i.step, i.created_at, i.format, i.save_id, _metrics(i.metrics)] for i in infos
        ]
        output.table(head, [row[: len(head)] for row in rows], right="step")
    return COULD_NOT_RUN if problems else SOUND


@click.command(short_help="What a checkpoint or a tensor is.")
@url_argument()
@click.argument("fqn", required=False)
@click.option("--files", "with_files", is_flag=True, help="Also list files and ranks.")
@click.option("--history", "with_history", is_flag=True, help="Also list the commit slots.")
@reads()
def show(
    url: str,
    fqn: str | None,
    *,
    with_files: bool,
    with_history: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Show what the checkpoint at URL is; with FQN, how one tensor is stored.

    Reads documents only, no tensor.
    """
    with open_checkpoint(url, **options) as checkpoint:
        if fqn is None:
            more: dict[str, Any] = {"files": checkpoint.files} if with_files else {}
            if with_history:
                slots = checkpoint.history
                more["history"] = [{key: getattr(one, key) for key in _SLOT} for one in slots]
            _show_checkpoint(checkpoint, more, as_json=as_json)
        elif (tensor := tensor_of(checkpoint, fqn)) is not None:
            _show_tensor(tensor, as_json=as_json)
        elif as_json:
            output.emit("show_value", fqn=fqn, kind="object", tensor=None)
        else:
            output.facts({"name": fqn, "kind": "object, no tensor"})
    return SOUND


def _show_checkpoint(checkpoint: Checkpoint, more: Mapping[str, Any], *, as_json: bool) -> None:
    info, entries = checkpoint.info, checkpoint.entries()
    tensor_count = sum(entry.dtype is not None for entry in entries)
    told: dict[str, Any] = {
        "url": checkpoint.url,
        "format": checkpoint.format,
        "save_id": checkpoint.save_id,
        "step": checkpoint.step,
        "metrics": info.metrics,
        "created_at": info.created_at,
        "world_size": checkpoint.world_size,
        "tensor_count": tensor_count,
        "object_count": len(entries) - tensor_count,
        "tensor_bytes": checkpoint.nbytes,
    }
    if as_json:
        output.emit("show", **told, **more)
        return
    told["metrics"] = _metrics(info.metrics)
    told["tensor_bytes"] = _bytes(checkpoint.nbytes)
    output.facts({name.replace("_", " "): value for name, value in told.items()})
    if "files" in more:
        rows = [(file.path, file.rank, f"{file.size_bytes:,}") for file in more["files"]]
        output.line()
        output.table(("file", "rank", "bytes"), rows, right="rank bytes")
    if "history" in more:
        output.line()
        slots = [one | {"fenced": " ".join(one["fenced"])} for one in more["history"]]
        output.table(_SLOT, [one.values() for one in slots], right="slot pid")


def _show_tensor(tensor: LazyTensor, *, as_json: bool) -> None:
    sharding = tensor.sharding
    told: dict[str, Any] = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    if as_json:
        chunks = [{"offsets": c.offsets, "sizes": c.sizes, "rank": c.rank} for c in sharding]
        told |= {"size_bytes": tensor.nbytes, "chunks": chunks}
        output.emit("show_value", fqn=tensor.fqn, kind="tensor", tensor=told)
        return
    more = {"bytes": _bytes(tensor.nbytes), "sharding": sharding}
    output.facts({"name": tensor.fqn, **told, **more})
    if len(sharding) > 1:
        rows = [
            (list(chunk.offsets), list(chunk.sizes), chunk.rank)
            for chunk in islice(sharding, _MOST_CHUNKS)
        ]
        output.line()
        output.table(("offsets", "sizes", "rank"), rows, right="rank")
        if len(sharding) > _MOST_CHUNKS:
            output.line(f"... and {len(sharding) - _MOST_CHUNKS} more chunks; --json lists all.")


@click.command(short_help="Names, types, shapes and sizes as a tree.")
@url_argument()
@click.option("--depth", type=click.IntRange(min=1), help="Show so many levels.")
@reads()
def tree(url: str, *, depth: int | None, as_json: bool, **options: Any) -> int:
    """Show the names in the checkpoint at URL with their types, shapes and sizes.

    Layers that are alike are shown once. Reads documents only. --json lists every value; one
    without a dtype is an object.
    """
    with open_checkpoint(url, **options) as checkpoint:
        if as_json:
            keys = ("fqn", "dtype", "shape", "size_bytes")
            values = [{key: getattr(one, key) for key in keys} for one in checkpoint.entries()]
            output.emit("tree", url=checkpoint.url, values=values)
        else:
            click.echo(str(checkpoint.tree(depth)))
    return SOUND


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in metrics.items())


def _bytes(count: int) -> str:
    return f"{output.size(count)} ({count:,})"


@click.command(short_help="Is every byte what was written?")
@url_argument()
@click.option(
    "--shallow", is_flag=True, help="Check documents and lengths of files; read no tensor."
)
@threads_option
@memory_option
@reads()
def verify(url: str, *, shallow: bool, as_json: bool, **options: Any) -> int:
    """Check the checkpoint at URL: every byte of every file against its checksum.

    Exits with 0 if it is sound and with 1 if it is not; names each file, rank, tensor and offset
    that is damaged, and what to do. Of checkpoints of other writers, which carry no checksums,
    only that all files are there and long enough.
    """
    report = verification.verify(url, deep=not shallow, progress=output.shows_progress(), **options)
    if as_json:
        output.emit("verify", report, ok=report.ok)
    else:
        _print_report(report, "documents and lengths" if shallow else "")
    return SOUND if report.ok else FOUND


def _print_report(report: VerifyReport, looked_at: str) -> None:
    for problem in [*report.problems, *report.notes]:
        output.line(f"- {problem.message}")
        output.line(f"  {problem.next_step}")
    for export in report.exports:
        if export.is_stale:
            output.line(f"The export {export.path or '.'} is of another save ({export.save_id}).")
    if report.format != "ckpt_storage":
        looked_at = "documents and lengths"
    checked = looked_at or output.size(report.checked_bytes)
    count = len(report.problems)
    verdict = "sound" if report.ok else f"{count} problem{'s' if count != 1 else ''}"
    output.line(f"{report.url}: {verdict}; {report.file_count} files, {checked} checked.")


@click.command(short_help="How two checkpoints differ.")
@url_argument("left")
@url_argument("right")
@click.option(
    "--no-values",
    "values",
    flag_value=False,
    default=True,
    type=bool,
    help="Compare names, shapes and types; read no tensor.",
)
@click.option("--prefix", help="Compare only names that begin so.")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="Relative tolerance.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, help="Absolute tolerance.")
@memory_option
@reads("LEFT, and of RIGHT unless it has its own")
@storage_options("other_storage", of="RIGHT")
def diff(  # one parameter for each option
    left: str,
    right: str,
    *,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    other_storage_options: dict[str, Any] | None,
    timeout: float | None,
    memory_limit_bytes: int | None,
    **how: Any,
) -> int:
    """Compare the checkpoints LEFT and RIGHT: names, shapes, types and values.

    Exits with 0 if they are equal and with 1 if they differ. Shardings and formats may differ.
    """
    limits: dict[str, Any] = {"timeout": timeout, "memory_limit_bytes": memory_limit_bytes}
    others = other_storage_options or storage_options
    with (
        open_checkpoint(left, storage_options=storage_options, **limits) as first,
        open_checkpoint(right, storage_options=others, **limits) as second,
    ):
        found = first.diff(second, progress=output.shows_progress(), **how)
    if as_json:
        output.emit("diff", found, is_equal=found.is_equal)
    else:
        click.echo(str(found))
    return SOUND if found.is_equal else FOUND


@click.command(short_help="What a storage can do and how fast.")
@url_argument()
@bytes_option("--size", "large_bytes", default="16MiB", help_text="Bytes of a large object.")
@reads()
def doctor(url: str, *, as_json: bool, timeout: float | None, **options: Any) -> int:
    """Try out the storage at URL: abilities, rights, latency, throughput, clock.

    Writes below a name of its own there and removes it. Exits with 1 if checkpoints cannot be
    saved to it and loaded from it.
    """
    found = diagnose(url, timeout=timeout or DEFAULT_TIMEOUT_S, **options)
    if as_json:
        output.emit("doctor", found, ok=found.ok)
    else:
        _print_diagnosis(found)
    return SOUND if found.ok else FOUND


def _print_diagnosis(found: Diagnosis) -> None:
    output.line(f"{found.url} ({found.kind})")
    rows = [
        (one.name, one.outcome, _ms(one.seconds), _rate(one), one.detail) for one in found.probes
    ]
    output.table(("can it", "", "takes", "", ""), rows, right="takes")
    if found.clock_offset_s is not None:
        output.line(f"Its clock is {found.clock_offset_s:+.1f} s from this machine's.")
    output.line("What to do:" if found.advice else "The defaults suit it.")
    for advice in found.advice:
        output.line(f"- {advice}")
    for path in found.leftovers:
        output.line(f"Could not remove {path}.")
    can = "can" if found.ok else "cannot"
    output.line(f"Checkpoints {can} be saved and loaded here.")


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.1f} ms"


def _rate(one: Probe) -> str:
    if not one.size_bytes or not one.seconds:
        return ""
    return f"{output.size(round(one.size_bytes / one.seconds))}/s"
