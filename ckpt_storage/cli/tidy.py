"""`rm` and `prune`: delete one checkpoint, or those that no policy keeps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import click

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.inspect.checkpoint import open_checkpoint
from ckpt_storage.manager.prune import delete
from ckpt_storage.manager.prune import prune as run
from ckpt_storage.manager.retention import (
    DEFAULT_TEMPLATE,
    Decision,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNewerThan,
    PruneReport,
    RetentionPolicy,
    StepNames,
)

from . import output
from .options import duration, reads, url_argument
from .output import FOUND, SOUND, check_root

_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*$)")
_BEST = re.compile(r"([^:]+):(min|max)(?::([1-9][0-9]{0,8}))?")


@click.command(short_help="Delete one checkpoint.")
@url_argument()
@click.option("--yes", is_flag=True, help="Delete. Without it, only what would go is shown.")
@reads()
def rm(url: str, *, yes: bool, as_json: bool, **options: Any) -> int:
    """Show, or with --yes delete, the checkpoint at URL and its exports.

    Its commit goes first, so that no reader meets a half. A record of a few hundred bytes stays,
    by which a save that was under way finds out; so does what another tool wrote.
    """
    with open_checkpoint(url, **options) as checkpoint:
        told = {
            "url": checkpoint.url,
            "save_id": checkpoint.save_id,
            "step": checkpoint.step,
            "file_count": len(checkpoint.files),
            "total_bytes": sum(file.size_bytes for file in checkpoint.files),
        }
        if checkpoint.save_id is None:
            raise InvalidInputError(
                f"{checkpoint.url} was written by another tool ({checkpoint.format}).",
                next_step="Delete it with the tool that wrote it, or as a folder.",
            )
    # What was shown goes, not what may have replaced it.
    is_deleted = yes and delete(url, expected_save_id=checkpoint.save_id, **options)
    verdict = "deleted" if is_deleted else "would be deleted; --yes does it"
    text = [*output.facts(told), f"This checkpoint {verdict}."]
    output.tell("rm", as_json=as_json, text=text, **told, is_dry_run=not yes, is_deleted=is_deleted)
    return SOUND


@click.command(short_help="Delete what no policy keeps.")
@url_argument("root")
@click.option("--keep-latest", type=click.IntRange(min=1), metavar="N", help="The N newest.")
@click.option(
    "--keep-every", type=click.IntRange(min=1), metavar="N", help="Steps that N divides, for good."
)
@click.option(
    "--keep-best",
    multiple=True,
    metavar="METRIC:min|max[:N]",
    help="The N best by a recorded metric, smallest or largest; by default one.",
)
@click.option("--keep-newer-than", metavar="AGE", callback=duration, help="Younger ones: 12h, 7d.")
@click.option("--names", metavar="TEMPLATE", default=DEFAULT_TEMPLATE, help="How steps are spelt.")
@click.option("--yes", is_flag=True, help="Delete. Without it, only the plan is shown.")
@reads("ROOT")
def prune(  # one parameter for each option
    root: str,
    *,
    keep_latest: int | None,
    keep_every: int | None,
    keep_best: tuple[str, ...],
    keep_newer_than: float | None,
    names: str,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Show, or with --yes delete, the checkpoints below ROOT that no --keep option keeps.

    The newest sound one is always kept, by step and by time; folders of other tools, and links,
    are never touched. Without --yes nothing is written, and ages go by this machine's clock; with
    it they go by the storage's, for which a probe is written and removed.
    """
    policies: list[RetentionPolicy] = [KeepBest(*_best(text)) for text in keep_best]
    policies += [KeepLatest(keep_latest)] if keep_latest is not None else []
    policies += [KeepEvery(keep_every)] if keep_every is not None else []
    policies += [KeepNewerThan(keep_newer_than)] if keep_newer_than is not None else []
    if not policies:
        raise click.UsageError("Say what to keep, such as --keep-latest 3.")
    report = run(root, policies, names=names, dry_run=not yes, **options)
    if not (report.planned or report.leftovers or any(o.step is not None for o in report.kept)):
        _check_names(names, check_root(root, **options))
    keys = ("is_dry_run", "leftovers", "deleted", "freed", "skipped", "failed")
    told = {"kept": _told(report.kept), "planned": _told(report.planned)}
    told |= {key: getattr(report, key) for key in keys}
    output.tell("prune", as_json=as_json, text=_lines(report), **told)
    return FOUND if report.failed else SOUND


def _check_names(template: str, folders: list[str]) -> None:
    """Raise `InvalidInputError` if there are folders, and none is named by `template`."""
    if folders and all(StepNames(template).step_of(name) is None for name in folders):
        templates = Counter(filter(None, map(_template_of, folders)))
        best, count = next(iter(templates.most_common(1)), ("", 0))
        fits = f"--names {best!r} fits {count} of {len(folders)}. " if best else ""
        raise InvalidInputError(
            f"None of the {len(folders)} folders below ROOT is named {template!r}.",
            next_step=f"{fits}Say by --names how the run spells its steps.",
        )


def _template_of(name: str) -> str:
    """Return how a folder's name spells its step, "" if it has no digits."""
    found = _LAST_NUMBER.search(name)
    if found is None:
        return ""
    padded = f":0{len(found[0])}d" if found[0].startswith("0") else ""
    return f"{name[: found.start()]}{{step{padded}}}{name[found.end() :]}"


def _best(text: str) -> tuple[str, Literal["min", "max"], int]:
    match = _BEST.fullmatch(text)
    if match is None:
        raise click.BadParameter(
            f"{text!r}: write METRIC:min, METRIC:max or METRIC:min:3.", param_hint="--keep-best"
        )
    return match[1], "max" if match[2] == "max" else "min", int(match[3] or 1)


def _told(decisions: tuple[Decision, ...]) -> list[dict[str, object]]:
    return [{"name": one.name, "step": one.step, "reasons": one.reasons} for one in decisions]


def _lines(report: PruneReport) -> Iterator[str]:
    rows = [
        *((one.name, one.step, "keep", "; ".join(one.reasons)) for one in report.kept),
        *((one.name, one.step, "delete", "; ".join(one.reasons)) for one in report.planned),
        *((name, None, "free", "nothing is committed here") for name in report.leftovers),
    ]
    yield from output.table(("name", "step", "", "why"), rows, right="step")
    for what, reasons in (("Skipped", report.skipped), ("Failed", report.failed)):
        for name, why in reasons.items():
            yield f"{what} {name}: {why}"
    if report.is_dry_run:
        yield f"{len(report.planned)} would be deleted; --yes does it."
        yield "Ages are by this machine's clock; with --yes they are by the storage's."
    else:
        yield f"{len(report.deleted)} deleted, {len(report.freed)} dead attempts freed."
