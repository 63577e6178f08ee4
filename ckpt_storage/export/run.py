"""The steps of an export on all ranks: agree on a plan, write the files, publish them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from ckpt_storage.coordination.failures import as_checkpoint_errors
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.rank_names import spell_ranks
from ckpt_storage.errors import CheckpointError, RankMismatchError
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.progress import reporting
from ckpt_storage.source.file_versions import changed_rather_than_damaged
from ckpt_storage.store.deadline import NEVER_S, stalling_deadline
from ckpt_storage.transfer.objects import is_there

from .output import (
    Export,
    ExportContext,
    ExportSpec,
    ResumeState,
    SourceVersion,
    WriteSummary,
    probed,
)
from .plan import plan
from .write import FileWriter

if TYPE_CHECKING:
    import torch.distributed as dist

R = TypeVar("R")

ExportFactory = Callable[[ExportContext, SourceVersion | None], Export[R]]
"""Makes the export of a rank, as its constructor does."""


def run(operation: Operation, spec: ExportSpec, make_export: ExportFactory[R]) -> R:
    """Make one output; all ranks call it within one operation, after they have met.

    On return it is published. After an error the earlier output is valid, or, if the last write
    failed, perhaps the new output.
    """

    def begin(phase: Phase, total_bytes: int = 0) -> None:
        if phase == "plan":
            context.begin(operation.phase(phase, total_bytes=total_bytes))
            return
        # No limit while bytes move.
        operation.phase(phase, NEVER_S, total_bytes=total_bytes)
        limit_s: float = getattr(spec.timeouts, phase)
        context.begin(stalling_deadline(phase, limit_s, operation.what, parent=operation))

    start_s = time.monotonic()
    context = ExportContext(spec)
    try:
        begin(spec.first_phase(is_alone=operation.world_size == 1))
        with context.deadline.annotate_errors(operation.what):
            export, resume = _agree(operation, context, make_export)
        operation.save_id = operation.save_id or export.save_id
        own_bytes = sum(region.size_bytes for region in export.plan.regions_of(operation.rank))
        begin(spec.phase, own_bytes)
        export.source.store = context.source
        with context.deadline.annotate_errors(operation.what):
            summary = _make_files(operation, export, resume, own_bytes)
            report = None
            if operation.is_coordinator:
                operation.stats = operation.stats or summary.stats
                report = export.report(summary, time.monotonic() - start_s)
            # Other ranks get the coordinator's report.
            return cast("R", operation.broadcast(report))
    finally:
        context.close()


def _make_files(
    operation: Operation, export: Export[R], resume: ResumeState, own_bytes: int
) -> WriteSummary:
    """Make the files, and publish them on the coordinator."""
    own_bytes += export.stream_bytes if operation.is_coordinator else 0
    try:
        with (
            reporting(
                export.spec.progress if own_bytes else None,
                phase=export.spec.phase,
                rank=operation.rank,
                total_bytes=own_bytes,
                save_id=export.save_id,
                with_bar=operation.is_coordinator,
            ) as export.on_bytes,
            changed_rather_than_damaged(export.check_unchanged),
        ):
            if export.version.weight_files:
                export.check_weight_files(operation.rank, operation.world_size)
                # A later call keeps complete files, so none is written of a damaged source.
                operation.barrier()
            summary = FileWriter(operation, export, resume).make()
            if operation.is_coordinator:
                export.publish(summary)
            return summary
    except BaseException as error:
        if operation.is_coordinator:
            export.clean_up(error)
        raise


def _agree(
    operation: Operation, context: ExportContext, make_export: ExportFactory[R]
) -> tuple[Export[R], ResumeState]:
    """Return the export, with a plan that is the same on all ranks, and what of it is done."""
    is_first, probe, digest, resume = operation.is_coordinator, "", "", ResumeState()
    export: Export[R] | None = None
    with contextlib.ExitStack() as stack:
        if is_first:
            export = make_export(context, None)
            # A storage that every process reaches by the same requests need not be probed.
            able = context.target.capabilities
            if operation.world_size > 1 and not (able.is_remote and able.shared):
                probe = stack.enter_context(probed(context.target))
        version, probe = operation.broadcast((export.version if export else None, probe))
        if sees := not probe or is_there(context.target, probe):
            export = export or make_export(context, version)
            export.plan = plan(
                export.lay_out(),
                world_size=operation.world_size,
                able=context.target.capabilities,
                part_bytes=export.part_bytes,
                source=export.content(),
            )
            digest = export.plan.digest
        answers = operation.gather((socket.gethostname(), sees, digest))
    if is_first and export:
        _check_alike(answers, context.spec)
        resume = export.claim()
    resume = operation.broadcast(resume)
    assert export is not None  # noqa: S101  # else the coordinator has raised for all
    export.run_ids = resume.run_ids
    export.rename(resume.name)
    export.plan = export.plan.remaining({*resume.done, *resume.whole}, resume.sealed)
    return export, resume


def _check_alike(answers: Sequence[tuple[str, bool, str]], spec: ExportSpec) -> None:
    """Raise unless all ranks see the probe and made the same plan.

    Each answer has the host, whether the rank sees the probe, and the digest of its plan.
    """
    url, digests = spec.target.url, dict[str, list[int]]()
    if blind := [rank for rank, (_, sees, _) in enumerate(answers) if not sees]:
        hosts = ", ".join(sorted({answers[rank][0] for rank in blind}))
        apart = f"{hosts} (rank{'s' if len(blind) > 1 else ''} {spell_ranks(blind)})"
        raise RankMismatchError(
            f"{url} is not the same on all nodes: what rank 0 writes there is not seen on {apart}.",
            values={apart: blind},
            path=url,
            phase="plan",
            next_step="Give an output on a file system that all nodes share or on an object store, "
            "or work with the ranks of one node, or with one process.",
        )
    for rank, (_, _, digest) in enumerate(answers):
        digests.setdefault(digest, []).append(rank)
    if len(digests) > 1:
        spelt = "; ".join(f"ranks {spell_ranks(ranks)}" for ranks in digests.values())
        what = f"The ranks planned different exports of {spec.source.url}: {spelt}."
        step = "Give all ranks the same options; functions must answer alike on all."
        raise RankMismatchError(what, values=digests, phase="plan", next_step=step)


def group_of(process_group: dist.ProcessGroup | None, name: str) -> RankGroup:
    """Return the ranks that share the work of a function; without a group, this rank alone."""
    return RankGroup.alone() if process_group is None else RankGroup.of(process_group, lane=name)


def run_together(
    group: RankGroup,
    name: str,
    what: str,
    timeout: float | timedelta | Timeouts | None,
    job: Callable[[], ExportSpec],
    make_export: ExportFactory[R],
) -> R:
    """Run a job on all ranks. A rank whose arguments are invalid joins, too, and reports why."""
    timeouts = Timeouts()
    with contextlib.suppress(CheckpointError):
        # The job raises this error, once the ranks have met.
        timeouts = Timeouts.of(timeout)
    with group.operation(what, timeouts=timeouts) as operation:
        with as_checkpoint_errors(f"The call of {name}", operation.rank):
            spec = job()
        operation.meet(spec.terms())
        return run(operation, spec, make_export)
