"""`ls`, `show`, `tree`, `verify`, `diff` and `doctor`: what there is, and whether it is sound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import click

from ckpt_storage.commit.info import CheckpointInfo, StorageUsage
from ckpt_storage.inspect import verify as verification
from ckpt_storage.inspect.checkpoint import open_checkpoint
from ckpt_storage.inspect.doctor import DEFAULT_TIMEOUT_S, Probe, diagnose
from ckpt_storage.inspect.lazy_tensor import LazyTensor
from ckpt_storage.inspect.verify import VerifyReport
from ckpt_storage.inspect.views import human_bytes
from ckpt_storage.manager.listing import list_checkpoints
from ckpt_storage.manager.usage import usage_of
from ckpt_storage.observe.stats import OperationStats

from . import output
from .options import (
    bytes_option,
    memory_option,
    reads,
    storage_options,
    threads_option,
    url_argument,
)
from .output import COULD_NOT_RUN, SOUND, UNSOUND, check_root, tensor_of

_SLOT = ("slot", "type", "created_at", "host", "pid", "save_id", "fenced")


@click.command(short_help="Committed checkpoints below a root.")
@url_argument("root")
@click.option(
    "-l", "--long", "is_long", is_flag=True, help="Also bytes, groups, seconds, ranks, the slowest."
)
@reads("ROOT")
def ls(root: str, *, is_long: bool, as_json: bool, **options: Any) -> int:
    """List the committed checkpoints directly below ROOT, by name.

    A save that is running or has died is not listed: it is no checkpoint. A root that
    does not exist is an error; on object storage that is a root below which nothing lies. A folder
    that may not be read is listed as unreadable; the exit code is 2 then. "own" are the bytes that
    no other checkpoint shares by hard links. -l reads the manifest of each.
    """
    infos = list_checkpoints(root, usage=is_long, **options)
    if not infos:
        check_root(root, **options)
    problems = [info.problem for info in infos if info.problem is not None]
    for problem in problems:
        output.note(problem)
    if not (infos or as_json):
        output.note("No committed checkpoint.")
    head = ["name", "step", "created", "format", "save id"]
    rows: list[list[object]] = [[i.name, i.step, i.created_at, i.format, i.save_id] for i in infos]
    # Columns without a value are left out.
    for key in ("metrics", "part"):
        if any(getattr(info, key) for info in infos):
            head.append(key)
            rows = [[*row, getattr(info, key)] for row, info in zip(rows, infos, strict=True)]
    if is_long:
        head += ["size", "own", "groups", "seconds", "ranks", "slowest"]
        rows = [[*row, *_long(info)] for row, info in zip(rows, infos, strict=True)]
    text = output.table(head, rows, right="step size own seconds ranks")
    output.emit("ls", as_json=as_json, text=text, checkpoints=infos)
    return COULD_NOT_RUN if problems else SOUND


def _long(info: CheckpointInfo) -> tuple[str, ...]:
    """Return the columns of `ls -l`, empty where nothing is known."""
    usage, stats = info.usage, info.stats
    columns = ["", "", "", "", "", ""]
    if usage is not None:
        sizes = human_bytes(usage.apparent_bytes), human_bytes(usage.own_bytes)
        columns[:3] = *sizes, _groups_text(usage)
    if stats is not None:
        columns[3:5] = f"{stats.seconds:.1f}", str(stats.world_size)
        if stats.world_size > 1:
            share = f"{stats.slowest_share:.0%}"
            columns[5] = f"rank {stats.slowest_rank}, {stats.slowest_s:.1f} s, {share}"
    return tuple(columns)


def _groups_text(usage: StorageUsage) -> str:
    pairs = usage.group_bytes.items()
    return ", ".join(f"{group or 'other'} {human_bytes(size)}" for group, size in pairs)


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

    Reads documents only, no tensor. "own bytes" are those that no other checkpoint shares by hard
    links.
    """
    with open_checkpoint(url, **options) as checkpoint:
        if fqn is not None:
            _show_value(tensor_of(checkpoint, fqn), fqn, as_json=as_json)
            return SOUND
        more: dict[str, Any] = {"files": checkpoint.files} if with_files else {}
        if with_history:
            slots = checkpoint.history
            more["history"] = [{key: getattr(slot, key) for key in _SLOT} for slot in slots]
        entries = checkpoint.entries()
        tensor_count = sum(entry.dtype is not None for entry in entries)
        handle = checkpoint._handle  # noqa: SLF001  # of this package
        usage = None if handle.manifest is None else usage_of(handle.manifest, handle.location)
        summary: dict[str, Any] = {
            "url": checkpoint.url,
            "format": checkpoint.format,
            "save_id": checkpoint.save_id,
            "step": checkpoint.step,
            "metrics": checkpoint.info.metrics,
            "part": checkpoint.info.part,
            "created_at": checkpoint.info.created_at,
            "world_size": checkpoint.world_size,
            "tensor_count": tensor_count,
            "object_count": len(entries) - tensor_count,
            "tensor_bytes": checkpoint.nbytes,
            "usage": usage,
            "stats": checkpoint.info.stats,
        }
    files = [
        (file.path, file.rank, file.group, f"{file.size_bytes:,}") for file in more.get("files", ())
    ]
    text = itertools.chain(
        output.facts(
            {**summary, **_usage_facts(usage), "stats": None, **_save_facts(summary["stats"])}
        ),
        output.table(("file", "rank", "group", "bytes"), files, right="rank bytes"),
        output.table(_SLOT, [slot.values() for slot in more.get("history", ())], right="slot pid"),
    )
    output.emit("show", as_json=as_json, text=text, **summary, **more)
    return SOUND


def _usage_facts(usage: StorageUsage | None) -> dict[str, object]:
    if usage is None:
        return {"usage": None}
    return {
        "usage": None,
        "groups": _groups_text(usage),
        "apparent_bytes": usage.apparent_bytes,
        "own_bytes": usage.own_bytes,
    }


def _save_facts(stats: OperationStats | None) -> dict[str, object]:
    if stats is None:
        return {}
    share = f"{stats.slowest_share:.0%} of the bytes"
    return {
        "save_seconds": stats.seconds,
        "phase_seconds": stats.phase_s,
        "slowest_rank": f"{stats.slowest_rank}: {stats.slowest_s:.3g} s, {share}",
        "retries": stats.retry_count,
    }


def _show_value(tensor: LazyTensor | None, fqn: str, *, as_json: bool) -> None:
    if tensor is None:
        output.emit("show_value", as_json=as_json, fqn=fqn, kind="object", tensor=None)
        return
    chunks = [{"offsets": c.offsets, "sizes": c.sizes, "rank": c.rank} for c in tensor.sharding]
    summary = {"dtype": tensor.dtype, "shape": tensor.shape, "size_bytes": tensor.nbytes}
    text = itertools.chain(
        output.facts({"fqn": fqn, **summary, "sharding": str(tensor.sharding)}),
        output.table(
            ("offsets", "sizes", "rank"), [chunk.values() for chunk in chunks], right="rank"
        ),
    )
    whole = {**summary, "chunks": chunks}
    output.emit("show_value", as_json=as_json, text=text, fqn=fqn, kind="tensor", tensor=whole)


@click.command(short_help="Names, types, shapes and sizes as a tree.")
@url_argument()
@click.option("--depth", type=click.IntRange(min=1), help="Number of levels to show.")
@reads()
def tree(url: str, *, depth: int | None, as_json: bool, **options: Any) -> int:
    """Show the names in the checkpoint at URL with their types, shapes and sizes.

    Layers that are alike are shown once. Reads documents only. --json lists every value;
    an object has no dtype.
    """
    with open_checkpoint(url, **options) as checkpoint:
        keys = ("fqn", "dtype", "shape", "size_bytes")
        values = [{key: getattr(entry, key) for key in keys} for entry in checkpoint.entries()]
        text = () if as_json else str(checkpoint.tree(depth)).splitlines()
        output.emit("tree", as_json=as_json, text=text, url=checkpoint.url, values=values)
    return SOUND


@click.command(short_help="Is every byte what was written?")
@url_argument()
@click.option("--shallow", is_flag=True, help="Check documents and lengths only; read no tensor.")
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
    text = _verdict(report, is_deep=not shallow)
    output.emit("verify", report, as_json=as_json, text=text, ok=report.ok)
    return SOUND if report.ok else UNSOUND


def _verdict(report: VerifyReport, *, is_deep: bool) -> Iterator[str]:
    for problem in [*report.problems, *report.notes]:
        yield f"- {problem.message}"
        yield f"  {problem.next_step}"
    for export in report.exports:
        if export.is_stale:
            yield f"The export {export.path or '.'} is of another save ({export.save_id})."
        if export.is_unfinished:
            yield f"The export {export.path} is not finished; consolidate again, or delete it."
    if report.link_counts:
        yield f"Linked to other checkpoints: {', '.join(sorted(report.link_counts))}"
    has_checksums = is_deep and report.format == "ckpt_storage"
    checked = human_bytes(report.checked_bytes) if has_checksums else "documents and lengths"
    verdict = "sound" if report.ok else f"problems: {len(report.problems)}"
    yield f"{report.url}: {verdict}; {report.file_count} files, {checked} checked."


@click.command(short_help="How two checkpoints differ.")
@url_argument("left")
@url_argument("right")
@click.option("--values/--no-values", default=True, help="Whether to read and compare elements.")
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
        report = first.diff(second, progress=output.shows_progress(), **how)
    text = str(report).splitlines()
    output.emit("diff", report, as_json=as_json, text=text, is_equal=report.is_equal)
    return SOUND if report.is_equal else UNSOUND


@click.command(short_help="What a storage can do and how fast.")
@url_argument()
@bytes_option("--size", "large_bytes", default="16MiB", help_text="Bytes of a large object.")
@reads()
def doctor(url: str, *, as_json: bool, timeout: float | None, **options: Any) -> int:
    """Test the storage at URL: abilities, rights, latency, throughput, clock.

    Writes below a new name there and removes it. Exits with 1 if checkpoints cannot be
    saved to it and loaded from it.
    """
    diagnosis = diagnose(url, timeout=timeout or DEFAULT_TIMEOUT_S, **options)
    probes = [
        (probe.name, probe.outcome, probe.seconds, _rate(probe), probe.detail)
        for probe in diagnosis.probes
    ]
    facts = {key: getattr(diagnosis, key) for key in ("url", "kind", "clock_offset_s")}
    can = "can" if diagnosis.ok else "cannot"
    text = itertools.chain(
        output.facts(facts),
        output.table(("can it", "answer", "seconds", "rate", "detail"), probes, right="seconds"),
        (f"- {advice}" for advice in diagnosis.advice),
        (f"Could not remove {path}." for path in diagnosis.leftovers),
        [f"Checkpoints {can} be saved and loaded here."],
    )
    output.emit("doctor", diagnosis, as_json=as_json, text=text, ok=diagnosis.ok)
    return SOUND if diagnosis.ok else UNSOUND


def _rate(probe: Probe) -> str:
    return f"{human_bytes(round(probe.size_bytes / probe.seconds))}/s" if probe.seconds else ""
