"""`ckpt-storage prune ROOT`: delete what no policy keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from . import output
from .options import common, duration_s, json_option, storage_options, url_argument
from .output import FOUND, SOUND, check_root

if TYPE_CHECKING:
    from ckpt_storage.manager.pruning import PruneReport
    from ckpt_storage.manager.retention import Decision, RetentionPolicy


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
@click.option("--keep-newer-than", metavar="AGE", help="Younger ones: 12h, 7d.")
@click.option(
    "--min-age",
    metavar="AGE",
    default="0",
    help="Delete nothing that was committed less than AGE ago; by default nothing is too young. A "
    "job that still reads an older checkpoint loses it: keep several, such as --keep-latest 3.",
)
@click.option("--names", metavar="TEMPLATE", help="How steps are spelt; default 'step-{step:08d}'.")
@click.option("--yes", is_flag=True, help="Delete. Without it, only the plan is shown.")
@json_option
@storage_options(of="ROOT")
@common
def prune(  # one parameter for each option
    root: str,
    *,
    keep_latest: int | None,
    keep_every: int | None,
    keep_best: tuple[str, ...],
    keep_newer_than: str | None,
    min_age: str,
    names: str | None,
    yes: bool,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    """Show, or with --yes delete, the checkpoints below ROOT that no --keep option keeps.

    The newest sound one is always kept, by step and by time; folders of other tools, and links,
    are never touched. Without --yes nothing is written, and ages go by this machine's clock; with
    it they go by the storage's, for which a probe is written and removed.
    """
    from ckpt_storage.manager.pruning import prune_checkpoints  # noqa: PLC0415  # called, not imported
    from ckpt_storage.manager.stepnames import DEFAULT_TEMPLATE  # noqa: PLC0415  # as above

    template = names or DEFAULT_TEMPLATE

    policies = _policies(keep_latest, keep_every, keep_best, keep_newer_than)
    if not policies:
        raise click.UsageError("Say what to keep, such as --keep-latest 3.")
    report = prune_checkpoints(
        root,
        policies,
        names=template,
        dry_run=not yes,
        min_age=_age(min_age, "--min-age"),
        storage_options=storage_options,
        timeout=timeout,
        on_step=lambda name, number, count: output.notice(f"Deleting {name} ({number} of {count})"),
    )
    plan = report.plan
    if not (plan.deleted or plan.leftovers or any(one.step is not None for one in plan.kept)):
        _check_names(root, template, check_root(root, storage_options, timeout))
    if as_json:
        output.emit("prune", **_as_data(report))
        return FOUND if report.failed else SOUND
    _print(report)
    if report.is_dry_run and (keep_newer_than or _age(min_age, "--min-age")):
        output.line("Ages are by this machine's clock; with --yes they are by the storage's.")
    hint = _hint([one.name for one in plan.kept if one.step is None], at_least=2)
    if hint:
        output.line(f"Other names were left alone: {hint}.")
    return FOUND if report.failed else SOUND


def _check_names(root: str, template: str, folders: list[str]) -> None:
    """Raise `InvalidInputError` if `root` has folders, and none is named by `template`."""
    from ckpt_storage.errors import InvalidInputError  # noqa: PLC0415  # called, not imported
    from ckpt_storage.manager.stepnames import StepNames  # noqa: PLC0415  # as above
    from ckpt_storage.store import Location  # noqa: PLC0415  # as above

    if folders and all(StepNames(template).step_of(name) is None for name in folders):
        url = Location.of(root).url
        hint = _hint(folders, at_least=1)
        raise InvalidInputError(
            f"None of the {len(folders)} folders of {url} is named {template!r}.",
            path=url,
            next_step=f"{hint}." if hint else "Say by --names how the run spells its steps.",
        )


def _hint(folders: list[str], *, at_least: int) -> str | None:
    """Return which template most of `folders` are named by; None if it is of fewer than that."""
    from ckpt_storage.manager.stepnames import fitting_template  # noqa: PLC0415  # as above

    found = fitting_template(folders)
    if found is None or found[1] < at_least:
        return None
    return f"--names {found[0]!r} fits {found[1]} of {len(folders)}"


def _age(text: str, option: str) -> float:
    try:
        return duration_s(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def _policies(
    latest: int | None, every: int | None, best: tuple[str, ...], newer_than: str | None
) -> list[RetentionPolicy]:
    from ckpt_storage.manager.retention import KeepBest, KeepEvery, KeepLatest, KeepNewerThan  # noqa: PLC0415  # called, not imported

    found: list[RetentionPolicy] = []
    if latest is not None:
        found.append(KeepLatest(latest))
    if every is not None:
        found.append(KeepEvery(every))
    for text in best:
        metric, mode, count = _best(text)
        found.append(KeepBest(metric, mode, count))
    if newer_than is not None:
        found.append(KeepNewerThan(_age(newer_than, "--keep-newer-than")))
    return found


def _best(text: str) -> tuple[str, Literal["min", "max"], int]:
    metric, _, rest = text.partition(":")
    mode, _, count = rest.partition(":")
    count = count or "1"
    is_count = count.isascii() and count.isdigit() and int(count) > 0
    if not metric or mode not in {"min", "max"} or not is_count:
        raise click.BadParameter(
            f"{text!r}: write METRIC:min, METRIC:max or METRIC:min:3.", param_hint="--keep-best"
        )
    return metric, "max" if mode == "max" else "min", int(count)


def _as_data(report: PruneReport) -> dict[str, object]:
    def told(decisions: tuple[Decision, ...]) -> list[dict[str, object]]:
        return [{"name": one.name, "step": one.step, "reasons": one.reasons} for one in decisions]

    plan = report.plan
    return {
        "is_dry_run": report.is_dry_run,
        "kept": told(plan.kept),
        "planned": told(plan.deleted),
        "leftovers": plan.leftovers,
        "deleted": report.deleted,
        "freed": report.freed,
        "skipped": report.skipped,
        "failed": report.failed,
    }


def _print(report: PruneReport) -> None:
    plan = report.plan
    rows = [
        *((one.name, one.step, "keep", "; ".join(one.reasons)) for one in plan.kept),
        *((one.name, one.step, "delete", "; ".join(one.reasons)) for one in plan.deleted),
        *((name, None, "free", "nothing is committed here") for name in plan.leftovers),
    ]
    if rows:
        output.table(("name", "step", "", "why"), rows, right="step")
    for what, reasons in (("Skipped", report.skipped), ("Failed", report.failed)):
        for name, why in reasons.items():
            output.line(f"{what} {name}: {why}")
    if report.is_dry_run:
        count = len(plan.deleted)
        output.line(
            f"{count} checkpoint{'s' if count != 1 else ''} would be deleted; --yes does it."
            if count
            else "Nothing would be deleted."
        )
    else:
        output.line(f"{len(report.deleted)} deleted, {len(report.freed)} dead attempts freed.")
