"""`verify`, `diff` and `doctor`: is it sound, is it equal, does the storage do."""

from __future__ import annotations

from typing import Any

import click

from ckpt_storage.inspect import verify as verification
from ckpt_storage.inspect.checkpoint import open_checkpoint
from ckpt_storage.inspect.doctor import DEFAULT_TIMEOUT_S, Diagnosis, Probe, diagnose
from ckpt_storage.inspect.verify import VerifyReport

from . import output
from .options import (
    bytes_option,
    memory_option,
    reads,
    storage_options,
    threads_option,
    url_argument,
)
from .output import FOUND, SOUND


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
